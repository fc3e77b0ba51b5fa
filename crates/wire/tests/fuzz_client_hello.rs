//! Fuzz target: arbitrary bytes as the start of a TLS stream, as a handshake message in records of any size, and as
//! the extensions of a valid ClientHello.

use crate::{
    client_hello::{message, protocols, records, server_name},
    prelude::*,
};
use turnpike_wire::client_hello::{MAX_LEN, Parsed, parse};

#[test]
fn client_hello() {
    fuzz::target("client_hello", seeds, |bytes| {
        check(bytes);
        if let Some((how, rest)) = bytes.split_first() {
            let sizes = vec![usize::from(*how) + 1; 70];
            check(&records(rest, &sizes));
            check(&records(&message(&[], rest), &sizes));
        }
    });
}

fn check(bytes: &[u8]) {
    let mut joined = Vec::new();
    match parse(bytes, &mut joined) {
        Parsed::Hello(hello) => {
            assert!(hello.server_name.is_none_or(|name| !name.is_empty() && name.is_ascii()));
            assert!(hello.protocols().all(|name| !name.is_empty()));
        }
        Parsed::Incomplete { wanted } => assert!(wanted > bytes.len() && wanted <= MAX_LEN),
        Parsed::Malformed => {}
    }
    assert!(joined.len() <= MAX_LEN);
    // Waiting for the requested bytes gives the same result as parsing everything at once.
    let (mut end, mut again) = (0, Vec::new());
    loop {
        match parse(&bytes[..end], &mut again) {
            Parsed::Incomplete { wanted } if wanted <= bytes.len() => {
                assert!(wanted > end);
                end = wanted;
            }
            Parsed::Incomplete { .. } => {
                return assert!(!matches!(parse(bytes, &mut joined), Parsed::Hello(_)));
            }
            gradual => return assert_eq!(gradual, parse(bytes, &mut joined)),
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let name = server_name(b"www.example.org");
    let all = [&name[..], &protocols(&[b"h2", b"http/1.1"])].concat();
    let whole = message(&[9; 32], &all);
    vec![
        records(&whole, &[]),
        records(&whole, &[1, 2, 3, 50]),
        [&[7][..], &whole].concat(),
        [&[255][..], &all].concat(),
        [&[0][..], &name].concat(),
        records(&whole, &[])[..40].to_vec(),
    ]
}
