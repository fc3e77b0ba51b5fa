//! The client over TCP, and TCP relaying (RFC 6062).

use crate::client_support::*;
use stun_types::message::{MessageClass, MessageType, MessageWrite as _, MessageWriteExt as _};
use turn_types::{
    attribute::{ConnectionId as ConnectionIdAttribute, RequestedTransport, XorPeerAddress},
    message::{CONNECT, CONNECTION_ATTEMPT, CONNECTION_BIND},
};
use turnpike_turn::client::{BindProgress, ConnectionId, Relayed, Timing};

fn tcp_client() -> Client {
    let config = Config { relayed: Relayed::Tcp, timing: Timing::RELIABLE, ..Config::new(USER, PASSWORD) };
    Client::new(Arc::new(config), turnpike_turn::random::Seed([9; 32]))
}

fn tcp_allocated() -> Client {
    let mut client = tcp_client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    let message = Message::from_bytes(&first).unwrap();
    assert_eq!(message.attribute::<RequestedTransport>().unwrap().protocol(), RequestedTransport::TCP);
    client.handle_datagram(0, &challenge(&first, 401, PLAIN_NONCE, None));
    grant(&mut client, 0, 600);
    event(&mut client);
    client
}

fn connected(request: &[u8], id: u32) -> Vec<u8> {
    let request = Message::from_bytes(request).unwrap();
    let mut response = Message::builder_success(&request, MessageWriteVec::new());
    response.add_attribute(&ConnectionIdAttribute::new(id)).unwrap();
    response.add_message_integrity(&credentials(), IntegrityAlgorithm::Sha1).unwrap();
    response.finish()
}

/// RFC 8489 section 6.2.2: no retransmission, and Ti is 39.5 s.
#[test]
fn a_request_over_tcp_is_sent_once_and_times_out_after_39_5_s() {
    let mut client = tcp_client();
    client.allocate(0).unwrap();
    request(&mut client);
    let mut now = 0;
    while let Some(at) = client.poll_timeout() {
        now = at;
        client.handle_timeout(now);
        assert!(client.poll_transmit().is_none(), "sent again at {now}");
    }
    assert_eq!(now, 39_500);
    let failed = event(&mut client);
    assert!(
        matches!(failed, Event::Failed { failure: Failure::Timeout { transmissions: 1, .. }, .. }),
        "{failed:?}"
    );
}

#[test]
fn connect_makes_a_peer_connection_that_a_second_stream_binds() {
    let mut client = tcp_allocated();
    client.connect(1, peer()).unwrap();
    let connect = request(&mut client);
    let message = Message::from_bytes(&connect).unwrap();
    assert!(message.has_method(CONNECT));
    let to = message.attribute::<XorPeerAddress>().unwrap().addr(message.transaction_id());
    assert_eq!(to, peer());
    client.handle_datagram(2, &connected(&connect, 0x1234_5678));
    assert_eq!(event(&mut client), Event::Connected { peer: peer(), connection: ConnectionId(0x1234_5678) });

    let mut data = client.data_connection(ConnectionId(0x1234_5678));
    let bind = data.poll_transmit().unwrap();
    let message = Message::from_bytes(&bind).unwrap();
    assert!(message.has_method(CONNECTION_BIND));
    assert_eq!(message.attribute::<ConnectionIdAttribute>().unwrap().id(), 0x1234_5678);
    assert_signed(&bind, IntegrityAlgorithm::Sha1, PLAIN_NONCE);
    // A nonce may be valid only for the first connection.
    assert_eq!(data.handle_message(&challenge(&bind, 438, "another", None)), Ok(BindProgress::Pending));
    let again = data.poll_transmit().unwrap();
    assert_signed(&again, IntegrityAlgorithm::Sha1, "another");
    let late = success(&bind, 0, Some(IntegrityAlgorithm::Sha1));
    assert_eq!(data.handle_message(&late), Ok(BindProgress::Pending));
    let timely = success(&again, 0, Some(IntegrityAlgorithm::Sha1));
    assert_eq!(data.handle_message(&timely), Ok(BindProgress::Bound));
}

#[test]
fn a_failed_connection_bind_returns_its_reason() {
    let mut client = tcp_allocated();
    let mut data = client.data_connection(ConnectionId(7));
    let bind = data.poll_transmit().unwrap();
    let refused = failure(&bind, 400, Some(IntegrityAlgorithm::Sha1));
    assert!(matches!(data.handle_message(&refused), Err(Failure::Refused { code: 400, .. })));

    let mut data = client.data_connection(ConnectionId(7));
    let bind = data.poll_transmit().unwrap();
    assert!(data.handle_message(&success(&bind, 0, None)).is_err(), "an unsigned success proves nothing");

    let mut data = client.data_connection(ConnectionId(7));
    let mut asked = 0;
    let failed = loop {
        let Some(bind) = data.poll_transmit() else { panic!("stopped without a failure") };
        asked += 1;
        if let Err(failure) = data.handle_message(&challenge(&bind, 401, PLAIN_NONCE, None)) {
            break failure;
        }
    };
    assert!(matches!(failed, Failure::Credentials { .. }) && asked <= 4, "{failed} after {asked}");
}

#[test]
fn a_failed_connect_does_not_change_the_allocation() {
    let mut client = tcp_allocated();
    client.connect(1, peer()).unwrap();
    let connect = request(&mut client);
    client.handle_datagram(2, &failure(&connect, 447, Some(IntegrityAlgorithm::Sha1)));
    let Event::Failed { request, failure } = event(&mut client) else { panic!("no failure") };
    assert_eq!(request, Request::Connect(peer()));
    assert!(matches!(failure, Failure::Refused { code: 447, .. }));
    assert!(client.allocation().is_some());
}

/// RFC 6062 section 4.4; the server cannot have accepted a peer without a permission.
#[test]
fn connection_attempts_are_reported_only_for_permitted_peers() {
    let mut client = tcp_allocated();
    let kind = MessageType::from_class_method(MessageClass::Indication, CONNECTION_ATTEMPT);
    let id = 77_u128.into();
    let mut attempt = Message::builder(kind, id, MessageWriteVec::new());
    attempt.add_attribute(&ConnectionIdAttribute::new(9)).unwrap();
    attempt.add_attribute(&XorPeerAddress::new(peer(), id)).unwrap();
    let attempt = attempt.finish();
    assert_eq!(client.handle_datagram(1, &attempt), Incoming::Ignored(Ignored::NoPermission));
    client.permit(1, peer().ip()).unwrap();
    grant(&mut client, 1, 0);
    event(&mut client);
    assert_eq!(client.handle_datagram(2, &attempt), Incoming::Control);
    assert_eq!(event(&mut client), Event::ConnectionAttempt { peer: peer(), connection: ConnectionId(9) });
}
