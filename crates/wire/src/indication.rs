//! Send and Data indications (RFC 8656 section 11), parsed and written without allocating. An indication is
//! sent as `header ++ payload ++ zero padding`, so the payload can stay in its receive buffer.

use std::net::{IpAddr, SocketAddr};

use crate::address::canonical;
use crate::stun::{
    ATTRIBUTE_HEADER_LEN, Attributes, COOKIE, Class, FAMILY_IPV4, FAMILY_IPV6, HEADER_LEN, Header, Invalid,
    header_ending_at, kind, method, xor_address, xored,
};

/// Maximum length of [`write_header`]: STUN header 20, XOR-PEER-ADDRESS (IPv6) 24, DATA header 4.
pub const MAX_HEADER_LEN: usize = 48;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indication {
    /// Client to server (type 0x0016).
    Send,
    /// Server to client (type 0x0017).
    Data,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndicationError {
    /// Not the expected indication, a wrong length field, or an invalid attribute.
    #[error("not a well-formed STUN message")]
    Malformed,
    #[error("XOR-PEER-ADDRESS or DATA is missing")]
    Missing,
    #[error("unknown comprehension-required attribute {0:#06x}")]
    UnknownAttribute(u16),
    #[error("FINGERPRINT does not match")]
    Fingerprint,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View<'a> {
    /// A Send indication's family stays as encoded, because the server's decision depends on it (RFC 8656
    /// section 11.2).
    pub peer: SocketAddr,
    pub data: &'a [u8],
    /// DONT-FRAGMENT is present (Send only).
    pub dont_fragment: bool,
}

/// Maximum payload that fits the 16-bit length field with either address family. A message with this payload
/// is too long for a UDP datagram.
pub const MAX_PAYLOAD_LEN: u16 = 0xFFFC - 28;
const _: () = assert!(MAX_HEADER_LEN - HEADER_LEN == 28, "header bytes that the length field includes");

/// Checks only type and cookie.
#[inline]
#[must_use]
pub fn is(which: Indication, datagram: &[u8]) -> bool {
    let [t0, t1, _, _, c0, c1, c2, c3, ..] = datagram else { return false };
    [*t0, *t1] == which.message_type() && [*c0, *c1, *c2, *c3] == COOKIE
}

/// A Data indication that contains ICMP instead of DATA yields `Missing`; use [`crate::stun::View`] to read
/// it. Ignores everything after MESSAGE-INTEGRITY, and known attributes that have no meaning here (RFC 8489
/// sections 14.5 and 6.3).
pub fn parse(which: Indication, datagram: &[u8]) -> Result<View<'_>, IndicationError> {
    if !is(which, datagram) {
        return Err(IndicationError::Malformed);
    }
    let Header { transaction, .. } = Header::new_checked(datagram)?;
    let mut peer = None;
    let mut data = None;
    let mut dont_fragment = false;
    let mut integrity_seen = false;
    for attribute in Attributes::of(datagram) {
        let attribute = attribute?;
        match attribute.kind {
            kind::FINGERPRINT => attribute.check_fingerprint(datagram)?,
            _ if integrity_seen => {}
            kind::XOR_PEER_ADDRESS if peer.is_none() => {
                peer = Some(xor_address(attribute.value, &transaction).ok_or(IndicationError::Malformed)?);
            }
            kind::DATA if data.is_none() => data = Some(attribute.value),
            kind::DONT_FRAGMENT if attribute.value.is_empty() => dont_fragment = which == Indication::Send,
            kind::DONT_FRAGMENT => return Err(IndicationError::Malformed),
            kind::MESSAGE_INTEGRITY | kind::MESSAGE_INTEGRITY_SHA256 => integrity_seen = true,
            other if kind::is_comprehended(other) => {}
            unknown => return Err(IndicationError::UnknownAttribute(unknown)),
        }
    }
    let mut peer = peer.ok_or(IndicationError::Missing)?;
    if which == Indication::Data {
        peer = canonical(peer);
    }
    let data = data.ok_or(IndicationError::Missing)?;
    Ok(View { peer, data, dont_fragment })
}

/// Writes everything before the payload and returns its length.
///
/// ```text
///  0        4        8             20                     32 or 44         +4
///  ┌────────┬────────┬─────────────┬──────────────────────┬─────────────────┐
///  │ type,  │ cookie │ transaction │ XOR-PEER-ADDRESS,    │ DATA type and   │ payload, padding
///  │ length │        │             │ IPv4 12, IPv6 24     │ length          │
///  └────────┴────────┴─────────────┴──────────────────────┴─────────────────┘
/// ```
///
/// Writes an IPv4-mapped `peer` as IPv4. `payload_len` should not exceed [`MAX_PAYLOAD_LEN`]; if it does, the
/// length field is capped at its maximum.
pub fn write_header(
    which: Indication,
    transaction: [u8; 12],
    peer: &SocketAddr,
    payload_len: u16,
    out: &mut [u8; MAX_HEADER_LEN],
) -> usize {
    out[0..2].copy_from_slice(&which.message_type());
    out[4..8].copy_from_slice(&COOKIE);
    out[8..20].copy_from_slice(&transaction);

    out[20..22].copy_from_slice(&kind::XOR_PEER_ADDRESS.to_be_bytes());
    let peer = xored(canonical(*peer), &transaction);
    out[26..28].copy_from_slice(&peer.port().to_be_bytes());
    let data_at = match peer.ip() {
        IpAddr::V4(ip) => {
            out[22..26].copy_from_slice(&[0, XOR_IPV4_LEN, 0, FAMILY_IPV4]);
            out[28..32].copy_from_slice(&ip.octets());
            32
        }
        IpAddr::V6(ip) => {
            out[22..26].copy_from_slice(&[0, XOR_IPV6_LEN, 0, FAMILY_IPV6]);
            out[28..44].copy_from_slice(&ip.octets());
            44
        }
    };

    out[data_at..data_at + 2].copy_from_slice(&kind::DATA.to_be_bytes());
    out[data_at + 2..data_at + 4].copy_from_slice(&payload_len.to_be_bytes());
    let header_len = data_at + ATTRIBUTE_HEADER_LEN;

    let end = header_len + usize::from(payload_len).next_multiple_of(4);
    let first = header_ending_at(out, end);
    out[0..4].copy_from_slice(&first);
    header_len
}

const XOR_IPV4_LEN: u8 = 8;
const XOR_IPV6_LEN: u8 = 20;

impl Indication {
    const fn message_type(self) -> [u8; 2] {
        let method = match self {
            Self::Send => method::SEND,
            Self::Data => method::DATA,
        };
        Header { class: Class::Indication, method, transaction: [0; 12] }.message_type().to_be_bytes()
    }
}

impl From<Invalid> for IndicationError {
    fn from(invalid: Invalid) -> Self {
        match invalid {
            Invalid::Fingerprint => Self::Fingerprint,
            _ => Self::Malformed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{frame, stun::Writer};

    const TRANSACTION: [u8; 12] = [0xB7, 0xE7, 0xA7, 0x01, 0xBC, 0x34, 0xD6, 0x86, 0xFA, 0x87, 0xDF, 0xAE];

    // Address and transaction ID of RFC 5769 sections 2.2 and 2.3: 192.0.2.1:32853 and its IPv6 counterpart.
    const SEND_IPV4: &[u8] = &[
        0x00, 0x16, 0x00, 0x14, 0x21, 0x12, 0xA4, 0x42, //
        0xB7, 0xE7, 0xA7, 0x01, 0xBC, 0x34, 0xD6, 0x86, 0xFA, 0x87, 0xDF, 0xAE, //
        0x00, 0x12, 0x00, 0x08, 0x00, 0x01, 0xA1, 0x47, 0xE1, 0x12, 0xA6, 0x43, //
        0x00, 0x13, 0x00, 0x03, b'a', b'b', b'c', 0x00,
    ];
    const DATA_IPV6: &[u8] = &[
        0x00, 0x17, 0x00, 0x20, 0x21, 0x12, 0xA4, 0x42, //
        0xB7, 0xE7, 0xA7, 0x01, 0xBC, 0x34, 0xD6, 0x86, 0xFA, 0x87, 0xDF, 0xAE, //
        0x00, 0x12, 0x00, 0x14, 0x00, 0x02, 0xA1, 0x47, //
        0x01, 0x13, 0xA9, 0xFA, 0xA5, 0xD3, 0xF1, 0x79, 0xBC, 0x25, 0xF4, 0xB5, 0xBE, 0xD2, 0xB9,
        0xD9, //
        0x00, 0x13, 0x00, 0x04, b'd', b'a', b't', b'a',
    ];
    const PEER: [u8; 12] = [0x00, 0x12, 0x00, 0x08, 0x00, 0x01, 0xA1, 0x47, 0xE1, 0x12, 0xA6, 0x43];
    const DATA: [u8; 8] = [0x00, 0x13, 0x00, 0x04, b'd', b'a', b't', b'a'];
    const OTHER_DATA: [u8; 8] = [0x00, 0x13, 0x00, 0x04, b'e', b'l', b's', b'e'];
    const DONT_FRAGMENT: [u8; 4] = [0x00, 0x1A, 0x00, 0x00];
    const USERNAME: [u8; 8] = [0x00, 0x06, 0x00, 0x02, b'm', b'e', 0, 0];
    const SOFTWARE: [u8; 8] = [0x80, 0x22, 0x00, 0x02, b'm', b'e', 0, 0];
    const INTEGRITY: [u8; 24] =
        [0, 8, 0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20];

    fn ipv4() -> SocketAddr {
        "192.0.2.1:32853".parse().unwrap()
    }

    fn ipv6() -> SocketAddr {
        "[2001:db8:1234:5678:11:2233:4455:6677]:32853".parse().unwrap()
    }

    fn message(which: Indication, attributes: &[&[u8]]) -> Vec<u8> {
        let attributes = attributes.concat();
        let mut message = which.message_type().to_vec();
        message.extend_from_slice(&u16::try_from(attributes.len()).unwrap().to_be_bytes());
        message.extend_from_slice(&COOKIE);
        message.extend_from_slice(&TRANSACTION);
        message.extend_from_slice(&attributes);
        message
    }

    fn fingerprinted(message: &[u8]) -> Vec<u8> {
        let mut buffer = Vec::new();
        let mut writer = Writer::begin(&mut buffer, Header::new_checked(message).unwrap());
        writer.raw(&message[HEADER_LEN..]);
        writer.finish(true).to_vec()
    }

    fn parse_send(attributes: &[&[u8]]) -> Result<(SocketAddr, Vec<u8>, bool), IndicationError> {
        let message = message(Indication::Send, attributes);
        parse(Indication::Send, &message).map(|view| (view.peer, view.data.to_vec(), view.dont_fragment))
    }

    #[test]
    fn send_with_an_ipv4_peer_parses_and_encodes() {
        let view = parse(Indication::Send, SEND_IPV4).unwrap();
        assert_eq!(view, View { peer: ipv4(), data: b"abc", dont_fragment: false });
        let mut header = [0xFF; MAX_HEADER_LEN];
        let length = write_header(Indication::Send, TRANSACTION, &ipv4(), 3, &mut header);
        assert_eq!(header[..length], SEND_IPV4[..36]);
        assert_eq!(usize::from(frame::padding(3)), SEND_IPV4.len() - 36 - 3);
    }

    #[test]
    fn data_with_an_ipv6_peer_parses_and_encodes() {
        let view = parse(Indication::Data, DATA_IPV6).unwrap();
        assert_eq!(view, View { peer: ipv6(), data: b"data", dont_fragment: false });
        let mut header = [0xFF; MAX_HEADER_LEN];
        let length = write_header(Indication::Data, TRANSACTION, &ipv6(), 4, &mut header);
        assert_eq!(header[..length], DATA_IPV6[..48]);
    }

    #[test]
    fn each_indication_is_rejected_as_the_other_one() {
        assert!(is(Indication::Send, SEND_IPV4) && !is(Indication::Data, SEND_IPV4));
        assert!(is(Indication::Data, DATA_IPV6) && !is(Indication::Send, DATA_IPV6));
        assert_eq!(parse(Indication::Data, SEND_IPV4), Err(IndicationError::Malformed));
        let mut wrong_cookie = SEND_IPV4.to_vec();
        wrong_cookie[5] ^= 1;
        assert!(!is(Indication::Send, &wrong_cookie));
        assert_eq!(parse(Indication::Send, &wrong_cookie), Err(IndicationError::Malformed));
    }

    #[test]
    fn attributes_may_come_in_any_order() {
        let expected = Ok((ipv4(), b"data".to_vec(), true));
        assert_eq!(parse_send(&[&PEER, &DONT_FRAGMENT, &DATA]), expected);
        assert_eq!(parse_send(&[&DATA, &PEER, &DONT_FRAGMENT]), expected);
        assert_eq!(parse_send(&[&SOFTWARE, &DONT_FRAGMENT, &DATA, &USERNAME, &PEER]), expected);
    }

    #[test]
    fn the_first_of_duplicate_attributes_is_used() {
        assert_eq!(parse_send(&[&PEER, &DATA, &OTHER_DATA]), Ok((ipv4(), b"data".to_vec(), false)));
        assert_eq!(parse_send(&[&PEER, &OTHER_DATA, &DATA]), Ok((ipv4(), b"else".to_vec(), false)));
        let mut elsewhere = PEER;
        elsewhere[11] ^= 1;
        assert_eq!(parse_send(&[&PEER, &elsewhere, &DATA]), Ok((ipv4(), b"data".to_vec(), false)));
    }

    #[test]
    fn data_may_be_empty_but_not_missing() {
        assert_eq!(parse_send(&[&PEER, &[0, 0x13, 0, 0]]), Ok((ipv4(), vec![], false)));
        assert_eq!(parse_send(&[&PEER]), Err(IndicationError::Missing));
        assert_eq!(parse_send(&[&DATA]), Err(IndicationError::Missing));
        assert_eq!(parse_send(&[]), Err(IndicationError::Missing));
    }

    #[test]
    fn dont_fragment_is_ignored_in_a_data_indication() {
        let bytes = message(Indication::Data, &[&PEER, &DONT_FRAGMENT, &DATA]);
        assert!(!parse(Indication::Data, &bytes).unwrap().dont_fragment);
        assert_eq!(
            parse_send(&[&PEER, &DATA, &[0, 0x1A, 0, 4, 0, 0, 0, 0]]),
            Err(IndicationError::Malformed)
        );
    }

    #[test]
    fn an_unknown_required_attribute_rejects_the_indication() {
        assert_eq!(
            parse_send(&[&PEER, &DATA, &[0x7F, 0xFE, 0, 0]]),
            Err(IndicationError::UnknownAttribute(0x7FFE))
        );
        // CHANGE-REQUEST (RFC 5780) has no meaning here.
        assert_eq!(
            parse_send(&[&PEER, &DATA, &[0, 3, 0, 4, 0, 0, 0, 0]]),
            Err(IndicationError::UnknownAttribute(3))
        );
        assert!(parse_send(&[&PEER, &DATA, &[0x80, 0x00, 0, 0], &[0xFF, 0xFF, 0, 0]]).is_ok());
    }

    #[test]
    fn attributes_after_message_integrity_are_ignored() {
        assert_eq!(parse_send(&[&PEER, &INTEGRITY, &DATA]), Err(IndicationError::Missing));
        assert!(parse_send(&[&PEER, &DATA, &INTEGRITY, &[0x7F, 0xFE, 0, 0]]).is_ok());
        assert_eq!(
            parse_send(&[&PEER, &DATA, &INTEGRITY, &DONT_FRAGMENT]),
            Ok((ipv4(), b"data".to_vec(), false))
        );
    }

    #[test]
    fn data_peers_are_canonical_and_send_peers_keep_their_family() {
        let mapped: SocketAddr = "[::ffff:192.0.2.1]:32853".parse().unwrap();
        let mut header = [0; MAX_HEADER_LEN];
        let length = write_header(Indication::Data, TRANSACTION, &mapped, 0, &mut header);
        assert_eq!(length, 36, "written as IPv4");

        // `write_header` cannot write a mapped address, so build its IPv6 form by hand.
        let IpAddr::V6(ip) = xored(mapped, &TRANSACTION).ip() else { unreachable!() };
        let attribute = [&[0, 0x12, 0, 20, 0, 2, 0xA1, 0x47][..], &ip.octets()].concat();
        assert_eq!(parse_send(&[&attribute, &DATA]).unwrap().0, mapped);
        let data = message(Indication::Data, &[&attribute, &DATA]);
        assert_eq!(parse(Indication::Data, &data).unwrap().peer, ipv4());
    }

    #[test]
    fn invalid_peer_addresses_are_malformed() {
        for attribute in [
            &[0, 0x12, 0, 0][..],
            &[0, 0x12, 0, 4, 0, 1, 0, 0],
            &[0, 0x12, 0, 8, 0, 2, 0, 0, 1, 2, 3, 4],
            &[0, 0x12, 0, 8, 0, 3, 0, 0, 1, 2, 3, 4],
            &[0, 0x12, 0, 12, 0, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
        ] {
            assert_eq!(parse_send(&[attribute, &DATA]), Err(IndicationError::Malformed), "{attribute:?}");
        }
        let mut reserved = PEER;
        reserved[4] = 0xFF;
        assert_eq!(parse_send(&[&reserved, &DATA]).unwrap().0, ipv4(), "the reserved byte is ignored");
    }

    #[test]
    fn a_fingerprint_must_match_and_be_last() {
        let right = fingerprinted(SEND_IPV4);
        assert_eq!(parse(Indication::Send, &right).unwrap().data, b"abc");

        let mut wrong = right.clone();
        *wrong.last_mut().unwrap() ^= 1;
        assert_eq!(parse(Indication::Send, &wrong), Err(IndicationError::Fingerprint));
        let mut changed = right.clone();
        changed[36] ^= 1;
        assert_eq!(parse(Indication::Send, &changed), Err(IndicationError::Fingerprint));

        let mut followed = right;
        followed.extend_from_slice(&SOFTWARE);
        followed[3] += 8;
        assert_eq!(parse(Indication::Send, &followed), Err(IndicationError::Malformed));
        assert_eq!(parse_send(&[&PEER, &DATA, &[0x80, 0x28, 0, 0]]), Err(IndicationError::Malformed));

        // FINGERPRINT is checked even after MESSAGE-INTEGRITY.
        let mut hidden = fingerprinted(&message(Indication::Send, &[&PEER, &DATA, &INTEGRITY]));
        assert!(parse(Indication::Send, &hidden).is_ok());
        *hidden.last_mut().unwrap() ^= 1;
        assert_eq!(parse(Indication::Send, &hidden), Err(IndicationError::Fingerprint));
    }

    #[test]
    fn a_truncated_indication_is_malformed() {
        for bytes in [SEND_IPV4, DATA_IPV6] {
            for length in 0..bytes.len() {
                for which in [Indication::Send, Indication::Data] {
                    assert_eq!(parse(which, &bytes[..length]), Err(IndicationError::Malformed), "{length}");
                }
            }
        }
        // The message is truncated and has a matching length field, so an attribute extends beyond the end.
        for length in (24..SEND_IPV4.len()).step_by(4) {
            let mut bytes = SEND_IPV4[..length].to_vec();
            bytes[3] = u8::try_from(length - 20).unwrap();
            let expected = if length == 32 { IndicationError::Missing } else { IndicationError::Malformed };
            assert_eq!(parse(Indication::Send, &bytes), Err(expected), "{length}");
        }
    }

    #[test]
    fn the_length_field_includes_padding_up_to_the_maximum() {
        let mut header = [0; MAX_HEADER_LEN];
        for (peer, fixed) in [(ipv4(), 16), (ipv6(), 28)] {
            for payload in [0, 1, 2, 3, 4, 5, 1199, 1200, MAX_PAYLOAD_LEN - 1, MAX_PAYLOAD_LEN] {
                write_header(Indication::Data, TRANSACTION, &peer, payload, &mut header);
                let expected =
                    fixed + usize::from(payload) + usize::from(frame::padding(usize::from(payload)));
                let written = usize::from(u16::from_be_bytes([header[2], header[3]]));
                assert_eq!(written, expected, "{payload}");
            }
            write_header(Indication::Data, TRANSACTION, &peer, u16::MAX, &mut header);
            assert_eq!(header[2..4], [0xFF, 0xFC], "never wraps to a short length");
        }
    }
}
