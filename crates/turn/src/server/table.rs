//! The allocations of a worker: dense slots with generations, found by 5-tuple through a seeded hash table that holds
//! nothing but slot numbers.

use std::{
    hash::{BuildHasher as _, Hasher as _},
    net::IpAddr,
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;

use super::{AllocationId, Client, allocation::Allocation};

pub(super) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Without those whose client is away.
    by_client: HashTable<u32>,
    len: usize,
    hasher: RandomState,
    /// The client looked up last: datagrams come in runs.
    last: Option<(Client, u32)>,
}

struct Slot {
    generation: u32,
    allocation: Option<Box<Allocation>>,
}

impl Table {
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            by_client: HashTable::new(),
            len: 0,
            hasher: RandomState::default(),
            last: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The allocation of this 5-tuple.
    #[inline]
    pub(super) fn find(&mut self, client: &Client) -> Option<u32> {
        if let Some((last, index)) = &self.last
            && last == client
        {
            return Some(*index);
        }
        let slots = &self.slots;
        let index = *self.by_client.find(hash(&self.hasher, client), |index| is_of(slots, *index, client))?;
        self.last = Some((*client, index));
        Some(index)
    }

    /// What [`Table::find`] found.
    #[inline]
    pub(super) fn at(&mut self, index: u32) -> Option<(AllocationId, &mut Allocation)> {
        let slot = self.slots.get_mut(index as usize)?;
        let allocation = slot.allocation.as_deref_mut()?;
        Some((AllocationId { index, generation: slot.generation }, allocation))
    }

    #[inline]
    pub(super) fn get(&mut self, id: AllocationId) -> Option<&mut Allocation> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        slot.allocation.as_deref_mut()
    }

    /// The 5-tuple must have none.
    pub(super) fn insert(&mut self, allocation: Allocation) -> AllocationId {
        let client = allocation.client;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, allocation: None });
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let slot = &mut self.slots[index as usize];
        slot.allocation = Some(Box::new(allocation));
        let generation = slot.generation;
        self.len += 1;
        self.enter(index, &client);
        AllocationId { index, generation }
    }

    /// Gives an allocation another 5-tuple, which must have none.
    pub(super) fn rekey(&mut self, index: u32, client: Client) {
        self.detach(index);
        let slot = self.slots.get_mut(index as usize);
        if let Some(allocation) = slot.and_then(|slot| slot.allocation.as_deref_mut()) {
            allocation.client = client;
            self.enter(index, &client);
        }
    }

    /// From now on, the allocation is not found by its 5-tuple.
    pub(super) fn detach(&mut self, index: u32) {
        let slot = self.slots.get(index as usize);
        let Some(allocation) = slot.and_then(|slot| slot.allocation.as_deref()) else { return };
        // By number: another allocation may have the 5-tuple of one that is detached.
        let hash = hash(&self.hasher, &allocation.client);
        if let Ok(entry) = self.by_client.find_entry(hash, |found| *found == index) {
            entry.remove();
        }
        if self.last.is_some_and(|(_, last)| last == index) {
            self.last = None;
        }
    }

    fn enter(&mut self, index: u32, client: &Client) {
        let (slots, hasher) = (&self.slots, &self.hasher);
        self.by_client.insert_unique(hash(hasher, client), index, |index| {
            slots[*index as usize].allocation.as_ref().map_or(0, |other| hash(hasher, &other.client))
        });
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<(AllocationId, Box<Allocation>)> {
        self.detach(index);
        let slot = self.slots.get_mut(index as usize)?;
        let allocation = slot.allocation.take()?;
        self.len -= 1;
        let id = AllocationId { index, generation: slot.generation };
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        Some((id, allocation))
    }

    /// Every slot's number, used or not.
    pub(super) fn indices(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }
}

#[inline]
fn is_of(slots: &[Slot], index: u32, client: &Client) -> bool {
    slots[index as usize].allocation.as_ref().is_some_and(|allocation| allocation.client == *client)
}

/// In three writes; the derived one makes ten, field by field.
#[inline]
fn hash(seeded: &RandomState, client: &Client) -> u64 {
    let bits = |ip| match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    let (address, local) = (client.address, client.local);
    let mut hasher = seeded.build_hasher();
    hasher.write_u128(bits(address.ip()));
    hasher.write_u128(bits(local.ip()));
    hasher.write_u64(
        u64::from(address.port()) << 32 | u64::from(local.port()) << 16 | u64::from(client.listener.0),
    );
    hasher.finish()
}
