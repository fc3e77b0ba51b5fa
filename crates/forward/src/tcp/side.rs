//! The two ends of a connection, and the tokens by which a poller tells of sockets.

use turnpike_net::poll::Poller;

use crate::rate::{DOWN, UP};

/// Kinds of tokens, in the lowest two bits.
pub(super) const LISTENER: u64 = 0;
pub(super) const CLIENT: u64 = 1;
pub(super) const TARGET: u64 = 2;
pub(super) const HEALTH: u64 = 3;

/// What holds for one wake-up.
#[derive(Clone, Copy)]
pub(crate) struct Tick<'a> {
    /// Milliseconds of a clock that never goes back.
    pub(crate) now: u64,
    pub(crate) poller: &'a Poller,
}

/// One of the two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Client,
    Target,
}

impl Side {
    pub(super) const BOTH: [Self; 2] = [Self::Client, Self::Target];

    pub(super) fn index(self) -> usize {
        match self {
            Self::Client => 0,
            Self::Target => 1,
        }
    }

    pub(super) fn way(self) -> usize {
        match self {
            Self::Client => UP,
            Self::Target => DOWN,
        }
    }
}

pub(super) fn token(kind: u64, key: usize) -> u64 {
    (key as u64) << 2 | kind
}
