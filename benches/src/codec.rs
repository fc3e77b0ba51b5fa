//! Cost of one packet in `wire`: parsing each relayed datagram, and computing the MAC of each request.

use std::{hint::black_box, net::SocketAddr};

use turnpike_wire::{
    channel_data::{ChannelData, ChannelNumber},
    indication::{self, Indication, MAX_HEADER_LEN},
    integrity::{Key, KeyAlgorithm, Mac},
    stun::{Class, Header, View, Writer, kind, method},
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
        let length = indication::write_header(Indication::Send, [7; 12], &peer, 120, &mut header);
        let send = [&header[..length], &PAYLOAD].concat();
        let parse = |bytes: &[u8]| indication::parse(Indication::Send, bytes).map(|view| view.data.len());
        assert_eq!(parse(&send).ok(), Some(120));
        bench.case(&format!("codec/send/parse/{family}"), || parse(black_box(&send)));
        bench.case(&format!("codec/data/header/{family}"), || {
            let (transaction, peer, length) = black_box(([7; 12], peer, 120));
            indication::write_header(Indication::Data, transaction, &peer, length, &mut header)
        });
    }
}

fn message_integrity(bench: &mut Bench) {
    let key = Key::long_term(KeyAlgorithm::Md5, "user", "example.org", b"password");
    // A Refresh request of the usual length.
    let header = Header { class: Class::Request, method: method::REFRESH, transaction: [7; 12] };
    let request = [(kind::USERNAME, &[b'x'; 8][..]), (kind::REALM, &[b'x'; 12]), (kind::NONCE, &[b'x'; 40])];
    for (name, mac) in [("sha1", Mac::Sha1), ("sha256", Mac::Sha256)] {
        let mut buffer = Vec::with_capacity(1024);
        bench.case(&format!("codec/integrity/sign/{name}"), || {
            let mut writer = Writer::begin(&mut buffer, header);
            request.iter().for_each(|(kind, value)| _ = writer.attribute(*kind, value));
            writer.sign(black_box(&key), mac);
            writer.finish(false).len()
        });
        let verifies = |bytes: &[u8], key: &Key| {
            View::new_checked(bytes).is_ok_and(|view| view.verify(key, mac).is_ok())
        };
        assert!(verifies(&buffer, &key));
        bench.case(&format!("codec/integrity/verify/{name}"), || {
            verifies(black_box(&buffer), black_box(&key))
        });
    }
}
