//! Responses are written into the server's single reply buffer, so that responding does not allocate.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use turnpike_wire::{
    integrity::{Key, Mac},
    stun::{Class, Header, Writer, kind},
};

use crate::server::{
    RequestRefusal, Transport,
    auth::masked,
    request::{Method, Request},
};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ResponseSigner {
    #[serde(with = "masked::key")]
    pub(crate) key: Key,
    #[serde(with = "MacName")]
    pub(crate) mac: Mac,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Mac")]
enum MacName {
    Sha1,
    Sha256,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Envelope {
    pub(crate) method: Method,
    pub(crate) transaction: [u8; 12],
    pub(crate) fingerprint: bool,
    #[serde(default)]
    pub(crate) names_algorithm: bool,
    /// The client's address is verified by a handshake or by a nonce issued to it.
    #[serde(default)]
    pub(crate) is_address_proved: bool,
    pub(crate) signer: Option<ResponseSigner>,
}

impl Envelope {
    /// Over UDP, the client's address may be forged.
    pub(crate) fn unsigned(request: &Request<'_>, transport: Transport) -> Self {
        Self {
            method: request.method,
            transaction: request.transaction(),
            fingerprint: request.view.has_fingerprint(),
            names_algorithm: [kind::PASSWORD_ALGORITHM, kind::PASSWORD_ALGORITHMS]
                .iter()
                .any(|kind| request.get(*kind).is_some()),
            is_address_proved: transport != Transport::Udp,
            signer: None,
        }
    }

    pub(crate) fn success<'b>(&self, buffer: &'b mut Vec<u8>) -> Writer<'b> {
        self.begin(buffer, Class::Success)
    }

    /// True if the response may contain optional text. If the address may be forged, each additional byte
    /// amplifies an attack.
    pub(crate) fn has_texts(&self) -> bool {
        self.signer.is_some() || self.is_address_proved
    }

    pub(crate) fn error<'b>(&self, buffer: &'b mut Vec<u8>, code: u16) -> Writer<'b> {
        self.error_because(buffer, code, reason_phrase(code))
    }

    pub(crate) fn error_because<'b>(&self, buffer: &'b mut Vec<u8>, code: u16, reason: &str) -> Writer<'b> {
        let reason = if self.has_texts() { reason } else { "" };
        let mut response = self.begin(buffer, Class::Error);
        response.error(code, reason);
        response
    }

    /// Appends SOFTWARE, signs if there is a signer, and completes the response.
    ///
    /// RFC 8489 section 9.2.4 requires MESSAGE-INTEGRITY-SHA256 in the response to a request that has a
    /// password algorithm and MESSAGE-INTEGRITY otherwise, whichever attribute the request used. A request
    /// with both MESSAGE-INTEGRITY and an algorithm contradicts section 9.2.5, but turn-client-proto sends it
    /// and verifies only MESSAGE-INTEGRITY, so the response has both attributes.
    pub(crate) fn sign(&self, mut response: Writer<'_>, software: Option<&str>) {
        self.software(&mut response, software);
        if let Some(ResponseSigner { key, mac }) = &self.signer {
            if !self.names_algorithm || *mac == Mac::Sha1 {
                response.sign(key, Mac::Sha1);
            }
            if self.names_algorithm {
                response.sign(key, Mac::Sha256);
            }
        }
        response.finish(self.fingerprint);
    }

    pub(crate) fn software(&self, response: &mut Writer<'_>, software: Option<&str>) {
        if let Some(software) = software.filter(|_| self.has_texts()) {
            response.attribute(kind::SOFTWARE, software.as_bytes());
        }
    }

    pub(crate) fn begin<'b>(&self, buffer: &'b mut Vec<u8>, class: Class) -> Writer<'b> {
        let Self { method, transaction, .. } = *self;
        Writer::begin(buffer, Header { class, method: method.number(), transaction })
    }
}

pub(crate) fn phrase(code: u16, why: RequestRefusal) -> Cow<'static, str> {
    match why {
        RequestRefusal::BadRequest(bad) => format!("{}: {bad}", reason_phrase(code)).into(),
        RequestRefusal::AllocationExists => "Allocation Mismatch: this 5-tuple has an allocation".into(),
        RequestRefusal::PeerFamily(peer) => format!("{}: {}", reason_phrase(code), peer.ip()).into(),
        RequestRefusal::SharedPeer => "Peer Taken on Shared Port".into(),
        _ => reason_phrase(code).into(),
    }
}

/// Reason phrases of RFC 8489 section 14.8, RFC 8656 section 19, RFC 6062 section 6.3 and RFC 8016 section
/// 3.4.
pub(crate) fn reason_phrase(code: u16) -> &'static str {
    match code {
        300 => "Try Alternate",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        405 => "Mobility Forbidden",
        420 => "Unknown Attribute",
        437 => "Allocation Mismatch",
        438 => "Stale Nonce",
        440 => "Address Family not Supported",
        441 => "Wrong Credentials",
        442 => "Unsupported Transport Protocol",
        443 => "Peer Address Family Mismatch",
        446 => "Connection Already Exists",
        447 => "Connection Timeout or Failure",
        486 => "Allocation Quota Reached",
        500 => "Server Error",
        508 => "Insufficient Capacity",
        _ => "",
    }
}
