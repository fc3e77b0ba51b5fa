//! Bounded queue of data that a connection could not send yet. Messages can be dropped until their first byte
//! has been sent. Independent of sockets.

use std::{collections::VecDeque, io::IoSlice};

/// Maximum size in bytes of the queued replies. Clients that send requests without reading replies are
/// disconnected.
const CONTROL_LIMIT: usize = 64 << 10;
const KEEP: usize = 4096;
pub(super) const SLICES: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteClass {
    /// A reply. It is never dropped, but the connection is closed if too many replies are unsent.
    Control,
    /// A relayed datagram. If the queue is full, the oldest is dropped, as a router would do.
    Datagram,
}

#[derive(Debug)]
pub(super) struct Overflow;

/// ```text
/// │ begun: the rest of a message that must be finished │ control: whole replies │ datagrams: whole messages, oldest first │
/// ```
#[derive(Debug)]
pub(super) struct Outbox {
    begun: Vec<u8>,
    begun_at: usize,
    control: Messages,
    datagrams: Messages,
    limit: usize,
}

impl Outbox {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            begun: Vec::new(),
            begun_at: 0,
            control: Messages::default(),
            datagrams: Messages::default(),
            limit,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.begun.is_empty() && self.control.is_empty() && self.datagrams.is_empty()
    }

    /// Queues a message that consists of three parts; returns the number of datagrams and bytes dropped to
    /// make room.
    pub(super) fn push(&mut self, class: WriteClass, parts: [&[u8]; 3]) -> Result<(u64, u64), Overflow> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        match class {
            WriteClass::Control => {
                if self.control.bytes.len() + len > CONTROL_LIMIT {
                    return Err(Overflow);
                }
                self.control.push(parts);
                Ok((0, 0))
            }
            WriteClass::Datagram => {
                if len > self.limit {
                    return Ok((1, len as u64));
                }
                let mut dropped = (0, 0);
                while self.datagrams.bytes.len() + len > self.limit {
                    dropped.0 += 1;
                    dropped.1 += self.datagrams.pop() as u64;
                }
                self.datagrams.push(parts);
                Ok(dropped)
            }
        }
    }

    /// Stores the rest of a partially sent message in an empty outbox.
    pub(super) fn begin(&mut self, parts: [&[u8]; 3], mut taken: usize) {
        for part in parts {
            let skipped = taken.min(part.len());
            taken -= skipped;
            self.begun.extend_from_slice(&part[skipped..]);
        }
    }

    pub(super) fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>; SLICES]) -> (usize, usize) {
        let (control, datagrams) = (self.control.bytes.as_slices(), self.datagrams.bytes.as_slices());
        let all = [&self.begun[self.begun_at..], control.0, control.1, datagrams.0, datagrams.1];
        let (mut count, mut total) = (0, 0);
        for part in all.into_iter().filter(|part| !part.is_empty()) {
            slices[count] = IoSlice::new(part);
            count += 1;
            total += part.len();
        }
        (count, total)
    }

    pub(super) fn rest(&self) -> Vec<u8> {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let (count, _) = self.slices(&mut slices);
        slices[..count].iter().flat_map(|slice| slice.iter().copied()).collect()
    }

    pub(super) fn next(&self) -> Option<[&[u8]; 2]> {
        self.control.front().or_else(|| self.datagrams.front())
    }

    pub(super) fn consume(&mut self, mut sent: usize) {
        let of_begun = sent.min(self.begun.len() - self.begun_at);
        self.begun_at += of_begun;
        sent -= of_begun;
        if self.begun_at < self.begun.len() {
            return;
        }
        self.begun_at = 0;
        self.begun.clear();
        let begun = &mut self.begun;
        if !self.control.consume(&mut sent, begun)
            && !self.datagrams.consume(&mut sent, begun)
            && self.begun.capacity() > KEEP
        {
            self.begun = Vec::new();
        }
    }
}

#[derive(Debug, Default)]
struct Messages {
    bytes: VecDeque<u8>,
    lengths: VecDeque<u32>,
}

impl Messages {
    fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    fn push(&mut self, parts: [&[u8]; 3]) {
        let mut len = 0;
        for part in parts {
            self.bytes.extend(part);
            len += part.len();
        }
        #[expect(clippy::cast_possible_truncation, reason = "a message is at most 64 KiB plus a header")]
        self.lengths.push_back(len as u32);
    }

    fn front(&self) -> Option<[&[u8]; 2]> {
        let len = *self.lengths.front()? as usize;
        let (head, tail) = self.bytes.as_slices();
        let of_head = len.min(head.len());
        Some([&head[..of_head], &tail[..len - of_head]])
    }

    fn pop(&mut self) -> usize {
        let len = self.lengths.pop_front().unwrap_or(0) as usize;
        self.bytes.drain(..len);
        len
    }

    /// Removes `sent` bytes from the front. If that leaves a partial message, moves its rest to `begun` and
    /// returns true.
    fn consume(&mut self, sent: &mut usize, begun: &mut Vec<u8>) -> bool {
        while *sent > 0
            && let Some(len) = self.lengths.pop_front()
        {
            let len = len as usize;
            if len > *sent {
                self.bytes.drain(..*sent);
                begun.extend(self.bytes.drain(..len - *sent));
                *sent = 0;
                return true;
            }
            self.bytes.drain(..len);
            *sent -= len;
        }
        if self.lengths.is_empty() && self.bytes.capacity() > KEEP {
            *self = Self::default();
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(outbox: &Outbox) -> Vec<u8> {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let (count, total) = outbox.slices(&mut slices);
        let bytes: Vec<u8> = slices[..count].iter().flat_map(|slice| slice.to_vec()).collect();
        assert_eq!(bytes.len(), total);
        bytes
    }

    fn datagram(outbox: &mut Outbox, text: &str) -> (u64, u64) {
        outbox.push(WriteClass::Datagram, [&text.as_bytes()[..1], &text.as_bytes()[1..], b""]).unwrap()
    }

    #[test]
    fn oldest_datagrams_are_dropped_and_counted() {
        let mut outbox = Outbox::new(10);
        assert_eq!(datagram(&mut outbox, "aaaa"), (0, 0));
        assert_eq!(datagram(&mut outbox, "bbbb"), (0, 0));
        assert_eq!(datagram(&mut outbox, "cccc"), (1, 4));
        assert_eq!(all(&outbox), b"bbbbcccc");
        assert_eq!(datagram(&mut outbox, "dddddddddd"), (2, 8));
        assert_eq!(datagram(&mut outbox, "longer than all"), (1, 15));
        assert_eq!(all(&outbox), b"dddddddddd");
    }

    #[test]
    fn message_in_progress_is_always_completed() {
        let mut outbox = Outbox::new(8);
        datagram(&mut outbox, "aaaa");
        datagram(&mut outbox, "bbbb");
        outbox.consume(2);
        assert_eq!(datagram(&mut outbox, "cccc"), (0, 0), "the message in progress counts as sent");
        assert_eq!(datagram(&mut outbox, "dddd"), (1, 4));
        assert_eq!(all(&outbox), b"aaccccdddd");
        outbox.consume(10);
        assert!(outbox.is_empty());
        assert_eq!(all(&outbox), b"");
    }

    #[test]
    fn replies_precede_datagrams_and_whole_messages_are_never_cut() {
        let mut outbox = Outbox::new(100);
        for round in 0..50 {
            datagram(&mut outbox, "first");
            datagram(&mut outbox, "second");
            outbox.push(WriteClass::Control, [b"reply", b"", b""]).unwrap();
            for expected in [&b"reply"[..], b"first", b"second"] {
                let next = outbox.next().unwrap().concat();
                assert_eq!(next, expected, "round {round}");
                outbox.consume(next.len());
            }
            assert!(outbox.next().is_none());
        }
    }

    #[test]
    fn replies_overtake_datagrams_except_the_one_in_progress() {
        let mut outbox = Outbox::new(100);
        outbox.begin([b"head", b"payload", b"\0"], 6);
        datagram(&mut outbox, "late");
        outbox.push(WriteClass::Control, [b"reply", b"", b""]).unwrap();
        assert_eq!(all(&outbox), b"yload\0replylate");
        outbox.consume(8);
        assert_eq!(all(&outbox), b"plylate");
        outbox.push(WriteClass::Control, [b"two", b"", b""]).unwrap();
        assert_eq!(all(&outbox), b"plytwolate");
    }

    #[test]
    fn replies_are_bounded_but_never_dropped() {
        let mut outbox = Outbox::new(100);
        let reply = [7; 1024];
        for _ in 0..64 {
            outbox.push(WriteClass::Control, [&reply, b"", b""]).unwrap();
        }
        assert!(outbox.push(WriteClass::Control, [b"one more", b"", b""]).is_err());
        assert_eq!(datagram(&mut outbox, "still"), (0, 0));
    }

    #[test]
    fn empty_outbox_keeps_little_memory() {
        let mut outbox = Outbox::new(1 << 20);
        for _ in 0..1000 {
            outbox.push(WriteClass::Datagram, [&[1; 4], &[2; 1000], b""]).unwrap();
        }
        let mut left = 1_004_000;
        while left > 0 {
            let sent = left.min(999);
            outbox.consume(sent);
            left -= sent;
        }
        assert!(outbox.is_empty());
        assert!(outbox.begun.capacity() + outbox.datagrams.bytes.capacity() <= 2 * KEEP);
    }
}
