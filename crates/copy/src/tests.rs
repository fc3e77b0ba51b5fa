//! Tests of copying in each mode: byte order, slow sinks, end of stream and pipe limits.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a panic is how a test fails")]

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    os::fd::OwnedFd,
    sync::LazyLock,
    time::{Duration, Instant},
};

use turnpike_net::{Interest, Poller, rlimit};

use super::*;

const BY_TRAFFIC: Option<bool> = None;
const SPLICED: Option<bool> = Some(true);
const BUFFERED: Option<bool> = Some(false);
const MODES: [Option<bool>; 3] = [BY_TRAFFIC, SPLICED, BUFFERED];

/// Two ends of a connection: the mover uses the first, the test the second.
fn pair() -> (TcpSocket, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // Make room for a whole unread message, because older kernels open a window of at most 64 KiB before the
    // first read.
    socket2::SockRef::from(&listener).set_recv_buffer_size(256 << 10).unwrap();
    let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (near, _) = listener.accept().unwrap();
    near.set_nonblocking(true).unwrap();
    far.set_nodelay(true).unwrap();
    far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    (OwnedFd::from(near).into(), far)
}

fn until<T>(mut ready: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < deadline, "timed out");
        std::thread::yield_now();
    }
}

fn arrive(near: &TcpSocket, len: usize) {
    let near = socket2::SockRef::from(near);
    let mut seen = vec![std::mem::MaybeUninit::new(0); len];
    until(|| near.peek(&mut seen).is_ok_and(|got| got == len).then_some(()));
}

fn fill_up(near: &TcpSocket) -> usize {
    let (chunk, mut sent, mut refused) = (vec![0; 1 << 16], 0, 0);
    while refused < 100 {
        match near.write(&chunk) {
            Ok(n) => (sent, refused) = (sent + n, 0),
            Err(_) => refused += 1,
        }
        std::thread::yield_now();
    }
    sent
}

/// Prime, so that any lost or duplicated piece or buffer is noticed.
const PERIOD: usize = 1_299_709;

/// `len` bytes (up to [`PERIOD`]) of the test stream, starting at an offset.
fn pattern(at: usize, len: usize) -> &'static [u8] {
    static TWICE: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let byte = |at: usize| ((at % PERIOD).wrapping_mul(0x9E37_79B9) >> 16) as u8;
        (0..2 * PERIOD).map(byte).collect()
    });
    &TWICE[at % PERIOD..][..len]
}

/// True if `heard` matches the test stream, starting at offset `at`.
fn is_pattern(heard: &[u8], at: usize) -> bool {
    heard.chunks(PERIOD).all(|chunk| chunk == pattern(at, chunk.len()))
}

/// Moves one message of `len` bytes and returns the number of spliced bytes.
fn message(
    mover: &mut Mover,
    flow: &mut CopyDirection,
    ends: &mut Ends,
    copy: Option<bool>,
    len: usize,
) -> u64 {
    let bytes = pattern(flow.bytes as usize, len);
    ends.source.write_all(bytes).unwrap();
    arrive(&ends.from, len);
    flow.readable = true;
    assert_eq!(to_the_end(mover, flow, ends, copy), Pumped::Idle);
    let mut heard = vec![0; len];
    ends.sink.read_exact(&mut heard).unwrap();
    assert!(heard == bytes);
    mover.take_moved().spliced
}

fn to_the_end(mover: &mut Mover, flow: &mut CopyDirection, ends: &mut Ends, copy: Option<bool>) -> Pumped {
    loop {
        match mover.pump(flow, &ends.from, &ends.to, copy, false) {
            Pumped::Again => {}
            other => return other,
        }
    }
}

struct Ends {
    source: TcpStream,
    from: TcpSocket,
    to: TcpSocket,
    sink: TcpStream,
}

impl Ends {
    fn new() -> Self {
        let ((from, source), (to, sink)) = (pair(), pair());
        Self { source, from, to, sink }
    }
}

/// Moves `total` bytes in pieces of varying size to a sink that reads only while the flow is blocked, up to
/// `appetite` bytes at a time.
fn transfer(copy: Option<bool>, total: usize, appetite: usize) {
    let Ends { mut source, from, to, mut sink } = Ends::new();
    let writer = std::thread::spawn(move || {
        let (mut at, mut piece) = (0, 1);
        while at < total {
            let len = piece.min(total - at);
            source.write_all(pattern(at, len)).unwrap();
            at += len;
            piece = piece * 3 % 300_007 + 1;
        }
        source.shutdown(Shutdown::Write).unwrap();
        source
    });
    let (mut mover, mut flow) = (Mover::default(), CopyDirection::default());
    let (mut heard, mut buffer, mut blocked) = (0, vec![0; appetite], 0);
    until(|| {
        // Treat each turn as an event, because reading an empty socket is harmless.
        flow.readable = true;
        match mover.pump(&mut flow, &from, &to, copy, false) {
            Pumped::Idle | Pumped::Again => assert!(!flow.is_blocked()),
            Pumped::Blocked => {
                assert!(flow.is_blocked());
                blocked += 1;
                let got = sink.read(&mut buffer).unwrap();
                assert!(is_pattern(&buffer[..got], heard), "{copy:?}: bytes differ after {heard}");
                heard += got;
            }
            Pumped::Done => return Some(()),
            broken => panic!("{broken:?}"),
        }
        None
    });
    assert!(flow.has_ended() && flow.is_done() && !flow.is_blocked());
    let mut rest = Vec::new();
    sink.read_to_end(&mut rest).unwrap();
    assert!(is_pattern(&rest, heard), "{copy:?}: bytes differ after {heard}");
    assert_eq!((heard + rest.len(), flow.bytes), (total, total as u64), "{copy:?}");
    assert!(blocked > 0, "the sink was never full");
    match copy {
        BY_TRAFFIC => {}
        SPLICED => assert_eq!(mover.take_moved().spliced, total as u64),
        BUFFERED => assert_eq!(mover.take_moved().spliced, 0),
    }
    drop(writer.join().unwrap());
    assert_eq!(mover.pipes, mover.idle.len(), "an ended flow holds no pipe");
}

#[test]
fn every_byte_arrives_at_a_slow_sink() {
    MODES.into_iter().for_each(|copy| transfer(copy, 24 << 20, 7001));
}

#[test]
fn every_byte_arrives_at_a_sink_with_large_reads() {
    MODES.into_iter().for_each(|copy| transfer(copy, 48 << 20, 1 << 20));
}

#[test]
fn end_of_stream_leaves_the_other_direction_open() {
    for copy in MODES {
        let (mut mover, mut ends) = (Mover::default(), Ends::new());
        let (mut there, mut back) = (CopyDirection::default(), CopyDirection::default());
        message(&mut mover, &mut there, &mut ends, copy, 9);
        ends.source.shutdown(Shutdown::Write).unwrap();
        until(|| {
            there.readable = true;
            (mover.pump(&mut there, &ends.from, &ends.to, copy, false) == Pumped::Done).then_some(())
        });
        assert_eq!(ends.sink.read(&mut [0]).unwrap(), 0);
        let Ends { source, from, to, sink } = ends;
        let mut turned = Ends { source: sink, from: to, to: from, sink: source };
        message(&mut mover, &mut back, &mut turned, copy, 20_000);
        assert!(there.is_done() && !back.has_ended());
    }
}

#[test]
fn last_end_of_stream_is_passed_on_by_closing() {
    let (mut mover, mut flow, ends) = (Mover::default(), CopyDirection::default(), Ends::new());
    ends.source.shutdown(Shutdown::Write).unwrap();
    until(|| {
        flow.readable = true;
        (mover.pump(&mut flow, &ends.from, &ends.to, BY_TRAFFIC, true) == Pumped::Done).then_some(())
    });
    ends.sink.set_nonblocking(true).unwrap();
    assert_eq!((&ends.sink).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    drop(ends.to);
    assert_eq!(until(|| (&ends.sink).read(&mut [0]).ok()), 0);
}

#[test]
fn known_end_of_stream_needs_no_extra_read() {
    let (mut mover, mut flow, mut ends) = (Mover::default(), CopyDirection::default(), Ends::new());
    ends.source.write_all(b"last").unwrap();
    ends.source.shutdown(Shutdown::Write).unwrap();
    arrive(&ends.from, 4);
    (flow.readable, flow.fin) = (true, true);
    assert_eq!(mover.pump(&mut flow, &ends.from, &ends.to, BY_TRAFFIC, false), Pumped::Done);
    let mut heard = Vec::new();
    ends.sink.read_to_end(&mut heard).unwrap();
    assert_eq!(heard, b"last");
}

#[test]
fn suspected_end_of_stream_is_passed_on_once_confirmed() {
    let (mut mover, mut flow, mut ends) = (Mover::default(), CopyDirection::default(), Ends::new());
    ends.source.write_all(b"last").unwrap();
    ends.source.shutdown(Shutdown::Write).unwrap();
    flow.doubts_end = true;
    until(|| {
        flow.readable = true;
        assert_eq!(mover.pump(&mut flow, &ends.from, &ends.to, BY_TRAFFIC, false), Pumped::Idle);
        std::mem::take(&mut flow.end_read).then_some(())
    });
    assert_eq!((flow.bytes, flow.has_ended(), flow.readable), (4, false, false));
    let mut heard = [0; 8];
    assert_eq!(ends.sink.read(&mut heard).unwrap(), 4);
    ends.sink.set_nonblocking(true).unwrap();
    assert_eq!(
        (&ends.sink).read(&mut heard).unwrap_err().kind(),
        ErrorKind::WouldBlock,
        "the end of stream is not passed on yet"
    );
    flow.believe_end();
    assert_eq!(mover.pump(&mut flow, &ends.from, &ends.to, BY_TRAFFIC, false), Pumped::Done);
    assert_eq!(until(|| (&ends.sink).read(&mut heard).ok()), 0);
}

#[test]
fn leading_bytes_are_sent_first() {
    for copy in MODES {
        let (mut mover, mut flow, mut ends) = (Mover::default(), CopyDirection::default(), Ends::new());
        flow.lead_with(b"header ".to_vec());
        assert!(flow.is_blocked());
        ends.source.write_all(b"body").unwrap();
        arrive(&ends.from, 4);
        flow.readable = true;
        assert_eq!(to_the_end(&mut mover, &mut flow, &mut ends, copy), Pumped::Idle);
        let mut heard = [0; 11];
        ends.sink.read_exact(&mut heard).unwrap();
        assert_eq!((&heard, flow.bytes), (b"header body", 4));
    }
}

#[test]
fn bulk_moves_to_a_pipe_and_interactive_traffic_back() {
    const LARGE: usize = BULK + 1000;
    let (mut mover, mut flow, mut ends) = (Mover::default(), CopyDirection::default(), Ends::new());
    let mut spliced =
        |flow: &mut CopyDirection, len| message(&mut mover, flow, &mut ends, BY_TRAFFIC, len) as usize;
    for _ in 0..100 {
        assert_eq!(spliced(&mut flow, 32), 0);
    }
    // One small read restarts the count.
    for _ in 1..BULK_READS {
        assert_eq!(spliced(&mut flow, LARGE), 0);
    }
    assert_eq!(spliced(&mut flow, 32), 0);
    for _ in 0..BULK_READS {
        assert_eq!(spliced(&mut flow, LARGE), 0);
    }
    assert_eq!(spliced(&mut flow, LARGE), LARGE);
    for _ in 1..CHATTER_READS {
        assert_eq!(spliced(&mut flow, 32), 32);
    }
    assert_eq!(spliced(&mut flow, LARGE), LARGE);
    for _ in 0..CHATTER_READS {
        assert_eq!(spliced(&mut flow, 32), 32);
    }
    assert_eq!(spliced(&mut flow, 32), 0);
    assert_eq!((mover.pipes, mover.idle.len()), (1, 1), "an idle flow returns its pipe to the pool");
}

#[test]
fn plain_flow_is_copied_even_if_it_is_bulk() {
    let (mut mover, mut flow, mut ends) = (Mover::default(), CopyDirection::default(), Ends::new());
    flow.plain = true;
    for _ in 0..2 * BULK_READS {
        assert_eq!(message(&mut mover, &mut flow, &mut ends, BY_TRAFFIC, BULK + 1000), 0);
    }
    assert!(!flow.thorough);
    flow.on_urgent(&ends.from);
    assert!(flow.thorough);
}

#[test]
fn urgent_byte_prevents_the_use_of_pipes() {
    let (mut mover, mut flow, mut ends) = (Mover::default(), CopyDirection::default(), Ends::new());
    assert_eq!(message(&mut mover, &mut flow, &mut ends, SPLICED, 100), 100);
    flow.on_urgent(&ends.from);
    assert_eq!(message(&mut mover, &mut flow, &mut ends, SPLICED, 100), 0);
}

/// A turn takes place after an urgent byte and FIN have arrived, but before the event that reports them.
#[test]
fn unannounced_urgent_byte_does_not_end_the_stream() {
    for copy in MODES {
        let (mut mover, mut flow, mut ends) =
            (Mover::default(), CopyDirection { readable: true, ..CopyDirection::default() }, Ends::new());
        ends.source.write_all(b"abc").unwrap();
        socket2::SockRef::from(&ends.source).send_out_of_band(b"!").unwrap();
        ends.source.write_all(b"def").unwrap();
        ends.source.shutdown(Shutdown::Write).unwrap();
        let mut poller = Poller::new().unwrap();
        poller.add_with(&ends.from, 0, Interest::Edge).unwrap();
        until(|| poller.wait(None).unwrap().iter().any(|event| event.priority && event.closed).then_some(()));
        let first = to_the_end(&mut mover, &mut flow, &mut ends, copy);
        if first != Pumped::Done {
            // After a read that stops short, the flow waits for the event that reports the urgent byte.
            assert_eq!((first, flow.bytes, flow.has_ended()), (Pumped::Idle, 3, false), "{copy:?}");
            flow.on_urgent(&ends.from);
            (flow.readable, flow.fin) = (true, true);
            assert_eq!(to_the_end(&mut mover, &mut flow, &mut ends, copy), Pumped::Done);
        }
        let mut heard = Vec::new();
        ends.sink.read_to_end(&mut heard).unwrap();
        assert_eq!(heard, b"abc!def", "{copy:?}");
    }
}

#[test]
fn mover_limits_open_and_idle_pipes() {
    // Each pipe needs two descriptors.
    let needed = 2 * PIPES as u64 + 256;
    assert!(rlimit::raise_open_files(needed) >= needed, "raise the limit on open files (ulimit -n)");
    let (mut mover, mut ends) = (Mover::default(), Ends::new());
    let mut waiting = fill_up(&ends.to);
    let flows: Vec<CopyDirection> = (0..PIPES + 2)
        .map(|number| {
            let mut flow = CopyDirection::default();
            until(|| {
                ends.source.write_all(pattern(32 * number, 32)).unwrap();
                arrive(&ends.from, 32);
                flow.readable = true;
                match mover.pump(&mut flow, &ends.from, &ends.to, SPLICED, false) {
                    Pumped::Blocked => Some(()),
                    // A window probe has made room in the sink.
                    _ => {
                        waiting += 32 + fill_up(&ends.to);
                        None
                    }
                }
            });
            assert_eq!(matches!(flow.held, Unsent::Pipe(_)), number < PIPES, "flow {number}");
            flow
        })
        .collect();
    assert_eq!((mover.pipes, mover.idle.len()), (PIPES, 0));
    // A flow that ends mid-transfer closes its pipe with the bytes inside.
    let mut flows = flows.into_iter();
    mover.reclaim(&mut flows.next().unwrap());
    assert_eq!((mover.pipes, mover.idle.len()), (PIPES - 1, 0));
    ends.sink.read_exact(&mut vec![0; waiting]).unwrap();
    for (number, mut flow) in (1..).zip(flows) {
        until(|| (mover.pump(&mut flow, &ends.from, &ends.to, SPLICED, false) == Pumped::Idle).then_some(()));
        let mut heard = [0; 32];
        ends.sink.read_exact(&mut heard).unwrap();
        assert!(heard[..] == *pattern(32 * number, 32), "flow {number}");
    }
    assert_eq!((mover.pipes, mover.idle.len()), (IDLE_PIPES, IDLE_PIPES));
}

#[test]
fn nodelay_is_set_before_nagle_could_delay() {
    for copy in MODES {
        let (mut mover, mut flow, mut ends) = (Mover::default(), CopyDirection::new(true), Ends::new());
        let nodelay = |ends: &Ends| socket2::SockRef::from(&ends.to).tcp_nodelay().unwrap();
        message(&mut mover, &mut flow, &mut ends, copy, ONE_SEGMENT);
        // A single short message needs no setsockopt(2); the pipe always sets TCP_NODELAY.
        assert_eq!(nodelay(&ends), copy == SPLICED);
        message(&mut mover, &mut flow, &mut ends, copy, 1);
        assert!(nodelay(&ends), "{copy:?}");
    }
}

#[test]
fn broken_source_and_sink_are_distinguished() {
    let reset = |stream: TcpStream| {
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    };
    for copy in MODES {
        let (mut mover, mut flow, ends) = (Mover::default(), CopyDirection::default(), Ends::new());
        reset(ends.source);
        let ended = until(|| {
            flow.on_error();
            let pumped = mover.pump(&mut flow, &ends.from, &ends.to, copy, false);
            (pumped != Pumped::Idle).then_some(pumped)
        });
        assert_eq!(ended, Pumped::SourceFailed, "{copy:?}");

        let (mut flow, mut ends) = (CopyDirection::default(), Ends::new());
        reset(ends.sink);
        let ended = until(|| {
            ends.source.write_all(b"x").unwrap();
            flow.readable = true;
            let pumped = mover.pump(&mut flow, &ends.from, &ends.to, copy, false);
            (pumped != Pumped::Idle).then_some(pumped)
        });
        assert_eq!(ended, Pumped::SinkFailed, "{copy:?}");
        mover.reclaim(&mut flow);
        assert_eq!(mover.pipes, mover.idle.len(), "{copy:?}");
    }
}

#[test]
fn budget_limits_reads_to_the_byte_and_loses_nothing() {
    for copy in MODES {
        let (mut mover, mut ends) = (Mover::default(), Ends::new());
        let mut flow = CopyDirection::new(false);
        flow.readable = true;
        let all = 300_000;
        ends.source.write_all(pattern(0, all)).unwrap();
        let mut heard = Vec::new();
        for grant in [1, 999, 64 << 10, 100_000] {
            arrive(&ends.from, grant as usize);
            flow.budget = Some(grant);
            let before = flow.bytes;
            until(|| match mover.pump(&mut flow, &ends.from, &ends.to, copy, false) {
                Pumped::Spent => Some(()),
                Pumped::Again | Pumped::Idle => {
                    flow.readable = true;
                    None
                }
                other => panic!("{other:?}"),
            });
            assert_eq!((flow.bytes - before, flow.budget), (grant, Some(0)), "{copy:?}");
            let mut piece = vec![0; grant as usize];
            ends.sink.read_exact(&mut piece).unwrap();
            heard.extend(piece);
        }
        assert_eq!(mover.pump(&mut flow, &ends.from, &ends.to, copy, false), Pumped::Spent, "{copy:?}");
        flow.budget = None;
        until(|| {
            flow.readable = true;
            let _ = mover.pump(&mut flow, &ends.from, &ends.to, copy, false);
            (flow.bytes == all as u64 && !flow.is_blocked()).then_some(())
        });
        let mut rest = vec![0; all - heard.len()];
        ends.sink.read_exact(&mut rest).unwrap();
        heard.extend(rest);
        assert!(is_pattern(&heard, 0), "{copy:?}");
    }
}
