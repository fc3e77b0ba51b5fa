//! Allocations on one relayed transport address: each peer's address belongs to one allocation.

use crate::common::{turn::AdditionalAddressFamily, *};
use proptest::prelude::*;

const PORT: SharedPort = SharedPort(0);
const OTHER_PORT: SharedPort = SharedPort(1);

fn relayed(SharedPort(number): SharedPort, family: Family) -> (SocketAddr, SharedPort) {
    let relayed = match family {
        Family::V4 => address(&format!("203.0.113.1:{}", 50_000 + number)),
        Family::V6 => address(&format!("[2001:db8::1]:{}", 50_000 + number)),
    };
    (relayed, SharedPort(2 * number + family as u16))
}

fn opened(port: SharedPort, family: Family) -> OpenResult {
    let (relayed, port) = relayed(port, family);
    OpenResult::Shared { relayed, port }
}

fn shares(world: &mut World, from: u16, port: SharedPort) -> (Credentials, RelayId) {
    world.client = client(from);
    let (relayed, port) = relayed(port, Family::V4);
    world.allocated_sharing(relayed, port)
}

fn ask(world: &mut World, from: u16, ask: &Ask) -> Option<u16> {
    world.client = client(from);
    world.ask(ask).code()
}

fn claimant(world: &mut World, port: SharedPort, peer: &str) -> Option<RelayId> {
    let peer: IpAddr = peer.parse().unwrap();
    let family = if peer.is_ipv4() { Family::V4 } else { Family::V6 };
    world.server.data.claimant(relayed(port, family).1, peer, 1)
}

#[test]
fn a_peers_datagrams_go_to_the_client_that_permitted_it() {
    let mut world = World::new();
    let (alice, first) = shares(&mut world, 1, PORT);
    let (bob, second) = shares(&mut world, 2, PORT);
    assert_eq!(ask(&mut world, 1, &Ask::permit("198.41.0.1:0").signed(&alice)), None);
    assert_eq!(ask(&mut world, 2, &Ask::bind(0x4000, "198.41.0.2:7000").signed(&bob)), None);
    for (peer, relay, to) in [("198.41.0.1", first, client(1)), ("198.41.0.2", second, client(2))] {
        assert_eq!(claimant(&mut world, PORT, peer), Some(relay));
        let sent = world.peer_sends(relay, &format!("{peer}:7000"), b"x");
        assert!(matches!(&sent, Outcome::ToClient { client, .. } if *client == to), "{sent:?}");
        let other = if relay == first { second } else { first };
        let sent = world.peer_sends(other, &format!("{peer}:7000"), b"x");
        assert_eq!(sent, Outcome::Drop(DropReason::NoPermission));
        let peer = address(&format!("{peer}:7000"));
        let unreachable = IcmpError { icmp_type: 3, code: 3, info: 0 };
        let verdict = world.server.data.from_icmp(world.now, relay, peer, unreachable);
        assert!(matches!(verdict, Verdict::Reply { client, .. } if client == to));
    }
    let before = world.dropped(DropReason::NoPermission);
    assert_eq!(claimant(&mut world, PORT, "198.41.0.3"), None);
    assert_eq!(world.server.data.claimant(PORT, "198.41.0.3".parse().unwrap(), 7), None);
    assert_eq!(world.dropped(DropReason::NoPermission), before + 8, "each datagram is counted");
    assert_eq!(claimant(&mut world, OTHER_PORT, "198.41.0.1"), None, "another socket");
}

#[test]
fn the_second_client_for_a_shared_peer_is_refused() {
    let mut world = World::new();
    let (alice, first) = shares(&mut world, 1, PORT);
    let (bob, _) = shares(&mut world, 2, PORT);
    let (carol, third) = shares(&mut world, 3, OTHER_PORT);
    assert_eq!(ask(&mut world, 1, &Ask::permit(PEER).signed(&alice)), None);
    // A permission covers all ports of the address, and a request is granted all its permissions or none.
    world.client = client(2);
    let refused = world.ask(&Ask::permit("198.41.0.9:0").peer("198.41.0.4:1").signed(&bob));
    assert_eq!(refused.code(), Some(508));
    assert_eq!(refused.get::<stun_types::attribute::ErrorCode>().reason(), "Peer Taken on Shared Port");
    assert_eq!(ask(&mut world, 2, &Ask::bind(0x4000, "198.41.0.4:7001").signed(&bob)), Some(508));
    assert_eq!(world.server.stats().shared_peer_limit, 2);
    assert_eq!(claimant(&mut world, PORT, "198.41.0.9"), None, "all permissions or none are installed");
    assert_eq!(claimant(&mut world, PORT, "198.41.0.4"), Some(first));
    // The owner can refresh the permission; on other sockets the peer is free.
    assert_eq!(ask(&mut world, 1, &Ask::bind(0x4000, PEER).signed(&alice)), None);
    assert_eq!(ask(&mut world, 3, &Ask::permit(PEER).signed(&carol)), None);
    assert_eq!(claimant(&mut world, OTHER_PORT, "198.41.0.4"), Some(third));
    world.client = client(4);
    let (dave, own) = world.allocated();
    assert_eq!(ask(&mut world, 4, &Ask::permit(PEER).signed(&dave)), None);
    assert!(world.peer_sends(own, PEER, b"x").goes_to_client());
}

#[test]
fn a_shared_peer_is_free_after_its_permission_and_channel_end() {
    let mut world = World::with(ServerConfig { channels_permit: false, ..config() });
    let (alice, first) = shares(&mut world, 1, PORT);
    let (bob, second) = shares(&mut world, 2, PORT);
    assert_eq!(ask(&mut world, 1, &Ask::bind(0x4000, PEER).signed(&alice)), None);
    assert_eq!(ask(&mut world, 1, &Ask::refresh(3600).signed(&alice)), None);
    assert_eq!(ask(&mut world, 2, &Ask::refresh(3600).signed(&bob)), None);
    world.sleep(301);
    // The permission has expired, but alice still sends on the channel, and the peer's data goes to her.
    assert_eq!(ask(&mut world, 2, &Ask::permit(PEER).signed(&bob)), Some(508));
    assert_eq!(claimant(&mut world, PORT, "198.41.0.4"), Some(first));
    assert_eq!(world.peer_sends(first, PEER, b"x"), Outcome::Drop(DropReason::NoPermission));
    world.now.ms += 300_000;
    assert_eq!(ask(&mut world, 2, &Ask::permit(PEER).signed(&bob)), None);
    assert_eq!(claimant(&mut world, PORT, "198.41.0.4"), Some(second));
    assert_eq!(ask(&mut world, 1, &Ask::bind(0x4000, PEER).signed(&alice)), Some(508));
    assert_eq!(ask(&mut world, 2, &Ask::refresh(0).signed(&bob)), None);
    assert_eq!(claimant(&mut world, PORT, "198.41.0.4"), None);
    assert_eq!(ask(&mut world, 1, &Ask::permit(PEER).signed(&alice)), None);
    world.now.ms += 3_600_000;
    let (carol, third) = shares(&mut world, 3, PORT);
    assert_eq!(ask(&mut world, 3, &Ask::permit(PEER).signed(&carol)), None);
    assert_eq!(claimant(&mut world, PORT, "198.41.0.4"), Some(third));
    let ended = world.effects();
    assert!(
        matches!(&ended[..], [Effect::Closed { reason: ClosedReason::Expired, allocation, .. }] if *allocation == first.allocation),
        "{ended:?}"
    );
}

#[test]
fn new_peer_rules_free_refused_shared_peers() {
    let mut world = World::new();
    let (alice, _) = shares(&mut world, 1, PORT);
    assert_eq!(ask(&mut world, 1, &Ask::bind(0x4000, PEER).signed(&alice)), None);
    let deny = PeerRules { deny: vec!["198.41.0.0/24".parse().unwrap()], ..PeerRules::default() };
    world.server.reconfigure(world.now, Arc::new(ServerConfig { peers: deny, ..config() }));
    assert_eq!(claimant(&mut world, PORT, "198.41.0.4"), None);
    world.server.reconfigure(world.now, Arc::new(config()));
    let (bob, second) = shares(&mut world, 2, PORT);
    assert_eq!(ask(&mut world, 2, &Ask::permit(PEER).signed(&bob)), None);
    assert_eq!(claimant(&mut world, PORT, "198.41.0.4"), Some(second));
}

#[test]
fn each_family_of_an_allocation_is_shared_separately() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let also = AdditionalAddressFamily::new(AddressFamily::IPV6);
    let request = world.feed(&Ask::allocate().with(&also).signed(&alice).bytes()).opens();
    let wishes = (request.first.port, request.second.map(|second| second.port));
    assert_eq!(wishes, (PortRequest::Any, Some(PortRequest::Any)));
    let own = OpenResult::Opened { relayed: address("203.0.113.1:50100") };
    world.opened(request.allocation, own, Some(opened(PORT, Family::V6))).success();
    let first = RelayId { family: Family::V6, ..world.last_opened() };
    world.ask(&Ask::permit(PEER).peer(PEER_V6).signed(&alice)).success();
    assert_eq!(claimant(&mut world, PORT, "2606:4700::1"), Some(first));
    assert_eq!(claimant(&mut world, PORT, "198.41.0.4"), None, "her IPv4 port is not shared");
    world.ask(&Ask::refresh(0).raw(0x0017, &[2, 0, 0, 0]).signed(&alice)).success();
    assert_eq!(claimant(&mut world, PORT, "2606:4700::1"), None);
    let v4 = RelayId { family: Family::V4, ..first };
    assert!(world.peer_sends(v4, PEER, b"x").goes_to_client());
}

#[test]
fn a_mobile_allocation_requests_unshared_ports() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let also = AdditionalAddressFamily::new(AddressFamily::IPV6);
    let mobile = Ask::allocate().with(&also).raw(TICKET, &[]).signed(&alice);
    let request = world.feed(&mobile.bytes()).opens();
    let wishes = (request.first.port, request.second.map(|second| second.port));
    assert_eq!(wishes, (PortRequest::Own, Some(PortRequest::Own)));
}

/// An allocation that ended while its socket was opening returns a shared socket too.
#[test]
fn a_shared_port_of_an_ended_allocation_is_returned() {
    let mut world = World::new();
    let request = world.feed_as("alice", Ask::allocate()).opens();
    world.server.close_all(world.now, ClosedReason::Administrator);
    world.all_effects();
    let verdict = world.server.opened(world.now, request.allocation, opened(PORT, Family::V4), None);
    assert!(matches!(verdict, Verdict::Drop(Some(DropReason::StaleRelay))));
    let relay = RelayId { allocation: request.allocation, family: Family::V4 };
    assert_eq!(world.all_effects(), [Effect::RelayClosed { relay }]);
}

#[test]
fn a_restored_allocation_keeps_its_shared_peers() {
    let (mut here, mut there) = (World::new(), World::new());
    let (alice, first) = shares(&mut here, 1, PORT);
    assert_eq!(ask(&mut here, 1, &Ask::bind(0x4000, PEER).signed(&alice)), None);
    let text = serde_json::to_string(&here.server.snapshot(here.now, first.allocation).unwrap()).unwrap();
    let allocation = there
        .server
        .restore(there.now, serde_json::from_str(&text).unwrap(), Link(0))
        .expect("below all quotas");
    assert_eq!(claimant(&mut there, PORT, "198.41.0.4"), Some(RelayId { allocation, ..first }));
    let (bob, _) = shares(&mut there, 2, PORT);
    assert_eq!(ask(&mut there, 2, &Ask::permit(PEER).signed(&bob)), Some(508));
    there.server.close_one(there.now, allocation, ClosedReason::Administrator);
    assert_eq!(ask(&mut there, 2, &Ask::permit(PEER).signed(&bob)), None);
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(bool),
    Refresh(u32),
    Permit(u8),
    Bind(u8, u8),
    Client(u8),
    Sleep(u16),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => any::<bool>().prop_map(Step::Allocate),
        1 => prop_oneof![Just(0), Just(600), Just(3000)].prop_map(Step::Refresh),
        5 => (0..6_u8).prop_map(Step::Permit),
        5 => (0..4_u8, 0..6_u8).prop_map(|(n, p)| Step::Bind(n, p)),
        4 => (0..5_u8).prop_map(Step::Client),
        2 => (1..400_u16).prop_map(Step::Sleep),
    ];
    prop::collection::vec(step, 1..80)
}

#[derive(Default)]
struct Holders(BTreeMap<u32, Holder>);

struct Holder {
    relay: RelayId,
    port: SharedPort,
    permissions: BTreeMap<IpAddr, u64>,
    channels: BTreeMap<u16, IpAddr>,
}

impl Holders {
    fn hear(&mut self, effect: &Effect) {
        match effect {
            Effect::Opened { allocation, relayed, .. } => {
                let holder = Holder {
                    relay: RelayId { allocation: *allocation, family: Family::V4 },
                    port: SharedPort(relayed.0.port() - 50_000),
                    permissions: BTreeMap::new(),
                    channels: BTreeMap::new(),
                };
                assert!(self.0.insert(allocation.index, holder).is_none());
            }
            Effect::Permitted { allocation, peer, expires_ms, .. } => {
                self.0.get_mut(&allocation.index).unwrap().permissions.insert(*peer, *expires_ms);
            }
            Effect::PermissionEnded { allocation, peer } => {
                self.0.get_mut(&allocation.index).unwrap().permissions.remove(peer);
            }
            Effect::Bound { allocation, number, peer, .. } => {
                self.0.get_mut(&allocation.index).unwrap().channels.insert(number.get(), peer.ip());
            }
            Effect::Unbound { allocation, number, .. } => {
                self.0.get_mut(&allocation.index).unwrap().channels.remove(&number.get());
            }
            Effect::Closed { allocation, .. } => _ = self.0.remove(&allocation.index),
            _ => {}
        }
    }

    fn of(&self, port: SharedPort, peer: IpAddr) -> Vec<RelayId> {
        let holds = |holder: &&Holder| {
            holder.port == port
                && (holder.permissions.contains_key(&peer) || holder.channels.values().any(|ip| *ip == peer))
        };
        self.0.values().filter(holds).map(|holder| holder.relay).collect()
    }
}

proptest! {
    #![proptest_config(crate::kept_seeds())]

    #[test]
    fn a_peer_of_a_shared_port_has_at_most_one_client(steps in steps()) {
        let mut world = World::new();
        let mut holders = Holders::default();
        for step in steps {
            let alice = world.credentials("alice", Scheme::Md5);
            match step {
                Step::Allocate(other) => {
                    let port = if other { OTHER_PORT } else { PORT };
                    if let Outcome::Open(request) = world.feed(&Ask::allocate().signed(&alice).bytes()) {
                        world.opened(request.allocation, opened(port, Family::V4), None);
                    }
                }
                Step::Refresh(seconds) => _ = world.ask(&Ask::refresh(seconds).signed(&alice)),
                Step::Permit(n) => {
                    world.ask(&Ask::permit(&format!("198.41.0.{}:0", n + 1)).signed(&alice));
                }
                Step::Bind(number, n) => {
                    let peer = format!("198.41.0.{}:{}", n + 1, 7000 + u16::from(number));
                    world.ask(&Ask::bind(0x4000 + u16::from(number), &peer).signed(&alice));
                }
                Step::Client(n) => world.client = client(40_000 + u16::from(n)),
                Step::Sleep(seconds) => world.sleep(seconds.into()),
            }
            for effect in world.all_effects() {
                holders.hear(&effect);
            }
            for port in [PORT, OTHER_PORT] {
                for n in 1..=6 {
                    let peer = IpAddr::from([198, 41, 0, n]);
                    let held = holders.of(port, peer);
                    prop_assert!(held.len() <= 1, "{} is held by {:?}", peer, held);
                    prop_assert_eq!(world.server.data.claimant(relayed(port, Family::V4).1, peer, 1), held.first().copied());
                }
            }
        }
    }
}
