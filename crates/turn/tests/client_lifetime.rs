//! Retransmission, refreshes and deletion by the client in virtual time.

use crate::client_support::*;
use turn_types::message::{CHANNEL_BIND, CREATE_PERMISSION};
use turnpike_wire::{
    channel_data::{ChannelData, ChannelNumber},
    indication::{self, Indication},
};

#[test]
fn an_unanswered_request_is_sent_seven_times_and_times_out() {
    let mut client = client();
    client.allocate(1_000).unwrap();
    let first = request(&mut client);
    let mut sent = vec![0];
    let given_up = loop {
        let now = client.poll_timeout().expect("the request is pending");
        client.handle_timeout(now);
        while let Some(bytes) = client.poll_transmit() {
            assert_eq!(bytes, first, "a retransmission is the same datagram");
            sent.push(now - 1_000);
        }
        if let Some(Event::Failed { request, failure }) = client.poll_event() {
            assert_eq!(request, Request::Allocate);
            assert_eq!(failure, Failure::Timeout { transmissions: 7, unverified: None });
            break now - 1_000;
        }
    };
    assert_eq!(sent, [0, 500, 1_500, 3_500, 7_500, 15_500, 31_500]);
    assert_eq!(given_up, 39_500);
}

#[test]
fn the_allocation_is_refreshed_a_minute_before_each_expiry() {
    let mut client = allocated(0, 600);
    for due in [540_000, 1_080_000, 1_620_000] {
        assert_eq!(client.poll_timeout(), Some(due));
        client.handle_timeout(due - 1);
        assert_eq!(client.poll_transmit(), None);
        client.handle_timeout(due);
        let refresh = request(&mut client);
        let message = Message::from_bytes(&refresh).unwrap();
        assert!(message.has_method(REFRESH));
        assert_signed(&refresh, IntegrityAlgorithm::Sha1, PLAIN_NONCE);
        client.handle_datagram(due, &success(&refresh, 600, Some(IntegrityAlgorithm::Sha1)));
        assert_eq!(event(&mut client), Event::Refreshed { lifetime: 600 });
    }
}

#[test]
fn a_short_lifetime_is_refreshed_halfway_through() {
    let client = allocated(0, 60);
    assert_eq!(client.poll_timeout(), Some(30_000));
}

#[test]
fn a_refresh_with_a_stale_nonce_retries_with_the_new_one() {
    let mut client = allocated(0, 600);
    client.handle_timeout(540_000);
    let stale = request(&mut client);
    client.handle_datagram(540_000, &challenge(&stale, 438, "fresh", None));
    let again = request(&mut client);
    assert_signed(&again, IntegrityAlgorithm::Sha1, "fresh");
    client.handle_datagram(540_000, &success(&again, 600, Some(IntegrityAlgorithm::Sha1)));
    assert_eq!(event(&mut client), Event::Refreshed { lifetime: 600 });
}

#[test]
fn a_refused_refresh_ends_the_allocation() {
    let mut client = allocated(0, 600);
    client.handle_timeout(540_000);
    let refresh = request(&mut client);
    client.handle_datagram(540_000, &failure(&refresh, 437, Some(IntegrityAlgorithm::Sha1)));
    assert!(matches!(event(&mut client), Event::Failed { request: Request::Refresh, .. }));
    assert_eq!(client.allocation(), None);
    assert_eq!(client.poll_timeout(), None);
    assert_eq!(client.permit(540_000, peer().ip()), Err(RequestError::NoAllocation));
}

#[test]
fn permissions_and_channels_are_refreshed_before_a_permission_expires() {
    let mut client = allocated(0, 3_600);
    client.permit(0, peer().ip()).unwrap();
    grant(&mut client, 0, 0);
    assert_eq!(event(&mut client), Event::Permitted(peer().ip()));
    let number = client.bind_channel(0, peer()).unwrap();
    grant(&mut client, 0, 0);
    assert_eq!(event(&mut client), Event::Bound(number, peer()));
    for due in [240_000, 480_000] {
        assert_eq!(client.poll_timeout(), Some(due));
        client.handle_timeout(due);
        for method in [CREATE_PERMISSION, CHANNEL_BIND] {
            let refresh = request(&mut client);
            assert!(Message::from_bytes(&refresh).unwrap().has_method(method));
            client.handle_datagram(due, &success(&refresh, 0, Some(IntegrityAlgorithm::Sha1)));
            event(&mut client);
        }
        assert_eq!(client.poll_transmit(), None);
    }
}

#[test]
fn a_deletion_sends_lifetime_zero_and_drops_all_state() {
    let mut client = allocated(0, 600);
    client.bind_channel(0, peer()).unwrap();
    client.delete(5).unwrap();
    let delete = request(&mut client);
    let message = Message::from_bytes(&delete).unwrap();
    assert_eq!(message.attribute::<Lifetime>().unwrap().seconds(), 0);
    assert_eq!(client.poll_transmit(), None, "the pending ChannelBind is dropped");
    client.handle_datagram(5, &success(&delete, 0, Some(IntegrityAlgorithm::Sha1)));
    assert_eq!(event(&mut client), Event::Deleted);
    assert_eq!((client.allocation(), client.poll_timeout(), client.channel(peer())), (None, None, None));
    client.allocate(6).unwrap();
}

fn header(client: &mut Client, len: u16) -> Vec<u8> {
    let mut bytes = [0; MAX_HEADER_LEN];
    let len = client.send_header(peer(), len, &mut bytes);
    bytes[..len].to_vec()
}

#[test]
fn data_uses_send_indications_until_a_channel_is_bound() {
    let mut client = allocated(0, 600);
    client.permit(0, peer().ip()).unwrap();
    grant(&mut client, 0, 0);
    let mut datagram = header(&mut client, 5);
    datagram.extend(b"hello\0\0\0");
    let view = indication::parse(Indication::Send, &datagram).unwrap();
    assert_eq!((view.peer, view.data), (peer(), &b"hello"[..]));

    let number = client.bind_channel(0, peer()).unwrap();
    assert_eq!(header(&mut client, 5).len(), datagram.len() - 8, "not bound before the success response");
    grant(&mut client, 0, 0);
    let mut datagram = header(&mut client, 5);
    datagram.extend(b"hello");
    let data = ChannelData::parse(&datagram).unwrap();
    assert_eq!((data.number(), data.payload()), (number, &b"hello"[..]));
}

#[test]
fn only_data_from_permitted_peers_is_delivered_in_either_form() {
    let mut client = allocated(0, 600);
    let number = client.bind_channel(0, peer()).unwrap();
    grant(&mut client, 0, 0);

    let mut datagram = ChannelData::header(number, 3).to_vec();
    datagram.extend(b"abc");
    let data = Incoming::Data { peer: peer(), channel: Some(number), payload: &b"abc"[..] };
    assert_eq!(client.handle_datagram(0, &datagram), data);

    let mut other = ChannelData::header(ChannelNumber::MAX, 3).to_vec();
    other.extend(b"abc");
    assert_eq!(client.handle_datagram(0, &other), Incoming::Ignored(Ignored::UnknownChannel));

    let indication = |from| {
        let mut header = [0; MAX_HEADER_LEN];
        let len = indication::write_header(Indication::Data, [1; 12], &from, 4, &mut header);
        [&header[..len], b"data"].concat()
    };
    let datagram = indication(peer());
    let data = Incoming::Data { peer: peer(), channel: None, payload: &b"data"[..] };
    assert_eq!(client.handle_datagram(0, &datagram), data);
    let stranger = indication("192.0.2.10:7000".parse().unwrap());
    assert_eq!(client.handle_datagram(0, &stranger), Incoming::Ignored(Ignored::NoPermission));

    for noise in [&b""[..], b"\x40", b"\xff\xff\xff\xff", b"\0\x01\0\0", b"GET / HTTP/1.1"] {
        assert!(matches!(client.handle_datagram(0, noise), Incoming::Ignored(_)), "{noise:?}");
    }
    assert_eq!(client.poll_event().map(|event| matches!(event, Event::Bound(..))), Some(true));
    assert_eq!(client.poll_event(), None);
}

#[test]
fn requests_and_events_are_bounded() {
    let mut client = allocated(0, 600);
    let mut refused = None;
    for port in 1..=u16::MAX {
        if let Err(error) = client.bind_channel(0, (peer().ip(), port).into()) {
            refused = Some(error);
            break;
        }
    }
    assert!(matches!(refused, Some(RequestError::TooMany { .. })), "{refused:?}");
    let mut sent = 0;
    while client.poll_transmit().is_some() {
        sent += 1;
    }
    assert!(sent <= 64, "{sent}");
}
