//! A client's requests and a server's responses.

use std::net::SocketAddr;

use hmac::{Hmac, KeyInit as _, Mac as _};
use md5::{Digest, Md5};
use sha1::Sha1;

use super::{
    MAGIC_COOKIE, Transaction, UDP, address,
    attribute::{
        ALTERNATE_SERVER, ERROR_CODE, MESSAGE_INTEGRITY, NONCE, REALM, REQUESTED_TRANSPORT, USERNAME,
    },
    attributes,
    kind::ALLOCATE,
    length, message,
};

/// Realm and nonce from a 401 or 438 response.
#[derive(Clone, Debug)]
pub struct Challenge {
    pub realm: Vec<u8>,
    pub nonce: Vec<u8>,
}

/// An Allocate request with an invalid MESSAGE-INTEGRITY.
pub fn forged_request(username: &[u8], realm: &[u8], nonce: &[u8]) -> Vec<u8> {
    let attributes = [
        (REQUESTED_TRANSPORT, &UDP[..]),
        (USERNAME, username),
        (REALM, realm),
        (NONCE, nonce),
        (MESSAGE_INTEGRITY, &[0x5A; 20]),
    ];
    plain_message(ALLOCATE, &attributes)
}

pub fn allocate_request(credentials: Option<(&str, &str, &Challenge)>) -> Vec<u8> {
    let attributes = [(REQUESTED_TRANSPORT, &UDP[..])];
    match credentials {
        Some(credentials) => signed_request(ALLOCATE, &attributes, credentials),
        None => plain_message(ALLOCATE, &attributes),
    }
}

pub fn plain_message(kind: u16, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    message(kind, Transaction::unique(), attributes)
}

/// A request signed with an MD5 key (RFC 8489 section 9.2.2) for a user with this password.
pub fn signed_request(
    kind: u16,
    attributes: &[(u16, &[u8])],
    (username, password, Challenge { realm, nonce }): (&str, &str, &Challenge),
) -> Vec<u8> {
    let user = username.as_bytes();
    let credentials = [(USERNAME, user), (REALM, &realm[..]), (NONCE, &nonce[..])];
    // The length already includes the MAC, whose bytes are still zero.
    let mac = [(MESSAGE_INTEGRITY, &[0; 20][..])];
    let mut message = plain_message(kind, &[attributes, &credentials, &mac].concat());
    message.truncate(message.len() - 24);
    let key = Md5::digest([user, b":", realm, b":", password.as_bytes()].concat());
    let mut mac = Hmac::<Sha1>::new_from_slice(&key).unwrap_or_else(|error| panic!("{error}"));
    mac.update(&message);
    message.extend(MESSAGE_INTEGRITY.to_be_bytes());
    message.extend([0, 20]);
    message.extend(mac.finalize().into_bytes());
    message
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message(pub Vec<u8>);

impl Message {
    pub fn stun(bytes: &[u8]) -> Self {
        assert!(bytes.len() >= 20 && bytes[4..8] == MAGIC_COOKIE, "not a STUN message: {bytes:?}");
        assert_eq!(bytes[2..4], length(&bytes[20..]).to_be_bytes(), "the length of a STUN message");
        Self(bytes.to_vec())
    }

    pub fn kind(&self) -> u16 {
        u16::from_be_bytes([self.0[0], self.0[1]])
    }

    pub fn attribute(&self, wanted: u16) -> Vec<u8> {
        let found = attributes(&self.0).into_iter().find(|(kind, _)| *kind == wanted);
        found.unwrap_or_else(|| panic!("attribute {wanted:#06x} is missing from {self:?}")).1
    }

    pub fn address(&self, wanted: u16) -> SocketAddr {
        let id = <[u8; 12]>::try_from(&self.0[8..20]).unwrap_or_else(|error| panic!("{error}"));
        address(&self.attribute(wanted), Transaction(id))
    }

    /// Code of an error response (class bits 11, RFC 8489 section 5).
    pub fn error(&self) -> Option<u16> {
        (self.kind() & 0x0110 == 0x0110).then(|| {
            let value = self.attribute(ERROR_CODE);
            u16::from(value[2]) * 100 + u16::from(value[3])
        })
    }

    pub fn challenge(&self) -> Challenge {
        Challenge { realm: self.attribute(REALM), nonce: self.attribute(NONCE) }
    }

    /// IPv4 address in the ALTERNATE-SERVER attribute of a 300 response (RFC 8489 section 14.15).
    pub fn alternate(&self) -> SocketAddr {
        let value = self.attribute(ALTERNATE_SERVER);
        let [0, 1, high, low, a, b, c, d] = value[..] else { panic!("not an IPv4 address: {value:?}") };
        SocketAddr::from(([a, b, c, d], u16::from_be_bytes([high, low])))
    }

    pub fn payload(&self) -> &[u8] {
        assert!((0x4000..0x8000).contains(&self.kind()), "not ChannelData: {self:?}");
        &self.0[4..]
    }
}
