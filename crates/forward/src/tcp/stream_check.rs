//! Health check that sends a request over TCP after the connect, and expects a certain response.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use turnpike_net::{Event, TcpSocket};
use turnpike_wire::proxy_protocol;

use crate::{Question, Rule};

/// Bytes per read; only the length of the expected response is kept.
const READ: usize = 1024;

pub(super) struct StreamCheck {
    socket: TcpSocket,
    unsent: Vec<u8>,
    heard: Vec<u8>,
}

impl StreamCheck {
    /// Prepares the request for a socket that is still connecting. A target that expects PROXY headers gets
    /// one that names no client.
    pub(super) fn new(socket: TcpSocket, rule: &Rule, question: &Question) -> Self {
        let header = rule.send_proxy.map(proxy_protocol::encode_unknown).unwrap_or_default();
        Self { socket, unsent: [header, question.send.clone()].concat(), heard: Vec::new() }
    }

    /// Handles a ready socket; returns the result, if known.
    pub(super) fn go_on(&mut self, event: &Event, question: &Question) -> Option<bool> {
        if event.error && self.socket.take_error().is_err() {
            return Some(false);
        }
        match self.exchange(question) {
            Ok(found) => found,
            // Not connected yet, or no data.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected) => {
                None
            }
            Err(_) => Some(false),
        }
    }

    fn exchange(&mut self, Question { expect, .. }: &Question) -> io::Result<Option<bool>> {
        while !self.unsent.is_empty() {
            let sent = self.socket.write(&self.unsent)?;
            self.unsent.drain(..sent);
        }
        // If no particular response is expected, any byte will do.
        let wanted = expect.len().max(1);
        let mut bytes = [0; READ];
        loop {
            let got = self.socket.read(&mut bytes)?;
            self.heard.extend(bytes[..got].iter().take(wanted - self.heard.len()));
            if self.heard.len() == wanted {
                return Ok(Some(self.heard.starts_with(expect)));
            }
            if got == 0 || !expect.starts_with(&self.heard) {
                return Ok(Some(false));
            }
        }
    }

    /// RST, so that neither side is left in TIME_WAIT.
    pub(super) fn reset(self) {
        self.socket.reset();
    }
}

impl AsFd for StreamCheck {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
