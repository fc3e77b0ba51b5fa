//! A minimal TURN client for a server without authentication, and its peer.

use crate::prelude::*;
use turnpike_testkit::stun::{self, Transaction, UDP, attribute::*, kind::*, xor_address};

pub(crate) struct Client {
    pub(crate) stun: stun::Client,
    pub(crate) relayed: SocketAddr,
}

impl Client {
    pub(crate) fn allocate(own: IpAddr, server: SocketAddr, relay_v6: bool) -> Self {
        let stun = stun::Client::from(own, server);
        let mut client = Self { stun, relayed: server };
        let family = [if relay_v6 { 2 } else { 1 }, 0, 0, 0];
        let attributes = [(REQUESTED_TRANSPORT, &UDP[..]), (REQUESTED_ADDRESS_FAMILY, &family)];
        client.relayed =
            client.ask(ALLOCATE, Transaction::unique(), &attributes).address(XOR_RELAYED_ADDRESS);
        client
    }

    pub(crate) fn socket(&self) -> &UdpSocket {
        self.stun.socket()
    }

    pub(crate) fn bind(&self, channel: u16, peer: SocketAddr) {
        let ([high, low], id) = (channel.to_be_bytes(), Transaction::unique());
        let attributes =
            [(CHANNEL_NUMBER, &[high, low, 0, 0][..]), (XOR_PEER_ADDRESS, &xor_address(peer, id))];
        self.ask(CHANNEL_BIND, id, &attributes);
    }

    pub(crate) fn permit(&self, peer: SocketAddr) {
        let id = Transaction::unique();
        self.ask(CREATE_PERMISSION, id, &[(XOR_PEER_ADDRESS, &xor_address(peer, id))]);
    }

    pub(crate) fn refresh(&self, seconds: u32) {
        self.ask(REFRESH, Transaction::unique(), &[(LIFETIME, &seconds.to_be_bytes())]);
    }

    pub(crate) fn send(&self, channel: u16, payload: &[u8]) {
        let mut message = channel.to_be_bytes().to_vec();
        message.extend(u16::try_from(payload.len()).expect("short").to_be_bytes());
        message.extend(payload);
        self.stun.send_raw(&message);
    }

    pub(crate) fn indicate(&self, peer: SocketAddr, payload: &[u8]) {
        let id = Transaction::unique();
        let attributes = [(XOR_PEER_ADDRESS, &xor_address(peer, id)[..]), (PAYLOAD, payload)];
        self.stun.send_raw(&stun::message(SEND, id, &attributes));
    }

    pub(crate) fn receive(&self) -> Option<(u16, Vec<u8>)> {
        let message = self.receive_message()?;
        let number = u16::from_be_bytes([message[0], message[1]]);
        assert!((0x4000..0x8000).contains(&number), "no ChannelData: {message:02x?}");
        assert_eq!(
            usize::from(u16::from_be_bytes([message[2], message[3]])),
            message.len() - 4,
            "its length"
        );
        Some((number, message[4..].to_vec()))
    }

    /// Receives a message; skips duplicate responses to a retransmitted request.
    pub(crate) fn receive_message(&self) -> Option<Vec<u8>> {
        let mut buffer = [0; 4096];
        loop {
            let len = self.socket().recv(&mut buffer).ok()?;
            if buffer[0] != 0x01 {
                return Some(buffer[..len].to_vec());
            }
        }
    }

    fn ask(&self, kind: u16, id: Transaction, attributes: &[(u16, &[u8])]) -> stun::Message {
        let answer = self.stun.ask(&stun::message(kind, id, attributes));
        assert_eq!(answer.kind(), kind | 0x100, "{answer:?}");
        answer
    }
}

pub(crate) fn bound(address: IpAddr) -> UdpSocket {
    let socket = UdpSocket::bind((address, 0)).expect("a free port");
    socket.set_read_timeout(Some(SOON)).expect("not zero");
    socket
}

pub(crate) fn received(peer: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = [0; 4096];
    let (len, from) = peer.recv_from(&mut buffer).expect("a datagram");
    (buffer[..len].to_vec(), from)
}

pub(crate) fn is_silent(socket: &UdpSocket) -> bool {
    socket.set_read_timeout(Some(Duration::from_millis(300))).expect("not zero");
    let silent = socket.recv_from(&mut [0; 4096]).is_err();
    socket.set_read_timeout(Some(SOON)).expect("not zero");
    silent
}
