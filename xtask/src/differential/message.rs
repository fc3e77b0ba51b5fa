//! Wire messages of a sequence: builds requests from steps, and strips from responses the parts that may differ between servers.

use std::{collections::BTreeSet, fmt, net::SocketAddr};

use turnpike_wire::{
    integrity::{Key, KeyAlgorithm, Mac, userhash},
    stun::{
        self, Class, ErrorCode, FAMILY_IPV4, Header, Transaction, View, Writer, kind, password_algorithms,
        unknown_attributes,
    },
};

use super::step::{Auth, Damage, Dialect, Field, Peer, Request, name};

pub(super) const REALM: &str = "example.org";
/// Number of primary users. Each is paired with a secondary user, which some clients use instead.
pub(super) const USERS: usize = 500;

pub(super) fn users() -> impl Iterator<Item = (String, String)> {
    (0..2 * USERS).map(user)
}

fn user(index: usize) -> (String, String) {
    (format!("alice{index}"), format!("wonderland{index}"))
}

#[derive(Clone, Debug, Default)]
pub(super) struct Challenge {
    pub(super) nonce: Vec<u8>,
    /// Value of PASSWORD-ALGORITHMS; empty if the server offers no algorithms.
    pub(super) algorithms: Vec<u8>,
}

pub(super) struct Context<'a> {
    pub(super) dialect: Dialect,
    pub(super) user: usize,
    pub(super) challenge: &'a Challenge,
    pub(super) is_datagram: bool,
    pub(super) token: &'a [u8],
    pub(super) address: &'a dyn Fn(Peer) -> SocketAddr,
}

pub(super) fn key(dialect: Dialect, auth: Auth, index: usize) -> (Key, Mac) {
    let (user, password) = user(if auth == Auth::OtherUser { index + USERS } else { index });
    let password = if auth == Auth::WrongPassword { "wrong" } else { &password };
    let (algorithm, mac) = match dialect {
        Dialect::Classic => (KeyAlgorithm::Md5, Mac::Sha1),
        Dialect::Sha256 | Dialect::Userhash => (KeyAlgorithm::Sha256, Mac::Sha256),
    };
    (Key::long_term(algorithm, &user, REALM, password.as_bytes()), mac)
}

pub(super) fn write(request: &Request, transaction: Transaction, context: &Context<'_>) -> Vec<u8> {
    let class = match (request.damage, request.indication) {
        (Some(Damage::Response), _) => Class::Success,
        (_, true) => Class::Indication,
        (_, false) => Class::Request,
    };
    let mut buffer = Vec::new();
    let mut message = Writer::begin(&mut buffer, Header { class, method: request.method, transaction });
    for field in &request.fields {
        match field {
            Field::Value(kind, value) => message.attribute(*kind, value),
            Field::Peer(peer) => message.xor_address(kind::XOR_PEER_ADDRESS, (context.address)(*peer)),
            Field::Token => message.attribute(kind::RESERVATION_TOKEN, context.token),
            Field::Data(length) => message.attribute(kind::DATA, &payload(*length)),
        };
    }
    if request.auth != Auth::None {
        credentials(&mut message, request.auth, context);
    }
    let flipped = (request.auth == Auth::Broken).then(|| message.len() - 1);
    if request.damage == Some(Damage::Behind) {
        message.number(kind::LIFETIME, 1);
    }
    let is_broken = request.damage == Some(Damage::Fingerprint);
    message.finish((request.fingerprint && flipped.is_none()) || is_broken);
    if let Some(last) = flipped.or_else(|| is_broken.then(|| buffer.len() - 1)) {
        buffer[last] ^= 1;
    }
    match request.damage {
        Some(Damage::Cookie) => buffer[4] ^= 0xFF,
        Some(Damage::Cut) if context.is_datagram => buffer.truncate(buffer.len() - 4),
        Some(Damage::Long) if context.is_datagram => buffer.extend([0; 4]),
        _ => {}
    }
    buffer
}

fn credentials(message: &mut Writer<'_>, auth: Auth, context: &Context<'_>) {
    let (user, _) = user(if auth == Auth::OtherUser { context.user + USERS } else { context.user });
    let user = if auth == Auth::UnknownUser { "mallory" } else { &user };
    let realm = if auth == Auth::WrongRealm { "example.net" } else { REALM };
    if auth != Auth::WithoutUser {
        match context.dialect {
            Dialect::Userhash => message.attribute(kind::USERHASH, &userhash(user, realm)),
            Dialect::Classic | Dialect::Sha256 => message.attribute(kind::USERNAME, user.as_bytes()),
        };
    }
    if auth != Auth::WithoutRealm {
        message.attribute(kind::REALM, realm.as_bytes());
    }
    match auth {
        Auth::WithoutNonce => {}
        Auth::WrongNonce => {
            // The prefix of the nonce is kept, because it encodes the server's features.
            let mut nonce = context.challenge.nonce.clone();
            nonce.iter_mut().rev().take(2).for_each(|byte| *byte = if *byte == b'0' { b'1' } else { b'0' });
            message.attribute(kind::NONCE, &nonce);
        }
        _ => _ = message.attribute(kind::NONCE, &context.challenge.nonce),
    }
    if context.dialect != Dialect::Classic {
        algorithms(message, auth, &context.challenge.algorithms);
    }
    if auth != Auth::Unsigned {
        let (key, mac) = key(context.dialect, auth, context.user);
        message.sign(&key, mac);
    }
}

fn algorithms(message: &mut Writer<'_>, auth: Auth, offered: &[u8]) {
    match auth {
        Auth::WithoutAlgorithms => {}
        Auth::OtherAlgorithms => {
            _ = message.attribute(kind::PASSWORD_ALGORITHMS, &KeyAlgorithm::Md5.attribute());
        }
        _ => _ = message.attribute(kind::PASSWORD_ALGORITHMS, offered),
    }
    match auth {
        Auth::WithoutAlgorithm => {}
        Auth::UnlistedAlgorithm => _ = message.attribute(kind::PASSWORD_ALGORITHM, &[0, 9, 0, 0]),
        _ => _ = message.attribute(kind::PASSWORD_ALGORITHM, &KeyAlgorithm::Sha256.attribute()),
    }
}

/// Application data of this length in which adjacent bytes always differ.
pub(super) fn payload(length: u16) -> Vec<u8> {
    (0..length).map(|at| at.to_be_bytes()[1]).collect()
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Answer {
    pub(super) method: u16,
    /// Code of a response: 0 for success, 1 for an error without ERROR-CODE.
    pub(super) code: u16,
    pub(super) facts: BTreeSet<String>,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let facts: Vec<&str> = self.facts.iter().map(String::as_str).collect();
        write!(f, "{} {} ({})", name(self.method), code(self.code), facts.join(", "))
    }
}

pub(super) fn code(code: u16) -> String {
    match code {
        0 => "success".to_owned(),
        1 => "an error without a code".to_owned(),
        code => code.to_string(),
    }
}

pub(super) struct Expected<'a> {
    pub(super) own: Option<SocketAddr>,
    pub(super) key: &'a (Key, Mac),
    /// The client's relayed addresses before the request, IPv4 and IPv6.
    pub(super) relays: [Option<SocketAddr>; 2],
    pub(super) is_even: bool,
    pub(super) is_again: bool,
}

pub(super) fn read(view: &View<'_>, expected: &Expected<'_>) -> Option<Answer> {
    let header = view.header();
    let code = match header.class {
        Class::Success => 0,
        Class::Error => view.error().map_or(1, |error| error.code),
        Class::Request | Class::Indication => return None,
    };
    let mut facts: BTreeSet<String> = view
        .attributes()
        .filter_map(|attribute| fact(view, attribute.kind, attribute.value, expected))
        .collect();
    if let Some(mac) = view.mac() {
        let (key, wanted) = expected.key;
        let verified = mac == *wanted && view.verify(key, mac).is_ok();
        facts.insert(if verified { "integrity" } else { "wrong integrity" }.to_owned());
    }
    if view.has_fingerprint() {
        facts.insert("FINGERPRINT".to_owned());
    }
    Some(Answer { method: header.method, code, facts })
}

fn fact(view: &View<'_>, kind: u16, value: &[u8], expected: &Expected<'_>) -> Option<String> {
    let told = match kind {
        kind::ERROR_CODE | kind::SOFTWARE | kind::PASSWORD_ALGORITHMS | kind::FINGERPRINT => return None,
        kind::LIFETIME => view.number(kind).map(|seconds| seconds.to_string()),
        kind::XOR_MAPPED_ADDRESS => (view.xor_address(kind) != expected.own).then(|| "wrong".to_owned()),
        kind::XOR_RELAYED_ADDRESS => {
            let relayed = stun::xor_address(value, &view.header().transaction)?;
            let family = if relayed.is_ipv4() { "IPv4" } else { "IPv6" };
            let is_other = expected.is_again && !expected.relays.contains(&Some(relayed));
            let parity = if expected.is_even && relayed.port() % 2 == 1 { " odd" } else { "" };
            Some(format!("{family}{parity}{}", if is_other { " other" } else { "" }))
        }
        kind::UNKNOWN_ATTRIBUTES => {
            let kinds: BTreeSet<u16> = unknown_attributes(value).collect();
            Some(kinds.into_iter().map(|kind| kind::Name(kind).to_string()).collect::<Vec<_>>().join(" "))
        }
        kind::REALM => (value != REALM.as_bytes()).then(|| "wrong".to_owned()),
        kind::ADDRESS_ERROR_CODE => {
            let family = if value.first() == Some(&FAMILY_IPV4) { "IPv4" } else { "IPv6" };
            ErrorCode::of(value).map(|error| format!("{family} {}", error.code))
        }
        _ => None,
    };
    let name = kind::Name(kind);
    Some(told.map_or_else(|| name.to_string(), |told| format!("{name}={told}")))
}

pub(super) fn challenge(view: &View<'_>) -> Option<Challenge> {
    let nonce = view.get(kind::NONCE)?.to_vec();
    let algorithms = view.get(kind::PASSWORD_ALGORITHMS).unwrap_or_default().to_vec();
    Some(Challenge { nonce, algorithms })
}

pub(super) fn offers_sha256(challenge: &Challenge) -> bool {
    password_algorithms(&challenge.algorithms).any(|number| number == 2)
}
