//! What one client may take of a rule: connections at a time, and new ones a second. Asked when a connection or session
//! begins and ends, by all workers; never for a packet.

use std::{
    hash::BuildHasher as _,
    net::{IpAddr, Ipv6Addr},
    sync::{Mutex, PoisonError},
};

use foldhash::fast::RandomState;
use hashbrown::{HashMap, hash_map::Entry};

use crate::{EndReason, Limits};

/// Workers hardly ever meet in one.
const SHARDS: usize = 16;
/// Clients of one shard that have nothing open and are remembered for their rate alone: 65,536 of a rule, some 3 MB.
const QUIET: usize = 4096;
const SECOND_US: u64 = 1_000_000;

/// The clients of one rule that has such a limit.
pub(crate) struct Clients {
    most: u32,
    /// Microseconds between two new connections at the limit, 0 where there is none.
    interval: u64,
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Default)]
struct Shard {
    clients: HashMap<u128, Client, RandomState>,
    /// Those of them that have nothing open.
    quiet: usize,
}

/// A client that has something open, or had within the last second.
#[derive(Default)]
struct Client {
    open: u32,
    /// When it may begin as many connections at once as it may in a second; microseconds.
    rested: u64,
}

impl Clients {
    /// `None` where a rule does not limit its clients.
    pub(crate) fn new(limits: &Limits) -> Option<Self> {
        if limits.connections_per_client.is_none() && limits.new_connections_per_client.is_none() {
            return None;
        }
        let rate = limits.new_connections_per_client.map(u64::from);
        Some(Self {
            most: limits.connections_per_client.unwrap_or(u32::MAX),
            interval: rate.map_or(0, |rate| (SECOND_US / rate.max(1)).max(1)),
            hasher: RandomState::default(),
            shards: std::array::from_fn(|_| Mutex::default()),
        })
    }

    /// One more connection of a client, at `now` milliseconds, or why not. As many new ones as a second allows may come at
    /// once; refused ones do not count.
    pub(crate) fn enter(&self, client: IpAddr, now: u64) -> Result<(), EndReason> {
        let now = now.saturating_mul(1000);
        let key = network(client);
        let mut shard = self.shard(key);
        if shard.quiet >= QUIET {
            shard.forget(now);
        }
        let Shard { clients, quiet } = &mut *shard;
        match clients.entry(key) {
            Entry::Vacant(vacant) => {
                if self.most == 0 {
                    return Err(EndReason::ClientLimit);
                }
                vacant.insert(Client { open: 1, rested: now.saturating_add(self.interval) });
            }
            Entry::Occupied(mut known) => {
                let client = known.get_mut();
                if client.open >= self.most {
                    return Err(EndReason::ClientLimit);
                }
                let rested = client.rested.max(now).saturating_add(self.interval);
                if self.interval > 0 && rested > now.saturating_add(SECOND_US) {
                    return Err(EndReason::ClientRate);
                }
                client.rested = rested;
                if client.open == 0 {
                    *quiet -= 1;
                }
                client.open += 1;
            }
        }
        Ok(())
    }

    /// One more that another process let in, whatever the limits are.
    pub(crate) fn resume(&self, client: IpAddr) {
        let key = network(client);
        let mut shard = self.shard(key);
        let Shard { clients, quiet } = &mut *shard;
        match clients.entry(key) {
            Entry::Vacant(vacant) => _ = vacant.insert(Client { open: 1, rested: 0 }),
            Entry::Occupied(mut known) => {
                let client = known.get_mut();
                if client.open == 0 {
                    *quiet -= 1;
                }
                client.open += 1;
            }
        }
    }

    /// One less.
    pub(crate) fn leave(&self, client: IpAddr) {
        let key = network(client);
        let mut shard = self.shard(key);
        let Shard { clients, quiet } = &mut *shard;
        let Entry::Occupied(mut known) = clients.entry(key) else { return };
        let client = known.get_mut();
        client.open = client.open.saturating_sub(1);
        if client.open > 0 {
            return;
        }
        if self.interval == 0 {
            known.remove();
        } else {
            *quiet += 1;
        }
    }

    fn shard(&self, key: u128) -> std::sync::MutexGuard<'_, Shard> {
        #[expect(clippy::cast_possible_truncation, reason = "reduced to the number of shards")]
        let at = self.hasher.hash_one(key) as usize % SHARDS;
        self.shards[at].lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    fn known(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().unwrap().clients.len()).sum()
    }
}

impl Shard {
    /// Makes room: first those go whose second is over. Where thousands came within it, all that have nothing open do: a table
    /// that sources of any number can fill must not turn away those who are not in it.
    fn forget(&mut self, now: u64) {
        self.clients.retain(|_, client| client.open > 0 || client.rested > now);
        self.quiet = self.clients.values().filter(|client| client.open == 0).count();
        if self.quiet > QUIET / 2 {
            self.clients.retain(|_, client| client.open > 0);
            self.quiet = 0;
        }
    }
}

/// One customer has 2^64 IPv6 addresses: their network counts as one. IPv4 addresses are where no such network is.
fn network(client: IpAddr) -> u128 {
    match client.to_canonical() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
        IpAddr::V6(ip) => Ipv6Addr::to_bits(ip) >> 64 << 64,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests {
    use super::*;

    fn clients(most: Option<u32>, rate: Option<u32>) -> Clients {
        let limits =
            Limits { connections_per_client: most, new_connections_per_client: rate, ..Limits::default() };
        Clients::new(&limits).unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_client_at_its_limit_is_refused_until_one_ends_and_others_are_not() {
        let clients = clients(Some(2), None);
        let one = ip("192.0.2.1");
        assert_eq!((clients.enter(one, 0), clients.enter(one, 0)), (Ok(()), Ok(())));
        assert_eq!(clients.enter(one, 0), Err(EndReason::ClientLimit));
        assert_eq!(clients.enter(ip("::ffff:192.0.2.1"), 0), Err(EndReason::ClientLimit));
        assert_eq!(clients.enter(ip("192.0.2.2"), 0), Ok(()));
        clients.leave(one);
        assert_eq!(clients.enter(one, 0), Ok(()));
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_client() {
        let clients = clients(Some(1), None);
        assert_eq!(clients.enter(ip("2001:db8::1"), 0), Ok(()));
        assert_eq!(clients.enter(ip("2001:db8::2"), 0), Err(EndReason::ClientLimit));
        assert_eq!(clients.enter(ip("2001:db8:0:1::1"), 0), Ok(()));
    }

    #[test]
    fn new_connections_come_at_the_rate_after_a_burst_of_one_second() {
        let clients = clients(None, Some(10));
        let one = ip("192.0.2.1");
        let admitted = |now| {
            let good = clients.enter(one, now).is_ok();
            if good {
                clients.leave(one);
            }
            u32::from(good)
        };
        assert_eq!((0..50).map(|_| admitted(5000)).sum::<u32>(), 10);
        // A millisecond apart for ten seconds: the rate, whatever was refused.
        assert_eq!((5001..15_001).map(admitted).sum::<u32>(), 100);
        assert_eq!(clients.enter(one, 15_001), Err(EndReason::ClientRate));
    }

    #[test]
    fn sources_without_number_are_forgotten_and_whoever_has_something_open_is_not() {
        let clients = clients(Some(1), Some(1));
        let lasting = ip("192.0.2.1");
        assert_eq!(clients.enter(lasting, 0), Ok(()));
        for n in 0..100_000_u32 {
            let client = IpAddr::from(n.wrapping_add(0x0a00_0000).to_be_bytes());
            assert_eq!(clients.enter(client, 1), Ok(()), "{client}");
            clients.leave(client);
        }
        assert!(clients.known() <= SHARDS * QUIET + 1, "{}", clients.known());
        assert_eq!(clients.enter(lasting, 1), Err(EndReason::ClientLimit));
    }

    #[test]
    fn what_another_process_let_in_counts_and_is_not_refused() {
        let clients = clients(Some(2), Some(1));
        let one = ip("192.0.2.1");
        (0..3).for_each(|_| clients.resume(one));
        assert_eq!(clients.enter(one, 0), Err(EndReason::ClientLimit));
        (0..2).for_each(|_| clients.leave(one));
        assert_eq!(clients.enter(one, 0), Ok(()));
        (0..2).for_each(|_| clients.leave(one));
        clients.resume(one);
        assert_eq!(clients.enter(one, 0), Err(EndReason::ClientRate));
    }

    #[test]
    fn without_a_rate_nobody_is_remembered_who_has_nothing_open() {
        let clients = clients(Some(1), None);
        clients.enter(ip("192.0.2.1"), 0).unwrap();
        clients.leave(ip("192.0.2.1"));
        assert_eq!(clients.known(), 0);
    }
}
