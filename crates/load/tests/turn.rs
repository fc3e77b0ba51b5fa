//! The TURN generator with a relay in this process: counts add up, limits are checked, errors suggest a
//! remedy.

use crate::common;

use std::{
    net::{TcpListener, UdpSocket},
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::common::{
    PASSWORD, Wishes, counter, free_address, load, loopback, measured, quiet, reflector, reflector_on, relay,
    relay_of, relay_with, wait_for_counter, wait_until_empty,
};
use turnpike_load::{
    ClientTransport, LoadError, StopHandle,
    options::parse,
    turn::{DataVia, Mode, TurnLoadConfig, run},
};
use turnpike_net::Datapath;
use turnpike_relay::CredentialStore;
use turnpike_turn::server::{CredentialCheck, User, Users};
use turnpike_wire::integrity::{Key, KeyAlgorithm};

#[test]
fn traffic_over_channels_and_send_indications_comes_back_complete() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    for (via, clients, burst) in [(DataVia::Channel, 1, 1), (DataVia::Channel, 20, 4), (DataVia::Send, 20, 2)]
    {
        for size in [24, 121] {
            let report = measured(
                &relay,
                &reflector,
                &format!("--via {via} --clients {clients} --burst {burst} --size {size}"),
            );
            let context = format!("{via} {clients} clients of {size} bytes: {report:?}");
            // Datagrams due in one second at 2,000/s, plus a burst per client.
            assert!((1..=2_100).contains(&report.sent), "{context}");
            assert_eq!((report.lost, report.duplicated, report.reordered), (0, 0, 0), "{context}");
            assert_eq!(report.sent, report.received, "{context}");
            assert!(report.rtt_us.p50 > 0 && report.rtt_us.max < 5_000_000, "{context}");
            assert!(report.errors.is_empty(), "{context}");
        }
    }
}

#[test]
fn clients_are_divided_among_several_servers() {
    let (first, second, reflector) = (relay(&Wishes::default()), relay(&Wishes::default()), reflector());
    let both = |flags: &str| load(&first, &reflector, &format!("{} {flags}", second.listeners().udp[0]));
    let report = quiet(&both("--clients 6 --threads 2")).unwrap().report;
    assert_eq!((report.lost, report.received), (0, report.sent), "{report:?}");
    assert!(report.sent > 0 && report.errors.is_empty(), "{report:?}");
    for relay in [&first, &second] {
        wait_for_counter(relay, "allocations_closed", "deleted", 3);
    }
    let report = quiet(&both("--mode allocate --clients 4 --rate 100")).unwrap().report;
    assert_eq!((report.lost, report.received), (0, report.sent), "{report:?}");
    for relay in [&first, &second] {
        assert!(counter(relay, "allocations_closed", "deleted") > 3);
        wait_until_empty(relay);
    }
    // The error names the server that does not respond, whichever it is.
    let absent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let silent = absent.local_addr().unwrap();
    let waits = load(&first, &reflector, &format!("{silent} --clients 2"));
    let waits = TurnLoadConfig { setup_timeout: Duration::from_secs(2), ..waits };
    let error = quiet(&waits).unwrap_err().to_string();
    assert!(error.contains(&silent.to_string()), "{error}");
}

#[test]
fn ipv6_works_from_end_to_end() {
    if UdpSocket::bind("[::1]:0").is_err() {
        println!("SKIPPED: this machine has no IPv6");
        return;
    }
    let six = std::net::Ipv6Addr::LOCALHOST.into();
    let (relay, reflector) = (relay(&Wishes { address: six, ..Wishes::default() }), reflector_on(six));
    for via in [DataVia::Channel, DataVia::Send] {
        let report = measured(&relay, &reflector, &format!("--via {via} --clients 4"));
        assert_eq!((report.lost, report.received), (0, report.sent), "{via}: {report:?}");
    }
}

#[test]
fn distinct_peers_share_one_relay_port() {
    let relay = relay_with(&Wishes::default(), |config| config.shared_ports = 1);
    let reflector = reflector_on(std::net::Ipv4Addr::UNSPECIFIED.into());
    let port = reflector.listeners()[0].port();
    for via in [DataVia::Channel, DataVia::Send] {
        let report = measured(
            &relay,
            &reflector,
            &format!("--via {via} --clients 40 --peer {} --peer-prefix 127.9.0.0/16", loopback(port)),
        );
        assert_eq!((report.lost, report.received), (0, report.sent), "{via}: {report:?}");
    }
    // With a single peer, all clients except one are refused.
    let config = load(&relay, &reflector, &format!("--clients 2 --peer {}", loopback(port)));
    let error = quiet(&config).unwrap_err().to_string();
    assert!(error.contains("Peer Taken on Shared Port") && error.contains("--peer-prefix"), "{error}");
}

#[test]
fn clients_on_a_shared_socket_have_their_own_addresses() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    for (via, burst, threads) in [(DataVia::Channel, 1, 1), (DataVia::Send, 8, 2), (DataVia::Channel, 8, 2)] {
        let report = measured(
            &relay,
            &reflector,
            &format!(
                "--via {via} --burst {burst} --threads {threads} --clients 40 --client-prefix 127.8.0.0/16"
            ),
        );
        assert_eq!((report.lost, report.received), (0, report.sent), "{via}: {report:?}");
        assert_eq!((report.reordered, report.errors.len()), (0, 0), "{via}: {report:?}");
        assert!(report.sent > 100, "{via}: {report:?}");
    }
    // This machine has no address with the client prefix (RFC 5737).
    let elsewhere = load(&relay, &reflector, "--client-prefix 198.51.100.0/24");
    let error = quiet(&elsewhere).unwrap_err().to_string();
    assert!(error.contains("198.51.100.1 (--client-prefix)"), "{error}");
}

#[test]
fn every_data_path_works() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    for datapath in [Datapath::Basic, Datapath::Mmsg, Datapath::best().0] {
        let report = measured(&relay, &reflector, &format!("--datapath {datapath} --burst 8"));
        assert_eq!(report.lost, 0, "{report:?}");
        assert_eq!(report.datapath, datapath.to_string());
    }
}

#[test]
fn a_window_bounds_a_flood() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    let report = measured(&relay, &reflector, "--rate max --window 64 --burst 16 --clients 2");
    assert!(report.received > 1_000, "{report:?}");
    // Each client's window bounds its packets in flight at the end of the run.
    assert!(report.lost <= 128, "{report:?}");
}

#[test]
fn allocations_are_created_and_deleted() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    let report = measured(&relay, &reflector, "--mode allocate --clients 8 --rate 200");
    assert_eq!((report.lost, report.received), (0, report.sent), "{report:?}");
    // No more requests than were due; a busy machine starts fewer.
    assert!((1..=201).contains(&report.sent), "{report:?}");
    wait_until_empty(&relay);
}

/// Allocations that were due before the measured time but have not been started are dropped; otherwise the
/// server would never catch up.
#[test]
fn a_server_that_falls_behind_is_still_measured() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    let report = measured(&relay, &reflector, "--mode allocate --rate 1M");
    assert!(report.sent > 0, "{report:?}");
    assert_eq!((report.lost, report.received), (0, report.sent), "{report:?}");
    wait_until_empty(&relay);
}

/// Accepts every username with this password, and records the names.
#[derive(Default)]
struct Everybody(Mutex<Vec<String>>);

impl CredentialStore for Everybody {}

impl Users for Everybody {
    fn check(
        &self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        _unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> CredentialCheck {
        let User::Name(name) = user else { return CredentialCheck::NoSuchUser };
        if !verify(&Key::long_term(algorithm, name, realm, PASSWORD.as_bytes())) {
            return CredentialCheck::WrongKey { username: name.into() };
        }
        self.0.lock().unwrap().push(name.to_owned());
        CredentialCheck::Accepted { username: name.into(), identity: name.into(), until_unix: None }
    }
}

#[test]
fn users_take_turns() {
    let (everybody, reflector) = (Arc::new(Everybody::default()), reflector());
    // USERHASH would hide the names from the test.
    let relay = relay_of(&Wishes::default(), Arc::clone(&everybody) as _, |config| {
        config.server.username_anonymity = false;
    });
    for mode in [Mode::Allocate, Mode::Packet] {
        let config =
            load(&relay, &reflector, &format!("--mode {mode} --users 3 --clients 4 --threads 2 --rate 200"));
        let report = quiet(&config).unwrap().report;
        assert_eq!((report.lost, report.received), (0, report.sent), "{mode}: {report:?}");
        let mut asked = std::mem::take(&mut *everybody.0.lock().unwrap());
        asked.sort();
        asked.dedup();
        assert_eq!(asked, ["alice0", "alice1", "alice2"], "{mode}");
    }
}

#[test]
fn channels_are_bound_one_after_the_other() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    let report = measured(&relay, &reflector, "--mode bind --clients 4 --rate max");
    assert_eq!((report.lost, report.received), (0, report.sent), "{report:?}");
    // More channels than one allocation can have, so some clients have started over.
    assert!(report.received > 4 * 60, "{report:?}");
    assert!(report.errors.is_empty(), "{report:?}");
    wait_until_empty(&relay);
}

#[test]
fn invalid_messages_leave_no_state_and_get_small_replies() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    let report = measured(&relay, &reflector, "--mode invalid --clients 4");
    // Well-formed requests do get a response.
    assert!(report.received > 0 && report.received < report.sent, "{report:?}");
    assert!(report.extra["amplification"] < 1.0, "{report:?}");
    assert!(report.extra["worst_amplification"] >= report.extra["amplification"], "{report:?}");
    assert_eq!(relay.snapshots()[0].allocations, 0);
}

#[test]
fn progress_is_reported_and_allocations_are_deleted() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    let config = load(&relay, &reflector, "--clients 3 --warmup 0.6 --duration 1.5");
    let mut intervals = Vec::new();
    run(&config, &StopHandle::default(), |interval| intervals.push(interval.clone())).unwrap();
    assert!(intervals.len() >= 2, "{intervals:?}");
    assert!(intervals.iter().any(|interval| interval.received > 0), "{intervals:?}");
    assert_eq!(relay.snapshots().len(), 1);
    wait_until_empty(&relay);
}

#[test]
fn exceeded_loss_and_latency_limits_are_reported() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    // There is no reflector, so everything is lost; this socket only occupies the port.
    let sink = UdpSocket::bind(loopback(0)).unwrap();
    let config = load(
        &relay,
        &reflector,
        &format!("--peer {} --max-loss 1 --max-p99 1000000 --duration 0.5", sink.local_addr().unwrap()),
    );
    let outcome = quiet(&config).unwrap();
    assert_eq!(outcome.report.received, 0);
    assert_eq!(outcome.report.lost, outcome.report.sent);
    assert_eq!(outcome.exceeded.len(), 2, "{outcome:?}");
    assert!(outcome.report.notes.iter().any(|note| note.contains("reflector")), "{outcome:?}");

    let slow = load(&relay, &reflector, "--max-p99 1 --max-loss 0");
    let outcome = quiet(&slow).unwrap();
    assert_eq!(outcome.exceeded.len(), 1, "{outcome:?}");
    let generous = load(&relay, &reflector, "--max-p99 5000000 --max-loss 0");
    assert!(quiet(&generous).unwrap().exceeded.is_empty());
}

#[test]
fn a_wrong_password_names_user_and_realm() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    for mode in [Mode::Packet, Mode::Allocate] {
        let config =
            load(&relay, &reflector, &format!("--user {}:looking-glass --mode {mode}", common::USER));
        match quiet(&config) {
            Err(LoadError::Credentials { user, realm, .. }) => {
                assert_eq!((user.as_str(), realm.as_str()), (common::USER, "turnpike"));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_closed_port_differs_from_a_silent_one() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    // Closed port: the kernel responds with port unreachable.
    let closed = free_address();
    let config = TurnLoadConfig { servers: vec![closed.into()], ..load(&relay, &reflector, "") };
    assert!(matches!(quiet(&config), Err(LoadError::Unreachable { server }) if server == closed));

    let silent = UdpSocket::bind(loopback(0)).unwrap();
    let config = TurnLoadConfig {
        servers: vec![silent.local_addr().unwrap().into()],
        setup_timeout: Duration::from_millis(300),
        ..load(&relay, &reflector, "")
    };
    assert!(matches!(quiet(&config), Err(LoadError::NoAnswer { ready: 0, .. })));
}

/// A silent server does not respond to the handshake, so no Allocate is ever sent.
#[test]
fn an_unanswered_handshake_is_reported_as_such() {
    let (datagrams, connections) =
        (UdpSocket::bind(loopback(0)).unwrap(), TcpListener::bind(loopback(0)).unwrap());
    let servers = [
        (ClientTransport::Dtls, datagrams.local_addr().unwrap()),
        // The backlog accepts connections that are never served.
        (ClientTransport::Tls, connections.local_addr().unwrap()),
    ];
    for (transport, server) in servers {
        for mode in [Mode::Packet, Mode::Allocate] {
            let config =
                parse(&format!("{server} --transport {transport} --mode {mode} --insecure")).unwrap();
            let config = TurnLoadConfig { setup_timeout: Duration::from_millis(600), ..config };
            match quiet(&config) {
                Err(error @ LoadError::Link { during_setup: true, .. }) => {
                    let told = error.to_string();
                    let handshake = format!("{} handshake", transport.to_string().to_uppercase());
                    assert!(told.contains(&handshake) && !told.contains("Allocate"), "{told}");
                }
                other => panic!("{transport}: {other:?}"),
            }
        }
    }
}

#[test]
fn quotas_and_forbidden_peers_are_reported() {
    let reflector = reflector();
    let small = relay(&Wishes { max_allocations_per_user: 2, ..Wishes::default() });
    let config = load(&small, &reflector, "--clients 3");
    assert!(matches!(quiet(&config), Err(LoadError::Refused { code: 486, .. })));
    // The failed run must have deleted its allocations, so that the quota is free.
    quiet(&load(&small, &reflector, "--clients 2 --duration 0.1")).unwrap();

    let strict = relay(&Wishes { allow_loopback: false, ..Wishes::default() });
    match quiet(&load(&strict, &reflector, "")) {
        Err(error @ LoadError::Refused { code: 403, .. }) => {
            assert!(error.to_string().contains("--allow-peer"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_report_is_one_json_object() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    let report = measured(&relay, &reflector, "--duration 0.3");
    let json: serde_json::Value = serde_json::to_value(&report).unwrap();
    assert_eq!(json["clients"], 1);
    assert_eq!(json["rate"], 2_000.0);
    assert_eq!((&json["transport"], &json["relay"]), (&"udp".into(), &"udp".into()));
    assert!(json["rtt_us"]["p99"].as_u64().is_some());
}
