//! Mobility (RFC 8016) across workers: packets from the new address reach a worker other than the
//! allocation's.

use crate::common::*;
use turnpike_turn::server::{MoveRequest, PendingMove};

/// Workers of a server, and a runtime that passes messages between them. Their clocks started at different
/// times.
pub(crate) struct Workers(pub(crate) Vec<World>);

impl Workers {
    pub(crate) fn new(count: u16) -> Self {
        let mut workers = World::workers(&streams(), count);
        for (skew, world) in workers.iter_mut().enumerate() {
            world.now.ms += 7_000 * skew as u64;
        }
        Self(workers)
    }

    /// Alice has a mobile allocation on worker 0 and a channel to the peer.
    fn mobile(count: u16) -> (Self, RelayId, Vec<u8>) {
        let mut workers = Self::new(count);
        let owner = &mut workers.0[0];
        let alice = owner.credentials("alice", Scheme::Md5);
        let reply = owner.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success();
        let relay = owner.last_opened();
        owner.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
        (workers, relay, reply.ticket().expect("a requested ticket"))
    }

    pub(crate) fn signed(&mut self, at: usize, from: Client, ask: Ask) -> Vec<u8> {
        let world = &mut self.0[at];
        world.client = from;
        let alice = world.credentials("alice", Scheme::Md5);
        ask.signed(&alice).bytes()
    }

    /// Passes a request through the server, starting at the worker that received it.
    #[track_caller]
    pub(crate) fn request(&mut self, at: usize, from: Client, bytes: &[u8]) -> Outcome {
        let (outcome, pending_move) = self.request_unannounced(at, from, bytes);
        self.expect(at, pending_move);
        outcome
    }

    /// Like [`Self::request`], without announcing the pending move to the client's worker.
    #[track_caller]
    pub(crate) fn request_unannounced(
        &mut self,
        at: usize,
        from: Client,
        bytes: &[u8],
    ) -> (Outcome, Option<PendingMove>) {
        self.0[at].client = from;
        let via = u16::try_from(at).expect("few enough workers");
        let mut announced = None;
        let mut outcome = self.0[at].feed(bytes);
        let mut by = at;
        for _ in 0..4 {
            match outcome {
                Outcome::Forward { worker, occupied } => {
                    by = worker.into();
                    let (verdict, pending_move) = self.0[by].forwarded_from(via, occupied, from, bytes);
                    outcome = verdict;
                    announced = pending_move.or(announced);
                }
                Outcome::Decline { via: back } => {
                    assert_eq!(back, via);
                    outcome =
                        self.0[at].declined(u16::try_from(by).expect("few enough workers"), from, bytes);
                }
                _ => return (outcome, announced),
            }
        }
        panic!("the request is forwarded in a loop")
    }

    pub(crate) fn expect(&mut self, at: usize, pending_move: Option<PendingMove>) {
        if let Some(pending_move) = pending_move {
            let world = &mut self.0[at];
            world.server.expect(pending_move);
        }
    }

    #[track_caller]
    fn present(&mut self, at: usize, from: Client, ticket: &[u8]) -> Reply {
        let bytes = self.signed(at, from, Ask::present(ticket));
        match self.request(at, from, &bytes) {
            Outcome::Reply(bytes) => Reply(bytes),
            other => panic!("{other:?}"),
        }
    }

    fn export(&mut self, request: &MoveRequest) -> Option<Moved> {
        let owner = &mut self.0[usize::from(request.owner)];
        owner.server.export(owner.now, request)
    }

    pub(crate) fn carry_out(&mut self, request: &MoveRequest) -> Option<RelayId> {
        let to = usize::from(request.to);
        let Some(moved) = self.export(request) else {
            self.0[to].server.not_moved(&request.client);
            return None;
        };
        let here = &mut self.0[to];
        match here.server.import(here.now, moved) {
            Ok(allocation) => Some(RelayId { allocation, family: Family::V4 }),
            Err(moved) => {
                let owner = &mut self.0[usize::from(request.owner)];
                owner.server.take_back(owner.now, moved);
                None
            }
        }
    }

    pub(crate) fn speaks(&mut self, at: usize, from: Client) -> (Outcome, Option<RelayId>) {
        let data = channel_data(0x4000, b"from the client");
        self.0[at].client = from;
        match self.0[at].feed(&data) {
            Outcome::Move(request) => {
                let relay = self.carry_out(&request);
                self.0[at].client = from;
                (self.0[at].feed(&data), relay)
            }
            outcome => (outcome, None),
        }
    }

    pub(crate) fn sleep(&mut self, seconds: u64) {
        self.0.iter_mut().for_each(|world| world.sleep(seconds));
    }

    pub(crate) fn allocations(&self) -> Vec<usize> {
        self.0.iter().map(|world| world.server.allocations()).collect()
    }

    pub(crate) fn held(&mut self) -> usize {
        self.0[0].server.policy_mut().held()
    }

    fn counted(&self, event: MobilityEvent) -> u64 {
        self.0.iter().map(|world| world.server.stats().mobility[event as usize]).sum()
    }
}

#[test]
fn repeated_refusals_of_forwarded_requests_are_bounded() {
    let (mut workers, _, ticket) = Workers::mobile(2);
    let from = elsewhere(9);
    workers.0[1].client = from;
    let bob = workers.0[1].credentials("bob", Scheme::Md5);
    let bytes = Ask::present(&ticket).signed(&bob).bytes();
    let outcomes = (0..1000).map(|_| workers.request(1, from, &bytes));
    let answered = outcomes.filter(|outcome| matches!(outcome, Outcome::Reply(_))).count();
    assert_eq!((answered, workers.0[0].dropped(DropReason::RefusalRepeated)), (100, 900));
}

#[test]
fn an_allocation_follows_its_client_to_another_worker() {
    let (mut workers, relay, ticket) = Workers::mobile(3);
    let (old, new) = (client(40_000), elsewhere(1));
    workers.0[0].feed(&channel_data(0x4000, b"four"));
    workers.sleep(100);
    let reply = workers.present(2, new, &ticket).success();
    assert_eq!(reply.lifetime(), 600);
    let next = reply.ticket().unwrap();
    assert_ne!(next, ticket);
    assert_eq!(reaches(&mut workers.0[0], relay), old);
    assert!(workers.speaks(0, old).0.goes_to_peer());
    assert_eq!(workers.allocations(), [1, 0, 0]);

    workers.0.iter_mut().for_each(|world| drop(world.effects()));
    let (outcome, moved) = workers.speaks(2, new);
    let moved = moved.expect("a completed move");
    assert!(matches!(outcome, Outcome::ToPeer { relay, .. } if relay == moved));
    assert_eq!(workers.allocations(), [0, 0, 1]);
    assert_eq!(workers.held(), 1);
    assert_eq!(reaches(&mut workers.0[2], moved), new);
    assert_eq!(workers.0[0].effects(), [], "the allocation has not ended");
    let effect = Effect::Moved {
        allocation: moved.allocation,
        was: Some(old),
        client: new,
        link: Link::default(),
        padded: false,
        from: Some(relay.allocation),
    };
    assert_eq!(workers.0[2].effects(), [effect]);
    assert_eq!(workers.speaks(0, old).0, Outcome::Drop(DropReason::NoAllocation));
    assert_eq!(workers.0[0].peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::StaleRelay));
    assert_eq!(workers.0[0].server.poll_timeout(), None);

    // The remaining times are converted to the other clock: the channel permits its peer for 600 s, 100 of
    // which have passed.
    workers.sleep(499);
    assert_eq!(reaches(&mut workers.0[2], moved), new);
    workers.sleep(1);
    assert_eq!(workers.0[2].peer_sends(moved, PEER, b"x"), Outcome::Drop(DropReason::NoPermission));
    workers.sleep(99);
    assert_eq!(workers.allocations(), [0, 0, 1]);
    workers.sleep(1);
    assert_eq!(workers.allocations(), [0, 0, 0]);
    assert_eq!(workers.held(), 0);
    let effects = workers.0[2].effects();
    let [Effect::Closed { client, username, reason, lived_ms, to_peer, to_client, .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((*client, &**username, *reason), (new, "alice", ClosedReason::Expired));
    assert_eq!((*lived_ms, to_peer.0, to_client.0), (700_000, 3, 3));
}

#[test]
fn the_next_ticket_finds_the_allocation_on_any_worker() {
    let (mut workers, _, mut ticket) = Workers::mobile(4);
    let steps =
        [(2, 1, false), (3, 2, true), (3, 3, true), (0, 4, false), (1, 5, false), (0, 6, true), (0, 7, true)];
    for (at, port, speaks) in steps {
        let reply = workers.present(at, elsewhere(port), &ticket).success();
        let spent = std::mem::replace(&mut ticket, reply.ticket().unwrap());
        if speaks {
            assert!(workers.speaks(at, elsewhere(port)).0.goes_to_peer(), "{port}");
            assert_eq!(workers.allocations()[at], 1);
            for (anywhere, from) in (0..4).zip(100..) {
                assert!(!workers.present(anywhere, elsewhere(from), &spent).is_success(), "a spent ticket");
            }
        }
        assert_eq!(workers.allocations().iter().sum::<usize>(), 1);
        assert_eq!(workers.held(), 1);
    }
}

#[test]
fn a_retransmitted_refresh_gets_the_same_response_on_any_worker() {
    let (mut workers, _, ticket) = Workers::mobile(2);
    let new = elsewhere(1);
    let bytes = workers.signed(1, new, Ask::present(&ticket));
    let first = workers.request(1, new, &bytes);
    assert!(matches!(&first, Outcome::Reply(bytes) if Reply(bytes.clone()).is_success()));
    workers.sleep(10);
    assert_eq!(workers.request(1, new, &bytes), first);
    workers.speaks(1, new);
    assert_eq!(workers.allocations(), [0, 1]);
    workers.sleep(29);
    assert_eq!(workers.request(1, new, &bytes), first, "same response after the move");
    workers.sleep(1);
    assert!(
        !matches!(workers.request(1, new, &bytes), Outcome::Reply(bytes) if Reply(bytes.clone()).is_success())
    );
}

/// Section 3.2.2: only data from the new 5-tuple ends the old one.
#[test]
fn the_owner_answers_requests_from_the_new_address() {
    let (mut workers, relay, ticket) = Workers::mobile(2);
    let (old, new) = (client(40_000), elsewhere(1));
    workers.present(1, new, &ticket).success();
    for ask in [Ask::permit("198.41.0.9:0"), Ask::refresh(700), Ask::bind(0x4001, "198.41.0.9:7")] {
        let bytes = workers.signed(1, new, ask);
        workers.request(1, new, &bytes).reply().success();
        assert_eq!(reaches(&mut workers.0[0], relay), old);
        assert!(workers.speaks(0, old).0.goes_to_peer());
        assert_eq!(workers.allocations(), [1, 0]);
    }
    assert_eq!(workers.present(1, elsewhere(2), &ticket).code(), Some(400));
    assert_eq!(workers.present(0, client(40_002), &ticket).code(), Some(400));
    let (outcome, moved) = workers.speaks(1, new);
    assert!(outcome.goes_to_peer(), "{outcome:?}");
    assert_eq!(reaches(&mut workers.0[1], moved.unwrap()), new);
}

#[test]
fn a_request_during_a_move_is_dropped_and_retransmitted() {
    let (mut workers, _, ticket) = Workers::mobile(2);
    let new = elsewhere(1);
    workers.present(1, new, &ticket).success();
    let bytes = workers.signed(1, new, Ask::permit("198.41.0.9:0"));
    workers.0[1].client = new;
    let Outcome::Move(request) = workers.0[1].feed(&channel_data(0x4000, b"x")) else { panic!() };
    assert_eq!(workers.request(1, new, &bytes), Outcome::Drop(DropReason::Moving));
    assert_eq!(workers.speaks(1, new).0, Outcome::Drop(DropReason::Moving));
    assert!(workers.carry_out(&request).is_some());
    workers.request(1, new, &bytes).reply().success();
}

#[test]
fn a_ticket_from_the_pending_address_is_400_on_every_worker() {
    for at in 0..3 {
        let (mut workers, _, ticket) = Workers::mobile(3);
        let next = workers.present(at, elsewhere(1), &ticket).success().ticket().unwrap();
        assert_eq!(workers.present(at, elsewhere(1), &next).code(), Some(400));
        assert!(workers.speaks(at, elsewhere(1)).0.goes_to_peer());
    }
}

/// Same request and address, another port: a neighbour behind the client's NAT can do this without the key.
#[test]
fn a_copy_of_a_refresh_is_refused_on_every_worker() {
    let (mut workers, relay, ticket) = Workers::mobile(3);
    let new = elsewhere(1);
    let bytes = workers.signed(1, new, Ask::present(&ticket));
    let first = workers.request(1, new, &bytes);
    for at in 0..3 {
        assert_eq!(workers.request(at, elsewhere(10), &bytes).reply().code(), Some(438), "worker {at}");
        assert_eq!(workers.speaks(at, elsewhere(10)).0, Outcome::Drop(DropReason::NoAllocation));
    }
    assert_eq!(workers.request(1, new, &bytes), first, "retransmission by the client itself");
    assert_eq!(reaches(&mut workers.0[0], relay), client(40_000));
    assert!(workers.speaks(1, new).0.goes_to_peer());
}

#[test]
fn a_ticket_from_an_occupied_5_tuple_gets_the_owners_response() {
    let (mut workers, _, ticket) = Workers::mobile(2);
    let taken = elsewhere(1);
    workers.0[1].client = taken;
    workers.0[1].allocated();
    assert_eq!(workers.present(1, taken, &ticket).code(), Some(437));
    let bob = workers.0[1].credentials("bob", Scheme::Md5);
    let bytes = Ask::present(&ticket).signed(&bob).bytes();
    assert_eq!(workers.request(1, taken, &bytes).reply().code(), Some(441));
    let next = workers.present(1, elsewhere(2), &ticket).success().ticket().unwrap();
    assert!(workers.speaks(1, elsewhere(2)).0.goes_to_peer());
    let last = workers.present(0, client(40_001), &next).success().ticket().unwrap();
    assert!(workers.speaks(0, client(40_001)).0.goes_to_peer());
    assert_eq!(workers.present(1, taken, &next).code(), Some(400), "a spent one");
    workers.present(1, elsewhere(3), &last).success();
}

#[test]
fn a_client_may_return_after_closing_its_new_connection() {
    for at in [0, 1] {
        let (mut workers, _, ticket) = Workers::mobile(2);
        let dtls = Client { listener: ListenerId(3), ..elsewhere(1) };
        let next = workers.present(at, dtls, &ticket).success().ticket().unwrap();
        let world = &mut workers.0[at];
        assert!(!world.server.disconnected(world.now, &dtls));
        let left = world.all_effects().into_iter().find_map(|effect| match effect {
            Effect::MoveOver { worker, pending_move } => Some((worker, pending_move)),
            _ => None,
        });
        assert_eq!(left.is_some(), at == 1);
        if let Some((owner, pending_move)) = left {
            assert_eq!(owner, 0);
            workers.0[0].server.move_over(1, &pending_move);
        }
        workers.present(at, dtls, &next).success();
        assert!(workers.speaks(at, dtls).0.goes_to_peer());
    }
}

#[test]
fn an_allocation_is_exported_only_to_its_pending_address() {
    let (mut workers, _, ticket) = Workers::mobile(3);
    workers.present(1, elsewhere(1), &ticket).success();
    let data = channel_data(0x4000, b"x");
    workers.0[1].client = elsewhere(1);
    let Outcome::Move(request) = workers.0[1].feed(&data) else { panic!() };
    let wrong = |change: fn(&mut MoveRequest)| {
        let mut wrong = request;
        change(&mut wrong);
        wrong
    };
    assert!(workers.export(&wrong(|request| request.to = 2)).is_none());
    assert!(workers.export(&wrong(|request| request.client = elsewhere(2))).is_none());
    assert!(workers.export(&wrong(|request| request.owner = 1)).is_none());
    let moved = workers.export(&request).expect("a pending move");
    assert_eq!(moved.client(), elsewhere(1));
    assert!(workers.export(&request).is_none(), "once");
    assert_eq!((workers.allocations(), workers.held()), (vec![0, 0, 0], 1));
    let here = &mut workers.0[1];
    assert!(here.server.import(here.now, moved).is_ok());
    assert_eq!(workers.counted(MobilityEvent::Exported), workers.counted(MobilityEvent::Imported));
}

#[test]
fn an_ended_allocation_is_not_exported() {
    let (mut workers, relay, ticket) = Workers::mobile(2);
    workers.present(1, elsewhere(1), &ticket).success();
    let owner = &mut workers.0[0];
    owner.server.close_one(owner.now, relay.allocation, ClosedReason::Administrator);
    assert_eq!(workers.speaks(1, elsewhere(1)), (Outcome::Drop(DropReason::NoAllocation), None));
    assert_eq!(workers.held(), 0);
    // The ticket is not forwarded in a loop either.
    assert_eq!(workers.present(1, elsewhere(2), &ticket).code(), Some(437));
    assert_eq!(workers.present(0, elsewhere(2), &ticket).code(), Some(437));
}

#[test]
fn a_client_that_leaves_before_sending_still_reaches_the_owner() {
    let (mut workers, relay, ticket) = Workers::mobile(2);
    let dtls = Client { listener: ListenerId(3), ..elsewhere(1) };
    let next = workers.present(1, dtls, &ticket).success().ticket().unwrap();
    let there = &mut workers.0[1];
    assert!(!there.server.disconnected(there.now, &dtls));
    assert_eq!(workers.speaks(1, dtls).0, Outcome::Drop(DropReason::NoAllocation));
    let last = workers.present(1, elsewhere(2), &next).success().ticket().unwrap();
    workers.present(1, elsewhere(3), &last).success();
    assert_eq!(reaches(&mut workers.0[0], relay), client(40_000));
    assert!(workers.speaks(1, elsewhere(3)).0.goes_to_peer());
}

#[test]
fn a_pending_move_of_an_expired_allocation_is_dropped() {
    let (mut workers, _, ticket) = Workers::mobile(2);
    workers.present(1, elsewhere(1), &ticket).success();
    workers.sleep(600);
    assert_eq!(workers.speaks(1, elsewhere(1)), (Outcome::Drop(DropReason::NoAllocation), None));
    let alice = workers.signed(1, elsewhere(1), Ask::allocate());
    assert!(matches!(workers.request(1, elsewhere(1), &alice), Outcome::Open(_)));
}

#[test]
fn an_address_with_a_pending_move_cannot_allocate() {
    let (mut workers, relay, ticket) = Workers::mobile(2);
    workers.present(1, elsewhere(1), &ticket).success();
    let alice = workers.signed(1, elsewhere(1), Ask::allocate());
    assert_eq!(workers.request(1, elsewhere(1), &alice).reply().code(), Some(437));
    assert_eq!(reaches(&mut workers.0[0], relay), client(40_000));
    assert_eq!((workers.allocations(), workers.held()), (vec![1, 0], 1));
}

#[test]
fn an_address_with_a_cancelled_move_can_allocate() {
    let (mut workers, relay, ticket) = Workers::mobile(2);
    workers.present(1, elsewhere(1), &ticket).success();
    let owner = &mut workers.0[0];
    owner.server.close_one(owner.now, relay.allocation, ClosedReason::Deleted);
    let alice = workers.signed(1, elsewhere(1), Ask::allocate());
    assert!(matches!(workers.request(1, elsewhere(1), &alice), Outcome::Open(_)));
}

#[test]
fn lost_messages_between_workers_are_repeated() {
    let (mut workers, relay, ticket) = Workers::mobile(2);
    let new = elsewhere(1);
    let bytes = workers.signed(1, new, Ask::present(&ticket));
    let owner = &mut workers.0[0];
    let (verdict, pending_move) = owner.forwarded(1, new, &bytes);
    let lost = verdict;
    assert!(pending_move.is_some());
    assert_eq!(workers.speaks(1, new).0, Outcome::Drop(DropReason::NoAllocation));
    workers.sleep(2);
    assert_eq!(workers.request(1, new, &bytes), lost);
    assert_eq!(reaches(&mut workers.0[0], relay), client(40_000));
    let (outcome, moved) = workers.speaks(1, new);
    assert!(outcome.goes_to_peer(), "{outcome:?}");
    assert_eq!(reaches(&mut workers.0[1], moved.unwrap()), new);
    let here = &mut workers.0[1];
    let (_, pending_move) = here.forwarded(0, new, &bytes);
    assert!(pending_move.is_none());
}

#[test]
fn a_repeated_announcement_does_not_extend_a_fetch() {
    let (mut workers, _, ticket) = Workers::mobile(2);
    let new = elsewhere(1);
    let bytes = workers.signed(1, new, Ask::present(&ticket));
    workers.request(1, new, &bytes);
    workers.0[1].client = new;
    assert!(matches!(workers.0[1].feed(&channel_data(0x4000, b"x")), Outcome::Move(_)));
    workers.request(1, new, &bytes);
    assert_eq!(
        workers.0[1].feed(&channel_data(0x4000, b"x")),
        Outcome::Drop(DropReason::Moving),
        "fetched once"
    );
}

#[test]
fn a_ticket_finds_its_allocation_without_a_pending_move() {
    let (mut workers, relay, ticket) = Workers::mobile(4);
    let next = workers.present(1, elsewhere(1), &ticket).success().ticket().unwrap();
    // The client stays at its first address for longer than a lifetime, and then moves again.
    for _ in 0..3 {
        workers.sleep(300);
        for ask in [Ask::refresh(600), Ask::bind(0x4000, PEER)] {
            let bytes = workers.signed(0, client(40_000), ask);
            assert!(workers.request(0, client(40_000), &bytes).reply().is_success());
        }
    }
    // The responses are lost, so every attempt uses the same ticket.
    for (at, port) in [(1, 6), (2, 2), (3, 3), (1, 4), (0, 5)] {
        workers.present(at, elsewhere(port), &next).success();
    }
    assert_eq!(workers.allocations(), [1, 0, 0, 0]);
    let data = channel_data(0x4000, b"x");
    workers.0[0].client = elsewhere(5);
    assert!(workers.0[0].feed(&data).goes_to_peer());
    assert_eq!(reaches(&mut workers.0[0], relay), elsewhere(5));
}

#[test]
fn the_next_datagram_retries_a_failed_fetch() {
    let (mut workers, _, ticket) = Workers::mobile(2);
    let new = elsewhere(1);
    workers.present(1, new, &ticket).success();
    workers.0[1].client = new;
    let data = channel_data(0x4000, b"x");
    for _ in 0..3 {
        assert!(matches!(workers.0[1].feed(&data), Outcome::Move(_)));
        assert_eq!(workers.0[1].feed(&data), Outcome::Drop(DropReason::Moving));
        workers.0[1].server.not_asked(&new);
    }
    assert!(workers.speaks(1, new).0.goes_to_peer());
}

#[test]
fn a_displaced_pending_move_returns_with_its_ticket() {
    let (mut workers, _, ticket) = Workers::mobile(3);
    let new = elsewhere(1);
    let next = workers.present(1, new, &ticket).success().ticket().unwrap();
    // Another user fills the table of that worker, one allocation at a time.
    for n in 0..8192 {
        // Each allocation gets a fresh nonce: if many were made in one second, some would have to retry.
        workers.0.iter_mut().for_each(|world| world.now.unix += 1);
        let owner = &mut workers.0[2];
        owner.client = client(n + 1);
        let reply = owner.ask_as("bob", Ask::allocate().raw(TICKET, &[])).success();
        let there = Client { address: address(&format!("198.18.7.7:{}", n + 1)), ..client(1) };
        owner.client = there;
        let bob = owner.credentials("bob", Scheme::Md5);
        let bytes = Ask::present(&reply.ticket().unwrap()).signed(&bob).bytes();
        let (_, pending_move) = owner.forwarded(1, there, &bytes);
        owner.server.close_all(owner.now, ClosedReason::Deleted);
        owner.effects();
        workers.expect(1, pending_move);
    }
    assert_eq!(workers.speaks(1, new).0, Outcome::Drop(DropReason::NoAllocation));
    assert_eq!(workers.present(1, new, &next).code(), Some(400));
    assert!(workers.speaks(1, new).0.goes_to_peer());
}

/// The client made an allocation at its new address while the owner was answering its Refresh.
fn refused(workers: &mut Workers, ticket: &[u8]) -> MoveRequest {
    let new = elsewhere(1);
    let bytes = workers.signed(1, new, Ask::present(ticket));
    let Outcome::Forward { worker: 0, .. } = workers.0[1].feed(&bytes) else { panic!() };
    workers.0[1].allocated();
    let owner = &mut workers.0[0];
    let (verdict, pending_move) = owner.forwarded(1, new, &bytes);
    assert!(matches!(verdict, Outcome::Reply(_)));
    workers.expect(1, pending_move);
    // Usually the client's other allocation ends first; here the owner acts first.
    let owner = &mut workers.0[0];
    owner.server.disconnected(owner.now, &client(40_000));
    let effects = owner.effects();
    let Some(Effect::Move(request)) = effects.last() else { panic!("{effects:?}") };
    *request
}

#[test]
fn a_refused_import_returns_the_allocation() {
    let (mut workers, _, ticket) = Workers::mobile(2);
    let request = refused(&mut workers, &ticket);
    assert!(workers.carry_out(&request).is_none());
    assert_eq!((workers.allocations(), workers.held()), (vec![1, 1], 2));
    workers.sleep(600);
    assert_eq!((workers.allocations(), workers.held()), (vec![0, 0], 0));
}

#[test]
fn a_returned_allocation_continues_at_its_old_address() {
    let (mut workers, _, ticket) = Workers::mobile(2);
    let next = workers.present(1, elsewhere(1), &ticket).success().ticket().unwrap();
    workers.0[1].client = elsewhere(1);
    let Outcome::Move(request) = workers.0[1].feed(&channel_data(0x4000, b"x")) else { panic!() };
    let moved = workers.export(&request).unwrap();
    let owner = &mut workers.0[0];
    let allocation = owner.server.take_back(owner.now, moved).expect("the 5-tuple is free");
    let relay = RelayId { allocation, family: Family::V4 };
    workers.0[1].server.not_moved(&elsewhere(1));
    assert_eq!(reaches(&mut workers.0[0], relay), client(40_000));
    assert!(workers.speaks(0, client(40_000)).0.goes_to_peer());
    assert_eq!(workers.speaks(1, elsewhere(1)).0, Outcome::Drop(DropReason::NoAllocation));
    // The allocation's ticket is valid, even though it was issued for the worker that refused the allocation.
    workers.present(1, elsewhere(2), &next).success();
    assert_eq!(workers.held(), 1);
}

#[test]
fn a_returned_allocation_ends_if_its_address_is_taken() {
    let (mut workers, relay, ticket) = Workers::mobile(2);
    workers.present(1, elsewhere(1), &ticket).success();
    workers.0[1].client = elsewhere(1);
    let Outcome::Move(request) = workers.0[1].feed(&channel_data(0x4000, b"x")) else { panic!() };
    let moved = workers.export(&request).unwrap();
    let owner = &mut workers.0[0];
    owner.client = client(40_000);
    let (_, taken) = owner.allocated();
    assert!(owner.server.take_back(owner.now, moved).is_none());
    let other = owner.server.close_one(owner.now, relay.allocation, ClosedReason::Administrator);
    assert!(!other, "the old ID is unused");
    let effects = owner.effects();
    let [Effect::Closed { allocation, .. }] = &effects[..] else { panic!("{effects:?}") };
    // The other allocation now has the old slot, so the runtime must not find it under this number.
    assert_ne!(allocation.index, taken.allocation.index);
    assert_eq!(taken.allocation.index, relay.allocation.index);
    assert_eq!((workers.allocations(), workers.held()), (vec![1, 0], 1));
}

/// A reload reaches the workers one after the other, possibly while an allocation is in transit.
#[test]
fn bindings_refused_during_a_move_do_not_arrive() {
    let denying = || {
        let deny = vec!["198.41.0.0/24".parse().unwrap()];
        let peers = PeerRules { deny, ..PeerRules::default() };
        Arc::new(ServerConfig { peers, ..streams() })
    };
    for is_taken in [true, false] {
        let (mut workers, _, ticket) = Workers::mobile(2);
        workers.present(1, elsewhere(1), &ticket).success();
        workers.0[1].client = elsewhere(1);
        let data = channel_data(0x4000, b"x");
        let Outcome::Move(request) = workers.0[1].feed(&data) else { panic!() };
        let moved = workers.export(&request).unwrap();
        for world in &mut workers.0 {
            world.server.reconfigure(world.now, denying());
            world.effects();
        }
        let (at, allocation) = if is_taken {
            let here = &mut workers.0[1];
            (1, here.server.import(here.now, moved).expect("the 5-tuple is free"))
        } else {
            let owner = &mut workers.0[0];
            (0, owner.server.take_back(owner.now, moved).expect("the 5-tuple is free"))
        };
        let effects = workers.0[at].all_effects();
        assert!(effects.iter().any(|it| matches!(it, Effect::Unbound { .. })), "{effects:?}");
        let relay = RelayId { allocation, family: Family::V4 };
        let back = workers.0[at].peer_sends(relay, PEER, b"from the peer");
        assert_eq!(back, Outcome::Drop(DropReason::NoPermission));
        workers.0[at].client = if is_taken { elsewhere(1) } else { client(40_000) };
        assert_eq!(workers.0[at].feed(&data), Outcome::Drop(DropReason::UnboundChannel));
    }
}

#[test]
fn an_owner_exports_without_a_request_after_its_client_disconnected() {
    let mut workers = Workers::new(2);
    let owner = &mut workers.0[0];
    owner.client = stream(41_000);
    let alice = owner.credentials("alice", Scheme::Md5);
    let reply = owner.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success();
    owner.ask(&Ask::permit(PEER).signed(&alice)).success();
    owner.effects();
    let ticket = reply.ticket().unwrap();
    // The Refresh comes before the end of the stream in the first case, and after it in the second.
    let next = workers.present(1, elsewhere(1), &ticket).success().ticket().unwrap();
    let owner = &mut workers.0[0];
    owner.server.disconnected(owner.now, &stream(41_000));
    let effects = owner.effects();
    let [Effect::Move(request)] = effects[..] else { panic!("{effects:?}") };
    let relay = workers.carry_out(&request).expect("a pending move");
    assert_eq!(reaches(&mut workers.0[1], relay), elsewhere(1));

    let dtls = Client { listener: ListenerId(3), ..elsewhere(1) };
    let next = workers.present(0, dtls, &next).success().ticket().unwrap();
    assert!(matches!(workers.speaks(0, dtls), (Outcome::Drop(DropReason::UnboundChannel), Some(_))));
    let owner = &mut workers.0[0];
    owner.server.disconnected(owner.now, &dtls);
    owner.effects();
    workers.present(1, elsewhere(2), &next).success();
    let effects = workers.0[0].effects();
    let [Effect::Move(request)] = effects[..] else { panic!("{effects:?}") };
    let relay = workers.carry_out(&request).expect("a pending move");
    assert_eq!(reaches(&mut workers.0[1], relay), elsewhere(2));
    assert_eq!((workers.allocations(), workers.held()), (vec![0, 1], 1));
}

#[test]
fn a_stream_is_passed_to_the_owner() {
    let (mut workers, relay, ticket) = Workers::mobile(3);
    let new = stream(41_000);
    let bytes = workers.signed(2, new, Ask::present(&ticket));
    assert_eq!(workers.0[2].feed(&bytes), Outcome::HandOver { worker: 0 });
    let owner = &mut workers.0[0];
    let outcome = owner.handed_over(new, &bytes);
    assert!(outcome.reply().is_success());
    assert!(workers.speaks(0, new).0.goes_to_peer());
    assert_eq!(reaches(&mut workers.0[0], relay), new);
    // A stream with the ticket of an ended allocation stays where it is.
    let spent = workers.signed(1, stream(5), Ask::present(&ticket));
    let owner = &mut workers.0[0];
    owner.server.close_all(owner.now, ClosedReason::Shutdown);
    workers.0[1].client = stream(5);
    let outcome = workers.0[1].feed(&spent);
    assert!(matches!(outcome, Outcome::Reply(bytes) if Reply(bytes.clone()).code() == Some(437)));
}

#[test]
fn the_owner_refuses_other_users_and_sees_only_authenticated_requests() {
    let (mut workers, relay, ticket) = Workers::mobile(2);
    let new = elsewhere(1);
    let away = &mut workers.0[1];
    away.client = new;
    assert_eq!(away.ask(&Ask::present(&ticket)).code(), Some(401));
    let mut wrong = away.credentials("alice", Scheme::Md5);
    wrong.password = "wrong".to_owned();
    assert_eq!(away.ask(&Ask::present(&ticket).signed(&wrong)).code(), Some(401));
    let bob = away.credentials("bob", Scheme::Md5);
    assert_eq!(away.ask(&Ask::present(&[7; 32]).signed(&bob)).code(), Some(400));
    let bytes = Ask::present(&ticket).signed(&bob).bytes();
    assert!(
        matches!(workers.request(1, new, &bytes), Outcome::Reply(bytes) if Reply(bytes.clone()).code() == Some(441))
    );
    assert_eq!(workers.0[0].server.stats().credentials_refused[4], 1);
    assert_eq!(reaches(&mut workers.0[0], relay), client(40_000));
    assert_eq!(workers.speaks(1, new).0, Outcome::Drop(DropReason::NoAllocation));
}

#[test]
fn only_one_of_two_allocations_moves_to_an_address() {
    let (mut workers, _, ticket) = Workers::mobile(2);
    let (new, old) = (elsewhere(1), client(40_001));
    let owner = &mut workers.0[1];
    owner.client = old;
    let second = owner.ask_as("alice", Ask::allocate().raw(TICKET, &[])).success().ticket().unwrap();
    // Worker 1 does not learn of the first move, so that the second may be pending too.
    let bytes = workers.signed(1, new, Ask::present(&ticket));
    workers.request_unannounced(1, new, &bytes);
    let second = workers.present(1, new, &second).success().ticket().unwrap();
    // The first allocation moves, because its old connection has closed.
    let world = &mut workers.0[0];
    world.server.disconnected(world.now, &client(40_000));
    let wanted = world.all_effects().into_iter().find_map(|effect| match effect {
        Effect::Move(request) => Some(request),
        _ => None,
    });
    let moved = workers.carry_out(&wanted.expect("an immediate move")).expect("a completed move");
    // The second has nowhere to go when its old connection closes, and waits.
    let world = &mut workers.0[1];
    world.all_effects();
    assert!(world.server.disconnected(world.now, &old));
    assert!(!world.all_effects().iter().any(|effect| matches!(effect, Effect::Moved { .. })));
    let (outcome, _) = workers.speaks(1, new);
    assert!(matches!(outcome, Outcome::ToPeer { relay, .. } if relay == moved), "{outcome:?}");
    assert_eq!(workers.allocations(), [0, 2]);
    workers.present(1, elsewhere(2), &second).success();
}
