//! UDP sessions, and the rules that cross from one protocol to the other: one engine per worker.
//!
//! ```text
//! client ─▶ listener ─ Rx::recv ─▶ session by (listener, client, address asked) ─▶ its own connected socket ─▶ target
//! client ◀─ listener ◀─ Tx::flush ─────────────── GRO in, GSO out ──────────────── Rx::recv ◀───────────────── target
//! ```
//!
//! A rule's sessions hang in lists ordered by their last datagram, all with the same time-out: the head is the next to
//! expire and the one that gives way when the rule is full, so that a datagram costs a few pointers and no timer.

mod departures;
mod drain;
mod engine;
mod kernel_flows;
pub(crate) mod listeners;
mod offload;
pub(crate) mod outgoing;
mod rule_state;
mod rules;
mod sessions;
mod streams;
mod tokens;
mod unanswered;
mod upgrade;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use turnpike_net::poll::Poller;

pub use engine::Engine;
pub use listeners::Listeners;
pub(crate) use upgrade::Portable;

pub use crate::circles::{Circles, Link};
use crate::{ConnectionReport, EndReason, Slot};

/// The engine watches its sockets under tokens that have this bit; the worker's own must not.
pub const TOKENS: u64 = 1 << 62;

/// How a worker and its engine name a rule; unique among the rules of an engine, removed ones with living sessions included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuleKey(pub u32);

/// A target picked for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Where the rule keeps what it knows of it.
    pub target: Slot,
    /// Its address, port included.
    pub address: SocketAddr,
}

/// Result of [`WorkerContext::enter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Counted.
    Entered,
    /// The rule has as many as it may ([`crate::Rule::max_connections`]). A UDP client takes the place of the session of
    /// this rule that has been idle for longest, a TCP client is refused.
    RuleFull,
    /// All rules together have as many as they may. As before, but with the longest idle one of all.
    TotalFull,
}

/// What the engine asks of the worker that it is a part of. Asked when sessions begin and end, never for a datagram of a known one.
pub trait WorkerContext {
    /// Whether the global lists and the rule's own let this client in.
    fn permits(&mut self, rule: RuleKey, client: IpAddr) -> bool;
    /// Counts one more connection or session of a client, unless a limit of the rule forbids it. `now` as in [`Tick::now`].
    ///
    /// # Errors
    /// Which limit.
    fn admit_client(&mut self, rule: RuleKey, client: IpAddr, now: u64) -> Result<(), EndReason> {
        let _ = (rule, client, now);
        Ok(())
    }
    /// One less.
    fn dismiss_client(&mut self, rule: RuleKey, client: IpAddr) {
        let _ = (rule, client);
    }
    /// Counts one more connection or session of a rule, unless a limit forbids it.
    fn enter(&mut self, rule: RuleKey) -> Admission;
    /// One less.
    fn leave(&mut self, rule: RuleKey);
    /// Counts a session that another process began, whatever the limits are. The target that it had, if it is one still.
    fn resume(
        &mut self,
        rule: RuleKey,
        client: IpAddr,
        port: u16,
        target: Option<SocketAddr>,
    ) -> Option<Choice> {
        let _ = (rule, client, port, target);
        None
    }
    /// A target for a session, none of those it has `tried`; `port` is the place of the client's port in the rule's range. `None` where no
    /// address is known.
    fn choose(&mut self, rule: RuleKey, client: SocketAddr, port: u16, tried: &[Slot]) -> Option<Choice>;
    /// True if a rule may have more than one target.
    fn has_choice(&mut self, rule: RuleKey) -> bool {
        let _ = rule;
        false
    }
    /// True if targets of a rule are known to answer. Those of a one-way protocol never do.
    fn answers(&mut self, rule: RuleKey) -> bool {
        let _ = rule;
        false
    }
    /// True if a session is to try all targets once, to find out. Few do.
    fn explores(&mut self, rule: RuleKey, now: u64) -> bool {
        let _ = (rule, now);
        false
    }
    /// Number of rules of this process that a client has come through.
    ///
    /// # Errors
    /// [`EndReason::Circle`] where they are too many.
    fn hops(&mut self, rule: RuleKey, client: SocketAddr) -> Result<u8, EndReason> {
        let _ = (rule, client);
        Ok(0)
    }
    /// Returns true if a target leads to a rule of this process; sessions with it are among [`WorkerContext::circles`]. `asked` is the
    /// address that the client came to, `now` as in [`Tick::now`].
    ///
    /// # Errors
    /// `HostUnreachable` where the rule must not go there.
    fn approach(
        &mut self,
        rule: RuleKey,
        target: SocketAddr,
        asked: Option<IpAddr>,
        now: u64,
    ) -> io::Result<bool> {
        let _ = (rule, target, asked, now);
        Ok(false)
    }
    /// Connections and sessions that lead to rules of this process.
    fn circles(&mut self) -> Arc<Circles> {
        Arc::default()
    }
    /// A target has taken the connection, or sent its first datagram to a session.
    fn answered(&mut self, rule: RuleKey, choice: Choice);
    /// A session with this target is over, or could not be made: `failed` where the target refused without ever having
    /// answered; otherwise nothing is known of its health.
    fn release(&mut self, rule: RuleKey, choice: Choice, failed: bool);
    /// For the log.
    fn ended(&mut self, report: ConnectionReport);
}

/// What holds for one wake-up of the worker.
pub struct Tick<'a> {
    /// Milliseconds of any clock that never goes back.
    pub now: u64,
    /// Of the worker.
    pub poller: &'a Poller,
    /// The worker.
    pub worker: &'a mut dyn WorkerContext,
}
