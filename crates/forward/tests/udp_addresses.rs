//! Answers leave from the address that was asked: the clients' sockets are connected, and hear nobody else.
#![allow(clippy::print_stdout, reason = "says why it was skipped, and what the test inside said")]
#![allow(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

mod udp_common;

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    process::Command,
    time::Instant,
};

use turnpike_forward::{Protocol, Rule};
use turnpike_net::Datapath;
use udp_common::{DATAPATHS, DEADLINE, Echo, KEY, LOCALHOST, Worker, expect_echo, rule};

/// One client address and port that asks several of our addresses has a session with each.
fn ask_each(bind: &str, addresses: &[&str], from: &str, datapath: Datapath) {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(datapath);
    let at = worker.add(KEY, &rule(Protocol::Udp, bind.parse().unwrap(), echo.address), datapath);
    let client = UdpSocket::bind(from).unwrap();
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    for _ in 0..2 {
        for address in addresses {
            let asked = SocketAddr::new(address.parse().unwrap(), at.port());
            client.send_to(address.as_bytes(), asked).unwrap();
            let mut bytes = [0; 64];
            let (len, answered) = client.recv_from(&mut bytes).unwrap();
            assert_eq!((&bytes[..len], answered), (address.as_bytes(), asked), "on {datapath}");
        }
    }
    assert_eq!(worker.active(), addresses.len());
}

#[test]
fn answers_leave_from_the_ipv4_address_that_was_asked() {
    for datapath in DATAPATHS {
        ask_each("0.0.0.0:0", &["127.0.0.1", "127.0.0.2", "127.1.2.3"], "127.0.0.9:0", datapath);
    }
}

#[test]
fn answers_leave_from_the_ipv6_address_that_was_asked() {
    in_namespace("answers_leave_from_the_ipv6_address_that_was_asked", || {
        for line in
            ["link set lo up", "addr add fd00::1/128 dev lo nodad", "addr add fd00::2/128 dev lo nodad"]
        {
            assert!(Command::new("ip").args(line.split(' ')).status().unwrap().success(), "ip {line}");
        }
        for ip in ["fd00::1", "fd00::2"] {
            wait_until_reachable(ip.parse().unwrap());
        }
        for datapath in DATAPATHS {
            ask_each("[::]:0", &["fd00::1", "fd00::2", "::1"], "[fd00::1]:0", datapath);
        }
    });
}

#[test]
fn the_rules_source_address_is_what_targets_see() {
    let target = UdpSocket::bind(LOCALHOST).unwrap();
    target.set_read_timeout(Some(DEADLINE)).unwrap();
    let worker = Worker::start(Datapath::Gso);
    let to = target.local_addr().unwrap();
    let source: IpAddr = "127.0.0.77".parse().unwrap();
    let rule = Rule { source: Some(source), ..rule(Protocol::Udp, LOCALHOST.parse().unwrap(), to) };
    let client = udp_common::client(worker.add(KEY, &rule, Datapath::Gso));
    client.send(b"?").unwrap();
    assert_eq!(target.recv_from(&mut [0; 8]).unwrap().1.ip(), source);
}

#[test]
fn an_ipv6_client_reaches_an_ipv4_target_and_the_other_way_round() {
    for (listen, target) in [("[::1]:0", LOCALHOST), (LOCALHOST, "[::1]:0")] {
        let echo = Echo::start(target);
        let worker = Worker::start(Datapath::Gso);
        let at = worker.add(KEY, &rule(Protocol::Udp, listen.parse().unwrap(), echo.address), Datapath::Gso);
        expect_echo(&udp_common::client(at), b"across");
    }
}

/// The kernel sets routes to new addresses up in the background.
fn wait_until_reachable(ip: IpAddr) {
    let deadline = Instant::now() + DEADLINE;
    let socket = UdpSocket::bind((ip, 0)).unwrap();
    socket.set_read_timeout(Some(std::time::Duration::from_millis(20))).unwrap();
    let address = socket.local_addr().unwrap();
    while socket.send_to(b"?", address).is_err() || socket.recv(&mut [0; 1]).is_err() {
        assert!(Instant::now() < deadline, "{ip} is not reachable from itself");
    }
}

/// Runs `body` with a network namespace of its own: this test starts itself again inside. Prints why not where the machine
/// does not let it.
fn in_namespace(test: &str, body: impl FnOnce()) {
    const INSIDE: &str = "TURNPIKE_FORWARD_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    let allowed = |flags: &&str| {
        let probe = Command::new("unshare").args([flags, "ip", "link", "set", "lo", "up"]).output();
        probe.is_ok_and(|output| output.status.success())
    };
    // A user namespace needs no privilege, but is often forbidden in containers, where root may do without.
    let Some(flags) = ["-n", "-rn"].into_iter().find(allowed) else {
        return println!("SKIPPED: {test}: unshare(1) and ip(8) cannot make a network namespace here");
    };
    let output = Command::new("unshare")
        .arg(flags)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test} failed inside its namespace");
    assert!(text.contains("1 passed"), "{test} did not run inside its namespace");
}
