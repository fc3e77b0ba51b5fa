//! One end of a call: sends RTP, STUN checks and RTCP reports, and counts what arrives.

use crate::prelude::*;
use rand::{Rng, SeedableRng, rngs::StdRng};
use turnpike_testkit::{
    rtp::{RtpReceiver, RtpSender},
    stun::{attribute::*, kind::*},
};

const AUDIO_STEP: Duration = Duration::from_millis(20);
/// The second stream sends half as many datagrams, two at a time.
const SECOND_STEP: Duration = Duration::from_millis(80);
const CHECK_STEP: Duration = Duration::from_millis(400);
const REPORT_STEP: Duration = Duration::from_secs(1);
/// Time after the last datagram: the slowest one arrives, and reports about all of them follow.
pub(super) const REST: Duration = Duration::from_secs(6);
const BINDING_SUCCESS: u16 = 0x0101;

/// Form of the payloads on the wire.
#[derive(Clone, Debug)]
pub(super) enum Form {
    Plain(SocketAddr),
    ChannelData([u8; 2]),
    Indications(SocketAddr),
}

/// Damage to datagrams in one direction, like netem's.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Impairment {
    #[default]
    None,
    /// Part of the datagrams, at random.
    Loss(f64),
    /// Largest deviation of the delay in milliseconds.
    Jitter(u32),
    /// Milliseconds.
    Delay(u32),
}

impl Impairment {
    pub(super) fn short(self) -> String {
        match self {
            Self::None => "none".to_owned(),
            Self::Loss(part) => format!("{:.1} % lost", part * 100.0),
            Self::Jitter(ms) => format!("+-{ms} ms"),
            Self::Delay(ms) => format!("{ms} ms late"),
        }
    }
}

/// Network between an end and its socket, in one direction.
struct Network {
    impairment: Impairment,
    /// Part of the datagrams that arrive twice.
    duplicates: f64,
    random: StdRng,
    /// Datagrams on their way, by the time since the beginning of the call and a number.
    on_their_way: BTreeMap<(Duration, u64), Vec<u8>>,
    passed: u64,
}

impl Network {
    fn new(impairment: Impairment, duplicates: f64, seed: u64) -> Self {
        let random = StdRng::seed_from_u64(seed);
        Self { impairment, duplicates, random, on_their_way: BTreeMap::new(), passed: 0 }
    }

    fn pass(&mut self, now: Duration, payload: &[u8]) {
        let copies = if self.random.random_bool(self.duplicates) { 2 } else { 1 };
        for _ in 0..copies {
            let ms = match self.impairment {
                Impairment::None => 0,
                Impairment::Loss(part) if self.random.random_bool(part) => continue,
                Impairment::Loss(_) => 0,
                Impairment::Jitter(ms) => 5 + self.random.random_range(0..2 * ms),
                Impairment::Delay(ms) => ms,
            };
            self.passed += 1;
            let due = now + Duration::from_millis(ms.into());
            self.on_their_way.insert((due, self.passed), payload.to_vec());
        }
    }

    fn arrived(&mut self, now: Duration) -> Option<Vec<u8>> {
        let first = self.on_their_way.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    fn due(&self) -> Option<Duration> {
        self.on_their_way.first_key_value().map(|((due, _), _)| *due)
    }
}

pub(super) struct End {
    pub(super) socket: UdpSocket,
    pub(super) form: Form,
    /// SSRC of the first stream; the second one, if there is one, has the next.
    pub(super) ssrc: u32,
    pub(super) has_second: bool,
    /// Towards the relay, and from it.
    pub(super) impairments: [Impairment; 2],
    /// See [`Network::duplicates`], in both directions.
    pub(super) duplicates: f64,
}

/// Counters of an end.
#[derive(Debug, Default)]
pub(super) struct Counted {
    pub(super) sent: u64,
    pub(super) received: u64,
    /// Jitter of the first stream on arrival.
    pub(super) jitter_ms: f64,
    /// Smoothed as the relay does; `None` without a completed check.
    pub(super) round_trip_ms: Option<f64>,
}

struct Running<'e> {
    end: &'e End,
    began: Instant,
    receivers: [RtpReceiver; 2],
    checks: BTreeMap<Vec<u8>, Instant>,
    counted: Counted,
    uplink: Network,
    downlink: Network,
}

impl End {
    /// Sends for `duration`, and then listens until everything has arrived.
    pub(super) fn run(&self, began: Instant, duration: Duration) -> Counted {
        let mut senders = [RtpSender::new(self.ssrc, 65_400), RtpSender::new(self.ssrc + 1, 7)];
        let [uplink, downlink] = self.impairments;
        let mut running = Running {
            end: self,
            began,
            receivers: Default::default(),
            checks: BTreeMap::new(),
            counted: Counted::default(),
            uplink: Network::new(uplink, self.duplicates, self.ssrc.into()),
            downlink: Network::new(downlink, self.duplicates, u64::from(self.ssrc) + 1),
        };
        let (mut audio, mut second, mut check, mut report) =
            (Duration::ZERO, Duration::ZERO, CHECK_STEP, REPORT_STEP);
        while began.elapsed() < duration + REST {
            let now = began.elapsed();
            let sends = now < duration;
            if sends && now >= audio {
                running.send(&senders[0].datagram(now, 80));
                audio += AUDIO_STEP;
            }
            if sends && self.has_second && now >= second {
                (0..2).for_each(|_| running.send(&senders[1].datagram(now, 300)));
                second += SECOND_STEP;
            }
            if sends && now >= check {
                running.check();
                check += CHECK_STEP;
            }
            if now >= report {
                running.report();
                report += REPORT_STEP;
            }
            running.forward();
            let next = if sends { audio.min(check) } else { report };
            let dues = [running.uplink.due(), running.downlink.due()];
            let next = dues.into_iter().flatten().fold(next, Duration::min);
            let wait = next.saturating_sub(began.elapsed()).max(Duration::from_micros(100));
            self.socket.set_read_timeout(Some(wait)).expect("not zero");
            running.receive();
        }
        let Running { receivers, mut counted, .. } = running;
        counted.sent = senders.iter().map(|sender| sender.sent).sum();
        counted.received = receivers.iter().map(|receiver| receiver.expected() - receiver.lost()).sum();
        counted.jitter_ms = receivers[0].jitter_ms();
        counted
    }

    fn put(&self, payload: &[u8]) {
        let sent = match &self.form {
            Form::Plain(to) => self.socket.send_to(payload, to),
            Form::ChannelData(number) => {
                let length = u16::try_from(payload.len()).expect("a short payload").to_be_bytes();
                self.socket.send(&[&number[..], &length, payload].concat())
            }
            Form::Indications(peer) => {
                let indication = stun::plain_message(
                    SEND,
                    &[(XOR_PEER_ADDRESS, &stun::xor_address(*peer, 0)), (PAYLOAD, payload)],
                );
                self.socket.send(&indication)
            }
        };
        sent.expect("the datagram leaves");
    }
}

impl Running<'_> {
    fn send(&mut self, payload: &[u8]) {
        self.uplink.pass(self.began.elapsed(), payload);
        self.forward();
    }

    /// Moves datagrams that are due in both networks.
    fn forward(&mut self) {
        while let Some(payload) = self.uplink.arrived(self.began.elapsed()) {
            self.end.put(&payload);
        }
        while let Some(payload) = self.downlink.arrived(self.began.elapsed()) {
            self.arrived(&payload);
        }
    }

    fn check(&mut self) {
        let request = stun::plain_message(BINDING, &[]);
        self.checks.insert(request[8..20].to_vec(), Instant::now());
        self.send(&request);
    }

    fn report(&mut self) {
        let known = self.receivers.iter_mut().filter(|receiver| receiver.expected() > 0);
        let reports: Vec<_> = known.map(|receiver| receiver.report(99)).collect();
        reports.iter().for_each(|report| self.send(report));
    }

    fn receive(&mut self) {
        let mut buffer = [0; 2048];
        let Ok(length) = self.end.socket.recv(&mut buffer) else { return };
        let bytes = &buffer[..length];
        let payload = match &self.end.form {
            Form::Plain(_) => bytes.to_vec(),
            Form::ChannelData(_) => bytes[4..].to_vec(),
            Form::Indications(_) => stun::Message::stun(bytes).attribute(PAYLOAD),
        };
        self.downlink.pass(self.began.elapsed(), &payload);
        self.forward();
    }

    fn arrived(&mut self, payload: &[u8]) {
        let (at, is_stun) = (self.began.elapsed(), payload[0] < 2);
        if is_stun && payload[..2] == BINDING.to_be_bytes() {
            let answer = [&BINDING_SUCCESS.to_be_bytes(), &payload[2..]].concat();
            self.send(&answer);
        } else if is_stun {
            let Some(asked) = self.checks.remove(&payload[8..20]) else { return };
            let sample = asked.elapsed().as_secs_f64() * 1000.0;
            let before = self.counted.round_trip_ms.unwrap_or(sample);
            self.counted.round_trip_ms = Some(before + (sample - before) / 8.0);
        } else if payload.len() >= 12 && payload[0] >> 6 == 2 {
            let is_second = payload[11] & 1 != 0;
            self.receivers[usize::from(is_second)].receive(at, payload);
        }
    }
}
