//! Fuzz target: arbitrary bytes as a STUN message, with and without a valid header and FINGERPRINT.

use crate::prelude::*;
use turnpike_wire::{
    escape,
    stun::{COOKIE, ErrorCode, FAMILY_IPV4, FAMILY_IPV6, HEADER_LEN, method},
};

use crate::{rfc_vectors, stun::agree_on};

#[test]
fn stun() {
    let key = Key::from_bytes(b"a key that no fuzzer guesses");
    fuzz::target("stun", seeds, |bytes| {
        check(bytes, &key);
        if let Some(message) = repaired(bytes) {
            check(&message, &key);
            signing(&message, &key);
        }
    });
}

fn check(bytes: &[u8], key: &Key) {
    let counted = allocation_counter::measure(|| {
        let Ok(view) = View::new_checked(bytes) else { return };
        assert!(view.attributes().map(|attribute| 4 + attribute.value.len()).sum::<usize>() <= bytes.len());
        view.attributes().for_each(|attribute| values_are_read(&view, attribute.value));
        for mac in [Mac::Sha1, Mac::Sha256] {
            let result = view.verify(key, mac);
            assert!(result.is_err(), "a forged MAC");
            assert!(view.mac() != Some(mac) || result != Err(IntegrityError::Missing));
        }
    });
    assert_eq!(counted.count_total, 0, "reading does not allocate");
    agree_on(bytes);
    let Ok(view) = View::new_checked(bytes) else { return };
    for attribute in view.attributes() {
        let text = escape::name(&String::from_utf8_lossy(attribute.value)).cut(255).to_string();
        assert!(text.chars().all(|character| character == '…' || escape::is_plain(character)), "{text}");
        addresses_are_written_as_read(&view, attribute.value);
    }
    means_the_same_when_rewritten(&view);
}

fn values_are_read(view: &View<'_>, value: &[u8]) {
    assert!(stun::unknown_attributes(value).count() <= value.len() / 2);
    assert!(stun::password_algorithms(value).count() <= value.len() / 4);
    let _ = stun::security_features(value);
    let [told, plain] = [stun::xor_address(value, &view.header().transaction), stun::address(value)];
    assert_eq!(told.is_some(), plain.is_some());
    if let Some(address) = plain {
        let family = if address.is_ipv4() { FAMILY_IPV4 } else { FAMILY_IPV6 };
        assert_eq!(value[1], family);
    }
    if let Some(ErrorCode { code, reason }) = ErrorCode::of(value) {
        assert!((300..700).contains(&code) && reason.len() == value.len() - 4);
    }
}

fn addresses_are_written_as_read(view: &View<'_>, value: &[u8]) {
    let Some(address) = stun::xor_address(value, &view.header().transaction) else { return };
    let mut buffer = Vec::new();
    let mut writer = Writer::begin(&mut buffer, view.header());
    writer.xor_address(kind::XOR_PEER_ADDRESS, address);
    let again = View::new_checked(writer.finish(false)).expect("our own message is valid");
    // The reserved first byte is not kept.
    assert_eq!(again.get(kind::XOR_PEER_ADDRESS).map(|again| &again[1..]), Some(&value[1..]));
}

fn means_the_same_when_rewritten(view: &View<'_>) {
    let mut buffer = Vec::new();
    let mut writer = Writer::begin(&mut buffer, view.header());
    view.attributes().for_each(|attribute| _ = writer.attribute(attribute.kind, attribute.value));
    let again = View::new_checked(writer.finish(view.has_fingerprint())).expect("our own message is valid");
    assert_eq!((again.header(), again.has_fingerprint()), (view.header(), view.has_fingerprint()));
    let parts = |view: &View<'_>| -> Vec<(u16, Vec<u8>)> {
        view.attributes().map(|attribute| (attribute.kind, attribute.value.to_vec())).collect()
    };
    assert_eq!(parts(&again), parts(view));
}

fn signing(message: &[u8], key: &Key) {
    // Nothing may follow FINGERPRINT, and only a stronger MAC may follow a MAC.
    if has_fingerprint(message) != Ok(false) || mac_of(message).is_some() {
        return;
    }
    for macs in [&[Mac::Sha1][..], &[Mac::Sha256], &[Mac::Sha1, Mac::Sha256]] {
        let signed = macs.iter().fold(message.to_vec(), |message, mac| signed(&message, key, *mac));
        let signed = fingerprinted(&signed);
        assert_eq!(mac_of(&signed), macs.last().copied());
        agree_on(&signed);
        for mac in macs {
            assert_eq!(verify(&signed, key, *mac), Ok(()));
            let mut altered = signed.clone();
            let at = 8 + usize::from(message[HEADER_LEN - 1]) % (message.len() - 8);
            altered[at] ^= 1;
            altered.truncate(altered.len() - 8);
            let length = u16::try_from(altered.len() - HEADER_LEN).expect("short").to_be_bytes();
            altered[2..4].copy_from_slice(&length);
            assert_ne!(verify(&altered, key, *mac), Ok(()), "byte {at}");
        }
    }
}

/// `None` if the input is too short or too long.
fn repaired(bytes: &[u8]) -> Option<Vec<u8>> {
    let (header, attributes) = bytes.split_first_chunk::<HEADER_LEN>()?;
    let attributes = &attributes[..attributes.len() & !3];
    let length = u16::try_from(attributes.len()).ok().filter(|length| *length < 4096)?;
    let mut message = header.to_vec();
    message[0] &= 0x3F;
    message[2..4].copy_from_slice(&length.to_be_bytes());
    message[4..8].copy_from_slice(&COOKIE);
    message.extend_from_slice(attributes);
    let body = message.len().checked_sub(8).filter(|body| *body >= HEADER_LEN);
    match body {
        Some(body) if message[body..body + 4] == [0x80, 0x28, 0, 4] => Some(fingerprinted(&message[..body])),
        _ => Some(message),
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let header = Header { class: Class::Request, method: method::ALLOCATE, transaction: [7; 12] };
    let key = Key::from_bytes(b"key");
    let mut buffer = Vec::new();
    let mut all = Writer::begin(&mut buffer, header);
    for kind in [kind::XOR_PEER_ADDRESS, kind::XOR_RELAYED_ADDRESS, kind::XOR_MAPPED_ADDRESS] {
        all.xor_address(kind, ([192, 0, 2, 1], 7).into());
        all.xor_address(kind, ([0x2001, 0xDB8, 0, 0, 0, 0, 0, 1], 7).into());
    }
    all.address(kind::MAPPED_ADDRESS, ([192, 0, 2, 1], 7).into())
        .number(kind::LIFETIME, 600)
        .number(kind::CHANNEL_NUMBER, 0x4000_0000)
        .number(kind::REQUESTED_TRANSPORT, 17 << 24)
        .error(438, "Stale Nonce")
        .address_error(FAMILY_IPV6, 440, "Address Family not Supported")
        .unknown_attributes(&[0x7FFF, 0x0003])
        .attribute(kind::PASSWORD_ALGORITHMS, &[0, 2, 0, 0, 0, 1, 0, 0])
        .attribute(kind::NONCE, b"obMatJos2gAAAnonce")
        .attribute(kind::REALM, b"example.org")
        .attribute(kind::DONT_FRAGMENT, &[])
        .sign(&key, Mac::Sha1)
        .sign(&key, Mac::Sha256);
    let all = all.finish(true).to_vec();
    rfc_vectors::messages().into_iter().chain([all]).chain(fuzz::captured("stun")).collect()
}
