//! Which of a server's workers a state machine belongs to, and which node of a fleet the server is. CONNECTION-IDs carry both numbers, and mobility
//! tickets the node's, so that any worker of any node can tell the owner.
//!
//! ```text
//!  CONNECTION-ID of a server alone   worker 10 │ by chance 22                        bits
//!  of a node of a fleet              node 12 │ worker 0 to 10 │ by chance 20 to 10   as many as its workers need
//! ```

/// The place of one worker among all of its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerId {
    number: u16,
    count: u16,
    /// `None` without a fleet; 0 as long as it has no number.
    node: Option<u16>,
}

/// Bits of a CONNECTION-ID behind the node's number.
const NODE_SHIFT: u32 = 20;

impl WorkerId {
    /// The most workers that a server may have: what a CONNECTION-ID has room for.
    pub const MOST: u16 = 1024;

    /// The only worker.
    pub const ONLY: Self = Self { number: 0, count: 1, node: None };

    /// Worker `number` of `count`, counted from 0. `None` unless `number < count <= `[`WorkerId::MOST`].
    #[must_use]
    pub const fn new(number: u16, count: u16) -> Option<Self> {
        if number < count && count <= Self::MOST { Some(Self { number, count, node: None }) } else { None }
    }

    /// This worker's number.
    #[must_use]
    pub const fn number(self) -> u16 {
        self.number
    }

    /// The same on the node of this number.
    pub(crate) const fn on(self, node: Option<u16>) -> Self {
        Self { node, ..self }
    }

    /// The number of the node; 0 for none.
    pub(crate) const fn node(self) -> u16 {
        match self.node {
            Some(node) => node,
            None => 0,
        }
    }

    /// Whether that is another node's number. What has none was made here, before this node had one.
    pub(crate) const fn is_another(self, node: u16) -> bool {
        self.node.is_some() && node != 0 && node != self.node()
    }

    /// A CONNECTION-ID of this worker; of `random`, the upper bits are taken.
    pub(crate) fn connection(self, random: u32) -> u32 {
        let bits = self.random_bits();
        u32::from(self.node()) << NODE_SHIFT | u32::from(self.number) << bits | random >> (32 - bits)
    }

    /// The numbers of the node and of the worker in a CONNECTION-ID.
    pub(crate) fn of_connection(self, id: u32) -> (u16, u16) {
        let node = if self.node.is_some() { (id >> NODE_SHIFT) as u16 } else { 0 };
        let worker = id >> self.random_bits() & ((1 << self.worker_bits()) - 1);
        (node, u16::try_from(worker).unwrap_or(u16::MAX))
    }

    /// Connections that a worker may have, so that a number by chance is free three times in four.
    pub(crate) fn most_connections(self) -> usize {
        1 << (self.random_bits() - 2)
    }

    fn worker_bits(self) -> u32 {
        // A server alone has always had as many as it could have workers.
        if self.node.is_some() { u16::BITS - (self.count - 1).leading_zeros() } else { 10 }
    }

    fn random_bits(self) -> u32 {
        if self.node.is_some() { NODE_SHIFT - self.worker_bits() } else { 32 - self.worker_bits() }
    }

    /// Whether there is a worker of this number.
    pub(crate) const fn has(self, number: u16) -> bool {
        number < self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seat_is_one_of_those_there_are() {
        assert!(WorkerId::new(0, 0).is_none());
        assert!(WorkerId::new(2, 2).is_none());
        assert!(WorkerId::new(0, 1025).is_none());
        assert_eq!(WorkerId::new(0, 1), Some(WorkerId::ONLY));
        let last = WorkerId::new(1023, 1024).unwrap();
        assert!(last.has(0) && last.has(1023) && !last.has(1024));
    }

    #[test]
    fn a_connection_says_whose_it_is() {
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
    fn what_has_no_node_is_ours_and_without_a_fleet_everything_is() {
        let worker_id = WorkerId::ONLY.on(Some(7));
        assert_eq!([0, 7, 8].map(|node| worker_id.is_another(node)), [false, false, true]);
        assert!(!WorkerId::ONLY.is_another(8));
        assert!(WorkerId::ONLY.on(Some(0)).is_another(8), "it has no number yet, and others have");
    }
}
