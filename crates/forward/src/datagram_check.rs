//! Health check of a UDP target: a datagram, sent a few times, and the reply.
//!
//! If no request is configured, a target that does not respond counts as healthy: most services ignore an
//! empty datagram, while a machine with a closed port sends an ICMP error (RFC 1122 section 4.1.3.1). If one
//! is configured, only a response means healthy.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
};

use turnpike_wire::proxy_protocol;

use crate::{Rule, udp::outgoing};

/// Maximum datagrams per check. One is not enough, because 1 % packet loss must not take a target down.
pub(crate) const TRIES: u64 = 3;

/// Maximum length of a response and of an expected prefix.
const ANSWER: usize = 2048;

pub(crate) struct DatagramCheck {
    socket: UdpSocket,
    tries: u64,
}

impl DatagramCheck {
    /// Sends the first datagram, from the rule's source address.
    pub(crate) fn begin(rule: &Rule, target: SocketAddr) -> io::Result<Self> {
        let mut check = Self { socket: outgoing::to_check(rule, target)?, tries: 0 };
        check.ask(rule)?;
        Ok(check)
    }

    /// Handles an attempt that got no response: sends the next datagram and returns `None`, or
    /// returns the result after [`TRIES`] attempts.
    pub(crate) fn go_on(&mut self, rule: &Rule) -> Option<bool> {
        if self.tries == TRIES {
            return Some(rule.health_question.is_none());
        }
        match self.ask(rule) {
            Ok(()) => None,
            Err(_) => Some(false),
        }
    }

    /// Handles a ready socket; returns the result, if known.
    pub(crate) fn hear(&self, rule: &Rule) -> Option<bool> {
        let mut answer = [0; ANSWER];
        match self.socket.recv(&mut answer) {
            Ok(len) => {
                let expected = rule.health_question.as_ref().map_or(&[][..], |question| &question.expect);
                Some(answer[..len].starts_with(expected))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            // Usually an ICMP port unreachable error.
            Err(_) => Some(false),
        }
    }

    fn ask(&mut self, rule: &Rule) -> io::Result<()> {
        self.tries += 1;
        let payload = rule.health_question.as_ref().map_or(&[][..], |question| &question.send);
        // A target that expects PROXY headers gets one that names no client.
        let header = rule.send_proxy.map(proxy_protocol::encode_unknown).unwrap_or_default();
        self.socket.send(&[&header, payload].concat()).map(drop)
    }
}

impl AsFd for DatagramCheck {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::Question;

    fn bound() -> (UdpSocket, SocketAddr) {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let address = socket.local_addr().unwrap();
        (socket, address)
    }

    fn asking(target: SocketAddr, expect: &[u8]) -> Rule {
        let question = Question { send: b"who?".to_vec(), expect: expect.to_vec() };
        Rule { health_question: Some(question), ..crate::testing::rule("t", target) }
    }

    fn heard(check: &DatagramCheck, rule: &Rule) -> bool {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(found) = check.hear(rule) {
                return found;
            }
            assert!(Instant::now() < deadline, "timed out");
            std::thread::yield_now();
        }
    }

    #[test]
    fn closed_port_is_unhealthy() {
        let target = bound().1;
        for rule in [crate::testing::rule("t", target), asking(target, b"")] {
            assert!(!heard(&DatagramCheck::begin(&rule, target).unwrap(), &rule));
        }
    }

    #[test]
    fn silence_is_healthy_only_if_no_request_is_configured() {
        let (socket, target) = bound();
        for (rule, sent, healthy) in
            [(crate::testing::rule("t", target), &b""[..], true), (asking(target, b""), b"who?", false)]
        {
            let mut check = DatagramCheck::begin(&rule, target).unwrap();
            for _ in 1..TRIES {
                assert_eq!((check.hear(&rule), check.go_on(&rule)), (None, None));
            }
            assert_eq!(check.go_on(&rule), Some(healthy));
            for _ in 0..TRIES {
                let mut bytes = [0; 16];
                let len = socket.recv(&mut bytes).unwrap();
                assert_eq!(&bytes[..len], sent);
            }
        }
    }

    #[test]
    fn answer_with_the_expected_prefix_is_healthy() {
        let (socket, target) = bound();
        for (expect, answer, healthy) in [
            (&b""[..], &b""[..], true),
            (b"", b"x", true),
            (b"I am", b"I am b", true),
            (b"I am", b"I a", false),
        ] {
            let rule = asking(target, expect);
            let check = DatagramCheck::begin(&rule, target).unwrap();
            let (_, from) = socket.recv_from(&mut [0; 16]).unwrap();
            socket.send_to(answer, from).unwrap();
            assert_eq!(heard(&check, &rule), healthy, "{answer:?}");
        }
    }
}
