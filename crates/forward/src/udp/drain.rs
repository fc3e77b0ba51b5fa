//! The end of listening: who is served until the end, and how the port becomes free for others meanwhile.
//!
//! A session that goes on gets a socket of its own, bound to the address that its client asks and connected to the client. The
//! kernel gives such a socket what comes from this client, before all that merely listen on the port, and everything else to
//! whoever listens there next (SO_REUSEPORT among processes of one user, ip(7); since Linux 5.3 it tells the two apart reliably).

use std::{
    cmp::Reverse,
    io,
    net::{IpAddr, SocketAddr, SocketAddrV6},
    time::Duration,
};

use hashbrown::HashMap;
use turnpike_net::{Datapath, UdpOptions, UdpSocket};

use super::{
    Engine, Tick,
    outgoing::BUFFER,
    rule_state::{Kind, Listener},
    sessions::{Inward, Key, Session, Stage, connected},
    tokens::{inward_token, narrow},
};
use crate::EndReason;

/// A UDP session without a datagram for so long holds up no drain: longer than the round trip of a question and its answer, or than
/// a lull of a call, shorter than anybody waits for a restart. UDP has no end, so that a session is "open" for its idle timeout
/// after its last datagram.
const QUIET: Duration = Duration::from_secs(2);
/// Sessions of one port that a worker serves to the end, those with the latest datagrams. All their sockets are in one chain of the
/// kernel's table, which it walks for each datagram (before Linux 6.13).
const MOST: usize = 1024;
/// Rounds of reading what waits at a listener that is to be closed; a flood must not keep it open.
const LAST_ROUNDS: usize = 16;

impl Engine {
    /// Takes no new sessions. Those of UDP clients that are quiet end, now or when they fall quiet; those of TCP clients live on.
    pub fn drain(&mut self, tick: &mut Tick<'_>) {
        self.draining = true;
        self.recall(tick);
        self.listeners.retain(|_, listener| matches!(listener.kind, Kind::Datagrams(_)));
        self.send_queued();
        let quiet = u64::try_from(QUIET.as_millis()).unwrap_or(u64::MAX);
        let mut kept: HashMap<u32, usize> = HashMap::new();
        let rules: Vec<usize> = self.rules.iter().map(|(slot, _)| slot).collect();
        for slot in rules {
            let state = &mut self.rules[slot];
            if !state.hears_datagrams() {
                continue;
            }
            state.lists.active.patience = state.lists.active.patience.min(quiet);
            let rule = narrow(slot);
            let mut sessions = self.sessions.of_rule(rule);
            sessions.sort_by_key(|at| Reverse(self.sessions.stamp(*at)));
            for at in sessions {
                let Some(Session { inward: Inward::Datagrams { key, .. }, stage, .. }) =
                    self.sessions.get(at)
                else {
                    continue;
                };
                let recent = *stage == Stage::Connecting || tick.now < self.sessions.stamp(at) + quiet;
                let kept = kept.entry(key.listener).or_default();
                if recent && *kept < MOST && self.set_apart(at, tick).is_ok() {
                    *kept += 1;
                } else {
                    self.end(at, EndReason::Shutdown, tick);
                }
            }
            self.expect(rule);
        }
        self.send_queued();
    }

    /// Closes the listeners. To be called when all who share their ports have drained: until then the kernel may bring datagrams of
    /// sessions here that have sockets of their own now.
    pub fn unlisten(&mut self, tick: &mut Tick<'_>) {
        let listeners: Vec<_> = self
            .listeners
            .iter()
            .filter_map(|(slot, listener)| match listener.kind {
                Kind::Datagrams(socket) => Some((narrow(slot), listener.rule, socket)),
                Kind::Streams { .. } => None,
            })
            .collect();
        for (listener, _, socket) in &listeners {
            for _ in 0..LAST_ROUNDS {
                let more = self.receive_from_clients(Key::of_listener(*listener), *socket, tick);
                self.flush();
                if !more {
                    break;
                }
            }
        }
        for (_, rule, _) in listeners {
            drop(self.take_listeners(rule, tick.poller));
        }
    }

    /// Gives the client of a session a socket of its own.
    fn set_apart(&mut self, at: u32, tick: &Tick<'_>) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let Some(Session { inward: Inward::Datagrams { key, reply }, .. }) = self.sessions.get_mut(at) else {
            return Err(gone());
        };
        let Some(Listener { kind: Kind::Datagrams(shared), .. }) = self.listeners.get(key.listener as usize)
        else {
            return Err(gone());
        };
        let listening = self.sockets.get(*shared).ok_or_else(gone)?.local_addr();
        let options = UdpOptions {
            reuse_port: true,
            recv_buffer: Some(BUFFER),
            send_buffer: Some(BUFFER),
            gro: self.datapath == Datapath::Gso,
            ..UdpOptions::default()
        };
        // What others send between the two calls is read all the same, and served by whose it is.
        let socket = UdpSocket::bind(asked(listening, key), &options)?;
        socket.connect(key.client)?;
        tick.poller.add(&socket, inward_token(at))?;
        *reply = connected(self.sockets.insert(socket));
        Ok(())
    }
}

/// The address that a client asks. A link-local one means something with an interface only, which is the client's.
fn asked(listening: SocketAddr, key: &Key) -> SocketAddr {
    match (key.local, key.client) {
        (None, _) => listening,
        (Some(IpAddr::V6(ip)), SocketAddr::V6(client)) if ip.is_unicast_link_local() => {
            SocketAddrV6::new(ip, listening.port(), 0, client.scope_id()).into()
        }
        (Some(ip), _) => SocketAddr::new(ip, listening.port()),
    }
}
