//! The decisions of the kernel programs in Rust: pure code that can be read and tested without a kernel. It
//! follows the order of `bpf/decide.h`, and tests compare the two on the same packets and tables.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, Ipv6Addr},
};

use crate::layout::{
    BEHIND, BURST, BURST_NS, CALM_NS, Count, Flow, FlowKey, HOP_WORDS, Kind, LISTENER, LOOPBACK,
    ONLY_FROM_THERE, POLL_NS, RELAY, class_of, mapped, way_of,
};

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const IPV6: usize = 40;
const UDP: usize = 8;
const CHANNEL_DATA: usize = 4;
const PROTOCOL: u8 = 17;
const ETH_IPV4: u16 = 0x0800;
const ETH_IPV6: u16 = 0x86dd;
/// Longest UDP datagram handled, including the header.
const MAX_UDP: usize = 2044;
/// Minimum MTU of an IPv6 link (RFC 8200 section 5).
const MIN_MTU_V6: usize = 1280;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// TC ingress, after GRO: the kernel's metadata is available.
    Tc,
    /// Driver: only the packet's bytes are known.
    Xdp,
}

#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Starts at the Ethernet header.
    pub bytes: &'a [u8],
    pub interface: u32,
    /// True if the frame is addressed to this machine's link address; TC only.
    pub for_us: bool,
    /// Datagrams combined by GRO, 0 if unknown; TC only.
    pub segments: u32,
    /// Length of each combined datagram, 0 for a single one; TC only.
    pub segment_size: u32,
    pub summed: Summed,
}

impl Frame<'_> {
    fn is_super_packet(&self) -> bool {
        self.segments > 1 || self.segment_size > 0
    }
}

/// State of a packet's UDP checksum according to the kernel (`ip_summed`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Summed {
    /// Unknown (CHECKSUM_NONE).
    Nothing,
    /// Correct (CHECKSUM_UNNECESSARY).
    Verified,
    /// Sum of everything after the Ethernet header (CHECKSUM_COMPLETE).
    Complete,
    /// The field contains only the sum of the pseudo-header (CHECKSUM_PARTIAL).
    Partial,
}

#[derive(Clone, Debug, Default)]
pub struct Tables {
    pub flows: HashMap<FlowKey, Flow>,
    pub states: Vec<State>,
    pub drained: Vec<u64>,
    pub routes: Vec<u64>,
    pub hops: Vec<[u64; HOP_WORDS]>,
    pub classes: Vec<u64>,
    /// True if flows need leases.
    pub leases: bool,
}

/// State of a flow, without its counters. See [`crate::layout::UP`] and the following words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub up: u64,
    pub calm: u64,
    pub since: u64,
    pub arrived: u64,
    pub across: u64,
}

#[derive(Clone, Copy)]
pub struct Moment {
    pub now: u64,
    pub id: [u8; 2],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub action: Action,
    pub state: Option<(u32, State)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Passed to the kernel's network stack; `None` if the packet does not concern the program.
    Up(Option<Count>),
    Dropped(Count),
    /// Sent on an interface. At TC, the Ethernet addresses have not been filled in yet.
    Across {
        interface: u32,
        bytes: Vec<u8>,
        count: Count,
        payload: usize,
    },
}

struct Packet<'a> {
    key: FlowKey,
    v6: bool,
    tos: u8,
    ttl: u8,
    /// UDP header and payload, up to the end according to the length field.
    udp: &'a [u8],
}

impl Packet<'_> {
    fn check(&self) -> u16 {
        be16(self.udp, 6)
    }

    fn channel_data(&self) -> [u16; 2] {
        if self.udp.len() < UDP + CHANNEL_DATA {
            [0; 2]
        } else {
            [be16(self.udp, UDP), be16(self.udp, UDP + 2)]
        }
    }
}

#[derive(Clone, Copy)]
struct Arrived<'a> {
    place: Place,
    frame: &'a Frame<'a>,
    packet: &'a Packet<'a>,
}

#[must_use]
pub fn decide(place: Place, frame: &Frame<'_>, tables: &Tables, moment: &Moment) -> Decision {
    let up = |count| Decision { action: Action::Up(count), state: None };
    if place == Place::Tc && !frame.for_us {
        return up(None);
    }
    let packet = match parse(frame.bytes) {
        Ok(packet) => packet,
        Err(count) => return up(count),
    };
    let class = class_of(&tables.classes, u16::from_be_bytes(packet.key.local_port));
    if class == 0 {
        return up(None);
    }
    let [number, _] = packet.channel_data();
    let is_alone = place == Place::Xdp || !frame.is_super_packet();
    let looks_like_it = class & LISTENER != 0 && is_alone && number & 0xc000 == 0x4000;
    let plain = packet.key;
    let on_channel = FlowKey { channel: number.to_be_bytes(), ..plain };
    for key in [on_channel, plain].iter().skip(usize::from(!looks_like_it)) {
        if let Some(flow) = tables.flows.get(key) {
            if flow.stamp != flow.stamp_end || flow.key != *key {
                return up(Some(Count::Stale));
            }
            return forward(Arrived { place, frame, packet: &packet }, flow, tables, moment);
        }
    }
    up(Some(match (class & LISTENER != 0, looks_like_it) {
        (true, true) => Count::UnknownChannel,
        (true, false) => Count::NotChannelData,
        (false, _) => {
            debug_assert_eq!(class, RELAY);
            Count::UnknownPeer
        }
    }))
}

/// Parses a UDP datagram that may belong to a flow; an error contains the counter to increase.
fn parse(frame: &[u8]) -> Result<Packet<'_>, Option<Count>> {
    let Some(ip) = frame.get(ETHERNET..) else { return Err(None) };
    let malformed = Err(Some(Count::Malformed));
    let (addresses, header, v6, tos, ttl, claimed) = match be16(frame, 12) {
        ETH_IPV4 => {
            if ip.len() < IPV4 || ip[0] >> 4 != 4 || ip[9] != PROTOCOL {
                return Err(None);
            }
            if ip[0] != 0x45 {
                return Err(Some(Count::IpOptions));
            }
            if be16(ip, 6) & 0x3fff != 0 {
                return Err(Some(Count::Fragment));
            }
            if ip.len() < IPV4 + UDP {
                return Err(None);
            }
            if fold(sum(&ip[..IPV4])) != 0xffff {
                return malformed;
            }
            let address =
                |at: usize| mapped(Ipv4Addr::new(ip[at], ip[at + 1], ip[at + 2], ip[at + 3]).into());
            let claimed = usize::from(be16(ip, 2)).checked_sub(IPV4);
            ([address(12), address(16)], IPV4, false, ip[1], ip[8], claimed)
        }
        ETH_IPV6 => {
            if ip.len() < IPV6 || ip[0] >> 4 != 6 {
                return Err(None);
            }
            match ip[6] {
                PROTOCOL => {}
                0 | 43 | 60 => return Err(Some(Count::IpOptions)),
                44 => return Err(Some(Count::Fragment)),
                _ => return Err(None),
            }
            if ip.len() < IPV6 + UDP {
                return Err(None);
            }
            let address = |at: usize| std::array::from_fn(|n| ip[at + n]);
            let tos = ip[0] << 4 | ip[1] >> 4;
            ([address(8), address(24)], IPV6, true, tos, ip[7], Some(usize::from(be16(ip, 4))))
        }
        _ => return Err(None),
    };
    let udp = &ip[header..];
    let length = usize::from(be16(udp, 4));
    // The kernel also drops IPv6 packets with mapped addresses (ip6_rcv), which would be taken for IPv4 here.
    let is_disguised = v6 && addresses.iter().any(|ip| Ipv6Addr::from(*ip).to_ipv4_mapped().is_some());
    if is_disguised || claimed != Some(length) || length > udp.len() || length < UDP {
        return malformed;
    }
    let key = FlowKey {
        remote: addresses[0],
        local: addresses[1],
        remote_port: [udp[0], udp[1]],
        local_port: [udp[2], udp[3]],
        channel: [0; 2],
        zero: [0; 2],
    };
    Ok(Packet { key, v6, tos, ttl, udp: &udp[..length] })
}

struct Egress<'t> {
    flow: &'t Flow,
    interface: u32,
    mtu: usize,
    hop: [u64; HOP_WORDS],
    turned_back: bool,
    to_peer: bool,
    forwards: bool,
    payload: usize,
}

impl Egress<'_> {
    fn leaves_with_header(&self) -> bool {
        self.flow.kind == Kind::ToClient as u8
    }

    fn hops(&self) -> u8 {
        if self.turned_back { 2 } else { 1 }
    }

    fn udp_length(&self) -> usize {
        UDP + if self.leaves_with_header() { CHANNEL_DATA } else { 0 } + self.payload
    }

    fn ip_length(&self) -> usize {
        self.udp_length() + if self.flow.leaves_by_v6() { IPV6 } else { IPV4 }
    }
}

fn forward(arrived: Arrived<'_>, flow: &Flow, tables: &Tables, moment: &Moment) -> Decision {
    let Arrived { place, frame, packet } = arrived;
    let now = moment.now;
    let (Some(mut state), Some(drained)) =
        (tables.states.get(flow.state as usize).copied(), tables.drained.get(flow.socket as usize).copied())
    else {
        return Decision { action: Action::Up(Some(Count::Stale)), state: None };
    };
    let in_bulk = match place {
        Place::Tc => frame.is_super_packet(),
        Place::Xdp => state.count(now),
    };
    // Packets still in the driver must not be overtaken by packets in user space.
    let leaving = place == Place::Xdp && state.is_leaving(now);
    let judged = if in_bulk && !leaving {
        Err(if place == Place::Tc { Count::SuperPacket } else { Count::Bulk })
    } else {
        let way = judge(arrived, flow, tables, moment);
        let settled = way.and_then(|way| state.settling(drained, now, leaving).map(|()| way));
        settled.and_then(|way| leased(arrived, flow, tables, now).map(|()| way))
    };
    let before = pseudo_header(&packet.key.remote, &packet.key.local, packet.udp.len());
    let judged = judged.and_then(|way| {
        let summed = if place == Place::Tc { frame.summed } else { Summed::Nothing };
        Ok((way, checksum(summed, packet, before).ok_or(Count::Checksum)?))
    });
    if in_bulk && !matches!(judged, Err(Count::Behind)) {
        state.calm = state.calm.max(now + CALM_NS);
    }
    let action = match judged {
        Ok((way, field)) => {
            if place == Place::Xdp {
                state.across = now;
            }
            across(arrived, &way, &field, before, moment)
        }
        Err(Count::Behind) => Action::Dropped(Count::Behind),
        Err(count) => {
            state.up = state.up.max(now);
            Action::Up(Some(count))
        }
    };
    Decision { action, state: Some((flow.state, state)) }
}

impl State {
    /// Counts a datagram; returns true if datagrams arrive so fast that user space is cheaper.
    fn count(&mut self, now: u64) -> bool {
        let is_later = now.wrapping_sub(self.since).cast_signed() > BURST_NS.cast_signed();
        if is_later {
            self.since = now;
        }
        self.arrived = if is_later { 1 } else { self.arrived + 1 };
        self.arrived > BURST
    }

    /// True if a packet may still be on its way out of the driver and none is in user space.
    fn is_leaving(&self, now: u64) -> bool {
        now.wrapping_sub(self.across).cast_signed() < POLL_NS.cast_signed() && self.up <= self.across
    }

    /// Returns an error if the flow must stay in user space because its packets there may still be in flight.
    fn settling(&self, drained: u64, now: u64, leaving: bool) -> Result<(), Count> {
        if !leaving && now < self.calm {
            Err(Count::Settling)
        } else if drained & !BEHIND >= self.up {
            Ok(())
        } else if drained & BEHIND != 0 {
            Err(Count::Behind)
        } else {
            Err(Count::Settling)
        }
    }
}

/// Requires a lease. A datagram without one goes to user space and requests it.
fn leased(arrived: Arrived<'_>, flow: &Flow, tables: &Tables, now: u64) -> Result<(), Count> {
    let tos = if flow.kind == Kind::Forward as u8 { 0 } else { arrived.packet.tos };
    let is_covered = || flow.lease.covers(flow.stamp, now, arrived.frame.interface, tos);
    match (flow.lease.refused, flow.lease.asked_by == flow.stamp) {
        _ if !tables.leases || is_covered() => Ok(()),
        (0, true) => Err(Count::Unseen),
        (0, false) => Err(Count::Lease),
        _ => Err(Count::Refused),
    }
}

fn judge<'t>(
    arrived: Arrived<'_>,
    flow: &'t Flow,
    tables: &'t Tables,
    moment: &Moment,
) -> Result<Egress<'t>, Count> {
    let Arrived { place, frame, packet } = arrived;
    let now = moment.now;
    if flow.kind == Kind::Client as u8 {
        return Err(Count::NotChannelData);
    }
    if flow.expires <= now {
        return Err(Count::Expired);
    }
    if !is_from_there(place, frame, flow.back, tables) {
        return Err(Count::Source);
    }
    let to_peer = flow.kind == Kind::ToPeer as u8;
    let taken = UDP + if to_peer { CHANNEL_DATA } else { 0 };
    let (interface, mtu) = way_of(route(tables, flow.route));
    let mut way = Egress {
        flow,
        interface,
        mtu,
        hop: [0; HOP_WORDS],
        turned_back: false,
        to_peer,
        forwards: flow.kind == Kind::Forward as u8,
        payload: packet.udp.len().wrapping_sub(taken),
    };
    if interface == 0 {
        if !to_peer {
            return Err(Count::NoRoute);
        }
        (way.flow, way.interface, way.mtu) = turn_back(flow, arrived.packet.tos, tables, now)?;
        way.turned_back = true;
    }
    if place == Place::Xdp {
        way.hop = tables.hops.get(way.flow.route as usize).copied().unwrap_or_default();
        if way.hop[0] == 0 {
            return Err(Count::NoNeighbour);
        }
    }
    if to_peer && usize::from(packet.channel_data()[1]) != way.payload {
        return Err(Count::Padded);
    }
    if packet.ttl <= way.hops() {
        return Err(Count::Ttl);
    }
    let leaves_by_v6 = way.flow.leaves_by_v6();
    if packet.check() == 0 && (packet.v6 || leaves_by_v6) {
        return Err(Count::NoChecksum);
    }
    let fits = way.ip_length() <= way.mtu
        && (!leaves_by_v6 || way.ip_length() <= MIN_MTU_V6)
        && packet.udp.len() <= MAX_UDP;
    if !fits {
        return Err(Count::TooBig);
    }
    Ok(way)
}

/// True if a packet arrives on an interface through which its source is reachable. XDP sees neither
/// the packet's VLAN nor whether it is addressed to this machine, so it accepts only the interface of the
/// route back, and only our link address on it.
fn is_from_there(place: Place, frame: &Frame<'_>, back: u32, tables: &Tables) -> bool {
    let word = route(tables, back);
    let (interface, _) = way_of(word);
    if interface == 0 {
        return false;
    }
    let is_there = interface == frame.interface;
    match place {
        Place::Tc => word & ONLY_FROM_THERE == 0 || is_there,
        Place::Xdp => {
            let [_, from] = tables.hops.get(back as usize).copied().unwrap_or_default();
            is_there && from.to_le_bytes()[..6] == frame.bytes[..6]
        }
    }
}

fn across(arrived: Arrived<'_>, way: &Egress<'_>, field: &Field, before: u64, moment: &Moment) -> Action {
    let (packet, leaving) = (arrived.packet, way.flow);
    let payload = &packet.udp[packet.udp.len() - way.payload..];
    let mut udp = Vec::with_capacity(way.udp_length());
    udp.extend([leaving.from_port, leaving.to_port].as_flattened());
    udp.extend([to_be16(way.udp_length()), [0; 2]].as_flattened());
    if way.leaves_with_header() {
        udp.extend([leaving.channel, to_be16(payload.len())].as_flattened());
    }
    let after = pseudo_header(&leaving.from, &leaving.to, way.udp_length());
    let check = match field {
        Field::Nothing => 0,
        Field::PseudoHeader => fold(after),
        Field::Whole => {
            // Change the checksum only by the difference, so that the receiver detects a damaged payload.
            let taken = &packet.udp[..packet.udp.len() - payload.len()];
            let old = before + sum(&taken[..6]) + sum(&taken[UDP..]);
            let new = after + sum(&udp);
            match !fold(u64::from(!packet.check()) + u64::from(!fold(old)) + new) {
                0 => 0xffff,
                check => check,
            }
        }
    };
    udp[6..8].copy_from_slice(&check.to_be_bytes());
    let mut bytes = lower_headers(arrived, way, moment);
    bytes.extend(udp);
    bytes.extend(payload);
    let count = match (way.turned_back, way.to_peer) {
        (true, _) => Count::TurnedBack,
        (false, _) if way.forwards => Count::Forwarded,
        (false, true) => Count::ToPeer,
        (false, false) => Count::ToClient,
    };
    Action::Across { interface: way.interface, bytes, count, payload: payload.len() }
}

fn lower_headers(arrived: Arrived<'_>, way: &Egress<'_>, moment: &Moment) -> Vec<u8> {
    let Arrived { place, frame, packet } = arrived;
    let leaving = way.flow;
    // A forwarder's sockets send with TOS 0.
    let tos = if way.forwards { 0 } else { packet.tos };
    let mut bytes = match place {
        Place::Tc => frame.bytes[..12].to_vec(),
        Place::Xdp => way.hop.iter().flat_map(|word| word.to_le_bytes().into_iter().take(6)).collect(),
    };
    if leaving.leaves_by_v6() {
        bytes.extend(ETH_IPV6.to_be_bytes());
        bytes.extend([0x60 | tos >> 4, tos << 4, 0, 0]);
        bytes.extend(to_be16(way.udp_length()));
        bytes.extend([PROTOCOL, packet.ttl - way.hops()]);
        bytes.extend([leaving.from, leaving.to].as_flattened());
    } else {
        let mut header = [0; IPV4];
        header[..2].copy_from_slice(&[0x45, tos]);
        header[2..4].copy_from_slice(&to_be16(way.ip_length()));
        header[4..6].copy_from_slice(&moment.id);
        header[8..10].copy_from_slice(&[packet.ttl - way.hops(), PROTOCOL]);
        header[12..16].copy_from_slice(&leaving.from[12..]);
        header[16..20].copy_from_slice(&leaving.to[12..]);
        let check = !fold(sum(&header));
        header[10..12].copy_from_slice(&check.to_be_bytes());
        bytes.extend(ETH_IPV4.to_be_bytes());
        bytes.extend(header);
    }
    bytes
}

/// Handles a datagram to a peer that is one of our relayed addresses: it continues to the client of that
/// address.
fn turn_back<'t>(
    flow: &Flow,
    tos: u8,
    tables: &'t Tables,
    now: u64,
) -> Result<(&'t Flow, u32, usize), Count> {
    let key = FlowKey {
        remote: flow.from,
        local: flow.to,
        remote_port: flow.from_port,
        local_port: flow.to_port,
        ..FlowKey::default()
    };
    let next = tables.flows.get(&key).ok_or(Count::NoRoute)?;
    if next.stamp != next.stamp_end || next.key != key {
        return Err(Count::Stale);
    }
    if next.kind != Kind::ToClient as u8 {
        return Err(Count::NoRoute);
    }
    let state = tables.states.get(next.state as usize).ok_or(Count::Stale)?;
    let drained = *tables.drained.get(next.socket as usize).ok_or(Count::Stale)?;
    if next.expires <= now {
        return Err(Count::Expired);
    }
    // Packets that user space sent to that address passed the program on loopback, which marked the flow.
    state.settling(drained, now, false)?;
    if tables.leases && !next.lease.covers(next.stamp, now, LOOPBACK, tos) {
        return Err(Count::Lease);
    }
    match way_of(route(tables, next.route)) {
        (0, _) => Err(Count::NoRoute),
        (interface, mtu) => Ok((next, interface, mtu)),
    }
}

fn route(tables: &Tables, number: u32) -> u64 {
    tables.routes.get(number as usize).copied().unwrap_or_default()
}

enum Field {
    Nothing,
    Whole,
    PseudoHeader,
}

fn checksum(summed: Summed, packet: &Packet<'_>, pseudo_header: u64) -> Option<Field> {
    if packet.check() == 0 {
        return Some(Field::Nothing);
    }
    if summed == Summed::Verified {
        return Some(Field::Whole);
    }
    if summed == Summed::Partial && packet.check() == fold(pseudo_header) {
        return Some(Field::PseudoHeader);
    }
    (fold(pseudo_header + sum(packet.udp)) == 0xffff).then_some(Field::Whole)
}

fn pseudo_header(from: &[u8; 16], to: &[u8; 16], length: usize) -> u64 {
    let is_v4 = Ipv6Addr::from(*from).to_ipv4_mapped().is_some();
    // Do not include the prefix that maps IPv4 into IPv6.
    let skipped = if is_v4 { 12 } else { 0 };
    sum(&from[skipped..]) + sum(&to[skipped..]) + length as u64 + u64::from(PROTOCOL)
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[expect(clippy::cast_possible_truncation, reason = "lengths of a datagram that was not longer than 64 KiB")]
fn to_be16(length: usize) -> [u8; 2] {
    (length as u16).to_be_bytes()
}

/// One's complement sum (RFC 1071), not yet folded.
fn sum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(2).map(|pair| u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    words.map(u64::from).sum()
}

#[expect(clippy::cast_possible_truncation, reason = "folded into sixteen bits")]
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
