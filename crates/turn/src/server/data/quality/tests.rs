#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "small numbers")]

use super::*;

const STEP_US: u64 = 20_000;

/// Sends an RTP stream whose timestamps follow the time of sending.
#[derive(Clone, Copy)]
struct Sender {
    ssrc: u32,
    sequence: u16,
    rate: u64,
    sent_us: u64,
}

impl Sender {
    fn new(ssrc: u32, sequence: u16) -> Self {
        Self { ssrc, sequence, rate: 48_000, sent_us: 7_000_000 }
    }

    fn at(rate: u64) -> Self {
        Self { rate, ..Self::new(7, 65_000) }
    }

    /// The next datagram and its time.
    fn next(&mut self) -> (u64, Vec<u8>) {
        let timestamp = (self.sent_us * self.rate / 1_000_000 + 0xFFFF_0000) as u32;
        let mut datagram = vec![0x80, 111];
        datagram.extend(self.sequence.to_be_bytes());
        datagram.extend(timestamp.to_be_bytes());
        datagram.extend(self.ssrc.to_be_bytes());
        datagram.extend([0x55; 100]);
        let at = self.sent_us;
        self.sequence = self.sequence.wrapping_add(1);
        self.sent_us += STEP_US;
        (at, datagram)
    }

    fn many(&mut self, count: usize) -> Vec<(u64, Vec<u8>)> {
        (0..count).map(|_| self.next()).collect()
    }
}

fn meter() -> Box<Meter> {
    Meter::new(QualityLevel::On).unwrap()
}

fn feed<'a>(meter: &mut Meter, way: Way, datagrams: impl IntoIterator<Item = &'a (u64, Vec<u8>)>) {
    datagrams.into_iter().for_each(|(at, datagram)| meter.relayed(way, *at, datagram));
}

fn uplink(meter: &Meter) -> MeasuredFlow {
    meter.measured().client.uplink.unwrap()
}

/// A receiver report with one block.
fn report(ssrc: u32, lost: u32, highest: u32, jitter: u32) -> Vec<u8> {
    let words = [0x81C9_0007, 99, ssrc, lost & 0xFF_FFFF, highest, jitter, 0, 0];
    words.iter().flat_map(|word: &u32| word.to_be_bytes()).collect()
}

#[test]
fn loss_is_exact_across_wraps_of_the_sequence_numbers() {
    let (mut meter, mut sender) = (meter(), Sender::new(7, 65_000));
    let sent = sender.many(140_000);
    feed(&mut meter, Way::ToPeer, sent.iter().enumerate().filter(|(at, _)| at % 10 != 5).map(|(_, it)| it));
    let flow = uplink(&meter);
    assert_eq!((flow.expected, flow.lost, flow.reordered), (140_000, 14_000, 0));
    assert_eq!(flow.jitter_us, 0);
    assert_eq!(flow.longest_gap_us, 2 * STEP_US);
    assert_eq!(meter.measured().peer, MeasuredLeg::default());
}

#[test]
fn reordered_datagrams_are_not_lost_and_duplicates_count_once() {
    let (mut meter, mut sender) = (meter(), Sender::new(7, 100));
    let mut sent = sender.many(1000);
    for at in (100..900).step_by(100) {
        sent.swap(at, at + 3);
    }
    let twice = sent[500].clone();
    sent.insert(520, twice);
    sent.remove(700);
    feed(&mut meter, Way::ToPeer, &sent);
    let flow = uplink(&meter);
    // A swap of numbers three apart delays three datagrams; one of those around 700 is lost instead.
    assert_eq!((flow.expected, flow.lost), (1000, 1));
    assert!((22..=24).contains(&flow.reordered), "{flow:?}");
}

#[test]
fn restarts_are_not_losses() {
    for jump in [5000, 40_000, 65_000] {
        let (mut meter, mut sender) = (meter(), Sender::new(7, 100));
        feed(&mut meter, Way::ToPeer, &sender.many(200));
        sender.sequence = sender.sequence.wrapping_add(jump);
        feed(&mut meter, Way::ToPeer, &sender.many(200));
        let flow = uplink(&meter);
        assert_eq!((flow.expected, flow.lost), (400, 0), "{jump}");
    }
}

#[test]
fn single_datagrams_far_away_are_ignored() {
    let (mut meter, mut sender) = (meter(), Sender::new(7, 100));
    feed(&mut meter, Way::ToPeer, &sender.many(200));
    let mut stray = Sender { sequence: 30_000, ..sender };
    feed(&mut meter, Way::ToPeer, &stray.many(1));
    feed(&mut meter, Way::ToPeer, &sender.many(200));
    assert_eq!((uplink(&meter).expected, uplink(&meter).lost), (400, 0));
}

/// Jitter of RFC 3550 by its definition, in microseconds.
fn true_jitter(delays: &[u64]) -> f64 {
    delays.windows(2).fold(0.0, |jitter, two| jitter + (two[0].abs_diff(two[1]) as f64 - jitter) / 16.0)
}

#[test]
fn jitter_is_that_of_the_rfc_at_all_clock_rates() {
    for rate in [8000, 16_000, 48_000, 90_000] {
        for most_us in [0, 500, 4000, 40_000] {
            let (mut meter, mut sender) = (meter(), Sender::at(rate));
            let (mut seed, mut delays) = (1_u64, Vec::new());
            // Ten minutes, in which the timestamps wrap.
            for (at, datagram) in sender.many(30_000) {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                delays.push(50_000 + (seed >> 33) * most_us / (1 << 31));
                meter.relayed(Way::ToPeer, at + delays[delays.len() - 1], &datagram);
            }
            let (measured, truth) = (uplink(&meter).jitter_us as f64, true_jitter(&delays));
            // Timestamps have steps of up to 125 microseconds.
            assert!((measured - truth).abs() <= truth * 0.1 + 130.0, "{rate}: {measured}, not {truth}");
        }
    }
}

#[test]
fn jitter_continues_after_the_timestamps_break() {
    let (mut meter, mut sender) = (meter(), Sender::at(48_000));
    feed(&mut meter, Way::ToPeer, &sender.many(1000));
    let gap = 3_600_000_000;
    let late: Vec<_> = sender.many(1000).into_iter().map(|(at, it)| (at + gap, it)).collect();
    feed(&mut meter, Way::ToPeer, &late);
    assert_eq!(uplink(&meter).jitter_us, 0);
}

#[test]
fn streams_of_one_direction_are_summed() {
    let mut meter = meter();
    let (mut audio, mut video) = (Sender::new(7, 0), Sender { rate: 90_000, ..Sender::new(8, 5000) });
    for number in 0..1000 {
        let (sound, picture) = (audio.next(), video.next());
        if number % 20 != 3 {
            feed(&mut meter, Way::ToClient, [&sound]);
        }
        if number % 50 != 7 {
            feed(&mut meter, Way::ToClient, [&picture]);
        }
    }
    let flow = meter.measured().peer.uplink.unwrap();
    assert_eq!((flow.expected, flow.lost), (2000, 70));
}

#[test]
fn floods_of_streams_take_bounded_memory_and_idle_streams_give_way() {
    let mut meter = meter();
    for ssrc in 0..10_000 {
        feed(&mut meter, Way::ToPeer, &Sender::new(ssrc, 9).many(3));
    }
    let flow = &meter.flows[Way::ToPeer as usize];
    assert_eq!(uplink(&meter).expected, 12);
    assert_eq!(flow.measured().map(|flow| flow.lost), Some(0));
    let mut later = Sender { sent_us: 60_000_000, ..Sender::new(20_000, 9) };
    feed(&mut meter, Way::ToPeer, &later.many(8));
    assert_eq!(uplink(&meter).expected, 20);
}

#[test]
fn other_traffic_yields_no_figures() {
    let (mut meter, mut seed) = (meter(), 1_u64);
    for number in 0..100_000_u64 {
        let noise: Vec<u8> = (0..8)
            .flat_map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                seed.swap_bytes().to_le_bytes()
            })
            .collect();
        let length = (number % 64) as usize;
        for way in [Way::ToPeer, Way::ToClient] {
            meter.relayed(way, number * 100, &noise[..length]);
            meter.relayed(way, number * 100, &[[0x80, 96].as_slice(), &noise[..length]].concat());
            meter.relayed(way, number * 100, &[0x80; 40]);
        }
    }
    assert_eq!(meter.measured(), Measured::default());
}

fn binding(kind: u16, id: u8) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &[0, 0], &turnpike_wire::stun::COOKIE, &[id; 12]].concat()
}

#[test]
fn stun_transactions_measure_the_end_that_responds() {
    let mut meter = meter();
    meter.relayed(Way::ToPeer, 1_000_000, &binding(1, 1));
    meter.relayed(Way::ToClient, 1_000_500, &binding(1, 2));
    meter.relayed(Way::ToClient, 1_040_000, &binding(0x101, 1));
    meter.relayed(Way::ToPeer, 1_010_500, &binding(0x111, 2));
    let measured = meter.measured();
    assert_eq!((measured.peer.round_trip_us, measured.client.round_trip_us), (Some(40_000), Some(10_000)));
    // Copies of a response, and responses to repeated requests, count for nothing.
    meter.relayed(Way::ToClient, 1_900_000, &binding(0x101, 1));
    meter.relayed(Way::ToPeer, 2_000_000, &binding(1, 3));
    meter.relayed(Way::ToPeer, 2_500_000, &binding(1, 3));
    meter.relayed(Way::ToClient, 2_600_000, &binding(0x101, 3));
    assert_eq!(meter.measured(), measured);
    meter.relayed(Way::ToPeer, 3_000_000, &binding(1, 4));
    meter.relayed(Way::ToClient, 3_048_000, &binding(0x101, 4));
    assert_eq!(meter.measured().peer.round_trip_us, Some(41_000));
}

/// A connection whose client is the relay's client: 10 ms away, and its server is 30 ms away.
fn spin(meter: &mut Meter, mut bit: impl FnMut(u64) -> bool) {
    meter.relayed(Way::ToPeer, 0, &[0xC3, 0, 0, 0, 1, 8]);
    for round in 0..100 {
        for packet in 0..4 {
            let at = round * 40_000 + packet * 500;
            let first = |bit: bool| [if bit { 0x60 } else { 0x40 }, 1, 2, 3];
            meter.relayed(Way::ToPeer, at, &first(bit(round)));
        }
        for packet in 0..4 {
            let at = round * 40_000 + 30_000 + packet * 500;
            meter.relayed(Way::ToClient, at, &[if bit(round) { 0x60 } else { 0x40 }, 1, 2, 3]);
        }
    }
}

#[test]
fn spin_bits_measure_both_ends() {
    let mut meter = meter();
    spin(&mut meter, |round| round % 2 == 1);
    let measured = meter.measured();
    assert_eq!((measured.peer.round_trip_us, measured.client.round_trip_us), (Some(30_000), Some(10_000)));
}

#[test]
fn random_and_constant_spin_bits_measure_nothing() {
    let mut seed = 1_u64;
    let mut random = |_| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        seed >> 63 == 1
    };
    let bits: [&mut dyn FnMut(u64) -> bool; 3] = [&mut random, &mut |_| true, &mut |_| false];
    for bit in bits {
        let mut meter = meter();
        spin(&mut meter, bit);
        assert_eq!(meter.measured(), Measured::default());
    }
}

#[test]
fn reports_tell_loss_behind_the_relay_from_loss_before_it() {
    for level in [QualityLevel::Headers, QualityLevel::On] {
        let mut meter = Meter::new(level).unwrap();
        let mut sender = Sender::new(7, 1000);
        let mut lost_behind = 0;
        for number in 0..3000_u32 {
            let (at, datagram) = sender.next();
            // One of 50 is lost before the relay.
            if number % 50 != 10 {
                meter.relayed(Way::ToClient, at, &datagram);
                lost_behind += u32::from(number % 20 == 5);
            }
            if number % 250 == 249 {
                let lost = number / 50 + 1 + lost_behind;
                meter.relayed(Way::ToPeer, at, &report(7, lost, 1000 + number, 480));
            }
        }
        let measured = meter.measured();
        let before = measured.peer.uplink.unwrap();
        assert_eq!((before.expected, before.lost), (3000, 60));
        let behind = measured.client.downlink;
        assert_eq!(behind.is_some(), level == QualityLevel::On);
        if let Some(behind) = behind {
            assert_eq!((behind.expected, behind.lost, behind.jitter_us), (2940, lost_behind.into(), 10_000));
        }
    }
}

#[test]
fn encrypted_and_foreign_reports_are_ignored() {
    let (mut meter, mut sender) = (meter(), Sender::new(7, 1000));
    feed(&mut meter, Way::ToClient, &sender.many(500));
    let encrypted = [report(7, 100, 1400, 480), vec![0x80; 14]].concat();
    let cut = report(7, 100, 1400, 480)[..30].to_vec();
    for report in [encrypted, cut, report(8, 100, 1400, 480), report(7, 100, 9000, 480)] {
        meter.relayed(Way::ToPeer, sender.sent_us, &report);
    }
    assert_eq!(meter.measured().client, MeasuredLeg::default());
}

#[test]
fn loss_from_before_the_measurement_is_not_counted() {
    let (mut meter, mut sender) = (meter(), Sender::new(7, 1000));
    feed(&mut meter, Way::ToClient, &sender.many(5000));
    meter.relayed(Way::ToPeer, sender.sent_us, &report(7, 900, 5999, 0));
    feed(&mut meter, Way::ToClient, &sender.many(500));
    meter.relayed(Way::ToPeer, sender.sent_us, &report(7, 925, 6499, 0));
    assert_eq!(meter.measured().client.downlink.unwrap().lost, 25);
}
