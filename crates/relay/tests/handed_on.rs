//! Connections handed on to a web server: selected by their first bytes, replayed exactly, limited and
//! counted.

use crate::prelude::*;
use crate::support::*;
use rustls::{ServerConfig, ServerConnection, crypto::ring, server::Acceptor};
use turnpike_relay::{HandOnEnd, HandOnRule, HandOnStats, HandedOnBy};
use turnpike_rules::Selector;
use turnpike_wire::proxy_protocol::{Parsed, parse};

/// Listening socket of a web server whose connections the test handles itself.
struct Web(TcpListener);

impl Web {
    fn start() -> Self {
        Self(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap())
    }

    fn at(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    fn accept(&self) -> TcpStream {
        self.0.set_nonblocking(true).unwrap();
        let stream = eventually("the web server has a connection", || self.0.accept().ok()).0;
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.set_write_timeout(Some(SOON)).unwrap();
        stream
    }

    fn by_name(&self, names: &[&str]) -> HandOnRule {
        let names = names.iter().map(|name| name.parse().unwrap()).collect();
        self.rule(Selector::Tls { names, protocols: Vec::new() })
    }

    fn by_protocol(&self, names: &[&str]) -> HandOnRule {
        let protocols = names.iter().map(|name| name.parse().unwrap()).collect();
        self.rule(Selector::Tls { names: Vec::new(), protocols })
    }

    fn plain(&self) -> HandOnRule {
        self.rule(Selector::Plain)
    }

    fn rule(&self, selector: Selector) -> HandOnRule {
        HandOnRule { selector, to: self.at(), proxy_protocol: None }
    }

    /// Accepts TLS with this certificate and echoes data until the client closes the connection.
    fn echo_by_tls(self, names: &[&str], protocols: &[&str]) -> SocketAddr {
        let (at, certificate) = (self.at(), identity(names).certified_key());
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(certificate)));
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let config = Arc::new(config);
        thread::spawn(move || {
            for stream in self.0.incoming().map_while(Result::ok) {
                let config = Arc::clone(&config);
                thread::spawn(move || {
                    let mut tls = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
                    let mut buffer = [0; 4096];
                    while let Ok(len @ 1..) = tls.read(&mut buffer) {
                        if tls.write_all(&buffer[..len]).is_err() {
                            return;
                        }
                    }
                    tls.conn.send_close_notify();
                    let _ = tls.flush();
                });
            }
        });
        at
    }
}

fn stats(world: &World) -> HandOnStats {
    world.relay.snapshots()[0].handed_on
}

fn wait_for_end(world: &World, reason: HandOnEnd, count: u64) {
    eventually(&format!("{reason:?} {count} times"), || stats(world).ended(reason) == count);
}

fn certificate(stream: &mut TlsStream) -> String {
    let certificates = stream.conn.peer_certificates().unwrap();
    let parsed = webpki::EndEntityCert::try_from(&certificates[0]).unwrap();
    parsed.valid_dns_names().next().unwrap().to_owned()
}

/// TURN server with a certificate for turn.example.org and these rules.
fn sharing(rules: Vec<HandOnRule>) -> World {
    start(|config| {
        config.tls = Some(context(&[identity(&["turn.example.org"])]));
        config.hand_on = rules;
    })
}

/// The ClientHello that rustls sends.
fn hello(name: &str, protocols: &[&str]) -> Vec<u8> {
    let config = tls_config(protocols);
    let mut client = ClientConnection::new(config, ServerName::try_from(name.to_owned()).unwrap()).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

/// A ClientHello for this name in records of at most `record` bytes, padded to a message of `len` bytes.
fn padded_hello(name: &str, len: usize, record: usize) -> Vec<u8> {
    let extension = |kind: u16, value: &[u8]| [&kind.to_be_bytes()[..], &vector(value)].concat();
    let server = extension(0, &vector(&[&[0][..], &vector(name.as_bytes())].concat()));
    let message = |padding: usize| {
        let extensions = [extension(21, &vec![0; padding]), server.clone()].concat();
        let body = [&[3, 3][..], &[7; 32], &[0], &vector(&[0x13, 1]), &[1, 0], &vector(&extensions)].concat();
        [&[1, 0][..], &vector(&body)].concat()
    };
    let message = message(len - message(0).len());
    message.chunks(record).flat_map(|part| [&[22, 3, 1][..], &vector(part)].concat()).collect()
}

fn read_exactly(stream: &mut impl Read, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn server_name_selects_web_or_turn_and_tls_is_not_terminated() {
    let web = Web::start();
    let rules = vec![web.by_name(&["*.example.org"])];
    web.echo_by_tls(&["www.example.org"], &["h2"]);
    let world = sharing(rules);
    for server in [world.tls(), world.tcp()] {
        let mut stream = tls_connect(server, "www.example.org", &tls_config(&["h2"])).unwrap();
        assert_eq!(certificate(&mut stream), "www.example.org");
        assert_eq!(stream.conn.alpn_protocol(), Some(&b"h2"[..]));
        stream.write_all(b"GET /").unwrap();
        assert_eq!(read_exactly(&mut stream, 5), b"GET /");
        // The name in TURN's certificate, an unknown name, and none.
        for name in ["turn.example.org", "other.example.net", "127.0.0.1"] {
            let mut stream = tls_connect(server, name, &tls_config(&[])).unwrap();
            assert_eq!(certificate(&mut stream), "turn.example.org", "{name}");
            Client::new(stream).ask(&binding(1));
        }
    }
    world.wait_for_closed(CloseReason::HandedOn, 2);
    assert_eq!(stats(&world).taken(HandedOnBy::Tls), 2);
}

#[test]
fn application_protocols_select_the_server_and_turn_keeps_its_own() {
    let web = Web::start();
    let rules = vec![web.by_protocol(&["h2", "http/1.1"]), web.by_name(&["*"])];
    web.echo_by_tls(&["web.example.org"], &["http/1.1"]);
    let world = sharing(rules);
    for (name, protocols, expected) in [
        ("turn.example.org", &["http/1.1"][..], "web.example.org"),
        ("127.0.0.1", &["http/1.1"], "web.example.org"),
        ("any.example.net", &[], "web.example.org"),
        ("any.example.net", &["stun.turn"], "turn.example.org"),
        ("turn.example.org", &[], "turn.example.org"),
        ("127.0.0.1", &[], "turn.example.org"),
    ] {
        let mut stream = tls_connect(world.tls(), name, &tls_config(protocols)).unwrap();
        assert_eq!(certificate(&mut stream), expected, "{name} {protocols:?}");
    }
}

#[test]
fn hand_on_rules_apply_to_names_of_a_wildcard_certificate() {
    for (pattern, expected) in [("*.example.org", "web.example.org"), ("www.example.org", "*.example.org")] {
        let web = Web::start();
        let rules = vec![web.by_name(&[pattern])];
        web.echo_by_tls(&["web.example.org"], &[]);
        let world = start(|config| {
            config.tls = Some(context(&[identity(&["*.example.org"])]));
            config.hand_on = rules;
        });
        let mut stream = tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap();
        assert_eq!(certificate(&mut stream), expected, "{pattern}");
    }
}

#[test]
fn server_without_a_certificate_shares_its_port() {
    let web = Web::start();
    let rules = vec![web.by_name(&["www.example.org"])];
    let world = start(|config| config.hand_on = rules);
    let sent = hello("www.example.org", &[]);
    let mut client = connect(world.tcp());
    client.write_all(&sent).unwrap();
    assert_eq!(read_exactly(&mut web.accept(), sent.len()), sent);
    let mut other = Client::new(connect(world.tcp()));
    other.send(&hello("other.example.org", &[]));
    other.ends();
    world.wait_for_closed(CloseReason::NoCertificate, 1);
}

#[test]
fn plain_text_goes_to_the_web_server_and_stun_does_not() {
    let web = Web::start();
    let rules = vec![web.plain()];
    let world = sharing(rules);
    let mut client = world.client();
    // STUN goes to TURN even if it arrives byte by byte.
    for byte in binding(1) {
        client.send(&[byte]);
    }
    assert_eq!(client.receive().unwrap().kind(), 0x0101);
    // G could begin ChannelData; a carriage return or a zero byte could begin STUN.
    for text in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\r\n\r\nGET /", b"\0\0\0\0\0\0\0\0", b"PRI * HTTP/2.0\r\n\r\n"]
    {
        for piece in [1, text.len()] {
            let mut client = connect(world.tcp());
            text.chunks(piece).for_each(|part| client.write_all(part).unwrap());
            assert_eq!(read_exactly(&mut web.accept(), text.len()), text);
        }
    }
    eventually("all handed-on connections are counted", || stats(&world).taken(HandedOnBy::Plain) == 8);
}

#[test]
fn forged_proxy_header_never_reaches_the_web_server() {
    let web = Web::start();
    let rules = vec![web.plain()];
    let world = sharing(rules);
    let header = |version| encode(version, "192.0.2.1:1".parse().unwrap(), "192.0.2.2:2".parse().unwrap());
    let headers = [header(ProxyVersion::V1), header(ProxyVersion::V2)];
    let cases = headers.iter().flat_map(|header| [1, 3, header.len()].map(|first| (header, first)));
    for (count, (header, first)) in (1..).zip(cases) {
        let mut client = world.client();
        let before = world.streams().read_bytes;
        client.send(&header[..first]);
        world.wait_for("the first bytes are read", |streams| streams.read_bytes >= before + first as u64);
        // Fails if the server has closed the connection.
        let _ = client.stream.write_all(&header[first..]);
        client.ends();
        world.wait_for_closed(CloseReason::UntrustedProxy, count);
    }
    assert_eq!(stats(&world).taken(HandedOnBy::Plain), 0);
}

#[test]
fn split_and_long_hellos_are_replayed_exactly() {
    let web = Web::start();
    let rules = vec![web.by_name(&["www.example.org"])];
    let world = sharing(rules);
    let longest = 16 << 10;
    for (sent, piece) in [
        (hello("www.example.org", &["h2"]), 1),
        (padded_hello("www.example.org", 300, 7), 1),
        (padded_hello("www.example.org", longest, longest), longest + 5),
        (padded_hello("www.example.org", longest, 257), 1000),
        (padded_hello("www.example.org", longest, longest), 17),
    ] {
        let mut client = connect(world.tls());
        for part in sent.chunks(piece) {
            client.write_all(part).unwrap();
        }
        client.write_all(b"early data").unwrap();
        let expected = [&sent[..], b"early data"].concat();
        let mut server = web.accept();
        assert!(read_exactly(&mut server, expected.len()) == expected, "{} by {piece}", sent.len());
        server.write_all(b"answer").unwrap();
        assert_eq!(read_exactly(&mut client, 6), b"answer");
    }
}

#[test]
fn split_hello_for_turn_completes_its_handshake() {
    let web = Web::start();
    let rules = vec![web.by_name(&["*.example.org"])];
    let world = sharing(rules);
    let config = tls_config(&[]);
    let name = ServerName::try_from("turn.example.org").unwrap();
    let mut tls = ClientConnection::new(config, name).unwrap();
    let mut bytes = Vec::new();
    tls.write_tls(&mut bytes).unwrap();
    let mut stream = connect(world.tls());
    for byte in &bytes {
        stream.write_all(&[*byte]).unwrap();
    }
    Client::new(StreamOwned::new(tls, stream)).ask(&binding(1));
}

#[test]
fn malformed_hellos_get_a_tls_alert() {
    let web = Web::start();
    let rules = vec![web.by_name(&["*"])];
    let world = sharing(rules);
    let right = hello("www.example.org", &[]);
    let changed = |at: usize, byte: u8| {
        let mut bytes = right.clone();
        bytes[at] = byte;
        bytes
    };
    let too_long = padded_hello("www.example.org", (16 << 10) + 1, 16 << 10);
    for bytes in [changed(5, 2), changed(6, 9), changed(8, 1).repeat(3), too_long.repeat(2)] {
        let mut client = connect(world.tls());
        let _ = client.write_all(&bytes);
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer[0] == 21 || answer[0] == 22, "{answer:?}");
    }
    assert_eq!(stats(&world).taken(HandedOnBy::Tls), 0);
    Client::new(tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap()).ask(&binding(1));
}

#[test]
fn our_parser_agrees_with_rustls() {
    for (name, protocols) in [("www.example.org", &["h2", "http/1.1"][..]), ("turn.example.org", &[])] {
        let bytes = hello(name, protocols);
        let mut acceptor = Acceptor::default();
        acceptor.read_tls(&mut &bytes[..]).unwrap();
        let accepted = acceptor.accept().ok().flatten().expect("a whole ClientHello");
        let theirs = accepted.client_hello();
        let mut joined = Vec::new();
        let turnpike_wire::client_hello::Parsed::Hello(ours) =
            turnpike_wire::client_hello::parse(&bytes, &mut joined)
        else {
            panic!("not a ClientHello");
        };
        assert_eq!(ours.server_name, theirs.server_name());
        let theirs: Vec<&[u8]> = theirs.alpn().map(Iterator::collect).unwrap_or_default();
        assert_eq!(ours.protocols().collect::<Vec<_>>(), theirs);
    }
}

#[test]
fn proxy_header_contains_the_clients_address() {
    let web = Web::start();
    for version in [ProxyVersion::V1, ProxyVersion::V2] {
        let rule = HandOnRule { proxy_protocol: Some(version), ..web.plain() };
        let world = start(|config| {
            config.hand_on = vec![rule];
            config.proxies = vec!["127.0.0.2/32".parse().unwrap()];
        });
        let mut client = connect(world.tcp());
        client.write_all(b"GET /").unwrap();
        let own = (client.local_addr().unwrap(), world.tcp());
        let header = encode(version, own.0, own.1);
        let received = read_exactly(&mut web.accept(), header.len() + 5);
        assert_eq!(parse(&received), Parsed::Header(header.len(), Some(own)));
        assert_eq!(received[header.len()..], b"GET /"[..]);
    }
}

#[test]
fn client_of_a_trusted_proxy_keeps_its_address() {
    let web = Web::start();
    let rule = HandOnRule { proxy_protocol: Some(ProxyVersion::V2), ..web.plain() };
    let world = start(|config| {
        config.hand_on = vec![rule];
        config.proxies = vec!["127.0.0.0/8".parse().unwrap()];
    });
    let pair = ("192.0.2.7:4000".parse().unwrap(), "198.51.100.1:443".parse().unwrap());
    let mut client = connect(world.tcp());
    client.write_all(&encode(ProxyVersion::V1, pair.0, pair.1)).unwrap();
    client.write_all(b"GET /").unwrap();
    let expected = [&encode(ProxyVersion::V2, pair.0, pair.1)[..], b"GET /"].concat();
    assert_eq!(read_exactly(&mut web.accept(), expected.len()), expected);
}

#[test]
fn bulk_data_arrives_unchanged_and_half_close_is_passed_on() {
    let web = Web::start();
    let rules = vec![web.plain()];
    let world = sharing(rules);
    let bytes = |seed: u32| -> Vec<u8> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..24 << 20).map(next).collect()
    };
    let (up, down) = (bytes(1), bytes(2));
    let upload = [b"PUT ", &up[..]].concat();
    let client = connect(world.tcp());
    let sender = {
        let (mut client, upload) = (client.try_clone().unwrap(), upload.clone());
        thread::spawn(move || {
            client.write_all(&upload).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
        })
    };
    let mut server = web.accept();
    let mut received = Vec::new();
    server.read_to_end(&mut received).unwrap();
    assert!(received == upload, "{} bytes", received.len());
    sender.join().unwrap();
    // The client has closed its direction, but the opposite direction still works.
    let answer = {
        let down = down.clone();
        thread::spawn(move || server.write_all(&down).unwrap())
    };
    let mut received = Vec::new();
    { client }.read_to_end(&mut received).unwrap();
    assert!(received == down, "{} bytes", received.len());
    answer.join().unwrap();
    wait_for_end(&world, HandOnEnd::Closed, 1);
    let stats = stats(&world);
    assert_eq!((stats.from_clients, stats.from_servers), (upload.len() as u64, down.len() as u64));
    assert_eq!(stats.open, 0);
}

#[test]
fn server_may_close_its_direction_first() {
    let web = Web::start();
    let rules = vec![web.plain()];
    let world = sharing(rules);
    let mut client = connect(world.tcp());
    client.write_all(b"GET /").unwrap();
    let mut server = web.accept();
    server.write_all(b"answer").unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"answer");
    client.write_all(b" more").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut received = Vec::new();
    server.read_to_end(&mut received).unwrap();
    assert_eq!(received, b"GET / more");
    wait_for_end(&world, HandOnEnd::Closed, 1);
}

#[test]
fn half_closed_connection_ends_when_idle() {
    let web = Web::start();
    let rules = vec![web.plain()];
    let world = start_with(|config| {
        config.streams.hand_on = rules;
        config.half_closed = Duration::from_millis(200);
    });
    let mut client = connect(world.tcp());
    client.write_all(b"GET /").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let server = web.accept();
    wait_for_end(&world, HandOnEnd::HalfClosed, 1);
    drop(server);
}

fn reset(stream: TcpStream) {
    TcpSocket::from(OwnedFd::from(stream)).reset();
}

#[test]
fn resets_are_passed_on_in_both_directions() {
    let web = Web::start();
    let rules = vec![web.plain()];
    let world = sharing(rules);
    let pair = || {
        let mut client = connect(world.tcp());
        client.write_all(b"GET /").unwrap();
        let mut server = web.accept();
        read_exactly(&mut server, 5);
        (client, server)
    };
    let (mut client, server) = pair();
    reset(server);
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    wait_for_end(&world, HandOnEnd::ServerReset, 1);
    let (client, mut server) = pair();
    reset(client);
    assert_eq!(server.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    wait_for_end(&world, HandOnEnd::ClientReset, 1);
}

#[test]
fn unreachable_web_server_affects_only_its_own_clients() {
    let web = Web::start();
    let rules = vec![web.plain()];
    drop(web);
    let world = sharing(rules);
    let mut client = connect(world.tcp());
    client.write_all(b"GET /").unwrap();
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)));
    wait_for_end(&world, HandOnEnd::Unreachable, 1);
    world.client().ask(&binding(1));
}

#[test]
fn handed_on_connections_above_a_limit_are_closed() {
    let web = Web::start();
    for (limit, reason) in [("total", HandOnEnd::Limit), ("address", HandOnEnd::LimitAddress)] {
        let rules = vec![web.plain()];
        let world = start(|config| {
            config.hand_on = rules;
            let most = if limit == "total" {
                &mut config.limits.handed_on
            } else {
                &mut config.limits.handed_on_per_address
            };
            *most = 2;
        });
        let client = || {
            let mut client = connect(world.tcp());
            client.write_all(b"GET /").unwrap();
            client
        };
        let (first, _second) = (client(), client());
        let (server, _other) = (web.accept(), web.accept());
        assert_eq!(client().read(&mut [0]).unwrap(), 0, "{limit}");
        wait_for_end(&world, reason, 1);
        drop((first, server));
        eventually("a slot is free", || stats(&world).open == 1);
        let _third = client();
        web.accept();
    }
}

#[test]
fn slow_hello_times_out_and_counts_towards_the_limit_of_its_address() {
    let web = Web::start();
    let rules = vec![web.by_name(&["*"])];
    let world = start(|config| {
        config.hand_on = rules;
        config.limits.first_message = Duration::from_millis(700);
        config.limits.idle_connections_per_address = 4;
    });
    let sent = hello("www.example.org", &[]);
    let mut slow: Vec<_> = (0..4).map(|_| world.client()).collect();
    slow.iter_mut().for_each(|client| client.send(&sent[..sent.len() - 1]));
    slow.iter_mut().for_each(Client::ends);
    eventually("all slow connections are closed", || {
        let streams = world.streams();
        streams.closed(CloseReason::NoMessage) + streams.closed(CloseReason::LimitAddress) == 4
    });
    assert_eq!(stats(&world).taken(HandedOnBy::Tls), 0);
    // Handed-on connections do not count towards this limit.
    let mut clients: Vec<TcpStream> = Vec::new();
    for _ in 0..8 {
        let mut client = connect(world.tcp());
        client.write_all(&sent).unwrap();
        read_exactly(&mut web.accept(), sent.len());
        clients.push(client);
    }
    world.client().ask(&binding(1));
}

#[test]
fn handed_on_and_waiting_connections_of_an_address_are_limited_separately() {
    let web = Web::start();
    let rules = vec![web.plain()];
    let world = start(|config| {
        config.hand_on = rules;
        config.limits.handed_on_per_address = 3;
        config.limits.idle_connections_per_address = 2;
    });
    let from = |last: u8, words: &[u8]| {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, last], 0)).into()).unwrap();
        socket.connect(&world.tcp().into()).unwrap();
        let mut client = TcpStream::from(socket);
        client.write_all(words).unwrap();
        client
    };
    let open: Vec<_> = (0..3).map(|_| (from(9, b"GET /"), web.accept())).collect();
    for refused in 1..=4 {
        let mut client = from(9, b"GET /");
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        wait_for_end(&world, HandOnEnd::LimitAddress, refused);
    }
    // These bytes do not show yet which server the client wants; the third connection evicts the first.
    let undecided: Vec<_> = (0..3).map(|_| from(9, &[0, 1])).collect();
    world.wait_for_closed(CloseReason::LimitAddress, 1);
    eventually("each kind has its own slots", || (stats(&world).open, world.streams().open) == (3, 2));
    // Other addresses have their own slots.
    let _other = (from(10, b"GET /"), web.accept());
    eventually("the connection has a slot", || stats(&world).open == 4);
    drop((open, undecided));
}

/// A client counts towards the limits while its connection to the web server is pending.
#[test]
fn connecting_to_a_web_server_times_out_after_ten_seconds() {
    let web = Web::start();
    // The kernel drops SYNs while the backlog is full.
    rustix::net::listen(&web.0, 0).unwrap();
    let _filler = TcpStream::connect(web.at()).unwrap();
    let world = sharing(vec![web.plain()]);
    let mut client = connect(world.tcp());
    client.write_all(b"GET /").unwrap();
    eventually("the connection is pending", || stats(&world).open == 1);
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)));
    wait_for_end(&world, HandOnEnd::ConnectTimeout, 1);
}

#[test]
fn rule_for_the_server_itself_is_refused() {
    let port = turnpike_testkit::free_port(Ipv4Addr::LOCALHOST.into());
    let own = Ipv4Addr::new(192, 0, 2, 1);
    let start = |to: SocketAddr| {
        let rule = HandOnRule { selector: Selector::Plain, to, proxy_protocol: None };
        let config = configured(|config| {
            config.addresses = vec![own.into()];
            config.streams.listen = vec![(Ipv4Addr::UNSPECIFIED, port).into()];
            config.listeners_beside = vec![(own, 9641).into()];
            config.streams.hand_on = vec![rule];
        });
        Relay::start(&config, Arc::new(()), Arc::new(())).map(drop)
    };
    for to in [(own, port), (Ipv4Addr::new(127, 0, 0, 9), port), (own, 9641)] {
        let refused = start(to.into()).unwrap_err();
        assert!(matches!(refused, StartError::HandOnToItself { .. }), "{to:?}: {refused}");
    }
    for to in [(Ipv4Addr::new(192, 0, 2, 2), port), (own, 9642), (Ipv4Addr::LOCALHOST, 9641)] {
        start(to.into()).unwrap();
    }
}

#[test]
fn reload_changes_rules_for_new_connections_only() {
    let web = Web::start();
    let rules = vec![web.plain()];
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, turnpike_testkit::free_port(Ipv4Addr::LOCALHOST.into())));
    let with =
        |rules| configured(|config| (config.streams.listen, config.streams.hand_on) = (vec![at], rules));
    let world = World { relay: Relay::start(&with(rules), Arc::new(()), Arc::new(())).unwrap() };
    let mut client = connect(world.tcp());
    client.write_all(b"GET /").unwrap();
    let mut server = web.accept();
    read_exactly(&mut server, 5);
    let (config, mut layout) = (with(Vec::new()), world.relay.layout());
    layout.follow(&config.listen, &config.dtls.listen, &config.streams);
    let absent: Arc<dyn CredentialStore> = Arc::new(());
    world.relay.reconfigure(&config, &layout, &absent).unwrap();
    let mut other = world.client();
    other.send(b"\0\0\0\0GET / HTTP/1.1\r\n");
    other.ends();
    world.wait_for_closed(CloseReason::NotStun, 1);
    client.write_all(b"more").unwrap();
    assert_eq!(read_exactly(&mut server, 4), b"more");
}

#[test]
fn shutdown_resets_handed_on_clients() {
    let web = Web::start();
    let rules = vec![web.plain()];
    let world = sharing(rules);
    let mut client = connect(world.tcp());
    client.write_all(b"GET /").unwrap();
    let mut server = web.accept();
    read_exactly(&mut server, 5);
    eventually("an upgrade waits for the connection", || world.relay.left() == (0, 1));
    drop(world);
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(server.read(&mut [0]).unwrap(), 0);
}
