//! Requests and their answers, attribute by attribute: [`turnpike_turn::client`] hides just what a probe wants to see.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use turnpike_wire::{
    address::canonical,
    demux,
    integrity::{self, Key, KeyAlgorithm, Mac},
};

use crate::connection::Connection;

/// Methods (RFC 8489 section 18.2, RFC 8656 section 17).
pub(crate) mod method {
    pub(crate) const BINDING: u16 = 0x001;
    pub(crate) const ALLOCATE: u16 = 0x003;
    pub(crate) const REFRESH: u16 = 0x004;
    pub(crate) const CREATE_PERMISSION: u16 = 0x008;
    pub(crate) const CHANNEL_BIND: u16 = 0x009;
}

/// Attributes (RFC 8489 section 18.3, RFC 8656 section 18, RFC 5780 section 7, RFC 8016 section 3.3).
pub(crate) mod attribute {
    pub(crate) const MAPPED_ADDRESS: u16 = 0x0001;
    pub(crate) const CHANGE_REQUEST: u16 = 0x0003;
    pub(crate) const USERNAME: u16 = 0x0006;
    pub(crate) const ERROR_CODE: u16 = 0x0009;
    pub(crate) const CHANNEL_NUMBER: u16 = 0x000C;
    pub(crate) const LIFETIME: u16 = 0x000D;
    pub(crate) const XOR_PEER_ADDRESS: u16 = 0x0012;
    pub(crate) const REALM: u16 = 0x0014;
    pub(crate) const NONCE: u16 = 0x0015;
    pub(crate) const XOR_RELAYED_ADDRESS: u16 = 0x0016;
    pub(crate) const REQUESTED_ADDRESS_FAMILY: u16 = 0x0017;
    pub(crate) const EVEN_PORT: u16 = 0x0018;
    pub(crate) const REQUESTED_TRANSPORT: u16 = 0x0019;
    pub(crate) const PASSWORD_ALGORITHM: u16 = 0x001D;
    pub(crate) const USERHASH: u16 = 0x001E;
    pub(crate) const XOR_MAPPED_ADDRESS: u16 = 0x0020;
    pub(crate) const ADDITIONAL_ADDRESS_FAMILY: u16 = 0x8000;
    pub(crate) const ADDRESS_ERROR_CODE: u16 = 0x8001;
    pub(crate) const PASSWORD_ALGORITHMS: u16 = 0x8002;
    pub(crate) const ALTERNATE_DOMAIN: u16 = 0x8003;
    pub(crate) const SOFTWARE: u16 = 0x8022;
    pub(crate) const ALTERNATE_SERVER: u16 = 0x8023;
    pub(crate) const OTHER_ADDRESS: u16 = 0x802C;
    pub(crate) const MOBILITY_TICKET: u16 = 0x8030;
}

const COOKIE: [u8; 4] = [0x21, 0x12, 0xA4, 0x42];
/// Challenges answered before they count as a refusal.
const MOST_CHALLENGES: u8 = 3;

/// Who asks.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    pub(crate) user: String,
    pub(crate) password: String,
}

/// A server's challenge, and the key that answers it.
#[derive(Clone, Debug)]
pub(crate) struct Challenge {
    pub(crate) realm: String,
    nonce: Vec<u8>,
    algorithms: Option<Vec<u8>>,
    key: Key,
    algorithm: KeyAlgorithm,
    mac: Mac,
    /// Whether USERNAME is to be a hash.
    pub(crate) anonymous: bool,
}

impl Challenge {
    /// Whether keys and MACs are SHA-256's.
    pub(crate) fn is_sha256(&self) -> bool {
        self.mac == Mac::Sha256
    }
}

/// An answer.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    bytes: Vec<u8>,
    /// Error code and reason; `None` for success.
    pub(crate) error: Option<(u16, String)>,
    /// Whether its integrity was as it must be; true where nothing was signed.
    pub(crate) verified: bool,
    /// From the last transmission, so that after a loss it is an estimate.
    pub(crate) took: Duration,
    /// Transmissions.
    pub(crate) sent: u32,
}

impl Answer {
    pub(crate) fn code(&self) -> Option<u16> {
        self.error.as_ref().map(|(code, _)| *code)
    }

    pub(crate) fn is_success(&self) -> bool {
        self.error.is_none()
    }

    /// "403 Forbidden".
    pub(crate) fn told(&self) -> String {
        match &self.error {
            None => "success".to_owned(),
            // pion has such.
            Some((0, _)) => "an error without a code (no ERROR-CODE)".to_owned(),
            Some((code, reason)) => told(*code, reason),
        }
    }

    /// Why one of two families was left out of a dual-stack allocation, such as "440 Address Family not Supported":
    /// ADDRESS-ERROR-CODE (RFC 8656 section 18.12) has a family in front of what ERROR-CODE has.
    pub(crate) fn family_refused(&self) -> Option<String> {
        let (code, reason) = read_error(self.value(attribute::ADDRESS_ERROR_CODE)?)?;
        Some(told(code, &reason))
    }

    /// All values of an attribute.
    pub(crate) fn all(&self, kind: u16) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.bytes.get(20..).unwrap_or_default();
        std::iter::from_fn(move || {
            loop {
                let [a, b, c, d, after @ ..] = rest else { return None };
                let length = usize::from(u16::from_be_bytes([*c, *d]));
                let value = after.get(..length)?;
                rest = after.get(length.next_multiple_of(4)..).unwrap_or_default();
                if u16::from_be_bytes([*a, *b]) == kind {
                    return Some(value);
                }
            }
        })
    }

    pub(crate) fn value(&self, kind: u16) -> Option<&[u8]> {
        self.all(kind).next()
    }

    /// A text attribute, without what could disturb a terminal.
    pub(crate) fn text(&self, kind: u16) -> Option<String> {
        self.value(kind).map(printable)
    }

    /// An address attribute; the XOR- ones by their types.
    pub(crate) fn addresses(&self, kind: u16) -> Vec<SocketAddr> {
        let plain = matches!(
            kind,
            attribute::MAPPED_ADDRESS | attribute::OTHER_ADDRESS | attribute::ALTERNATE_SERVER
        );
        let id: [u8; 12] = self.bytes.get(8..20).and_then(|id| id.try_into().ok()).unwrap_or_default();
        self.all(kind).filter_map(|value| read_address(value, if plain { None } else { Some(&id) })).collect()
    }

    pub(crate) fn address(&self, kind: u16) -> Option<SocketAddr> {
        self.addresses(kind).first().copied()
    }
}

/// Requests over one connection, one at a time.
pub(crate) struct Session {
    connection: Connection,
    credentials: Option<Credentials>,
    pub(crate) challenge: Option<Challenge>,
    /// The longest wait for an answer.
    patience: Duration,
    /// When everything must be over.
    deadline: Instant,
}

impl Session {
    pub(crate) fn new(
        connection: Connection,
        credentials: Option<Credentials>,
        patience: Duration,
        deadline: Instant,
    ) -> Self {
        Self { connection, credentials, challenge: None, patience, deadline }
    }

    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        self.connection.local_addr()
    }

    /// One request, unsigned.
    pub(crate) fn ask(&mut self, method: u16, attributes: &[(u16, Vec<u8>)]) -> io::Result<Answer> {
        self.exchange(method, attributes, false)
    }

    /// One request, signed for the challenge that there is.
    pub(crate) fn signed(&mut self, method: u16, attributes: &[(u16, Vec<u8>)]) -> io::Result<Answer> {
        self.exchange(method, attributes, true)
    }

    /// One request, signed as soon as there is a challenge, and again after each.
    pub(crate) fn request(&mut self, method: u16, attributes: &[(u16, Vec<u8>)]) -> io::Result<Answer> {
        let mut signed = self.challenge.is_some();
        for _ in 0..MOST_CHALLENGES {
            let answer = self.exchange(method, attributes, signed)?;
            let again = match answer.code() {
                Some(401) => !signed,
                Some(438) => true,
                _ => false,
            };
            if !again || !self.accept_challenge(&answer) {
                return Ok(answer);
            }
            signed = true;
        }
        self.exchange(method, attributes, signed)
    }

    /// Takes over realm and nonce of a challenge; false when it lacks them, or there is nobody to sign as.
    pub(crate) fn accept_challenge(&mut self, answer: &Answer) -> bool {
        let Some(credentials) = &self.credentials else { return false };
        let known = self.challenge.as_ref().map(|challenge| challenge.realm.clone());
        let realm =
            answer.value(attribute::REALM).and_then(|realm| String::from_utf8(realm.to_vec()).ok()).or(known);
        let (Some(realm), Some(nonce)) = (realm, answer.value(attribute::NONCE)) else { return false };
        let algorithms = answer.value(attribute::PASSWORD_ALGORITHMS).map(<[u8]>::to_vec);
        let (algorithm, mac) = match algorithms.as_deref() {
            // The first one that is known here (RFC 8489 section 9.2.5); 1 is MD5, 2 SHA-256.
            Some([0, 1, ..]) => (KeyAlgorithm::Md5, Mac::Sha256),
            Some(_) => (KeyAlgorithm::Sha256, Mac::Sha256),
            None => (KeyAlgorithm::Md5, Mac::Sha1),
        };
        let key = Key::long_term(algorithm, &credentials.user, &realm, credentials.password.as_bytes());
        let anonymous = features(nonce) & 0x40 != 0;
        self.challenge =
            Some(Challenge { realm, nonce: nonce.to_vec(), algorithms, key, algorithm, mac, anonymous });
        true
    }

    /// Deletes the allocation, so that the probe leaves nothing behind.
    pub(crate) fn delete(&mut self) {
        // Where that fails it expires by itself.
        let _ = self.request(method::REFRESH, &[(attribute::LIFETIME, vec![0; 4])]);
    }

    fn exchange(&mut self, method: u16, attributes: &[(u16, Vec<u8>)], signed: bool) -> io::Result<Answer> {
        let id: [u8; 12] = rand::random();
        let challenge = self.challenge.as_ref().filter(|_| signed);
        let message = write(method, id, attributes, challenge, self.credentials.as_ref());
        let deadline = self.deadline.min(Instant::now() + self.patience);
        let mut stray = None;
        // RFC 8489 section 6.2.1: 500 ms, then twice as long each time.
        let mut pause = Duration::from_millis(500);
        let mut sent = 0;
        loop {
            let sent_at = Instant::now();
            self.connection.send(&message, deadline)?;
            sent += 1;
            let until = if self.connection.is_lossy() { (sent_at + pause).min(deadline) } else { deadline };
            pause *= 2;
            loop {
                match self.connection.receive(until) {
                    Ok(bytes) => {
                        let other = Stray::of(&bytes, &message);
                        if let Some(answer) = read(bytes, method, id, challenge, sent_at.elapsed(), sent) {
                            return Ok(answer);
                        }
                        stray = stray.or(other);
                    }
                    Err(error) if error.kind() == io::ErrorKind::TimedOut && until < deadline => break,
                    Err(error) => {
                        let is_end =
                            matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::UnexpectedEof);
                        let stray = stray.or(self.connection.ends_in_garbage().then_some(Stray::Garbage));
                        return Err(stray.filter(|_| is_end).map_or(error, Stray::error));
                    }
                }
            }
        }
    }
}

/// What came in place of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stray {
    /// The request itself.
    Echo,
    /// No STUN. No ChannelData either: no peer is sent anything that it could answer, and text begins as ChannelData does.
    Garbage,
}

impl Stray {
    /// `None` for what a STUN server may send: late answers to earlier requests, and indications.
    fn of(bytes: &[u8], request: &[u8]) -> Option<Self> {
        if bytes == request {
            return Some(Self::Echo);
        }
        (!demux::is_stun_message(bytes)).then_some(Self::Garbage)
    }

    fn error(self) -> io::Error {
        let what = match self {
            Self::Echo => "what answers sends back what it gets: an echo service and no STUN server",
            Self::Garbage => "what answers does not speak STUN",
        };
        io::Error::new(io::ErrorKind::InvalidData, what)
    }
}

/// An attribute value that holds an address for this transaction cannot be written before its id is known; peers are given
/// as plain addresses and are XORed in [`write`].
pub(crate) fn peer(address: SocketAddr) -> (u16, Vec<u8>) {
    (attribute::XOR_PEER_ADDRESS, write_address(address))
}

/// What the first of a nonce's security feature bytes says (RFC 8489 section 9.2).
fn features(nonce: &[u8]) -> u8 {
    let value = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    match nonce.strip_prefix(b"obMatJos2") {
        Some([a, b, ..]) => value(*a) << 2 | value(*b) >> 4,
        _ => 0,
    }
}

fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().filter(|c| !c.is_control()).take(255).collect()
}

pub(crate) fn write(
    method: u16,
    id: [u8; 12],
    attributes: &[(u16, Vec<u8>)],
    challenge: Option<&Challenge>,
    credentials: Option<&Credentials>,
) -> Vec<u8> {
    // The class bits of a request are zero, and these methods have no bit beyond the low four (RFC 8489 section 5).
    let mut message = method.to_be_bytes().to_vec();
    message.extend([0, 0]);
    message.extend(COOKIE);
    message.extend(id);
    for (kind, value) in attributes {
        if *kind == attribute::XOR_PEER_ADDRESS {
            put(&mut message, *kind, &xor(value, &id));
        } else {
            put(&mut message, *kind, value);
        }
    }
    if let (Some(challenge), Some(credentials)) = (challenge, credentials) {
        if challenge.anonymous {
            put(&mut message, attribute::USERHASH, &integrity::userhash(&credentials.user, &challenge.realm));
        } else {
            put(&mut message, attribute::USERNAME, credentials.user.as_bytes());
        }
        put(&mut message, attribute::REALM, challenge.realm.as_bytes());
        put(&mut message, attribute::NONCE, &challenge.nonce);
        if let Some(offered) = &challenge.algorithms {
            put(&mut message, attribute::PASSWORD_ALGORITHMS, offered);
            let chosen = if challenge.algorithm == KeyAlgorithm::Md5 { 1 } else { 2 };
            put(&mut message, attribute::PASSWORD_ALGORITHM, &[0, chosen, 0, 0]);
        }
        integrity::sign(&mut message, &challenge.key, challenge.mac);
        return message;
    }
    let length = u16::try_from(message.len() - 20).unwrap_or(u16::MAX);
    message[2..4].copy_from_slice(&length.to_be_bytes());
    message
}

fn put(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend(kind.to_be_bytes());
    message.extend(u16::try_from(value.len()).unwrap_or(u16::MAX).to_be_bytes());
    message.extend(value);
    message.resize(message.len().next_multiple_of(4), 0);
}

/// The answer to this request, if it is one.
pub(crate) fn read(
    bytes: Vec<u8>,
    method: u16,
    id: [u8; 12],
    challenge: Option<&Challenge>,
    took: Duration,
    sent: u32,
) -> Option<Answer> {
    if !demux::is_stun_message(&bytes) || bytes.get(8..20) != Some(&id) {
        return None;
    }
    let kind = u16::from_be_bytes([bytes[0], bytes[1]]);
    let failed = match kind.checked_sub(method)? {
        0x100 => false,
        0x110 => true,
        _ => return None,
    };
    let verified =
        challenge.is_none_or(|challenge| integrity::verify(&bytes, &challenge.key, challenge.mac).is_ok());
    let mut answer = Answer { bytes, error: None, verified, took, sent };
    if failed {
        answer.error = Some(answer.value(attribute::ERROR_CODE).and_then(read_error).unwrap_or_default());
    }
    Some(answer)
}

/// Code and reason phrase (RFC 8489 section 14.8).
fn read_error(value: &[u8]) -> Option<(u16, String)> {
    let (head, reason) = value.split_first_chunk::<4>()?;
    Some((u16::from(head[2] & 7) * 100 + u16::from(head[3]), printable(reason)))
}

fn told(code: u16, reason: &str) -> String {
    format!("{code} {reason}").trim_end().to_owned()
}

fn write_address(address: SocketAddr) -> Vec<u8> {
    let mut value = match address.ip() {
        IpAddr::V4(_) => vec![0, 1],
        IpAddr::V6(_) => vec![0, 2],
    };
    value.extend(address.port().to_be_bytes());
    match address.ip() {
        IpAddr::V4(ip) => value.extend(ip.octets()),
        IpAddr::V6(ip) => value.extend(ip.octets()),
    }
    value
}

fn xor(value: &[u8], id: &[u8; 12]) -> Vec<u8> {
    let mask = COOKIE[..2].iter().chain(COOKIE.iter()).chain(id);
    let (head, rest) = value.split_at(2.min(value.len()));
    head.iter().copied().chain(rest.iter().zip(mask).map(|(byte, mask)| byte ^ mask)).collect()
}

fn read_address(value: &[u8], id: Option<&[u8; 12]>) -> Option<SocketAddr> {
    let value = id.map_or_else(|| value.to_vec(), |id| xor(value, id));
    let port = u16::from_be_bytes([*value.get(2)?, *value.get(3)?]);
    let ip: IpAddr = match (value.get(1)?, value.get(4..)?) {
        (1, ip) => <[u8; 4]>::try_from(ip).ok()?.into(),
        (2, ip) => <[u8; 16]>::try_from(ip).ok()?.into(),
        _ => return None,
    };
    Some(canonical((ip, port).into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_probe_writes_reads_as_stun_and_addresses_read_back() {
        let id = [7; 12];
        for address in ["192.0.2.1:4000", "[2001:db8::1]:80"] {
            let address: SocketAddr = address.parse().unwrap();
            let message = write(method::CREATE_PERMISSION, id, &[peer(address)], None, None);
            assert!(demux::is_stun_message(&message));
            let value = &message[24..];
            assert_eq!(read_address(value, Some(&id)), Some(address));
        }
    }

    #[test]
    fn an_echo_and_garbage_are_told_from_silence() {
        let request = write(method::BINDING, [7; 12], &[], None, None);
        let mut late = write(method::BINDING, [6; 12], &[], None, None);
        late[0] = 1;
        for (bytes, expected) in [
            (&request[..], Some(Stray::Echo)),
            (b"HTTP/1.1 400", Some(Stray::Garbage)),
            (&request[..19], Some(Stray::Garbage)),
            (b"", Some(Stray::Garbage)),
            (&late, None),
        ] {
            assert_eq!(Stray::of(bytes, &request), expected, "{bytes:?}");
        }
    }

    #[test]
    fn the_nonce_tells_what_a_server_can() {
        assert_eq!(features(b"obMatJos2gAAArest") & 0xC0, 0x80);
        assert_eq!(features(b"obMatJos2QAAArest") & 0xC0, 0x40);
        assert_eq!(features(b"obMatJos2"), 0);
        assert_eq!(features(b"gAAA"), 0);
    }

    #[test]
    fn an_answer_is_one_only_to_its_request() {
        let id = [9; 12];
        let mut success = write(method::BINDING, id, &[], None, None);
        success[0] = 1;
        let took = Duration::ZERO;
        assert!(read(success.clone(), method::BINDING, id, None, took, 1).is_some_and(|a| a.is_success()));
        assert!(read(success.clone(), method::BINDING, [8; 12], None, took, 1).is_none());
        assert!(read(success.clone(), method::ALLOCATE, id, None, took, 1).is_none());
        let error = (attribute::ERROR_CODE, b"\0\0\x04\x03No\x07!".to_vec());
        let mut refused = write(method::BINDING, id, &[error], None, None);
        refused[..2].copy_from_slice(&[1, 0x11]);
        let answer = read(refused, method::BINDING, id, None, took, 1).unwrap();
        assert_eq!(answer.told(), "403 No!");
        let mut bare = write(method::BINDING, id, &[], None, None);
        bare[..2].copy_from_slice(&[1, 0x11]);
        let answer = read(bare, method::BINDING, id, None, took, 1).unwrap();
        assert_eq!((answer.is_success(), answer.told().contains("without a code")), (false, true));
        for length in 0..success.len() {
            assert!(read(success[..length].to_vec(), method::BINDING, id, None, took, 1).is_none());
        }
    }
}
