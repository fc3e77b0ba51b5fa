//! A user who requests one allocation and deletes it immediately.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use turnpike_testkit::stun::{self, attribute::LIFETIME, kind::REFRESH};

use super::Server;

pub(super) struct Visitor {
    client: stun::Client,
    challenge: stun::Challenge,
}

impl Visitor {
    /// A client with a challenge that it has not used yet.
    pub(super) fn of(server: &Server) -> Self {
        let client = stun::Client::from(way_to(server.address), server.address);
        let (_, _, challenge) = client.challenge();
        Self { client, challenge }
    }

    /// Sends an Allocate with the challenge; returns the error code, or `None` after deleting the allocation. A new nonce from a 438 is
    /// kept for the next call.
    pub(super) fn asks(&mut self, user: &str, password: &str) -> Option<u16> {
        let answer = self.client.allocate_once(user, password, &self.challenge);
        let error = answer.error();
        match error {
            Some(438) => self.challenge = answer.challenge(),
            Some(_) => {}
            None => {
                let credentials = (user, password, &self.challenge);
                self.client.send_raw(&stun::signed_request(REFRESH, &[(LIFETIME, &[0; 4])], credentials));
                let deleted = self.client.receive().expect("a request is answered");
                assert_eq!(deleted.error(), None, "the allocation can be deleted");
            }
        }
        error
    }
}

impl Server {
    pub(super) fn answers(&self, user: &str, password: &str) -> Option<u16> {
        let mut visitor = Visitor::of(self);
        match visitor.asks(user, password) {
            Some(438) => visitor.asks(user, password),
            answered => answered,
        }
    }
}

fn way_to(server: SocketAddr) -> IpAddr {
    let any = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).expect("a free port");
    socket.connect(server).expect("the destination is reachable");
    socket.local_addr().expect("the socket is connected").ip()
}
