//! The addresses and routes of the server's machine change while the server is running. Each test has a network
//! namespace with the pair of interfaces `e0` and `e1`.

use crate::prelude::*;
use turnpike_testkit::stun::{self, attribute::*, kind::*};
use turnpike_trials::REALM;

const OLD: &str = "203.0.113.5";
const NEW: &str = "203.0.113.77";

fn run(line: &str) {
    let words: Vec<&str> = line.split_whitespace().collect();
    alone::run(words[0], &words[1..]);
}

fn link(name: &str, other: &str) {
    run(&format!("ip link add {name} type veth peer name {other}"));
    for name in [name, other] {
        run(&format!("sysctl -qw net.ipv6.conf.{name}.accept_ra=0"));
        run(&format!("ip link set {name} up"));
    }
}

fn lease(address: &str, interface: &str, metric: u32) {
    let (network, _) = address.rsplit_once('.').expect("an IPv4 address");
    run(&format!("ip address add {address}/24 dev {interface}"));
    run(&format!("ip route replace default via {network}.1 dev {interface} metric {metric}"));
}

fn end_lease(address: &str, interface: &str) {
    run(&format!("ip address del {address}/24 dev {interface}"));
}

fn serve(more: &[&str]) -> Serve {
    let user = format!("{USER}:{PASSWORD}");
    let plain = ["--realm", REALM, "--user", &user, "--allow-peer", "127.0.0.0/8"];
    Serve::start_bare(&[&plain[..], more].concat())
}

struct Call {
    client: stun::Client,
    relayed: SocketAddr,
}

impl Call {
    fn new(serve: &Serve, v4: bool) -> Result<Self, u16> {
        let client = stun::Client::new(serve.address(V4));
        let family = [if v4 { 1 } else { 2 }, 0, 0, 0];
        let attributes = [(REQUESTED_TRANSPORT, &stun::UDP[..]), (REQUESTED_ADDRESS_FAMILY, &family)];
        let answer = client.ask_as((USER, PASSWORD), ALLOCATE, &attributes);
        match answer.error() {
            Some(code) => Err(code),
            None => Ok(Self { client, relayed: answer.address(XOR_RELAYED_ADDRESS) }),
        }
    }

    fn at(serve: &Serve) -> Result<IpAddr, u16> {
        let call = Self::new(serve, true)?;
        call.end();
        Ok(call.relayed.ip())
    }

    /// Deletes the allocation, so that repeated requests do not exhaust the quota.
    fn end(&self) {
        self.asks(REFRESH, &[(LIFETIME, &[0; 4])]);
    }

    fn is_answered(&self) {
        self.asks(REFRESH, &[]);
    }

    fn asks(&self, kind: u16, attributes: &[(u16, &[u8])]) {
        assert_eq!(self.client.ask_as((USER, PASSWORD), kind, attributes).error(), None);
    }

    fn goes_on(&self) {
        let peer = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
        let address = stun::xor_address(peer.local_addr().expect("the socket is bound"), 0);
        self.asks(CREATE_PERMISSION, &[(XOR_PEER_ADDRESS, &address)]);
        peer.send_to(b"still there", self.relayed).expect("the relay has the address");
        let data = self.client.receive().expect("a Data indication");
        assert_eq!(data.attribute(PAYLOAD), b"still there");
    }
}

fn told(serve: &Serve, path: &str) -> Value {
    let (status, text) = fetch(serve.admin(), path).expect("the admin interface answers");
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).expect("JSON")
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn relays(serve: &Serve) -> Vec<(String, bool)> {
    let status = told(serve, "/v1/status");
    let relays = status["relays"].as_array().expect("a server has relay addresses").iter();
    relays
        .map(|relay| {
            assert!(relay["since"].as_str().is_some_and(|since| since.ends_with('Z')), "{relay}");
            (relay["address"].as_str().unwrap_or_default().to_owned(), relay["up"] == true)
        })
        .collect()
}

fn relays_on(serve: &Serve, address: &str) -> bool {
    relays(serve).contains(&(address.to_owned(), true))
}

fn eventually_at(serve: &Serve, address: &str) {
    eventually("new calls use the new address", || Call::at(serve) == Ok(ip(address)));
}

#[test]
fn new_lease_serves_new_calls_within_two_seconds_under_200_calls() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        lease(OLD, "e0", 100);
        let serve = serve(&["--workers", "2"]);
        assert_eq!(Call::at(&serve), Ok(ip(OLD)));
        let peer = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
        let peer = peer.local_addr().expect("the socket is bound");
        let calls = ["--clients", "200", "--rate", "2", "--warmup", "0", "--duration", "60"];
        let load = Load::new(serve.address(V4)).to(peer).with_words(&calls).start();
        serve.wait_for_allocations(200);
        end_lease(OLD, "e0");
        eventually("the old address is absent", || relays(&serve).contains(&(OLD.to_owned(), false)));
        assert_eq!(Call::at(&serve), Err(508));
        lease(NEW, "e0", 100);
        let since = Instant::now();
        eventually_at(&serve, NEW);
        assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
        assert_eq!(relays(&serve), [(NEW.to_owned(), true)]);
        let metrics = serve.metrics();
        assert_eq!(metrics.sum("turnpike_relay_address_up", NEW), 1, "{}", metrics.text());
        let (_, verbose) = fetch(serve.admin(), "/healthz?verbose").expect("the page answers");
        assert!(verbose.starts_with(&format!("ok\nrelay address {NEW} up since ")), "{verbose}");
        let refused = told(&serve, "/v1/refusals");
        assert!(refused.to_string().contains("does not have the relay address"), "{refused}");
        let mut program = serve.program;
        program.signal("HUP");
        program.line_with("configuration reloaded; no reloadable setting has changed");
        Upgraded::new(&program).upgrade();
        load.signal("INT");
        load.wait(SOON);
    });
}

#[test]
fn allocations_continue_when_their_address_returns() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        lease(OLD, "e0", 100);
        let serve = serve(&[]);
        let call = Call::new(&serve, true).expect("the address is there");
        call.goes_on();
        end_lease(OLD, "e0");
        eventually("no address is left", || serve.health() == Some(503));
        assert_eq!(Call::at(&serve), Err(508));
        let (_, text) = fetch(serve.admin(), "/healthz").expect("the page answers");
        assert!(text.starts_with(&format!("waiting\nrelay address {OLD} absent since ")), "{text}");
        lease(OLD, "e0", 100);
        eventually_at(&serve, OLD);
        call.goes_on();
        assert_eq!(serve.health(), Some(200));
    });
}

#[test]
fn relay_address_follows_the_default_route() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        link("f0", "f1");
        lease(OLD, "e0", 100);
        lease("198.51.100.5", "f0", 200);
        let serve = serve(&[]);
        assert_eq!(Call::at(&serve), Ok(ip(OLD)));
        run("ip link set e0 down");
        eventually_at(&serve, "198.51.100.5");
        run("ip link set e0 up");
        run("ip route replace default via 203.0.113.1 dev e0 metric 100");
        eventually_at(&serve, OLD);
        run("ip route add default via 203.0.113.1 dev e0 metric 300");
        run("ip route del default metric 100");
        eventually_at(&serve, "198.51.100.5");
    });
}

#[test]
fn server_relays_on_stable_ipv6_addresses_and_never_on_loopback() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        lease(OLD, "e0", 100);
        run("sysctl -qw net.ipv6.conf.e0.use_tempaddr=2");
        run("ip -6 route add default dev e0");
        let serve = serve(&[]);
        assert_eq!(relays(&serve), [(OLD.to_owned(), true)], "a default route, but no address");
        assert_eq!(Call::new(&serve, false).err(), Some(440));
        // Makes the kernel create a temporary address (RFC 8981), which it prefers.
        run("ip address add 2001:db8:5::5/64 dev e0 mngtmpaddr nodad valid_lft 3600 preferred_lft 3600");
        let temporary = eventually("a temporary address exists", || {
            let socket = UdpSocket::bind("[::]:0").expect("IPv6 is available");
            socket.connect("[2001:db8::1]:9").ok()?;
            let source = socket.local_addr().expect("the socket is connected").ip();
            (source != ip("2001:db8:5::5") && !source.is_loopback()).then_some(source)
        });
        eventually("the stable address is used for relaying", || relays_on(&serve, "2001:db8:5::5"));
        let call = Call::new(&serve, false).expect("IPv6 is available");
        assert_eq!(call.relayed.ip(), ip("2001:db8:5::5"));
        run(&format!("ip address change {temporary}/64 dev e0 valid_lft 2 preferred_lft 0"));
        eventually("the temporary address has expired", || UdpSocket::bind((temporary, 0)).is_err());
        assert_eq!(Call::new(&serve, false).map(|call| call.relayed.ip()), Ok(ip("2001:db8:5::5")));
    });
}

#[test]
fn a_host_without_ipv4_relays_over_ipv6() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        run("ip address add 2001:db8:5::5/64 dev e0 nodad");
        run("ip address add 2001:db8:5::9/64 dev e0 nodad valid_lft forever preferred_lft 0");
        run("ip -6 route add default dev e0");
        let serve = serve(&["--listen", "[::]:3478", "--allow-peer", "2001:db8:5::9/128"]);
        assert_eq!(relays(&serve), [("2001:db8:5::5".to_owned(), true)]);
        assert_eq!(Call::new(&serve, true).err(), Some(440));
        let peer = Reflect::start(ip("2001:db8:5::9"), &[]);
        let load = Load::new((ip("2001:db8:5::5"), 3478).into()).to(peer.address);
        let load = load.with("--clients 4 --rate 200 --warmup 0 --duration 2").start();
        let result = load.wait(SOON).result();
        let count = |key: &str| result[key].as_u64().expect("a number");
        assert!(count("sent") > 0 && count("received") == count("sent"), "{result}");
    });
}

#[test]
fn deprecated_ipv6_address_is_replaced_and_its_allocations_wait() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        lease(OLD, "e0", 100);
        run("ip -6 route add default dev e0");
        let own = |verb: &str, address: &str, lifetimes: &str| {
            run(&format!("ip address {verb} {address}/64 dev e0 nodad {lifetimes}"));
        };
        own("add", "2001:db8:5::aaaa", "valid_lft 600 preferred_lft 600");
        let serve = serve(&[]);
        let at = || Call::new(&serve, false).map(|call| call.relayed.ip());
        assert_eq!(at(), Ok(ip("2001:db8:5::aaaa")));
        let call = Call::new(&serve, false).expect("IPv6 is available");
        own("add", "2001:db8:5::bbbb", "valid_lft 600 preferred_lft 600");
        own("change", "2001:db8:5::aaaa", "valid_lft 600 preferred_lft 0");
        eventually("the deprecated address is no longer used", || at() == Ok(ip("2001:db8:5::bbbb")));
        call.is_answered();
        own("change", "2001:db8:5::aaaa", "valid_lft 1 preferred_lft 0");
        eventually("the address has expired", || UdpSocket::bind("[2001:db8:5::aaaa]:0").is_err());
        assert_eq!(at(), Ok(ip("2001:db8:5::bbbb")));
        call.is_answered();
    });
}

#[test]
fn without_a_default_route_any_non_loopback_address_is_used() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        let serve = serve(&[]);
        assert_eq!(Call::at(&serve), Ok(V4), "no other address exists");
        run("ip address add 10.0.5.5/24 dev e0");
        eventually_at(&serve, "10.0.5.5");
        run("ip address del 10.0.5.5/24 dev e0");
        run("ip address add 10.0.5.6/24 dev e0");
        eventually_at(&serve, "10.0.5.6");
        let mut other = self::serve(&[]).program;
        other.line_with("no default route: relaying on 10.0.5.6 until it has one");
        lease(OLD, "e0", 100);
        eventually_at(&serve, OLD);
        end_lease(OLD, "e0");
        eventually("nothing is granted elsewhere", || Call::at(&serve) == Err(508));
    });
}

#[test]
fn http_listeners_on_absent_addresses_appear_with_the_address() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        lease(OLD, "e0", 100);
        let certificate = Certificate::new(&["turn.example.org"]);
        let dir = Dir::new();
        let flags = certificate.flags();
        let file = format!(
            "[admin]\ntls_cert = \"{cert}\"\ntls_key = \"{key}\"\ntokens = [\"{token}\"]\n\
                 [credentials]\nlisten = [\"203.0.113.9:8443\", \"[2001:db8:5::9]:8443\"]\n",
            cert = flags[1],
            key = flags[3],
            token = "x".repeat(16),
        );
        let file = dir.file("turnpike.toml", file);
        let file = file.to_str().expect("UTF-8");
        let named = ["-c", file, "--admin", "203.0.113.9:9641", "--admin", "[2001:db8:5::9]:9641"];
        let named = [&named[..], &flags].concat();
        Program::run(&mut turnpike(&[&["check-config", "--user", "a:b"], &named[..]].concat())).ended(0);
        let serve = serve(&named);
        let lines = serve.program.lines();
        let pages = ["203.0.113.9:9641", "203.0.113.9:8443", "[2001:db8:5::9]:9641", "[2001:db8:5::9]:8443"];
        for page in pages {
            let words = format!("listening on {page} once it has");
            assert!(lines.iter().any(|line| line.contains(&words)), "{words}: {lines:?}");
        }
        run("ip address add 203.0.113.9/24 dev e0");
        run("ip address add 2001:db8:5::9/64 dev e0 nodad");
        for page in pages {
            eventually("the page is reached", || TcpStream::connect(page).is_ok());
            let shown = shown_by(page.parse().expect("an address"), "turn.example.org");
            assert_eq!(shown, certificate.der(), "{page}");
        }
    });
}

/// Waits for the actual grace period of one minute.
#[test]
#[ignore = "waits for two minutes"]
fn allocations_wait_60_seconds_for_their_address() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        lease(OLD, "e0", 100);
        let mut serve = serve(&[]);
        let call = Call::new(&serve, true).expect("the address is there");
        end_lease(OLD, "e0");
        thread::sleep(Duration::from_secs(50));
        lease(OLD, "e0", 100);
        eventually_at(&serve, OLD);
        call.goes_on();
        end_lease(OLD, "e0");
        eventually("no address is left", || serve.health() == Some(503));
        let left = || serve.allocations();
        thread::sleep(Duration::from_secs(57));
        assert!(left() > 0, "allocations are kept for a minute");
        thread::sleep(Duration::from_secs(5));
        assert_eq!(left(), 0);
        let line = serve.program.line_with("allocation ended");
        assert!(line.contains("the machine lost its relay address"), "{line}");
        lease(OLD, "e0", 100);
        eventually_at(&serve, OLD);
    });
}

#[test]
fn tentative_address_is_used_once_verified() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        lease(OLD, "e0", 100);
        run("sysctl -qw net.ipv6.conf.e0.dad_transmits=3");
        run("ip -6 route add default dev e0");
        run("ip address add 2001:db8:5::5/64 dev e0");
        let serve = serve(&["--listen", "[2001:db8:5::5]:3478"]);
        assert_eq!(Call::new(&serve, false).err(), Some(440), "the address is tentative");
        eventually("the address is used for relaying", || relays_on(&serve, "2001:db8:5::5"));
        assert!(Call::new(&serve, false).is_ok());
        eventually("the listener is bound", || {
            stun::Client::new("[2001:db8:5::5]:3478".parse().expect("an address")).is_answered()
        });
    });
}

#[test]
fn server_waits_for_configured_addresses_even_with_nonlocal_bind() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        link("e0", "e1");
        lease(OLD, "e0", 100);
        // A typical setting on a VRRP backup router.
        run("sysctl -qw net.ipv4.ip_nonlocal_bind=1");
        let named = ["--relay-ip", "203.0.113.9", "--relay-ip", "::1", "--listen", "203.0.113.9:3478"];
        let check =
            Program::run(&mut turnpike(&[&["check-config", "--user", "a:b"], &named[..]].concat())).ended(0);
        for key in ["server.listen", "relay.addresses"] {
            let words = format!("{key}: this machine does not have the address 203.0.113.9");
            assert!(check.stderr.contains(&words), "{}", check.output());
        }
        let serve = serve(&named);
        let lines = serve.program.lines();
        for words in ["not listening on udp 203.0.113.9:3478", "the relay address 203.0.113.9: waiting"] {
            assert!(lines.iter().any(|line| line.contains(words)), "{words}: {lines:?}");
        }
        assert_eq!(relays(&serve), [("203.0.113.9".to_owned(), false), ("::1".to_owned(), true)]);
        assert_eq!(Call::at(&serve).err(), Some(508));
        let listening = || {
            let udp = stun::Client::new("203.0.113.9:3478".parse().expect("an address")).is_answered();
            udp && TcpStream::connect("203.0.113.9:3478").is_ok()
        };
        for _ in 0..2 {
            run("ip address add 203.0.113.9/32 dev e0");
            eventually("the listener is bound", &listening);
            eventually_at(&serve, "203.0.113.9");
            run("ip address del 203.0.113.9/32 dev e0");
            eventually("nothing is granted", || Call::at(&serve) == Err(508));
        }
    });
}
