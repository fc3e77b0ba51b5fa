/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* Relays lone datagrams between bound channels, and forwards those of a forwarder's sessions, at TC ingress. What it is not sure of goes up to user space, as if it were not there;
 * `mirror.rs` decides the same in Rust, and tests hold the two together. */
#include "flow.h"

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

/* By socket: what was sent to it before this time has left user space. ktime_get_ns. */
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

/* Classes of UDP ports, 32 to a word. */
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

/* Of a datagram that has to be moved, or summed up. */
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

/* A UDP datagram, as it came. Lengths are in host order, the checksum as it lies. */
struct packet {
	struct flow_key key;
	/* Of the header before UDP's, in IP's terms. */
	u32 udp_at;
	u16 length, check;
	u8 v6, tos, ttl;
	struct channel_data channel_data;
};

INLINE int count(u32 what) {
	u64 *counter = map_lookup(&counts, &what);
	if (counter)
		++*counter;
	return TC_NEXT;
}

INLINE void mark(struct state *state, u64 until) {
	if (READ_ONCE(state->up) < until)
		WRITE_ONCE(state->up, until);
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

/* The pseudo-header (RFC 768; RFC 8200 section 8.1), summed as it would lie in memory. */
INLINE u64 pseudo_header(const u32 *from, const u32 *to, int v6, u16 length) {
	u64 sum = (u64)from[3] + to[3] + HTONS(length) + HTONS(IPPROTO_UDP);
	if (v6)
		sum += (u64)from[0] + from[1] + from[2] + to[0] + to[1] + to[2];
	return sum;
}

/* 1 for a UDP datagram that may be somebody's flow; else 0, and `*reason` says what to count, COUNTS for nothing. */
INLINE int parse(struct __sk_buff *skb, struct packet *packet, u32 *reason) {
	u32 want = ETH_LEN + IPV6_LEN + UDP_LEN + sizeof(struct channel_data);
	void *data, *end;
	struct udp *udp;

	*reason = COUNTS;
	if (skb->protocol != HTONS(ETH_IPV4) && skb->protocol != HTONS(ETH_IPV6))
		return 0;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if (data + want > end) {
		/* Short, or its headers lie elsewhere. */
		if (skb_pull_data(skb, skb->len < want ? skb->len : want))
			return 0;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	__builtin_memset(packet, 0, sizeof(*packet));
	if (skb->protocol == HTONS(ETH_IPV4)) {
		struct ipv4 *ip = data + ETH_LEN;
		u16 *words = (u16 *)ip, total;
		u64 sum = 0;

		if ((void *)(ip + 1) > end || ip->version_length >> 4 != 4 || ip->protocol != IPPROTO_UDP)
			return 0;
		if (ip->version_length != 0x45) {
			*reason = PASS_IP_OPTIONS;
			return 0;
		}
		/* More fragments, or not the first. */
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
		if (fold(sum) != 0xffff || total != IPV4_LEN + packet->length || ETH_LEN + total > skb->len)
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
			/* Hop-by-hop options, routing, fragment, destination options: what is behind them is not looked at. */
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
		if (NTOHS(ip->payload_length) != packet->length || ETH_LEN + IPV6_LEN + packet->length > skb->len)
			return 0;
		/* The kernel drops these too (ip6_rcv), and here they would pass for IPv4. */
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

/* What stands behind the Ethernet header, up to `length` bytes of it, summed. Not more than ROOM. */
INLINE u64 sum_of(struct __sk_buff *skb, u32 at, u64 length, struct room *room) {
	u64 sum = 0;

	/* The verifier has to see the very register that was compared. */
	asm volatile("" : "+r"(length));
	if (length == 0 || length > ROOM - 4)
		return 0;
	if (skb_load_bytes(skb, at, room->bytes, length))
		return 0;
	*(u32 *)(room->bytes + length) = 0;
	for (u32 i = 0; i < ROOM / STEP; i++) {
		u64 left = length > i * STEP ? length - i * STEP : 0;
		u64 step = left < STEP ? (left + 3) & ~3ULL : STEP;

		asm volatile("" : "+r"(step));
		if (step == 0 || step > STEP)
			break;
		sum += (u32)csum_diff(0, 0, room->bytes + i * STEP, step, 0);
	}
	return sum;
}

enum csum {
	CSUM_BAD,
	/* The field holds the whole sum, or none at all. */
	CSUM_WHOLE,
	/* The same, and the kernel holds the sum of all that is behind the Ethernet header. */
	CSUM_COMPLETE,
	/* The field holds the pseudo-header's sum; a device further down, or whoever receives it, adds the rest. */
	CSUM_PARTIAL,
};

/* How far the checksum can be believed. The kernel looks at it later than this program. */
INLINE enum csum checksum(struct __sk_buff *skb, const struct packet *packet, u64 pseudo, struct room *room) {
	s64 complete = csum_update(skb, 0);

	/* None: IPv4 may go without. */
	if (packet->check == 0)
		return complete < 0 ? CSUM_WHOLE : CSUM_COMPLETE;
	if (csum_level(skb, CSUM_LEVEL_QUERY) >= 0)
		return CSUM_WHOLE;
	if (complete < 0 && packet->check == fold(pseudo))
		return CSUM_PARTIAL;
	/* An IPv4 header sums up to nothing. */
	if (complete >= 0 && !packet->v6 && skb->len == packet->udp_at + packet->length)
		return fold(pseudo + complete) == 0xffff ? CSUM_COMPLETE : CSUM_BAD;
	if (fold(pseudo + sum_of(skb, packet->udp_at, packet->length, room)) != 0xffff)
		return CSUM_BAD;
	return complete < 0 ? CSUM_WHOLE : CSUM_COMPLETE;
}

/* Moves the payload by four bytes, for the header must stay where it is: CHECKSUM_PARTIAL says by its place where the sum begins. */
INLINE int move_payload(struct __sk_buff *skb, u32 udp_at, u64 payload, int to_peer, struct room *room) {
	u32 from = udp_at + UDP_LEN + (to_peer ? sizeof(struct channel_data) : 0);
	u32 to = udp_at + UDP_LEN + (to_peer ? 0 : sizeof(struct channel_data));

	asm volatile("" : "+r"(payload));
	if (payload > ROOM)
		return -1;
	if (payload > 0 && skb_load_bytes(skb, from, room->bytes, payload))
		return -1;
	if (!to_peer && skb_change_tail(skb, to + payload, 0))
		return -1;
	if (payload > 0 && skb_store_bytes(skb, to, room->bytes, payload, 0))
		return -1;
	if (to_peer && skb_change_tail(skb, to + payload, 0))
		return -1;
	return 0;
}

/* Linux' own table from TOS to queue priority, which a UDP socket uses too (rt_tos2priority). */
INLINE u32 priority_of(u8 tos) {
	u32 precedence = (tos >> 3) & 3;

	return precedence == 1 ? 2 : precedence == 2 ? 6 : precedence == 3 ? 4 : 0;
}

/* How a packet of a flow goes across. */
struct way {
	/* By which it leaves. */
	struct flow flow;
	/* Of that by which it came, and, where one of our relayed addresses sends to another, of that by which it leaves. */
	struct state *state, *next;
	/* What goes up holds its flow up until then; 0 for not at all. */
	u64 until;
	/* Whether it came, and leaves, with a header of ChannelData; whether it leaves as IPv6. */
	u32 came_with, leaves_with, out_v6;
	u32 interface;
	/* UDP's, and the payload's. */
	u16 length, check, payload;
	/* By how many the TTL is less; the TOS that it leaves with. */
	u8 hops, tos;
};

/* Writes all headers. */
INLINE int write_headers(struct __sk_buff *skb, const struct packet *packet, const struct way *way) {
	const struct flow *flow = &way->flow;
	u32 udp_at = ETH_LEN + (way->out_v6 ? IPV6_LEN : IPV4_LEN);
	u32 want = udp_at + UDP_LEN + way->leaves_with;
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethernet *ethernet;
	struct udp *udp;

	/* Also where it lies in order: only so it may be written to. */
	if (data + want > end) {
		if (skb_pull_data(skb, want))
			return -1;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	ethernet = data;
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
		/* It may be cut into fragments further down: a socket's datagrams have no DF either, and an ID. */
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

/* The sum of what is not the payload, behind the Ethernet header. */
INLINE u64 sum_of_headers(struct __sk_buff *skb, u32 length) {
	u8 bytes[IPV6_LEN + UDP_LEN + sizeof(struct channel_data)] = {};

	/* Lengths of which the verifier knows the value. */
	if (length == IPV4_LEN + UDP_LEN) {
		if (skb_load_bytes(skb, ETH_LEN, bytes, IPV4_LEN + UDP_LEN))
			return 0;
	} else if (length == IPV4_LEN + UDP_LEN + 4) {
		if (skb_load_bytes(skb, ETH_LEN, bytes, IPV4_LEN + UDP_LEN + 4))
			return 0;
	} else if (length == IPV6_LEN + UDP_LEN) {
		if (skb_load_bytes(skb, ETH_LEN, bytes, IPV6_LEN + UDP_LEN))
			return 0;
	} else if (skb_load_bytes(skb, ETH_LEN, bytes, IPV6_LEN + UDP_LEN + 4)) {
		return 0;
	}
	return (u32)csum_diff(0, 0, bytes, sizeof(bytes), 0);
}

/* Copies a flow; 0 if it is another by now. In this order: an element that is overwritten meanwhile shows it by one stamp or the other. */
INLINE int take(const struct flow *found, const struct flow_key *key, struct flow *flow) {
	u64 end = READ_ONCE(found->stamp_end);

	asm volatile("" ::: "memory");
	__builtin_memcpy(flow, found, sizeof(*flow));
	asm volatile("" ::: "memory");
	if (READ_ONCE(found->stamp) != end)
		return 0;
#pragma unroll
	for (int i = 0; i < sizeof(struct flow_key) / 8; i++)
		if (((u64 *)&flow->key)[i] != ((u64 *)key)[i])
			return 0;
	return 1;
}

/* Whether something that went up may still be on its way. */
INLINE int is_settling(const u64 *emptied, const struct state *state) {
	return *(volatile u64 *)emptied < READ_ONCE(state->up);
}

/* The peer is a relayed address of ours: leads on to the client behind that. COUNTS if it can. */
INLINE u32 turn_back(struct way *way, u64 now) {
	struct flow_key key = {};
	struct flow *next;
	u64 *emptied, *route;

	__builtin_memcpy(key.remote, way->flow.from, sizeof(key.remote));
	__builtin_memcpy(key.local, way->flow.to, sizeof(key.local));
	key.remote_port = way->flow.from_port;
	key.local_port = way->flow.to_port;
	next = map_lookup(&flows, &key);
	if (!next)
		return PASS_NO_ROUTE;
	/* User space sends it to itself: that takes two sockets to be emptied. */
	way->until = now + CALM;
	if (!take(next, &key, &way->flow))
		return PASS_STALE;
	if (way->flow.kind != TO_CLIENT)
		return PASS_NO_ROUTE;
	way->next = map_lookup(&states, &way->flow.state);
	emptied = map_lookup(&drained, &way->flow.socket);
	route = map_lookup(&routes, &way->flow.route);
	if (!way->next || !emptied || !route)
		return PASS_STALE;
	if (way->flow.expires <= now)
		return PASS_EXPIRED;
	if (is_settling(emptied, way->next))
		return PASS_SETTLING;
	way->interface = INTERFACE(READ_ONCE(*route));
	way->hops = 2;
	return way->interface ? COUNTS : PASS_NO_ROUTE;
}

/* Why a packet of a flow goes up, or COUNTS. */
INLINE u32 judge(struct __sk_buff *skb, const struct packet *packet, const struct flow *found, struct way *way) {
	u32 ip_length, mtu = 0;
	u64 now, *emptied, *route, *back;

	way->state = way->next = 0;
	way->until = 0;
	if (!take(found, &packet->key, &way->flow))
		return PASS_STALE;
	emptied = map_lookup(&drained, &way->flow.socket);
	route = map_lookup(&routes, &way->flow.route);
	back = map_lookup(&routes, &way->flow.back);
	if (!emptied || !route || !back)
		return PASS_STALE;
	way->state = map_lookup(&states, &way->flow.state);
	if (!way->state)
		return PASS_STALE;
	now = ktime_get_ns();
	if (skb->gso_segs > 1) {
		way->until = now + CALM;
		return PASS_SUPER_PACKET;
	}
	way->until = now;
	if (way->flow.kind == CLIENT)
		return PASS_NOT_CHANNEL_DATA;
	if (way->flow.expires <= now)
		return PASS_EXPIRED;
	if (!INTERFACE(*back) || (*back & ONLY_FROM_THERE && INTERFACE(*back) != skb->ifindex))
		return PASS_SOURCE;
	way->came_with = way->flow.kind == TO_PEER ? sizeof(struct channel_data) : 0;
	way->interface = INTERFACE(READ_ONCE(*route));
	way->hops = 1;
	/* A forwarder's sockets send with none. */
	way->tos = way->flow.kind == FORWARD ? 0 : packet->tos;
	if (!way->interface) {
		u32 reason = way->came_with ? turn_back(way, now) : PASS_NO_ROUTE;

		if (reason != COUNTS)
			return reason;
	}
	way->leaves_with = way->flow.kind == TO_CLIENT ? sizeof(struct channel_data) : 0;
	way->payload = packet->length - UDP_LEN - way->came_with;
	way->length = way->payload + UDP_LEN + way->leaves_with;
	if (way->came_with && NTOHS(packet->channel_data.length) != way->payload)
		return PASS_PADDED;
	/* RFC 8656 section 15.1; 0 is for user space to judge. */
	if (packet->ttl <= way->hops)
		return PASS_TTL;
	way->out_v6 = !is_mapped(way->flow.to);
	if (packet->check == 0 && (packet->v6 || way->out_v6))
		return PASS_NO_CHECKSUM;
	ip_length = way->length + (way->out_v6 ? IPV6_LEN : IPV4_LEN);
	/* In IPv6 a sender heeds the path's MTU, which user space knows; this much fits everywhere (RFC 8200 section 5). */
	if (packet->length > ROOM - 4 || (way->out_v6 && ip_length > 1280) ||
	    check_mtu(skb, way->interface, &mtu, ip_length + ETH_LEN - skb->len, 0))
		return PASS_TOO_BIG;
	if (is_settling(emptied, way->state))
		return PASS_SETTLING;
	return COUNTS;
}

/* The checksum of what leaves. Only the change is added, so that a payload that was damaged shows at the far end. */
INLINE u16 new_check(const struct packet *packet, const struct way *way, enum csum csum, u64 pseudo) {
	u64 sum = pseudo_header(way->flow.from, way->flow.to, way->out_v6, way->length), old;
	u16 check;

	if (csum == CSUM_PARTIAL)
		return fold(sum);
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

/* Changes a packet; not 0 if the kernel refuses. */
INLINE int rewrite(struct __sk_buff *skb, const struct packet *packet, const struct way *way, enum csum csum, struct room *room) {
	int more = (int)way->leaves_with - (int)way->came_with;
	u64 complete = 0, headers = 0;

	/* Ethernet pads what is short. */
	if (skb->len > packet->udp_at + packet->length && skb_change_tail(skb, packet->udp_at + packet->length, 0))
		return -1;
	if (csum == CSUM_COMPLETE) {
		complete = csum_update(skb, 0);
		headers = sum_of_headers(skb, packet->udp_at - ETH_LEN + UDP_LEN + way->came_with);
	}
	if (more && csum == CSUM_PARTIAL) {
		if (move_payload(skb, packet->udp_at, way->payload, more < 0, room))
			return -1;
	} else if (more && skb_adjust_room(skb, more, ROOM_NET, ROOM_KEEPS_CSUM)) {
		return -1;
	}
	if (way->out_v6 != packet->v6 && skb_change_proto(skb, way->out_v6 ? HTONS(ETH_IPV6) : HTONS(ETH_IPV4), 0))
		return -1;
	if (write_headers(skb, packet, way))
		return -1;
	if (csum == CSUM_COMPLETE) {
		u32 length = (way->out_v6 ? IPV6_LEN : IPV4_LEN) + UDP_LEN + way->leaves_with;
		u16 wanted = fold(complete + (u16)~fold(headers) + sum_of_headers(skb, length));

		csum_update(skb, (u16)~fold((u32)csum_update(skb, 0)));
		csum_update(skb, wanted);
	}
	skb->mark = 0;
	if (!way->out_v6)
		skb->priority = priority_of(way->tos);
	return 0;
}

INLINE void add(struct state *state, u16 payload) {
	__sync_fetch_and_add(&state->datagrams, 1);
	__sync_fetch_and_add(&state->bytes, payload);
}

/* Sends a packet of a flow across, or up. */
INLINE int forward(struct __sk_buff *skb, const struct packet *packet, const struct flow *found) {
	struct way way;
	struct room *room;
	u32 reason = judge(skb, packet, found, &way), zero = 0;
	u64 pseudo;
	enum csum csum = CSUM_BAD;

	room = map_lookup(&rooms, &zero);
	if (reason == COUNTS && room) {
		pseudo = pseudo_header(packet->key.remote, packet->key.local, packet->v6, packet->length);
		csum = checksum(skb, packet, pseudo, room);
		if (csum == CSUM_BAD)
			reason = PASS_CHECKSUM;
	}
	if (reason != COUNTS || !room) {
		if (way.state)
			mark(way.state, way.until);
		return count(reason);
	}
	way.check = new_check(packet, &way, csum, pseudo);
	if (rewrite(skb, packet, &way, csum, room)) {
		count(COUNT_FAILED);
		return TC_DROP;
	}
	if (!way.state)
		return TC_DROP;
	add(way.state, way.payload);
	if (way.next)
		add(way.next, way.payload);
	count(way.next ? COUNT_TURNED_BACK : way.flow.kind == FORWARD ? COUNT_FORWARDED : way.came_with ? COUNT_TO_PEER : COUNT_TO_CLIENT);
	return redirect_neigh(way.interface, 0, 0, 0);
}

SEC("classifier") int turnpike(struct __sk_buff *skb) {
	struct packet packet;
	struct flow *flow;
	u32 reason, class;
	int looks;

	/* For others, or for a VLAN, whose device comes to see it next. */
	if (skb->pkt_type != PACKET_HOST || skb->vlan_present)
		return TC_NEXT;
	if (!parse(skb, &packet, &reason))
		return reason == COUNTS ? TC_NEXT : count(reason);
	class = class_of(NTOHS(packet.key.local_port));
	if (!class)
		return TC_NEXT;
	/* The first two bits of ChannelData (RFC 8656 section 12). A super-packet may have several channels in it. */
	looks = (class & LISTENER) && skb->gso_segs <= 1 && (packet.channel_data.number & HTONS(0xc000)) == HTONS(0x4000);
	if (looks)
		packet.key.channel = packet.channel_data.number;
	flow = map_lookup(&flows, &packet.key);
	if (!flow && looks) {
		/* No such channel, but whoever sent it may have others. */
		packet.key.channel = 0;
		flow = map_lookup(&flows, &packet.key);
	}
	if (flow)
		return forward(skb, &packet, flow);
	if (class & LISTENER)
		return count(looks ? PASS_UNKNOWN_CHANNEL : PASS_NOT_CHANNEL_DATA);
	return count(PASS_UNKNOWN_PEER);
}

char _license[] SEC("license") = "Dual MIT/GPL";
