//! Floods a server, without saturating it, while other clients relay through it: nothing is sent faster than the server can read or answer
//! it.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
};

use serde_json::json;
use turnpike_testkit::stun::{self, attribute::*, kind::*, xor_address};

use super::{
    strangers::{Packet, are_read, are_read_by, half_open, pour_in_as_read},
    wire::{User, Wire, client_hello, handshake},
};
use turnpike_trials::{Dir, PASSWORD, Program, REALM, Serve, USER, V4, address_after, fetch, post, turnpike};

const FORBIDDEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 9);

/// Sends one round of messages and returns their number; the argument is the number of earlier rounds.
pub(super) type Turn<'a> = Box<dyn FnMut(u32) -> u32 + 'a>;

pub(super) struct Flood {
    pub(super) name: &'static str,
    pub(super) begin: Box<dyn for<'a> Fn(&'a Serve) -> Turn<'a>>,
}

fn flood(name: &'static str, begin: impl for<'a> Fn(&'a Serve) -> Turn<'a> + 'static) -> Flood {
    Flood { name, begin: Box::new(begin) }
}

pub(super) fn all(key: &str) -> Vec<Flood> {
    let others = others().into_iter().chain([application(key.to_owned())]).collect();
    [Packet::ALL.map(packets).into(), streams(), users(), others].into_iter().flatten().collect()
}

/// Datagrams from forged sources; nothing receives the responses.
fn packets(packet: Packet) -> Flood {
    flood(packet.name(), move |serve| {
        let server = match packet {
            Packet::ClientHello => serve.address_of("dtls", V4),
            _ => serve.address(V4),
        };
        Box::new(move |turn| {
            pour_in_as_read(packet, server, turn % 400 * 20, 20);
            20
        })
    })
}

fn streams() -> Vec<Flood> {
    let bytes = |name: &'static str, bytes: Vec<u8>| {
        flood(name, move |serve| {
            let (server, bytes) = (serve.address_of("tls", V4), bytes.clone());
            Box::new(move |_| {
                for _ in 0..5 {
                    let mut stream = TcpStream::connect(server).expect("the listener accepts connections");
                    // A connection that the server has already closed also counts as answered.
                    let _ = stream.write_all(&bytes);
                }
                5
            })
        })
    };
    let requests = |name: &'static str, wire: fn(SocketAddr) -> Wire| {
        flood(name, move |serve| {
            let mut wire = wire(serve.address_of("tls", V4));
            Box::new(move |_| {
                (0..10).for_each(|_| wire.send(&stun::allocate_request(None)));
                (0..10).for_each(|_| assert_eq!(wire.receive().error(), Some(401)));
                10
            })
        })
    };
    vec![
        bytes("TCP connections closed immediately", Vec::new()),
        bytes("TCP connections with garbage", b"GET / HTTP/1.0\r\n\r\n".to_vec()),
        requests("Allocates over TCP without a credential", Wire::tcp),
        bytes("TLS connections with half a ClientHello", vec![0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3]),
        flood("TLS connections with only a ClientHello", |serve| {
            let (server, hello) = (serve.address_of("tls", V4), client_hello());
            Box::new(move |_| {
                let mut stream = TcpStream::connect(server).expect("the listener accepts connections");
                stream.write_all(&hello).expect("the connection is open");
                stream.read_exact(&mut [0]).expect("a ServerHello");
                1
            })
        }),
        flood("TLS connections with garbage", |serve| {
            let server = serve.address_of("tls", V4);
            Box::new(move |_| {
                let mut stream = handshake(server);
                stream.write_all(b"GET / HTTP/1.0\r\n\r\n").expect("the connection is open");
                let _ = stream.read(&mut [0; 64]);
                1
            })
        }),
        requests("Allocates over TLS without a credential", Wire::tls),
        flood("DTLS handshakes stopped after a valid cookie", |serve| {
            let server = serve.address_of("dtls", V4);
            Box::new(move |turn| {
                drop(half_open(server, turn));
                1
            })
        }),
    ]
}

fn users() -> Vec<Flood> {
    let over_udp = |serve: &Serve| User::new(Wire::udp(serve.address(V4)), USER, PASSWORD);
    let peer = || xor_address(FORBIDDEN, 0);
    // Sends the request repeatedly; each must be refused with this code.
    let refused = |user: &mut User, message_type: u16, attributes: &[(u16, &[u8])], code: u16| {
        (0..10).for_each(|_| user.say(message_type, attributes));
        (0..10).for_each(|_| assert_eq!(user.wire.receive().error(), Some(code)));
        10
    };
    // Over UDP, the server rate-limits identical refusals to a 5-tuple.
    let refused_again = |user: &mut User,
                         message_type: u16,
                         attributes: &[(u16, &[u8])],
                         server: SocketAddr| {
        (0..10).for_each(|_| user.say(message_type, attributes));
        are_read(server);
        assert!(user.wire.arrived().iter().all(|answer| answer.error().is_some()), "a request was accepted");
        10
    };
    vec![
        flood("users: CreatePermission, refused", move |serve| {
            let (mut user, peer, server) = (over_udp(serve), peer(), serve.address(V4));
            user.allocate(17, &[]);
            Box::new(move |_| {
                refused_again(&mut user, CREATE_PERMISSION, &[(XOR_PEER_ADDRESS, &peer)], server)
            })
        }),
        flood("users: ChannelBind, refused", move |serve| {
            let (mut user, peer, server) = (over_udp(serve), peer(), serve.address(V4));
            user.allocate(17, &[]);
            Box::new(move |_| {
                let asked = [(CHANNEL_NUMBER, &[0x40, 0, 0, 0][..]), (XOR_PEER_ADDRESS, &peer)];
                refused_again(&mut user, CHANNEL_BIND, &asked, server)
            })
        }),
        flood("users: Send without a permission", move |serve| {
            let (mut user, peer) = (over_udp(serve), peer());
            user.allocate(17, &[]);
            Box::new(move |_| {
                let asked = [(XOR_PEER_ADDRESS, &peer[..]), (PAYLOAD, b"for nobody")];
                (0..20).for_each(|_| user.wire.send(&stun::plain_message(SEND, &asked)));
                are_read(serve.address(V4));
                20
            })
        }),
        flood("users: ChannelData on an unbound channel", move |serve| {
            let mut user = over_udp(serve);
            user.allocate(17, &[]);
            Box::new(move |_| {
                (0..20).for_each(|_| user.wire.send(&[0x40, 1, 0, 4, b'n', b'o', b'n', b'e']));
                are_read(serve.address(V4));
                20
            })
        }),
        flood("users: Connect, refused", move |serve| {
            let (mut user, peer) =
                (User::new(Wire::tcp(serve.address_of("tcp", V4)), USER, PASSWORD), peer());
            user.allocate(6, &[]);
            Box::new(move |_| refused(&mut user, CONNECT, &[(XOR_PEER_ADDRESS, &peer)], 403))
        }),
        flood("users: ConnectionBind to an unknown connection", move |serve| {
            let server = serve.address_of("tcp", V4);
            Box::new(move |turn| {
                let mut user = User::new(Wire::tcp(server), USER, PASSWORD);
                let answer = user.ask(CONNECTION_BIND, &[(CONNECTION_ID, &turn.to_be_bytes())]);
                assert!(answer.error().is_some(), "a request was accepted");
                1
            })
        }),
        flood("users: Refresh with an invalid ticket", move |serve| {
            let mut of_ticket = over_udp(serve);
            let mut ticket = of_ticket.allocate(17, &[(MOBILITY_TICKET, &[])]).attribute(MOBILITY_TICKET);
            *ticket.last_mut().expect("not empty") ^= 1;
            let (mut user, server) = (over_udp(serve), serve.address(V4));
            Box::new(move |_| {
                let _of_ticket = &of_ticket;
                refused_again(&mut user, REFRESH, &[(MOBILITY_TICKET, &ticket)], server)
            })
        }),
        flood("users: Allocate with a wrong password", move |serve| {
            let mut user = User::new(Wire::udp(serve.address(V4)), USER, "guessed");
            Box::new(move |_| refused(&mut user, ALLOCATE, &[(REQUESTED_TRANSPORT, &[17, 0, 0, 0])], 401))
        }),
    ]
}

fn others() -> Vec<Flood> {
    vec![
        flood("requests to the admin interface", |serve| {
            Box::new(move |_| {
                for path in ["/metrics", "/v1/status", "/v1/allocations", "/nothing"] {
                    let _ = fetch(serve.admin(), path);
                }
                4
            })
        }),
        flood("changes at the admin interface with a wrong token", |serve| {
            Box::new(move |turn| {
                let path = ["/v1/reload", "/v1/drain", "/v1/credentials", "/v1/users"][turn as usize % 4];
                let answer = post(serve.admin(), path, "guessed", &json!({}));
                assert!(answer.is_ok_and(|(status, _)| (400..500).contains(&status)), "{path}");
                1
            })
        }),
        flood("reloads", |serve| {
            Box::new(move |_| {
                serve.program.signal("HUP");
                1
            })
        }),
    ]
}

/// The credentials API, and the key of an application that may send this many requests per second.
pub(super) struct Applications {
    dir: Dir,
    pub(super) key: String,
}

impl Applications {
    pub(super) fn new() -> Self {
        let dir = Dir::new();
        dir.file("turnpike.toml", "[credentials]\nlisten = [\"127.0.0.1:0\"]\nnames = [\"127.0.0.1\"]\n");
        let state = dir.at("state").display().to_string();
        let said = |words: &[&str]| {
            let ended =
                Program::run(&mut turnpike(&[words, &["--json", "--state", &state]].concat())).ended(0);
            ended.result()
        };
        said(&["secret", "rotate", REALM]);
        let made = said(&["key", "add", "shop", "--rate", "100"]);
        let key = made["key"].as_str().expect("the key is printed").to_owned();
        Self { dir, key }
    }

    pub(super) fn flags(&self) -> [String; 4] {
        let path = |name: &str| self.dir.at(name).display().to_string();
        ["-c".to_owned(), path("turnpike.toml"), "--state".to_owned(), path("state")]
    }
}

fn application(key: String) -> Flood {
    flood("application credentials above the rate limit", move |serve| {
        let label = "get credentials on http://";
        let lines = serve.program.lines();
        let line = lines.iter().find(|line| line.contains(label)).expect("the log contains the address");
        let (api, key) = (address_after(line, label), key.clone());
        Box::new(move |_| {
            for _ in 0..4 {
                let answer = post(api, "/v1/credentials", &key, &json!({ "user": "anybody" }));
                assert!(answer.is_ok_and(|(status, _)| [200, 429].contains(&status)));
            }
            4
        })
    })
}

/// Packets from forged addresses over links; the server, process `pid`, has a route to all of them.
pub(super) fn spoofed(server: SocketAddr, pid: u32, turn: u32) -> u32 {
    for number in turn % 400 * 10..turn % 400 * 10 + 10 {
        let source = Ipv4Addr::from_bits(0xC612_0001 + number);
        let socket = UdpSocket::bind((source, 0)).expect("the test has a route for the address");
        for message in [stun::allocate_request(None), stun::plain_message(BINDING, &[])] {
            socket.send_to(&message, server).expect("the link accepts the packet");
        }
    }
    are_read_by(pid, server);
    20
}
