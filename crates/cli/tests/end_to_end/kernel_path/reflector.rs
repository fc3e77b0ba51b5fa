//! `reflect --datapath kernel`: the kernel returns datagrams that are addressed to the reflector, and no
//! others.

use crate::prelude::*;
use std::io::ErrorKind;

use socket2::{Domain, Protocol, Socket, Type};

use super::{CLIENT, Links, SERVER, on_links, operator::unprivileged};

/// Larger than the links' MTU, so it arrives in fragments.
const FRAGMENTED: usize = 4000;

fn reflect(links: &Links, more: &[&str]) -> Program {
    let mut command = links.command(&turnpike(&[&["reflect", "--datapath", "kernel"], more].concat()));
    Program::start(&mut command)
}

fn end(program: Program) -> Finished {
    program.signal("TERM");
    program.wait(SOON)
}

fn number(said: &str, text: &str) -> u64 {
    let rest = said.split(text).nth(1).unwrap_or_else(|| panic!("no {text:?} in {said}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("no number after {text:?} in {said}"))
}

fn client(from: IpAddr, to: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind((from, 0)).unwrap();
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket
}

fn comes_back(socket: &UdpSocket, payload: &[u8]) -> bool {
    socket.send(payload).unwrap();
    let mut buffer = [0; 1 << 16];
    match socket.recv(&mut buffer) {
        Ok(length) => &buffer[..length] == payload,
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn kernel_returns_datagrams_from_links() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let mut program = reflect(links, &["--listen", "10.77.1.1:9001", "--listen", "[fd77:1::1]:9001"]);
        let line = program.line_with("in-kernel reflection on");
        assert!(line.ends_with("in-kernel reflection on c, p"), "{line}");
        let (mut lone, mut fragmented) = (0, 0);
        // Datagrams are returned even if the sender has computed the checksums, as on a wire.
        for offload in ["on", "off"] {
            run("ethtool", &["-K", "c", "tx", offload]);
            for family in 0..2 {
                let socket = client(CLIENT[family], SocketAddr::new(SERVER[family], 9001));
                for size in [0, 1, 2, 7, 120, 161, 1200, 1452] {
                    let payload: Vec<u8> = (0..=u8::MAX).cycle().skip(size).take(size).collect();
                    assert!(comes_back(&socket, &payload), "{size} bytes, family {family}, tx {offload}");
                    lone += 1;
                }
                assert!(comes_back(&socket, &[7; FRAGMENTED]), "family {family}, tx {offload}");
                fragmented += 1;
            }
        }
        let said = end(program).output();
        assert_eq!(number(&said, "returned in the kernel: "), lone, "{said}");
        assert_eq!(number(&said, "datagrams: "), lone + fragmented, "{said}");
        let absent = client(CLIENT[0], SocketAddr::new(SERVER[0], 9001));
        absent.send(b"anybody?").unwrap();
        assert_eq!(absent.recv(&mut [0; 64]).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn gro_merged_datagrams_all_return() {
    on_links(turnpike_testkit::this_test!(), |links| {
        links.inside(&["ethtool", "-K", "c", "gro", "on"]);
        let mut program = reflect(links, &["--listen", "10.77.1.1:9001"]);
        program.line_with("in-kernel reflection on");
        for burst in ["1", "16"] {
            let load =
                ["load", "udp", "10.77.1.1:9001", "--clients", "4", "--rate", "4000", "--duration", "1"];
            let run = Program::run(&mut turnpike(&[&load[..], &["--burst", burst, "--json", "-"]].concat()))
                .ended(0);
            let result: serde_json::Value = serde_json::from_str(&run.stdout).expect("JSON");
            assert_eq!(result["received"], result["sent"], "{result}");
            assert!(result["sent"].as_u64().is_some_and(|sent| sent > 1000), "{result}");
            assert_eq!(result["reordered"], 0, "{result}");
        }
        let said = end(program).output();
        let in_kernel = number(&said, "returned in the kernel: ");
        assert!(in_kernel > 2000, "{said}");
        assert_eq!(number(&said, "datagrams: "), in_kernel, "{said}");
    });
}

/// The kernel drops a datagram whose UDP length exceeds the packet, and truncates one whose UDP length is
/// shorter.
#[test]
fn mismatched_lengths_are_left_to_user_space() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let to: SocketAddr = "10.77.1.1:9001".parse().unwrap();
        let mut program = reflect(links, &["--listen", "10.77.1.1:9001"]);
        program.line_with("in-kernel reflection on");
        let socket = client(CLIENT[0], to);
        let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255))).unwrap();
        let says = |length: u16| {
            let mut packet = vec![0x45, 0, 0, 0, 0, 1, 0, 0, 64, 17, 0, 0];
            for address in [CLIENT[0], SERVER[0]] {
                let IpAddr::V4(address) = address else { panic!("not an IPv4 address") };
                packet.extend(address.octets());
            }
            for word in [socket.local_addr().unwrap().port(), to.port(), length, 0] {
                packet.extend(word.to_be_bytes());
            }
            packet.extend(b"payload");
            raw.send_to(&packet, &to.into()).unwrap();
        };
        // The last two are the actual length and a shorter one.
        for length in [0, 7, 16, u16::MAX, 15, 11] {
            says(length);
        }
        let mut buffer = [0; 64];
        for expected in [&b"payload"[..], b"pay"] {
            let length = socket.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], expected);
        }
        let said = end(program).output();
        assert_eq!(number(&said, "returned in the kernel: "), 1, "{said}");
        assert_eq!(number(&said, "datagrams: "), 2, "{said}");
    });
}

/// A wildcard listener owns the machine's addresses but not those that the machine forwards to.
#[test]
fn forwarded_packets_are_not_reflected() {
    on_links(turnpike_testkit::this_test!(), |links| {
        // Addressed to a machine behind the reflector's; in fact, it is this machine, on its other link.
        links.inside(&["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]);
        links.inside(&["ip", "addr", "add", "10.78.0.1/32", "dev", "lo"]);
        links.inside(&["ip", "route", "add", "10.99.0.0/16", "via", "10.77.2.2"]);
        run("ip", &["route", "add", "10.78.0.0/16", "via", "10.77.1.1"]);
        run("ip", &["route", "add", "10.99.0.0/16", "via", "10.77.1.1"]);
        let mut program = reflect(links, &["--listen", "0.0.0.0:9001"]);
        program.line_with("in-kernel reflection on");
        for own in ["10.77.1.1", "10.77.2.1", "10.78.0.1"] {
            let socket = client(CLIENT[0], SocketAddr::new(own.parse().unwrap(), 9001));
            assert!(comes_back(&socket, b"mine"), "{own}");
        }
        for (other, port) in [("10.99.0.1", 9001), ("10.77.1.1", 9002)] {
            let socket = UdpSocket::bind((CLIENT[0], 0)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            socket.send_to(b"not mine", (other, port)).unwrap();
            assert!(socket.recv(&mut [0; 64]).is_err(), "{other}:{port}");
        }
        let said = end(program).output();
        assert_eq!(number(&said, "returned in the kernel: "), 3, "{said}");
        assert_eq!(number(&said, "datagrams: "), 3, "{said}");
    });
}

#[test]
fn unsupported_kernel_path_fails_with_the_reason() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let refused = |command: &mut Command, why: &str| {
            Program::run(command).ended(1).says(why);
        };
        let reflect = turnpike(&["reflect", "--datapath", "kernel", "--listen", "127.0.0.1:9001"]);
        let mut without = unprivileged(links, "");
        without.arg(reflect.get_program()).args(reflect.get_args());
        refused(&mut without, "lacks CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON");
        for link in ["c", "p"] {
            links.inside(&["ip", "link", "set", link, "down"]);
        }
        refused(&mut links.command(&reflect), "no Ethernet interface is up and has an address");
    });
}
