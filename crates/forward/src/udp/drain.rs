//! Draining: live sessions are served until they end, while the port becomes free for other processes.
//!
//! Each session that continues gets its own socket, bound to the address that its client uses and connected
//! to the client. The kernel prefers this socket for datagrams of that client and passes all others to the
//! next listener on the port (SO_REUSEPORT among processes of one user, ip(7); reliable since Linux 5.3).

use std::{
    cmp::Reverse,
    io,
    net::{IpAddr, SocketAddr, SocketAddrV6},
    time::Duration,
};

use hashbrown::HashMap;
use turnpike_net::{Datapath, UdpOptions, UdpSocket};

use super::{
    Engine, UdpTick,
    outgoing::BUFFER,
    rule_state::{Listener, SocketKind},
    sessions::{Inward, Key, Session, SessionStage, connected},
    tokens::{inward_token, narrow},
};
use crate::EndReason;

/// Idle time after which a UDP session no longer delays a drain: longer than a round trip or a pause in a
/// call, but short enough not to hold up a restart. UDP has no end of stream, so a session stays open until
/// its idle timeout.
const QUIET: Duration = Duration::from_secs(2);
/// Maximum number of sessions per port and worker that are served until they end; the most recently active
/// ones are chosen. The kernel keeps their sockets in one chain and walks it for each datagram (before Linux
/// 6.13).
const MOST: usize = 1024;
/// Maximum number of reads from a listener before it is closed, so that a flood cannot delay closing it.
const LAST_ROUNDS: usize = 16;

impl Engine {
    /// Stops accepting sessions. Sessions of UDP clients end once they are idle; those of TCP clients
    /// continue.
    pub fn drain(&mut self, tick: &mut UdpTick<'_>) {
        self.draining = true;
        self.recall(tick);
        self.listeners.retain(|_, listener| matches!(listener.kind, SocketKind::Datagrams(_)));
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
                let recent = *stage == SessionStage::Connecting || tick.now < self.sessions.stamp(at) + quiet;
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

    /// Closes the listeners. Call this after all workers that share the ports have drained: until then, the
    /// kernel may deliver datagrams to this worker although their sessions have their own sockets.
    pub fn unlisten(&mut self, tick: &mut UdpTick<'_>) {
        let listeners: Vec<_> = self
            .listeners
            .iter()
            .filter_map(|(slot, listener)| match listener.kind {
                SocketKind::Datagrams(socket) => Some((narrow(slot), listener.rule, socket)),
                SocketKind::Streams { .. } => None,
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

    /// Gives a session its own socket towards the client.
    fn set_apart(&mut self, at: u32, tick: &UdpTick<'_>) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let Some(Session { inward: Inward::Datagrams { key, reply }, .. }) = self.sessions.get_mut(at) else {
            return Err(gone());
        };
        let Some(Listener { kind: SocketKind::Datagrams(shared), .. }) =
            self.listeners.get(key.listener as usize)
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
        // Datagrams of other clients that arrive between bind and connect are read and handled by their
        // sessions.
        let socket = UdpSocket::bind(asked(listening, key), &options)?;
        socket.connect(key.client)?;
        tick.poller.add(&socket, inward_token(at))?;
        *reply = connected(self.sockets.insert(socket));
        Ok(())
    }
}

/// Address used by the client. A link-local address needs an interface; the client's is used.
fn asked(listening: SocketAddr, key: &Key) -> SocketAddr {
    match (key.local, key.client) {
        (None, _) => listening,
        (Some(IpAddr::V6(ip)), SocketAddr::V6(client)) if ip.is_unicast_link_local() => {
            SocketAddrV6::new(ip, listening.port(), 0, client.scope_id()).into()
        }
        (Some(ip), _) => SocketAddr::new(ip, listening.port()),
    }
}
