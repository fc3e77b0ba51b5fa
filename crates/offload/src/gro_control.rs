//! Turns UDP_GRO on and off per socket. Super-packets go to user space, which is cheap if they contain many
//! datagrams. If they contain only a few, such as a video frame of a call, the kernel relays each datagram at
//! less cost. A socket with short super-packets loses UDP_GRO for a while and is then examined again.

/// Cost of a super-packet in user space, measured in datagrams that the kernel could relay instead: handling
/// it, plus waking the worker. All packets found at one wake-up share the cost of waking, so small
/// super-packets only pay off if the worker is busy anyway.
const HANDLING: u64 = 3;
const WAKE_UP: u64 = 9;
/// Value of a super-packet that user space would handle in any case, so that GRO always pays off.
const FOREIGN: u64 = 2 * (HANDLING + WAKE_UP);
const ENOUGH: u64 = 4;
/// Time without GRO in milliseconds: doubles from the first value to the maximum.
const FIRST_MS: u64 = 1_000;
const MOST_MS: u64 = 8_000;
/// Time for which GRO stays enabled after disabling it did not help, in milliseconds.
const USELESS_MS: u64 = 60_000;
/// Datagrams per second, in one direction of a session, above which GRO may pay off again.
const HEAVY: u64 = 20_000;
const STOPS: usize = 16;

#[derive(Default)]
pub(crate) struct GroControl {
    places: Vec<SocketGro>,
    /// Sockets with super-packets that have not been judged yet; may include closed ones.
    seen: Vec<u32>,
    /// Sockets whose GRO is disabled or forced until some time; may include closed ones.
    waiting: Vec<u32>,
    stopping: Vec<u32>,
    now_ms: u64,
    /// Super-packets since the last judgement, super-packets in this tick, and ticks with super-packets.
    super_packets: u64,
    of_tick: u64,
    ticks: u64,
}

#[derive(Clone, Copy, Default)]
struct SocketGro {
    state: GroState,
    is_seen: bool,
    /// Counts since `since_ms`: super-packets and their datagrams; without GRO, the datagrams that still
    /// arrived in user space.
    super_packets: u64,
    datagrams: u64,
    since_ms: u64,
    /// Consecutive periods without GRO.
    times: u32,
}

#[derive(Clone, Copy, Default)]
enum GroState {
    #[default]
    Gathers,
    /// Without GRO until this time. In the `in_ms` milliseconds before GRO was disabled, `datagrams`
    /// datagrams arrived.
    DoesWithout {
        until_ms: u64,
        datagrams: u64,
        in_ms: u64,
    },
    GathersAnyway {
        until_ms: u64,
    },
}

impl GroControl {
    /// Records a received buffer; `goes_across` is true if the kernel would have relayed the buffer's
    /// datagrams, had they arrived one by one.
    pub(crate) fn saw(&mut self, socket: u32, datagrams: usize, goes_across: bool) {
        let at = socket as usize;
        if self.places.len() <= at {
            self.places.resize(at + 1, SocketGro::default());
        }
        let place = &mut self.places[at];
        self.of_tick += u64::from(datagrams > 1);
        match place.state {
            GroState::Gathers if datagrams > 1 => {
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
            GroState::DoesWithout { .. } if goes_across => place.datagrams += datagrams as u64,
            _ => {}
        }
    }

    /// Ends a tick. `stop` disables GRO on a socket if its queue is empty, and returns true if nothing is
    /// left to do.
    pub(crate) fn end_tick(&mut self, mut stop: impl FnMut(u32) -> bool) {
        let of_tick = std::mem::take(&mut self.of_tick);
        self.super_packets += of_tick;
        self.ticks += u64::from(of_tick > 0);
        // Iterates backwards, so that `swap_remove` moves only sockets already visited.
        for at in (self.stopping.len().saturating_sub(STOPS)..self.stopping.len()).rev() {
            if stop(self.stopping[at]) {
                self.stopping.swap_remove(at);
            }
        }
    }

    /// Records datagrams that the kernel relayed for one session of this socket in the last second: GRO may
    /// pay off again.
    pub(crate) fn went_across(&mut self, socket: u32, datagrams: u64) {
        if datagrams <= HEAVY {
            return;
        }
        if let Some(SocketGro { state: GroState::DoesWithout { until_ms, .. }, .. }) =
            self.places.get_mut(socket as usize)
        {
            *until_ms = 0;
        }
    }

    /// Takes over a socket of a previous process, which may have disabled GRO. May be called once for the
    /// socket or once for each of its flows.
    pub(crate) fn adopted(&mut self, socket: u32) {
        let at = socket as usize;
        if self.places.len() <= at {
            self.places.resize(at + 1, SocketGro::default());
        }
        let place = &mut self.places[at];
        if let GroState::Gathers = place.state {
            place.state = GroState::DoesWithout { until_ms: 0, datagrams: u64::MAX, in_ms: 1 };
            self.waiting.push(socket);
        }
    }

    pub(crate) fn forget(&mut self, socket: u32) {
        let Some(place) = self.places.get_mut(socket as usize) else { return };
        if let GroState::DoesWithout { .. } = place.state {
            self.stopping.retain(|stopping| *stopping != socket);
        }
        *place = SocketGro { is_seen: place.is_seen, ..SocketGro::default() };
    }

    /// Calls `start` to re-enable GRO on every socket without it, because the kernel no longer relays.
    pub(crate) fn end(&mut self, mut start: impl FnMut(u32)) {
        for socket in std::mem::take(&mut self.waiting) {
            if let Some(SocketGro { state: GroState::DoesWithout { .. }, .. }) =
                self.places.get(socket as usize)
            {
                start(socket);
            }
        }
        *self = Self::default();
    }

    /// Judges the traffic since the last call. `start` enables GRO on a socket. [`GroControl::end_tick`]
    /// disables GRO where this call decides so.
    pub(crate) fn judge(&mut self, now_ms: u64, mut start: impl FnMut(u32)) {
        self.now_ms = now_ms;
        let ticks = std::mem::take(&mut self.ticks).max(1);
        let super_packets = std::mem::take(&mut self.super_packets).max(ticks);
        let Self { places, seen, waiting, stopping, .. } = self;
        waiting.retain(|socket| {
            let Some(place) = places.get_mut(*socket as usize) else { return false };
            let does_without = matches!(place.state, GroState::DoesWithout { .. });
            place.wait(now_ms);
            if does_without && !matches!(place.state, GroState::DoesWithout { .. }) {
                stopping.retain(|stopping| stopping != socket);
                start(*socket);
            }
            !matches!(place.state, GroState::Gathers)
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

impl SocketGro {
    /// True if GRO should be disabled, because super-packets have fewer than `worth.0 / worth.1` datagrams on average.
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
        self.state = GroState::DoesWithout { until_ms: now_ms + pause_ms, datagrams, in_ms };
        true
    }

    /// Re-enables GRO when the time is up, or if disabling it did not help: if datagrams still arrive in user
    /// space at half the previous rate or more, they do not arrive there because of GRO.
    fn wait(&mut self, now_ms: u64) {
        self.state = match self.state {
            GroState::DoesWithout { datagrams, in_ms, .. } if self.is_useless(now_ms, datagrams, in_ms) => {
                GroState::GathersAnyway { until_ms: now_ms + USELESS_MS }
            }
            GroState::DoesWithout { until_ms, .. } | GroState::GathersAnyway { until_ms }
                if until_ms <= now_ms =>
            {
                GroState::Gathers
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
    fn gro_stays_disabled_longer_each_time_for_short_super_packets() {
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
        bring(&mut gathering, ENOUGH, 32);
        assert_eq!(look(&mut gathering, now_ms), []);
        bring(&mut gathering, ENOUGH, 4);
        assert_eq!(look(&mut gathering, now_ms), [(SOCKET, false)]);
        assert_eq!(look(&mut gathering, now_ms + 999), []);
        assert_eq!(look(&mut gathering, now_ms + 1_000), [(SOCKET, true)]);
    }

    #[test]
    fn gro_stays_enabled_for_short_super_packets_if_each_wake_up_brings_many() {
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
    fn gro_stays_enabled_for_super_packets_that_are_few_long_or_not_relayed() {
        let mut gathering = GroControl::default();
        bring(&mut gathering, ENOUGH - 1, 2);
        assert_eq!(look(&mut gathering, 0), []);
        bring(&mut gathering, 1, 64);
        assert_eq!(look(&mut gathering, 100), [], "the mean decides");
        bring(&mut gathering, ENOUGH, 2);
        (0..ENOUGH).for_each(|_| gathering.saw(SOCKET, 2, false));
        assert_eq!(look(&mut gathering, 200), [], "half of the traffic would not be relayed by the kernel");
    }

    #[test]
    fn a_heavy_session_is_examined_immediately() {
        let mut gathering = GroControl::default();
        gathering.went_across(SOCKET, HEAVY + 1);
        bring(&mut gathering, ENOUGH, 2);
        assert_eq!(look(&mut gathering, 0), [(SOCKET, false)]);
        bring(&mut gathering, 1, 2);
        assert_eq!(look(&mut gathering, 100), []);
        gathering.went_across(SOCKET, HEAVY);
        assert_eq!(look(&mut gathering, 150), []);
        gathering.went_across(SOCKET, HEAVY + 1);
        assert_eq!(look(&mut gathering, 200), [(SOCKET, true)]);
        assert_eq!(look(&mut gathering, 300), []);
    }

    #[test]
    fn gro_is_re_enabled_if_disabling_it_did_not_help() {
        let mut gathering = GroControl::default();
        assert_eq!(look(&mut gathering, 5_000), []);
        bring(&mut gathering, 100, 1);
        bring(&mut gathering, ENOUGH, 4);
        assert_eq!(look(&mut gathering, 5_100), [(SOCKET, false)]);
        bring(&mut gathering, 15, 1);
        assert_eq!(look(&mut gathering, 5_200), [], "the traffic may have been in flight");
        (0..100).for_each(|_| gathering.saw(SOCKET, 1, false));
        assert_eq!(look(&mut gathering, 5_300), [], "the kernel would not relay this traffic in any case");
        bring(&mut gathering, 12, 1);
        assert_eq!(look(&mut gathering, 5_400), [(SOCKET, true)]);
        bring(&mut gathering, ENOUGH, 4);
        assert_eq!(look(&mut gathering, 65_300), []);
        assert_eq!(look(&mut gathering, 65_400), []);
        bring(&mut gathering, ENOUGH, 4);
        assert_eq!(look(&mut gathering, 65_500), [(SOCKET, false)]);
    }

    #[test]
    fn a_reused_socket_starts_over() {
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
        (0..3).for_each(|_| gathering.adopted(SOCKET));
        assert_eq!(look(&mut gathering, 60_000), [(SOCKET, true)]);
        assert_eq!(look(&mut gathering, 60_000), []);
    }

    #[test]
    fn closed_sockets_leave_nothing_behind() {
        let mut gathering = GroControl::default();
        for now_ms in 0..1_000 {
            for socket in 0..4 {
                gathering.forget(socket);
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
    fn a_non_empty_socket_is_retried_until_it_is_empty_or_gro_is_due() {
        let mut gathering = GroControl::default();
        bring(&mut gathering, ENOUGH, 2);
        gathering.judge(0, |_| unreachable!("GRO was never disabled"));
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
        // The wait for an empty socket ends when GRO is to be enabled again, and also when the kernel path
        // ends.
        for ends in [false, true] {
            bring(&mut gathering, ENOUGH, 2);
            gathering.judge(2 * FIRST_MS, |_| unreachable!("GRO is enabled"));
            if ends {
                gathering.forget(SOCKET);
            } else {
                let mut started = Vec::new();
                gathering.end(|socket| started.push(socket));
                assert_eq!(started, [SOCKET]);
            }
            gathering.end_tick(|_| unreachable!("the socket is closed"));
        }
    }
}
