//! Cost per packet of this crate: `cargo bench -p turnpike-wire`.

use std::hint::black_box;
use std::net::SocketAddr;

use criterion::{Criterion, Throughput};
use turnpike_wire::channel_data::{ChannelData, ChannelNumber};
use turnpike_wire::indication::{self, Indication, MAX_HEADER_LEN};
use turnpike_wire::integrity::{Key, KeyAlgorithm, Mac};
use turnpike_wire::stun::{Class, HEADER_LEN, Header, View, Writer, kind, method};

const PAYLOAD: [u8; 120] = [0x5A; 120];

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    channel_data(&mut criterion);
    indications(&mut criterion);
    message_integrity(&mut criterion);
    criterion.final_summary();
}

fn channel_data(criterion: &mut Criterion) {
    let number = ChannelNumber::MIN;
    let message = [&ChannelData::header(number, 120)[..], &PAYLOAD].concat();
    let mut group = criterion.benchmark_group("channel_data");
    group.throughput(Throughput::Elements(1));
    group.bench_function("parse", |b| b.iter(|| ChannelData::parse(black_box(&message))));
    group.bench_function("header", |b| b.iter(|| ChannelData::header(black_box(number), black_box(120))));
    group.finish();
}

fn indications(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("indication");
    group.throughput(Throughput::Elements(1));
    for (family, peer) in [("ipv4", "192.0.2.1:32853"), ("ipv6", "[2001:db8::1]:32853")] {
        let peer: SocketAddr = peer.parse().expect("an address");
        let mut header = [0; MAX_HEADER_LEN];
        let length = indication::write_header(Indication::Send, [7; 12], &peer, 120, &mut header);
        let send = [&header[..length], &PAYLOAD].concat();
        group.bench_function(format!("parse_send/{family}"), |b| {
            b.iter(|| indication::parse(Indication::Send, black_box(&send)).map(|view| view.data.len()));
        });
        group.bench_function(format!("write_data/{family}"), |b| {
            b.iter(|| {
                indication::write_header(
                    Indication::Data,
                    black_box([7; 12]),
                    &black_box(peer),
                    black_box(120),
                    &mut header,
                )
            });
        });
        let mut buffer = Vec::new();
        let mut writer = Writer::begin(&mut buffer, Header::new_checked(&send).expect("a message"));
        writer.raw(&send[HEADER_LEN..]);
        let send = writer.finish(true);
        group.bench_function(format!("parse_send_with_fingerprint/{family}"), |b| {
            b.iter(|| indication::parse(Indication::Send, black_box(send)).map(|view| view.data.len()));
        });
    }
    group.finish();
}

fn message_integrity(criterion: &mut Criterion) {
    let key = Key::long_term(KeyAlgorithm::Md5, "user", "example.org", b"password");
    let header = Header { class: Class::Request, method: method::REFRESH, transaction: [7; 12] };
    let request = [(kind::USERNAME, &[b'x'; 8][..]), (kind::REALM, &[b'x'; 12]), (kind::NONCE, &[b'x'; 40])];
    let mut group = criterion.benchmark_group("integrity");
    group.throughput(Throughput::Elements(1));
    for (name, mac) in [("sha1", Mac::Sha1), ("sha256", Mac::Sha256)] {
        let mut buffer = Vec::with_capacity(1024);
        group.bench_function(format!("sign/{name}"), |b| {
            b.iter(|| {
                let mut writer = Writer::begin(&mut buffer, header);
                request.iter().for_each(|(kind, value)| _ = writer.attribute(*kind, value));
                writer.sign(black_box(&key), mac);
                writer.finish(false).len()
            });
        });
        let verify = |bytes: &[u8]| View::new_checked(bytes).map(|view| view.verify(black_box(&key), mac));
        assert_eq!(verify(&buffer), Ok(Ok(())));
        group.bench_function(format!("verify/{name}"), |b| b.iter(|| verify(black_box(&buffer))));
    }
    group.finish();
}
