//! Writes messages into a buffer that keeps its capacity, so that writing another message does not allocate.

use std::net::{IpAddr, SocketAddr};

use super::{
    ATTRIBUTE_HEADER_LEN, COOKIE, HEADER_LEN, Header, Transaction,
    attribute::fingerprint,
    header_ending_at, kind,
    value::{FAMILY_IPV4, FAMILY_IPV6, xored},
};
use crate::integrity::{Key, Mac};

/// Maximum length that leaves room for both integrity attributes and FINGERPRINT in the 16-bit length.
const MOST: usize = HEADER_LEN + 0xFFFC - (24 + 36 + 8);

/// Attributes are written in call order and padded with zeros; an attribute that does not fit is left out.
#[derive(Debug)]
pub struct Writer<'b> {
    buffer: &'b mut Vec<u8>,
    transaction: Transaction,
}

impl<'b> Writer<'b> {
    /// Begins a message, which replaces the buffer's content.
    #[inline]
    pub fn begin(buffer: &'b mut Vec<u8>, header: Header) -> Self {
        let mut bytes = [0; HEADER_LEN];
        bytes[..2].copy_from_slice(&header.message_type().to_be_bytes());
        bytes[4..8].copy_from_slice(&COOKIE);
        bytes[8..].copy_from_slice(&header.transaction);
        buffer.clear();
        buffer.extend_from_slice(&bytes);
        Self { buffer, transaction: header.transaction }
    }

    #[inline]
    pub fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.put(kind, value.len(), [value])
    }

    pub fn number(&mut self, kind: u16, value: u32) -> &mut Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    #[inline]
    pub fn xor_address(&mut self, kind: u16, address: SocketAddr) -> &mut Self {
        self.address(kind, xored(address, &self.transaction))
    }

    pub fn address(&mut self, kind: u16, address: SocketAddr) -> &mut Self {
        let mut value = [0; 20];
        value[2..4].copy_from_slice(&address.port().to_be_bytes());
        let length = match address.ip() {
            IpAddr::V4(ip) => {
                value[1] = FAMILY_IPV4;
                value[4..8].copy_from_slice(&ip.octets());
                8
            }
            IpAddr::V6(ip) => {
                value[1] = FAMILY_IPV6;
                value[4..].copy_from_slice(&ip.octets());
                20
            }
        };
        self.attribute(kind, &value[..length])
    }

    /// Codes 300 to 699.
    pub fn error(&mut self, code: u16, reason: &str) -> &mut Self {
        self.code(kind::ERROR_CODE, 0, code, reason)
    }

    /// Appends ADDRESS-ERROR-CODE; family 1 is IPv4, 2 is IPv6.
    pub fn address_error(&mut self, family: u8, code: u16, reason: &str) -> &mut Self {
        self.code(kind::ADDRESS_ERROR_CODE, family, code, reason)
    }

    pub fn unknown_attributes(&mut self, types: &[u16]) -> &mut Self {
        self.put(kind::UNKNOWN_ATTRIBUTES, 2 * types.len(), types.iter().map(|kind| kind.to_be_bytes()))
    }

    /// Appends raw bytes, for malformed messages in tests.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.buffer.extend_from_slice(bytes);
        self
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Appends an integrity attribute. Receivers ignore everything after it except FINGERPRINT and, after
    /// SHA-1, the SHA-256 attribute.
    pub fn sign(&mut self, key: &Key, mac: Mac) -> &mut Self {
        let header = header_ending_at(self.buffer, self.buffer.len() + ATTRIBUTE_HEADER_LEN + mac.len());
        let value = key.mac(mac, [&header, &self.buffer[4..]]);
        self.append(mac.kind(), mac.len(), [&value[..mac.len()]]);
        self
    }

    #[inline]
    pub fn finish(mut self, with_fingerprint: bool) -> &'b [u8] {
        if with_fingerprint {
            let value = fingerprint(self.buffer, self.buffer.len());
            self.append(kind::FINGERPRINT, value.len(), [value]);
        }
        let header = header_ending_at(self.buffer, self.buffer.len());
        self.buffer[..4].copy_from_slice(&header);
        self.buffer
    }

    /// Completes an RFC 3489 message, which has neither FINGERPRINT nor XOR-MAPPED-ADDRESS.
    pub fn finish_classic(self, in_place_of_cookie: [u8; 4]) {
        self.buffer[4..8].copy_from_slice(&in_place_of_cookie);
        self.finish(false);
    }

    fn code(&mut self, kind: u16, family: u8, code: u16, reason: &str) -> &mut Self {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "both are less than 100, because codes are 300 to 699"
        )]
        let value = [family, 0, (code / 100) as u8, (code % 100) as u8];
        self.put(kind, value.len() + reason.len(), [&value, reason.as_bytes()])
    }

    /// Appends an attribute if it fits.
    fn put(&mut self, kind: u16, length: usize, parts: impl IntoIterator<Item: AsRef<[u8]>>) -> &mut Self {
        if self.buffer.len() + ATTRIBUTE_HEADER_LEN + length.next_multiple_of(4) <= MOST {
            self.append(kind, length, parts);
        }
        self
    }

    /// The attribute must fit.
    fn append(&mut self, kind: u16, length: usize, parts: impl IntoIterator<Item: AsRef<[u8]>>) {
        let [k0, k1] = kind.to_be_bytes();
        #[expect(clippy::cast_possible_truncation, reason = "less than MOST")]
        let [l0, l1] = (length as u16).to_be_bytes();
        self.buffer.extend_from_slice(&[k0, k1, l0, l1]);
        parts.into_iter().for_each(|part| self.buffer.extend_from_slice(part.as_ref()));
        self.buffer.extend_from_slice(&[0; 3][..length.wrapping_neg() & 3]);
    }
}
