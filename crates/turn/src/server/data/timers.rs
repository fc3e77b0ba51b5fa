//! Timing wheel with one timer per allocation, set and cancelled in constant time.
//!
//! A hashed wheel of one-second slots. Each slot is a doubly linked list through `nodes`, which is indexed
//! like the allocations; a bitmap finds the next non-empty slot. Deadlines beyond one turn stay in their slot
//! until their turn comes.

const TICK_MS: u64 = 1000;
/// The wheel covers more than an hour, so that, within the documented limits, all timers in a slot are due in
/// the same turn.
const SLOTS: usize = 4096;
const WORDS: usize = SLOTS / 64;
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct TimerNode {
    /// Second in which the timer fires; `u64::MAX` if it is not set.
    tick: u64,
    next: u32,
    prev: u32,
}

const UNSET: TimerNode = TimerNode { tick: u64::MAX, next: NONE, prev: NONE };

pub(crate) struct Timers {
    heads: Box<[u32; SLOTS]>,
    occupied: [u64; WORDS],
    nodes: Vec<TimerNode>,
    /// First tick not processed yet.
    current: u64,
    set: usize,
}

impl Timers {
    pub(crate) fn new() -> Self {
        Self { heads: Box::new([NONE; SLOTS]), occupied: [0; WORDS], nodes: Vec::new(), current: 0, set: 0 }
    }

    /// Sets or moves the timer of `index`. It fires in the first whole second at or after the deadline.
    pub(crate) fn set(&mut self, now_ms: u64, index: u32, deadline_ms: u64) {
        self.cancel(index);
        if self.set == 0 {
            self.current = self.current.max(now_ms / TICK_MS);
        }
        let at = index as usize;
        if self.nodes.len() <= at {
            self.nodes.resize(at + 1, UNSET);
        }
        let tick = deadline_ms.div_ceil(TICK_MS).max(self.current);
        let slot = slot_of(tick);
        let next = self.heads[slot];
        self.nodes[at] = TimerNode { tick, next, prev: NONE };
        if next != NONE {
            self.nodes[next as usize].prev = index;
        }
        self.heads[slot] = index;
        self.occupied[slot / 64] |= 1 << (slot % 64);
        self.set += 1;
    }

    pub(crate) fn set_if_earlier(&mut self, now_ms: u64, index: u32, deadline_ms: u64) {
        let tick = deadline_ms.div_ceil(TICK_MS);
        if self.nodes.get(index as usize).is_none_or(|node| tick < node.tick) {
            self.set(now_ms, index, deadline_ms);
        }
    }

    pub(crate) fn cancel(&mut self, index: u32) {
        let Some(node) = self.nodes.get_mut(index as usize) else { return };
        let TimerNode { tick, next, prev } = std::mem::replace(node, UNSET);
        if tick == u64::MAX {
            return;
        }
        self.set -= 1;
        if next != NONE {
            self.nodes[next as usize].prev = prev;
        }
        if prev != NONE {
            self.nodes[prev as usize].next = next;
        } else {
            let slot = slot_of(tick);
            self.heads[slot] = next;
            if next == NONE {
                self.occupied[slot / 64] &= !(1 << (slot % 64));
            }
        }
    }

    pub(crate) fn pop(&mut self, now_ms: u64) -> Option<u32> {
        let now = now_ms / TICK_MS;
        if self.set == 0 {
            self.current = self.current.max(now + 1);
            return None;
        }
        // After a long sleep, one turn covers every slot.
        self.current = self.current.max((now + 1).saturating_sub(SLOTS as u64));
        while self.current <= now {
            let mut index = self.heads[slot_of(self.current)];
            while index != NONE {
                let node = self.nodes[index as usize];
                if node.tick <= now {
                    self.cancel(index);
                    return Some(index);
                }
                index = node.next;
            }
            self.current += 1;
        }
        None
    }

    /// Time of the next wake-up. It is never later than the second of the next deadline, and earlier only if
    /// that deadline is more than a turn away.
    pub(crate) fn next(&self) -> Option<u64> {
        if self.set == 0 {
            return None;
        }
        let start = slot_of(self.current);
        for step in 0..=WORDS {
            let word = (start / 64 + step) % WORDS;
            let mut bits = self.occupied[word];
            if step == 0 {
                bits &= u64::MAX << (start % 64);
            } else if step == WORDS {
                bits &= !(u64::MAX << (start % 64));
            }
            if bits != 0 {
                let slot = word * 64 + bits.trailing_zeros() as usize;
                let ahead = (slot + SLOTS - start) % SLOTS;
                return Some((self.current + ahead as u64) * TICK_MS);
            }
        }
        None
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the remainder is below SLOTS")]
fn slot_of(tick: u64) -> usize {
    (tick % SLOTS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_timer_fires_in_the_second_of_its_deadline_and_not_before() {
        let mut timers = Timers::new();
        timers.set(1_000_000, 3, 1_600_500);
        assert_eq!(timers.next(), Some(1_601_000));
        assert_eq!(timers.pop(1_600_999), None);
        assert_eq!(timers.next(), Some(1_601_000));
        assert_eq!(timers.pop(1_601_000), Some(3));
        assert_eq!(timers.pop(1_601_000), None);
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn a_timer_beyond_one_turn_waits_for_its_turn() {
        let mut timers = Timers::new();
        let far = 3 * 4096 * 1000 + 7000;
        timers.set(0, 0, far);
        let mut wakes = 0;
        while let Some(at) = timers.next() {
            wakes += 1;
            if timers.pop(at).is_some() {
                assert_eq!(at, far);
                break;
            }
        }
        assert!(wakes <= 4, "{wakes} wake-ups");
    }

    proptest! {
        #[test]
        fn timers_behave_like_a_list_of_deadlines(
            steps in prop::collection::vec((0..12_u32, 1..9_000_000_u64, 0..2_000_000_u64, any::<bool>()), 1..60),
        ) {
            let mut timers = Timers::new();
            let mut model = std::collections::BTreeMap::new();
            let mut now = 123_456;
            for (index, delay, sleep, cancel) in steps {
                if cancel {
                    timers.cancel(index);
                    model.remove(&index);
                } else {
                    timers.set(now, index, now + delay);
                    model.insert(index, (now + delay).div_ceil(TICK_MS) * TICK_MS);
                }
                prop_assert!(timers.next().unwrap_or(u64::MAX) <= model.values().copied().min().unwrap_or(u64::MAX).max(timers.current * TICK_MS));
                now += sleep;
                let mut fired: Vec<u32> = std::iter::from_fn(|| timers.pop(now)).collect();
                fired.sort_unstable();
                let due: Vec<u32> =
                    model.iter().filter(|(_, at)| **at / TICK_MS <= now / TICK_MS).map(|(index, _)| *index).collect();
                prop_assert_eq!(&fired, &due);
                for index in due {
                    model.remove(&index);
                }
                prop_assert_eq!(timers.set, model.len());
            }
        }
    }
}
