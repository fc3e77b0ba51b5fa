//! Hands the sessions of UDP clients over to another process, with their sockets and in the order of last
//! activity. Connections of TCP clients stay in this process.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use serde::{Deserialize, Serialize};
use turnpike_net::{Interest, SocketProtocol, TcpSocket, UdpSocket};

use super::{
    ChosenTarget, Engine, RuleKey, UdpTick, outgoing,
    rule_state::{Listener, SocketKind},
    sessions::{Arrival, Inward, Key, Outward, Session, addressed, connected},
    tokens::{narrow, outward_token},
};
use crate::{
    TargetSlot,
    bridge::{self, Stream},
    rate::Pace,
};

/// A session without its socket.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Portable {
    /// Index of its rule among those of the process.
    pub(crate) rule: usize,
    port: u16,
    client: SocketAddr,
    local: Option<IpAddr>,
    target: SocketAddr,
    /// True if it counts as a session of the target.
    is_seated: bool,
    attempts: u8,
    answered: bool,
    to_target: u64,
    to_client: u64,
    lived_ms: u64,
    idle_ms: u64,
    /// Last value of the kernel's drop counter for its socket.
    drops: u32,
    stream: Option<bridge::BridgeState>,
    /// See [`Arrival::hops`]; older versions do not send this field.
    #[serde(default)]
    hops: u8,
}

impl Engine {
    pub(crate) fn listening(&self, key: RuleKey) -> Vec<BorrowedFd<'_>> {
        let mut found: Vec<&Listener> = self.listeners_of(key).map(|(_, listener)| listener).collect();
        found.sort_unstable_by_key(|listener| listener.port);
        let descriptors = found.into_iter().filter_map(|listener| match &listener.kind {
            SocketKind::Datagrams(id) => self.sockets.get(*id).map(UdpSocket::as_fd),
            SocketKind::Streams { socket, .. } => Some(socket.as_fd()),
        });
        descriptors.collect()
    }

    /// Last drop counters of a rule's listeners, in the order of its range.
    pub(crate) fn listener_drops(&self, key: RuleKey) -> Vec<u32> {
        let drops_by_port = self.listeners_of(key).filter_map(|(_, listener)| match listener.kind {
            SocketKind::Datagrams(id) => Some((listener.port, self.sockets.get(id)?.lend())),
            SocketKind::Streams { .. } => None,
        });
        let mut drops_by_port: Vec<(u16, u32)> = drops_by_port.collect();
        drops_by_port.sort_unstable();
        drops_by_port.into_iter().map(|(_, drops)| drops).collect()
    }

    pub(crate) fn expect_drops(&self, key: RuleKey, drops: &[u32]) {
        for (_, Listener { port, kind, .. }) in self.listeners_of(key) {
            if let (SocketKind::Datagrams(id), Some(drops)) = (kind, drops.get(usize::from(*port)))
                && let Some(socket) = self.sockets.get(*id)
            {
                socket.expect_drops(*drops);
            }
        }
    }

    /// Sessions that can be handed over, the longest idle first.
    pub(crate) fn portable(&self) -> Vec<u32> {
        let rules = self.rules.iter().filter(|(_, state)| !state.removed);
        let mut all: Vec<u32> = rules.flat_map(|(slot, _)| self.sessions.of_rule(narrow(slot))).collect();
        all.retain(|at| self.client_of(*at).is_some());
        all.sort_by_key(|at| self.sessions.stamp(*at));
        all
    }

    /// Exports a session and its socket towards the target; the session stays usable here. `rules` are all
    /// rules of the process.
    pub(crate) fn export(&self, at: u32, rules: &[RuleKey], now: u64) -> Option<(Portable, BorrowedFd<'_>)> {
        let session = self.sessions.get(at)?;
        let key = self.client_of(at)?;
        let rule = self.rules.get(session.rule as usize)?.key;
        let (socket, drops, stream) = match &session.outward {
            Outward::Stream(stream) => (stream.socket().as_fd(), 0, Some(stream.held())),
            datagrams => {
                let socket = self.sockets.get(datagrams.socket()?)?;
                (socket.as_fd(), socket.lend(), None)
            }
        };
        let portable = Portable {
            rule: rules.iter().position(|other| *other == rule)?,
            port: session.port,
            client: session.client,
            local: key.local,
            target: session.tried,
            is_seated: session.choice.is_some(),
            attempts: session.attempts,
            answered: session.answered,
            to_target: session.to_target,
            to_client: session.to_client,
            lived_ms: now.saturating_sub(session.opened),
            idle_ms: now.saturating_sub(self.sessions.stamp(at)),
            drops,
            stream,
            hops: session.hops,
        };
        Some((portable, socket))
    }

    /// Continues a session of another process. Fails with `InvalidData` if the session does not belong to
    /// this rule or already exists.
    pub(crate) fn resume(
        &mut self,
        session: Portable,
        key: RuleKey,
        socket: OwnedFd,
        tick: &mut UdpTick<'_>,
    ) -> io::Result<()> {
        let unknown =
            || io::Error::new(io::ErrorKind::InvalidData, "handed-over session belongs to an unknown rule");
        let found = self.listeners_of(key).find(|(_, listener)| listener.port == session.port);
        let (listener, rule, shared) = match found {
            Some((at, Listener { rule, kind: SocketKind::Datagrams(shared), .. })) => {
                (narrow(at), *rule, *shared)
            }
            _ => return Err(unknown()),
        };
        let Portable { client, local, port, hops, .. } = session;
        let arrival = Arrival { rule, client, port, hops };
        let client_key = Key { listener, client, local };
        if self.sessions.find(&client_key).is_some() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "handed-over session already exists"));
        }
        let token = outward_token(self.sessions.next());
        // The other process has accepted the session, so an error here does not end it.
        let leads_here = tick.worker.approach(key, session.target, local, tick.now).unwrap_or(false);
        let mut end = Err(io::ErrorKind::NotConnected.into());
        let outward = match session.stream {
            None => {
                let socket = UdpSocket::take_over(socket, session.drops)?;
                tick.poller.add(&socket, token)?;
                let rule = &self.rules[rule as usize].rule;
                if leads_here {
                    end = outgoing::source_of(&socket, rule, session.target)
                        .map(|local| (SocketProtocol::Udp, local));
                }
                let any_port = rule.any_port.then_some(session.target);
                let header = self.header(arrival, local);
                addressed(self.sockets.insert(socket), any_port, header)
            }
            Some(held) => {
                let framed = self.rules[rule as usize].framed();
                let mut stream = Stream::resume(TcpSocket::from(socket), framed, held);
                let (readable, writable) = stream.wanted();
                let interest = Interest::Level { read: readable, write: writable };
                tick.poller.add_with(stream.socket(), token, interest)?;
                stream.interest = (readable, writable);
                if leads_here {
                    end = stream.socket().local_addr().map(|local| (SocketProtocol::Tcp, local));
                }
                Outward::Stream(Box::new(stream))
            }
        };
        let link = end.ok().map(|(transport, local)| tick.worker.circles().link(transport, local, hops));
        let reply = turnpike_net::Route { to: Some(client), from: local, ..connected(shared) };
        let inward = Inward::Datagrams { key: client_key, reply };
        let tried = ChosenTarget { target: TargetSlot::default(), address: session.target };
        let heard = tick.now.saturating_sub(session.idle_ms);
        let target = session.is_seated.then_some(session.target);
        let choice = tick.worker.resume(key, client.ip(), port, target);
        let state = &mut self.rules[rule as usize];
        if let Some(choice) = choice {
            state.tallies.of(choice.target).open += 1;
        }
        let mut resumed = Session::new(arrival, inward, (outward, link), choice.unwrap_or(tried), heard);
        resumed.choice = choice;
        resumed.attempts = session.attempts;
        resumed.answered = session.answered;
        (resumed.to_target, resumed.to_client) = (session.to_target, session.to_client);
        resumed.opened = tick.now.saturating_sub(session.lived_ms);
        resumed.pace = Pace::of(state.rates.as_ref());
        state.counters.active += 1;
        let at = self.sessions.insert(resumed, &mut state.lists);
        self.expect(rule);
        self.await_answer(at, tick);
        Ok(())
    }

    /// Drops listeners and sessions of UDP clients without a report, since another process has them.
    /// Connections of TCP clients stay.
    pub(crate) fn surrender(&mut self, tick: &mut UdpTick<'_>) {
        self.recall(tick);
        self.send_queued();
        for at in self.portable() {
            self.forget(at, tick);
        }
        let rules: Vec<u32> = self.rules.iter().map(|(slot, _)| narrow(slot)).collect();
        for rule in rules {
            drop(self.take_listeners(rule, tick.poller));
        }
        self.send_queued();
    }

    fn forget(&mut self, at: u32, tick: &mut UdpTick<'_>) {
        let Some(rule) = self.sessions.get(at).map(|session| session.rule) else { return };
        let state = &mut self.rules[rule as usize];
        let Some(session) = self.sessions.remove(at, &mut state.lists) else { return };
        state.counters.active -= 1;
        tick.worker.dismiss_client(state.key, session.client.ip());
        tick.worker.leave(state.key);
        if let Some(choice) = session.choice {
            state.left(choice, None);
            tick.worker.release(state.key, choice, false);
        }
        // Closing does not remove the socket from the poller while the other process has it open.
        match session.outward {
            Outward::Stream(stream) => _ = tick.poller.remove(stream.socket()),
            datagrams => {
                if let Some(socket) = datagrams.socket().and_then(|id| self.sockets.remove(id)) {
                    let _ = tick.poller.remove(&socket);
                }
            }
        }
    }

    /// Key of a session whose client shares a listener's socket.
    fn client_of(&self, at: u32) -> Option<&Key> {
        match &self.sessions.get(at)?.inward {
            Inward::Datagrams { key, reply } if reply.to.is_some() => Some(key),
            _ => None,
        }
    }

    fn listeners_of(&self, key: RuleKey) -> impl Iterator<Item = (usize, &Listener)> {
        let is_of = move |listener: &Listener| {
            self.rules.get(listener.rule as usize).is_some_and(|state| state.key == key && !state.removed)
        };
        self.listeners.iter().filter(move |(_, listener)| is_of(listener))
    }
}
