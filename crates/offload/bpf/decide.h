/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* Decides on each packet, at TC ingress as well as in the driver (XDP). Doubtful packets go to user space, as if the program were not
 * there. `mirror.rs` makes the same decisions in Rust, and tests keep the two in step. */
#pragma once
#include "streams.h"

struct {
	NUMBER(type, MAP_HASH);
	NUMBER(map_flags, NO_PREALLOC);
	NUMBER(max_entries, 1);
	TYPE(key, struct flow_key);
	TYPE(value, struct flow);
} flows SEC(".maps");

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, MMAPABLE);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct state);
} states SEC(".maps");

/* Indexed by socket: user space has sent on everything that the socket received before this time (ktime_get_ns). */
struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, MMAPABLE);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, u64);
} drained SEC(".maps");

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, MMAPABLE);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, u64);
} routes SEC(".maps");

/* Keys of flows by the destination (remote), source (local) and channel with which their datagrams leave. */
struct {
	NUMBER(type, MAP_HASH);
	NUMBER(map_flags, NO_PREALLOC);
	NUMBER(max_entries, 1);
	TYPE(key, struct flow_key);
	TYPE(value, struct flow_key);
} departures SEC(".maps");

/* Indexed by route, for XDP. */
struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, MMAPABLE);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct hop);
} hops SEC(".maps");

/* Indexed by route, for TC. */
struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, MMAPABLE);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct gateway);
} gateways SEC(".maps");

/* Classes of UDP ports, 32 per word. */
struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, MMAPABLE);
	NUMBER(max_entries, 2048);
	TYPE(key, u32);
	TYPE(value, u64);
} ports SEC(".maps");

struct {
	NUMBER(type, MAP_PERCPU_ARRAY);
	NUMBER(max_entries, COUNTS);
	TYPE(key, u32);
	TYPE(value, u64);
} counts SEC(".maps");

/* Buffer for a datagram that has to be moved or checksummed. */
enum { ROOM = 2048, STEP = 512 };
struct room {
	u8 bytes[ROOM + 8];
};

struct {
	NUMBER(type, MAP_PERCPU_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct room);
} rooms SEC(".maps");

/* Place where a packet is seen, known at compile time. */
enum place { AT_TC, AT_XDP };

/* Metadata of an arriving packet. */
struct arrival {
	/* Argument of the kernel's functions: struct __sk_buff or struct xdp_md. */
	void *context;
	u32 interface;
	/* True if the packet contains several datagrams. */
	int is_super_packet;
};

/* A UDP datagram as received. Lengths are in host order, and the checksum is in network order. */
struct packet {
	struct flow_key key;
	/* Offset of the UDP header. */
	u32 udp_at;
	u16 length, check;
	u8 v6, tos, ttl;
	struct channel_data channel_data;
};

/* Outgoing side of a packet of a flow. */
struct way {
	/* Flow on which the packet leaves. */
	struct flow flow;
	/* State of the flow on which the packet arrived; between two of our relayed addresses, `next` is that of the flow on which it leaves. */
	struct state *state, *next;
	/* Time of the decision: if the packet goes to user space, it holds up its flow from then on; 0 if it holds up nothing. */
	u64 now;
	/* `bulk`: part of bulk traffic. `leaving`: earlier packets of the flow may still be leaving the driver, and none are in user space. */
	u32 bulk, leaving;
	/* Length of the ChannelData header on arrival and on departure; true if the packet leaves as IPv6. */
	u32 came_with, leaves_with, out_v6;
	u32 interface, mtu;
	/* For XDP. */
	u32 by_redirection;
	struct hop hop;
	/* UDP length and checksum, length of the payload and, if the packet is turned back, UDP length of the datagram that user space would
	 * send first. */
	u16 length, check, payload, first_length;
	/* Amount by which the TTL decreases, and TOS of the outgoing packet. */
	u8 hops, tos;
};

INLINE void count(u32 what) {
	u64 *counter = map_lookup(&counts, &what);
	if (counter)
		++*counter;
}

INLINE void at_least(u64 *time, u64 least) {
	if (READ_ONCE(*time) < least)
		WRITE_ONCE(*time, least);
}

/* Records that a packet of a flow goes to user space. */
INLINE void mark(const struct way *way) {
	if (!way->state || !way->now)
		return;
	at_least(&way->state->up, way->now);
	if (way->bulk)
		at_least(&way->state->calm, way->now + CALM);
}

INLINE u16 fold(u64 sum) {
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

INLINE int is_mapped(const u32 *address) {
	return address[0] == 0 && address[1] == 0 && address[2] == HTONL(0xffff);
}

/* Sum of the pseudo-header (RFC 768; RFC 8200 section 8.1) in memory order. */
INLINE u64 pseudo_header(const u32 *from, const u32 *to, int v6, u16 length) {
	u64 sum = (u64)from[3] + to[3] + HTONS(length) + HTONS(IPPROTO_UDP);
	if (v6)
		sum += (u64)from[0] + from[1] + from[2] + to[0] + to[1] + to[2];
	return sum;
}

/* Returns 1 for a UDP datagram that may belong to a flow; otherwise 0, with the counter to increase in `*reason` (COUNTS if none). `data`
 * points to the Ethernet header; `length` is the length from there, and all that is read here lies before `end`. */
INLINE int parse(void *data, void *end, u32 length, u16 protocol, struct packet *packet, u32 *reason) {
	struct udp *udp;

	*reason = COUNTS;
	if (protocol != HTONS(ETH_IPV4) && protocol != HTONS(ETH_IPV6))
		return 0;
	__builtin_memset(packet, 0, sizeof(*packet));
	if (protocol == HTONS(ETH_IPV4)) {
		struct ipv4 *ip = data + ETH_LEN;
		u16 *words = (u16 *)ip, total;
		u64 sum = 0;

		if ((void *)(ip + 1) > end || ip->version_length >> 4 != 4 || ip->protocol != IPPROTO_UDP)
			return 0;
		if (ip->version_length != 0x45) {
			*reason = PASS_IP_OPTIONS;
			return 0;
		}
		/* More fragments follow, or this is not the first one. */
		if (ip->fragment & HTONS(0x3fff)) {
			*reason = PASS_FRAGMENT;
			return 0;
		}
		udp = (void *)(ip + 1);
		if ((void *)(udp + 1) > end)
			return 0;
#pragma unroll
		for (int i = 0; i < IPV4_LEN / 2; i++)
			sum += words[i];
		total = NTOHS(ip->total_length);
		packet->length = NTOHS(udp->length);
		*reason = PASS_MALFORMED;
		if (fold(sum) != 0xffff || total != IPV4_LEN + packet->length || ETH_LEN + total > length)
			return 0;
		packet->key.remote[2] = packet->key.local[2] = HTONL(0xffff);
		packet->key.remote[3] = ip->from;
		packet->key.local[3] = ip->to;
		packet->tos = ip->tos;
		packet->ttl = ip->ttl;
		packet->udp_at = ETH_LEN + IPV4_LEN;
	} else {
		struct ipv6 *ip = data + ETH_LEN;

		if ((void *)(ip + 1) > end || NTOHS(ip->first & 0xffff) >> 12 != 6)
			return 0;
		if (ip->next != IPPROTO_UDP) {
			/* Hop-by-hop options, routing, fragment, destination options: headers after them are not parsed. */
			if (ip->next == 0 || ip->next == 43 || ip->next == 60)
				*reason = PASS_IP_OPTIONS;
			if (ip->next == 44)
				*reason = PASS_FRAGMENT;
			return 0;
		}
		udp = (void *)(ip + 1);
		if ((void *)(udp + 1) > end)
			return 0;
		packet->length = NTOHS(udp->length);
		*reason = PASS_MALFORMED;
		if (NTOHS(ip->payload_length) != packet->length || ETH_LEN + IPV6_LEN + packet->length > length)
			return 0;
		/* The kernel drops these too (ip6_rcv); here they would be taken for IPv4. */
		if (is_mapped(ip->from) || is_mapped(ip->to))
			return 0;
		__builtin_memcpy(packet->key.remote, ip->from, sizeof(ip->from));
		__builtin_memcpy(packet->key.local, ip->to, sizeof(ip->to));
		packet->v6 = 1;
		packet->tos = NTOHS(ip->first & 0xffff) >> 4;
		packet->ttl = ip->hop_limit;
		packet->udp_at = ETH_LEN + IPV6_LEN;
	}
	if (packet->length < UDP_LEN)
		return 0;
	packet->key.remote_port = udp->from;
	packet->key.local_port = udp->to;
	packet->check = udp->check;
	if (packet->length >= UDP_LEN + sizeof(struct channel_data)) {
		struct channel_data *channel_data = (void *)(udp + 1);

		if ((void *)(channel_data + 1) > end)
			return 0;
		packet->channel_data = *channel_data;
	}
	return 1;
}

INLINE u32 class_of(u16 port) {
	u32 word = port >> 5;
	u64 *classes = map_lookup(&ports, &word);

	return classes ? (*classes >> ((port & 31) * 2)) & 3 : 0;
}

/* Finds the flow of a packet; 0 if there is none, with the counter to increase in `*reason` (COUNTS if none). */
INLINE struct flow *find(struct packet *packet, int is_super_packet, u32 *reason) {
	u32 class = class_of(NTOHS(packet->key.local_port));
	struct flow *flow;
	int looks;

	*reason = COUNTS;
	if (!class)
		return 0;
	/* The first two bits of ChannelData (RFC 8656 section 12). A super-packet may contain several channels. */
	looks = (class & LISTENER) && !is_super_packet && (packet->channel_data.number & HTONS(0xc000)) == HTONS(0x4000);
	if (looks)
		packet->key.channel = packet->channel_data.number;
	flow = map_lookup(&flows, &packet->key);
	if (!flow && looks) {
		/* The channel is unknown, but the client may have other channels. */
		packet->key.channel = 0;
		flow = map_lookup(&flows, &packet->key);
	}
	*reason = !(class & LISTENER) ? PASS_UNKNOWN_PEER : looks ? PASS_UNKNOWN_CHANNEL : PASS_NOT_CHANNEL_DATA;
	return flow;
}

INLINE long load_bytes(enum place place, void *context, u64 at, void *to, u64 length) {
	return place == AT_XDP ? xdp_load_bytes(context, at, to, length) : skb_load_bytes(context, at, to, length);
}

/* Returns a length of 1 to ROOM unchanged, in a way that shows the verifier its bounds: before Linux 6.8 it learns nothing from a comparison
 * with 0, and only sometimes from a comparison with another copy of the value. */
INLINE u64 within_room(u64 length) {
	asm volatile("" : "+r"(length));
	return ((length - 1) & (ROOM - 1)) + 1;
}

/* Sum of `length` bytes (1 to ROOM - 4) starting at `at`. */
INLINE u64 sum_of(enum place place, void *context, u32 at, u64 length, struct room *room) {
	u64 sum = 0;

	length = within_room(length);
	if (load_bytes(place, context, at, room->bytes, length))
		return 0;
	*(u32 *)(room->bytes + length) = 0;
	for (u32 i = 0; i < ROOM / STEP && length > i * STEP; i++) {
		u64 left = length - i * STEP;
		u64 step = left < STEP ? (left + 3) & ~3ULL : STEP;

		/* The verifier must see the same register that is compared. */
		asm volatile("" : "+r"(step));
		if (step > STEP)
			break;
		sum += (u32)csum_diff(0, 0, room->bytes + i * STEP, step, 0);
	}
	return sum;
}

/* Copies a flow without its lease; 0 if the element holds another flow by now. The order matters: if the element is overwritten during the
 * copy, the stamps differ. */
INLINE int take(const struct flow *found, const struct flow_key *key, struct flow *flow) {
	u64 end = READ_ONCE(found->stamp_end);

	asm volatile("" ::: "memory");
	__builtin_memcpy(flow, found, __builtin_offsetof(struct flow, lease));
	asm volatile("" ::: "memory");
	if (READ_ONCE(found->stamp) != end)
		return 0;
#pragma unroll
	for (int i = 0; i < sizeof(struct flow_key) / 8; i++)
		if (((u64 *)&flow->key)[i] != ((u64 *)key)[i])
			return 0;
	return 1;
}

/* Reason why a flow may not be relayed yet, because packets in user space may be in flight; COUNTS if it may. Packets that have been relayed
 * but have not left yet must not be overtaken by packets in user space, so they take precedence over `calm`. */
INLINE u32 settling(const u64 *emptied, const struct state *state, u64 now, u32 leaving) {
	u64 empty = *(volatile u64 *)emptied;

	if (!leaving && now < READ_ONCE(state->calm))
		return PASS_SETTLING;
	if ((empty & ~BEHIND) >= READ_ONCE(state->up))
		return COUNTS;
	return empty & BEHIND ? COUNT_BEHIND : PASS_SETTLING;
}

/* Counts a datagram; true if they arrive so fast that user space is cheaper. */
INLINE int is_bulk(struct state *state, u64 now) {
	u64 arrived = READ_ONCE(state->arrived) + 1;

	if ((s64)(now - READ_ONCE(state->since)) > (s64)BURST_TIME) {
		WRITE_ONCE(state->since, now);
		arrived = 1;
	}
	WRITE_ONCE(state->arrived, arrived);
	return arrived > BURST;
}

/* See `leaving` in struct way. */
INLINE int is_leaving(const struct state *state, u64 now) {
	u64 across = READ_ONCE(state->across);

	return (s64)(now - across) < (s64)POLL_TIME && READ_ONCE(state->up) <= across;
}

/* 1 if flows need leases. Set by the loader. */
const volatile u32 leases = 0;

INLINE u64 dscp_bit(u8 tos) {
	return 1ULL << (tos >> 2);
}

/* True if the flow with this stamp holds a lease for datagrams with this TOS from this interface. */
INLINE int has_lease(const struct lease *lease, u64 stamp, u64 now, u32 interface, u8 tos) {
	return READ_ONCE(lease->of) == stamp && READ_ONCE(lease->until) > now && READ_ONCE(lease->from) == interface &&
	       (READ_ONCE(lease->dscps) & dscp_bit(tos));
}

/* Requests a lease for a datagram that goes to user space. No other datagram of its flow is there: all earlier ones have left, or never will.
 * Returns the reason to count. */
INLINE u32 ask(struct lease *lease, u64 stamp, u32 interface, const struct packet *packet, const struct way *way) {
	u32 reason = READ_ONCE(lease->refused) ? PASS_REFUSED : READ_ONCE(lease->asked_by) == stamp ? PASS_UNSEEN : PASS_LEASE;

	WRITE_ONCE(lease->asked_by, 0);
	WRITE_ONCE(lease->refused, 0);
	WRITE_ONCE(lease->asked, dscp_bit(way->tos));
	WRITE_ONCE(lease->asked_from, interface);
	WRITE_ONCE(lease->asked_length, way->first_length);
	WRITE_ONCE(lease->asked_ttl, packet->ttl);
	WRITE_ONCE(lease->asked_by, stamp);
	return reason;
}

/* Another datagram may be in user space besides the requesting one. If they arrived on different interfaces, egress cannot tell them apart, so
 * the request is not granted. */
INLINE void ask_too(struct lease *lease, u64 stamp, u32 interface, u8 tos) {
	if (READ_ONCE(lease->asked_by) != stamp)
		return;
	if (READ_ONCE(lease->asked_from) != interface)
		WRITE_ONCE(lease->asked_from, 0);
	WRITE_ONCE(lease->asked, READ_ONCE(lease->asked) | dscp_bit(tos));
}

/* True if the kernel has bpf_check_mtu (Linux 5.12). Set by the loader; if it is 0, the verifier never reaches the call. */
const volatile u32 kernel_tells_mtu = 1;

/* True if an IP packet of this length fits the link on which it leaves. */
INLINE int fits(const struct arrival *arrival, const struct way *way, u32 ip_length) {
	u32 mtu = 0;

	if (!kernel_tells_mtu)
		return ip_length <= way->mtu;
	/* The result for the packet itself includes the link header on that interface, which may be longer than Ethernet's (VLAN). */
	return check_mtu(arrival->context, way->interface, &mtu, 0, 0) >= 0 && ip_length <= mtu;
}

/* Reads the outgoing interface and its MTU from a word of `routes`. */
INLINE void leave_by(struct way *way, u64 word) {
	way->interface = INTERFACE(word);
	way->mtu = MTU(word);
}

/* Redirects a packet to the client behind a peer that is one of our relayed addresses. COUNTS on success. */
INLINE u32 turn_back(struct way *way) {
	struct flow_key key = {};
	struct flow *next;
	u64 *emptied, *route;
	u32 reason;

	__builtin_memcpy(key.remote, way->flow.from, sizeof(key.remote));
	__builtin_memcpy(key.local, way->flow.to, sizeof(key.local));
	key.remote_port = way->flow.from_port;
	key.local_port = way->flow.to_port;
	next = map_lookup(&flows, &key);
	if (!next)
		return PASS_NO_ROUTE;
	if (!take(next, &key, &way->flow))
		return PASS_STALE;
	if (way->flow.kind != TO_CLIENT)
		return PASS_NO_ROUTE;
	way->next = map_lookup(&states, &way->flow.state);
	emptied = map_lookup(&drained, &way->flow.socket);
	route = map_lookup(&routes, &way->flow.route);
	if (!way->next || !emptied || !route)
		return PASS_STALE;
	if (way->flow.expires <= way->now)
		return PASS_EXPIRED;
	/* Packets that user space sent to that address passed the program on loopback, which marked the flow. */
	reason = settling(emptied, way->next, way->now, 0);
	if (reason != COUNTS)
		return reason;
	/* The packet goes to user space, and requests the lease when it arrives on loopback. */
	if (leases && !has_lease(&next->lease, way->flow.stamp, way->now, LOOPBACK, way->tos))
		return PASS_LEASE;
	leave_by(way, READ_ONCE(*route));
	way->hops = 2;
	return way->interface ? COUNTS : PASS_NO_ROUTE;
}

/* Reads the link addresses. They are three words, and may change while they are read. */
INLINE u32 read_hop(struct way *way) {
	struct hop *hop = map_lookup(&hops, &way->flow.route);
	u64 *route = map_lookup(&routes, &way->flow.route), word;

	if (!hop || !route)
		return PASS_STALE;
	way->hop.to = READ_ONCE(hop->to);
	way->hop.from = READ_ONCE(hop->from);
	word = READ_ONCE(*route);
	if (INTERFACE(word) != way->interface)
		return PASS_STALE;
	way->by_redirection = (word & BY_REDIRECTION) != 0;
	return way->hop.to ? COUNTS : PASS_NO_NEIGHBOUR;
}

/* True if a packet arrives on an interface through which its source is reachable. XDP sees neither the packet's VLAN nor whether it is addressed
 * to this machine, so it accepts only the interface of the route back, and only our link address on it. */
INLINE int is_from_there(enum place place, const struct arrival *arrival, u32 back, u64 link_address) {
	u64 *route = map_lookup(&routes, &back);
	u64 word;

	if (!route)
		return 0;
	word = READ_ONCE(*route);
	if (!INTERFACE(word))
		return 0;
	if (place == AT_TC)
		return !(word & ONLY_FROM_THERE) || INTERFACE(word) == arrival->interface;
	if (INTERFACE(word) != arrival->interface)
		return 0;
	struct hop *hop = map_lookup(&hops, &back);
	return hop && READ_ONCE(hop->from) == link_address;
}

/* Slot of the streams of a flow plus 1; 0 if they are not measured. */
INLINE u32 measured(const struct state *state) {
	return state ? READ_ONCE(state->measured) : 0;
}

/* True if user space reads the payload of a measured flow. */
INLINE int is_for_user_space(enum place place, void *context, const struct packet *packet, const struct way *way) {
	u32 at = UDP_LEN + way->came_with, number = measured(way->state);
	u16 first = 0;
	enum media media;

	if (!number || packet->length < at + sizeof(first) || load_bytes(place, context, packet->udp_at + at, &first, sizeof(first)))
		return 0;
	media = media_of(first);
	return media == MEDIA_STUN || (media == MEDIA_RTCP && is_rtcp_due(number - 1, way->now));
}

/* Counts an RTP packet of a measured flow and, if it is turned back, for the flow on which it leaves. Otherwise it arrives there on loopback. */
INLINE void measure(enum place place, void *context, const struct packet *packet, const struct way *way, u32 reason) {
	u32 at = UDP_LEN + way->came_with, number = measured(way->state);
	struct start start;

	if (!number || packet->length < at + START_LEN || (way->flow.kind == CLIENT && !way->came_with) ||
	    load_bytes(place, context, packet->udp_at + at, &start, START_LEN) || media_of(start.head) != MEDIA_RTP)
		return;
	arrive(number - 1, start.head, start.ssrc, way->now, reason == COUNTS || reason == COUNT_BEHIND);
	number = reason == COUNTS ? measured(way->next) : 0;
	if (number)
		arrive(number - 1, start.head, start.ssrc, way->now, 1);
}

/* Reason why a packet of a flow goes to user space or is dropped; COUNTS if neither. `link_address` is its link-layer destination, for XDP. */
INLINE u32 judge(enum place place, const struct arrival *arrival, u64 link_address, const struct packet *packet,
		 struct flow *found, struct way *way) {
	u32 ip_length, reason;
	u64 *emptied, *route, stamp;

	way->state = way->next = 0;
	way->now = 0;
	way->bulk = way->leaving = 0;
	way->came_with = 0;
	if (!take(found, &packet->key, &way->flow))
		return PASS_STALE;
	emptied = map_lookup(&drained, &way->flow.socket);
	route = map_lookup(&routes, &way->flow.route);
	if (!emptied || !route)
		return PASS_STALE;
	way->state = map_lookup(&states, &way->flow.state);
	if (!way->state)
		return PASS_STALE;
	way->now = ktime_get_ns();
	stamp = way->flow.stamp;
	/* A super-packet may contain ChannelData, but only its client was found. */
	if (way->flow.kind == TO_PEER || (way->flow.kind == CLIENT && (packet->channel_data.number & HTONS(0xc000)) == HTONS(0x4000)))
		way->came_with = sizeof(struct channel_data);
	/* A forwarder's sockets send with TOS 0. */
	way->tos = way->flow.kind == FORWARD ? 0 : packet->tos;
	if (leases)
		ask_too(&found->lease, stamp, arrival->interface, way->tos);
	way->bulk = place == AT_XDP ? is_bulk(way->state, way->now) : arrival->is_super_packet;
	way->leaving = place == AT_XDP && is_leaving(way->state, way->now);
	if (way->bulk && !way->leaving)
		return place == AT_XDP ? PASS_BULK : PASS_SUPER_PACKET;
	if (way->flow.kind == CLIENT)
		return PASS_NOT_CHANNEL_DATA;
	if (way->flow.expires <= way->now)
		return PASS_EXPIRED;
	way->first_length =
		packet->length - way->came_with + (way->flow.kind == TO_CLIENT ? sizeof(struct channel_data) : 0);
	if (!is_from_there(place, arrival, way->flow.back, link_address)) {
		/* From one of our relayed addresses to another: see `turn_back`. */
		if (leases && arrival->interface == LOOPBACK && settling(emptied, way->state, way->now, 0) == COUNTS)
			ask(&found->lease, stamp, LOOPBACK, packet, way);
		return PASS_SOURCE;
	}
	leave_by(way, READ_ONCE(*route));
	way->hops = 1;
	if (!way->interface) {
		reason = way->came_with ? turn_back(way) : PASS_NO_ROUTE;
		if (reason != COUNTS)
			return reason;
	}
	if (place == AT_XDP) {
		reason = read_hop(way);
		if (reason != COUNTS)
			return reason;
	}
	way->leaves_with = way->flow.kind == TO_CLIENT ? sizeof(struct channel_data) : 0;
	way->payload = packet->length - UDP_LEN - way->came_with;
	way->length = way->payload + UDP_LEN + way->leaves_with;
	if (way->came_with && NTOHS(packet->channel_data.length) != way->payload)
		return PASS_PADDED;
	/* RFC 8656 section 15.1; user space handles a TTL of 0. */
	if (packet->ttl <= way->hops)
		return PASS_TTL;
	way->out_v6 = !is_mapped(way->flow.to);
	if (packet->check == 0 && (packet->v6 || way->out_v6))
		return PASS_NO_CHECKSUM;
	ip_length = way->length + (way->out_v6 ? IPV6_LEN : IPV4_LEN);
	/* With IPv6, the sender must respect the path MTU, which only user space knows; this length fits everywhere (RFC 8200 section 5). */
	if (packet->length > ROOM - 4 || (way->out_v6 && ip_length > 1280) || !fits(arrival, way, ip_length))
		return PASS_TOO_BIG;
	reason = settling(emptied, way->state, way->now, way->leaving);
	if (reason == COUNTS && is_for_user_space(place, arrival->context, packet, way))
		return PASS_MEASURED;
	if (reason == COUNTS && leases && !has_lease(&found->lease, stamp, way->now, arrival->interface, way->tos))
		return ask(&found->lease, stamp, arrival->interface, packet, way);
	return reason;
}

/* Checksum of the outgoing packet. Adds only the difference, so that the receiver detects a damaged payload. */
INLINE u16 new_check(const struct packet *packet, const struct way *way, u64 pseudo) {
	u64 sum = pseudo_header(way->flow.from, way->flow.to, way->out_v6, way->length), old;
	u16 check;

	if (packet->check == 0)
		return 0;
	old = pseudo + packet->key.remote_port + packet->key.local_port + HTONS(packet->length);
	if (way->came_with)
		old += (u64)packet->channel_data.number + packet->channel_data.length;
	sum += (u64)way->flow.from_port + way->flow.to_port + HTONS(way->length);
	if (way->leaves_with)
		sum += (u64)way->flow.channel + HTONS(way->payload);
	check = ~fold((u64)(u16)~packet->check + (u16)~fold(old) + sum);
	return check ? check : 0xffff;
}

/* Writes all headers except the link addresses; `data` points to the Ethernet header. Not 0 if they do not fit before `end`. */
INLINE int write_headers(void *data, void *end, const struct packet *packet, const struct way *way) {
	const struct flow *flow = &way->flow;
	struct ethernet *ethernet = data;
	struct udp *udp;

	if (way->out_v6) {
		struct ipv6 *ip = data + ETH_LEN;

		udp = (void *)(ip + 1);
		if ((void *)(udp + 1) > end)
			return -1;
		ethernet->protocol = HTONS(ETH_IPV6);
		ip->first = HTONL((u32)6 << 28 | (u32)way->tos << 20);
		ip->payload_length = HTONS(way->length);
		ip->next = IPPROTO_UDP;
		ip->hop_limit = packet->ttl - way->hops;
		__builtin_memcpy(ip->from, flow->from, sizeof(ip->from));
		__builtin_memcpy(ip->to, flow->to, sizeof(ip->to));
	} else {
		struct ipv4 *ip = data + ETH_LEN;
		u16 *words = (u16 *)ip;
		u64 sum = 0;

		udp = (void *)(ip + 1);
		if ((void *)(udp + 1) > end)
			return -1;
		ethernet->protocol = HTONS(ETH_IPV4);
		ip->version_length = 0x45;
		ip->tos = way->tos;
		ip->total_length = HTONS(way->length + IPV4_LEN);
		/* Like a socket's datagrams, it has an ID and no DF, so routers may fragment it. */
		ip->id = get_prandom_u32();
		ip->fragment = 0;
		ip->ttl = packet->ttl - way->hops;
		ip->protocol = IPPROTO_UDP;
		ip->check = 0;
		ip->from = flow->from[3];
		ip->to = flow->to[3];
#pragma unroll
		for (int i = 0; i < IPV4_LEN / 2; i++)
			sum += words[i];
		ip->check = ~fold(sum);
	}
	udp->from = flow->from_port;
	udp->to = flow->to_port;
	udp->length = HTONS(way->length);
	udp->check = way->check;
	if (way->leaves_with) {
		struct channel_data *channel_data = (void *)(udp + 1);

		if ((void *)(channel_data + 1) > end)
			return -1;
		channel_data->number = flow->channel;
		channel_data->length = HTONS(way->payload);
	}
	return 0;
}

INLINE void add(struct state *state, u16 payload) {
	__sync_fetch_and_add(&state->datagrams, 1);
	__sync_fetch_and_add(&state->bytes, payload);
}

/* Counts a relayed packet. */
INLINE void book(const struct way *way) {
	if (way->state)
		add(way->state, way->payload);
	if (way->next)
		add(way->next, way->payload);
	count(way->next ? COUNT_TURNED_BACK : way->flow.kind == FORWARD ? COUNT_FORWARDED : way->came_with ? COUNT_TO_PEER : COUNT_TO_CLIENT);
}
