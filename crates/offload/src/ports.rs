//! UDP ports that the program handles: listeners and relay ports permanently, a forwarder's ports while they
//! have flows.

use std::{
    collections::HashMap,
    ops::RangeInclusive,
    sync::{Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use crate::{
    layout::{RELAY, class_of, classes},
    mapped_array::MappedArray,
};

pub(crate) struct Ports {
    words: MappedArray,
    flows: Mutex<HashMap<u16, u32>>,
}

impl Ports {
    pub(crate) fn new(words: MappedArray) -> Self {
        Self { words, flows: Mutex::default() }
    }

    pub(crate) fn set(&self, listeners: &[u16], relays: RangeInclusive<u16>) {
        let mut flows = self.flows();
        for (word, class) in self.words.iter().zip(classes(listeners, relays)) {
            word.store(class, Ordering::Relaxed);
        }
        flows.retain(|port, _| {
            let is_held = self.class(*port) & RELAY == 0;
            if is_held {
                let (word, bits) = place(*port);
                self.words[word].fetch_or(bits, Ordering::Relaxed);
            }
            is_held
        });
    }

    /// Counts a flow on this port; undone by [`Self::give_back`].
    pub(crate) fn hold(&self, port: u16) {
        let mut flows = self.flows();
        if let Some(held) = flows.get_mut(&port) {
            *held += 1;
        } else if self.class(port) & RELAY == 0 {
            flows.insert(port, 1);
            let (word, bits) = place(port);
            self.words[word].fetch_or(bits, Ordering::Relaxed);
        }
    }

    pub(crate) fn give_back(&self, port: u16) {
        let mut flows = self.flows();
        // Permanent ports are not in this table.
        let Some(held) = flows.get_mut(&port) else { return };
        *held -= 1;
        if *held == 0 {
            flows.remove(&port);
            let (word, bits) = place(port);
            self.words[word].fetch_and(!bits, Ordering::Relaxed);
        }
    }

    fn class(&self, port: u16) -> u64 {
        let word = self.words[usize::from(port >> 5)].load(Ordering::Relaxed);
        class_of(&[word], port & 31)
    }

    fn flows(&self) -> MutexGuard<'_, HashMap<u16, u32>> {
        self.flows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn place(port: u16) -> (usize, u64) {
    (usize::from(port >> 5), RELAY << ((port & 31) * 2))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::layout::LISTENER;

    #[test]
    fn a_port_is_handled_while_it_has_flows_or_is_permanent() {
        let zero =
            File::options().read(true).write(true).open("/dev/zero").expect("every machine has /dev/zero");
        let words = MappedArray::map(&zero, 2048).expect("memory");
        let ports = Ports::new(words);
        ports.set(&[3478], 49_152..=65_535);
        for port in [53, 3478, 50_000] {
            let before = ports.class(port);
            ports.hold(port);
            ports.hold(port);
            ports.give_back(port);
            assert_eq!(ports.class(port), before | RELAY, "{port}");
            ports.give_back(port);
            assert_eq!(ports.class(port), before, "{port}");
        }
        ports.hold(53);
        ports.set(&[3479], 40_000..=40_009);
        assert_eq!(
            [53, 3478, 3479, 40_000, 50_000].map(|port| ports.class(port)),
            [RELAY, 0, LISTENER, RELAY, 0]
        );
        ports.give_back(53);
        ports.set(&[3478], 49_152..=65_535);
        assert_eq!(ports.class(53), 0);
        assert_eq!([ports.class(52), ports.class(3478), ports.class(50_000)], [0, LISTENER, RELAY]);
    }
}
