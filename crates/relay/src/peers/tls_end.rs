//! TLS client of a data connection, with one buffer per direction. A side is read only after the data of its
//! last read has been sent, so at most one read's data is waiting.

use std::io::{self, ErrorKind, Write as _};

use rustls::ServerConnection;
use turnpike_copy::CopyDirection;
use turnpike_net::TcpSocket;

use super::PeerSide;
use crate::stream::channel::{self, Fed};

/// Bytes per read. A read may also complete a record of up to 16 KiB that began earlier.
const READ: usize = 16 << 10;
const DECRYPTED: usize = READ + (32 << 10);
const TURN: usize = 8;

pub(super) struct TlsEnd {
    socket: TcpSocket,
    tls: Box<ServerConnection>,
    /// Decrypted data for the peer; the unsent part starts at offset `at`.
    waiting: Vec<u8>,
    at: usize,
    /// True if the client has ended its sending direction. `peer_told` is true once the peer's socket has
    /// been shut down for writing.
    client_ended: bool,
    peer_told: bool,
    /// True if the peer has ended its sending direction. `notified` is true once close_notify has been
    /// written, and `client_told` once all data has been sent.
    peer_ended: bool,
    notified: bool,
    client_told: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turned {
    Idle,
    Blocked,
    Again,
    Over,
}

impl TlsEnd {
    /// `first` is already decrypted; `ended` means that nothing follows it.
    pub(super) fn new(socket: TcpSocket, tls: Box<ServerConnection>, first: Vec<u8>, ended: bool) -> Self {
        Self {
            socket,
            tls,
            waiting: first,
            at: 0,
            client_ended: ended,
            peer_told: false,
            peer_ended: false,
            notified: false,
            client_told: false,
        }
    }

    pub(super) fn is_half_closed(&self) -> bool {
        self.client_ended || self.peer_ended
    }

    /// Returns true if a turn would not read from this side and would therefore miss an error.
    pub(super) fn is_deaf_to(&self, side: PeerSide) -> bool {
        match side {
            PeerSide::Client => self.client_ended || self.at < self.waiting.len(),
            PeerSide::Peer => self.peer_ended || self.tls.wants_write(),
        }
    }

    /// Moves as much data as possible; nothing is kept in `scratch` between calls. The flows
    /// indicate which sides may be readable.
    pub(super) fn turn(
        &mut self,
        peer: &TcpSocket,
        to_peer: &mut CopyDirection,
        to_client: &mut CopyDirection,
        scratch: &mut [u8],
    ) -> Turned {
        for _ in 0..TURN {
            let moved = self.towards_peer(peer, to_peer, scratch).and_then(|moved| {
                let also = self.towards_client(peer, to_client, scratch)?;
                Ok(moved || also)
            });
            match moved {
                Err(_) => return Turned::Over,
                Ok(_) if self.peer_told && self.client_told => return Turned::Over,
                Ok(false) if self.at < self.waiting.len() || self.tls.wants_write() => {
                    return Turned::Blocked;
                }
                Ok(false) => return Turned::Idle,
                Ok(true) => {}
            }
        }
        Turned::Again
    }

    fn towards_peer(
        &mut self,
        peer: &TcpSocket,
        flow: &mut CopyDirection,
        scratch: &mut [u8],
    ) -> io::Result<bool> {
        while self.at < self.waiting.len() {
            match some(peer.write(&self.waiting[self.at..]))? {
                0 => return Ok(false),
                sent => self.at += sent,
            }
        }
        self.at = 0;
        self.waiting = Vec::new();
        if self.client_ended {
            if !self.peer_told {
                self.peer_told = true;
                peer.shutdown_write()?;
            }
            return Ok(false);
        }
        let most = flow.within_budget(READ);
        if !flow.readable || most == 0 {
            return Ok(false);
        }
        let (encrypted, plain) = scratch.split_at_mut(READ);
        let plain = &mut plain[..DECRYPTED];
        let len = match self.socket.read(&mut encrypted[..most]) {
            Ok(0) => {
                self.client_ended = true;
                return Ok(true);
            }
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                flow.readable = false;
                return Ok(false);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(error),
        };
        let Fed { plain: decrypted, ended, error, .. } =
            channel::feed(&mut self.tls, &encrypted[..len], plain);
        if let Some(error) = error {
            let _ = channel::flush(&mut self.tls, &self.socket, &mut 0);
            return Err(io::Error::other(error));
        }
        self.client_ended = ended;
        flow.bytes += decrypted as u64;
        flow.spend(decrypted);
        let sent = if decrypted == 0 { 0 } else { some(peer.write(&plain[..decrypted]))? };
        self.waiting.extend_from_slice(&plain[sent..decrypted]);
        Ok(true)
    }

    fn towards_client(
        &mut self,
        peer: &TcpSocket,
        flow: &mut CopyDirection,
        scratch: &mut [u8],
    ) -> io::Result<bool> {
        channel::flush(&mut self.tls, &self.socket, &mut 0)?;
        if self.tls.wants_write() {
            return Ok(false);
        }
        if self.peer_ended {
            if !self.notified {
                self.notified = true;
                self.tls.send_close_notify();
                return self.towards_client(peer, flow, scratch);
            }
            if !self.client_told {
                self.client_told = true;
                self.socket.shutdown_write()?;
            }
            return Ok(false);
        }
        let most = flow.within_budget(READ);
        if !flow.readable || most == 0 {
            return Ok(false);
        }
        match peer.read(&mut scratch[..most]) {
            Ok(0) => self.peer_ended = true,
            Ok(len) => {
                flow.bytes += len as u64;
                flow.spend(len);
                self.tls.writer().write_all(&scratch[..len])?;
                channel::flush(&mut self.tls, &self.socket, &mut 0)?;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                flow.readable = false;
                return Ok(false);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(true)
    }
}

fn some(written: io::Result<usize>) -> io::Result<usize> {
    match written {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}
