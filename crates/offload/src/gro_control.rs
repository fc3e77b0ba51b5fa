//! Switches UDP_GRO on and off by socket. A super-packet goes to user space, which is cheap for many datagrams; a few, such as a video frame
//! of a call, cost less if the kernel relays each by itself. A socket with short super-packets loses UDP_GRO for a while and is then examined
//! again.

/// What a super-packet costs that goes up, in datagrams that go across: to be handled, and for a worker to be woken up, which all that it finds then
/// share. So a few datagrams are worth gathering only where the worker is busy anyway.
const HANDLING: u64 = 3;
const WAKE_UP: u64 = 9;
/// What user space handles anyway is worth gathering, whatever its length.
const FOREIGN: u64 = 2 * (HANDLING + WAKE_UP);
/// So many super-packets tell how long they are.
const ENOUGH: u64 = 4;
/// How long a socket does without: at first, and at most, each time twice as long as before, in milliseconds.
const FIRST_MS: u64 = 1_000;
const MOST_MS: u64 = 8_000;
/// How long it does not, once that did not help.
const USELESS_MS: u64 = 60_000;
/// Datagrams of a session that go across in a second, one way, and may be worth gathering after all.
const HEAVY: u64 = 20_000;
/// Sockets that are asked at the end of a tick whether they are empty.
const STOPS: usize = 16;

/// The sockets of one worker, by numbers that are small and the worker's own.
#[derive(Default)]
pub(crate) struct GroControl {
    places: Vec<Place>,
    /// Those of which super-packets were seen that are not judged yet, and some that were closed meanwhile.
    seen: Vec<u32>,
    /// Those that do without, or gather whatever comes, until a time, and some that were closed meanwhile.
    waiting: Vec<u32>,
    /// Those that are to do without as soon as they are empty.
    stopping: Vec<u32>,
    /// When they were last judged.
    now_ms: u64,
    /// Super-packets of all since then, those of this tick, and the ticks that brought any.
    super_packets: u64,
    of_tick: u64,
    ticks: u64,
}

#[derive(Clone, Copy, Default)]
struct Place {
    state: State,
    /// It stands among those seen.
    is_seen: bool,
    /// What came since then: super-packets, and datagrams of them; where nothing is gathered, those that came all the same.
    super_packets: u64,
    datagrams: u64,
    since_ms: u64,
    /// How often it has done without, one time after the other.
    times: u32,
}

#[derive(Clone, Copy, Default)]
enum State {
    #[default]
    Gathers,
    /// Until then; before, so many datagrams came in so many milliseconds.
    DoesWithout { until_ms: u64, datagrams: u64, in_ms: u64 },
    /// Until then, whatever comes.
    GathersAnyway { until_ms: u64 },
}

impl GroControl {
    /// A buffer of so many datagrams was received from this socket; `goes_across` says whether they would have been relayed by the kernel alone.
    pub(crate) fn saw(&mut self, socket: u32, datagrams: usize, goes_across: bool) {
        let at = socket as usize;
        if self.places.len() <= at {
            self.places.resize(at + 1, Place::default());
        }
        let place = &mut self.places[at];
        self.of_tick += u64::from(datagrams > 1);
        match place.state {
            State::Gathers if datagrams > 1 => {
                if place.super_packets == 0 {
                    place.since_ms = self.now_ms;
                }
                if !place.is_seen {
                    place.is_seen = true;
                    self.seen.push(socket);
                }
                place.super_packets += 1;
                place.datagrams += if goes_across { datagrams as u64 } else { FOREIGN };
            }
            State::DoesWithout { .. } if goes_across => place.datagrams += datagrams as u64,
            _ => {}
        }
    }

    /// All that a wake-up brought has been handled. `stop` has a socket gather nothing, if it is empty; whether that is settled.
    pub(crate) fn end_tick(&mut self, mut stop: impl FnMut(u32) -> bool) {
        let of_tick = std::mem::take(&mut self.of_tick);
        self.super_packets += of_tick;
        self.ticks += u64::from(of_tick > 0);
        // From the end: others go on waiting, and are not moved.
        for at in (self.stopping.len().saturating_sub(STOPS)..self.stopping.len()).rev() {
            if stop(self.stopping[at]) {
                self.stopping.swap_remove(at);
            }
        }
    }

    /// So many datagrams of one session that come to this socket went across in the last second: it may be worth gathering them after all.
    pub(crate) fn went_across(&mut self, socket: u32, datagrams: u64) {
        if datagrams <= HEAVY {
            return;
        }
        if let Some(Place { state: State::DoesWithout { until_ms, .. }, .. }) =
            self.places.get_mut(socket as usize)
        {
            *until_ms = 0;
        }
    }

    /// Somebody else had this socket before, and may have had it do without. Told once, or with each flow of it.
    pub(crate) fn adopted(&mut self, socket: u32) {
        let at = socket as usize;
        if self.places.len() <= at {
            self.places.resize(at + 1, Place::default());
        }
        let place = &mut self.places[at];
        if let State::Gathers = place.state {
            place.state = State::DoesWithout { until_ms: 0, datagrams: u64::MAX, in_ms: 1 };
            self.waiting.push(socket);
        }
    }

    /// The socket is closed.
    pub(crate) fn forget(&mut self, socket: u32) {
        let Some(place) = self.places.get_mut(socket as usize) else { return };
        if let State::DoesWithout { .. } = place.state {
            self.stopping.retain(|stopping| *stopping != socket);
        }
        *place = Place { is_seen: place.is_seen, ..Place::default() };
    }

    /// From now on nothing goes across: all that do without are told to `start`.
    pub(crate) fn end(&mut self, mut start: impl FnMut(u32)) {
        for socket in std::mem::take(&mut self.waiting) {
            if let Some(Place { state: State::DoesWithout { .. }, .. }) = self.places.get(socket as usize) {
                start(socket);
            }
        }
        *self = Self::default();
    }

    /// Looks at what came since the last time. `start` has a socket gather again; those that are to do without are told of by
    /// [`GroControl::end_tick`].
    pub(crate) fn judge(&mut self, now_ms: u64, mut start: impl FnMut(u32)) {
        self.now_ms = now_ms;
        let ticks = std::mem::take(&mut self.ticks).max(1);
        let super_packets = std::mem::take(&mut self.super_packets).max(ticks);
        let Self { places, seen, waiting, stopping, .. } = self;
        waiting.retain(|socket| {
            let Some(place) = places.get_mut(*socket as usize) else { return false };
            let does_without = matches!(place.state, State::DoesWithout { .. });
            place.wait(now_ms);
            if does_without && !matches!(place.state, State::DoesWithout { .. }) {
                stopping.retain(|stopping| stopping != socket);
                start(*socket);
            }
            !matches!(place.state, State::Gathers)
        });
        seen.retain(|socket| {
            let Some(place) = places.get_mut(*socket as usize) else { return false };
            if (1..ENOUGH).contains(&place.super_packets) {
                return true;
            }
            place.is_seen = false;
            let worth = (HANDLING * super_packets + WAKE_UP * ticks, super_packets);
            if place.super_packets > 0 && place.begins_without(now_ms, worth) {
                stopping.push(*socket);
                waiting.push(*socket);
            }
            false
        });
    }
}

impl Place {
    /// Whether what was seen says that it had better do without: super-packets of `worth.0` datagrams in `worth.1` would be worth it.
    fn begins_without(&mut self, now_ms: u64, worth: (u64, u64)) -> bool {
        let is_worth_it = self.datagrams * worth.1 >= worth.0 * self.super_packets;
        let (datagrams, in_ms) = (self.datagrams, now_ms.saturating_sub(self.since_ms));
        (self.super_packets, self.datagrams, self.since_ms) = (0, 0, now_ms);
        if is_worth_it {
            self.times = 0;
            return false;
        }
        let pause_ms = FIRST_MS.checked_shl(self.times).unwrap_or(MOST_MS).min(MOST_MS);
        self.times = (self.times + 1).min(8);
        self.state = State::DoesWithout { until_ms: now_ms + pause_ms, datagrams, in_ms };
        true
    }

    /// Lets it gather when its time is over, or doing without is useless: where half as much comes as before, that goes up for another reason than
    /// that this machine has gathered it.
    fn wait(&mut self, now_ms: u64) {
        self.state = match self.state {
            State::DoesWithout { datagrams, in_ms, .. } if self.is_useless(now_ms, datagrams, in_ms) => {
                State::GathersAnyway { until_ms: now_ms + USELESS_MS }
            }
            State::DoesWithout { until_ms, .. } | State::GathersAnyway { until_ms } if until_ms <= now_ms => {
                State::Gathers
            }
            _ => return,
        };
        (self.super_packets, self.datagrams, self.since_ms) = (0, 0, now_ms);
    }

    fn is_useless(&self, now_ms: u64, datagrams: u64, in_ms: u64) -> bool {
        let elapsed_ms = now_ms.saturating_sub(self.since_ms);
        let (came, before) = (
            u128::from(self.datagrams) * u128::from(in_ms.max(1)),
            u128::from(datagrams) * u128::from(elapsed_ms),
        );
        self.datagrams >= datagrams && came * 2 >= before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOCKET: u32 = 3;

    /// What a look at this time changes.
    fn look(gathering: &mut GroControl, now_ms: u64) -> Vec<(u32, bool)> {
        let mut changes = Vec::new();
        gathering.judge(now_ms, |socket| changes.push((socket, true)));
        gathering.end_tick(|socket| {
            changes.push((socket, false));
            true
        });
        changes
    }

    fn bring(gathering: &mut GroControl, super_packets: u64, datagrams: usize) {
        for _ in 0..super_packets {
            gathering.saw(SOCKET, datagrams, true);
        }
    }

    #[test]
    fn short_super_packets_are_not_gathered_for_longer_and_longer() {
        let mut gathering = GroControl::default();
        let (mut now_ms, mut pauses) = (0, Vec::new());
        for _ in 0..6 {
            bring(&mut gathering, ENOUGH, 4);
            assert_eq!(look(&mut gathering, now_ms), [(SOCKET, false)]);
            let since = now_ms;
            while look(&mut gathering, now_ms).is_empty() {
                now_ms += 100;
            }
            pauses.push(now_ms - since);
        }
        assert_eq!(pauses, [1_000, 2_000, 4_000, 8_000, 8_000, 8_000]);
        // Long ones end that.
        bring(&mut gathering, ENOUGH, 32);
        assert_eq!(look(&mut gathering, now_ms), []);
        bring(&mut gathering, ENOUGH, 4);
        assert_eq!(look(&mut gathering, now_ms), [(SOCKET, false)]);
        assert_eq!(look(&mut gathering, now_ms + 999), []);
        assert_eq!(look(&mut gathering, now_ms + 1_000), [(SOCKET, true)]);
    }

    #[test]
    fn short_ones_are_gathered_where_each_wake_up_brings_many() {
        let mut gathering = GroControl::default();
        for super_packets in [16, 1] {
            for _ in 0..10 {
                bring(&mut gathering, super_packets, 4);
                gathering.end_tick(|_| unreachable!("nothing was judged"));
            }
            let expected = if super_packets == 1 { &[(SOCKET, false)][..] } else { &[] };
            assert_eq!(look(&mut gathering, 0), expected, "{super_packets} at once");
        }
    }

    #[test]
    fn few_long_or_foreign_ones_are_gathered() {
        let mut gathering = GroControl::default();
        bring(&mut gathering, ENOUGH - 1, 2);
        assert_eq!(look(&mut gathering, 0), []);
        bring(&mut gathering, 1, 64);
        assert_eq!(look(&mut gathering, 100), [], "the mean counts");
        bring(&mut gathering, ENOUGH, 2);
        (0..ENOUGH).for_each(|_| gathering.saw(SOCKET, 2, false));
        assert_eq!(look(&mut gathering, 200), [], "half of it would not go across");
    }

    #[test]
    fn what_turns_heavy_is_looked_at_at_once() {
        let mut gathering = GroControl::default();
        gathering.went_across(SOCKET, HEAVY + 1);
        bring(&mut gathering, ENOUGH, 2);
        assert_eq!(look(&mut gathering, 0), [(SOCKET, false)]);
        // Of before.
        bring(&mut gathering, 1, 2);
        assert_eq!(look(&mut gathering, 100), []);
        gathering.went_across(SOCKET, HEAVY);
        assert_eq!(look(&mut gathering, 150), []);
        gathering.went_across(SOCKET, HEAVY + 1);
        assert_eq!(look(&mut gathering, 200), [(SOCKET, true)]);
        assert_eq!(look(&mut gathering, 300), []);
    }

    #[test]
    fn where_as_much_comes_as_before_it_is_gathered_again() {
        let mut gathering = GroControl::default();
        assert_eq!(look(&mut gathering, 5_000), []);
        // A lone datagram is nothing to gather.
        bring(&mut gathering, 100, 1);
        bring(&mut gathering, ENOUGH, 4);
        assert_eq!(look(&mut gathering, 5_100), [(SOCKET, false)]);
        bring(&mut gathering, 15, 1);
        assert_eq!(look(&mut gathering, 5_200), [], "it may have been on its way");
        (0..100).for_each(|_| gathering.saw(SOCKET, 1, false));
        assert_eq!(look(&mut gathering, 5_300), [], "it would not go across in any case");
        bring(&mut gathering, 12, 1);
        assert_eq!(look(&mut gathering, 5_400), [(SOCKET, true)]);
        // For a while that is that.
        bring(&mut gathering, ENOUGH, 4);
        assert_eq!(look(&mut gathering, 65_300), []);
        assert_eq!(look(&mut gathering, 65_400), []);
        bring(&mut gathering, ENOUGH, 4);
        assert_eq!(look(&mut gathering, 65_500), [(SOCKET, false)]);
    }

    #[test]
    fn whoever_comes_next_begins_anew() {
        let mut gathering = GroControl::default();
        bring(&mut gathering, ENOUGH, 2);
        assert_eq!(look(&mut gathering, 0), [(SOCKET, false)]);
        gathering.forget(SOCKET);
        assert_eq!(look(&mut gathering, 60_000), []);
        bring(&mut gathering, ENOUGH - 1, 2);
        gathering.forget(SOCKET);
        bring(&mut gathering, 1, 2);
        assert_eq!(look(&mut gathering, 60_000), []);
        gathering.forget(SOCKET);
        // However often: each flow of it tells that.
        (0..3).for_each(|_| gathering.adopted(SOCKET));
        assert_eq!(look(&mut gathering, 60_000), [(SOCKET, true)]);
        assert_eq!(look(&mut gathering, 60_000), []);
    }

    #[test]
    fn sockets_that_come_and_go_leave_nothing_behind() {
        let mut gathering = GroControl::default();
        for now_ms in 0..1_000 {
            for socket in 0..4 {
                gathering.forget(socket);
                // Too few to be judged, or enough.
                (0..=ENOUGH * u64::from(socket % 2)).for_each(|_| gathering.saw(socket, 2, true));
            }
            look(&mut gathering, now_ms);
            assert!([&gathering.seen, &gathering.waiting].iter().all(|list| list.len() <= 4));
        }
        (0..4).for_each(|socket| gathering.forget(socket));
        look(&mut gathering, 1_000);
        assert_eq!([gathering.seen, gathering.waiting, gathering.stopping], [const { Vec::<u32>::new() }; 3]);
    }

    #[test]
    fn a_socket_that_is_not_empty_is_asked_until_it_is_or_has_to_gather_again() {
        let mut gathering = GroControl::default();
        bring(&mut gathering, ENOUGH, 2);
        gathering.judge(0, |_| unreachable!("it never did without"));
        for _ in 0..2 {
            let mut asked = 0;
            gathering.end_tick(|socket| {
                assert_eq!(socket, SOCKET);
                asked += 1;
                false
            });
            assert_eq!(asked, 1);
        }
        assert_eq!(look(&mut gathering, FIRST_MS), [(SOCKET, true)]);
        // It waited for that in vain, and so does whoever has ended.
        for ends in [false, true] {
            bring(&mut gathering, ENOUGH, 2);
            gathering.judge(2 * FIRST_MS, |_| unreachable!("it gathers"));
            if ends {
                gathering.forget(SOCKET);
            } else {
                let mut started = Vec::new();
                gathering.end(|socket| started.push(socket));
                assert_eq!(started, [SOCKET]);
            }
            gathering.end_tick(|_| unreachable!("nobody has it"));
        }
    }
}
