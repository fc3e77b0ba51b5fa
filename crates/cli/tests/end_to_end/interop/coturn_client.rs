//! coturn's clients against `serve`: `turnutils_uclient` in many modes, `turnutils_stunclient`.

use crate::prelude::*;

/// Messages that each client of a uclient run sends.
const MESSAGES: u64 = 50;

/// Credentials of [`USER`].
pub(super) const ALICE: [&str; 4] = ["-u", USER, "-w", PASSWORD];

/// Or why a test cannot run here.
pub(super) fn coturn(family: IpAddr) -> Result<(), String> {
    installed("turnutils_uclient")?;
    Ok(loopback_of(family)?)
}

/// uclient to `peer` through `server`, with so many clients.
pub(super) fn start_uclient(server: SocketAddr, peer: SocketAddr, clients: u64, more: &[&str]) -> Program {
    let mut command = Command::new("turnutils_uclient");
    for (flag, value) in [
        ("-p", server.port().to_string()),
        ("-e", peer.ip().to_string()),
        ("-r", peer.port().to_string()),
        ("-n", MESSAGES.to_string()),
        ("-m", clients.to_string()),
    ] {
        command.args([flag, &value]);
    }
    // 120 bytes each, 5 ms apart.
    command.args(["-l", "120", "-z", "5"]).args(more).arg(server.ip().to_string());
    Program::start(&mut command)
}

/// Runs it to its end.
fn uclient(server: SocketAddr, peer: SocketAddr, clients: u64, more: &[&str]) -> Finished {
    start_uclient(server, peer, clients, more).wait(SOON * 2)
}

/// coturn's own echo, on this port and the next.
fn turnutils_peer() -> (Program, SocketAddr) {
    let address = SocketAddr::new(V4, free_port(V4));
    let mut command = Command::new("turnutils_peer");
    let arguments = ["-L", &address.ip().to_string(), "-p", &address.port().to_string()];
    let peer = Program::start(command.args(arguments));
    let probe = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    probe.set_read_timeout(Some(Duration::from_millis(100))).expect("not zero");
    eventually("turnutils_peer echoes", || {
        // Refused while nobody listens there yet.
        probe.send_to(b"?", address).ok()?;
        probe.recv(&mut [0; 16]).ok()
    });
    (peer, address)
}

/// How uclient sends.
#[derive(Clone, Copy, PartialEq)]
enum Via {
    Channel,
    Send,
}

/// Relays uclient's messages to our reflector and expects each of them back.
fn relays_all(family: IpAddr, via: Via, more: &[&str]) {
    need!(coturn(family));
    let certificate = Certificate::new(&["turn.example.org"]);
    let serve = Serve::start(&[&["--secret", "north-star"], &certificate.flags()[..], &dtls(more)].concat());
    let reflect = Reflect::start(family, &[]);
    let requested = if family.is_ipv4() { "-X" } else { "-x" };
    let more = [&[requested], more].concat();
    let more = match via {
        Via::Channel => more,
        Via::Send => [&["-s"], &more[..]].concat(),
    };
    let clients = 4;
    let ended = uclient(serve.address(family), reflect.address, clients, &more);
    returns_all(&ended, clients);
    let expected = clients * MESSAGES;
    for direction in ["to_peer", "to_client"] {
        eventually(&format!("{expected} datagrams are counted {direction}"), || {
            let metrics = serve.metrics();
            let relayed =
                metrics.sum("turnpike_relayed_datagrams_total", &format!("direction=\"{direction}\""));
            relayed >= expected
        });
    }
}

/// Flags for DTLS on the ports of plain UDP, if it is asked for: -S without -t.
fn dtls(more: &[&str]) -> Vec<&'static str> {
    let wanted = more.contains(&"-S") && !more.contains(&"-t");
    let addresses =
        ["127.0.0.1:0", "[::1]:0"].into_iter().filter(|address| *address != "[::1]:0" || has_ipv6());
    addresses.filter(|_| wanted).flat_map(|address| ["--dtls-listen", address]).collect()
}

/// uclient's own report says that nothing was lost.
pub(super) fn returns_all(ended: &Finished, clients: u64) {
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    for (label, expected) in [
        ("tot_send_msgs=", clients * MESSAGES),
        ("tot_recv_msgs=", clients * MESSAGES),
        ("Total lost packets ", 0),
    ] {
        assert_eq!(last_number(ended, label), expected, "{label}: {}", ended.output());
    }
}

/// The number after the last `label` of uclient's report.
fn last_number(ended: &Finished, label: &str) -> u64 {
    let output = ended.output();
    let (_, rest) = output.rsplit_once(label).unwrap_or_else(|| panic!("no {label:?} in {output}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|error| panic!("{label:?}: {error} in {output}"))
}

/// The same as [`USER`].
fn alice_relays_all(families: &[IpAddr], via: Via, flags: &str) {
    families.iter().for_each(|family| relays_all(*family, via, &[&ALICE[..], &words(flags)].concat()));
}

tests! {
    channels_over_ipv4: alice_relays_all(&[V4], Via::Channel, "-c");
    send_over_ipv4: alice_relays_all(&[V4], Via::Send, "-c");
    channels_over_ipv6: alice_relays_all(&[V6], Via::Channel, "-c");
    send_over_ipv6: alice_relays_all(&[V6], Via::Send, "-c");
    channels_over_tcp: alice_relays_all(&[V4, V6], Via::Channel, "-c -t");
    send_over_tcp: alice_relays_all(&[V4], Via::Send, "-c -t");
    /// Payloads of every length modulo 4 need padding over streams; uclient checks what comes back.
    odd_lengths_over_tcp: for length in ["121", "122", "123"] {
        alice_relays_all(&[V4], Via::Channel, &format!("-c -t -l {length}"));
    };
    /// Over the same port as TCP. uclient tries TLS 1.0 and 1.1 too, is refused, and tries again.
    channels_over_tls: alice_relays_all(&[V4, V6], Via::Channel, "-c -t -S");
    send_over_tls: alice_relays_all(&[V4], Via::Send, "-c -t -S");
    /// Over the same port as UDP, told apart by the first byte.
    channels_over_dtls: alice_relays_all(&[V4, V6], Via::Channel, "-c -S");
    send_over_dtls: alice_relays_all(&[V4], Via::Send, "-c -S");
    /// -G repeats CreatePermission, one time for a peer of the other family; -g asks for DONT-FRAGMENT; -D pads.
    extra_requests_dont_fragment_and_padding: alice_relays_all(&[V4], Via::Send, "-c -G -g -D");
    extra_requests_over_tcp: alice_relays_all(&[V4], Via::Channel, "-c -G -t");
    extra_requests_over_tls: alice_relays_all(&[V6], Via::Channel, "-c -G -t -S");
    /// uclient makes itself a time-limited credential from the shared secret.
    time_limited_credentials: relays_all(V4, Via::Send, &["-u", "bob", "-W", "north-star", "-c"]);
}

/// Without -c each RTP session has an RTCP session on the next port (EVEN-PORT, RESERVATION-TOKEN), whose peer is the
/// peer's next port: turnutils_peer has both.
#[test]
fn pairs_of_ports() {
    need!(coturn(V4));
    let serve = Serve::start(&[]);
    let (_peer, address) = turnutils_peer();
    let ended = uclient(serve.address(V4), address, 2, &[&ALICE[..], &["-s", "-X"]].concat());
    returns_all(&ended, 2);
}

/// -Z asks for an address of each family with one allocation, and uses that of the peer's.
#[test]
fn dual_stack_allocations() {
    for family in [V4, V6] {
        need!(coturn(V6));
        let serve = Serve::start(&["--log", "debug"]);
        let reflect = Reflect::start(family, &[]);
        let clients = 2;
        let ended = uclient(serve.address(V4), reflect.address, clients, &[&ALICE[..], &["-Z"]].concat());
        returns_all(&ended, clients);
        let opened: Vec<String> =
            serve.program.lines().into_iter().filter(|line| line.contains("session opened")).collect();
        assert!(!opened.is_empty());
        for line in opened {
            assert!(line.contains("relayed=127.0.0.1:") && line.contains("relayed2=[::1]:"), "{line}");
        }
    }
}

#[test]
fn a_wrong_password_is_refused() {
    need!(coturn(V4));
    let mut serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let ended = uclient(serve.address(V4), reflect.address, 1, &["-u", USER, "-w", "wrong", "-c", "-X"]);
    assert!(ended.output().contains("Cannot complete Allocation"), "{}", ended.output());
    assert!(serve.program.line_with("credential refused").contains("wrong key"));
    assert_eq!(serve.allocations(), 0);
}

/// turnutils_peer in the place of our own reflector: nothing of ours but the relay.
#[test]
fn coturn_on_both_sides() {
    need!(coturn(V4));
    let serve = Serve::start(&[]);
    let (_peer, address) = turnutils_peer();
    let ended = uclient(serve.address(V4), address, 1, &[&ALICE[..], &["-c", "-X"]].concat());
    returns_all(&ended, 1);
}

#[test]
fn stunclient_learns_its_address() {
    for family in [V4, V6] {
        need!(coturn(family));
        let serve = Serve::start(&[]);
        let server = serve.address(family);
        let mut command = Command::new("turnutils_stunclient");
        let ended =
            Program::run(command.args(["-p", &server.port().to_string(), &server.ip().to_string()])).ended(0);
        let reflexive =
            format!("UDP reflexive addr: {}", if family.is_ipv4() { "127.0.0.1:" } else { "::1:" });
        assert!(ended.output().contains(&reflexive), "{}", ended.output());
    }
}

/// -T has clients connect to each other's relayed addresses, each over a data connection of its own, with the nonce of its control
/// connection.
fn relays_tcp(workers: &str, clients: u64, more: &[&str]) {
    need!(coturn(V4));
    let certificate = Certificate::new(&["turn.example.org"]);
    let serve = Serve::start(&[&["--workers", workers], &certificate.flags()[..]].concat());
    let nobody = SocketAddr::new(V4, 9);
    let ended =
        uclient(serve.address(V4), nobody, clients, &[&ALICE[..], &["-T", "-X"], more].concat()).ended(0);
    // One alone would have nobody to talk to: uclient makes it two.
    let sent = clients.max(2) * MESSAGES;
    // -P: the server tells of the connections that the others made. uclient counts one of each pair, with coturn's own server too.
    let heard = if more.contains(&"-P") { sent / 2 } else { sent };
    assert_eq!(last_number(&ended, "tot_send_msgs="), sent);
    assert_eq!(last_number(&ended, "tot_recv_msgs="), heard, "{}", ended.output());
    eventually("data connections are counted", || {
        let bound = serve.metrics().sum("turnpike_peer_connections_total", "event=\"bound\"");
        bound * MESSAGES >= heard
    });
    assert_eq!(serve.metrics().sum("turnpike_error_responses_total", "code=\"438\""), 0);
}

#[test]
fn tcp_relaying() {
    for clients in [1, 2, 4, 12] {
        relays_tcp("1", clients, &["-t"]);
        relays_tcp("3", clients, &["-t"]);
    }
}

#[test]
fn tcp_relaying_over_tls() {
    for clients in [1, 4, 12] {
        relays_tcp("3", clients, &["-t", "-S"]);
    }
}

#[test]
fn tcp_relaying_with_active_peers() {
    relays_tcp("2", 2, &["-P"]);
}

/// -M has each client move to another port in the middle of its allocation.
#[test]
fn mobility_over_udp_and_tcp() {
    for workers in ["1", "2"] {
        for more in [&["-M"][..], &["-M", "-t"]] {
            need!(coturn(V4));
            let serve = Serve::start(&["--workers", workers]);
            let reflect = Reflect::start(V4, &[]);
            let more = [&ALICE[..], &["-c", "-X"], more].concat();
            let clients = 4;
            let ended = uclient(serve.address(V4), reflect.address, clients, &more);
            returns_all(&ended, clients);
            eventually("each client has moved", || {
                let moved = serve.metrics().sum("turnpike_mobility_total", "event=\"arrived\"");
                moved >= clients
            });
        }
    }
}
