//! Mobility (RFC 8016) in mid-run: every client changes its socket from time to time and takes its allocation along.
//!
//! ```text
//!  measured time ─▶ │  0  1  2  3  0  1  2  3  0  1  2  3 │      clients of four, one interval from each number to the next same
//! ```
//!
//! As where a phone leaves one network for another: the old socket is closed at once, and the new one sends a Refresh with the
//! ticket. What is due until the server has answered waits, for from there it knows nobody yet; the round trips contain the wait.
//! What the server still sends to the old socket is lost, and counted so.

use super::{engine::TurnEngine, moves::MoveState};

/// Moves begun before it is the turn of traffic again.
const AT_A_TIME: usize = 32;

impl TurnEngine {
    /// Moves the clients whose time has come. Nothing may be queued for their old sockets.
    pub(super) fn start_moves(&mut self) {
        let now_ns = self.now_ns();
        for _ in 0..AT_A_TIME {
            let Some(index) = self.moves.next(now_ns) else { return };
            match self.moves.clients[index] {
                MoveState::Stranded => continue,
                // It is still being asked; a connection that failed asks no more.
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
            return self.moves.failed(index, || format!("no new socket: {error}"));
        }
        let now = self.now_ms();
        if let Err(error) = self.endpoints[index].client.migrate(now) {
            return self.moves.stranded(index, || error.to_string());
        }
        self.pump(index);
    }
}
