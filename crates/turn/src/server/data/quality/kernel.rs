//! RTP streams that the kernel relays and counts.
//!
//! The kernel sees each datagram of its flows first. It follows the sequence numbers of all of them, but counts only those as received that
//! it does not pass on to user space; the meter counts the others. [`super::rtp::Flow`] adds the two.

use std::fmt::Debug;

use super::Meter;
use crate::server::{AllocationSlot, Policy, Server, Way};

/// Most streams of a flow in the kernel.
pub const KERNEL_STREAMS: usize = 4;

/// Counters of a stream since it took its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelStream {
    pub ssrc: u32,
    pub payload_type: u8,
    pub highest: u16,
    /// False until a datagram follows the first one.
    pub is_confirmed: bool,
    /// Nanoseconds per unit of timestamps, in fractions of 256; 0 if unknown.
    pub unit: u32,
    /// Datagrams up to the highest sequence number.
    pub expected: u32,
    /// Those of them that did not go to user space.
    pub received: u32,
    pub reordered: u32,
    /// Timestamp and time of the latest datagram.
    pub timestamp: u32,
    pub at_us: u64,
    pub jitter_us: u64,
}

/// Access to the streams of a flow in the kernel, by place.
pub trait KernelStreams: Debug + Send {
    /// 0 if the place is free.
    fn ssrc(&self, place: usize) -> u32;
    fn read(&self, place: usize) -> Option<KernelStream>;
    /// Sets [`KernelStream::unit`].
    fn set_unit(&self, place: usize, stream: &KernelStream, unit: u32);
    fn longest_gap_us(&self) -> u64;
}

/// Stream measured so far, for the kernel to continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownStream {
    pub ssrc: u32,
    pub payload_type: u8,
    pub highest: u16,
    /// False for a datagram whose successor would begin a stream.
    pub is_confirmed: bool,
    /// See [`KernelStream::unit`].
    pub unit: u32,
}

/// Flow whose streams the kernel counts.
#[derive(Debug)]
pub(super) struct KernelFlow {
    pub(super) id: u16,
    pub(super) streams: Box<dyn KernelStreams>,
    places: [Place; KERNEL_STREAMS],
}

/// Stream in a place.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    ssrc: u32,
    /// Counters that have been added.
    expected: u32,
    received: u32,
    reordered: u32,
    /// Datagrams that came to user space since then.
    passed: u32,
}

/// Counters of a stream since they were last added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    pub(super) expected: u64,
    pub(super) received: u64,
    pub(super) reordered: u64,
}

impl KernelFlow {
    /// Earlier counts are those of a previous process.
    pub(super) fn new(id: u16, streams: Box<dyn KernelStreams>) -> Self {
        let places = std::array::from_fn(|place| {
            let stream = streams.read(place).unwrap_or_default();
            let KernelStream { ssrc, expected, received, reordered, .. } = stream;
            Place { ssrc, expected, received, reordered, passed: 0 }
        });
        Self { id, streams, places }
    }

    /// Counts a datagram that came to user space; false if the kernel does not follow its stream.
    pub(super) fn passed(&mut self, ssrc: u32) -> bool {
        let place = (0..KERNEL_STREAMS).find(|place| self.streams.ssrc(*place) == ssrc);
        let Some(place) = place.filter(|_| ssrc != 0) else { return false };
        self.place(place, ssrc).passed += 1;
        true
    }

    /// A new stream may have taken the place.
    fn place(&mut self, place: usize, ssrc: u32) -> &mut Place {
        let place = &mut self.places[place];
        if place.ssrc != ssrc {
            *place = Place { ssrc, ..Place::default() };
        }
        place
    }

    /// The stream in a place with its progress; `None` if there was none.
    pub(super) fn progress(&mut self, place: usize) -> Option<(KernelStream, Progress)> {
        let stream = self.streams.read(place).filter(|stream| stream.is_confirmed)?;
        let added = self.place(place, stream.ssrc);
        let since = |now: u32, before: u32| u64::from(now.wrapping_sub(before));
        let progress = Progress {
            expected: since(stream.expected, added.expected),
            received: since(stream.received, added.received) + u64::from(added.passed),
            reordered: since(stream.reordered, added.reordered),
        };
        let KernelStream { ssrc, expected, received, reordered, .. } = stream;
        *added = Place { ssrc, expected, received, reordered, passed: 0 };
        let is_idle = progress == Progress { expected: 0, received: 0, reordered: 0 };
        (!is_idle).then_some((stream, progress))
    }
}

/// Meter of an allocation, for the part that runs in the kernel.
#[derive(Debug)]
pub struct KernelMeter<'m>(pub(super) &'m mut Meter);

impl KernelMeter<'_> {
    #[must_use]
    pub fn reads_rtcp(&self) -> bool {
        self.0.reads_rtcp
    }

    #[must_use]
    pub fn known(&self, way: Way) -> Vec<KnownStream> {
        self.0.flows[way as usize].known()
    }

    #[must_use]
    pub fn has(&self, way: Way, id: u16) -> bool {
        self.0.flows[way as usize].has_kernel(id)
    }

    /// Adds a flow in the kernel.
    pub fn add(&mut self, way: Way, id: u16, streams: Box<dyn KernelStreams>) {
        self.0.flows[way as usize].add_kernel(KernelFlow::new(id, streams));
    }

    /// Adds the kernel's counts.
    pub fn add_counted(&mut self) {
        for flow in &mut self.0.flows {
            self.0.has_news |= flow.add_counted();
        }
    }

    /// Removes the flows that the kernel no longer has.
    pub fn retain(&mut self, way: Way, has: impl Fn(u16) -> bool) {
        self.0.has_news |= self.0.flows[way as usize].retain_kernel(has);
    }
}

impl<P: Policy> Server<P> {
    /// `None` if the allocation is not measured.
    pub fn kernel_meter(&mut self, allocation: AllocationSlot) -> Option<KernelMeter<'_>> {
        let limits = self.data.forwarding.get(allocation)?.limits.as_mut()?;
        Some(KernelMeter(limits.meter.as_mut()?))
    }
}
