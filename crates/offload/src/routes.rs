//! By which interface each client and each peer is reached, by whom on that link, and for XDP at which link address. At TC the kernel finds
//! that address itself, as it does for what a socket sends; `bpf_fib_lookup` would know all of it, if only it looked before the forwarding of
//! this machine were on (ip_forward).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    net::IpAddr,
    sync::{Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use crate::{
    layout::{BY_REDIRECTION, GATEWAY_WORDS, HOP_WORDS, ONLY_FROM_THERE, mapped},
    netlink::{LinkAddress, Netlink, NextHop},
    slots::Slots,
    words::Words,
};

/// The words that the programs read, and what they stand for.
pub(crate) struct Routes {
    words: Words,
    /// For TC.
    gateways: Words,
    /// For XDP.
    hops: Option<Words>,
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
    next: Option<NextHop>,
}

/// What routes may lead over.
#[derive(Clone, Default)]
struct Links {
    ethernet: BTreeSet<u32>,
    /// Our link addresses where XDP sends.
    own: BTreeMap<u32, LinkAddress>,
    /// Where it sends by redirection alone.
    by_redirection: BTreeSet<u32>,
    /// Some interface has a strict reverse path filter for IPv4.
    strict: bool,
}

impl Links {
    /// `xdp` are the interfaces by which XDP may send.
    fn read(netlink: &mut Netlink, xdp: &BTreeSet<u32>) -> io::Result<Self> {
        let interfaces = netlink.interfaces()?;
        let ethernet = interfaces.iter().filter(|interface| interface.is_ethernet && !interface.is_port);
        let by_xdp = || interfaces.iter().filter(|interface| xdp.contains(&interface.number));
        let veth = by_xdp().filter(|interface| interface.kind.as_deref() == Some("veth"));
        Ok(Self {
            by_redirection: veth.map(|interface| interface.number).collect(),
            strict: interfaces.iter().any(|interface| filters_strictly(&interface.name))
                || filters_strictly("all"),
            ethernet: ethernet.map(|interface| interface.number).collect(),
            own: by_xdp().filter_map(|interface| Some((interface.number, interface.address?))).collect(),
        })
    }

    fn word(&self, to: IpAddr, next: Option<NextHop>) -> u64 {
        let Some(next) = next.filter(|next| self.ethernet.contains(&next.interface)) else { return 0 };
        let only = if self.strict && to.is_ipv4() { ONLY_FROM_THERE } else { 0 };
        let how = if self.by_redirection.contains(&next.interface) { BY_REDIRECTION } else { 0 };
        u64::from(next.interface) | only | how
    }

    /// What XDP writes into a frame.
    fn hop(&self, netlink: &mut Netlink, next: Option<NextHop>) -> io::Result<[u64; HOP_WORDS]> {
        let own = next.and_then(|next| Some((next, *self.own.get(&next.interface)?)));
        let Some((next, own)) = own else { return Ok([0; HOP_WORDS]) };
        Ok([netlink.neighbour(next)?.map_or(0, as_word), as_word(own)])
    }
}

fn as_word([a, b, c, d, e, f]: LinkAddress) -> u64 {
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}

/// The neighbour's address, as flows have addresses.
fn as_words(next: NextHop) -> [u64; GATEWAY_WORDS] {
    let [first, second] = [0, 8].map(|at| {
        let octets = mapped(next.neighbour);
        u64::from_ne_bytes(std::array::from_fn(|byte| octets[at + byte]))
    });
    [first, second]
}

/// Whether nothing may come by an interface but from where it leads to (net.ipv4.conf.*.rp_filter = 1).
fn filters_strictly(name: &str) -> bool {
    fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter"))
        .is_ok_and(|text| text.trim() == "1")
}

impl Routes {
    pub(crate) fn new(words: Words, gateways: Words, hops: Option<Words>) -> io::Result<Self> {
        let mut netlink = Netlink::new()?;
        let links = Links::read(&mut netlink, &BTreeSet::new())?;
        let slots = Slots::new(u32::try_from(words.len()).unwrap_or(u32::MAX));
        let inner = Inner { netlink, slots, by_ends: HashMap::new(), by_slot: HashMap::new(), links };
        Ok(Self { words, gateways, hops, inner: Mutex::new(inner) })
    }

    /// The number of a route; `None` if there are too many. To be given back.
    pub(crate) fn hold(&self, from: IpAddr, to: IpAddr) -> Option<u32> {
        let inner = &mut *self.inner();
        if let Some(held) = inner.by_ends.get_mut(&(from, to)) {
            held.holders += 1;
            return Some(held.slot);
        }
        let slot = inner.slots.take()?;
        let next = inner.netlink.route(from, to).unwrap_or_default();
        let hop = inner.links.hop(&mut inner.netlink, next).unwrap_or_default();
        self.write(slot, inner.links.word(to, next), next, hop);
        inner.by_ends.insert((from, to), Held { slot, holders: 1, next });
        inner.by_slot.insert(slot, (from, to));
        Some(slot)
    }

    /// Holds the route that another process has had under this number. The next [`Routes::refresh`] asks where it leads.
    pub(crate) fn adopt(&self, slot: u32, from: IpAddr, to: IpAddr) {
        let inner = &mut *self.inner();
        inner.slots.claim(slot);
        inner.by_slot.insert(slot, (from, to));
        inner.by_ends.entry((from, to)).or_insert(Held { slot, holders: 0, next: None }).holders += 1;
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

    /// Asks for all of them anew, with a socket of its own: nobody waits for it. XDP may send by the interfaces `xdp`.
    pub(crate) fn refresh(&self, netlink: &mut Netlink, xdp: &BTreeSet<u32>) -> io::Result<()> {
        let links = Links::read(netlink, xdp)?;
        self.inner().links = links.clone();
        self.held(|_, _| true)
            .into_iter()
            .try_for_each(|(slot, ends, _)| self.ask(netlink, &links, slot, ends))
    }

    /// Asks anew where those lead whose gateway is among these neighbours, who have not answered: the kernel takes another gateway by itself
    /// then, if it has one, and there is no other news of that.
    pub(crate) fn refresh_lost(&self, netlink: &mut Netlink, lost: &BTreeSet<NextHop>) -> io::Result<()> {
        let links = self.inner().links.clone();
        let is_lost = |to, next: NextHop| next.neighbour != to && lost.contains(&next);
        let by_lost = self.held(|to, next| next.is_some_and(|next| is_lost(to, next)));
        by_lost.into_iter().try_for_each(|(slot, ends, _)| self.ask(netlink, &links, slot, ends))
    }

    /// The gateways that the kernel cannot send to. They are few, however many routes there are.
    pub(crate) fn lost_gateways(&self, netlink: &mut Netlink) -> io::Result<BTreeSet<NextHop>> {
        let by_gateway = self.held(|to, next| next.is_some_and(|next| next.neighbour != to));
        let all: BTreeSet<NextHop> = by_gateway.into_iter().filter_map(|(_, _, next)| next).collect();
        let mut lost = BTreeSet::new();
        for gateway in all {
            if netlink.neighbour(gateway)?.is_none() {
                lost.insert(gateway);
            }
        }
        Ok(lost)
    }

    fn ask(&self, netlink: &mut Netlink, links: &Links, slot: u32, ends: Ends) -> io::Result<()> {
        let next = netlink.route(ends.0, ends.1)?;
        let hop = links.hop(netlink, next)?;
        // It may be another one's by now, and that one was asked for later.
        if let Some(held) = self.inner().by_ends.get_mut(&ends).filter(|held| held.slot == slot) {
            held.next = next;
            self.write(slot, links.word(ends.1, next), next, hop);
        }
        Ok(())
    }

    /// Asks for the link addresses of these neighbours anew, or of all.
    pub(crate) fn refresh_neighbours(
        &self,
        netlink: &mut Netlink,
        which: Option<&BTreeSet<NextHop>>,
    ) -> io::Result<()> {
        let links = self.inner().links.clone();
        let is_it = |next: NextHop| which.is_none_or(|which| which.contains(&next));
        for (slot, ends, next) in self.held(|_, next| next.is_some_and(is_it)) {
            let hop = links.hop(netlink, next)?;
            let inner = self.inner();
            if inner.by_ends.get(&ends).is_some_and(|held| held.slot == slot && held.next == next) {
                self.write(slot, links.word(ends.1, next), next, hop);
            }
        }
        Ok(())
    }

    /// Keeps the kernel's knowledge of the neighbours alive that only XDP sends to, of which the kernel hears nothing.
    pub(crate) fn use_neighbours(&self, netlink: &mut Netlink) -> io::Result<()> {
        let neighbours: BTreeSet<NextHop> = {
            let inner = self.inner();
            let next = inner.by_ends.values().filter_map(|held| held.next);
            next.filter(|next| inner.links.own.contains_key(&next.interface)).collect()
        };
        neighbours.into_iter().try_for_each(|neighbour| netlink.use_neighbour(neighbour))
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.inner().by_slot.len()
    }

    /// Those to such an address with such a next hop.
    fn held(&self, which: impl Fn(IpAddr, Option<NextHop>) -> bool) -> Vec<(u32, Ends, Option<NextHop>)> {
        let inner = self.inner();
        let held = inner.by_ends.iter().filter(|(ends, held)| which(ends.1, held.next));
        held.map(|(ends, held)| (held.slot, *ends, held.next)).collect()
    }

    /// A reader that finds the same interface before and behind them has a gateway and link addresses that are good there.
    fn write(&self, slot: u32, word: u64, next: Option<NextHop>, hop: [u64; HOP_WORDS]) {
        let (place, slot) = (&self.words[slot as usize], slot as usize);
        let gateways = &self.gateways[slot * GATEWAY_WORDS..][..GATEWAY_WORDS];
        let mut beside = vec![(gateways, next.map_or([0; GATEWAY_WORDS], as_words))];
        beside.extend(self.hops.as_ref().map(|hops| (&hops[slot * HOP_WORDS..][..HOP_WORDS], hop)));
        for (words, new) in beside {
            if words.iter().zip(new).any(|(word, new)| word.load(Ordering::Relaxed) != new) {
                place.store(0, Ordering::Release);
                words.iter().zip(new).for_each(|(word, new)| word.store(new, Ordering::Release));
            }
        }
        place.store(word, Ordering::Release);
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
