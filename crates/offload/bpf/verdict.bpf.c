/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* Passes data from one TCP socket of a pair to the other while the traffic is interactive. Larger amounts go to user space, and so does
 * everything after them, until user space has caught up and hands the direction back. `sockmap.rs` is the user-space side. */
#include "kernel.h"

enum { MAP_SOCKMAP = 15, MAP_RINGBUF = 27 };
enum { SK_DROP = 0, SK_PASS = 1 };

static u64 (*get_socket_cookie)(void *ctx) = (void *)46;
static long (*sk_redirect_map)(struct __sk_buff *, void *map, u32 key, u64 flags) = (void *)52;
static long (*sk_release)(void *sk) = (void *)86;
static long (*ringbuf_output)(void *ring, void *data, u64 size, u64 flags) = (void *)130;
static void *(*skc_to_tcp_sock)(void *sk) = (void *)137;

/* Fields of the kernel's own structures; BTF supplies their offsets when the program is loaded. */
struct tcp_sock {
	u32 write_seq;
} __attribute__((preserve_access_index));

struct sock {
	int sk_wmem_queued, sk_sndbuf;
} __attribute__((preserve_access_index));

/* One socket of a pair, in a cache line of its own. `sockmap.rs` uses the same layout. */
struct side {
	/* Number of bytes received from this socket, and the flag UP if they go to user space. */
	u64 seen;
	/* Write sequence number of the other socket when the first byte arrived, and the flag KNOWN. */
	u64 base;
	/* Number of bytes since the other side last sent data. */
	u64 run;
	/* Value of `seen` when UP was set: these bytes have been passed on, or had already been read. */
	u64 handed;
	u64 unused[4];
};

#define UP (1ULL << 63)
#define KNOWN (1ULL << 32)

/* More than this in one direction is not interactive, and user space handles it more cheaply. */
#define MOST_RUN (256 * 1024)
/* Space that a packet takes up in a send buffer in addition to its bytes. */
#define PIECE 4096

/* Slots of sockets by cookie (SO_COOKIE). Those of a pair differ in the last bit. */
struct {
	NUMBER(type, MAP_HASH);
	NUMBER(map_flags, NO_PREALLOC);
	NUMBER(max_entries, 1);
	TYPE(key, u64);
	TYPE(value, u32);
} places SEC(".maps");

struct {
	NUMBER(type, MAP_SOCKMAP);
	NUMBER(max_entries, 1);
	NUMBER(key_size, 4);
	NUMBER(value_size, 4);
} sockets SEC(".maps");

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, MMAPABLE);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct side);
} sides SEC(".maps");

/* Slots of sockets whose bytes go to user space from now on. */
struct {
	NUMBER(type, MAP_RINGBUF);
	NUMBER(max_entries, 4096);
} raised SEC(".maps");

/* Returns the bytes written to a socket, modulo 2^32, and the room in its send buffer; not 0 if there is no such socket. */
INLINE int look_at(u32 place, u32 *written, s64 *room) {
	struct tcp_sock *tcp;
	struct sock *sock;
	void *sk = map_lookup(&sockets, &place);
	int failed = 1;

	if (!sk)
		return 1;
	tcp = skc_to_tcp_sock(sk);
	if (tcp) {
		/* struct tcp_sock begins with a struct sock. */
		sock = (struct sock *)tcp;
		*written = tcp->write_seq;
		*room = (s64)sock->sk_sndbuf - sock->sk_wmem_queued;
		failed = 0;
	}
	sk_release(sk);
	return failed;
}

/* True if `len` more bytes are too many. Data that the kernel has queued for a full socket (sk_psock_backlog) would wait there without
 * limit, and data from that socket would wait behind it. So data is passed on only if the send buffer certainly has room for it, including the
 * overhead of each piece, which is about as large as the data. */
INLINE int is_too_much(struct side *side, u32 other, u64 seen, u32 len) {
	u32 written = 0, waiting;
	s64 room = 0;

	if (look_at(other, &written, &room))
		return 1;
	if (!(side->base & KNOWN)) {
		/* It is unknown how many of the bytes seen before have been written. */
		if (seen & ~UP)
			return 1;
		WRITE_ONCE(side->base, KNOWN | written);
	}
	waiting = (u32)seen - (written - (u32)side->base);
	return 2 * ((s64)waiting + len) + PIECE > room || side->run + len > MOST_RUN;
}

SEC("sk_skb/stream_verdict") int turnpike_chat(struct __sk_buff *skb) {
	u64 cookie = get_socket_cookie(skb), seen;
	u32 *found = map_lookup(&places, &cookie), place, len = skb->len;
	struct side *side, *other;

	/* End of stream, which epoll reports. Passing on a packet without bytes would break the other socket (sk_psock_backlog). */
	if (!len)
		return SK_DROP;
	if (!found)
		return SK_PASS;
	place = *found;
	side = map_lookup(&sides, &place);
	place ^= 1;
	other = map_lookup(&sides, &place);
	if (!side || !other)
		return SK_PASS;
	seen = READ_ONCE(side->seen);
	if ((!(seen & UP) || !(side->base & KNOWN)) && is_too_much(side, place, seen, len) && !(seen & UP)) {
		u32 own = place ^ 1;

		WRITE_ONCE(side->handed, seen);
		/* Unless user space has already set UP. */
		if (!(__sync_fetch_and_or(&side->seen, UP) & UP))
			ringbuf_output(&raised, &own, sizeof(own), 0);
	}
	WRITE_ONCE(side->run, side->run + len);
	WRITE_ONCE(other->run, 0);
	/* Atomic: bytes counted before user space sets UP have been passed on, and bytes counted later go to user space. */
	if (__sync_fetch_and_add(&side->seen, len) & UP)
		return SK_PASS;
	return sk_redirect_map(skb, &sockets, place, 0);
}

char _license[] SEC("license") = "Dual MIT/GPL";
