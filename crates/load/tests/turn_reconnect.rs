//! Reconnecting clients (`--reconnect`): after a server restart, all of them soon have an allocation again,
//! even after a redirect.

use std::thread;

use crate::common::{
    Dir, Wishes, certificate, eventually, listen_to_all, listener, load, measured, reflector, relay_with,
};
use turnpike_load::{
    ClientTransport, LoadReport, StopHandle,
    turn::{DataVia, TurnLoadConfig, run},
};
use turnpike_relay::Relay;
use turnpike_turn::server::{Alternate, AlternateWhen};

const CLIENTS: usize = 4;

fn allocations(relay: &Relay) -> u64 {
    relay.snapshots().iter().map(|worker| worker.allocations).sum()
}

fn relayed(relay: &Relay) -> u64 {
    relay.snapshots().iter().map(|worker| worker.turn.to_client_datagrams).sum()
}

/// Runs until all clients use a second relay, which replaces the first one and has the same addresses.
fn outlives(
    config: &TurnLoadConfig,
    relay: Relay,
    replace: impl FnOnce(&mut turnpike_relay::Config),
) -> LoadReport {
    let (listeners, stop) = (relay.listeners(), StopHandle::default());
    let outcome = thread::scope(|scope| {
        let running = scope.spawn(|| run(config, &stop, |_| {}));
        eventually("data is relayed", || allocations(&relay) == CLIENTS as u64 && relayed(&relay) > 100);
        relay.stop();
        let second = relay_with(&Wishes::default(), |config| {
            replace(config);
            config.listen = listeners.udp.clone();
            config.streams.listen = listeners.tcp.clone();
            config.streams.tls_listen = listeners.tls.clone();
            config.dtls.listen = listeners.dtls.clone();
        });
        eventually("all are back", || allocations(&second) >= CLIENTS as u64 && relayed(&second) > 200);
        stop.stop();
        running.join().expect("the run does not panic")
    });
    outcome.unwrap().report
}

#[test]
fn clients_reconnect_to_a_restarted_server() {
    let certificate = certificate("turn.example.org");
    let reflector = reflector();
    let dir = Dir::new();
    let ca = dir.file("ca.pem", &certificate.pem);
    for (transport, via) in [
        (ClientTransport::Udp, DataVia::Channel),
        (ClientTransport::Udp, DataVia::Send),
        (ClientTransport::Tcp, DataVia::Channel),
        (ClientTransport::Tls, DataVia::Channel),
        (ClientTransport::Dtls, DataVia::Channel),
    ] {
        let first = relay_with(&Wishes::default(), |config| listen_to_all(config, Some(&certificate)));
        let config = load(
            &first,
            &reflector,
            &format!(
                "--transport {transport} --via {via} --clients {CLIENTS} --threads 2 --server-name turn.example.org --ca {} --rate 400 --reconnect 0.3 --warmup 0.1 --duration 600",
                ca.display()
            ),
        );
        let report = outlives(&config, first, |config| listen_to_all(config, Some(&certificate)));
        let context = format!("{transport} {via}: {report:?}");
        assert!(report.extra["returns_done"] >= CLIENTS as f64, "{context}");
        assert_eq!(report.extra["clients_silent"], 0.0, "{context}");
        assert!(report.extra["pause_ms_max"] >= 300.0, "a client reconnected sooner: {context}");
        assert!(report.extra["allocations_lost"] >= CLIENTS as f64, "{context}");
        assert!(
            report.extra["reconnect_ms_p50"] >= 300.0,
            "the gap is counted from the last payload: {context}"
        );
        assert_eq!(report.extra["lost_of_others"], 0.0, "all clients had to reconnect: {context}");
        // Packets due in the meantime are lost over UDP; a broken connection does not accept any.
        assert!(report.lost > 0 || transport != ClientTransport::Udp, "{context}");
        assert_eq!(report.sent, report.received + report.lost, "{context}");
    }
}

#[test]
fn clients_with_steady_traffic_never_reconnect() {
    let relay = relay_with(&Wishes::default(), |_| {});
    let reflector = reflector();
    let report = measured(&relay, &reflector, &format!("--clients {CLIENTS} --rate 400 --reconnect 30"));
    assert_eq!((report.extra["returns_done"], report.extra["clients_silent"]), (0.0, 0.0), "{report:?}");
    assert!(report.extra["pause_ms_p50"] > 0.0, "{report:?}");
    assert_eq!(
        (report.extra["allocations_lost"], report.extra["reconnect_ms_max"]),
        (0.0, 0.0),
        "{report:?}"
    );
}

#[test]
fn reconnecting_clients_start_at_the_first_server() {
    let reflector = reflector();
    for transport in [ClientTransport::Udp, ClientTransport::Tcp] {
        let end = relay_with(&Wishes::default(), |config| listen_to_all(config, None));
        let first = relay_with(&Wishes::default(), |config| {
            listen_to_all(config, None);
            config.server.alternates = vec![Alternate {
                address: listener(&end, transport),
                domain: None,
                transports: Vec::new(),
                when: AlternateWhen::Always,
            }];
        });
        let config = load(
            &first,
            &reflector,
            &format!(
                "--transport {transport} --clients {CLIENTS} --threads 2 --rate 400 --reconnect 0.3 --warmup 0.1 --duration 600"
            ),
        );
        let report = outlives(&config, end, |config| listen_to_all(config, None));
        let context = format!("{transport}: {report:?}");
        assert!(report.extra["returns_done"] >= CLIENTS as f64, "{context}");
        assert!(report.extra["redirects"] >= 2.0 * CLIENTS as f64, "{context}");
        assert_eq!(report.extra["clients_silent"], 0.0, "{context}");
    }
}
