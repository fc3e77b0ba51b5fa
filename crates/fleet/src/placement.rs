//! Choice of the node for a new allocation. All loads, including our own, are those of the last heartbeat:
//! otherwise, a node would consider itself busy only because the others' figures are older.
//!
//! ```text
//!  share of new clients that is redirected
//!    1 ┤              ┌───────
//!      │            ╱
//!    0 ┼──────────╱───────────▶ own load over the mean of the zone
//!             +1 %   +4 %
//! ```
//!
//! Redirects go only to nodes below the mean that have missed no heartbeat, and those do not redirect, so
//! there are no redirect loops. The less busy of two random nodes gets the client (power of two choices), so
//! that the best one does not get all of them. Clients redirected since the last heartbeat are added to a
//! node's load, multiplied by the number of redirecting nodes.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use hashbrown::HashMap;
use turnpike_turn::server::Transport;

use crate::{
    members::{FleetMember, FleetMembers},
    node::Card,
};

/// Excess over the mean load at which redirects begin, and excess at which all clients are redirected.
const BEGIN: f64 = 0.01;
const END: f64 = 0.04;
/// Load below which a node keeps its clients, because a redirect costs them time.
const WORTH: f64 = 0.2;
/// Load below which a zone keeps its clients.
const ZONE_WORTH: f64 = 0.5;

/// Maximum load at which a node takes clients from nodes that are down to their reserve, to prevent redirect
/// loops.
const ROOMY: f64 = 0.95;

const TRANSPORTS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    None,
    /// This node is full or accepts no new clients.
    Room,
    /// The remaining room is for clients that do not follow redirects.
    Reserve,
}

#[derive(Clone, Debug)]
pub struct RedirectTarget {
    pub card: Arc<Card>,
    pub number: u16,
    /// Address of the client's own family.
    pub address: SocketAddr,
    /// Address of the other family, if the node has one.
    pub second: Option<SocketAddr>,
}

/// Snapshot of all nodes at the last heartbeat, from the point of view of a zone.
#[derive(Debug, Default)]
pub struct FleetView {
    nodes: Vec<Seen>,
    by_number: HashMap<u16, u32>,
    /// Mean load of the nodes that accept redirects, in this zone and in all zones.
    near_mean: f64,
    mean: f64,
    /// Number of nodes that redirect within the zone, and number of nodes that redirect to other zones.
    near_senders: u32,
    senders: u32,
    groups: [[NodeGroup; 2]; TRANSPORTS],
}

#[derive(Debug)]
struct Seen {
    card: Arc<Card>,
    number: u16,
    busy: f64,
    /// Load that one more allocation adds.
    step: f64,
    takes: bool,
    /// True if the node accepts clients that could also be served elsewhere.
    invites: bool,
}

/// Indexes of nodes that serve a transport and a family.
#[derive(Debug, Default)]
struct NodeGroup {
    near: Vec<u32>,
    far: Vec<u32>,
    /// Indexes of those nodes that are below the mean.
    near_below: Vec<u32>,
    far_below: Vec<u32>,
}

/// Clients that this node has redirected to each other node since the snapshot.
#[derive(Debug, Default)]
pub struct Charges(Vec<AtomicU32>);

impl FleetView {
    #[must_use]
    pub fn new(zone: &str, members: &FleetMembers) -> Self {
        let mut view = Self::default();
        for (_, member) in members.iter() {
            let Some(seen) = Seen::new(member) else { continue };
            let place = u32::try_from(view.nodes.len()).unwrap_or(u32::MAX);
            view.by_number.insert(seen.number, place);
            view.nodes.push(seen);
        }
        view.mean = mean(view.nodes.iter().filter(|seen| seen.invites).map(|seen| seen.busy));
        let zones = zone_means(&view.nodes);
        let zone_mean = |zone: &str| zones.get(zone).copied().unwrap_or_default();
        view.near_mean = zone_mean(zone);
        let (near_mean, mean) = (view.near_mean, view.mean);
        let is_near = |seen: &&Seen| seen.card.zone == zone;
        let sends_near = |seen: &&Seen| near_share(seen.busy, near_mean) > 0.0;
        let sends_far = |seen: &&Seen| far_share(seen.busy, zone_mean(&seen.card.zone), mean) > 0.0;
        view.near_senders = count(view.nodes.iter().filter(is_near).filter(sends_near));
        view.senders = count(view.nodes.iter().filter(sends_far));
        for (place, seen) in (0..).zip(&view.nodes) {
            if seen.takes {
                let near = seen.card.zone == zone;
                let below = seen.invites && seen.busy < if near { near_mean } else { mean };
                for entrance in &seen.card.entrances {
                    let family = usize::from(entrance.address.is_ipv6());
                    view.groups[entrance.transport as usize][family].put(place, near, below);
                }
            }
        }
        view
    }

    #[must_use]
    pub fn charges(&self) -> Charges {
        Charges(self.nodes.iter().map(|_| AtomicU32::new(0)).collect())
    }

    /// Converts `charges`, which are indexed by the nodes of the view `before`, to the indexes of this view.
    #[must_use]
    pub fn charges_after(&self, before: &Self, charges: &Charges) -> Charges {
        let sent = |seen: &Seen| {
            let place = before.by_number.get(&seen.number).and_then(|place| charges.0.get(*place as usize));
            AtomicU32::new(place.map_or(0, |sent| sent.load(Ordering::Relaxed)))
        };
        Charges(self.nodes.iter().map(sent).collect())
    }

    /// Target for a client of node `own` with this transport and family; `None` if the client should stay, or
    /// if no node can take it. `dice` are random numbers.
    #[must_use]
    pub fn choose(
        &self,
        own: u16,
        charges: &Charges,
        need: Need,
        (transport, v4): (Transport, bool),
        dice: [u64; 3],
    ) -> Option<RedirectTarget> {
        let group = &self.groups[transport as usize][usize::from(!v4)];
        let [whether, one, other] = dice;
        let pair = |places: &[u32], senders: u32| self.better(own, charges, places, senders, [one, other]);
        let place = match need {
            Need::Room | Need::Reserve => {
                let most = if need == Need::Room { 1.0 } else { ROOMY };
                let fits = |(place, _): &(u32, f64)| self.estimate(charges, *place, 1) < most;
                let any = |places: &[u32]| {
                    let drawn = pair(places, 1).filter(fits);
                    drawn.or_else(|| self.least(own, charges, places).filter(fits))
                };
                any(&group.near).or_else(|| any(&group.far))?.0
            }
            Need::None => {
                let busy = self.seen(own)?.busy;
                let far = far_share(busy, self.near_mean, self.mean);
                let near = near_share(busy, self.near_mean);
                let at = fraction(whether);
                let (places, senders, mean) = if at < far {
                    (&group.far_below, self.senders, self.mean)
                } else if at - far < (1.0 - far) * near {
                    (&group.near_below, self.near_senders, self.near_mean)
                } else {
                    return None;
                };
                let (place, estimate) = pair(places, senders.max(1))?;
                // The redirects since the last heartbeat have already brought the target up to the mean.
                if estimate > mean * (1.0 + BEGIN) {
                    return None;
                }
                place
            }
        };
        charges.0.get(place as usize)?.fetch_add(1, Ordering::Relaxed);
        self.target(place, transport, v4)
    }

    pub fn charge(&self, charges: &Charges, number: u16, clients: u32) {
        let place = self.by_number.get(&number).and_then(|place| charges.0.get(*place as usize));
        if let Some(sent) = place {
            sent.fetch_add(clients, Ordering::Relaxed);
        }
    }

    #[must_use]
    pub fn node(&self, number: u16, transport: Transport, v4: bool) -> Option<RedirectTarget> {
        self.target(*self.by_number.get(&number)?, transport, v4)
    }

    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    fn seen(&self, number: u16) -> Option<&Seen> {
        self.nodes.get(*self.by_number.get(&number)? as usize)
    }

    /// The less busy of two random nodes and its load, or the only node.
    fn better(
        &self,
        own: u16,
        charges: &Charges,
        places: &[u32],
        senders: u32,
        dice: [u64; 2],
    ) -> Option<(u32, f64)> {
        let own = self.by_number.get(&own).copied();
        let drawn = dice.map(|dice| {
            let at = usize::try_from(dice % u64::try_from(places.len().max(1)).ok()?).ok()?;
            // If the random choice is this node itself, take the next one.
            let place = *places.get(at)?;
            let place = if Some(place) == own { places[(at + 1) % places.len()] } else { place };
            (Some(place) != own).then(|| (place, self.estimate(charges, place, senders)))
        });
        match drawn {
            [Some(one), Some(other)] => Some(if other.1 < one.1 { other } else { one }),
            [one, other] => one.or(other),
        }
    }

    fn least(&self, own: u16, charges: &Charges, places: &[u32]) -> Option<(u32, f64)> {
        let own = self.by_number.get(&own).copied();
        let others = places.iter().copied().filter(|place| Some(*place) != own);
        let estimated = others.map(|place| (place, self.estimate(charges, place, 1)));
        estimated.min_by(|one, other| one.1.total_cmp(&other.1))
    }

    /// Load of a node, including redirects since the last heartbeat: this node's, multiplied by the number of
    /// redirecting nodes (`senders`, including this one).
    fn estimate(&self, charges: &Charges, place: u32, senders: u32) -> f64 {
        let place = place as usize;
        let sent = charges.0.get(place).map_or(0, |sent| sent.load(Ordering::Relaxed));
        self.nodes.get(place).map_or(1.0, |seen| seen.busy + f64::from(sent) * f64::from(senders) * seen.step)
    }

    fn target(&self, place: u32, transport: Transport, v4: bool) -> Option<RedirectTarget> {
        let Seen { card, number, .. } = self.nodes.get(place as usize)?;
        let of = |v4: bool| {
            let mut entrances = card.entrances.iter();
            let found = entrances.find(|it| it.transport == transport && it.address.is_ipv4() == v4);
            found.map(|entrance| entrance.address)
        };
        Some(RedirectTarget { card: Arc::clone(card), number: *number, address: of(v4)?, second: of(!v4) })
    }
}

impl Seen {
    fn new(member: &FleetMember) -> Option<Self> {
        let card = Arc::clone(member.card.as_ref()?);
        let load = &member.beat.load;
        let has_room = !member.beat.draining && !load.is_full();
        Some(Self {
            card,
            number: member.beat.number,
            busy: load.busy(),
            step: 1.0 / f64::from(load.most_allocations.max(1)),
            takes: has_room && member.is_heard(),
            invites: has_room && member.is_on_time(),
        })
    }
}

impl NodeGroup {
    fn put(&mut self, place: u32, near: bool, below: bool) {
        let (all, of_below) =
            if near { (&mut self.near, &mut self.near_below) } else { (&mut self.far, &mut self.far_below) };
        // A node with two addresses of the same transport and family is listed once.
        if all.last() != Some(&place) {
            all.push(place);
            if below {
                of_below.push(place);
            }
        }
    }
}

/// Share of a node's clients that are redirected within its zone.
fn near_share(busy: f64, mean: f64) -> f64 {
    if busy < WORTH { 0.0 } else { ramp(busy, mean) }
}

/// Share of a node's clients that are redirected to another zone, because its zone is busier. Nodes below the
/// mean of their zone redirect no clients: the other nodes in the zone redirect to them.
fn far_share(busy: f64, zone_mean: f64, mean: f64) -> f64 {
    if zone_mean < ZONE_WORTH || busy < zone_mean { 0.0 } else { ramp(zone_mean, mean) }
}

fn ramp(busy: f64, mean: f64) -> f64 {
    if mean <= 0.0 {
        return 0.0;
    }
    ((busy / mean - 1.0 - BEGIN) / (END - BEGIN)).clamp(0.0, 1.0)
}

fn zone_means(nodes: &[Seen]) -> BTreeMap<&str, f64> {
    let mut sums: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for seen in nodes.iter().filter(|seen| seen.invites) {
        let (sum, count) = sums.entry(&*seen.card.zone).or_default();
        (*sum, *count) = (*sum + seen.busy, *count + 1.0);
    }
    sums.into_iter().map(|(zone, (sum, count))| (zone, sum / count)).collect()
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0_f64), |(sum, count), value| (sum + value, count + 1.0));
    if count > 0.0 { sum / count } else { 0.0 }
}

fn count<T>(items: impl Iterator<Item = T>) -> u32 {
    u32::try_from(items.count()).unwrap_or(u32::MAX)
}

fn fraction(dice: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a fraction has 53 bits")]
    let fraction = (dice >> 11) as f64 / (1_u64 << 53) as f64;
    fraction
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        members::NodeRecord,
        node::{Beat, Entrance, Load, NodeName},
    };

    const UDP: (Transport, bool) = (Transport::Udp, true);

    struct Node {
        name: &'static str,
        zone: &'static str,
        allocations: u32,
        draining: bool,
        entrances: Vec<Entrance>,
    }

    fn node(name: &'static str, zone: &'static str, allocations: u32) -> Node {
        let number = name.bytes().map(u16::from).sum::<u16>();
        let address = SocketAddr::from(([10, 0, 0, u8::try_from(number % 200).unwrap()], 3478));
        let entrances = vec![Entrance { transport: Transport::Udp, address }];
        Node { name, zone, allocations, draining: false, entrances }
    }

    fn number(name: &str) -> u16 {
        name.bytes().map(u16::from).sum()
    }

    fn view(zone: &str, nodes: &[Node]) -> FleetView {
        view_without(zone, nodes, "")
    }

    /// [`view`] after node `late` has missed two heartbeats.
    fn view_without(zone: &str, nodes: &[Node], late: &str) -> FleetView {
        let mut members = FleetMembers::default();
        let record = |node: &Node, stamp_ms| {
            let load = Load { allocations: node.allocations, most_allocations: 1000, ..Load::default() };
            let beat = Beat { number: number(node.name), incarnation: 1, draining: node.draining, load };
            NodeRecord { name: node.name.parse().unwrap(), stamp_ms, beat }
        };
        for now in [0, 2000] {
            let stamp = |node: &Node| if node.name == late { 0 } else { now };
            members.look(now, now, u64::MAX, nodes.iter().map(|node| record(node, stamp(node))).collect());
        }
        for node in nodes {
            members.put_card(Card {
                name: node.name.parse::<NodeName>().unwrap(),
                incarnation: 1,
                zone: node.zone.to_owned(),
                version: String::new(),
                entrances: node.entrances.clone(),
                domain: None,
            });
        }
        FleetView::new(zone, &members)
    }

    fn dice(seed: &mut u64) -> [u64; 3] {
        [0; 3].map(|_| {
            *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (*seed ^ *seed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            mixed ^ mixed >> 31
        })
    }

    /// Targets of 1,000 clients of a node; those that stay are counted for the node itself.
    fn sent(view: &FleetView, own: &str, need: Need) -> HashMap<String, u32> {
        let (charges, mut seed, mut counts) = (view.charges(), 7, HashMap::new());
        for _ in 0..1000 {
            let target = view.choose(number(own), &charges, need, UDP, dice(&mut seed));
            let to = target.map_or_else(|| own.to_owned(), |target| target.card.name.to_string());
            *counts.entry(to).or_default() += 1;
        }
        counts
    }

    fn only(name: &str) -> HashMap<String, u32> {
        [(name.to_owned(), 1000)].into()
    }

    #[test]
    fn slightly_busier_node_keeps_its_clients() {
        let alike = view("", &[node("a", "", 503), node("b", "", 500), node("c", "", 497)]);
        assert_eq!(sent(&alike, "a", Need::None), only("a"));
        let idle = view("", &[node("a", "", 190), node("b", "", 0)]);
        assert_eq!(sent(&idle, "a", Need::None), only("a"), "not worth a round trip");
        let alone = view("", &[node("a", "", 900)]);
        assert_eq!(sent(&alone, "a", Need::None), only("a"));
    }

    #[test]
    fn busy_node_redirects_to_nodes_below_the_mean_which_do_not_redirect() {
        let nodes = [node("a", "", 800), node("b", "", 300), node("c", "", 400), node("d", "", 700)];
        let view = view("", &nodes);
        let counts = sent(&view, "a", Need::None);
        assert!(!counts.contains_key("d"), "{counts:?}");
        let (b, c) = (counts["b"], counts["c"]);
        // Two nodes redirect, so each fills half of the gap up to the mean of 550.
        assert!((110..=140).contains(&b) && (60..=90).contains(&c), "{counts:?}");
        for own in ["b", "c"] {
            assert_eq!(sent(&view, own, Need::None), only(own));
        }
    }

    #[test]
    fn late_node_gets_only_clients_without_room_elsewhere() {
        let nodes = [node("a", "", 800), node("b", "", 300), node("c", "", 795)];
        let late = view_without("", &nodes, "b");
        assert_eq!(sent(&late, "a", Need::None), only("a"), "hardly busier than those on time");
        assert!(sent(&view("", &nodes), "a", Need::None)["b"] > 100);
        let full = [node("a", "", 1000), node("b", "", 300), node("c", "", 1000)];
        assert!(sent(&view_without("", &full, "b"), "a", Need::Room)["b"] >= 699);
    }

    #[test]
    fn redirected_share_grows_with_the_difference() {
        let with = |allocations| view("", &[node("a", "", allocations), node("b", "", 1000 - allocations)]);
        let went = |allocations| {
            let view = with(allocations);
            let mut seed = 1;
            // New charges for each client, so that earlier redirects do not count.
            let goes = |_: &u32| {
                view.choose(number("a"), &view.charges(), Need::None, UDP, dice(&mut seed)).is_some()
            };
            (0..1000).filter(goes).count()
        };
        assert_eq!(went(504), 0);
        assert!((350..650).contains(&went(512)), "{}", went(512));
        assert_eq!(went(560), 1000);
    }

    #[test]
    fn full_node_redirects_all_clients_to_nodes_with_room() {
        let mut nodes = vec![node("a", "", 1000), node("b", "", 999), node("c", "", 500), node("d", "", 10)];
        nodes[3].draining = true;
        let counts = sent(&view("", &nodes), "a", Need::Room);
        assert_eq!((counts.get("b").copied().unwrap_or(1), counts.get("d")), (1, None), "{counts:?}");
        assert_eq!(counts["c"], 500, "no more clients than fit");
        assert_eq!(counts["a"], 1000 - 500 - counts.get("b").copied().unwrap_or_default());
    }

    #[test]
    fn own_zone_comes_first_unless_it_is_too_busy() {
        let with = |west| {
            view(
                "west",
                &[
                    node("a", "west", west),
                    node("b", "west", west),
                    node("c", "east", 100),
                    node("d", "east", 200),
                ],
            )
        };
        assert_eq!(sent(&with(400), "a", Need::None), only("a"), "the zone is less than half busy");
        let counts = sent(&with(800), "a", Need::None);
        assert!(counts["c"] > counts["d"] && counts["d"] > 50 && !counts.contains_key("b"), "{counts:?}");
        let counts = sent(&with(400), "a", Need::Room);
        assert!((599..=601).contains(&counts["b"]), "the zone is filled first: {counts:?}");
        assert_eq!(counts["b"] + counts["c"] + counts["d"], 1000);
        let full = view("west", &[node("a", "west", 1000), node("b", "west", 1000), node("c", "east", 100)]);
        assert!(sent(&full, "a", Need::Room)["c"] >= 899);
    }

    #[test]
    fn target_matches_the_clients_transport_and_family() {
        let mut nodes = vec![node("a", "", 900), node("b", "", 100)];
        let all = ["udp://10.0.0.9:3478", "udp://[2001:db8::9]:3478", "tls://[2001:db8::9]:5349"];
        nodes[1].entrances = all.map(|text| text.parse().unwrap()).into();
        let view = view("", &nodes);
        let to = |transport, v4| {
            let charges = view.charges();
            let target = view.choose(number("a"), &charges, Need::Room, (transport, v4), [0; 3])?;
            assert_eq!(target.number, number("b"));
            Some((target.address.to_string(), target.second.map(|second| second.to_string())))
        };
        let (four, six) = ("10.0.0.9:3478".to_owned(), "[2001:db8::9]:3478".to_owned());
        assert_eq!(to(Transport::Udp, true), Some((four.clone(), Some(six.clone()))));
        assert_eq!(to(Transport::Udp, false), Some((six, Some(four))));
        assert_eq!(to(Transport::Tls, false), Some(("[2001:db8::9]:5349".to_owned(), None)));
        assert_eq!((to(Transport::Tls, true), to(Transport::Tcp, true)), (None, None));
        assert_eq!(view.node(number("b"), Transport::Tls, false).unwrap().card.name.as_str(), "b");
        assert!(view.node(77, Transport::Udp, true).is_none());
    }

    #[test]
    fn charges_are_kept_when_a_node_leaves() {
        let before = view("", &[node("a", "", 900), node("b", "", 500), node("c", "", 0)]);
        let charges = before.charges();
        before.charge(&charges, number("b"), 300);
        let after = view("", &[node("a", "", 900), node("b", "", 500)]);
        let goes = |charges: &Charges| after.choose(number("a"), charges, Need::None, UDP, [0; 3]).is_some();
        assert!(goes(&after.charges()) && !goes(&after.charges_after(&before, &charges)));
    }

    /// There is one idle node among many busy ones that redirect: the redirects of one interval must not fill
    /// it twice.
    #[test]
    fn many_redirecting_nodes_do_not_overload_one() {
        let names: Vec<&'static str> =
            (0..20).map(|number| &*format!("n{}", "x".repeat(number + 1)).leak()).collect();
        let mut nodes: Vec<Node> = names.iter().map(|name| node(name, "", 900)).collect();
        nodes.push(node("idle", "", 0));
        let view = view("", &nodes);
        let mut arrived = 0;
        let mut seed = 3;
        for name in &names {
            let charges = view.charges();
            let goes =
                |_: &u32| view.choose(number(name), &charges, Need::None, UDP, dice(&mut seed)).is_some();
            arrived += (0..500).filter(goes).count();
        }
        // 20 nodes with 500 clients each: without damping, several thousand would arrive.
        assert!((500..=1000).contains(&arrived), "{arrived}");
    }
}
