//! One client's association: dimpl's instance, and what limits know of it.

use std::time::Instant;

use dimpl::{Dtls, Error, Output, ProtocolVersion, SecurityError};
use turnpike_net::{Route, Rx, Span, Tx};
use turnpike_turn::server::{Client, ListenerId, Source};

use super::stats::{DtlsDrop, DtlsEnd, DtlsFailure, DtlsStats};
use crate::link::{Place, Way};

/// How far an association has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The client is where it says it is; hands are being shaken. The number in the crowd of those.
    HalfOpen(u64),
    /// Messages pass, but there is no allocation. The number in the crowd of those.
    Idle(u64),
    /// There is an allocation.
    Allocated,
}

pub(super) struct Association {
    pub(super) dtls: Dtls,
    /// As the socket sees it: its listener's number is that of clients that ask for no name.
    pub(super) client: Client,
    /// Which of the listeners it came to.
    pub(super) place: usize,
    /// Tells it from those that had its slot before.
    pub(super) generation: u32,
    /// The number that the state machine knows it by, which says for which name it asked.
    pub(super) listener: ListenerId,
    /// Of the ClientHello: tells one that is repeated from one that begins anew.
    pub(super) random: [u8; 32],
    pub(super) stage: Stage,
    /// Somebody has sent an alert in the clear from the client's address before there were keys.
    pub(super) alerted: bool,
    /// When it ends unless something happens before; milliseconds.
    pub(super) deadline_ms: u64,
    /// When dimpl wants to be called; milliseconds.
    pub(super) timer_ms: u64,
    /// For when it stands among the timers; milliseconds.
    pub(super) armed_ms: u64,
}

/// What came of draining an association.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drained {
    /// The handshake is over.
    pub(super) connected: bool,
    /// The client said farewell.
    pub(super) closed: bool,
    /// Something was sent.
    pub(super) said: bool,
    /// When dimpl wants to be called.
    pub(super) timer: Option<Instant>,
}

impl Association {
    /// The client as the state machine knows it.
    pub(super) fn known_as(&self) -> Client {
        Client { listener: self.listener, ..self.client }
    }

    /// The same of the association in this slot, with the way to it.
    pub(super) fn source(&self, slot: usize) -> Source {
        let place = Place { slot, generation: self.generation };
        Source { client: self.known_as(), link: Way::Dtls(place).link() }
    }

    pub(super) fn is_open(&self) -> bool {
        !matches!(self.stage, Stage::HalfOpen(_))
    }

    pub(super) fn is_1_3(&self) -> bool {
        self.dtls.protocol_version() == Some(ProtocolVersion::DTLS1_3)
    }

    /// Sends what it has to say, and puts what it has decrypted into the arena.
    pub(super) fn drain(
        &mut self,
        route: &Route,
        tx: &mut Tx,
        mut arena: Option<(&mut Rx, &mut Vec<Span>)>,
        scratch: &mut Vec<u8>,
        stats: &mut DtlsStats,
    ) -> Drained {
        let mut drained = Drained::default();
        loop {
            let mut next = None;
            match &mut arena {
                // Only an instance that was just fed has anything for the arena.
                Some((rx, spans)) => {
                    let filled = rx.fill(0, |room| {
                        let (poll, plain) = poll(&mut self.dtls, room, route, tx);
                        next = Some(poll);
                        Ok(plain)
                    });
                    if let Ok(span) = filled
                        && matches!(next, Some(Poll::Message))
                    {
                        spans.push(span);
                        stats.received += 1;
                    }
                }
                None => next = Some(poll(&mut self.dtls, scratch, route, tx).0),
            }
            match next {
                Some(Poll::Message | Poll::Nothing) => {}
                Some(Poll::Sent) => drained.said = true,
                Some(Poll::TooSmall(needed)) => {
                    // The arena is full, or the scratch buffer is new.
                    if arena.take().is_some() {
                        stats.dropped[DtlsDrop::NoRoom as usize] += 1;
                    }
                    scratch.resize(needed.max(scratch.len()), 0);
                }
                Some(Poll::Connected) => drained.connected = true,
                Some(Poll::Closed) => drained.closed = true,
                Some(Poll::Wait(at)) => {
                    drained.timer = Some(at);
                    return drained;
                }
                None => return drained,
            }
        }
    }
}

enum Poll {
    Sent,
    Message,
    Connected,
    Closed,
    TooSmall(usize),
    Wait(Instant),
    Nothing,
}

/// One step. What is for the client is queued; how many bytes of plaintext lie at the beginning of `room`.
fn poll(dtls: &mut Dtls, room: &mut [u8], route: &Route, tx: &mut Tx) -> (Poll, usize) {
    match dtls.poll_output(room) {
        Output::Packet(packet) => {
            tx.push_bytes(route, packet);
            (Poll::Sent, 0)
        }
        Output::ApplicationData(data) => (Poll::Message, data.len()),
        Output::Connected => (Poll::Connected, 0),
        Output::CloseNotify => (Poll::Closed, 0),
        Output::BufferTooSmall { needed } => (Poll::TooSmall(needed), 0),
        Output::Timeout(at) => (Poll::Wait(at), 0),
        _ => (Poll::Nothing, 0),
    }
}

/// Why a handshake failed with this error.
pub(super) fn failure(error: &Error) -> DtlsFailure {
    match error {
        Error::Timeout(_) => DtlsFailure::Timeout,
        Error::ConnectionClosed | Error::SecurityError(SecurityError::FatalAlert { .. }) => {
            DtlsFailure::Closed
        }
        Error::SecurityError(
            SecurityError::NoCommonCipherSuite
            | SecurityError::NoMutuallyAcceptableCipherSuite
            | SecurityError::NoCommonKeyExchangeGroup
            | SecurityError::ExtendedMasterSecretNotNegotiated
            | SecurityError::UnsupportedSignatureScheme(_),
        ) => DtlsFailure::Incompatible,
        Error::SecurityError(SecurityError::UnsupportedClientVersion(_)) => DtlsFailure::Version,
        Error::SecurityError(_)
        | Error::UnexpectedMessage(_)
        | Error::CryptoError(_)
        | Error::ReceiveQueueFull
        | Error::RenegotiationAttempt => DtlsFailure::Misbehaved,
        _ => DtlsFailure::Other,
    }
}

/// The end of an open association with this error.
pub(super) fn end(error: &Error) -> DtlsEnd {
    match error {
        Error::ConnectionClosed | Error::SecurityError(SecurityError::FatalAlert { .. }) => DtlsEnd::Client,
        _ => DtlsEnd::Protocol,
    }
}
