//! Mode `packet`: traffic through the relay to the reflector and back.
//!
//! One thread alternates between sending what is due and receiving what is there; each client is a socket. Datagrams are
//! written in place, neighbours of one client leave as one super-packet, and what comes back is read from GRO
//! buffers, so that a datagram costs the generator a small part of what it costs the relay.

use std::{sync::Mutex, time::Duration};

use turnpike_measure::{Arrival, Jitter, Rate, Sequence};
use turnpike_turn::client::{Event, Relayed, Request};
use turnpike_wire::{channel_data::ChannelData, indication};

use super::{
    Config, Shared, Via, direct,
    engine::{Engine, Sink},
    finished,
    migrate::{self, Moves},
    set_up,
};
use crate::{
    LoadError,
    clock::thread_cpu,
    pacer::Pacer,
    payload::{HEADER_LEN, Stamp},
    run::{Finished, Schedule, Tallies},
    secure::Security,
};

/// Datagrams queued before they are sent.
const BATCH: usize = 256;
/// How often counts are handed to the reporter.
const PUBLISH_NS: u64 = 200_000_000;
/// A paced thread sleeps no shorter than this. Waking for every burst cost 38 % of the generator's CPU time at 25,000
/// bursts a second; 20,000 a second, where latency is looked at, still has a wake-up for each.
const SHORTEST_SLEEP: Duration = Duration::from_micros(50);
/// A thread with nothing to send wakes this often to look after its clients.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);
/// Replies that have not come back this long after the last one are lost.
const QUIET_NS: u64 = 400_000_000;
/// However many trickle in, the wait for them ends.
const LONGEST_DRAIN_NS: u64 = 3_000_000_000;

/// Runs one thread's share of the clients.
pub(super) fn run(
    shared: &Shared<'_>,
    security: Option<&Security>,
    thread: usize,
    moved: &Mutex<migrate::Found>,
) -> Result<Finished, LoadError> {
    let (count, first) = shared.share(shared.config.clients, thread);
    let mut engine = Engine::new(shared.config, security, count, shared.clock)?;
    let measured = measure(&mut engine, shared, thread, count, first, moved);
    // Also after a failure, for those clients that had got their allocation.
    let taken_down =
        if shared.config.via == Via::Direct { Ok(()) } else { set_up::take_down(&mut engine, shared) };
    let measured = measured?;
    taken_down?;
    Ok(finished(shared.config, engine, measured))
}

fn measure(
    engine: &mut Engine,
    shared: &Shared<'_>,
    thread: usize,
    count: usize,
    first: usize,
    moved: &Mutex<migrate::Found>,
) -> Result<Finished, LoadError> {
    match shared.config.via {
        Via::Direct => direct::set_up(engine, shared, first, set_up::outstanding(shared))?,
        Via::Channel | Via::Send => set_up::set_up(engine, shared)?,
    }
    let flows = (0..count).map(|index| Flow::new(engine, index, first + index, shared.config));
    let mut traffic = Traffic {
        flows: flows.collect(),
        tallies: Tallies::default(),
        measure_ns: u64::MAX,
        garbled: 0,
        moves: Moves::new(count),
    };
    shared.thread_is_ready();
    let schedule = loop {
        shared.check()?;
        if let Some(schedule) = shared.schedule() {
            break schedule;
        }
        serve(engine, &mut traffic, shared, Duration::from_millis(1))?;
    };
    traffic.measure_ns = schedule.measure;
    traffic.moves.begin(shared.config, schedule, first);
    let cpu = send_all(engine, &mut traffic, shared, thread, schedule, first)?;
    drain(engine, &mut traffic, shared)?;
    let cpu = cpu.zip(thread_cpu()).map(|(from, to)| to.saturating_sub(from));
    traffic.publish(shared, thread);
    traffic.moves.finish(moved);
    // A relayed stream that lost or gained a byte is one to its end.
    if traffic.garbled > 0 && shared.config.relayed == Relayed::Tcp {
        engine.errors.insert("garbled", traffic.garbled);
    }
    let estimates = traffic.flows.iter().filter_map(|flow| flow.jitter.estimate());
    let jitter = estimates.fold((0.0, 0), |(sum, count), estimate| (sum + estimate, count + 1));
    Ok(Finished { jitter, cpu, ..Finished::default() })
}

/// One client's traffic.
struct Flow {
    /// What stands before the payload, ready to be copied.
    prefix: [u8; indication::MAX_HEADER_LEN],
    prefix_len: usize,
    number: u32,
    next_sequence: u64,
    seen: Sequence,
    jitter: Jitter,
    /// Everything below counts as no longer under way.
    settled: u64,
}

struct Traffic {
    flows: Vec<Flow>,
    tallies: Tallies,
    measure_ns: u64,
    /// What came back where only our own can, and is not.
    garbled: u64,
    moves: Moves,
}

impl Flow {
    #[expect(clippy::cast_possible_truncation, reason = "validated: at most 10,000 clients, 65,000 bytes")]
    fn new(engine: &mut Engine, index: usize, number: usize, config: &Config) -> Self {
        let mut prefix = [0; indication::MAX_HEADER_LEN];
        let client = &mut engine.endpoints[index].client;
        let prefix_len = match config.via {
            Via::Direct => 0,
            // A peer connection carries the peer's bytes and nothing else.
            _ if config.relayed == Relayed::Tcp => 0,
            Via::Channel | Via::Send => client.send_header(config.peer, config.size as u16, &mut prefix),
        };
        Self {
            prefix,
            prefix_len,
            number: number as u32,
            next_sequence: 0,
            seen: Sequence::new(),
            jitter: Jitter::default(),
            settled: 0,
        }
    }

    /// Datagrams sent whose reply, or that of a later one, has not come back.
    fn under_way(&self) -> u64 {
        self.next_sequence - self.seen.next().max(self.settled)
    }
}

impl Traffic {
    /// Hands the counts to the reporter.
    fn publish(&mut self, shared: &Shared<'_>, thread: usize) {
        let under_way = self.flows.iter().map(Flow::under_way).sum();
        self.tallies.publish(&shared.slots[thread], under_way);
    }

    /// Queues a burst of one client.
    fn push(&mut self, engine: &mut Engine, index: usize, due_ns: u64, config: &Config, burst: usize) {
        let flow = &mut self.flows[index];
        let padding = match config.via {
            _ if flow.prefix_len == 0 => 0,
            // On a stream ChannelData is padded as attributes are (RFC 8656 section 12.5).
            Via::Channel | Via::Direct if !config.transport.is_stream() => 0,
            Via::Channel | Via::Direct | Via::Send => indication::padding(config.size),
        };
        let (start, len) = (flow.prefix_len, flow.prefix_len + config.size + padding);
        for _ in 0..burst {
            let stamp = Stamp { client: flow.number, sequence: flow.next_sequence, due_ns };
            flow.next_sequence += 1;
            let fill = |out: &mut [u8]| {
                out[..start].copy_from_slice(&flow.prefix[..start]);
                stamp.write(&mut out[start..]);
                out[start + config.size..].fill(0);
            };
            match config.relayed {
                Relayed::Udp => engine.push_with(index, len, fill),
                Relayed::Tcp => engine.push_to_peer(index, len, fill),
            }
        }
        let tally = self.tallies.of(due_ns >= self.measure_ns);
        tally.sent += burst as u64;
        tally.sent_bytes += (burst * config.size) as u64;
    }

    #[inline]
    fn arrived(&mut self, index: usize, now_ns: u64, payload: &[u8]) -> bool {
        let Some(stamp) = Stamp::read(payload) else { return false };
        let flow = &mut self.flows[index];
        if stamp.client != flow.number || stamp.sequence >= flow.next_sequence {
            return false;
        }
        let measured = stamp.due_ns >= self.measure_ns;
        let tally = self.tallies.of(measured);
        match flow.seen.note(stamp.sequence) {
            Arrival::InOrder => {}
            Arrival::Reordered | Arrival::TooOld => tally.reordered += 1,
            Arrival::Duplicate => {
                tally.duplicated += 1;
                return true;
            }
        }
        let rtt_us = now_ns.saturating_sub(stamp.due_ns) / 1_000;
        tally.received += 1;
        tally.received_bytes += payload.len() as u64;
        tally.record_rtt(rtt_us);
        if measured {
            flow.jitter.note(rtt_us);
        }
        true
    }
}

impl Sink for Traffic {
    /// ChannelData of our own channel, without asking the client; without TURN, whatever there is.
    #[inline]
    fn raw(&mut self, index: usize, now_ns: u64, datagram: &[u8]) -> bool {
        let flow = &self.flows[index];
        if flow.prefix_len == 0 {
            if !self.arrived(index, now_ns, datagram) {
                self.garbled += 1;
            }
            return true;
        }
        let Some(header) = datagram.first_chunk::<{ ChannelData::HEADER_LEN }>() else { return false };
        if flow.prefix_len != ChannelData::HEADER_LEN || header != &flow.prefix[..ChannelData::HEADER_LEN] {
            return false;
        }
        let len = usize::from(u16::from_be_bytes([header[2], header[3]]));
        let payload = datagram.get(ChannelData::HEADER_LEN..ChannelData::HEADER_LEN + len);
        payload.is_some_and(|payload| self.arrived(index, now_ns, payload))
    }

    fn payload(&mut self, index: usize, now_ns: u64, payload: &[u8]) {
        self.arrived(index, now_ns, payload);
    }
}

/// Sends until the schedule ends, receiving in between. Returns the thread's CPU time at the start of the measured part.
fn send_all(
    engine: &mut Engine,
    traffic: &mut Traffic,
    shared: &Shared<'_>,
    thread: usize,
    schedule: Schedule,
    first: usize,
) -> Result<Option<Duration>, LoadError> {
    let mut sender = Sender::new(shared.config, schedule, traffic.flows.len(), first);
    let mut cpu = None;
    let mut next_publish = schedule.start;
    loop {
        let now = shared.clock.ns();
        if now >= next_publish {
            shared.check_on(&mut sender.schedule)?;
            traffic.moves.end_at(sender.schedule.end);
            traffic.publish(shared, thread);
            next_publish = now + PUBLISH_NS;
            if cpu.is_none() && now >= schedule.measure {
                cpu = thread_cpu();
            }
        }
        if traffic.moves.is_due(now) {
            flush(engine, traffic, shared.config, now >= schedule.measure);
            traffic.moves.start_due(engine, shared, now);
        }
        if traffic.moves.is_releasing() {
            release(engine, traffic, shared.config);
        }
        let Some(sleep) = sender.send(engine, traffic, shared, now) else { return Ok(cpu) };
        serve(engine, traffic, shared, sleep)?;
    }
}

/// Receives, and looks after the clients.
fn serve(
    engine: &mut Engine,
    traffic: &mut Traffic,
    shared: &Shared<'_>,
    sleep: Duration,
) -> Result<usize, LoadError> {
    engine.sweep();
    engine.flush();
    let received = engine.receive(sleep, traffic)?;
    for (index, event) in engine.events.drain(..) {
        match event {
            Event::Migrated { .. } => {
                traffic.moves.done(index, shared.clock.ns());
                // Its old socket took with it what was under way, which shall not fill a window for ever.
                traffic.flows[index].settled = traffic.flows[index].next_sequence;
            }
            Event::Failed { request: Request::Migrate, failure } => traffic.moves.refused(index, &failure),
            Event::Failed { request: Request::Refresh, .. } => {
                *engine.errors.entry("refresh_failed").or_default() += 1;
            }
            Event::Failed { .. } => *engine.errors.entry("permission_refresh_failed").or_default() += 1,
            Event::Icmp { .. } => *engine.errors.entry("icmp").or_default() += 1,
            _ => {}
        }
    }
    Ok(received)
}

/// Decides which client sends when.
struct Sender<'a> {
    config: &'a Config,
    schedule: Schedule,
    pace: Pace,
    burst: usize,
    flows: usize,
    /// The client whose turn it is.
    turn: usize,
}

enum Pace {
    /// Bursts at their due times.
    Open(Pacer),
    /// As much as goes, each client within its window if there is one; since when nothing has come back.
    Flood { window: u64, stuck_since: u64 },
}

impl<'a> Sender<'a> {
    #[expect(clippy::cast_precision_loss, reason = "client counts are small")]
    fn new(config: &'a Config, schedule: Schedule, flows: usize, first: usize) -> Self {
        let burst = config.burst();
        let pace = match config.rate {
            Rate::Pps(pps) => {
                let bursts = pps / burst as f64;
                let share = flows as f64 / config.clients as f64;
                // Threads take turns instead of all sending at once.
                let offset = (first as f64 / config.clients as f64) * 1e9 / (bursts * share);
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive")]
                Pace::Open(Pacer::new(schedule.start + offset as u64, bursts * share))
            }
            Rate::Max => Pace::Flood { window: config.window.unwrap_or(u64::MAX), stuck_since: 0 },
        };
        Self { config, schedule, pace, burst, flows, turn: 0 }
    }

    /// Sends what is due, at most a few batches; returns how long there is nothing to send, or `None` at the end.
    fn send(
        &mut self,
        engine: &mut Engine,
        traffic: &mut Traffic,
        shared: &Shared<'_>,
        now: u64,
    ) -> Option<Duration> {
        /// After so many batches it is the receiver's turn, however late the sender is.
        const BATCHES: usize = 4;
        let mut now = now;
        for _ in 0..BATCHES {
            if now < self.schedule.start {
                return Some(Duration::from_nanos(self.schedule.start - now).min(LONGEST_SLEEP));
            }
            match &mut self.pace {
                Pace::Open(_) => {
                    self.send_due(engine, traffic, now);
                    now = shared.clock.ns();
                    let Pace::Open(pacer) = &self.pace else { return None };
                    let due = pacer.due();
                    if due >= self.schedule.end {
                        return None;
                    }
                    if due > now {
                        let sleep = Duration::from_nanos(due - now);
                        return Some(sleep.clamp(SHORTEST_SLEEP, LONGEST_SLEEP));
                    }
                }
                Pace::Flood { .. } => {
                    if now >= self.schedule.end {
                        return None;
                    }
                    return Some(self.flood(engine, traffic, now));
                }
            }
        }
        Some(Duration::ZERO)
    }

    /// One batch of what is due by now.
    #[expect(clippy::cast_possible_truncation, reason = "a burst is at most 64")]
    fn send_due(&mut self, engine: &mut Engine, traffic: &mut Traffic, now: u64) {
        let Pace::Open(pacer) = &mut self.pace else { return };
        let mut due = pacer.due();
        while due <= now && due < self.schedule.end && engine.queued() < BATCH {
            if !traffic.moves.hold(self.turn, due) {
                traffic.push(engine, self.turn, due, self.config, self.burst);
            }
            let late = &mut traffic.tallies.of(due >= self.schedule.measure).late;
            late.record_n((now - due) / 1_000, self.burst as u32);
            self.turn = if self.turn + 1 == self.flows { 0 } else { self.turn + 1 };
            pacer.advance();
            due = pacer.due();
        }
        flush(engine, traffic, self.config, now >= self.schedule.measure);
    }

    /// One batch, round robin over the clients; returns how long to wait for replies.
    fn flood(&mut self, engine: &mut Engine, traffic: &mut Traffic, now: u64) -> Duration {
        /// With every window full and nothing coming back for so long, what is under way is lost.
        const STUCK_NS: u64 = 100_000_000;
        let Pace::Flood { window, stuck_since } = &mut self.pace else { return Duration::ZERO };
        for _ in 0..self.flows {
            let flow = &traffic.flows[self.turn];
            let has_room = engine.has_room(self.turn, self.config.relayed == Relayed::Tcp)
                && !traffic.moves.is_moving(self.turn);
            if has_room && flow.under_way() + self.burst as u64 <= *window {
                traffic.push(engine, self.turn, now, self.config, self.burst);
            }
            self.turn = if self.turn + 1 == self.flows { 0 } else { self.turn + 1 };
            if engine.queued() >= BATCH {
                break;
            }
        }
        let queued = engine.queued() as u64;
        if queued == 0 {
            if *stuck_since == 0 {
                *stuck_since = now;
            } else if now - *stuck_since > STUCK_NS {
                traffic.flows.iter_mut().for_each(|flow| flow.settled = flow.next_sequence);
            }
            return Duration::from_millis(1);
        }
        *stuck_since = 0;
        let dropped = flush(engine, traffic, self.config, now >= self.schedule.measure);
        // The kernel takes no more: give it, and whoever shares the core, time.
        if dropped == queued { Duration::from_micros(50) } else { Duration::ZERO }
    }
}

/// Sends the batch; what the kernel did not take was not sent.
fn flush(engine: &mut Engine, traffic: &mut Traffic, config: &Config, measured: bool) -> u64 {
    let dropped = engine.flush();
    if dropped > 0 {
        let tally = traffic.tallies.of(measured);
        tally.sent = tally.sent.saturating_sub(dropped);
        tally.sent_bytes = tally.sent_bytes.saturating_sub(dropped * config.size as u64);
    }
    dropped
}

/// Sends what waited for a client to move, at most a batch of it.
fn release(engine: &mut Engine, traffic: &mut Traffic, config: &Config) {
    while engine.queued() < BATCH
        && let Some((index, due)) = traffic.moves.release()
    {
        traffic.push(engine, index, due, config, config.burst());
    }
    flush(engine, traffic, config, true);
}

/// Waits for the last replies.
fn drain(engine: &mut Engine, traffic: &mut Traffic, shared: &Shared<'_>) -> Result<(), LoadError> {
    let start = shared.clock.ns();
    let mut last = start;
    loop {
        shared.check()?;
        let received = serve(engine, traffic, shared, Duration::from_millis(5))?;
        let now = shared.clock.ns();
        if received > 0 {
            last = now;
        }
        let all = traffic.flows.iter().all(|flow| flow.under_way() == 0);
        if traffic.moves.is_releasing() {
            release(engine, traffic, shared.config);
            last = now;
            continue;
        }
        let quiet = all || now - last > QUIET_NS;
        if (quiet && !traffic.moves.any_under_way()) || now - start > LONGEST_DRAIN_NS {
            // What has not left by now never will; it was due and is lost.
            traffic.moves.end();
            while traffic.moves.is_releasing() {
                release(engine, traffic, shared.config);
            }
            return Ok(());
        }
    }
}

const _: () = assert!(HEADER_LEN == 24);
