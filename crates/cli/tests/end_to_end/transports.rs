//! `load turn` through `serve` over each transport, checked with the server's metrics.

use crate::prelude::*;

const NAME: &str = "turn.example.org";
/// Datagrams per second: few enough that the smallest receive buffer of any kernel holds one second's worth while a
/// busy machine suspends a program.
const RATE: &str = "200";
const ALL: [&str; 4] = ["udp", "tcp", "tls", "dtls"];

struct Server {
    serve: Serve,
    certificate: Certificate,
}

impl Server {
    fn start(more: &[&str]) -> Self {
        let certificate = Certificate::of_authority(&[NAME, "127.0.0.1", "::1"]);
        let serve = Serve::start_secured(&certificate, more);
        Self { serve, certificate }
    }

    fn load(&self, transport: &str, family: IpAddr) -> Load {
        let trust = self.certificate.authority().display().to_string();
        let load =
            Load::new(self.serve.address_of(transport, family)).with(&format!("--transport {transport}"));
        if matches!(transport, "tls" | "dtls") { load.with(&format!("--ca {trust}")) } else { load }
    }

    fn wait_for_metric(&self, name: &str, label: &str, is_right: impl Fn(u64) -> bool) {
        eventually(&format!("{name}{{{label}}} is right"), || {
            is_right(self.serve.metrics().sum(name, label))
        });
    }

    /// Waits until `clients` have connected over this transport, and none over any other.
    fn saw(&self, transport: &str, clients: u64) {
        let connections = if matches!(transport, "tcp" | "tls") { clients } else { 0 };
        self.wait_for_metric("turnpike_connections_accepted_total", "", |count| count == connections);
        for (name, whose) in [
            ("turnpike_connections_plain_total", "tcp"),
            ("turnpike_tls_handshakes_total", "tls"),
            ("turnpike_dtls_handshakes_total", "dtls"),
        ] {
            let wanted = if whose == transport { clients } else { 0 };
            self.wait_for_metric(name, "", |count| count == wanted);
        }
        self.wait_for_metric("turnpike_allocations_opened_total", "", |count| count == clients);
        self.serve.wait_for_allocations(0);
    }
}

fn count(result: &Value, key: &str) -> u64 {
    result[key].as_u64().unwrap_or_else(|| panic!("{key} is not a count in {result}"))
}

/// Asserts that everything came back over streams; over UDP and DTLS, datagrams may be lost.
fn came_back(run: &Finished, transport: &str) -> u64 {
    assert_eq!(run.code, Some(0), "{}", run.output());
    let result = run.result();
    let sent = count(&result, "sent");
    assert!(sent >= 50, "{result}");
    for nothing in ["duplicated", "reordered"] {
        assert_eq!(count(&result, nothing), 0, "{nothing} in {result}");
    }
    let is_stream = matches!(transport, "tcp" | "tls");
    assert!(count(&result, "lost") <= if is_stream { 0 } else { 20 }, "{result}");
    let mut errors = result["errors"].as_object().expect("counts by name").clone();
    if !is_stream {
        // On a busy machine, a client may repeat its first request and get two responses.
        errors.remove("unexpected_datagram");
    }
    assert!(errors.is_empty(), "{result}");
    sent
}

fn relays(transport: &str, family: IpAddr, via: &str, workers: &str) {
    need!(loopback_of(family));
    let server = Server::start(&["--workers", workers]);
    let reflect = Reflect::start(family, &[]);
    let run = server
        .load(transport, family)
        .to(reflect.address)
        // An odd size, because ChannelData is padded over streams.
        .with(&format!("--via {via} --clients 16 --rate {RATE} --size 121 --duration 2"))
        .run();
    let sent = came_back(&run, transport);
    for direction in ["to_peer", "to_client"] {
        let label = format!("direction=\"{direction}\"");
        let least = if transport.starts_with('t') { sent } else { sent - 20 };
        server.wait_for_metric("turnpike_relayed_datagrams_total", &label, |relayed| relayed >= least);
    }
    server.saw(transport, 16);
}

/// Plaintext on all addresses, TLS and DTLS on one of them, all on one port, with one worker and with several.
#[test]
fn tls_address_and_wildcard_share_one_port() {
    let certificate = Certificate::of_authority(&["127.0.0.1"]);
    let authority = certificate.authority().display().to_string();
    let user = format!("{USER}:{PASSWORD}");
    for workers in ["1", "2"] {
        let port = free_port(V4);
        let (all, one) = (format!("0.0.0.0:{port}"), format!("127.0.0.1:{port}"));
        let mut arguments = vec!["serve", "--listen", &all, "--tls-listen", &one, "--dtls-listen", &one];
        arguments.extend(["--workers", workers, "--user", &user, "--relay-ip", "127.0.0.1"]);
        arguments.extend(["--admin", "127.0.0.1:0"]);
        arguments.extend(certificate.flags());
        let _serve = Program::start(&mut turnpike(&arguments));
        for uri in [
            format!("turn:127.0.0.2:{port}?transport=udp"),
            format!("turns:{one}?transport=tcp"),
            format!("turns:{one}?transport=udp"),
        ] {
            eventually(&format!("{uri} can be used, {workers} workers"), || {
                let probe = ["probe", &uri, "--user", &user, "--ca", &authority, "--timeout", "10"];
                Program::run(&mut turnpike(&probe)).code == Some(0)
            });
        }
    }
}

tests! {
    channels_over_udp: relays("udp", V4, "channel", "2");
    channels_over_tcp: relays("tcp", V4, "channel", "2");
    indications_over_tcp_and_ipv6: relays("tcp", V6, "send", "1");
    channels_over_tls: relays("tls", V4, "channel", "1");
    indications_over_tls_and_ipv6: relays("tls", V6, "send", "2");
    /// The kernel spreads the clients' datagrams over both workers' sockets; an association belongs to one of them.
    channels_over_dtls_with_several_workers: relays("dtls", V4, "channel", "2");
    indications_over_dtls_and_ipv6: relays("dtls", V6, "send", "1");
}

/// `server.udp = false`: TCP is served, and the UDP port stays free.
#[test]
fn server_without_udp_serves_tcp_only() {
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", "[server]\nudp = false\n");
    let user = format!("{USER}:{PASSWORD}");
    let mut arguments =
        vec!["serve", "-c", file.to_str().expect("UTF-8"), "--listen", "127.0.0.1:0", "--workers", "2"];
    arguments.extend(["--admin", "off", "--state", "off", "--user", &user, "--relay-ip", "127.0.0.1"]);
    arguments.extend(["--allow-peer", "127.0.0.0/8"]);
    let mut serve = Program::start(&mut turnpike(&arguments));
    let address = address_after(&serve.line_with("listening on tcp 127.0.0.1:"), "listening on tcp ");
    let reflect = Reflect::start(V4, &[]);
    let load = Load::new(address).with(&format!("--transport tcp --clients 2 --rate {RATE} --duration 1"));
    came_back(&load.to(reflect.address).run(), "tcp");
    assert!(serve.lines().iter().all(|line| !line.contains("listening on udp")), "{:?}", serve.lines());
    std::net::UdpSocket::bind(address).expect("the UDP port is free");
}

#[test]
fn plain_udp_and_dtls_share_an_address() {
    let server = Server::start(&["--workers", "2"]);
    assert_eq!(server.serve.address_of("dtls", V4), server.serve.address(V4));
    let reflect = Reflect::start(V4, &[]);
    let both = ["udp", "dtls"].map(|transport| {
        let more = ["--clients", "8", "--rate", RATE, "--duration", "2"];
        (transport, server.load(transport, V4).to(reflect.address).with_words(&more).start())
    });
    for (transport, program) in both {
        came_back(&program.wait(SOON * 2), transport);
    }
    server.wait_for_metric("turnpike_dtls_handshakes_total", "version=\"1.3\"", |count| count == 8);
    server.wait_for_metric("turnpike_allocations_opened_total", "", |count| count == 16);
}

#[test]
fn separate_dtls_listener_serves_clients_on_several_workers() {
    let certificate = Certificate::of_authority(&[NAME]);
    let mut arguments = certificate.flags().to_vec();
    arguments.extend(["--dtls-listen", "127.0.0.2:0", "--workers", "2"]);
    let serve = Serve::start(&arguments);
    let server = Server { serve, certificate };
    let reflect = Reflect::start(V4, &[]);
    let address = server.serve.address_of("dtls", [127, 0, 0, 2].into());
    let trust = server.certificate.authority().display().to_string();
    let run = Load::new(address)
        .to(reflect.address)
        .with(&format!("--transport dtls --ca {trust} --server-name {NAME}"))
        .with(&format!("--clients 64 --rate {RATE} --duration 2"))
        .run();
    came_back(&run, "dtls");
    server.saw("dtls", 64);
    // The probability that one worker gets no client is 2^-63.
    for worker in 0..2 {
        let label = format!("worker=\"{worker}\"");
        server.wait_for_metric("turnpike_dtls_handshakes_total", &label, |count| count > 0);
    }
}

/// The relayed family is independent of the family between client and server.
#[test]
fn each_transport_relays_both_families() {
    need!(loopback_of(V6));
    let server = Server::start(&["--workers", "1"]);
    for (way, relayed, name) in [(V4, V6, "6"), (V6, V4, "4"), (V6, V6, "6"), (V4, V4, "4")] {
        let reflect = Reflect::start(relayed, &[]);
        for transport in ALL {
            let run = server
                .load(transport, way)
                .to(reflect.address)
                .with(&format!("--family {name} --clients 2 --rate {RATE}"))
                .with("--duration 0.5 --warmup 0.1")
                .run();
            came_back(&run, transport);
        }
    }
    let never = Load::new(server.serve.address(V4))
        .to(Reflect::start(V4, &[]).address)
        .with("--family 6 --duration 1")
        .run();
    assert!(
        never.code != Some(0),
        "an IPv4 peer is unreachable from an IPv6 relayed address: {}",
        never.output()
    );
}

/// Runs at full speed, with enough in flight to fill queues and split messages anywhere, but not to overflow a queue.
#[test]
fn streams_lose_nothing_at_full_speed() {
    let server = Server::start(&["--workers", "2"]);
    let reflect = Reflect::start(V4, &[]);
    for (transport, via, size) in [
        ("tcp", "channel", "121"),
        ("tls", "channel", "1199"),
        ("tcp", "send", "1199"),
        ("tls", "send", "121"),
    ] {
        let run = server
            .load(transport, V4)
            .to(reflect.address)
            .with("--rate max --window 16 --burst 8 --clients 4")
            .with(&format!("--via {via} --size {size}"))
            .with("--duration 0.5 --warmup 0.1")
            .run();
        came_back(&run, transport);
    }
    server.wait_for_metric("turnpike_stream_dropped_total", "", |dropped| dropped == 0);
}

#[test]
fn tcp_is_relayed_over_tcp_and_tls() {
    let server = Server::start(&["--workers", "2"]);
    let listen = ["reflect", "--tcp", "127.0.0.1:0", "--listen", "127.0.0.1:0"];
    let mut reflect = Program::start(&mut turnpike(&listen));
    let peer: SocketAddr = address_after(&reflect.line_with("listening on tcp "), "listening on tcp ");
    for (times, transport) in [(1, "tcp"), (2, "tls")] {
        let run = server
            .load(transport, V4)
            .to(peer)
            .with("--relay tcp --clients 4 --rate 400")
            .with("--size 1000 --duration 2")
            .run();
        let sent = came_back(&run, transport);
        let result = run.result();
        assert_eq!(count(&result, "received"), sent, "{result}");
        assert_eq!(result["received_bytes"].as_f64(), Some(sent as f64 * 1_000.0), "{result}");
        server.wait_for_metric("turnpike_peer_connections_total", "event=\"connected\"", |count| {
            count == 4 * times
        });
    }
    server.serve.wait_for_allocations(0);
    server.wait_for_metric("turnpike_peer_connections_open", "", |open| open == 0);
}

#[test]
fn allocations_are_created_and_deleted_over_each_transport() {
    let server = Server::start(&["--workers", "2"]);
    let mut before = 0;
    for transport in ALL {
        let result = server
            .load(transport, V4)
            .with("--mode allocate --clients 4 --rate 100 --duration 1 --warmup 0")
            .run()
            .ended(0)
            .result();
        let received = count(&result, "received");
        assert!(received >= 9, "{transport}: {result}");
        assert_eq!(count(&result, "lost"), 0, "{transport}: {result}");
        let mut errors = result["errors"].as_object().expect("counts by name").clone();
        errors.remove("unexpected_datagram");
        assert!(errors.is_empty(), "{transport}: {result}");
        let opened = "turnpike_allocations_opened_total";
        server.wait_for_metric(opened, "", |count| count >= before + received);
        server.serve.wait_for_allocations(0);
        before = server.serve.metrics().sum(opened, "");
        if transport == "tls" {
            for (kind, is_right) in [("full", 1..=8), ("resumed", 1..=u64::MAX)] {
                let told = result[format!("{kind}_handshakes")].as_f64();
                assert!(told > Some(0.0), "{kind}: {result}");
                let label = format!("kind=\"{kind}\"");
                server.wait_for_metric("turnpike_tls_handshakes_total", &label, |count| {
                    is_right.contains(&count) && Some(count as f64) == told
                });
            }
        }
    }
    server.wait_for_metric("turnpike_connections", "", |open| open == 0);
    server.wait_for_metric("turnpike_dtls_associations", "", |open| open == 0);
}

#[test]
fn client_reports_untrusted_or_misnamed_certificates() {
    let server = Server::start(&[]);
    let other = Certificate::of_authority(&[NAME]);
    let reflect = Reflect::start(V4, &[]);
    for transport in ["tls", "dtls"] {
        let address = server.serve.address_of(transport, V4);
        let load = || {
            let transport = ["--transport", transport, "--rate", "100", "--duration", "0.5"];
            Load::new(address).to(reflect.address).with_words(&transport)
        };
        let [ours, theirs] =
            [&server.certificate, &other].map(|certificate| certificate.authority().display().to_string());
        for (flags, words) in [
            (vec!["--ca", &theirs], ["certificate", "--ca"]),
            (vec!["--ca", &ours, "--server-name", "turn.example.net"], ["turn.example.net", NAME]),
        ] {
            let run = load().with_words(&flags).run();
            assert_eq!(run.code, Some(1), "{transport} {flags:?}: {}", run.output());
            for word in words {
                assert!(run.stderr.contains(word), "{transport}: no {word:?} in {}", run.stderr);
            }
        }
        for flags in [
            vec!["--ca", &ours, "--server-name", NAME],
            vec!["--ca", &ours],
            vec!["--insecure", "--server-name", "turn.example.net"],
        ] {
            let run = load().with_words(&flags).run();
            assert_eq!(run.code, Some(0), "{transport} {flags:?}: {}", run.output());
        }
        load()
            .with_words(&["--ca", &server.certificate.key().display().to_string()])
            .run()
            .ended(2)
            .says("key.pem");
    }
    server.wait_for_metric("turnpike_tls_handshakes_failed_total", "", |count| count >= 2);
}
