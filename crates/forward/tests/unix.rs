//! Unix sockets as listeners and as targets.

use crate::prelude::*;
use std::os::unix::{
    fs::{FileTypeExt as _, PermissionsExt as _},
    net::UnixListener,
};

fn name(path: &Path) -> UnixName {
    path.to_str().unwrap().parse::<UnixName>().unwrap()
}

fn unix_endpoint(name: UnixName) -> Endpoint {
    Endpoint { host: Host::Unix(name), ports: PortRange { first: 0, last: 0 }, weight: 1 }
}

fn listening_at(path: &Path, target: std::net::SocketAddr) -> Rule {
    Rule { bind: Bind::Unix(name(path)), ..rule("r", target) }
}

fn connect(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).expect("the forwarder listens");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn exactly(stream: &mut impl Read, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn all(stream: &mut impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}

fn start_error(rules: &[Rule]) -> String {
    let log = Arc::new(support::Reports::default());
    Forwarder::start(&settings(), rules, log).err().expect("the forwarder does not start").to_string()
}

#[test]
fn megabytes_and_half_close_pass_between_unix_and_tcp() {
    for copy in [CopyMode::Auto, CopyMode::Splice, CopyMode::Buffer] {
        let directory = Dir::new();
        let (inside, outside) = (directory.at("in"), directory.at("app"));
        let app = UnixListener::bind(&outside).unwrap();
        let tcp = Rule {
            targets: vec![unix_endpoint(name(&outside))],
            copy,
            ..rule("tcp", ([127, 0, 0, 1], 1).into())
        };
        let running = Running::start(&[tcp]);
        // Two forwarders in a chain: from Unix to TCP to Unix.
        let first = Running::start(&[Rule { copy, ..listening_at(&inside, running.address("tcp")) }]);
        let client = connect(&inside);
        let sent = support::pattern(0, 5_000_000, 3);
        let writer = {
            let (mut client, sent) = (client.try_clone().unwrap(), sent.clone());
            std::thread::spawn(move || {
                client.write_all(&sent).unwrap();
                client.shutdown(Shutdown::Write).unwrap();
            })
        };
        let (mut served, _) = app.accept().unwrap();
        served.set_read_timeout(Some(PATIENCE)).unwrap();
        assert!(all(&mut served) == sent, "{copy:?}: not all bytes arrived");
        served.write_all(b"and back").unwrap();
        drop(served);
        writer.join().unwrap();
        assert_eq!(all(&mut { client }), b"and back", "{copy:?}");
        let report = first.log.wait(1).remove(0);
        assert_eq!((report.reason, report.to_target, report.to_client), (EndReason::Finished, 5_000_000, 8));
        assert_eq!(report.client.to_string(), format!("unix:{}", inside.display()));
        let report = running.log.wait(1).remove(0);
        assert_eq!(report.target.unwrap().to_string(), format!("unix:{}", outside.display()));
    }
}

#[test]
fn workers_share_a_unix_listener_and_its_file_is_removed() {
    let directory = Dir::new();
    let path = directory.at("in");
    let mut settings = settings();
    settings.workers = 3;
    let running = Running::start_with(&settings, &[listening_at(&path, greeter("a"))]);
    let mut open: Vec<_> = (0..50).map(|_| connect(&path)).collect();
    open.iter_mut().for_each(|client| assert_eq!(exactly(client, 1), b"a"));
    assert!(std::fs::metadata(&path).unwrap().file_type().is_socket());
    running.forwarder.drain();
    assert!(!path.exists(), "the path is not free while connections are drained");
    open[0].write_all(b"x").unwrap();
    assert_eq!(exactly(&mut open[0], 1), b"x");
}

#[test]
fn only_a_stale_socket_file_is_replaced() {
    let directory = Dir::new();
    let path = directory.at("in");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "no socket file is left");
    let running = Running::start(&[listening_at(&path, greeter("a"))]);
    assert_eq!(exactly(&mut connect(&path), 1), b"a");
    let told = start_error(&[listening_at(&path, greeter("b"))]);
    assert!(told.starts_with(&format!("rule r: cannot listen on unix:{}: ", path.display())), "{told}");
    assert!(
        told.ends_with(
            "another program or listener has this path: stop it, or choose another path in this rule"
        ),
        "{told}"
    );
    assert_eq!(exactly(&mut connect(&path), 1), b"a", "the listener is unchanged");
    drop(running);
    assert!(!path.exists());
    std::fs::write(&path, "precious").unwrap();
    let told = start_error(&[listening_at(&path, greeter("b"))]);
    assert!(told.contains("a file that is not a socket is in the way; choose another path"), "{told}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let told = start_error(&[listening_at(&directory.at("no/such"), greeter("b"))]);
    assert!(told.ends_with("create its directory first, or choose another path in this rule"), "{told}");
}

#[test]
fn file_that_replaced_the_socket_is_kept() {
    let directory = Dir::new();
    let path = directory.at("in");
    let running = Running::start(&[listening_at(&path, greeter("a"))]);
    std::fs::remove_file(&path).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    drop(running);
    assert!(path.exists());
}

#[test]
fn reload_keeps_the_listener_and_changes_target_and_permissions() {
    let directory = Dir::new();
    let path = directory.at("in");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let old = Rule { socket_mode: Some(0o600), ..listening_at(&path, greeter("a")) };
    let running = Running::start(&[old]);
    assert_eq!(mode(&path), 0o600);
    let mut before = connect(&path);
    assert_eq!(exactly(&mut before, 1), b"a");
    let inode = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&path).unwrap());
    let new = Rule { socket_mode: Some(0o666), ..listening_at(&path, greeter("b")) };
    running.forwarder.reload(&settings(), &[new, rule("other", greeter("c"))]).unwrap();
    assert_eq!(mode(&path), 0o666);
    assert_eq!(std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&path).unwrap()), inode);
    assert_eq!(exactly(&mut connect(&path), 1), b"b");
    before.write_all(b"x").unwrap();
    assert_eq!(exactly(&mut before, 1), b"x");
    running.forwarder.reload(&settings(), &[rule("other", greeter("c"))]).unwrap();
    assert!(!path.exists(), "the file was not removed with its rule");
}

#[test]
fn abstract_socket_needs_no_file() {
    let text = format!("@turnpike-test-{}", std::process::id());
    let name = text.parse::<UnixName>().unwrap();
    let inner = Rule { bind: Bind::Unix(name.clone()), ..rule("inner", greeter("a")) };
    let outer = Rule { targets: vec![unix_endpoint(name)], ..rule("outer", ([127, 0, 0, 1], 1).into()) };
    let running = Running::start(&[inner, outer]);
    assert_eq!(read_exactly(&mut running.connect("outer"), 1), b"a");
    let told = start_error(&[Rule {
        bind: Bind::Unix(text.parse::<UnixName>().unwrap()),
        ..rule("r", greeter("b"))
    }]);
    assert!(told.contains("another program or listener has this path"), "{told}");
}

#[test]
fn proxy_header_for_a_unix_client_is_unknown_or_the_one_it_sent() {
    for (version, unknown) in [
        (ProxyVersion::V1, &b"PROXY UNKNOWN\r\n"[..]),
        (ProxyVersion::V2, b"\r\n\r\n\0\r\nQUIT\n\x21\x00\x00\x00"),
    ] {
        let directory = Dir::new();
        let path = directory.at("in");
        let (server, target) = listener();
        let mut sending = listening_at(&path, target);
        sending.send_proxy = Some(version);
        let running = Running::start(&[sending.clone()]);
        let mut client = connect(&path);
        client.write_all(b"x").unwrap();
        let expected = [unknown, b"x"].concat();
        assert_eq!(read_exactly(&mut accept(&server), expected.len()), expected);
        drop((client, running));
    }
    let directory = Dir::new();
    let path = directory.at("in");
    let (server, target) = listener();
    let mut rule = listening_at(&path, target);
    (rule.proxy_protocol_from, rule.send_proxy) = (vec![Proxy::Unix], Some(ProxyVersion::V1));
    let running = Running::start(&[rule]);
    let mut client = connect(&path);
    client.write_all(b"PROXY TCP4 192.0.2.7 10.0.0.1 4660 443\r\nx").unwrap();
    assert_eq!(read_exactly(&mut accept(&server), 41), b"PROXY TCP4 192.0.2.7 10.0.0.1 4660 443\r\nx");
    drop(client);
    assert_eq!(running.log.wait(1)[0].client.to_string(), "192.0.2.7:4660");
}

#[test]
fn missing_unix_target_is_skipped_until_it_is_healthy() {
    let directory = Dir::new();
    let path = directory.at("app");
    let mut rule = rule("r", greeter("b"));
    rule.targets.insert(0, unix_endpoint(name(&path)));
    rule.balance = Balance::Failover;
    rule.health = Some(Duration::from_millis(100));
    let running = Running::start(&[rule]);
    assert_eq!(read_exactly(&mut running.connect("r"), 1), b"b");
    let app = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for mut stream in app.incoming().flatten() {
            let _ = stream.write_all(b"a");
        }
    });
    eventually("the first target answers again", || read_exactly(&mut running.connect("r"), 1) == b"a");
}

/// TCP would retransmit its SYN, but a Unix socket reports a full queue immediately.
#[test]
fn connect_waits_while_the_queue_is_full() {
    let directory = Dir::new();
    let path = directory.at("app");
    let app = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    app.bind(&socket2::SockAddr::unix(&path).unwrap()).unwrap();
    app.listen(0).unwrap();
    let app = UnixListener::from(std::os::fd::OwnedFd::from(app));
    let _first = UnixStream::connect(&path).unwrap();
    let mut rule = rule("r", ([127, 0, 0, 1], 1).into());
    rule.targets = vec![unix_endpoint(name(&path))];
    let running = Running::start(&[rule]);
    let mut client = running.connect("r");
    client.write_all(b"x").unwrap();
    // The client is accepted but not connected to the target yet, so it waits.
    eventually("the client is accepted", || running.snapshot("r").active == 1);
    drop(app.accept().unwrap());
    let (mut served, _) = app.accept().unwrap();
    served.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(exactly(&mut served, 1), b"x");
}

/// Descriptors passed over a Unix socket end a read early; the data after them must not be lost.
#[test]
fn data_after_passed_descriptors_arrives() {
    let directory = Dir::new();
    let path = directory.at("in");
    let (server, target) = listener();
    let running = Running::start(&[listening_at(&path, target)]);
    let mut client = connect(&path);
    let mut server = accept(&server);
    // One SCM_RIGHTS message with one descriptor, laid out as in cmsg(3).
    let mut control = 20_usize.to_ne_bytes().to_vec();
    let (sol_socket, scm_rights) = (1, 1);
    for word in [sol_socket, scm_rights, std::os::fd::AsRawFd::as_raw_fd(&client), 0] {
        control.extend(i32::to_ne_bytes(word));
    }
    for _ in 0..100 {
        let passing = [std::io::IoSlice::new(b"abc")];
        let message = socket2::MsgHdr::new().with_buffers(&passing).with_control(&control);
        assert_eq!(socket2::SockRef::from(&client).sendmsg(&message, 0).unwrap(), 3);
        client.write_all(b"defg").unwrap();
        assert_eq!(read_exactly(&mut server, 7), b"abcdefg");
    }
    drop((client, running));
}

#[test]
fn udp_rules_cannot_listen_on_a_unix_socket() {
    let directory = Dir::new();
    let mut rule = listening_at(&directory.at("in"), greeter("a"));
    rule.protocol = turnpike_forward::Protocol::Udp;
    assert!(start_error(&[rule]).ends_with("only rules from TCP to TCP can listen on a Unix socket"));
}
