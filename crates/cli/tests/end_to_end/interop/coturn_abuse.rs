//! Abusive modes of coturn's `turnutils_uclient`, on all transports at once: other clients must not notice.
//!
//! With -N and -R it corrupts requests at random, gives up or waits forever, so the test only requires that the server
//! receives its requests.

use super::coturn_client::{ALICE, coturn, returns_all, start_uclient};
use crate::prelude::*;

const TRANSPORTS: [&[&str]; 3] = [&[], &["-t"], &["-t", "-S"]];

const PATIENCE: Duration = Duration::from_secs(2);

/// Number of clients of the well-behaved uclient, and of each abusive one.
const CLIENTS: u64 = 4;

/// Effects of the abusive clients, as proof that they did something.
struct Harm {
    flawed: u64,
    opened: u64,
}

/// Runs abusive clients `times` on each transport while another client relays; afterwards the server must
/// be in the same state as before.
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

    let late: Vec<Program> = TRANSPORTS.iter().map(|&transport| start(transport)).collect();
    for program in late {
        returns_all(&program.wait(SOON), CLIENTS);
    }
    assert!(!serve.program.has_ended());
    // All connections end; over UDP, clients that send no final Refresh leave allocations behind.
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
fn negative_tests_do_not_disturb_others() {
    need!(coturn(V4));
    assert!(others_do_not_notice("-N", 4, PATIENCE).flawed > 0);
}

#[test]
fn negative_protocol_tests_do_not_disturb_others() {
    need!(coturn(V4));
    assert!(others_do_not_notice("-R", 4, PATIENCE).flawed > 0);
}

#[test]
fn denial_of_service_does_not_disturb_others() {
    need!(coturn(V4));
    // Some clients exit before they have an allocation.
    assert!(others_do_not_notice("-O", 8, PATIENCE).opened > 0);
}

/// The client reconnects at random, and its messages still arrive.
#[test]
fn random_disconnects_do_not_disturb_others() {
    need!(coturn(V4));
    let each_has_one = TRANSPORTS.len() as u64 * CLIENTS;
    assert!(others_do_not_notice("-B", 1, SOON).opened >= each_has_one);
}
