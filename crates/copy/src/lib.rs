//! Copies the bytes of a TCP connection between two sockets, one direction at a time, through a shared buffer
//! or a pooled pipe.
//!
//! ```text
//! buffer   read ─▶ 256 KiB of the mover ─▶ write      the connection keeps only the bytes that write rejected
//! splice   socket ─▶ pooled pipe ─▶ socket            bytes stay in the kernel; an empty pipe returns to the pool
//! ```
//!
//! Each worker has one [`Mover`]; each connection has two flows ([`CopyDirection`]), one per direction. A flow
//! reads only after its sink has accepted all held bytes, so it holds at most one buffer or one full pipe.
//!
//! Sockets are watched edge-triggered ([`turnpike_net::Interest::Edge`]). The owner maps events to calls:
//!
//! ```text
//! source readable        flow.readable = true, Mover::pump         source sent FIN (Event::closed)     flow.fin = true, pump
//! sink writable          Mover::pump, if flow.is_blocked()         urgent byte (Event::priority)       flow.on_urgent()
//! Pumped::Again          Mover::pump, after the other sockets      error (Event::error)                flow.on_error(), pump
//! ```
//!
//! A short read means that the socket is empty, so each message costs one read and one write; data that
//! arrives later raises another event. The exception is an urgent byte, which ends a read early; see
//! [`CopyDirection::on_urgent`]. A spliced flow gets one call per turn, so that data can accumulate.
#![forbid(unsafe_code)]

mod splice;

use std::{io, mem};

use rustix::net::sockopt::{set_socket_oobinline, set_tcp_nodelay};
use turnpike_net::TcpSocket;

use crate::splice::Pipe;

/// Read buffer. Larger sizes gain nothing (a receive queue holds 256 KiB at full speed) and exceed the cache.
const BUFFER: usize = 256 << 10;
/// Number of bytes above which a read counts as bulk.
const BULK: usize = 64 << 10;
/// Consecutive bulk reads before a pipe takes over.
const BULK_READS: u8 = 4;
/// Number of bytes below which a splice counts as interactive. After `CHATTER_READS` of these in a row, the
/// buffer takes over again. With a limit of 8, full-speed streams switched back and forth a hundred times a
/// second, because a core that keeps up also sees small pieces.
const CHATTER: usize = 16 << 10;
const CHATTER_READS: u8 = 64;
/// Maximum number of reads per direction in one turn, for fairness.
const TURN: usize = 8;
/// Maximum number of pipes per mover, two descriptors each. Additional bulk flows use the buffer.
const PIPES: usize = 256;
/// Number of bytes below which a splice is lean. At full speed, a splice moves far more.
const LEAN: usize = 256 << 10;
const IDLE_PIPES: usize = 64;
/// Maximum number of idle buffers to keep for unsent data.
const SPARE: usize = 16;
/// Maximum size of a first write that Nagle's algorithm never delays, because it fits in one segment on any
/// path.
const ONE_SEGMENT: usize = 500;

/// One direction of a connection.
#[derive(Debug, Default)]
pub struct CopyDirection {
    /// Number of bytes read from the source. The owner may add bytes that it has read itself.
    pub bytes: u64,
    held: Unsent,
    /// The source may have unread data. Set on an event, cleared by [`Mover::pump`].
    pub readable: bool,
    /// The source's FIN has arrived, so a short read is the last one. Set on an event.
    pub fin: bool,
    /// End of stream was read from the source.
    ended: bool,
    /// End of stream was passed to the sink.
    shut: bool,
    bulk: bool,
    /// Number of consecutive reads that contradict `bulk`.
    streak: u8,
    /// True if splice(2) must not be used, because of an urgent byte, a kernel refusal, or data that
    /// splice(2) cannot see.
    pub plain: bool,
    /// True if only a read that would block shows that the source is empty, and a short read does not. This is
    /// the case after an urgent byte or an error, and on Unix sockets, where passed descriptors and urgent
    /// bytes cut reads short (unix(7)).
    pub thorough: bool,
    /// TCP_NODELAY must still be set on the sink before the first write that Nagle's algorithm could delay. A
    /// connection with a single short request never needs that call.
    pub nodelay_due: bool,
    /// Bytes that may still be read; `None` is unlimited. [`Mover::pump`] counts down and returns
    /// [`Pumped::Spent`] at zero, after passing on the bytes it has read.
    pub budget: Option<u64>,
    /// End of stream may be premature, because the source can have bytes that reads do not see yet.
    /// [`Mover::pump`] then sets [`CopyDirection::end_read`] and returns [`Pumped::Idle`] until [`CopyDirection::believe_end`]
    /// confirms the end.
    pub doubts_end: bool,
    /// End of stream was read but is in doubt; see [`CopyDirection::doubts_end`]. The owner clears this.
    pub end_read: bool,
}

/// Bytes that have been read but not yet written.
#[derive(Debug, Default)]
enum Unsent {
    #[default]
    Nothing,
    /// Buffer, and the offset of its unsent bytes (at least one).
    Bytes(Vec<u8>, usize),
    Pipe(Pipe),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a flow that is not pumped again stalls"]
pub enum Pumped {
    /// The source is empty.
    Idle,
    /// The sink is full.
    Blocked,
    /// More may follow, but other flows are waiting.
    Again,
    /// [`CopyDirection::budget`] is used up.
    Spent,
    /// End of stream was passed on.
    Done,
    SourceFailed,
    SinkFailed,
}

impl CopyDirection {
    pub fn new(nodelay_due: bool) -> Self {
        Self { nodelay_due, ..Self::default() }
    }

    /// True if bytes are waiting for the sink to accept them.
    #[inline]
    pub fn is_blocked(&self) -> bool {
        match &self.held {
            Unsent::Nothing => false,
            Unsent::Bytes(..) => true,
            Unsent::Pipe(pipe) => pipe.held() > 0,
        }
    }

    pub fn is_bulk(&self) -> bool {
        self.bulk
    }

    #[inline]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    #[inline]
    pub fn is_done(&self) -> bool {
        self.shut
    }

    /// Queues bytes to be sent before all others; they are not counted in [`CopyDirection::bytes`]. Only valid before
    /// the first [`Mover::pump`].
    pub fn lead_with(&mut self, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.held = Unsent::Bytes(bytes, 0);
        }
    }

    /// Handles an urgent byte: reads stop at it and splice(2) never passes it. SO_OOBINLINE keeps it in its
    /// place in the stream.
    pub fn on_urgent(&mut self, source: &TcpSocket) {
        self.plain = true;
        self.thorough = true;
        // If this fails, the kernel skips the byte as it does by default.
        let _ = set_socket_oobinline(source, true);
    }

    /// Confirms an end of stream that [`CopyDirection::doubts_end`] held back.
    pub fn believe_end(&mut self) {
        self.doubts_end = false;
        self.ended = true;
    }

    /// Handles an error event: drains the source's queue until the read returns the error.
    pub fn on_error(&mut self) {
        self.readable = true;
        self.thorough = true;
    }

    #[inline]
    pub fn within_budget(&self, room: usize) -> usize {
        match self.budget {
            None => room,
            Some(left) => usize::try_from(left).map_or(room, |left| left.min(room)),
        }
    }

    /// Deducts bytes that the owner read itself.
    #[inline]
    pub fn spend(&mut self, n: usize) {
        if let Some(left) = &mut self.budget {
            *left = left.saturating_sub(n as u64);
        }
    }

    /// Counts the bytes of one read and decides whether the flow is bulk.
    #[inline]
    fn took(&mut self, n: usize, spliced: bool) {
        self.bytes += n as u64;
        self.spend(n);
        let against = if spliced { n < CHATTER } else { n >= BULK };
        self.streak = if against { self.streak + 1 } else { 0 };
        if self.streak >= if spliced { CHATTER_READS } else { BULK_READS } {
            self.bulk = !spliced;
            self.streak = 0;
        }
    }
}

/// Buffer and pipe pool shared by all connections of a worker. Pipes are opened on demand, up to 256.
#[derive(Debug)]
pub struct Mover {
    buffer: Box<[u8]>,
    idle: Vec<Pipe>,
    pipes: usize,
    spare: Vec<Vec<u8>>,
    moved: CopyCounts,
}

/// Work done by a [`Mover`]. It is used for metrics and to pace wake-ups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyCounts {
    pub spliced: u64,
    /// Splices of less than 256 KiB.
    pub lean: u32,
    /// Reads into the shared buffer.
    pub buffered: u32,
}

impl Default for Mover {
    fn default() -> Self {
        Self {
            buffer: vec![0; BUFFER].into(),
            idle: Vec::new(),
            pipes: 0,
            spare: Vec::new(),
            moved: CopyCounts::default(),
        }
    }
}

impl Mover {
    /// Lends the 256 KiB buffer for unrelated reads; its content is not kept between calls.
    pub fn scratch(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Returns the counts since the last call.
    #[inline]
    pub fn take_moved(&mut self) -> CopyCounts {
        mem::take(&mut self.moved)
    }

    /// Moves available data, a few reads at most. `splice` selects a pipe (if the pool has one) or the
    /// buffer; `None` starts with the buffer, switches to a pipe once the flow proves to be bulk, and may
    /// switch back. `last` means that the other flow is done: both sockets are about to be closed, so the end
    /// of stream is not passed on.
    pub fn pump(
        &mut self,
        flow: &mut CopyDirection,
        from: &TcpSocket,
        to: &TcpSocket,
        splice: Option<bool>,
        last: bool,
    ) -> Pumped {
        let mut turn = 0;
        loop {
            match self.drain(flow, to) {
                Ok(true) => {}
                Ok(false) => return Pumped::Blocked,
                Err(_) => return self.stop(flow, Pumped::SinkFailed),
            }
            if flow.ended && flow.doubts_end {
                (flow.ended, flow.end_read, flow.readable) = (false, true, false);
                return self.stop(flow, Pumped::Idle);
            }
            if flow.ended {
                if !flow.shut {
                    flow.shut = true;
                    if !last && to.shutdown_write().is_err() {
                        return self.stop(flow, Pumped::SinkFailed);
                    }
                }
                return self.stop(flow, Pumped::Done);
            }
            if !flow.readable {
                return self.stop(flow, Pumped::Idle);
            }
            if flow.budget == Some(0) {
                return self.stop(flow, Pumped::Spent);
            }
            if turn == TURN {
                return self.stop(flow, Pumped::Again);
            }
            turn += 1;
            let moved = if splice.unwrap_or(flow.bulk) && !flow.plain && self.lend(flow) {
                // Little data has arrived since the last splice. Let it accumulate while other flows have
                // their turn.
                turn = TURN;
                self.splice(flow, from)
            } else {
                match self.copy(flow, from, to) {
                    Ok(moved) => moved,
                    Err(_) => return self.stop(flow, Pumped::SinkFailed),
                }
            };
            match moved {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => flow.readable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return self.stop(flow, Pumped::SourceFailed),
            }
        }
    }

    /// Recovers the pipe or buffer of an ended connection. A pipe that still contains data is closed. If the
    /// flow is dropped instead, the pool loses a pipe.
    pub fn reclaim(&mut self, flow: &mut CopyDirection) {
        match mem::take(&mut flow.held) {
            Unsent::Nothing => {}
            Unsent::Bytes(bytes, _) => self.recycle(bytes),
            Unsent::Pipe(pipe) => self.give_back(pipe),
        }
    }

    /// Sends held bytes; true if none are left.
    fn drain(&mut self, flow: &mut CopyDirection, to: &TcpSocket) -> io::Result<bool> {
        match &mut flow.held {
            Unsent::Nothing => Ok(true),
            Unsent::Bytes(bytes, at) => {
                while *at < bytes.len() {
                    match to.write(&bytes[*at..]) {
                        Ok(sent) => *at += sent,
                        Err(error) => return blocked(error),
                    }
                }
                if let Unsent::Bytes(bytes, _) = mem::take(&mut flow.held) {
                    self.recycle(bytes);
                }
                Ok(true)
            }
            Unsent::Pipe(pipe) => {
                if flow.nodelay_due && pipe.held() > 0 {
                    flow.nodelay_due = false;
                    // If this fails, the following write fails too.
                    let _ = set_tcp_nodelay(to, true);
                }
                while pipe.held() > 0 {
                    match pipe.drain(to) {
                        Ok(sent) => self.moved.spliced += sent as u64,
                        Err(error) => return blocked(error),
                    }
                }
                Ok(true)
            }
        }
    }

    /// Fills the flow's empty pipe once.
    fn splice(&mut self, flow: &mut CopyDirection, from: &TcpSocket) -> io::Result<()> {
        let most = flow.within_budget(usize::MAX);
        let Unsent::Pipe(pipe) = &mut flow.held else { return Ok(()) };
        match pipe.fill(from, most) {
            // 0 may also mean that an urgent byte precedes FIN, even if the byte's event has not arrived yet.
            Ok(0) if from.is_at_urgent_byte() => {
                flow.on_urgent(from);
                self.reclaim(flow);
            }
            Ok(0) => flow.ended = true,
            Ok(moved) => {
                flow.took(moved, true);
                self.moved.lean += u32::from(moved < LEAN);
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                // The socket does not support splice(2), for example because of kTLS or an unusual protocol.
                flow.plain = true;
                self.reclaim(flow);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Does one read and one write. The outer error comes from the sink.
    fn copy(
        &mut self,
        flow: &mut CopyDirection,
        from: &TcpSocket,
        to: &TcpSocket,
    ) -> io::Result<io::Result<()>> {
        if let Unsent::Pipe(_) = flow.held {
            self.reclaim(flow);
        }
        let most = flow.within_budget(self.buffer.len());
        let got = match from.read(&mut self.buffer[..most]) {
            Ok(got) => got,
            Err(error) => return Ok(Err(error)),
        };
        if got == 0 {
            flow.ended = true;
            return Ok(Ok(()));
        }
        if got < most && !flow.thorough {
            flow.readable = false;
            flow.ended = flow.fin;
        }
        if flow.nodelay_due && (flow.bytes > 0 || got > ONE_SEGMENT) {
            flow.nodelay_due = false;
            // If this fails, the following write fails too.
            let _ = set_tcp_nodelay(to, true);
        }
        flow.took(got, false);
        self.moved.buffered += 1;
        let sent = match to.write(&self.buffer[..got]) {
            Ok(sent) => sent,
            Err(error) => blocked(error).map(|_| 0)?,
        };
        if sent < got {
            let mut left = self.spare.pop().unwrap_or_default();
            left.extend_from_slice(&self.buffer[sent..got]);
            flow.held = Unsent::Bytes(left, 0);
        }
        Ok(Ok(()))
    }

    fn lend(&mut self, flow: &mut CopyDirection) -> bool {
        if let Unsent::Pipe(_) = flow.held {
            return true;
        }
        let pipe = match self.idle.pop() {
            Some(pipe) => pipe,
            None if self.pipes >= PIPES => return false,
            None => match Pipe::new() {
                Ok(pipe) => {
                    self.pipes += 1;
                    pipe
                }
                Err(_) => return false,
            },
        };
        flow.held = Unsent::Pipe(pipe);
        true
    }

    /// Returns an empty pipe to the pool.
    fn stop(&mut self, flow: &mut CopyDirection, pumped: Pumped) -> Pumped {
        if matches!(&flow.held, Unsent::Pipe(pipe) if pipe.held() == 0) {
            self.reclaim(flow);
        }
        pumped
    }

    fn give_back(&mut self, pipe: Pipe) {
        if pipe.held() == 0 && self.idle.len() < IDLE_PIPES {
            self.idle.push(pipe);
        } else {
            self.pipes -= 1;
        }
    }

    fn recycle(&mut self, mut bytes: Vec<u8>) {
        if self.spare.len() < SPARE && bytes.capacity() >= BULK {
            bytes.clear();
            self.spare.push(bytes);
        }
    }
}

/// Distinguishes a full sink from a broken one.
fn blocked(error: io::Error) -> io::Result<bool> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests;
