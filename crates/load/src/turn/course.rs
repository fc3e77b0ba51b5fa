//! Servers and ports that one client has been at.

use std::net::SocketAddr;

use turnpike_turn::client::{Failure, Request};

use crate::LoadError;

/// Servers that one client is sent on to, one after the other.
const MAX_HOPS: usize = 5;

/// Whether the client's port is of another allocation.
pub(super) fn is_taken_port(request: Request, failure: &Failure) -> bool {
    request == Request::Allocate && matches!(failure, Failure::Refused { code: 437, .. })
}

/// Where a client stands.
pub(super) struct Course {
    /// The server that it talks to.
    pub(super) server: SocketAddr,
    /// Those that sent it on.
    pub(super) left: Vec<SocketAddr>,
    /// On so many of its ports a server had an allocation of somebody before, one after the other.
    pub(super) taken_ports: usize,
}

impl Course {
    pub(super) fn new(server: SocketAddr) -> Self {
        Self { server, left: Vec::new(), taken_ports: 0 }
    }

    /// The next server, if it is one to go to.
    pub(super) fn advance(&mut self, to: SocketAddr) -> Result<(), LoadError> {
        let from = self.server;
        let refused = |why| Err(LoadError::Redirected { from, to, why });
        if to.port() == 0 || to.ip().is_unspecified() || to.ip().is_multicast() {
            return refused("which is no address of a server");
        }
        // RFC 8489 section 10: a redirection to where this request was sent in the last five minutes is none, and the request has
        // failed.
        if to == from || self.left.contains(&to) {
            return refused("where it had been before: the servers send their clients round in a circle");
        }
        if self.left.len() == MAX_HOPS {
            return refused("after five others that did so: too many in a row");
        }
        self.left.push(from);
        self.server = to;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> SocketAddr {
        ([192, 0, 2, last], 3478).into()
    }

    #[test]
    fn a_client_goes_to_five_others_and_to_none_twice() {
        let mut course = Course::new(address(1));
        for next in 2..=6 {
            course.advance(address(next)).expect("another server");
            assert_eq!(course.server, address(next));
            for been in 1..=next {
                let circle = course.advance(address(been)).expect_err("a circle").to_string();
                assert!(circle.contains("circle"), "{circle}");
            }
        }
        let far = course.advance(address(7)).expect_err("too far").to_string();
        assert!(far.contains("too many"), "{far}");
        assert_eq!(course.server, address(6));
    }

    #[test]
    fn what_is_no_server_is_not_gone_to() {
        let mut course = Course::new(address(1));
        for nowhere in ["0.0.0.0:3478", "[::]:3478", "224.0.0.1:3478", "192.0.2.9:0"] {
            let to = nowhere.parse().expect("an address");
            assert!(course.advance(to).is_err_and(|error| error.to_string().contains(nowhere)));
        }
    }
}
