//! Clients that change their socket during the run (RFC 8016): all of them move, and traffic continues.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::JoinHandle,
    time::Duration,
};

use crate::common::{
    Dir, Wishes, certificate, counter, eventually, listen_to_all, load, loopback, quiet, reflector, relay,
    relay_with, wait_for_counter, wait_until_empty,
};
use turnpike_load::{
    ClientTransport, LoadError,
    reflect::Reflector,
    turn::{DataVia, Mode, TurnLoadConfig},
};
use turnpike_relay::Relay;

const CLIENTS: u16 = 4;
const PPS: u16 = 100;

/// Settings under which every client moves five times.
fn restless(relay: &Relay, reflector: &Reflector, flags: &str) -> TurnLoadConfig {
    let rate = CLIENTS * PPS;
    let usual = format!("--clients {CLIENTS} --threads 2 --rate {rate} --migrate 0.3 --duration 1.5");
    load(relay, reflector, &format!("{usual} {flags}"))
}

#[test]
fn all_clients_move_and_traffic_continues() {
    const MOVES: u64 = 5 * CLIENTS as u64;
    let certificate = certificate("turn.example.org");
    let relay = relay_with(&Wishes::default(), |config| listen_to_all(config, Some(&certificate)));
    let reflector = reflector();
    let dir = Dir::new();
    let ca = dir.file("ca.pem", &certificate.pem);
    let mut moved = 0;
    for (transport, via) in [
        (ClientTransport::Udp, DataVia::Channel),
        (ClientTransport::Udp, DataVia::Send),
        (ClientTransport::Tcp, DataVia::Channel),
        (ClientTransport::Tcp, DataVia::Send),
        (ClientTransport::Tls, DataVia::Channel),
        (ClientTransport::Dtls, DataVia::Channel),
    ] {
        let config = restless(
            &relay,
            &reflector,
            &format!(
                "--transport {transport} --via {via} --server-name turn.example.org --ca {}",
                ca.display()
            ),
        );
        let report = quiet(&config).unwrap().report;
        let context = format!("{transport} {via}: {report:?}");
        let figure = |name: &str| report.extra[name];
        // The last moves may come too late on a busy machine.
        assert!((1.0..=MOVES as f64).contains(&figure("migrations_done")), "{context}");
        assert_eq!(figure("migrations_failed"), 0.0, "{context}");
        assert!(figure("migration_ms_p50") > 0.0, "{context}");
        assert!(figure("migration_ms_p50") <= figure("migration_ms_max"), "{context}");
        // The packets in flight cover one round trip, far fewer than the 30 datagrams that a client cut off
        // by a move would lose before its next move.
        assert!((1..=650).contains(&report.sent), "{context}");
        assert!(report.lost <= 3 * MOVES, "{context}");
        assert_eq!(report.sent, report.received + report.lost, "{context}");
        assert!(report.errors.is_empty(), "{context}");
        // The server has counted the same moves, and data from the new addresses.
        moved += figure("migrations_done") as u64;
        for event in ["arrived", "moved"] {
            wait_for_counter(&relay, "mobility", event, moved);
        }
        if transport.is_secure() {
            let all = figure("full_handshakes") + figure("resumed_handshakes");
            assert_eq!(all, figure("migrations_done") + f64::from(CLIENTS), "{context}");
        }
        // The allocations are deleted from the clients' new addresses.
        wait_until_empty(&relay);
    }
}

#[test]
fn a_flood_survives_moves() {
    let reflector = reflector();
    for transport in [ClientTransport::Udp, ClientTransport::Tcp] {
        // One relay per transport, because a relay may count the last moves of a run late.
        let relay = relay_with(&Wishes::default(), |config| listen_to_all(config, None));
        let flags = format!("--transport {transport} --rate max --window 64 --burst 16");
        let config = restless(&relay, &reflector, &flags);
        let report = quiet(&config).unwrap().report;
        let context = format!("{transport}: {report:?}");
        assert_eq!(report.extra["migrations_failed"], 0.0, "{context}");
        let done = report.extra["migrations_done"];
        assert!((1.0..=20.0).contains(&done) && report.received > 0, "{context}");
        // Even clients whose window is full keep sending, so the server sees data after each move, except
        // possibly a client's last one.
        let moves = || counter(&relay, "mobility", "moved") as f64;
        eventually("the server has seen data after the moves", || moves() >= done - f64::from(CLIENTS));
        assert!(moves() <= done && moves() > 0.0, "{} {context}", moves());
        // Each move, and the end of the run, may cost at most one window of datagrams.
        assert!(report.lost <= 64 * (20 + u64::from(CLIENTS)), "{context}");
    }
}

#[test]
fn disabled_mobility_is_reported() {
    let relay = relay_with(&Wishes::default(), |config| config.server.mobility = false);
    let reflector = reflector();
    let config = restless(&relay, &reflector, "");
    match quiet(&config) {
        Err(error @ LoadError::Refused { code: 405, .. }) => {
            let text = error.to_string();
            assert!(text.contains("relay.mobility = true") && text.contains("--migrate"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    quiet(&TurnLoadConfig { migrate: None, ..config }).unwrap();
}

#[test]
fn modes_without_allocations_do_not_move() {
    let (relay, reflector) = (relay(&Wishes::default()), reflector());
    for mode in [Mode::Allocate, Mode::Invalid] {
        let config = restless(&relay, &reflector, &format!("--mode {mode}"));
        match quiet(&config) {
            Err(LoadError::Config(what)) => assert!(what.contains("--migrate"), "{what}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_server_without_mobility_is_reported() {
    let server = Scripted::start(false);
    let reflector = reflector();
    let relay = relay(&Wishes::default());
    let config = TurnLoadConfig {
        servers: vec![server.address.into()],
        user: None,
        ..restless(&relay, &reflector, "")
    };
    match quiet(&config) {
        Err(error @ LoadError::NoMobility { .. }) => {
            assert!(error.to_string().contains("relay.mobility = true"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn refused_tickets_are_counted_and_explained() {
    let server = Scripted::start(true);
    let reflector = reflector();
    let relay = relay(&Wishes::default());
    let config = TurnLoadConfig {
        servers: vec![server.address.into()],
        user: None,
        ..restless(&relay, &reflector, "")
    };
    let report = quiet(&config).unwrap().report;
    // Each client fails once; without an allocation it cannot move again.
    assert_eq!(report.extra["migrations_failed"], f64::from(CLIENTS), "{report:?}");
    assert_eq!(report.extra["migrations_done"], 0.0, "{report:?}");
    assert!(report.notes.iter().any(|note| note.contains("4 of 4") && note.contains("400")), "{report:?}");
}

/// Server without users that grants every request, echoes ChannelData itself, and rejects its own tickets if
/// it issues any.
struct Scripted {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Scripted {
    fn start(tickets: bool) -> Self {
        let socket = UdpSocket::bind(loopback(0)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let (address, stop) = (socket.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut buffer = [0; 2048];
            while !stopped.load(SeqCst) {
                let Ok((len, client)) = socket.recv_from(&mut buffer) else { continue };
                // The send fails if the client has closed its socket in the meantime.
                let _ = socket.send_to(&answer(&buffer[..len], tickets), client);
            }
        });
        Self { address, stop, thread: Some(thread) }
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn answer(message: &[u8], tickets: bool) -> Vec<u8> {
    const TICKET: [u8; 8] = [0x80, 0x30, 0, 4, 1, 2, 3, 4];
    const LIFETIME: [u8; 8] = [0, 0x0D, 0, 4, 0, 0, 2, 0x58];
    // XOR-RELAYED-ADDRESS 127.0.0.1:50000.
    const RELAYED: [u8; 12] = [0, 0x16, 0, 8, 0, 1, 0xE2, 0x42, 0x5E, 0x12, 0xA4, 0x43];
    const REFUSAL: [u8; 8] = [0, 0x09, 0, 4, 0, 0, 4, 0];
    let kind = u16::from_be_bytes([message[0], message[1]]);
    if kind >= 0x4000 {
        return message.to_vec();
    }
    let presented = message.windows(2).any(|bytes| bytes == [0x80, 0x30]);
    let (class, body) = match kind {
        0x0003 if tickets => (0x0100, [&RELAYED[..], &LIFETIME, &TICKET].concat()),
        0x0003 => (0x0100, [&RELAYED[..], &LIFETIME].concat()),
        0x0004 if presented => (0x0110, REFUSAL.to_vec()),
        _ => (0x0100, LIFETIME.to_vec()),
    };
    let length = u16::try_from(body.len()).unwrap();
    [&(kind | class).to_be_bytes()[..], &length.to_be_bytes(), &message[4..20], &body].concat()
}
