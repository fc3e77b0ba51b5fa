//! Requests and responses. Unlike [`turnpike_turn::client`], this module gives access to all attributes.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use turnpike_client::Login;
use turnpike_wire::{
    address::canonical,
    escape::name,
    integrity::{Key, KeyAlgorithm, Mac, userhash},
    precis::opaque_string,
    stun::{
        self, Class, ErrorCode, Header, Invalid, View, Writer, feature, kind, method, password_algorithms,
        security_features,
    },
};

use crate::connection::ProbeConnection;

/// Maximum number of challenges to respond to; one more counts as a refusal.
const MOST_CHALLENGES: u8 = 3;
/// Maximum number of buffered indications, since a server may send any number of them.
const MOST_UNASKED: usize = 1024;

pub(crate) type RequestAttributes<'a> = &'a dyn Fn(&mut Writer<'_>);

#[derive(Clone, Debug)]
pub(crate) struct ProbeChallenge {
    pub(crate) realm: String,
    nonce: Vec<u8>,
    algorithms: Option<Vec<u8>>,
    key: Key,
    algorithm: KeyAlgorithm,
    mac: Mac,
    pub(crate) anonymous: bool,
}

impl ProbeChallenge {
    pub(crate) fn is_sha256(&self) -> bool {
        self.mac == Mac::Sha256
    }
}

#[derive(Clone, Debug)]
pub(crate) struct ServerAnswer {
    bytes: Vec<u8>,
    /// Error code and reason; `None` for success.
    pub(crate) error: Option<(u16, String)>,
    /// True if the response's integrity attribute is correct, or if the request was not signed.
    pub(crate) verified: bool,
    /// Time from the last transmission to the response; only an estimate if the request was retransmitted.
    pub(crate) took: Duration,
    pub(crate) sent: u32,
}

impl ServerAnswer {
    pub(crate) fn code(&self) -> Option<u16> {
        self.error.as_ref().map(|(code, _)| *code)
    }

    pub(crate) fn is_success(&self) -> bool {
        self.error.is_none()
    }

    pub(crate) fn describe(&self) -> String {
        match &self.error {
            None => "success".to_owned(),
            // pion sends errors without ERROR-CODE.
            Some((0, _)) => "an error without a code (no ERROR-CODE)".to_owned(),
            Some((code, reason)) => describe_code(*code, reason),
        }
    }

    /// ADDRESS-ERROR-CODE (RFC 8656 section 18.12) is an ERROR-CODE preceded by a family.
    pub(crate) fn family_refused(&self) -> Option<String> {
        let error = self.value(kind::ADDRESS_ERROR_CODE).and_then(ErrorCode::of)?;
        Some(describe_code(error.code, &error.text()))
    }

    pub(crate) fn value(&self, kind: u16) -> Option<&[u8]> {
        self.view().get(kind)
    }

    pub(crate) fn text(&self, kind: u16) -> Option<String> {
        self.value(kind).map(|value| String::from_utf8_lossy(value).into_owned())
    }

    pub(crate) fn addresses(&self, kind: u16) -> Vec<SocketAddr> {
        let view = self.view();
        let read = |value| match kind {
            kind::MAPPED_ADDRESS | kind::OTHER_ADDRESS | kind::ALTERNATE_SERVER => stun::address(value),
            _ => stun::xor_address(value, &view.header().transaction),
        };
        view.all(kind).filter_map(read).map(canonical).collect()
    }

    pub(crate) fn address(&self, kind: u16) -> Option<SocketAddr> {
        self.addresses(kind).first().copied()
    }

    fn view(&self) -> View<'_> {
        View::new_checked(&self.bytes).expect("only checked answers are kept")
    }
}

pub(crate) struct ProbeSession {
    connection: ProbeConnection,
    unasked: VecDeque<Vec<u8>>,
    credentials: Option<Login>,
    pub(crate) challenge: Option<ProbeChallenge>,
    patience: Duration,
    deadline: Instant,
}

impl ProbeSession {
    pub(crate) fn new(
        connection: ProbeConnection,
        credentials: Option<Login>,
        patience: Duration,
        deadline: Instant,
    ) -> Self {
        Self { connection, unasked: VecDeque::new(), credentials, challenge: None, patience, deadline }
    }

    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        self.connection.local_addr()
    }

    pub(crate) fn ask(&mut self, method: u16, attributes: RequestAttributes<'_>) -> io::Result<ServerAnswer> {
        self.exchange(method, attributes, false)
    }

    pub(crate) fn signed(
        &mut self,
        method: u16,
        attributes: RequestAttributes<'_>,
    ) -> io::Result<ServerAnswer> {
        self.exchange(method, attributes, true)
    }

    /// Sends a request, signed once there is a challenge, and repeats it after each new one.
    pub(crate) fn request(
        &mut self,
        method: u16,
        attributes: RequestAttributes<'_>,
    ) -> io::Result<ServerAnswer> {
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

    /// Adopts the realm and nonce of a challenge; returns false if they are missing or no user is configured.
    pub(crate) fn accept_challenge(&mut self, answer: &ServerAnswer) -> bool {
        let Some(credentials) = &self.credentials else { return false };
        let known = self.challenge.as_ref().map(|challenge| challenge.realm.clone());
        let realm = answer.view().text(kind::REALM).map(str::to_owned).or(known);
        let (Some(realm), Some(nonce)) = (realm, answer.value(kind::NONCE)) else { return false };
        let algorithms = answer.value(kind::PASSWORD_ALGORITHMS).map(<[u8]>::to_vec);
        let (algorithm, mac) = match algorithms.as_deref() {
            // Use the first algorithm offered that is supported (RFC 8489 section 9.2.5).
            Some(offered) => {
                let known = password_algorithms(offered).find_map(KeyAlgorithm::numbered);
                (known.unwrap_or(KeyAlgorithm::Sha256), Mac::Sha256)
            }
            None => (KeyAlgorithm::Md5, Mac::Sha1),
        };
        let key = Key::long_term(
            algorithm,
            &opaque_string(&credentials.name),
            &realm,
            credentials.password.as_bytes(),
        );
        let anonymous = security_features(nonce) & feature::USERNAME_ANONYMITY != 0;
        self.challenge =
            Some(ProbeChallenge { realm, nonce: nonce.to_vec(), algorithms, key, algorithm, mac, anonymous });
        true
    }

    pub(crate) fn indicate(&mut self, method: u16, attributes: RequestAttributes<'_>) -> io::Result<()> {
        let mut buffer = Vec::new();
        let header = Header { class: Class::Indication, method, transaction: rand::random() };
        let mut message = Writer::begin(&mut buffer, header);
        attributes(&mut message);
        message.finish(false);
        self.connection.send(&buffer, self.deadline)
    }

    /// Next unsolicited message; `TimedOut` if none arrives.
    pub(crate) fn receive_unsolicited(&mut self, until: Instant) -> io::Result<Vec<u8>> {
        match self.unasked.pop_front() {
            Some(message) => Ok(message),
            None => self.connection.receive(until.min(self.deadline)),
        }
    }

    pub(crate) fn delete(&mut self) {
        let _ = self.request(method::REFRESH, &|message| _ = message.number(kind::LIFETIME, 0));
    }

    fn exchange(
        &mut self,
        method: u16,
        attributes: RequestAttributes<'_>,
        signed: bool,
    ) -> io::Result<ServerAnswer> {
        let id: [u8; 12] = rand::random();
        let challenge = self.challenge.as_ref().filter(|_| signed);
        let message = write(method, id, attributes, challenge, self.credentials.as_ref());
        let deadline = self.deadline.min(Instant::now() + self.patience);
        let mut stray = None;
        // The retransmission interval starts at 500 ms and doubles each time (RFC 8489 section 6.2.1).
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
                        if is_data(&bytes) && self.unasked.len() < MOST_UNASKED {
                            stray = stray.or(other);
                            self.unasked.push_back(bytes);
                            continue;
                        }
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stray {
    Echo,
    /// Neither STUN nor data. Text that looks like ChannelData also counts as garbage, because no data can arrive: none has been sent to a
    /// peer.
    Garbage,
}

impl Stray {
    /// Classifies a message that is not the response to `request`. Returns `None` for messages that a STUN server may send: late responses
    /// to earlier requests, and indications.
    fn of(bytes: &[u8], request: &[u8]) -> Option<Self> {
        if bytes == request {
            return Some(Self::Echo);
        }
        let speaks_stun = matches!(View::new_checked(bytes), Ok(_) | Err(Invalid::Fingerprint));
        (!speaks_stun).then_some(Self::Garbage)
    }

    fn error(self) -> io::Error {
        let what = match self {
            Self::Echo => "the server returns its input: an echo service, not a STUN server",
            Self::Garbage => "the server does not speak STUN on this port",
        };
        io::Error::new(io::ErrorKind::InvalidData, what)
    }
}

pub(crate) fn write(
    method: u16,
    transaction: [u8; 12],
    attributes: RequestAttributes<'_>,
    challenge: Option<&ProbeChallenge>,
    credentials: Option<&Login>,
) -> Vec<u8> {
    let mut buffer = Vec::new();
    let mut message = Writer::begin(&mut buffer, Header { class: Class::Request, method, transaction });
    attributes(&mut message);
    if let (Some(challenge), Some(credentials)) = (challenge, credentials) {
        if challenge.anonymous {
            message.attribute(kind::USERHASH, &userhash(&credentials.name, &challenge.realm));
        } else {
            message.attribute(kind::USERNAME, opaque_string(&credentials.name).as_bytes());
        }
        message.attribute(kind::REALM, challenge.realm.as_bytes());
        message.attribute(kind::NONCE, &challenge.nonce);
        if let Some(offered) = &challenge.algorithms {
            message.attribute(kind::PASSWORD_ALGORITHMS, offered);
            message.attribute(kind::PASSWORD_ALGORITHM, &challenge.algorithm.attribute());
        }
        message.sign(&challenge.key, challenge.mac);
    }
    message.finish(false);
    buffer
}

/// Returns true for indications, and for channel numbers 0x4000 to 0x4FFF (RFC 8656 section 12).
fn is_data(bytes: &[u8]) -> bool {
    matches!(bytes.first(), Some(0x40..=0x4F))
        || View::new_checked(bytes).is_ok_and(|view| view.header().class == Class::Indication)
}

pub(crate) fn read(
    bytes: Vec<u8>,
    method: u16,
    id: [u8; 12],
    challenge: Option<&ProbeChallenge>,
    took: Duration,
    sent: u32,
) -> Option<ServerAnswer> {
    let view = View::new_checked(&bytes).ok()?;
    let header = view.header();
    if (header.method, header.transaction) != (method, id) {
        return None;
    }
    let error = match header.class {
        Class::Success => None,
        Class::Error => {
            let error = view.error().map(|error| (error.code, error.text()));
            Some(error.unwrap_or_default())
        }
        Class::Request | Class::Indication => return None,
    };
    let verified = challenge.is_none_or(|challenge| view.verify(&challenge.key, challenge.mac).is_ok());
    Some(ServerAnswer { bytes, error, verified, took, sent })
}

fn describe_code(code: u16, reason: &str) -> String {
    format!("{code} {}", name(reason).cut(127)).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(class: Class, id: [u8; 12], attributes: RequestAttributes<'_>) -> Vec<u8> {
        let mut buffer = Vec::new();
        let header = Header { class, method: method::BINDING, transaction: id };
        let mut message = Writer::begin(&mut buffer, header);
        attributes(&mut message);
        message.finish(false);
        buffer
    }

    #[test]
    fn echoes_and_garbage_differ_from_silence() {
        let request = write(method::BINDING, [7; 12], &|_| (), None, None);
        let late = answer(Class::Success, [6; 12], &|_| ());
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
    fn a_response_must_match_its_request() {
        let id = [9; 12];
        let success = answer(Class::Success, id, &|_| ());
        let read = |bytes: &[u8], method, id| read(bytes.to_vec(), method, id, None, Duration::ZERO, 1);
        assert!(read(&success, method::BINDING, id).is_some_and(|answer| answer.is_success()));
        assert!(read(&success, method::BINDING, [8; 12]).is_none());
        assert!(read(&success, method::ALLOCATE, id).is_none());
        let refused = answer(Class::Error, id, &|message| _ = message.error(403, "No\x07!"));
        assert_eq!(read(&refused, method::BINDING, id).unwrap().describe(), "403 No\\u{7}!");
        let bare = read(&answer(Class::Error, id, &|_| ()), method::BINDING, id).unwrap();
        assert_eq!((bare.is_success(), bare.describe().contains("without a code")), (false, true));
        for length in 0..success.len() {
            assert!(read(&success[..length], method::BINDING, id).is_none());
        }
    }
}
