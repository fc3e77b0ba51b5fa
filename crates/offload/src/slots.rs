//! Numbers of places in an array map: given out, and taken back.

/// The free ones.
#[derive(Debug)]
pub(crate) struct Slots {
    returned: Vec<u32>,
    next: u32,
    most: u32,
}

impl Slots {
    pub(crate) fn new(most: u32) -> Self {
        Self { returned: Vec::new(), next: 0, most }
    }

    pub(crate) fn take(&mut self) -> Option<u32> {
        self.returned.pop().or_else(|| {
            (self.next < self.most).then(|| {
                self.next += 1;
                self.next - 1
            })
        })
    }

    pub(crate) fn give_back(&mut self, slot: u32) {
        self.returned.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_somebodys_only_once() {
        let mut slots = Slots::new(2);
        assert_eq!([slots.take(), slots.take(), slots.take()], [Some(0), Some(1), None]);
        slots.give_back(0);
        assert_eq!([slots.take(), slots.take()], [Some(0), None]);
    }
}
