//! Opens connections: PROXY header, name lookup, and a connect attempt for each address.

use std::{io, net::SocketAddr, sync::Arc, time::Instant};

use socket2::SockRef;
use turnpike_net::{ConnectOptions, Event, Interest, TcpTimers, is_exhaustion};
use turnpike_wire::proxy_protocol::{self, MAX_HEADER, Parsed};

use super::{
    attempt::AttemptStage,
    engine::Engine,
    side::{CLIENT, StreamSide, TARGET, Tick, token},
};
use crate::{
    Address, EndReason,
    state::RuleState,
    targets::{Pick, Seat},
};

impl Engine {
    /// Connects to the next address, or ends the connection if none is left.
    pub(super) fn connect_next(&mut self, key: usize, tick: Tick<'_>) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let Some(opening) = connection.opening.and_then(|at| self.openings.get_mut(at as usize)) else {
            return;
        };
        let state = Arc::clone(&self.rules[connection.rule].state);
        let failure = loop {
            let client = connection.client_address.ip();
            let wait = !opening.without_names;
            let (seat, address) = match state.targets.pick(client, opening.offset, &opening.tried, wait) {
                Pick::At(seat, address) => (seat, address),
                Pick::NoTarget => {
                    tell_unreachable(&state, opening.obstacle.take());
                    break EndReason::ConnectFailed;
                }
                Pick::Pending => {
                    if opening.stage != AttemptStage::Name {
                        opening.stage = AttemptStage::Name;
                        opening.deadline = tick.now.saturating_add(opening.patience);
                    }
                    return;
                }
            };
            let transparent;
            let options = if state.rule.transparent {
                // If the client has no IP address, our own address is used.
                let source = connection.client_address.ip().map(|ip| SocketAddr::new(ip, 0));
                transparent =
                    ConnectOptions { source, transparent: source.is_some(), ..state.connect.clone() };
                &transparent
            } else {
                &state.connect
            };
            let asked = || connection.client.local_addr().ok().map(|asked| asked.ip());
            opening.connecting = Instant::now();
            let common = &self.common;
            let approached = self.here.approach(&common.listening, &state, &address, asked, tick.now);
            let connected = approached.and_then(|leads_here| {
                let connect = || address.connect(options);
                if !leads_here {
                    return Ok((connect()?, None));
                }
                let (socket, link) = common.circles.connect(opening.hops, connect)?;
                Ok((socket, Some(link)))
            });
            let begun = connected.and_then(|(socket, link)| {
                if !address.is_unix() && state.rule.timers != TcpTimers::default() {
                    socket.set_timers(&state.rule.timers)?;
                    SockRef::from(&socket).set_keepalive(state.rule.keepalive)?;
                }
                tick.poller.add_with(&socket, token(TARGET, key), Interest::Edge)?;
                Ok((socket, link))
            });
            match begun {
                Ok((socket, link)) => {
                    opening.stage = AttemptStage::Connecting;
                    opening.deadline = tick.now.saturating_add(opening.patience);
                    if address.is_unix() {
                        connection.down.thorough = true;
                    }
                    connection.link = link;
                    connection.target = Some(socket);
                    connection.target_address = Some(address);
                    connection.seat = self.rules[connection.rule].sit(seat);
                    return;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if opening.stage != AttemptStage::Queue {
                        opening.stage = AttemptStage::Queue;
                        opening.deadline = tick.now.saturating_add(opening.patience);
                    }
                    opening.queued = Some(seat.slot());
                    opening.obstacle = Some((address, error));
                    return;
                }
                Err(error) if is_exhaustion(&error) => {
                    if opening.stage != AttemptStage::Descriptor {
                        opening.stage = AttemptStage::Descriptor;
                        opening.deadline = tick.now.saturating_add(opening.patience);
                    }
                    self.starving = true;
                    return self.pause_all(&error, tick);
                }
                Err(error) => {
                    opening.tried.push(seat.slot());
                    self.rules[connection.rule].connect_failed(&seat, &error);
                    tracing::debug!(rule = state.rule.id.0, to = %address, %error, "cannot connect");
                    opening.obstacle = Some((address, error));
                }
            }
        };
        self.end(key, failure, tick);
    }

    pub(super) fn on_connected(&mut self, key: usize, event: &Event, tick: Tick<'_>) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let Some(target) = &connection.target else { return };
        if event.error
            && let Err(error) = target.take_error()
        {
            return self.on_refused(key, error, tick);
        }
        if event.writable {
            self.establish(key, event, tick);
        }
    }

    fn on_refused(&mut self, key: usize, error: io::Error, tick: Tick<'_>) {
        let connection = &mut self.connections[key];
        let local = &mut self.rules[connection.rule];
        connection.link = None;
        connection.target = None;
        let to = connection.target_address.as_ref().map(tracing::field::display);
        tracing::debug!(rule = local.state.rule.id.0, to, %error, "cannot connect");
        let seat = connection.seat.take();
        if let Some(seat) = &seat {
            local.connect_failed(seat, &error);
        }
        let opening = connection.opening.and_then(|at| self.openings.get_mut(at as usize));
        if let (Some(opening), Some(address)) = (opening, connection.target_address.take()) {
            opening.tried.extend(seat.as_ref().map(Seat::slot));
            opening.obstacle = Some((address, error));
        }
        if let Some(seat) = seat {
            local.stand_up(seat);
        }
        self.connect_next(key, tick);
    }

    fn establish(&mut self, key: usize, event: &Event, tick: Tick<'_>) {
        let connection = &mut self.connections[key];
        let Some(opening) = connection.opening.take().and_then(|at| self.openings.try_remove(at as usize))
        else {
            return;
        };
        let local = &mut self.rules[connection.rule];
        if let Some(seat) = &connection.seat {
            local.tallies.of(seat.slot()).connected_in(opening.connecting.elapsed());
            seat.member().answered();
        }
        let state = &local.state;
        if state.is_reached_again() {
            tracing::info!(rule = state.rule.id.0, "a target is reachable again");
        }
        let rule = &state.rule;
        let mut lead = Vec::new();
        if let Some(version) = rule.send_proxy {
            let asked = opening.asked.or_else(|| connection.client.local_addr().ok());
            lead = match (&connection.client_address, asked) {
                (Address::Ip(client), Some(asked)) => proxy_protocol::encode(version, *client, asked),
                (Address::Unix(_), _) => proxy_protocol::encode_unknown(version),
                // If the client's socket has no local address, the client has disconnected; the next read
                // fails.
                (Address::Ip(_), None) => Vec::new(),
            };
            if rule.nodelay
                && let Some(target) = &connection.target
            {
                connection.up.nodelay_due = false;
                // If this fails, the following write fails too.
                let _ = SockRef::from(target).set_tcp_nodelay(true);
            }
        }
        lead.extend_from_slice(&opening.inbox);
        connection.up.bytes += opening.inbox.len() as u64;
        local.moved(connection.seat.as_ref(), StreamSide::Client, opening.inbox.len() as u64);
        connection.up.lead_with(lead);
        connection.up.readable = true;
        connection.down.readable = event.readable;
        connection.down.fin = event.closed;
        connection.active = tick.now;
        let watched = opening.is_proxy;
        let greets = connection.down.readable;
        // Reading before the client's socket is registered saves an event.
        self.resume(key, StreamSide::Client, tick);
        if greets {
            self.resume(key, StreamSide::Target, tick);
        }
        let Some(connection) = self.connections.get_mut(key) else { return };
        if watched {
            return;
        }
        if let Err(error) = tick.poller.add_with(&connection.client, token(CLIENT, key), Interest::EdgeRead) {
            self.complain(&error);
            return self.end(key, EndReason::Limit, tick);
        }
        // Watching for writability was requested before the socket was watched.
        if std::mem::take(&mut connection.client_writable) {
            self.watch_client_writable(key, tick);
        }
    }

    /// Handles data from a client before there is a target; only proxies are watched this early.
    pub(super) fn on_early_client(&mut self, key: usize, event: &Event, tick: Tick<'_>) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let Some(opening) = connection.opening.and_then(|at| self.openings.get_mut(at as usize)) else {
            return;
        };
        connection.up.fin |= event.closed;
        if event.error {
            return self.end(key, EndReason::ClientReset, tick);
        }
        if opening.stage != AttemptStage::Waiting {
            return;
        }
        loop {
            let room = MAX_HEADER - opening.inbox.len();
            let scratch = &mut self.mover.scratch()[..room];
            let got = match connection.client.read(scratch) {
                Ok(0) => return self.end(key, EndReason::BadProxyHeader, tick),
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return self.end(key, EndReason::ClientReset, tick),
            };
            opening.inbox.extend_from_slice(&self.mover.scratch()[..got]);
            match proxy_protocol::parse(&opening.inbox) {
                Parsed::Incomplete if opening.inbox.len() < MAX_HEADER => {}
                Parsed::Incomplete | Parsed::Malformed => {
                    return self.end(key, EndReason::BadProxyHeader, tick);
                }
                Parsed::Header(len, addresses) => {
                    opening.inbox.drain(..len);
                    if let Some((source, destination)) = addresses {
                        connection.client_address = source.into();
                        opening.asked = Some(destination);
                    }
                    let client = &connection.client_address;
                    if !self.common.admits_from(&self.rules[connection.rule].state.rule, client) {
                        return self.end(key, EndReason::Denied, tick);
                    }
                    // If the header names no client, the proxy itself counts as the client.
                    if let Some((client, _)) = addresses
                        && let Err(reason) = connection.place.of_client(client.ip(), tick.now)
                    {
                        return self.end(key, reason, tick);
                    }
                    return self.connect_next(key, tick);
                }
            }
        }
    }

    /// Handles timeouts of connections being opened, and retries those waiting for a descriptor or a Unix
    /// socket's queue.
    pub(super) fn look_at_openings(&mut self, tick: Tick<'_>) {
        if self.openings.is_empty() {
            self.starving = false;
            return;
        }
        let ask = |stage: AttemptStage, late: bool| {
            late || matches!(stage, AttemptStage::Descriptor | AttemptStage::Queue)
        };
        let due: Vec<(usize, AttemptStage, bool)> = self
            .openings
            .iter()
            .map(|(_, opening)| (opening.connection, opening.stage, opening.deadline <= tick.now))
            .filter(|(_, stage, late)| ask(*stage, *late))
            .collect();
        self.starving = false;
        for (key, stage, late) in due {
            match (stage, late) {
                (AttemptStage::Waiting, _) => self.end(key, EndReason::BadProxyHeader, tick),
                (AttemptStage::Name, _) => self.give_up_on_name(key, tick),
                (AttemptStage::Descriptor, true) => self.end(key, EndReason::Limit, tick),
                // If one connection still gets no descriptor, skip the others that need one.
                (AttemptStage::Descriptor, false) if self.starving => {}
                (AttemptStage::Descriptor, false) => self.connect_next(key, tick),
                (AttemptStage::Queue, false) => self.connect_next(key, tick),
                (AttemptStage::Queue, true) => self.give_up_on_queue(key, tick),
                (AttemptStage::Connecting, _) => self.on_refused(key, io::ErrorKind::TimedOut.into(), tick),
            }
        }
    }

    /// Tries another target, because the program behind a Unix socket does not accept connections.
    fn give_up_on_queue(&mut self, key: usize, tick: Tick<'_>) {
        let Some(connection) = self.connections.get(key) else { return };
        let local = &mut self.rules[connection.rule];
        if let Some(opening) = connection.opening.and_then(|at| self.openings.get_mut(at as usize)) {
            if let Some(slot) = opening.queued.take() {
                opening.tried.push(slot);
                local.queue_full(slot);
            }
            opening.stage = AttemptStage::Waiting;
        }
        self.connect_next(key, tick);
    }

    /// Tries a target with known addresses, because the name servers do not respond.
    fn give_up_on_name(&mut self, key: usize, tick: Tick<'_>) {
        let opening = self.connections.get(key).and_then(|connection| connection.opening);
        if let Some(opening) = opening.and_then(|at| self.openings.get_mut(at as usize)) {
            opening.without_names = true;
            opening.stage = AttemptStage::Waiting;
        }
        self.connect_next(key, tick);
    }
}

/// Logs the cause if a connection finds no target, because the connection log does not include it. Later
/// connections are not logged until one succeeds again.
fn tell_unreachable(state: &RuleState, obstacle: Option<(Address, io::Error)>) {
    if !state.is_now_unreachable() {
        return;
    }
    let rule = &state.rule.id.0;
    match obstacle {
        Some((address, error)) => {
            // This machine no longer has the source address, or all its ports towards the target are in use
            // (connect(2)).
            let remedy = if error.kind() == io::ErrorKind::AddrNotAvailable {
                "; check that `source` is an address of this machine and net.ipv4.ip_local_port_range is wide enough"
            } else {
                ""
            };
            tracing::warn!(
                rule, to = %address, %error, "no target is reachable; resetting clients{remedy}"
            );
        }
        None => {
            tracing::warn!(
                rule,
                "no target has an address; resetting clients; check the host names of the targets"
            );
        }
    }
}
