/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* Parts of the kernel's interface to eBPF programs that are used here: numbers and layouts from linux/bpf.h, bpf-helpers(7), and packet
 * headers. They are copied here so that the object does not depend on the headers installed on the build machine. */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
/* Maps as BTF describes them: a number is the length of an array, a type is the target of a pointer. */
#define NUMBER(name, value) int(*name)[value]
#define TYPE(name, of) of *name

#define HTONS(x) __builtin_bswap16(x)
#define NTOHS(x) __builtin_bswap16(x)
#define HTONL(x) __builtin_bswap32(x)
#define NTOHL(x) __builtin_bswap32(x)
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, value) (*(volatile typeof(x) *)&(x) = (value))

enum { MAP_HASH = 1, MAP_ARRAY = 2, MAP_PERCPU_ARRAY = 6 };
enum { NO_PREALLOC = 1 << 0, MMAPABLE = 1 << 10 };

enum { TC_NEXT = -1, TC_DROP = 2 };
enum { XDP_DROP = 1, XDP_PASS = 2, XDP_TX = 3 };
enum { PACKET_HOST = 0 };
/* The loopback device of each network namespace. */
enum { LOOPBACK = 1 };
enum { CSUM_LEVEL_QUERY = 0, CSUM_LEVEL_INC = 1, CSUM_LEVEL_DEC = 2 };
enum { ROOM_NET = 0, ROOM_KEEPS_CSUM = 1 << 5 };

struct bpf_sock;

/* The start of struct __sk_buff, up to the last field used here. */
struct __sk_buff {
	u32 len;
	u32 pkt_type;
	u32 mark;
	u32 queue_mapping;
	u32 protocol;
	u32 vlan_present;
	u32 vlan_tci;
	u32 vlan_proto;
	u32 priority;
	u32 ingress_ifindex;
	u32 ifindex;
	u32 tc_index;
	u32 cb[5];
	u32 hash;
	u32 tc_classid;
	u32 data;
	u32 data_end;
	u32 napi_id;
	u32 family;
	u32 remote_ip4;
	u32 local_ip4;
	u32 remote_ip6[4];
	u32 local_ip6[4];
	u32 remote_port;
	u32 local_port;
	u32 data_meta;
	u64 flow_keys __attribute__((aligned(8)));
	u64 tstamp;
	u32 wire_len;
	u32 gso_segs;
	struct bpf_sock *sk __attribute__((aligned(8)));
	u32 gso_size;
};

struct xdp_md {
	u32 data;
	u32 data_end;
	u32 data_meta;
	u32 ingress_ifindex;
	u32 rx_queue_index;
	u32 egress_ifindex;
};

/* The start of struct bpf_sock. */
struct bpf_sock {
	u32 bound_dev_if, family, type, protocol, mark, priority;
	u32 src_ip4, src_ip6[4];
	/* In host order. */
	u32 src_port;
};

/* struct bpf_fib_lookup, with the fields used here. */
struct fib_lookup {
	u8 family, l4_protocol;
	u16 from_port, to_port;
	u16 total_length;
	u32 ifindex;
	u32 tos_or_flow;
	/* IPv4: the first of the four. */
	u32 from[4], to[4];
	u16 vlan[2];
	u8 link_from[6], link_to[6];
};

/* Its results: the packet is for this machine, or this machine does not forward packets from this interface. */
enum { FIB_NOT_FORWARDED = 4, FIB_FORWARDING_DISABLED = 5 };
enum { AF_INET = 2, AF_INET6 = 10 };

/* struct bpf_redir_neigh. */
struct neighbour {
	u32 family;
	/* IPv4: the first of the four. */
	u32 address[4];
};

static void *(*map_lookup)(void *map, const void *key) = (void *)1;
static u64 (*ktime_get_ns)(void) = (void *)5;
static u32 (*get_prandom_u32)(void) = (void *)7;
static long (*skb_store_bytes)(struct __sk_buff *, u64 offset, const void *from, u64 len, u64 flags) = (void *)9;
static u32 (*get_cgroup_classid)(struct __sk_buff *) = (void *)17;
static long (*redirect)(u32 ifindex, u64 flags) = (void *)23;
static long (*skb_load_bytes)(const struct __sk_buff *, u64 offset, void *to, u64 len) = (void *)26;
static s64 (*csum_diff)(const void *from, u64 from_size, const void *to, u64 to_size, u64 seed) = (void *)28;
static long (*skb_change_proto)(struct __sk_buff *, u16 proto, u64 flags) = (void *)31;
static long (*skb_change_tail)(struct __sk_buff *, u32 len, u64 flags) = (void *)38;
static long (*skb_pull_data)(struct __sk_buff *, u32 len) = (void *)39;
static s64 (*csum_update)(struct __sk_buff *, u32 csum) = (void *)40;
static void (*set_hash_invalid)(struct __sk_buff *) = (void *)41;
static long (*xdp_adjust_head)(struct xdp_md *, int delta) = (void *)44;
static long (*skb_adjust_room)(struct __sk_buff *, int diff, u32 mode, u64 flags) = (void *)50;
static long (*xdp_adjust_tail)(struct xdp_md *, int delta) = (void *)65;
static long (*fib_lookup)(void *context, struct fib_lookup *, int length, u32 flags) = (void *)69;
static struct bpf_sock *(*sk_fullsock)(struct bpf_sock *) = (void *)95;
static s64 (*csum_level)(struct __sk_buff *, u64 level) = (void *)135;
static long (*redirect_neigh)(u32 ifindex, void *params, int params_len, u64 flags) = (void *)152;
static long (*check_mtu)(void *context, u32 ifindex, u32 *mtu, int diff, u64 flags) = (void *)163;
static long (*xdp_load_bytes)(struct xdp_md *, u64 offset, void *to, u64 len) = (void *)189;

enum { ETH_LEN = 14, UDP_LEN = 8, IPV4_LEN = 20, IPV6_LEN = 40, IPPROTO_UDP = 17 };
enum { ETH_IPV4 = 0x0800, ETH_IPV6 = 0x86dd };

struct ethernet {
	u8 to[6], from[6];
	u16 protocol;
};

struct ipv4 {
	u8 version_length, tos;
	u16 total_length, id, fragment;
	u8 ttl, protocol;
	u16 check;
	u32 from, to;
};

struct ipv6 {
	/* Version 4 bits, traffic class 8, flow label 20. */
	u32 first;
	u16 payload_length;
	u8 next, hop_limit;
	u32 from[4], to[4];
};

struct udp {
	u16 from, to, length, check;
};

struct channel_data {
	u16 number, length;
};
