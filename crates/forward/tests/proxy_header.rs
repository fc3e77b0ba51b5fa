//! PROXY headers of both versions, received and sent.

use crate::prelude::*;

const V2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c\xc0\x00\x02\x07\x0a\x00\x00\x01\x12\x34\x01\xbb";

fn accepting(target: std::net::SocketAddr) -> Rule {
    let mut rule = rule("r", target);
    rule.proxy_protocol_from = vec![Proxy::Network(Pattern::Prefix([127, 0, 0, 1].into(), 32))];
    rule
}

#[test]
fn target_receives_a_version_1_header() {
    let (server, target) = listener();
    let mut rule = rule("r", target);
    rule.send_proxy = Some(ProxyVersion::V1);
    let running = Running::start(&[rule]);
    let mut client = running.connect("r");
    let (own, asked) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
    client.write_all(b"hello").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let heard = read_all(&mut accept(&server));
    let expected = format!("PROXY TCP4 127.0.0.1 127.0.0.1 {} {}\r\nhello", own.port(), asked.port());
    assert_eq!(String::from_utf8(heard).unwrap(), expected);
    drop(client);
    // The header is not counted among the client's bytes.
    assert_eq!(running.log.wait(1)[0].to_target, 5);
}

#[test]
fn header_is_sent_before_the_client_sends_data() {
    let (server, target) = listener();
    let mut rule = rule("r", target);
    rule.send_proxy = Some(ProxyVersion::V2);
    let running = Running::start(&[rule]);
    let client = running.connect("r");
    let heard = read_exactly(&mut accept(&server), 28);
    assert_eq!(heard[..16], *b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c");
    assert_eq!(heard[16..24], [127, 0, 0, 1, 127, 0, 0, 1]);
    assert_eq!(heard[24..26], client.local_addr().unwrap().port().to_be_bytes());
}

#[test]
fn header_of_a_trusted_proxy_is_used_and_not_forwarded() {
    for header in [V2, b"PROXY TCP4 192.0.2.7 10.0.0.1 4660 443\r\n"] {
        let (server, target) = listener();
        let running = Running::start(&[accepting(target)]);
        let mut client = running.connect("r");
        client.write_all(&[header, b"first"].concat()).unwrap();
        let mut server = accept(&server);
        assert_eq!(read_exactly(&mut server, 5), b"first");
        client.write_all(b"second").unwrap();
        assert_eq!(read_exactly(&mut server, 6), b"second");
        server.write_all(b"answer").unwrap();
        assert_eq!(read_exactly(&mut client, 6), b"answer");
        drop((client, server));
        let report = running.log.wait(1).remove(0);
        assert_eq!(report.client.to_string(), "192.0.2.7:4660");
        assert_eq!((report.to_target, report.to_client, report.reason), (11, 6, EndReason::Finished));
    }
}

#[test]
fn header_in_single_bytes_followed_by_fin_is_parsed() {
    let (server, target) = listener();
    let running = Running::start(&[accepting(target)]);
    let mut client = running.connect("r");
    client.set_nodelay(true).unwrap();
    for byte in [V2, b"all"].concat() {
        client.write_all(&[byte]).unwrap();
    }
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&mut accept(&server)), b"all");
}

#[test]
fn header_is_translated_between_versions() {
    let (server, target) = listener();
    let mut rule = accepting(target);
    rule.send_proxy = Some(ProxyVersion::V1);
    let running = Running::start(&[rule]);
    let mut client = running.connect("r");
    client.write_all(&[V2, b"x"].concat()).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&mut accept(&server)), b"PROXY TCP4 192.0.2.7 10.0.0.1 4660 443\r\nx");
}

#[test]
fn lists_apply_to_the_client_in_the_header() {
    let mut rule = accepting(support::greeter("a"));
    rule.access = Access { allow: Vec::new(), deny: vec![Pattern::Prefix([192, 0, 2, 0].into(), 24)] };
    let running = Running::start(&[rule]);
    let mut client = running.connect("r");
    client.write_all(V2).unwrap();
    assert_eq!(read_all(&mut client), b"");
    assert_eq!(running.log.wait(1)[0].reason, EndReason::Denied);
    let mut client = running.connect("r");
    client.write_all(b"PROXY UNKNOWN\r\n").unwrap();
    assert_eq!(read_exactly(&mut client, 1), b"a");
}

fn accepting_from_others(target: std::net::SocketAddr) -> Rule {
    let mut rule = rule("r", target);
    rule.proxy_protocol_from = vec![Proxy::Network(Pattern::Prefix([192, 0, 2, 0].into(), 24)), Proxy::Unix];
    rule
}

#[test]
fn header_from_an_untrusted_client_never_reaches_a_target() {
    for header in [V2, b"PROXY TCP4 192.0.2.7 10.0.0.1 4660 443\r\n", b"PROXY UNKNOWN\r\n"] {
        for whole in [true, false] {
            let (server, target) = listener();
            let running = Running::start(&[accepting_from_others(target)]);
            let mut client = running.connect("r");
            client.set_nodelay(true).unwrap();
            let own = client.local_addr().unwrap().into();
            if whole {
                client.write_all(&[header, b"first"].concat()).unwrap();
            } else {
                // The client may be refused before the last byte.
                let _ = header.iter().try_for_each(|byte| client.write_all(&[*byte]));
            }
            let report = running.log.wait(1).remove(0);
            assert_eq!((report.reason, report.client), (EndReason::UntrustedProxy, own));
            assert_eq!((report.to_target, report.to_client), (0, 0));
            // An earlier write may already have reported the reset.
            let end = client.read(&mut [0]).map_err(|error| error.kind());
            assert!(end == Err(ErrorKind::ConnectionReset) || end == Ok(0) && !whole, "{end:?}");
            assert_eq!(read_all(&mut accept(&server)), b"", "{header:?}");
        }
    }
}

#[test]
fn untrusted_clients_without_a_header_are_served_normally() {
    let (server, target) = listener();
    let running = Running::start(&[accepting_from_others(target)]);
    for said in [&b"PROXIMITY"[..], b"P", b"\r\n\r\nQUIT", b"\r", b"GET / HTTP/1.1", b""] {
        let mut client = running.connect("r");
        let own = client.local_addr().unwrap().into();
        client.write_all(said).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut server = accept(&server);
        assert_eq!(read_all(&mut server), said);
        server.write_all(b"answer").unwrap();
        drop(server);
        assert_eq!(read_all(&mut client), b"answer");
        let reports = running.log.all();
        assert!(reports.iter().all(|report| report.reason == EndReason::Finished), "{reports:?}");
        support::eventually("a report", || running.log.all().iter().any(|report| report.client == own));
    }
    // A target that sends first need not wait for the client.
    let running = Running::start(&[accepting_from_others(support::greeter("a"))]);
    assert_eq!(read_exactly(&mut running.connect("r"), 1), b"a");
}

#[test]
fn malformed_missing_or_late_header_ends_the_connection() {
    let mut rule = accepting(support::greeter("a"));
    rule.connect_timeout = Duration::from_millis(300);
    let running = Running::start(&[rule]);
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"PROXY TCP4 ", b""] {
        let mut client = running.connect("r");
        client.write_all(bytes).unwrap();
        match client.read(&mut [0; 8]) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("{other:?}"),
        }
    }
    let mut half = running.connect("r");
    half.write_all(b"PROXY").unwrap();
    half.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&mut half), b"");
    let reports = running.log.wait(4);
    assert!(reports.iter().all(|report| report.reason == EndReason::BadProxyHeader), "{reports:?}");
}
