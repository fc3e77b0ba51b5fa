//! Fuzz target: arbitrary bytes as the start of a proxied stream, with and without a signature.

use crate::prelude::*;
use turnpike_wire::proxy_protocol::{
    ENOUGH_TO_TELL, MAX_HEADER, Parsed, ProxyVersion, encode, encode_unknown, is_begun, parse,
};

#[test]
fn proxy_protocol() {
    fuzz::target("proxy_protocol", seeds, |bytes| {
        check(bytes);
        check(&[&encode_unknown(ProxyVersion::V2)[..ENOUGH_TO_TELL], bytes].concat());
    });
}

fn check(bytes: &[u8]) {
    let counted = allocation_counter::measure(|| _ = parse(bytes));
    assert_eq!(counted.count_total, 0, "reading does not allocate");
    let whole = parse(bytes);
    match whole {
        Parsed::Header(length, addresses) => {
            assert!(length <= bytes.len().min(MAX_HEADER));
            assert_eq!(is_begun(bytes), Some(true));
            assert_eq!(parse(&bytes[..length]), whole, "bytes after the header are ignored");
            addresses.into_iter().for_each(are_written_as_read);
        }
        Parsed::Incomplete => {
            assert!(bytes.len() < MAX_HEADER && is_begun(bytes) != Some(false));
            assert!(bytes.len() < ENOUGH_TO_TELL || is_begun(bytes) == Some(true));
        }
        Parsed::Malformed => {}
    }
    if is_begun(bytes) == Some(false) {
        assert_eq!(whole, Parsed::Malformed);
    }
    // Each prefix must be reported as incomplete until the header's last byte.
    let end = if let Parsed::Header(length, _) = whole { length } else { bytes.len() };
    let mut is_malformed = false;
    for end in (0..end).filter(|at| *at < 128 || at.is_multiple_of(61)) {
        match parse(&bytes[..end]) {
            Parsed::Incomplete => assert!(!is_malformed),
            Parsed::Malformed => is_malformed = true,
            Parsed::Header(..) => panic!("found a header of {end} bytes inside a longer one"),
        }
    }
    assert!(!is_malformed || whole == Parsed::Malformed);
}

fn are_written_as_read((client, local): (SocketAddr, SocketAddr)) {
    for version in [ProxyVersion::V1, ProxyVersion::V2] {
        let header = encode(version, client, local);
        assert_eq!(parse(&header), Parsed::Header(header.len(), Some((client, local))));
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let at = |text: &str| text.parse().expect("an address");
    let pairs =
        [("10.1.2.3:4", "10.0.0.1:5"), ("[2001:db8::1]:4", "[2001:db8::2]:5"), ("10.1.2.3:4", "[::1]:5")];
    let mut seeds = Vec::new();
    for version in [ProxyVersion::V1, ProxyVersion::V2] {
        seeds.push(encode_unknown(version));
        seeds.extend(pairs.map(|(client, local)| encode(version, at(client), at(local))));
    }
    // LOCAL, UNIX, and a header with a TLV.
    let signature = encode_unknown(ProxyVersion::V2)[..ENOUGH_TO_TELL].to_vec();
    let behind = |rest: &[u8]| [&signature[..], rest].concat();
    seeds.push(behind(&[0x20, 0, 0, 0]));
    seeds.push(behind(&[&[0x21, 0x31, 0, 216][..], &[0; 216]].concat()));
    seeds.push(behind(
        &[&[0x21, 0x11, 0, 16, 10, 0, 0, 1, 10, 0, 0, 2, 0, 1, 0, 2], &[4, 0, 1, 0][..]].concat(),
    ));
    // A header without its signature, for the second check.
    seeds.push(vec![0x21, 0x11, 0, 12, 10, 0, 0, 1, 10, 0, 0, 2, 0, 1, 0, 2]);
    seeds.push(b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\nGET / HTTP/1.1\r\n".to_vec());
    seeds
}
