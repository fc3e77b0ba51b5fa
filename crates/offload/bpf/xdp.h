/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* In the driver: before GRO, with only the bytes of a packet, and with link addresses supplied by user space. */
#pragma once
#include "decide.h"

/* The six bytes of a link address, in the form of `struct hop`. */
INLINE u64 link_address(const u8 *bytes) {
	u64 address = 0;

	__builtin_memcpy(&address, bytes, 6);
	return address;
}

/* Changes a packet; not 0 if the kernel refuses. */
INLINE int xdp_rewrite(struct xdp_md *xdp, u32 length, const struct packet *packet, const struct way *way) {
	int came = (packet->v6 ? IPV6_LEN : IPV4_LEN) + (int)way->came_with;
	int leaves = (way->out_v6 ? IPV6_LEN : IPV4_LEN) + (int)way->leaves_with;
	u32 padding = length - (packet->udp_at + packet->length);
	struct ethernet *ethernet;
	void *end;

	/* Ethernet pads short frames. */
	if (padding && xdp_adjust_tail(xdp, -(int)padding))
		return -1;
	if (came != leaves && xdp_adjust_head(xdp, came - leaves))
		return -1;
	ethernet = (void *)(long)xdp->data;
	end = (void *)(long)xdp->data_end;
	if ((void *)(ethernet + 1) > end || write_headers(ethernet, end, packet, way))
		return -1;
	__builtin_memcpy(ethernet->to, &way->hop.to, sizeof(ethernet->to));
	__builtin_memcpy(ethernet->from, &way->hop.from, sizeof(ethernet->from));
	return 0;
}

/* Relays a packet of a flow, or passes it to user space. */
INLINE int xdp_forward(struct xdp_md *xdp, u32 length, u64 sent_to, const struct packet *packet, struct flow *found) {
	struct arrival arrival = {
		.context = xdp,
		.interface = xdp->ingress_ifindex,
	};
	struct way way;
	struct room *room;
	u32 reason = judge(AT_XDP, &arrival, sent_to, packet, found, &way), zero = 0;
	u64 pseudo = pseudo_header(packet->key.remote, packet->key.local, packet->v6, packet->length);

	room = map_lookup(&rooms, &zero);
	/* The driver's own verification of the checksum is not visible here. */
	if (reason == COUNTS && room && packet->check &&
	    fold(pseudo + sum_of(AT_XDP, xdp, packet->udp_at, packet->length, room)) != 0xffff)
		reason = PASS_CHECKSUM;
	measure(AT_XDP, xdp, packet, &way, reason);
	if (reason != COUNTS || !room) {
		count(reason);
		if (reason == COUNT_BEHIND)
			return XDP_DROP;
		mark(&way);
		return XDP_PASS;
	}
	way.check = new_check(packet, &way, pseudo);
	if (xdp_rewrite(xdp, length, packet, &way)) {
		count(COUNT_FAILED);
		return XDP_DROP;
	}
	book(&way);
	if (way.state) {
		WRITE_ONCE(way.state->across, way.now);
		/* After the next pause, the flow goes to user space. */
		if (way.bulk)
			at_least(&way.state->calm, way.now + CALM);
	}
	/* Every driver can send on the interface on which the packet arrived. */
	if (way.interface == arrival.interface && !way.by_redirection)
		return XDP_TX;
	return redirect(way.interface, 0);
}

SEC("xdp") int turnpike_xdp(struct xdp_md *xdp) {
	void *data = (void *)(long)xdp->data, *end = (void *)(long)xdp->data_end;
	struct ethernet *ethernet = data;
	u32 length = end - data, reason;
	struct packet packet;
	struct flow *flow = 0;
	u64 sent_to;

	/* Packets on a VLAN have a different protocol number, or are rejected when their source is checked. */
	if ((void *)(ethernet + 1) > end)
		return XDP_PASS;
	sent_to = link_address(ethernet->to);
	if (parse(data, end, length, ethernet->protocol, &packet, &reason))
		flow = find(&packet, 0, &reason);
	if (flow)
		return xdp_forward(xdp, length, sent_to, &packet, flow);
	if (reason != COUNTS)
		count(reason);
	return XDP_PASS;
}
