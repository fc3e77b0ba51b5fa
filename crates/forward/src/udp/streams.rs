//! TCP sides of sessions: accepting clients, connecting to targets, and reading streams.

use std::{net::SocketAddr, time::Duration};

use turnpike_net::{Event, TcpSocket, is_exhaustion};

use super::{
    Admission, Engine, UdpTick, outgoing,
    rule_state::{RuleState, SocketKind},
    sessions::{ATTEMPTS, Arrival, Gate, Inward, Outward, Session, SessionStage, connected},
    tokens,
};
use crate::{
    ConnectionReport, EndReason, TargetFailure,
    bridge::Stream,
    rate::{DOWN, UP},
};

/// Maximum connections accepted per listener and tick.
const ACCEPTS: usize = 64;
/// Milliseconds for which a listener pauses when descriptors have run out.
const REST: u64 = 100;
/// Maximum number of bytes copied from streams before a flush.
const COPIED: u64 = 1 << 20;

impl Engine {
    pub(super) fn accept(&mut self, at: u32, tick: &mut UdpTick<'_>) {
        for _ in 0..ACCEPTS {
            let Some(listener) = self.listeners.get_mut(at as usize) else { return };
            let (rule, port) = (listener.rule, listener.port);
            let SocketKind::Streams { socket, paused_until } = &mut listener.kind else { return };
            match socket.accept() {
                Ok(Some((stream, client))) => {
                    self.admit(Arrival { rule, client, port, hops: 0 }, stream, tick);
                }
                Ok(None) => return,
                Err(error) if is_exhaustion(&error) => {
                    // Polling is level-triggered, so the waiting connection would wake the worker forever.
                    if tick.poller.remove(socket).is_ok() {
                        let until = tick.now + REST;
                        *paused_until = Some(until);
                        self.expect_at(Some(until));
                    }
                    return self.complain(&error);
                }
                // Only this connection is lost, for example because a firewall refused it (accept(2)).
                Err(_) => {}
            }
        }
    }

    /// Resumes watching listeners whose pause is over; returns the time at which the next pause ends.
    pub(super) fn resume_listeners(&mut self, tick: &mut UdpTick<'_>) -> Option<u64> {
        let mut next: Option<u64> = None;
        for (at, listener) in &mut self.listeners {
            let SocketKind::Streams { socket, paused_until } = &mut listener.kind else { continue };
            let Some(until) = *paused_until else { continue };
            let token = tokens::listener_token(tokens::narrow(at));
            if until <= tick.now && tick.poller.add(socket, token).is_ok() {
                *paused_until = None;
                continue;
            }
            let until = until.max(tick.now + 1);
            next = Some(next.map_or(until, |next| next.min(until)));
        }
        next
    }

    fn admit(&mut self, mut arrival: Arrival, stream: TcpSocket, tick: &mut UdpTick<'_>) {
        let Arrival { rule, client, .. } = arrival;
        let state = &mut self.rules[rule as usize];
        if !tick.worker.permits(state.key, client.ip()) {
            return refuse(state, client, EndReason::Denied, tick);
        }
        let key = state.key;
        match tick.worker.hops(key, client) {
            Ok(hops) => arrival.hops = hops,
            Err(reason) => return refuse(state, client, reason, tick),
        }
        if let Err(reason) = tick.worker.admit_client(key, client.ip(), tick.now) {
            return refuse(state, client, reason, tick);
        }
        if tick.worker.enter(key) != Admission::Entered {
            tick.worker.dismiss_client(key, client.ip());
            return refuse(state, client, EndReason::Limit, tick);
        }
        let framed = state.framed();
        let at = self.sessions.next();
        if let Err(error) = tick.poller.add(&stream, tokens::inward_token(at)) {
            self.complain(&error);
            tick.worker.dismiss_client(key, client.ip());
            tick.worker.leave(key);
            return refuse(&mut self.rules[rule as usize], client, EndReason::ClientReset, tick);
        }
        let Some((reached, choice)) = self.reach(arrival, None, tick) else {
            tick.worker.dismiss_client(key, client.ip());
            tick.worker.leave(key);
            return refuse(&mut self.rules[rule as usize], client, EndReason::ConnectFailed, tick);
        };
        let inward = Inward::Stream(Box::new(Stream::new(stream, framed, false)));
        self.begin(Session::new(arrival, inward, reached, choice, tick.now), tick);
    }

    pub(super) fn on_target_stream(&mut self, at: u32, event: &Event, tick: &mut UdpTick<'_>) {
        let Some(session) = self.sessions.get_mut(at) else { return };
        let Outward::Stream(stream) = &mut session.outward else { return };
        let rule = session.rule;
        if stream.connecting {
            match stream.finish_connecting() {
                Err(error) => return self.try_next_target(at, TargetFailure::of(&error), tick),
                Ok(false) => return,
                Ok(true) => {}
            }
            let time = stream.begun.elapsed();
            if let Some(choice) = session.choice {
                let state = &mut self.rules[rule as usize];
                state.tallies.of(choice.target).connected_in(time);
                state.tallies.moved(choice.target, session.to_target, 0);
                tick.worker.answered(state.key, choice);
            }
            self.sessions.enter(at, SessionStage::Active, tick.now, &mut self.rules[rule as usize].lists);
            self.expect(rule);
        }
        let Some(session) = self.sessions.get_mut(at) else { return };
        let (Outward::Stream(stream), Inward::Datagrams { reply, .. }) =
            (&mut session.outward, &session.inward)
        else {
            return;
        };
        if stream.send_queued().is_err() {
            return self.end(at, EndReason::TargetReset, tick);
        }
        stream.watch(tokens::outward_token(at), tick.poller);
        if !event.readable && !event.error {
            return;
        }
        let (tx, reply) = (&mut self.tx, *reply);
        let mut gate = Gate::new(session.pace.as_deref(), DOWN, tick.now);
        let pass = |datagram: &[u8]| {
            if gate.admits(datagram) {
                tx.push_bytes(&reply, datagram);
            }
        };
        let mut turn = match stream.receive(&mut self.scratch, pass) {
            Ok(turn) => turn,
            Err(_) => return self.end(at, EndReason::TargetReset, tick),
        };
        session.answered |= turn.datagrams > 0;
        turn.limit(gate.limited, gate.bytes);
        session.to_client += turn.bytes;
        let state = &mut self.rules[rule as usize];
        state.moved(session.choice, 0, turn.bytes);
        state.counters.to_client_datagrams += turn.datagrams;
        state.counters.dropped_datagrams += turn.too_long;
        state.counters.limited_datagrams += gate.limited;
        if turn.datagrams > 0 {
            self.sessions.touch(at, tick.now, &mut state.lists);
        }
        self.copy_done(turn.bytes);
        if turn.closed {
            // UDP has no half-close, so no more data for the target is expected.
            self.end(at, EndReason::Finished, tick);
        }
    }

    pub(super) fn on_client_stream(&mut self, at: u32, event: &Event, tick: &mut UdpTick<'_>) {
        let Some(session) = self.sessions.get_mut(at) else { return };
        let (Inward::Stream(stream), Outward::Datagrams(socket)) = (&mut session.inward, &session.outward)
        else {
            return;
        };
        if stream.send_queued().is_err() {
            return self.end(at, EndReason::ClientReset, tick);
        }
        if stream.read_closed {
            stream.watch(tokens::inward_token(at), tick.poller);
            // The client has also stopped reading, because only a hang-up or an error is reported when no
            // events are watched.
            if event.error || event.readable {
                let reset = stream.socket().take_error().is_err();
                let reason = if reset { EndReason::ClientReset } else { EndReason::Finished };
                self.end(at, reason, tick);
            }
            return;
        }
        let mut turn = crate::bridge::Turn::default();
        let mut gate = Gate::new(session.pace.as_deref(), UP, tick.now);
        if event.readable || event.error {
            let (tx, route) = (&mut self.tx, connected(*socket));
            let pass = |datagram: &[u8]| {
                if gate.admits(datagram) {
                    tx.push_bytes(&route, datagram);
                }
            };
            match stream.receive(&mut self.scratch, pass) {
                Ok(brought) => turn = brought,
                Err(_) => return self.end(at, EndReason::ClientReset, tick),
            }
        }
        stream.read_closed = turn.closed;
        turn.limit(gate.limited, gate.bytes);
        stream.watch(tokens::inward_token(at), tick.poller);
        session.to_target += turn.bytes;
        let rule = session.rule;
        let state = &mut self.rules[rule as usize];
        state.moved(session.choice, turn.bytes, 0);
        state.counters.to_target_datagrams += turn.datagrams;
        state.counters.dropped_datagrams += turn.too_long;
        state.counters.limited_datagrams += gate.limited;
        if turn.closed {
            self.sessions.enter(at, SessionStage::Closing, tick.now, &mut state.lists);
            self.expect(rule);
        } else if turn.datagrams > 0 {
            self.sessions.touch(at, tick.now, &mut state.lists);
        }
        self.copy_done(turn.bytes);
    }

    /// Handles a failed connect to a TCP target.
    pub(super) fn try_next_target(&mut self, at: u32, failure: TargetFailure, tick: &mut UdpTick<'_>) {
        let Some(session) = self.sessions.get_mut(at) else { return };
        let Session { rule, client, port, hops, .. } = *session;
        let state = &mut self.rules[rule as usize];
        let failed = session.choice.take();
        if let Some(failed) = failed {
            state.left(failed, Some(failure));
            tick.worker.release(state.key, failed, true);
        }
        while session.attempts < ATTEMPTS {
            let Some(choice) = tick.worker.choose(state.key, client, port, &[]) else { break };
            if failed.is_some_and(|failed| failed.address == choice.address) {
                // There is no other target.
                tick.worker.release(state.key, choice, false);
                break;
            }
            session.choice = Some(choice);
            session.tried = choice.address;
            session.attempts += 1;
            let token = tokens::outward_token(at);
            let arrival = Arrival { rule, client, port, hops };
            let connected = outgoing::watched_stream(state, arrival, choice.address, token, tick);
            match (connected, &mut session.outward) {
                (Ok((socket, link)), Outward::Stream(stream)) => {
                    state.took(choice);
                    session.link = link;
                    stream.reconnect(socket);
                    self.sessions.enter(at, SessionStage::Connecting, tick.now, &mut state.lists);
                    return self.expect(rule);
                }
                (Err(error), _) => state.failed(choice, Some(TargetFailure::of(&error))),
                (Ok(_), Outward::Datagrams(_) | Outward::Addressed(_)) => {}
            }
            session.choice = None;
            // Connects rarely fail immediately, so local failures are not treated separately; the next health
            // check corrects a wrong verdict.
            tick.worker.release(state.key, choice, true);
        }
        self.end(at, EndReason::ConnectFailed, tick);
    }

    fn copy_done(&mut self, bytes: u64) {
        self.copied += bytes;
        if self.copied > COPIED {
            self.send_queued();
        }
    }
}

fn refuse(state: &mut RuleState, client: SocketAddr, reason: EndReason, tick: &mut UdpTick<'_>) {
    state.counters.count_ends(reason, 1);
    if reason.is_quiet() {
        return;
    }
    tick.worker.ended(ConnectionReport {
        rule: state.rule.id.clone(),
        client: client.into(),
        target: None,
        to_target: 0,
        to_client: 0,
        lived: Duration::ZERO,
        reason,
    });
}
