//! Peer connections of a worker (RFC 6062), and their number per user across all workers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::quality::RandomState;
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::{
    random::Random,
    server::{ServerConfig, WorkerId, allocation_state::AllocationState},
};

/// The upper bits hold node and worker, so that a ConnectionBind can be routed. The ID need not be secret: a
/// ConnectionBind is authenticated by its credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ConnectionId(pub u32);

impl ConnectionId {
    pub(crate) fn draw(random: &mut Random, worker_id: WorkerId) -> Self {
        Self(worker_id.connection(random.u32()))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConnectionHolder(Arc<str>, Box<str>);

impl ConnectionHolder {
    pub(crate) fn of(state: &AllocationState) -> Self {
        Self(Arc::clone(&state.realm), state.identity().into())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionsFull {
    Allocation,
    Total,
    User,
}

type HeldConnections = HashMap<ConnectionHolder, usize, RandomState>;

/// Shared by all workers. Locked only when a connection is requested, arrives or ends.
#[derive(Clone, Debug, Default)]
pub struct ConnectionCounts(Arc<Mutex<ConnectionTotals>>);

#[derive(Debug, Default)]
struct ConnectionTotals {
    total: usize,
    held: HeldConnections,
}

impl ConnectionCounts {
    fn take(&self, config: &ServerConfig, holder: &ConnectionHolder) -> Result<(), ConnectionsFull> {
        let mut counts = self.lock();
        if counts.total >= config.limits.peer_connections {
            return Err(ConnectionsFull::Total);
        }
        if counts.held.get(holder).is_some_and(|held| *held >= config.limits.peer_connections_per_user) {
            return Err(ConnectionsFull::User);
        }
        counts.add(holder);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTotals> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionTotals {
    fn add(&mut self, holder: &ConnectionHolder) {
        self.total += 1;
        *self.held.entry(holder.clone()).or_default() += 1;
    }

    fn remove(&mut self, holder: &ConnectionHolder, count: usize) {
        self.total -= count;
        subtract(&mut self.held, holder, count);
    }
}

fn subtract(held: &mut HeldConnections, holder: &ConnectionHolder, count: usize) {
    if let Some(of_holder) = held.get_mut(holder) {
        *of_holder -= count;
        if *of_holder == 0 {
            held.remove(holder);
        }
    }
}

/// Finds allocations by CONNECTION-ID.
pub(crate) struct Connections {
    owners: HashMap<u32, u32, RandomState>,
    held: HeldConnections,
    counts: ConnectionCounts,
    most: usize,
}

impl Connections {
    pub(crate) fn new(worker_id: WorkerId, counts: ConnectionCounts) -> Self {
        Self {
            owners: HashMap::with_hasher(RandomState::default()),
            held: HeldConnections::default(),
            counts,
            most: worker_id.most_connections(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.owners.len()
    }

    pub(crate) fn owner(&self, id: ConnectionId) -> Option<u32> {
        self.owners.get(&id.0).copied()
    }

    /// Draws a free random number. `most` keeps the table sparse, so that one is found quickly.
    pub(crate) fn draw(
        &mut self,
        config: &ServerConfig,
        random: &mut Random,
        worker_id: WorkerId,
        (index, of_allocation): (u32, usize),
        holder: &ConnectionHolder,
    ) -> Result<ConnectionId, ConnectionsFull> {
        if of_allocation >= config.limits.peer_connections_per_allocation {
            return Err(ConnectionsFull::Allocation);
        }
        if self.len() >= self.most {
            return Err(ConnectionsFull::Total);
        }
        self.counts.take(config, holder)?;
        *self.held.entry(holder.clone()).or_default() += 1;
        loop {
            let id = ConnectionId::draw(random, worker_id);
            if self.owners.try_insert(id.0, index).is_ok() {
                return Ok(id);
            }
        }
    }

    /// Skips connections whose numbers are taken on this worker or belong to another worker.
    pub(crate) fn adopt(&mut self, worker_id: WorkerId, index: u32, state: &mut AllocationState) {
        let holder = ConnectionHolder::of(state);
        let Some(tcp) = state.tcp.as_deref_mut() else { return };
        tcp.retain(|id| {
            let adopted = worker_id.of_connection(id.0).1 == worker_id.number()
                && self.owners.try_insert(id.0, index).is_ok();
            if adopted {
                *self.held.entry(holder.clone()).or_default() += 1;
                self.counts.lock().add(&holder);
            }
            adopted
        });
    }

    pub(crate) fn remove(&mut self, id: ConnectionId, holder: &ConnectionHolder) {
        if self.owners.remove(&id.0).is_some() {
            subtract(&mut self.held, holder, 1);
            self.counts.lock().remove(holder, 1);
        }
    }

    pub(crate) fn forget(&mut self, state: &AllocationState) {
        let Some(tcp) = &state.tcp else { return };
        let holder = ConnectionHolder::of(state);
        tcp.ids().for_each(|id| self.remove(id, &holder));
    }

    #[cfg(test)]
    fn agrees(&self) -> bool {
        self.held.values().sum::<usize>() == self.owners.len() && self.held.values().all(|held| *held > 0)
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        let mut counts = self.counts.lock();
        self.held.iter().for_each(|(holder, count)| counts.remove(holder, *count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{random::Seed, server::ServerLimits};

    fn holder(name: &str) -> ConnectionHolder {
        ConnectionHolder("realm".into(), name.into())
    }

    #[test]
    fn connections_are_counted_per_user_and_released() {
        let config = ServerConfig {
            limits: ServerLimits { peer_connections_per_user: 2, ..ServerLimits::default() },
            ..ServerConfig::default()
        };
        let mut connections = Connections::new(WorkerId::ONLY, ConnectionCounts::default());
        let mut random = Random::new(Seed([1; 32]));
        let mut draw = |connections: &mut Connections, of_allocation, holder: &ConnectionHolder| {
            connections.draw(&config, &mut random, WorkerId::ONLY, (0, of_allocation), holder)
        };
        let mut drawn = Vec::new();
        for name in ["alice", "alice", "bob"] {
            drawn.push((draw(&mut connections, 0, &holder(name)).unwrap(), holder(name)));
        }
        assert_eq!(draw(&mut connections, 0, &holder("alice")), Err(ConnectionsFull::User));
        let elsewhere = ConnectionHolder("another".into(), "alice".into());
        drawn.push((draw(&mut connections, 0, &elsewhere).expect("another user"), elsewhere));
        assert_eq!(draw(&mut connections, 32, &holder("bob")), Err(ConnectionsFull::Allocation));
        for (id, holder) in drawn {
            connections.remove(id, &holder);
            connections.remove(id, &holder);
            assert!(connections.agrees());
        }
        assert_eq!((connections.len(), connections.held.len()), (0, 0));
        {
            let counts = connections.counts.lock();
            assert_eq!((counts.total, counts.held.len()), (0, 0));
        }
    }

    #[test]
    fn limits_apply_across_workers_and_dropped_workers_free_their_connections() {
        let config = ServerConfig {
            limits: ServerLimits {
                peer_connections: 5,
                peer_connections_per_user: 3,
                ..ServerLimits::default()
            },
            ..ServerConfig::default()
        };
        let counts = ConnectionCounts::default();
        let worker_ids = [0, 1].map(|worker| WorkerId::new(worker, 2).unwrap());
        let [mut one, mut other] = worker_ids.map(|worker_id| Connections::new(worker_id, counts.clone()));
        let mut random = Random::new(Seed([1; 32]));
        let mut draw = |connections: &mut Connections, worker: usize, name| {
            connections.draw(&config, &mut random, worker_ids[worker], (0, 0), &holder(name))
        };
        // One worker has more than half of a limit.
        for _ in 0..3 {
            draw(&mut one, 0, "alice").unwrap();
        }
        assert_eq!(draw(&mut other, 1, "alice"), Err(ConnectionsFull::User));
        for _ in 0..2 {
            draw(&mut other, 1, "bob").unwrap();
        }
        assert_eq!(draw(&mut one, 0, "carol"), Err(ConnectionsFull::Total));
        drop(other);
        draw(&mut one, 0, "carol").unwrap();
        assert!(one.agrees());
    }
}
