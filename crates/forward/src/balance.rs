//! Pure functions that select a target by weight and load. The caller decides which targets are
//! eligible (health, weight 0, already tried).

use std::net::IpAddr;

pub(crate) trait Weighed {
    /// The target's weight, which is never 0.
    fn weight(&self) -> u64;
    fn active(&self) -> u64;
    /// Number derived only from the target's address ([`key`]).
    fn key(&self) -> u64;
}

/// Weighted round robin: a run consists of as many turns as the sum of all weights (divided by their common
/// factor), and each target gets exactly its weight in every run. The step between turns is coprime to the
/// length of the run and about 0.618 of it (the golden ratio), which spreads the turns of a heavy target.
pub(crate) fn in_turn<'a, T: Weighed + 'a>(
    turn: u64,
    each: impl Iterator<Item = &'a T> + Clone,
) -> Option<&'a T> {
    let common = each.clone().fold(0, |common, one| greatest_common_divisor(common, one.weight())).max(1);
    let share = |one: &T| one.weight() / common;
    let (run, count) = each.clone().fold((0, 0), |(run, count), one| (run + share(one), count + 1));
    if run == 0 {
        return None;
    }
    let mut at = if run == count { turn % run } else { (turn % run) * step(run) % run };
    let mut last = None;
    for one in each {
        if at < share(one) {
            return Some(one);
        }
        at -= share(one);
        last = Some(one);
    }
    // Another worker has marked a target as down since the targets were counted.
    last
}

/// Target with the fewest connections relative to weight; ties as in [`in_turn`].
pub(crate) fn least_busy<'a, T: Weighed + 'a>(
    turn: u64,
    each: impl Iterator<Item = &'a T> + Clone,
) -> Option<&'a T> {
    // Compares a / b with c / d without dividing.
    let load = |one: &T| (one.active(), one.weight());
    let less = |one: (u64, u64), other: (u64, u64)| one.0 * other.1 < other.0 * one.1;
    let lowest = each.clone().map(load).reduce(|low, one| if less(one, low) { one } else { low })?;
    in_turn(turn, each.clone().filter(|one| !less(lowest, load(one)))).or_else(|| in_turn(turn, each))
}

/// Rendezvous hashing: each target gets a number derived from its key and the client, and the best
/// number wins. If a target is removed, only its own clients move, each to its second-best target;
/// a new target takes clients from all others. The number is exponentially distributed with the
/// weight as its rate, so targets win in proportion to weight.  There is no seed: equal addresses
/// give the same choice on every worker, after a restart and on every machine.
pub(crate) fn by_source<'a, T: Weighed + 'a>(
    client: IpAddr,
    each: impl Iterator<Item = &'a T>,
) -> Option<&'a T> {
    let client = address_bits(client);
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit, and so does a weight")]
    let wait = |one: &T| {
        let drawn = absorb(absorb(one.key(), client.0), client.1);
        let uniform = ((drawn >> 11) + 1) as f64 / (1_u64 << 53) as f64;
        -uniform.ln() / one.weight() as f64
    };
    each.map(|one| (wait(one), one)).min_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, one)| one)
}

pub(crate) fn key(ip: IpAddr, port: u16) -> u64 {
    let (high, low) = address_bits(ip);
    absorb(absorb(u64::from(port), high), low)
}

pub(crate) fn key_of_name(name: &str) -> u64 {
    name.bytes().fold(0, |state, byte| absorb(state, byte.into()))
}

/// Maps IPv4 to IPv6, so that both notations of an address compare equal.
fn address_bits(ip: IpAddr) -> (u64, u64) {
    let bits = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    #[expect(clippy::cast_possible_truncation, reason = "splits the number into its halves")]
    ((bits >> 64) as u64, bits as u64)
}

/// Finalizer of `SplitMix64` (Steele, Lea and Flood, 2014), in which each input bit flips half of the
/// output bits on average. Unlike hashes of the standard library and foldhash, it never changes.
fn absorb(state: u64, word: u64) -> u64 {
    let mut z = (state ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Step between turns, which is about 0.618 of the run's length and coprime to it.
fn step(run: u64) -> u64 {
    let golden = run * 618 / 1000;
    let is_good = |step: &u64| (1..=run).contains(step) && greatest_common_divisor(*step, run) == 1;
    (0..run).find_map(|by| [golden.saturating_sub(by), golden + by].into_iter().find(is_good)).unwrap_or(1)
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, net::Ipv4Addr};

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug)]
    struct One {
        weight: u64,
        active: Cell<u64>,
        key: u64,
    }

    impl Weighed for One {
        fn weight(&self) -> u64 {
            self.weight
        }

        fn active(&self) -> u64 {
            self.active.get()
        }

        fn key(&self) -> u64 {
            self.key
        }
    }

    fn all(weights: &[u64]) -> Vec<One> {
        let address = |at: usize| IpAddr::V4(Ipv4Addr::from_bits(0x0A00_0000 + u32::try_from(at).unwrap()));
        weights
            .iter()
            .enumerate()
            .map(|(at, weight)| One { weight: *weight, active: Cell::new(0), key: key(address(at), 80) })
            .collect()
    }

    fn place(all: &[One], chosen: &One) -> usize {
        all.iter().position(|one| std::ptr::eq(one, chosen)).unwrap()
    }

    fn order(weights: &[u64], turns: u64) -> String {
        let all = all(weights);
        let letter =
            |turn| char::from(b'a' + u8::try_from(place(&all, in_turn(turn, all.iter()).unwrap())).unwrap());
        (0..turns).map(letter).collect()
    }

    fn client(number: u32) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(number))
    }

    #[test]
    fn equal_weights_follow_the_order_of_the_list() {
        assert_eq!(order(&[1, 1, 1], 6), "abcabc");
        assert_eq!(order(&[7, 7], 4), "abab");
        assert_eq!(order(&[], 0), "");
        assert!(in_turn::<One>(0, [].iter()).is_none());
    }

    #[test]
    fn turns_of_a_heavy_target_are_spread() {
        let run = order(&[4, 4, 8], 4);
        assert!(run.contains('a') && run.contains('b'), "{run}");
        assert_eq!(order(&[5, 3], 8).matches("aaaa").count(), 0);
    }

    #[test]
    fn least_busy_target_for_its_weight_is_chosen() {
        let all = all(&[3, 1]);
        let mut got = [0_u64; 2];
        for turn in 0..40 {
            let chosen = least_busy(turn, all.iter()).unwrap();
            chosen.active.set(chosen.active() + 1);
            got[place(&all, chosen)] += 1;
        }
        assert_eq!(got, [30, 10]);
    }

    #[test]
    fn idle_targets_share_short_connections_by_weight() {
        let all = all(&[3, 1]);
        let first = (0..40).filter(|turn| place(&all, least_busy(*turn, all.iter()).unwrap()) == 0).count();
        assert_eq!(first, 30);
    }

    /// If these values changed, every client would move to a different target after an upgrade.
    #[test]
    fn target_of_a_client_is_the_same_in_every_version() {
        let all = all(&[1, 1, 1, 2]);
        let chosen: Vec<usize> =
            (0..12).map(|number| place(&all, by_source(client(number), all.iter()).unwrap())).collect();
        assert_eq!(chosen, PINNED);
        let mapped = IpAddr::V6(Ipv4Addr::from_bits(3).to_ipv6_mapped());
        assert_eq!(place(&all, by_source(mapped, all.iter()).unwrap()), chosen[3]);
    }

    const PINNED: [usize; 12] = [3, 0, 1, 3, 3, 0, 3, 3, 3, 1, 3, 3];

    proptest! {
        #[test]
        fn weights_are_met_within_rounding_over_any_number_of_turns(
            weights in prop::collection::vec(1_u64..=256, 1..12),
            from in 0_u64..1_000_000,
            turns in 0_u64..2000,
        ) {
            let all = all(&weights);
            let mut got = vec![0_u64; weights.len()];
            for turn in from..from + turns {
                got[place(&all, in_turn(turn, all.iter()).unwrap())] += 1;
            }
            let run: u64 = weights.iter().sum();
            for (got, weight) in got.iter().zip(&weights) {
                let least = turns / run * weight;
                prop_assert!((least..=least + weight).contains(got), "{got} of {turns} turns, weight {weight} of {run}");
            }
        }

        #[test]
        fn removing_a_target_moves_only_its_own_clients(
            weights in prop::collection::vec(1_u64..=20, 2..10),
            gone in any::<prop::sample::Index>(),
            clients in prop::collection::vec(any::<u32>(), 1..200),
        ) {
            let all = all(&weights);
            let gone = gone.index(all.len());
            for number in clients {
                let before = place(&all, by_source(client(number), all.iter()).unwrap());
                let left = all.iter().enumerate().filter(|(at, _)| *at != gone).map(|(_, one)| one);
                let after = place(&all, by_source(client(number), left).unwrap());
                prop_assert_ne!(after, gone);
                prop_assert!(before == gone || before == after);
            }
        }

        #[test]
        fn reordering_the_list_moves_no_client(weights in prop::collection::vec(1_u64..=20, 1..10), number in any::<u32>()) {
            let all = all(&weights);
            let forwards = by_source(client(number), all.iter()).unwrap();
            let backwards = by_source(client(number), all.iter().rev()).unwrap();
            prop_assert!(std::ptr::eq(forwards, backwards));
        }
    }

    #[test]
    fn sources_are_spread_by_weight() {
        let all = all(&[1, 2, 5]);
        let mut got = [0_u32; 3];
        // Adjacent addresses, like clients on one network.
        for number in 0..8000 {
            got[place(&all, by_source(client(0x0A01_0000 + number), all.iter()).unwrap())] += 1;
        }
        for (got, due) in got.into_iter().zip([1000_u32, 2000, 5000]) {
            assert!(got.abs_diff(due) < due / 10, "{got} of {due}");
        }
    }
}
