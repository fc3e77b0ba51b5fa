//! A connection to a peer that is bound: events become turns of its two directions.

use turnpike_net::{CopyMode, Flow, Mover, Pumped, TcpSocket, poll::Event};

use super::{ClientEnd, Connection, Peers, Side, Stage, note, tls_end::Turned};

/// What a turn of a connection leaves to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Idle,
    /// An end takes no more for now.
    Blocked,
    Again,
    Over,
}

impl Peers {
    /// One end has something to read, takes something again, or is broken.
    pub(super) fn on_traffic(&mut self, slot: usize, side: Side, event: &Event) {
        let connection = &mut self.connections[slot];
        let source = match side {
            Side::Peer => &mut connection.to_client,
            Side::Client => &mut connection.to_peer,
        };
        note(source, event);
        if event.error {
            // Nothing is left to read, or nothing can be read now: a reset does not wait.
            let stuck = match &connection.stage {
                Stage::Bound(ClientEnd::Tls(end)) => end.is_deaf_to(side),
                _ => source.has_ended() || source.is_blocked(),
            };
            if stuck {
                return self.end(slot);
            }
            source.on_error();
        }
        if event.priority {
            let socket = match (&connection.stage, side) {
                (Stage::Bound(ClientEnd::Plain(client)), Side::Client) => client,
                _ => &connection.peer,
            };
            // In the stream, where it was sent; where it fails, the byte is skipped as it is by default.
            let _ = socket.set_oob_inline(true);
        }
        self.turn(slot);
    }

    /// Moves what can be moved now, in both directions.
    pub(super) fn turn(&mut self, slot: usize) {
        let mover = self.mover.get_or_insert_with(Mover::new);
        let Some(connection) = self.connections.get_mut(slot) else { return };
        let outcome = connection.turn(mover, self.copy);
        self.stats.spliced_bytes += mover.take_spliced();
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
    fn turn(&mut self, mover: &mut Mover, copy: CopyMode) -> Outcome {
        let Self { peer, stage, to_peer, to_client, .. } = self;
        let client = match stage {
            Stage::Bound(ClientEnd::Plain(client)) => client,
            Stage::Bound(ClientEnd::Tls(client)) => {
                return match client.turn(peer, to_peer, to_client, mover.scratch()) {
                    Turned::Idle => Outcome::Idle,
                    Turned::Blocked => Outcome::Blocked,
                    Turned::Again => Outcome::Again,
                    Turned::Over => Outcome::Over,
                };
            }
            Stage::Connecting | Stage::Waiting => return Outcome::Idle,
        };
        let first = one_way(mover, to_peer, client, peer, copy, to_client.is_done());
        let second = one_way(mover, to_client, peer, client, copy, to_peer.is_done());
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
    flow: &mut Flow,
    from: &TcpSocket,
    to: &TcpSocket,
    copy: CopyMode,
    last: bool,
) -> Outcome {
    if flow.is_done() {
        return Outcome::Idle;
    }
    match mover.pump(flow, from, to, copy, last) {
        // These flows have no budget.
        Pumped::Idle | Pumped::Spent | Pumped::Done => Outcome::Idle,
        Pumped::Blocked => Outcome::Blocked,
        Pumped::Again => Outcome::Again,
        Pumped::SourceFailed | Pumped::SinkFailed => Outcome::Over,
    }
}
