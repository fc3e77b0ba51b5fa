//! Receives messages at clients and datagrams at peers.

use std::net::{Ipv4Addr, SocketAddr};

use turnpike_probe::connection::ProbeConnection;
use turnpike_wire::{
    channel_data::{ChannelData, ChannelRange},
    stun::{self, Class, View, kind, method},
};

use super::{
    message::{self, Expected, payload},
    seen::Seen,
    session::{Session, State},
    step::{Client, Peer},
};

impl Session<'_> {
    pub(super) fn take(&mut self, client: Client, bytes: &[u8]) {
        let seen = match bytes.first() {
            Some(0x40..=0x7F) => match ChannelData::parse_within(ChannelRange::Rfc5766, bytes) {
                Ok(data) if is_payload(data.payload()) => {
                    Some(Seen::Channel(client, data.number().get(), data.payload().len()))
                }
                _ => Some(Seen::Stray(client, "damaged ChannelData")),
            },
            _ => match View::new_checked(bytes) {
                Ok(view) if view.header().class == Class::Indication => self.indication(client, &view),
                Ok(view) => Some(self.answer(client, &view)),
                Err(_) => Some(Seen::Stray(client, "a message that is not STUN")),
            },
        };
        self.seen.extend(seen);
    }

    /// Ignores data from other sequences, which may have used the same ports.
    fn indication(&self, client: Client, view: &View<'_>) -> Option<Seen> {
        let peer = self.peer(view.xor_address(kind::XOR_PEER_ADDRESS)?)?;
        let data = view.get(kind::DATA)?;
        let damaged = Seen::Stray(client, "a damaged Data indication");
        Some(if is_payload(data) { Seen::Data(client, peer, data.len()) } else { damaged })
    }

    fn answer(&mut self, client: Client, view: &View<'_>) -> Seen {
        let state = &mut self.clients[client.0];
        let own = state.connection.as_ref().and_then(ProbeConnection::local_addr);
        let Some(sent) = state.last.as_ref().filter(|sent| sent.transaction == view.header().transaction)
        else {
            return Seen::Stray(client, "a response without a request");
        };
        // A wildcard socket does not know its address; on loopback it sends from 127.0.0.1.
        let own = own.map(|own| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), own.port()));
        let expected = Expected {
            own,
            key: &sent.key,
            relays: state.relays,
            is_even: sent.is_even,
            is_again: sent.is_again,
        };
        let Some(answer) = message::read(view, &expected) else { return Seen::Stray(client, "a request") };
        if let Some(challenge) = message::challenge(view) {
            state.challenge = challenge;
        }
        if (answer.method, answer.code) == (method::ALLOCATE, 0) {
            state.user = sent.auth;
            state.relays = [None; 2];
            let relayed = view.attributes().filter(|attribute| attribute.kind == kind::XOR_RELAYED_ADDRESS);
            for address in relayed.filter_map(|it| stun::xor_address(it.value, &sent.transaction)) {
                state.relays[usize::from(address.is_ipv6())] = Some(address);
            }
            if let Some(token) = view.get(kind::RESERVATION_TOKEN) {
                self.token = token.to_vec();
            }
        }
        Seen::Answer(client, answer)
    }

    pub(super) fn hear_peers(&mut self) {
        let mut buffer = [0; 2048];
        for (peer, socket, _) in &self.peers {
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let is_of = |state: &State| state.relays.contains(&Some(from));
                if let Some(client) = self.clients.iter().position(is_of).map(Client) {
                    let damaged = Seen::Stray(client, "a damaged datagram at a peer");
                    let whole = Seen::Relayed(*peer, client, length);
                    self.seen.push(if is_payload(&buffer[..length]) { whole } else { damaged });
                }
            }
        }
    }

    fn peer(&self, address: SocketAddr) -> Option<Peer> {
        let peer = self.peers.iter().find(|(.., known)| *known == address).map(|(peer, ..)| *peer);
        let is_relay = |state: &State| state.relays.contains(&Some(address));
        peer.or_else(|| self.clients.iter().position(is_relay).map(|index| Peer::Relay(Client(index))))
    }
}

fn is_payload(bytes: &[u8]) -> bool {
    u16::try_from(bytes.len()).is_ok_and(|length| payload(length) == bytes)
}
