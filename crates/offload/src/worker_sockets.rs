//! Sockets of one worker whose flows the kernel may relay: drained times, super-packets, and the times of the
//! next checks.

use std::{iter::StepBy, ops::Range, time::Duration};

use turnpike_net::{Buffer, Received, Rx, SocketId, Sockets, UdpSocket};

use crate::{clock::now_ns, drained::DrainedSockets, flows::Flows, gro_control::GroControl};

/// Interval of sweeps in milliseconds. Each reads the counters of a tenth of the sessions.
const SWEEP_MS: u64 = 100;
const SWEEPS: usize = 10;

pub struct WorkerSockets {
    drained: DrainedSockets,
    /// `None` for XDP, which sees packets before GRO.
    gro: Option<GroControl>,
    swept_ms: u64,
    sweep: usize,
}

impl WorkerSockets {
    #[must_use]
    pub fn new(flows: &Flows, now_ms: u64) -> Self {
        Self {
            drained: DrainedSockets::new(flows.gap_ns()),
            gro: (!flows.come_before_gro()).then(GroControl::default),
            swept_ms: now_ms,
            sweep: 0,
        }
    }

    /// Number of a socket in the maps of the program. `None` if no number is left.
    pub fn slot(&mut self, socket: SocketId, flows: &Flows) -> Option<u32> {
        self.drained.slot(socket.0, || flows.socket())
    }

    /// Takes over a socket of the previous process. GRO may be off, and datagrams may have arrived after that
    /// process paused.
    pub fn adopt(&mut self, socket: SocketId, number: impl FnOnce() -> u32) {
        self.drained.slot(socket.0, || Some(number()));
        if let Some(gro) = &mut self.gro {
            gro.adopted(socket.0);
        }
        self.drained.touch(socket.0);
    }

    pub fn touch(&mut self, socket: SocketId) {
        self.drained.touch(socket.0);
    }

    pub fn forget(&mut self, socket: SocketId, flows: &Flows) {
        if let Some(gro) = &mut self.gro {
            gro.forget(socket.0);
        }
        if let Some(number) = self.drained.forget(socket.0) {
            flows.give_back_socket(number);
        }
    }

    pub fn leave(&mut self, flows: &Flows) {
        self.drained = DrainedSockets::new(flows.gap_ns());
    }

    /// Called before a wait; returns its maximum duration.
    pub fn before_wait(&mut self) -> Option<Duration> {
        self.drained.before_wait(now_ns())
    }

    /// Called after a wait that reported these sockets. `are_all` is true if nothing else is ready; `lost` is
    /// the number of datagrams that all sockets have lost so far.
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

    /// Records a receive call whose datagrams are still to be sent. `is_empty` is true if the call shows that
    /// nothing more was queued. `goes_across` returns true if the kernel would relay a buffer's datagrams; it
    /// is `None` if the kernel relays nothing.
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

    pub fn flushed(&mut self, sockets: &Sockets, flows: &Flows) {
        self.drained.flushed(flows);
        if let Some(gro) = &mut self.gro {
            gro.end_tick(|socket| set_gro(sockets, SocketId(socket), false));
        }
    }

    pub fn end(&mut self, sockets: &Sockets) {
        if let Some(gro) = &mut self.gro {
            gro.end(|socket| _ = set_gro(sockets, SocketId(socket), true));
        }
    }

    #[must_use]
    pub fn sweep_due(&self) -> u64 {
        self.swept_ms + SWEEP_MS
    }

    /// Indexes of the sessions, out of `len`, whose counters must be read now; `None` if no sweep is due.
    pub fn begin_sweep(&mut self, now_ms: u64, len: usize) -> Option<StepBy<Range<usize>>> {
        if now_ms < self.sweep_due() {
            return None;
        }
        self.swept_ms = now_ms;
        self.sweep = (self.sweep + 1) % SWEEPS;
        Some((self.sweep.min(len)..len).step_by(SWEEPS))
    }

    /// Records datagrams relayed by the kernel for one session of this socket since the session's last sweep.
    pub fn went_across(&mut self, socket: SocketId, datagrams: u64) {
        if let Some(gro) = &mut self.gro {
            gro.went_across(socket.0, datagrams);
        }
    }

    pub fn end_sweep(&mut self, now_ms: u64, sockets: &Sockets) {
        if let Some(gro) = &mut self.gro {
            gro.judge(now_ms, |socket| _ = set_gro(sockets, SocketId(socket), true));
        }
    }
}

/// Turns UDP_GRO on or off; false if the call must be repeated. A missing socket or a refusal counts as done.
fn set_gro(sockets: &Sockets, id: SocketId, on: bool) -> bool {
    sockets.get(id).is_none_or(|socket| socket.set_gro(on).unwrap_or(true))
}
