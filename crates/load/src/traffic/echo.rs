//! Echo traffic: payloads sent at a fixed rate, or as fast as possible, to a reflector that returns each of
//! them.
//!
//! Each thread alternates between sending and receiving. Payloads are written directly into the send buffer, consecutive payloads of a
//! client are sent as one super-packet, and replies are read from GRO buffers. A datagram therefore costs the generator far less CPU time
//! than it costs the relay.

use std::time::Duration;

use turnpike_measure::OfferedRate;

use super::{
    BATCH, Carrier, LONGEST_DRAIN_NS, LONGEST_SLEEP, QUIET_NS, SHORTEST_SLEEP, Sink, await_start,
    flow::FlowCounters,
};
use crate::{
    LoadError,
    pacer::Pacer,
    payload::PayloadStamp,
    run::{Heartbeat, RunShared, RunTallies, RunTimes, ThreadResult},
};

#[derive(Clone, Copy, Debug)]
pub(crate) struct EchoPlan {
    pub(crate) clients: usize,
    pub(crate) rate: OfferedRate,
    pub(crate) size: usize,
    pub(crate) burst: usize,
    pub(crate) window: Option<u64>,
}

pub(crate) fn run<C>(
    carrier: &mut impl Carrier,
    plan: &EchoPlan,
    shared: &RunShared<'_, C>,
    thread: usize,
) -> Result<ThreadResult, LoadError> {
    let (count, first) = shared.share(plan.clients, thread);
    let mut echo = EchoFlows::new(count, first);
    let schedule = await_start(carrier, &mut echo, shared)?;
    echo.measure_ns = schedule.measure;
    let mut heartbeat = Heartbeat::new(shared, thread, schedule);
    let mut sender = EchoSender::new(*plan, schedule, count, first);
    loop {
        let now = shared.clock.ns();
        let flows = &echo.flows;
        let under_way = || flows.iter().map(FlowCounters::under_way).sum();
        if heartbeat.beat(now, &mut echo.tallies, &mut sender.schedule, under_way)? {
            carrier.plan(sender.schedule);
        }
        if carrier.is_due(now) {
            flush(carrier, &mut echo, plan, now >= schedule.measure);
            carrier.tend();
        }
        if carrier.is_releasing() {
            release(carrier, &mut echo, plan);
        }
        let Some(sleep) = sender.send(carrier, &mut echo, shared, now) else { break };
        carrier.receive(sleep, &mut echo)?;
    }
    drain(carrier, &mut echo, plan, shared)?;
    for (client, flow) in echo.flows.iter().enumerate() {
        carrier.lost(client, flow.lost());
    }
    let cpu = heartbeat.cpu();
    let under_way = echo.flows.iter().map(FlowCounters::under_way).sum();
    echo.tallies.publish(&shared.slots[thread], under_way);
    let estimates = echo.flows.iter().filter_map(|flow| flow.jitter.estimate());
    let jitter = estimates.fold((0.0, 0), |(sum, count), estimate| (sum + estimate, count + 1));
    Ok(ThreadResult { jitter, cpu, garbled: echo.garbled, ..ThreadResult::default() })
}

struct EchoFlows {
    first: usize,
    flows: Vec<FlowCounters>,
    tallies: RunTallies,
    measure_ns: u64,
    garbled: u64,
}

impl EchoFlows {
    fn new(count: usize, first: usize) -> Self {
        Self {
            first,
            flows: std::iter::repeat_with(FlowCounters::default).take(count).collect(),
            tallies: RunTallies::default(),
            measure_ns: u64::MAX,
            garbled: 0,
        }
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "validated: at most 10,000 clients")]
    fn number(&self, client: usize) -> u32 {
        (self.first + client) as u32
    }

    fn push(&mut self, carrier: &mut impl Carrier, client: usize, due_ns: u64, plan: &EchoPlan) {
        let number = self.number(client);
        let flow = &mut self.flows[client];
        carrier.push(client, plan.burst, plan.size, |out| {
            PayloadStamp { flow: number, sequence: flow.next_sequence, due_ns }.write(out);
            flow.next_sequence += 1;
        });
        let measured = due_ns >= self.measure_ns;
        flow.sent += if measured { plan.burst as u64 } else { 0 };
        let tally = self.tallies.of(measured);
        tally.sent += plan.burst as u64;
        tally.sent_bytes += (plan.burst * plan.size) as u64;
    }

    #[inline]
    fn arrived(&mut self, client: usize, now_ns: u64, payload: &[u8]) -> bool {
        let Some(stamp) = PayloadStamp::read(payload).filter(|stamp| stamp.flow == self.number(client))
        else {
            return false;
        };
        let measured = stamp.due_ns >= self.measure_ns;
        let tally = self.tallies.of(measured);
        self.flows[client].arrived(stamp, payload.len(), now_ns, measured, tally)
    }
}

impl Sink for EchoFlows {
    #[inline]
    fn payload(&mut self, client: usize, now_ns: u64, payload: &[u8]) {
        if !self.arrived(client, now_ns, payload) {
            self.garbled += 1;
        }
    }

    fn forget(&mut self, client: usize) {
        self.flows[client].settled = self.flows[client].next_sequence;
    }
}

struct EchoSender {
    plan: EchoPlan,
    schedule: RunTimes,
    pace: EchoPace,
    flows: usize,
    turn: usize,
}

enum EchoPace {
    Open(Pacer),
    /// Closed loop. `stuck_since` is the time at which every window was first found full, or 0.
    Flood {
        window: u64,
        stuck_since: u64,
    },
}

impl EchoSender {
    fn new(plan: EchoPlan, schedule: RunTimes, flows: usize, first: usize) -> Self {
        let pace = match plan.rate {
            OfferedRate::Pps(pps) => {
                let bursts = pps / plan.burst as f64;
                let share = flows as f64 / plan.clients as f64;
                // Each thread starts with a different phase, so that they do not all send at the same time.
                let offset = (first as f64 / plan.clients as f64) * 1e9 / (bursts * share);
                #[expect(clippy::cast_possible_truncation, reason = "positive")]
                EchoPace::Open(Pacer::new(schedule.start + offset as u64, bursts * share))
            }
            OfferedRate::Max => EchoPace::Flood { window: plan.window.unwrap_or(u64::MAX), stuck_since: 0 },
        };
        Self { plan, schedule, pace, flows, turn: 0 }
    }

    fn send<C>(
        &mut self,
        carrier: &mut impl Carrier,
        echo: &mut EchoFlows,
        shared: &RunShared<'_, C>,
        now: u64,
    ) -> Option<Duration> {
        /// Maximum number of batches to send before receiving again, even if sending is behind schedule.
        const BATCHES: usize = 4;
        let mut now = now;
        for _ in 0..BATCHES {
            if now < self.schedule.start {
                return Some(Duration::from_nanos(self.schedule.start - now).min(LONGEST_SLEEP));
            }
            match &mut self.pace {
                EchoPace::Open(_) => {
                    self.send_due(carrier, echo, now);
                    now = shared.clock.ns();
                    let EchoPace::Open(pacer) = &self.pace else { return None };
                    let due = pacer.due();
                    if due >= self.schedule.end {
                        return None;
                    }
                    if due > now {
                        let sleep = Duration::from_nanos(due - now);
                        return Some(sleep.clamp(SHORTEST_SLEEP, LONGEST_SLEEP));
                    }
                }
                EchoPace::Flood { .. } => {
                    if now >= self.schedule.end {
                        return None;
                    }
                    return Some(self.flood(carrier, echo, now));
                }
            }
        }
        Some(Duration::ZERO)
    }

    #[expect(clippy::cast_possible_truncation, reason = "a burst is at most 64")]
    fn send_due(&mut self, carrier: &mut impl Carrier, echo: &mut EchoFlows, now: u64) {
        let EchoPace::Open(pacer) = &mut self.pace else { return };
        let mut due = pacer.due();
        while due <= now && due < self.schedule.end && carrier.queued() < BATCH {
            if !carrier.hold(self.turn, due) {
                echo.push(carrier, self.turn, due, &self.plan);
            }
            let late = &mut echo.tallies.of(due >= self.schedule.measure).late;
            late.record_n((now - due) / 1_000, self.plan.burst as u32);
            self.turn = if self.turn + 1 == self.flows { 0 } else { self.turn + 1 };
            pacer.advance();
            due = pacer.due();
        }
        flush(carrier, echo, &self.plan, now >= self.schedule.measure);
    }

    /// Queues one batch, round robin over the clients; returns how long to wait for replies.
    fn flood(&mut self, carrier: &mut impl Carrier, echo: &mut EchoFlows, now: u64) -> Duration {
        /// Time after which the packets in flight count as lost if every window is full and no replies arrive.
        const STUCK_NS: u64 = 100_000_000;
        /// Maximum number of bursts queued before they are sent. Without a window, bursts are not gathered, because gathering would never
        /// end.
        const GATHERED: usize = 32;
        const GATHERED_BYTES: usize = 256 << 10;
        let EchoPlan { burst, size, .. } = self.plan;
        let EchoPace::Flood { window, stuck_since } = &mut self.pace else { return Duration::ZERO };
        let gathered =
            if *window == u64::MAX { 0 } else { (GATHERED * burst).min(GATHERED_BYTES / size.max(1)) };
        let (mut turns, mut idle) = (0, 0);
        while idle < self.flows {
            let flow = &echo.flows[self.turn];
            if carrier.can_send(self.turn) && flow.under_way() + burst as u64 <= *window {
                echo.push(carrier, self.turn, now, &self.plan);
                idle = 0;
            } else {
                idle += 1;
            }
            self.turn = if self.turn + 1 == self.flows { 0 } else { self.turn + 1 };
            turns += 1;
            let most = if turns < self.flows { BATCH } else { gathered };
            if carrier.queued() >= most {
                break;
            }
        }
        let queued = carrier.queued() as u64;
        if queued == 0 {
            if *stuck_since == 0 {
                *stuck_since = now;
            } else if now - *stuck_since > STUCK_NS {
                echo.flows.iter_mut().for_each(|flow| flow.settled = flow.next_sequence);
            }
            return Duration::from_millis(1);
        }
        *stuck_since = 0;
        let dropped = flush(carrier, echo, &self.plan, now >= self.schedule.measure);
        // If the kernel's buffers are full, leave CPU time to the kernel and to other processes on the core.
        if dropped == queued { Duration::from_micros(50) } else { Duration::ZERO }
    }
}

fn flush(carrier: &mut impl Carrier, echo: &mut EchoFlows, plan: &EchoPlan, measured: bool) -> u64 {
    let dropped = carrier.flush();
    if dropped > 0 {
        let tally = echo.tallies.of(measured);
        tally.sent = tally.sent.saturating_sub(dropped);
        tally.sent_bytes = tally.sent_bytes.saturating_sub(dropped * plan.size as u64);
    }
    dropped
}

fn release(carrier: &mut impl Carrier, echo: &mut EchoFlows, plan: &EchoPlan) {
    while carrier.queued() < BATCH
        && let Some((client, due)) = carrier.release()
    {
        echo.push(carrier, client, due, plan);
    }
    flush(carrier, echo, plan, true);
}

fn drain<C>(
    carrier: &mut impl Carrier,
    echo: &mut EchoFlows,
    plan: &EchoPlan,
    shared: &RunShared<'_, C>,
) -> Result<(), LoadError> {
    let start = shared.clock.ns();
    let mut last = start;
    loop {
        shared.check()?;
        let received = carrier.receive(Duration::from_millis(5), echo)?;
        let now = shared.clock.ns();
        if received > 0 {
            last = now;
        }
        if carrier.is_releasing() {
            release(carrier, echo, plan);
            last = now;
            continue;
        }
        let all = echo.flows.iter().all(|flow| flow.under_way() == 0);
        let quiet = all || now - last > QUIET_NS;
        if (quiet && !carrier.is_waiting()) || now - start > LONGEST_DRAIN_NS {
            carrier.give_up();
            while carrier.is_releasing() {
                release(carrier, echo, plan);
            }
            return Ok(());
        }
    }
}
