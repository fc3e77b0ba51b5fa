//! Sockets of one worker whose flows the kernel may relay: which of them user space has drained, which receive super-packets, and when the
//! worker has to look again.

use std::{iter::StepBy, ops::Range, time::Duration};

use turnpike_net::{Buffer, Rx, SocketId, Sockets, UdpSocket, rx::Received};

use crate::{clock::now_ns, drained::DrainedSockets, flows::Flows, gro_control::GroControl};

/// Each session's counters are read once in ten of these, in milliseconds.
const SWEEP_MS: u64 = 100;
const SWEEPS: usize = 10;

/// A worker's bookkeeping beside its [`Flows`].
pub struct WorkerSockets {
    drained: DrainedSockets,
    /// `None` where super-packets make no difference to the program.
    gro: Option<GroControl>,
    swept_ms: u64,
    sweep: usize,
}

impl WorkerSockets {
    /// Without sockets; the first sweep is due some time after `now_ms`.
    #[must_use]
    pub fn new(flows: &Flows, now_ms: u64) -> Self {
        Self {
            drained: DrainedSockets::new(flows.gap_ns()),
            gro: (!flows.come_before_gro()).then(GroControl::default),
            swept_ms: now_ms,
            sweep: 0,
        }
    }

    /// The program's number of a socket. `None` where all are given out.
    pub fn slot(&mut self, socket: SocketId, flows: &Flows) -> Option<u32> {
        self.drained.slot(socket.0, || flows.socket())
    }

    /// A socket of a process before, with its number there. It may have had no super-packets, and something may have come to it since that
    /// process rested.
    pub fn adopt(&mut self, socket: SocketId, number: impl FnOnce() -> u32) {
        self.drained.slot(socket.0, || Some(number()));
        if let Some(gro) = &mut self.gro {
            gro.adopted(socket.0);
        }
        self.drained.touch(socket.0);
    }

    /// Something may be on its way through this socket.
    pub fn touch(&mut self, socket: SocketId) {
        self.drained.touch(socket.0);
    }

    /// A socket is about to be closed, and its flows are gone.
    pub fn forget(&mut self, socket: SocketId, flows: &Flows) {
        if let Some(gro) = &mut self.gro {
            gro.forget(socket.0);
        }
        if let Some(number) = self.drained.forget(socket.0) {
            flows.give_back_socket(number);
        }
    }

    /// Another process has all flows.
    pub fn leave(&mut self, flows: &Flows) {
        self.drained = DrainedSockets::new(flows.gap_ns());
    }

    /// Before the worker waits for events: how long at most.
    pub fn before_wait(&mut self) -> Option<Duration> {
        self.drained.before_wait(now_ns())
    }

    /// After a wait that named these sockets. `are_all` means that nothing else is ready; `lost` is the number of datagrams that all sockets
    /// have lost so far.
    pub fn after_wait(
        &mut self,
        ready: impl Iterator<Item = SocketId>,
        are_all: bool,
        lost: u64,
        sockets: &Sockets,
        flows: &Flows,
    ) {
        let backlog = |socket| sockets.get(SocketId(socket)).map_or(0, UdpSocket::backlog);
        self.drained.after_wait(now_ns(), ready.map(|socket| socket.0), are_all, (lost, backlog), flows);
    }

    /// A receive call has brought this through a socket, and it is still to be sent. `is_empty` if the call shows that there was no more.
    /// `goes_across` tells whether the kernel would relay a buffer's datagrams; `None` where it relays nothing.
    #[inline]
    pub fn received(
        &mut self,
        socket: SocketId,
        received: Received,
        is_empty: bool,
        rx: &Rx,
        goes_across: Option<impl Fn(&Buffer<'_>) -> bool>,
    ) {
        let is_judged = goes_across.filter(|_| self.drained.is_needed(socket.0));
        let mut judged = self.gro.as_mut().zip(is_judged);
        let mut is_bulk = false;
        for buffer in rx.buffers(received) {
            is_bulk |= buffer.count() > 1;
            if let Some((gro, goes_across)) = &mut judged {
                gro.saw(socket.0, buffer.count(), goes_across(&buffer));
            }
        }
        if is_bulk {
            self.drained.bulk(socket.0);
        }
        if is_empty {
            self.drained.received(socket.0);
        }
    }

    /// All that was received has been sent.
    pub fn flushed(&mut self, sockets: &Sockets, flows: &Flows) {
        self.drained.flushed(flows);
        if let Some(gro) = &mut self.gro {
            gro.end_tick(|socket| sockets.set_gro(SocketId(socket), false));
        }
    }

    /// Nothing goes across from now on: all sockets receive super-packets.
    pub fn end(&mut self, sockets: &Sockets) {
        if let Some(gro) = &mut self.gro {
            gro.end(|socket| _ = sockets.set_gro(SocketId(socket), true));
        }
    }

    /// When [`Self::begin_sweep`] is due, in milliseconds of the worker's clock.
    #[must_use]
    pub fn sweep_due(&self) -> u64 {
        self.swept_ms + SWEEP_MS
    }

    /// The sessions whose counters are to be read now, of `len` places; `None` if that is not due.
    pub fn begin_sweep(&mut self, now_ms: u64, len: usize) -> Option<StepBy<Range<usize>>> {
        if now_ms < self.sweep_due() {
            return None;
        }
        self.swept_ms = now_ms;
        self.sweep = (self.sweep + 1) % SWEEPS;
        Some((self.sweep.min(len)..len).step_by(SWEEPS))
    }

    /// So many datagrams of one session went across to this socket since the last sweep of that session.
    pub fn went_across(&mut self, socket: SocketId, datagrams: u64) {
        if let Some(gro) = &mut self.gro {
            gro.went_across(socket.0, datagrams);
        }
    }

    /// After a sweep: switches super-packets on for the sockets that are worth it.
    pub fn end_sweep(&mut self, now_ms: u64, sockets: &Sockets) {
        if let Some(gro) = &mut self.gro {
            gro.judge(now_ms, |socket| _ = sockets.set_gro(SocketId(socket), true));
        }
    }
}
