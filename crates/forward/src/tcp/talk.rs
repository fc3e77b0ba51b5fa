//! Whether a connection is chatter, and what is known of one that the kernel passes on.

use turnpike_offload::Joined;

use super::side::Side;

/// So many times the sides take turns until a connection is taken for chatter; twice as often after each time that it was more, up to the
/// second of these.
const TURNS: u16 = 4;
const MOST_TURNS: u16 = 1024;
/// Bytes in one direction, read at once, that are no chatter.
const LOUD: u64 = 64 << 10;
/// Whether the sides of a connection take turns, with little to say each.
pub(super) struct Talk {
    pub(super) last: Option<Side>,
    pub(super) turns: u16,
    pub(super) wanted: u16,
}

impl Default for Talk {
    fn default() -> Self {
        Self { last: None, turns: 0, wanted: TURNS }
    }
}

impl Talk {
    /// Bytes came from this side.
    pub(super) fn heard(&mut self, side: Side, bytes: u64) {
        if bytes >= LOUD {
            (self.last, self.turns) = (None, 0);
        } else if bytes > 0 && self.last != Some(side) {
            self.last = Some(side);
            self.turns = self.turns.saturating_add(1);
        }
    }

    pub(super) fn is_chatter(&self) -> bool {
        self.turns >= self.wanted
    }

    /// It was more than that.
    pub(super) fn deceived(&mut self) {
        *self = Self { wanted: (self.wanted * 2).min(MOST_TURNS), ..Self::default() };
    }
}

/// A connection whose sockets are in the map.
pub(super) struct Across {
    pub(super) joined: Joined,
    /// The kernel passes on what comes; otherwise it is read here.
    pub(super) passes: bool,
    /// By the side that the bytes come from.
    pub(super) ways: [Way; 2],
}

/// One direction.
#[derive(Clone, Copy, Default)]
pub(super) struct Way {
    /// Bytes since the two were joined that have been read, or passed on as far as is known.
    pub(super) taken: u64,
    /// How much had been written to the other socket then.
    pub(super) base: u64,
    /// What the kernel had passed on when it was stopped has yet to be written.
    pub(super) settles: Option<Settling>,
    /// Its source is broken: it is not waited for as long as it takes.
    pub(super) is_broken: bool,
    /// It is among [`super::engine::Engine::waiting`], and how long it was there the last time.
    pub(super) is_waiting: bool,
    pub(super) delay: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Settling {
    /// So many bytes are to be written before ours.
    pub(super) first: u64,
    pub(super) since: u64,
}

impl Across {
    /// Whether the kernel passes on what comes.
    pub(super) fn passes(&self) -> bool {
        self.passes
    }

    /// Bytes were read here.
    pub(super) fn took(&mut self, side: Side, bytes: u64) {
        self.ways[side.index()].taken += bytes;
    }

    /// The source is broken: what the kernel still has of it is waited for, but not for long.
    pub(super) fn hurry(&mut self, side: Side) {
        self.ways[side.index()].is_broken = true;
    }

    /// Whether what comes from this side may be read and written here.
    pub(super) fn is_ours(&self, side: Side) -> bool {
        !self.passes && self.ways[side.index()].settles.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chatter_is_taking_turns_with_little_to_say() {
        let mut talk = Talk::default();
        for _ in 0..3 {
            talk.heard(Side::Client, 30_000);
        }
        talk.heard(Side::Target, 10);
        talk.heard(Side::Client, 10);
        assert!(!talk.is_chatter(), "three turns");
        talk.heard(Side::Target, 0);
        assert!(!talk.is_chatter(), "nothing was said");
        talk.heard(Side::Target, 10);
        assert!(talk.is_chatter());
        talk.heard(Side::Target, LOUD);
        assert!(!talk.is_chatter());
    }

    #[test]
    fn who_was_no_chatter_has_to_chat_for_longer_the_next_time() {
        let mut talk = Talk::default();
        let turns = |talk: &mut Talk| {
            (1..=u32::from(MOST_TURNS) + 1).find(|turn| {
                talk.heard(if turn % 2 == 0 { Side::Client } else { Side::Target }, 1);
                talk.is_chatter()
            })
        };
        for wanted in [4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024] {
            assert_eq!(turns(&mut talk), Some(wanted));
            talk.deceived();
        }
    }
}
