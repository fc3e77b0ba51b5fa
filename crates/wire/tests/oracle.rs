//! The data path's parsers and writers compared with `stun_types` and `turn_types`, in both directions.

use crate::prelude::*;
use std::net::IpAddr;

use proptest::prelude::*;
use stun_types::attribute::{Attribute as _, AttributeWrite as _, RawAttribute};
use stun_types::message::{MessageClass, MessageType, MessageWrite, MessageWriteExt, TransactionId};
use turn_types::attribute::{Data, DontFragment, Icmp, XorPeerAddress};
use turn_types::channel::ChannelData as OracleChannelData;
use turn_types::message::{DATA, SEND};
use turnpike_wire::address::canonical;
use turnpike_wire::indication::{IndicationError, View};

fn any_peer() -> impl Strategy<Value = SocketAddr> {
    (any::<IpAddr>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port))
}

fn any_indication() -> impl Strategy<Value = Indication> {
    prop_oneof![Just(Indication::Send), Just(Indication::Data)]
}

fn any_payload() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..1500)
}

fn transaction_id(bytes: [u8; 12]) -> TransactionId {
    let mut wide = [0; 16];
    wide[4..].copy_from_slice(&bytes);
    u128::from_be_bytes(wide).into()
}

fn message_type(which: Indication) -> MessageType {
    let method = match which {
        Indication::Send => SEND,
        Indication::Data => DATA,
    };
    MessageType::from_class_method(MessageClass::Indication, method)
}

fn ours(which: Indication, transaction: [u8; 12], peer: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let mut header = [0; MAX_HEADER_LEN];
    let length = u16::try_from(payload.len()).unwrap();
    let header_len = indication::write_header(which, transaction, &peer, length, &mut header);
    [&header[..header_len], payload, &[0; 3][..usize::from(frame::padding(payload.len()))]].concat()
}

#[derive(Clone, Debug)]
enum Part {
    Peer(SocketAddr),
    Data(Vec<u8>),
    DontFragment,
    Raw(u16, Vec<u8>),
}

fn any_part() -> impl Strategy<Value = Part> {
    let value = || proptest::collection::vec(any::<u8>(), 0..40);
    prop_oneof![
        4 => any_peer().prop_map(Part::Peer),
        4 => value().prop_map(Part::Data),
        2 => Just(Part::DontFragment),
        1 => value().prop_map(|value| Part::Raw(0x0006, value)),
        1 => value().prop_map(|value| Part::Raw(0x8022, value)),
        1 => Just(Part::Raw(0x0008, vec![7; 20])),
        1 => Just(Part::Raw(0x001C, vec![7; 32])),
        1 => (0x0030_u16..0x8000, value()).prop_map(|(kind, value)| Part::Raw(kind, value)),
    ]
}

fn assemble(which: Indication, transaction: TransactionId, parts: &[Part], fingerprint: bool) -> Vec<u8> {
    let mut bytes = Message::builder(message_type(which), transaction, MessageWriteVec::new()).finish();
    for part in parts {
        let (kind, value) = match part {
            Part::Peer(peer) => {
                let mut writer = Message::builder(message_type(which), transaction, MessageWriteVec::new());
                writer.add_attribute(&XorPeerAddress::new(*peer, transaction)).unwrap();
                bytes.extend_from_slice(&writer.finish()[20..]);
                continue;
            }
            Part::Data(data) => (0x0013, data.as_slice()),
            Part::DontFragment => (0x001A, &[][..]),
            Part::Raw(kind, value) => (*kind, value.as_slice()),
        };
        // Built by hand, because the oracle's writer refuses attributes after MESSAGE-INTEGRITY.
        bytes.extend_from_slice(&RawAttribute::new(kind.into(), value).to_bytes());
    }
    let length = u16::try_from(bytes.len() - 20).unwrap();
    bytes[2..4].copy_from_slice(&length.to_be_bytes());
    if fingerprint { fingerprinted(&bytes) } else { bytes }
}

/// Meaning of an indication according to the oracle and RFC 8489 section 6.3.2.
pub(crate) fn oracles_view(
    which: Indication,
    bytes: &[u8],
) -> Result<(SocketAddr, Vec<u8>, bool), IndicationError> {
    let message = Message::from_bytes(bytes).map_err(|_| IndicationError::Malformed)?;
    // Types in RFC 8489, RFC 8656 and RFC 6062; most have no meaning in an indication.
    let known = [
        0x0001, 0x0006, 0x0008, 0x0009, 0x000A, 0x000C, 0x000D, 0x0012, 0x0013, 0x0014, 0x0015, 0x0016,
        0x0017, 0x0018, 0x0019, 0x001A, 0x001C, 0x001D, 0x001E, 0x0020, 0x0022, 0x002A,
    ];
    for (_, attribute) in message.iter_attributes() {
        let kind = attribute.get_type();
        if kind.comprehension_required() && !known.contains(&kind.value()) {
            return Err(IndicationError::UnknownAttribute(kind.value()));
        }
    }
    let peer = message.attribute::<XorPeerAddress>().map_err(|_| IndicationError::Missing)?;
    let data = message.attribute::<Data<'_>>().map_err(|_| IndicationError::Missing)?;
    let dont_fragment = which == Indication::Send && message.attribute::<DontFragment>().is_ok();
    Ok((as_told(which, peer.addr(message.transaction_id())), data.data().to_vec(), dont_fragment))
}

/// A server keeps the encoded family of a Send indication.
fn as_told(which: Indication, peer: SocketAddr) -> SocketAddr {
    if which == Indication::Data { canonical(peer) } else { peer }
}

pub(crate) fn our_view(
    which: Indication,
    bytes: &[u8],
) -> Result<(SocketAddr, Vec<u8>, bool), IndicationError> {
    let View { peer, data, dont_fragment } = indication::parse(which, bytes)?;
    Ok((peer, data.to_vec(), dont_fragment))
}

/// Our parser and the oracle differ here: the oracle reads bytes after the message as attributes.
#[test]
fn only_the_oracle_reads_beyond_the_length_field() {
    let transaction = transaction_id([7; 12]);
    let mut bytes =
        Message::builder(message_type(Indication::Send), transaction, MessageWriteVec::new()).finish();
    bytes.extend_from_slice(&RawAttribute::new(0x0013.into(), b"smuggled").to_bytes());
    assert_eq!(bytes[2..4], [0, 0], "a message without attributes");
    let message = Message::from_bytes(&bytes).unwrap();
    let data = message.attribute::<Data<'_>>().unwrap();
    assert_eq!(data.data(), b"smuggled");
    assert_eq!(stun::View::new_checked(&bytes).err(), Some(Invalid::Length));
    assert_eq!(indication::parse(Indication::Send, &bytes), Err(IndicationError::Malformed));
}

/// The figure in RFC 8656 section 18.13 shows 7 and 9 bits, but ICMP has a byte for each.
#[test]
fn icmp_type_and_code_are_a_byte_each() {
    let raw = Icmp::new(3, 4, 1400).to_raw().to_bytes();
    assert_eq!(raw, [0x80, 0x04, 0, 8, 0, 0, 3, 4, 0, 0, 0x05, 0x78]);
    let raw = RawAttribute::from_bytes(&raw).unwrap();
    let icmp = Icmp::try_from(&raw).unwrap();
    assert_eq!((icmp.icmp_type(), icmp.code(), icmp.data()), (3, 4, 1400));
}

proptest! {
    #[test]
    fn our_indications_mean_the_same_to_the_oracle(
        which in any_indication(),
        transaction in any::<[u8; 12]>(),
        peer in any_peer(),
        payload in any_payload(),
    ) {
        let bytes = ours(which, transaction, peer, &payload);
        prop_assert!(indication::is(which, &bytes));
        prop_assert!(stun::View::new_checked(&bytes).is_ok());
        let expected = Ok((canonical(peer), payload, false));
        prop_assert_eq!(&our_view(which, &bytes), &expected);
        prop_assert_eq!(&oracles_view(which, &bytes), &expected);
        let message = Message::from_bytes(&bytes).unwrap();
        prop_assert_eq!(message.get_type(), message_type(which));
        prop_assert_eq!(message.transaction_id(), transaction_id(transaction));
    }

    #[test]
    fn the_oracles_indications_mean_the_same_to_us(
        which in any_indication(),
        transaction in any::<[u8; 12]>(),
        peer in any_peer(),
        payload in any_payload(),
        dont_fragment in any::<bool>(),
        software in any::<bool>(),
        fingerprint in any::<bool>(),
    ) {
        let transaction = transaction_id(transaction);
        let mut writer = Message::builder(message_type(which), transaction, MessageWriteVec::new());
        if software {
            writer.add_attribute(&Software::new("oracle").unwrap()).unwrap();
        }
        writer.add_attribute(&XorPeerAddress::new(peer, transaction)).unwrap();
        if dont_fragment {
            writer.add_attribute(&DontFragment::new()).unwrap();
        }
        writer.add_attribute(&Data::new(&payload)).unwrap();
        if fingerprint {
            writer.add_fingerprint().unwrap();
        }
        let bytes = writer.finish();
        let dont_fragment = dont_fragment && which == Indication::Send;
        prop_assert_eq!(our_view(which, &bytes), Ok((as_told(which, peer), payload, dont_fragment)));
        prop_assert_eq!(has_fingerprint(&bytes), Ok(fingerprint));
    }

    #[test]
    fn any_mix_of_attributes_means_the_same_to_both(
        which in any_indication(),
        transaction in any::<[u8; 12]>(),
        parts in proptest::collection::vec(any_part(), 0..8),
        fingerprint in any::<bool>(),
    ) {
        let bytes = assemble(which, transaction_id(transaction), &parts, fingerprint);
        prop_assert_eq!(our_view(which, &bytes), oracles_view(which, &bytes));
    }

    #[test]
    fn a_truncated_indication_yields_nothing(
        which in any_indication(),
        transaction in any::<[u8; 12]>(),
        peer in any_peer(),
        payload in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        let whole = ours(which, transaction, peer, &payload);
        for length in 0..whole.len() {
            prop_assert_eq!(indication::parse(which, &whole[..length]), Err(IndicationError::Malformed));
            prop_assert_eq!(stun::View::new_checked(&whole[..length]).err(), Some(Invalid::Truncated));
        }
    }

    /// A message with a changed byte may mean something else, but never contains more data than the datagram.
    #[test]
    fn a_damaged_indication_yields_no_data_beyond_its_end(
        which in any_indication(),
        transaction in any::<[u8; 12]>(),
        peer in any_peer(),
        payload in proptest::collection::vec(any::<u8>(), 0..64),
        at in any::<prop::sample::Index>(),
        value in any::<u8>(),
    ) {
        let mut bytes = ours(which, transaction, peer, &payload);
        let at = at.index(bytes.len());
        bytes[at] = value;
        if let Ok(view) = indication::parse(which, &bytes) {
            let range = bytes.as_ptr_range();
            let data = view.data.as_ptr_range();
            prop_assert!(range.start <= data.start && data.end <= range.end);
            prop_assert_eq!(our_view(which, &bytes), oracles_view(which, &bytes));
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused_or_parsed(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        for which in [Indication::Send, Indication::Data] {
            let _ = indication::parse(which, &bytes);
        }
        if let Ok(view) = ChannelData::parse(&bytes) {
            prop_assert!(view.payload().len() + 4 <= bytes.len());
        }
        if stun::View::new_checked(&bytes).is_ok() {
            prop_assert_eq!(demux::classify(&bytes), demux::Kind::Stun);
        }
    }

    #[test]
    fn our_channel_data_means_the_same_to_the_oracle(number in 0x4000_u16..=0x4FFF, payload in any_payload()) {
        let number = ChannelNumber::new(number).unwrap();
        let length = u16::try_from(payload.len()).unwrap();
        let bytes = [&ChannelData::header(number, length)[..], &payload].concat();
        let view = ChannelData::parse(&bytes).unwrap();
        prop_assert_eq!((view.number(), view.payload()), (number, payload.as_slice()));
        let oracle = OracleChannelData::parse(&bytes).unwrap();
        prop_assert_eq!((oracle.id(), oracle.data()), (number.get(), payload.as_slice()));
        prop_assert_eq!(demux::classify(&bytes), demux::Kind::ChannelData);
    }

    #[test]
    fn the_oracles_channel_data_means_the_same_to_us(
        number in 0x4000_u16..=0x4FFF,
        payload in any_payload(),
        padding in 0_usize..4,
    ) {
        let mut bytes = vec![0; 4 + payload.len()];
        OracleChannelData::new(number, &payload).write_into_unchecked(&mut bytes);
        for length in 0..bytes.len() {
            prop_assert!(ChannelData::parse(&bytes[..length]).is_err());
        }
        bytes.extend_from_slice(&[0xFF; 3][..padding]);
        let view = ChannelData::parse(&bytes).unwrap();
        prop_assert_eq!((view.number().get(), view.payload()), (number, payload.as_slice()));
    }

    /// `turn_types` also accepts 0x5000 to 0xFFFE, which RFC 5766 allowed in part and RFC 8656 reserves.
    #[test]
    fn both_read_the_same_channel_data_in_arbitrary_bytes(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..40),
        number in prop_oneof![0x3FF0_u16..0x5010, any::<u16>()],
        length in 0_u16..48,
    ) {
        for (byte, value) in bytes.iter_mut().zip(number.to_be_bytes().into_iter().chain(length.to_be_bytes())) {
            *byte = value;
        }
        let oracle = OracleChannelData::parse(&bytes).ok().filter(|view| view.id() <= 0x4FFF);
        let view = ChannelData::parse(&bytes).ok();
        prop_assert_eq!(
            view.map(|view| (view.number().get(), view.payload().to_vec())),
            oracle.map(|view| (view.id(), view.data().to_vec()))
        );
    }
}
