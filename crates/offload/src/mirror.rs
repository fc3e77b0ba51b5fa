//! What the program in the kernel decides, decided once more in Rust: pure, so that it can be read and tested without a kernel. Each rule
//! stands where it stands in `bpf/relay.bpf.c`; tests feed both the same packets and tables.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, Ipv6Addr},
};

use crate::layout::{
    CALM_NS, Count, Flow, FlowKey, Kind, LISTENER, ONLY_FROM_THERE, RELAY, class_of, mapped,
};

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const IPV6: usize = 40;
const UDP: usize = 8;
const CHANNEL_DATA: usize = 4;
/// IP's number of UDP.
const PROTOCOL: u8 = 17;
const ETH_IPV4: u16 = 0x0800;
const ETH_IPV6: u16 = 0x86dd;
/// The longest UDP datagram that is looked at, header included.
const MAX_UDP: usize = 2044;
/// What fits through every link in IPv6 (RFC 8200 section 5).
const MIN_MTU_V6: usize = 1280;

/// A frame, and what the kernel knows of it.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// From the Ethernet header on.
    pub bytes: &'a [u8],
    /// By which it came.
    pub interface: u32,
    /// Sent to this machine's address on that link.
    pub for_us: bool,
    /// Of how many datagrams GRO has made it.
    pub segments: u32,
    /// What is known of its UDP checksum.
    pub summed: Summed,
}

/// What the kernel knows of a UDP checksum (`ip_summed`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Summed {
    /// Nothing (CHECKSUM_NONE; CHECKSUM_PARTIAL looks the same).
    Nothing,
    /// It is right (CHECKSUM_UNNECESSARY).
    Verified,
    /// The sum of all that is behind the Ethernet header (CHECKSUM_COMPLETE).
    Complete,
}

/// What the maps hold.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// By key.
    pub flows: HashMap<FlowKey, Flow>,
    /// Word [`crate::layout::UP`] of each state.
    pub up: Vec<u64>,
    /// By socket.
    pub drained: Vec<u64>,
    /// By number.
    pub routes: Vec<u64>,
    /// See [`crate::layout::classes`].
    pub classes: Vec<u64>,
}

/// What is asked of the kernel on the way.
#[derive(Clone, Copy)]
pub struct Moment<'a> {
    /// The monotonic clock, in nanoseconds.
    pub now: u64,
    /// The ID of an IPv4 header: random.
    pub id: [u8; 2],
    /// The MTU of an interface, if there is one of this number.
    pub mtu: &'a dyn Fn(u32) -> Option<usize>,
}

/// What becomes of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Where it goes.
    pub verdict: Verdict,
    /// The state whose word [`crate::layout::UP`] becomes at least this.
    pub mark: Option<(u32, u64)>,
}

/// Where a frame goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// To the rest of the kernel; counted, or none of our business.
    Up(Option<Count>),
    /// Out by this interface, as these bytes (the Ethernet addresses are still to be filled in).
    Across {
        /// Its number.
        interface: u32,
        /// From the Ethernet header on.
        bytes: Vec<u8>,
        /// In which direction.
        count: Count,
        /// Bytes of the payload.
        payload: usize,
    },
}

/// A UDP datagram, as it came.
struct Packet<'a> {
    key: FlowKey,
    v6: bool,
    tos: u8,
    ttl: u8,
    /// From UDP's header to the end that it claims.
    udp: &'a [u8],
}

impl Packet<'_> {
    fn check(&self) -> u16 {
        be16(self.udp, 6)
    }

    /// Number and length of what may be ChannelData.
    fn channel_data(&self) -> [u16; 2] {
        if self.udp.len() < UDP + CHANNEL_DATA {
            [0; 2]
        } else {
            [be16(self.udp, UDP), be16(self.udp, UDP + 2)]
        }
    }
}

/// Decides.
#[must_use]
pub fn decide(frame: &Frame<'_>, tables: &Tables, moment: &Moment<'_>) -> Decision {
    let up = |count| Decision { verdict: Verdict::Up(count), mark: None };
    if !frame.for_us {
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
    let looks_like_it = class & LISTENER != 0 && frame.segments <= 1 && number & 0xc000 == 0x4000;
    let plain = packet.key;
    let on_channel = FlowKey { channel: number.to_be_bytes(), ..plain };
    for key in [on_channel, plain].iter().skip(usize::from(!looks_like_it)) {
        if let Some(flow) = tables.flows.get(key) {
            // Overwritten in this very moment.
            if flow.stamp != flow.stamp_end || flow.key != *key {
                return up(Some(Count::Stale));
            }
            return forward(frame, &packet, flow, tables, moment);
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

/// A UDP datagram that may be somebody's flow, or what to count.
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
    // The kernel drops IPv6 packets with mapped addresses too (ip6_rcv), and here they would pass for IPv4.
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

/// How a packet of a flow goes across.
struct Way<'t> {
    /// By which it leaves.
    flow: &'t Flow,
    interface: u32,
    /// One of our relayed addresses sends to another.
    turned_back: bool,
}

fn forward(
    frame: &Frame<'_>,
    packet: &Packet<'_>,
    flow: &Flow,
    tables: &Tables,
    moment: &Moment<'_>,
) -> Decision {
    let now = moment.now;
    let mut until = now;
    let up = |count, until: Option<u64>| Decision {
        verdict: Verdict::Up(Some(count)),
        mark: until.map(|until| (flow.state, until)),
    };
    let (Some(last_up), Some(drained)) =
        (tables.up.get(flow.state as usize), tables.drained.get(flow.socket as usize))
    else {
        return up(Count::Stale, None);
    };
    if frame.segments > 1 {
        return up(Count::SuperPacket, Some(now + CALM_NS));
    }
    if flow.kind == Kind::Client as u8 {
        return up(Count::NotChannelData, Some(now));
    }
    if flow.expires <= now {
        return up(Count::Expired, Some(now));
    }
    let back = tables.routes.get(flow.back as usize).copied().unwrap_or_default();
    if interface_of(back) == 0 || (back & ONLY_FROM_THERE != 0 && interface_of(back) != frame.interface) {
        return up(Count::Source, Some(now));
    }
    let to_peer = flow.kind == Kind::ToPeer as u8;
    let interface = interface_of(tables.routes.get(flow.route as usize).copied().unwrap_or_default());
    let mut way = Way { flow, interface, turned_back: false };
    if interface == 0 {
        let turned = if to_peer { turn_back(flow, tables, now, &mut until) } else { Err(Count::NoRoute) };
        way = match turned {
            Ok(way) => way,
            Err(count) => return up(count, Some(until)),
        };
    }
    let leaves_with_header = way.flow.kind == Kind::ToClient as u8;
    let forwards = flow.kind == Kind::Forward as u8;
    // A forwarder's sockets send with none.
    let tos = if forwards { 0 } else { packet.tos };
    let payload = if to_peer { &packet.udp[UDP + CHANNEL_DATA..] } else { &packet.udp[UDP..] };
    if to_peer && usize::from(packet.channel_data()[1]) != payload.len() {
        return up(Count::Padded, Some(until));
    }
    let hops = if way.turned_back { 2 } else { 1 };
    if packet.ttl <= hops {
        return up(Count::Ttl, Some(until));
    }
    let leaves_by_v6 = way.flow.leaves_by_v6();
    if packet.check() == 0 && (packet.v6 || leaves_by_v6) {
        return up(Count::NoChecksum, Some(until));
    }
    let udp_length = UDP + if leaves_with_header { CHANNEL_DATA } else { 0 } + payload.len();
    let ip_length = udp_length + if leaves_by_v6 { IPV6 } else { IPV4 };
    let fits = (moment.mtu)(way.interface).is_some_and(|mtu| ip_length <= mtu)
        && (!leaves_by_v6 || ip_length <= MIN_MTU_V6)
        && packet.udp.len() <= MAX_UDP;
    if !fits {
        return up(Count::TooBig, Some(until));
    }
    if drained < last_up {
        return up(Count::Settling, Some(until));
    }
    let before = pseudo_header(&packet.key.remote, &packet.key.local, packet.udp.len());
    let Some(sum_is) = judge(frame.summed, packet, before) else { return up(Count::Checksum, Some(until)) };

    let leaving = way.flow;
    let mut udp = Vec::with_capacity(udp_length);
    udp.extend([leaving.from_port, leaving.to_port].as_flattened());
    udp.extend([to_be16(udp_length), [0; 2]].as_flattened());
    if leaves_with_header {
        udp.extend([leaving.channel, to_be16(payload.len())].as_flattened());
    }
    let after = pseudo_header(&leaving.from, &leaving.to, udp_length);
    let check = match sum_is {
        Field::Nothing => 0,
        Field::PseudoHeader => fold(after),
        Field::Whole => {
            // Only the change is added: a payload that was damaged shows at the far end.
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
    let mut bytes = frame.bytes[..12].to_vec();
    if leaves_by_v6 {
        bytes.extend(ETH_IPV6.to_be_bytes());
        bytes.extend([0x60 | tos >> 4, tos << 4, 0, 0]);
        bytes.extend(to_be16(udp_length));
        bytes.extend([PROTOCOL, packet.ttl - hops]);
        bytes.extend([leaving.from, leaving.to].as_flattened());
    } else {
        let mut header = [0; IPV4];
        header[..2].copy_from_slice(&[0x45, tos]);
        header[2..4].copy_from_slice(&to_be16(ip_length));
        header[4..6].copy_from_slice(&moment.id);
        header[8..10].copy_from_slice(&[packet.ttl - hops, PROTOCOL]);
        header[12..16].copy_from_slice(&leaving.from[12..]);
        header[16..20].copy_from_slice(&leaving.to[12..]);
        let check = !fold(sum(&header));
        header[10..12].copy_from_slice(&check.to_be_bytes());
        bytes.extend(ETH_IPV4.to_be_bytes());
        bytes.extend(header);
    }
    bytes.extend(udp);
    bytes.extend(payload);
    let count = match (way.turned_back, to_peer) {
        (true, _) => Count::TurnedBack,
        (false, _) if forwards => Count::Forwarded,
        (false, true) => Count::ToPeer,
        (false, false) => Count::ToClient,
    };
    let interface = way.interface;
    Decision { verdict: Verdict::Across { interface, bytes, count, payload: payload.len() }, mark: None }
}

/// The peer is a relayed address of ours: leads on to the client behind that.
fn turn_back<'t>(flow: &Flow, tables: &'t Tables, now: u64, until: &mut u64) -> Result<Way<'t>, Count> {
    let key = FlowKey {
        remote: flow.from,
        local: flow.to,
        remote_port: flow.from_port,
        local_port: flow.to_port,
        ..FlowKey::default()
    };
    let next = tables.flows.get(&key).ok_or(Count::NoRoute)?;
    // User space sends it to itself: that takes two sockets to be emptied.
    *until = now + CALM_NS;
    if next.stamp != next.stamp_end || next.key != key {
        return Err(Count::Stale);
    }
    if next.kind != Kind::ToClient as u8 {
        return Err(Count::NoRoute);
    }
    let (Some(last_up), Some(drained)) =
        (tables.up.get(next.state as usize), tables.drained.get(next.socket as usize))
    else {
        return Err(Count::Stale);
    };
    if next.expires <= now {
        return Err(Count::Expired);
    }
    if drained < last_up {
        return Err(Count::Settling);
    }
    match interface_of(tables.routes.get(next.route as usize).copied().unwrap_or_default()) {
        0 => Err(Count::NoRoute),
        interface => Ok(Way { flow: next, interface, turned_back: true }),
    }
}

/// What the checksum field holds.
enum Field {
    Nothing,
    Whole,
    PseudoHeader,
}

/// `None` for a wrong checksum.
fn judge(summed: Summed, packet: &Packet<'_>, pseudo_header: u64) -> Option<Field> {
    if packet.check() == 0 {
        return Some(Field::Nothing);
    }
    if summed == Summed::Verified {
        return Some(Field::Whole);
    }
    if summed == Summed::Nothing && packet.check() == fold(pseudo_header) {
        return Some(Field::PseudoHeader);
    }
    (fold(pseudo_header + sum(packet.udp)) == 0xffff).then_some(Field::Whole)
}

fn pseudo_header(from: &[u8; 16], to: &[u8; 16], length: usize) -> u64 {
    let is_v4 = Ipv6Addr::from(*from).to_ipv4_mapped().is_some();
    // What maps IPv4 addresses into IPv6 is no part of it.
    let skipped = if is_v4 { 12 } else { 0 };
    sum(&from[skipped..]) + sum(&to[skipped..]) + length as u64 + u64::from(PROTOCOL)
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is the interface")]
fn interface_of(route: u64) -> u32 {
    route as u32
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[expect(clippy::cast_possible_truncation, reason = "lengths of a datagram that was not longer than 64 KiB")]
fn to_be16(length: usize) -> [u8; 2] {
    (length as u16).to_be_bytes()
}

/// One's complement (RFC 1071), not yet folded.
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
