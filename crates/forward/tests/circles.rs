//! Rules that forward to themselves or to each other.

use crate::prelude::*;
use socket2::{Domain, Socket, Type};
use turnpike_forward::RuleId;

use crate::{
    support,
    targets::{failures, greeting},
};

const HERE: [u8; 4] = [127, 0, 0, 1];

/// Rule that targets itself and listens on one loopback address, or on all, at a port that is free for TCP
/// and UDP.
fn at_a_known_port(listen: [u8; 4], protocol: Protocol) -> (Rule, u16) {
    let port = eventually("a port that is free for both", || {
        let port = free_address().port();
        UdpSocket::bind(("127.0.0.1", port)).ok().map(|_| port)
    });
    let mut rule = Rule::new("r", (listen, port).into(), SocketAddr::from((listen, port)).into());
    rule.protocol = protocol;
    rule.idle = (protocol == Protocol::Udp).then_some(Duration::from_secs(60));
    rule.balance = Balance::Failover;
    (rule, port)
}

#[test]
fn rule_does_not_connect_to_its_own_listener() {
    let (mut rule, port) = at_a_known_port([127, 0, 0, 1], Protocol::Tcp);
    let running = Running::start(&[rule.clone()]);
    for turn in 1..=3 {
        let error = support::first_byte(running.address("r")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert_eq!(running.log.wait(turn)[turn - 1].reason, EndReason::ConnectFailed);
    }
    let own = SocketAddr::from(([127, 0, 0, 1], port));
    eventually("the failures are counted", || failures(&running, own, TargetFailure::Unreachable) == 3);
    assert_eq!(running.snapshot("r").accepted, 3, "one connection per client");
    drop(running);
    // If there is a second target, it is used.
    rule.targets.push(greeter("b").into());
    assert_eq!(greeting(&Running::start(&[rule])), "b");
}

#[test]
fn wildcard_rule_does_not_connect_to_itself_at_any_address() {
    let (mut rule, port) = at_a_known_port([0; 4], Protocol::Tcp);
    rule.targets = [2, 3].map(|last| SocketAddr::from(([127, 0, 0, last], port)).into()).to_vec();
    let running = Running::start(&[rule]);
    for _ in 0..10 {
        let error = support::first_byte(([127, 0, 0, 1], port).into()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    eventually("all connections are counted", || running.snapshot("r").accepted >= 10);
    eventually("all connections have ended", || running.forwarder.active() == 0);
    // Each of the two addresses is tried once before the rule knows that it is local.
    assert!(running.snapshot("r").accepted <= 12, "{:?}", running.snapshot("r"));
}

#[test]
fn udp_rule_has_no_session_with_itself() {
    for (listen, target, sessions) in [([127, 0, 0, 1], [127, 0, 0, 1], 0), ([0; 4], [127, 0, 0, 2], 1)] {
        let (mut rule, port) = at_a_known_port(listen, Protocol::Udp);
        rule.targets = vec![SocketAddr::from((target, port)).into()];
        let running = Running::start(&[rule]);
        let refused = || {
            let ended = running.snapshot("r").ended;
            ended
                .iter()
                .find(|(reason, _)| *reason == EndReason::ConnectFailed)
                .map_or(0, |(_, count)| *count)
        };
        for turn in 1..=3 {
            let client = UdpSocket::bind("127.0.0.1:0").unwrap();
            client.send_to(b"?", SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
            eventually("the session is refused", || refused() >= turn);
        }
        assert_eq!((refused(), running.snapshot("r").accepted), (3, sessions), "{listen:?}");
    }
}

/// Chain of rules, the last of which leads to `target`; also returns the address of the first one.
pub(crate) fn chain(protocol: Protocol, length: usize, target: SocketAddr) -> (Vec<Rule>, SocketAddr) {
    let (mut rules, mut next): (Vec<Rule>, _) = (Vec::new(), target);
    for number in (0..length).rev() {
        let (rule, port) = at_a_known_port(HERE, protocol);
        rules.push(Rule { id: RuleId(number.to_string()), targets: vec![next.into()], ..rule });
        next = (HERE, port).into();
    }
    rules.reverse();
    (rules, next)
}

pub(crate) fn circles(running: &Running, id: &str) -> u64 {
    let ended = running.snapshot(id).ended;
    ended.iter().filter(|(reason, _)| *reason == EndReason::Circle).map(|(_, count)| count).sum()
}

fn pair(protocol: Protocol) -> (Vec<Rule>, SocketAddr) {
    let (mut rules, first) = chain(protocol, 2, ([127, 0, 0, 1], 9).into());
    rules[1].targets = vec![first.into()];
    (rules, first)
}

fn start(rules: &[Rule]) -> Running {
    Running::start_with(&Settings { workers: 2, ..support::settings() }, rules)
}

fn accepted(running: &Running) -> u64 {
    ["0", "1"].into_iter().map(|id| running.snapshot(id).accepted).sum()
}

/// Client whose address transparent rules can also bind on this machine.
fn sharing_client() -> UdpSocket {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
    socket.set_reuse_port(true).unwrap();
    socket.bind(&SocketAddr::from((HERE, 0)).into()).unwrap();
    socket.into()
}

#[test]
fn forwarding_loop_between_two_rules_is_limited() {
    for (protocol, any_port) in [(Protocol::Udp, false), (Protocol::Udp, true), (Protocol::Tcp, false)] {
        let (mut rules, first) = pair(protocol);
        rules.iter_mut().for_each(|rule| rule.any_port = any_port);
        let running = start(&rules);
        let in_circle = || circles(&running, "0") + circles(&running, "1") > 0;
        if protocol == Protocol::Udp {
            let client = UdpSocket::bind("127.0.0.1:0").unwrap();
            client.send_to(b"?", first).unwrap();
            eventually("the loop is detected", in_circle);
        } else {
            let mut client = running.connect("0");
            assert!(!matches!(client.read(&mut [0]), Ok(1..)), "data came out of a loop");
            eventually("the loop is detected", in_circle);
        }
        assert!(accepted(&running) < 100, "{protocol:?}: {}", accepted(&running));
        assert!(running.log.all().len() < 100);
    }
}

#[test]
fn transparent_rules_in_a_loop_send_nothing() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        let (mut rules, first) = pair(Protocol::Udp);
        rules.iter_mut().for_each(|rule| rule.transparent = true);
        let running = start(&rules);
        let client = sharing_client();
        for _ in 0..3 {
            client.send_to(b"?", first).unwrap();
        }
        let ended = || running.snapshot("0").ended;
        eventually("the client is refused", || ended() == [(EndReason::ConnectFailed, 3)]);
        assert_eq!(running.snapshot("1").accepted, 0);
    });
}

#[test]
fn use_of_many_ports_of_a_transparent_rule_is_not_taken_for_a_loop() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        // Datagrams to 10.8.0.1 get no response.
        alone::run("ip", &["route", "add", "10.8.0.1", "dev", "lo"]);
        let ports = PortRange { first: 36000, last: 36011 };
        let (rule, _) = at_a_known_port(HERE, Protocol::Udp);
        let host = turnpike_forward::Host::Ip([10, 8, 0, 1].into());
        let rule = Rule {
            bind: HERE.into(),
            ports,
            targets: vec![Endpoint { host, ports, weight: 1 }],
            transparent: true,
            ..rule
        };
        let running = Running::start(&[rule]);
        let client = sharing_client();
        for port in ports.first..=ports.last {
            client.send_to(b"?", (std::net::Ipv4Addr::from(HERE), port)).unwrap();
        }
        eventually("each port has a session", || running.snapshot("r").accepted == 12);
        assert_eq!(running.snapshot("r").ended, []);
    });
}

#[test]
fn session_that_reconnects_counts_as_a_hop_for_the_next_rule() {
    let (mut rules, first) = chain(Protocol::Tcp, 8, greeter("a"));
    let (across, listening) = at_a_known_port(HERE, Protocol::Udp);
    // The first target's port is closed.
    rules.push(Rule {
        id: RuleId("across".to_owned()),
        protocol: Protocol::UdpToTcp { framed: false },
        targets: vec![free_address().into(), first.into()],
        ..across
    });
    let running = Running::start(&rules);
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.send_to(b"?", (std::net::Ipv4Addr::from(HERE), listening)).unwrap();
    eventually("the last rule refuses the ninth hop", || circles(&running, "7") == 1);
}

#[test]
fn chain_of_eight_rules_is_not_a_loop() {
    let echo = Echo::start("127.0.0.1:0");
    let (rules, first) = chain(Protocol::Udp, 8, echo.address);
    let running = Running::start(&rules);
    crate::udp_common::expect_echo(&crate::udp_common::client(first), b"through all");
    drop(running);
    let (rules, first) = chain(Protocol::Udp, 9, echo.address);
    let running = Running::start(&rules);
    crate::udp_common::client(first).send(b"?").unwrap();
    eventually("the ninth rule refuses the client", || circles(&running, "8") == 1);
}
