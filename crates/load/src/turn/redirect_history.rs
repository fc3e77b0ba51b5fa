//! Servers and ports that one client has used.

use std::net::SocketAddr;

use turnpike_turn::client::{Failure, Request};

use crate::LoadError;

const MAX_HOPS: usize = 5;

/// Returns true if the server refused an Allocate request because it still has an allocation for the client's port (437).
pub(super) fn is_taken_port(request: Request, failure: &Failure) -> bool {
    request == Request::Allocate && matches!(failure, Failure::Refused { code: 437, .. })
}

pub(super) struct RedirectHistory {
    pub(super) server: SocketAddr,
    pub(super) left: Vec<SocketAddr>,
    pub(super) taken_ports: usize,
}

impl RedirectHistory {
    pub(super) fn new(server: SocketAddr) -> Self {
        Self { server, left: Vec::new(), taken_ports: 0 }
    }

    pub(super) fn advance(&mut self, to: SocketAddr) -> Result<(), LoadError> {
        let from = self.server;
        let refused = |why| Err(LoadError::Redirected { from, to, why });
        if to.port() == 0 || to.ip().is_unspecified() || to.ip().is_multicast() {
            return refused("which is not a server address");
        }
        // If a redirect leads to a server that has already received this request, the request fails (RFC 8489 section
        // 10).
        if to == from || self.left.contains(&to) {
            return refused("where it had already been: the servers redirect in a loop");
        }
        if self.left.len() == MAX_HOPS {
            return refused("after five other redirects: too many in a row");
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
    fn a_client_follows_five_redirects_and_visits_no_server_twice() {
        let mut history = RedirectHistory::new(address(1));
        for next in 2..=6 {
            history.advance(address(next)).expect("another server");
            assert_eq!(history.server, address(next));
            for been in 1..=next {
                let circle = history.advance(address(been)).expect_err("a loop").to_string();
                assert!(circle.contains("in a loop"), "{circle}");
            }
        }
        let far = history.advance(address(7)).expect_err("too far").to_string();
        assert!(far.contains("too many"), "{far}");
        assert_eq!(history.server, address(6));
    }

    #[test]
    fn redirects_to_impossible_addresses_are_rejected() {
        let mut history = RedirectHistory::new(address(1));
        for nowhere in ["0.0.0.0:3478", "[::]:3478", "224.0.0.1:3478", "192.0.2.9:0"] {
            let to = nowhere.parse().expect("an address");
            assert!(history.advance(to).is_err_and(|error| error.to_string().contains(nowhere)));
        }
    }
}
