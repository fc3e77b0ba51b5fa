//! One packet in `wire`: the bytes that each datagram of a relay costs, and the MAC that each request costs.

use std::{hint::black_box, net::SocketAddr};

use turnpike_wire::{
    channel_data::{ChannelData, ChannelNumber},
    indication::{self, Indication, MAX_HEADER_LEN},
    integrity::{self, Key, KeyAlgorithm, Mac},
};

use crate::Bench;

const PAYLOAD: [u8; 120] = [0x5A; 120];

pub(crate) fn cases(bench: &mut Bench) {
    channel_data(bench);
    indications(bench);
    message_integrity(bench);
}

fn channel_data(bench: &mut Bench) {
    let number = ChannelNumber::MIN;
    let message = [&ChannelData::header(number, 120)[..], &PAYLOAD].concat();
    assert_eq!(ChannelData::parse(&message).map(|view| view.payload()), Ok(&PAYLOAD[..]));
    bench.case("codec/channel_data/parse", || ChannelData::parse(black_box(&message)).is_ok());
    bench.case("codec/channel_data/header", || ChannelData::header(black_box(number), black_box(120)));
}

fn indications(bench: &mut Bench) {
    for (family, peer) in [("ipv4", "192.0.2.1:32853"), ("ipv6", "[2001:db8::1]:32853")] {
        let peer: SocketAddr = peer.parse().expect("an address");
        let mut header = [0; MAX_HEADER_LEN];
        let length = indication::write_header(Indication::Send, [7; 12], peer, 120, &mut header);
        let send = [&header[..length], &PAYLOAD].concat();
        let parse = |bytes: &[u8]| indication::parse(Indication::Send, bytes).map(|view| view.data.len());
        assert_eq!(parse(&send).ok(), Some(120));
        bench.case(&format!("codec/send/parse/{family}"), || parse(black_box(&send)));
        bench.case(&format!("codec/data/header/{family}"), || {
            let (transaction, peer, length) = black_box(([7; 12], peer, 120));
            indication::write_header(Indication::Data, transaction, peer, length, &mut header)
        });
    }
}

fn message_integrity(bench: &mut Bench) {
    let key = Key::long_term(KeyAlgorithm::Md5, "user", "example.org", b"password");
    // A Refresh request of the usual size: USERNAME, REALM, NONCE.
    let mut request = vec![0, 4, 0, 0, 0x21, 0x12, 0xA4, 0x42, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
    for (kind, length) in [(0x06, 8), (0x14, 12), (0x15, 40)] {
        request.extend_from_slice(&[0, kind, 0, length]);
        request.extend(std::iter::repeat_n(b'x', usize::from(length)));
    }
    for (name, mac) in [("sha1", Mac::Sha1), ("sha256", Mac::Sha256)] {
        let mut buffer = Vec::with_capacity(1024);
        bench.case(&format!("codec/integrity/sign/{name}"), || {
            buffer.clear();
            buffer.extend_from_slice(&request);
            integrity::sign(&mut buffer, black_box(&key), mac);
            buffer.len()
        });
        assert_eq!(integrity::verify(&buffer, &key, mac), Ok(()));
        bench.case(&format!("codec/integrity/verify/{name}"), || {
            integrity::verify(black_box(&buffer), black_box(&key), mac).is_ok()
        });
    }
}
