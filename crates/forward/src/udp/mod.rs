//! UDP sessions, and rules between UDP and TCP: one engine per worker.
//!
//! ```text
//! client ─▶ listener ─ Rx::recv ─▶ session by (listener, client, address asked) ─▶ its own connected socket ─▶ target
//! client ◀─ listener ◀─ Tx::flush ─────────────── GRO in, GSO out ──────────────── Rx::recv ◀───────────────── target
//! ```
//!
//! The sessions of a rule are in lists ordered by their last datagram, and each list has one timeout. The
//! head of a list is the next session to expire and the first to evict, so a datagram costs only a few
//! pointer updates and no timer.

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

use turnpike_net::Poller;

pub use engine::Engine;
pub use listeners::UdpListeners;
pub(crate) use upgrade::Portable;

pub use crate::circles::{Circles, Link};
use crate::{ConnectionReport, EndReason, TargetSlot};

/// Bit in all tokens of the engine's sockets; the worker's own tokens must not contain it.
pub const TOKENS: u64 = 1 << 62;

/// Key of a rule, unique among the rules of an engine, including removed ones with live sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuleKey(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenTarget {
    pub target: TargetSlot,
    pub address: SocketAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Entered,
    /// The rule is at its limit ([`crate::Rule::max_connections`]). A UDP client evicts the rule's longest
    /// idle session; a TCP client is refused.
    RuleFull,
    /// All rules together are at their limit. Like [`Admission::RuleFull`], but the longest idle session of
    /// all rules is evicted.
    TotalFull,
}

/// Services that a worker provides to its engine. Called when sessions begin and end, never for a datagram of
/// an existing session.
pub trait WorkerContext {
    /// True if the global lists and those of the rule admit the client.
    fn permits(&mut self, rule: RuleKey, client: IpAddr) -> bool;
    /// Counts a connection or session of a client, or returns the limit that it exceeds. `now` is
    /// [`UdpTick::now`].
    fn admit_client(&mut self, rule: RuleKey, client: IpAddr, now: u64) -> Result<(), EndReason> {
        let _ = (rule, client, now);
        Ok(())
    }
    fn dismiss_client(&mut self, rule: RuleKey, client: IpAddr) {
        let _ = (rule, client);
    }
    /// Counts a connection or session of a rule, unless a limit is reached.
    fn enter(&mut self, rule: RuleKey) -> Admission;
    fn leave(&mut self, rule: RuleKey);
    /// Counts a handed-over session regardless of limits. Returns its target if it still exists.
    fn resume(
        &mut self,
        rule: RuleKey,
        client: IpAddr,
        port: u16,
        target: Option<SocketAddr>,
    ) -> Option<ChosenTarget> {
        let _ = (rule, client, port, target);
        None
    }
    /// Selects a target for a session, excluding `tried`; `port` is the offset, in the rule's range, of the
    /// port that the client used. Returns `None` if no address is known.
    fn choose(
        &mut self,
        rule: RuleKey,
        client: SocketAddr,
        port: u16,
        tried: &[TargetSlot],
    ) -> Option<ChosenTarget>;
    /// True if a rule may have more than one target.
    fn has_choice(&mut self, rule: RuleKey) -> bool {
        let _ = rule;
        false
    }
    /// True if targets of a rule are known to respond. Those of a one-way protocol never do.
    fn answers(&mut self, rule: RuleKey) -> bool {
        let _ = rule;
        false
    }
    /// True if a session should try all targets once. Returns true only rarely, to bound the cost.
    fn explores(&mut self, rule: RuleKey, now: u64) -> bool {
        let _ = (rule, now);
        false
    }
    /// Number of rules of this process through which a client has come, or [`EndReason::Circle`] if that number
    /// exceeds the limit.
    fn hops(&mut self, rule: RuleKey, client: SocketAddr) -> Result<u8, EndReason> {
        let _ = (rule, client);
        Ok(0)
    }
    /// True if a target is a rule of this process; its sessions are recorded in [`WorkerContext::circles`].
    /// `asked` is the address that the client used, and `now` is [`UdpTick::now`]. Returns `HostUnreachable` if
    /// the rule must not use this target.
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
    fn circles(&mut self) -> Arc<Circles> {
        Arc::default()
    }
    /// Records that a target accepted the connection, or sent its first datagram to a session.
    fn answered(&mut self, rule: RuleKey, choice: ChosenTarget);
    /// Releases the target of an ended or failed session. `failed` is true if the target refused without ever
    /// having responded; otherwise its health is unknown.
    fn release(&mut self, rule: RuleKey, choice: ChosenTarget, failed: bool);
    fn ended(&mut self, report: ConnectionReport);
}

pub struct UdpTick<'a> {
    /// Milliseconds of any monotonic clock.
    pub now: u64,
    pub poller: &'a Poller,
    pub worker: &'a mut dyn WorkerContext,
}
