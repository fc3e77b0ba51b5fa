//! A health check of a target that speaks TCP and is asked something: what is sent once it is connected, and what has to come back.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use turnpike_net::{TcpSocket, poll::Event};
use turnpike_wire::proxy_protocol;

use crate::{Question, Rule};

/// Bytes of an answer read at a time; no more than the expected ones are kept.
const READ: usize = 1024;

pub(super) struct StreamCheck {
    socket: TcpSocket,
    /// Bytes still to be sent.
    unsent: Vec<u8>,
    heard: Vec<u8>,
}

impl StreamCheck {
    /// Asks what the rule asks by a socket that has begun to connect. A target that expects PROXY headers gets one that names no client.
    pub(super) fn new(socket: TcpSocket, rule: &Rule, question: &Question) -> Self {
        let header = rule.send_proxy.map(proxy_protocol::encode_unknown).unwrap_or_default();
        Self { socket, unsent: [header, question.send.clone()].concat(), heard: Vec::new() }
    }

    /// To be called when the socket is ready: what the check has found, if anything.
    pub(super) fn go_on(&mut self, event: &Event, question: &Question) -> Option<bool> {
        if event.error && self.socket.take_error().is_err() {
            return Some(false);
        }
        match self.exchange(question) {
            Ok(found) => found,
            // Not connected yet, or nothing there.
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
        // Any answer will do where none is expected.
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

    /// RST: neither side keeps a TIME_WAIT for a question.
    pub(super) fn reset(self) {
        self.socket.reset();
    }
}

impl AsFd for StreamCheck {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
