//! Writes responses into the server's one reply buffer, which keeps its capacity: answering allocates nothing.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use turnpike_wire::integrity::{self, Key, Mac};

use super::{
    attribute,
    request::{COOKIE, Method, Request, xor_mask},
    secret,
};

/// What a response is signed with: RFC 8489 section 9.2.4 has it carry the request's integrity attribute, under the
/// request's key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Signer {
    #[serde(with = "secret::key")]
    pub(super) key: Key,
    #[serde(with = "MacName")]
    pub(super) mac: Mac,
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
pub(super) struct Envelope {
    pub(super) method: Method,
    pub(super) transaction: [u8; 12],
    /// Whether the request carried a FINGERPRINT, and so shall the response.
    pub(super) fingerprint: bool,
    /// None where the client has not proved who it is.
    pub(super) signer: Option<Signer>,
}

impl Envelope {
    pub(super) fn unsigned(request: &Request<'_>) -> Self {
        let Request { method, transaction, fingerprint, .. } = *request;
        Self { method, transaction, fingerprint, signer: None }
    }
}

/// A message under construction.
pub(super) struct Response<'b> {
    buffer: &'b mut Vec<u8>,
    transaction: [u8; 12],
}

impl<'b> Response<'b> {
    pub(super) fn success(buffer: &'b mut Vec<u8>, to: &Envelope) -> Self {
        Self::start(buffer, to.method.number() | 0x0100, to.transaction)
    }

    /// Begins with ERROR-CODE (RFC 8489 section 14.8).
    pub(super) fn error(buffer: &'b mut Vec<u8>, to: &Envelope, code: u16, reason: &str) -> Self {
        let mut response = Self::start(buffer, to.method.number() | 0x0110, to.transaction);
        response.code(attribute::ERROR_CODE, 0, code, reason);
        response
    }

    pub(super) fn data_indication(buffer: &'b mut Vec<u8>, transaction: [u8; 12]) -> Self {
        Self::start(buffer, 0x0017, transaction)
    }

    /// RFC 6062 section 5.3.
    pub(super) fn connection_attempt(buffer: &'b mut Vec<u8>, transaction: [u8; 12]) -> Self {
        Self::start(buffer, 0x001C, transaction)
    }

    fn start(buffer: &'b mut Vec<u8>, message_type: u16, transaction: [u8; 12]) -> Self {
        buffer.clear();
        buffer.extend_from_slice(&message_type.to_be_bytes());
        buffer.extend_from_slice(&[0, 0]);
        buffer.extend_from_slice(&COOKIE);
        buffer.extend_from_slice(&transaction);
        Self { buffer, transaction }
    }

    /// Values are at most 1500 bytes long.
    pub(super) fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.parts(kind, &[value]);
    }

    pub(super) fn number(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_be_bytes());
    }

    /// ERROR-CODE, or ADDRESS-ERROR-CODE, whose first byte is the family (RFC 8656 section 18.12).
    pub(super) fn code(&mut self, kind: u16, family: u8, code: u16, reason: &str) {
        #[expect(clippy::cast_possible_truncation, reason = "codes are 300 to 699")]
        let value = [family, 0, (code / 100) as u8, (code % 100) as u8];
        self.parts(kind, &[&value, reason.as_bytes()]);
    }

    /// XOR-MAPPED-ADDRESS and its like (RFC 8489 section 14.2).
    pub(super) fn xor_address(&mut self, kind: u16, address: SocketAddr) {
        let [p0, p1] = address.port().to_be_bytes();
        let port = [p0 ^ COOKIE[0], p1 ^ COOKIE[1]];
        match address.ip() {
            IpAddr::V4(ip) => {
                let xored = (ip.to_bits() ^ u32::from_be_bytes(COOKIE)).to_be_bytes();
                self.parts(kind, &[&[0, 1], &port, &xored]);
            }
            IpAddr::V6(ip) => {
                let xored = (ip.to_bits() ^ xor_mask(self.transaction)).to_be_bytes();
                self.parts(kind, &[&[0, 2], &port, &xored]);
            }
        }
    }

    /// MAPPED-ADDRESS and its like (RFC 8489 section 14.1).
    pub(super) fn address(&mut self, kind: u16, address: SocketAddr) {
        let port = address.port().to_be_bytes();
        match address.ip() {
            IpAddr::V4(ip) => self.parts(kind, &[&[0, 1], &port, &ip.octets()]),
            IpAddr::V6(ip) => self.parts(kind, &[&[0, 2], &port, &ip.octets()]),
        }
    }

    /// Appends SOFTWARE and signs, if there is a signer, and completes it. The two go together: a signed answer goes to a client
    /// that has authenticated, and to any other each byte is one more that a forged source address makes us send.
    pub(super) fn sign(mut self, to: &Envelope, software: Option<&str>) {
        if let Some(Signer { key, mac }) = &to.signer {
            if let Some(software) = software {
                self.attribute(attribute::SOFTWARE, software.as_bytes());
            }
            integrity::sign(self.buffer, key, *mac);
        }
        self.finish(to.fingerprint);
    }

    /// Bytes so far.
    pub(super) fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Appends FINGERPRINT if wanted, and sets the length.
    pub(super) fn finish(self, fingerprint: bool) {
        if fingerprint {
            integrity::append_fingerprint(self.buffer);
        }
        #[expect(clippy::cast_possible_truncation, reason = "a response is at most some 1600 bytes long")]
        let length = (self.buffer.len() - super::request::HEADER_LEN) as u16;
        self.buffer[2..4].copy_from_slice(&length.to_be_bytes());
    }

    fn parts(&mut self, kind: u16, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        #[expect(clippy::cast_possible_truncation, reason = "at most 1500 bytes")]
        let short = length as u16;
        self.buffer.extend_from_slice(&kind.to_be_bytes());
        self.buffer.extend_from_slice(&short.to_be_bytes());
        for part in parts {
            self.buffer.extend_from_slice(part);
        }
        self.buffer.extend_from_slice(&[0; 3][..length.wrapping_neg() & 3]);
    }
}

/// The reason phrase of an error code (RFC 8489 section 14.8, RFC 8656 section 19, RFC 6062 section 6.3, RFC 8016 section 3.4).
pub(super) fn reason_phrase(code: u16) -> &'static str {
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
