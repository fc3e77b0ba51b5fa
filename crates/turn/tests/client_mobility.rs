//! The client after a move (RFC 8016) or a redirect (RFC 8489 section 10), and with a token (RFC 7635).

use crate::client_support;

use crate::client_support::*;
use stun_types::{
    attribute::{AlternateDomain, AlternateServer, AttributeType, ErrorCode, RawAttribute},
    message::{MessageIntegrityCredentials, MessageWrite as _, MessageWriteExt as _, ShortTermCredentials},
};
use turn_types::{attribute::XorRelayedAddress, message::ALLOCATE};
use turnpike_turn::client::AccessToken;

const TICKET: AttributeType = AttributeType::new(0x8030);

fn success_with_ticket(request: &[u8], ticket: &[u8]) -> Vec<u8> {
    let request = Message::from_bytes(request).unwrap();
    let mut response = Message::builder_success(&request, MessageWriteVec::new());
    if request.has_method(ALLOCATE) {
        response.add_attribute(&XorRelayedAddress::new(relayed(), request.transaction_id())).unwrap();
    }
    response.add_attribute(&Lifetime::new(600)).unwrap();
    response.add_attribute(&RawAttribute::new(TICKET, ticket)).unwrap();
    response.add_message_integrity(&credentials(), IntegrityAlgorithm::Sha1).unwrap();
    response.finish()
}

fn ticket_of(request: &[u8]) -> Option<Vec<u8>> {
    Message::from_bytes(request).unwrap().raw_attribute(TICKET).map(|raw| raw.value.to_vec())
}

fn mobile() -> Client {
    let mut client = Client::new(
        Arc::new(Config { mobility: true, ..Config::new(USER, PASSWORD) }),
        turnpike_turn::random::Seed([9; 32]),
    );
    client.allocate(0).unwrap();
    let first = request(&mut client);
    assert_eq!(ticket_of(&first), Some(Vec::new()), "an empty attribute requests a ticket");
    client.handle_datagram(0, &challenge(&first, 401, PLAIN_NONCE, None));
    let second = request(&mut client);
    client.handle_datagram(0, &success_with_ticket(&second, b"first"));
    assert!(matches!(event(&mut client), Event::Allocated(_)));
    assert!(client.can_migrate());
    client
}

#[test]
fn migration_renews_the_ticket_and_resumes_pending_refreshes() {
    let mut client = mobile();
    client.permit(1, peer().ip()).unwrap();
    grant(&mut client, 1, 0);
    event(&mut client);
    client.handle_timeout(240_001);
    let lost = request(&mut client);

    client.migrate(240_100).unwrap();
    let moved = request(&mut client);
    assert!(Message::from_bytes(&moved).unwrap().has_method(REFRESH));
    assert_eq!(ticket_of(&moved), Some(b"first".to_vec()));
    // No other request is sent from an address that the server does not yet know.
    client.handle_timeout(240_200);
    assert!(client.poll_transmit().is_none());
    // Nonces may be bound to an address.
    client.handle_datagram(240_300, &challenge(&moved, 401, "new", None));
    let again = request(&mut client);
    assert_signed(&again, IntegrityAlgorithm::Sha1, "new");
    assert_eq!(ticket_of(&again), Some(b"first".to_vec()));
    client.handle_datagram(240_400, &success_with_ticket(&again, b"second"));
    assert_eq!(event(&mut client), Event::Migrated { lifetime: 600 });

    client.handle_timeout(240_400);
    let permission = request(&mut client);
    assert_ne!(permission[8..20], lost[8..20]);
    let granted = success(&permission, 0, Some(IntegrityAlgorithm::Sha1));
    assert_eq!(client.handle_datagram(240_500, &granted), Incoming::Control);
    assert_eq!(event(&mut client), Event::Permitted(peer().ip()));

    client.migrate(300_000).unwrap();
    assert_eq!(ticket_of(&request(&mut client)), Some(b"second".to_vec()));
}

#[test]
fn a_timed_out_migration_may_retry_and_a_refused_one_is_final() {
    let mut client = mobile();
    client.migrate(0).unwrap();
    let mut now = 0;
    let failed = loop {
        while client.poll_transmit().is_some() {}
        if let Some(event) = client.poll_event() {
            break event;
        }
        now = client.poll_timeout().expect("a pending timeout");
        client.handle_timeout(now);
    };
    assert!(matches!(failed, Event::Failed { request: Request::Migrate, failure: Failure::Timeout { .. } }));
    client.migrate(now).unwrap();
    let moved = request(&mut client);
    client.handle_datagram(now, &failure(&moved, 437, Some(IntegrityAlgorithm::Sha1)));
    assert!(matches!(event(&mut client), Event::Failed { request: Request::Migrate, .. }));
    assert!(client.allocation().is_none());
}

fn until_failure(client: &mut Client, mut now: u64) -> (u64, Event) {
    loop {
        while client.poll_transmit().is_some() {}
        while let Some(event) = client.poll_event() {
            if matches!(event, Event::Failed { .. }) {
                return (now, event);
            }
        }
        now = client.poll_timeout().expect("a pending timeout");
        client.handle_timeout(now);
    }
}

#[test]
fn state_not_refreshed_on_a_dead_network_is_kept_for_the_next_network() {
    for mobile_one in [true, false] {
        let mut client = if mobile_one { mobile() } else { allocated(0, 3600) };
        client.permit(0, peer().ip()).unwrap();
        grant(&mut client, 0, 0);
        let number = client.bind_channel(0, peer()).unwrap();
        grant(&mut client, 0, 0);
        let other = "203.0.113.200".parse().unwrap();
        client.permit(0, other).unwrap();
        let (_, failed) = until_failure(&mut client, 0);
        assert!(matches!(failed, Event::Failed { request: Request::Permit(peer), .. } if peer == other));
        let (mut now, mut failures) = (0, 0);
        while failures < 2 {
            let (later, failed) = until_failure(&mut client, now);
            now = later;
            failures += u32::from(matches!(
                failed,
                Event::Failed {
                    request: Request::Permit(_) | Request::Bind(..),
                    failure: Failure::Timeout { .. }
                }
            ));
        }
        assert_eq!(client.channel(peer()), mobile_one.then_some(number));
        if !mobile_one {
            continue;
        }
        client.migrate(now).unwrap();
        let moved = request(&mut client);
        client.handle_datagram(now, &success_with_ticket(&moved, b"second"));
        client.handle_timeout(now);
        let mut asked = Vec::new();
        while let Some(bytes) = client.poll_transmit() {
            let message = Message::from_bytes(bytes).unwrap();
            asked.push(message.method());
        }
        let wanted = [turn_types::message::CREATE_PERMISSION, turn_types::message::CHANNEL_BIND];
        assert!(wanted.iter().all(|method| asked.contains(method)) && asked.len() == 2, "{asked:?}");
    }
}

#[test]
fn migration_requires_a_ticket() {
    let mut client = allocated(0, 600);
    assert_eq!(client.migrate(1), Err(RequestError::NoTicket));
    assert_eq!(client_support::client().migrate(1), Err(RequestError::NoAllocation));
}

#[test]
fn a_redirect_is_reported_with_the_servers_name() {
    let mut client = client();
    client.allocate(0).unwrap();
    let first = request(&mut client);
    let first = Message::from_bytes(&first).unwrap();
    let mut response = Message::builder_error(&first, MessageWriteVec::new());
    let other = "203.0.113.77:3479".parse().unwrap();
    response.add_attribute(&ErrorCode::builder(300).build().unwrap()).unwrap();
    response.add_attribute(&AlternateServer::new(other)).unwrap();
    response.add_attribute(&AlternateDomain::new("b.example.org")).unwrap();
    let response = response.finish();
    assert_eq!(client.handle_datagram(1, &response), Incoming::Control);
    let failure = Failure::TryAlternate { server: other, domain: Some("b.example.org".to_owned()) };
    assert_eq!(event(&mut client), Event::Failed { request: Request::Allocate, failure });
}

#[test]
fn an_access_token_replaces_a_password() {
    let access = AccessToken { token: b"opaque".to_vec(), mac_key: vec![7; 20] };
    let config = Config { access_token: Some(access), ..Config::new("key-1", "") };
    let mut client = Client::new(Arc::new(config), turnpike_turn::random::Seed([9; 32]));
    client.allocate(0).unwrap();
    let first = request(&mut client);
    client.handle_datagram(0, &challenge(&first, 401, PLAIN_NONCE, None));
    let second = request(&mut client);
    let message = Message::from_bytes(&second).unwrap();
    let token = message.raw_attribute(AttributeType::new(0x001B)).expect("ACCESS-TOKEN");
    assert_eq!(&*token.value, b"opaque");
    let key: MessageIntegrityCredentials = ShortTermCredentials::new("\x07".repeat(20)).into();
    assert_eq!(message.validate_integrity(&key).ok(), Some(IntegrityAlgorithm::Sha1));
    // Other requests do not carry the token (RFC 7635 section 9).
    let answer = |request: &[u8], ticket: &[u8]| {
        let message = Message::from_bytes(request).unwrap();
        let mut response = Message::builder_success(&message, MessageWriteVec::new());
        if message.has_method(ALLOCATE) {
            response.add_attribute(&XorRelayedAddress::new(relayed(), message.transaction_id())).unwrap();
        }
        response.add_attribute(&Lifetime::new(600)).unwrap();
        response.add_attribute(&RawAttribute::new(TICKET, ticket)).unwrap();
        response.add_message_integrity(&key, IntegrityAlgorithm::Sha1).unwrap();
        response.finish()
    };
    let shows = |request: &[u8]| {
        let message = Message::from_bytes(request).unwrap();
        assert!(message.validate_integrity(&key).is_ok());
        message.has_attribute(AttributeType::new(0x001B))
    };
    client.handle_datagram(0, &answer(&second, b"ticket"));
    client.permit(0, peer().ip()).unwrap();
    assert!(!shows(&request(&mut client)));
    client.bind_channel(0, peer()).unwrap();
    assert!(!shows(&request(&mut client)));
    client.migrate(0).unwrap();
    let moved = request(&mut client);
    assert!(shows(&moved) && ticket_of(&moved).is_some());
    let connection = turnpike_turn::client::ConnectionId(7);
    assert!(!shows(&client.data_connection(connection).poll_transmit().unwrap()));
    client.delete(0).unwrap();
    assert!(shows(&request(&mut client)));
}
