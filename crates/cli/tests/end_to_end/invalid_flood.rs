//! Floods of what nobody authenticated: counters with reasons, and nothing else that stays.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};
use turnpike_testkit::stun;

use turnpike_trials::{Load, REALM, SOON, Serve, V4, eventually};

#[test]
fn a_flood_leaves_no_state_no_log_lines_and_no_amplification() {
    let serve = Serve::start(&["--workers", "1"]);
    let flood = |seconds: &str| {
        let run = Load::new(serve.address(V4))
            .with(&["--mode", "invalid", "--clients", "16", "--rate", "20000", "--duration", seconds])
            .start()
            .wait(SOON * 2);
        assert_eq!(run.code, Some(0), "{}", run.output());
    };
    let (lines, start) = (serve.program.lines(), serve.memory());
    // The first flood fills the arenas that every later one uses again.
    flood("1");
    let (after_first, arrived) = (serve.memory(), received(&serve));
    flood("3");

    assert!(received(&serve) > 2 * arrived, "{} datagrams after {arrived}", received(&serve));
    let (of_first, of_second) =
        (after_first.saturating_sub(start), serve.memory().saturating_sub(after_first));
    assert!(of_second <= of_first, "{of_second} bytes after {of_first}");
    assert_eq!(serve.program.lines(), lines, "lines for what nobody has proved to have sent");
    assert_eq!(serve.allocations(), 0);
    assert_eq!(serve.metrics().sum("turnpike_allocations_opened_total", ""), 0);

    let metrics = serve.metrics();
    assert!(metrics.sum("turnpike_dropped_datagrams_total", "") > 0);
    let (bytes_in, bytes_out) =
        (metrics.sum("turnpike_rx_bytes_total", ""), metrics.sum("turnpike_tx_bytes_total", ""));
    // Over the whole mixture: most of it deserves no answer at all.
    assert!(bytes_out <= bytes_in * MOST_AMPLIFICATION, "{bytes_out} bytes out for {bytes_in} in");
}

/// As an attacker would who wants the log to accuse others, or to hold nothing else: with names and, had it more addresses, with
/// addresses of its choice.
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
                    socket.send_to(&request, server).expect("loopback takes a datagram");
                    sent += 1;
                }
            }
        }
        // A few thousand a second: that the genuine ones find room in the socket is not the question here.
        thread::sleep(Duration::from_millis(20));
    }
    sent
}

#[test]
fn a_genuine_clients_refusals_are_logged_while_forged_packets_pour_in() {
    let mut serve = Serve::start(&["--workers", "1"]);
    let server = serve.address(V4);
    let started = serve.program.lines().len();
    let stop = AtomicBool::new(false);
    let forged = thread::scope(|scope| {
        // Also where an assertion fails, or the scope would wait for ever.
        let _stop = StopAtEnd(&stop);
        let attacker = scope.spawn(|| pour_in_forged_requests(server, &stop));
        let invalid = Load::new(server)
            .with(&["--mode", "invalid", "--clients", "4", "--rate", "2000", "--duration", "3"])
            .start();
        eventually("the flood is under way", || (wrong_realms(&serve) > 500).then_some(()));
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
        attacker.join().expect("it does not panic")
    });
    assert!(forged > 1000, "{forged}");
    eventually("forged ones are counted", || (wrong_realms(&serve) > forged / 4).then_some(()));
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

/// A 401 must carry realm and nonce, and the shortest Allocate has 28 bytes: replies may be that many times larger.
const MOST_AMPLIFICATION: u64 = 5;

#[test]
fn the_challenge_is_not_larger_than_needed() {
    let serve = Serve::start(&[]);
    let (asked, answer, challenge) = stun::Client::new(serve.address(V4)).challenge();
    let needed = challenge.realm.len() + challenge.nonce.len();
    // Header, ERROR-CODE with a phrase, headers of REALM and NONCE, PASSWORD-ALGORITHMS, SOFTWARE, FINGERPRINT.
    assert!(answer.0.len() <= needed + 96, "{} bytes, realm and nonce are {needed}", answer.0.len());
    let most = asked * usize::try_from(MOST_AMPLIFICATION).expect("small");
    assert!(answer.0.len() <= most, "{} bytes for {asked}", answer.0.len());
}

#[test]
fn malformed_datagrams_get_no_answer() {
    let serve = Serve::start(&[]);
    let stun = stun::Client::new(serve.address(V4));
    let malformed: &[&[u8]] = &[
        b"",
        b"\x00",
        // An Allocate without the magic cookie: RFC 3489 has Binding alone.
        &[0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        // One that says it is longer than it is.
        &[0, 1, 0, 8, 0x21, 0x12, 0xA4, 0x42, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        // A length that is no multiple of four.
        &[0, 1, 0, 3, 0x21, 0x12, 0xA4, 0x42, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        // ChannelData without an allocation, ChannelData of the reserved range (RFC 8656 section 12).
        &[0x40, 0, 0, 4, 1, 2, 3, 4],
        &[0x50, 0, 0, 4, 1, 2, 3, 4],
        // ChannelData that says it is longer than it is.
        &[0x40, 0, 0xFF, 0xFF, 1],
        &[0xFF; 1400],
        // A Send indication without an allocation.
        &[0, 0x16, 0, 0, 0x21, 0x12, 0xA4, 0x42, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    ];
    for bytes in malformed {
        stun.send_raw(bytes);
    }
    eventually("each is counted with a reason", || {
        let dropped = serve.metrics().sum("turnpike_dropped_datagrams_total", "");
        (dropped == malformed.len() as u64).then_some(())
    });
    // The first answer is the one to what follows: none came before it.
    let (_, answer, _) = stun.challenge();
    assert_eq!(answer.error(), Some(401));
}

fn received(serve: &Serve) -> u64 {
    serve.metrics().sum("turnpike_rx_datagrams_total", "")
}
