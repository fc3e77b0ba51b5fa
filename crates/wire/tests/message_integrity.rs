//! Message integrity compared with `stun_types`, and corner cases of RFC 8489 sections 14.5 to 14.7.

use crate::prelude::*;
use proptest::prelude::*;
use stun_types::attribute::{
    Attribute as _, AttributeStaticType, AttributeWrite, Fingerprint, MessageIntegrity,
    MessageIntegritySha256, RawAttribute, Username,
};
use stun_types::message::{
    BINDING, IntegrityAlgorithm, LongTermKeyCredentials, MessageIntegrityCredentials, MessageWrite,
    MessageWriteExt, ShortTermCredentials,
};

const PASSWORD: &str = "correct horse";

fn key() -> Key {
    Key::from_bytes(PASSWORD.as_bytes())
}

fn short_term(password: &str) -> MessageIntegrityCredentials {
    ShortTermCredentials::new(password.to_owned()).into()
}

fn request(software: usize) -> Vec<u8> {
    let mut writer = Message::builder_request(BINDING, MessageWriteVec::new());
    writer.add_attribute(&Username::new("user").unwrap()).unwrap();
    writer.add_attribute(&Software::new(&"s".repeat(software)).unwrap()).unwrap();
    writer.finish()
}

fn append(message: &mut Vec<u8>, attribute: &RawAttribute<'_>) {
    message.extend_from_slice(&attribute.to_bytes());
    set_length(message);
}

fn set_length(message: &mut [u8]) {
    let length = u16::try_from(message.len() - 20).unwrap();
    message[2..4].copy_from_slice(&length.to_be_bytes());
}

/// Appends MESSAGE-INTEGRITY-SHA256 truncated to `length` bytes, computed by the oracle.
fn sign_truncated(message: &mut Vec<u8>, length: usize) {
    let end = message.len();
    message.extend_from_slice(&[0; 4]);
    message.resize(end + 4 + length.next_multiple_of(4), 0);
    set_length(message);
    let oracle = short_term(PASSWORD).make_key(IntegrityAlgorithm::Sha256);
    let mac = MessageIntegritySha256::compute(&[&message[..end]], &oracle).unwrap();
    message[end..end + 4].copy_from_slice(&[0, 0x1C, 0, u8::try_from(length).unwrap()]);
    message[end + 4..end + 4 + length].copy_from_slice(&[&mac[..], &[0; 8]].concat()[..length]);
}

#[test]
fn one_message_may_have_both_macs_and_a_fingerprint() {
    let mut message = signed(&request(5), &key(), Mac::Sha1);
    assert_eq!(mac_of(&message), Some(Mac::Sha1));
    message = signed(&message, &key(), Mac::Sha256);
    message = fingerprinted(&message);
    assert_eq!(mac_of(&message), Some(Mac::Sha256), "SHA-256 takes precedence");
    assert_eq!(verify(&message, &key(), Mac::Sha1), Ok(()));
    assert_eq!(verify(&message, &key(), Mac::Sha256), Ok(()));
    assert_eq!(has_fingerprint(&message), Ok(true));

    let oracle = Message::from_bytes(&message).unwrap();
    assert_eq!(oracle.validate_integrity(&short_term(PASSWORD)).ok(), Some(IntegrityAlgorithm::Sha256));
}

#[test]
fn both_macs_and_fingerprint_of_the_oracle_verify() {
    let mut writer = Message::builder_request(BINDING, MessageWriteVec::new());
    writer.add_attribute(&Software::new("oracle").unwrap()).unwrap();
    writer.add_message_integrity(&short_term(PASSWORD), IntegrityAlgorithm::Sha1).unwrap();
    writer.add_message_integrity(&short_term(PASSWORD), IntegrityAlgorithm::Sha256).unwrap();
    writer.add_fingerprint().unwrap();
    let message = writer.finish();
    assert_eq!(verify(&message, &key(), Mac::Sha1), Ok(()));
    assert_eq!(verify(&message, &key(), Mac::Sha256), Ok(()));
    assert_eq!(has_fingerprint(&message), Ok(true));
}

/// RFC 8489 section 14.6 leaves truncation to the STUN usage, and TURN does not allow it.
#[test]
fn sha256_is_never_truncated() {
    for length in 0..=40 {
        let mut message = request(0);
        sign_truncated(&mut message, length);
        let expected = if length == 32 { Ok(()) } else { Err(IntegrityError::Malformed) };
        assert_eq!(verify(&message, &key(), Mac::Sha256), expected, "{length}");
        if expected.is_ok() {
            let last = message.len() - 1;
            message[last] ^= 1;
            let changed = verify(&message, &key(), Mac::Sha256);
            assert_eq!(changed, Err(IntegrityError::Mismatch), "{length}");
        }
    }
}

#[test]
fn sha1_is_never_truncated() {
    for length in (0_u8..=32).filter(|length| *length != 20) {
        let mut message = request(0);
        append(&mut message, &RawAttribute::new(MessageIntegrity::TYPE, &vec![7; length.into()]));
        assert_eq!(verify(&message, &key(), Mac::Sha1), Err(IntegrityError::Malformed), "{length}");
    }
}

/// RFC 8489 section 14.5.
#[test]
fn attributes_after_message_integrity_are_not_covered_or_visible() {
    for (mac, kind) in [(Mac::Sha1, MessageIntegrity::TYPE), (Mac::Sha256, MessageIntegritySha256::TYPE)] {
        let empty = Message::builder_request(BINDING, MessageWriteVec::new()).finish();
        let mut message = signed(&empty, &key(), mac);
        append(&mut message, &Username::new("mallory").unwrap().to_raw());
        let view = View::new_checked(&message).unwrap();
        assert_eq!((view.mac(), view.attributes().count()), (Some(mac), 0));
        assert_eq!(view.verify(&key(), mac), Ok(()), "appending does not break the MAC");

        let oracle = Message::from_bytes(&message).unwrap();
        assert!(oracle.attribute::<Username>().is_err());
        assert!(!oracle.has_attribute(Username::TYPE));
        let seen: Vec<_> = oracle.iter_attributes().map(|(_, attribute)| attribute.get_type()).collect();
        assert_eq!(seen, [kind]);
    }
}

#[test]
fn message_integrity_after_sha256_or_fingerprint_is_ignored() {
    let after_sha256 = signed(&signed(&request(0), &key(), Mac::Sha256), &key(), Mac::Sha1);
    assert_eq!(mac_of(&after_sha256), Some(Mac::Sha256));
    assert_eq!(verify(&after_sha256, &key(), Mac::Sha1), Err(IntegrityError::Missing));
    assert_eq!(verify(&after_sha256, &key(), Mac::Sha256), Ok(()));

    let after_fingerprint = signed(&fingerprinted(&request(0)), &key(), Mac::Sha1);
    let after_fingerprint = signed(&after_fingerprint, &key(), Mac::Sha256);
    assert_eq!(mac_of(&after_fingerprint), None);
    for mac in [Mac::Sha1, Mac::Sha256] {
        assert_eq!(verify(&after_fingerprint, &key(), mac), Err(IntegrityError::Malformed));
    }
    assert_eq!(has_fingerprint(&after_fingerprint), Err(Invalid::Attribute), "FINGERPRINT must be last");
}

#[test]
fn the_first_of_two_macs_of_one_kind_is_used() {
    let mallory = Key::from_bytes(b"mallory");
    for mac in [Mac::Sha1, Mac::Sha256] {
        let message = signed(&signed(&request(0), &key(), mac), &mallory, mac);
        assert_eq!(verify(&message, &key(), mac), Ok(()));
        assert_eq!(verify(&message, &mallory, mac), Err(IntegrityError::Mismatch));
    }
}

/// An attacker cannot downgrade a message from SHA-256 to SHA-1 by corrupting the SHA-256 attribute.
#[test]
fn a_corrupted_sha256_is_not_treated_as_missing() {
    let mut message = signed(&request(0), &key(), Mac::Sha1);
    append(&mut message, &RawAttribute::new(MessageIntegritySha256::TYPE, &[]));
    assert_eq!(mac_of(&message), Some(Mac::Sha256));
    assert_eq!(verify(&message, &key(), Mac::Sha256), Err(IntegrityError::Malformed));
}

#[test]
fn an_unsigned_message_lacks_a_mac() {
    let message = request(3);
    assert_eq!(mac_of(&message), None);
    assert_eq!(has_fingerprint(&message), Ok(false));
    for mac in [Mac::Sha1, Mac::Sha256] {
        assert_eq!(verify(&message, &key(), mac), Err(IntegrityError::Missing));
        assert_eq!(verify(&message[..19], &key(), mac), Err(IntegrityError::Malformed));
        assert_eq!(verify(&[], &key(), mac), Err(IntegrityError::Malformed));
    }
}

#[test]
fn a_fingerprint_of_the_wrong_size_is_malformed() {
    for length in (0_u8..12).filter(|length| *length != 4) {
        let mut message = request(0);
        append(&mut message, &RawAttribute::new(Fingerprint::TYPE, &vec![0; length.into()]));
        assert_eq!(has_fingerprint(&message), Err(Invalid::Attribute), "{length}");
    }
}

#[test]
fn keys_compare_by_value_and_are_never_printed() {
    let key = Key::long_term(KeyAlgorithm::Md5, "user", "realm", b"secret");
    assert_eq!(key, Key::long_term(KeyAlgorithm::Md5, "user", "realm", b"secret"));
    assert_eq!(key, key.clone());
    assert_ne!(key, Key::long_term(KeyAlgorithm::Sha256, "user", "realm", b"secret"));
    assert_ne!(key, Key::long_term(KeyAlgorithm::Md5, "user", "realm", b"Secret"));
    assert_ne!(Key::from_bytes(b"abc"), Key::from_bytes(b"ab"));
    // Example of RFC 5389 section 15.4.
    let known = Key::long_term(KeyAlgorithm::Md5, "user", "realm", b"pass");
    let bytes =
        [0x84, 0x93, 0xFB, 0xC5, 0x3B, 0xA5, 0x82, 0xFB, 0x4C, 0x04, 0x4C, 0x45, 0x6B, 0xDC, 0x40, 0xEB];
    assert_eq!(known, Key::from_bytes(&bytes), "the key in RFC 8489 section 9.2.2 and RFC 5389 section 15.4");
    assert_eq!(format!("{known:?}"), "Key(..)");
}

proptest! {
    #[test]
    fn the_oracle_verifies_our_signatures(
        user in "[a-z]{1,20}",
        realm in "[a-z.]{1,20}",
        password in "\\PC{0,40}",
        software in 0_usize..20,
        fingerprint in any::<bool>(),
    ) {
        for (key_algorithm, mac, oracle_algorithm) in [
            (KeyAlgorithm::Md5, Mac::Sha1, IntegrityAlgorithm::Sha1),
            (KeyAlgorithm::Sha256, Mac::Sha256, IntegrityAlgorithm::Sha256),
        ] {
            let key = Key::unprepared(key_algorithm, &user, &realm, password.as_bytes());
            let mut message = signed(&request(software), &key, mac);
            if fingerprint {
                message = fingerprinted(&message);
            }
            let oracle = LongTermKeyCredentials::new(user.clone(), password.clone(), realm.clone()).into();
            let parsed = Message::from_bytes(&message).unwrap();
            prop_assert_eq!(parsed.validate_integrity(&oracle).ok(), Some(oracle_algorithm));
            let username = parsed.attribute::<Username>().unwrap();
            prop_assert_eq!(username.username(), "user");
        }
    }

    #[test]
    fn we_verify_the_oracles_signatures(
        user in "[a-z]{1,20}",
        realm in "[a-z.]{1,20}",
        password in "\\PC{0,80}",
        software in 0_usize..20,
        fingerprint in any::<bool>(),
    ) {
        let long: MessageIntegrityCredentials =
            LongTermKeyCredentials::new(user.clone(), password.clone(), realm.clone()).into();
        for (credentials, key_algorithm, mac, oracle_algorithm) in [
            (&long, Some(KeyAlgorithm::Md5), Mac::Sha1, IntegrityAlgorithm::Sha1),
            (&long, Some(KeyAlgorithm::Sha256), Mac::Sha256, IntegrityAlgorithm::Sha256),
            (&short_term(&password), None, Mac::Sha1, IntegrityAlgorithm::Sha1),
            (&short_term(&password), None, Mac::Sha256, IntegrityAlgorithm::Sha256),
        ] {
            let mut writer = Message::builder_request(BINDING, MessageWriteVec::new());
            writer.add_attribute(&Software::new(&"s".repeat(software)).unwrap()).unwrap();
            writer.add_message_integrity(credentials, oracle_algorithm).unwrap();
            if fingerprint {
                writer.add_fingerprint().unwrap();
            }
            let message = writer.finish();
            let key = match key_algorithm {
                Some(algorithm) => Key::unprepared(algorithm, &user, &realm, password.as_bytes()),
                None => Key::from_bytes(password.as_bytes()),
            };
            prop_assert_eq!(mac_of(&message), Some(mac));
            prop_assert_eq!(verify(&message, &key, mac), Ok(()));
            let other = Key::from_bytes(format!("{password}x").as_bytes());
            prop_assert_eq!(verify(&message, &other, mac), Err(IntegrityError::Mismatch));
        }
    }

    /// The MAC does not cover the length field as sent, but a wrong length makes the message malformed.
    #[test]
    fn changing_any_bit_of_a_signed_message_is_detected(
        software in 0_usize..20,
        at in any::<prop::sample::Index>(),
        bit in 0_u8..8,
    ) {
        for mac in [Mac::Sha1, Mac::Sha256] {
            let mut message = signed(&request(software), &key(), mac);
            let at = at.index(message.len());
            message[at] ^= 1 << bit;
            prop_assert!(verify(&message, &key(), mac).is_err());
        }
    }

    #[test]
    fn a_truncated_message_is_never_authentic(software in 0_usize..20) {
        let message = signed(&signed(&request(software), &key(), Mac::Sha1), &key(), Mac::Sha256);
        let message = fingerprinted(&message);
        for length in 0..message.len() {
            for mac in [Mac::Sha1, Mac::Sha256] {
                let refused = verify(&message[..length], &key(), mac);
                prop_assert_eq!(refused, Err(IntegrityError::Malformed));
            }
            prop_assert_eq!(has_fingerprint(&message[..length]), Err(Invalid::Truncated));
        }
    }

    #[test]
    fn a_message_cut_at_an_attribute_verifies_only_directly_after_its_sha1(software in 0_usize..20) {
        let unsigned = request(software).len();
        let message = signed(&signed(&request(software), &key(), Mac::Sha1), &key(), Mac::Sha256);
        for length in (20..message.len()).step_by(4) {
            let mut cut = message[..length].to_vec();
            set_length(&mut cut);
            let sha1 = verify(&cut, &key(), Mac::Sha1);
            prop_assert_eq!(sha1.is_ok(), length == unsigned + 24, "{}", length);
            prop_assert!(verify(&cut, &key(), Mac::Sha256).is_err());
        }
    }
}
