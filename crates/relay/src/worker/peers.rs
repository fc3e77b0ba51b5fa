//! TCP relaying (RFC 6062): connects the state machine with the sockets of [`crate::peers`].

use turnpike_net::Event;
use turnpike_turn::{
    server::{
        AllocationSlot, Client, ConnectError, ConnectRequest, ConnectionId, Family, OpenRelay, OpenResult,
        PeerConnection, RelayId,
    },
    time::Now,
};
use turnpike_wire::address::canonical;

use super::{TrailingBytes, Worker};
use crate::{
    peers::{PeerEvent, Purse},
    ports::Refusal,
    stream::CloseReason,
};

/// Maximum connections accepted per relayed transport address and tick.
const ACCEPTS: usize = 32;

impl Worker {
    pub(super) fn open_tcp(&mut self, now: Now, allocation: AllocationSlot, wish: &OpenRelay) -> OpenResult {
        let first = self.address_for(allocation, wish.family);
        let realm = self.server.owner(allocation).unwrap_or_default().realm;
        let (socket, relayed) = match self.ports.open_tcp(wish.family, realm, first, now.ms) {
            Ok(opened) => opened,
            Err(refusal) => return self.refuse(refusal),
        };
        let bound = socket.local_addr();
        let relay = RelayId { allocation, family: wish.family };
        if self.peers.listen(relay, socket, &self.frame.poller).is_err() {
            self.ports.release(bound, now.ms);
            return self.refuse(Refusal::File);
        }
        OpenResult::Opened { relayed }
    }

    pub(super) fn connect(&mut self, now: Now, request: &ConnectRequest) {
        if let Err(error) = self.peers.connect(request, &self.frame.poller) {
            let verdict =
                self.server.connected(now, request.relay.allocation, request.connection, Err(error));
            self.out.reply(verdict);
        }
    }

    pub(super) fn give_up(&mut self, now: Now, allocation: AllocationSlot, connection: ConnectionId) {
        self.peers.drop_connection(connection);
        let verdict = self.server.connected(now, allocation, connection, Err(ConnectError::TimedOut));
        self.out.reply(verdict);
    }

    /// Turns the client's connection into the data connection for `connection`; the reply to the client is
    /// already queued. `first` is the data that followed the request.
    pub(super) fn bind(
        &mut self,
        now: Now,
        connection: ConnectionId,
        client: &Client,
        first: TrailingBytes<'_>,
    ) {
        let first = self.all_behind(client, first);
        let taken =
            self.out.streams.detach(client, &self.rx, &self.frame.poller, CloseReason::DataConnection);
        match taken {
            Some(taken) => {
                let purse = &mut Purse { now, server: &mut self.server };
                self.peers.bind(connection, taken, first, &self.frame.poller, purse);
            }
            None => {
                self.peers.drop_connection(connection);
                self.server.connection_ended(now, connection, 0, 0);
            }
        }
        self.report(now);
    }

    pub(super) fn serve_peers(&mut self, now: Now, event: &Event) {
        let purse = &mut Purse { now, server: &mut self.server };
        if let Some(place) = self.peers.on_event(event, purse) {
            self.accept_peers(now, place);
        }
        self.report(now);
    }

    pub(super) fn resume_peers(&mut self, now: Now) {
        self.peers.handle_timeout(now.ms, &self.frame.poller);
        self.peers.resume(&mut Purse { now, server: &mut self.server });
        self.report(now);
        self.frame.dirty = true;
    }

    fn accept_peers(&mut self, now: Now, place: usize) {
        for _ in 0..ACCEPTS {
            let Some((relay, socket, peer)) = self.peers.accept(place, now.ms, &self.frame.poller) else {
                return;
            };
            // A socket that is refused closes on drop.
            if let PeerConnection::Accept { connection, client, link, bytes } =
                self.server.peer_connected(now, relay, canonical(peer))
            {
                if self.peers.hold(relay.allocation, connection, socket, &self.frame.poller).is_ok() {
                    self.out.reply_to(&client, link, bytes);
                } else {
                    self.server.connection_ended(now, connection, 0, 0);
                }
            }
        }
    }

    fn report(&mut self, now: Now) {
        while let Some(event) = self.peers.next_event() {
            match event {
                PeerEvent::Connected(allocation, connection, result) => {
                    let verdict = self.server.connected(now, allocation, connection, result);
                    self.out.reply(verdict);
                }
                PeerEvent::Ended(connection, to_peer, to_client) => {
                    self.server.connection_ended(now, connection, to_peer, to_client);
                }
            }
        }
    }

    pub(super) fn close_tcp(&mut self, now: Now, relay: RelayId) {
        if let Some(bound) = self.peers.close_listener(relay) {
            self.ports.release(bound, now.ms);
        }
    }

    pub(super) fn close_all_tcp(&mut self, now: Now, allocation: AllocationSlot) {
        self.peers.close_connections(allocation);
        for family in [Family::V4, Family::V6] {
            self.close_tcp(now, RelayId { allocation, family });
        }
    }
}
