//! The connections of a worker (RFC 6062) by CONNECTION-ID, and how many each user has: of what all share, nobody takes it all.

use std::sync::Arc;

use foldhash::quality::RandomState;
use hashbrown::HashMap;

use super::{Seat, ServerConfig, connections::ConnectionId, session::Session};
use crate::random::Random;

/// Whose connections are counted together: a realm, and whom quotas count there.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Holder(Arc<str>, Box<str>);

impl Holder {
    pub(super) fn of(session: &Session) -> Self {
        Self(Arc::clone(&session.realm), session.identity().into())
    }
}

/// Of what there are as many as there may be, in the order of [`super::Stats::connection_limit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    Allocation,
    Total,
    User,
}

/// The connections of a worker, by CONNECTION-ID, with the index of the allocation that each belongs to.
pub(super) struct Connections {
    owners: HashMap<u32, u32, RandomState>,
    /// Without those who have none.
    held: HashMap<Holder, usize, RandomState>,
    /// For which there are numbers.
    most: usize,
}

impl Connections {
    pub(super) fn new(seat: Seat) -> Self {
        Self {
            owners: HashMap::with_hasher(RandomState::default()),
            held: HashMap::with_hasher(RandomState::default()),
            most: seat.most_connections(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.owners.len()
    }

    /// The index of the allocation that it belongs to.
    pub(super) fn owner(&self, id: ConnectionId) -> Option<u32> {
        self.owners.get(&id.0).copied()
    }

    /// Whether one more is one too many, for an allocation that has so many.
    pub(super) fn full(&self, config: &ServerConfig, of_allocation: usize, holder: &Holder) -> Option<Full> {
        if of_allocation >= config.max_connections {
            Some(Full::Allocation)
        } else if self.len() >= config.max_total_connections.min(self.most) {
            Some(Full::Total)
        } else {
            let held = self.held.get(holder).copied().unwrap_or_default();
            (held >= config.max_user_connections).then_some(Full::User)
        }
    }

    /// A number for one more. [`Self::full`] keeps the table small enough that a free one is found at once.
    pub(super) fn draw(
        &mut self,
        random: &mut Random,
        seat: Seat,
        index: u32,
        holder: Holder,
    ) -> ConnectionId {
        *self.held.entry(holder).or_default() += 1;
        loop {
            let id = ConnectionId::draw(random, seat);
            if self.owners.try_insert(id.0, index).is_ok() {
                return id;
            }
        }
    }

    /// Takes in the connections of an allocation that comes from elsewhere, but for those whose numbers are taken here or another worker's.
    pub(super) fn adopt(&mut self, seat: Seat, index: u32, session: &mut Session) {
        let holder = Holder::of(session);
        let Some(tcp) = session.tcp.as_deref_mut() else { return };
        tcp.retain(|id| {
            let adopted =
                seat.of_connection(id.0).1 == seat.number() && self.owners.try_insert(id.0, index).is_ok();
            if adopted {
                *self.held.entry(holder.clone()).or_default() += 1;
            }
            adopted
        });
    }

    /// Forgets one of a holder's.
    pub(super) fn remove(&mut self, id: ConnectionId, holder: &Holder) {
        if self.owners.remove(&id.0).is_some()
            && let Some(held) = self.held.get_mut(holder)
        {
            *held -= 1;
            if *held == 0 {
                self.held.remove(holder);
            }
        }
    }

    /// Forgets all connections of an allocation that is gone.
    pub(super) fn forget(&mut self, session: &Session) {
        let Some(tcp) = &session.tcp else { return };
        let holder = Holder::of(session);
        tcp.ids().for_each(|id| self.remove(id, &holder));
    }

    /// Whether nothing is counted that is not there.
    #[cfg(test)]
    fn agrees(&self) -> bool {
        self.held.values().sum::<usize>() == self.owners.len() && self.held.values().all(|held| *held > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Seed;

    #[test]
    fn each_user_is_counted_and_forgotten() {
        let config = ServerConfig { max_user_connections: 2, ..ServerConfig::default() };
        let holder = |name: &str| Holder("realm".into(), name.into());
        let mut connections = Connections::new(Seat::ONLY);
        let mut drawn = Vec::new();
        let mut random = Random::new(Seed([1; 32]));
        for (index, name) in ["alice", "alice", "bob"].into_iter().enumerate() {
            assert_eq!(connections.full(&config, 0, &holder(name)), None);
            let index = u32::try_from(index).unwrap();
            drawn.push((connections.draw(&mut random, Seat::ONLY, index, holder(name)), name));
        }
        assert_eq!(connections.full(&config, 0, &holder("alice")), Some(Full::User));
        let elsewhere = Holder("another".into(), "alice".into());
        assert_eq!(connections.full(&config, 0, &elsewhere), None, "another user");
        assert_eq!(connections.full(&config, 32, &holder("bob")), Some(Full::Allocation));
        for (id, name) in drawn {
            connections.remove(id, &holder(name));
            connections.remove(id, &holder(name));
            assert!(connections.agrees());
        }
        assert_eq!((connections.len(), connections.held.len()), (0, 0));
    }
}
