//! Floods of unauthenticated packets are counted by reason and leave no other state.

use crate::prelude::*;
use std::sync::atomic::AtomicBool;

#[test]
fn floods_leave_no_state_no_log_lines_and_no_amplification() {
    let serve = Serve::start(&["--workers", "1"]);
    let flood = |seconds: &str| {
        Load::new(serve.address(V4))
            .with(&format!("--mode invalid --clients 16 --rate 20000 --duration {seconds}"))
            .start()
            .wait(SOON * 2)
            .ended(0);
    };
    let (lines, start) = (serve.program.lines(), serve.memory());
    // The first flood fills arenas that later ones reuse.
    flood("1");
    let (after_first, arrived) = (serve.memory(), received(&serve));
    flood("3");

    assert!(received(&serve) > 2 * arrived, "{} datagrams after {arrived}", received(&serve));
    let (of_first, of_second) =
        (after_first.saturating_sub(start), serve.memory().saturating_sub(after_first));
    assert!(of_second <= of_first, "{of_second} bytes after {of_first}");
    assert_eq!(serve.program.lines(), lines, "log lines about unauthenticated packets");
    assert_eq!(serve.allocations(), 0);
    assert_eq!(serve.metrics().sum("turnpike_allocations_opened_total", ""), 0);

    let metrics = serve.metrics();
    assert!(metrics.sum("turnpike_dropped_datagrams_total", "") > 0);
    let (bytes_in, bytes_out) =
        (metrics.sum("turnpike_rx_bytes_total", ""), metrics.sum("turnpike_tx_bytes_total", ""));
    assert!(bytes_out <= bytes_in * MOST_AMPLIFICATION, "{bytes_out} bytes out for {bytes_in} in");
}

/// An attacker could flood the log with forged names and source addresses.
fn pour_in_forged_requests(server: SocketAddr, stop: &AtomicBool) -> u64 {
    let socket = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    let nonces: [&[u8]; 3] = [b"", b"f//499k954d6OL34oL9FSTvy64sA", b"obMatJos2gAAAAAAAAAAAAAAAAAAA"];
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        for round in 0..10_u8 {
            for nonce in nonces {
                for realm in ["elsewhere.example", REALM] {
                    let request =
                        stun::forged_request(format!("forged-{round}").as_bytes(), realm.as_bytes(), nonce);
                    socket.send_to(&request, server).expect("loopback accepts a datagram");
                    sent += 1;
                }
            }
        }
        // A few thousand a second, so that the socket buffer has room for genuine requests.
        thread::sleep(Duration::from_millis(20));
    }
    sent
}

#[test]
fn refusals_of_genuine_clients_are_logged_during_a_forged_flood() {
    let mut serve = Serve::start(&["--workers", "1"]);
    let server = serve.address(V4);
    let started = serve.program.lines().len();
    let stop = AtomicBool::new(false);
    let forged = thread::scope(|scope| {
        // Also stops the thread if an assertion fails; otherwise the scope would never end.
        let _stop = StopAtEnd(&stop);
        let attacker = scope.spawn(|| pour_in_forged_requests(server, &stop));
        let invalid = Load::new(server).with("--mode invalid --clients 4 --rate 2000 --duration 3").start();
        eventually("the flood is under way", || wrong_realms(&serve) > 500);
        for user in 1..=9 {
            let user = format!("genuine-{user}");
            let stun = stun::Client::new(server);
            let (_, _, challenge) = stun.challenge();
            assert_eq!(stun.forge(&user, &challenge.realm, &challenge.nonce), Some(401));
            let line = serve.program.line_with(&user);
            assert!(line.contains("credential refused") && line.contains("no such user"), "{line}");
        }
        assert_eq!(invalid.wait(SOON).code, Some(0));
        stop.store(true, Ordering::Relaxed);
        attacker.join().expect("the thread does not panic")
    });
    assert!(forged > 1000, "{forged}");
    eventually("forged requests are counted", || wrong_realms(&serve) > forged / 4);
    let lines = serve.program.lines();
    assert!(!lines.iter().any(|line| line.contains("forged-")), "{lines:#?}");
    assert_eq!(lines.len() - started, 9, "a line for each genuine refusal, and no other: {lines:#?}");
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn wrong_realms(serve: &Serve) -> u64 {
    serve.metrics().sum("turnpike_credentials_refused_total", "reason=\"wrong_realm\"")
}

/// A 401 must contain realm and nonce, and the shortest Allocate has 28 bytes; replies may be this many
/// times larger.
const MOST_AMPLIFICATION: u64 = 5;

fn received(serve: &Serve) -> u64 {
    serve.metrics().sum("turnpike_rx_datagrams_total", "")
}
