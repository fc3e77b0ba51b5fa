//! Access tokens instead of passwords (RFC 7635): valid tokens are accepted, refusals are explained.

use crate::common::{
    Wishes, counter, eventually, listen_to_all, load, quiet, reflector, relay_with, unix, wait_until_empty,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use turnpike_load::{
    ClientTransport, LoadError, OfferedRate,
    reflect::Reflector,
    turn::{self, Mode, TurnLoadConfig},
};
use turnpike_relay::Relay;
use turnpike_turn::{
    access_token::{AccessToken, TokenKey},
    server::{IssuerKey, ThirdParty},
};

const KEY: [u8; 32] = [5; 32];
const NAME: &str = "turn.example.org";

fn server() -> Relay {
    relay_with(&Wishes::default(), |config| {
        listen_to_all(config, None);
        let key = TokenKey::from_bytes(&KEY).unwrap();
        let key = IssuerKey { kid: "north".into(), key, realm: "turnpike".into(), max_lifetime: 3600 };
        config.server.third_party = ThirdParty { server_name: NAME.to_owned(), skew: 5, keys: vec![key] };
    })
}

/// Token in the format of `turnpike credentials --token-key`.
fn token(
    kid: &str,
    key: [u8; 32],
    name: &str,
    mac_key: [u8; 32],
    (made, lifetime): (u64, u32),
) -> turn::PrintedToken {
    let token = AccessToken::new(&[9; 32], made, lifetime).unwrap();
    let sealed = token.seal(&TokenKey::from_bytes(&key).unwrap(), name, [1; 12]);
    let (mac_key, sealed) = (STANDARD.encode(mac_key), STANDARD.encode(sealed));
    format!("username: {kid}\nmac_key: {mac_key}\naccess_token: {sealed}\nexpires_in: {lifetime}")
        .parse()
        .unwrap()
}

fn with(token: turn::PrintedToken, relay: &Relay, reflector: &Reflector, flags: &str) -> TurnLoadConfig {
    TurnLoadConfig { access_token: Some(token), user: None, ..load(relay, reflector, flags) }
}

#[test]
fn a_valid_token_replaces_user_and_password() {
    let (relay, reflector) = (server(), reflector());
    for transport in [ClientTransport::Udp, ClientTransport::Tcp] {
        let good = token("north", KEY, NAME, [9; 32], (unix(), 60));
        // Moves also use the token.
        let flags = format!("--transport {transport} --clients 4 --migrate 0.5 --rate 400");
        let config = with(good, &relay, &reflector, &flags);
        let report = quiet(&config).unwrap().report;
        assert!(report.received > 0, "{transport}: {report:?}");
        // The last moves may come too late on a busy machine.
        assert!((1.0..=8.0).contains(&report.extra["migrations_done"]), "{transport}: {report:?}");
        assert!(report.errors.is_empty(), "{transport}: {report:?}");
        wait_until_empty(&relay);

        let config =
            TurnLoadConfig { mode: Mode::Allocate, migrate: None, rate: OfferedRate::Pps(50.0), ..config };
        let report = quiet(&config).unwrap().report;
        assert!(report.sent > 0 && report.lost == 0, "{transport}: {report:?}");
        wait_until_empty(&relay);
    }
}

#[test]
fn refused_tokens_are_explained() {
    let (relay, reflector) = (server(), reflector());
    let now = unix();
    for (what, bad, counted) in [
        ("expired", token("north", KEY, NAME, [9; 32], (now - 100, 60)), "expired"),
        ("another key", token("north", [6; 32], NAME, [9; 32], (now, 60)), "access_token"),
        ("no such key", token("south", KEY, NAME, [9; 32], (now, 60)), "access_token"),
        ("another server", token("north", KEY, "turn.example.com", [9; 32], (now, 60)), "access_token"),
        ("another mac_key", token("north", KEY, NAME, [8; 32], (now, 60)), "wrong_key"),
    ] {
        let kid = bad.kid.clone();
        let before = counter(&relay, "credentials_refused", counted);
        match quiet(&with(bad, &relay, &reflector, "")) {
            Err(error @ LoadError::AccessToken { .. }) => {
                let text = error.to_string();
                assert!(
                    text.contains(&kid) && text.contains("expired") && text.contains("oauth.key"),
                    "{text}"
                );
            }
            other => panic!("{what}: {other:?}"),
        }
        eventually(what, || counter(&relay, "credentials_refused", counted) > before);
    }
    assert_eq!(relay.snapshots()[0].allocations, 0);
}

#[test]
fn a_token_that_expires_during_the_run_is_rejected() {
    let (relay, reflector) = (server(), reflector());
    let short = token("north", KEY, NAME, [9; 32], (unix(), 1));
    match quiet(&with(short, &relay, &reflector, "")) {
        Err(LoadError::Config(what)) => assert!(what.contains("--ttl"), "{what}"),
        other => panic!("{other:?}"),
    }
}
