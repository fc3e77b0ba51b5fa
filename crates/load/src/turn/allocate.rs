//! Modes `allocate` and `bind`: authenticated allocations. Each is deleted once it has been granted
//! (`allocate`) or has enough channels (`bind`). Up to `clients` are in progress at a time, each from a
//! fresh source port where possible: a server may remember the 5-tuple of a deleted allocation (coturn 4.6
//! does so for one second and responds with 437). The latency covers the whole Allocate exchange, including
//! the challenge; over TCP, TLS and DTLS it also covers opening the connection. Mode `bind` counts and times
//! only its ChannelBind requests.

use std::{collections::VecDeque, io, net::SocketAddr, sync::Arc, time::Duration};

use turnpike_client::{ErrorCounts, Security};
use turnpike_turn::client::{self, Event, Failure, Request};

use super::{
    Mode, TurnShared,
    engine::{TurnEngine, as_user, client_settings},
    finished,
};
use crate::{
    LoadError,
    clock::nanos,
    pacer::Pacer,
    run::{Heartbeat, RunTallies, RunTimes, ThreadResult},
    traffic::{Carrier as _, LONGEST_DRAIN_NS, LONGEST_SLEEP, NoData},
};

/// Source ports of the clients. All are below 49152, because a server on the same machine uses higher ports as relay ports (RFC 8656
/// section 7.2).
const PORTS: std::ops::Range<u16> = 20_000..49_152;

/// Number of channels per allocation in mode `bind`; fewer than servers allow by default.
const CHANNELS: u16 = 60;

pub(super) fn run(
    shared: &TurnShared<'_>,
    security: Option<&Security>,
    thread: usize,
) -> Result<ThreadResult, LoadError> {
    let (limit, first) = shared.share(shared.config.clients, thread);
    let engine = TurnEngine::new(shared.config, security, (limit, first), shared.clock)?;
    shared.ready_clients.fetch_add(limit, std::sync::atomic::Ordering::Relaxed);
    shared.thread_is_ready();
    let schedule = shared.wait_for_start()?;
    let churn = Churn {
        free: (0..limit).collect(),
        due: vec![0; limit],
        is_granted: vec![false; limit],
        bound: vec![0; limit],
        ports: SourcePorts::of_thread(thread, shared.frame.threads),
        users: UserRotation::of_thread(thread, shared),
        engine,
        shared,
        schedule,
        limit,
        under_way: 0,
        deleting: 0,
        granted: 0,
        tallies: RunTallies::default(),
    };
    churn.go(thread)
}

struct Churn<'a> {
    shared: &'a TurnShared<'a>,
    schedule: RunTimes,
    engine: TurnEngine,
    free: VecDeque<usize>,
    due: Vec<u64>,
    is_granted: Vec<bool>,
    bound: Vec<u16>,
    ports: SourcePorts,
    users: UserRotation,
    limit: usize,
    under_way: usize,
    deleting: usize,
    granted: u64,
    tallies: RunTallies,
}

impl Churn<'_> {
    fn go(mut self, thread: usize) -> Result<ThreadResult, LoadError> {
        let config = self.shared.config;
        let mut pacer = config
            .rate
            .pps()
            .map(|rate| Pacer::new(self.schedule.start, rate * self.limit as f64 / config.clients as f64));
        let mut heartbeat = Heartbeat::new(self.shared, thread, self.schedule);
        loop {
            let now = self.shared.clock.ns();
            let under_way = (self.under_way - self.deleting) as u64;
            heartbeat.beat(now, &mut self.tallies, &mut self.schedule, || under_way)?;
            if now >= self.schedule.end {
                break;
            }
            let sleep = self.start_due(now, pacer.as_mut());
            self.serve(sleep)?;
            self.check_answers(now)?;
        }
        let deadline = self.shared.clock.ns() + LONGEST_DRAIN_NS;
        while self.under_way > 0 && self.shared.clock.ns() < deadline {
            self.shared.check()?;
            self.serve(Duration::from_millis(5))?;
        }
        self.tallies.publish(&self.shared.slots[thread], 0);
        let cpu = heartbeat.cpu();
        Ok(finished(config, self.engine, ThreadResult { cpu, ..ThreadResult::default() }))
    }

    fn start_due(&mut self, now: u64, mut pacer: Option<&mut Pacer>) -> Duration {
        if now < self.schedule.start {
            return Duration::from_nanos(self.schedule.start - now).min(LONGEST_SLEEP);
        }
        if let Some(pacer) = pacer.as_mut()
            && now >= self.schedule.measure
        {
            // Drop requests still due from the warm-up. Otherwise, a server that fell behind then would spend the whole run catching up.
            pacer.skip_to(self.schedule.measure);
        }
        while self.under_way < self.limit {
            let due = pacer.as_ref().map_or(now, |pacer| pacer.due());
            if due > now {
                return Duration::from_nanos(due - now).min(LONGEST_SLEEP);
            }
            let Some(index) = self.free.pop_front() else { break };
            if let Some(pacer) = pacer.as_mut() {
                pacer.advance();
            }
            if self.shared.config.mode == Mode::Allocate {
                let tally = self.tallies.of(due >= self.schedule.measure);
                tally.sent += 1;
                tally.late.record((now - due) / 1_000);
            }
            self.due[index] = due;
            self.under_way += 1;
            self.engine.allocate_again(index, self.users.next());
        }
        LONGEST_SLEEP
    }

    fn serve(&mut self, sleep: Duration) -> Result<(), LoadError> {
        self.engine.sweep();
        self.engine.flush();
        self.engine.drive(sleep, &mut NoData)?;
        let now = self.shared.clock.ns();
        for (index, event) in std::mem::take(&mut self.engine.events) {
            match event {
                Event::Allocated(_) => self.granted(index, now),
                Event::Bound(..) => {
                    self.answered(index, now);
                    self.bind_next(index, now);
                }
                Event::Deleted => self.rest(index)?,
                Event::Failed { request, failure } => self.failed(index, request, failure)?,
                _ => {}
            }
        }
        self.engine.flush();
        Ok(())
    }

    fn granted(&mut self, index: usize, now: u64) {
        self.granted += 1;
        if self.shared.config.mode == Mode::Bind {
            self.bound[index] = 0;
            return self.bind_next(index, now);
        }
        self.answered(index, now);
        self.delete(index, now);
    }

    fn answered(&mut self, index: usize, now: u64) {
        let due = self.due[index];
        let tally = self.tallies.of(due >= self.schedule.measure);
        tally.received += 1;
        tally.record_rtt(now.saturating_sub(due) / 1_000);
    }

    fn bind_next(&mut self, index: usize, now: u64) {
        let bound = self.bound[index];
        if bound == CHANNELS || now >= self.schedule.end {
            return self.delete(index, now);
        }
        self.bound[index] = bound + 1;
        self.due[index] = now;
        self.tallies.of(now >= self.schedule.measure).sent += 1;
        let endpoint = &mut self.engine.endpoints[index];
        let peer = SocketAddr::new(endpoint.peer.ip(), 1024 + bound);
        let _ = endpoint.client.bind_channel(now / 1_000_000, peer);
        self.engine.pump(index);
    }

    fn delete(&mut self, index: usize, now: u64) {
        self.deleting += 1;
        self.is_granted[index] = true;
        let _ = self.engine.endpoints[index].client.delete(now / 1_000_000);
        self.engine.pump(index);
    }

    fn failed(&mut self, index: usize, request: Request, failure: Failure) -> Result<(), LoadError> {
        if let (Request::Allocate, Failure::TryAlternate { server, domain }) = (request, &failure) {
            return self.engine.follow(index, *server, domain.as_deref());
        }
        if self.granted == 0 {
            return Err(self.engine.failure(self.shared.config, index, request, failure, (0, self.limit)));
        }
        count(&mut self.engine.errors, request, &failure);
        self.rest(index)
    }

    fn rest(&mut self, index: usize) -> Result<(), LoadError> {
        let mut source = io::Error::from(io::ErrorKind::AddrInUse);
        self.engine.return_home(index);
        for _ in 0..PORTS.len() {
            match self.engine.reopen(index, self.ports.next()) {
                Ok(()) => {
                    self.under_way -= 1;
                    self.deleting -= usize::from(std::mem::take(&mut self.is_granted[index]));
                    self.free.push_back(index);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => source = error,
                Err(error) => {
                    source = error;
                    break;
                }
            }
        }
        Err(LoadError::Socket { server: self.engine.endpoints[index].history.server, source })
    }

    /// Fails if the server has granted nothing (no allocation or channel, depending on the mode) for a while.
    fn check_answers(&self, now: u64) -> Result<(), LoadError> {
        if self.granted > 0 {
            return Ok(());
        }
        if let Some(failure) = self.engine.setup_failure(self.shared.config) {
            return Err(failure);
        }
        if now.saturating_sub(self.schedule.start) > nanos(self.shared.config.setup_timeout) {
            return Err(self.engine.no_answer(self.shared.config, (0, self.limit)));
        }
        Ok(())
    }
}

struct UserRotation {
    /// Settings of the first user; for other users, a number is appended to the name.
    settings: Arc<client::Config>,
    count: usize,
    next: usize,
    threads: usize,
}

impl UserRotation {
    /// Each thread starts with a different user, so that the threads together rotate through all users.
    fn of_thread(thread: usize, shared: &TurnShared<'_>) -> Self {
        let config = shared.config;
        let settings = client_settings(config);
        Self { settings, count: config.users, next: thread % config.users, threads: shared.frame.threads }
    }

    fn next(&mut self) -> Arc<client::Config> {
        let settings = as_user(&self.settings, self.count, self.next);
        self.next = (self.next + self.threads) % self.count;
        settings
    }
}

struct SourcePorts {
    first: u16,
    count: u16,
    next: u16,
}

impl SourcePorts {
    fn of_thread(thread: usize, threads: usize) -> Self {
        let each = (PORTS.len() / threads).max(1);
        let offset = (thread * each).min(PORTS.len() - 1);
        #[expect(clippy::cast_possible_truncation, reason = "both lie within PORTS, a range of u16")]
        let (first, count) = (PORTS.start + offset as u16, each as u16);
        // Starts at a random port, because the previous run may still occupy the first ones.
        Self { first, count, next: rand::random_range(0..count) }
    }

    fn next(&mut self) -> u16 {
        self.next = (self.next + 1) % self.count;
        self.first + self.next
    }
}

pub(super) fn count(errors: &mut ErrorCounts, request: Request, failure: &Failure) {
    let name = match (request, failure) {
        (Request::Delete, _) => "delete_failed",
        (_, Failure::Timeout { .. }) => "timeout",
        (_, Failure::Credentials { .. } | Failure::CredentialsNeeded { .. }) => "unauthorized_401",
        (_, Failure::Refused { code: 437, .. }) => "allocation_mismatch_437",
        (_, Failure::Refused { code: 486, .. }) => "quota_486",
        (_, Failure::Refused { code: 508, .. }) => "capacity_508",
        _ => "refused",
    };
    *errors.entry(name).or_default() += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_ranges_of_threads_are_disjoint_and_wrap() {
        for threads in [1, 2, 3, 7] {
            let mut seen = std::collections::HashSet::new();
            for thread in 0..threads {
                let mut ports = SourcePorts::of_thread(thread, threads);
                let own: Vec<_> = (0..PORTS.len() / threads).map(|_| ports.next()).collect();
                assert!(
                    own.iter().all(|port| PORTS.contains(port) && seen.insert(*port)),
                    "{threads} threads"
                );
                assert_eq!(ports.next(), own[0]);
            }
        }
    }
}
