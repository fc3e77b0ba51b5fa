//! Unguessable values look random according to [`turnpike_testkit::randomness`].

use std::net::Ipv4Addr;

use crate::common::{turn::*, *};
use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use turnpike_testkit::randomness::{SAMPLES, judge};

fn clients() -> impl Iterator<Item = Client> {
    let address = |number: usize| Ipv4Addr::from(0xC633_0000 + u32::try_from(number).unwrap());
    (0..SAMPLES)
        .map(move |number| Client { address: SocketAddr::new(address(number).into(), 4000), ..client(1) })
}

/// Cookie, features and time are public; the last 30 bits are the MAC.
#[test]
fn the_secret_part_of_nonces_looks_random() {
    let mut world = World::new();
    let nonces = clients().map(|client| {
        world.client = client;
        let nonce = world.ask(&Ask::allocate()).get::<Nonce>().nonce().to_owned();
        let bytes = STANDARD_NO_PAD.decode(&nonce[13..]).unwrap();
        bytes[bytes.len() - 4..].to_vec()
    });
    judge(&nonces.collect::<Vec<_>>(), &[0x3F, 0xFF, 0xFF, 0xFF]).unwrap();
}

/// The last bit is the family.
#[test]
fn reservation_tokens_look_random() {
    let mut world = World::with(ServerConfig { authenticate: false, ..config() });
    world.server.policy_mut().total = SAMPLES;
    let tokens = clients().map(|client| {
        world.client = client;
        let reply = world.ask(&Ask::allocate().with(&EvenPort::new(true))).success();
        reply.get::<ReservationToken>().token().to_be_bytes().to_vec()
    });
    judge(&tokens.collect::<Vec<_>>(), &[255, 255, 255, 255, 255, 255, 255, 0xFE]).unwrap();
}

/// A typo must not end another allocation: no two IDs are similar.
#[test]
fn allocation_ids_look_random() {
    let mut world = World::with(ServerConfig { authenticate: false, ..config() });
    world.server.policy_mut().total = SAMPLES;
    let names = (0..).zip(clients()).map(|(slot, client)| {
        world.client = client;
        world.ask(&Ask::allocate()).success();
        let name = world.server.view(world.now, slot).unwrap().id().to_string();
        u128::from_str_radix(&name, 16).unwrap().to_be_bytes().to_vec()
    });
    judge(&names.collect::<Vec<_>>(), &[0xFF; 16]).unwrap();
}

#[test]
fn mobility_tickets_look_random() {
    let mut world = World::with(ServerConfig { authenticate: false, mobility: true, ..streams() });
    world.server.policy_mut().total = SAMPLES;
    let tickets = clients().map(|client| {
        world.client = client;
        world.ask(&Ask::allocate().raw(TICKET, &[])).success().ticket().unwrap()
    });
    // No byte of a ticket is zero, but this number of samples is too small to show that.
    judge(&tickets.collect::<Vec<_>>(), &[255; 32]).unwrap();
}

/// The upper bits are the worker number, which leaves 22 bits: IDs will repeat, but never among live
/// connections.
#[test]
fn connection_ids_look_random() {
    let config = ServerConfig {
        authenticate: false,
        limits: ServerLimits {
            peer_connections_per_allocation: SAMPLES,
            peer_connections: SAMPLES,
            peer_connections_per_user: SAMPLES,
            ..ServerLimits::default()
        },
        ..streams()
    };
    let mut world = World::with(config);
    world.client = stream(41_000);
    world.ask(&Ask::allocate_tcp()).success();
    let mut seen = std::collections::HashSet::new();
    let ids = (0..SAMPLES).map(|number| {
        let peer = SocketAddr::new("198.41.0.4".parse().unwrap(), 1024 + u16::try_from(number).unwrap());
        let id = world.connecting(&Ask::connect(&peer.to_string())).connection.0;
        assert!(seen.insert(id), "{id:#x} is in use");
        id.to_be_bytes().to_vec()
    });
    judge(&ids.collect::<Vec<_>>(), &[0, 0x3F, 255, 255]).unwrap();
}
