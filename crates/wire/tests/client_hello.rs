//! ClientHellos of all shapes: extensions in any order, records of any size, and every prefix.

use proptest::prelude::*;
use turnpike_wire::client_hello::{ClientHello, MAX_LEN, MAX_MESSAGE, MAX_RECORDS, Parsed, parse};

pub(crate) fn vector(bytes: &[u8]) -> Vec<u8> {
    [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat()
}

pub(crate) fn extension(kind: u16, value: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &vector(value)].concat()
}

pub(crate) fn server_name(name: &[u8]) -> Vec<u8> {
    extension(0, &vector(&[&[0][..], &vector(name)].concat()))
}

pub(crate) fn protocols(names: &[&[u8]]) -> Vec<u8> {
    let list = names.iter().flat_map(|name| [&[u8::try_from(name.len()).unwrap()][..], name].concat());
    extension(16, &vector(&list.collect::<Vec<u8>>()))
}

pub(crate) fn message(session: &[u8], extensions: &[u8]) -> Vec<u8> {
    let body = [
        &[3, 3][..],
        &[7; 32],
        &[u8::try_from(session.len()).unwrap()],
        session,
        &vector(&[0x13, 1, 0x13, 2]),
        &[1, 0],
        &vector(extensions),
    ]
    .concat();
    [&[1, 0][..], &vector(&body)].concat()
}

pub(crate) fn records(mut message: &[u8], lengths: &[usize]) -> Vec<u8> {
    let mut stream = Vec::new();
    for len in lengths.iter().copied().chain([usize::MAX]) {
        let (record, rest) = message.split_at(len.min(message.len()));
        if !record.is_empty() {
            stream.extend([&[22, 3, 1][..], &vector(record)].concat());
        }
        message = rest;
    }
    stream
}

fn shown(stream: &[u8]) -> Option<(Option<String>, Vec<Vec<u8>>)> {
    let mut joined = b"left over".to_vec();
    match parse(stream, &mut joined) {
        Parsed::Hello(hello) => {
            Some((hello.server_name.map(str::to_owned), hello.protocols().map(<[u8]>::to_vec).collect()))
        }
        _ => None,
    }
}

fn wanted(stream: &[u8]) -> Option<usize> {
    match parse(stream, &mut Vec::new()) {
        Parsed::Incomplete { wanted } => Some(wanted),
        _ => None,
    }
}

proptest! {
    #[test]
    fn name_and_protocols_are_found_in_a_hello_of_any_shape(
        session in prop::collection::vec(any::<u8>(), 0..=32),
        name in prop::option::of("[a-zA-Z0-9.-]{1,60}"),
        offered in prop::collection::vec("[ -~]{1,20}", 0..5),
        others in prop::collection::vec((17_u16.., prop::collection::vec(any::<u8>(), 0..200)), 0..6),
        lengths in prop::collection::vec(1_usize..200, 0..60),
        order in any::<prop::sample::Index>(),
        tail in prop::collection::vec(any::<u8>(), 0..20),
    ) {
        let mut extensions: Vec<Vec<u8>> =
            others.iter().map(|(kind, value)| extension(*kind, value)).collect();
        extensions.extend(name.as_ref().map(|name| server_name(name.as_bytes())));
        let offered: Vec<&[u8]> = offered.iter().map(String::as_bytes).collect();
        extensions.extend((!offered.is_empty()).then(|| protocols(&offered)));
        if !extensions.is_empty() {
            let middle = order.index(extensions.len());
            extensions.rotate_left(middle);
        }
        let stream = records(&message(&session, &extensions.concat()), &lengths);
        let expected = Some((name, offered.iter().map(|name| name.to_vec()).collect()));
        prop_assert_eq!(&shown(&stream), &expected);
        prop_assert_eq!(&shown(&[&stream[..], &tail].concat()), &expected);
        for end in 0..stream.len() {
            let wanted = wanted(&stream[..end]);
            prop_assert!(wanted.is_some_and(|wanted| wanted > end && wanted <= stream.len()), "{} of {}", end, stream.len());
        }
    }

    #[test]
    fn any_bytes_give_a_result_within_bounds(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        at in any::<prop::sample::Index>(),
        byte: u8,
    ) {
        let _ = parse(&bytes, &mut Vec::new());
        let mut stream = records(&message(&[], &server_name(b"www.example.org")), &[3, 40]);
        let at = at.index(stream.len());
        stream[at] = byte;
        if let Parsed::Incomplete { wanted } = parse(&stream, &mut Vec::new()) {
            prop_assert!(wanted > stream.len() && wanted <= MAX_LEN);
        }
    }
}

#[test]
fn longest_message_is_read_and_a_longer_one_is_not() {
    let name = server_name(b"www.example.org");
    let padded = |len: usize| {
        let short = message(&[], &[&name[..], &extension(21, &[])].concat()).len();
        message(&[], &[&extension(21, &vec![0; len - short])[..], &name].concat())
    };
    let longest = padded(MAX_MESSAGE);
    assert_eq!(longest.len(), MAX_MESSAGE);
    let expected = Some((Some("www.example.org".to_owned()), Vec::new()));
    assert_eq!(shown(&records(&longest, &[])), expected);
    let many = records(&longest, &[256; MAX_RECORDS - 1]);
    assert_eq!((shown(&many), many.len()), (expected, MAX_LEN));
    assert_eq!(parse(&records(&longest, &[10; MAX_RECORDS]), &mut Vec::new()), Parsed::Malformed);
    // An excessive length is refused as soon as the header has arrived.
    let too_long = records(&padded(MAX_MESSAGE + 1), &[4]);
    assert_eq!(parse(&too_long[..9], &mut Vec::new()), Parsed::Malformed);
}

#[test]
fn message_in_one_record_is_read_in_place() {
    let stream = records(&message(&[], &server_name(b"www.example.org")), &[]);
    let mut joined = Vec::new();
    let counted = allocation_counter::measure(|| _ = parse(&stream, &mut joined));
    assert_eq!(counted.count_total, 0);
}

#[test]
fn ambiguous_and_broken_hellos_are_malformed() {
    let name = |name: &[u8]| server_name(name);
    let two = vector(&[&[0][..], &vector(b"a.example"), &[0], &vector(b"b.example")].concat());
    for (why, extensions) in [
        ("two extensions", [name(b"a.example"), name(b"b.example")].concat()),
        ("two names", extension(0, &two)),
        ("empty name", name(b"")),
        ("other alphabet", name("ä.example".as_bytes())),
        ("other kind", extension(0, &vector(&[&[1][..], &vector(b"a.example")].concat()))),
        ("two lists", [protocols(&[b"h2"]), protocols(&[b"http/1.1"])].concat()),
        ("empty list", protocols(&[])),
        ("empty protocol", protocols(&[b"h2", b""])),
        ("cut value", [0, 0, 0, 9, 0].to_vec()),
    ] {
        let stream = records(&message(&[], &extensions), &[]);
        assert_eq!(parse(&stream, &mut Vec::new()), Parsed::Malformed, "{why}");
    }
    let right = records(&message(&[], &name(b"a.example")), &[]);
    for (at, byte) in [(0, 23), (1, 2), (5, 2), (6, 1)] {
        let mut wrong = right.clone();
        wrong[at] = byte;
        assert_eq!(parse(&wrong, &mut Vec::new()), Parsed::Malformed, "{at}");
    }
    assert_eq!(parse(&[22, 3, 1, 0, 0], &mut Vec::new()), Parsed::Malformed, "empty record");
    // Old clients send no extensions.
    let bare = [&[3, 1][..], &[7; 32], &[0], &vector(&[0, 5]), &[1, 0]].concat();
    let bare = records(&[&[1, 0][..], &vector(&bare)].concat(), &[]);
    assert_eq!(parse(&bare, &mut Vec::new()), Parsed::Hello(ClientHello::default()));
}
