//! What stands between a connection's messages and its socket: nothing, or TLS.
//!
//! Each message is a TLS record of its own, though a record could hold many: coturn's client, for one, reads a record and takes it
//! for a message. The records of a tick leave together all the same.
//!
//! rustls' buffered interface is used, not the unbuffered one, though both want no I/O of their own: it gathers a message straight
//! from where its parts lie, and writes its records from where it encrypted them. The unbuffered one wants the plaintext in one
//! piece and copies each record once more (rustls 0.23, `WriteTraffic::encrypt`), and both make a vector per record.

use std::io::{self, IoSlice, Read, Write as _};

use rustls::{HandshakeKind, ServerConnection};
use turnpike_net::TcpSocket;

use super::HandshakeFailure;

/// Bytes that are encrypted before the kernel is asked to take them: what is encrypted can no longer be dropped.
const BATCH: usize = 32 << 10;
/// Records that are encrypted before that: as many as rustls hands to one write.
const RECORDS: u32 = 64;

pub(crate) enum Channel {
    Plain,
    Tls(Box<ServerConnection>),
}

/// What came of feeding a TLS connection.
#[derive(Default)]
pub(crate) struct Fed {
    /// Bytes of plaintext.
    pub(crate) plain: usize,
    /// Bytes that came behind the last of it.
    pub(crate) barren: usize,
    /// The client has said that it is done.
    pub(crate) ended: bool,
    pub(crate) error: Option<rustls::Error>,
}

impl Channel {
    /// Sends what TLS has to say by itself: handshakes, tickets, alerts.
    pub(crate) fn flush(&mut self, socket: &TcpSocket, writes: &mut u64) -> io::Result<()> {
        match self {
            Self::Plain => Ok(()),
            Self::Tls(tls) => flush(tls, socket, writes),
        }
    }

    /// Tells TLS clients that nothing more will come (RFC 8446 section 6.1), if the kernel takes it; an alert that waits leaves
    /// with it.
    pub(crate) fn say_goodbye(&mut self, socket: &TcpSocket, writes: &mut u64) {
        if let Self::Tls(tls) = self {
            tls.send_close_notify();
            // Gone already is as well.
            let _ = flush(tls, socket, writes);
        }
    }

    /// Whether the kernel did not take all that was encrypted.
    pub(crate) fn is_waiting(&self) -> bool {
        match self {
            Self::Plain => false,
            Self::Tls(tls) => tls.wants_write(),
        }
    }
}

/// Sends what the kernel takes of these, `more` of which follows at once; how many bytes that is.
pub(crate) fn write(
    socket: &TcpSocket,
    slices: &[IoSlice<'_>],
    more: bool,
    writes: &mut u64,
) -> io::Result<usize> {
    *writes += 1;
    none_for_now(socket.write_vectored(slices, more))
}

/// How much has been encrypted since the kernel was last asked to take it.
#[derive(Default)]
pub(crate) struct Batch {
    bytes: usize,
    records: u32,
}

impl Batch {
    /// Encrypts a message. It is the connection's from now on.
    pub(crate) fn encrypt(&mut self, tls: &mut ServerConnection, parts: &[IoSlice<'_>]) -> io::Result<()> {
        self.bytes += tls.writer().write_vectored(parts)?;
        self.records += 1;
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// Hands what there is to the kernel, if there is enough of it. It is not told that more follows: the client decrypts the first
    /// records while the next are encrypted.
    pub(crate) fn flush_if_full(
        &mut self,
        tls: &mut ServerConnection,
        socket: &TcpSocket,
        writes: &mut u64,
    ) -> io::Result<()> {
        if self.bytes < BATCH && self.records < RECORDS {
            return Ok(());
        }
        *self = Self::default();
        flush(tls, socket, writes)
    }
}

/// The longest record there can be (RFC 5246 section 6.2.3). rustls would gather 64 KiB of a message of the handshake, and of many
/// such clients at a time; without a certificate of its own a client needs one or two of them.
pub(crate) const BARREN_LIMIT: usize = 5 + (16 << 10) + 2048;

/// Decrypts into `room`, which must hold as much as `input` and a record more.
pub(crate) fn feed(tls: &mut ServerConnection, mut input: &[u8], room: &mut [u8]) -> Fed {
    let mut fed = Fed::default();
    while !input.is_empty() {
        let (before, plain) = (input.len(), fed.plain);
        match tls.read_tls(&mut input) {
            Ok(1..) => {}
            // After close_notify it reads no more.
            Ok(0) => fed.ended = true,
            // Its own buffer is full: a message of the handshake longer than any.
            Err(_) => fed.error = Some(rustls::Error::General("message too long".to_owned())),
        }
        if let Err(error) = tls.process_new_packets() {
            fed.error = Some(error);
        }
        if fed.error.is_some() || fed.ended {
            return fed;
        }
        loop {
            match tls.reader().read(&mut room[fed.plain..]) {
                Ok(0) => {
                    fed.ended = true;
                    break;
                }
                Ok(len) => fed.plain += len,
                Err(_) => break,
            }
        }
        fed.barren = if fed.plain > plain { 0 } else { fed.barren + before - input.len() };
    }
    fed
}

/// Whether the handshake that just ended resumed an earlier session.
pub(crate) fn was_resumed(tls: &ServerConnection) -> bool {
    tls.handshake_kind() == Some(HandshakeKind::Resumed)
}

pub(crate) fn failure(error: &rustls::Error) -> HandshakeFailure {
    match error {
        rustls::Error::NoApplicationProtocol => HandshakeFailure::Alpn,
        rustls::Error::PeerIncompatible(_) => HandshakeFailure::Incompatible,
        rustls::Error::AlertReceived(_) => HandshakeFailure::Alert,
        rustls::Error::InvalidMessage(_) => HandshakeFailure::Garbage,
        rustls::Error::PeerMisbehaved(_)
        | rustls::Error::InappropriateMessage { .. }
        | rustls::Error::InappropriateHandshakeMessage { .. }
        | rustls::Error::DecryptError => HandshakeFailure::Misbehaved,
        _ => HandshakeFailure::Other,
    }
}

pub(crate) fn flush(tls: &mut ServerConnection, socket: &TcpSocket, writes: &mut u64) -> io::Result<()> {
    while tls.wants_write() {
        *writes += 1;
        if none_for_now(tls.write_tls(&mut { socket }))? == 0 {
            break;
        }
    }
    Ok(())
}

fn none_for_now(written: io::Result<usize>) -> io::Result<usize> {
    match written {
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

pub(super) fn is_nothing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
