//! coturn's clients against `serve`: `turnutils_uclient` in many modes, `turnutils_stunclient`.

use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
};

use crate::harness::{Finished, PASSWORD, Program, Reflect, Serve, USER, V4, V6, has_ipv6, installed, skip};

/// Messages that each of [`CLIENTS`] sends.
const MESSAGES: u64 = 50;
const CLIENTS: u64 = 2;

/// Why a test cannot run here, if it cannot.
fn obstacle(family: IpAddr) -> Option<&'static str> {
    if installed("turnutils_uclient").is_none() {
        Some("coturn is not installed")
    } else if family.is_ipv6() && !has_ipv6() {
        Some("no IPv6 loopback address")
    } else {
        None
    }
}

/// uclient to `peer` through `server`, as [`USER`] unless `more` says otherwise.
fn uclient(server: SocketAddr, peer: SocketAddr, more: &[&str]) -> Finished {
    let mut command = Command::new("turnutils_uclient");
    command.args([
        "-p",
        &server.port().to_string(),
        "-e",
        &peer.ip().to_string(),
        "-r",
        &peer.port().to_string(),
    ]);
    command.args(["-n", &MESSAGES.to_string(), "-m", &CLIENTS.to_string(), "-l", "120", "-z", "5"]);
    command.args(more).arg(server.ip().to_string());
    Program::run(&mut command)
}

/// Credentials of [`USER`].
const ALICE: [&str; 4] = ["-u", USER, "-w", PASSWORD];

/// Relays uclient's messages and expects each of them back. `sessions` of [`CLIENTS`] each, an RTP session has an RTCP one beside it.
fn relays_all(family: IpAddr, sessions: u64, more: &[&str]) {
    if let Some(why) = obstacle(family) {
        return skip(why);
    }
    let serve = Serve::start(&["--secret", "north-star"]);
    let reflect = Reflect::start(family, &[]);
    let ended = uclient(serve.address(family), reflect.address, more);
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    let count = |label: &str| last_number(&ended, label);
    let expected = sessions * CLIENTS * MESSAGES;
    assert_eq!(count("tot_send_msgs="), expected, "{}", ended.output());
    assert_eq!(count("tot_recv_msgs="), expected, "{}", ended.output());
    assert_eq!(count("Total lost packets "), 0, "{}", ended.output());
    let metrics = serve.metrics();
    for direction in ["to_peer", "to_client"] {
        let relayed = metrics.sum("turnpike_relayed_datagrams_total", &format!("direction=\"{direction}\""));
        assert!(relayed >= expected, "{direction}: {relayed}");
    }
}

/// The number after the last `label` of uclient's report.
fn last_number(ended: &Finished, label: &str) -> u64 {
    let output = ended.output();
    let (_, rest) = output.rsplit_once(label).unwrap_or_else(|| panic!("no {label:?} in {output}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|error| panic!("{label:?}: {error} in {output}"))
}

/// [`ALICE`] and more.
fn alice<'a>(more: &[&'a str]) -> Vec<&'a str> {
    ALICE.iter().chain(more).copied().collect()
}

#[test]
fn channels_over_ipv4() {
    relays_all(V4, 1, &alice(&["-c", "-X"]));
}

#[test]
fn send_over_ipv4() {
    relays_all(V4, 1, &alice(&["-c", "-X", "-s"]));
}

#[test]
fn channels_over_ipv6() {
    relays_all(V6, 1, &alice(&["-c", "-x"]));
}

#[test]
fn send_over_ipv6() {
    relays_all(V6, 1, &alice(&["-c", "-x", "-s"]));
}

#[test]
fn extra_requests_dont_fragment_and_padding() {
    relays_all(V4, 1, &alice(&["-c", "-X", "-G", "-g", "-D"]));
}

/// The shared secret with which uclient makes itself a time-limited credential.
#[test]
fn time_limited_credentials() {
    relays_all(V4, 1, &["-u", "bob", "-W", "north-star", "-c", "-X"]);
}

#[test]
fn a_wrong_password_is_refused() {
    if let Some(why) = obstacle(V4) {
        return skip(why);
    }
    let mut serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let ended = uclient(serve.address(V4), reflect.address, &["-u", USER, "-w", "wrong", "-c", "-X"]);
    assert!(ended.output().contains("Cannot complete Allocation"), "{}", ended.output());
    assert!(serve.program.line_with("credential refused").contains("wrong key"));
    assert_eq!(serve.allocations(), 0);
}

/// turnutils_peer in the place of our own reflector: nothing of ours but the relay.
#[test]
fn coturn_on_both_sides() {
    if let Some(why) = obstacle(V4) {
        return skip(why);
    }
    let serve = Serve::start(&[]);
    let peer = SocketAddr::new(V4, crate::harness::free_port(V4));
    let mut command = Command::new("turnutils_peer");
    let _peer = Program::start(command.args(["-L", &peer.ip().to_string(), "-p", &peer.port().to_string()]));
    let ended = uclient(serve.address(V4), peer, &alice(&["-c", "-X"]));
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    assert_eq!(last_number(&ended, "tot_recv_msgs="), CLIENTS * MESSAGES, "{}", ended.output());
}

#[test]
fn stunclient_learns_its_address() {
    for family in [V4, V6] {
        if let Some(why) = obstacle(family) {
            return skip(why);
        }
        let serve = Serve::start(&[]);
        let server = serve.address(family);
        let mut command = Command::new("turnutils_stunclient");
        let ended = Program::run(command.args(["-p", &server.port().to_string(), &server.ip().to_string()]));
        assert_eq!(ended.code, Some(0), "{}", ended.output());
        let reflexive =
            format!("UDP reflexive addr: {}", if family.is_ipv4() { "127.0.0.1:" } else { "[::1]:" });
        assert!(ended.output().contains(&reflexive), "{}", ended.output());
    }
}
