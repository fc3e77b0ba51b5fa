//! What a response takes over from its request. Responses are written into the server's one reply buffer, which keeps its capacity:
//! answering allocates nothing.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use turnpike_wire::{
    integrity::{Key, Mac},
    stun::{Class, Header, Writer, kind},
};

use crate::server::{
    RequestRefusal, Transport,
    auth::secret,
    request::{Method, Request},
};

/// Proof of the client: the key that signed the request signs the response.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Signer {
    #[serde(with = "secret::key")]
    pub(crate) key: Key,
    /// Attribute that authenticated the request.
    #[serde(with = "MacName")]
    pub(crate) mac: Mac,
}

/// How [`Mac`] is written.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Mac")]
enum MacName {
    Sha1,
    Sha256,
}

/// What a response takes over from its request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Envelope {
    pub(crate) method: Method,
    pub(crate) transaction: [u8; 12],
    /// Whether the request carried a FINGERPRINT, and so shall the response.
    pub(crate) fingerprint: bool,
    /// Whether the request named a password algorithm.
    #[serde(default)]
    pub(crate) names_algorithm: bool,
    /// Whether the client has shown that its address is its own, by a handshake or a nonce that was given to it.
    #[serde(default)]
    pub(crate) is_address_proved: bool,
    /// None where the client has not proved who it is.
    pub(crate) signer: Option<Signer>,
}

impl Envelope {
    /// Over UDP an address may be forged.
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

    /// Begins a success response.
    pub(crate) fn success<'b>(&self, buffer: &'b mut Vec<u8>) -> Writer<'b> {
        self.begin(buffer, Class::Success)
    }

    /// Whether the response has texts for people: the reason phrase and SOFTWARE. To an address that may be forged each byte is one more
    /// that whoever forges it makes us send.
    pub(crate) fn has_texts(&self) -> bool {
        self.signer.is_some() || self.is_address_proved
    }

    /// Begins an error response, with a reason phrase where it has texts.
    pub(crate) fn error<'b>(&self, buffer: &'b mut Vec<u8>, code: u16) -> Writer<'b> {
        self.error_because(buffer, code, reason_phrase(code))
    }

    /// The same with another phrase than the code's own.
    pub(crate) fn error_because<'b>(&self, buffer: &'b mut Vec<u8>, code: u16, reason: &str) -> Writer<'b> {
        let reason = if self.has_texts() { reason } else { "" };
        let mut response = self.begin(buffer, Class::Error);
        response.error(code, reason);
        response
    }

    /// Appends SOFTWARE, signs if there is a signer, and completes the response.
    ///
    /// RFC 8489 section 9.2.4 has MESSAGE-INTEGRITY-SHA256 answer a request that names a password algorithm and MESSAGE-INTEGRITY any
    /// other, whichever attribute the request has. A request with MESSAGE-INTEGRITY that names one contradicts section 9.2.5, but
    /// turn-client-proto sends it and verifies that attribute alone: the response has both.
    pub(crate) fn sign(&self, mut response: Writer<'_>, software: Option<&str>) {
        self.software(&mut response, software);
        if let Some(Signer { key, mac }) = &self.signer {
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

/// The reason phrase of an error response: that of its code, with the cause where the code has several.
pub(crate) fn phrase(code: u16, why: RequestRefusal) -> Cow<'static, str> {
    match why {
        RequestRefusal::BadRequest(bad) => format!("{}: {bad}", reason_phrase(code)).into(),
        RequestRefusal::AllocationExists => "Allocation Mismatch: this 5-tuple has an allocation".into(),
        RequestRefusal::PeerFamily(peer) => format!("{}: {}", reason_phrase(code), peer.ip()).into(),
        RequestRefusal::SharedPeer => "Peer Taken on Shared Port".into(),
        _ => reason_phrase(code).into(),
    }
}

/// The reason phrase of an error code (RFC 8489 section 14.8, RFC 8656 section 19, RFC 6062 section 6.3, RFC 8016 section 3.4).
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
