//! Listeners of a worker: opened at startup and by reloads, closed once their last client has gone.

use std::{io, mem, net::SocketAddr, sync::Arc};

use turnpike_net::SocketId;
use turnpike_turn::{
    server::{ServerConfig, Transport},
    time::Now,
};

use super::{Listener, NO_TRAILING, Role, Worker};
use crate::{
    Config, DtlsConfig, Layout, StreamConfig,
    listening::{Closing, ClosingClients, ListenerSockets, SocketSource},
};

const LOOK_MS: u64 = 1000;

pub(crate) struct Reconfigure {
    pub(crate) server: Arc<ServerConfig>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) streams: Arc<StreamConfig>,
    pub(crate) dtls: Arc<DtlsConfig>,
    /// Configuration; the fields above take precedence over it.
    pub(crate) config: Arc<Config>,
    pub(crate) sockets: ListenerSockets,
}

#[derive(Default)]
pub(super) struct Lingering {
    list: Vec<(Closing, bool)>,
    look_ms: u64,
}

impl Lingering {
    pub(super) fn due(&self) -> Option<u64> {
        (!self.list.is_empty()).then_some(self.look_ms)
    }
}

impl Worker {
    pub(super) fn reconfigure(&mut self, now: Now, new: Reconfigure) {
        let Reconfigure { server, layout, streams, dtls, config, sockets } = new;
        self.shared.reconfigure(&config);
        let (channels, keys) = (server.channels, server.nonce_keys.clone());
        self.server.reconfigure(now, server);
        if let Some(offload) = &mut self.offload {
            offload.restrict(channels, &mut self.server, &self.out.listeners);
        }
        self.carry_out_effects(now, NO_TRAILING);
        self.layout = Arc::clone(&layout);
        self.handed_on.limit(&streams.limits, config.workers);
        self.out.streams.reconfigure(Arc::clone(&layout), streams);
        self.out.dtls.reconfigure(layout, dtls, keys);
        // Close listeners without clients before new listeners reuse their places.
        self.close_gone(now);
        let is_open = |closing: &Closing| {
            let mut placed = self.layout.placed(closing.transport);
            placed.any(|placed| placed.place == closing.place && placed.open)
        };
        self.lingering.list.retain(|(closing, _)| !is_open(closing));
        if let Err(error) = self.listen(sockets) {
            tracing::error!(
                worker = self.frame.number,
                %error,
                "cannot watch a new listener, so this worker does not serve it: raise fs.epoll.max_user_watches"
            );
        }
        self.frame.dirty = true;
    }

    pub(super) fn listen(&mut self, sockets: ListenerSockets) -> io::Result<()> {
        let ListenerSockets { udp, dtls, streams, closing } = sockets;
        for closing in closing {
            if closing.transport == Transport::Tcp {
                self.out.streams.close_listener(closing.place, self.now().ms, &self.frame.poller);
            } else {
                self.lingering.list.push((closing, true));
                // Check immediately, because the last client may have left some time ago.
                self.lingering.look_ms = 0;
            }
        }
        for (place, source) in udp {
            let (socket, bound, held) = self.open_listener(source, Transport::Dtls)?;
            let number = self.layout.number(Transport::Udp, place, None);
            if self.listeners.len() <= place {
                self.listeners.resize_with(place + 1, || Listener::NONE);
            }
            self.listeners[place] = Listener { socket, bound, number };
            let index = usize::from(number.0);
            if self.out.listeners.len() <= index {
                self.out.listeners.resize(index + 1, None);
            }
            self.out.listeners[index] = Some((socket, bound.ip().is_unspecified()));
            let role = &mut self.roles[socket.0 as usize];
            *role = match *role {
                Role::Dtls(secure) => Role::Both(place, secure),
                _ => Role::Listener(place),
            };
            if let Some(clients) = held {
                clients.leave();
            }
        }
        for (place, source) in dtls {
            let (socket, bound, held) = self.open_listener(source, Transport::Udp)?;
            self.out.dtls.listen(place, socket, bound);
            let role = &mut self.roles[socket.0 as usize];
            *role = match *role {
                Role::Listener(plain) => Role::Both(plain, place),
                _ => Role::Dtls(place),
            };
            if let Some(clients) = held {
                clients.leave();
            }
        }
        for (place, socket) in streams {
            self.out.streams.listen(place, socket, &self.frame.poller)?;
        }
        Ok(())
    }

    /// Opens the socket of a new listener and returns its address. If a closing listener of the `other` kind
    /// shares the socket, also returns that listener's clients.
    fn open_listener(
        &mut self,
        source: SocketSource,
        other: Transport,
    ) -> io::Result<(SocketId, SocketAddr, Option<Arc<ClosingClients>>)> {
        match source {
            SocketSource::Own(socket) => {
                let bound = socket.local_addr();
                // Another process may have turned GRO off.
                self.ports.prepare(&socket);
                Ok((self.adopt(socket, Role::Free)?, bound, None))
            }
            SocketSource::Shared(place, clients) => {
                let (socket, bound) = self.listening(other, place).ok_or(io::ErrorKind::NotFound)?;
                Ok((socket, bound, clients))
            }
        }
    }

    pub(super) fn listening(&self, transport: Transport, place: usize) -> Option<(SocketId, SocketAddr)> {
        if transport == Transport::Dtls {
            return self.out.dtls.listening(place);
        }
        let listener = self.listeners.get(place).filter(|it| it.socket != Listener::NONE.socket);
        listener.map(|listener| (listener.socket, listener.bound))
    }

    /// Closes listeners that have no clients.
    pub(super) fn close_forsaken(&mut self, now: Now) {
        self.lingering.look_ms = now.ms + LOOK_MS;
        for (closing, counts) in &mut self.lingering.list {
            let mut numbers = self.layout.numbers(closing.transport, closing.place);
            let has_clients = |number| self.server.serves(number) || self.tunnels.lead_from(number);
            if *counts && !numbers.any(has_clients) {
                *counts = false;
                closing.clients.leave();
            }
        }
        self.close_gone(now);
    }

    /// Closes listeners without clients on any worker.
    fn close_gone(&mut self, now: Now) {
        let list = mem::take(&mut self.lingering.list);
        let (gone, list) = list.into_iter().partition(|(closing, _)| closing.clients.are_gone());
        self.lingering.list = list;
        for (closing, _) in gone {
            self.close_listener(now, &closing);
        }
    }

    fn close_listener(&mut self, now: Now, closing: &Closing) {
        let place = closing.place;
        let Some((socket, _)) = self.listening(closing.transport, place) else { return };
        if closing.transport == Transport::Dtls {
            self.out.dtls.close_listener(place, &mut self.out.tx);
        } else {
            let closed = mem::replace(&mut self.listeners[place], Listener::NONE);
            if let Some(way) = self.out.listeners.get_mut(usize::from(closed.number.0)) {
                *way = None;
            }
        }
        let role = &mut self.roles[socket.0 as usize];
        *role = match (*role, closing.transport) {
            (Role::Both(_, secure), Transport::Udp) => Role::Dtls(secure),
            (Role::Both(plain, _), Transport::Dtls) => Role::Listener(plain),
            _ => Role::Free,
        };
        if matches!(role, Role::Free) {
            self.close_socket(socket);
        }
        self.carry_out_effects(now, NO_TRAILING);
    }

    /// Closes a socket after its queued datagrams have been sent. The arena keeps data that has not been
    /// routed yet.
    fn close_socket(&mut self, id: SocketId) {
        self.out.tx.flush(&mut self.sockets, &self.rx);
        if let Some(offload) = &mut self.offload {
            offload.socket_closed(id);
        }
        if let Some(socket) = self.sockets.remove(id) {
            // If another process shares the socket, closing it does not remove it from the poller.
            let _ = self.frame.poller.remove(&socket);
        }
    }
}
