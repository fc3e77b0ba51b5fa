//! Sets up the flows: each client must get one datagram back before the run starts. A forwarder then has a
//! session for it, and a missing reflector is reported immediately.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use super::{UdpLoadConfig, UdpShared, clients::UdpClients};
use crate::{
    LoadError,
    clock::nanos,
    payload::{HEADER_LEN, PayloadStamp},
    traffic::{Carrier as _, Sink},
};

/// Sequence number of setup datagrams. No client reaches it, so a late reply is never mistaken for traffic.
pub(crate) const PROBE: u64 = (1 << 48) - 1;
const OUTSTANDING: usize = 256;
/// First retry interval, which doubles each time. Retries are needed because socat, for example, accepts only one flow at a time and loses
/// the other flows' datagrams.
const FIRST_RETRY_NS: u64 = 50_000_000;
const LONGEST_RETRY_NS: u64 = 200_000_000;

/// Sets up the flows of one thread; `first` is the number of its first client. Calls `peer_is_ready` when the peers' socket is readable.
pub(super) fn set_up(
    clients: &mut UdpClients,
    shared: &UdpShared<'_>,
    (count, first): (usize, usize),
    peer_is_ready: impl FnMut(),
) -> Result<(), LoadError> {
    let UdpLoadConfig { server, setup_timeout, .. } = *shared.config;
    let limit = (OUTSTANDING / shared.frame.threads).max(1);
    let mut answers = Answers { answered: vec![false; count], ready: 0, first, peer_is_ready };
    let mut probing: Vec<(usize, u64, u64)> = Vec::with_capacity(limit);
    let (mut started, mut ready) = (0, 0);
    let mut last_answer = shared.clock.ns();
    while answers.ready < count {
        shared.check()?;
        let now = shared.clock.ns();
        probing.retain(|(index, ..)| !answers.answered[*index]);
        while started < count && probing.len() < limit {
            probing.push((started, 0, FIRST_RETRY_NS));
            started += 1;
        }
        for (index, due, pause) in &mut probing {
            if *due <= now {
                send(clients, *index, first);
                *due = now + *pause;
                *pause = (*pause * 2).min(LONGEST_RETRY_NS);
            }
        }
        clients.flush();
        clients.receive(Duration::from_millis(10), &mut answers)?;
        if answers.ready > ready {
            shared.ready_clients.fetch_add(answers.ready - ready, Relaxed);
            ready = answers.ready;
            last_answer = shared.clock.ns();
        } else if clients.unreachable {
            return Err(LoadError::NoReflector { server });
        } else if shared.clock.ns() - last_answer > nanos(setup_timeout) {
            return Err(LoadError::NoReflection { server, ready, clients: count });
        }
    }
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "validated: at most 10,000 clients")]
fn send(clients: &mut UdpClients, index: usize, first: usize) {
    let stamp = PayloadStamp { flow: (first + index) as u32, sequence: PROBE, due_ns: 0 };
    clients.push(index, 1, HEADER_LEN, |out| stamp.write(out));
}

struct Answers<F> {
    answered: Vec<bool>,
    ready: usize,
    first: usize,
    peer_is_ready: F,
}

impl<F: FnMut()> Sink for Answers<F> {
    fn payload(&mut self, client: usize, _now_ns: u64, payload: &[u8]) {
        let ours = PayloadStamp::read(payload)
            .is_some_and(|stamp| stamp.sequence == PROBE && stamp.flow as usize == self.first + client);
        if ours && !std::mem::replace(&mut self.answered[client], true) {
            self.ready += 1;
        }
    }

    fn peer_is_ready(&mut self) {
        (self.peer_is_ready)();
    }
}
