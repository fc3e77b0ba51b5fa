//! Traffic of one thread with a profile: sends due packets and counts arrivals, both for the clients and for their peers.

use std::{net::SocketAddr, time::Duration};

use turnpike_client::{Datagrams, ErrorCounts};
use turnpike_measure::Direction;
use turnpike_net::{Datapath, Poller};

use super::{
    Draw, Profile, ProfileOptions, StreamFigures,
    schedule::{Burst, Bursts},
};
use crate::{
    LoadError,
    clock::Clock,
    payload::{HEADER_LEN, PayloadStamp},
    run::{Heartbeat, RunShared, RunTallies, RunTimes, ThreadResult},
    traffic::{
        BATCH, Carrier, LONGEST_DRAIN_NS, LONGEST_SLEEP, PEER, QUIET_NS, SHORTEST_SLEEP, Sink, await_start,
        flow::FlowCounters,
    },
    udp::PROBE,
};

pub(crate) fn run<C>(
    carrier: &mut impl Carrier,
    mut ends: ProfileEnds<'_>,
    shared: &RunShared<'_, C>,
    thread: usize,
) -> Result<ThreadResult, LoadError> {
    for (client, address) in ends.peer.addresses.iter_mut().enumerate() {
        *address = carrier.seen_as(client).or(*address);
    }
    let mut schedule = await_start(carrier, &mut ends, shared)?;
    let EndCounts { profile, seed, share, .. } = ends.counts;
    ends.counts.measure_ns = schedule.measure;
    let mut bursts = Bursts::new(profile, seed, share, schedule.start);
    let mut heartbeat = Heartbeat::new(shared, thread, schedule);
    let mut tallies = RunTallies::default();
    loop {
        let now = shared.clock.ns();
        if heartbeat.is_due(now) {
            ends.counts.sum(&mut tallies);
        }
        if heartbeat.beat(now, &mut tallies, &mut schedule, || ends.counts.under_way())? {
            carrier.plan(schedule);
        }
        let Some(sleep) = ends.send(carrier, &mut bursts, schedule) else { break };
        carrier.receive(sleep, &mut ends)?;
    }
    ends.drain(carrier, shared)?;
    for (number, flow) in ends.counts.flows.iter().enumerate() {
        carrier.lost(number / profile.flows(), flow.lost());
    }
    let cpu = heartbeat.cpu();
    ends.counts.sum(&mut tallies);
    tallies.publish(&shared.slots[thread], ends.counts.under_way());
    for (name, count) in std::mem::take(&mut ends.peer.errors) {
        *carrier.errors().entry(name).or_default() += count;
    }
    let (streams, jitter) = ends.counts.figures();
    Ok(ThreadResult { cpu, streams, jitter, ..ThreadResult::default() })
}

pub(crate) struct ProfileEnds<'a> {
    counts: EndCounts<'a>,
    peer: ProfilePeer,
    clock: Clock,
}

struct EndCounts<'a> {
    profile: &'a Profile,
    seed: u64,
    share: (usize, usize),
    flows: Vec<FlowCounters>,
    tallies: Vec<RunTallies>,
    totals: Vec<StreamFigures>,
    measure_ns: u64,
}

struct ProfilePeer {
    datagrams: Datagrams,
    address: SocketAddr,
    addresses: Vec<Option<SocketAddr>>,
    errors: ErrorCounts,
    received: usize,
}

impl<'a> ProfileEnds<'a> {
    pub(crate) fn new(
        shaped: &'a ProfileOptions,
        share: (usize, usize),
        listen: SocketAddr,
        datapath: Datapath,
        poller: &Poller,
        clock: Clock,
    ) -> Result<Self, LoadError> {
        let profile = &shaped.profile;
        let mut datagrams = Datagrams::new(datapath, 1);
        let address = datagrams
            .listen(listen, poller, PEER)
            .map_err(|source| LoadError::Peers { address: listen, source })?;
        let counts = EndCounts {
            profile,
            seed: shaped.seed,
            share,
            flows: std::iter::repeat_with(FlowCounters::default).take(share.0 * profile.flows()).collect(),
            tallies: std::iter::repeat_with(RunTallies::default).take(profile.streams.len()).collect(),
            totals: vec![StreamFigures::default(); profile.streams.len()],
            measure_ns: u64::MAX,
        };
        let addresses = vec![None; share.0];
        Ok(Self {
            counts,
            peer: ProfilePeer { datagrams, address, addresses, errors: ErrorCounts::new(), received: 0 },
            clock,
        })
    }

    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer.address
    }

    fn send(
        &mut self,
        carrier: &mut impl Carrier,
        bursts: &mut Bursts,
        schedule: RunTimes,
    ) -> Option<Duration> {
        /// Maximum number of batches to send before receiving again, even if sending is behind schedule.
        const BATCHES: usize = 4;
        for _ in 0..BATCHES {
            let now = self.clock.ns();
            while carrier.queued() < BATCH && self.peer.datagrams.queued() < BATCH {
                let due = bursts.due();
                if due > now || due >= schedule.end {
                    break;
                }
                if let Some(burst) = bursts.take() {
                    self.push(carrier, burst, now);
                }
            }
            // Packets that the kernel rejects count as lost; `errors` counts them by reason.
            carrier.flush();
            self.peer.datagrams.flush(&mut self.peer.errors);
            let (due, now) = (bursts.due(), self.clock.ns());
            if due >= schedule.end {
                return None;
            }
            if due > now {
                return Some(Duration::from_nanos(due - now).clamp(SHORTEST_SLEEP, LONGEST_SLEEP));
            }
        }
        Some(Duration::ZERO)
    }

    fn push(&mut self, carrier: &mut impl Carrier, burst: Burst, now: u64) {
        let Self { counts, peer, .. } = self;
        let (profile, seed) = (counts.profile, counts.seed);
        let stream = &profile.streams[burst.stream];
        let number = profile.flow_number(counts.share.1 + burst.client, burst.flow);
        let flow = &mut counts.flows[burst.client * profile.flows() + burst.flow];
        let to = peer.addresses[burst.client];
        let (mut packets, mut bytes) = (0, 0);
        // Shifts the burst number per flow, so that clients send their key frames at different times.
        let place = burst.number + u64::from(number) * 7_919;
        stream.shape.burst(Draw::new(seed, number, burst.number), place, |len, count| {
            packets += count;
            bytes += len * count;
            let stamp = |out: &mut [u8]| {
                PayloadStamp { flow: number, sequence: flow.next_sequence, due_ns: burst.due_ns }.write(out);
                flow.next_sequence += 1;
            };
            match stream.direction {
                Direction::ToPeer => carrier.push(burst.client, count, len, stamp),
                Direction::ToClient => peer.datagrams.push_run(0, to, (count, len), stamp),
            }
        });
        let measured = burst.due_ns >= counts.measure_ns;
        flow.sent += if measured { packets as u64 } else { 0 };
        let tally = counts.tallies[burst.stream].of(measured);
        tally.sent += packets as u64;
        tally.sent_bytes += bytes as u64;
        tally.late.record_n((now - burst.due_ns) / 1_000, u32::try_from(packets).unwrap_or(u32::MAX));
    }

    pub(crate) fn receive_at_peer(&mut self) {
        let Self { counts, peer, clock } = self;
        let ProfilePeer { datagrams, addresses, errors, received, .. } = peer;
        let (mut now_ns, mut unexpected, mut greetings) = (0, 0, Vec::new());
        datagrams.receive(0, errors, |datagram| {
            let Some((payload, from)) = datagram else {
                now_ns = clock.ns();
                return;
            };
            *received += 1;
            let stamp = PayloadStamp::read(payload);
            if let Some((stamp, client)) = stamp.and_then(|stamp| Some((stamp, counts.client_of(stamp)?))) {
                addresses[client] = Some(from);
                if stamp.sequence == PROBE {
                    greetings.push((from, stamp));
                    return;
                }
                if counts.arrived(client, Direction::ToPeer, now_ns, stamp, payload.len()) {
                    return;
                }
            }
            unexpected += 1;
        });
        for (from, stamp) in &greetings {
            datagrams.push_run(0, Some(*from), (1, HEADER_LEN), |out| stamp.write(out));
        }
        if !greetings.is_empty() {
            datagrams.flush(errors);
        }
        if unexpected > 0 {
            *errors.entry("unexpected_datagram").or_default() += unexpected;
        }
    }

    fn drain<C>(&mut self, carrier: &mut impl Carrier, shared: &RunShared<'_, C>) -> Result<(), LoadError> {
        let start = shared.clock.ns();
        let mut last = start;
        loop {
            shared.check()?;
            let before = self.peer.received;
            let received = carrier.receive(Duration::from_millis(5), self)?;
            let now = shared.clock.ns();
            if received + (self.peer.received - before) > 0 {
                last = now;
            }
            let all = self.counts.under_way() == 0;
            if all || now - last > QUIET_NS || now - start > LONGEST_DRAIN_NS {
                return Ok(());
            }
        }
    }
}

impl Sink for ProfileEnds<'_> {
    #[inline]
    fn payload(&mut self, client: usize, now_ns: u64, payload: &[u8]) {
        let known = PayloadStamp::read(payload).is_some_and(|stamp| {
            self.counts.arrived(client, Direction::ToClient, now_ns, stamp, payload.len())
        });
        if !known {
            *self.peer.errors.entry("unexpected_datagram").or_default() += 1;
        }
    }

    fn peer_is_ready(&mut self) {
        self.receive_at_peer();
    }
}

impl EndCounts<'_> {
    #[inline]
    fn arrived(
        &mut self,
        client: usize,
        at: Direction,
        now_ns: u64,
        stamp: PayloadStamp,
        len: usize,
    ) -> bool {
        let profile = self.profile;
        let first = profile.flow_number(self.share.1 + client, 0);
        let Some(flow) = stamp.flow.checked_sub(first).map(|flow| flow as usize) else { return false };
        let Some(stream) = profile.flows.get(flow).copied() else { return false };
        let flow = &mut self.flows[client * profile.flows() + flow];
        if profile.streams[stream].direction != at {
            return false;
        }
        let measured = stamp.due_ns >= self.measure_ns;
        flow.arrived(stamp, len, now_ns, measured, self.tallies[stream].of(measured))
    }

    #[inline]
    fn client_of(&self, stamp: PayloadStamp) -> Option<usize> {
        let (count, first) = self.share;
        let number = match stamp.sequence {
            PROBE => stamp.flow as usize,
            _ => stamp.flow as usize / self.profile.flows(),
        };
        number.checked_sub(first).filter(|client| *client < count)
    }

    /// Number of packets sent that have neither arrived nor been overtaken by a later packet of their flow.
    fn under_way(&self) -> u64 {
        self.flows.iter().map(FlowCounters::under_way).sum()
    }

    fn sum(&mut self, all: &mut RunTallies) {
        for (tallies, total) in self.tallies.iter_mut().zip(&mut self.totals) {
            total.tally.merge(&mut tallies.measured);
            for (from, to) in
                [(&mut tallies.warmup, &mut all.warmup), (&mut tallies.measured, &mut all.measured)]
            {
                to.merge(from);
                from.clear();
            }
        }
    }

    fn figures(mut self) -> (Vec<StreamFigures>, (f64, u64)) {
        let mut all = (0.0, 0);
        let flows = self.profile.flows();
        for (index, flow) in self.flows.iter().enumerate() {
            let Some(estimate) = flow.jitter.estimate() else { continue };
            let own = &mut self.totals[self.profile.flows[index % flows]].jitter;
            for sum in [own, &mut all] {
                sum.0 += estimate;
                sum.1 += 1;
            }
        }
        (self.totals, all)
    }
}
