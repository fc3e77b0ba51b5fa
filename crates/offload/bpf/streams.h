/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* Counts the RTP streams of measured flows on arrival, as user space does for the datagrams that it relays. A datagram that goes to user space
 * advances the sequence numbers here, and is received there. */
#pragma once
#include "flow.h"

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, MMAPABLE);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct streams);
} streams SEC(".maps");

/* Start of a payload, as in RTP. */
struct start {
	/* Two bytes, sequence number, timestamp. */
	u64 head;
	u32 ssrc;
};

enum { START_LEN = 12 };

/* Classes of payloads by the first two bytes of `head` (RFC 7983, RFC 5761). */
enum media { MEDIA_OTHER, MEDIA_RTP, MEDIA_RTCP, MEDIA_STUN };

INLINE enum media media_of(u64 head) {
	u8 first = head, second = head >> 8;

	if (first < 2)
		return MEDIA_STUN;
	if (first >> 6 != 2)
		return MEDIA_OTHER;
	return second >= 192 && second <= 223 ? MEDIA_RTCP : MEDIA_RTP;
}

/* True if RTCP goes to user space now. Global functions are verified once, and not for each state of their callers. */
__attribute__((noinline)) int is_rtcp_due(u32 slot, u64 now) {
	struct streams *own = map_lookup(&streams, &slot);

	if (!own || READ_ONCE(own->rtcp_due) > now)
		return 0;
	WRITE_ONCE(own->rtcp_due, now + RTCP_INTERVAL);
	return 1;
}

/* Slot of a stream: its own, or one for a new stream; STREAMS if all are in use. */
INLINE u32 slot_of(const struct streams *streams, u32 ssrc, u64 now) {
	u32 slot = STREAMS;

#pragma unroll
	for (u32 i = 0; i < STREAMS; i++)
		if (slot == STREAMS && streams->of[i].ssrc == ssrc)
			slot = i;
	if (slot != STREAMS)
		return slot;
#pragma unroll
	for (u32 i = 0; i < STREAMS; i++)
		if (slot == STREAMS && !streams->of[i].ssrc)
			slot = i;
	if (slot != STREAMS)
		return slot;
#pragma unroll
	for (u32 i = 0; i < STREAMS; i++)
		if (slot == STREAMS && (!streams->of[i].is_confirmed || (s64)(now - streams->of[i].at) > (s64)IDLE))
			slot = i;
	return slot;
}

INLINE void await(struct stream *stream, u16 next, u32 received) {
	stream->awaited = next;
	stream->awaits = 1 + received;
}

/* Interarrival jitter, and the start of the next interval. */
INLINE void tick(struct stream *stream, u32 timestamp, u64 now) {
	s64 units = (int)(timestamp - stream->timestamp);
	s64 difference = (s64)(now - stream->at) - ((units * (s64)stream->unit) >> 8);

	if (difference < 0)
		difference = -difference;
	if (stream->unit && difference < (s64)BREAK)
		stream->jitter += difference - ((stream->jitter + 8) >> 4);
	stream->timestamp = timestamp;
	stream->at = now;
}

/* Counts a datagram (RFC 3550 appendix A.1) of the flows with these streams. See `struct start`; `received` is 0 if it goes to user
 * space, otherwise 1. */
__attribute__((noinline)) int arrive(u32 number, u64 head, u32 network_ssrc, u64 now, u32 received) {
	struct streams *own = map_lookup(&streams, &number);
	u16 sequence = NTOHS((u16)(head >> 16)), ahead, behind;
	u32 timestamp = NTOHL((u32)(head >> 32)), ssrc = NTOHL(network_ssrc), slot;
	struct stream *stream;

	if (!own || !ssrc)
		return 0;
	slot = slot_of(own, ssrc, now);
	if (slot >= STREAMS)
		return 0;
	received = received != 0;
	stream = &own->of[slot];
	if (stream->ssrc != ssrc) {
		__builtin_memset(stream, 0, sizeof(*stream));
		stream->payload_type = (head >> 8) & 0x7f;
		stream->timestamp = timestamp;
		stream->at = now;
		await(stream, sequence + 1, received);
		WRITE_ONCE(stream->ssrc, ssrc);
		return 0;
	}
	if (own->last && now - own->last > own->longest_gap)
		own->longest_gap = now - own->last;
	own->last = now;
	ahead = sequence - stream->highest;
	behind = -ahead;
	if (stream->awaits && sequence == stream->awaited) {
		/* The datagram that announced the stream or its restart is counted too. */
		stream->received += stream->awaits - 1 + received;
		stream->expected += 2;
		stream->arrived = ~0ULL;
		stream->highest = sequence;
		stream->awaits = 0;
		stream->is_confirmed = 1;
		stream->timestamp = timestamp;
		stream->at = now;
		return 0;
	}
	if (!stream->is_confirmed) {
		await(stream, sequence + 1, received);
		return 0;
	}
	if (ahead - 1U < MOST_MISSING - 1) {
		stream->expected += ahead;
		stream->arrived = ahead < REMEMBERED ? stream->arrived << ahead | 1 : 1;
		stream->highest = sequence;
		stream->awaits = 0;
	} else if (behind < REMEMBERED) {
		u64 bit = 1ULL << behind;

		/* A duplicate. */
		if (stream->arrived & bit)
			return 0;
		stream->arrived |= bit;
		stream->reordered++;
	} else {
		await(stream, sequence + 1, received);
		return 0;
	}
	stream->received += received;
	tick(stream, timestamp, now);
	return 0;
}
