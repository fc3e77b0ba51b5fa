//! Connections whose interactive traffic the kernel forwards between sockets (`turnpike_offload::sockmap`)
//! without waking a worker.
//!
//! ```text
//!  user space ─ some requests and responses ─▶ joined: both sockets in the map, still read here
//!     ▲                                            │ nothing unread, nothing unwritten: both directions lowered
//!     │ the kernel has written its data            ▼
//!     └── settling ◀── bulk, end of stream, error ─── across: epoll reports nothing else
//! ```
//!
//! - **Order of bytes**: a counter per direction, shared with the program. The kernel writes the bytes
//!   received before [`Sockmap::raise`]; later ones are read here. User space writes again once the kernel
//!   has written all of its bytes to the other socket.
//! - **End of stream** is passed on when all received bytes have been read or forwarded, because reads do not
//!   show the bytes that the kernel still has to write.
//! - **Sockets stay in the map** until they are closed, since removing one could lose unread data. splice(2)
//!   does not see the map's queue, so it is no longer used for them.

use std::{io, os::fd::AsFd as _};

use socket2::SockRef;
use turnpike_net::Interest;
use turnpike_offload::Sockmap;

use super::{
    connection::Connection,
    engine::Engine,
    side::{CLIENT, StreamSide, TARGET, Tick, token},
    talk::{JoinedConnection, KernelDirection, Settling},
};

/// Milliseconds between reads of counters; the counters of a connection are part of every `SWEEPS`th read.
const SWEEP_MS: u64 = 100;
const SWEEPS: usize = 10;
/// Initial and maximum interval between checks of a waiting direction, in milliseconds.
const SOON_MS: u64 = 1;
const LATER_MS: u64 = 64;
/// Milliseconds to wait for data that a broken side had already sent.
const LAST_WORDS_MS: u64 = 100;

impl Connection {
    pub(super) fn heard(&mut self, side: StreamSide, bytes: u64) {
        self.talk.heard(side, bytes);
        if let Some(across) = &mut self.across {
            across.took(side, bytes);
        }
    }

    /// True if user space has no unsent data, so the kernel can take over without reordering bytes.
    fn is_quiet(&self) -> bool {
        let is_idle = [&self.up, &self.down].into_iter().all(|flow| {
            !flow.readable && !flow.is_blocked() && !flow.has_ended() && !flow.fin && !flow.thorough
        });
        is_idle && self.opening.is_none() && !self.unvouched && self.pace.is_none()
    }
}

impl Engine {
    pub(crate) fn use_sockmap(&mut self, sockmap: Sockmap) {
        self.sockmap = Some(sockmap);
    }

    /// Takes back connections that the program has stopped forwarding.
    pub(crate) fn on_raised(&mut self, tick: Tick<'_>) {
        self.wake_up.other += 1;
        while let Some(pair) = self.sockmap.as_mut().and_then(Sockmap::raised) {
            if let Some(key) = self.joined.get(pair as usize).copied().flatten() {
                self.come_up(key, tick);
            }
        }
    }

    /// After a turn that leaves no data, decides whether the kernel takes over the connection, for the first
    /// time or again.
    pub(super) fn consider(&mut self, key: usize, tick: Tick<'_>) {
        let Some(connection) = self.connections.get(key) else { return };
        if !connection.talk.is_chatter() || !connection.is_quiet() {
            return;
        }
        match &connection.across {
            None => self.join(key, tick),
            Some(across) if StreamSide::BOTH.into_iter().all(|side| across.is_ours(side)) => {
                self.hand_over(key, tick);
            }
            Some(_) => {}
        }
    }

    /// Adds both sockets to the map. Data received since the last read will be found by a read through the
    /// map.
    fn join(&mut self, key: usize, tick: Tick<'_>) {
        let (Some(sockmap), Some(connection)) = (&mut self.sockmap, self.connections.get_mut(key)) else {
            return;
        };
        let Some(target) = &connection.target else { return };
        let client = &connection.client;
        let mut join = || -> io::Result<_> {
            // Keeps an urgent byte in the stream, as user space does.
            SockRef::from(client).set_out_of_band_inline(true)?;
            SockRef::from(target).set_out_of_band_inline(true)?;
            let base = [target.written()?, client.written()?];
            Ok(sockmap.join(tick.now, [client.as_fd(), target.as_fd()])?.map(|joined| (joined, base)))
        };
        let Ok(Some((joined, base))) = join() else {
            // There are too many pairs, or a socket is being closed, so try again after more interactive
            // traffic.
            connection.talk.deceived();
            return;
        };
        let pair = joined.pair() as usize;
        let ways = base.map(|base| KernelDirection { base, ..KernelDirection::default() });
        connection.across = Some(Box::new(JoinedConnection { joined, passes: false, ways }));
        for flow in [&mut connection.up, &mut connection.down] {
            flow.plain = true;
            (flow.doubts_end, flow.readable) = (true, true);
        }
        if self.joined.len() <= pair {
            self.joined.resize(pair + 1, None);
        }
        self.joined[pair] = Some(key);
        self.pairs += 1;
        self.again.extend(StreamSide::BOTH.map(|side| (key, side)));
    }

    /// Lets the kernel forward the connection's data, unless some has arrived in the meantime.
    fn hand_over(&mut self, key: usize, tick: Tick<'_>) {
        let (Some(sockmap), Some(connection)) = (&self.sockmap, self.connections.get_mut(key)) else {
            return;
        };
        let (Some(across), Some(target)) = (&mut connection.across, &connection.target) else { return };
        let lower =
            |side: StreamSide| sockmap.lower(&across.joined, side.index(), across.ways[side.index()].taken);
        if !lower(StreamSide::Client) {
            return;
        }
        let mut is_done = lower(StreamSide::Target);
        across.passes = true;
        for (socket, kind) in [(&connection.client, CLIENT), (target, TARGET)] {
            is_done = is_done && tick.poller.set(socket, token(kind, key), Interest::EdgeEnd).is_ok();
        }
        if !is_done {
            self.come_up(key, tick);
        }
    }

    /// Takes a connection back: user space reads new data, and writes it once the kernel has written the data
    /// that it had received before.
    pub(super) fn come_up(&mut self, key: usize, tick: Tick<'_>) {
        let (Some(sockmap), Some(connection)) = (&self.sockmap, self.connections.get(key)) else { return };
        let Some(across) = connection.across.as_ref().filter(|across| across.passes) else { return };
        StreamSide::BOTH.into_iter().for_each(|side| sockmap.raise(&across.joined, side.index()));
        self.book(key, tick.now);
        let (Some(sockmap), Some(connection)) = (&self.sockmap, self.connections.get_mut(key)) else {
            return;
        };
        let (Some(across), Some(target)) = (&mut connection.across, &connection.target) else { return };
        across.passes = false;
        for (side, way) in across.ways.iter_mut().enumerate() {
            let first = sockmap.handed(&across.joined, side);
            (way.settles, way.delay) = (Some(Settling { first, since: tick.now }), SOON_MS);
        }
        connection.talk.deceived();
        connection.client_writable = true;
        for (socket, kind) in [(&connection.client, CLIENT), (target, TARGET)] {
            // Pending events are reported again. Even if this fails, the poller still reports the end of the
            // connection.
            let _ = tick.poller.set(socket, token(kind, key), Interest::Edge);
        }
        (connection.up.readable, connection.down.readable) = (true, true);
        self.again.extend(StreamSide::BOTH.map(|side| (key, side)));
    }

    /// Returns true if data from this side may be read and written here; otherwise, schedules another check.
    pub(super) fn settle(&mut self, key: usize, side: StreamSide, tick: Tick<'_>) -> bool {
        let Some(connection) = self.connections.get_mut(key) else { return false };
        let Some(across) = connection.across.as_mut().filter(|across| !across.passes) else { return false };
        let way = &mut across.ways[side.index()];
        let Some(Settling { first, since }) = way.settles else { return true };
        let sink = match side {
            StreamSide::Client => connection.target.as_ref(),
            StreamSide::Target => Some(&connection.client),
        };
        // A broken socket will fail on the next write.
        let written = sink.and_then(|sink| sink.written().ok());
        if written.is_none_or(|written| written.saturating_sub(way.base) >= first) {
            way.settles = None;
            return true;
        }
        if way.is_broken && tick.now >= since + LAST_WORDS_MS {
            self.broken(key, side, tick);
        } else {
            self.wait(key, side, tick.now);
        }
        false
    }

    /// Decides whether an end of stream that was read is final, which requires that all received bytes have been
    /// read.
    pub(super) fn judge_end(&mut self, key: usize, side: StreamSide, tick: Tick<'_>) {
        let (Some(sockmap), Some(connection)) = (&self.sockmap, self.connections.get_mut(key)) else {
            return;
        };
        let Some(across) = &connection.across else { return };
        if across.ways[side.index()].taken == sockmap.seen(&across.joined, side.index()) {
            connection.flow(side).believe_end();
            self.resume(key, side, tick);
        } else {
            self.wait(key, side, tick.now);
        }
    }

    fn wait(&mut self, key: usize, side: StreamSide, now: u64) {
        let across = self.connections.get_mut(key).and_then(|connection| connection.across.as_mut());
        let Some(way) = across.map(|across| &mut across.ways[side.index()]) else { return };
        if !std::mem::replace(&mut way.is_waiting, true) {
            way.delay = way.delay.clamp(SOON_MS, LATER_MS);
            self.waiting.push((now + way.delay, key, side));
            way.delay *= 2;
        }
    }

    /// Checks waiting directions again, and reads counters.
    pub(super) fn look_at_joined(&mut self, tick: Tick<'_>) {
        if self.waiting.iter().any(|(due, ..)| *due <= tick.now) {
            for (due, key, side) in std::mem::take(&mut self.waiting) {
                if due > tick.now {
                    self.waiting.push((due, key, side));
                    continue;
                }
                // The connection may have ended and its slot been reused; in that case the check is harmless.
                let Some(connection) = self.connections.get_mut(key) else { continue };
                let Some(across) = &mut connection.across else { continue };
                across.ways[side.index()].is_waiting = false;
                connection.flow(side).readable = true;
                self.resume(key, side, tick);
            }
        }
        if self.pairs == 0 || tick.now < self.swept + SWEEP_MS {
            return;
        }
        self.swept = tick.now;
        self.sweep = (self.sweep + 1) % SWEEPS;
        for pair in (self.sweep..self.joined.len()).step_by(SWEEPS) {
            let Some(key) = self.joined[pair] else { continue };
            self.book(key, tick.now);
            if self.is_raised(key) {
                self.come_up(key, tick);
            }
        }
    }

    pub(super) fn joined_due(&self) -> Option<u64> {
        let sweep = (self.pairs > 0).then_some(self.swept + SWEEP_MS);
        self.waiting.iter().map(|(due, ..)| *due).chain(sweep).min()
    }

    /// Counts bytes forwarded by the kernel since the last call; returns true if there were any.
    pub(super) fn book(&mut self, key: usize, now: u64) -> bool {
        let (Some(sockmap), Some(connection)) = (&self.sockmap, self.connections.get_mut(key)) else {
            return false;
        };
        let Some(across) = connection.across.as_mut().filter(|across| across.passes) else { return false };
        let local = &mut self.rules[connection.rule];
        let mut any = false;
        for (side, flow) in StreamSide::BOTH.into_iter().zip([&mut connection.up, &mut connection.down]) {
            let way = &mut across.ways[side.index()];
            let handed = sockmap.handed(&across.joined, side.index());
            let more = handed.saturating_sub(way.taken);
            way.taken += more;
            flow.bytes += more;
            local.moved(connection.seat.as_ref(), side, more);
            local.counters.spliced_bytes += more;
            local.counters.kernel.bytes[side.index()] += more;
            any |= more > 0;
        }
        if any {
            connection.active = now;
            self.any_counted = true;
        }
        any
    }

    /// Removes an ended connection. Call before its sockets are closed.
    pub(super) fn part(&mut self, across: JoinedConnection, now: u64) {
        let Some(sockmap) = &mut self.sockmap else { return };
        self.joined[across.joined.pair() as usize] = None;
        self.pairs -= 1;
        sockmap.part(now, across.joined);
    }

    /// True if the program has stopped forwarding but has not notified us.
    fn is_raised(&self, key: usize) -> bool {
        let across = self.connections.get(key).and_then(|connection| connection.across.as_ref());
        let (Some(sockmap), Some(across)) = (&self.sockmap, across) else { return false };
        across.passes && StreamSide::BOTH.into_iter().any(|side| sockmap.is_up(&across.joined, side.index()))
    }
}
