//! Attacks by one authenticated user on another user's allocation: from the owner's address, with the owner's ticket, or with the ID of the
//! owner's connection.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, UdpSocket},
};

use turnpike_testkit::stun::{self, attribute::*, kind::*, xor_address};

use super::{
    TRANSPORTS,
    wire::{User, Wire},
};
use turnpike_trials::{Certificate, PASSWORD, SOON, Serve, USER, V4};

const OTHER: (&str, &str) = ("mallory", "guessed");
const WRONG_CREDENTIALS: u16 = 441;

fn serve(certificate: &Certificate) -> Serve {
    Serve::start_secured(certificate, &["--workers", "1", "--user", "mallory:guessed"])
}

fn relays(owner: &mut User, relayed: SocketAddr, peer: &UdpSocket) {
    let address = xor_address(peer.local_addr().expect("the socket is bound"), 0);
    owner.wire.send(&stun::plain_message(SEND, &[(XOR_PEER_ADDRESS, &address), (PAYLOAD, b"ours")]));
    let mut buffer = [0; 64];
    let (len, from) = peer.recv_from(&mut buffer).expect("the datagram arrives");
    assert_eq!((&buffer[..len], from), (&b"ours"[..], relayed));
    peer.send_to(b"back", relayed).expect("the send succeeds");
    let message = owner.wire.hear();
    assert!(message.windows(4).any(|bytes| bytes == b"back"), "{message:02x?}");
}

#[test]
fn a_user_cannot_take_over_end_or_use_another_users_allocation() {
    let certificate = Certificate::new(&["turn.example.org"]);
    let serve = serve(&certificate);
    let peer = UdpSocket::bind((V4, 0)).expect("a free port");
    peer.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
    let permitted = xor_address(peer.local_addr().expect("the socket is bound"), 0);
    for transport in TRANSPORTS {
        let wire = || Wire::new(transport, serve.address_of(transport, V4));
        let mut owner = User::new(wire(), USER, PASSWORD);
        let granted = owner.allocate(17, &[(MOBILITY_TICKET, &[])]);
        let (ticket, relayed) = (granted.attribute(MOBILITY_TICKET), granted.address(XOR_RELAYED_ADDRESS));
        let answer = owner.ask(CREATE_PERMISSION, &[(XOR_PEER_ADDRESS, &permitted)]);
        assert_eq!(answer.error(), None, "over {transport}");
        relays(&mut owner, relayed, &peer);
        // The requests come from the owner's 5-tuple, because over UDP anyone can forge the source address.
        let end: (u16, &[u8]) = (LIFETIME, &[0; 4]);
        let channel: [(u16, &[u8]); 2] = [(CHANNEL_NUMBER, &[0x40, 0, 0, 0]), (XOR_PEER_ADDRESS, &permitted)];
        for (asked, attributes) in [
            (REFRESH, &[end][..]),
            (REFRESH, &[]),
            (CREATE_PERMISSION, &[(XOR_PEER_ADDRESS, &permitted[..])]),
            (CHANNEL_BIND, &channel),
        ] {
            let answer = owner.ask_as(OTHER, asked, attributes);
            assert_eq!(answer.error(), Some(WRONG_CREDENTIALS), "{asked:#06x} over {transport}");
        }
        let mut thief = User::new(wire(), OTHER.0, OTHER.1);
        for attributes in [&[(MOBILITY_TICKET, &ticket[..])][..], &[(MOBILITY_TICKET, &ticket), end]] {
            let answer = thief.ask(REFRESH, attributes);
            assert_eq!(answer.error(), Some(WRONG_CREDENTIALS), "over {transport}");
        }
        relays(&mut owner, relayed, &peer);
        let mut moved = User::new(wire(), USER, PASSWORD);
        assert_eq!(moved.ask(REFRESH, &[(MOBILITY_TICKET, &ticket)]).error(), None, "over {transport}");
        relays(&mut moved, relayed, &peer);
        assert_eq!(moved.ask(REFRESH, &[end]).error(), None, "over {transport}");
    }
}

/// RFC 6062: only the user who owns a connection to a peer can bind it, even if another user knows its ID.
#[test]
fn only_the_owner_can_bind_a_connection_to_a_peer() {
    let certificate = Certificate::new(&["turn.example.org"]);
    let serve = serve(&certificate);
    let listener = TcpListener::bind((V4, 0)).expect("a free port");
    let peer = xor_address(listener.local_addr().expect("the socket is bound"), 0);
    for transport in ["tcp", "tls"] {
        let wire = || Wire::new(transport, serve.address_of(transport, V4));
        let mut owner = User::new(wire(), USER, PASSWORD);
        owner.allocate(6, &[]);
        let answer = owner.ask(CONNECT, &[(XOR_PEER_ADDRESS, &peer)]);
        assert_eq!(answer.error(), None, "over {transport}");
        let (mut accepted, _) = listener.accept().expect("the socket is connected");
        let id = answer.attribute(CONNECTION_ID);
        let mut thief = User::new(wire(), OTHER.0, OTHER.1);
        let refused = thief.ask(CONNECTION_BIND, &[(CONNECTION_ID, &id)]);
        assert_eq!(refused.error(), Some(WRONG_CREDENTIALS), "over {transport}");
        let mut data = User::new(wire(), USER, PASSWORD);
        assert_eq!(data.ask(CONNECTION_BIND, &[(CONNECTION_ID, &id)]).error(), None, "over {transport}");
        data.wire.send(b"for the peer");
        let mut buffer = [0; 12];
        accepted.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
        accepted.read_exact(&mut buffer).expect("the datagram arrives");
        assert_eq!(&buffer, b"for the peer");
        accepted.write_all(b"back").expect("the connection is open");
        assert_eq!(data.wire.read(4), b"back", "over {transport}");
    }
}
