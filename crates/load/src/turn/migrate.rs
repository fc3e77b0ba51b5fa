//! Mobility (RFC 8016) during the run: every client changes its socket at intervals and moves its allocation.
//!
//! ```text
//! measured time ─▶ │  0  1  2  3  0  1  2  3  0  1  2  3 │      moves of four clients, one interval apart for each client
//! ```
//!
//! This models a phone that changes networks: the old socket is closed immediately, and a Refresh with the ticket is sent from the new one.
//! Bursts that become due before the server responds have to wait, because the server does not know the new address yet; their round-trip
//! times include this wait. Packets that the server still sends to the old socket count as lost.

use super::{engine::TurnEngine, moves::MoveState};

const AT_A_TIME: usize = 32;

impl TurnEngine {
    /// Starts moves that are due. No messages may be queued for the old sockets.
    pub(super) fn start_moves(&mut self) {
        let now_ns = self.now_ns();
        for _ in 0..AT_A_TIME {
            let Some(index) = self.moves.next(now_ns) else { return };
            match self.moves.clients[index] {
                MoveState::Stranded => continue,
                MoveState::Moving(_) if !self.is_broken(index) => continue,
                MoveState::Moving(_) => self.moves.failed(index, || "the new connection failed".to_owned()),
                MoveState::Settled => {}
            }
            self.start_move(index);
        }
    }

    fn start_move(&mut self, index: usize) {
        self.moves.clients[index] = MoveState::Moving(self.now_ns());
        self.moves.under_way += 1;
        if let Err(error) = self.reopen(index, 0) {
            return self.moves.failed(index, || format!("cannot open a new socket: {error}"));
        }
        let now = self.now_ms();
        if let Err(error) = self.endpoints[index].client.migrate(now) {
            return self.moves.stranded(index, || error.to_string());
        }
        self.pump(index);
    }
}
