//! A client's DTLS association: its dimpl instance, and its status under the limits.

use std::time::Instant;

use dimpl::{Dtls, Error, Output, ProtocolVersion, SecurityError};
use turnpike_net::{ArenaSpan, Route, Rx, Tx};
use turnpike_turn::server::{Client, ListenerId, Source};

use super::stats::{DtlsDrop, DtlsEnd, DtlsFailure, DtlsStats};
use crate::link::{ClientLinkKind, LinkSlot};
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AssociationStage {
    /// Handshake in progress, with a verified address; contains the number in the set of handshakes.
    HalfOpen(u64),
    /// Open but without an allocation; contains the number in the set of idle associations.
    Idle(u64),
    Allocated,
}

pub(super) struct Association {
    pub(super) dtls: Dtls,
    /// Addresses as seen at the socket, with the listener number for clients without a server name.
    pub(super) client: Client,
    pub(super) place: usize,
    pub(super) generation: u32,
    /// Listener number passed to the state machine; depends on the server name.
    pub(super) listener: ListenerId,
    /// The ClientHello's random, which distinguishes a retransmission from a new handshake.
    pub(super) random: [u8; 32],
    pub(super) stage: AssociationStage,
    /// True if an unauthenticated plaintext alert was received during the handshake.
    pub(super) alerted: bool,
    pub(super) deadline_ms: u64,
    /// Time in milliseconds at which dimpl's timer is next due.
    pub(super) timer_ms: u64,
    pub(super) armed_ms: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drained {
    pub(super) connected: bool,
    pub(super) closed: bool,
    pub(super) said: bool,
    pub(super) timer: Option<Instant>,
}

impl Association {
    pub(super) fn known_as(&self) -> Client {
        Client { listener: self.listener, ..self.client }
    }

    pub(super) fn source(&self, slot: usize) -> Source {
        let place = LinkSlot { slot, generation: self.generation };
        Source { client: self.known_as(), link: ClientLinkKind::Dtls(place).link() }
    }

    pub(super) fn is_open(&self) -> bool {
        !matches!(self.stage, AssociationStage::HalfOpen(_))
    }

    pub(super) fn is_1_3(&self) -> bool {
        self.dtls.protocol_version() == Some(ProtocolVersion::DTLS1_3)
    }

    pub(super) fn drain(
        &mut self,
        route: &Route,
        tx: &mut Tx,
        mut arena: Option<(&mut Rx, &mut Vec<ArenaSpan>)>,
        scratch: &mut Vec<u8>,
        stats: &mut DtlsStats,
    ) -> Drained {
        let mut drained = Drained::default();
        loop {
            let mut next = None;
            match &mut arena {
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

/// Polls dimpl once, and queues packets for the client. Also returns the number of plaintext bytes at the
/// start of `room`.
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

pub(super) fn end(error: &Error) -> DtlsEnd {
    match error {
        Error::ConnectionClosed | Error::SecurityError(SecurityError::FatalAlert { .. }) => DtlsEnd::Client,
        _ => DtlsEnd::Protocol,
    }
}
