//! Routes to clients and peers: interface, gateway, and for XDP the link address. At TC, the kernel resolves
//! the link address, as it does for sockets. `bpf_fib_lookup` would provide all of it, but requires
//! forwarding (ip_forward) on this machine.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    net::IpAddr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    clock::now_ns,
    layout::{BY_REDIRECTION, GATEWAY_WORDS, HOP_WORDS, ONLY_FROM_THERE, mapped, route_by},
    mapped_array::MappedArray,
    netlink::{LinkAddress, Netlink, NextHop},
    slots::{REST_NS, Slots},
};

pub(crate) struct Routes {
    words: MappedArray,
    gateways: MappedArray,
    hops: Option<MappedArray>,
    /// True if a query to the kernel has failed.
    unknown: AtomicBool,
    inner: Mutex<RouteCache>,
}

struct RouteCache {
    netlink: Netlink,
    slots: Slots,
    by_ends: HashMap<Ends, RouteEntry>,
    by_slot: HashMap<u32, Ends>,
    links: LinkTable,
}

/// Local and remote address.
type Ends = (IpAddr, IpAddr);

type HeldRoute = (u32, Ends, Option<NextHop>);

struct RouteEntry {
    slot: u32,
    holders: u32,
    next: Option<NextHop>,
}

#[derive(Clone, Default)]
struct LinkTable {
    ethernet: BTreeMap<u32, u32>,
    /// Our link addresses on the interfaces on which XDP sends.
    own: BTreeMap<u32, LinkAddress>,
    /// Interfaces on which XDP sends only by redirection.
    by_redirection: BTreeSet<u32>,
    strict: bool,
}

impl LinkTable {
    fn read(netlink: &mut Netlink, xdp: &BTreeSet<u32>) -> io::Result<Self> {
        let interfaces = netlink.interfaces()?;
        let ethernet = interfaces.iter().filter(|interface| interface.is_ethernet && !interface.is_port);
        let by_xdp = || interfaces.iter().filter(|interface| xdp.contains(&interface.number));
        let veth = by_xdp().filter(|interface| interface.kind.as_deref() == Some("veth"));
        Ok(Self {
            by_redirection: veth.map(|interface| interface.number).collect(),
            strict: interfaces.iter().any(|interface| filters_strictly(&interface.name))
                || filters_strictly("all"),
            ethernet: ethernet.map(|interface| (interface.number, interface.mtu)).collect(),
            own: by_xdp().filter_map(|interface| Some((interface.number, interface.address?))).collect(),
        })
    }

    fn word(&self, to: IpAddr, next: Option<NextHop>) -> u64 {
        let Some(next) = next else { return 0 };
        let Some(mtu) = self.ethernet.get(&next.interface) else { return 0 };
        let only = if self.strict && to.is_ipv4() { ONLY_FROM_THERE } else { 0 };
        let how = if self.by_redirection.contains(&next.interface) { BY_REDIRECTION } else { 0 };
        route_by(next.interface, *mtu) | only | how
    }

    fn hop(&self, netlink: &mut Netlink, next: Option<NextHop>) -> io::Result<[u64; HOP_WORDS]> {
        let own = next.and_then(|next| Some((next, *self.own.get(&next.interface)?)));
        let Some((next, own)) = own else { return Ok([0; HOP_WORDS]) };
        Ok([netlink.neighbour(next)?.map_or(0, as_word), as_word(own)])
    }
}

fn as_word([a, b, c, d, e, f]: LinkAddress) -> u64 {
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}

fn as_words(next: NextHop) -> [u64; GATEWAY_WORDS] {
    let [first, second] = [0, 8].map(|at| {
        let octets = mapped(next.neighbour);
        u64::from_ne_bytes(std::array::from_fn(|byte| octets[at + byte]))
    });
    [first, second]
}

/// True if packets must arrive on the interface that leads back to their source (`rp_filter` = 1).
fn filters_strictly(name: &str) -> bool {
    fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter"))
        .is_ok_and(|text| text.trim() == "1")
}

impl Routes {
    pub(crate) fn new(
        words: MappedArray,
        gateways: MappedArray,
        hops: Option<MappedArray>,
    ) -> io::Result<Self> {
        let mut netlink = Netlink::new()?;
        let links = LinkTable::read(&mut netlink, &BTreeSet::new())?;
        let slots = Slots::new(u32::try_from(words.len()).unwrap_or(u32::MAX), REST_NS);
        let inner = RouteCache { netlink, slots, by_ends: HashMap::new(), by_slot: HashMap::new(), links };
        Ok(Self { words, gateways, hops, unknown: AtomicBool::new(false), inner: Mutex::new(inner) })
    }

    /// Acquires the slot of a route; `None` if there are too many. Must be given back.
    pub(crate) fn hold(&self, from: IpAddr, to: IpAddr) -> Option<u32> {
        let inner = &mut *self.inner();
        if let Some(held) = inner.by_ends.get_mut(&(from, to)) {
            held.holders += 1;
            return Some(held.slot);
        }
        let slot = inner.slots.take(now_ns())?;
        let next = self.or_later(inner.netlink.route(from, to));
        let hop = self.or_later(inner.links.hop(&mut inner.netlink, next));
        self.write(slot, inner.links.word(to, next), next, hop);
        inner.by_ends.insert((from, to), RouteEntry { slot, holders: 1, next });
        inner.by_slot.insert(slot, (from, to));
        Some(slot)
    }

    /// Takes over a route and slot of another process. The next [`Routes::refresh`] looks up its next hop.
    pub(crate) fn adopt(&self, slot: u32, from: IpAddr, to: IpAddr) {
        let inner = &mut *self.inner();
        inner.slots.claim(slot);
        inner.by_slot.insert(slot, (from, to));
        inner.by_ends.entry((from, to)).or_insert(RouteEntry { slot, holders: 0, next: None }).holders += 1;
    }

    pub(crate) fn give_back(&self, slot: u32) {
        let inner = &mut *self.inner();
        let Some(ends) = inner.by_slot.get(&slot).copied() else { return };
        let Some(held) = inner.by_ends.get_mut(&ends) else { return };
        held.holders -= 1;
        if held.holders == 0 {
            inner.by_ends.remove(&ends);
            inner.by_slot.remove(&slot);
            inner.slots.give_back(now_ns(), slot);
        }
    }

    /// Result of a query to the kernel. If it failed, this is the default until the query is repeated; see
    /// [`Routes::are_unknown`].
    fn or_later<T: Default>(&self, said: io::Result<T>) -> T {
        said.unwrap_or_else(|_| {
            self.unknown.store(true, Ordering::Relaxed);
            T::default()
        })
    }

    pub(crate) fn are_unknown(&self) -> bool {
        self.unknown.swap(false, Ordering::Relaxed)
    }

    /// Looks up all routes again through the caller's own socket, without blocking workers. XDP may send on
    /// the interfaces `xdp`.
    pub(crate) fn refresh(&self, netlink: &mut Netlink, xdp: &BTreeSet<u32>) -> io::Result<()> {
        let links = LinkTable::read(netlink, xdp)?;
        self.inner().links = links.clone();
        self.ask_all(netlink, &links, self.held(|_, _| true))
    }

    fn ask_all(&self, netlink: &mut Netlink, links: &LinkTable, routes: Vec<HeldRoute>) -> io::Result<()> {
        let mut first = Ok(());
        for (slot, ends, _) in routes {
            first = first.and(self.ask(netlink, links, slot, ends));
        }
        first
    }

    /// Repeats the lookup of routes whose gateway is among these unreachable neighbours: the kernel then
    /// switches to another gateway, without a notification.
    pub(crate) fn refresh_lost(&self, netlink: &mut Netlink, lost: &BTreeSet<NextHop>) -> io::Result<()> {
        let links = self.inner().links.clone();
        let is_lost = |to, next: NextHop| next.neighbour != to && lost.contains(&next);
        let by_lost = self.held(|to, next| next.is_some_and(|next| is_lost(to, next)));
        self.ask_all(netlink, &links, by_lost)
    }

    /// Gateways that are unreachable. There are only a few gateways, even if there are many routes.
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

    fn ask(&self, netlink: &mut Netlink, links: &LinkTable, slot: u32, ends: Ends) -> io::Result<()> {
        let next = netlink.route(ends.0, ends.1)?;
        let hop = links.hop(netlink, next)?;
        // The slot may already belong to a newer route.
        if let Some(held) = self.inner().by_ends.get_mut(&ends).filter(|held| held.slot == slot) {
            held.next = next;
            self.write(slot, links.word(ends.1, next), next, hop);
        }
        Ok(())
    }

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

    /// Keeps neighbour entries fresh if only XDP uses them, because the kernel does not notice that use.
    pub(crate) fn use_neighbours(&self, netlink: &mut Netlink) -> io::Result<()> {
        let neighbours: BTreeSet<NextHop> = {
            let inner = self.inner();
            let next = inner.by_ends.values().filter_map(|held| held.next);
            next.filter(|next| inner.links.own.contains_key(&next.interface)).collect()
        };
        neighbours.into_iter().try_for_each(|neighbour| netlink.use_neighbour(neighbour))
    }

    pub(crate) fn len(&self) -> usize {
        self.inner().by_slot.len()
    }

    fn held(&self, which: impl Fn(IpAddr, Option<NextHop>) -> bool) -> Vec<HeldRoute> {
        let inner = self.inner();
        let held = inner.by_ends.iter().filter(|(ends, held)| which(ends.1, held.next));
        held.map(|(ends, held)| (held.slot, *ends, held.next)).collect()
    }

    /// If a reader finds the same interface before and after reading the gateway and link addresses, these
    /// belong to it.
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

    fn inner(&self) -> MutexGuard<'_, RouteCache> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        os::{fd::OwnedFd, unix::net::UnixDatagram},
        sync::{Arc, atomic::AtomicUsize},
        thread,
    };

    use turnpike_testkit::Dir;

    use super::*;

    const ENOBUFS: i32 = 105;
    const GET_ROUTE: u16 = 26;

    fn words(len: usize) -> MappedArray {
        let dir = Dir::new();
        let file = File::options().read(true).write(true).open(dir.file("words", [0; 4096]));
        MappedArray::map(file.unwrap(), len).unwrap()
    }

    /// Simulates a kernel without interfaces that answers the first `times` route queries with ENOBUFS; also
    /// returns a counter of queries.
    fn busy_kernel(times: usize) -> (Netlink, Arc<AtomicUsize>) {
        let (ours, its) = UnixDatagram::pair().unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        thread::spawn(move || {
            let mut question = [0; 4096];
            while let Ok(16..) = its.recv(&mut question) {
                let kind = u16::from_ne_bytes([question[4], question[5]]);
                let is_about_routes = kind == GET_ROUTE;
                let before = counted.fetch_add(usize::from(is_about_routes), Ordering::Relaxed);
                let code = if is_about_routes && before < times { -ENOBUFS } else { 0 };
                // NLMSG_ERROR with the sequence number of the request; 0 is success.
                let mut answer = [0; 20];
                answer[..4].copy_from_slice(&20_u32.to_ne_bytes());
                answer[4..6].copy_from_slice(&2_u16.to_ne_bytes());
                answer[8..12].copy_from_slice(&question[8..12]);
                answer[16..].copy_from_slice(&code.to_ne_bytes());
                its.send(&answer).unwrap();
            }
        });
        (Netlink::of(OwnedFd::from(ours)), asked)
    }

    #[test]
    fn queries_that_failed_with_enobufs_are_repeated() {
        let routes = Routes::new(words(4), words(4 * GATEWAY_WORDS), None).unwrap();
        let ends = |last| (IpAddr::from([127, 0, 0, 1]), IpAddr::from([127, 0, 0, last]));
        routes.inner().netlink = busy_kernel(1).0;
        let first = routes.hold(ends(2).0, ends(2).1).unwrap();
        assert!(routes.are_unknown());
        let second = routes.hold(ends(3).0, ends(3).1).unwrap();
        assert!(!routes.are_unknown(), "the second query succeeded, and the flag was cleared");
        // The error of one query does not stop the others.
        let (mut netlink, asked) = busy_kernel(1);
        let said = routes.refresh(&mut netlink, &BTreeSet::new());
        assert_eq!(said.unwrap_err().raw_os_error(), Some(ENOBUFS));
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        routes.refresh(&mut netlink, &BTreeSet::new()).unwrap();
        assert_eq!(asked.load(Ordering::Relaxed), 4);
        [first, second].into_iter().for_each(|slot| routes.give_back(slot));
        assert_eq!(routes.len(), 0);
    }
}
