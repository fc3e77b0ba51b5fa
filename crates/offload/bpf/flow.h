/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* What the program and `layout.rs` both know: the layout of maps, and what is counted. Tests hold the two together. */
#pragma once
#include "kernel.h"

/* By what the packet shows. IPv4 addresses are mapped into IPv6 (RFC 4291 section 2.5.5.2), all is in network order. */
struct flow_key {
	/* Who sent it, and which of our addresses it came to. */
	u32 remote[4], local[4];
	u16 remote_port, local_port;
	/* ChannelData's number; 0 for datagrams of peers, and for the client as such (CLIENT). */
	u16 channel;
	u16 zero;
} __attribute__((aligned(8)));

enum kind {
	/* Nothing is forwarded: a client with flows. Whatever else it sends goes up, and no datagram of its flows may overtake that. */
	CLIENT = 0,
	/* ChannelData of a client: its header is taken off. */
	TO_PEER = 1,
	/* A peer's datagram: becomes ChannelData. */
	TO_CLIENT = 2,
	/* A datagram of a forwarder's session, either way: it gets other addresses, and nothing else. */
	FORWARD = 3,
};

struct flow {
	/* Drawn for each installation. Elements are reused at once: where the two differ, or the key is another, this is not the flow that
	 * was looked up. */
	u64 stamp;
	struct flow_key key;
	/* Of the datagram that leaves. */
	u32 from[4], to[4];
	u16 from_port, to_port;
	/* For TO_CLIENT, in network order. */
	u16 channel;
	u8 kind;
	u8 unused;
	/* Of the way to `to`, and of the way back to where the packet came from. */
	u32 route, back;
	u32 state;
	/* Of the socket that takes what goes up, in `drained`. */
	u32 socket;
	/* ktime_get_ns. */
	u64 expires;
	u64 stamp_end;
};

/* What changes with each datagram, in a cache line of its own. Times are ktime_get_ns. */
struct state {
	/* When something of it last went up: until the socket is known to have been empty then or later, it may still be on its way. */
	u64 up;
	u64 datagrams, bytes;
	/* It stays up until then: more are coming at once. */
	u64 calm;
	/* What XDP measures: so many have come since. */
	u64 since, arrived;
	/* When XDP last sent something of it across. */
	u64 across;
	u64 unused;
};

/* Of a time in `drained`: user space loses what it is sent, and does not find the socket empty any more. */
#define BEHIND (1ULL << 63)

/* A word of `routes`: the interface by which something is reached, 0 for none that this program may use, among them what is ours; and
 * whether nothing from there may come by another one (strict reverse path). */
#define INTERFACE(route) ((u32)(route))
#define ONLY_FROM_THERE (1ULL << 32)
/* XDP sends by that interface by redirection also what came by it: a veth does not wake up its far end for XDP_TX unless that has a program
 * (Linux 6.18, veth_xdp_flush). */
#define BY_REDIRECTION (1ULL << 33)
/* The MTU of that interface as user space has heard of it, for kernels that do not tell it. */
#define MTU(route) ((u32)((route) >> 40))

/* The next hop of a route, for XDP: its link address and our own on that link, as they lie in a frame, and two bytes of 0. The first is 0
 * where it is not known, both are where XDP does not send. */
struct hop {
	u64 to, from;
};

/* Who takes what goes by a route, for TC, as `flow_key` has addresses: a gateway, or who it is for. All 0 where that is not known. */
struct gateway {
	u64 address[2];
};

/* How long a flow that came in bulk stays up: as long as more is to be expected. In nanoseconds. */
#define CALM 5000000ULL
/* What XDP takes for bulk, for it sees packets before GRO: more than so many datagrams within so many nanoseconds. */
#define BURST 16
#define BURST_TIME 250000ULL
/* So long may it take until what XDP sends has left: drivers send at the end of a poll, which takes 64 packets at a time. In nanoseconds. */
#define POLL_TIME 500000ULL

/* Classes of UDP ports, two bits each. */
enum { LISTENER = 1, RELAY = 2 };

/* Indexes of `counts`. The first are done or dropped, the rest went up for a reason. */
enum count {
	COUNT_TO_PEER,
	COUNT_TO_CLIENT,
	/* From a client by two relayed addresses of ours to another client. */
	COUNT_TURNED_BACK,
	COUNT_FORWARDED,
	/* Dropped by the program itself: the kernel refused a change when others had been made already. */
	COUNT_FAILED,
	/* Dropped, so that user space can catch up: see BEHIND. */
	COUNT_BEHIND,
	PASS_SUPER_PACKET,
	/* The same where XDP decides, by rate. */
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
	/* For XDP the link address of the next hop is not known, or it cannot send there. */
	PASS_NO_NEIGHBOUR,
	/* Its source is ours, cannot be reached, or is reached by another interface only. */
	PASS_SOURCE,
	PASS_CHECKSUM,
	PASS_NO_CHECKSUM,
	PASS_MALFORMED,
	PASS_STALE,
	COUNTS,
};
