//! NAT behaviour discovery (RFC 5780) over real sockets: responses leave from the requested address and port.

use crate::prelude::*;
use turnpike_testkit::stun::{self, attribute::*};

fn binding(kind: u16, value: &[u8]) -> Vec<u8> {
    stun::plain_message(stun::kind::BINDING, &[(kind, value)])
}

fn client() -> UdpSocket {
    let socket = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    socket.set_read_timeout(Some(SOON)).expect("not zero");
    socket
}

/// Two free ports and all four endpoints, in the order in which CHANGE-REQUEST's flags select them, starting
/// with the first.
fn endpoints() -> ([u16; 2], [SocketAddr; 4]) {
    let [first, second] = [free_port(V4), free_port(V4)];
    let at = |host: u8, port| SocketAddr::from(([127, 0, 0, host], port));
    ([first, second], [at(1, first), at(1, second), at(2, first), at(2, second)])
}

fn file(dir: &Dir, ports: [u16; 2], more: &str) -> String {
    let text =
        format!("[nat_discovery]\naddresses = [\"127.0.0.1\", \"127.0.0.2\"]\nports = {ports:?}\n{more}");
    dir.file("turnpike.toml", &text).to_str().expect("the test's path is UTF-8").to_owned()
}

fn answers_come_from_where_flags_say(all: &[SocketAddr; 4]) {
    let socket = client();
    for (here, server) in all.iter().enumerate() {
        for flags in [0, 2, 4, 6] {
            socket.send_to(&binding(CHANGE_REQUEST, &[0, 0, 0, flags]), server).expect("the request is sent");
            let mut answer = [0; 2048];
            let (length, from) = socket.recv_from(&mut answer).expect("a response arrives");
            assert_eq!(from, all[here ^ usize::from(flags >> 1)], "{server} {flags}");
            assert_eq!(answer[..2], [1, 1], "{:x?}", &answer[..length]);
        }
    }
}

#[test]
fn response_leaves_from_the_requested_address_and_port() {
    let dir = Dir::new();
    let (ports, all) = endpoints();
    let config = file(&dir, ports, "");
    let serve = Serve::start_bare(&["-c", &config, "--relay-ip", "127.0.0.1", "--workers", "2"]);
    answers_come_from_where_flags_say(&all);
    let asker = client();
    let other = client();
    let port = other.local_addr().expect("the socket is bound").port();
    asker.send_to(&binding(RESPONSE_PORT, &port.to_be_bytes()), all[0]).expect("the request is sent");
    let (_, from) = other.recv_from(&mut [0; 2048]).expect("the response arrives on the requested port");
    assert_eq!(from, all[0]);
    let padded = binding(PADDING, &[7; 3000]);
    asker.send_to(&padded, all[0]).expect("the request is sent");
    let (length, _) = asker.recv_from(&mut [0; 4096]).expect("a response arrives");
    assert!((1500..1600).contains(&length), "{length}");
    assert_eq!(serve.health(), Some(200));
}

/// One wildcard listener on the first port serves both addresses; listeners on the second port are added.
#[test]
fn wildcard_listener_answers_for_each_of_its_addresses() {
    let dir = Dir::new();
    let (ports, all) = endpoints();
    let config = file(&dir, ports, "");
    let listen = format!("0.0.0.0:{}", ports[0]);
    let arguments = ["serve", "-c", &config, "--listen", &listen, "--relay-ip", "127.0.0.1"];
    let mut program =
        Program::start(&mut turnpike(&[&arguments[..], &["--admin", "off", "--user", "a:b"]].concat()));
    for wanted in [SocketAddr::from(([0, 0, 0, 0], ports[0])), all[1], all[3]] {
        let line = program.line_with(&format!("listening on udp {wanted}"));
        assert_eq!(address_after(&line, "listening on udp "), wanted);
    }
    program.line_with("data path");
    answers_come_from_where_flags_say(&all);
}
