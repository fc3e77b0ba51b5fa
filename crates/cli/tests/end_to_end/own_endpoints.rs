//! Services on the server's own machine are not allowed as peers: on its own addresses, which may change,
//! only relay ports are open. Each test has a network namespace.

use crate::prelude::*;

fn ip(arguments: &[&str]) {
    alone::run("ip", arguments);
}

fn lets(serve: &Serve, peer: SocketAddr) -> bool {
    let run =
        Load::new(serve.address(V4)).to(peer).with("--clients 1 --rate 10 --warmup 0 --duration 0.2").run();
    let text = run.output();
    let is_let_in = text.contains("\"sent\"");
    assert!(is_let_in || text.contains("403"), "neither refused nor permitted: {text}");
    is_let_in
}

const LOCAL: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const PUBLIC: Ipv4Addr = Ipv4Addr::new(198, 41, 0, 9);
const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 99);

/// Adds a wildcard listener to those of the harness.
fn serve(more: &[&str]) -> Serve {
    for address in ["10.9.0.1/24", "10.9.0.2/24"] {
        ip(&["address", "add", address, "dev", "lo"]);
    }
    let plain = ["--user", "alice:secret", "--realm", "example.org", "--listen", "0.0.0.0:4478"];
    Serve::start_bare(&[&plain[..], &["--relay-ip", "10.9.0.1=198.41.0.9"], more].concat())
}

#[test]
fn on_own_addresses_only_relay_ports_are_allowed_peers() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        for allow in [&[][..], &["--allow-peer", "0.0.0.0/0"]] {
            let serve = serve(allow);
            let admin = serve.admin();
            let own = serve.address(V4).port();
            for ip in [LOCAL, OTHER, PUBLIC, Ipv4Addr::UNSPECIFIED, Ipv4Addr::LOCALHOST] {
                // On an address without a listener, a port that the kernel chose may be a relay port.
                let is_service = |port: &u16| *port < 49_152 || ip.is_loopback();
                for port in [22, 4478, own, admin.port(), 6379].into_iter().filter(is_service) {
                    assert!(!lets(&serve, (ip, port).into()), "{ip}:{port} with {allow:?}");
                }
            }
            assert!(lets(&serve, (PUBLIC, 50_000).into()));
            assert_eq!(lets(&serve, (OTHER, 50_000).into()), !allow.is_empty());
            assert_eq!(lets(&serve, (STRANGER, 22).into()), !allow.is_empty());
            drop(serve);
            ip(&["address", "flush", "dev", "lo", "to", "10.9.0.0/24"]);
        }
    });
}

#[test]
fn new_own_address_is_protected_until_it_is_removed() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        let serve = serve(&["--allow-peer", "10.0.0.0/8"]);
        let peer = SocketAddr::from((STRANGER, 22));
        assert!(lets(&serve, peer), "the address is not this machine's yet");
        ip(&["address", "add", "10.9.0.99/32", "dev", "lo"]);
        eventually("the new address is protected", || !lets(&serve, peer));
        ip(&["address", "del", "10.9.0.99/32", "dev", "lo"]);
        eventually("allowed again", || lets(&serve, peer));
        let told =
            serve.program.lines().into_iter().filter(|line| line.contains("addresses of this machine"));
        assert_eq!(told.count(), 2);
    });
}
