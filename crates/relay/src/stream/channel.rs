//! Plain or TLS channel between a connection's messages and its socket.
//!
//! Each message is a TLS record of its own, because some clients, such as coturn's, treat a record as a
//! message. The records of a tick are still sent together.
//!
//! The channel uses the buffered interface of rustls, which gathers a message from its parts and writes each
//! record from the buffer it was encrypted into. The unbuffered interface requires contiguous plaintext and
//! copies each record once more (rustls 0.23, `WriteTraffic::encrypt`). Both interfaces allocate a vector per
//! record.

use std::io::{self, IoSlice, Read, Write as _};

use rustls::{HandshakeKind, ServerConnection};
use turnpike_net::TcpSocket;

use super::HandshakeFailure;

/// Maximum bytes encrypted before a write, because encrypted messages can no longer be dropped.
const BATCH: usize = 32 << 10;
/// Maximum records encrypted before a write: rustls passes at most this many to one write.
const RECORDS: u32 = 64;

pub(crate) enum Channel {
    Plain,
    Tls(Box<ServerConnection>),
}

#[derive(Default)]
pub(crate) struct Fed {
    pub(crate) plain: usize,
    /// Bytes of TLS input since the last plaintext.
    pub(crate) barren: usize,
    pub(crate) ended: bool,
    pub(crate) error: Option<rustls::Error>,
}

impl Channel {
    pub(crate) fn flush(&mut self, socket: &TcpSocket, writes: &mut u64) -> io::Result<()> {
        match self {
            Self::Plain => Ok(()),
            Self::Tls(tls) => flush(tls, socket, writes),
        }
    }

    /// Sends close_notify (RFC 8446 section 6.1) and any pending alert to a TLS client, if the socket has
    /// room for them.
    pub(crate) fn say_goodbye(&mut self, socket: &TcpSocket, writes: &mut u64) {
        if let Self::Tls(tls) = self {
            tls.send_close_notify();
            // A broken connection needs no close_notify.
            let _ = flush(tls, socket, writes);
        }
    }

    pub(crate) fn is_waiting(&self) -> bool {
        match self {
            Self::Plain => false,
            Self::Tls(tls) => tls.wants_write(),
        }
    }
}

/// Writes as much of these slices as the kernel accepts; returns the number of bytes. `more` means that
/// another write will follow.
pub(crate) fn write(
    socket: &TcpSocket,
    slices: &[IoSlice<'_>],
    more: bool,
    writes: &mut u64,
) -> io::Result<usize> {
    *writes += 1;
    none_for_now(socket.write_vectored(slices, more))
}

#[derive(Default)]
pub(crate) struct RecordBatch {
    bytes: usize,
    records: u32,
}

impl RecordBatch {
    pub(crate) fn encrypt(&mut self, tls: &mut ServerConnection, parts: &[IoSlice<'_>]) -> io::Result<()> {
        self.bytes += tls.writer().write_vectored(parts)?;
        self.records += 1;
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// Writes the batch if it is large enough, without MSG_MORE, so that the client decrypts it while the
    /// next one is being encrypted.
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

/// Maximum TLS input that yields no plaintext: the longest possible record (RFC 5246 section 6.2.3). rustls
/// alone would buffer a handshake message of up to 64 KiB per client, although clients without certificates
/// need only one or two records.
pub(crate) const BARREN_LIMIT: usize = 5 + (16 << 10) + 2048;

/// Decrypts into `room`, which must be large enough for `input` plus one record.
pub(crate) fn feed(tls: &mut ServerConnection, mut input: &[u8], room: &mut [u8]) -> Fed {
    let mut fed = Fed::default();
    while !input.is_empty() {
        let (before, plain) = (input.len(), fed.plain);
        match tls.read_tls(&mut input) {
            Ok(1..) => {}
            // rustls stops reading after close_notify.
            Ok(0) => fed.ended = true,
            // The buffer is full, although no valid handshake message is that long.
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

pub(crate) fn was_resumed(tls: &ServerConnection) -> bool {
    tls.handshake_kind() == Some(HandshakeKind::Resumed)
}

pub(crate) fn failure(error: &rustls::Error) -> HandshakeFailure {
    match error {
        rustls::Error::NoApplicationProtocol => HandshakeFailure::Alpn,
        rustls::Error::PeerIncompatible(_) => HandshakeFailure::Incompatible,
        rustls::Error::NoCertificatesPresented | rustls::Error::InvalidCertificate(_) => {
            HandshakeFailure::ClientCertificate
        }
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
