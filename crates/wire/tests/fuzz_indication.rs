//! Fuzz target: arbitrary bytes as an indication, once as they are and once after a valid header.

use crate::prelude::*;
use turnpike_wire::{address::canonical, stun::COOKIE};

use crate::oracle::{oracles_view, our_view};

#[test]
fn indication() {
    fuzz::target("indication", seeds, |bytes| {
        check(bytes);
        let Some((fingerprint, attributes)) = bytes.split_first() else { return };
        let attributes = &attributes[..attributes.len().min(4096) & !3];
        let length = u16::try_from(attributes.len()).expect("at most 4096").to_be_bytes();
        for kind in [0x16, 0x17] {
            let header = [&[0, kind][..], &length, &COOKIE, &[9; 12]].concat();
            let message = [&header[..], attributes].concat();
            check(&if fingerprint & 1 == 0 { message } else { fingerprinted(&message) });
        }
    });
}

/// Accepted input must have the same meaning for the oracle, and after re-encoding.
fn check(bytes: &[u8]) {
    for which in [Indication::Send, Indication::Data] {
        let counted = allocation_counter::measure(|| _ = indication::parse(which, bytes));
        assert_eq!(counted.count_total, 0, "reading does not allocate");
        let parsed = indication::parse(which, bytes);
        if indication::is(which, bytes)
            && let Ok(message) = View::new_checked(bytes)
            // The oracle accepts a non-empty DONT-FRAGMENT.
            && message.all(kind::DONT_FRAGMENT).all(<[u8]>::is_empty)
        {
            assert_eq!(our_view(which, bytes).ok(), oracles_view(which, bytes).ok());
        }
        let Ok(view) = parsed else { continue };
        assert!(indication::is(which, bytes) && View::new_checked(bytes).is_ok());
        assert!(which == Indication::Send || view.peer == canonical(view.peer));
        assert!(bytes.as_ptr_range().contains(&view.data.as_ptr()) || view.data.is_empty());

        let mut header = [0; MAX_HEADER_LEN];
        let length = u16::try_from(view.data.len()).expect("the length field has 16 bits");
        let header_len = indication::write_header(which, [1; 12], &view.peer, length, &mut header);
        let padding = &[0; 3][..usize::from(frame::padding(view.data.len()))];
        let again = [&header[..header_len], view.data, padding].concat();
        let reparsed = indication::parse(which, &again).expect("our own message is valid");
        assert_eq!((reparsed.peer, reparsed.data), (canonical(view.peer), view.data));
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (which, peer) in [
        (Indication::Send, "192.0.2.1:7000"),
        (Indication::Data, "[2001:db8::1]:7000"),
        (Indication::Send, "[::ffff:192.0.2.1]:7"),
    ] {
        let mut header = [0; MAX_HEADER_LEN];
        let peer = peer.parse().expect("an address");
        let length = indication::write_header(which, [9; 12], &peer, 5, &mut header);
        let message = [&header[..length], &[1, 2, 3, 4, 5, 0, 0, 0]].concat();
        seeds.push([&[1][..], &message[20..], &[0, 0x1A, 0, 0]].concat());
        seeds.push(fingerprinted(&message));
        seeds.push(message);
    }
    let captured = fuzz::captured("stun").into_iter();
    seeds
        .extend(captured.filter(|bytes| {
            [Indication::Send, Indication::Data].iter().any(|it| indication::is(*it, bytes))
        }));
    seeds
}
