//! Clients that the server refuses by address, and servers that answer only Binding requests.

use std::{net::IpAddr, sync::Arc};

use crate::common::*;
use turnpike_turn::server::{ClientNetwork, ClientNetworks, ClientRules, Country, Method};

fn denying(prefix: &str) -> ServerConfig {
    let clients = ClientRules { deny: vec![prefix.parse().unwrap()], ..ClientRules::default() };
    ServerConfig { clients, ..config() }
}

#[test]
fn requests_of_refused_clients_are_dropped_and_counted() {
    let mut world = World::with(denying("192.0.2.0/24"));
    for request in [Ask::new(BINDING), Ask::allocate()] {
        assert_eq!(world.feed(&request.bytes()), Outcome::Drop(DropReason::ClientRefused));
    }
    // Without an allocation, data is dropped in any case.
    for data in [Ask::send("198.51.100.1:9", b"x"), channel_data(0x4000, b"x")] {
        assert_eq!(world.feed(&data), Outcome::Drop(DropReason::NoAllocation));
    }
    assert_eq!(world.dropped(DropReason::ClientRefused), 2);
    world.client.address = address("198.51.100.7:40000");
    world.ask(&Ask::new(BINDING)).success();
}

#[test]
fn reload_ends_the_allocations_of_refused_clients() {
    for (deny, left) in [("198.51.100.0/24", 1), ("192.0.2.7", 0)] {
        let mut world = World::new();
        world.allocated();
        world.server.reconfigure(world.now, denying(deny).into());
        assert_eq!(world.server.allocations(), left, "{deny}");
    }
}

#[test]
fn stun_only_server_forbids_all_requests_but_binding() {
    let mut world = World::with(ServerConfig { stun_only: true, ..config() });
    world.ask(&Ask::new(BINDING)).success();
    let peer = "198.51.100.1:9";
    for ask in [Ask::allocate(), Ask::refresh(1), Ask::permit(peer), Ask::bind(0x4000, peer)] {
        let reply = world.ask(&ask);
        assert_eq!(reply.code(), Some(403));
        assert!(reply.0.len() <= 28, "too long for an address that may be forged: {} bytes", reply.0.len());
    }
    assert_eq!(world.server.allocations(), 0);
}

#[test]
fn binding_may_need_credentials() {
    let mut world = World::with(ServerConfig { authenticate_binding: true, ..config() });
    assert_eq!(world.ask(&Ask::new(BINDING)).code(), Some(401));
    for scheme in [Scheme::Md5, Scheme::Sha256] {
        let alice = world.credentials("alice", scheme);
        let reply = world.ask(&Ask::new(BINDING).signed(&alice)).success();
        assert!(reply.is_signed(&alice));
        assert_eq!(reply.mapped(), world.client.address);
    }
    let classic = [&[0, 1, 0, 0][..], &[9; 16]].concat();
    assert_eq!(world.feed(&classic), Outcome::Drop(DropReason::ClassicStun));
}

/// All addresses within 192.0.2.0/24 are in Germany and in AS 64500.
#[derive(Debug)]
struct Germany;

impl ClientNetworks for Germany {
    fn network(&self, client: IpAddr) -> ClientNetwork {
        let is_known = client.to_string().starts_with("192.0.2.");
        if is_known {
            ClientNetwork { country: Country::new("DE"), asn: Some(64500) }
        } else {
            ClientNetwork::default()
        }
    }
}

#[test]
fn allocations_of_a_refused_network_get_403_and_are_reported() {
    for rule in ["country:DE", "AS64500"] {
        let config = ServerConfig { networks: Some(Arc::new(Germany)), ..denying(rule) };
        let mut world = World::with(config);
        world.ask(&Ask::new(BINDING)).success();
        let alice = world.credentials("alice", Scheme::Md5);
        let ask = Ask::allocate().signed(&alice);
        assert_eq!(world.ask(&ask).code(), Some(403), "{rule}");
        let told = world.all_effects().into_iter().any(|effect| {
            matches!(
                effect,
                Effect::RequestRefused {
                    proved: true,
                    method: Method::Allocate,
                    code: 403,
                    why: RequestRefusal::ClientNetwork,
                    ..
                }
            )
        });
        assert!(told, "{rule}");
        assert_eq!((world.server.stats().network_refusals, world.server.allocations()), (1, 0));
        world.client.address = address("198.51.100.7:40000");
        world.allocated();
    }
}

#[test]
fn rules_on_networks_leave_existing_allocations_alone() {
    let mut world = World::new();
    world.allocated();
    let config = ServerConfig { networks: Some(Arc::new(Germany)), ..denying("country:DE") };
    world.server.reconfigure(world.now, config.into());
    assert_eq!(world.server.allocations(), 1);
}

#[test]
fn rules_on_networks_without_a_database_match_no_client() {
    let mut world = World::with(denying("country:DE"));
    world.allocated();
    let clients = ClientRules { allow: vec!["country:DE".parse().unwrap()], ..ClientRules::default() };
    let mut world = World::with(ServerConfig { clients, ..config() });
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(403));
}
