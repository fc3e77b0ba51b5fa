//! What the program and user space both know: the layout of the maps, and what is counted. `bpf/flow.h` says the same in C; tests hold the
//! two together.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use aya::Pod;
use strum::{IntoStaticStr, VariantArray};
use turnpike_wire::{address::canonical, channel_data::ChannelNumber};

/// How the maps are laid out, and what their words mean: a sum (FNV-1a) of `flow.h`. A process of another version goes on with the maps of
/// this one only if it has the same.
pub const LAYOUT: u64 = sum_of(include_bytes!("../bpf/flow.h"));

const fn sum_of(bytes: &[u8]) -> u64 {
    let (mut sum, mut at) = (0xcbf2_9ce4_8422_2325_u64, 0);
    while at < bytes.len() {
        sum = (sum ^ bytes[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    sum
}

/// What a packet shows, and a flow is found by. All is in network order, IPv4 addresses are mapped into IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C, align(8))]
pub struct FlowKey {
    /// Who sent it.
    pub remote: [u8; 16],
    /// Which of our addresses it came to.
    pub local: [u8; 16],
    /// UDP's source port.
    pub remote_port: [u8; 2],
    /// UDP's destination port.
    pub local_port: [u8; 2],
    /// ChannelData's number; 0 for datagrams of peers, and for a client as such.
    pub channel: [u8; 2],
    /// 0.
    pub zero: [u8; 2],
}

// SAFETY: plain bytes, no padding: 16 + 16 + 4 * 2 = 40.
unsafe impl Pod for FlowKey {}

impl FlowKey {
    /// Of what `remote` sends to `local`; on a channel, or plain.
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

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Nothing: a client with flows, which nothing else of it may be overtaken by.
    Client = 0,
    /// ChannelData of a client: its header is taken off.
    ToPeer = 1,
    /// A datagram of a peer: becomes ChannelData.
    ToClient = 2,
    /// A datagram of a forwarder's session, either way: it gets other addresses, and nothing else.
    Forward = 3,
}

/// A flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Flow {
    /// Drawn for each installation, as is `stamp_end`: an element may be overwritten while it is read.
    pub stamp: u64,
    /// What it is found by.
    pub key: FlowKey,
    /// Source address of the datagram that leaves.
    pub from: [u8; 16],
    /// Its destination.
    pub to: [u8; 16],
    /// Its source port.
    pub from_port: [u8; 2],
    /// Its destination port.
    pub to_port: [u8; 2],
    /// The channel that it is sent on; 0 to peers.
    pub channel: [u8; 2],
    /// [`Kind`].
    pub kind: u8,
    /// 0.
    pub unused: u8,
    /// Number of the way to `to`.
    pub route: u32,
    /// Number of the way back to where the packet came from.
    pub back: u32,
    /// Number of its [`State`].
    pub state: u32,
    /// Number of the socket that takes what goes up.
    pub socket: u32,
    /// On the kernel's monotonic clock, in nanoseconds.
    pub expires: u64,
    /// As `stamp`.
    pub stamp_end: u64,
}

// SAFETY: numbers and bytes, no padding: 8 + 40 + 16 + 16 + 8 + 4 * 4 + 8 + 8 = 120, a multiple of 8.
unsafe impl Pod for Flow {}

const _: () = assert!(size_of::<FlowKey>() == 40 && size_of::<Flow>() == 120);

impl Flow {
    /// Whether what leaves is IPv6.
    #[must_use]
    pub fn leaves_by_v6(&self) -> bool {
        Ipv6Addr::from(self.to).to_ipv4_mapped().is_none()
    }
}

/// Words (of 64 bits) of a state.
pub const STATE_WORDS: usize = 8;
/// Word of a state: when something of the flow last went up.
pub const UP: usize = 0;
/// Word of a state: datagrams that went across.
pub const DATAGRAMS: usize = 1;
/// Word of a state: bytes of their payload.
pub const BYTES: usize = 2;
/// Word of a state: until when the flow stays up, whatever its socket.
pub const CALM: usize = 3;
/// Word of a state: since when XDP counts its datagrams.
pub const SINCE: usize = 4;
/// Word of a state: how many they are.
pub const ARRIVED: usize = 5;
/// Word of a state: when XDP last sent something across.
pub const ACROSS: usize = 6;

/// Words of a next hop: its link address, 0 where that is not known, and our own on that link, each as it lies in a frame, with two bytes of
/// 0 behind.
pub const HOP_WORDS: usize = 2;

/// Words of a gateway: its address as [`mapped`] has it, 0 where it is not known.
pub const GATEWAY_WORDS: usize = 2;

/// In a time until which a socket has been emptied: it is not any more, and loses what it is sent.
pub const BEHIND: u64 = 1 << 63;

/// How long a flow that came in bulk stays up, in nanoseconds.
pub const CALM_NS: u64 = 5_000_000;
/// More than so many datagrams are bulk where XDP decides...
pub const BURST: u64 = 16;
/// ...that come within so many nanoseconds.
pub const BURST_NS: u64 = 250_000;
/// What XDP sends has left after so many nanoseconds: drivers send at the end of a poll.
pub const POLL_NS: u64 = 500_000;

/// A packet is in its socket's queue so long after the program at TC ingress has seen it, at the latest: both happen in one run of a softirq,
/// which hands on eight packets at a time. In nanoseconds.
pub const TC_GAP_NS: u64 = 50_000;
/// The same after XDP, which sees it before GRO: that may keep it until the next tick of the clock.
pub const XDP_GAP_NS: u64 = 2_000_000;

/// In a route: nothing from there may come by another interface.
pub const ONLY_FROM_THERE: u64 = 1 << 32;
/// In a route: XDP sends by this interface by redirection alone.
pub const BY_REDIRECTION: u64 = 1 << 33;

/// In a route: the MTU of its interface begins at this bit.
const MTU_SHIFT: u32 = 40;

/// A route by an interface with this MTU, in bytes.
#[must_use]
pub fn route_by(interface: u32, mtu: u32) -> u64 {
    u64::from(interface) | u64::from(mtu) << MTU_SHIFT
}

/// The interface and the MTU of a route; the interface is 0 where there is no route.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the low half is the interface")]
pub fn way_of(route: u64) -> (u32, usize) {
    (route as u32, (route >> MTU_SHIFT) as usize)
}

/// A class of ports: those of listeners.
pub const LISTENER: u64 = 1;
/// A class of ports: those of relayed transport addresses.
pub const RELAY: u64 = 2;

/// What is counted, in the order of the program's counters. The first were taken or dropped, all others went up for a reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Count {
    /// Sent to a peer.
    ToPeer,
    /// Sent to a client.
    ToClient,
    /// From a client by two relayed addresses of this machine to another client.
    TurnedBack,
    /// Of a forwarder's session.
    Forwarded,
    /// Dropped: the kernel refused a change when others had been made already.
    Failed,
    /// Dropped: user space is overloaded, and its flow goes across as soon as that has sent what it has.
    Behind,
    /// Coalesced by GRO: user space is cheaper for these.
    SuperPacket,
    /// The same where XDP decides: many of its flow within a moment.
    Bulk,
    /// Others of its flow went up, and may still be on their way.
    Settling,
    /// Requests and indications.
    NotChannelData,
    /// On a channel that is not bound, or that was not taken up.
    UnknownChannel,
    /// From nobody with a channel.
    UnknownPeer,
    /// Channel or permission has expired.
    Expired,
    /// The length of ChannelData is not that of the datagram.
    Padded,
    /// A fragment.
    Fragment,
    /// IPv4 options, or extension headers of IPv6.
    IpOptions,
    /// Its TTL or hop limit ends here.
    Ttl,
    /// Does not fit through the next link, or is longer than the program can hold.
    TooBig,
    /// No route that the program may use: none at all, one to this machine itself, or one that is no Ethernet.
    NoRoute,
    /// XDP does not know the link address of the next hop, or cannot send there.
    NoNeighbour,
    /// Its source is ours, cannot be reached, or is reached by another interface only (strict reverse path).
    Source,
    /// Wrong UDP checksum.
    Checksum,
    /// None, where IPv6 needs one.
    NoChecksum,
    /// Lengths that do not agree, a bad IPv4 header checksum.
    Malformed,
    /// The flow was changed in that very moment.
    Stale,
}

impl Count {
    /// Whether it says why a packet went up.
    #[must_use]
    pub fn is_pass(self) -> bool {
        self as usize > Self::Behind as usize
    }
}

/// As addresses stand in keys.
#[must_use]
pub fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// The words of the map of port classes.
#[must_use]
pub fn classes(listeners: &[u16], relays: std::ops::RangeInclusive<u16>) -> Vec<u64> {
    let mut words = vec![0; 2048];
    let ports = listeners.iter().map(|port| (*port, LISTENER)).chain(relays.map(|port| (port, RELAY)));
    for (port, class) in ports {
        words[usize::from(port >> 5)] |= class << ((port & 31) * 2);
    }
    words
}

/// The class of a port in these words.
#[must_use]
pub fn class_of(classes: &[u64], port: u16) -> u64 {
    classes[usize::from(port >> 5)] >> ((port & 31) * 2) & 3
}

/// An address as keys have it.
#[must_use]
pub fn address(ip: [u8; 16], port: [u8; 2]) -> SocketAddr {
    canonical(SocketAddr::new(Ipv6Addr::from(ip).into(), u16::from_be_bytes(port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of an enumeration of `flow.h`, in its order.
    fn names_in_c(prefixes: &[&str]) -> Vec<String> {
        let source = include_str!("../bpf/flow.h");
        let body =
            source.split("enum count {").nth(1).expect("it has counters").split('}').next().expect("an end");
        let lines = body.lines().map(str::trim).filter(|line| line.ends_with(','));
        let name = |line: &str| {
            let name = line.trim_end_matches(',');
            let name = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix));
            name.map(str::to_lowercase)
        };
        lines.filter_map(name).collect()
    }

    #[test]
    fn counters_have_the_same_order_in_both_languages() {
        let here: Vec<&str> = Count::VARIANTS.iter().map(Into::into).collect();
        assert_eq!(names_in_c(&["COUNT_", "PASS_"]), here);
        assert!(Count::SuperPacket.is_pass() && !Count::Behind.is_pass());
    }

    #[test]
    fn words_of_a_state_have_the_same_order_in_both_languages() {
        let source = include_str!("../bpf/flow.h");
        let body = source.split("struct state {").nth(1).expect("it has states").split('}').next();
        let fields = body.expect("an end").lines().filter_map(|line| line.trim().strip_prefix("u64 "));
        let names: Vec<&str> = fields.flat_map(|line| line.trim_end_matches(';').split(", ")).collect();
        for (at, name) in [
            (UP, "up"),
            (DATAGRAMS, "datagrams"),
            (BYTES, "bytes"),
            (CALM, "calm"),
            (SINCE, "since"),
            (ARRIVED, "arrived"),
            (ACROSS, "across"),
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
            "#define BEHIND (1ULL << 63)".to_owned(),
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
    fn ports_have_the_classes_that_they_were_given() {
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
