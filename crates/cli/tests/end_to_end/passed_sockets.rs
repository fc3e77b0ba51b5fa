//! Listeners bound and passed by a service manager (LISTEN_FDS, sd_listen_fds(3)): the program serves
//! clients that are already waiting in them, and the listeners outlive the program.

use crate::prelude::*;
use std::os::fd::OwnedFd;

/// Starts the binary with these two sockets as descriptors 3 and 4. A shell receives them as standard
/// input and output, because the standard library cannot pass other descriptors.
fn start_passing(sockets: [OwnedFd; 2], names: &str, arguments: &[&str]) -> Program {
    const LAUNCH: &str = "export LISTEN_PID=$$; exec \"$@\" 3<&0 4<&1 </dev/null >&2";
    let [first, second] = sockets;
    let mut command = Command::new("/bin/sh");
    command.args(["-c", LAUNCH, "sh", env!("CARGO_BIN_EXE_turnpike")]).args(arguments).env_clear();
    command.env("LISTEN_FDS", "2").env("LISTEN_FDNAMES", names);
    Program::start_with(command.stdin(Stdio::from(first)).stdout(Stdio::from(second)))
}

/// Listeners on one port, as a service manager holds them.
struct Unit {
    udp: UdpSocket,
    tcp: TcpListener,
    at: SocketAddr,
}

impl Unit {
    fn new() -> Self {
        let at = SocketAddr::new(V4, free_port(V4));
        Self { udp: UdpSocket::bind(at).expect("free"), tcp: TcpListener::bind(at).expect("free"), at }
    }

    fn start(&self, arguments: &[&str]) -> Program {
        let copies = [
            self.udp.try_clone().expect("a descriptor").into(),
            self.tcp.try_clone().expect("a descriptor").into(),
        ];
        start_passing(copies, "turnpike.socket:turnpike.socket", arguments)
    }
}

const SERVE: [&str; 9] = [
    "serve",
    "--admin",
    "off",
    "--user",
    "alice:secret",
    "--relay-ip",
    "127.0.0.1",
    "--allow-peer",
    "127.0.0.0/8",
];

#[test]
fn serve_uses_passed_listeners_with_a_worker_for_each() {
    let unit = Unit::new();
    let mut serve = unit.start(&SERVE);
    serve.line_with(&format!("listening on udp {}", unit.at));
    serve.line_with(&format!("listening on tcp {}", unit.at));
    let workers = serve.line_with("workers: ");
    assert!(workers.ends_with("workers: 1"), "{workers}");
    let listening = serve.lines().iter().filter(|line| line.contains("listening on ")).count();
    assert_eq!(listening, 2, "only passed listeners: {:?}", serve.lines());
    let reflect = Reflect::start(V4, &[]);
    for server in [format!("turn:{}", unit.at), format!("turn:{}?transport=tcp", unit.at)] {
        let load = Load::at(&server).to(reflect.address).with("--rate 100 --duration 1").run();
        assert_eq!(load.code, Some(0), "{server}: {}", load.output());
        assert_eq!(load.result()["lost"], 0, "{server}");
    }
    serve.signal("TERM");
    assert_eq!(serve.wait(SOON).code, Some(0));
}

#[test]
fn clients_waiting_in_a_passed_listener_survive_restarts() {
    let unit = Unit::new();
    let (udp, tcp) = (udp_echo(), tcp_echo());
    let rules = [format!("udp://{}={udp}", unit.at), format!("tcp://{}={tcp}", unit.at)];
    let arguments = ["forward", "--admin", "off", &rules[0], &rules[1]];
    for round in 0..2 {
        let mut stream = TcpStream::connect(unit.at).expect("the listener is open");
        stream.write_all(b"early").expect("the backlog has room");
        let client = UdpSocket::bind((V4, 0)).expect("loopback");
        client.set_read_timeout(Some(SOON)).expect("the data is sent");
        client.connect(unit.at).expect("an address");
        client.send(b"early").expect("the backlog has room");

        let forward = unit.start(&arguments);
        let mut answer = [0; 16];
        let len = client.recv(&mut answer).expect("served");
        assert_eq!(&answer[..len], b"early", "round {round}");
        stream.write_all(b" and late").expect("the write succeeds");
        let mut answer = [0; 14];
        stream.read_exact(&mut answer).expect("served");
        assert_eq!(&answer, b"early and late", "round {round}");
        drop((stream, client));
        forward.signal("TERM");
        let ended = forward.wait(SOON);
        assert_eq!(ended.code, Some(0), "round {round}: {}", ended.output());
    }
}

/// The service manager owns the port, so a changed rule must reuse the passed socket.
#[test]
fn changed_rule_keeps_its_passed_listener() {
    let unit = Unit::new();
    let (udp, tcp) = (udp_echo(), tcp_echo());
    let dir = Dir::new();
    let file = |idle: u32| {
        let rule = |transport: &str, target: SocketAddr| {
            format!(
                "[[rule]]\nprotocol = \"{transport}\"\nlisten = \"{}\"\ntarget = \"{target}\"\nidle = {idle}\n",
                unit.at
            )
        };
        dir.file("rules.toml", &(rule("udp", udp) + &rule("tcp", tcp)))
    };
    let path = file(30);
    let mut forward = unit.start(&["forward", "--admin", "off", "-c", path.to_str().expect("UTF-8")]);
    forward.line_with("data path");
    assert_eq!(say_udp(unit.at, "one"), "one");
    file(31);
    forward.signal("HUP");
    let reloaded = forward.line_with("rules reloaded");
    assert!(reloaded.contains("changed"), "{reloaded}");
    eventually("UDP is forwarded by the new rule", || say_udp(unit.at, "two") == "two");
    let mut stream = TcpStream::connect(unit.at).expect("the rule accepts connections");
    assert_eq!(say(&mut stream, "two"), "two");
}

#[test]
fn unused_passed_socket_aborts_startup_and_is_named() {
    let unit = Unit::new();
    let rule = format!("udp://{}={}", unit.at, udp_echo());
    let ended = unit.start(&["forward", "--admin", "off", &rule]).wait(SOON).ended(1);
    let named = format!("tcp {} (\"turnpike.socket\"), but no listener is configured there", unit.at);
    assert!(ended.stderr.contains(&named), "{}", ended.stderr);
}

#[test]
fn two_passed_sockets_with_the_same_address_serve_two_workers() {
    let at = SocketAddr::new(V4, free_port(V4));
    let bound = || {
        let socket =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None).expect("a socket");
        socket.set_reuse_port(true).expect("Linux supports SO_REUSEPORT");
        socket.bind(&at.into()).expect("free");
        OwnedFd::from(socket)
    };
    let names = "turnpike.socket:turnpike.socket";
    let mut serve = start_passing([bound(), bound()], names, &SERVE);
    let workers = serve.line_with("workers: ");
    assert!(workers.ends_with("workers: 2"), "{workers}");
    let reflect = Reflect::start(V4, &[]);
    let load = Load::new(at).to(reflect.address).with("--clients 16 --rate 200 --duration 1");
    let load = load.run().ended(0);
    assert_eq!(load.result()["lost"], 0);
    drop(serve);
    start_passing([bound(), bound()], names, &[&SERVE[..], &["--workers", "1"]].concat())
        .wait(SOON)
        .ended(1)
        .says("more sockets for this address (2) than workers (1)");
}
