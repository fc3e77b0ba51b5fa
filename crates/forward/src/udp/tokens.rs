//! Poller tokens of the engine's sockets.

use super::TOKENS;

/// Kinds of tokens, in the two bits below the slot.
pub(super) const LISTENER: u64 = 0;
pub(super) const OUTWARD: u64 = 1;
pub(super) const INWARD: u64 = 2;

pub(super) fn outward_token(at: u32) -> u64 {
    token(OUTWARD, at)
}

pub(super) fn inward_token(at: u32) -> u64 {
    token(INWARD, at)
}

pub(super) fn listener_token(at: u32) -> u64 {
    token(LISTENER, at)
}

fn token(side: u64, slot: u32) -> u64 {
    TOKENS | u64::from(slot) << 2 | side
}

#[expect(clippy::cast_possible_truncation, reason = "`token` created it from a u32")]
pub(super) fn slot_of(token: u64) -> u32 {
    (token >> 2) as u32
}

#[expect(clippy::cast_possible_truncation, reason = "there are fewer than 2^31 rules and listeners")]
pub(super) fn narrow(slot: usize) -> u32 {
    slot as u32
}
