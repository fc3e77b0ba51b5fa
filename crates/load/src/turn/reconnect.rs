//! Clients that come back: one that has heard nothing for a while makes another allocation, where it made its first one, as an application does whose
//! server has gone.
//!
//! ```text
//!  heard ─▶ ... silence ... ─▶ away: a new socket, Allocate, 300 followed, channel ─▶ back
//!    └────────────── counted from here ─────────────────────────────────────────────┘
//! ```
//!
//! What is due meanwhile is not sent, and counted by itself. A connection that breaks is silence enough.

use std::{mem, sync::Mutex};

use turnpike_measure::{Latency, Report};
use turnpike_turn::client::{Event, Failure, Request};

use super::{Config, engine::Engine};
use crate::{LoadError, clock::nanos, run::Schedule};

/// How often all clients are looked at.
const LOOK_NS: u64 = 20_000_000;
/// An attempt that has not ended by then is given up, and another one made from another port.
const ATTEMPT_NS: u64 = 1_500_000_000;
/// Between two attempts, and a random part as long.
const PAUSE_NS: u64 = 100_000_000;

/// Who is away, and what came of those who were.
pub(super) struct Returns {
    /// `u64::MAX` where nobody comes back.
    patience_ns: u64,
    /// `u64::MAX` outside of the run.
    next_look_ns: u64,
    clients: Vec<Place>,
    away: usize,
    found: Found,
}

#[derive(Clone, Copy)]
struct Place {
    /// When something came last, or the run began.
    heard_ns: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    There,
    /// Asks since then.
    Asking(u64),
    /// Asks again then.
    Resting(u64),
}

/// What came of returns.
#[derive(Default)]
pub(super) struct Found {
    done: u64,
    /// Attempts that failed.
    failed: u64,
    /// Who was away when the run ended.
    stranded: u64,
    /// Bursts that were due of who was away.
    missed: u64,
    /// From what was heard last until the new channel was bound.
    took: Latency,
    /// Why the first attempt failed that did.
    why: Option<String>,
}

impl Returns {
    pub(super) fn new(config: &Config, count: usize) -> Self {
        Self {
            patience_ns: config.reconnect.map_or(u64::MAX, nanos),
            next_look_ns: u64::MAX,
            clients: vec![Place { heard_ns: 0, state: State::There }; count],
            away: 0,
            found: Found::default(),
        }
    }

    /// Whether clients come back at all.
    pub(super) fn is_wanted(&self) -> bool {
        self.patience_ns < u64::MAX
    }

    /// The run begins, or has another end.
    pub(super) fn plan(&mut self, schedule: Schedule) {
        if self.is_wanted() && self.next_look_ns == u64::MAX {
            self.next_look_ns = schedule.start + LOOK_NS;
            self.clients.iter_mut().for_each(|client| client.heard_ns = schedule.start);
        }
    }

    #[inline]
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.next_look_ns
    }

    /// Something came for a client.
    #[inline]
    pub(super) fn heard(&mut self, index: usize, now_ns: u64) {
        self.clients[index].heard_ns = now_ns;
    }

    #[inline]
    pub(super) fn is_away(&self, index: usize) -> bool {
        self.clients[index].state != State::There
    }

    /// Whether a burst is not to be sent, because its client is away.
    #[inline]
    pub(super) fn miss(&mut self, index: usize) -> bool {
        let is_away = self.is_away(index);
        self.found.missed += u64::from(is_away);
        is_away
    }

    /// The clients that are to ask now.
    fn look(&mut self, now_ns: u64, is_broken: impl Fn(usize) -> bool) -> Vec<usize> {
        self.next_look_ns = now_ns + LOOK_NS;
        let mut asking = Vec::new();
        for index in 0..self.clients.len() {
            let Place { heard_ns, state } = self.clients[index];
            let asks = match state {
                State::There => now_ns.saturating_sub(heard_ns) > self.patience_ns || is_broken(index),
                State::Asking(since) if now_ns.saturating_sub(since) > ATTEMPT_NS => {
                    self.refused(index, now_ns, || "no answer came in time".to_owned());
                    false
                }
                State::Asking(since) if is_broken(index) && now_ns > since => {
                    self.refused(index, now_ns, || "the connection failed".to_owned());
                    false
                }
                State::Asking(_) => false,
                State::Resting(until) => now_ns >= until,
            };
            if asks {
                self.away += usize::from(state == State::There);
                self.clients[index].state = State::Asking(now_ns);
                asking.push(index);
            }
        }
        asking
    }

    fn refused(&mut self, index: usize, now_ns: u64, why: impl FnOnce() -> String) {
        let pause = PAUSE_NS + rand::random::<u64>() % PAUSE_NS;
        self.clients[index].state = State::Resting(now_ns + pause);
        self.found.failed += 1;
        self.found.why.get_or_insert_with(why);
    }

    fn back(&mut self, index: usize, now_ns: u64) {
        let Place { heard_ns, .. } = mem::replace(
            &mut self.clients[index],
            Place { heard_ns: now_ns, state: State::There },
        );
        self.away -= 1;
        self.found.done += 1;
        self.found.took.record(now_ns.saturating_sub(heard_ns) / 1_000);
    }

    /// The run is over: who is away stays so.
    pub(super) fn end(&mut self) {
        self.next_look_ns = u64::MAX;
        self.found.stranded = self.away as u64;
    }

    pub(super) fn finish(&mut self, all: &Mutex<Found>) {
        let found = mem::take(&mut self.found);
        if let Ok(mut all) = all.lock() {
            all.done += found.done;
            all.failed += found.failed;
            all.stranded += found.stranded;
            all.missed += found.missed;
            all.took.merge(&found.took);
            all.why = all.why.take().or(found.why);
        }
    }
}

impl Engine {
    /// Has clients ask that have heard nothing. Nothing may be queued for their old sockets.
    pub(super) fn start_returns(&mut self) {
        let now_ns = self.now_ns();
        let asking = {
            let mut returns = mem::take(&mut self.returns);
            let asking = returns.look(now_ns, |index| self.is_broken(index));
            self.returns = returns;
            asking
        };
        for index in asking {
            if let Err(why) = self.ask_at_home(index) {
                self.returns.refused(index, now_ns, || why);
            }
        }
    }

    /// Another allocation, where this client made its first one.
    fn ask_at_home(&mut self, index: usize) -> Result<(), String> {
        self.go_home(index);
        self.reopen(index, 0).map_err(|error| format!("no new socket: {error}"))?;
        self.renew(index, self.endpoints[index].settings.clone());
        let now = self.now_ms();
        // A client that has done nothing can allocate.
        let _ = self.endpoints[index].client.allocate(now);
        self.pump(index);
        Ok(())
    }

    /// What a client says that is away. False if it is no concern of its return.
    pub(super) fn on_its_way(&mut self, index: usize, event: &Event) -> bool {
        let now_ns = self.now_ns();
        if !self.returns.is_wanted() {
            return false;
        }
        if !self.returns.is_away(index) {
            // The server knows the allocation no more: there is nothing to wait for.
            if let Event::Failed { request: Request::Refresh, failure: Failure::Refused { .. } } = event {
                self.returns.give_way(index);
            }
            return false;
        }
        match event {
            Event::Allocated(_) => self.prepare_channel(index),
            Event::Bound(..) | Event::Permitted(_) => self.returns.back(index, now_ns),
            Event::Failed {
                request: Request::Allocate,
                failure: Failure::TryAlternate { server, domain },
            } => {
                if let Err(error) = self.follow(index, *server, domain.as_deref()) {
                    self.returns.refused(index, now_ns, || LoadError::to_string(&error));
                }
            }
            Event::Failed { failure, .. } => self.returns.refused(index, now_ns, || failure.to_string()),
            _ => {}
        }
        true
    }
}
