//! No TURN: clients that send straight to a reflector, or through a forwarder to one (`load udp`).
//!
//! Before any traffic each client gets one datagram back, so that a forwarder has its session, and an address at
//! which nothing reflects is told at once.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use super::{
    Config, Shared,
    engine::{Engine, Sink},
};
use crate::{
    LoadError,
    clock::nanos,
    payload::{HEADER_LEN, Stamp},
};

/// No client sends so many datagrams, so that a late answer is never taken for one of them.
const PROBE: u64 = u64::MAX;
/// A probe without an answer is sent again after this, doubling up to a fifth of a second: socat takes one flow at a time,
/// and what the others sent meanwhile is lost.
const FIRST_RETRY_NS: u64 = 50_000_000;
const LONGEST_RETRY_NS: u64 = 200_000_000;

/// Waits until every client of this thread, of which the first has number `first`, has got a datagram back.
pub(super) fn set_up(
    engine: &mut Engine,
    shared: &Shared<'_>,
    first: usize,
    limit: usize,
) -> Result<(), LoadError> {
    let Config { server, setup_timeout, .. } = *shared.config;
    let clients = engine.endpoints.len();
    let mut answers = Answers { answered: vec![false; clients], ready: 0, first };
    // Clients whose probe is under way: index, when to send again, and the pause after that.
    let mut probing: Vec<(usize, u64, u64)> = Vec::with_capacity(limit);
    let (mut started, mut ready) = (0, 0);
    let mut last_answer = shared.clock.ns();
    while answers.ready < clients {
        shared.check()?;
        let now = shared.clock.ns();
        probing.retain(|(index, ..)| !answers.answered[*index]);
        while started < clients && probing.len() < limit {
            probing.push((started, 0, FIRST_RETRY_NS));
            started += 1;
        }
        for (index, due, pause) in &mut probing {
            if *due <= now {
                send(engine, *index, first);
                *due = now + *pause;
                *pause = (*pause * 2).min(LONGEST_RETRY_NS);
            }
        }
        engine.flush();
        engine.receive(Duration::from_millis(10), &mut answers)?;
        if answers.ready > ready {
            shared.ready_clients.fetch_add(answers.ready - ready, Relaxed);
            ready = answers.ready;
            last_answer = shared.clock.ns();
        } else if engine.unreachable.is_some() {
            return Err(LoadError::NoReflector { server });
        } else if shared.clock.ns() - last_answer > nanos(setup_timeout) {
            return Err(LoadError::NoReflection { server, ready, clients });
        }
    }
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "validated: at most 10,000 clients")]
fn send(engine: &mut Engine, index: usize, first: usize) {
    let stamp = Stamp { client: (first + index) as u32, sequence: PROBE, due_ns: 0 };
    engine.push_with(index, HEADER_LEN, |out| stamp.write(out));
}

struct Answers {
    answered: Vec<bool>,
    ready: usize,
    first: usize,
}

impl Sink for Answers {
    fn raw(&mut self, index: usize, _now_ns: u64, datagram: &[u8]) -> bool {
        let ours = Stamp::read(datagram)
            .is_some_and(|stamp| stamp.sequence == PROBE && stamp.client as usize == self.first + index);
        if ours && !std::mem::replace(&mut self.answered[index], true) {
            self.ready += 1;
        }
        true
    }
}
