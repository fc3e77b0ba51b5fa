//! By which interface each client and each peer is reached. The program asks the kernel for the next hop itself, but has to say by which
//! interface; `bpf_fib_lookup` would know that too, if only it looked before the forwarding of this machine were on (ip_forward).

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    net::IpAddr,
    sync::{Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use crate::{layout::ONLY_FROM_THERE, netlink::Netlink, slots::Slots, words::Words};

/// The words that the program reads, and what they stand for.
pub(crate) struct Routes {
    words: Words,
    inner: Mutex<Inner>,
}

struct Inner {
    netlink: Netlink,
    slots: Slots,
    by_ends: HashMap<Ends, Held>,
    by_slot: HashMap<u32, Ends>,
    links: Links,
}

/// From one of our addresses to somebody else's.
type Ends = (IpAddr, IpAddr);

struct Held {
    slot: u32,
    holders: u32,
}

/// What routes may lead over.
#[derive(Clone, Default)]
struct Links {
    ethernet: BTreeSet<u32>,
    /// Some interface has a strict reverse path filter for IPv4.
    strict: bool,
}

impl Links {
    fn read(netlink: &mut Netlink) -> io::Result<Self> {
        let interfaces = netlink.interfaces()?;
        let ethernet = interfaces.iter().filter(|interface| interface.is_ethernet && !interface.is_port);
        Ok(Self {
            strict: interfaces.iter().any(|interface| filters_strictly(&interface.name))
                || filters_strictly("all"),
            ethernet: ethernet.map(|interface| interface.number).collect(),
        })
    }

    fn word(&self, to: IpAddr, interface: Option<u32>) -> u64 {
        let Some(interface) = interface.filter(|number| self.ethernet.contains(number)) else { return 0 };
        let only = if self.strict && to.is_ipv4() { ONLY_FROM_THERE } else { 0 };
        u64::from(interface) | only
    }
}

/// Whether nothing may come by an interface but from where it leads to (net.ipv4.conf.*.rp_filter = 1).
fn filters_strictly(name: &str) -> bool {
    fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter"))
        .is_ok_and(|text| text.trim() == "1")
}

impl Routes {
    pub(crate) fn new(words: Words) -> io::Result<Self> {
        let mut netlink = Netlink::new()?;
        let links = Links::read(&mut netlink)?;
        let slots = Slots::new(u32::try_from(words.len()).unwrap_or(u32::MAX));
        let inner = Inner { netlink, slots, by_ends: HashMap::new(), by_slot: HashMap::new(), links };
        Ok(Self { words, inner: Mutex::new(inner) })
    }

    /// The number of a route; `None` if there are too many. To be given back.
    pub(crate) fn hold(&self, from: IpAddr, to: IpAddr) -> Option<u32> {
        let inner = &mut *self.inner();
        if let Some(held) = inner.by_ends.get_mut(&(from, to)) {
            held.holders += 1;
            return Some(held.slot);
        }
        let slot = inner.slots.take()?;
        let interface = inner.netlink.route(from, to).unwrap_or_default();
        self.words[slot as usize].store(inner.links.word(to, interface), Ordering::Relaxed);
        inner.by_ends.insert((from, to), Held { slot, holders: 1 });
        inner.by_slot.insert(slot, (from, to));
        Some(slot)
    }

    pub(crate) fn give_back(&self, slot: u32) {
        let inner = &mut *self.inner();
        let Some(ends) = inner.by_slot.get(&slot).copied() else { return };
        let Some(held) = inner.by_ends.get_mut(&ends) else { return };
        held.holders -= 1;
        if held.holders == 0 {
            inner.by_ends.remove(&ends);
            inner.by_slot.remove(&slot);
            inner.slots.give_back(slot);
        }
    }

    /// Asks for all of them anew, with a socket of its own: nobody waits for it.
    pub(crate) fn refresh(&self, netlink: &mut Netlink) -> io::Result<()> {
        let links = Links::read(netlink)?;
        let routes: Vec<(u32, Ends)> = {
            let mut inner = self.inner();
            inner.links = links.clone();
            inner.by_slot.iter().map(|(slot, ends)| (*slot, *ends)).collect()
        };
        for (slot, (from, to)) in routes {
            let word = links.word(to, netlink.route(from, to)?);
            // It may be another one's by now, and that one was asked for later.
            let inner = self.inner();
            if inner.by_slot.get(&slot) == Some(&(from, to)) {
                self.words[slot as usize].store(word, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.inner().by_slot.len()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
