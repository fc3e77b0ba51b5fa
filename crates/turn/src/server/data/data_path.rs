//! The packet path uses the forwarding table and the peer rules to decide what happens to each datagram. It
//! passes requests, and data from clients without an allocation, to the control plane.

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
};

use turnpike_wire::{
    channel_data::{ChannelData, ChannelNumber},
    demux::Kind,
    frame,
    indication::{self, Indication, MAX_HEADER_LEN},
    stun::{self, Class, Writer, kind, method},
};

use crate::{
    server::{
        AllocationSlot, DataPlane, DropReason, Effect, Family, Header, HeldUp, PeerRules, RelayId,
        SharedPort, Verdict, Way,
        data::forwarding::{Channels, Permissions},
    },
    time::Now,
};

/// Maximum payload of a UDP datagram over IPv4, in bytes.
const MAX_DATAGRAM_LEN: usize = 65_507;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpError {
    /// ICMP type, or ICMPv6 type if the relayed transport address is IPv6.
    pub icmp_type: u8,
    pub code: u8,
    /// MTU of the next hop, if the error contains it.
    pub info: u32,
}

impl DataPlane {
    /// If no allocation owns the peer, returns `None` and counts `datagrams` as dropped. `peer` must be
    /// canonical.
    #[inline]
    pub fn claimant(&mut self, port: SharedPort, peer: IpAddr, datagrams: usize) -> Option<RelayId> {
        let index = match self.forwarding.claimant(port, peer) {
            None if self.config.peers.own.are_translated() => self.claimant_by_name(port, peer),
            index => index,
        };
        let Some((allocation, _)) = index.and_then(|index| self.forwarding.at(index)) else {
            self.stats.drops[DropReason::NoPermission as usize] += datagrams as u64;
            return None;
        };
        Some(RelayId { allocation, family: Family::of(peer) })
    }

    #[inline(never)]
    fn claimant_by_name(&mut self, port: SharedPort, peer: IpAddr) -> Option<u32> {
        let forwarding = &mut self.forwarding;
        self.config.peers.own.aliases(peer).find_map(|name| forwarding.claimant(port, name))
    }

    /// Handles a datagram from a peer to a relayed transport address. `peer` must be canonical.
    #[inline]
    pub fn from_peer<'a>(
        &mut self,
        now: Now,
        relay: RelayId,
        peer: SocketAddr,
        datagram: &'a [u8],
    ) -> Verdict<'a> {
        let Some(entry) = self.forwarding.get(relay.allocation) else {
            return self.dropped(DropReason::StaleRelay);
        };
        if entry.away {
            return self.dropped(DropReason::ClientAway);
        }
        let Ok(length) = u16::try_from(datagram.len()) else {
            return self.dropped(DropReason::Oversized);
        };
        let mut bytes = [0; MAX_HEADER_LEN];
        let (header_len, padding) = if let Some(channel) = entry.channels.by_peer(peer, now.ms) {
            // The permission may expire before the channel (RFC 8656 section 9).
            if channel.permitted_until_ms <= now.ms {
                return self.dropped(DropReason::NoPermission);
            }
            bytes[..ChannelData::HEADER_LEN].copy_from_slice(&ChannelData::header(channel.number, length));
            if !channel.used {
                let (number, told) = (channel.number, (self.tells_use, &mut self.effects));
                first_use(relay.allocation, number, &mut entry.channels, told);
            }
            (ChannelData::HEADER_LEN, frame::padding(datagram.len()) & entry.padding)
        } else {
            let name;
            let mut peer = &peer;
            if self.config.peers.own.are_translated() {
                name = known_as(&self.config.peers, &entry.permissions, *peer, now);
                peer = &name;
            }
            if !entry.permissions.allow(peer.ip(), now.ms) {
                return self.dropped(DropReason::NoPermission);
            }
            let transaction = self.indications.next();
            let header_len =
                indication::write_header(Indication::Data, transaction, peer, length, &mut bytes);
            (header_len, frame::padding(datagram.len()))
        };
        if header_len + datagram.len() + usize::from(padding) > MAX_DATAGRAM_LEN {
            return self.dropped(DropReason::Oversized);
        }
        if let Some(limits) = &mut entry.limits {
            if let Err(held_up) = limits.admit(Way::ToClient, datagram.len(), now.ms) {
                return self.held_up(held_up, false);
            }
            if let Some(meter) = &mut limits.meter {
                meter.relayed(Way::ToClient, now.ms * 1000 + self.beyond_ms_us, datagram);
            }
            if limits.tap.is_some() {
                let header = &bytes[..header_len];
                entry.report(Way::ToClient, peer, header, datagram);
            }
        }
        entry.to_client.0 += 1;
        entry.to_client.1 += u64::from(length);
        self.stats.to_client_datagrams += 1;
        self.stats.to_client_bytes += u64::from(length);
        Verdict::ToClient {
            client: entry.client,
            link: entry.link,
            header: Header::new(bytes, header_len),
            payload: datagram,
            padding,
        }
    }

    /// Handles an ICMP error about a datagram sent by a relay socket (RFC 8656 section 11.5).
    pub fn from_icmp(
        &mut self,
        now: Now,
        relay: RelayId,
        peer: SocketAddr,
        IcmpError { icmp_type, code, info }: IcmpError,
    ) -> Verdict<'_> {
        // Types listed in section 11.5: unreachable, time exceeded and, for IPv6, packet too big.
        let passed_on = match relay.family {
            Family::V4 => matches!(icmp_type, 3 | 11),
            Family::V6 => matches!(icmp_type, 1..=3),
        };
        if !passed_on {
            return self.dropped(DropReason::IcmpType);
        }
        let Some(entry) = self.forwarding.get(relay.allocation) else {
            return self.dropped(DropReason::StaleRelay);
        };
        let rules = &self.config.peers;
        let peer =
            if rules.own.are_translated() { known_as(rules, &entry.permissions, peer, now) } else { peer };
        if !entry.permissions.allow(peer.ip(), now.ms) {
            return self.dropped(DropReason::NoPermission);
        }
        // Section 18.13 shows 7 bits of type and 9 of code; this uses 8 bits for each, as ICMP does.
        let data = match (relay.family, icmp_type, code) {
            (Family::V4, 3, 4) | (Family::V6, 2, _) => info,
            _ => 0,
        };
        if entry.away {
            return self.dropped(DropReason::ClientAway);
        }
        let (client, link) = (entry.client, entry.link);
        self.stats.icmp_relayed += 1;
        let transaction = self.indications.next();
        let header = stun::Header { class: Class::Indication, method: method::DATA, transaction };
        let mut indication = Writer::begin(&mut self.icmp, header);
        let [d0, d1, d2, d3] = data.to_be_bytes();
        indication
            .xor_address(kind::XOR_PEER_ADDRESS, peer)
            .attribute(kind::ICMP, &[0, 0, icmp_type, code, d0, d1, d2, d3]);
        indication.finish(false);
        Verdict::Reply { client, link, bytes: &self.icmp }
    }

    #[inline]
    pub(crate) fn relay_from_client<'a>(
        &mut self,
        now: Now,
        index: u32,
        kind: Kind,
        datagram: &'a [u8],
    ) -> Verdict<'a> {
        if kind == Kind::ChannelData {
            self.channel_data(now, index, datagram)
        } else {
            self.send(now, index, datagram)
        }
    }

    /// Checks that [`DataPlane::relay_from_client`] could relay the datagram, regardless of its sender.
    #[inline]
    pub(crate) fn check(&self, kind: Kind, datagram: &[u8]) -> Result<(), DropReason> {
        if kind == Kind::ChannelData {
            ChannelData::parse_within(self.config.channels, datagram)?;
        } else {
            indication::parse(Indication::Send, datagram)?;
        }
        Ok(())
    }

    /// RFC 8656 section 12.6.
    #[inline]
    fn channel_data<'a>(&mut self, now: Now, index: u32, datagram: &'a [u8]) -> Verdict<'a> {
        let message = match ChannelData::parse_within(self.config.channels, datagram) {
            Ok(message) => message,
            Err(error) => return self.dropped(error.into()),
        };
        let Some((allocation, entry)) = self.forwarding.at(index) else {
            return self.dropped(DropReason::NoAllocation);
        };
        let Some(channel) = entry.channels.by_number(message.number(), now.ms) else {
            return self.dropped(DropReason::UnboundChannel);
        };
        let peer = channel.peer;
        if !channel.used {
            let (number, told) = (channel.number, (self.tells_use, &mut self.effects));
            first_use(allocation, number, &mut entry.channels, told);
        }
        let payload = message.payload();
        if let Some(limits) = &mut entry.limits {
            if let Err(held_up) = limits.admit(Way::ToPeer, payload.len(), now.ms) {
                let is_stream = entry.is_by_stream();
                return self.held_up(held_up, is_stream);
            }
            if let Some(meter) = &mut limits.meter {
                meter.relayed(Way::ToPeer, now.ms * 1000 + self.beyond_ms_us, payload);
            }
            if limits.tap.is_some() {
                entry.report(Way::ToPeer, peer, &datagram[..ChannelData::HEADER_LEN], payload);
            }
        }
        entry.to_peer.0 += 1;
        entry.to_peer.1 += payload.len() as u64;
        self.stats.to_peer_datagrams += 1;
        self.stats.to_peer_bytes += payload.len() as u64;
        let relay = RelayId { allocation, family: Family::of(peer.ip()) };
        Verdict::ToPeer { relay, peer, payload, dont_fragment: false }
    }

    /// RFC 8656 section 11.2.
    #[inline]
    fn send<'a>(&mut self, now: Now, index: u32, datagram: &'a [u8]) -> Verdict<'a> {
        let view = match indication::parse(Indication::Send, datagram) {
            Ok(view) => view,
            Err(error) => return self.dropped(error.into()),
        };
        let Some((allocation, entry)) = self.forwarding.at(index) else {
            return self.dropped(DropReason::NoAllocation);
        };
        let family = Family::of(view.peer.ip());
        // RFC 6062 allocations relay only connections.
        if entry.relays_tcp {
            return self.dropped(DropReason::TcpAllocation);
        }
        if !entry.has(family) {
            return self.dropped(DropReason::PeerFamily);
        }
        if view.peer.port() == 0 || !self.config.peers.permits_endpoint(view.peer) {
            return self.dropped(DropReason::PeerRefused);
        }
        if !entry.permissions.allow(view.peer.ip(), now.ms) {
            return self.dropped(DropReason::NoPermission);
        }
        if let Some(limits) = &mut entry.limits {
            if let Err(held_up) = limits.admit(Way::ToPeer, view.data.len(), now.ms) {
                let is_stream = entry.is_by_stream();
                return self.held_up(held_up, is_stream);
            }
            if let Some(meter) = &mut limits.meter {
                meter.relayed(Way::ToPeer, now.ms * 1000 + self.beyond_ms_us, view.data);
            }
            if limits.tap.is_some() {
                // DATA is usually the last attribute.
                let header_len = view.data.as_ptr().addr() - datagram.as_ptr().addr();
                entry.report(Way::ToPeer, view.peer, &datagram[..header_len], view.data);
            }
        }
        entry.to_peer.0 += 1;
        entry.to_peer.1 += view.data.len() as u64;
        self.stats.to_peer_datagrams += 1;
        self.stats.to_peer_bytes += view.data.len() as u64;
        let own = &self.config.peers.own;
        Verdict::ToPeer {
            relay: RelayId { allocation, family },
            peer: if own.are_translated() { own.internal(view.peer) } else { view.peer },
            payload: view.data,
            // RFC 8656 section 13: for a client that uses datagrams, DF applies only from IPv4 to IPv4.
            dont_fragment: view.dont_fragment
                && (entry.is_by_stream() || entry.client.address.is_ipv4() && view.peer.is_ipv4()),
        }
    }

    #[inline]
    pub(crate) fn dropped<'a>(&mut self, reason: DropReason) -> Verdict<'a> {
        self.stats.drop(reason);
        Verdict::Drop(Some(reason))
    }

    #[cold]
    #[inline(never)]
    fn held_up<'a>(&mut self, held_up: HeldUp, is_stream: bool) -> Verdict<'a> {
        if !is_stream {
            return self.dropped(held_up.level.drop_reason());
        }
        self.stats.bandwidth_pauses[held_up.level as usize] += 1;
        Verdict::Wait { until_ms: held_up.until_ms, otherwise: held_up.level.drop_reason() }
    }
}

#[inline(never)]
pub(crate) fn known_as(
    rules: &PeerRules,
    permissions: &Permissions,
    peer: SocketAddr,
    now: Now,
) -> SocketAddr {
    // Check the permission first: it is a hash lookup, while rules are lists.
    let may_have = |peer: SocketAddr| permissions.allow(peer.ip(), now.ms) && rules.permits_endpoint(peer);
    rules.own.external(peer, may_have)
}

#[cold]
#[inline(never)]
fn first_use(
    allocation: AllocationSlot,
    number: ChannelNumber,
    channels: &mut Channels,
    (is_told, effects): (bool, &mut VecDeque<Effect>),
) {
    channels.mark_used(number);
    if is_told {
        effects.push_back(Effect::Used { allocation, number });
    }
}

/// Transaction IDs of indications. Indications have no response, so their IDs must be distinct but need not
/// be random.
pub(crate) struct Indications {
    salt: [u8; 4],
    count: u64,
}

impl Indications {
    pub(crate) fn new(salt: [u8; 4]) -> Self {
        Self { salt, count: 0 }
    }

    #[inline]
    pub(crate) fn next(&mut self) -> [u8; 12] {
        self.count = self.count.wrapping_add(1);
        let mut transaction = [0; 12];
        transaction[..4].copy_from_slice(&self.salt);
        transaction[4..].copy_from_slice(&self.count.to_be_bytes());
        transaction
    }
}
