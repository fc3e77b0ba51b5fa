//! Checks that the data path does not allocate, for valid and invalid packets.

use crate::prelude::*;
use std::hint::black_box;

fn allocations(work: impl FnOnce()) -> u64 {
    allocation_counter::measure(work).count_total
}

fn peers() -> [SocketAddr; 2] {
    ["192.0.2.1:32853".parse().unwrap(), "[2001:db8::1]:32853".parse().unwrap()]
}

fn indication(which: Indication, peer: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let mut header = [0; MAX_HEADER_LEN];
    let length = u16::try_from(payload.len()).unwrap();
    let header_len = indication::write_header(which, [7; 12], &peer, length, &mut header);
    [&header[..header_len], payload, &[0; 3][..usize::from(frame::padding(payload.len()))]].concat()
}

#[test]
fn the_counter_counts_allocations() {
    assert_eq!(allocations(|| drop(black_box(vec![1, 2, 3]))), 1);
}

#[test]
fn channel_data_is_parsed_and_written_without_allocation() {
    let message = [&ChannelData::header(ChannelNumber::MIN, 1200)[..], &[9; 1200]].concat();
    let counted = allocations(|| {
        for length in 0..message.len() {
            assert!(ChannelData::parse(black_box(&message[..length])).is_err());
            black_box(demux::classify(&message[..length]));
        }
        assert_eq!(ChannelData::parse(black_box(&message)).map(|view| view.payload().len()), Ok(1200));
        black_box(ChannelData::header(black_box(ChannelNumber::MAX), 1200));
    });
    assert_eq!(counted, 0);
}

#[test]
fn indications_are_parsed_without_allocation() {
    for peer in peers() {
        for which in [Indication::Send, Indication::Data] {
            let message = fingerprinted(&indication(which, peer, &[9; 1199]));
            let counted = allocations(|| {
                for length in 0..message.len() {
                    assert!(indication::parse(which, black_box(&message[..length])).is_err());
                }
                assert!(indication::is(which, black_box(&message)));
                assert_eq!(
                    indication::parse(which, black_box(&message)).map(|view| view.data.len()),
                    Ok(1199)
                );
            });
            assert_eq!(counted, 0);
        }
    }
}

#[test]
fn indications_are_written_without_allocation() {
    let mut header = [0; MAX_HEADER_LEN];
    let counted = allocations(|| {
        for peer in peers() {
            for which in [Indication::Send, Indication::Data] {
                black_box(indication::write_header(which, black_box([7; 12]), &peer, 1200, &mut header));
            }
        }
    });
    assert_eq!(counted, 0);
}

/// Each signed request of an unauthenticated flood costs two hashes and no memory.
#[test]
fn messages_are_verified_without_allocation() {
    let key = Key::long_term(KeyAlgorithm::Sha256, "user", "realm", b"password");
    let empty = [0, 4, 0, 0, 0x21, 0x12, 0xA4, 0x42, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
    let message = signed(&signed(&empty, &key, Mac::Sha1), &key, Mac::Sha256);
    let counted = allocations(|| {
        for mac in [Mac::Sha1, Mac::Sha256] {
            assert_eq!(verify(black_box(&message), &key, mac), Ok(()));
        }
        assert_eq!(mac_of(black_box(&message)), Some(Mac::Sha256));
    });
    assert_eq!(counted, 0);
}

#[test]
fn messages_are_read_and_written_again_without_allocation() {
    let header = Header { class: Class::Error, method: stun::method::ALLOCATE, transaction: [7; 12] };
    let key = Key::from_bytes(b"key");
    let mut buffer = Vec::with_capacity(1500);
    let counted = allocations(|| {
        let mut writer = Writer::begin(&mut buffer, header);
        writer.error(420, "Unknown Attribute").unknown_attributes(&[0x7FFF, 0x7FFE]);
        peers().into_iter().for_each(|peer| _ = writer.xor_address(kind::XOR_MAPPED_ADDRESS, peer));
        writer.sign(&key, Mac::Sha1).sign(&key, Mac::Sha256);
        let message = black_box(writer.finish(true));
        for length in 0..message.len() {
            assert!(View::new_checked(black_box(&message[..length])).is_err());
        }
        let view = View::new_checked(black_box(message)).unwrap();
        let code = view.error().map(|error| error.code);
        assert_eq!((view.attributes().count(), code, view.unknown(|_| false).count()), (4, Some(420), 4));
    });
    assert_eq!(counted, 0);
}
