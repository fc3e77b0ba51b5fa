//! Moving the bytes of a TCP connection between two sockets, one direction at a time, by a shared buffer or through a pooled
//! pipe.
//!
//! ```text
//! buffer   read ─▶ the mover's 256 KiB ─▶ write       what the write does not take is all that a connection keeps
//! splice   socket ─▶ pipe of the pool ─▶ socket       the bytes never leave the kernel; an empty pipe goes back to the pool
//! ```
//!
//! A worker has one [`Mover`]; each connection has two [`Flow`]s, one per direction, and nothing else of its own. Memory is
//! bounded: a flow reads only once its sink has taken what it holds, so it keeps one buffer or one pipe's fill at most.
//!
//! The sockets are watched edge-triggered ([`crate::poll::Interest::Edge`]), and the owner turns events into turns:
//!
//! ```text
//! source readable        flow.readable = true, Mover::pump         source sent FIN (Event::closed)     flow.fin = true, pump
//! sink writable          Mover::pump, if Flow::is_blocked          urgent byte (Event::priority)       Flow::on_urgent
//! Pumped::Again          Mover::pump, after the other sockets      error (Event::error)                Flow::on_error, pump
//! ```
//!
//! A read that brings less than was asked has emptied the socket, so that a message costs one read and one write: what comes
//! later brings its own event. A splice has one turn at a time, so that what comes meanwhile gathers. (Only an urgent byte stops a read early; that is announced, see [`Flow::on_urgent`].)

use std::{io, mem};

use rustix::net::sockopt::{set_socket_oobinline, set_tcp_nodelay};

use crate::{TcpSocket, splice::Pipe};

/// The mover's buffer. Larger ones gain nothing (256 KiB is what a receive queue holds at full speed) and leave the cache.
const BUFFER: usize = 256 << 10;
/// A read of so many bytes or more speaks for bulk.
const BULK: usize = 64 << 10;
/// Consecutive reads that speak for bulk until a pipe takes over.
const BULK_READS: u8 = 4;
/// A splice of fewer bytes speaks for chatter; so many consecutive ones bring the buffer back. With 8 of them streams at full speed
/// went back and forth a hundred times a second: a core that keeps up meets small pieces too.
const CHATTER: usize = 16 << 10;
const CHATTER_READS: u8 = 64;
/// Reads of one direction in one turn, so that others get theirs.
const TURN: usize = 8;
/// Pipes of one mover, at two descriptors each. Beyond, bulk goes by the buffer.
const PIPES: usize = 256;
/// A splice of fewer bytes is counted as lean: at full speed a pipe takes far more.
const LEAN: usize = 256 << 10;
/// Idle pipes kept.
const IDLE_PIPES: usize = 64;
/// Idle buffers kept for what a write did not take.
const SPARE: usize = 16;
/// A first write up to this size is one segment on any path, which Nagle's algorithm never holds back.
const ONE_SEGMENT: usize = 500;

/// How bytes move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyMode {
    /// The shared buffer first, a pooled pipe once a connection proves to be bulk, and back.
    #[default]
    Auto,
    /// splice(2) through a pooled pipe, as long as there is one to have.
    Splice,
    /// The shared buffer, always.
    Buffer,
    /// As `Auto`; and the owner of a connection has the kernel pass its chatter from socket to socket.
    Kernel,
}

/// One direction of a connection: from its source to its sink.
#[derive(Debug, Default)]
pub struct Flow {
    /// Bytes taken from the source. The owner may add what it took itself.
    pub bytes: u64,
    held: Held,
    /// The source may have more than was read: to be set when an event says so; [`Mover::pump`] clears it.
    pub readable: bool,
    /// The source's FIN is known to have arrived: a short read is the last. To be set when an event says so.
    pub fin: bool,
    /// The source's end was read.
    ended: bool,
    /// It was passed on.
    shut: bool,
    bulk: bool,
    /// Consecutive reads that speak against `bulk` as it is.
    streak: u8,
    /// splice(2) cannot be used: an urgent byte, the kernel refused, or the source has its bytes where splice(2) does not find them.
    pub plain: bool,
    /// Reads go on until the source would block: after an urgent byte or an error, and for a source whose reads may be short although
    /// more waits, as those of Unix sockets are at passed descriptors and urgent bytes (unix(7)).
    pub thorough: bool,
    /// TCP_NODELAY is still to be set on the sink, before the first write that Nagle's algorithm could hold back: a connection
    /// of one short request never pays for the call.
    pub nodelay_due: bool,
    /// Bytes that may still be taken from the source; `None` is as many as there are. [`Mover::pump`] counts it down and stops
    /// at zero with [`Pumped::Spent`]; what has been taken is passed on whatever it says.
    pub budget: Option<u64>,
    /// An end that a read shows may be none, for the source has bytes that no read shows yet. Then [`Mover::pump`] stops there, sets
    /// [`Flow::end_read`] and says [`Pumped::Idle`]; [`Flow::believe_end`] has it go on.
    pub doubts_end: bool,
    /// See [`Flow::doubts_end`]; cleared by whoever looks.
    pub end_read: bool,
}

/// Bytes on their way.
#[derive(Debug, Default)]
enum Held {
    #[default]
    Nothing,
    /// Left over from a write, from an offset on; never empty.
    Bytes(Vec<u8>, usize),
    Pipe(Pipe),
}

/// Where a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a flow that is not pumped again stands still"]
pub enum Pumped {
    /// The source has no more for now.
    Idle,
    /// The sink takes no more for now.
    Blocked,
    /// There is more to move, but others are waiting.
    Again,
    /// There may be more to move, but [`Flow::budget`] is used up.
    Spent,
    /// The end was passed on.
    Done,
    /// The source is broken.
    SourceFailed,
    /// The sink is broken.
    SinkFailed,
}

impl Flow {
    /// `nodelay_due`: the sink is to have TCP_NODELAY and does not yet, see [`Flow::nodelay_due`].
    pub fn new(nodelay_due: bool) -> Self {
        Self { nodelay_due, ..Self::default() }
    }

    /// Whether bytes wait for the sink.
    #[inline]
    pub fn is_blocked(&self) -> bool {
        match &self.held {
            Held::Nothing => false,
            Held::Bytes(..) => true,
            Held::Pipe(pipe) => pipe.held() > 0,
        }
    }

    /// Whether it has proved to be bulk.
    pub fn is_bulk(&self) -> bool {
        self.bulk
    }

    /// Whether the source's end was read.
    #[inline]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether the source's end was passed on.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.shut
    }

    /// Bytes to send before all others; only before the first turn. They are not counted in [`Flow::bytes`].
    pub fn lead_with(&mut self, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.held = Held::Bytes(bytes, 0);
        }
    }

    /// An urgent byte is on its way: reads stop at it, and splice(2) never passes it. It stays in the stream, where it was sent.
    pub fn on_urgent(&mut self, source: &TcpSocket) {
        self.plain = true;
        self.thorough = true;
        // Where it fails, the byte is skipped as it is by default.
        let _ = set_socket_oobinline(source, true);
    }

    /// The end that was read is one.
    pub fn believe_end(&mut self) {
        self.doubts_end = false;
        self.ended = true;
    }

    /// The source is broken: its queue is read to the end, and the error behind it found.
    pub fn on_error(&mut self) {
        self.readable = true;
        self.thorough = true;
    }

    /// How much of `room` may be filled.
    #[inline]
    pub fn within_budget(&self, room: usize) -> usize {
        match self.budget {
            None => room,
            Some(left) => usize::try_from(left).map_or(room, |left| left.min(room)),
        }
    }

    /// Takes so much from the budget: for an owner that reads by itself.
    #[inline]
    pub fn spend(&mut self, n: usize) {
        if let Some(left) = &mut self.budget {
            *left = left.saturating_sub(n as u64);
        }
    }

    /// Counts `n` bytes that one read has brought, and judges it for `auto`.
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

/// What all connections of a worker share: the buffer, and the pool of pipes. Pipes are opened as bulk asks for them, 256 at most.
#[derive(Debug)]
pub struct Mover {
    buffer: Box<[u8]>,
    idle: Vec<Pipe>,
    pipes: usize,
    spare: Vec<Vec<u8>>,
    moved: CopyCounts,
}

/// What a [`Mover`] has moved, for counters and for an owner that paces its wake-ups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyCounts {
    /// Bytes that splice(2) has moved.
    pub spliced: u64,
    /// Reads by splice(2) of less than 256 KiB.
    pub lean: u32,
    /// Reads by the shared buffer.
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
    /// Room for a read of something else than a flow: 256 KiB that hold nothing between two calls.
    pub fn scratch(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// What has been moved since the last call.
    #[inline]
    pub fn take_moved(&mut self) -> CopyCounts {
        mem::take(&mut self.moved)
    }

    /// Moves what can be moved now, a few reads at most. With `last`, the other flow is done: the end need not be passed on to
    /// the sink, as both sockets are about to be closed.
    pub fn pump(
        &mut self,
        flow: &mut Flow,
        from: &TcpSocket,
        to: &TcpSocket,
        copy: CopyMode,
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
            let by_pipe = match copy {
                CopyMode::Buffer => false,
                CopyMode::Splice => true,
                CopyMode::Auto | CopyMode::Kernel => flow.bulk,
            };
            let moved = if by_pipe && !flow.plain && self.lend(flow) {
                // What came meanwhile is a small piece: it grows while the others have their turn.
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

    /// Takes back what the flow of an ended connection holds, so that others can have it. A pipe with bytes inside is closed
    /// with them. Dropping a flow that holds a pipe instead leaves the pool one short.
    pub fn reclaim(&mut self, flow: &mut Flow) {
        match mem::take(&mut flow.held) {
            Held::Nothing => {}
            Held::Bytes(bytes, _) => self.recycle(bytes),
            Held::Pipe(pipe) => self.give_back(pipe),
        }
    }

    /// Sends what is held; `true` when nothing is any more.
    fn drain(&mut self, flow: &mut Flow, to: &TcpSocket) -> io::Result<bool> {
        match &mut flow.held {
            Held::Nothing => Ok(true),
            Held::Bytes(bytes, at) => {
                while *at < bytes.len() {
                    match to.write(&bytes[*at..]) {
                        Ok(sent) => *at += sent,
                        Err(error) => return blocked(error),
                    }
                }
                if let Held::Bytes(bytes, _) = mem::take(&mut flow.held) {
                    self.recycle(bytes);
                }
                Ok(true)
            }
            Held::Pipe(pipe) => {
                if flow.nodelay_due && pipe.held() > 0 {
                    flow.nodelay_due = false;
                    // Where it fails, the write that follows fails too.
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

    /// One fill of the flow's pipe, which is empty.
    fn splice(&mut self, flow: &mut Flow, from: &TcpSocket) -> io::Result<()> {
        let most = flow.within_budget(usize::MAX);
        let Held::Pipe(pipe) = &mut flow.held else { return Ok(()) };
        match pipe.fill(from, most) {
            // The same 0 stands for an urgent byte behind which the end has arrived already. The event that announces it may come later.
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
                // splice(2): the socket does not support it (kTLS, an odd protocol).
                flow.plain = true;
                self.reclaim(flow);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// One read and one write. The outer error is the sink's.
    fn copy(&mut self, flow: &mut Flow, from: &TcpSocket, to: &TcpSocket) -> io::Result<io::Result<()>> {
        if let Held::Pipe(_) = flow.held {
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
            // Where it fails, the write that follows fails too.
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
            flow.held = Held::Bytes(left, 0);
        }
        Ok(Ok(()))
    }

    /// Makes sure that the flow has a pipe; `false` when there is none to have.
    fn lend(&mut self, flow: &mut Flow) -> bool {
        if let Held::Pipe(_) = flow.held {
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
        flow.held = Held::Pipe(pipe);
        true
    }

    /// An empty pipe is of use to others.
    fn stop(&mut self, flow: &mut Flow, pumped: Pumped) -> Pumped {
        if matches!(&flow.held, Held::Pipe(pipe) if pipe.held() == 0) {
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

/// Tells a sink that is full from one that is broken.
fn blocked(error: io::Error) -> io::Result<bool> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests;
