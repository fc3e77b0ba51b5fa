//! Minimal TURN server that uses only `stun_types`, so that it shares no code with the client.

use std::net::SocketAddr;
pub(crate) use std::sync::Arc;
pub(crate) use stun_types::message::{IntegrityAlgorithm, Message, MessageWriteVec};
pub(crate) use turn_types::{attribute::Lifetime, message::REFRESH};
pub(crate) use turnpike_turn::client::{
    Client, Config, Event, Failure, Ignored, Incoming, Request, RequestError,
};
pub(crate) use turnpike_wire::indication::MAX_HEADER_LEN;

use stun_types::{
    attribute::{
        ErrorCode, Nonce, PasswordAlgorithmValue, PasswordAlgorithms, Realm, Userhash, Username,
        XorMappedAddress,
    },
    message::{LongTermKeyCredentials, MessageIntegrityCredentials, MessageWrite as _, MessageWriteExt as _},
};
use turn_types::{attribute::XorRelayedAddress, message::ALLOCATE};

pub(crate) const USER: &str = "alice";
pub(crate) const PASSWORD: &str = "wonderland";
pub(crate) const REALM: &str = "example.org";
/// Nonce of an RFC 5389 server.
pub(crate) const PLAIN_NONCE: &str = "f//499k954d6OL34oL9FSTvy64sA";
/// Announces password algorithms.
pub(crate) const COOKIE_NONCE: &str = "obMatJos2gAAAf//499k954d6OL34oL9FSTvy64sA";
/// Announces password algorithms and username anonymity.
pub(crate) const ANONYMOUS_NONCE: &str = "obMatJos2wAAAf//499k954d6OL34oL9FSTvy64sA";

pub(crate) fn client() -> Client {
    Client::new(Arc::new(Config::new(USER, PASSWORD)), turnpike_turn::random::Seed([9; 32]))
}

pub(crate) fn relayed() -> SocketAddr {
    "203.0.113.5:50000".parse().unwrap()
}

pub(crate) fn mapped() -> SocketAddr {
    "198.51.100.7:40000".parse().unwrap()
}

pub(crate) fn peer() -> SocketAddr {
    "192.0.2.9:7000".parse().unwrap()
}

pub(crate) fn request(client: &mut Client) -> Vec<u8> {
    client.poll_transmit().expect("the client sends a request").to_vec()
}

pub(crate) fn event(client: &mut Client) -> Event {
    client.poll_event().expect("the client reports an event")
}

pub(crate) fn challenge(
    request: &[u8],
    code: u16,
    nonce: &str,
    algorithms: Option<&[PasswordAlgorithmValue]>,
) -> Vec<u8> {
    let request = Message::from_bytes(request).unwrap();
    let mut response = Message::builder_error(&request, MessageWriteVec::new());
    response.add_attribute(&ErrorCode::builder(code).build().unwrap()).unwrap();
    response.add_attribute(&Realm::new(REALM).unwrap()).unwrap();
    response.add_attribute(&Nonce::new(nonce).unwrap()).unwrap();
    if let Some(algorithms) = algorithms {
        response.add_attribute(&PasswordAlgorithms::new(algorithms)).unwrap();
    }
    response.finish()
}

pub(crate) fn credentials() -> MessageIntegrityCredentials {
    LongTermKeyCredentials::new(USER.to_owned(), PASSWORD.to_owned(), REALM.to_owned()).into()
}

/// Checks the request's MAC with the oracle, and its user, realm and nonce.
pub(crate) fn assert_signed(request: &[u8], with: IntegrityAlgorithm, nonce: &str) {
    let message = Message::from_bytes(request).unwrap();
    assert_eq!(message.validate_integrity(&credentials()).unwrap(), with);
    assert_eq!(message.attribute::<Realm>().unwrap().realm(), REALM);
    assert_eq!(message.attribute::<Nonce>().unwrap().nonce(), nonce);
    if nonce == ANONYMOUS_NONCE {
        assert_eq!(*message.attribute::<Userhash>().unwrap().hash(), Userhash::compute(USER, REALM));
        assert!(message.attribute::<Username>().is_err());
    } else {
        assert_eq!(message.attribute::<Username>().unwrap().username(), USER);
    }
}

/// Success response for this method, signed unless `with` is `None`.
pub(crate) fn success(request: &[u8], lifetime: u32, with: Option<IntegrityAlgorithm>) -> Vec<u8> {
    let request = Message::from_bytes(request).unwrap();
    let id = request.transaction_id();
    let mut response = Message::builder_success(&request, MessageWriteVec::new());
    if request.has_method(ALLOCATE) {
        response.add_attribute(&XorRelayedAddress::new(relayed(), id)).unwrap();
        response.add_attribute(&XorMappedAddress::new(mapped(), id)).unwrap();
    }
    if request.has_method(ALLOCATE) || request.has_method(REFRESH) {
        response.add_attribute(&Lifetime::new(lifetime)).unwrap();
    }
    if let Some(algorithm) = with {
        response.add_message_integrity(&credentials(), algorithm).unwrap();
    }
    response.finish()
}

/// Error response, signed unless `with` is `None`.
pub(crate) fn failure(request: &[u8], code: u16, with: Option<IntegrityAlgorithm>) -> Vec<u8> {
    let request = Message::from_bytes(request).unwrap();
    let mut response = Message::builder_error(&request, MessageWriteVec::new());
    response.add_attribute(&ErrorCode::builder(code).build().unwrap()).unwrap();
    if let Some(algorithm) = with {
        response.add_message_integrity(&credentials(), algorithm).unwrap();
    }
    response.finish()
}

pub(crate) fn grant(client: &mut Client, now: u64, lifetime: u32) {
    let request = request(client);
    let response = success(&request, lifetime, Some(IntegrityAlgorithm::Sha1));
    assert_eq!(client.handle_datagram(now, &response), Incoming::Control);
}

pub(crate) fn allocated(now: u64, lifetime: u32) -> Client {
    let mut client = client();
    client.allocate(now).unwrap();
    let first = request(&mut client);
    client.handle_datagram(now, &challenge(&first, 401, PLAIN_NONCE, None));
    grant(&mut client, now, lifetime);
    assert!(matches!(event(&mut client), Event::Allocated(_)));
    client
}
