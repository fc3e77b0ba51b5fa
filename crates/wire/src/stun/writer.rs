//! Writing a message into a buffer that keeps its capacity: whoever writes into it again allocates nothing.

use std::net::{IpAddr, SocketAddr};

use super::{
    ATTRIBUTE_HEADER_LEN, COOKIE, HEADER_LEN, Header, Transaction, header_ending_at, kind,
    value::{FAMILY_IPV4, FAMILY_IPV6, xored},
};
use crate::integrity::{self, Key, Mac};

/// Where attributes must end, so that there is room for both integrity attributes and FINGERPRINT in a length of 16 bits.
const MOST: usize = HEADER_LEN + 0xFFFC - (24 + 36 + 8);

/// A message under construction. Attributes come in the order of the calls, padded with zeros; one for which there is no room is left
/// out as a whole.
#[derive(Debug)]
pub struct Writer<'b> {
    buffer: &'b mut Vec<u8>,
    transaction: Transaction,
}

impl<'b> Writer<'b> {
    /// Begins a message in place of what was in the buffer.
    pub fn begin(buffer: &'b mut Vec<u8>, header: Header) -> Self {
        buffer.clear();
        buffer.extend_from_slice(&header.message_type().to_be_bytes());
        buffer.extend_from_slice(&[0, 0]);
        buffer.extend_from_slice(&COOKIE);
        buffer.extend_from_slice(&header.transaction);
        Self { buffer, transaction: header.transaction }
    }

    /// Any attribute.
    pub fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.parts(kind, &[value])
    }

    /// LIFETIME and its like.
    pub fn number(&mut self, kind: u16, value: u32) -> &mut Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    /// XOR-MAPPED-ADDRESS and its like (RFC 8489 section 14.2).
    pub fn xor_address(&mut self, kind: u16, address: SocketAddr) -> &mut Self {
        self.address(kind, xored(address, &self.transaction))
    }

    /// MAPPED-ADDRESS and its like (RFC 8489 section 14.1).
    pub fn address(&mut self, kind: u16, address: SocketAddr) -> &mut Self {
        let port = address.port().to_be_bytes();
        match address.ip() {
            IpAddr::V4(ip) => self.parts(kind, &[&[0, FAMILY_IPV4], &port, &ip.octets()]),
            IpAddr::V6(ip) => self.parts(kind, &[&[0, FAMILY_IPV6], &port, &ip.octets()]),
        }
    }

    /// ERROR-CODE (RFC 8489 section 14.8), of a code from 300 to 699.
    pub fn error(&mut self, code: u16, reason: &str) -> &mut Self {
        self.code(kind::ERROR_CODE, 0, code, reason)
    }

    /// ADDRESS-ERROR-CODE (RFC 8656 section 18.12); 1 is IPv4, 2 IPv6.
    pub fn address_error(&mut self, family: u8, code: u16, reason: &str) -> &mut Self {
        self.code(kind::ADDRESS_ERROR_CODE, family, code, reason)
    }

    /// UNKNOWN-ATTRIBUTES (RFC 8489 section 14.13).
    pub fn unknown_attributes(&mut self, types: impl IntoIterator<Item = u16>) -> &mut Self {
        let start = self.buffer.len();
        self.parts(kind::UNKNOWN_ATTRIBUTES, &[]);
        for kind in types {
            if self.buffer.len() + 2 > MOST {
                break;
            }
            self.buffer.extend_from_slice(&kind.to_be_bytes());
        }
        self.close(start);
        self
    }

    /// Bytes as they are, for those who want a message to be wrong.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.buffer.extend_from_slice(bytes);
        self
    }

    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Never: there is always a header.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Appends the integrity attribute of this kind. A receiver heeds only a FINGERPRINT behind it, and behind the SHA-1 one also the
    /// SHA-256 one.
    pub fn sign(&mut self, key: &Key, mac: Mac) -> &mut Self {
        integrity::sign(self.buffer, key, mac);
        self
    }

    /// Appends FINGERPRINT if it is wanted, and sets the length.
    pub fn finish(self, fingerprint: bool) -> &'b [u8] {
        if fingerprint {
            integrity::append_fingerprint(self.buffer);
        } else {
            let first = header_ending_at(self.buffer, self.buffer.len());
            self.buffer[..4].copy_from_slice(&first);
        }
        self.buffer
    }

    fn code(&mut self, kind: u16, family: u8, code: u16, reason: &str) -> &mut Self {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "both are less than 100 where the code is less than 10,000"
        )]
        let value = [family, 0, (code / 100) as u8, (code % 100) as u8];
        self.parts(kind, &[&value, reason.as_bytes()])
    }

    fn parts(&mut self, kind: u16, parts: &[&[u8]]) -> &mut Self {
        let start = self.buffer.len();
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if start + ATTRIBUTE_HEADER_LEN + length.next_multiple_of(4) > MOST {
            return self;
        }
        self.buffer.extend_from_slice(&kind.to_be_bytes());
        self.buffer.extend_from_slice(&[0, 0]);
        parts.iter().for_each(|part| self.buffer.extend_from_slice(part));
        self.close(start);
        self
    }

    /// Sets the length of the attribute that begins here and ends at the end, and pads it.
    fn close(&mut self, start: usize) {
        let Some(length) = self.buffer.len().checked_sub(start + ATTRIBUTE_HEADER_LEN) else { return };
        // Not more than MOST.
        let length = u16::try_from(length).unwrap_or(0).to_be_bytes();
        self.buffer[start + 2..start + ATTRIBUTE_HEADER_LEN].copy_from_slice(&length);
        self.buffer.resize(self.buffer.len().next_multiple_of(4), 0);
    }
}
