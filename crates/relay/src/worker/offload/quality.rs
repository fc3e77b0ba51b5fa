//! Measurement of the streams of flows in the kernel.

use turnpike_offload::{
    Flows, Streams, WorkerClock,
    streams::{CountedStream, KnownStream},
};
use turnpike_turn::server::{self, AllocationSlot, KernelStream, KernelStreams, Policy, Server, Way};

use super::{Offload, OffloadedAllocation};

/// Flow of a client to all its peers. The others have the number of their channel.
const TO_PEERS: u16 = 0;

/// Streams of a flow, on the worker's clock.
#[derive(Debug)]
struct StreamsOfFlow {
    streams: Streams,
    clock: WorkerClock,
}

impl KernelStreams for StreamsOfFlow {
    fn ssrc(&self, place: usize) -> u32 {
        self.streams.ssrc(place)
    }

    fn read(&self, place: usize) -> Option<KernelStream> {
        let stream = self.streams.read(place)?;
        Some(KernelStream {
            ssrc: stream.ssrc,
            payload_type: stream.payload_type,
            highest: stream.highest,
            is_confirmed: stream.is_confirmed,
            unit: stream.unit,
            expected: stream.expected,
            received: stream.received,
            reordered: stream.reordered,
            timestamp: stream.timestamp,
            at_us: self.clock.us(stream.at_ns),
            jitter_us: stream.jitter_ns / 1000,
        })
    }

    fn set_unit(&self, place: usize, stream: &KernelStream, unit: u32) {
        let stream = CountedStream { ssrc: stream.ssrc, unit: stream.unit, ..CountedStream::default() };
        self.streams.set_unit(place, &stream, unit);
    }

    fn longest_gap_us(&self) -> u64 {
        self.streams.longest_gap_ns() / 1000
    }
}

impl Offload {
    /// True if only user space may relay an allocation's datagrams.
    pub(super) fn is_limited<P: Policy>(&self, allocation: AllocationSlot, server: &mut Server<P>) -> bool {
        server.is_limited(allocation)
            || (!self.flows.can_measure() && server.kernel_meter(allocation).is_some())
    }

    /// Begins and ends measurement in the kernel as flows come and go.
    pub(super) fn measure<P: Policy>(&mut self, allocation: AllocationSlot, server: &mut Server<P>) {
        let slot = self.allocations.get_mut(allocation.index as usize);
        let Some(offloaded) = slot.and_then(|slot| slot.as_deref_mut()) else { return };
        if offloaded.allocation == allocation {
            offloaded.measure(&self.flows, self.clock, server);
        }
    }
}

impl OffloadedAllocation {
    pub(super) fn measure<P: Policy>(&mut self, flows: &Flows, clock: WorkerClock, server: &mut Server<P>) {
        let Some(mut meter) = server.kernel_meter(self.allocation) else {
            if std::mem::take(&mut self.is_measured) {
                let states = self.channels.iter().filter_map(|channel| channel.to_client.as_ref());
                states.chain(&self.own).for_each(|(_, state)| flows.end_measuring(state));
            }
            return;
        };
        self.is_measured = true;
        let own = self.own.as_ref().map(|(_, state)| (Way::ToPeer, TO_PEERS, state));
        let to_client = self.channels.iter().filter_map(|channel| {
            let (_, state) = channel.to_client.as_ref()?;
            Some((Way::ToClient, channel.number.get(), state))
        });
        for (way, id, state) in own.into_iter().chain(to_client) {
            if meter.has(way, id) {
                continue;
            }
            let known: Vec<KnownStream> = meter.known(way).into_iter().map(known).collect();
            if let Some(streams) = flows.measure(state, &known, meter.reads_rtcp()) {
                meter.add(way, id, Box::new(StreamsOfFlow { streams, clock }));
            }
        }
        meter.retain(Way::ToPeer, |_| self.own.is_some());
        meter.retain(Way::ToClient, |id| {
            self.channels.iter().any(|channel| channel.number.get() == id && channel.to_client.is_some())
        });
    }
}

fn known(stream: server::KnownStream) -> KnownStream {
    let server::KnownStream { ssrc, payload_type, highest, is_confirmed, unit } = stream;
    KnownStream { ssrc, payload_type, highest, is_confirmed, unit }
}
