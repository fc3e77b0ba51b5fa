/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* Layout of the maps and list of counters, shared by the program and `layout.rs`. Tests keep the two in step. */
#pragma once
#include "kernel.h"

/* Key of a flow, from the fields of a packet. IPv4 addresses are mapped into IPv6 (RFC 4291 section 2.5.5.2); all in network order. */
struct flow_key {
	/* Source of the packet, and the local address that it was sent to. */
	u32 remote[4], local[4];
	u16 remote_port, local_port;
	/* Channel number of ChannelData; 0 for datagrams from peers, and for the client as a whole (CLIENT). */
	u16 channel;
	u16 zero;
} __attribute__((aligned(8)));

enum kind {
	/* Client that has flows; nothing is forwarded. Its other packets go to user space, and datagrams of its flows must not overtake them. */
	CLIENT = 0,
	/* ChannelData from a client: its header is removed. */
	TO_PEER = 1,
	/* Datagram from a peer: becomes ChannelData. */
	TO_CLIENT = 2,
	/* Datagram of a forwarder's session, in either direction: only its addresses change. */
	FORWARD = 3,
};

/* Permits the kernel to relay a flow, if the loader requires leases (`leases`). Programs write it in place; user space zeroes it with each
 * installation. A datagram without a lease goes to user space and asks for one. The program at TC egress grants it if user space's copy leaves
 * as the kernel path would send it. */
struct lease {
	/* Stamp of the flow that holds it, and its end in ktime_get_ns. If the element was reused during the write, the stamp differs. */
	u64 of, until;
	/* Bit set of the DSCP values that it covers. */
	u64 dscps;
	/* Stamp of the flow that asks, or 0, and bit set of the DSCP values asked for. */
	u64 asked_by, asked;
	/* Interface on which datagrams must arrive, and on which those that ask arrived: 0 if there were several. */
	u32 from, asked_from;
	/* UDP length with which the first datagram that asked leaves, in host order, and its TTL. */
	u16 asked_length;
	u8 asked_ttl;
	/* 1 if the last request was refused. */
	u8 refused;
	u32 unused;
};

/* Maximum duration in nanoseconds; up to a quarter less, so that leases do not end together. */
#define LEASE 4000000000ULL

struct flow {
	/* New for each installation. Elements are reused immediately: if the two stamps differ, or the key is different, this is not the flow
	 * that was looked up. */
	u64 stamp;
	struct flow_key key;
	/* Addresses of the outgoing datagram. */
	u32 from[4], to[4];
	u16 from_port, to_port;
	/* For TO_CLIENT, in network order. */
	u16 channel;
	u8 kind;
	u8 unused;
	/* Slots in `routes` of the route to `to`, and of the route back to the packet's source. */
	u32 route, back;
	u32 state;
	/* Slot in `drained` of the socket that receives packets passed to user space. */
	u32 socket;
	/* ktime_get_ns. */
	u64 expires;
	u64 stamp_end;
	struct lease lease;
};

/* Fields that change with each datagram, in a cache line of their own. Times are ktime_get_ns. */
struct state {
	/* Time of the last packet to user space, which may be in flight until the socket is known to have been empty at that time or later. */
	u64 up;
	u64 datagrams, bytes;
	/* Until this time it stays in user space, because it is bulk traffic. */
	u64 calm;
	/* XDP's count: `arrived` datagrams since `since`. */
	u64 since, arrived;
	/* Time at which XDP last relayed one of its packets. */
	u64 across;
	/* Slot in `streams` plus 1, if the quality of the flow's media is measured. */
	u64 measured;
};

/* RTP stream of measured flows. The counters start when user space clears the slot. */
struct stream {
	/* 0 if the slot is free. */
	u32 ssrc;
	u16 highest;
	/* If `awaits`, the sequence number that would confirm the stream or its restart. */
	u16 awaited;
	/* `awaits`: 1, or 2 if the datagram before the awaited one was counted as received. */
	u8 awaits, is_confirmed, payload_type, unused;
	/* Nanoseconds per unit of timestamps, in fractions of 256; 0 if unknown. Only user space writes it. */
	u32 unit;
	/* Datagrams up to the highest sequence number, and those of them that did not go to user space. */
	u32 expected, received;
	u32 reordered, timestamp;
	/* Interarrival jitter (RFC 3550 section 6.4.1) in sixteenths of nanoseconds, and the time of the latest datagram. */
	u64 jitter, at;
	/* A bit for each of the last sequence numbers up to the highest one, which is the lowest bit. */
	u64 arrived;
};

enum { STREAMS = 4 };

/* RTP streams of the flows with the same state. */
struct streams {
	/* Time of the latest datagram of a stream, and the longest gap between two. */
	u64 last, longest_gap;
	/* Time from which the next RTCP packet goes to user space. */
	u64 rtcp_due;
	struct stream of[STREAMS];
};

/* A larger step ahead is a restart, if the next datagram follows it. */
#define MOST_MISSING 3000
/* Datagrams behind the highest one whose arrival is known. */
#define REMEMBERED 64
/* Differences between times and timestamps, in nanoseconds, above which the timestamps broke. */
#define BREAK 5000000000LL
/* Time without a datagram, in nanoseconds, after which a stream gives its slot to a new one. */
#define IDLE 20000000000LL
/* Time in nanoseconds between RTCP packets for user space. */
#define RTCP_INTERVAL 2000000000ULL

/* Flag of a time in `drained`: user space is losing packets, and no longer finds the socket empty. */
#define BEHIND (1ULL << 63)

/* A word of `routes`: the outgoing interface, or 0 if there is none that this program may use, as for our own addresses; and whether
 * packets from there must arrive on that interface (strict reverse path). */
#define INTERFACE(route) ((u32)(route))
#define ONLY_FROM_THERE (1ULL << 32)
/* XDP uses redirection even for packets that leave on the interface on which they arrived: for XDP_TX, a veth does not wake up its far end
 * unless that has a program (Linux 6.18, veth_xdp_flush). */
#define BY_REDIRECTION (1ULL << 33)
/* MTU of that interface as user space last read it, for kernels that do not report it to programs. */
#define MTU(route) ((u32)((route) >> 40))

/* Next hop of a route, for XDP: its link address and our own on that link, each as in a frame and followed by two zero bytes. The first is
 * 0 if it is unknown; both are 0 if XDP does not send there. */
struct hop {
	u64 to, from;
};

/* Next hop of a route, for TC, in the form of addresses in `flow_key`: the gateway, or the destination itself. All zeros if unknown. */
struct gateway {
	u64 address[2];
};

/* Time in nanoseconds that a flow stays in user space after bulk traffic: as long as more is to be expected. */
#define CALM 5000000ULL
/* XDP sees packets before GRO, so it treats more than this many datagrams within this many nanoseconds as bulk traffic. */
#define BURST 16
#define BURST_TIME 250000ULL
/* Maximum time in nanoseconds until XDP's packets have left: drivers send at the end of a poll, which handles 64 packets at a time. */
#define POLL_TIME 500000ULL

/* Classes of UDP ports, two bits each. */
enum { LISTENER = 1, RELAY = 2 };

/* Indexes of `counts`. The first count relayed or dropped packets, the others the reasons why packets went to user space. */
enum count {
	COUNT_TO_PEER,
	COUNT_TO_CLIENT,
	/* From a client to another client through two of our relayed addresses. */
	COUNT_TURNED_BACK,
	COUNT_FORWARDED,
	/* Dropped by the program itself: the kernel refused a change after others had already been made. */
	COUNT_FAILED,
	/* Dropped, so that user space can catch up: see BEHIND. */
	COUNT_BEHIND,
	PASS_SUPER_PACKET,
	/* XDP's counterpart, which is based on the rate. */
	PASS_BULK,
	PASS_SETTLING,
	PASS_NOT_CHANNEL_DATA,
	PASS_UNKNOWN_CHANNEL,
	PASS_UNKNOWN_PEER,
	PASS_EXPIRED,
	PASS_PADDED,
	PASS_FRAGMENT,
	PASS_IP_OPTIONS,
	PASS_TTL,
	PASS_TOO_BIG,
	PASS_NO_ROUTE,
	/* XDP does not know the link address of the next hop, or cannot send there. */
	PASS_NO_NEIGHBOUR,
	/* Its source is one of our addresses, is unreachable, or is reachable only through another interface. */
	PASS_SOURCE,
	PASS_CHECKSUM,
	PASS_NO_CHECKSUM,
	PASS_MALFORMED,
	PASS_STALE,
	/* Asks for a lease: as usual; because the last datagram that asked was not seen leaving; because it left with a difference. */
	PASS_LEASE,
	PASS_UNSEEN,
	PASS_REFUSED,
	/* STUN, or an RTCP packet that is due, of a measured flow. */
	PASS_MEASURED,
	/* Differences found at TC egress. */
	REFUSED_INTERFACE,
	REFUSED_SOURCE,
	REFUSED_MARK,
	REFUSED_DSCP,
	REFUSED_TTL,
	REFUSED_PRIORITY,
	REFUSED_CGROUP,
	COUNTS,
};
