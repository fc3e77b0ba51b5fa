//! RTP streams with known loss and jitter at both ends, and receiver reports about them (RFC 3550).

use std::{collections::BTreeSet, time::Duration};

/// Timestamp units per second.
const CLOCK: f64 = 48_000.0;
const HEADER: usize = 12;
const PAYLOAD_TYPE: u8 = 111;
const RECEIVER_REPORT: u8 = 201;

/// Sends a stream. Timestamps are the times of sending, so a late sender adds no jitter.
#[derive(Debug)]
pub struct RtpSender {
    ssrc: u32,
    sequence: u16,
    pub sent: u64,
}

impl RtpSender {
    pub fn new(ssrc: u32, first_sequence: u16) -> Self {
        Self { ssrc, sequence: first_sequence, sent: 0 }
    }

    /// The next datagram. `at` is the time since the stream began.
    pub fn datagram(&mut self, at: Duration, payload: usize) -> Vec<u8> {
        let mut datagram = vec![0x80, PAYLOAD_TYPE];
        datagram.extend(self.sequence.to_be_bytes());
        datagram.extend(units(at).to_be_bytes());
        datagram.extend(self.ssrc.to_be_bytes());
        datagram.resize(HEADER + payload, 0);
        self.sequence = self.sequence.wrapping_add(1);
        self.sent += 1;
        datagram
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "tests take less than a day")]
fn units(at: Duration) -> u32 {
    (at.as_secs_f64() * CLOCK) as u32
}

/// Counts a stream on arrival.
#[derive(Debug, Default)]
pub struct RtpReceiver {
    /// SSRC of the stream.
    source: u32,
    /// Extended sequence numbers; duplicates count once.
    received: BTreeSet<i64>,
    /// Difference between arrival and sending of the last datagram, in timestamp units.
    transit: Option<f64>,
    /// Timestamp units.
    jitter: f64,
    /// Expected and lost at the previous report.
    reported: (u64, u64),
}

impl RtpReceiver {
    /// Counts a datagram; returns false if it is not RTP. `at` is on the clock of the sender.
    pub fn receive(&mut self, at: Duration, datagram: &[u8]) -> bool {
        let Some((header, _)) = datagram.split_first_chunk::<HEADER>() else { return false };
        let [0x80, PAYLOAD_TYPE, s0, s1, t0, t1, t2, t3, source @ ..] = *header else { return false };
        self.source = u32::from_be_bytes(source);
        let highest =
            self.received.last().copied().unwrap_or_else(|| i64::from(u16::from_be_bytes([s0, s1])));
        let [.., h0, h1] = highest.to_be_bytes();
        let ahead = u16::from_be_bytes([s0, s1]).wrapping_sub(u16::from_be_bytes([h0, h1])).cast_signed();
        self.received.insert(highest + i64::from(ahead));
        let transit = at.as_secs_f64() * CLOCK - f64::from(u32::from_be_bytes([t0, t1, t2, t3]));
        if let Some(before) = self.transit.replace(transit) {
            self.jitter += ((transit - before).abs() - self.jitter) / 16.0;
        }
        true
    }

    /// Datagrams that the sequence numbers promise.
    pub fn expected(&self) -> u64 {
        let (Some(first), Some(last)) = (self.received.first(), self.received.last()) else { return 0 };
        (last - first).unsigned_abs() + 1
    }

    pub fn lost(&self) -> u64 {
        self.expected() - self.received.len() as u64
    }

    pub fn jitter_ms(&self) -> f64 {
        self.jitter / CLOCK * 1000.0
    }

    /// An RTCP receiver report with one block, from the receiver `reporter`.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "fields of the format")]
    pub fn report(&mut self, reporter: u32) -> [u8; 32] {
        let (expected, lost) = (self.expected(), self.lost());
        let (since, lost_since) = (expected - self.reported.0, lost.saturating_sub(self.reported.1));
        self.reported = (expected, lost);
        let fraction = (lost_since * 256).checked_div(since).unwrap_or(0).min(255) as u32;
        let highest = self.received.last().copied().unwrap_or_default() as u32;
        let words = [
            0x8100_0007 | u32::from(RECEIVER_REPORT) << 16,
            reporter,
            self.source,
            fraction << 24 | (lost.min(0x7F_FFFF) as u32),
            highest,
            self.jitter as u32,
            0,
            0,
        ];
        let mut report = [0; 32];
        for (bytes, word) in report.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(20);

    #[test]
    fn loss_is_exact_across_a_wrap_with_reordering_and_duplicates() {
        let (mut sender, mut receiver) = (RtpSender::new(7, 65_500), RtpReceiver::default());
        let mut sent: Vec<_> = (0..100).map(|number| sender.datagram(STEP * number, 160)).collect();
        sent.swap(40, 41);
        for (number, datagram) in (0..).zip(&sent) {
            if number % 10 != 5 {
                assert!(receiver.receive(STEP * number, datagram));
            }
        }
        receiver.receive(STEP * 100, &sent[50]);
        assert_eq!((sender.sent, receiver.expected(), receiver.lost()), (100, 100, 10));
    }

    #[test]
    fn constant_delay_is_no_jitter_and_alternating_delay_is() {
        for (extra_ms, expected_ms) in [(0, 0.0), (10, 10.0)] {
            let (mut sender, mut receiver) = (RtpSender::new(7, 0), RtpReceiver::default());
            for number in 0..200 {
                let datagram = sender.datagram(STEP * number, 160);
                let delay = Duration::from_millis(50 + u64::from(number % 2) * extra_ms);
                receiver.receive(STEP * number + delay, &datagram);
            }
            let jitter_ms = receiver.jitter_ms();
            assert!((jitter_ms - expected_ms).abs() < 0.1, "{jitter_ms}");
        }
    }

    #[test]
    fn report_has_one_block_with_the_loss_since_the_previous_one() {
        let (mut sender, mut receiver) = (RtpSender::new(7, 0), RtpReceiver::default());
        for number in 0..100 {
            let datagram = sender.datagram(STEP * number, 160);
            if number % 4 != 1 {
                receiver.receive(STEP * number, &datagram);
            }
        }
        let report = receiver.report(9);
        assert_eq!(report[..4], [0x81, 201, 0, 7]);
        assert_eq!((report[7], report[11]), (9, 7));
        assert_eq!(report[12..16], [64, 0, 0, 25]);
        assert_eq!(report[16..20], [0, 0, 0, 99]);
        assert_eq!(receiver.report(9)[12], 0);
    }

    #[test]
    fn other_datagrams_are_not_counted() {
        let mut receiver = RtpReceiver::default();
        for datagram in [&b""[..], b"hello", &[0; 20], &RtpReceiver::default().report(1)] {
            assert!(!receiver.receive(STEP, datagram));
        }
        assert_eq!(receiver.expected(), 0);
    }
}
