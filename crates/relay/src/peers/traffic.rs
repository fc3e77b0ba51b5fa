//! Traffic of a bound peer connection: on each event, moves data in both directions.

use turnpike_copy::{CopyDirection, Mover, Pumped};
use turnpike_net::{Event, TcpSocket};
use turnpike_turn::server::Way;

use super::{ClientEnd, Connection, HalfClosed, PeerSide, PeerStage, Peers, Purse, note, tls_end::Turned};

/// Maximum bytes requested from a bandwidth limit per call, so a worker never reserves more than
/// this.
const PORTION: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Idle,
    Blocked,
    Again,
    Over,
}

impl Peers {
    pub(super) fn on_traffic(&mut self, slot: usize, side: PeerSide, event: &Event, purse: &mut Purse<'_>) {
        let connection = &mut self.connections[slot];
        let source = match side {
            PeerSide::Peer => &mut connection.to_client,
            PeerSide::Client => &mut connection.to_peer,
        };
        let socket = match (&connection.stage, side) {
            (PeerStage::Bound(ClientEnd::Plain(client)), PeerSide::Client) => client,
            _ => &connection.peer,
        };
        note(source, socket, event);
        if event.error {
            // If nothing can be read, a reset ends the connection immediately.
            let stuck = match &connection.stage {
                PeerStage::Bound(ClientEnd::Tls(end)) => end.is_deaf_to(side),
                _ => source.has_ended() || source.is_blocked(),
            };
            if stuck {
                return self.end(slot);
            }
            source.on_error();
        }
        self.turn(slot, purse);
    }

    pub(super) fn turn(&mut self, slot: usize, purse: &mut Purse<'_>) {
        let mover = self.mover.get_or_insert_with(Mover::default);
        let Some(connection) = self.connections.get_mut(slot) else { return };
        let granted = connection.grant(purse);
        let mut outcome = connection.turn(mover);
        self.stats.spliced_bytes += mover.take_moved().spliced;
        if let Some(granted) = granted {
            let is_spent = connection.settle(granted, purse);
            if is_spent && matches!(outcome, Outcome::Idle | Outcome::Blocked) {
                outcome = Outcome::Again;
            }
            if outcome != Outcome::Over {
                let held = connection.held_until_ms.into_iter().filter(|until_ms| *until_ms > purse.now.ms);
                self.paused.extend(held.map(|until_ms| (until_ms, slot, connection.generation)));
            }
        }
        if outcome != Outcome::Over && !connection.half_closed && connection.is_half_closed() {
            connection.half_closed = true;
            self.half_closed.push_back(HalfClosed {
                until_ms: purse.now.ms + self.half_closed_ms,
                slot,
                generation: connection.generation,
                bytes: connection.bytes(),
            });
        }
        match outcome {
            Outcome::Idle => {}
            Outcome::Blocked => self.stats.stalls += 1,
            Outcome::Again if connection.queued => {}
            Outcome::Again => {
                connection.queued = true;
                self.again.push(slot);
            }
            Outcome::Over => self.end(slot),
        }
    }
}

impl Connection {
    fn is_half_closed(&self) -> bool {
        match &self.stage {
            PeerStage::Bound(ClientEnd::Tls(end)) => end.is_half_closed(),
            _ => self.to_peer.has_ended() || self.to_client.has_ended(),
        }
    }

    /// Grants both flows as much as their limits allow; returns the grants, or `None` without limits.
    fn grant(&mut self, purse: &mut Purse<'_>) -> Option<[u64; 2]> {
        let is_limited = purse.server.is_limited(self.allocation);
        let mut granted = [0; 2];
        let flows = [(Way::ToPeer, &mut self.to_peer), (Way::ToClient, &mut self.to_client)];
        for ((way, flow), granted) in flows.into_iter().zip(&mut granted) {
            flow.budget = is_limited.then_some(0);
            let until_ms = &mut self.held_until_ms[way as usize];
            if !is_limited || !flow.readable || *until_ms > purse.now.ms {
                continue;
            }
            match purse.server.take_bytes(purse.now, self.allocation, way, PORTION) {
                Ok(bytes) => (flow.budget, *granted) = (Some(bytes), bytes),
                Err(held_up) => *until_ms = held_up.until_ms.max(purse.now.ms + 1),
            }
        }
        is_limited.then_some(granted)
    }

    fn settle(&mut self, granted: [u64; 2], purse: &mut Purse<'_>) -> bool {
        let flows = [(Way::ToPeer, &self.to_peer), (Way::ToClient, &self.to_client)];
        let mut is_spent = false;
        for ((way, flow), granted) in flows.into_iter().zip(granted) {
            let left = flow.budget.unwrap_or(0);
            purse.server.give_back_bytes(self.allocation, way, left);
            is_spent |= granted > 0 && left == 0 && flow.readable;
        }
        is_spent
    }

    fn turn(&mut self, mover: &mut Mover) -> Outcome {
        let Self { peer, stage, to_peer, to_client, .. } = self;
        let client = match stage {
            PeerStage::Bound(ClientEnd::Plain(client)) => client,
            PeerStage::Bound(ClientEnd::Tls(client)) => {
                return match client.turn(peer, to_peer, to_client, mover.scratch()) {
                    Turned::Idle => Outcome::Idle,
                    Turned::Blocked => Outcome::Blocked,
                    Turned::Again => Outcome::Again,
                    Turned::Over => Outcome::Over,
                };
            }
            PeerStage::Connecting | PeerStage::Waiting => return Outcome::Idle,
        };
        let first = one_way(mover, to_peer, client, peer, to_client.is_done());
        let second = one_way(mover, to_client, peer, client, to_peer.is_done());
        if first == Outcome::Over || second == Outcome::Over || (to_peer.is_done() && to_client.is_done()) {
            Outcome::Over
        } else if first == Outcome::Again || second == Outcome::Again {
            Outcome::Again
        } else if first == Outcome::Blocked || second == Outcome::Blocked {
            Outcome::Blocked
        } else {
            Outcome::Idle
        }
    }
}

fn one_way(
    mover: &mut Mover,
    flow: &mut CopyDirection,
    from: &TcpSocket,
    to: &TcpSocket,
    last: bool,
) -> Outcome {
    if flow.is_done() {
        return Outcome::Idle;
    }
    match mover.pump(flow, from, to, None, last) {
        // If the budget is used up, `grant` has set a pause.
        Pumped::Idle | Pumped::Spent | Pumped::Done => Outcome::Idle,
        Pumped::Blocked => Outcome::Blocked,
        Pumped::Again => Outcome::Again,
        Pumped::SourceFailed | Pumped::SinkFailed => Outcome::Over,
    }
}
