//! Mode `invalid`: background noise of the open internet. Unauthenticated requests, malformed and truncated messages,
//! ChannelData without an allocation, random bytes. The result shows how little the server sends back: the number of replies,
//! and reply bytes per byte sent (both UDP payload).

use std::{collections::BTreeMap, time::Duration};

use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use turnpike_wire::stun::{Class, Header, Writer, kind, method};

use super::{TurnLoadConfig, TurnShared};
use crate::{
    LoadError,
    pacer::Pacer,
    run::{Heartbeat, RunTallies, RunTimes, ThreadResult},
    traffic::{BATCH, Carrier as _, LONGEST_SLEEP, Sink},
    udp::UdpClients,
};

const SHORTEST_SLEEP: Duration = Duration::from_micros(20);
const DRAIN_NS: u64 = 300_000_000;
/// Number of prepared messages; a multiple of ten, the number of kinds.
const PREPARED: usize = 10 * 32;
/// Position of the transaction ID in a STUN message. The generator writes a mark, the message length and the due time into it.
const TRANSACTION: std::ops::Range<usize> = 8..20;
const MARK: [u8; 2] = *b"TP";

pub(super) fn run(shared: &TurnShared<'_>, thread: usize) -> Result<ThreadResult, LoadError> {
    let (count, first) = shared.share(shared.config.clients, thread);
    let TurnLoadConfig { datapath, clients, .. } = *shared.config;
    let sockets = UdpClients::new(shared.config.server_of(0), datapath, clients, count, shared.clock)?;
    // Seeded with the number of the thread's first client, so that every run sends the same messages.
    let mut random = SmallRng::seed_from_u64(first as u64);
    let messages: Vec<_> = (0..PREPARED).map(|kind| message(kind, &mut random)).collect();
    shared.ready_clients.fetch_add(count, std::sync::atomic::Ordering::Relaxed);
    shared.thread_is_ready();
    let schedule = shared.wait_for_start()?;
    let pacer =
        shared.config.rate.pps().map(|pps| Pacer::new(schedule.start, pps * count as f64 / clients as f64));
    let mut flood = Flood {
        clients: sockets,
        count,
        messages,
        turn: 0,
        pacer,
        replies: Replies {
            measure_ns: schedule.measure,
            tallies: RunTallies::default(),
            longest: 0,
            worst: 0.0,
        },
    };
    let heartbeat = flood.run(shared, thread, schedule)?;
    let Flood { mut clients, mut replies, .. } = flood;
    let deadline = shared.clock.ns() + DRAIN_NS;
    while shared.clock.ns() < deadline {
        shared.check()?;
        clients.receive(Duration::from_millis(5), &mut replies)?;
    }
    replies.tallies.publish(&shared.slots[thread], 0);
    let cpu = heartbeat.cpu();
    Ok(ThreadResult {
        errors: clients.errors,
        cpu,
        extra: BTreeMap::from([
            ("longest_reply_bytes", replies.longest as f64),
            ("worst_amplification", replies.worst),
        ]),
        ..ThreadResult::default()
    })
}

struct Replies {
    measure_ns: u64,
    tallies: RunTallies,
    longest: usize,
    worst: f64,
}

impl Sink for Replies {
    fn payload(&mut self, _client: usize, now_ns: u64, datagram: &[u8]) {
        let own = datagram.get(TRANSACTION).and_then(|id| {
            let (mark, rest) = id.split_first_chunk::<2>()?;
            let (len, due) = rest.split_first_chunk::<2>()?;
            (*mark == MARK).then_some((u16::from_be_bytes(*len), u64::from_be_bytes(*due.first_chunk()?)))
        });
        let due = own.map(|(_, due)| due);
        let tally = self.tallies.of(due.unwrap_or(now_ns) >= self.measure_ns);
        tally.received += 1;
        tally.received_bytes += datagram.len() as u64;
        self.longest = self.longest.max(datagram.len());
        if let Some((len, due)) = own {
            let ratio = datagram.len() as f64 / f64::from(len.max(1));
            self.worst = self.worst.max(ratio);
            tally.record_rtt(now_ns.saturating_sub(due) / 1_000);
        }
    }
}

struct Flood {
    clients: UdpClients,
    count: usize,
    messages: Vec<Vec<u8>>,
    turn: usize,
    pacer: Option<Pacer>,
    replies: Replies,
}

impl Flood {
    fn run<'a>(
        &mut self,
        shared: &'a TurnShared<'a>,
        thread: usize,
        mut schedule: RunTimes,
    ) -> Result<Heartbeat<'a, TurnLoadConfig>, LoadError> {
        let mut heartbeat = Heartbeat::new(shared, thread, schedule);
        loop {
            let now = shared.clock.ns();
            heartbeat.beat(now, &mut self.replies.tallies, &mut schedule, || 0)?;
            if now >= schedule.end {
                return Ok(heartbeat);
            }
            let sleep = self.queue_due(now, &schedule);
            let dropped = self.clients.flush();
            let tally = self.replies.tallies.of(now >= schedule.measure);
            tally.sent = tally.sent.saturating_sub(dropped);
            self.clients.receive(sleep, &mut self.replies)?;
        }
    }

    fn queue_due(&mut self, now: u64, schedule: &RunTimes) -> Duration {
        while self.clients.queued() < BATCH {
            let due = self.pacer.as_ref().map_or(now.max(schedule.start), Pacer::due);
            if due > now {
                return Duration::from_nanos(due - now).clamp(SHORTEST_SLEEP, LONGEST_SLEEP);
            }
            if let Some(pacer) = &mut self.pacer {
                pacer.advance();
            }
            let message = &self.messages[self.turn % self.messages.len()];
            self.clients.push(self.turn % self.count, 1, message.len(), |out| {
                out.copy_from_slice(message);
                if let Some(id) = out.get_mut(TRANSACTION) {
                    id[..2].copy_from_slice(&MARK);
                    id[2..4].copy_from_slice(&u16::try_from(message.len()).unwrap_or(u16::MAX).to_be_bytes());
                    id[4..].copy_from_slice(&due.to_be_bytes());
                }
            });
            self.turn += 1;
            let tally = self.replies.tallies.of(due >= schedule.measure);
            tally.sent += 1;
            tally.sent_bytes += message.len() as u64;
            tally.late.record((now - due) / 1_000);
        }
        Duration::ZERO
    }
}

fn message(kind: usize, random: &mut SmallRng) -> Vec<u8> {
    const REQUESTED_TRANSPORT: [u8; 4] = [17, 0, 0, 0];
    let mut bytes = |from: usize, to: usize| -> Vec<u8> {
        let len = random.random_range(from..=to);
        (0..len).map(|_| random.random()).collect()
    };
    let allocate = |with: &dyn Fn(&mut Writer<'_>)| {
        stun(Class::Request, method::ALLOCATE, &|message| {
            with(message.attribute(kind::REQUESTED_TRANSPORT, &REQUESTED_TRANSPORT));
        })
    };
    match kind % 10 {
        // Valid but unauthenticated: the response is 401.
        0 => allocate(&|_| ()),
        // Unknown user and a random MAC.
        1 => {
            let noise =
                [(kind::USERNAME, 12), (kind::REALM, 8), (kind::NONCE, 32), (kind::MESSAGE_INTEGRITY, 20)]
                    .map(|(kind, len)| {
                        (kind, bytes(len, len).iter().map(|byte| b'a' + byte % 26).collect::<Vec<_>>())
                    });
            allocate(&|message| noise.iter().for_each(|(kind, value)| _ = message.attribute(*kind, value)))
        }
        // Length field beyond the end of the message.
        2 => {
            let mut message = allocate(&|_| ());
            message[3] = 200;
            message
        }
        // Truncated within the header.
        3 => {
            let mut message = stun(Class::Request, method::BINDING, &|_| ());
            message.truncate(12);
            message
        }
        // Attribute longer than the message.
        4 => stun(Class::Request, method::REFRESH, &|message| {
            let [high, low] = kind::LIFETIME.to_be_bytes();
            message.raw(&[high, low, 0x01, 0x00, 0, 0, 0, 0]);
        }),
        // Unknown comprehension-required attribute: the response is 420.
        5 => stun(Class::Request, method::BINDING, &|message| _ = message.attribute(0x7F01, &[1, 2, 3, 4])),
        // ChannelData from a client without an allocation.
        6 => {
            let payload = bytes(24, 200);
            let mut message = vec![0x40, 0x01, 0, 0];
            message[3] = u8::try_from(payload.len()).unwrap_or(0);
            message.extend(payload);
            message
        }
        // Truncated ChannelData.
        7 => vec![0x40, 0x00, 0x04, 0x00, 1, 2, 3],
        8 => stun(Class::Indication, method::SEND, &|message| {
            message.xor_address(kind::XOR_PEER_ADDRESS, ([0, 0, 0, 0], 0).into()).attribute(kind::DATA, &[]);
        }),
        _ => bytes(1, 600),
    }
}

fn stun(class: Class, method: u16, attributes: &dyn Fn(&mut Writer<'_>)) -> Vec<u8> {
    let mut buffer = Vec::new();
    let mut message = Writer::begin(&mut buffer, Header { class, method, transaction: [0; 12] });
    attributes(&mut message);
    message.finish(false);
    buffer
}
