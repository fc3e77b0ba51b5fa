//! coturn's clients against `serve`: `turnutils_uclient` in many modes, and `turnutils_stunclient`.

use crate::prelude::*;

const MESSAGES: u64 = 50;

pub(super) const ALICE: [&str; 4] = ["-u", USER, "-w", PASSWORD];

pub(super) fn coturn(family: IpAddr) -> Result<(), String> {
    installed("turnutils_uclient")?;
    Ok(loopback_of(family)?)
}

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

fn uclient(server: SocketAddr, peer: SocketAddr, clients: u64, more: &[&str]) -> Finished {
    start_uclient(server, peer, clients, more).wait(SOON * 2)
}

/// coturn's echo server, on the returned port and the next.
fn turnutils_peer() -> (Program, SocketAddr) {
    let address = SocketAddr::new(V4, free_port(V4));
    let mut command = Command::new("turnutils_peer");
    let arguments = ["-L", &address.ip().to_string(), "-p", &address.port().to_string()];
    let peer = Program::start(command.args(arguments));
    let probe = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    probe.set_read_timeout(Some(Duration::from_millis(100))).expect("not zero");
    eventually("turnutils_peer echoes", || {
        // The port is unreachable until the echo server listens.
        probe.send_to(b"?", address).ok()?;
        probe.recv(&mut [0; 16]).ok()
    });
    (peer, address)
}

#[derive(Clone, Copy, PartialEq)]
enum Via {
    Channel,
    Send,
}

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

/// DTLS flags for the plain UDP ports, if requested: -S without -t.
fn dtls(more: &[&str]) -> Vec<&'static str> {
    let wanted = more.contains(&"-S") && !more.contains(&"-t");
    let addresses =
        ["127.0.0.1:0", "[::1]:0"].into_iter().filter(|address| *address != "[::1]:0" || has_ipv6());
    addresses.filter(|_| wanted).flat_map(|address| ["--dtls-listen", address]).collect()
}

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

fn last_number(ended: &Finished, label: &str) -> u64 {
    let output = ended.output();
    let (_, rest) = output.rsplit_once(label).unwrap_or_else(|| panic!("no {label:?} in {output}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|error| panic!("{label:?}: {error} in {output}"))
}

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
    /// Payloads of every length modulo 4, because ChannelData is padded over streams; uclient checks the echo.
    odd_lengths_over_tcp: for length in ["121", "122", "123"] {
        alice_relays_all(&[V4], Via::Channel, &format!("-c -t -l {length}"));
    };
    /// TLS on the TCP port. uclient also tries TLS 1.0 and 1.1, which the server refuses, and then retries.
    channels_over_tls: alice_relays_all(&[V4, V6], Via::Channel, "-c -t -S");
    send_over_tls: alice_relays_all(&[V4], Via::Send, "-c -t -S");
    /// DTLS on the UDP port; the first byte distinguishes it from STUN.
    channels_over_dtls: alice_relays_all(&[V4, V6], Via::Channel, "-c -S");
    send_over_dtls: alice_relays_all(&[V4], Via::Send, "-c -S");
    /// -G repeats CreatePermission, once for a peer of the other family; -g requests DONT-FRAGMENT; -D pads.
    extra_requests_dont_fragment_and_padding: alice_relays_all(&[V4], Via::Send, "-c -G -g -D");
    extra_requests_over_tcp: alice_relays_all(&[V4], Via::Channel, "-c -G -t");
    extra_requests_over_tls: alice_relays_all(&[V6], Via::Channel, "-c -G -t -S");
    time_limited_credentials: relays_all(V4, Via::Send, &["-u", "bob", "-W", "north-star", "-c"]);
}

/// Without -c each RTP session has an RTCP session on the next port (EVEN-PORT, RESERVATION-TOKEN) to the peer's next port, where
/// turnutils_peer listens too.
#[test]
fn uclient_relays_over_pairs_of_ports() {
    need!(coturn(V4));
    let serve = Serve::start(&[]);
    let (_peer, address) = turnutils_peer();
    let ended = uclient(serve.address(V4), address, 2, &[&ALICE[..], &["-s", "-X"]].concat());
    returns_all(&ended, 2);
}

/// -Z requests an address of each family in one allocation and uses the peer's family.
#[test]
fn uclient_relays_over_dual_stack_allocations() {
    for family in [V4, V6] {
        need!(coturn(V6));
        let serve = Serve::start(&["--log", "debug"]);
        let reflect = Reflect::start(family, &[]);
        let clients = 2;
        let ended = uclient(serve.address(V4), reflect.address, clients, &[&ALICE[..], &["-Z"]].concat());
        returns_all(&ended, clients);
        let opened: Vec<String> =
            serve.program.lines().into_iter().filter(|line| line.contains("allocation opened")).collect();
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

/// turnutils_peer instead of our own reflector.
#[test]
fn uclient_relays_to_turnutils_peer() {
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

/// -T makes clients connect to each other's relayed addresses, each over its own data connection with the nonce of the control
/// connection.
fn relays_tcp(workers: &str, clients: u64, more: &[&str]) {
    need!(coturn(V4));
    let certificate = Certificate::new(&["turn.example.org"]);
    let serve = Serve::start(&[&["--workers", workers], &certificate.flags()[..]].concat());
    let absent = SocketAddr::new(V4, 9);
    let ended =
        uclient(serve.address(V4), absent, clients, &[&ALICE[..], &["-T", "-X"], more].concat()).ended(0);
    // A single client would have no partner, so uclient starts two.
    let sent = clients.max(2) * MESSAGES;
    // -P: the server announces incoming connections. uclient counts only one of each pair, even with coturn's own server.
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
fn uclient_relays_tcp() {
    for clients in [1, 2, 4, 12] {
        relays_tcp("1", clients, &["-t"]);
        relays_tcp("3", clients, &["-t"]);
    }
}

#[test]
fn uclient_relays_tcp_over_tls() {
    for clients in [1, 4, 12] {
        relays_tcp("3", clients, &["-t", "-S"]);
    }
}

#[test]
fn uclient_relays_tcp_with_active_peers() {
    relays_tcp("2", 2, &["-P"]);
}

/// -M moves each client to another port during its allocation.
#[test]
fn uclient_moves_its_allocation_over_udp_and_tcp() {
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
