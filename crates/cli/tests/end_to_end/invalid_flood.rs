//! Floods of what nobody authenticated: counters with reasons, and nothing else that stays.

use std::time::Instant;

use super::harness::{Load, SOON, Serve, Stun, V4, eventually};

#[test]
fn a_flood_leaves_no_state_no_log_lines_and_no_amplification() {
    let serve = Serve::start(&["--workers", "1"]);
    let flood = |rate: &str, seconds: &str| {
        let run = Load::new(serve.address(V4))
            .with(&["--mode", "invalid", "--clients", "16", "--rate", rate, "--duration", seconds])
            .start()
            .wait(SOON * 2);
        assert_eq!(run.code, Some(0), "{}", run.output());
    };
    // The first flood fills the arenas that every later one uses again.
    flood("5000", "1");
    let before = (serve.resident_kib(), serve.program.lines().len(), received(&serve));
    let began = Instant::now();
    flood("20000", "3");
    let seconds = began.elapsed().as_secs() + 1;

    let arrived = received(&serve) - before.2;
    assert!(arrived > 5000, "only {arrived} datagrams of the flood arrived");
    let grown = serve.resident_kib().saturating_sub(before.0);
    // 60,000 datagrams: a hundred bytes kept for each would be 6 MB.
    assert!(grown < 2048, "{grown} KiB more");
    let lines = serve.program.lines().len() - before.1;
    // Refused credentials, which a part of the flood is, may be logged 20 times a second after a burst of 50.
    let most = 50 + 20 * usize::try_from(seconds).expect("small");
    assert!(lines <= most, "{lines} log lines for {arrived} datagrams in {seconds} s");
    assert_eq!(serve.allocations(), 0);
    assert_eq!(serve.metrics().sum("turnpike_allocations_opened_total", ""), 0);

    let metrics = serve.metrics();
    assert!(metrics.sum("turnpike_dropped_datagrams_total", "") > 0);
    let (bytes_in, bytes_out) =
        (metrics.sum("turnpike_rx_bytes_total", ""), metrics.sum("turnpike_tx_bytes_total", ""));
    // Over the whole mixture: most of it deserves no answer at all.
    assert!(bytes_out <= bytes_in * MOST_AMPLIFICATION, "{bytes_out} bytes out for {bytes_in} in");
}

/// A 401 must carry realm and nonce, and the shortest Allocate has 28 bytes: replies may be that many times larger.
const MOST_AMPLIFICATION: u64 = 5;

#[test]
fn the_challenge_is_not_larger_than_needed() {
    let serve = Serve::start(&[]);
    let (asked, answer, challenge) = Stun::new(serve.address(V4)).challenge();
    let needed = challenge.realm.len() + challenge.nonce.len();
    // Header, ERROR-CODE with a phrase, headers of REALM and NONCE, PASSWORD-ALGORITHMS, SOFTWARE, FINGERPRINT.
    assert!(answer.len <= needed + 96, "{} bytes, realm and nonce are {needed}", answer.len);
    let most = asked * usize::try_from(MOST_AMPLIFICATION).expect("small");
    assert!(answer.len <= most, "{} bytes for {asked}", answer.len);
}

#[test]
fn malformed_datagrams_get_no_answer() {
    let serve = Serve::start(&[]);
    let mut stun = Stun::new(serve.address(V4));
    let malformed: &[&[u8]] = &[
        b"",
        b"\x00",
        // A Binding request without its magic cookie (RFC 8489 section 5).
        &[0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
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
