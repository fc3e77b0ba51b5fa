//! Number of the worker that runs a state machine and, in a fleet, number of its node. CONNECTION-IDs contain
//! both numbers, and mobility tickets contain the node's number, so that any worker of any node can find
//! the owner.
//!
//! ```text
//!  CONNECTION-ID, in bits
//!  standalone    worker 10 │ random 22
//!  fleet node    node 12 │ worker 0 to 10 │ random 20 to 10     worker: as few bits as its workers need
//! ```

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerId {
    number: u16,
    count: u16,
    /// `None` without a fleet; 0 while no number is assigned.
    node: Option<u16>,
}

const NODE_SHIFT: u32 = 20;

impl WorkerId {
    pub const MOST: u16 = 1024;

    pub const ONLY: Self = Self { number: 0, count: 1, node: None };

    /// `number` is the worker's, starting at 0.
    #[must_use]
    pub const fn new(number: u16, count: u16) -> Option<Self> {
        if number < count && count <= Self::MOST { Some(Self { number, count, node: None }) } else { None }
    }

    #[must_use]
    pub const fn number(self) -> u16 {
        self.number
    }

    pub(crate) const fn on(self, node: Option<u16>) -> Self {
        Self { node, ..self }
    }

    pub(crate) const fn node(self) -> u16 {
        match self.node {
            Some(node) => node,
            None => 0,
        }
    }

    /// Returns true for the number of another node. 0 stands for this node before it had a number.
    pub(crate) const fn is_another(self, node: u16) -> bool {
        self.node.is_some() && node != 0 && node != self.node()
    }

    pub(crate) fn connection(self, random: u32) -> u32 {
        let bits = self.random_bits();
        u32::from(self.node()) << NODE_SHIFT | u32::from(self.number) << bits | random >> (32 - bits)
    }

    pub(crate) fn of_connection(self, id: u32) -> (u16, u16) {
        let node = if self.node.is_some() { (id >> NODE_SHIFT) as u16 } else { 0 };
        let worker = id >> self.random_bits() & ((1 << self.worker_bits()) - 1);
        (node, u16::try_from(worker).unwrap_or(u16::MAX))
    }

    /// Maximum number of connections of a worker: a random ID is then free three times out of four.
    pub(crate) fn most_connections(self) -> usize {
        1 << (self.random_bits() - 2)
    }

    fn worker_bits(self) -> u32 {
        // A standalone server reserves bits for the maximum number of workers, as earlier versions do.
        if self.node.is_some() { u16::BITS - (self.count - 1).leading_zeros() } else { 10 }
    }

    fn random_bits(self) -> u32 {
        if self.node.is_some() { NODE_SHIFT - self.worker_bits() } else { 32 - self.worker_bits() }
    }

    pub(crate) const fn has(self, number: u16) -> bool {
        number < self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_ids_are_within_the_worker_count() {
        assert!(WorkerId::new(0, 0).is_none());
        assert!(WorkerId::new(2, 2).is_none());
        assert!(WorkerId::new(0, 1025).is_none());
        assert_eq!(WorkerId::new(0, 1), Some(WorkerId::ONLY));
        let last = WorkerId::new(1023, 1024).unwrap();
        assert!(last.has(0) && last.has(1023) && !last.has(1024));
    }

    #[test]
    fn a_connection_id_encodes_node_and_worker() {
        for (number, count) in [(0, 1), (1, 2), (2, 3), (3, 4), (1023, 1024)] {
            let alone = WorkerId::new(number, count).unwrap();
            for (worker_id, node) in [(alone, 0), (alone.on(Some(0)), 0), (alone.on(Some(4095)), 4095)] {
                for random in [0, 1 << 31, u32::MAX] {
                    assert_eq!(
                        worker_id.of_connection(worker_id.connection(random)),
                        (node, number),
                        "{worker_id:?}"
                    );
                }
                let differing = worker_id.connection(0) ^ worker_id.connection(u32::MAX);
                assert_eq!(1 << differing.count_ones(), 4 * worker_id.most_connections(), "{worker_id:?}");
            }
            assert_eq!(alone.most_connections(), 1 << 20);
        }
        assert_eq!(WorkerId::ONLY.on(Some(1)).most_connections(), 1 << 18);
        assert_eq!(WorkerId::new(0, 1024).unwrap().on(Some(1)).most_connections(), 1 << 8);
    }

    #[test]
    fn node_zero_and_servers_without_a_fleet_are_never_another_node() {
        let worker_id = WorkerId::ONLY.on(Some(7));
        assert_eq!([0, 7, 8].map(|node| worker_id.is_another(node)), [false, false, true]);
        assert!(!WorkerId::ONLY.is_another(8));
        assert!(WorkerId::ONLY.on(Some(0)).is_another(8), "this node has no number yet, but node 8 has");
    }
}
