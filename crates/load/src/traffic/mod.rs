//! Payload traffic over interchangeable carriers: plain UDP sockets, or clients of a TURN server. [`echo`]
//! and [`crate::profile`] decide what to send; a [`Carrier`] transports it.

pub(crate) mod echo;
pub(crate) mod flow;

use std::{net::SocketAddr, time::Duration};

use turnpike_client::ErrorCounts;
use turnpike_net::Poller;

use crate::{
    LoadError,
    run::{RunShared, RunTimes},
};

pub(crate) const BATCH: usize = 256;
/// Minimum time to sleep. Waking up for every burst cost 38 % of the generator's CPU time at 25,000 bursts/s. At 20,000/s, the rate used to
/// measure latency, the generator still wakes up for each burst.
pub(crate) const SHORTEST_SLEEP: Duration = Duration::from_micros(50);
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_millis(20);
/// Time without arrivals after which missing packets count as lost.
pub(crate) const QUIET_NS: u64 = 400_000_000;
/// Maximum wait for the last packets, even if some are still arriving.
pub(crate) const LONGEST_DRAIN_NS: u64 = 3_000_000_000;
/// Token of a socket that does not belong to the carrier; see [`Sink::peer_is_ready`].
pub(crate) const PEER: u64 = 1 << 32;

pub(crate) trait Carrier {
    fn push(&mut self, client: usize, count: usize, len: usize, fill: impl FnMut(&mut [u8]));
    fn queued(&self) -> usize;
    /// Sends the queued messages; returns the number that the kernel did not accept.
    fn flush(&mut self) -> u64;
    fn can_send(&self, _client: usize) -> bool {
        true
    }
    /// Waits for at most `timeout`, then passes received messages to `sink`. Returns their number.
    fn receive(&mut self, timeout: Duration, sink: &mut impl Sink) -> Result<usize, LoadError>;
    /// Source address of a client's payloads as its peer sees it; `None` if the carrier does not know it.
    fn seen_as(&self, _client: usize) -> Option<SocketAddr> {
        None
    }
    fn poller(&self) -> &Poller;
    fn errors(&mut self) -> &mut ErrorCounts;

    // The following methods are for clients that change their socket during the run. Bursts that become due while a client has no usable
    // socket have to wait.

    fn plan(&mut self, _schedule: RunTimes) {}
    /// True if [`Carrier::tend`] has work to do.
    fn is_due(&self, _now_ns: u64) -> bool {
        false
    }
    /// Does work besides sending and receiving payloads, such as moving a client to a new socket. The queue must be empty.
    fn tend(&mut self) {}
    /// Holds back a burst of a client that cannot send. Returns false if the client can send.
    fn hold(&mut self, _client: usize, _due_ns: u64) -> bool {
        false
    }
    fn is_releasing(&self) -> bool {
        false
    }
    /// Returns the next held burst that can be sent: its client and due time.
    fn release(&mut self) -> Option<(usize, u64)> {
        None
    }
    fn is_waiting(&self) -> bool {
        false
    }
    fn give_up(&mut self) {}

    /// Reports the number of a client's payloads lost in the measured time; called at the end of the run.
    fn lost(&mut self, _client: usize, _count: u64) {}
}

pub(crate) trait Sink {
    fn payload(&mut self, client: usize, now_ns: u64, payload: &[u8]);
    /// No more replies will arrive for this client's packets in flight.
    fn forget(&mut self, _client: usize) {}
    fn peer_is_ready(&mut self) {}
}

pub(crate) fn await_start<C>(
    carrier: &mut impl Carrier,
    sink: &mut impl Sink,
    shared: &RunShared<'_, C>,
) -> Result<RunTimes, LoadError> {
    shared.thread_is_ready();
    loop {
        shared.check()?;
        if let Some(schedule) = shared.schedule() {
            carrier.plan(schedule);
            return Ok(schedule);
        }
        carrier.receive(Duration::from_millis(1), sink)?;
    }
}

pub(crate) struct NoData;

impl Sink for NoData {
    fn payload(&mut self, _client: usize, _now_ns: u64, _payload: &[u8]) {}
}
