//! Allocations, permissions and channels of the server, rebuilt from its effects.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use turnpike_turn::server::{AllocationSlot, Client, Effect, Family};

#[derive(Default)]
pub(super) struct Mirror(BTreeMap<(u32, u32), MirroredAllocation>);

pub(super) struct MirroredAllocation {
    pub(super) client: Client,
    pub(super) is_away: bool,
    until: BTreeMap<u8, u64>,
    pub(super) permissions: BTreeMap<IpAddr, u64>,
    pub(super) channels: BTreeMap<u16, (SocketAddr, u64)>,
}

impl Mirror {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, id: AllocationSlot) -> Option<&MirroredAllocation> {
        self.0.get(&(id.index, id.generation))
    }

    pub(super) fn get_mut(&mut self, id: AllocationSlot) -> Option<&mut MirroredAllocation> {
        self.0.get_mut(&(id.index, id.generation))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (AllocationSlot, &MirroredAllocation)> {
        self.0.iter().map(|((index, generation), mirrored)| {
            (AllocationSlot { index: *index, generation: *generation }, mirrored)
        })
    }

    pub(super) fn hear(&mut self, effect: &Effect) {
        let family = |ip: IpAddr| if ip.is_ipv4() { Family::V4 } else { Family::V6 };
        match effect {
            Effect::Opened { allocation, client, expires_ms, relayed, .. } => {
                let relays = [Some(relayed.0), relayed.1].into_iter().flatten();
                let until = relays.map(|at| (family(at.ip()) as u8, *expires_ms)).collect();
                let (permissions, channels) = Default::default();
                let mirrored =
                    MirroredAllocation { client: *client, is_away: false, until, permissions, channels };
                assert!(self.0.insert((allocation.index, allocation.generation), mirrored).is_none());
            }
            Effect::Moved { allocation, client, .. } => {
                let mirrored = self.get_mut(*allocation).unwrap();
                (mirrored.client, mirrored.is_away) = (*client, false);
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
                let mirrored = self.get_mut(*allocation).unwrap();
                assert_eq!(mirrored.permissions.insert(*peer, *expires_ms).is_some(), *renewed);
            }
            Effect::PermissionEnded { allocation, peer } => {
                assert!(self.get_mut(*allocation).unwrap().permissions.remove(peer).is_some());
            }
            Effect::Bound { allocation, number, peer, expires_ms, renewed, .. } => {
                let mirrored = self.get_mut(*allocation).unwrap();
                let before = mirrored.channels.insert(number.get(), (*peer, *expires_ms));
                assert_eq!(before.map(|(peer, _)| peer), renewed.then_some(*peer));
            }
            Effect::Unbound { allocation, number, peer } => {
                let mirrored = self.get_mut(*allocation).unwrap();
                assert_eq!(mirrored.channels.remove(&number.get()).unwrap().0, *peer);
            }
            Effect::RelayClosed { relay } => {
                // An allocation that ended before its sockets opened returns the sockets.
                let Some(mirrored) = self.get_mut(relay.allocation) else { return };
                assert!(mirrored.until.remove(&(relay.family as u8)).is_some());
                mirrored.permissions.retain(|ip, _| family(*ip) != relay.family);
                mirrored.channels.retain(|_, (peer, _)| family(peer.ip()) != relay.family);
            }
            Effect::Closed { allocation, client, relayed, .. } => {
                let mirrored = self.0.remove(&(allocation.index, allocation.generation));
                assert_eq!(
                    mirrored.map(|mirrored| mirrored.client),
                    (*relayed != [None; 2]).then_some(*client)
                );
            }
            _ => {}
        }
    }
}
