//! Layout of the maps and counters shared by the program and user space. Tests compare it with `bpf/flow.h`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use aya::Pod;
use strum::{IntoStaticStr, VariantArray};
use turnpike_wire::{address::canonical, channel_data::ChannelNumber};

/// Hash (FNV-1a) of `flow.h`, which defines the layout and meaning of the maps. Another version can use the
/// maps only if its hash is equal.
pub const LAYOUT: u64 = sum_of(include_bytes!("../bpf/flow.h"));

const fn sum_of(bytes: &[u8]) -> u64 {
    let (mut sum, mut at) = (0xcbf2_9ce4_8422_2325_u64, 0);
    while at < bytes.len() {
        sum = (sum ^ bytes[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    sum
}

/// Key of a flow. Fields are in network byte order, as in packets, with IPv4 addresses mapped into IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C, align(8))]
pub struct FlowKey {
    pub remote: [u8; 16],
    pub local: [u8; 16],
    pub remote_port: [u8; 2],
    pub local_port: [u8; 2],
    /// ChannelData number; 0 for datagrams from peers, and for a client as a whole.
    pub channel: [u8; 2],
    pub zero: [u8; 2],
}

// SAFETY: plain bytes, no padding: 16 + 16 + 4 * 2 = 40.
unsafe impl Pod for FlowKey {}

impl FlowKey {
    #[must_use]
    pub fn new(remote: SocketAddr, local: SocketAddr, channel: Option<ChannelNumber>) -> Self {
        Self {
            remote: mapped(remote.ip()),
            local: mapped(local.ip()),
            remote_port: remote.port().to_be_bytes(),
            local_port: local.port().to_be_bytes(),
            channel: channel.map_or([0; 2], |channel| channel.get().to_be_bytes()),
            zero: [0; 2],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// No forwarding: marks a client that has flows, so that its other packets are not overtaken.
    Client = 0,
    ToPeer = 1,
    ToClient = 2,
    /// Datagram of a forwarder's session, in either direction, of which only the addresses change.
    Forward = 3,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Flow {
    /// Different for each installation and equal to `stamp_end`, so that an entry overwritten during a read
    /// is detected.
    pub stamp: u64,
    pub key: FlowKey,
    pub from: [u8; 16],
    pub to: [u8; 16],
    pub from_port: [u8; 2],
    pub to_port: [u8; 2],
    /// Channel of the outgoing datagram; 0 if it goes to a peer.
    pub channel: [u8; 2],
    pub kind: u8,
    pub unused: u8,
    pub route: u32,
    pub back: u32,
    pub state: u32,
    /// Number of the socket for packets passed to user space.
    pub socket: u32,
    /// Expiry, on the monotonic clock in nanoseconds.
    pub expires: u64,
    pub stamp_end: u64,
    pub lease: Lease,
}

// SAFETY: numbers and bytes, no padding: 8 + 40 + 16 + 16 + 8 + 4 * 4 + 8 + 8 + 56 = 176, a multiple of 8.
unsafe impl Pod for Flow {}

/// Permission for a flow to be relayed by the kernel for some seconds, if leases are required. Written by the
/// programs, and reset when the flow is installed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Lease {
    /// Stamp of the flow that has the lease.
    pub of: u64,
    /// Expiry, on the monotonic clock in nanoseconds.
    pub until: u64,
    /// Bit set of the DSCP values that the lease covers.
    pub dscps: u64,
    /// Stamp of the flow that requests a lease; 0 if no flow does.
    pub asked_by: u64,
    /// Bit set of the requested DSCP values.
    pub asked: u64,
    /// Interface on which datagrams must arrive.
    pub from: u32,
    /// Interface on which the requesting datagrams arrived; 0 if there were several.
    pub asked_from: u32,
    /// UDP length of the first requesting datagram when it leaves.
    pub asked_length: u16,
    /// TTL of the first requesting datagram.
    pub asked_ttl: u8,
    /// 1 if the last request was refused.
    pub refused: u8,
    pub unused: u32,
}

// SAFETY: numbers and bytes, no padding: 5 * 8 + 2 * 4 + 2 + 2 + 4 = 56.
unsafe impl Pod for Lease {}

const _: () = assert!(size_of::<FlowKey>() == 40 && size_of::<Lease>() == 56 && size_of::<Flow>() == 176);

impl Lease {
    /// True if datagrams that arrive on this interface with this TOS may be relayed by the kernel.
    #[must_use]
    pub fn covers(&self, stamp: u64, now: u64, interface: u32, tos: u8) -> bool {
        self.of == stamp && self.until > now && self.from == interface && self.dscps & dscp_bit(tos) != 0
    }
}

/// Bit of a TOS or traffic class in a set of DSCP values (RFC 2474).
#[must_use]
pub fn dscp_bit(tos: u8) -> u64 {
    1 << (tos >> 2)
}

/// Maximum duration of a lease in nanoseconds. The actual duration is up to a quarter shorter.
pub const LEASE_NS: u64 = 4_000_000_000;
/// Number of the loopback interface in each network namespace.
pub const LOOPBACK: u32 = 1;

impl Flow {
    /// Key of the flow's datagrams as they leave: destination, source and channel. `None` for
    /// [`Kind::Client`].
    #[must_use]
    pub fn leaves(&self) -> Option<FlowKey> {
        let kind =
            [Kind::ToPeer, Kind::ToClient, Kind::Forward].into_iter().find(|it| *it as u8 == self.kind)?;
        Some(FlowKey {
            remote: self.to,
            local: self.from,
            remote_port: self.to_port,
            local_port: self.from_port,
            channel: if kind == Kind::ToClient { self.channel } else { [0; 2] },
            zero: [0; 2],
        })
    }

    #[must_use]
    pub fn leaves_by_v6(&self) -> bool {
        Ipv6Addr::from(self.to).to_ipv4_mapped().is_none()
    }
}

/// Words (64 bits) per state.
pub const STATE_WORDS: usize = 8;
/// Word: time of the last packet passed to user space.
pub const UP: usize = 0;
/// Word: datagrams relayed by the kernel.
pub const DATAGRAMS: usize = 1;
/// Word: payload bytes of the datagrams relayed by the kernel.
pub const BYTES: usize = 2;
/// Word: time until which the flow stays in user space regardless of its socket.
pub const CALM: usize = 3;
/// Word: start of XDP's current count of datagrams.
pub const SINCE: usize = 4;
/// Word: XDP's current count.
pub const ARRIVED: usize = 5;
/// Word: time at which XDP last relayed a packet.
pub const ACROSS: usize = 6;

/// Word: slot of the flow's streams plus 1; 0 if they are not measured.
pub const MEASURED: usize = 7;

/// Streams per slot, and words of the slot before them.
pub const STREAMS: usize = 4;
pub const STREAMS_HEAD: usize = 3;
/// Words per stream.
pub const STREAM_WORDS: usize = 7;
pub const STREAMS_WORDS: usize = STREAMS_HEAD + STREAMS * STREAM_WORDS;
/// Word of a slot: time of the latest datagram of a stream.
pub const LAST: usize = 0;
/// Word of a slot: longest gap between two datagrams.
pub const LONGEST_GAP: usize = 1;
/// Word of a slot: time from which an RTCP packet goes to user space.
pub const RTCP_DUE: usize = 2;

/// Words per next hop: its link address (0 if unknown) and our own on that link, each as in a frame plus two
/// zero bytes.
pub const HOP_WORDS: usize = 2;

/// Words per gateway: its address as in [`mapped`], 0 if unknown.
pub const GATEWAY_WORDS: usize = 2;

/// Flag in a drain time. It means that the worker cannot keep up with the socket, which loses datagrams.
pub const BEHIND: u64 = 1 << 63;

/// Time for which a flow stays in user space after bulk traffic, in nanoseconds.
pub const CALM_NS: u64 = 5_000_000;
/// Maximum number of datagrams within [`BURST_NS`] that XDP does not treat as bulk.
pub const BURST: u64 = 16;
pub const BURST_NS: u64 = 250_000;
/// Time after which XDP's packets have left, in nanoseconds: drivers send at the end of a poll.
pub const POLL_NS: u64 = 500_000;

/// Maximum time until a packet seen at TC ingress is in its socket's queue, in nanoseconds: both happen in
/// one softirq run, which passes on eight packets at a time.
pub const TC_GAP_NS: u64 = 50_000;
/// Like [`TC_GAP_NS`], but for XDP, which runs before GRO: GRO may hold the packet until the next clock tick.
pub const XDP_GAP_NS: u64 = 2_000_000;

/// Flag in a route: packets from the addresses it leads to must arrive on this interface (strict reverse
/// path).
pub const ONLY_FROM_THERE: u64 = 1 << 32;
/// Flag in a route: XDP sends on this interface only by redirection.
pub const BY_REDIRECTION: u64 = 1 << 33;

/// First bit of the interface's MTU in a route.
const MTU_SHIFT: u32 = 40;

#[must_use]
pub fn route_by(interface: u32, mtu: u32) -> u64 {
    u64::from(interface) | u64::from(mtu) << MTU_SHIFT
}

/// Interface and MTU of a route; interface 0 means no route.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the low half is the interface")]
pub fn way_of(route: u64) -> (u32, usize) {
    (route as u32, (route >> MTU_SHIFT) as usize)
}

pub const LISTENER: u64 = 1;
pub const RELAY: u64 = 2;

/// Counters, in the program's order. The first ones count relayed or dropped packets; the others count
/// packets passed to user space, by reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Count {
    ToPeer,
    ToClient,
    /// Relayed from a client to another client through two relayed addresses of this machine.
    TurnedBack,
    Forwarded,
    /// Dropped: the kernel refused a change after others had been made.
    Failed,
    /// Dropped: user space is overloaded; the flow returns to the kernel once user space has caught up.
    Behind,
    /// Coalesced by GRO: user space handles super-packets more cheaply.
    SuperPacket,
    /// Like [`SuperPacket`](Self::SuperPacket), but for XDP, which runs before GRO: many datagrams of the
    /// flow at once.
    Bulk,
    /// Earlier packets of the flow went to user space and may still be in flight.
    Settling,
    NotChannelData,
    /// Channel not bound, or not installed in the kernel.
    UnknownChannel,
    UnknownPeer,
    Expired,
    Padded,
    Fragment,
    IpOptions,
    Ttl,
    /// Exceeds the next link's MTU, or the program's buffer.
    TooBig,
    /// No usable route: none, one to this machine itself, or one that is not Ethernet.
    NoRoute,
    /// XDP does not know the next hop's link address, or cannot send to it.
    NoNeighbour,
    /// The source is our own address, unreachable, or reachable only through another interface (strict
    /// reverse path).
    Source,
    Checksum,
    NoChecksum,
    /// Inconsistent lengths, or a bad IPv4 header checksum.
    Malformed,
    /// The flow was changed while the packet was being processed.
    Stale,
    /// The flow has no lease, or its lease has ended: this datagram requests one.
    Lease,
    /// The datagram that requested a lease was not seen leaving: dropped, translated or encrypted on its way.
    Unseen,
    /// The datagram that requested a lease did not leave as the kernel path would have sent it.
    Refused,
    /// STUN or RTCP of a measured flow, which user space reads.
    Measured,
    /// It left through another interface, or with a VLAN tag.
    RefusedInterface,
    /// It left with a source other than its socket's (NAT).
    RefusedSource,
    RefusedMark,
    RefusedDscp,
    RefusedTtl,
    RefusedPriority,
    /// Its cgroup has a class for traffic control (net_cls).
    RefusedCgroup,
}

impl Count {
    #[must_use]
    pub fn is_pass(self) -> bool {
        (self as usize > Self::Behind as usize) && !self.is_refusal()
    }

    /// True for reasons why leases are refused.
    #[must_use]
    pub fn is_refusal(self) -> bool {
        self as usize >= Self::RefusedInterface as usize
    }
}

#[must_use]
pub fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

#[must_use]
pub fn classes(listeners: &[u16], relays: std::ops::RangeInclusive<u16>) -> Vec<u64> {
    let mut words = vec![0; 2048];
    let ports = listeners.iter().map(|port| (*port, LISTENER)).chain(relays.map(|port| (port, RELAY)));
    for (port, class) in ports {
        words[usize::from(port >> 5)] |= class << ((port & 31) * 2);
    }
    words
}

#[must_use]
pub fn class_of(classes: &[u64], port: u16) -> u64 {
    classes[usize::from(port >> 5)] >> ((port & 31) * 2) & 3
}

/// Inverse of [`mapped`], with a port.
#[must_use]
pub fn address(ip: [u8; 16], port: [u8; 2]) -> SocketAddr {
    canonical(SocketAddr::new(Ipv6Addr::from(ip).into(), u16::from_be_bytes(port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_in_c(prefixes: &[&str]) -> Vec<String> {
        let source = include_str!("../bpf/flow.h");
        let body = source
            .split("enum count {")
            .nth(1)
            .expect("flow.h defines the counters")
            .split('}')
            .next()
            .expect("a closing brace");
        let lines = body.lines().map(str::trim).filter(|line| line.ends_with(','));
        let name = |line: &str| {
            let name = line.trim_end_matches(',');
            let name = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix));
            name.map(str::to_lowercase)
        };
        lines.filter_map(name).filter(|name| name != "counts").collect()
    }

    #[test]
    fn counters_have_the_same_order_in_both_languages() {
        let here: Vec<&str> = Count::VARIANTS.iter().map(Into::into).collect();
        assert_eq!(names_in_c(&["COUNT_", "PASS_", ""]), here);
        assert!(Count::SuperPacket.is_pass() && !Count::Behind.is_pass());
    }

    #[test]
    fn words_of_a_state_have_the_same_order_in_both_languages() {
        let source = include_str!("../bpf/flow.h");
        let body = source.split("struct state {").nth(1).expect("flow.h defines the state").split('}').next();
        let fields =
            body.expect("a closing brace").lines().filter_map(|line| line.trim().strip_prefix("u64 "));
        let names: Vec<&str> = fields.flat_map(|line| line.trim_end_matches(';').split(", ")).collect();
        for (at, name) in [
            (UP, "up"),
            (DATAGRAMS, "datagrams"),
            (BYTES, "bytes"),
            (CALM, "calm"),
            (SINCE, "since"),
            (ARRIVED, "arrived"),
            (ACROSS, "across"),
            (MEASURED, "measured"),
        ] {
            assert_eq!(names.get(at), Some(&name), "{names:?}");
        }
        assert_eq!(names.len(), STATE_WORDS, "{names:?}");
    }

    #[test]
    fn numbers_are_the_same_in_both_languages() {
        let source = include_str!("../bpf/flow.h");
        for line in [
            format!("#define CALM {CALM_NS}ULL"),
            format!("#define BURST {BURST}\n#define BURST_TIME {BURST_NS}ULL"),
            format!("#define POLL_TIME {POLL_NS}ULL"),
            format!("#define LEASE {LEASE_NS}ULL"),
            "#define BEHIND (1ULL << 63)".to_owned(),
            format!("enum {{ STREAMS = {STREAMS} }};"),
            "#define ONLY_FROM_THERE (1ULL << 32)".to_owned(),
            "#define BY_REDIRECTION (1ULL << 33)".to_owned(),
            format!("#define MTU(route) ((u32)((route) >> {MTU_SHIFT}))"),
            format!("enum {{ LISTENER = {LISTENER}, RELAY = {RELAY} }};"),
            format!("\tCLIENT = {},", Kind::Client as u8),
            format!("\tTO_PEER = {},", Kind::ToPeer as u8),
            format!("\tTO_CLIENT = {},", Kind::ToClient as u8),
            format!("\tFORWARD = {},", Kind::Forward as u8),
        ] {
            assert!(source.contains(&line), "{line}");
        }
    }

    #[test]
    fn each_port_has_the_right_class() {
        let words = classes(&[3478, 50_000], 49_152..=65_535);
        for (port, class) in [
            (3478, LISTENER),
            (3477, 0),
            (49_151, 0),
            (49_152, RELAY),
            (50_000, LISTENER | RELAY),
            (65_535, RELAY),
            (0, 0),
        ] {
            assert_eq!(class_of(&words, port), class, "{port}");
        }
    }
}
