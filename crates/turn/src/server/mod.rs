//! A TURN server as a state machine: feed a datagram with [`Server::from_client`] or [`Server::from_peer`], carry out
//! the [`Verdict`], drain [`Server::poll_effect`], and call [`Server::handle_timeout`] when [`Server::poll_timeout`]
//! says so. One server per worker; nothing in it is shared.

pub mod verdict;

pub use verdict::{
    AllocationId, Client, DropReason, Effect, Family, Header, ListenerId, OpenRelay, OpenRequest, OpenResult,
    PortWish, RelayId, Verdict,
};
