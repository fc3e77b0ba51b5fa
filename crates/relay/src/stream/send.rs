//! Sends the messages of a tick in as few writes as possible, and copies only data that the kernel does not
//! accept.

use std::io::{self, IoSlice};

use rustls::ServerConnection;
use turnpike_net::{ArenaSpan, Interest, Poller, Rx, TcpSocket};
use turnpike_wire::indication;

use super::{
    CloseReason, Connection, HANDSHAKES, StreamToken, Streams,
    channel::{self, Channel, RecordBatch},
    connection::NONE,
    outbox::{self, Outbox, WriteClass},
};
use crate::link::LinkSlot;

const SLICES: usize = 64;
const ZEROS: [u8; 3] = [0; 3];
const NOWHERE: ArenaSpan = ArenaSpan { offset: 0, len: 0 };

#[derive(Default)]
pub(super) struct Pieces {
    list: Vec<Piece>,
    own: Vec<u8>,
    quiet: u32,
}

#[derive(Clone, Copy)]
struct Piece {
    own: u32,
    own_len: u32,
    payload: ArenaSpan,
    padding: u8,
    class: WriteClass,
    next: u32,
}

/// Number of pieces for which memory is always kept; the rest is freed after `QUIET` ticks without a flood,
/// because floods are rare.
const KEEP: usize = 4096;
const QUIET: u32 = 1000;

impl Pieces {
    fn clear(&mut self) {
        let used = self.list.len();
        self.list.clear();
        self.own.clear();
        if self.list.capacity() <= KEEP || used > self.list.capacity() / 8 {
            self.quiet = 0;
            return;
        }
        self.quiet += 1;
        if self.quiet == QUIET {
            self.quiet = 0;
            self.list.shrink_to(KEEP);
            self.own.shrink_to(KEEP * indication::MAX_HEADER_LEN);
        }
    }

    #[inline]
    fn parts<'a>(&'a self, piece: &Piece, rx: &'a Rx) -> [&'a [u8]; 3] {
        [
            &self.own[piece.own as usize..][..piece.own_len as usize],
            rx.bytes(piece.payload),
            &ZEROS[..usize::from(piece.padding)],
        ]
    }

    fn gather<'a>(
        &'a self,
        mut at: u32,
        rx: &'a Rx,
        slices: &mut [IoSlice<'a>; SLICES],
    ) -> (usize, usize, u32) {
        let (mut count, mut total) = (0, 0);
        while at != NONE && count + 3 <= SLICES {
            let piece = &self.list[at as usize];
            for part in self.parts(piece, rx) {
                if !part.is_empty() {
                    slices[count] = IoSlice::new(part);
                    count += 1;
                    total += part.len();
                }
            }
            at = piece.next;
        }
        (count, total, at)
    }
}

impl Streams {
    #[inline]
    pub(crate) fn relay(&mut self, to: LinkSlot, header: &[u8], payload: ArenaSpan, padding: u8) {
        self.append(to, header, payload, padding, WriteClass::Datagram);
    }

    /// Queues a copy of a reply. Indications may be dropped: peers can cause any number of them with ICMP
    /// errors (RFC 8656 section 11.5) and connections (RFC 6062 section 4.4), and these must not end the
    /// client's connection.
    pub(crate) fn reply(&mut self, to: LinkSlot, bytes: &[u8]) {
        let class = if is_indication(bytes) { WriteClass::Datagram } else { WriteClass::Control };
        self.append(to, bytes, NOWHERE, 0, class);
    }

    #[expect(clippy::cast_possible_truncation, reason = "a tick queues far less than 4 GiB")]
    fn append(&mut self, to: LinkSlot, own: &[u8], payload: ArenaSpan, padding: u8, class: WriteClass) {
        let Some(slot) = self.slot_at(to) else { return };
        let index = self.pieces.list.len() as u32;
        let at = self.pieces.own.len() as u32;
        self.pieces.own.extend_from_slice(own);
        self.pieces.list.push(Piece {
            own: at,
            own_len: own.len() as u32,
            payload,
            padding,
            class,
            next: NONE,
        });
        let connection = &mut self.connections[slot];
        if connection.last == NONE {
            connection.first = index;
        } else {
            self.pieces.list[connection.last as usize].next = index;
        }
        connection.last = index;
        self.stats.sent += 1;
        self.touch(slot);
    }

    /// Sends everything queued in this tick and closes connections. Afterwards the arena may be reused.
    pub(crate) fn flush(&mut self, rx: &Rx, poller: &Poller) {
        self.handshakes_left = HANDSHAKES;
        // Closing a connection adds only that connection to the list.
        let mut index = 0;
        while let Some(&slot) = self.touched.get(index) {
            index += 1;
            let Some(connection) = self.connections.get_mut(slot) else { continue };
            connection.touched = false;
            let sent = if connection.first == NONE {
                connection
                    .channel
                    .flush(&connection.socket, &mut self.stats.writes)
                    .map_err(|_| CloseReason::Broken)
            } else {
                self.send(slot, rx)
            };
            self.finish(slot, sent, poller);
        }
        self.touched.clear();
        self.pieces.clear();
    }

    pub(crate) fn resume(&mut self, slot: usize, poller: &Poller) {
        let Some(connection) = self.connections.get_mut(slot) else { return };
        // The messages of this tick are sent first.
        if connection.closing.is_some() {
            return self.touch(slot);
        }
        let sent = Self::empty(connection, &mut self.stats.writes).map_err(|_| CloseReason::Broken);
        self.finish(slot, sent, poller);
    }

    pub(crate) fn shutdown(&mut self, poller: &Poller) {
        let slots: Vec<usize> = self.connections.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.finish(slot, Err(CloseReason::Shutdown), poller);
        }
    }

    pub(super) fn send(&mut self, slot: usize, rx: &Rx) -> Result<(), CloseReason> {
        let connection = &mut self.connections[slot];
        let mut at = std::mem::replace(&mut connection.first, NONE);
        connection.last = NONE;
        // The outbox is sent first, once the socket is writable. TLS output such as tickets or replies to
        // KeyUpdate is sent together with the pieces.
        if connection.outbox.is_empty() && !connection.watches_writable {
            let sent = match &mut connection.channel {
                Channel::Plain => Self::send_plain(
                    &connection.socket,
                    &mut connection.outbox,
                    &self.pieces,
                    at,
                    rx,
                    &mut self.stats.writes,
                ),
                Channel::Tls(tls) => {
                    Self::send_tls(&connection.socket, tls, &self.pieces, at, rx, &mut self.stats.writes)
                }
            };
            at = sent.map_err(|_| CloseReason::Broken)?;
        }
        while at != NONE {
            let piece = self.pieces.list[at as usize];
            let queued = connection.outbox.push(piece.class, self.pieces.parts(&piece, rx));
            let (datagrams, bytes) = queued.map_err(|_| CloseReason::RepliesUnread)?;
            self.stats.queue_drops += datagrams;
            self.stats.queue_dropped_bytes += bytes;
            at = piece.next;
        }
        Ok(())
    }

    /// Writes the pieces starting at `at`; returns the first unsent one.
    fn send_plain(
        socket: &TcpSocket,
        outbox: &mut Outbox,
        pieces: &Pieces,
        mut at: u32,
        rx: &Rx,
        writes: &mut u64,
    ) -> io::Result<u32> {
        while at != NONE {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let (count, total, next) = pieces.gather(at, rx, &mut slices);
            let taken = channel::write(socket, &slices[..count], next != NONE, writes)?;
            if taken < total {
                return Ok(Self::skip(outbox, pieces, at, taken, rx));
            }
            at = next;
        }
        Ok(NONE)
    }

    /// Encrypts and writes the pieces starting at `at`; returns the first unsent one.
    fn send_tls(
        socket: &TcpSocket,
        tls: &mut ServerConnection,
        pieces: &Pieces,
        mut at: u32,
        rx: &Rx,
        writes: &mut u64,
    ) -> io::Result<u32> {
        let mut batch = RecordBatch::default();
        while at != NONE {
            let piece = &pieces.list[at as usize];
            batch.encrypt(tls, &pieces.parts(piece, rx).map(IoSlice::new))?;
            at = piece.next;
            batch.flush_if_full(tls, socket, writes)?;
            if batch.is_empty() && tls.wants_write() {
                return Ok(at);
            }
        }
        channel::flush(tls, socket, writes)?;
        Ok(NONE)
    }

    /// Skips `taken` bytes starting at `at`; returns the next piece. Stores the rest of a partial message in
    /// the outbox.
    fn skip(outbox: &mut Outbox, pieces: &Pieces, mut at: u32, mut taken: usize, rx: &Rx) -> u32 {
        while taken > 0 && at != NONE {
            let piece = &pieces.list[at as usize];
            let parts = pieces.parts(piece, rx);
            let len: usize = parts.iter().map(|part| part.len()).sum();
            if taken < len {
                outbox.begin(parts, taken);
                return piece.next;
            }
            taken -= len;
            at = piece.next;
        }
        at
    }

    fn empty(connection: &mut Connection, writes: &mut u64) -> io::Result<()> {
        let Connection { socket, channel, outbox, .. } = connection;
        match channel {
            Channel::Plain => {
                if outbox.is_empty() {
                    return Ok(());
                }
                let mut slices = [IoSlice::new(&[]); outbox::SLICES];
                let (count, _) = outbox.slices(&mut slices);
                let taken = channel::write(socket, &slices[..count], false, writes)?;
                outbox.consume(taken);
            }
            Channel::Tls(tls) => {
                channel::flush(tls, socket, writes)?;
                let mut batch = RecordBatch::default();
                while !(batch.is_empty() && tls.wants_write())
                    && let Some(parts) = outbox.next()
                {
                    batch.encrypt(tls, &parts.map(IoSlice::new))?;
                    let len = parts.iter().map(|part| part.len()).sum();
                    outbox.consume(len);
                    batch.flush_if_full(tls, socket, writes)?;
                }
                channel::flush(tls, socket, writes)?;
            }
        }
        Ok(())
    }

    fn finish(&mut self, slot: usize, sent: Result<(), CloseReason>, poller: &Poller) {
        let connection = &mut self.connections[slot];
        if let Some(reason) = sent.err().or(connection.closing) {
            if reason != CloseReason::Broken {
                connection.channel.say_goodbye(&connection.socket, &mut self.stats.writes);
            }
            return self.remove(slot, reason);
        }
        let waits = !connection.outbox.is_empty() || connection.channel.is_waiting();
        if waits != connection.watches_writable {
            connection.watches_writable = waits;
            let (token, readable) = (StreamToken::Connection(slot).get(), connection.watches_readable);
            if poller
                .set(&connection.socket, token, Interest::Level { read: readable, write: waits })
                .is_err()
            {
                self.remove(slot, CloseReason::Broken);
            }
        }
    }
}

/// Returns true if a STUN message is an indication (RFC 8489 section 5).
fn is_indication(message: &[u8]) -> bool {
    matches!(message, [high, low, ..] if high & 0x01 == 0 && low & 0x10 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_flood_is_freed_afterwards() {
        let piece = Piece {
            own: 0,
            own_len: 0,
            payload: NOWHERE,
            padding: 0,
            class: WriteClass::Control,
            next: NONE,
        };
        let mut pieces = Pieces::default();
        for _ in 0..3 {
            pieces.list.resize(100_000, piece);
            pieces.own.resize(4_000_000, 0);
            pieces.clear();
            for _ in 0..QUIET / 2 {
                pieces.list.push(piece);
                pieces.clear();
            }
            assert!(pieces.list.capacity() >= 100_000, "the flood may continue");
        }
        for _ in 0..QUIET {
            pieces.list.push(piece);
            pieces.clear();
        }
        assert!(pieces.list.capacity() <= 2 * KEEP && pieces.own.capacity() <= 1 << 20);
    }
}
