//! The modes in which coturn's `turnutils_uclient` is no good client, on all transports at once: others must not notice.
//!
//! With -N and -R it corrupts requests at random, gives up or waits for ever; so nothing is asked of its own ends but that they
//! come to the server's notice.

use super::coturn_client::{ALICE, coturn, returns_all, start_uclient};
use crate::prelude::*;

const TRANSPORTS: [&[&str]; 3] = [&[], &["-t"], &["-t", "-S"]];

/// How long a client may wait for an answer that it has made impossible.
const PATIENCE: Duration = Duration::from_secs(2);

/// Clients of the one that relays meanwhile, and of each that is let loose.
const CLIENTS: u64 = 4;

/// What came of clients that were let loose. A program that does nothing harms nobody either.
struct Harm {
    /// Requests that were found wanting.
    flawed: u64,
    /// Allocations that they opened.
    opened: u64,
}

/// Lets clients in this mode loose, so many times on each transport, while another relays; then the server must be as it was.
fn others_do_not_notice(mode: &str, times: u32, patience: Duration) -> Harm {
    let certificate = Certificate::new(&["turn.example.org"]);
    let mut serve = Serve::start(&certificate.flags());
    let reflect = Reflect::start(V4, &[]);
    let start = |flags: &[&str]| {
        let flags = [&ALICE[..], &["-c", "-X"], flags].concat();
        start_uclient(serve.address(V4), reflect.address, CLIENTS, &flags)
    };

    let bystander =
        serve.load(&reflect).with(&format!("--clients {CLIENTS} --rate 200 --duration 3")).start();
    for _ in 0..times {
        let running: Vec<Program> =
            TRANSPORTS.iter().map(|&transport| start(&[&[mode], transport].concat())).collect();
        let deadline = Instant::now() + patience;
        for mut program in running {
            while !program.has_ended() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
    let result = bystander.wait(SOON * 2).ended(0).result();
    assert!(result["sent"].as_u64() >= Some(400), "{result}");
    assert_eq!(result["lost"], 0, "{result}");

    let opened = serve.metrics().sum("turnpike_allocations_opened_total", "") - CLIENTS;

    // And whoever comes later is served, on each transport.
    let late: Vec<Program> = TRANSPORTS.iter().map(|&transport| start(transport)).collect();
    for program in late {
        returns_all(&program.wait(SOON), CLIENTS);
    }
    assert!(!serve.program.has_ended());
    // Nobody holds on to connections: what is left are UDP clients that did not say that they go.
    eventually("all connections are gone", || serve.metrics().sum("turnpike_connections", "") == 0);
    assert!(
        !serve.program.lines().iter().any(|line| line.contains("panicked")),
        "{:?}",
        serve.program.lines()
    );
    let metrics = serve.metrics();
    let flawed = metrics.sum("turnpike_error_responses_total", "code=\"400\"")
        + metrics.sum("turnpike_dropped_datagrams_total", "")
        + metrics.sum("turnpike_connections_closed_total", "reason=\"not_stun\"");
    Harm { flawed, opened }
}

#[test]
fn negative_tests() {
    need!(coturn(V4));
    assert!(others_do_not_notice("-N", 4, PATIENCE).flawed > 0);
}

#[test]
fn negative_protocol_tests() {
    need!(coturn(V4));
    assert!(others_do_not_notice("-R", 4, PATIENCE).flawed > 0);
}

#[test]
fn denial_of_service() {
    need!(coturn(V4));
    // Some of them leave before they have one.
    assert!(others_do_not_notice("-O", 8, PATIENCE).opened > 0);
}

/// It connects anew, and its messages arrive all the same.
#[test]
fn random_disconnects() {
    need!(coturn(V4));
    let each_has_one = TRANSPORTS.len() as u64 * CLIENTS;
    assert!(others_do_not_notice("-B", 1, SOON).opened >= each_has_one);
}
