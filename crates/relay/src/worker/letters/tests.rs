//! Two workers whose letters the test carries: what gets lost between them, and when, cannot be arranged from outside.
#![allow(clippy::unwrap_used, reason = "clippy.toml excuses test functions, not their helpers")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Mutex, RwLock},
};

use turnpike_net::Datapath;
use turnpike_testkit::stun::message;
use turnpike_turn::server::{DropReason, ListenerId, OpenResult, ServerConfig, stats::MobilityEvent};

use super::*;
use crate::{
    Config, RelayAddress, WorkerSnapshot,
    dtls::Associations,
    gate::{Quotas, WorkerGate},
    ports::Ports,
    runtime::Listeners,
    stream::{Admission, StreamListeners},
    worker::Shared,
};

const TICKET: u16 = 0x8030;
const NOW: Now = Now { ms: 1000, unix: 1_800_000_000 };

fn workers() -> [Worker; 2] {
    let any: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
    let config = Config {
        listen: vec![any],
        workers: 2,
        datapath: Datapath::Mmsg,
        relay: vec![RelayAddress { bind: Ipv4Addr::LOCALHOST.into(), external: None }],
        ports: 20_000..=29_999,
        server: ServerConfig { authenticate: false, ..ServerConfig::default() },
        ..Config::default()
    };
    let listeners = Listeners { udp: vec![any], ..Listeners::default() };
    let streams = Arc::new(config.streams.clone());
    let layout = Arc::new(config.layout());
    let admission = Arc::new(Admission::new(10, 10));
    let quotas = Arc::new(Quotas::new(10, 10));
    let ports = Arc::new(Ports::new(&config));
    let mut mailboxes = Vec::new();
    let made = [0, 1].map(|number| {
        let (commands, inbox) = mpsc::channel();
        let sockets = StreamListeners::bind(&[], &[], &streams, true).unwrap_or_else(|_| unreachable!());
        let (worker, waker) = Worker::new(
            number,
            &config,
            &listeners,
            |started| Associations::new(Arc::clone(&layout), Arc::new(config.dtls.clone()), 2, started),
            |poller| {
                Streams::new(
                    Arc::clone(&layout),
                    Arc::clone(&streams),
                    Arc::clone(&admission),
                    sockets,
                    poller,
                )
            },
            WorkerGate::new(Arc::new(RwLock::new(Arc::new(()))), Arc::clone(&quotas), Arc::clone(&ports)),
            Arc::clone(&ports),
            Arc::new(()),
            inbox,
            Arc::new(Shared { snapshot: Mutex::new(WorkerSnapshot::default()) }),
        )
        .unwrap();
        mailboxes.push(Mailbox { commands, waker, backlog: Arc::default() });
        worker
    });
    let mailboxes: Arc<[Mailbox]> = mailboxes.into();
    made.map(|mut worker| {
        worker.meet(Arc::clone(&mailboxes));
        worker
    })
}

fn client(port: u16) -> Client {
    let at = |port| (Ipv4Addr::LOCALHOST, port).into();
    Client { listener: ListenerId(0), address: at(port), local: at(3478) }
}

/// A mobile allocation of the first worker, and the Refresh that takes it along.
fn mobile(owner: &mut Worker) -> Vec<u8> {
    let allocate = message(0x0003, 7, &[(0x0019, &[17, 0, 0, 0]), (TICKET, &[])]);
    let Verdict::Open(request) = owner.server.from_client(NOW, client(1), &allocate) else { panic!() };
    let relayed = (Ipv4Addr::LOCALHOST, 20_000).into();
    let opened = owner.server.opened(NOW, request.allocation, OpenResult::Opened { relayed }, None);
    let Verdict::Reply { bytes, .. } = opened else { panic!() };
    let at = bytes.windows(4).position(|head| *head == [0x80, 0x30, 0, 32]).expect("a ticket") + 4;
    message(0x0004, 7, &[(TICKET, &bytes[at..at + 32])])
}

/// The letters that wait.
fn read(worker: &mut Worker) -> usize {
    let mut read = 0;
    while let Ok(Command::Letter(letter)) = worker.inbox.try_recv() {
        worker.read_letter(NOW, *letter);
        read += 1;
    }
    read
}

/// A Refresh that reaches the second worker.
fn present(here: &mut Worker, from: Client, refresh: &[u8]) {
    let verdict = here.server.from_client(NOW, from, refresh);
    let Verdict::Forward { worker: 0 } = verdict else { panic!("not forwarded") };
    here.forward(from, 0, refresh.to_vec());
}

/// What the first data from there asks for.
fn asks(here: &mut Worker, from: Client) -> Result<MoveRequest, DropReason> {
    match here.server.from_client(NOW, from, &[0x40, 0, 0, 0]) {
        Verdict::Move(request) => Ok(request),
        Verdict::Drop(reason) => Err(reason),
        _ => panic!("neither known nor a stranger"),
    }
}

fn fill(of: &Worker, worker: usize, letters: usize) {
    of.mailboxes[worker].backlog.store(letters, Ordering::Relaxed);
}

fn moves(owner: &mut Worker, here: &mut Worker, from: Client) {
    let request = asks(here, from).unwrap();
    here.ask_for(request, Vec::new());
    assert_eq!((read(owner), read(here)), (1, 1));
    assert_eq!((owner.server.allocations(), here.server.allocations()), (0, 1));
}

#[test]
fn an_answer_that_finds_no_room_is_given_to_the_request_sent_again() {
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    present(&mut here, client(2), &refresh);
    fill(&here, 1, BACKLOG);
    assert_eq!((read(&mut owner), read(&mut here)), (1, 0));
    assert_eq!(owner.counted.letters_lost, 1);
    assert_eq!(asks(&mut here, client(2)), Err(DropReason::NoAllocation));
    fill(&here, 1, 0);
    present(&mut here, client(2), &refresh);
    assert_eq!((read(&mut owner), read(&mut here)), (1, 1));
    moves(&mut owner, &mut here, client(2));
}

#[test]
fn a_question_that_finds_no_room_is_asked_again_for_the_next_datagram() {
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    present(&mut here, client(2), &refresh);
    assert_eq!((read(&mut owner), read(&mut here)), (1, 1));
    for _ in 0..3 {
        let request = asks(&mut here, client(2)).unwrap();
        fill(&here, 0, BACKLOG);
        here.ask_for(request, Vec::new());
        fill(&here, 0, 0);
        assert_eq!(read(&mut owner), 0);
    }
    moves(&mut owner, &mut here, client(2));
}

#[test]
fn an_allocation_that_comes_after_its_client_has_gone_is_kept_for_its_return() {
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    // Of a listener whose clients have connections, none of which is this one's.
    let gone = Client { listener: ListenerId(1), ..client(2) };
    present(&mut here, gone, &refresh);
    assert_eq!((read(&mut owner), read(&mut here)), (1, 1));
    moves(&mut owner, &mut here, gone);
    assert_eq!(here.server.stats().mobility[MobilityEvent::Kept as usize], 1);
    // Its address is anybody's now.
    assert_eq!(asks(&mut here, gone), Err(DropReason::NoAllocation));
    // Over plain UDP there is nothing that could be gone.
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    present(&mut here, client(2), &refresh);
    assert_eq!((read(&mut owner), read(&mut here)), (1, 1));
    moves(&mut owner, &mut here, client(2));
    assert_eq!(here.server.stats().mobility[MobilityEvent::Kept as usize], 0);
}

/// A reload reaches one worker after the other.
#[test]
fn an_allocation_that_comes_from_a_realm_that_is_no_more_here_ends() {
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    present(&mut here, client(2), &refresh);
    assert_eq!((read(&mut owner), read(&mut here)), (1, 1));
    let renamed =
        ServerConfig { realm: "renamed".to_owned(), authenticate: false, ..ServerConfig::default() };
    here.server.reconfigure(NOW, Arc::new(renamed));
    let request = asks(&mut here, client(2)).unwrap();
    here.ask_for(request, Vec::new());
    assert_eq!((read(&mut owner), read(&mut here)), (1, 1));
    assert_eq!((owner.server.allocations(), here.server.allocations()), (0, 0));
}
