//! Fuzz targets: any bytes as an indication, and any bytes as the attributes of one, which gets past the header
//! check. Bounded under `cargo test`, unbounded under `cargo bolero`.

use turnpike_wire::address::canonical;
use turnpike_wire::frame;
use turnpike_wire::indication::{self, Indication, MAX_HEADER_LEN};
use turnpike_wire::stun::View;

/// Whatever is taken is a well-formed message, lies within it, and means the same when written anew.
fn check(bytes: &[u8]) {
    for which in [Indication::Send, Indication::Data] {
        let Ok(view) = indication::parse(which, bytes) else { continue };
        assert!(indication::is(which, bytes) && View::new_checked(bytes).is_ok());
        assert!(which == Indication::Send || view.peer == canonical(view.peer));
        assert!(bytes.as_ptr_range().contains(&view.data.as_ptr()) || view.data.is_empty());

        let mut header = [0; MAX_HEADER_LEN];
        let length = u16::try_from(view.data.len()).unwrap();
        let header_len = indication::write_header(which, [1; 12], view.peer, length, &mut header);
        let padding = &[0; 3][..usize::from(frame::padding(view.data.len()))];
        let again = [&header[..header_len], view.data, padding].concat();
        let reparsed = indication::parse(which, &again).unwrap();
        assert_eq!((reparsed.peer, reparsed.data), (canonical(view.peer), view.data));
    }
}

#[test]
fn indication_of_any_bytes() {
    bolero::check!().for_each(check);
}

#[test]
fn indication_of_any_attributes() {
    bolero::check!().for_each(|attributes: &[u8]| {
        let attributes = &attributes[..attributes.len() & 0xFFFC];
        let length = u16::try_from(attributes.len()).unwrap().to_be_bytes();
        for kind in [0x16, 0x17] {
            let header = [0, kind, length[0], length[1], 0x21, 0x12, 0xA4, 0x42];
            check(&[&header[..], &[9; 12], attributes].concat());
        }
    });
}

/// A third, shaped like the attributes that an indication has, so that most inputs are taken.
#[test]
fn indication_of_likely_attributes() {
    let kinds = [0x0012, 0x0013, 0x001A, 0x8022, 0x8028, 0x0008, 0x0006, 0x7F00_u16];
    bolero::check!().with_type::<Vec<(u8, Vec<u8>)>>().for_each(|parts| {
        let mut message = vec![0, 0x16, 0, 0, 0x21, 0x12, 0xA4, 0x42, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9];
        for (selector, value) in parts.iter().take(16) {
            let kind = kinds[usize::from(*selector) % kinds.len()];
            let length = match kind {
                0x0012 => value.len().min(if selector & 0x80 == 0 { 8 } else { 20 }),
                0x001A => 0,
                _ => value.len().min(64),
            };
            message.extend_from_slice(&kind.to_be_bytes());
            message.extend_from_slice(&u16::try_from(length).unwrap().to_be_bytes());
            message.extend_from_slice(&value[..length]);
            message.resize(message.len().next_multiple_of(4), 0);
        }
        let length = u16::try_from(message.len() - 20).unwrap().to_be_bytes();
        message[2..4].copy_from_slice(&length);
        check(&message);
    });
}
