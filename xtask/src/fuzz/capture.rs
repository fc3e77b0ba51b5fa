//! Seeds from real clients: sorts packets captured with tcpdump by fuzz target and keeps the first packet of each shape.

use std::{collections::BTreeSet, fs, path::Path};

use super::{corpus, program::Places, targets};
use crate::Failure;

/// Maximum length of an input in bytes; longer inputs cover no additional code.
const LONGEST: usize = 1500;
/// Maximum length of ChannelData in bytes, because its payload does not matter.
const LONGEST_DATA: usize = 64;

/// Adds packets of tcpdump files to `captured.hex` of each target; returns the number added per target.
pub(super) fn add(
    places: &Places,
    files: &[impl AsRef<Path>],
) -> Result<Vec<(&'static str, usize)>, Failure> {
    let mut added = Vec::new();
    let payloads = files.iter().map(|file| payloads(file.as_ref())).collect::<Result<Vec<_>, _>>()?.concat();
    for (name, shape) in [
        ("stun", stun as fn(&[u8]) -> Option<Shape>),
        ("channel_data", channel_data),
        ("dtls_hello", dtls_hello),
    ] {
        let file = places.memory(targets::named(name)?).join(corpus::CAPTURED);
        let mut inputs = corpus::read(&file)?;
        let before = inputs.len();
        let mut known: BTreeSet<_> =
            inputs.iter().filter_map(|input| shape(input)).map(|shape| shape.key).collect();
        for payload in &payloads {
            let Some(Shape { key, length }) = shape(payload) else { continue };
            if known.insert(key) {
                inputs.push(payload[..length].to_vec());
            }
        }
        corpus::write(&file, &inputs)?;
        added.push((name, inputs.len() - before));
    }
    Ok(added)
}

struct Shape {
    key: Vec<u8>,
    /// Length of the message, without trailing bytes.
    length: usize,
}

/// Shape of a STUN message: its type, and the type and length of each attribute.
fn stun(bytes: &[u8]) -> Option<Shape> {
    let (header, rest) = bytes.split_at_checked(20)?;
    let attributes = rest.get(..usize::from(u16::from_be_bytes([header[2], header[3]])))?;
    let length = header.len() + attributes.len();
    if header[0] & 0xC0 != 0 || header[4..8] != [0x21, 0x12, 0xA4, 0x42] || length > LONGEST {
        return None;
    }
    let mut key = header[..2].to_vec();
    let mut rest = attributes;
    while let [k0, k1, l0, l1, value @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*l0, *l1]));
        // The exact length of names and data does not matter.
        key.extend([*k0, *k1, u8::try_from(length.min(20)).ok()?]);
        rest = value.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(Shape { key, length })
}

/// Shape of ChannelData: padding and approximate length.
fn channel_data(bytes: &[u8]) -> Option<Shape> {
    let [0x40..=0x7F, _, l0, l1, data @ ..] = bytes else { return None };
    let length = u16::from_be_bytes([*l0, *l1]);
    let fits = usize::from(length) <= data.len() && usize::from(length) <= LONGEST_DATA;
    fits.then(|| Shape { key: vec![l1 % 4, l1 / 16], length: 4 + usize::from(length) })
}

/// Shape of a ClientHello: only its length; distinguishing the order of extensions would give too many shapes.
fn dtls_hello(bytes: &[u8]) -> Option<Shape> {
    let is_hello = matches!(bytes, [22, 0xFE, _, 0, 0, _, _, _, _, _, _, _, _, 1, ..]);
    let length = bytes.len();
    (is_hello && length <= LONGEST).then(|| Shape { key: length.to_be_bytes().to_vec(), length })
}

/// UDP and TCP payloads in a tcpdump file (pcap(3PCAP), pcap-linktype(7)).
fn payloads(file: &Path) -> Result<Vec<Vec<u8>>, Failure> {
    let bytes = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let wrong = || format!("{}: not a supported capture; create one with tcpdump -w FILE", file.display());
    let (header, mut rest) = bytes.split_at_checked(24).ok_or_else(wrong)?;
    // Magic numbers for both byte orders, with timestamps in microseconds or nanoseconds.
    let number = match header[..4] {
        [0xD4, 0xC3, 0xB2, 0xA1] | [0x4D, 0x3C, 0xB2, 0xA1] => u32::from_le_bytes,
        [0xA1, 0xB2, 0xC3, 0xD4] | [0xA1, 0xB2, 0x3C, 0x4D] => u32::from_be_bytes,
        _ => return Err(wrong().into()),
    };
    let at = |bytes: &[u8], at: usize| bytes.get(at..).and_then(<[u8]>::first_chunk).copied().map(number);
    let link_header = match at(header, 20) {
        // Ethernet, raw IP, and the two formats of `tcpdump -i any`.
        Some(1) => 14,
        Some(101) => 0,
        Some(113) => 16,
        Some(276) => 20,
        _ => return Err(wrong().into()),
    };
    let mut payloads = Vec::new();
    while let Some(length) = at(rest, 8) {
        let Some((packet, behind)) = rest[16..].split_at_checked(usize::try_from(length)?) else { break };
        payloads.extend(packet.get(link_header..).and_then(payload).map(<[u8]>::to_vec));
        rest = behind;
    }
    Ok(payloads)
}

fn payload(ip: &[u8]) -> Option<&[u8]> {
    let (protocol, segment) = match ip.first()? >> 4 {
        4 => {
            let total = usize::from(u16::from_be_bytes([*ip.get(2)?, *ip.get(3)?]));
            (*ip.get(9)?, ip.get(4 * usize::from(ip[0] & 15)..total)?)
        }
        6 => {
            let total = usize::from(u16::from_be_bytes([*ip.get(4)?, *ip.get(5)?]));
            (*ip.get(6)?, ip.get(40..40 + total)?)
        }
        _ => return None,
    };
    let payload = match protocol {
        17 => segment.get(8..),
        6 => segment.get(4 * usize::from(segment.get(12)? >> 4)..),
        _ => None,
    };
    payload.filter(|payload| !payload.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_distinguished_by_type_and_attributes() {
        let message = |kind: u8, value: &[u8]| {
            let length = u8::try_from(value.len()).expect("short");
            let header = [&[0, 1, 0, 4 + length, 0x21, 0x12, 0xA4, 0x42][..], &[7; 12]].concat();
            [&header[..], &[0x80, kind, 0, length], value, b"behind"].concat()
        };
        let key = |bytes: &[u8]| stun(bytes).map(|shape| (shape.key, shape.length));
        assert_eq!(key(&message(0x22, &[1; 4])), key(&message(0x22, &[2; 4])));
        assert_ne!(key(&message(0x22, &[1; 4])), key(&message(0x22, &[2; 8])));
        assert_ne!(key(&message(0x22, &[1; 4])), key(&message(0x23, &[1; 4])));
        assert_eq!(key(&message(0x22, &[1; 4])).map(|(_, length)| length), Some(28));
        assert_eq!(key(&message(0x22, &[1; 4])[..27]), None);
        assert_eq!(key(b"GET / HTTP/1.1\r\nHost: example.org\r\n"), None);
    }

    #[test]
    fn udp_and_tcp_payloads_are_extracted() {
        let mut udp = vec![0x45, 0, 0, 31, 0, 0, 0, 0, 64, 17, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2];
        udp.extend([0, 1, 0, 2, 0, 11, 0, 0, 7, 8, 9, 0xEE]);
        assert_eq!(payload(&udp), Some(&[7, 8, 9][..]), "padding is removed");
        let mut tcp = vec![0x60, 0, 0, 0, 0, 25, 6, 64];
        tcp.extend([0; 32]);
        tcp.extend([0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0x60, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 9]);
        assert_eq!(payload(&tcp), Some(&[9][..]), "options are skipped");
        assert_eq!(payload(&[0x45, 0]), None);
    }
}
