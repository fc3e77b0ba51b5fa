//! Fuzz targets: any bytes to the MAC and FINGERPRINT checks, alone and behind a right header. Bounded under
//! `cargo test`, unbounded under `cargo bolero`.

use turnpike_wire::integrity::{IntegrityError, Key, Mac};

use crate::support::{fingerprinted, has_fingerprint, mac_of, signed, verify};

/// Nobody who does not know the key gets past it, and what a message says it carries is there.
fn check(bytes: &[u8], key: &Key) {
    let carried = mac_of(bytes);
    for mac in [Mac::Sha1, Mac::Sha256] {
        let result = verify(bytes, key, mac);
        assert!(result.is_err(), "a forged MAC");
        if carried == Some(mac) {
            assert_ne!(result, Err(IntegrityError::Missing));
        }
    }
}

#[test]
fn integrity_of_any_bytes() {
    let key = Key::from_bytes(b"a key that no fuzzer guesses");
    bolero::check!().for_each(|bytes: &[u8]| check(bytes, &key));
}

#[test]
fn integrity_of_any_attributes() {
    let key = Key::from_bytes(b"a key that no fuzzer guesses");
    bolero::check!().for_each(|attributes: &[u8]| {
        let attributes = &attributes[..attributes.len() & 0xFFFC];
        let length = u16::try_from(attributes.len()).unwrap().to_be_bytes();
        let header = [0, 1, length[0], length[1], 0x21, 0x12, 0xA4, 0x42];
        check(&[&header[..], &[9; 12], attributes].concat(), &key);
        // The tail as the value of an integrity attribute, of whatever length.
        for kind in [0x08, 0x1C] {
            let value = &attributes[..attributes.len().min(44)];
            let claimed = u8::try_from(value.len()).unwrap();
            let header = [0, 1, 0, claimed + 4, 0x21, 0x12, 0xA4, 0x42];
            check(&[&header[..], &[9; 12], &[0, kind, 0, claimed], value].concat(), &key);
        }
    });
}

#[test]
fn signing_any_attributes_verifies() {
    let key = Key::from_bytes(b"key");
    bolero::check!().for_each(|value: &[u8]| {
        let value = &value[..value.len().min(1000)];
        let mut message = vec![0, 1, 0, 0, 0x21, 0x12, 0xA4, 0x42, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9];
        message.extend_from_slice(&[0x80, 0x22]);
        message.extend_from_slice(&u16::try_from(value.len()).unwrap().to_be_bytes());
        message.extend_from_slice(value);
        message.resize(message.len().next_multiple_of(4), 0xFF);
        let message = fingerprinted(&signed(&signed(&message, &key, Mac::Sha1), &key, Mac::Sha256));
        assert_eq!(verify(&message, &key, Mac::Sha1), Ok(()));
        assert_eq!(verify(&message, &key, Mac::Sha256), Ok(()));
        assert_eq!(has_fingerprint(&message), Ok(true));
    });
}
