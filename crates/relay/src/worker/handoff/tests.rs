//! Handoffs between two workers. The tests deliver the messages themselves to control losses and timing.
#![allow(clippy::unwrap_used, reason = "clippy.toml exempts test functions, but not their helpers")]

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

use turnpike_net::Datapath;
use turnpike_testkit::stun::message;
use turnpike_turn::server::{
    DropReason, Effect, ListenerId, OpenResult, ServerConfig, Verdict, stats::MobilityEvent,
};

use super::*;
use crate::{
    Config, RelayAddress, StreamConfig, common::RelayCommon, link::LinkSlot, listening::ListenerPlaces,
};

const TICKET: u16 = 0x8030;
const NOW: Now = Now { ms: 1000, unix: 1_800_000_000 };

fn workers() -> [Worker; 2] {
    let any: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
    let mut config = Config {
        listen: vec![any],
        streams: StreamConfig { listen: vec![any], ..StreamConfig::default() },
        workers: 2,
        datapath: Datapath::Mmsg,
        relay: vec![RelayAddress { bind: Ipv4Addr::LOCALHOST.into(), external: None }],
        ports: 20_000..=29_999,
        server: ServerConfig { authenticate: false, ..ServerConfig::default() },
        ..Config::default()
    };
    let layout = config.layout();
    config.server.listeners = layout.profiles(&config.server.listeners);
    let change = ListenerPlaces::default().change(&layout, &config).unwrap_or_else(|error| panic!("{error}"));
    let mut sockets = change.sockets.into_iter();
    let common = RelayCommon::new(config, layout, Arc::new(()), Arc::new(()), None, false);
    let made = [0, 1].map(|number| {
        let made = Worker::new(number, &common, sockets.next().unwrap());
        made.unwrap_or_else(|error| panic!("{error}"))
    });
    let mailboxes: Arc<[Mailbox]> = made.iter().map(Mailbox::of).collect();
    made.map(|mut worker| {
        worker.set_mailboxes(Arc::clone(&mailboxes));
        worker
    })
}

fn client(port: u16) -> Client {
    let at = |port| (Ipv4Addr::LOCALHOST, port).into();
    Client { listener: ListenerId(0), address: at(port), local: at(3478) }
}

fn mobile(owner: &mut Worker) -> Vec<u8> {
    let allocate = message(0x0003, 7, &[(0x0019, &[17, 0, 0, 0]), (TICKET, &[])]);
    let Verdict::Drop(None) = owner.server.from_client(NOW, &client(1).into(), &allocate) else { panic!() };
    let Some(Effect::Open(request)) = owner.server.poll_effect() else { panic!() };
    let relayed = (Ipv4Addr::LOCALHOST, 20_000).into();
    let opened = owner.server.opened(NOW, request.allocation, OpenResult::Opened { relayed }, None);
    let Verdict::Reply { bytes, .. } = opened else { panic!() };
    let at = bytes.windows(4).position(|head| *head == [0x80, 0x30, 0, 32]).expect("a ticket") + 4;
    message(0x0004, 7, &[(TICKET, &bytes[at..at + 32])])
}

fn take(worker: &mut Worker) -> usize {
    let mut taken = 0;
    while let Some(Command::Handoff(handoff)) = worker.frame.command() {
        worker.take_handoff(NOW, *handoff);
        taken += 1;
    }
    taken
}

fn present(here: &mut Worker, from: Source, refresh: &[u8]) {
    here.server.from_client(NOW, &from, refresh);
    assert!(here.server.has_effects(), "not forwarded");
    here.carry_out_effects(NOW, NO_TRAILING);
}

fn asks(here: &mut Worker, from: Source) -> Result<(), DropReason> {
    match here.server.from_client(NOW, &from, &[0x40, 0, 0, 0]) {
        Verdict::Drop(None) => {}
        Verdict::Drop(Some(reason)) => return Err(reason),
        _ => panic!("unexpected verdict"),
    }
    here.carry_out_effects(NOW, NO_TRAILING);
    Ok(())
}

fn connected(worker: &mut Worker, words: &[u8]) -> TcpStream {
    let at = worker.out.streams.listening(0).unwrap().local_addr();
    // The kernel chooses the worker, so try several times.
    for _ in 0..100 {
        let mut client = TcpStream::connect(at).unwrap();
        client.set_read_timeout(Some(turnpike_testkit::PATIENCE)).unwrap();
        client.write_all(words).unwrap();
        for _ in 0..20 {
            worker.out.streams.accept(0, NOW.ms, &worker.frame.poller);
            if worker.out.streams.stats().accepted > 0 {
                worker.serve_accepted(NOW);
                return client;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    panic!("the kernel assigned all connections to the other worker");
}

fn fill(of: &Worker, worker: usize, waiting: usize) {
    of.mailboxes[worker].backlog.store(waiting, Ordering::Relaxed);
}

fn moves(owner: &mut Worker, here: &mut Worker, from: Source) {
    asks(here, from).unwrap();
    assert_eq!((take(owner), take(here)), (1, 1));
    assert_eq!((owner.server.allocations(), here.server.allocations()), (0, 1));
}

#[test]
fn reply_lost_to_a_full_queue_is_repeated_on_retransmission() {
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    present(&mut here, client(2).into(), &refresh);
    fill(&here, 1, BACKLOG);
    assert_eq!((take(&mut owner), take(&mut here)), (1, 0));
    assert_eq!(owner.counted.handoffs_lost, 1);
    assert_eq!(asks(&mut here, client(2).into()), Err(DropReason::NoAllocation));
    fill(&here, 1, 0);
    present(&mut here, client(2).into(), &refresh);
    assert_eq!((take(&mut owner), take(&mut here)), (1, 1));
    moves(&mut owner, &mut here, client(2).into());
}

#[test]
fn dropped_allocation_request_is_repeated_on_the_next_datagram() {
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    present(&mut here, client(2).into(), &refresh);
    assert_eq!((take(&mut owner), take(&mut here)), (1, 1));
    for _ in 0..3 {
        fill(&here, 0, BACKLOG);
        asks(&mut here, client(2).into()).unwrap();
        fill(&here, 0, 0);
        assert_eq!(take(&mut owner), 0);
    }
    moves(&mut owner, &mut here, client(2).into());
}

#[test]
fn stream_waits_while_the_queue_is_full_and_keeps_its_trailing_bytes() {
    let [mut owner, mut here] = workers();
    let words = [mobile(&mut owner), message(0x0001, 9, &[])].concat();
    fill(&here, 0, BACKLOG);
    let mut client = connected(&mut here, &words);
    let open = |worker: &Worker| worker.out.streams.stats().open;
    for ms in [AGAIN_MS, 2 * AGAIN_MS] {
        assert_eq!((take(&mut owner), open(&here)), (0, 1));
        here.resume_streams(Now { ms: NOW.ms + ms, ..NOW });
    }
    fill(&here, 0, 0);
    here.resume_streams(Now { ms: NOW.ms + 3 * AGAIN_MS, ..NOW });
    assert_eq!((take(&mut owner), open(&owner), open(&here)), (1, 1, 0));
    owner.flush();
    for kind in [0x0104, 0x0101] {
        let mut head = [0; 20];
        client.read_exact(&mut head).unwrap();
        assert_eq!(u16::from_be_bytes([head[0], head[1]]), kind);
        let mut rest = vec![0; usize::from(u16::from_be_bytes([head[2], head[3]]))];
        client.read_exact(&mut rest).unwrap();
    }
    assert_eq!(here.counted.handoffs_lost, 0);
}

/// The store responds only after the client has begun to send its next message.
#[test]
fn late_handover_includes_a_partial_message() {
    for is_full in [false, true] {
        let [mut owner, mut here] = workers();
        let (refresh, binding) = (mobile(&mut owner), message(0x0001, 9, &[]));
        let (half, rest) = binding.split_at(9);
        let mut client = connected(&mut here, half);
        let (address, local) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        let of = |listener| Client { listener: ListenerId(listener), address, local };
        let of_stream = (0..8)
            .map(of)
            .find(|of| here.out.streams.held(of) == half)
            .expect("a connection with half a message");
        fill(&here, 0, if is_full { BACKLOG } else { 0 });
        here.hand_over(NOW, &of_stream, 0, refresh.into(), NO_TRAILING);
        if is_full {
            fill(&here, 0, 0);
            here.resume_streams(Now { ms: NOW.ms + AGAIN_MS, ..NOW });
        }
        assert_eq!(take(&mut owner), 1);
        client.write_all(rest).unwrap();
        for expected in [0x0104, 0x0101] {
            owner.receive_from_stream(NOW, 0);
            owner.flush();
            let mut head = [0; 20];
            client.read_exact(&mut head).unwrap();
            assert_eq!(u16::from_be_bytes([head[0], head[1]]), expected);
            let mut attributes = vec![0; usize::from(u16::from_be_bytes([head[2], head[3]]))];
            client.read_exact(&mut attributes).unwrap();
        }
    }
}

#[test]
fn allocation_arriving_after_its_client_left_is_kept() {
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    let link = ClientLinkKind::Stream(LinkSlot { slot: 0, generation: 1 }).link();
    let gone = Source { client: client(2), link };
    present(&mut here, gone, &refresh);
    assert_eq!((take(&mut owner), take(&mut here)), (1, 1));
    moves(&mut owner, &mut here, gone);
    assert_eq!(here.server.stats().mobility[MobilityEvent::Kept as usize], 1);
    // The client's address may now belong to another client.
    assert_eq!(asks(&mut here, gone), Err(DropReason::NoAllocation));
    // Plain UDP has no connection to lose.
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    present(&mut here, client(2).into(), &refresh);
    assert_eq!((take(&mut owner), take(&mut here)), (1, 1));
    moves(&mut owner, &mut here, client(2).into());
    assert_eq!(here.server.stats().mobility[MobilityEvent::Kept as usize], 0);
}

/// A reload reaches one worker before the other.
#[test]
fn arriving_allocation_of_a_removed_realm_ends() {
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    present(&mut here, client(2).into(), &refresh);
    assert_eq!((take(&mut owner), take(&mut here)), (1, 1));
    let renamed =
        ServerConfig { realm: "renamed".to_owned(), authenticate: false, ..ServerConfig::default() };
    here.server.reconfigure(NOW, Arc::new(renamed));
    asks(&mut here, client(2).into()).unwrap();
    assert_eq!((take(&mut owner), take(&mut here)), (1, 1));
    assert_eq!((owner.server.allocations(), here.server.allocations()), (0, 0));
}
