//! Sides of a connection, and poller tokens.

use turnpike_net::Poller;

use crate::rate::{DOWN, UP};

/// Kinds of tokens, in the lowest two bits.
pub(super) const LISTENER: u64 = 0;
pub(super) const CLIENT: u64 = 1;
pub(super) const TARGET: u64 = 2;
pub(super) const HEALTH: u64 = 3;

#[derive(Clone, Copy)]
pub(crate) struct Tick<'a> {
    /// Milliseconds of a monotonic clock.
    pub(crate) now: u64,
    pub(crate) poller: &'a Poller,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamSide {
    Client,
    Target,
}

impl StreamSide {
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
