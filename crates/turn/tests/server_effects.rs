//! Each made, renewed and ended session, permission and channel is told, in order: who keeps a table of them from what is told has the
//! server's own.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use crate::common::*;
use proptest::prelude::*;
use turn::AdditionalAddressFamily;
use turnpike_turn::server::{
    AllocationId, Client, ClosedReason, DropReason, Effect, Family, Link, PeerRules, RelayId, ServerConfig,
    Verdict,
};
use turnpike_turn::wire::channel_data::ChannelNumber;

const OTHER: &str = "198.41.0.5:7000";

#[test]
fn what_is_made_renewed_and_ended_is_told_once() {
    let mut world = World::with(ServerConfig { channels_permit: false, ..config() });
    let (alice, relay) = world.allocated();
    let (allocation, start) = (relay.allocation, world.now.ms);
    let (peer, number) = (address(PEER), ChannelNumber::MIN);
    let permitted = |at: u64, renewed| Effect::Permitted {
        allocation,
        peer: peer.ip(),
        expires_ms: start + at + 300_000,
        renewed,
    };
    let bound = |at: u64, renewed| Effect::Bound {
        allocation,
        number,
        peer,
        at: peer,
        expires_ms: start + at + 600_000,
        renewed,
    };

    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert_eq!(world.all_effects(), [permitted(0, false), bound(0, false)]);
    world.sleep(100);
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    world.ask(&Ask::refresh(1200).signed(&alice)).success();
    let renewed = Effect::Renewed { allocation, family: None, expires_ms: start + 1_300_000 };
    assert_eq!(world.all_effects(), [permitted(100_000, true), renewed]);
    // The permission ends before the channel, and comes back with it.
    world.sleep(300);
    assert_eq!(world.all_effects(), [Effect::PermissionEnded { allocation, peer: peer.ip() }]);
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert_eq!(world.all_effects(), [permitted(400_000, false), bound(400_000, true)]);
    world.sleep(300);
    world.all_effects();
    world.sleep(300);
    assert_eq!(world.all_effects(), [Effect::Unbound { allocation, number, peer }]);
    world.sleep(300);
    assert!(matches!(
        world.all_effects()[..],
        [Effect::Closed { reason: ClosedReason::Expired, lived_ms: 1_300_000, .. }]
    ));
}

#[test]
fn the_first_datagram_on_a_channel_is_told_once_to_who_wants_to_know() {
    let mut world = World::new();
    world.server.tell_first_use();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::bind(0x4001, OTHER).signed(&alice)).success();
    world.all_effects();
    let used =
        |number| Effect::Used { allocation: relay.allocation, number: ChannelNumber::new(number).unwrap() };

    // Neither an indication is one, nor what is not relayed.
    assert!(matches!(world.feed(&Ask::send(PEER, b"x")), Outcome::ToPeer { .. }));
    assert_eq!(world.feed(&channel_data(0x4002, b"x")), Outcome::Drop(DropReason::UnboundChannel));
    assert_eq!(world.all_effects(), []);
    // The client's on the one, the peer's on the other.
    assert!(matches!(world.feed(&channel_data(0x4000, b"x")), Outcome::ToPeer { .. }));
    assert!(matches!(world.peer_sends(relay, OTHER, b"x"), Outcome::ToClient { .. }));
    assert_eq!(world.all_effects(), [used(0x4000), used(0x4001)]);
    let both_ways = |world: &mut World| {
        for (number, peer) in [(0x4000, PEER), (0x4001, OTHER)] {
            assert!(matches!(world.feed(&channel_data(number, b"x")), Outcome::ToPeer { .. }));
            assert!(matches!(world.peer_sends(relay, peer, b"x"), Outcome::ToClient { .. }));
        }
        let mut effects = world.all_effects();
        effects.retain(|effect| matches!(effect, Effect::Used { .. }));
        effects
    };
    assert_eq!(both_ways(&mut world), []);
    // A channel that is renewed is the same; one that is bound again is not.
    world.ask(&Ask::refresh(1200).signed(&alice)).success();
    world.sleep(250);
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::permit(OTHER).signed(&alice)).success();
    assert_eq!(both_ways(&mut world), []);
    world.sleep(350);
    let alice = world.credentials("alice", Scheme::Md5);
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::bind(0x4001, OTHER).signed(&alice)).success();
    assert_eq!(both_ways(&mut world), [used(0x4001)]);
}

#[test]
fn channels_that_come_from_another_process_have_not_been_used_here() {
    let mut world = World::new();
    let mut there = World::new();
    there.server.tell_first_use();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert!(matches!(world.feed(&channel_data(0x4000, b"x")), Outcome::ToPeer { .. }));
    assert!(world.all_effects().iter().all(|effect| !matches!(effect, Effect::Used { .. })), "not asked for");
    let moved = world.server.snapshot(world.now, relay.allocation).unwrap();
    let allocation = there.server.restore(there.now, moved, Link::default()).unwrap();
    there.all_effects();
    there.feed(&channel_data(0x4000, b"x"));
    let number = ChannelNumber::MIN;
    assert_eq!(there.all_effects(), [Effect::Used { allocation, number }]);
}

#[test]
fn what_new_peer_rules_refuse_is_told() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::permit("192.5.5.241:0").signed(&alice)).success();
    world.all_effects();
    let deny = PeerRules { deny: vec!["198.41.0.0/24".parse().unwrap()], ..PeerRules::default() };
    world.server.reconfigure(world.now, std::sync::Arc::new(ServerConfig { peers: deny, ..config() }));
    let allocation = relay.allocation;
    let ended = world.all_effects();
    assert!(
        matches!(
            ended[..],
            [
                Effect::PermissionEnded { allocation: one, peer: ip },
                Effect::Unbound { allocation: two, peer, .. }
            ] if (one, two, ip, peer) == (allocation, allocation, address(PEER).ip(), address(PEER))
        ),
        "{ended:?}"
    );
}

/// A table elsewhere, kept from nothing but what is told. By index and generation.
#[derive(Default)]
pub(crate) struct Mirror(BTreeMap<(u32, u32), Session>);

pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) is_away: bool,
    until: BTreeMap<u8, u64>,
    pub(crate) permissions: BTreeMap<IpAddr, u64>,
    pub(crate) channels: BTreeMap<u16, (SocketAddr, u64)>,
}

impl Mirror {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn get(&self, id: AllocationId) -> Option<&Session> {
        self.0.get(&(id.index, id.generation))
    }

    pub(crate) fn get_mut(&mut self, id: AllocationId) -> Option<&mut Session> {
        self.0.get_mut(&(id.index, id.generation))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (AllocationId, &Session)> {
        self.0.iter().map(|((index, generation), session)| {
            (AllocationId { index: *index, generation: *generation }, session)
        })
    }

    pub(crate) fn hear(&mut self, effect: &Effect) {
        let family = |ip: IpAddr| if ip.is_ipv4() { Family::V4 } else { Family::V6 };
        match effect {
            Effect::Opened { allocation, client, expires_ms, relayed, .. } => {
                let relays = [Some(relayed.0), relayed.1].into_iter().flatten();
                let until = relays.map(|at| (family(at.ip()) as u8, *expires_ms)).collect();
                let (permissions, channels) = Default::default();
                let session = Session { client: *client, is_away: false, until, permissions, channels };
                assert!(self.0.insert((allocation.index, allocation.generation), session).is_none());
            }
            Effect::Moved { allocation, client, .. } => {
                let session = self.get_mut(*allocation).unwrap();
                (session.client, session.is_away) = (*client, false);
            }
            Effect::Away { allocation } => self.get_mut(*allocation).unwrap().is_away = true,
            Effect::Renewed { allocation, family, expires_ms } => {
                for (of, until) in &mut self.get_mut(*allocation).unwrap().until {
                    if family.is_none_or(|family| family as u8 == *of) {
                        *until = *expires_ms;
                    }
                }
            }
            Effect::Permitted { allocation, peer, expires_ms, renewed } => {
                let session = self.get_mut(*allocation).unwrap();
                assert_eq!(session.permissions.insert(*peer, *expires_ms).is_some(), *renewed);
            }
            Effect::PermissionEnded { allocation, peer } => {
                assert!(self.get_mut(*allocation).unwrap().permissions.remove(peer).is_some());
            }
            Effect::Bound { allocation, number, peer, expires_ms, renewed, .. } => {
                let session = self.get_mut(*allocation).unwrap();
                let before = session.channels.insert(number.get(), (*peer, *expires_ms));
                assert_eq!(before.map(|(peer, _)| peer), renewed.then_some(*peer));
            }
            Effect::Unbound { allocation, number, peer } => {
                let session = self.get_mut(*allocation).unwrap();
                assert_eq!(session.channels.remove(&number.get()).unwrap().0, *peer);
            }
            Effect::RelayClosed { relay } => {
                // Of one that ended before its sockets were open, they are given back.
                let Some(session) = self.get_mut(relay.allocation) else { return };
                assert!(session.until.remove(&(relay.family as u8)).is_some());
                session.permissions.retain(|ip, _| family(*ip) != relay.family);
                session.channels.retain(|_, (peer, _)| family(peer.ip()) != relay.family);
            }
            Effect::Closed { allocation, client, relayed, .. } => {
                let session = self.0.remove(&(allocation.index, allocation.generation));
                assert_eq!(session.map(|session| session.client), (*relayed != [None; 2]).then_some(*client));
            }
            _ => {}
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(bool),
    Refresh(u32, u8),
    Permit(u8),
    Bind(u8, u8),
    Client(u8),
    Sleep(u16),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => any::<bool>().prop_map(Step::Allocate),
        2 => (prop_oneof![Just(0), Just(600), Just(3000)], 0..3_u8).prop_map(|(s, f)| Step::Refresh(s, f)),
        4 => (0..12_u8).prop_map(Step::Permit),
        4 => (0..6_u8, 0..12_u8).prop_map(|(n, p)| Step::Bind(n, p)),
        1 => (0..3_u8).prop_map(Step::Client),
        3 => (1..400_u16).prop_map(Step::Sleep),
    ];
    prop::collection::vec(step, 1..60)
}

fn peer(n: u8) -> String {
    if n % 3 == 2 {
        format!("[2606:4700::{n:x}]:{}", 7000 + u16::from(n % 2))
    } else {
        format!("198.41.0.{}:7000", n + 1)
    }
}

proptest! {
    #![proptest_config(crate::kept_seeds())]

    /// Whatever is asked for, and slept through: a packet passes exactly where the mirror has an entry for it, and the first on a channel
    /// is told.
    #[test]
    fn a_table_kept_from_what_is_told_is_the_servers_own(steps in steps()) {
        let mut world = World::new();
        world.server.tell_first_use();
        let mut used = BTreeSet::new();
        let mut mirror = Mirror::default();
        let mut owners: BTreeMap<u16, RelayId> = BTreeMap::new();
        for step in steps {
            let alice = world.credentials("alice", Scheme::Md5);
            match step {
                Step::Allocate(dual) => {
                    let mut ask = Ask::allocate();
                    if dual {
                        ask = ask.with(&AdditionalAddressFamily::new(AddressFamily::IPV6));
                    }
                    world.ask(&ask.signed(&alice));
                }
                Step::Refresh(seconds, family) => {
                    let mut ask = Ask::refresh(seconds);
                    if family > 0 {
                        ask = ask.raw(0x0017, &[family, 0, 0, 0]);
                    }
                    world.ask(&ask.signed(&alice));
                }
                Step::Permit(n) => _ = world.ask(&Ask::permit(&peer(n)).signed(&alice)),
                Step::Bind(number, n) => {
                    world.ask(&Ask::bind(0x4000 + u16::from(number), &peer(n)).signed(&alice));
                }
                Step::Client(n) => world.client = client(40_000 + u16::from(n)),
                Step::Sleep(seconds) => world.sleep(seconds.into()),
            }
            for effect in world.all_effects() {
                mirror.hear(&effect);
                match effect {
                    Effect::Opened { allocation, client, .. } => {
                        owners.insert(client.address.port(), RelayId { allocation, family: Family::V4 });
                    }
                    Effect::Unbound { allocation, number, .. } => {
                        used.remove(&(allocation.index, allocation.generation, number.get()));
                    }
                    _ => {}
                }
            }
            // Those of a session or a relayed address that ended.
            used.retain(|(index, generation, number)| {
                mirror.0.get(&(*index, *generation)).is_some_and(|it| it.channels.contains_key(number))
            });
            prop_assert_eq!(world.server.allocations(), mirror.len());
            for (port, relay) in &owners {
                let told = mirror.get(relay.allocation);
                let from = client(*port).into();
                for number in 0..6 {
                    let message = channel_data(0x4000 + number, b"x");
                    let verdict = world.server.from_client(world.now, &from, &message);
                    let to = match verdict {
                        Verdict::ToPeer { peer, relay: of, .. } if of.allocation == relay.allocation => Some(peer),
                        _ => None,
                    };
                    let known = told.and_then(|session| session.channels.get(&(0x4000 + number)));
                    prop_assert_eq!(to, known.map(|(peer, _)| *peer));
                    let AllocationId { index, generation } = relay.allocation;
                    let first = to.is_some() && used.insert((index, generation, 0x4000 + number));
                    let effects = world.all_effects();
                    let number = ChannelNumber::new(0x4000 + number).unwrap();
                    let expected = first.then_some(Effect::Used { allocation: relay.allocation, number });
                    prop_assert_eq!(effects, Vec::from_iter(expected));
                }
                for n in 0..12 {
                    let from = address(&peer(n));
                    let family = if from.is_ipv4() { Family::V4 } else { Family::V6 };
                    let relay = RelayId { family, ..*relay };
                    let verdict = world.server.from_peer(world.now, relay, from, b"x");
                    let passes = matches!(verdict, Verdict::ToClient { .. });
                    let known = told.is_some_and(|session| session.permissions.contains_key(&from.ip()));
                    prop_assert_eq!(passes, known, "{}", from);
                }
            }
        }
    }
}
