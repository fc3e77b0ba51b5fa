//! Two workers whose handoffs the test carries: what gets lost between them, and when, cannot be arranged from outside.
#![allow(clippy::unwrap_used, reason = "clippy.toml excuses test functions, not their helpers")]

use std::net::{Ipv4Addr, SocketAddr};

use turnpike_net::Datapath;
use turnpike_testkit::stun::message;
use turnpike_turn::server::{
    DropReason, Effect, ListenerId, OpenResult, ServerConfig, Verdict, stats::MobilityEvent,
};

use super::*;
use crate::{Config, RelayAddress, link::Place, listening::Places, runtime::Common};

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
    let layout = config.layout();
    let change = Places::default().change(&layout, &config).unwrap_or_else(|error| panic!("{error}"));
    let mut sockets = change.sockets.into_iter();
    let common = Common::new(config, layout, Arc::new(()), Arc::new(()), None, false);
    let mut mailboxes = Vec::new();
    let made = [0, 1].map(|number| {
        let made = Worker::new(number, &common, sockets.next().unwrap());
        let (worker, mailbox, _) = made.unwrap_or_else(|error| panic!("{error}"));
        mailboxes.push(mailbox);
        worker
    });
    let mailboxes: Arc<[Mailbox]> = mailboxes.into();
    made.map(|mut worker| {
        worker.set_mailboxes(Arc::clone(&mailboxes));
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
    let Verdict::Drop(None) = owner.server.from_client(NOW, &client(1).into(), &allocate) else { panic!() };
    let Some(Effect::Open(request)) = owner.server.poll_effect() else { panic!() };
    let relayed = (Ipv4Addr::LOCALHOST, 20_000).into();
    let opened = owner.server.opened(NOW, request.allocation, OpenResult::Opened { relayed }, None);
    let Verdict::Reply { bytes, .. } = opened else { panic!() };
    let at = bytes.windows(4).position(|head| *head == [0x80, 0x30, 0, 32]).expect("a ticket") + 4;
    message(0x0004, 7, &[(TICKET, &bytes[at..at + 32])])
}

/// Takes what waits.
fn take(worker: &mut Worker) -> usize {
    let mut taken = 0;
    while let Some(Command::Handoff(handoff)) = worker.inbox.command() {
        worker.take_handoff(NOW, *handoff);
        taken += 1;
    }
    taken
}

/// A Refresh that reaches the second worker.
fn present(here: &mut Worker, from: Source, refresh: &[u8]) {
    here.server.from_client(NOW, &from, refresh);
    assert!(here.server.has_effects(), "not forwarded");
    here.carry_out_effects(NOW, NOTHING);
}

/// Data from there; whether it asks for an allocation.
fn asks(here: &mut Worker, from: Source) -> Result<(), DropReason> {
    match here.server.from_client(NOW, &from, &[0x40, 0, 0, 0]) {
        Verdict::Drop(None) => {}
        Verdict::Drop(Some(reason)) => return Err(reason),
        _ => panic!("neither known nor a stranger"),
    }
    here.carry_out_effects(NOW, NOTHING);
    Ok(())
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
fn an_answer_that_finds_no_room_is_given_to_the_request_sent_again() {
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
fn a_question_that_finds_no_room_is_asked_again_for_the_next_datagram() {
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
fn an_allocation_that_comes_after_its_client_has_gone_is_kept_for_its_return() {
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    // Its stream is closed.
    let link = Way::Stream(Place { slot: 0, generation: 1 }).link();
    let gone = Source { client: client(2), link };
    present(&mut here, gone, &refresh);
    assert_eq!((take(&mut owner), take(&mut here)), (1, 1));
    moves(&mut owner, &mut here, gone);
    assert_eq!(here.server.stats().mobility[MobilityEvent::Kept as usize], 1);
    // Its address is anybody's now.
    assert_eq!(asks(&mut here, gone), Err(DropReason::NoAllocation));
    // Over plain UDP there is nothing that could be gone.
    let [mut owner, mut here] = workers();
    let refresh = mobile(&mut owner);
    present(&mut here, client(2).into(), &refresh);
    assert_eq!((take(&mut owner), take(&mut here)), (1, 1));
    moves(&mut owner, &mut here, client(2).into());
    assert_eq!(here.server.stats().mobility[MobilityEvent::Kept as usize], 0);
}

/// A reload reaches one worker after the other.
#[test]
fn an_allocation_that_comes_from_a_realm_that_is_no_more_here_ends() {
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
