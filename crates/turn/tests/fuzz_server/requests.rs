//! Client input: requests with arbitrary attributes and a valid or almost valid signature, and data.

use std::net::SocketAddr;

use turnpike_testkit::fuzz::Input;
use turnpike_turn::{
    access_token::{AccessToken, TokenKey},
    server::{Client, ListenerId},
    wire::{
        integrity::{Key, KeyAlgorithm, Mac, userhash},
        stun::{Class, Header, View, Writer, kind, method},
    },
};

use super::Run;
use crate::common::{REALM, address, client, password, stream};

const METHODS: [u16; 7] = [
    method::ALLOCATE,
    method::REFRESH,
    method::CREATE_PERMISSION,
    method::CHANNEL_BIND,
    method::CONNECT,
    method::CONNECTION_BIND,
    method::BINDING,
];
const USERS: [&str; 5] = ["alice", "bob", "north", "old", "nobody"];
const TENANT: &str = "tenant.example";
const MAC_KEY: [u8; 20] = [5; 20];
pub(super) const RELAYED: &str = "203.0.113.1:50002";

impl Run {
    /// Builds a request from meaningful attributes, with a valid or almost valid signature.
    pub(super) fn request(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let (method, how) = (input.below(8), input.u16());
        let method = METHODS.get(usize::from(method)).copied().unwrap_or_else(|| input.u16() & 0xFFF);
        let header = Header { class: Class::Request, method, transaction: [input.byte(); 12] };
        let mut buffer = Vec::new();
        let mut writer = Writer::begin(&mut buffer, header);
        for _ in 0..input.below(8) {
            self.attribute(&mut writer, input);
        }
        self.sign(&mut writer, how);
        writer.finish(how & 1 != 0);
        buffer
    }

    fn attribute(&self, writer: &mut Writer<'_>, input: &mut Input<'_>) {
        match input.below(20) {
            0 | 1 => writer.xor_address(kind::XOR_PEER_ADDRESS, peer(input.byte())),
            2 => writer.number(kind::CHANNEL_NUMBER, u32::from(0x4000 + u16::from(input.below(6))) << 16),
            3 => writer.number(kind::LIFETIME, input.u16().into()),
            4 => writer.number(kind::REQUESTED_TRANSPORT, u32::from(*input.choice(&[17_u8, 6, 132])) << 24),
            5 => writer.number(kind::REQUESTED_ADDRESS_FAMILY, u32::from(*input.choice(&[1_u8, 2, 3])) << 24),
            6 => writer.number(kind::ADDITIONAL_ADDRESS_FAMILY, u32::from(*input.choice(&[2_u8, 1])) << 24),
            7 => writer.attribute(kind::EVEN_PORT, &[*input.choice(&[0x80, 0])]),
            8 => writer.attribute(kind::RESERVATION_TOKEN, &self.reservation),
            9 => writer.attribute(kind::DONT_FRAGMENT, &[]),
            10 => writer.attribute(kind::MOBILITY_TICKET, &[]),
            11 => {
                let number = usize::from(input.byte());
                let mut ticket = self.tickets.iter().rev().nth(number).cloned().unwrap_or_default();
                if let (Some(byte), mask) = (ticket.get_mut(number % 32), input.below(2)) {
                    *byte ^= mask;
                }
                writer.attribute(kind::MOBILITY_TICKET, &ticket)
            }
            12 => {
                let known = self.connections.get(usize::from(input.byte()));
                writer.number(kind::CONNECTION_ID, known.map_or_else(|| input.u32(), |known| known.0))
            }
            13 => writer.number(kind::CHANGE_REQUEST, u32::from(input.below(8))),
            14 => writer.attribute(kind::PADDING, &vec![0; 8 * usize::from(input.byte())]),
            15 => writer.attribute(kind::RESPONSE_PORT, &input.u16().to_be_bytes()),
            16 => {
                let lifetime = input.u16();
                let age = u64::from(input.byte());
                let token =
                    AccessToken::new(&MAC_KEY, self.now.unix + 30 - age, lifetime.into()).expect("a key");
                writer.attribute(
                    kind::ACCESS_TOKEN,
                    &token.seal(&TokenKey::A128Gcm([1; 16]), "turn.example.org", [9; 12]),
                )
            }
            17 => writer.number(kind::DRAFT_ADDITIONAL_ADDRESS_FAMILY, 2 << 24),
            18 => writer
                .attribute(*input.choice(&[0x7FFF, kind::DATA, kind::ICMP, kind::PRIORITY]), input.bytes()),
            _ => writer.attribute(input.u16(), input.bytes()),
        };
    }

    fn sign(&self, writer: &mut Writer<'_>, how: u16) {
        if how & 2 != 0 {
            return;
        }
        let user = USERS[usize::from(how >> 2 & 7) % USERS.len()];
        let challenge = self.challenges.iter().find(|(client, ..)| *client == self.client);
        let (mut realm, mut nonce) = challenge.map_or_else(
            || (REALM.as_bytes().to_vec(), Vec::new()),
            |(_, realm, nonce)| (realm.clone(), nonce.clone()),
        );
        if how & 0x20 != 0 {
            realm = TENANT.as_bytes().to_vec();
        }
        if let (true, Some(byte)) = (how & 0x40 != 0, nonce.last_mut()) {
            *byte ^= 1;
        }
        let text = String::from_utf8_lossy(&realm).into_owned();
        let (algorithm, mac) = match how >> 8 & 3 {
            0 => (KeyAlgorithm::Md5, Mac::Sha1),
            1 => (KeyAlgorithm::Md5, Mac::Sha256),
            _ => (KeyAlgorithm::Sha256, Mac::Sha256),
        };
        if how >> 8 & 3 == 3 {
            writer.attribute(kind::USERHASH, &userhash(user, &text));
        } else {
            writer.attribute(kind::USERNAME, user.as_bytes());
        }
        writer.attribute(kind::REALM, &realm).attribute(kind::NONCE, &nonce);
        if algorithm == KeyAlgorithm::Sha256 {
            let offered = [KeyAlgorithm::Sha256, KeyAlgorithm::Md5].map(KeyAlgorithm::attribute).concat();
            writer.attribute(kind::PASSWORD_ALGORITHMS, &offered);
            writer.attribute(kind::PASSWORD_ALGORITHM, &algorithm.attribute());
        }
        let secret = if how & 0x80 != 0 { "wrong".to_owned() } else { password(user) };
        let key = match user {
            "north" => Key::from_bytes(&MAC_KEY),
            _ => Key::long_term(algorithm, user, &text, secret.as_bytes()),
        };
        writer.sign(&key, mac);
    }

    /// Re-signs a recorded client request with the credentials of this test, keeping its other attributes.
    pub(super) fn signed_again(&self, message: &[u8]) -> Option<Vec<u8>> {
        let view = View::new_checked(message).ok()?;
        let mut buffer = Vec::new();
        let mut writer = Writer::begin(&mut buffer, view.header());
        let credentials = [
            kind::USERNAME,
            kind::USERHASH,
            kind::REALM,
            kind::NONCE,
            kind::PASSWORD_ALGORITHM,
            kind::PASSWORD_ALGORITHMS,
        ];
        for attribute in view.attributes().filter(|attribute| !credentials.contains(&attribute.kind)) {
            writer.attribute(attribute.kind, attribute.value);
        }
        match view.mac() {
            Some(Mac::Sha1) => self.sign(&mut writer, 0),
            Some(Mac::Sha256) => self.sign(&mut writer, 0x200),
            None => {}
        }
        writer.finish(view.has_fingerprint());
        Some(buffer)
    }
}

/// Clients over UDP, TCP, TLS and DTLS; the last one has a relayed address.
pub(super) fn client_numbered(number: u8) -> Client {
    match number % 7 {
        0 => client(40_000),
        1 => client(40_001),
        2 => stream(41_000),
        3 => stream(41_001),
        4 => Client { listener: ListenerId(2), ..client(42_000) },
        5 => Client { listener: ListenerId(3), ..client(43_000) },
        _ => Client { address: address(RELAYED), ..client(1) },
    }
}

pub(super) fn peer(number: u8) -> SocketAddr {
    let of = u16::from(number / 8);
    match number % 8 {
        0..4 => ([198, 41, 0, number % 4], 7000 + of % 3).into(),
        4 | 5 => ([0x2606, 0x4700, 0, 0, 0, 0, 0, of], 7000).into(),
        6 => *[
            address("10.0.0.1:7000"),
            address("[::ffff:198.41.0.1]:7000"),
            address(RELAYED),
            address("0.0.0.0:7000"),
            address("[64:ff9b::a00:1]:7000"),
            address("192.0.2.1:3478"),
        ]
        .get(usize::from(of) % 6)
        .expect("one of six kinds"),
        _ => ([198, 41, 0, 1], of % 2).into(),
    }
}

pub(super) fn send(to: u8, data: &[u8]) -> Vec<u8> {
    let mut buffer = Vec::new();
    let header = Header { class: Class::Indication, method: method::SEND, transaction: [to; 12] };
    let mut writer = Writer::begin(&mut buffer, header);
    writer.xor_address(kind::XOR_PEER_ADDRESS, peer(to)).attribute(kind::DATA, data);
    writer.finish(to & 1 != 0);
    buffer
}
