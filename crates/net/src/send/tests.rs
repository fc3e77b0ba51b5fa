//! Tests of sending with a simulated kernel: datagrams sent, their order, and counters.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests may panic, and print which checks they skip"
)]

use std::{
    cell::Cell,
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr},
    os::fd::AsFd,
};

use libc::{c_int, mmsghdr};

use super::{FEWEST_SEGMENTS, MAX_IOVECS, MOST_SEGMENTS, SendCalls, max_segments, probe_segments};
use crate::{
    ArenaSpan, Datapath, Route, Rx, SocketId, Sockets, Tx, UdpOptions, UdpSocket,
    sys::{self, RawAddress},
};

const REFUSALS: [c_int; 5] = [libc::EINVAL, libc::EIO, libc::ENOPROTOOPT, libc::EOPNOTSUPP, libc::EMSGSIZE];

/// A message as the kernel sees it.
struct Seen {
    to: SocketAddr,
    bytes: Vec<u8>,
    segment: Option<usize>,
    dont_fragment: bool,
}

fn look(socket: &UdpSocket, message: &mmsghdr) -> Seen {
    let header = &message.msg_hdr;
    assert!(header.msg_iovlen <= MAX_IOVECS, "more iovecs than the kernel accepts");
    let mut bytes = Vec::new();
    for at in 0..header.msg_iovlen {
        // SAFETY: the sender promises `msg_iovlen` iovecs and that each describes readable bytes.
        unsafe {
            let piece = *header.msg_iov.add(at);
            bytes.extend_from_slice(std::slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len));
        }
    }
    // SAFETY: the sender promises a socket address there.
    let to = unsafe { *header.msg_name.cast::<RawAddress>() }.get().unwrap();
    let control = match header.msg_controllen as _ {
        0 => &[],
        // SAFETY: the sender promises `msg_controllen` bytes of control messages.
        len => unsafe { std::slice::from_raw_parts(header.msg_control.cast::<u8>(), len) },
    };
    let segment = sys::control_messages(control)
        .find(|m| (m.level, m.kind) == (sys::SOL_UDP, sys::UDP_SEGMENT))
        .map(|m| usize::from(u16::from_ne_bytes(m.data.try_into().unwrap())));
    Seen { to, bytes, segment, dont_fragment: !cfg!(miri) && dont_fragment(socket) }
}

fn dont_fragment(socket: &UdpSocket) -> bool {
    let value = sys::get_option(socket.as_fd(), libc::IPPROTO_IP, libc::IP_MTU_DISCOVER).unwrap();
    value == libc::IP_PMTUDISC_PROBE
}

/// Simulated kernel that follows a rule and records the datagrams that it accepts.
struct Ruled<R> {
    /// Errno for a message, or `None` to accept it.
    rule: R,
    taken: Vec<(SocketAddr, Vec<u8>)>,
    super_packets: usize,
    with_df: Vec<bool>,
    errors: usize,
    calls: usize,
    /// Maximum number of messages accepted per call.
    at_most: usize,
}

fn ruled<R: FnMut(&Seen) -> Option<c_int>>(rule: R) -> Ruled<R> {
    Ruled {
        rule,
        taken: Vec::new(),
        super_packets: 0,
        with_df: Vec::new(),
        errors: 0,
        calls: 0,
        at_most: usize::MAX,
    }
}

impl<R: FnMut(&Seen) -> Option<c_int>> SendCalls for Ruled<R> {
    fn send(&mut self, socket: &UdpSocket, messages: &mut [mmsghdr]) -> std::io::Result<usize> {
        self.calls += 1;
        for (at, message) in messages.iter().enumerate() {
            if at == self.at_most {
                return Ok(at);
            }
            let seen = look(socket, message);
            if let Some(errno) = (self.rule)(&seen) {
                // Like sendmmsg(2): an error is returned only if it affects the first message.
                if at > 0 {
                    return Ok(at);
                }
                self.errors += 1;
                return Err(std::io::Error::from_raw_os_error(errno));
            }
            self.with_df.push(seen.dont_fragment);
            match seen.segment {
                None => self.taken.push((seen.to, seen.bytes)),
                Some(size) => {
                    self.super_packets += 1;
                    assert!(seen.bytes.len().div_ceil(size) <= most_segments());
                    self.taken.extend(seen.bytes.chunks(size).map(|c| (seen.to, c.to_vec())));
                }
            }
        }
        Ok(messages.len())
    }
}

/// A socket, an arena with known bytes in it, and a queue.
struct Bench {
    sockets: Sockets,
    id: SocketId,
    rx: Rx,
    arena: ArenaSpan,
    tx: Tx,
    pushed: Vec<(SocketAddr, Vec<u8>)>,
}

fn bench(datapath: Datapath) -> Bench {
    let mut rx = Rx::new(datapath);
    // The pattern's length is prime. Under Miri, a loop over all bytes would take seconds.
    let known = (0..251).collect::<Vec<u8>>().repeat(239);
    let arena = rx.fill(0, |room| {
        room[..known.len()].copy_from_slice(&known);
        Ok(known.len())
    });
    let mut sockets = Sockets::default();
    let id = sockets.insert(socket());
    let segments = if datapath == Datapath::Gso { most_segments() } else { 1 };
    let tx = Tx::with_segments(datapath, segments);
    Bench { sockets, id, rx, arena: arena.unwrap(), tx, pushed: Vec::new() }
}

/// Miri has no UDP sockets, and most tests need none, because they simulate the kernel.
fn socket() -> UdpSocket {
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    if cfg!(miri) {
        let (any, _) = std::io::pipe().unwrap();
        return UdpSocket::at(here, any.into(), 0);
    }
    UdpSocket::bind(here, &UdpOptions::default()).unwrap()
}

fn most_segments() -> usize {
    if cfg!(miri) { FEWEST_SEGMENTS } else { max_segments() }
}

impl Bench {
    fn route(&self, to: SocketAddr) -> Route {
        Route { socket: self.id, to: Some(to), from: None, tos: 0, ttl: 0, dont_fragment: false }
    }

    /// Queues a datagram of a 12-byte header with its number, `size - 12 - padding` bytes of the arena, and
    /// padding.
    fn push(&mut self, to: SocketAddr, size: usize) {
        let route = self.route(to);
        self.push_route(&route, size);
    }

    fn push_route(&mut self, route: &Route, size: usize) {
        let number = self.pushed.len();
        let padding = number % 4;
        let header = format!("{number:012}");
        let len = u32::try_from(size - 12 - padding).unwrap();
        let payload = ArenaSpan { offset: self.arena.offset + (number % 1000) as u32, len };
        let mut whole = header.clone().into_bytes();
        whole.extend_from_slice(self.rx.bytes(payload));
        whole.extend(std::iter::repeat_n(0, padding));
        self.tx.push(route, header.as_bytes(), payload, padding as u8);
        self.pushed.push((route.to.unwrap(), whole));
    }

    fn flush(&mut self, kernel: &mut impl SendCalls) {
        self.tx.flush_through(kernel, &mut self.sockets, &self.rx);
    }

    /// Checks that each pushed datagram was sent once, and those to one destination in order.
    fn assert_all_in_order(&self, taken: &[(SocketAddr, Vec<u8>)]) {
        assert_eq!(by_destination(taken), by_destination(&self.pushed));
        assert_eq!(self.tx.stats().datagrams, self.pushed.len() as u64);
        let dropped = self.tx.stats().refused + self.tx.stats().too_big + self.tx.stats().would_block;
        assert_eq!(dropped, 0);
    }
}

fn by_destination(datagrams: &[(SocketAddr, Vec<u8>)]) -> HashMap<SocketAddr, Vec<&[u8]>> {
    let mut map: HashMap<SocketAddr, Vec<&[u8]>> = HashMap::new();
    for (to, bytes) in datagrams {
        map.entry(*to).or_default().push(bytes);
    }
    map
}

fn peer(n: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 10_000 + n))
}

#[test]
fn each_refusal_of_a_super_packet_causes_one_step_down() {
    for errno in REFUSALS {
        let mut b = bench(Datapath::Gso);
        let mut kernel = ruled(|m| m.segment.map(|_| errno));
        for _ in 0..20 {
            b.push(peer(0), 100);
            b.push(peer(1), 200);
            b.push(peer(2), 100);
        }
        b.push(peer(2), 70);
        b.flush(&mut kernel);
        b.assert_all_in_order(&kernel.taken);
        assert_eq!(b.tx.stats().step_downs, 1, "errno {errno}");
        // The second attempt distinguishes a refusal from a pending ICMP error; no other call fails.
        assert_eq!(kernel.errors, 2, "errno {errno}");

        for _ in 0..20 {
            b.push(peer(0), 100);
        }
        b.flush(&mut kernel);
        b.assert_all_in_order(&kernel.taken);
        assert_eq!((b.tx.stats().step_downs, kernel.errors), (1, 2), "errno {errno}");
        assert_eq!(b.tx.stats().super_packets, 0);
    }
}

/// Simulates a link whose MTU shrinks for a while.
#[test]
fn super_packets_are_used_again_once_the_kernel_accepts_them() {
    for size in [100, 1400] {
        let mut b = bench(Datapath::Gso);
        let narrow = Cell::new(true);
        let mut kernel = ruled(|m| m.segment.filter(|_| narrow.get()).map(|_| libc::EMSGSIZE));
        let flush = |b: &mut Bench, kernel: &mut _| {
            b.push(peer(0), size);
            b.push(peer(0), size);
            b.flush(kernel);
        };
        for _ in 0..5_000 {
            flush(&mut b, &mut kernel);
        }
        assert_eq!(b.tx.stats().step_downs, 3, "retries become rarer");
        narrow.set(false);
        for _ in 0..5_000 {
            flush(&mut b, &mut kernel);
        }
        assert!(kernel.super_packets > 1_000, "{}", kernel.super_packets);
        b.assert_all_in_order(&kernel.taken);
    }
}

#[test]
fn a_refused_large_segment_steps_down_only_for_its_size() {
    for errno in REFUSALS {
        let mut b = bench(Datapath::Gso);
        let mut kernel = ruled(|m| m.segment.filter(|s| *s > 1300).map(|_| errno));
        for _ in 0..2 {
            for _ in 0..10 {
                b.push(peer(0), 1400);
                b.push(peer(1), 1200);
            }
            b.flush(&mut kernel);
        }
        b.assert_all_in_order(&kernel.taken);
        assert_eq!(b.tx.stats().step_downs, 1);
        assert_eq!(kernel.super_packets, 2, "segments of 1200 still form super-packets");

        // If a smaller size is refused, the socket steps down again.
        for _ in 0..10 {
            b.push(peer(0), 1310);
        }
        b.flush(&mut kernel);
        b.assert_all_in_order(&kernel.taken);
        assert_eq!(b.tx.stats().step_downs, 2);
    }
}

#[test]
fn a_step_down_never_raises_the_limit_of_an_earlier_one() {
    let mut b = bench(Datapath::Gso);
    let mut kernel = ruled(|m| m.segment.map(|_| libc::EIO));
    for size in [100, 1400, 100] {
        for _ in 0..4 {
            b.push(peer(size as u16), size);
        }
    }
    b.flush(&mut kernel);
    assert_eq!(b.sockets.get(b.id).unwrap().gso_limit(), 0);
    b.sockets.get(b.id).unwrap().step_down(1400);
    assert_eq!(b.sockets.get(b.id).unwrap().gso_limit(), 0);
    b.assert_all_in_order(&kernel.taken);
    assert_eq!(b.tx.stats().step_downs, 1);
}

#[test]
fn other_sockets_do_not_step_down() {
    let mut b = bench(Datapath::Gso);
    let other = b.sockets.insert(socket());
    let mut kernel = ruled(|m| m.segment.filter(|_| m.to == peer(0)).map(|_| libc::EIO));
    let route = Route { socket: other, ..b.route(peer(1)) };
    for _ in 0..8 {
        b.push(peer(0), 100);
        b.push_route(&route, 100);
    }
    b.flush(&mut kernel);
    b.assert_all_in_order(&kernel.taken);
    assert_eq!((kernel.super_packets, b.tx.stats().step_downs), (1, 1));
}

#[test]
fn a_pending_icmp_error_is_not_a_refusal() {
    for errno in REFUSALS.into_iter().chain([libc::ECONNREFUSED, libc::EHOSTUNREACH]) {
        for datapath in [Datapath::Basic, Datapath::Mmsg, Datapath::Gso] {
            let mut b = bench(datapath);
            let mut pending = Some(errno);
            let mut kernel = ruled(|_| pending.take());
            for _ in 0..10 {
                b.push(peer(0), 100);
                b.push(peer(1), 100);
            }
            b.flush(&mut kernel);
            b.assert_all_in_order(&kernel.taken);
            assert_eq!(b.tx.stats().step_downs, 0);
            assert_eq!(kernel.super_packets, if datapath == Datapath::Gso { 2 } else { 0 });
        }
    }
}

/// udp_sendmsg() returns EINVAL for port 0. This must not disable GSO for other peers.
#[test]
fn a_refused_destination_causes_no_step_down() {
    let mut b = bench(Datapath::Gso);
    let bad = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let mut kernel = ruled(|m| (m.to == bad).then_some(libc::EINVAL));
    for _ in 0..10 {
        b.push(bad, 100);
        b.push(peer(1), 100);
    }
    b.flush(&mut kernel);
    let stats = *b.tx.stats();
    assert_eq!((stats.step_downs, stats.refused, stats.datagrams), (0, 10, 10));
    assert_eq!(kernel.super_packets, 1);
}

#[test]
fn datagrams_beyond_the_mtu_are_counted_and_the_rest_is_sent() {
    for datapath in [Datapath::Basic, Datapath::Mmsg, Datapath::Gso] {
        let mut b = bench(datapath);
        let mut kernel = ruled(|m| (m.segment.unwrap_or(m.bytes.len()) > 1472).then_some(libc::EMSGSIZE));
        for _ in 0..5 {
            b.push(peer(0), 1500);
            b.push(peer(1), 1200);
        }
        b.flush(&mut kernel);
        let stats = *b.tx.stats();
        assert_eq!((stats.step_downs, stats.too_big, stats.datagrams), (0, 5, 5), "{datapath}");
    }
}

#[test]
fn a_full_send_buffer_drops_the_rest_and_counts_datagrams() {
    for (datapath, kept) in [(Datapath::Basic, 20), (Datapath::Mmsg, 20), (Datapath::Gso, 20)] {
        let mut b = bench(datapath);
        let mut room = 2000_usize;
        let mut kernel = ruled(|m| match room.checked_sub(m.bytes.len()) {
            Some(left) => {
                room = left;
                None
            }
            None => Some(libc::EAGAIN),
        });
        for n in 0..4 {
            for _ in 0..10 {
                b.push(peer(n), 100);
            }
        }
        b.flush(&mut kernel);
        let stats = *b.tx.stats();
        assert_eq!((stats.datagrams, stats.would_block), (kept, 20), "{datapath}");
        assert_eq!(kernel.taken, b.pushed[..20], "the first datagrams are sent");
    }
}

#[test]
fn a_full_device_queue_drops_one_message() {
    let mut b = bench(Datapath::Gso);
    let mut kernel = ruled(|m| (m.to == peer(1)).then_some(libc::ENOBUFS));
    for n in 0..3 {
        for _ in 0..10 {
            b.push(peer(n), 100);
        }
    }
    b.flush(&mut kernel);
    let stats = *b.tx.stats();
    assert_eq!((stats.datagrams, stats.would_block, stats.step_downs), (20, 10, 0));
    assert_eq!(kernel.errors, 1, "no second try");
}

#[test]
fn partial_sends_are_continued() {
    for datapath in [Datapath::Basic, Datapath::Mmsg, Datapath::Gso] {
        for at_most in [1, 2, 7] {
            let mut b = bench(datapath);
            let mut kernel = ruled(|_| None);
            kernel.at_most = at_most;
            for n in 0..300 {
                b.push(peer(n % 7), 50 + usize::from(n));
            }
            b.flush(&mut kernel);
            b.assert_all_in_order(&kernel.taken);
        }
    }
}

#[test]
fn an_interrupted_call_is_repeated() {
    let mut b = bench(Datapath::Gso);
    let mut interruptions = 5;
    let mut kernel = ruled(|_| {
        interruptions -= 1;
        (interruptions >= 0).then_some(libc::EINTR)
    });
    for _ in 0..10 {
        b.push(peer(0), 100);
    }
    b.flush(&mut kernel);
    b.assert_all_in_order(&kernel.taken);
    assert_eq!(kernel.super_packets, 1);
}

#[test]
fn thousands_of_pieces_respect_the_message_limits() {
    let mut b = bench(Datapath::Gso);
    let mut kernel = ruled(|_| None);
    for n in 0..6000 {
        b.push(peer(n % 3), 20);
    }
    b.flush(&mut kernel);
    b.assert_all_in_order(&kernel.taken);
    let most = 6000_usize.div_ceil(most_segments()) + 3;
    assert!(kernel.super_packets <= most, "{} super-packets", kernel.super_packets);
    assert_eq!(b.tx.stats().step_downs, 0);
}

#[test]
fn a_message_is_no_longer_than_a_udp_payload() {
    let mut b = bench(Datapath::Gso);
    let mut kernel = ruled(|m| (m.bytes.len() > 65_507).then_some(libc::EINVAL));
    for _ in 0..100 {
        b.push(peer(0), 1400);
    }
    b.flush(&mut kernel);
    b.assert_all_in_order(&kernel.taken);
    assert_eq!((kernel.errors, kernel.super_packets), (0, 3), "46 segments fit in a message");
}

#[test]
fn adjacent_datagrams_share_an_iovec_until_a_step_down() {
    let mut b = bench(Datapath::Gso);
    let mut kernel = ruled(|m| m.segment.map(|_| libc::EIO));
    let route = b.route(peer(0));
    for n in 0..10_u8 {
        let bytes = [n; 100];
        let bytes = if n == 9 { &bytes[..30] } else { &bytes[..] };
        b.tx.push_bytes(&route, bytes);
        b.pushed.push((peer(0), bytes.to_vec()));
    }
    // Simulates a reflected super-packet, whose datagrams are adjacent in the arena.
    for n in 0..10 {
        let span = ArenaSpan { offset: b.arena.offset + n * 500, len: 500 };
        b.tx.push(&route, &[], span, 0);
        b.pushed.push((peer(0), b.rx.bytes(span).to_vec()));
    }
    b.flush(&mut kernel);
    b.assert_all_in_order(&kernel.taken);
}

#[test]
fn empty_datagrams_are_sent_alone_and_in_order() {
    for datapath in [Datapath::Basic, Datapath::Mmsg, Datapath::Gso] {
        let mut b = bench(datapath);
        let mut kernel = ruled(|_| None);
        let route = b.route(peer(0));
        for size in [0, 0, 5, 5, 0, 5, 0] {
            b.tx.push_bytes(&route, &vec![7; size]);
            b.pushed.push((peer(0), vec![7; size]));
        }
        let nothing = ArenaSpan { offset: b.arena.offset, len: 0 };
        b.tx.push(&route, &[], nothing, 0);
        b.pushed.push((peer(0), Vec::new()));
        b.flush(&mut kernel);
        b.assert_all_in_order(&kernel.taken);
    }
}

#[test]
fn df_is_set_only_for_routes_with_dont_fragment() {
    let mut b = bench(Datapath::Gso);
    let mut kernel = ruled(|_| None);
    for n in 0..40 {
        let route = Route { dont_fragment: n % 2 == 1, ..b.route(peer(n % 8)) };
        b.push_route(&route, 100);
    }
    b.flush(&mut kernel);
    b.assert_all_in_order(&kernel.taken);
    assert_eq!(kernel.with_df, [[false; 4], [true; 4]].concat());
    assert_eq!(kernel.calls, 2, "alternating routes must not cost a call each");
    for (to, bytes) in &kernel.taken {
        let number: u16 = std::str::from_utf8(&bytes[..12]).unwrap().parse().unwrap();
        assert_eq!(*to, peer(number % 8));
    }
    assert!(!dont_fragment(b.sockets.get(b.id).unwrap()));
}

#[test]
fn datagrams_of_a_removed_socket_count_as_refused() {
    let mut b = bench(Datapath::Gso);
    let mut kernel = ruled(|_| None);
    for n in 0..20 {
        b.push(peer(n % 6), 100);
    }
    b.sockets.remove(b.id);
    b.flush(&mut kernel);
    assert_eq!((kernel.calls, b.tx.stats().refused), (0, 20));
    assert_eq!(b.tx.queued(), 0);
}

#[test]
fn many_routes_of_one_socket_stay_separate() {
    let mut b = bench(Datapath::Mmsg);
    let mut kernel = ruled(|_| None);
    // Uses more routes than the linear search covers, in an order that revisits each; twice, because the
    // table is reused.
    for _ in 0..2 {
        for n in 0..2000_u32 {
            b.push(peer((n * 7 % 500) as u16), 30 + (n % 9) as usize);
        }
        b.flush(&mut kernel);
    }
    b.assert_all_in_order(&kernel.taken);
}

#[test]
#[should_panic(expected = "multiple of 4")]
fn padding_is_at_most_three_bytes() {
    let mut b = bench(Datapath::Basic);
    let route = b.route(peer(0));
    b.tx.push(&route, &[], b.arena, 4);
}

#[test]
fn probe_finds_the_segment_limit_of_this_kernel() {
    if probe_segments(2).is_err() {
        return println!("SKIPPED: this kernel has no UDP_SEGMENT, or there is no loopback");
    }
    let limit = max_segments();
    assert!([FEWEST_SEGMENTS, MOST_SEGMENTS].contains(&limit));
    probe_segments(limit).unwrap();
    if limit == FEWEST_SEGMENTS {
        assert_eq!(probe_segments(MOST_SEGMENTS).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
