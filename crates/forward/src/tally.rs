//! Counters per target address. Each worker has its own plain integers, which snapshots add up.

use std::{io, time::Duration};

use strum::{IntoStaticStr, VariantArray};

use crate::{Address, Endpoint};

/// Slot of a target address in tables. `at` is reused once the old address has no connections; `serial` is
/// never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetSlot {
    pub at: u32,
    pub serial: u32,
}

/// Upper bounds of the connect time histogram, from the connect time of a host on the same link to the
/// default timeout.
pub const CONNECT_BOUNDS: [Duration; 15] = {
    let micros = Duration::from_micros;
    [
        micros(200),
        micros(500),
        micros(1000),
        micros(2000),
        micros(5000),
        micros(10_000),
        micros(20_000),
        micros(50_000),
        micros(100_000),
        micros(200_000),
        micros(500_000),
        micros(1_000_000),
        micros(2_000_000),
        micros(5_000_000),
        micros(10_000_000),
    ]
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum TargetFailure {
    /// RST, or ICMP port unreachable.
    Refused,
    /// No response within [`crate::Rule::connect_timeout`].
    Timeout,
    /// No route, according to a local error or an ICMP error.
    Unreachable,
    Other,
}

impl TargetFailure {
    pub(crate) fn of(error: &io::Error) -> Self {
        use io::ErrorKind::{
            AddrNotAvailable, ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable,
            TimedOut,
        };
        match error.kind() {
            ConnectionRefused | ConnectionReset => Self::Refused,
            TimedOut => Self::Timeout,
            AddrNotAvailable | HostUnreachable | NetworkUnreachable => Self::Unreachable,
            _ => Self::Other,
        }
    }
}

/// Counters of a target address over all workers, at most 100 ms old.
#[derive(Clone, Debug)]
pub struct TargetSnapshot {
    pub target: Endpoint,
    /// Address with the first port of the target's range.
    pub address: Address,
    /// State after the last health check, connect or first response.
    pub up: bool,
    /// Counters since the address became known.
    pub counts: Tally,
}

impl TargetSnapshot {
    pub(crate) fn new(target: Endpoint, address: Address, up: bool) -> Self {
        Self { target, address, up, counts: Tally::default() }
    }

    pub(crate) fn with(mut self, counts: &Tally) -> Self {
        self.counts.add(counts);
        self
    }

    pub(crate) fn merge_into(self, all: &mut Vec<Self>) {
        let same =
            |other: &&mut Self| other.address == self.address && other.target.is_same_place(&self.target);
        match all.iter_mut().find(same) {
            Some(other) => other.counts.add(&self.counts),
            None => all.push(self),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Tally {
    serial: u32,
    /// Open connections and sessions, including those being opened.
    pub open: u64,
    /// Established connections and UDP sessions.
    pub connected: u64,
    /// Failed attempts, in the order of [`TargetFailure::VARIANTS`].
    pub failed: [u64; TargetFailure::VARIANTS.len()],
    pub to_target_bytes: u64,
    pub to_client_bytes: u64,
    /// Histogram over [`CONNECT_BOUNDS`]; the last bucket counts everything above.
    pub connect_times: [u64; CONNECT_BOUNDS.len() + 1],
    pub connect_time: Duration,
}

impl Tally {
    pub(crate) fn connected_in(&mut self, time: Duration) {
        self.connected += 1;
        let bucket = CONNECT_BOUNDS.iter().position(|bound| time <= *bound);
        self.connect_times[bucket.unwrap_or(CONNECT_BOUNDS.len())] += 1;
        self.connect_time += time;
    }

    pub(crate) fn failed(&mut self, failure: TargetFailure) {
        self.failed[failure as usize] += 1;
    }

    fn add(&mut self, other: &Self) {
        self.open += other.open;
        self.connected += other.connected;
        let sum = |all: &mut [u64], others: &[u64]| all.iter_mut().zip(others).for_each(|(a, b)| *a += b);
        sum(&mut self.failed, &other.failed);
        self.to_target_bytes += other.to_target_bytes;
        self.to_client_bytes += other.to_client_bytes;
        sum(&mut self.connect_times, &other.connect_times);
        self.connect_time += other.connect_time;
    }
}

#[derive(Default)]
pub(crate) struct Tallies(Vec<Tally>);

impl Tallies {
    /// Counters of a slot, reset if the slot belonged to another address. Used when a connection starts or
    /// stops using a target.
    pub(crate) fn of(&mut self, slot: TargetSlot) -> &mut Tally {
        let at = slot.at as usize;
        if self.0.len() <= at {
            self.0.resize_with(at + 1, Tally::default);
        }
        let tally = &mut self.0[at];
        if tally.serial != slot.serial {
            *tally = Tally { serial: slot.serial, ..Tally::default() };
        }
        tally
    }

    #[inline]
    pub(crate) fn moved(&mut self, slot: TargetSlot, to_target: u64, to_client: u64) {
        if let Some(tally) = self.0.get_mut(slot.at as usize) {
            tally.to_target_bytes += to_target;
            tally.to_client_bytes += to_client;
        }
    }

    pub(crate) fn get(&self, slot: TargetSlot) -> Option<&Tally> {
        self.0.get(slot.at as usize).filter(|tally| tally.serial == slot.serial)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reused_slot_starts_at_zero() {
        let mut tallies = Tallies::default();
        let (old, new) = (TargetSlot { at: 2, serial: 1 }, TargetSlot { at: 2, serial: 9 });
        tallies.of(old).connected_in(Duration::from_millis(3));
        tallies.moved(old, 5, 7);
        assert_eq!(
            tallies.get(old).map(|tally| (tally.to_target_bytes, tally.to_client_bytes)),
            Some((5, 7))
        );
        tallies.of(new).open += 1;
        assert!(tallies.get(old).is_none());
        assert_eq!(tallies.get(new).map(|tally| (tally.open, tally.connected)), Some((1, 0)));
    }

    #[test]
    fn connect_times_fall_into_their_buckets() {
        let mut tally = Tally::default();
        for micros in [0, 200, 201, 10_000_000, 10_000_001] {
            tally.connected_in(Duration::from_micros(micros));
        }
        assert_eq!((tally.connect_times[0], tally.connect_times[1]), (2, 1));
        assert_eq!(tally.connect_times[14..], [1, 1]);
        assert_eq!(tally.connect_time, Duration::from_micros(20_000_402));
        assert!(CONNECT_BOUNDS.is_sorted());
    }
}
