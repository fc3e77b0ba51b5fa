//! Which of a server's workers a state machine belongs to. CONNECTION-IDs and mobility tickets carry the number, so that
//! any worker can tell whose they are.

/// The place of one worker among all of its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    number: u16,
    count: u16,
}

impl Seat {
    /// The most workers that a server may have: what a CONNECTION-ID has room for.
    pub const MOST: u16 = 1024;

    /// The only worker.
    pub const ONLY: Self = Self { number: 0, count: 1 };

    /// Worker `number` of `count`, counted from 0. `None` unless `number < count <= `[`Seat::MOST`].
    #[must_use]
    pub const fn new(number: u16, count: u16) -> Option<Self> {
        if number < count && count <= Self::MOST { Some(Self { number, count }) } else { None }
    }

    /// This worker's number.
    #[must_use]
    pub const fn number(self) -> u16 {
        self.number
    }

    /// Whether there is a worker of this number.
    pub(super) const fn has(self, number: u16) -> bool {
        number < self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seat_is_one_of_those_there_are() {
        assert!(Seat::new(0, 0).is_none());
        assert!(Seat::new(2, 2).is_none());
        assert!(Seat::new(0, 1025).is_none());
        assert_eq!(Seat::new(0, 1), Some(Seat::ONLY));
        let last = Seat::new(1023, 1024).unwrap();
        assert!(last.has(0) && last.has(1023) && !last.has(1024));
    }
}
