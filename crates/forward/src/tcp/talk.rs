//! Detection of interactive traffic, and state of connections in the sockmap.

use turnpike_offload::Joined;

use super::side::StreamSide;

/// Number of times the sides must alternate before a connection counts as interactive: the initial value,
/// which doubles after each wrong guess, and its maximum.
const TURNS: u16 = 4;
const MOST_TURNS: u16 = 1024;
/// A read of this many bytes is too large for interactive traffic.
const LOUD: u64 = 64 << 10;
/// Counts how often the sides of a connection alternate in sending little data.
pub(super) struct Talk {
    pub(super) last: Option<StreamSide>,
    pub(super) turns: u16,
    pub(super) wanted: u16,
}

impl Default for Talk {
    fn default() -> Self {
        Self { last: None, turns: 0, wanted: TURNS }
    }
}

impl Talk {
    pub(super) fn heard(&mut self, side: StreamSide, bytes: u64) {
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

    /// Records a wrong guess.
    pub(super) fn deceived(&mut self) {
        *self = Self { wanted: (self.wanted * 2).min(MOST_TURNS), ..Self::default() };
    }
}

/// Connection whose sockets are in the map.
pub(super) struct JoinedConnection {
    pub(super) joined: Joined,
    /// True if the kernel forwards new data; otherwise it is read here.
    pub(super) passes: bool,
    /// Both directions, indexed by their source.
    pub(super) ways: [KernelDirection; 2],
}

#[derive(Clone, Copy, Default)]
pub(super) struct KernelDirection {
    /// Bytes read or known to be forwarded since joining.
    pub(super) taken: u64,
    /// Bytes written to the other socket before joining.
    pub(super) base: u64,
    /// Set while the kernel has stopped forwarding but still has to write data that it received before.
    pub(super) settles: Option<Settling>,
    /// True if the source is broken, which limits the wait.
    pub(super) is_broken: bool,
    /// True if the direction is in [`super::engine::Engine::waiting`]; `delay` is the last delay in
    /// milliseconds.
    pub(super) is_waiting: bool,
    pub(super) delay: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Settling {
    /// Bytes that the kernel has to write before ours.
    pub(super) first: u64,
    pub(super) since: u64,
}

impl JoinedConnection {
    pub(super) fn passes(&self) -> bool {
        self.passes
    }

    pub(super) fn took(&mut self, side: StreamSide, bytes: u64) {
        self.ways[side.index()].taken += bytes;
    }

    pub(super) fn hurry(&mut self, side: StreamSide) {
        self.ways[side.index()].is_broken = true;
    }

    /// True if data from this side may be read and written here.
    pub(super) fn is_ours(&self, side: StreamSide) -> bool {
        !self.passes && self.ways[side.index()].settles.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_is_interactive_if_small_messages_alternate() {
        let mut talk = Talk::default();
        for _ in 0..3 {
            talk.heard(StreamSide::Client, 30_000);
        }
        talk.heard(StreamSide::Target, 10);
        talk.heard(StreamSide::Client, 10);
        assert!(!talk.is_chatter(), "three turns");
        talk.heard(StreamSide::Target, 0);
        assert!(!talk.is_chatter(), "no data");
        talk.heard(StreamSide::Target, 10);
        assert!(talk.is_chatter());
        talk.heard(StreamSide::Target, LOUD);
        assert!(!talk.is_chatter());
    }

    #[test]
    fn wrong_guess_doubles_the_required_turns() {
        let mut talk = Talk::default();
        let turns = |talk: &mut Talk| {
            (1..=u32::from(MOST_TURNS) + 1).find(|turn| {
                talk.heard(if turn % 2 == 0 { StreamSide::Client } else { StreamSide::Target }, 1);
                talk.is_chatter()
            })
        };
        for wanted in [4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024] {
            assert_eq!(turns(&mut talk), Some(wanted));
            talk.deceived();
        }
    }
}
