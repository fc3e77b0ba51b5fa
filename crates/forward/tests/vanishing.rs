//! Clients and servers that disappear without FIN or RST, as if a cable were cut: TCP's timers or the rule's
//! idle timeout end the connection, and the other side is reset.

use crate::prelude::*;

use turnpike_testkit::alone;

const TEST: &str = "vanishing::vanished_peer_is_detected_and_the_other_side_is_reset";

/// Number of messages exchanged before a connection becomes idle or a transfer begins.
const WORDS: u64 = 10;

/// Addresses of this namespace that are removed during a connection, so that packets to them get no response.
fn address(number: u8) -> String {
    format!("10.9.0.{number}")
}

#[test]
fn vanished_peer_is_detected_and_the_other_side_is_reset() {
    alone::in_network_namespace(TEST, vanish);
}

struct Pair {
    client: TcpStream,
    server: TcpStream,
}

fn client_at(number: u8, running: &Running, id: &str, server: &TcpListener) -> Pair {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let source: SocketAddr = format!("{}:0", address(number)).parse().unwrap();
    socket.bind(&source.into()).unwrap();
    socket.connect(&running.address(id).into()).unwrap();
    greeted(Pair { client: patient(socket.into()), server: accept(server) })
}

fn server_at(running: &Running, id: &str, server: &TcpListener) -> Pair {
    greeted(Pair { client: running.connect(id), server: accept(server) })
}

/// Exchanges some messages, so that the connection is established and interactive.
fn greeted(mut pair: Pair) -> Pair {
    for _ in 0..WORDS {
        pair.client.write_all(b"?").unwrap();
        assert_eq!(read_exactly(&mut pair.server, 1), b"?");
        pair.server.write_all(b"!").unwrap();
        assert_eq!(read_exactly(&mut pair.client, 1), b"!");
    }
    pair
}

/// Transfer in progress: `to` has read a megabyte and stops. Returns the writer's error.
fn transfer(mut from: TcpStream, to: &mut TcpStream) -> thread::JoinHandle<ErrorKind> {
    let writer = thread::spawn(move || {
        let piece = [7; 1 << 16];
        loop {
            if let Err(error) = from.write_all(&piece) {
                return error.kind();
            }
        }
    });
    read_exactly(to, 1 << 20);
    writer
}

fn vanish() {
    for (name, value) in [
        // An idle connection is probed after a second and ended after two more.
        ("tcp_keepalive_time", "1"),
        ("tcp_keepalive_intvl", "1"),
        ("tcp_keepalive_probes", "2"),
        // A connection with data in flight is ended after four attempts.
        ("tcp_retries2", "3"),
    ] {
        if let Err(error) = fs::write(format!("/proc/sys/net/ipv4/{name}"), value) {
            return alone::skip(&format!("cannot set {name}: {error}"));
        }
    }
    vanish_from(CopyMode::Auto);
    if kernel_passes_on() {
        vanish_from(CopyMode::Kernel);
    }
}

fn vanish_from(copy: CopyMode) {
    for number in 1..=5 {
        run("ip", &["address", "add", &format!("{}/32", address(number)), "dev", "lo"]);
    }
    let rule = |id: &str, target| Rule { copy, ..rule(id, target) };
    let (here, target) = listener();
    let [upload_to, idle_at] = [2, 4].map(|number| TcpListener::bind((address(number), 0)).unwrap());
    let impatient = Rule { idle: Some(Duration::from_secs(1)), ..rule("impatient", target) };
    let running = Running::start(&[
        rule("here", target),
        rule("upload", upload_to.local_addr().unwrap()),
        rule("idle", idle_at.local_addr().unwrap()),
        impatient,
    ]);
    let mut download = client_at(1, &running, "here", &here);
    let mut upload = server_at(&running, "upload", &upload_to);
    let idle_client = client_at(3, &running, "here", &here);
    let idle_server = server_at(&running, "idle", &idle_at);
    let mut impatient = client_at(5, &running, "impatient", &here);

    let writers = [
        transfer(download.server.try_clone().unwrap(), &mut download.client),
        transfer(upload.client.try_clone().unwrap(), &mut upload.server),
        transfer(impatient.server.try_clone().unwrap(), &mut impatient.client),
    ];
    let (mut told_server, mut told_client) =
        (idle_client.server.try_clone().unwrap(), idle_server.client.try_clone().unwrap());
    assert_eq!(running.forwarder.active(), 5);
    for number in 1..=5 {
        run("ip", &["address", "del", &format!("{}/32", address(number)), "dev", "lo"]);
    }

    for writer in writers {
        let error = writer.join().unwrap();
        assert!(matches!(error, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
    }
    assert_eq!(told_server.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(told_client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let reports = running.log.wait(5);
    let ended = |rule: &str| {
        let mut reasons: Vec<_> = reports
            .iter()
            .filter(|report| report.rule.0 == rule)
            .map(|report| (report.reason, report.to_client > WORDS, report.to_target > WORDS))
            .collect();
        reasons.sort_by_key(|(_, downloaded, _)| *downloaded);
        reasons
    };
    assert_eq!(
        ended("here"),
        [(EndReason::ClientReset, false, false), (EndReason::ClientReset, true, false)]
    );
    assert_eq!(ended("upload"), [(EndReason::TargetReset, false, true)]);
    assert_eq!(ended("idle"), [(EndReason::TargetReset, false, false)]);
    assert_eq!(ended("impatient"), [(EndReason::Idle, true, false)]);
    eventually("all connections have ended", || running.forwarder.active() == 0);
}
