//! Compares the forwarding table with a linear list under random operations: lookups and expiries must agree.

use std::{collections::BTreeMap, sync::Arc};

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::server::{AllocationId, ClosedReason, ListenerId, RelayId, RelayTransport, Transport};

#[derive(Clone, Debug)]
struct Listed {
    id: AllocationSlot,
    client: Client,
    link: Link,
    padded: bool,
    away: bool,
    relays: [Option<(SocketAddr, u64)>; 2],
    permissions: BTreeMap<IpAddr, u64>,
    channels: BTreeMap<u16, (SocketAddr, u64)>,
}

impl Listed {
    fn deadlines(&self) -> impl Iterator<Item = u64> + '_ {
        let relays = self.relays.iter().flatten().map(|(_, until)| *until);
        let channels = self.channels.values().map(|(_, until)| *until);
        relays.chain(self.permissions.values().copied()).chain(channels)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Install { client: u16, padded: bool },
    Opened { which: usize, both: bool, ms: u64 },
    Renewed { which: usize, family: Option<bool>, ms: u64 },
    Permit { which: usize, peer: u8, ms: u64 },
    Bind { which: usize, number: u16, peer: u8, ms: u64 },
    EndPermission { which: usize, peer: u8 },
    Unbind { which: usize, number: u16 },
    CloseRelay { which: usize, v6: bool },
    Away(usize),
    Move { which: usize, client: u16, padded: bool },
    Close { which: usize, exported: bool },
    Find(u16),
    Sleep(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0..8_usize;
    let ms = || 1..40_000_u64;
    prop_oneof![
        4 => (0..6_u16, any::<bool>()).prop_map(|(client, padded)| Step::Install { client, padded }),
        4 => (which(), any::<bool>(), ms()).prop_map(|(which, both, ms)| Step::Opened { which, both, ms }),
        2 => (which(), prop::option::of(any::<bool>()), ms())
            .prop_map(|(which, family, ms)| Step::Renewed { which, family, ms }),
        9 => (which(), 0..14_u8, ms()).prop_map(|(which, peer, ms)| Step::Permit { which, peer, ms }),
        9 => (which(), 0..12_u16, 0..14_u8, ms())
            .prop_map(|(which, number, peer, ms)| Step::Bind { which, number, peer, ms }),
        2 => (which(), 0..14_u8).prop_map(|(which, peer)| Step::EndPermission { which, peer }),
        2 => (which(), 0..12_u16).prop_map(|(which, number)| Step::Unbind { which, number }),
        1 => (which(), any::<bool>()).prop_map(|(which, v6)| Step::CloseRelay { which, v6 }),
        2 => which().prop_map(Step::Away),
        3 => (which(), 0..6_u16, any::<bool>())
            .prop_map(|(which, client, padded)| Step::Move { which, client, padded }),
        3 => (which(), any::<bool>()).prop_map(|(which, exported)| Step::Close { which, exported }),
        4 => (0..6_u16).prop_map(Step::Find),
        3 => (0..20_000_u64).prop_map(Step::Sleep),
    ]
}

fn client(number: u16) -> Client {
    let address = ([192, 0, 2, 1], 40_000 + number).into();
    Client { listener: ListenerId(0), address, local: ([192, 0, 2, 9], 3478).into() }
}

/// Peer by number. There are enough to exceed [`FEW`] in each family, with two ports per address.
fn peer(number: u8) -> SocketAddr {
    let port = 7000 + u16::from(number % 2);
    if number.is_multiple_of(7) {
        SocketAddr::new(IpAddr::from([0x2606, 0x4700, 0, 0, 0, 0, 0, u16::from(number) + 1]), port)
    } else {
        SocketAddr::new(IpAddr::from([198, 41, 0, number / 2]), port)
    }
}

fn channel(number: u16) -> ChannelNumber {
    ChannelNumber::new(0x4000 + number).expect("a valid channel number")
}

#[derive(Default)]
struct Both {
    list: Vec<Listed>,
    names: Vec<AllocationSlot>,
    links: u64,
    now: u64,
}

impl Both {
    fn at_home(&self, wanted: &Client) -> Option<&Listed> {
        self.list.iter().find(|it| !it.away && it.client == *wanted)
    }

    fn step(&mut self, table: &mut Forwarding, step: &Step) {
        let now = self.now;
        let (which, ms) = match *step {
            Step::Install { client: number, padded } => return self.install(table, client(number), padded),
            Step::Find(number) => {
                let found = self.at_home(&client(number)).map(|it| it.id.index);
                return assert_eq!(table.find(&client(number)), found);
            }
            Step::Sleep(ms) => return self.sleep(table, ms),
            Step::Opened { which, ms, .. }
            | Step::Renewed { which, ms, .. }
            | Step::Permit { which, ms, .. }
            | Step::Bind { which, ms, .. } => (which, ms),
            Step::EndPermission { which, .. }
            | Step::Unbind { which, .. }
            | Step::CloseRelay { which, .. }
            | Step::Away(which)
            | Step::Move { which, .. }
            | Step::Close { which, .. } => (which, 0),
        };
        let Some(which) = which.checked_rem(self.list.len()) else { return };
        let taken = |number: u16| self.list.iter().any(|it| !it.away && it.client == client(number));
        let taken = matches!(step, Step::Move { client, .. } if taken(*client));
        let it = &mut self.list[which];
        let (allocation, expires_ms, renewed) = (it.id, now + ms, false);
        let effect = match *step {
            Step::Opened { both, .. } => {
                let v4 = SocketAddr::from(([203, 0, 113, 1], 50_000));
                let v6 = SocketAddr::new(IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]), 50_000);
                it.relays = [Some((v4, expires_ms)), both.then_some((v6, expires_ms)).or(it.relays[1])];
                Effect::Opened {
                    allocation,
                    id: id(),
                    client: it.client,
                    link: it.link,
                    expires_ms,
                    realm: Arc::from("realm"),
                    username: "alice".into(),
                    relayed: (v4, both.then_some(v6)),
                }
            }
            Step::Renewed { family, .. } => {
                let family = family.map(|v6| if v6 { Family::V6 } else { Family::V4 });
                for of in [Family::V4, Family::V6] {
                    if let Some((_, until)) = &mut it.relays[of as usize]
                        && family.is_none_or(|family| family == of)
                    {
                        *until = expires_ms;
                    }
                }
                Effect::Renewed { allocation, family, expires_ms }
            }
            Step::Permit { peer: number, .. } => {
                let peer = peer(number).ip();
                it.permissions.insert(peer, expires_ms);
                Effect::Permitted { allocation, peer, expires_ms, renewed }
            }
            Step::Bind { number, peer: to, .. } => {
                let (peer, number) = (peer(to), channel(number));
                // The control plane ensures that numbers and peers map one to one.
                let other =
                    |(known, (to, _)): (&u16, &(SocketAddr, u64))| (*known == number.get()) != (*to == peer);
                if it.channels.iter().any(other) || !it.permissions.contains_key(&peer.ip()) {
                    return;
                }
                it.channels.insert(number.get(), (peer, expires_ms));
                Effect::Bound { allocation, number, peer, at: peer, expires_ms, renewed }
            }
            Step::EndPermission { peer: number, .. } => {
                // If a permission ends early, so do its channels.
                let peer = peer(number).ip();
                if it.channels.values().any(|(to, _)| to.ip() == peer) {
                    return;
                }
                it.permissions.remove(&peer);
                Effect::PermissionEnded { allocation, peer }
            }
            Step::Unbind { number, .. } => {
                let number = channel(number);
                let Some((peer, _)) = it.channels.remove(&number.get()) else { return };
                Effect::Unbound { allocation, number, peer }
            }
            Step::CloseRelay { v6, .. } => {
                let family = if v6 { Family::V6 } else { Family::V4 };
                it.relays[family as usize] = None;
                it.permissions.retain(|ip, _| Family::of(*ip) != family);
                it.channels.retain(|_, (peer, _)| Family::of(peer.ip()) != family);
                Effect::RelayClosed { relay: RelayId { allocation, family } }
            }
            Step::Away(_) => {
                it.away = true;
                Effect::Away { allocation }
            }
            Step::Move { client: to, padded, .. } => {
                if taken {
                    return;
                }
                self.links += 1;
                (it.client, it.link, it.padded, it.away) = (client(to), Link(self.links), padded, false);
                let (client, link) = (it.client, it.link);
                Effect::Moved { allocation, was: None, client, link, padded, from: None }
            }
            Step::Close { exported, .. } => {
                let it = self.list.remove(which);
                if exported { Effect::Exported { allocation } } else { closed(&it) }
            }
            Step::Install { .. } | Step::Find(_) | Step::Sleep(_) => return,
        };
        table.apply(now, &effect);
        if matches!(effect, Effect::Closed { .. } | Effect::Exported { .. }) {
            assert!(table.get(allocation).is_none());
        }
    }

    fn install(&mut self, table: &mut Forwarding, client: Client, padded: bool) {
        if self.at_home(&client).is_some() {
            return;
        }
        self.links += 1;
        let link = Link(self.links);
        let id = table.install(self.now, ForwardingEntry::new(client, link, padded, false));
        assert!(!self.names.contains(&id), "an ID was reused");
        self.names.push(id);
        let (relays, away) = ([None; 2], false);
        let (permissions, channels) = Default::default();
        self.list.push(Listed { id, client, link, padded, away, relays, permissions, channels });
    }

    fn sleep(&mut self, table: &mut Forwarding, ms: u64) {
        self.now += ms;
        while let Some(index) = table.due(self.now) {
            let it = self
                .list
                .iter_mut()
                .find(|it| it.id.index == index)
                .expect("a due timer belongs to a live entry");
            let (now, allocation) = (self.now, it.id);
            let bindings: Vec<Binding> = table.at(index).expect("a live entry").1.bindings().collect();
            for binding in bindings.into_iter().filter(|binding| binding.expires_ms() <= now) {
                let effect = match binding {
                    Binding::Permission(peer, _) => Effect::PermissionEnded { allocation, peer },
                    Binding::Channel(channel) => {
                        Effect::Unbound { allocation, number: channel.number, peer: channel.name() }
                    }
                };
                table.apply(now, &effect);
            }
            while let Some(family) = table.at(index).and_then(|(_, entry)| entry.expired_relay(now)) {
                table.apply(now, &Effect::RelayClosed { relay: RelayId { allocation, family } });
                it.relays[family as usize] = None;
                it.permissions.retain(|ip, _| Family::of(*ip) != family);
                it.channels.retain(|_, (peer, _)| Family::of(peer.ip()) != family);
            }
            it.permissions.retain(|_, until| *until > now);
            it.channels.retain(|_, (_, until)| *until > now);
            table.arm(now, index);
        }
        let over = |until: u64| until.div_ceil(1000) * 1000 <= self.now;
        let late: Vec<_> = self.list.iter().filter(|it| it.deadlines().any(over)).collect();
        assert!(late.is_empty(), "missed expiries at {}: {late:?}", self.now);
    }

    fn compare(&self, table: &mut Forwarding) {
        let now = self.now;
        assert_eq!(table.len(), self.list.len());
        for number in 0..6 {
            let found = self.at_home(&client(number)).map(|it| it.id.index);
            assert_eq!(table.find(&client(number)), found, "client {number}");
        }
        for name in &self.names {
            let listed = self.list.iter().find(|it| it.id == *name);
            let entry = table.get(*name);
            assert_eq!(entry.is_some(), listed.is_some());
            let (Some(entry), Some(it)) = (entry, listed) else { continue };
            let padding = if it.padded { 3 } else { 0 };
            assert_eq!((entry.client, entry.link, entry.padding), (it.client, it.link, padding));
            assert_eq!(entry.away, it.away);
            let relays = entry.relays.map(|relay| relay.map(|relay| (relay.address, relay.expires_ms)));
            assert_eq!(relays, it.relays);
            let permitted = |ip: IpAddr| it.permissions.get(&ip).is_some_and(|until| *until > now);
            for peer in (0..14).map(peer) {
                assert_eq!(entry.permissions.allow(peer.ip(), now), permitted(peer.ip()), "{peer}");
                let bound = it.channels.iter().find(|(_, (to, until))| *to == peer && *until > now);
                let found = entry.channels.by_peer(peer, now);
                assert_eq!(found.map(|it| it.number.get()), bound.map(|(number, _)| *number), "{peer}");
                assert!(
                    found.is_none_or(|it| (it.permitted_until_ms > now) == permitted(peer.ip())),
                    "{peer}"
                );
            }
            for number in (0..12).map(channel) {
                let bound = it.channels.get(&number.get()).filter(|(_, until)| *until > now);
                let found = entry.channels.by_number(number, now);
                assert_eq!(found.map(|it| it.peer), bound.map(|(peer, _)| *peer), "{number:?}");
            }
        }
        let first = self.list.iter().flat_map(Listed::deadlines).min();
        if let Some(first) = first {
            let due = table.next_due();
            assert!(due.is_some_and(|due| due <= first.div_ceil(1000) * 1000), "{due:?} for {first}");
        }
    }
}

fn id() -> AllocationId {
    "0".repeat(32).parse().expect("32 digits")
}

fn closed(it: &Listed) -> Effect {
    Effect::Closed {
        allocation: it.id,
        id: id(),
        client: it.client,
        realm: Arc::from("realm"),
        username: "alice".into(),
        identity: None,
        relayed: [None; 2],
        transport: Transport::Udp,
        relay_transport: RelayTransport::Udp,
        reason: ClosedReason::Deleted,
        away: it.away,
        lived_ms: 0,
        to_peer: (0, 0),
        to_client: (0, 0),
        reported: None,
    }
}

proptest! {
    #[test]
    fn the_table_behaves_like_a_list(steps in vec(step(), 1..120)) {
        let mut table = Forwarding::new();
        let mut both = Both { now: 1_000_500, ..Both::default() };
        for step in &steps {
            both.step(&mut table, step);
            both.compare(&mut table);
        }
        while let Some(it) = both.list.pop() {
            table.apply(both.now, &closed(&it));
        }
        both.compare(&mut table);
        prop_assert_eq!(table.next_due(), None);
    }
}
