/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* At TC egress: grants leases. Compares the datagrams that user space sends with those that the kernel path would send. Changes by netfilter,
 * routing rules, IPsec or other programs show up here; datagrams that they dropped or encapsulated never arrive here. */
#pragma once
#include "tc.h"

/* The first difference from the kernel path's datagram; COUNTS if there is none. */
INLINE u32 compare(struct __sk_buff *skb, const struct packet *packet, const struct flow *flow, u64 asked, u8 asked_ttl) {
	u32 route = READ_ONCE(flow->route), interface;
	u64 *word = map_lookup(&routes, &route);

	if (!word)
		return REFUSED_INTERFACE;
	interface = INTERFACE(READ_ONCE(*word));
	/* The peer is one of our relayed addresses. */
	if (!interface && flow->kind == TO_PEER)
		interface = LOOPBACK;
	if (skb->ifindex != interface || skb->vlan_present)
		return REFUSED_INTERFACE;
	if (skb->mark)
		return REFUSED_MARK;
	if (!(asked & dscp_bit(packet->tos)))
		return REFUSED_DSCP;
	/* A forwarder's sockets set their own TTL. */
	if (flow->kind != FORWARD && packet->ttl + 1 != asked_ttl)
		return REFUSED_TTL;
	if (skb->priority != (packet->v6 ? 0 : priority_of(packet->tos)))
		return REFUSED_PRIORITY;
	/* Queueing disciplines may classify by cgroup, which the kernel path's datagrams do not have. */
	if (get_cgroup_classid(skb))
		return REFUSED_CGROUP;
	return COUNTS;
}

INLINE void grant(struct lease *lease, u64 stamp, u8 tos) {
	u32 from = READ_ONCE(lease->asked_from);
	u64 now = ktime_get_ns(), bit = dscp_bit(tos), left = READ_ONCE(lease->asked) & ~bit;

	if (READ_ONCE(lease->of) == stamp && READ_ONCE(lease->until) > now && READ_ONCE(lease->from) == from) {
		/* A grant for another DSCP does not extend the lease. */
		WRITE_ONCE(lease->dscps, READ_ONCE(lease->dscps) | bit);
	} else {
		WRITE_ONCE(lease->of, 0);
		WRITE_ONCE(lease->from, from);
		WRITE_ONCE(lease->dscps, bit);
		WRITE_ONCE(lease->until, now + LEASE - get_prandom_u32() % (u32)(LEASE / 4));
		WRITE_ONCE(lease->of, stamp);
	}
	WRITE_ONCE(lease->asked, left);
	if (!left)
		WRITE_ONCE(lease->asked_by, 0);
}

/* Checks that this is still the flow that was looked up: elements are reused immediately. */
INLINE int sends(const struct flow *flow, const struct flow_key *leaves) {
	if (flow->from_port != leaves->local_port || flow->to_port != leaves->remote_port)
		return 0;
	if (flow->kind == TO_CLIENT && flow->channel != leaves->channel)
		return 0;
#pragma unroll
	for (int i = 0; i < 4; i++)
		if (flow->from[i] != leaves->local[i] || flow->to[i] != leaves->remote[i])
			return 0;
	return flow->kind != CLIENT;
}

/* True if the source port is not the sending socket's (NAT). */
INLINE int is_translated(struct __sk_buff *skb, u16 port) {
	struct bpf_sock *sock = skb->sk;
	u32 bound;

	if (!sock)
		return 0;
	sock = sk_fullsock(sock);
	if (!sock)
		return 0;
	bound = sock->src_port;
	return bound != NTOHS(port) && class_of(bound);
}

SEC("classifier/leaves") int turnpike_leaves(struct __sk_buff *skb) {
	u32 want = ETH_LEN + IPV6_LEN + UDP_LEN + sizeof(struct channel_data), reason;
	struct flow_key leaves = {}, *name;
	struct packet packet;
	struct flow *flow;
	void *data, *end;
	u32 class;
	u64 stamp;

	/* The packet arrived on an interface: it was relayed by the kernel path, or forwarded. */
	if (skb->ingress_ifindex)
		return TC_NEXT;
	if (skb->protocol != HTONS(ETH_IPV4) && skb->protocol != HTONS(ETH_IPV6))
		return TC_NEXT;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if (data + want > end) {
		if (skb_pull_data(skb, skb->len < want ? skb->len : want))
			return TC_NEXT;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	if (!parse(data, end, skb->len, skb->protocol, &packet, &reason))
		return TC_NEXT;
	if (is_translated(skb, packet.key.remote_port)) {
		count(REFUSED_SOURCE);
		return TC_NEXT;
	}
	class = class_of(NTOHS(packet.key.remote_port));
	if (!class)
		return TC_NEXT;
	__builtin_memcpy(leaves.remote, packet.key.local, sizeof(leaves.remote));
	__builtin_memcpy(leaves.local, packet.key.remote, sizeof(leaves.local));
	leaves.remote_port = packet.key.local_port;
	leaves.local_port = packet.key.remote_port;
	name = 0;
	if ((class & LISTENER) && (packet.channel_data.number & HTONS(0xc000)) == HTONS(0x4000)) {
		leaves.channel = packet.channel_data.number;
		name = map_lookup(&departures, &leaves);
	}
	if (!name) {
		leaves.channel = 0;
		name = map_lookup(&departures, &leaves);
	}
	if (!name)
		return TC_NEXT;
	flow = map_lookup(&flows, name);
	if (!flow)
		return TC_NEXT;
	stamp = READ_ONCE(flow->stamp);
	if (READ_ONCE(flow->lease.asked_by) != stamp || !READ_ONCE(flow->lease.asked_from) || !sends(flow, &leaves))
		return TC_NEXT;
	/* Not the datagram that requested the lease: this one arrived over TCP, or in a Send indication. */
	if (READ_ONCE(flow->lease.asked_length) != (skb->gso_size ? skb->gso_size + UDP_LEN : packet.length))
		return TC_NEXT;
	reason = compare(skb, &packet, flow, READ_ONCE(flow->lease.asked), READ_ONCE(flow->lease.asked_ttl));
	if (reason == COUNTS) {
		grant(&flow->lease, stamp, packet.tos);
	} else {
		count(reason);
		WRITE_ONCE(flow->lease.refused, 1);
		WRITE_ONCE(flow->lease.asked_by, 0);
	}
	return TC_NEXT;
}
