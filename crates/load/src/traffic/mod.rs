//! Payloads that leave when they are due, over whatever carries them: UDP sockets as they are, or clients of a TURN server. What is
//! sent and what comes back, [`echo`] and [`crate::profile`] decide; how it gets there, the carriers.

pub(crate) mod echo;
pub(crate) mod flow;

use std::{net::SocketAddr, time::Duration};

use turnpike_client::Errors;
use turnpike_net::poll::Poller;

use crate::{
    LoadError,
    run::{RunShared, Schedule},
};

/// Payloads queued before they are sent.
pub(crate) const BATCH: usize = 256;
/// A paced thread sleeps no shorter than this. Waking for every burst cost 38 % of the generator's CPU time at 25,000
/// bursts a second; 20,000 a second, where latency is looked at, still has a wake-up for each.
pub(crate) const SHORTEST_SLEEP: Duration = Duration::from_micros(50);
/// A thread with nothing to send wakes this often to look after its clients.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_millis(20);
/// What has not come so long after the last that did is lost.
pub(crate) const QUIET_NS: u64 = 400_000_000;
/// However many trickle in, the wait for them ends.
pub(crate) const LONGEST_DRAIN_NS: u64 = 3_000_000_000;
/// The token of a socket that is not the carrier's own; see [`Sink::peer_is_ready`].
pub(crate) const PEER: u64 = 1 << 32;

/// How the clients of one thread reach their peers, by index.
pub(crate) trait Carrier {
    /// Queues `count` payloads of `len` bytes, each of which `fill` writes, from a client to its peer.
    fn push(&mut self, client: usize, count: usize, len: usize, fill: impl FnMut(&mut [u8]));
    /// Payloads, and messages of the carrier's own, queued since the last flush.
    fn queued(&self) -> usize;
    /// Sends what is queued; returns how much of it was not taken.
    fn flush(&mut self) -> u64;
    /// Whether a client can send now.
    fn can_send(&self, _client: usize) -> bool {
        true
    }
    /// Waits for at most `timeout`, then hands over what has arrived. Returns how many messages that was.
    fn receive(&mut self, timeout: Duration, sink: &mut impl Sink) -> Result<usize, LoadError>;
    /// Where a client's payloads seem to come from, to its peer; `None` where only the peer can see that.
    fn seen_as(&self, _client: usize) -> Option<SocketAddr> {
        None
    }
    /// For a socket that is not the carrier's own, to be added as [`PEER`].
    fn poller(&self) -> &Poller;
    fn errors(&mut self) -> &mut Errors;

    // Clients that change their socket in mid-run: what is due meanwhile waits.

    /// The times of the run are known, or have changed.
    fn plan(&mut self, _schedule: Schedule) {}
    /// Whether [`Carrier::tend`] has something to do.
    fn is_due(&self, _now_ns: u64) -> bool {
        false
    }
    /// Does what is due beside the traffic. Nothing may be queued.
    fn tend(&mut self) {}
    /// Keeps a burst of a client that cannot send. False if it is to be sent.
    fn hold(&mut self, _client: usize, _due_ns: u64) -> bool {
        false
    }
    /// Whether there is something to [`Carrier::release`].
    fn is_releasing(&self) -> bool {
        false
    }
    /// A burst that waits no longer, and when it was due.
    fn release(&mut self) -> Option<(usize, u64)> {
        None
    }
    /// Whether something waits, or a client for the server.
    fn is_waiting(&self) -> bool {
        false
    }
    /// Gives up on what waits.
    fn give_up(&mut self) {}

    /// So many of a client's payloads were lost in the measured time; told at the end.
    fn lost(&mut self, _client: usize, _count: u64) {}
}

/// Who takes what arrives.
pub(crate) trait Sink {
    /// Takes a payload that came for a client.
    fn payload(&mut self, client: usize, now_ns: u64, payload: &[u8]);
    /// What a client had under way will not be answered any more.
    fn forget(&mut self, _client: usize) {}
    /// There is something to read at the socket that was added as [`PEER`].
    fn peer_is_ready(&mut self) {}
}

/// Says that this thread is ready, and receives until all are.
pub(crate) fn await_start<C>(
    carrier: &mut impl Carrier,
    sink: &mut impl Sink,
    shared: &RunShared<'_, C>,
) -> Result<Schedule, LoadError> {
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

/// Takes nothing: while clients are set up or taken down.
pub(crate) struct NoData;

impl Sink for NoData {
    fn payload(&mut self, _client: usize, _now_ns: u64, _payload: &[u8]) {}
}
