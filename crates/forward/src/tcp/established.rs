//! Established connections: on each event, gives the flows concerned a turn to move data.

use std::io;

use turnpike_copy::Pumped;
use turnpike_net::{Event, Interest};
use turnpike_rules::CopyMode;
use turnpike_wire::proxy_protocol::{ENOUGH_TO_TELL, is_begun};

use super::{
    connection::Connection,
    engine::Engine,
    side::{CLIENT, StreamSide, Tick, token},
};
use crate::EndReason;

impl Engine {
    pub(super) fn on_traffic(&mut self, key: usize, side: StreamSide, event: &Event, tick: Tick<'_>) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let is_joined = connection.across.is_some();
        if connection.across.as_ref().is_some_and(|across| across.passes()) {
            // End of stream or an error. `come_up` re-arms the poller, so the event is reported again.
            return self.come_up(key, tick);
        }
        let (inward, outward, socket) = match side {
            StreamSide::Client => (&mut connection.up, &connection.down, Some(&connection.client)),
            StreamSide::Target => (&mut connection.down, &connection.up, connection.target.as_ref()),
        };
        inward.fin |= event.closed && !is_joined;
        inward.readable |= event.readable;
        if event.closed && is_joined {
            // A socket in the sockmap may have more data even after a short read.
            inward.thorough = true;
            inward.readable = true;
        }
        if event.priority
            && let Some(socket) = socket
        {
            inward.on_urgent(socket);
        }
        if event.error {
            // If nothing is left to read, or nothing can be read now, do not delay the reset.
            if inward.has_ended() || inward.is_blocked() {
                return self.broken(key, side, tick);
            }
            inward.on_error();
            if let Some(across) = &mut connection.across {
                across.hurry(side);
            }
        }
        let (readable, writable) = (inward.readable, event.writable && outward.is_blocked());
        if readable {
            self.resume(key, side, tick);
        }
        if writable {
            self.resume(key, side.other(), tick);
        }
    }

    pub(super) fn resume(&mut self, key: usize, side: StreamSide, tick: Tick<'_>) {
        self.resume_with(key, side, None, tick);
    }

    /// Like [`Engine::resume`], with a `share` of bytes for a flow that has waited for tokens.
    pub(super) fn resume_with(&mut self, key: usize, side: StreamSide, share: Option<u64>, tick: Tick<'_>) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        if connection.unvouched
            && side == StreamSide::Client
            && let Some(reason) = look_for_header(connection)
        {
            return self.end(key, reason, tick);
        }
        if connection.pace.is_some() {
            connection.grant(side, share, tick.now);
        }
        if connection.across.is_some() && !self.settle(key, side, tick) {
            return;
        }
        let Some(connection) = self.connections.get_mut(key) else { return };
        let Some(target) = &connection.target else { return };
        let local = &mut self.rules[connection.rule];
        let copy = local.state.rule.copy;
        let last = connection.half_done();
        let (flow, from, to) = match side {
            StreamSide::Client => (&mut connection.up, &connection.client, target),
            StreamSide::Target => (&mut connection.down, target, &connection.client),
        };
        let before = flow.bytes;
        let pumped = self.mover.pump(flow, from, to, copy.splices(), last);
        let (taken, end_read) = (flow.bytes - before, std::mem::take(&mut flow.end_read));
        local.moved(connection.seat.as_ref(), side, taken);
        self.any_counted |= taken > 0;
        let moved = self.mover.take_moved();
        self.wake_up.lean += moved.lean;
        // Bulk data that the other side occasionally acknowledges still counts as bulk.
        if !(connection.up.is_bulk() || connection.down.is_bulk()) {
            self.wake_up.other += moved.buffered;
        }
        local.counters.spliced_bytes += moved.spliced;
        connection.active = tick.now;
        if connection.pace.is_some() {
            connection.settle(side);
        }
        if copy == CopyMode::Kernel {
            connection.heard(side, taken);
        }
        match pumped {
            Pumped::Idle if end_read => self.judge_end(key, side, tick),
            Pumped::Idle if copy == CopyMode::Kernel => self.consider(key, tick),
            Pumped::Idle => {}
            Pumped::Blocked => {
                // The target's socket has been watched for writability since the connect.
                if side == StreamSide::Target {
                    self.watch_client_writable(key, tick);
                }
            }
            Pumped::Again => self.again.push((key, side)),
            Pumped::Spent => self.wait_for_tokens(key, side, tick.now),
            Pumped::Done => {
                if connection.up.is_done() && connection.down.is_done() {
                    self.end(key, EndReason::Finished, tick);
                }
            }
            Pumped::SourceFailed => self.broken(key, side, tick),
            Pumped::SinkFailed => {
                self.last_words(key, side.other());
                self.broken(key, side.other(), tick);
            }
        }
    }

    /// Also watches the client's socket for writability; if it is already writable, that is reported
    /// immediately.
    pub(super) fn watch_client_writable(&mut self, key: usize, tick: Tick<'_>) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        if connection.client_writable {
            return;
        }
        connection.client_writable = true;
        match tick.poller.set(&connection.client, token(CLIENT, key), Interest::Edge) {
            Ok(()) => {}
            // The socket is not watched yet: `establish` calls this again.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                self.complain(&error);
                self.end(key, EndReason::Limit, tick);
            }
        }
    }

    /// Forwards data that a broken side had already sent, as much as the other side accepts without blocking:
    /// a server may respond and reset immediately, for example when it refuses an upload.
    fn last_words(&mut self, key: usize, side: StreamSide) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        // The kernel would first have to write the data that it still has, and we do not wait for that.
        if connection.across.as_ref().is_some_and(|across| !across.is_ours(side)) {
            return;
        }
        let Some(target) = &connection.target else { return };
        let local = &mut self.rules[connection.rule];
        let copy = local.state.rule.copy;
        let (flow, from, to) = match side {
            StreamSide::Client => (&mut connection.up, &connection.client, target),
            StreamSide::Target => (&mut connection.down, target, &connection.client),
        };
        if flow.has_ended() || side == StreamSide::Client && connection.unvouched {
            return;
        }
        flow.on_error();
        // Ignore the bandwidth limit, because this moves at most what the socket buffer contains, and only
        // once.
        flow.budget = None;
        let before = flow.bytes;
        // The connection ends anyway, so an error does not matter.
        let _ = self.mover.pump(flow, from, to, copy.splices(), false);
        local.moved(connection.seat.as_ref(), side, flow.bytes - before);
        let moved = self.mover.take_moved();
        self.wake_up.lean += moved.lean;
        self.wake_up.other += moved.buffered;
        local.counters.spliced_bytes += moved.spliced;
    }

    pub(super) fn broken(&mut self, key: usize, side: StreamSide, tick: Tick<'_>) {
        let reason = match side {
            StreamSide::Client => EndReason::ClientReset,
            StreamSide::Target => EndReason::TargetReset,
        };
        self.end(key, reason, tick);
    }
}

/// Checks the first bytes of a client that is not a trusted proxy. Returns a reason to end the connection if
/// they start a PROXY header, which must not reach a target. If there are too few bytes to tell, they stay
/// in the socket's receive queue.
#[cold]
fn look_for_header(connection: &mut Connection) -> Option<EndReason> {
    let mut beginning = [0; ENOUGH_TO_TELL];
    let told = match connection.client.peek(&mut beginning) {
        // End of stream.
        Ok(0) => Some(false),
        Ok(len) => is_begun(&beginning[..len]).or(connection.up.fin.then_some(false)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => None,
        // The read has cleared the error, so it is not reported again.
        Err(_) => return Some(EndReason::ClientReset),
    };
    connection.unvouched = told.is_none();
    connection.up.readable &= told.is_some();
    (told == Some(true)).then_some(EndReason::UntrustedProxy)
}

impl StreamSide {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Client => Self::Target,
            Self::Target => Self::Client,
        }
    }
}
