//! STUN codec compared with `stun_types`: they agree on messages that both accept.

use crate::prelude::*;
use std::net::IpAddr;

use proptest::{prelude::*, sample::Index};
use stun_types::{
    attribute::{
        AlternateDomain, AlternateServer, Attribute as _, AttributeWrite, ErrorCode as OracleErrorCode,
        Nonce, PasswordAlgorithm, PasswordAlgorithmValue, PasswordAlgorithms, Realm, UnknownAttributes,
        Userhash, Username, XorMappedAddress,
    },
    message::{
        IntegrityAlgorithm, MessageClass, MessageIntegrityCredentials, MessageType, MessageWrite as _,
        MessageWriteExt as _, Method, ShortTermCredentials, TransactionId,
    },
};
use turn_types::{AddressFamily, attribute as turn};
use turnpike_wire::{
    integrity::userhash,
    precis::opaque_string,
    stun::{ErrorCode, HEADER_LEN},
};

const PASSWORD: &str = "correct horse";

#[derive(Clone, Debug)]
enum Part {
    Raw(u16, Vec<u8>),
    /// Uses this byte instead of zero padding.
    Padded(u16, Vec<u8>, u8),
    Number(u16, u32),
    Xor(u16, SocketAddr),
    Plain(u16, SocketAddr),
    Error(u16, String),
    AddressError(u8, u16, String),
    Unknown(Vec<u16>),
}

impl Part {
    fn write(&self, writer: &mut Writer<'_>) {
        match self {
            Self::Raw(kind, value) => writer.attribute(*kind, value),
            Self::Padded(kind, value, padding) => {
                let length = u16::try_from(value.len()).unwrap().to_be_bytes();
                let mut bytes = [&kind.to_be_bytes(), &length, &value[..]].concat();
                bytes.resize(bytes.len().next_multiple_of(4), *padding);
                writer.raw(&bytes)
            }
            Self::Number(kind, value) => writer.number(*kind, *value),
            Self::Xor(kind, address) => writer.xor_address(*kind, *address),
            Self::Plain(kind, address) => writer.address(*kind, *address),
            Self::Error(code, reason) => writer.error(*code, reason),
            Self::AddressError(family, code, reason) => writer.address_error(*family, *code, reason),
            Self::Unknown(types) => writer.unknown_attributes(types),
        };
    }

    fn is(&self, attribute: stun::Attribute<'_>, header: Header) -> bool {
        let stun::Attribute { kind: found, value, .. } = attribute;
        match self {
            Self::Raw(kind, bytes) | Self::Padded(kind, bytes, _) => found == *kind && value == bytes,
            Self::Number(kind, number) => found == *kind && value == number.to_be_bytes(),
            Self::Xor(kind, address) => {
                found == *kind && stun::xor_address(value, &header.transaction) == Some(*address)
            }
            Self::Plain(kind, address) => found == *kind && stun::address(value) == Some(*address),
            Self::Error(code, reason) => {
                let wanted = ErrorCode { code: *code, reason: reason.as_bytes() };
                found == kind::ERROR_CODE && ErrorCode::of(value) == Some(wanted)
            }
            Self::AddressError(family, code, reason) => {
                let wanted = ErrorCode { code: *code, reason: reason.as_bytes() };
                found == kind::ADDRESS_ERROR_CODE
                    && value[0] == *family
                    && ErrorCode::of(value) == Some(wanted)
            }
            Self::Unknown(types) => {
                found == kind::UNKNOWN_ATTRIBUTES && stun::unknown_attributes(value).eq(types.iter().copied())
            }
        }
    }
}

const ENDS: [u16; 3] = [kind::MESSAGE_INTEGRITY, kind::MESSAGE_INTEGRITY_SHA256, kind::FINGERPRINT];

/// Any attribute type, mostly a known one, both comprehension-required and comprehension-optional.
fn any_kind() -> impl Strategy<Value = u16> {
    prop_oneof![0_u16..0x30, 0x8000_u16..0x8034, any::<u16>()]
        .prop_filter("the attribute ends the message", |kind| !ENDS.contains(kind))
}

fn any_address() -> impl Strategy<Value = SocketAddr> {
    (any::<IpAddr>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port))
}

fn any_part() -> impl Strategy<Value = Part> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..50);
    prop_oneof![
        (any_kind(), bytes()).prop_map(|(kind, value)| Part::Raw(kind, value)),
        (any_kind(), bytes(), any::<u8>()).prop_map(|(kind, value, fill)| Part::Padded(kind, value, fill)),
        (any_kind(), any::<u32>()).prop_map(|(kind, value)| Part::Number(kind, value)),
        (any_kind(), any_address()).prop_map(|(kind, address)| Part::Xor(kind, address)),
        any_address().prop_map(|address| Part::Xor(kind::XOR_MAPPED_ADDRESS, address)),
        (any_kind(), any_address()).prop_map(|(kind, address)| Part::Plain(kind, address)),
        (300_u16..700, "[ -~]{0,40}").prop_map(|(code, reason)| Part::Error(code, reason)),
        (1_u8..3, 300_u16..700, "[ -~]{0,40}")
            .prop_map(|(family, code, reason)| Part::AddressError(family, code, reason)),
        prop::collection::vec(any::<u16>(), 0..20).prop_map(Part::Unknown),
    ]
}

fn any_header() -> impl Strategy<Value = Header> {
    let class =
        prop_oneof![Just(Class::Request), Just(Class::Indication), Just(Class::Success), Just(Class::Error)];
    (class, 0_u16..0x1000, any::<[u8; 12]>()).prop_map(|(class, method, transaction)| Header {
        class,
        method,
        transaction,
    })
}

fn key() -> Key {
    Key::from_bytes(PASSWORD.as_bytes())
}

fn written(header: Header, parts: &[Part], macs: &[Mac], fingerprint: bool) -> Vec<u8> {
    let mut buffer = Vec::new();
    let mut writer = Writer::begin(&mut buffer, header);
    parts.iter().for_each(|part| part.write(&mut writer));
    for mac in macs {
        writer.sign(&key(), *mac);
    }
    writer.finish(fingerprint);
    buffer
}

fn any_macs() -> impl Strategy<Value = Vec<Mac>> {
    prop_oneof![
        Just(vec![]),
        Just(vec![Mac::Sha1]),
        Just(vec![Mac::Sha256]),
        Just(vec![Mac::Sha1, Mac::Sha256])
    ]
}

fn oracle_credentials() -> MessageIntegrityCredentials {
    ShortTermCredentials::new(PASSWORD.to_owned()).into()
}

fn oracle_class(class: Class) -> MessageClass {
    match class {
        Class::Request => MessageClass::Request,
        Class::Indication => MessageClass::Indication,
        Class::Success => MessageClass::Success,
        Class::Error => MessageClass::Error,
    }
}

fn oracle_id(transaction: [u8; 12]) -> TransactionId {
    let mut wide = [0; 16];
    wide[4..].copy_from_slice(&transaction);
    u128::from_be_bytes(wide).into()
}

fn agree(view: &View<'_>, oracle: &Message<'_>) {
    assert_eq!(oracle_class(view.header().class), oracle.class());
    assert_eq!(view.header().method, oracle.method().value());
    assert_eq!(oracle_id(view.header().transaction), oracle.transaction_id());
    let ours: Vec<_> = view.attributes().map(|one| (one.offset, one.kind, one.value.to_vec())).collect();
    let theirs: Vec<_> = oracle
        .iter_attributes()
        .map(|(offset, raw)| (offset, raw.get_type().value(), raw.value.to_vec()))
        .filter(|(_, kind, _)| !ENDS.contains(kind))
        .collect();
    assert_eq!(ours, theirs);
    let theirs = oracle.attribute::<XorMappedAddress>().ok().map(|it| it.addr(oracle.transaction_id()));
    assert_eq!(view.xor_address(kind::XOR_MAPPED_ADDRESS), theirs);
    assert_eq!(
        view.number(kind::LIFETIME),
        oracle.attribute::<turn::Lifetime>().ok().map(|lifetime| lifetime.seconds())
    );
    let theirs = oracle.attribute::<Realm>().ok();
    assert_eq!(view.text(kind::REALM), theirs.as_ref().map(Realm::realm));
    // The oracle requires UTF-8.
    if let Ok(theirs) = oracle.attribute::<OracleErrorCode>() {
        let theirs = ErrorCode { code: theirs.code(), reason: theirs.reason().as_bytes() };
        assert_eq!(view.error(), Some(theirs));
    }
}

/// Only the oracle accepts trailing bytes, and invalid attributes after the visible part.
pub(crate) fn agree_on(bytes: &[u8]) {
    match (View::new_checked(bytes), Message::from_bytes(bytes)) {
        (Ok(view), Ok(oracle)) => agree(&view, &oracle),
        (Err(Invalid::Length), Ok(_)) => {
            let length = usize::from(u16::from_be_bytes([bytes[2], bytes[3]]));
            assert!(HEADER_LEN + length < bytes.len() || !length.is_multiple_of(4));
        }
        (Err(Invalid::Attribute | Invalid::Fingerprint), Ok(oracle)) => {
            assert!(oracle.iter_attributes().any(|(_, raw)| ENDS.contains(&raw.get_type().value())));
        }
        (ours, theirs) => assert!(ours.is_err() && theirs.is_err(), "{ours:?}, {theirs:?}"),
    }
}

#[test]
fn class_and_method_are_interleaved_as_in_the_oracle() {
    for message_type in 0..0x4000_u16 {
        let header = Header::of_type(message_type, [0; 12]);
        assert_eq!(header.message_type(), message_type);
        let oracle = MessageType::from_bytes(&message_type.to_be_bytes()).unwrap();
        assert_eq!((oracle_class(header.class), header.method), (oracle.class(), oracle.method().value()));
    }
}

#[test]
fn each_kind_of_invalid_message_has_its_error() {
    let good = written(
        Header { class: Class::Request, method: stun::method::BINDING, transaction: [7; 12] },
        &[Part::Raw(kind::SOFTWARE, b"four".to_vec())],
        &[],
        true,
    );
    let told = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        View::new_checked(&bytes).err()
    };
    assert_eq!(told(&|_| ()), None);
    assert_eq!(told(&|bytes| bytes[0] |= 0x40), Some(Invalid::NotStun));
    assert_eq!(told(&|bytes| bytes.clear()), Some(Invalid::Truncated));
    assert_eq!(told(&|bytes| bytes.truncate(HEADER_LEN - 1)), Some(Invalid::Truncated));
    assert_eq!(told(&|bytes| bytes.truncate(bytes.len() - 1)), Some(Invalid::Truncated));
    assert_eq!(told(&|bytes| bytes.push(0)), Some(Invalid::Length));
    assert_eq!(
        told(&|bytes| {
            bytes[3] += 2;
            bytes.extend([0; 2]);
        }),
        Some(Invalid::Length)
    );
    assert_eq!(told(&|bytes| bytes[4] ^= 1), Some(Invalid::Cookie));
    assert_eq!(told(&|bytes| bytes[HEADER_LEN + 3] = 200), Some(Invalid::Attribute));
    assert_eq!(told(&|bytes| bytes[HEADER_LEN + 4] ^= 1), Some(Invalid::Fingerprint));
    // Nothing may follow FINGERPRINT.
    let behind = |bytes: &mut Vec<u8>| {
        bytes[3] += 4;
        bytes.extend([0x80, 0x22, 0, 0]);
    };
    assert_eq!(told(&behind), Some(Invalid::Attribute));
}

#[test]
fn unknown_required_attributes_are_listed_up_to_the_mac() {
    let header = Header { class: Class::Request, method: stun::method::ALLOCATE, transaction: [1; 12] };
    let raw = |kind| Part::Raw(kind, vec![1, 2, 3]);
    let parts = [raw(0x7FFF), raw(kind::USERNAME), raw(0x8000), raw(0x0002), raw(0x7FFF)];
    let mut buffer = Vec::new();
    let mut writer = Writer::begin(&mut buffer, header);
    parts.iter().for_each(|part| part.write(&mut writer));
    writer.sign(&key(), Mac::Sha1).attribute(0x7FFE, b"smuggled").attribute(kind::USERNAME, b"somebody");
    let view = View::new_checked(writer.finish(true)).unwrap();
    let unknown: Vec<u16> = view.unknown(|kind| kind == kind::USERNAME).collect();
    assert_eq!(unknown, [0x7FFF, 0x0002, 0x7FFF]);
    assert_eq!((view.get(kind::USERNAME), view.get(0x7FFE)), (Some(&[1, 2, 3][..]), None));
    assert_eq!((view.mac(), view.has_fingerprint()), (Some(Mac::Sha1), true));
}

#[test]
fn text_is_limited_to_utf8_and_the_rfc_length() {
    let header = Header { class: Class::Error, method: stun::method::ALLOCATE, transaction: [1; 12] };
    let realm = |value: &[u8]| {
        let mut buffer = Vec::new();
        let mut writer = Writer::begin(&mut buffer, header);
        writer.attribute(kind::REALM, value);
        View::new_checked(writer.finish(false)).unwrap().text(kind::REALM).map(str::len)
    };
    assert_eq!((realm(&[b'r'; 763]), realm(&[b'r'; 764]), realm(b"\xFF")), (Some(763), None, None));
}

#[test]
fn attributes_stop_before_the_length_field_overflows() {
    let header = Header { class: Class::Success, method: stun::method::BINDING, transaction: [1; 12] };
    let mut buffer = Vec::new();
    let mut writer = Writer::begin(&mut buffer, header);
    for _ in 0..100 {
        writer.attribute(kind::SOFTWARE, &[b's'; 999]);
    }
    writer.attribute(kind::SOFTWARE, &[0; 70_000]).unknown_attributes(&[0x7FFF; 40_000]);
    writer.sign(&key(), Mac::Sha1).sign(&key(), Mac::Sha256);
    let view = View::new_checked(writer.finish(true)).unwrap();
    assert_eq!(view.verify(&key(), Mac::Sha256), Ok(()));
    assert_eq!(view.attributes().filter(|one| one.kind == kind::SOFTWARE).count(), 65);
}

proptest! {
    #[test]
    fn any_bytes_are_read_as_the_oracle_reads_them(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        is_headed in any::<bool>(),
        lengths in prop::collection::vec(0_u8..40, 0..8),
    ) {
        // Most random input would fail at the cookie or the first length.
        if is_headed && bytes.len() >= HEADER_LEN {
            bytes.truncate(bytes.len() / 4 * 4);
            bytes[0] &= 0x3F;
            let length = u16::try_from(bytes.len() - HEADER_LEN).unwrap();
            bytes[2..4].copy_from_slice(&length.to_be_bytes());
            bytes[4..8].copy_from_slice(&stun::COOKIE);
            let mut at = HEADER_LEN;
            for length in lengths {
                let Some(field) = bytes.get_mut(at + 2..at + 4) else { break };
                field.copy_from_slice(&[0, length]);
                at += 4 + usize::from(length).next_multiple_of(4);
            }
        }
        agree_on(&bytes);
        if let Ok(view) = View::new_checked(&bytes) {
            view.attributes().for_each(|one| {
                let _ = (stun::address(one.value), stun::xor_address(one.value, &view.header().transaction));
                let _ = (ErrorCode::of(one.value), stun::unknown_attributes(one.value).count());
                let _ = (stun::password_algorithms(one.value).count(), stun::security_features(one.value));
            });
        }
    }

    #[test]
    fn written_messages_round_trip_here_and_in_the_oracle(
        header in any_header(),
        parts in prop::collection::vec(any_part(), 0..12),
        macs in any_macs(),
        fingerprint in any::<bool>(),
    ) {
        let bytes = written(header, &parts, &macs, fingerprint);
        let view = View::new_checked(&bytes).unwrap();
        prop_assert_eq!(view.header(), header);
        prop_assert_eq!((view.mac(), view.has_fingerprint()), (macs.last().copied(), fingerprint));
        prop_assert_eq!(view.attributes().count(), parts.len());
        for (part, attribute) in parts.iter().zip(view.attributes()) {
            prop_assert!(part.is(attribute, header), "{part:?} became {attribute:?}");
        }
        for mac in macs {
            prop_assert_eq!(view.verify(&key(), mac), Ok(()));
        }
        let oracle = Message::from_bytes(&bytes).unwrap();
        agree(&view, &oracle);
        if view.mac().is_some() {
            prop_assert!(oracle.validate_integrity(&oracle_credentials()).is_ok());
        }
    }

    /// Every attribute known to both, byte for byte, including those that end the message.
    #[test]
    fn the_oracle_writes_the_same_message(
        header in any_header(),
        address in any_address(),
        text in "\\PC{0,100}",
        number in any::<u32>(),
        short in any::<u16>(),
        token in any::<[u8; 8]>(),
        bytes in prop::collection::vec(any::<u8>(), 0..50),
        code in 300_u16..700,
        types in prop::collection::vec(any::<u16>(), 0..10),
        algorithms in prop::collection::vec(any::<bool>(), 0..4),
        flag in any::<bool>(),
        order in prop::collection::vec(any::<Index>(), 0..40),
        macs in any_macs(),
        fingerprint in any::<bool>(),
    ) {
        let id = oracle_id(header.transaction);
        let [high, low] = short.to_be_bytes();
        let is_v6 = address.is_ipv6();
        let family = if is_v6 { AddressFamily::IPV6 } else { AddressFamily::IPV4 };
        let number_of = if is_v6 { stun::FAMILY_IPV6 } else { stun::FAMILY_IPV4 };
        let oracle_types: Vec<_> = types.iter().map(|kind| (*kind).into()).collect();
        let algorithm = |is_sha256: &bool| if *is_sha256 { KeyAlgorithm::Sha256 } else { KeyAlgorithm::Md5 };
        let oracle_algorithm = |is_sha256: &bool| match is_sha256 {
            true => PasswordAlgorithmValue::SHA256,
            false => PasswordAlgorithmValue::MD5,
        };
        let offered: Vec<u8> = algorithms.iter().flat_map(|it| algorithm(it).attribute()).collect();
        let oracle_offered: Vec<_> = algorithms.iter().map(oracle_algorithm).collect();
        let hash = userhash(&text, PASSWORD);
        let error = OracleErrorCode::builder(code).reason(&text).build().unwrap();
        let raw = |kind: u16, value: &[u8]| Part::Raw(kind, value.to_vec());
        let all: Vec<(Part, Box<dyn AttributeWrite + '_>)> = vec![
            (raw(kind::USERNAME, text.as_bytes()), Box::new(Username::new(&text).unwrap())),
            (raw(kind::USERHASH, &hash), Box::new(Userhash::new(Userhash::compute(&opaque_string(&text), PASSWORD)))),
            (raw(kind::REALM, text.as_bytes()), Box::new(Realm::new(&text).unwrap())),
            (raw(kind::NONCE, text.as_bytes()), Box::new(Nonce::new(&text).unwrap())),
            (raw(kind::SOFTWARE, text.as_bytes()), Box::new(Software::new(&text).unwrap())),
            (raw(kind::ALTERNATE_DOMAIN, text.as_bytes()), Box::new(AlternateDomain::new(&text))),
            (Part::Plain(kind::ALTERNATE_SERVER, address), Box::new(AlternateServer::new(address))),
            (Part::Xor(kind::XOR_MAPPED_ADDRESS, address), Box::new(XorMappedAddress::new(address, id))),
            (Part::Xor(kind::XOR_PEER_ADDRESS, address), Box::new(turn::XorPeerAddress::new(address, id))),
            (
                Part::Xor(kind::XOR_RELAYED_ADDRESS, address),
                Box::new(turn::XorRelayedAddress::new(address, id)),
            ),
            (Part::Error(code, text.clone()), Box::new(error.clone())),
            (Part::AddressError(number_of, code, text.clone()), Box::new(turn::AddressErrorCode::new(family, error))),
            (Part::Unknown(types), Box::new(UnknownAttributes::new(&oracle_types))),
            (raw(kind::PASSWORD_ALGORITHMS, &offered), Box::new(PasswordAlgorithms::new(&oracle_offered))),
            (
                raw(kind::PASSWORD_ALGORITHM, &algorithm(&flag).attribute()),
                Box::new(PasswordAlgorithm::new(oracle_algorithm(&flag))),
            ),
            (Part::Number(kind::LIFETIME, number), Box::new(turn::Lifetime::new(number))),
            (Part::Number(kind::CONNECTION_ID, number), Box::new(turn::ConnectionId::new(number))),
            (raw(kind::CHANNEL_NUMBER, &[high, low, 0, 0]), Box::new(turn::ChannelNumber::new(short))),
            (raw(kind::REQUESTED_TRANSPORT, &[high, 0, 0, 0]), Box::new(turn::RequestedTransport::new(high))),
            (
                raw(kind::REQUESTED_ADDRESS_FAMILY, &[number_of, 0, 0, 0]),
                Box::new(turn::RequestedAddressFamily::new(family)),
            ),
            (
                raw(kind::ADDITIONAL_ADDRESS_FAMILY, &[stun::FAMILY_IPV6, 0, 0, 0]),
                Box::new(turn::AdditionalAddressFamily::new(AddressFamily::IPV6)),
            ),
            (raw(kind::EVEN_PORT, &[if flag { 0x80 } else { 0 }]), Box::new(turn::EvenPort::new(flag))),
            (
                raw(kind::RESERVATION_TOKEN, &token),
                Box::new(turn::ReservationToken::new(u64::from_be_bytes(token))),
            ),
            (raw(kind::DONT_FRAGMENT, &[]), Box::new(turn::DontFragment::new())),
            (raw(kind::DATA, &bytes), Box::new(turn::Data::new(&bytes))),
            (
                raw(kind::ICMP, &[&[0, 0, high, low][..], &number.to_be_bytes()].concat()),
                Box::new(turn::Icmp::new(high, low, number)),
            ),
        ];
        let of = MessageType::from_class_method(oracle_class(header.class), Method::new(header.method));
        let mut theirs = Message::builder(of, id, MessageWriteVec::new());
        let (mut left, mut parts) = (all, Vec::new());
        for at in order {
            if left.is_empty() {
                break;
            }
            let (part, attribute) = left.swap_remove(at.index(left.len()));
            parts.push(part);
            theirs.add_attribute(&*attribute).unwrap();
        }
        for mac in &macs {
            let algorithm = match mac {
                Mac::Sha1 => IntegrityAlgorithm::Sha1,
                Mac::Sha256 => IntegrityAlgorithm::Sha256,
            };
            theirs.add_message_integrity(&oracle_credentials(), algorithm).unwrap();
        }
        if fingerprint {
            theirs.add_fingerprint().unwrap();
        }
        prop_assert_eq!(written(header, &parts, &macs, fingerprint), theirs.finish());
    }

    /// Both agree on which MAC applies; attributes after the first MAC are invisible.
    #[test]
    fn attributes_after_message_integrity_are_invisible(
        header in any_header(),
        parts in prop::collection::vec(any_part(), 0..4),
        macs in prop::collection::vec(prop_oneof![Just(Mac::Sha1), Just(Mac::Sha256)], 1..5),
        behind in prop::collection::vec(any_part(), 0..4),
        fingerprint in any::<bool>(),
    ) {
        let mut buffer = Vec::new();
        let mut writer = Writer::begin(&mut buffer, header);
        parts.iter().for_each(|part| part.write(&mut writer));
        macs.iter().for_each(|mac| _ = writer.sign(&key(), *mac));
        behind.iter().for_each(|part| part.write(&mut writer));
        let bytes = writer.finish(fingerprint);
        let (view, oracle) = (View::new_checked(bytes).unwrap(), Message::from_bytes(bytes).unwrap());
        prop_assert_eq!(view.attributes().count(), parts.len());
        agree(&view, &oracle);
        let strongest = if macs.contains(&Mac::Sha256) { Mac::Sha256 } else { Mac::Sha1 };
        prop_assert_eq!(view.mac(), Some(strongest));
        prop_assert_eq!(view.verify(&key(), strongest), Ok(()));
        // The oracle finds SHA-256 only as the first MAC or directly after the first. MESSAGE-INTEGRITY
        // counts only as the first MAC.
        if macs[0] == strongest || macs[1] == strongest {
            let theirs = oracle.validate_integrity(&oracle_credentials()).unwrap();
            prop_assert_eq!(theirs == IntegrityAlgorithm::Sha256, strongest == Mac::Sha256);
        }
        let first = if macs[0] == Mac::Sha1 { Ok(()) } else { Err(IntegrityError::Missing) };
        prop_assert_eq!(view.verify(&key(), Mac::Sha1), first);
    }

    /// Includes wrong lengths of messages and attributes.
    #[test]
    fn both_agree_on_damaged_messages(
        header in any_header(),
        parts in prop::collection::vec(any_part(), 0..8),
        macs in any_macs(),
        fingerprint in any::<bool>(),
        damage in prop::collection::vec((any::<Index>(), any::<u8>()), 0..3),
        lie in prop::option::of((any::<Index>(), any::<u16>())),
        cut in prop::option::of((any::<Index>(), any::<bool>())),
    ) {
        let mut bytes = written(header, &parts, &macs, fingerprint);
        let offsets: Vec<_> = View::new_checked(&bytes).unwrap().attributes().map(|one| one.offset).collect();
        if let Some((which, length)) = lie
            && !offsets.is_empty()
        {
            let at = offsets[which.index(offsets.len())] + 2;
            bytes[at..at + 2].copy_from_slice(&(length % 128).to_be_bytes());
        }
        for (at, with) in damage {
            let at = at.index(bytes.len());
            bytes[at] = with;
        }
        if let Some((cut, is_told)) = cut {
            bytes.truncate(cut.index(bytes.len()));
            if is_told && bytes.len() >= HEADER_LEN {
                bytes.truncate(bytes.len() / 4 * 4);
                let length = u16::try_from(bytes.len() - HEADER_LEN).unwrap();
                bytes[2..4].copy_from_slice(&length.to_be_bytes());
            }
        }
        agree_on(&bytes);
    }
}
