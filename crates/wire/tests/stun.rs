//! The codec against `stun_types`: any bytes are read without a panic, what we write is read back, and where both read a message they
//! read the same.

use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;
use turnpike_wire::{
    demux,
    integrity::{self, Key, Mac},
    stun::{self, Class, ErrorCode, HEADER_LEN, Header, Invalid, View, Writer, kind},
    stun_types::{
        attribute::{
            Attribute as _, ErrorCode as OracleErrorCode, Software, UnknownAttributes, XorMappedAddress,
        },
        message::{
            IntegrityAlgorithm, Message, MessageClass, MessageIntegrityCredentials, MessageType,
            MessageWrite as _, MessageWriteExt as _, MessageWriteVec, Method, ShortTermCredentials,
            TransactionId,
        },
    },
};

const PASSWORD: &str = "correct horse";

/// Of any kind that a writer knows.
#[derive(Clone, Debug)]
enum Part {
    Raw(u16, Vec<u8>),
    Number(u16, u32),
    Xor(u16, SocketAddr),
    Plain(u16, SocketAddr),
    Error(u16, String),
    Unknown(Vec<u16>),
}

impl Part {
    fn write(&self, writer: &mut Writer<'_>) {
        match self {
            Self::Raw(kind, value) => writer.attribute(*kind, value),
            Self::Number(kind, value) => writer.number(*kind, *value),
            Self::Xor(kind, address) => writer.xor_address(*kind, *address),
            Self::Plain(kind, address) => writer.address(*kind, *address),
            Self::Error(code, reason) => writer.error(*code, reason),
            Self::Unknown(types) => writer.unknown_attributes(types.iter().copied()),
        };
    }

    /// Whether this is what stands in an attribute.
    fn is(&self, attribute: stun::Attribute<'_>, header: Header) -> bool {
        let stun::Attribute { kind: found, value, .. } = attribute;
        match self {
            Self::Raw(kind, bytes) => found == *kind && value == bytes,
            Self::Number(kind, number) => found == *kind && value == number.to_be_bytes(),
            Self::Xor(kind, address) => {
                found == *kind && stun::xor_address(value, &header.transaction) == Some(*address)
            }
            Self::Plain(kind, address) => found == *kind && stun::address(value) == Some(*address),
            Self::Error(code, reason) => {
                let wanted = ErrorCode { code: *code, reason: reason.as_bytes() };
                found == kind::ERROR_CODE && ErrorCode::of(value) == Some(wanted)
            }
            Self::Unknown(types) => {
                found == kind::UNKNOWN_ATTRIBUTES && stun::unknown_attributes(value).eq(types.iter().copied())
            }
        }
    }
}

/// None of those that end what counts.
fn any_kind() -> impl Strategy<Value = u16> {
    let ends = [kind::MESSAGE_INTEGRITY, kind::MESSAGE_INTEGRITY_SHA256, kind::FINGERPRINT];
    any::<u16>().prop_filter("it ends the message", move |kind| !ends.contains(kind))
}

fn any_address() -> impl Strategy<Value = SocketAddr> {
    (any::<IpAddr>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port))
}

fn any_part() -> impl Strategy<Value = Part> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..50);
    prop_oneof![
        (any_kind(), bytes()).prop_map(|(kind, value)| Part::Raw(kind, value)),
        (any_kind(), any::<u32>()).prop_map(|(kind, value)| Part::Number(kind, value)),
        (any_kind(), any_address()).prop_map(|(kind, address)| Part::Xor(kind, address)),
        Just(())
            .prop_flat_map(|()| any_address())
            .prop_map(|address| Part::Xor(kind::XOR_MAPPED_ADDRESS, address)),
        (any_kind(), any_address()).prop_map(|(kind, address)| Part::Plain(kind, address)),
        (300_u16..700, "[ -~]{0,40}").prop_map(|(code, reason)| Part::Error(code, reason)),
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

/// Whether both understand the same.
fn agree(view: &View<'_>, oracle: &Message<'_>) {
    assert_eq!(oracle_class(view.header().class), oracle.class());
    assert_eq!(view.header().method, oracle.method().value());
    assert_eq!(oracle_id(view.header().transaction), oracle.transaction_id());
    let ends = [kind::MESSAGE_INTEGRITY, kind::MESSAGE_INTEGRITY_SHA256, kind::FINGERPRINT];
    let ours: Vec<_> = view.attributes().map(|one| (one.offset, one.kind, one.value.to_vec())).collect();
    let theirs: Vec<_> = oracle
        .iter_attributes()
        .map(|(offset, raw)| (offset, raw.get_type().value(), raw.value.to_vec()))
        .filter(|(_, kind, _)| !ends.contains(kind))
        .collect();
    assert_eq!(ours, theirs);
}

#[test]
fn class_and_method_are_interleaved_as_the_oracle_has_them() {
    for message_type in 0..0x4000_u16 {
        let header = Header::of_type(message_type, [0; 12]);
        assert_eq!(header.message_type(), message_type);
        let oracle = MessageType::from_bytes(&message_type.to_be_bytes()).unwrap();
        assert_eq!((oracle_class(header.class), header.method), (oracle.class(), oracle.method().value()));
    }
}

#[test]
fn each_way_to_be_no_message_has_its_name() {
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
    // Behind it nothing may stand.
    let behind = |bytes: &mut Vec<u8>| {
        bytes[3] += 4;
        bytes.extend([0x80, 0x22, 0, 0]);
    };
    assert_eq!(told(&behind), Some(Invalid::Fingerprint));
}

#[test]
fn what_must_be_comprehended_and_is_not_is_told_and_what_stands_behind_the_mac_is_not() {
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
fn a_message_ends_before_its_length_field_does() {
    let header = Header { class: Class::Success, method: stun::method::BINDING, transaction: [1; 12] };
    let mut buffer = Vec::new();
    let mut writer = Writer::begin(&mut buffer, header);
    for _ in 0..100 {
        writer.attribute(kind::SOFTWARE, &[b's'; 999]);
    }
    writer.attribute(kind::SOFTWARE, &[0; 70_000]).unknown_attributes(0..u16::MAX);
    writer.sign(&key(), Mac::Sha1).sign(&key(), Mac::Sha256);
    let view = View::new_checked(writer.finish(true)).unwrap();
    assert_eq!(integrity::verify(view.bytes(), &key(), Mac::Sha256), Ok(()));
    assert_eq!(view.attributes().filter(|one| one.kind == kind::SOFTWARE).count(), 65);
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic_and_taken_as_the_other_readers_take_them(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        is_headed in any::<bool>(),
    ) {
        // Mostly such bytes end at the cookie.
        if is_headed && bytes.len() >= HEADER_LEN {
            bytes.truncate(bytes.len() / 4 * 4);
            bytes[0] &= 0x3F;
            let length = u16::try_from(bytes.len() - HEADER_LEN).unwrap();
            bytes[2..4].copy_from_slice(&length.to_be_bytes());
            bytes[4..8].copy_from_slice(&stun::COOKIE);
        }
        match View::new_checked(&bytes) {
            Ok(view) => {
                prop_assert!(demux::is_stun_message(&bytes));
                prop_assert_eq!(view.mac(), integrity::mac_of(&bytes));
                prop_assert_eq!(integrity::check_fingerprint(&bytes), view.has_fingerprint().then_some(true));
                view.attributes().for_each(|one| {
                    let _ = (stun::address(one.value), stun::xor_address(one.value, &view.header().transaction));
                    let _ = (ErrorCode::of(one.value), stun::unknown_attributes(one.value).count());
                });
            }
            Err(Invalid::Fingerprint) => prop_assert_eq!(integrity::check_fingerprint(&bytes), Some(false)),
            Err(_) => prop_assert!(!demux::is_stun_message(&bytes)),
        }
    }

    #[test]
    fn what_is_written_is_read_back_by_us_and_by_the_oracle(
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
            prop_assert_eq!(integrity::verify(&bytes, &key(), mac), Ok(()));
        }
        let oracle = Message::from_bytes(&bytes).unwrap();
        agree(&view, &oracle);
        if view.mac().is_some() {
            let credentials: MessageIntegrityCredentials = ShortTermCredentials::new(PASSWORD.to_owned()).into();
            prop_assert!(oracle.validate_integrity(&credentials).is_ok());
        }
        let first = |wanted: u16| view.attributes().find(|one| one.kind == wanted).map(|one| one.value);
        if let Some(value) = first(kind::XOR_MAPPED_ADDRESS)
            && let Some(ours) = stun::xor_address(value, &header.transaction)
        {
            let theirs = oracle.attribute::<XorMappedAddress>().unwrap();
            prop_assert_eq!(theirs.addr(oracle.transaction_id()), ours);
        }
        if let Some(ours) = first(kind::ERROR_CODE).and_then(ErrorCode::of)
            && let Ok(theirs) = oracle.attribute::<OracleErrorCode>()
        {
            prop_assert_eq!((theirs.code(), theirs.reason().as_bytes()), (ours.code, ours.reason));
        }
    }

    #[test]
    fn what_the_oracle_writes_is_read(
        header in any_header(),
        software in "[ -~]{0,60}",
        mapped in any_address(),
        code in 300_u16..700,
        unknown in prop::collection::vec(any::<u16>(), 0..10),
        mac in prop::option::of(any::<bool>()),
        fingerprint in any::<bool>(),
    ) {
        let of = MessageType::from_class_method(oracle_class(header.class), Method::new(header.method));
        let id = oracle_id(header.transaction);
        let mut writer = Message::builder(of, id, MessageWriteVec::new());
        writer.add_attribute(&Software::new(&software).unwrap()).unwrap();
        writer.add_attribute(&XorMappedAddress::new(mapped, id)).unwrap();
        writer.add_attribute(&OracleErrorCode::new(code, "why").unwrap()).unwrap();
        let types: Vec<_> = unknown.iter().map(|kind| (*kind).into()).collect();
        writer.add_attribute(&UnknownAttributes::new(&types)).unwrap();
        if let Some(is_sha256) = mac {
            let credentials: MessageIntegrityCredentials = ShortTermCredentials::new(PASSWORD.to_owned()).into();
            let algorithm = if is_sha256 { IntegrityAlgorithm::Sha256 } else { IntegrityAlgorithm::Sha1 };
            writer.add_message_integrity(&credentials, algorithm).unwrap();
        }
        if fingerprint {
            writer.add_fingerprint().unwrap();
        }
        let bytes = writer.finish();
        let view = View::new_checked(&bytes).unwrap();
        agree(&view, &Message::from_bytes(&bytes).unwrap());
        let mac = mac.map(|is_sha256| if is_sha256 { Mac::Sha256 } else { Mac::Sha1 });
        prop_assert_eq!((view.header(), view.mac(), view.has_fingerprint()), (header, mac, fingerprint));
        prop_assert_eq!(view.get(kind::SOFTWARE), Some(software.as_bytes()));
        let address = view.get(kind::XOR_MAPPED_ADDRESS).and_then(|it| stun::xor_address(it, &header.transaction));
        prop_assert_eq!(address, Some(mapped));
        let error = view.get(kind::ERROR_CODE).and_then(ErrorCode::of);
        prop_assert_eq!(error, Some(ErrorCode { code, reason: b"why" }));
        let value = view.get(kind::UNKNOWN_ATTRIBUTES).unwrap();
        prop_assert_eq!(stun::unknown_attributes(value).collect::<Vec<_>>(), unknown);
        if let Some(mac) = mac {
            prop_assert_eq!(integrity::verify(&bytes, &key(), mac), Ok(()));
        }
    }

    /// A good message with some bytes changed, or cut short: where both still read one, they read the same.
    #[test]
    fn of_a_damaged_message_both_understand_the_same(
        header in any_header(),
        parts in prop::collection::vec(any_part(), 0..8),
        macs in any_macs(),
        fingerprint in any::<bool>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = written(header, &parts, &macs, fingerprint);
        for (at, with) in damage {
            let at = at.index(bytes.len());
            bytes[at] = with;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let (Ok(view), Ok(oracle)) = (View::new_checked(&bytes), Message::from_bytes(&bytes)) {
            agree(&view, &oracle);
        }
    }
}
