//! Builds kernel messages from queued datagrams: super-packets, control messages and batched calls. If the
//! kernel refuses a super-packet, steps down to smaller ones or none for a while.

use std::{
    io, mem,
    net::{Ipv4Addr, SocketAddr},
    os::fd::{AsFd, AsRawFd},
    sync::OnceLock,
};

use libc::{c_int, iovec, mmsghdr};
use rustix::net::SendFlags;

use crate::{
    Rx, UdpOptions, UdpSocket,
    queued::{Payload, Queued, Route, TxStats},
    sys::{self, ControlBuffer, ControlWriter, RawAddress},
};

/// UDP_MAX_SEGMENTS of include/linux/udp.h: 64 since UDP_SEGMENT was added (4.18), 128 since Linux 6.9.
/// Stable kernels have backported the higher limit, so it cannot be derived from the kernel version.
const FEWEST_SEGMENTS: usize = 64;
const MOST_SEGMENTS: usize = 128;
/// Maximum UDP payload over IPv4: 65535 - 20 - 8.
const MAX_BYTES: usize = 65_507;
const MAX_IOVECS: usize = 1024;
/// Maximum number of messages per call, and number of iovecs for all of them.
const MESSAGES: usize = 128;
const IOVECS: usize = 4096;
/// Size of a control buffer in bytes: packet information (40 for IPv6), TOS, TTL and segment size (24 each).
const CONTROL: usize = 112;

static ZEROS: [u8; 4] = [0; 4];

/// Maximum number of segments per super-packet, probed once by sending one to ourselves.
pub(crate) fn max_segments() -> usize {
    static LIMIT: OnceLock<usize> = OnceLock::new();
    *LIMIT.get_or_init(|| match probe_segments(MOST_SEGMENTS) {
        Ok(()) => MOST_SEGMENTS,
        // EINVAL means that the lower limit applies. Other errors are inconclusive, but every kernel accepts
        // 64.
        Err(_) => FEWEST_SEGMENTS,
    })
}

/// Sends a super-packet of one-byte segments from a loopback socket to itself.
fn probe_segments(segments: usize) -> io::Result<()> {
    let socket = UdpSocket::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), &UdpOptions::default())?;
    socket.connect(socket.local_addr())?;
    sys::set_option(socket.as_fd(), sys::SOL_UDP, sys::UDP_SEGMENT, 1)?;
    rustix::net::send(&socket, &vec![0; segments], SendFlags::DONTWAIT)?;
    Ok(())
}

/// System calls for sending; tests simulate refusals here.
pub(crate) trait SendCalls {
    /// sendmmsg(2), or sendmsg(2) for one message.
    fn send(&mut self, socket: &UdpSocket, messages: &mut [mmsghdr]) -> io::Result<usize>;
}

pub(crate) struct Linux;

impl SendCalls for Linux {
    fn send(&mut self, socket: &UdpSocket, messages: &mut [mmsghdr]) -> io::Result<usize> {
        let fd = socket.as_fd().as_raw_fd();
        if let [one] = messages {
            // SAFETY: every pointer in the header is to memory that lives until `Sender::send` returns.
            let sent = unsafe { libc::sendmsg(fd, &raw const one.msg_hdr, libc::MSG_DONTWAIT) };
            return if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(1) };
        }
        let count = u32::try_from(messages.len()).unwrap_or(u32::MAX);
        // SAFETY: as above, for `count` headers.
        let sent = unsafe { sys::sendmmsg(fd, messages.as_mut_ptr(), count) };
        sys::check(sent).map(|sent| sent.unsigned_abs() as usize)
    }
}

/// Layout of a message, for counting and for splitting it again.
#[derive(Clone, Copy)]
struct Message {
    first_iovec: usize,
    iovecs: usize,
    segments: usize,
    segment: usize,
    bytes: usize,
    /// Length of the control messages in bytes, without and with the segment size.
    control: usize,
    total_control: usize,
}

/// Memory of the queued datagrams.
#[derive(Clone, Copy)]
pub(crate) struct Bytes<'a> {
    /// Headers, and payloads that did not come from a socket.
    pub(crate) own: &'a [u8],
    pub(crate) rx: &'a Rx,
}

/// Scratch memory for the messages of one call, reused by all flushes.
pub(crate) struct SendBatch {
    iovecs: Vec<iovec>,
    messages: Vec<Message>,
    headers: Box<[mmsghdr]>,
    names: Box<[RawAddress]>,
    controls: Box<[ControlBuffer<CONTROL>]>,
    /// Maximum number of segments per super-packet; 1 disables them.
    max_segments: usize,
}

// SAFETY: every call of `Sender::send` rewrites the raw pointers, and nothing uses them between calls.
unsafe impl Send for SendBatch {}

impl SendBatch {
    pub(crate) fn new(max_segments: usize) -> Self {
        let empty = sys::empty_message();
        Self {
            iovecs: Vec::with_capacity(IOVECS),
            messages: Vec::with_capacity(MESSAGES),
            headers: vec![empty; MESSAGES].into_boxed_slice(),
            names: vec![RawAddress::empty(); MESSAGES].into_boxed_slice(),
            controls: vec![ControlBuffer([0; CONTROL]); MESSAGES].into_boxed_slice(),
            max_segments,
        }
    }

    pub(crate) fn open<'a, K: SendCalls>(
        &'a mut self,
        kernel: &'a mut K,
        socket: &'a UdpSocket,
        bytes: Bytes<'a>,
        one_by_one: bool,
        stats: &'a mut TxStats,
    ) -> SocketSender<'a, K> {
        // Dangling pointers may remain after a panic in a flush.
        self.messages.clear();
        self.iovecs.clear();
        let gso_limit = if self.max_segments > 1 { usize::from(socket.gso_limit()) } else { 0 };
        SocketSender {
            kernel,
            socket,
            bytes,
            gso_limit,
            one_by_one,
            stats,
            batch: self,
            route: None,
            name_len: 0,
            joinable: false,
            dont_fragment: false,
        }
    }
}

/// Gathers the messages of one socket.
pub(crate) struct SocketSender<'a, K> {
    kernel: &'a mut K,
    socket: &'a UdpSocket,
    bytes: Bytes<'a>,
    /// Maximum segment size in a super-packet.
    gso_limit: usize,
    one_by_one: bool,
    stats: &'a mut TxStats,
    batch: &'a mut SendBatch,
    route: Option<Route>,
    name_len: u32,
    /// True if the newest message accepts another segment.
    joinable: bool,
    dont_fragment: bool,
}

impl<K: SendCalls> SocketSender<'_, K> {
    pub(crate) fn route(&mut self, route: &Route) {
        if route.dont_fragment != self.dont_fragment {
            self.send();
            // IPv4 has no control message for DF. Failing to set it does not justify dropping the datagram.
            let _ = self.socket.set_dont_fragment(route.dont_fragment);
            self.dont_fragment = route.dont_fragment;
        }
        self.route = Some(*route);
        self.joinable = false;
    }

    #[inline]
    pub(crate) fn push(&mut self, queued: &Queued) {
        let len = queued.len as usize;
        if let Payload::Own(at) = queued.payload
            && queued.header_len == 0
        {
            return self.push_run(at as usize, len, queued.run as usize);
        }
        if !self.join(len) {
            self.start(len);
        }
        if queued.header_len > 0 {
            self.piece(self.bytes.own, queued.header as usize, usize::from(queued.header_len));
        }
        match queued.payload {
            Payload::Arena(span) => {
                self.piece(self.bytes.rx.arena(), span.offset as usize, span.len as usize);
            }
            Payload::Own(at) => self.piece(self.bytes.own, at as usize, len),
        }
        if queued.padding > 0 {
            self.piece(&ZEROS, 0, usize::from(queued.padding));
        }
    }

    /// Adds `count` contiguous datagrams of `len` bytes from the queue's own buffer; several form a burst.
    #[inline]
    fn push_run(&mut self, mut at: usize, len: usize, count: usize) {
        let mut left = count;
        if count > 1 {
            self.joinable = false;
        }
        while left > 0 {
            if !self.join(len) {
                self.start(len);
            }
            let mut taken = 1;
            if self.joinable
                && left > 1
                && let Some(message) = self.batch.messages.last_mut()
            {
                // Add as many datagrams as fit into this message in one step; they extend its last piece.
                let room =
                    (self.batch.max_segments - message.segments).min((MAX_BYTES - message.bytes) / len);
                let more = room.min(left - 1);
                message.segments += more;
                message.bytes += more * len;
                taken += more;
            }
            self.piece(self.bytes.own, at, taken * len);
            at += taken * len;
            left -= taken;
        }
    }

    /// Sends the remaining messages and restores the socket's default for DF.
    pub(crate) fn finish(mut self) {
        self.send();
        if self.gso_limit < usize::from(u16::MAX) && self.batch.max_segments > 1 {
            self.socket.pause_gso();
        }
        if self.dont_fragment {
            let _ = self.socket.set_dont_fragment(false);
        }
    }

    /// Adds a datagram of this length to the newest message, if possible.
    #[inline]
    fn join(&mut self, len: usize) -> bool {
        if !self.joinable {
            return false;
        }
        let used = self.batch.iovecs.len();
        let Some(message) = self.batch.messages.last_mut() else { return false };
        let fits = len <= message.segment
            && len > 0
            && message.segments < self.batch.max_segments
            && message.bytes + len <= MAX_BYTES
            && used - message.first_iovec + 3 <= MAX_IOVECS
            && used + 3 <= IOVECS;
        if fits {
            message.segments += 1;
            message.bytes += len;
            // A shorter segment ends a super-packet (udp(7)).
            self.joinable = len == message.segment;
        }
        fits
    }

    fn start(&mut self, len: usize) {
        if self.batch.messages.len() == MESSAGES
            || self.batch.iovecs.len() + 3 > IOVECS
            || (self.one_by_one && !self.batch.messages.is_empty())
        {
            self.send();
        }
        let at = self.batch.messages.len();
        if let Some(to) = self.route.as_ref().and_then(|route| route.to) {
            // A dual-stack socket accepts IPv4 addresses too.
            self.name_len = self.batch.names[at].set(to);
        } else {
            self.name_len = 0;
        }
        let control = self.write_control(at);
        let header = &mut self.batch.headers[at].msg_hdr;
        header.msg_namelen = self.name_len;
        self.batch.messages.push(Message {
            first_iovec: self.batch.iovecs.len(),
            iovecs: 0,
            segments: 1,
            segment: len,
            bytes: len,
            control,
            total_control: control,
        });
        self.joinable = len > 0 && len <= self.gso_limit;
    }

    /// Writes all control messages except the segment size, which is known only once the message is complete.
    fn write_control(&mut self, at: usize) -> usize {
        let Some(route) = &self.route else { return 0 };
        let ttl = self.socket.ttl_to_name(route.ttl, self.batch.messages.is_empty());
        let mut writer = ControlWriter::new(&mut self.batch.controls[at]);
        let v6 = self.socket.is_v6();
        match route.from {
            Some(std::net::IpAddr::V4(ip)) if !v6 => {
                // struct in_pktinfo { int ifindex; in_addr spec_dst; in_addr addr; }
                let mut info = [0; mem::size_of::<libc::in_pktinfo>()];
                info[4..8].copy_from_slice(&ip.octets());
                writer.push(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
            }
            // The kernel accepts a mapped address here for a datagram sent as IPv4 (ip_cmsg_send).
            Some(ip) if v6 => {
                let ip = match ip {
                    std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    std::net::IpAddr::V6(ip) => ip,
                };
                // struct in6_pktinfo { in6_addr addr; int ifindex; }
                let mut info = [0; mem::size_of::<libc::in6_pktinfo>()];
                info[..16].copy_from_slice(&ip.octets());
                writer.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
            }
            _ => {}
        }
        if route.tos != 0 {
            let (level, kind) =
                if v6 { (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) } else { (libc::IPPROTO_IP, libc::IP_TOS) };
            writer.push(level, kind, c_int::from(route.tos).to_ne_bytes());
        }
        if ttl != 0 {
            let (level, kind) =
                if v6 { (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) } else { (libc::IPPROTO_IP, libc::IP_TTL) };
            writer.push(level, kind, c_int::from(ttl).to_ne_bytes());
        }
        writer.len()
    }

    /// Appends `len` bytes to the newest message, extending its last iovec if they are adjacent. The pointer
    /// covers `whole`, so later extensions may read beyond this piece.
    #[inline]
    fn piece(&mut self, whole: &[u8], at: usize, len: usize) {
        assert!(at <= whole.len() && len <= whole.len() - at, "queued bytes must lie in their buffer");
        let start = whole.as_ptr().wrapping_add(at);
        let Some(message) = self.batch.messages.last_mut() else { return };
        if message.iovecs > 0
            && let Some(last) = self.batch.iovecs.last_mut()
            && last.iov_base.cast_const().cast::<u8>().wrapping_add(last.iov_len) == start
        {
            last.iov_len += len;
            return;
        }
        self.batch.iovecs.push(iovec { iov_base: start.cast_mut().cast(), iov_len: len });
        message.iovecs += 1;
    }

    /// Sends all gathered messages. On return, each of them is sent or counted as dropped.
    fn send(&mut self) {
        let count = self.batch.messages.len();
        self.complete();
        let mut done = 0;
        let mut retried = usize::MAX;
        while done < count {
            let next = self.batch.messages[done];
            if next.segments > 1 && next.segment > self.gso_limit {
                // This super-packet was gathered before a step-down in this call.
                self.send_apart(done);
                done += 1;
                continue;
            }
            self.stats.calls += 1;
            match self.kernel.send(self.socket, &mut self.batch.headers[done..count]) {
                Ok(sent) => {
                    for message in &self.batch.messages[done..done + sent] {
                        count_sent(self.stats, message);
                    }
                    done += sent.max(1);
                }
                Err(error) => match error.raw_os_error().unwrap_or(0) {
                    libc::EINTR => {}
                    libc::EAGAIN => {
                        // The send buffer is full, so the remaining messages would fail too.
                        let rest = &self.batch.messages[done..count];
                        self.stats.would_block += rest.iter().map(|m| m.segments as u64).sum::<u64>();
                        done = count;
                    }
                    libc::ENOBUFS => {
                        // The device queue dropped the message. The next message may use another device.
                        self.stats.would_block += next.segments as u64;
                        done += 1;
                    }
                    // A pending ICMP error of the socket is reported once, in place of sending. It can be any
                    // errno, including EMSGSIZE, so try again before treating it as a refusal.
                    _ if retried != done => retried = done,
                    refusal if next.segments > 1 && is_refusal_of_gso(refusal) => {
                        self.step_down(done);
                        done += 1;
                    }
                    other => {
                        *drop_counter(self.stats, other) += next.segments as u64;
                        done += 1;
                    }
                },
            }
        }
        self.batch.messages.clear();
        self.batch.iovecs.clear();
        self.joinable = false;
    }

    /// Sets the pointers of every header.
    fn complete(&mut self) {
        let SendBatch { iovecs, messages, headers, names, controls, .. } = &mut *self.batch;
        for (message, control) in messages.iter_mut().zip(controls.iter_mut()) {
            message.total_control = message.control;
            if message.segments > 1 {
                message.total_control += append_segment_size(control, message.control, message.segment);
            }
        }
        // The three arrays are accessed only through these pointers until the system call.
        let (iovecs, names, controls) = (iovecs.as_mut_ptr(), names.as_mut_ptr(), controls.as_mut_ptr());
        for (at, message) in messages.iter().enumerate() {
            let header = &mut headers[at].msg_hdr;
            header.msg_name =
                if header.msg_namelen == 0 { std::ptr::null_mut() } else { names.wrapping_add(at).cast() };
            header.msg_iov = iovecs.wrapping_add(message.first_iovec);
            header.msg_iovlen = message.iovecs as _;
            header.msg_control = if message.total_control == 0 {
                std::ptr::null_mut()
            } else {
                controls.wrapping_add(at).cast()
            };
            header.msg_controllen = message.total_control as _;
            header.msg_flags = 0;
        }
    }

    /// Handles a refused super-packet: sends its segments one by one. If the kernel accepts any of them,
    /// the socket stops forming such super-packets for a while. If it accepts none, it refused the destination.
    #[cold]
    fn step_down(&mut self, at: usize) {
        if self.send_apart(at) == 0 {
            return;
        }
        let segment = self.batch.messages[at].segment;
        self.socket.step_down(u16::try_from(segment).unwrap_or(u16::MAX));
        self.gso_limit = self.gso_limit.min(usize::from(self.socket.gso_limit()));
        self.stats.step_downs += 1;
    }

    /// Sends the segments of a super-packet one by one and returns the number accepted.
    #[cold]
    fn send_apart(&mut self, at: usize) -> usize {
        let message = self.batch.messages[at];
        let mut pieces = self.batch.iovecs[message.first_iovec..][..message.iovecs].to_vec();
        let mut left = message.bytes;
        let mut first = 0;
        let mut taken = 0;
        while left > 0 {
            let want = message.segment.min(left);
            // Cut the message's pieces at the end of the segment.
            let (mut have, mut last) = (0, first);
            while have + pieces[last].iov_len < want {
                have += pieces[last].iov_len;
                last += 1;
            }
            let rest = have + pieces[last].iov_len - want;
            let whole = pieces[last];
            pieces[last].iov_len -= rest;
            let header = &mut self.batch.headers[at];
            header.msg_hdr.msg_iov = pieces[first..].as_mut_ptr();
            header.msg_hdr.msg_iovlen = (last - first + 1) as _;
            header.msg_hdr.msg_controllen = message.control as _;
            if message.control == 0 {
                header.msg_hdr.msg_control = std::ptr::null_mut();
            }
            taken += usize::from(self.send_alone(at, want));
            if rest == 0 {
                first = last + 1;
            } else {
                pieces[last] =
                    iovec { iov_base: whole.iov_base.wrapping_byte_add(whole.iov_len - rest), iov_len: rest };
                first = last;
            }
            left -= want;
        }
        taken
    }

    /// Sends message `at`, `bytes` long, in its own call; true if the kernel accepted it.
    #[cold]
    fn send_alone(&mut self, at: usize, bytes: usize) -> bool {
        let mut retried = false;
        loop {
            self.stats.calls += 1;
            let Err(error) = self.kernel.send(self.socket, &mut self.batch.headers[at..=at]) else {
                self.stats.messages += 1;
                self.stats.datagrams += 1;
                self.stats.bytes += bytes as u64;
                return true;
            };
            match error.raw_os_error().unwrap_or(0) {
                libc::EINTR => {}
                full @ (libc::EAGAIN | libc::ENOBUFS) => {
                    *drop_counter(self.stats, full) += 1;
                    return false;
                }
                // As in `send`: possibly a pending ICMP error.
                _ if !retried => retried = true,
                other => {
                    *drop_counter(self.stats, other) += 1;
                    return false;
                }
            }
        }
    }
}

fn count_sent(stats: &mut TxStats, message: &Message) {
    stats.messages += 1;
    stats.super_packets += u64::from(message.segments > 1);
    stats.datagrams += message.segments as u64;
    stats.bytes += message.bytes as u64;
}

/// Errnos of kernels and devices that cannot segment: EINVAL and EMSGSIZE (segment beyond the MTU), EIO (no
/// checksum offload, IPsec), ENOPROTOOPT and EOPNOTSUPP (no UDP_SEGMENT).
fn is_refusal_of_gso(errno: c_int) -> bool {
    matches!(errno, libc::EINVAL | libc::EIO | libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::EMSGSIZE)
}

fn drop_counter(stats: &mut TxStats, errno: c_int) -> &mut u64 {
    match errno {
        libc::EAGAIN | libc::ENOBUFS => &mut stats.would_block,
        libc::EMSGSIZE => &mut stats.too_big,
        _ => &mut stats.refused,
    }
}

fn append_segment_size(control: &mut ControlBuffer<CONTROL>, used: usize, segment: usize) -> usize {
    let mut tail = ControlBuffer([0; 24]);
    let mut writer = ControlWriter::new(&mut tail);
    #[expect(clippy::cast_possible_truncation, reason = "a datagram is shorter than 64 KiB")]
    let segment = segment as u16;
    writer.push(sys::SOL_UDP, sys::UDP_SEGMENT, segment.to_ne_bytes());
    let len = writer.len();
    control.0[used..used + len].copy_from_slice(&tail.0[..len]);
    len
}

#[cfg(test)]
mod tests;
