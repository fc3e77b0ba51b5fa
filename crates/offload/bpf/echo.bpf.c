/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* Reflector at TC ingress: sends datagrams back to their source. Datagrams coalesced by GRO go back as one packet, which is segmented
 * on its way out. Doubtful packets go to user space, which reflects them. */
#include "kernel.h"

/* Shared by the program and `echo.rs`. Tests keep the two in step. */
struct listener {
	/* In network order, IPv4 mapped into IPv6. If all bits after the prefix are zero, all addresses of that family match. */
	u32 address[4];
	u16 port;
	u16 zero;
};

enum { ECHOED_DATAGRAMS, ECHOED_BYTES, ECHOED };

struct {
	NUMBER(type, MAP_HASH);
	NUMBER(map_flags, NO_PREALLOC);
	NUMBER(max_entries, 1);
	TYPE(key, struct listener);
	TYPE(value, u32);
} listeners SEC(".maps");

struct {
	NUMBER(type, MAP_PERCPU_ARRAY);
	NUMBER(max_entries, ECHOED);
	TYPE(key, u32);
	TYPE(value, u64);
} echoed SEC(".maps");

INLINE void count(u32 index, u64 more) {
	u64 *value = map_lookup(&echoed, &index);

	if (value)
		*value += more;
}

/* For a wildcard listener: true if this is an address of this machine. If the machine does not forward, every packet received here is for it. */
INLINE int is_ours(struct __sk_buff *skb, struct fib_lookup *way) {
	long found;

	way->l4_protocol = IPPROTO_UDP;
	way->ifindex = skb->ifindex;
	found = fib_lookup(skb, way, sizeof(*way), 0);
	return found == FIB_NOT_FORWARDED || found == FIB_FORWARDING_DISABLED;
}

INLINE int is_listener(struct __sk_buff *skb, struct listener *to, struct fib_lookup *way, int v6) {
	if (map_lookup(&listeners, to))
		return 1;
	if (v6)
		to->address[0] = to->address[1] = to->address[2] = 0;
	to->address[3] = 0;
	return map_lookup(&listeners, to) && is_ours(skb, way);
}

/* True if this is a unicast source that can be answered. */
INLINE int is_anybody(u32 address) {
	u8 first = NTOHL(address) >> 24;

	return first != 0 && first != 127 && first < 224;
}

/* True if the UDP length matches the IP payload and does not exceed the packet. The kernel handles all other packets. */
INLINE int is_whole(struct __sk_buff *skb, struct udp *udp, u32 header, u32 length) {
	return length >= UDP_LEN && NTOHS(udp->length) == length && ETH_LEN + header + length <= skb->len;
}

INLINE void turn_around(struct ethernet *ethernet, struct udp *udp) {
	u8 link[6];
	u16 port = udp->from;

	udp->from = udp->to;
	udp->to = port;
	__builtin_memcpy(link, ethernet->from, 6);
	__builtin_memcpy(ethernet->from, ethernet->to, 6);
	__builtin_memcpy(ethernet->to, link, 6);
}

/* The UDP checksum does not change: it sums the same words in a different order. */
INLINE struct udp *echo_ipv4(struct __sk_buff *skb, struct ethernet *ethernet, void *end) {
	struct ipv4 *ip = (void *)(ethernet + 1);
	struct udp *udp = (void *)(ip + 1);
	struct listener to = {.address = {0, 0, HTONL(0xffff)}};
	struct fib_lookup way = {.family = AF_INET};
	u32 sum, from;

	if ((void *)(udp + 1) > end)
		return 0;
	/* No options, not a fragment, and a correct header checksum. */
	if (ip->version_length != 0x45 || ip->protocol != IPPROTO_UDP || (ip->fragment & HTONS(0x3fff)) || ip->ttl < 2)
		return 0;
	if (!is_whole(skb, udp, IPV4_LEN, NTOHS(ip->total_length) - IPV4_LEN))
		return 0;
	sum = csum_diff(0, 0, ip, sizeof(*ip), 0);
	sum = (sum & 0xffff) + (sum >> 16);
	if (((sum & 0xffff) + (sum >> 16)) != 0xffff)
		return 0;
	if (!udp->from || !is_anybody(ip->from))
		return 0;
	from = ip->from;
	to.address[3] = ip->to;
	to.port = udp->to;
	way.from[0] = from;
	way.to[0] = ip->to;
	if (!is_listener(skb, &to, &way, 0))
		return 0;
	ip->from = ip->to;
	ip->to = from;
	ip->ttl--;
	/* The upper byte of the word decreases by one (RFC 1624). */
	sum = NTOHS(ip->check) + 0x100;
	ip->check = HTONS((u16)(sum + (sum >> 16)));
	return udp;
}

INLINE struct udp *echo_ipv6(struct __sk_buff *skb, struct ethernet *ethernet, void *end) {
	struct ipv6 *ip = (void *)(ethernet + 1);
	struct udp *udp = (void *)(ip + 1);
	struct listener to = {};
	struct fib_lookup way = {.family = AF_INET6};
	u32 from[4], before[2], after[2];

	if ((void *)(udp + 1) > end)
		return 0;
	if (ip->next != IPPROTO_UDP || ip->hop_limit < 2 || !udp->from || !udp->check)
		return 0;
	if (!is_whole(skb, udp, IPV6_LEN, NTOHS(ip->payload_length)))
		return 0;
	__builtin_memcpy(from, ip->from, sizeof(from));
	/* Multicast, unspecified and loopback sources. */
	if ((from[0] & HTONL(0xff000000)) == HTONL(0xff000000) || !(from[0] | from[1] | from[2]))
		return 0;
	__builtin_memcpy(to.address, ip->to, sizeof(to.address));
	to.port = udp->to;
	__builtin_memcpy(way.from, ip->from, sizeof(way.from));
	__builtin_memcpy(way.to, ip->to, sizeof(way.to));
	if (!is_listener(skb, &to, &way, 1))
		return 0;
	__builtin_memcpy(ip->from, ip->to, sizeof(from));
	__builtin_memcpy(ip->to, from, sizeof(from));
	__builtin_memcpy(before, ip, sizeof(before));
	ip->hop_limit--;
	__builtin_memcpy(after, ip, sizeof(after));
	/* For packets whose complete sum the kernel has: IPv6 has no header checksum that would compensate. */
	csum_update(skb, csum_diff(before, sizeof(before), after, sizeof(after), 0));
	return udp;
}

SEC("classifier") int turnpike_echo(struct __sk_buff *skb) {
	u32 want = ETH_LEN + (skb->protocol == HTONS(ETH_IPV4) ? IPV4_LEN : IPV6_LEN) + UDP_LEN;
	struct ethernet *ethernet;
	struct udp *udp;
	void *end;

	/* Addressed to others, or on a VLAN, whose device sees it next. */
	if (skb->pkt_type != PACKET_HOST || skb->vlan_present)
		return TC_NEXT;
	if (skb->protocol != HTONS(ETH_IPV4) && skb->protocol != HTONS(ETH_IPV6))
		return TC_NEXT;
	/* Pulls even if the headers are linear, because this makes them writable. */
	if (skb->len < want || skb_pull_data(skb, want))
		return TC_NEXT;
	ethernet = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if ((void *)(ethernet + 1) > end)
		return TC_NEXT;
	udp = skb->protocol == HTONS(ETH_IPV4) ? echo_ipv4(skb, ethernet, end) : echo_ipv6(skb, ethernet, end);
	if (!udp)
		return TC_NEXT;
	turn_around(ethernet, udp);
	count(ECHOED_DATAGRAMS, skb->gso_segs ? skb->gso_segs : 1);
	count(ECHOED_BYTES, NTOHS(udp->length) - UDP_LEN);
	return redirect(skb->ifindex, 0);
}

char _license[] SEC("license") = "Dual MIT/GPL";
