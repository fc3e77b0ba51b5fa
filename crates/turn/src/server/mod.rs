//! A TURN server as a state machine: feed a datagram with [`Server::from_client`] or [`Server::from_peer`], carry out
//! the [`Verdict`], drain [`Server::poll_effect`], and call [`Server::handle_timeout`] when [`Server::poll_timeout`]
//! says so. One server per worker; nothing in it is shared.

pub mod config;
pub mod gate;
pub mod peer_rules;
pub mod stats;
pub mod verdict;

pub use config::ServerConfig;
pub use gate::{Gate, Lookup, QuotaRefusal, User};
pub use peer_rules::{Cidr, PeerRules};
pub use stats::Stats;
pub use verdict::{
    AllocationId, Client, ClosedReason, CredentialRefusal, DropReason, Effect, Family, Header, ListenerId,
    OpenRelay, OpenRequest, OpenResult, PortWish, RelayId, Verdict,
};

use crate::time::Now;
use std::{net::SocketAddr, sync::Arc};

/// The state of one worker.
pub struct Server<G> {
    _gate: G,
}

impl<G: Gate> Server<G> {
    /// An empty server.
    #[must_use]
    pub fn new(_config: Arc<ServerConfig>, _gate: G) -> Self {
        todo!()
    }

    /// Feeds a datagram that a client sent.
    pub fn from_client<'a>(&'a mut self, _now: Now, _client: Client, _datagram: &'a [u8]) -> Verdict<'a> {
        todo!()
    }

    /// Feeds a datagram that a peer sent to a relayed transport address.
    pub fn from_peer<'a>(
        &'a mut self,
        _now: Now,
        _relay: RelayId,
        _peer: SocketAddr,
        _datagram: &'a [u8],
    ) -> Verdict<'a> {
        todo!()
    }

    /// Feeds an ICMP error about a datagram that a relay socket sent (RFC 8656 section 11.5).
    pub fn from_icmp(
        &mut self,
        _now: Now,
        _relay: RelayId,
        _peer: SocketAddr,
        _icmp_type: u8,
        _code: u8,
        _info: u32,
    ) -> Verdict<'_> {
        todo!()
    }

    /// Says how an [`OpenRequest`] went; the verdict is the reply to the client. On failure the runtime has closed
    /// whatever it opened for it.
    pub fn opened(
        &mut self,
        _now: Now,
        _allocation: AllocationId,
        _first: OpenResult,
        _second: Option<OpenResult>,
    ) -> Verdict<'_> {
        todo!()
    }

    /// The next thing to do, if any.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        todo!()
    }

    /// When [`Server::handle_timeout`] wants to be called, in [`Now::ms`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        todo!()
    }

    /// Expires what is due.
    pub fn handle_timeout(&mut self, _now: Now) {
        todo!()
    }

    /// From now on, Allocate is answered with 508 and what exists lives on (graceful stop).
    pub fn drain(&mut self) {
        todo!()
    }

    /// Replaces configuration for what happens from now on (reload); allocations live on.
    pub fn reconfigure(&mut self, _config: Arc<ServerConfig>) {
        todo!()
    }

    /// Ends every allocation with this reason.
    pub fn close_all(&mut self, _now: Now, _reason: ClosedReason) {
        todo!()
    }

    /// Allocations that exist.
    #[must_use]
    pub fn allocations(&self) -> usize {
        todo!()
    }

    /// All counters.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        todo!()
    }
}
