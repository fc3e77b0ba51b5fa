//! Authentication of the client and of responses (RFC 8489 section 9.2).

use crate::client_support::*;
use stun_types::attribute::{
    AttributeStaticType as _, MessageIntegrity, MessageIntegritySha256, PasswordAlgorithm,
    PasswordAlgorithmValue, PasswordAlgorithms,
};
use turnpike_turn::client::Allocation;

const MD5: PasswordAlgorithmValue = PasswordAlgorithmValue::MD5;
const SHA256: PasswordAlgorithmValue = PasswordAlgorithmValue::SHA256;

#[test]
fn the_first_allocate_is_unsigned_and_the_retry_is_signed() {
    let mut client = client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    assert!(!Message::from_bytes(&first).unwrap().has_attribute(MessageIntegrity::TYPE));

    let asked = challenge(&first, 401, PLAIN_NONCE, None);
    assert_eq!(client.handle_datagram(10, &asked), Incoming::Control);
    let second = request(&mut client);
    assert_signed(&second, IntegrityAlgorithm::Sha1, PLAIN_NONCE);
    assert_ne!(first[8..20], second[8..20], "a retry must be a new transaction");

    let response = success(&second, 600, Some(IntegrityAlgorithm::Sha1));
    assert_eq!(client.handle_datagram(20, &response), Incoming::Control);
    let allocation = Allocation {
        relayed: relayed(),
        additional: None,
        mapped: Some(mapped()),
        lifetime: 600,
        reservation: None,
        additional_refused: None,
    };
    assert_eq!(event(&mut client), Event::Allocated(allocation));
    assert_eq!(client.allocation(), Some(&allocation));
    assert_eq!(client.allocate(30), Err(RequestError::AllocationExists));
}

#[test]
fn offered_algorithms_are_echoed_and_the_first_known_is_used() {
    for (offered, chosen) in [(&[SHA256, MD5][..], SHA256), (&[SHA256], SHA256)] {
        let mut client = client();
        client.allocate(0).unwrap();
        let first = request(&mut client);
        client.handle_datagram(0, &challenge(&first, 401, COOKIE_NONCE, Some(offered)));
        let second = request(&mut client);
        assert_signed(&second, IntegrityAlgorithm::Sha256, COOKIE_NONCE);
        let message = Message::from_bytes(&second).unwrap();
        assert_eq!(message.attribute::<PasswordAlgorithms>().unwrap().algorithms(), offered);
        assert_eq!(message.attribute::<PasswordAlgorithm>().unwrap().algorithm(), chosen);
        let response = success(&second, 600, Some(IntegrityAlgorithm::Sha256));
        assert_eq!(client.handle_datagram(0, &response), Incoming::Control);
        assert!(matches!(event(&mut client), Event::Allocated(_)));
    }
}

#[test]
fn an_md5_key_offered_with_algorithms_still_signs_with_sha256() {
    let mut client = client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    client.handle_datagram(0, &challenge(&first, 401, COOKIE_NONCE, Some(&[MD5])));
    let second = request(&mut client);
    let message = Message::from_bytes(&second).unwrap();
    assert_eq!(message.attribute::<PasswordAlgorithm>().unwrap().algorithm(), MD5);
    assert!(message.has_attribute(MessageIntegritySha256::TYPE));
    assert!(!message.has_attribute(MessageIntegrity::TYPE));
}

#[test]
fn an_anonymous_username_is_sent_as_its_hash() {
    let mut client = client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    client.handle_datagram(0, &challenge(&first, 401, ANONYMOUS_NONCE, Some(&[SHA256])));
    assert_signed(&request(&mut client), IntegrityAlgorithm::Sha256, ANONYMOUS_NONCE);
}

#[test]
fn a_challenge_stripped_of_its_algorithms_is_ignored() {
    let mut client = client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    let stripped = challenge(&first, 401, COOKIE_NONCE, None);
    assert_eq!(client.handle_datagram(0, &stripped), Incoming::Ignored(Ignored::BidDown));
    assert_eq!(client.poll_transmit(), None);
    client.handle_datagram(0, &challenge(&first, 401, COOKIE_NONCE, Some(&[SHA256])));
    assert_signed(&request(&mut client), IntegrityAlgorithm::Sha256, COOKIE_NONCE);
}

#[test]
fn an_rfc_5389_client_ignores_password_algorithms() {
    let config = Config { password_algorithms: false, ..Config::new(USER, PASSWORD) };
    let mut client = Client::new(Arc::new(config), turnpike_turn::random::Seed([9; 32]));
    client.allocate(0).unwrap();
    let first = request(&mut client);
    client.handle_datagram(0, &challenge(&first, 401, COOKIE_NONCE, Some(&[SHA256, MD5])));
    let second = request(&mut client);
    assert_signed(&second, IntegrityAlgorithm::Sha1, COOKIE_NONCE);
    assert!(!Message::from_bytes(&second).unwrap().has_attribute(PasswordAlgorithm::TYPE));
}

#[test]
fn a_second_challenge_in_the_same_realm_means_wrong_credentials() {
    let mut client = client();
    client.allocate(0).unwrap();
    for _ in 0..2 {
        let request = request(&mut client);
        client.handle_datagram(0, &challenge(&request, 401, PLAIN_NONCE, None));
    }
    let failure = Failure::Credentials { username: USER.to_owned(), realm: REALM.to_owned() };
    assert_eq!(event(&mut client), Event::Failed { request: Request::Allocate, failure });
    assert_eq!(client.poll_transmit(), None);
    assert_eq!(client.poll_timeout(), None);
}

#[test]
fn a_stale_nonce_is_replaced_a_limited_number_of_times() {
    let mut client = client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    client.handle_datagram(0, &challenge(&first, 401, PLAIN_NONCE, None));
    for nonce in ["second", "third"] {
        let request = request(&mut client);
        client.handle_datagram(0, &challenge(&request, 438, nonce, None));
    }
    let request = request(&mut client);
    assert_signed(&request, IntegrityAlgorithm::Sha1, "third");
    client.handle_datagram(0, &challenge(&request, 438, "fourth", None));
    assert!(matches!(event(&mut client), Event::Failed { failure: Failure::Credentials { .. }, .. }));
}

#[test]
fn a_challenge_without_configured_credentials_is_a_distinct_error() {
    let mut client = Client::new(Arc::new(Config::default()), turnpike_turn::random::Seed([9; 32]));
    client.allocate(0).unwrap();
    let request = request(&mut client);
    client.handle_datagram(0, &challenge(&request, 401, PLAIN_NONCE, None));
    let failure = Failure::CredentialsNeeded { realm: REALM.to_owned() };
    assert_eq!(event(&mut client), Event::Failed { request: Request::Allocate, failure });
}

#[test]
fn unsigned_and_forged_responses_are_ignored() {
    let mut client = client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    client.handle_datagram(0, &challenge(&first, 401, PLAIN_NONCE, None));
    let second = request(&mut client);

    let mut forged = success(&second, 600, Some(IntegrityAlgorithm::Sha1));
    let last = forged.len() - 1;
    forged[last] ^= 1;
    for datagram in [success(&second, 600, None), forged, failure(&second, 486, None)] {
        assert_eq!(client.handle_datagram(0, &datagram), Incoming::Ignored(Ignored::Unverified));
        assert_eq!(client.poll_event(), None);
    }
    let response = success(&second, 600, Some(IntegrityAlgorithm::Sha1));
    assert_eq!(client.handle_datagram(0, &response), Incoming::Control);
    assert!(matches!(event(&mut client), Event::Allocated(_)));
    assert_eq!(client.handle_datagram(0, &response), Incoming::Ignored(Ignored::UnknownTransaction));
}

#[test]
fn a_signed_refusal_has_its_code_and_reason() {
    let mut client = client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    client.handle_datagram(0, &challenge(&first, 401, PLAIN_NONCE, None));
    let second = request(&mut client);
    client.handle_datagram(0, &failure(&second, 486, Some(IntegrityAlgorithm::Sha1)));
    match event(&mut client) {
        Event::Failed { request: Request::Allocate, failure: Failure::Refused { code, reason } } => {
            assert_eq!(code, 486);
            assert_eq!(reason, "Allocation Quota Reached");
        }
        other => panic!("{other:?}"),
    }
    client.allocate(1).unwrap();
}

#[test]
fn an_unverified_error_is_reported_on_timeout() {
    let mut client = client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    client.handle_datagram(0, &challenge(&first, 401, PLAIN_NONCE, None));
    let second = request(&mut client);
    client.handle_datagram(0, &failure(&second, 508, None));
    let mut now = 0;
    let failure = loop {
        now = client.poll_timeout().expect("the request is pending").max(now);
        client.handle_timeout(now);
        while client.poll_transmit().is_some() {}
        if let Some(Event::Failed { failure, .. }) = client.poll_event() {
            break failure;
        }
    };
    assert_eq!(now, 39_500);
    match failure {
        Failure::Timeout { transmissions: 7, unverified: Some((508, _)) } => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_overlong_username_is_reported_and_not_sent() {
    let config = Config::new("x".repeat(509), PASSWORD);
    let mut client = Client::new(Arc::new(config), turnpike_turn::random::Seed([9; 32]));
    client.allocate(0).unwrap();
    let first = request(&mut client);
    client.handle_datagram(0, &challenge(&first, 401, PLAIN_NONCE, None));
    assert_eq!(client.poll_transmit(), None);
    match event(&mut client) {
        Event::Failed { request: Request::Allocate, failure: Failure::Unwritable(why) } => {
            assert!(why.contains("USERNAME is 509 bytes long"), "{why}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_response_with_trailing_bytes_is_rejected() {
    let mut client = client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    let whole = challenge(&first, 401, PLAIN_NONCE, None);
    let longer = [&whole[..], &[0x80, 0x22, 0, 0]].concat();
    assert_eq!(client.handle_datagram(0, &longer), Incoming::Ignored(Ignored::Malformed));
    assert_eq!(client.handle_datagram(0, &whole), Incoming::Control);
}
