//! Receives datagrams in batches into an arena.
//!
//! ```text
//! arena  │ buffer 0 │ buffer 1 │▒ slot ▒▒▒▒▒▒▒▒▒│▒ slot ▒▒▒▒▒▒▒▒▒│ …
//!                              ^ used: the next call offers slots from here and keeps only received bytes
//! ```
//!
//! A slot holds the longest super-packet, but a small datagram uses only its own length, so a tick of a
//! thousand thin flows stays within a few pages.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, AsRawFd},
};

use libc::{iovec, mmsghdr};

use crate::{
    Datapath, UdpSocket,
    sys::{self, ControlBuffer, RawAddress},
};

/// Length of the longest datagram or GRO super-packet.
const SLOT: usize = 1 << 16;
/// Size of the arena, which holds everything received in a tick. The batch size limits a flood before the
/// arena does.
const ARENA: usize = 4 << 20;
const ALIGN: usize = 64;

/// Bytes in the arena, valid until [`Rx::reset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaSpan {
    pub offset: u32,
    pub len: u32,
}

/// One datagram, or a GRO super-packet of several.
#[derive(Clone, Copy, Debug)]
pub struct Buffer<'a> {
    /// Source; an IPv4-mapped address is converted to IPv4.
    pub from: SocketAddr,
    /// Destination address, on sockets with `packet_info`.
    pub local: Option<IpAddr>,
    /// TOS or traffic class byte (DSCP and ECN), 0 without `ip_header`.
    pub tos: u8,
    /// TTL or hop limit, 0 without `ip_header`.
    pub ttl: u8,
    /// Length of each datagram except the last.
    pub segment_size: usize,
    /// All datagrams in sequence.
    pub bytes: &'a [u8],
}

impl<'a> Buffer<'a> {
    /// Splits the buffer into datagrams. An empty buffer yields one empty datagram.
    pub fn datagrams(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let mut rest = Some(self.bytes);
        let size = self.segment_size.max(1);
        std::iter::from_fn(move || {
            let bytes = rest?;
            if bytes.len() > size {
                let (head, tail) = bytes.split_at(size);
                rest = Some(tail);
                Some(head)
            } else {
                rest = None;
                Some(bytes)
            }
        })
    }

    pub fn count(&self) -> usize {
        self.bytes.len().div_ceil(self.segment_size.max(1)).max(1)
    }
}

/// Result of one [`Rx::recv`], for [`Rx::buffers`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Index of the first buffer received.
    pub first: usize,
    /// Number of buffers received; 0 means that the call would have blocked.
    pub count: usize,
    /// The batch was full, so another call is likely to return more. After a call for one datagram this is
    /// false (except with [`Datapath::Basic`]), because level-triggered epoll reports any others.
    pub more: bool,
    /// The batch was not full, so the socket's queue was empty. With IP_RECVERR this is not reliable, because
    /// an ICMP error also ends a call.
    pub emptied: bool,
}

/// Counters; never reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxStats {
    pub calls: u64,
    /// Calls that returned no datagram.
    pub would_block: u64,
    /// Buffers received; a super-packet is one buffer.
    pub buffers: u64,
    pub datagrams: u64,
    pub bytes: u64,
    /// Datagrams dropped by the kernel because of a full receive buffer (SO_RXQ_OVFL), as reported by later
    /// datagrams. A super-packet is counted once.
    pub kernel_drops: u64,
    /// Buffers dropped because they exceed a slot or lack a source address.
    pub truncated: u64,
    /// Histogram of datagrams per call: bucket i counts calls with 2^i to 2^(i+1)-1 datagrams, and the last
    /// one also those with more.
    pub batch: [u64; 12],
}

#[derive(Clone, Copy)]
struct Meta {
    from: SocketAddr,
    local: Option<IpAddr>,
    tos: u8,
    ttl: u8,
    segment_size: u32,
    span: ArenaSpan,
}

pub struct Rx {
    arena: Box<[u8]>,
    used: usize,
    buffers: Vec<Meta>,
    most: usize,
    stats: RxStats,
    // Arguments of recvmmsg(2), reused. Each call sets the pointers in `headers[i]` to `iovecs[i]`,
    // `names[i]` and `controls[i]`.
    headers: Box<[mmsghdr]>,
    iovecs: Box<[iovec]>,
    names: Box<[RawAddress]>,
    controls: Box<[ControlBuffer<CONTROL>]>,
}

/// Bytes for packet information (IPv6: 40), TOS, TTL, GRO size and drop counter (24 each).
const CONTROL: usize = 144;

// SAFETY: every call of `recv` rewrites the raw pointers in `headers` and `iovecs`, and nothing uses them
// between calls.
unsafe impl Send for Rx {}

impl Rx {
    pub fn new(datapath: Datapath) -> Self {
        // Beyond a few hundred datagrams per call, larger batches gain nothing and cost cache space.
        let most = match datapath {
            Datapath::Basic => 1,
            Datapath::Mmsg => 32,
            Datapath::Gso => 16,
        };
        let empty = sys::empty_message();
        Self {
            arena: vec![0; ARENA].into_boxed_slice(),
            used: 0,
            buffers: Vec::with_capacity(1024),
            most,
            stats: RxStats::default(),
            headers: vec![empty; most].into_boxed_slice(),
            iovecs: vec![iovec { iov_base: std::ptr::null_mut(), iov_len: SLOT }; most].into_boxed_slice(),
            names: vec![RawAddress::empty(); most].into_boxed_slice(),
            controls: vec![ControlBuffer([0; CONTROL]); most].into_boxed_slice(),
        }
    }

    /// Clears the arena and invalidates all spans.
    #[inline]
    pub fn reset(&mut self) {
        self.used = 0;
        self.buffers.clear();
    }

    /// True if the arena has room for another [`Rx::recv`]. If false, flush [`crate::Tx`], then reset.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.used + SLOT <= self.arena.len()
    }

    /// Number of free bytes in the arena.
    #[inline]
    pub fn room(&self) -> usize {
        self.arena.len() - self.used
    }

    /// Lets `fill` write up to 64 KiB into the arena, after a `gap` for [`Rx::join`], and return the number
    /// of bytes written. This is for data that does not come from a UDP socket. The slice is empty if the
    /// arena is full. After an error, nothing is kept.
    pub fn fill(
        &mut self,
        gap: usize,
        fill: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<ArenaSpan> {
        let start = (self.used + gap).min(self.arena.len());
        let end = (start + SLOT).min(self.arena.len());
        let len = fill(&mut self.arena[start..end])?.min(end - start);
        self.used = (start + len).next_multiple_of(ALIGN).min(self.arena.len());
        #[expect(clippy::cast_possible_truncation, reason = "the arena is shorter than 4 GiB")]
        Ok(ArenaSpan { offset: start as u32, len: len as u32 })
    }

    /// Copies `lead` directly before a span, into the gap left by [`Rx::fill`], and returns both as one span.
    ///
    /// # Panics
    /// If the gap would begin before the arena. Other data there is overwritten.
    pub fn join(&mut self, lead: &[u8], span: ArenaSpan) -> ArenaSpan {
        let end = span.offset as usize;
        self.arena[end - lead.len()..end].copy_from_slice(lead);
        #[expect(clippy::cast_possible_truncation, reason = "within the arena, checked by the line above")]
        let len = lead.len() as u32;
        ArenaSpan { offset: span.offset - len, len: span.len + len }
    }

    /// Receives once. The number of requested buffers adapts to the socket: a thin flow is read with
    /// recvmsg(2), a flood in full batches. A pending ICMP error of the socket is returned once; the next
    /// call receives. EAGAIN and EINTR are not errors.
    pub fn recv(&mut self, socket: &UdpSocket) -> io::Result<Received> {
        let first = self.buffers.len();
        let room = (self.arena.len() - self.used) / SLOT;
        let ask = usize::from(socket.appetite()).min(self.most).min(room);
        if ask == 0 {
            return Ok(Received { first, count: 0, more: true, emptied: false });
        }
        // The `ask` slots that start here lie inside the arena.
        let base = self.arena[self.used..].as_mut_ptr();
        for i in 0..ask {
            self.iovecs[i].iov_base = base.wrapping_add(i * SLOT).cast();
            let header = &mut self.headers[i].msg_hdr;
            header.msg_iov = &raw mut self.iovecs[i];
            header.msg_iovlen = 1;
            header.msg_name = (&raw mut self.names[i]).cast();
            header.msg_control = (&raw mut self.controls[i]).cast();
            header.msg_namelen = RawAddress::SIZE;
            header.msg_controllen = CONTROL as _;
            header.msg_flags = 0;
        }
        self.stats.calls += 1;
        let mut interrupted = false;
        let got = match self.call(socket, ask) {
            Ok(got) => got,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                self.stats.would_block += 1;
                interrupted = error.kind() == io::ErrorKind::Interrupted;
                0
            }
            Err(error) => return Err(error),
        };
        #[expect(clippy::cast_possible_truncation, reason = "all are at most `most`, which is at most 32")]
        socket.digest(ask as u8, got as u8, self.most as u8);
        let start = self.used;
        let mut datagrams = 0;
        for i in 0..got {
            datagrams += self.keep(socket, i, start + i * SLOT);
        }
        if datagrams > 0 {
            let bucket = (datagrams.ilog2() as usize).min(self.stats.batch.len() - 1);
            self.stats.batch[bucket] += 1;
        }
        Ok(Received {
            first,
            count: self.buffers.len() - first,
            more: got == ask && (ask > 1 || self.most == 1),
            emptied: got < ask && !interrupted,
        })
    }

    #[inline]
    pub fn buffers(&self, received: Received) -> impl Iterator<Item = Buffer<'_>> {
        let range = received.first..received.first + received.count;
        self.buffers.get(range).unwrap_or(&[]).iter().map(|meta| self.view(meta))
    }

    /// Buffer with this index, counting from the last reset.
    #[inline]
    pub fn buffer(&self, index: usize) -> Option<Buffer<'_>> {
        self.buffers.get(index).map(|meta| self.view(meta))
    }

    fn view(&self, meta: &Meta) -> Buffer<'_> {
        Buffer {
            from: meta.from,
            local: meta.local,
            tos: meta.tos,
            ttl: meta.ttl,
            segment_size: meta.segment_size as usize,
            bytes: self.bytes(meta.span),
        }
    }

    /// Span of these bytes, which must be part of the arena.
    ///
    /// # Panics
    /// If the bytes are not part of the arena.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the arena is shorter than 4 GiB")]
    pub fn span(&self, bytes: &[u8]) -> ArenaSpan {
        let offset = (bytes.as_ptr() as usize).wrapping_sub(self.arena.as_ptr() as usize);
        assert!(offset.saturating_add(bytes.len()) <= self.arena.len(), "not a part of this arena");
        ArenaSpan { offset: offset as u32, len: bytes.len() as u32 }
    }

    /// Bytes of a span.
    ///
    /// # Panics
    /// If it reaches beyond the arena.
    #[inline]
    pub fn bytes(&self, span: ArenaSpan) -> &[u8] {
        &self.arena[span.offset as usize..][..span.len as usize]
    }

    #[inline]
    pub(crate) fn arena(&self) -> &[u8] {
        &self.arena
    }

    pub fn stats(&self) -> &RxStats {
        &self.stats
    }

    fn call(&mut self, socket: &UdpSocket, ask: usize) -> io::Result<usize> {
        let fd = socket.as_fd().as_raw_fd();
        if ask == 1 {
            // SAFETY: every pointer in the header is to a live box of the length given with it.
            let got = unsafe { libc::recvmsg(fd, &raw mut self.headers[0].msg_hdr, libc::MSG_DONTWAIT) };
            if got < 0 {
                return Err(io::Error::last_os_error());
            }
            #[expect(clippy::cast_possible_truncation, reason = "a slot is 64 KiB")]
            {
                self.headers[0].msg_len = got.unsigned_abs() as u32;
            }
            return Ok(1);
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most `most`")]
        // SAFETY: as above, for `ask` headers.
        let got = unsafe {
            libc::recvmmsg(
                fd,
                self.headers.as_mut_ptr(),
                ask as u32,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        sys::check(got).map(|got| got.unsigned_abs() as usize)
    }

    /// Records message `i` of a call and returns its number of datagrams.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "TOS and TTL are bytes on the wire"
    )]
    fn keep(&mut self, socket: &UdpSocket, i: usize, offset: usize) -> u64 {
        let header = &self.headers[i].msg_hdr;
        let len = self.headers[i].msg_len as usize;
        let mut meta = Meta {
            from: SocketAddr::from(([0; 4], 0)),
            local: None,
            tos: 0,
            ttl: 0,
            segment_size: len as u32,
            span: ArenaSpan { offset: offset as u32, len: len as u32 },
        };
        // The kernel set msg_controllen to the bytes that it wrote into `controls[i]`.
        let written: usize = header.msg_controllen as _;
        for message in sys::control_messages(&self.controls[i].0[..written]) {
            match (message.level, message.kind) {
                (sys::SOL_UDP, sys::UDP_GRO) => {
                    if let Some(size) = message.int().filter(|size| *size > 0) {
                        meta.segment_size = size as u32;
                    }
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => meta.tos = message.data.first().copied().unwrap_or(0),
                (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                    meta.ttl = message.int().unwrap_or(0) as u8;
                }
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => meta.tos = message.int().unwrap_or(0) as u8,
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                    let counter = message.int().unwrap_or(0) as u32;
                    self.stats.kernel_drops += u64::from(socket.drops_since(counter));
                }
                _ => meta.local = message.packet_info().or(meta.local),
            }
        }
        let source = if header.msg_flags & libc::MSG_TRUNC != 0 { None } else { self.names[i].get() };
        let Some(from) = source else {
            self.stats.truncated += 1;
            return 0;
        };
        meta.from = from;
        self.used = (offset + len).next_multiple_of(ALIGN);
        let datagrams = len.div_ceil((meta.segment_size as usize).max(1)).max(1) as u64;
        self.stats.buffers += 1;
        self.stats.datagrams += datagrams;
        self.stats.bytes += len as u64;
        self.buffers.push(meta);
        datagrams
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(bytes: &[u8], segment_size: usize) -> Vec<&[u8]> {
        let from = SocketAddr::from(([127, 0, 0, 1], 1));
        let buffer = Buffer { from, local: None, tos: 0, ttl: 0, segment_size, bytes };
        let datagrams: Vec<_> = buffer.datagrams().collect();
        assert_eq!(datagrams.len(), buffer.count());
        datagrams
    }

    #[test]
    fn buffer_is_split_at_the_segment_size() {
        assert_eq!(split(b"abcdef", 2), [b"ab", b"cd", b"ef"]);
        assert_eq!(split(b"abcdefg", 3), [&b"abc"[..], b"def", b"g"]);
        assert_eq!(split(b"abc", 3), [b"abc"]);
        assert_eq!(split(b"abc", 1200), [b"abc"]);
    }

    #[test]
    fn empty_datagram_counts_as_one() {
        assert_eq!(split(b"", 0), [b""]);
        assert_eq!(split(b"", 5), [b""]);
    }

    #[test]
    #[should_panic(expected = "not a part of this arena")]
    fn bytes_outside_the_arena_have_no_span() {
        let _ = Rx::new(Datapath::Basic).span(b"elsewhere");
    }

    #[test]
    fn join_fills_the_gap_and_a_full_arena_offers_no_room() {
        let mut rx = Rx::new(Datapath::Basic);
        let first = rx.fill(0, |room| Ok(b"before".iter().zip(room).map(|(from, to)| *to = *from).count()));
        let second = rx.fill(3, |room| {
            assert_eq!(room.len(), SLOT);
            room[..2].copy_from_slice(b"de");
            Ok(2)
        });
        let joined = rx.join(b"abc", second.unwrap());
        assert_eq!((rx.bytes(first.unwrap()), rx.bytes(joined)), (&b"before"[..], &b"abcde"[..]));
        let used = rx.used;
        assert!(rx.fill(0, |_| Err(io::ErrorKind::WouldBlock.into())).is_err());
        assert_eq!(rx.used, used);
        rx.used = ARENA - 10;
        assert_eq!((rx.room(), rx.fill(4, |room| Ok(room.len())).unwrap().len), (10, 6));
        assert_eq!(rx.fill(100, |room| Ok(room.len())).unwrap().len, 0);
    }

    #[test]
    fn full_arena_skips_the_receive_call() {
        let socket = socket_with(0);
        let mut rx = Rx::new(Datapath::Gso);
        rx.used = ARENA - SLOT + 1;
        assert!(!rx.has_room());
        let received = rx.recv(&socket).unwrap();
        assert_eq!((received.count, received.more, rx.stats.calls), (0, true, 0));
        rx.reset();
        assert!(rx.has_room());
    }

    fn socket_with(datagrams: usize) -> UdpSocket {
        let socket = UdpSocket::bind(SocketAddr::from(([127, 0, 0, 1], 0)), &crate::UdpOptions::default());
        let socket = socket.unwrap();
        if datagrams > 0 {
            send_to(&socket, datagrams);
        }
        socket
    }

    fn send_to(socket: &UdpSocket, datagrams: usize) {
        let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..datagrams {
            sender.send_to(b"x", socket.local_addr()).unwrap();
        }
        wait(socket);
    }

    fn wait(socket: &UdpSocket) {
        let mut poller = crate::Poller::new().unwrap();
        poller.add(socket, 0).unwrap();
        assert_eq!(poller.wait(Some(std::time::Duration::from_secs(10))).unwrap().len(), 1);
    }

    #[test]
    fn call_at_the_end_of_the_arena_keeps_the_batch_size() {
        let socket = socket_with(1);
        for full in [1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8] {
            socket.digest(full, full, 16);
        }
        assert_eq!(socket.appetite(), 16);
        let mut rx = Rx::new(Datapath::Gso);
        rx.used = ARENA - SLOT;
        assert_eq!(rx.recv(&socket).unwrap().count, 1);
        assert_eq!(socket.appetite(), 16);
    }

    #[test]
    fn short_batch_means_an_empty_socket() {
        let socket = socket_with(3);
        let mut rx = Rx::new(Datapath::Gso);
        // This call asks for only one datagram, so more may be queued.
        let received = rx.recv(&socket).unwrap();
        assert_eq!((received.count, received.emptied), (1, false));
        for full in [1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8] {
            socket.digest(full, full, 16);
        }
        let received = rx.recv(&socket).unwrap();
        assert_eq!((received.count, received.emptied), (2, true));
        let received = rx.recv(&socket).unwrap();
        assert_eq!((received.count, received.emptied), (0, true));
    }

    #[test]
    fn batch_size_is_small_for_thin_flows_and_large_for_floods() {
        for (datapath, most) in [(Datapath::Basic, 1), (Datapath::Mmsg, 32), (Datapath::Gso, 16)] {
            let socket = socket_with(0);
            let mut rx = Rx::new(datapath);
            let mut more_than_one = 0;
            for _ in 0..90 {
                send_to(&socket, 1);
                more_than_one += usize::from(socket.appetite() > 1);
                let received = rx.recv(&socket).unwrap();
                assert_eq!((received.count, received.more), (1, datapath == Datapath::Basic));
                rx.reset();
            }
            assert!(more_than_one <= 10, "{more_than_one} of 90");
            send_to(&socket, 200);
            let calls = rx.stats.calls;
            let mut got = 0;
            while got < 200 {
                wait(&socket);
                got += rx.recv(&socket).unwrap().count;
                rx.reset();
            }
            let calls = rx.stats.calls - calls;
            assert!(calls <= 200 / most + 14, "{datapath}: {calls} calls");
        }
    }
}
