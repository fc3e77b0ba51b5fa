//! Fuzz target: arbitrary bytes as a client's first datagram and as the extensions of a valid ClientHello,
//! and the cookie exchange of both versions.

use turnpike_testkit::fuzz::{self, Input};
use turnpike_turn::server::{ListenerId, NonceKey};

use super::*;
use crate::dtls::cookie::CookieKeys;

const NOW: u64 = 100;

#[test]
fn dtls_hello() {
    let key = CookieKeys::new(NonceKey(rand::random()).into());
    fuzz::target("dtls_hello", seeds, |bytes| {
        let mut input = Input::new(bytes);
        let how = input.byte();
        check(&key, input.clone().rest());
        let built = packet(&built(how, &mut input));
        assert!(is_hello(&built));
        check(&key, &built);
    });
}

fn check(key: &CookieKeys, datagram: &[u8]) {
    if !is_hello(datagram) {
        return;
    }
    match Hello::parse(datagram) {
        Err(HelloError::TooLong) => assert!(datagram.len() > MAX_HELLO),
        Err(_) => {}
        Ok(hello) => {
            assert!(datagram.len() <= MAX_HELLO);
            assert!(2 * hello.signature_algorithms().count() <= datagram.len());
            let mut first = Vec::new();
            // A guessed cookie is never valid.
            assert_eq!(key.check(NOW, &client(1), &hello, &mut first), None);
            assert!(first.len() <= 2 * MAX_HELLO + 4, "{} bytes were written", first.len());
            let fragment = Fragment::parse(datagram).expect("parsed before");
            assert_eq!(fragment.bytes, hello.body);
            let (before, cookie) = fragment.beginning().expect("parsed before");
            assert_eq!((before, cookie), (hello.before_cookie(), &hello.body[hello.legacy_cookie.clone()]));
            assert!(!key.check_fragment(NOW, &client(1), before, cookie));
            // RFC 8446 section 4.2 forbids duplicate extensions.
            if !has_twins(&hello) {
                hello.write_first(hello.padding(), &mut first);
                exchange(key, &packet(&first));
            }
        }
    }
}

fn has_twins(hello: &Hello<'_>) -> bool {
    let mut reader = HelloReader { bytes: hello.body, at: hello.extensions };
    let mut kinds = Vec::new();
    while reader.at < hello.body.len() {
        let kind = pair(reader.take(2).expect("parsed before"));
        reader.vector16().expect("parsed before");
        if kinds.contains(&kind) {
            return true;
        }
        kinds.push(kind);
    }
    false
}

/// Checks that a first ClientHello gets a cookie that is valid only for this client and for a limited time.
fn exchange(key: &CookieKeys, datagram: &[u8]) {
    let hello = match Hello::parse(datagram) {
        Ok(hello) => hello,
        // Removing the cookie may leave a ClientHello that offers no supported version.
        Err(error) => {
            return assert!(matches!(error, HelloError::Version | HelloError::KeyShare), "{error:?}");
        }
    };
    assert_eq!(hello.cookie, None, "the cookie was removed");
    let (mut first, mut again) = (Vec::new(), Vec::new());
    let cookie = key.make(NOW, &client(1), &hello, &mut first);
    assert_eq!(first, hello.body, "nothing to remove");
    let second = with_cookie(&hello, &cookie);
    let second = packet(&second);
    if second.len() > MAX_HELLO {
        return;
    }
    let second = Hello::parse(&second).expect("the second ClientHello is as valid as the first");
    assert_eq!(
        (second.version, second.random, second.server_name),
        (hello.version, hello.random, hello.server_name)
    );
    assert_eq!(second.cookie, Some(&cookie[..]));
    assert_eq!(key.check(NOW + 1, &client(1), &second, &mut again), Some(cookie));
    assert_eq!(again, first, "the first ClientHello is reconstructed");
    assert_eq!(
        key.check(NOW + 1, &client(2), &second, &mut again),
        None,
        "the cookie is not valid on another port"
    );
    assert_eq!(key.check(NOW + 100, &client(1), &second, &mut again), None, "too late");
    assert_eq!(key.check(NOW - 11, &client(1), &second, &mut again), None, "too early");
}

fn with_cookie(hello: &Hello<'_>, cookie: &[u8; COOKIE_LEN]) -> Vec<u8> {
    let (body, at) = (hello.body, hello.legacy_cookie.start);
    if hello.version == Version::V12 {
        return [&body[..at - 1], &[32], cookie, &body[at..]].concat();
    }
    let extension = [&COOKIE.to_be_bytes()[..], &[0, 34, 0, 32], cookie].concat();
    let mut body = [body, &extension].concat();
    let length = u16::try_from(body.len() - hello.extensions).expect("short").to_be_bytes();
    body[hello.extensions - 2..hello.extensions].copy_from_slice(&length);
    body
}

fn built(how: u8, input: &mut Input<'_>) -> Vec<u8> {
    let mut extensions = Vec::new();
    while !input.is_empty() && extensions.len() < 2000 {
        let (kind, value) = match input.below(9) {
            0 => (SUPPORTED_VERSIONS, vec![4, 0xFE, 0xFC, 0xFE, 0xFD]),
            1 => (SUPPORTED_VERSIONS, [&[2, 0xFE][..], &[input.byte()]].concat()),
            2 => (KEY_SHARE, vec![0, 6, 0, 0x1D, 0, 2, 1, 1]),
            3 => (KEY_SHARE, vector(input.bytes())),
            4 => (COOKIE, vector(input.bytes())),
            5 => (PADDING, vec![0; input.byte().into()]),
            6 => (SERVER_NAME, vector(&[&[0][..], &vector(input.bytes())].concat())),
            7 => (SIGNATURE_ALGORITHMS, vector(input.bytes())),
            _ => (input.u16(), input.bytes().to_vec()),
        };
        extensions.extend_from_slice(&kind.to_be_bytes());
        extensions.extend_from_slice(&vector(&value));
    }
    let legacy_cookie = vec![7; if how & 1 == 0 { 0 } else { usize::from(how >> 2) }];
    let length = u8::try_from(legacy_cookie.len()).expect("at most 63");
    let mut body =
        [&[0xFE, if how & 2 == 0 { 0xFD } else { 0xFF }][..], &[7; 32], &[1, 9, length], &legacy_cookie]
            .concat();
    body.extend_from_slice(&[0, 2, 0x13, 0x01, 1, 0]);
    if !extensions.is_empty() {
        body.extend_from_slice(&vector(&extensions));
    }
    body
}

fn vector(value: &[u8]) -> Vec<u8> {
    [&u16::try_from(value.len()).expect("short").to_be_bytes()[..], value].concat()
}

fn packet(body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    write_packet(5, 0, body, &mut out);
    out
}

fn client(port: u16) -> turnpike_turn::server::Client {
    turnpike_turn::server::Client {
        listener: ListenerId(3),
        address: ([192, 0, 2, 1], port).into(),
        local: ([192, 0, 2, 9], 5349).into(),
    }
}

fn seeds() -> Vec<Vec<u8>> {
    // The first byte selects extensions or a complete datagram.
    let built_from: [&[u8]; 6] = [
        &[0],
        &[0, 0, 2],
        &[0, 0, 2, 5, 50, 6, 5, b'a', b'.', b'o', b'r', b'g', 7, 4, 4, 3, 8, 4],
        &[0x81, 0, 4, 3, 1, 2, 3, 2],
        &[2, 1, 0xFC, 3, 4, 0, 0x17, 0, 0],
        &[0, 5, 3, 0, 4, 2, 9, 9, 8, 0, 10, 2, 0, 0x1D],
    ];
    let whole = built_from.map(|seed| {
        let mut input = Input::new(seed);
        let how = input.byte();
        [&[0][..], &packet(&built(how, &mut input))].concat()
    });
    let captured = fuzz::captured("dtls_hello").into_iter().map(|datagram| [&[0][..], &datagram].concat());
    built_from.map(<[u8]>::to_vec).into_iter().chain(whole).chain(captured).collect()
}
