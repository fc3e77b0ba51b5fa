/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* TC ingress: after GRO, with the kernel's knowledge of checksums and neighbours. */
#pragma once
#include "decide.h"

enum csum {
	CSUM_BAD,
	/* The field contains the complete checksum, or none. */
	CSUM_WHOLE,
	/* Like CSUM_WHOLE, and the kernel has the sum of everything after the Ethernet header. */
	CSUM_COMPLETE,
	/* The field contains the sum of the pseudo-header; a later device or the receiver adds the rest. */
	CSUM_PARTIAL,
};

/* Distinguishes a partial sum (CHECKSUM_PARTIAL) from an unknown one (CHECKSUM_NONE): only the latter can temporarily be marked
 * as verified. */
INLINE int is_partial(struct __sk_buff *skb) {
	csum_level(skb, CSUM_LEVEL_INC);
	if (csum_level(skb, CSUM_LEVEL_QUERY) < 0)
		return 1;
	csum_level(skb, CSUM_LEVEL_DEC);
	return 0;
}

/* Verifies the checksum, which the kernel itself does only after this program has run. */
INLINE enum csum checksum(struct __sk_buff *skb, const struct packet *packet, u64 pseudo, struct room *room) {
	s64 complete = csum_update(skb, 0);

	/* No checksum, which IPv4 allows. */
	if (packet->check == 0)
		return complete < 0 ? CSUM_WHOLE : CSUM_COMPLETE;
	if (csum_level(skb, CSUM_LEVEL_QUERY) >= 0)
		return CSUM_WHOLE;
	if (complete < 0 && packet->check == fold(pseudo) && is_partial(skb))
		return CSUM_PARTIAL;
	/* The sum of an IPv4 header is zero. */
	if (complete >= 0 && !packet->v6 && skb->len == packet->udp_at + packet->length)
		return fold(pseudo + complete) == 0xffff ? CSUM_COMPLETE : CSUM_BAD;
	if (fold(pseudo + sum_of(AT_TC, skb, packet->udp_at, packet->length, room)) != 0xffff)
		return CSUM_BAD;
	return complete < 0 ? CSUM_WHOLE : CSUM_COMPLETE;
}

/* Moves the payload by four bytes, because the header must stay in place: CHECKSUM_PARTIAL refers to its position. */
INLINE int move_payload(struct __sk_buff *skb, u32 udp_at, u64 payload, int to_peer, struct room *room) {
	u32 from = udp_at + UDP_LEN + (to_peer ? sizeof(struct channel_data) : 0);
	u32 to = udp_at + UDP_LEN + (to_peer ? 0 : sizeof(struct channel_data));

	if (payload > 0 && skb_load_bytes(skb, from, room->bytes, within_room(payload)))
		return -1;
	if (!to_peer && skb_change_tail(skb, to + payload, 0))
		return -1;
	if (payload > 0 && skb_store_bytes(skb, to, room->bytes, within_room(payload), 0))
		return -1;
	if (to_peer && skb_change_tail(skb, to + payload, 0))
		return -1;
	return 0;
}

/* Linux's own mapping from TOS to queue priority, which UDP sockets also use (rt_tos2priority). */
INLINE u32 priority_of(u8 tos) {
	u32 precedence = (tos >> 3) & 3;

	return precedence == 1 ? 2 : precedence == 2 ? 6 : precedence == 3 ? 4 : 0;
}

/* Sum of the headers after the Ethernet header. */
INLINE u64 sum_of_headers(struct __sk_buff *skb, u32 length) {
	u8 bytes[IPV6_LEN + UDP_LEN + sizeof(struct channel_data)] = {};

	/* Constant lengths, which the verifier requires. */
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

/* Changes a packet; not 0 if the kernel refuses. */
INLINE int rewrite(struct __sk_buff *skb, const struct packet *packet, const struct way *way, enum csum csum, struct room *room) {
	int more = (int)way->leaves_with - (int)way->came_with;
	u32 want = ETH_LEN + (way->out_v6 ? IPV6_LEN : IPV4_LEN) + UDP_LEN + way->leaves_with;
	u64 complete = 0, headers = 0;
	void *data, *end;

	/* Ethernet pads short frames. */
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
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	/* Pulls even if the headers are linear, because this makes them writable. */
	if (data + want > end) {
		if (skb_pull_data(skb, want))
			return -1;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	if (write_headers(data, end, packet, way))
		return -1;
	if (csum == CSUM_COMPLETE) {
		u16 wanted = fold(complete + (u16)~fold(headers) + sum_of_headers(skb, want - ETH_LEN));

		csum_update(skb, (u16)~fold((u32)csum_update(skb, 0)));
		csum_update(skb, wanted);
	}
	/* Drops the hash of the received packet. Queueing disciplines use it (fq, fq_codel), and relayed packets should share a queue with those
	 * that our sockets send, which have no hash yet. */
	set_hash_invalid(skb);
	skb->mark = 0;
	if (!way->out_v6)
		skb->priority = priority_of(way->tos);
	return 0;
}

/* Makes the kernel send a packet along a route. If the watcher has stored the next hop, it need not be looked up for each packet. */
INLINE int send(u32 interface, u32 number) {
	struct gateway *gateway = map_lookup(&gateways, &number);
	u64 *route = map_lookup(&routes, &number);
	struct neighbour next = {};
	u64 address[2];

	if (!gateway || !route)
		return redirect_neigh(interface, 0, 0, 0);
	address[0] = READ_ONCE(gateway->address[0]);
	address[1] = READ_ONCE(gateway->address[1]);
	__builtin_memcpy(next.address, address, sizeof(address));
	/* The next hop is unknown, or the route has changed and the address may be a mix of the old and the new one. */
	if (!address[1] || INTERFACE(READ_ONCE(*route)) != interface)
		return redirect_neigh(interface, 0, 0, 0);
	next.family = AF_INET6;
	if (is_mapped(next.address)) {
		next.family = AF_INET;
		next.address[0] = next.address[3];
	}
	return redirect_neigh(interface, &next, sizeof(next), 0);
}

/* True for a packet with several datagrams. GRO sets their number; a virtual machine's network card leaves that at 0 and sets only their size. */
INLINE int is_super_packet(const struct __sk_buff *skb) {
	return skb->gso_segs > 1 || skb->gso_size;
}

/* Relays a packet of a flow, or passes it to user space. */
INLINE int tc_forward(struct __sk_buff *skb, const struct packet *packet, struct flow *found) {
	struct arrival arrival = {
		.context = skb,
		.interface = skb->ifindex,
		.is_super_packet = is_super_packet(skb),
	};
	struct way way;
	struct room *room;
	u32 reason = judge(AT_TC, &arrival, 0, packet, found, &way), zero = 0;
	u64 pseudo;
	enum csum csum = CSUM_BAD;

	room = map_lookup(&rooms, &zero);
	if (reason == COUNTS && room) {
		pseudo = pseudo_header(packet->key.remote, packet->key.local, packet->v6, packet->length);
		csum = checksum(skb, packet, pseudo, room);
		if (csum == CSUM_BAD)
			reason = PASS_CHECKSUM;
	}
	measure(AT_TC, skb, packet, &way, reason);
	if (reason != COUNTS || !room) {
		count(reason);
		if (reason == COUNT_BEHIND)
			return TC_DROP;
		mark(&way);
		return TC_NEXT;
	}
	way.check = csum == CSUM_PARTIAL ? fold(pseudo_header(way.flow.from, way.flow.to, way.out_v6, way.length))
					 : new_check(packet, &way, pseudo);
	if (rewrite(skb, packet, &way, csum, room)) {
		count(COUNT_FAILED);
		return TC_DROP;
	}
	book(&way);
	return send(way.interface, way.flow.route);
}

SEC("classifier") int turnpike(struct __sk_buff *skb) {
	u32 want = ETH_LEN + IPV6_LEN + UDP_LEN + sizeof(struct channel_data), reason;
	struct packet packet;
	struct flow *flow;
	void *data, *end;

	/* Addressed to others, or on a VLAN, whose device sees it next. */
	if (skb->pkt_type != PACKET_HOST || skb->vlan_present)
		return TC_NEXT;
	if (skb->protocol != HTONS(ETH_IPV4) && skb->protocol != HTONS(ETH_IPV6))
		return TC_NEXT;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if (data + want > end) {
		/* Too short, or its headers are not linear. */
		if (skb_pull_data(skb, skb->len < want ? skb->len : want))
			return TC_NEXT;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	flow = 0;
	if (parse(data, end, skb->len, skb->protocol, &packet, &reason))
		flow = find(&packet, is_super_packet(skb), &reason);
	if (flow)
		return tc_forward(skb, &packet, flow);
	if (reason != COUNTS)
		count(reason);
	return TC_NEXT;
}
