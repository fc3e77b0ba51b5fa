//! Fuzz target: mobility tickets (RFC 8016) on three workers, while allocations move and clients leave.

use turnpike_testkit::fuzz::{self, Input};

use crate::{common::*, server_mobility_workers::Workers};

const WORKERS: u16 = 3;
const USERS: [&str; 2] = ["alice", "bob"];
const MOST_EVENTS: usize = 60;
const MOST_EACH: usize = 3;

struct Given {
    user: &'static str,
    ticket: Vec<u8>,
}

struct Run {
    workers: Workers,
    given: Vec<Given>,
    made: [usize; 2],
}

#[test]
fn tickets() {
    fuzz::target("tickets", seeds, |bytes| {
        let mut input = Input::new(bytes);
        let mut run = Run { workers: Workers::new(WORKERS), given: Vec::new(), made: [0; 2] };
        for _ in 0..MOST_EVENTS {
            if input.is_empty() {
                break;
            }
            run.event(&mut input);
            run.moves();
            let owned = run.workers.allocations().iter().sum::<usize>();
            assert_eq!(run.workers.held(), owned, "each allocation has one owner and is counted once");
            assert!(owned <= run.made.iter().sum());
        }
        run.workers.sleep(3601);
        run.moves();
        assert_eq!((run.workers.allocations(), run.workers.held()), (vec![0; WORKERS.into()], 0));
    });
}

impl Run {
    fn event(&mut self, input: &mut Input<'_>) {
        let at = usize::from(input.byte()) % usize::from(WORKERS);
        let from = Self::client(at, input.byte());
        match input.below(7) {
            0 => self.make(at, from, usize::from(input.below(2))),
            1 | 2 => self.present(at, from, input),
            3 => _ = self.workers.speaks(at, from),
            4 => self.workers.sleep(u64::from(input.byte()) * 2),
            5 => {
                let world = &mut self.workers.0[at];
                world.server.disconnected(world.now, &from);
            }
            _ => {
                let bytes = self.workers.signed(at, from, Ask::permit(PEER));
                self.workers.request(at, from, &bytes);
            }
        }
    }

    /// A 5-tuple belongs to one worker. Some clients use DTLS, where the end of a connection is known.
    fn client(at: usize, number: u8) -> Client {
        let port = 100 * u16::try_from(at).expect("few") + u16::from(number % 4);
        Client { listener: ListenerId(if number & 4 == 0 { 0 } else { 3 }), ..elsewhere(port) }
    }

    fn make(&mut self, at: usize, from: Client, user: usize) {
        if self.made[user] == MOST_EACH {
            return;
        }
        let world = &mut self.workers.0[at];
        world.client = from;
        let who = world.credentials(USERS[user], Scheme::Md5);
        let bytes = Ask::allocate().raw(TICKET, &[]).signed(&who).bytes();
        let outcome = self.workers.request(at, from, &bytes);
        let world = &mut self.workers.0[at];
        world.client = from;
        match outcome {
            Outcome::Open(request) => {
                let reply = world.open(&request).success();
                let ticket = reply.ticket().expect("a ticket was requested");
                self.made[user] += 1;
                self.give(USERS[user], ticket);
                let world = &mut self.workers.0[at];
                world.client = from;
                world.ask(&Ask::bind(0x4000, PEER).signed(&who)).success();
            }
            Outcome::Reply(reply) => {
                assert!(!Reply(reply).is_success(), "answered before a socket opened");
            }
            Outcome::Drop(_) => {}
            other => panic!("{other:?}"),
        }
    }

    fn present(&mut self, at: usize, from: Client, input: &mut Input<'_>) {
        let user = *input.choice(&USERS);
        let (number, how, place, mask) = (input.byte(), input.below(6), input.byte(), input.byte());
        let known = self.given.iter().rev().nth(usize::from(number));
        let mut ticket = known.map_or_else(|| vec![7; 32], |given| given.ticket.clone());
        let right = known.is_some_and(|given| given.user == user) && !matches!(how, 0..=2);
        match how {
            0 => ticket[usize::from(place) % 32] ^= mask | 1,
            1 => ticket.truncate(place.into()),
            2 => ticket = input.bytes().to_vec(),
            _ => {}
        }
        let is_ours = self.given.iter().any(|given| given.user == user && given.ticket == ticket);
        let world = &mut self.workers.0[at];
        world.client = from;
        let who = world.credentials(user, Scheme::Sha256);
        let bytes = Ask::present(&ticket).signed(&who).bytes();
        let (outcome, pending_move) = self.workers.request_unannounced(at, from, &bytes);
        // The message that announces the move to the other worker may be lost.
        if mask & 0x80 == 0 {
            self.workers.expect(at, pending_move);
        }
        match outcome {
            Outcome::Reply(reply) => {
                let reply = Reply(reply);
                if reply.is_success()
                    && let Some(next) = reply.ticket()
                {
                    assert!(right || is_ours, "this ticket was never issued to {user}");
                    self.give(user, next);
                }
            }
            Outcome::Drop(_) => {}
            other => panic!("{other:?}"),
        }
    }

    /// Tickets must be unique, and contain no zero bytes, so that coturn's client can store them.
    fn give(&mut self, user: &'static str, ticket: Vec<u8>) {
        assert!(ticket.len() == 32 && !ticket.contains(&0), "{ticket:02x?}");
        assert!(self.given.iter().all(|given| given.ticket != ticket));
        self.given.push(Given { user, ticket });
    }

    fn moves(&mut self) {
        for _ in 0..=WORKERS {
            for at in 0..usize::from(WORKERS) {
                for effect in self.workers.0[at].effects() {
                    match effect {
                        Effect::Move(request) => _ = self.workers.carry_out(&request),
                        Effect::MoveOver { worker, pending_move } => {
                            let from = u16::try_from(at).expect("few");
                            self.workers.0[usize::from(worker)].server.move_over(from, &pending_move);
                        }
                        _ => {}
                    }
                }
            }
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    // Worker, client, event and its arguments.
    let made = [0, 1, 0, 0];
    let presented = |at, client, how| [at, client, 1, 0, 0, how, 3, 1];
    let speaks = |at, client| [at, client, 3];
    let walk =
        [&made[..], &presented(1, 1, 3), &speaks(1, 1), &presented(2, 2, 3), &speaks(2, 2), &speaks(0, 1)]
            .concat();
    let gone =
        [&made[..], &presented(1, 5, 3), &[1, 5, 5], &presented(1, 1, 4), &[0, 1, 5], &speaks(1, 1)].concat();
    let wrong =
        [&made[..], &presented(1, 1, 0), &presented(2, 1, 1), &[1, 1, 1, 1, 0, 3, 0, 0], &speaks(1, 1)]
            .concat();
    let old =
        [&walk[..], &[0, 2, 1, 0, 1, 3, 0, 0], &[0, 2, 1, 0, 2, 3, 0, 0x80], &[0, 0, 4, 200], &speaks(0, 2)]
            .concat();
    let permitted =
        [&made[..], &presented(2, 3, 3), &[2, 3, 6], &[2, 3, 0, 0], &[0, 0, 4, 255], &[0, 0, 4, 60]].concat();
    vec![walk, gone, wrong, old, permitted]
}
