//! A connection whose both ends are there: events become turns of its two flows.

use turnpike_net::{Pumped, poll::Event};

use super::engine::{CLIENT, Engine, Side, Tick, token};
use crate::EndReason;

impl Engine {
    /// One end has something to read, takes something again, or is broken.
    pub(super) fn on_traffic(&mut self, key: usize, side: Side, event: &Event, tick: Tick<'_>) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let (inward, outward, socket) = match side {
            Side::Client => (&mut connection.up, &connection.down, Some(&connection.client)),
            Side::Target => (&mut connection.down, &connection.up, connection.target.as_ref()),
        };
        inward.fin |= event.closed;
        inward.readable |= event.readable;
        if event.priority {
            inward.on_urgent();
            if let Some(socket) = socket {
                // In the stream, where it was sent; where it fails, the byte is skipped as it is by default.
                let _ = socket.set_oob_inline(true);
            }
        }
        if event.error {
            // Nothing is left to read, or nothing can be read now: a reset does not wait.
            if inward.has_ended() || inward.is_blocked() {
                return self.broken(key, side, tick);
            }
            inward.on_error();
        }
        let (readable, writable) = (inward.readable, event.writable && outward.is_blocked());
        if readable {
            self.resume(key, side, tick);
        }
        if writable {
            self.resume(key, side.other(), tick);
        }
    }

    /// A turn of the flow whose source is `side`.
    pub(super) fn resume(&mut self, key: usize, side: Side, tick: Tick<'_>) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let Some(target) = &connection.target else { return };
        let local = &mut self.rules[connection.rule];
        let copy = local.state.rule.copy;
        let last = connection.half_done();
        let (flow, from, to) = match side {
            Side::Client => (&mut connection.up, &connection.client, target),
            Side::Target => (&mut connection.down, target, &connection.client),
        };
        let before = flow.bytes;
        let pumped = self.mover.pump(flow, from, to, copy, last);
        local.moved(connection.seat.as_ref(), side, flow.bytes - before);
        let turns = self.mover.take_turns();
        self.wake_up.lean += turns.lean;
        // Bulk that is acknowledged now and then stays bulk.
        if !(connection.up.is_bulk() || connection.down.is_bulk()) {
            self.wake_up.other += turns.buffered;
        }
        local.counters.spliced_bytes += self.mover.take_spliced();
        connection.active = tick.now;
        match pumped {
            Pumped::Idle => {}
            Pumped::Blocked => {
                // A target's socket is watched for it since it began to connect.
                if side == Side::Target {
                    self.watch_client_writable(key, tick);
                }
            }
            Pumped::Again => self.again.push((key, side)),
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

    /// From now on the client's socket also tells when it takes bytes again; what it takes already, it tells at once.
    pub(super) fn watch_client_writable(&mut self, key: usize, tick: Tick<'_>) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        if connection.client_writable {
            return;
        }
        connection.client_writable = true;
        match tick.poller.add_edge_writable(&connection.client, token(CLIENT, key)) {
            Ok(()) => {}
            // Not watched at all yet: `establish` asks again.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                self.complain(&error);
                self.end(key, EndReason::Limit, tick);
            }
        }
    }

    /// What a broken end had sent before is passed on, as far as it is taken at once: a server that answers and resets in one
    /// breath (an upload refused) is heard.
    fn last_words(&mut self, key: usize, side: Side) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let Some(target) = &connection.target else { return };
        let local = &mut self.rules[connection.rule];
        let copy = local.state.rule.copy;
        let (flow, from, to) = match side {
            Side::Client => (&mut connection.up, &connection.client, target),
            Side::Target => (&mut connection.down, target, &connection.client),
        };
        if flow.has_ended() {
            return;
        }
        flow.on_error();
        let before = flow.bytes;
        // Whatever this says, the connection ends now.
        let _ = self.mover.pump(flow, from, to, copy, false);
        local.moved(connection.seat.as_ref(), side, flow.bytes - before);
        local.counters.spliced_bytes += self.mover.take_spliced();
    }

    fn broken(&mut self, key: usize, side: Side, tick: Tick<'_>) {
        let reason = match side {
            Side::Client => EndReason::ClientReset,
            Side::Target => EndReason::TargetReset,
        };
        self.end(key, reason, tick);
    }
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Client => Self::Target,
            Self::Target => Self::Client,
        }
    }
}
