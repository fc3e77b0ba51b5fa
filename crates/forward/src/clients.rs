//! Limits per client of a rule: concurrent connections, and new ones per second. All workers check
//! and update them when a connection or session begins and ends, never per packet.

use std::{
    hash::BuildHasher as _,
    net::{IpAddr, Ipv6Addr},
    sync::{Mutex, PoisonError},
};

use foldhash::fast::RandomState;
use hashbrown::{HashMap, hash_map::Entry};

use crate::{EndReason, Limits};

/// Enough shards that workers rarely contend for one.
const SHARDS: usize = 16;
/// Maximum number of clients without connections whose rate is remembered, per shard: 65,536 per
/// rule, about 3 MB.
const QUIET: usize = 4096;
const SECOND_US: u64 = 1_000_000;

pub(crate) struct ClientCounts {
    most: u32,
    /// Microseconds between new connections at the limit; 0 if there is no limit.
    interval: u64,
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Default)]
struct Shard {
    clients: HashMap<u128, Client, RandomState>,
    /// Number of clients without connections.
    quiet: usize,
}

/// Client that has connections or had some within the last second.
#[derive(Default)]
struct Client {
    open: u32,
    /// Time at which the full burst of one second is available again; microseconds.
    rested: u64,
}

impl ClientCounts {
    /// `None` if the rule has no limit per client.
    pub(crate) fn new(limits: &Limits) -> Option<Self> {
        if limits.max_connections_per_client.is_none() && limits.new_connections_per_client.is_none() {
            return None;
        }
        let rate = limits.new_connections_per_client.map(u64::from);
        Some(Self {
            most: limits.max_connections_per_client.unwrap_or(u32::MAX),
            interval: rate.map_or(0, |rate| (SECOND_US / rate.max(1)).max(1)),
            hasher: RandomState::default(),
            shards: std::array::from_fn(|_| Mutex::default()),
        })
    }

    /// Counts a connection of a client at time `now` in milliseconds, or returns the limit that it exceeds.
    /// All connections allowed per second may arrive in a burst; refused connections are not
    /// counted.
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

    /// Counts a handed-over connection regardless of limits.
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
    /// Removes clients without connections whose rate need not be remembered any longer. If thousands
    /// remain, removes all clients without connections, because forged sources must not fill the table and
    /// lock out others.
    fn forget(&mut self, now: u64) {
        self.clients.retain(|_, client| client.open > 0 || client.rested > now);
        self.quiet = self.clients.values().filter(|client| client.open == 0).count();
        if self.quiet > QUIET / 2 {
            self.clients.retain(|_, client| client.open > 0);
            self.quiet = 0;
        }
    }
}

/// Reduces an IPv6 address to its /64, because one customer typically has 2^64 addresses. IPv4 is
/// mapped to IPv6.
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

    fn clients(most: Option<u32>, rate: Option<u32>) -> ClientCounts {
        let limits = Limits {
            max_connections_per_client: most,
            new_connections_per_client: rate,
            ..Limits::default()
        };
        ClientCounts::new(&limits).unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn client_at_its_limit_is_refused_until_a_connection_ends() {
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
    fn addresses_of_one_ipv6_network_count_as_one_client() {
        let clients = clients(Some(1), None);
        assert_eq!(clients.enter(ip("2001:db8::1"), 0), Ok(()));
        assert_eq!(clients.enter(ip("2001:db8::2"), 0), Err(EndReason::ClientLimit));
        assert_eq!(clients.enter(ip("2001:db8:0:1::1"), 0), Ok(()));
    }

    #[test]
    fn new_connections_follow_the_rate_after_a_burst_of_one_second() {
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
        // One attempt per millisecond for ten seconds: connections are admitted at the configured rate,
        // regardless of how many were refused.
        assert_eq!((5001..15_001).map(admitted).sum::<u32>(), 100);
        assert_eq!(clients.enter(one, 15_001), Err(EndReason::ClientRate));
    }

    #[test]
    fn only_clients_without_connections_are_forgotten() {
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
    fn handed_over_connections_count_and_are_never_refused() {
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
    fn without_a_rate_idle_clients_are_forgotten() {
        let clients = clients(Some(1), None);
        clients.enter(ip("192.0.2.1"), 0).unwrap();
        clients.leave(ip("192.0.2.1"));
        assert_eq!(clients.known(), 0);
    }
}
