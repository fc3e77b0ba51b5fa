//! 300 (Try Alternate): clients follow redirects, check the certificate name given in the redirect, and
//! detect loops.

use std::net::SocketAddr;

use crate::common::{
    Certificate, Dir, Wishes, certificate, free_address, listen_to_all, listener, load, loopback, measured,
    quiet, reflector, relay_with, wait_for_counter, wait_until_empty,
};
use turnpike_load::{
    ClientTransport, LoadError,
    turn::{Mode, TurnLoadConfig},
};
use turnpike_relay::Relay;
use turnpike_turn::server::{Alternate, AlternateWhen};

fn signpost(
    to: &[(SocketAddr, Option<&str>)],
    certificate: Option<&Certificate>,
    at: Option<SocketAddr>,
) -> Relay {
    relay_with(&Wishes::default(), |config| {
        listen_to_all(config, certificate);
        if let Some(at) = at {
            config.listen = vec![at];
        }
        let alternate = |(address, domain): &(SocketAddr, Option<&str>)| Alternate {
            address: *address,
            domain: domain.map(str::to_owned),
            transports: Vec::new(),
            when: AlternateWhen::Always,
        };
        config.server.alternates = to.iter().map(alternate).collect();
    })
}

fn destination(certificate: Option<&Certificate>) -> Relay {
    relay_with(&Wishes::default(), |config| listen_to_all(config, certificate))
}

#[test]
fn clients_follow_redirects_over_several_hops() {
    let reflector = reflector();
    let (one, other) = (destination(None), destination(None));
    for transport in [ClientTransport::Udp, ClientTransport::Tcp] {
        let ends = [&one, &other].map(|relay| (listener(relay, transport), None));
        let second = signpost(&ends, None, None);
        let first = signpost(&[(listener(&second, transport), None)], None, None);
        let config =
            load(&first, &reflector, &format!("--transport {transport} --clients 6 --threads 2 --rate 500"));
        let report = quiet(&config).unwrap().report;
        assert_eq!((report.lost, report.received), (0, report.sent), "{transport}: {report:?}");
        assert!(report.sent > 0, "{transport}: {report:?}");
        assert_eq!(report.extra["redirects"], 12.0, "{transport}: {report:?}");
        wait_for_counter(&first, "redirects", "", 6);
        wait_until_empty(&one);
        wait_until_empty(&other);
    }
    for relay in [&one, &other] {
        // Three allocations are deleted per transport.
        wait_for_counter(relay, "allocations_closed", "deleted", 6);
    }
}

#[test]
fn allocations_and_relayed_streams_follow_redirects() {
    let end = destination(None);
    let stream_reflector = turnpike_load::reflect::Reflector::start(&turnpike_load::reflect::ReflectConfig {
        tcp: vec![loopback(0)],
        workers: Some(1),
        ..Default::default()
    })
    .unwrap();
    let reflector = reflector();
    for transport in [ClientTransport::Udp, ClientTransport::Tcp] {
        let first = signpost(&[(listener(&end, transport), None)], None, None);
        let report = measured(
            &first,
            &reflector,
            &format!("--transport {transport} --mode allocate --clients 4 --rate 50"),
        );
        assert_eq!((report.lost, report.received), (0, report.sent), "{transport}: {report:?}");
        // Every run starts at the first server again, and so does every allocation, even during the warm-up.
        assert!(report.sent > 0 && report.extra["redirects"] >= report.sent as f64, "{report:?}");
        wait_until_empty(&end);
    }
    let first = signpost(&[(listener(&end, ClientTransport::Tcp), None)], None, None);
    let report = measured(
        &first,
        &reflector,
        &format!(
            "--transport tcp --relay tcp --peer {} --clients 2 --rate 500",
            stream_reflector.tcp_listeners()[0]
        ),
    );
    assert_eq!((report.lost, report.extra["redirects"]), (0, 2.0), "{report:?}");
    assert!(report.sent > 0 && report.errors.is_empty(), "{report:?}");
}

#[test]
fn a_redirect_domain_is_checked_against_the_certificate() {
    let reflector = reflector();
    let (here, there) = (certificate("here.example"), certificate("there.example"));
    let dir = Dir::new();
    let ca = dir.file("ca.pem", format!("{}{}", here.pem, there.pem));
    let end = destination(Some(&there));
    for transport in [ClientTransport::Tls, ClientTransport::Dtls] {
        let to = listener(&end, transport);
        for (domain, good) in [(Some("there.example"), true), (Some("nowhere.example"), false), (None, false)]
        {
            let first = signpost(&[(to, domain)], Some(&here), None);
            let config = load(
                &first,
                &reflector,
                &format!(
                    "--transport {transport} --server-name here.example --ca {} --clients 2 --rate 200",
                    ca.display()
                ),
            );
            match quiet(&config) {
                Ok(outcome) if good => {
                    let report = outcome.report;
                    assert_eq!((report.lost, report.extra["redirects"]), (0, 2.0), "{report:?}");
                }
                Err(error @ LoadError::Alternate { .. }) if !good => {
                    let text = error.to_string();
                    assert!(text.contains("certificate") && text.contains(&to.to_string()), "{text}");
                }
                other => panic!("{transport} {domain:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn servers_that_redirect_in_a_loop_are_named() {
    let reflector = reflector();
    let home = free_address();
    let second = signpost(&[(home, None)], None, None);
    let away = listener(&second, ClientTransport::Udp);
    let first = signpost(&[(away, None)], None, Some(home));
    for mode in [Mode::Packet, Mode::Allocate] {
        match quiet(&load(&first, &reflector, &format!("--mode {mode}"))) {
            Err(error @ LoadError::Redirected { from, to, .. }) => {
                assert_eq!((from, to), (away, home));
                assert!(error.to_string().contains("in a loop"), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn an_unreachable_redirect_target_names_the_redirecting_server() {
    let reflector = reflector();
    let absent = free_address();
    for transport in [ClientTransport::Udp, ClientTransport::Tcp] {
        let first = signpost(&[(absent, None)], None, None);
        let server = listener(&first, transport);
        match quiet(&TurnLoadConfig {
            servers: vec![server.into()],
            ..load(&first, &reflector, &format!("--transport {transport}"))
        }) {
            Err(error @ LoadError::Alternate { .. }) => {
                let text = error.to_string();
                assert!(text.contains(&server.to_string()) && text.contains(&absent.to_string()), "{text}");
            }
            other => panic!("{transport}: {other:?}"),
        }
    }
}
