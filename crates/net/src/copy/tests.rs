//! Every byte in order, whatever the mode and however slow the sink; and what a mover keeps to itself.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a panic is how a test fails")]

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    os::fd::OwnedFd,
    sync::LazyLock,
    time::{Duration, Instant},
};

use super::*;
use crate::{
    poll::{Interest, Poller},
    rlimit,
};

const MODES: [CopyMode; 3] = [CopyMode::Auto, CopyMode::Splice, CopyMode::Buffer];

/// Both ends of a connection: the mover's, and the one far away.
fn pair() -> (TcpSocket, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // Room for all of a message that nobody reads yet: older kernels open a window of 64 KiB at most until somebody does.
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
        assert!(Instant::now() < deadline, "waited in vain");
        std::thread::yield_now();
    }
}

/// Waits until `near` has `len` bytes to read.
fn arrive(near: &TcpSocket, len: usize) {
    let near = socket2::SockRef::from(near);
    let mut seen = vec![std::mem::MaybeUninit::new(0); len];
    until(|| near.peek(&mut seen).is_ok_and(|got| got == len).then_some(()));
}

/// Sends until the other side's buffers, and this one's, take no more.
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

/// A prime, so that no piece or buffer that is lost or doubled goes unnoticed.
const PERIOD: usize = 1_299_709;

/// `len` bytes (up to [`PERIOD`]) of the stream that all tests send, from an offset on.
fn pattern(at: usize, len: usize) -> &'static [u8] {
    static TWICE: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let byte = |at: usize| ((at % PERIOD).wrapping_mul(0x9E37_79B9) >> 16) as u8;
        (0..2 * PERIOD).map(byte).collect()
    });
    &TWICE[at % PERIOD..][..len]
}

/// Whether `heard` is that stream from `at` on.
fn is_pattern(heard: &[u8], at: usize) -> bool {
    heard.chunks(PERIOD).all(|chunk| chunk == pattern(at, chunk.len()))
}

/// One message of `len` bytes through a flow; returns how many of them were spliced.
fn message(mover: &mut Mover, flow: &mut Flow, ends: &mut Ends, copy: CopyMode, len: usize) -> u64 {
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

/// Turn after turn, as an owner gives them, until there is nothing more to move.
fn to_the_end(mover: &mut Mover, flow: &mut Flow, ends: &mut Ends, copy: CopyMode) -> Pumped {
    loop {
        match mover.pump(flow, &ends.from, &ends.to, copy, false) {
            Pumped::Again => {}
            other => return other,
        }
    }
}

/// A source that sends to `from`, and a sink that hears what `to` is given.
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

/// Moves `total` bytes in pieces of changing size to a sink that reads only when all is blocked, and then no more than
/// `appetite`.
fn transfer(copy: CopyMode, total: usize, appetite: usize) {
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
    let (mut mover, mut flow) = (Mover::default(), Flow::default());
    let (mut heard, mut buffer, mut blocked) = (0, vec![0; appetite], 0);
    until(|| {
        // Each turn as if an event had come: a read in vain only says so.
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
        CopyMode::Auto | CopyMode::Kernel => {}
        CopyMode::Splice => assert_eq!(mover.take_moved().spliced, total as u64),
        CopyMode::Buffer => assert_eq!(mover.take_moved().spliced, 0),
    }
    drop(writer.join().unwrap());
    assert_eq!(mover.pipes, mover.idle.len(), "an ended flow holds no pipe");
}

#[test]
fn every_byte_arrives_at_a_slow_sink() {
    MODES.into_iter().for_each(|copy| transfer(copy, 24 << 20, 7001));
}

#[test]
fn every_byte_arrives_at_a_sink_that_takes_much_at_a_time() {
    MODES.into_iter().for_each(|copy| transfer(copy, 48 << 20, 1 << 20));
}

#[test]
fn an_end_is_passed_on_and_the_other_direction_lives() {
    for copy in MODES {
        let (mut mover, mut ends) = (Mover::default(), Ends::new());
        let (mut there, mut back) = (Flow::default(), Flow::default());
        message(&mut mover, &mut there, &mut ends, copy, 9);
        ends.source.shutdown(Shutdown::Write).unwrap();
        until(|| {
            there.readable = true;
            (mover.pump(&mut there, &ends.from, &ends.to, copy, false) == Pumped::Done).then_some(())
        });
        assert_eq!(ends.sink.read(&mut [0]).unwrap(), 0);
        // What was its source is its sink now.
        let Ends { source, from, to, sink } = ends;
        let mut turned = Ends { source: sink, from: to, to: from, sink: source };
        message(&mut mover, &mut back, &mut turned, copy, 20_000);
        assert!(there.is_done() && !back.has_ended());
    }
}

#[test]
fn the_last_end_is_left_to_the_close() {
    let (mut mover, mut flow, ends) = (Mover::default(), Flow::default(), Ends::new());
    ends.source.shutdown(Shutdown::Write).unwrap();
    until(|| {
        flow.readable = true;
        (mover.pump(&mut flow, &ends.from, &ends.to, CopyMode::Auto, true) == Pumped::Done).then_some(())
    });
    ends.sink.set_nonblocking(true).unwrap();
    assert_eq!((&ends.sink).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    drop(ends.to);
    assert_eq!(until(|| (&ends.sink).read(&mut [0]).ok()), 0);
}

#[test]
fn a_known_end_needs_no_read_of_its_own() {
    let (mut mover, mut flow, mut ends) = (Mover::default(), Flow::default(), Ends::new());
    ends.source.write_all(b"last").unwrap();
    ends.source.shutdown(Shutdown::Write).unwrap();
    arrive(&ends.from, 4);
    (flow.readable, flow.fin) = (true, true);
    assert_eq!(mover.pump(&mut flow, &ends.from, &ends.to, CopyMode::Auto, false), Pumped::Done);
    let mut heard = Vec::new();
    ends.sink.read_to_end(&mut heard).unwrap();
    assert_eq!(heard, b"last");
}

#[test]
fn an_end_that_is_doubted_is_told_and_passed_on_once_it_is_believed() {
    let (mut mover, mut flow, mut ends) = (Mover::default(), Flow::default(), Ends::new());
    ends.source.write_all(b"last").unwrap();
    ends.source.shutdown(Shutdown::Write).unwrap();
    flow.doubts_end = true;
    until(|| {
        flow.readable = true;
        assert_eq!(mover.pump(&mut flow, &ends.from, &ends.to, CopyMode::Kernel, false), Pumped::Idle);
        std::mem::take(&mut flow.end_read).then_some(())
    });
    assert_eq!((flow.bytes, flow.has_ended(), flow.readable), (4, false, false));
    let mut heard = [0; 8];
    assert_eq!(ends.sink.read(&mut heard).unwrap(), 4);
    ends.sink.set_nonblocking(true).unwrap();
    assert_eq!((&ends.sink).read(&mut heard).unwrap_err().kind(), ErrorKind::WouldBlock, "no end yet");
    flow.believe_end();
    assert_eq!(mover.pump(&mut flow, &ends.from, &ends.to, CopyMode::Kernel, false), Pumped::Done);
    assert_eq!(until(|| (&ends.sink).read(&mut heard).ok()), 0);
}

#[test]
fn what_leads_goes_first() {
    for copy in MODES {
        let (mut mover, mut flow, mut ends) = (Mover::default(), Flow::default(), Ends::new());
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
fn bulk_moves_to_a_pipe_and_chatter_back_to_the_buffer() {
    const LARGE: usize = BULK + 1000;
    let (mut mover, mut flow, mut ends) = (Mover::default(), Flow::default(), Ends::new());
    let mut spliced =
        |flow: &mut Flow, len| message(&mut mover, flow, &mut ends, CopyMode::Auto, len) as usize;
    for _ in 0..100 {
        assert_eq!(spliced(&mut flow, 32), 0);
    }
    // One read that is none of bulk, and the count starts anew.
    for _ in 1..BULK_READS {
        assert_eq!(spliced(&mut flow, LARGE), 0);
    }
    assert_eq!(spliced(&mut flow, 32), 0);
    for _ in 0..BULK_READS {
        assert_eq!(spliced(&mut flow, LARGE), 0);
    }
    assert_eq!(spliced(&mut flow, LARGE), LARGE);
    // The same the other way.
    for _ in 1..CHATTER_READS {
        assert_eq!(spliced(&mut flow, 32), 32);
    }
    assert_eq!(spliced(&mut flow, LARGE), LARGE);
    for _ in 0..CHATTER_READS {
        assert_eq!(spliced(&mut flow, 32), 32);
    }
    assert_eq!(spliced(&mut flow, 32), 0);
    assert_eq!((mover.pipes, mover.idle.len()), (1, 1), "an idle flow lends its pipe to others");
}

#[test]
fn a_flow_that_forgoes_pipes_is_copied_however_much_it_brings() {
    let (mut mover, mut flow, mut ends) = (Mover::default(), Flow::default(), Ends::new());
    flow.plain = true;
    for _ in 0..2 * BULK_READS {
        assert_eq!(message(&mut mover, &mut flow, &mut ends, CopyMode::Kernel, BULK + 1000), 0);
    }
    assert!(!flow.thorough);
    flow.on_urgent(&ends.from);
    assert!(flow.thorough);
}

#[test]
fn an_urgent_byte_keeps_a_flow_off_pipes() {
    let (mut mover, mut flow, mut ends) = (Mover::default(), Flow::default(), Ends::new());
    assert_eq!(message(&mut mover, &mut flow, &mut ends, CopyMode::Splice, 100), 100);
    flow.on_urgent(&ends.from);
    assert_eq!(message(&mut mover, &mut flow, &mut ends, CopyMode::Splice, 100), 0);
}

/// A turn that comes after an urgent byte and the end behind it, and before the event that tells of them.
#[test]
fn an_urgent_byte_that_nobody_has_told_of_ends_no_stream() {
    for copy in MODES {
        let (mut mover, mut flow, mut ends) =
            (Mover::default(), Flow { readable: true, ..Flow::default() }, Ends::new());
        ends.source.write_all(b"abc").unwrap();
        socket2::SockRef::from(&ends.source).send_out_of_band(b"!").unwrap();
        ends.source.write_all(b"def").unwrap();
        ends.source.shutdown(Shutdown::Write).unwrap();
        let mut poller = Poller::new().unwrap();
        poller.add_with(&ends.from, 0, Interest::Edge).unwrap();
        until(|| poller.wait(None).unwrap().iter().any(|event| event.priority && event.closed).then_some(()));
        let first = to_the_end(&mut mover, &mut flow, &mut ends, copy);
        if first != Pumped::Done {
            // A read that stops short waits for that event.
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
fn a_mover_has_so_many_pipes_and_keeps_fewer() {
    // Two descriptors each.
    let needed = 2 * PIPES as u64 + 256;
    assert!(rlimit::raise_open_files(needed) >= needed, "raise the limit of open files (ulimit -n)");
    let (mut mover, mut ends) = (Mover::default(), Ends::new());
    let mut waiting = fill_up(&ends.to);
    let flows: Vec<Flow> = (0..PIPES + 2)
        .map(|number| {
            let mut flow = Flow::default();
            until(|| {
                ends.source.write_all(pattern(32 * number, 32)).unwrap();
                arrive(&ends.from, 32);
                flow.readable = true;
                match mover.pump(&mut flow, &ends.from, &ends.to, CopyMode::Splice, false) {
                    Pumped::Blocked => Some(()),
                    // A window probe made room for more after all.
                    _ => {
                        waiting += 32 + fill_up(&ends.to);
                        None
                    }
                }
            });
            assert_eq!(matches!(flow.held, Held::Pipe(_)), number < PIPES, "flow {number}");
            flow
        })
        .collect();
    assert_eq!((mover.pipes, mover.idle.len()), (PIPES, 0));
    // The one that ends in mid-transfer takes its pipe along, with the bytes inside: nobody else hears them.
    let mut flows = flows.into_iter();
    mover.reclaim(&mut flows.next().unwrap());
    assert_eq!((mover.pipes, mover.idle.len()), (PIPES - 1, 0));
    ends.sink.read_exact(&mut vec![0; waiting]).unwrap();
    for (number, mut flow) in (1..).zip(flows) {
        until(|| {
            (mover.pump(&mut flow, &ends.from, &ends.to, CopyMode::Splice, false) == Pumped::Idle)
                .then_some(())
        });
        let mut heard = [0; 32];
        ends.sink.read_exact(&mut heard).unwrap();
        assert!(heard[..] == *pattern(32 * number, 32), "flow {number}");
    }
    assert_eq!((mover.pipes, mover.idle.len()), (IDLE_PIPES, IDLE_PIPES));
}

#[test]
fn nagle_is_turned_off_before_it_could_hold_anything_back() {
    for copy in MODES {
        let (mut mover, mut flow, mut ends) = (Mover::default(), Flow::new(true), Ends::new());
        let nodelay = |ends: &Ends| socket2::SockRef::from(&ends.to).tcp_nodelay().unwrap();
        message(&mut mover, &mut flow, &mut ends, copy, ONE_SEGMENT);
        // One short message needs no call; a pipe is not for such.
        assert_eq!(nodelay(&ends), copy == CopyMode::Splice);
        message(&mut mover, &mut flow, &mut ends, copy, 1);
        assert!(nodelay(&ends), "{copy:?}");
    }
}

#[test]
fn which_side_is_broken_is_told() {
    let reset = |stream: TcpStream| {
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    };
    for copy in MODES {
        let (mut mover, mut flow, ends) = (Mover::default(), Flow::default(), Ends::new());
        reset(ends.source);
        let ended = until(|| {
            flow.on_error();
            let pumped = mover.pump(&mut flow, &ends.from, &ends.to, copy, false);
            (pumped != Pumped::Idle).then_some(pumped)
        });
        assert_eq!(ended, Pumped::SourceFailed, "{copy:?}");

        let (mut flow, mut ends) = (Flow::default(), Ends::new());
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
fn a_budget_bounds_what_is_taken_to_the_byte_and_loses_nothing() {
    for copy in MODES {
        let (mut mover, mut ends) = (Mover::default(), Ends::new());
        let mut flow = Flow::new(false);
        flow.readable = true;
        let all = 300_000;
        ends.source.write_all(pattern(0, all)).unwrap();
        let mut heard = Vec::new();
        // Sizes below, at and above what one read takes.
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
