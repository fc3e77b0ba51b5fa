//! The number of workers changes no answer: the same requests, data and losses of connections are given to servers with one, two and four workers,
//! whose clients are placed on chosen workers, and every client sees the same.

use std::collections::HashMap;

use crate::common::*;
use proptest::prelude::*;
use turnpike_turn::server::{Client, Effect, ListenerId, MoveRequest, RelayId};

/// 5-tuples: two addresses; UDP, TCP and DTLS.
const CLIENTS: u16 = 8;

fn at(number: u16) -> Client {
    let ip = if number.is_multiple_of(2) { "192.0.2.7" } else { "198.18.0.1" };
    let listener = ListenerId([0, 0, 0, 0, 1, 1, 3, 3][usize::from(number)]);
    Client { listener, address: address(&format!("{ip}:{}", 40_000 + number)), ..client(1) }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate {
        from: u16,
        bob: bool,
        mobile: bool,
    },
    /// A Refresh with a ticket; 0 is the one that was given out last.
    Present {
        from: u16,
        bob: bool,
        age: usize,
        ends: bool,
    },
    Permit {
        from: u16,
        bob: bool,
    },
    Bind {
        from: u16,
        bob: bool,
    },
    Refresh {
        from: u16,
        bob: bool,
        ends: bool,
    },
    /// The client's last request again.
    Again {
        from: u16,
    },
    /// The exact bytes of an earlier request, by any client.
    Copy {
        from: u16,
        age: usize,
    },
    ChannelData {
        from: u16,
    },
    Send {
        from: u16,
    },
    /// A peer sends to every relayed transport address.
    Peer,
    /// The client's connection is closed.
    Gone {
        from: u16,
    },
    Sleep(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let from = || 0..CLIENTS;
    // Of ten requests one is another user's.
    let bob = || prop::bool::weighted(0.1);
    let often = || prop::bool::weighted(0.8);
    let rarely = || prop::bool::weighted(0.1);
    prop_oneof![
        3 => (from(), bob(), often()).prop_map(|(from, bob, mobile)| Step::Allocate { from, bob, mobile }),
        8 => (from(), bob(), prop_oneof![4 => Just(0), 1 => 1..4_usize], rarely())
            .prop_map(|(from, bob, age, ends)| Step::Present { from, bob, age, ends }),
        3 => (from(), bob()).prop_map(|(from, bob)| Step::Permit { from, bob }),
        3 => (from(), bob()).prop_map(|(from, bob)| Step::Bind { from, bob }),
        3 => (from(), bob(), rarely()).prop_map(|(from, bob, ends)| Step::Refresh { from, bob, ends }),
        2 => from().prop_map(|from| Step::Again { from }),
        2 => (from(), 0..6_usize).prop_map(|(from, age)| Step::Copy { from, age }),
        4 => from().prop_map(|from| Step::ChannelData { from }),
        2 => from().prop_map(|from| Step::Send { from }),
        4 => Just(Step::Peer),
        2 => from().prop_map(|from| Step::Gone { from }),
        1 => (1..200_u64).prop_map(Step::Sleep),
    ]
}

/// A server, and what its clients know.
struct Service {
    workers: Vec<World>,
    /// The worker that the kernel gives each 5-tuple.
    placed: Vec<usize>,
    /// The same of streams, which may have been handed over since.
    streams: HashMap<Client, usize>,
    /// Relay sockets by the order in which they were opened.
    relays: Vec<(usize, RelayId)>,
    tickets: Vec<Vec<u8>>,
    sent: Vec<Vec<u8>>,
    last: HashMap<Client, Vec<u8>>,
}

impl Service {
    fn new(workers: u16, placed: &[usize]) -> Self {
        let placed = placed.iter().map(|worker| worker % usize::from(workers)).collect();
        let (streams, relays, tickets, sent, last) = Default::default();
        Self {
            workers: World::workers(&crate::common::streams(), workers),
            placed,
            streams,
            relays,
            tickets,
            sent,
            last,
        }
    }

    fn worker(&self, from: &Client) -> usize {
        let number = (0..CLIENTS).find(|number| at(*number) == *from).expect("one of them");
        self.streams.get(from).copied().unwrap_or(self.placed[usize::from(number)])
    }

    /// What the client sees.
    fn step(&mut self, step: &Step) -> String {
        let user = |bob: bool| if bob { "bob" } else { "alice" };
        let lifetime = |ends: bool| if ends { 0 } else { 600 };
        let seen = match *step {
            Step::Allocate { from, bob, mobile } => {
                let ask = Ask::allocate();
                self.ask(at(from), user(bob), if mobile { ask.raw(TICKET, &[]) } else { ask })
            }
            Step::Present { from, bob, age, ends } => match self.tickets.iter().rev().nth(age).cloned() {
                Some(ticket) => {
                    self.ask(at(from), user(bob), Ask::refresh(lifetime(ends)).raw(TICKET, &ticket))
                }
                None => String::new(),
            },
            Step::Permit { from, bob } => self.ask(at(from), user(bob), Ask::permit(PEER)),
            Step::Bind { from, bob } => self.ask(at(from), user(bob), Ask::bind(0x4000, PEER)),
            Step::Refresh { from, bob, ends } => self.ask(at(from), user(bob), Ask::refresh(lifetime(ends))),
            Step::Again { from } => match self.last.get(&at(from)).cloned() {
                Some(bytes) => self.request(at(from), &bytes),
                None => String::new(),
            },
            Step::Copy { from, age } => match self.sent.iter().rev().nth(age).cloned() {
                Some(bytes) => {
                    self.last.remove(&at(from));
                    self.request(at(from), &bytes)
                }
                None => String::new(),
            },
            Step::ChannelData { from } => self.data(at(from), &channel_data(0x4000, b"from the client")),
            Step::Send { from } => self.data(at(from), &Ask::send(PEER, b"from the client")),
            Step::Peer => self.peer_sends(),
            Step::Gone { from } => self.gone(at(from)),
            Step::Sleep(seconds) => {
                self.workers.iter_mut().for_each(|world| world.sleep(seconds));
                String::new()
            }
        };
        self.settle();
        let allocations: usize = self.workers.iter().map(|world| world.server.allocations()).sum();
        let held = self.workers[0].server.gate_mut().held();
        format!("{seen}, {allocations} allocations, {held} held")
    }

    fn ask(&mut self, from: Client, user: &str, ask: Ask) -> String {
        let worker = self.worker(&from);
        let world = &mut self.workers[worker];
        world.client = from;
        let credentials = world.credentials(user, Scheme::Md5);
        let bytes = ask.signed(&credentials).bytes();
        self.sent.push(bytes.clone());
        self.last.insert(from, bytes.clone());
        self.request(from, &bytes)
    }

    /// Carries a request through the server.
    fn request(&mut self, from: Client, bytes: &[u8]) -> String {
        let here = self.worker(&from);
        let via = u16::try_from(here).expect("few workers");
        self.workers[here].client = from;
        let (mut outcome, mut by, mut announced) = (self.workers[here].feed(bytes), here, None);
        for _ in 0..8 {
            match outcome {
                Outcome::Forward { worker, occupied } => {
                    by = usize::from(worker);
                    let (verdict, pending_move) = self.workers[by].forwarded_from(via, occupied, from, bytes);
                    (outcome, announced) = (verdict, pending_move.or(announced));
                }
                Outcome::Decline { via: back } => {
                    assert_eq!(back, via);
                    let owner = u16::try_from(by).expect("few workers");
                    by = here;
                    outcome = self.workers[here].declined(owner, from, bytes);
                }
                Outcome::HandOver { worker } => {
                    by = usize::from(worker);
                    self.streams.insert(from, by);
                    outcome = self.workers[by].handed_over(from, bytes);
                }
                Outcome::Open(request) => {
                    self.workers[by].client = from;
                    outcome = Outcome::Reply(self.workers[by].open(&request).0);
                    let relay = self.workers[by].last_opened();
                    self.relays.push((by, relay));
                }
                Outcome::Reply(bytes) => {
                    if let Some(pending_move) = announced {
                        self.workers[here].server.expect(pending_move);
                    }
                    return self.read(&Reply(bytes));
                }
                Outcome::Drop(_) => return "dropped".to_owned(),
                other => panic!("{other:?}"),
            }
        }
        panic!("a request that goes round in circles")
    }

    /// Code and lifetime of an answer; its ticket is kept.
    fn read(&mut self, reply: &Reply) -> String {
        if !reply.is_success() {
            return format!("error {:?}", reply.code());
        }
        let ticket = reply.ticket();
        let is_new = ticket.as_ref().is_some_and(|ticket| !self.tickets.contains(ticket));
        self.tickets.extend(ticket.filter(|_| is_new));
        format!("success, new ticket: {is_new}")
    }

    fn data(&mut self, from: Client, bytes: &[u8]) -> String {
        self.last.remove(&from);
        let here = self.worker(&from);
        for _ in 0..2 {
            let world = &mut self.workers[here];
            world.client = from;
            match world.feed(bytes) {
                Outcome::ToPeer { .. } => return "to the peer".to_owned(),
                Outcome::Drop(reason) => return format!("dropped: {reason:?}"),
                Outcome::Move(request) => {
                    if !self.carry_out(&request) {
                        self.workers[here].server.not_moved(&from);
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        panic!("data that moves an allocation twice")
    }

    fn carry_out(&mut self, request: &MoveRequest) -> bool {
        let (owner, to) = (usize::from(request.owner), usize::from(request.to));
        let world = &mut self.workers[owner];
        let Some(moved) = world.server.export(world.now, request) else { return false };
        let old = moved.from();
        let world = &mut self.workers[to];
        let allocation = world.server.import(world.now, moved).expect("its 5-tuple has none");
        let is_its = |(at, relay): &&mut (usize, RelayId)| (*at, relay.allocation) == (owner, old);
        let relay = self.relays.iter_mut().find(is_its).expect("it has a socket");
        *relay = (to, RelayId { allocation, ..relay.1 });
        true
    }

    fn peer_sends(&mut self) -> String {
        let mut seen = String::new();
        for (at, relay) in &self.relays {
            seen += &match self.workers[*at].peer_sends(*relay, PEER, b"from the peer") {
                Outcome::ToClient { client, .. } => format!("to {client:?}; "),
                Outcome::Drop(_) => "dropped; ".to_owned(),
                other => panic!("{other:?}"),
            };
        }
        seen
    }

    fn gone(&mut self, from: Client) -> String {
        self.last.remove(&from);
        if from.listener == ListenerId(0) {
            return String::new();
        }
        let worker = self.worker(&from);
        let world = &mut self.workers[worker];
        world.server.disconnected(world.now, &from);
        self.streams.remove(&from);
        "gone".to_owned()
    }

    /// Carries out what no request waits for.
    fn settle(&mut self) {
        loop {
            let mut effects = Vec::new();
            for (at, world) in (0..).zip(&mut self.workers) {
                effects.extend(world.all_effects().into_iter().map(|effect| (at, effect)));
            }
            if effects.is_empty() {
                return;
            }
            for (from, effect) in effects {
                match effect {
                    Effect::Move(request) => assert!(self.carry_out(&request)),
                    Effect::MoveOver { worker, pending_move } => {
                        self.workers[usize::from(worker)].server.move_over(from, &pending_move);
                    }
                    Effect::Deleted { via, deletion } => {
                        let world = &mut self.workers[usize::from(via)];
                        world.server.remember_deletions(world.now, &[deletion]);
                    }
                    _ => {}
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(crate::kept_seeds())]

    #[test]
    fn every_client_sees_the_same_with_one_two_and_four_workers(
        placed in prop::collection::vec(0..4_usize, usize::from(CLIENTS)),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut services = [1, 2, 4].map(|workers| Service::new(workers, &placed));
        for (number, step) in steps.iter().enumerate() {
            let [one, two, four] = services.each_mut().map(|service| service.step(step));
            prop_assert_eq!(&one, &two, "two workers, step {} {:?}", number, step);
            prop_assert_eq!(&one, &four, "four workers, step {} {:?}", number, step);
        }
    }
}
