//! Bandwidth limits on the packet path, with exact counts in virtual time.

use crate::common::*;
use turnpike_turn::server::{RateLevel, Way};

const PERMITTED: &str = "198.41.0.5:7000";

fn limited(rates: Rates, total: Option<u64>) -> ServerConfig {
    let bandwidth = Bandwidth { rates, total, burst_ms: 100, realms: HashMap::new() };
    ServerConfig { bandwidth, ..streams() }
}

fn per_allocation(rate: u64) -> ServerConfig {
    limited(Rates { per_allocation: Some(rate), ..Rates::default() }, None)
}

/// Creates a client with a channel to one peer and a permission for another.
fn relaying(world: &mut World, client: Client, user: &str) -> RelayId {
    world.client = client;
    let user = world.credentials(user, Scheme::Md5);
    world.ask(&Ask::allocate().signed(&user)).success();
    let relay = world.last_opened();
    world.ask(&Ask::bind(0x4000, PEER).signed(&user)).success();
    world.ask(&Ask::permit(PERMITTED).signed(&user)).success();
    relay
}

fn passing(world: &mut World, client: Client) -> usize {
    world.client = client;
    let datagram = channel_data(0x4000, &[7; 1000]);
    (0..10_000).take_while(|_| matches!(world.feed(&datagram), Outcome::ToPeer { .. })).count()
}

#[test]
fn each_direction_has_the_full_rate_over_channels_and_indications() {
    // 1,000 bytes per millisecond, with a burst of 100,000.
    let mut world = World::with(per_allocation(8_000_000));
    let relay = relaying(&mut world, client(1), "alice");
    assert_eq!(passing(&mut world, client(1)), 100);
    let dropped = Outcome::Drop(DropReason::AllocationBandwidth);
    assert_eq!(world.feed(&Ask::send(PERMITTED, &[7; 1000])), dropped);
    for peer in [PEER, PERMITTED] {
        let passed =
            (0..50).filter(|_| matches!(world.peer_sends(relay, peer, &[7; 1000]), Outcome::ToClient { .. }));
        assert_eq!(passed.count(), 50, "the other direction");
    }
    assert_eq!(world.peer_sends(relay, PEER, &[7; 1000]), dropped);
    world.now.ms += 7;
    assert_eq!(passing(&mut world, client(1)), 7);
    assert!(
        matches!(world.feed(&Ask::send(PERMITTED, &[])), Outcome::ToPeer { .. }),
        "an empty payload is free"
    );
    let stats = world.server.stats();
    assert_eq!((stats.to_peer_bytes, stats.to_client_bytes), (107_000, 100_000));
    assert_eq!(world.dropped(DropReason::AllocationBandwidth), 4);
}

#[test]
fn drops_are_counted_by_the_limit_that_caused_them() {
    for (rates, total, reason) in [
        (Rates { per_user: Some(8_000_000), ..Rates::default() }, None, DropReason::UserBandwidth),
        (Rates { per_realm: Some(8_000_000), ..Rates::default() }, None, DropReason::RealmBandwidth),
        (Rates::default(), Some(8_000_000), DropReason::TotalBandwidth),
    ] {
        let mut world = World::with(limited(rates, total));
        for (port, user) in [(1, "alice"), (2, "alice"), (3, "bob")] {
            relaying(&mut world, client(port), user);
        }
        let passed: Vec<usize> = [1, 2, 3].map(|port| passing(&mut world, client(port))).to_vec();
        let (alice, bob) = (passed[0] + passed[1], passed[2]);
        if reason == DropReason::UserBandwidth {
            assert_eq!((alice, bob), (100, 100), "each user has the full rate");
        } else {
            assert_eq!(alice + bob, 100, "{reason:?}");
        }
        assert!(world.dropped(reason) > 0 && world.dropped(DropReason::AllocationBandwidth) == 0);
    }
}

#[test]
fn workers_share_a_users_rate() {
    let config = limited(Rates { per_user: Some(80_000_000), ..Rates::default() }, None);
    let mut workers = World::workers(&config, 4);
    for (number, world) in (1..).zip(&mut workers) {
        relaying(world, client(number), "alice");
    }
    let (mut passed, start) = (0, workers[0].now.ms);
    for _ in 0..4000 {
        for (number, world) in (1..).zip(&mut workers) {
            world.now.ms += 1;
            world.client = client(number);
            for _ in 0..11 {
                passed += u64::from(matches!(
                    world.feed(&channel_data(0x4000, &[7; 1000])),
                    Outcome::ToPeer { .. }
                ));
            }
        }
    }
    // 10,000 bytes per millisecond, plus a burst of 1,000,000 and the leases of four workers.
    let brought = (workers[0].now.ms - start) * 10;
    assert!(passed >= brought * 99 / 100 && passed <= brought + 1000 + 4 * 40, "{passed} of {brought}");
}

#[test]
fn a_realm_may_have_its_own_rates_or_none() {
    let mut config = per_allocation(8_000_000);
    config.bandwidth.realms.insert(REALM.into(), Rates::default());
    let mut world = World::with(config);
    let relay = relaying(&mut world, client(1), "alice");
    assert_eq!(passing(&mut world, client(1)), 10_000);
    assert!(!world.server.is_limited(relay.allocation));
}

#[test]
fn data_from_a_stream_waits_instead_of_being_dropped() {
    let mut world = World::with(per_allocation(8_000_000));
    let relay = relaying(&mut world, stream(1), "alice");
    assert_eq!(passing(&mut world, stream(1)), 100);
    let until_ms = world.now.ms + 1;
    let otherwise = DropReason::AllocationBandwidth;
    let datagram = channel_data(0x4000, &[7; 1000]);
    assert_eq!(world.feed(&datagram), Outcome::Wait { until_ms, otherwise });
    assert_eq!(world.feed(&Ask::send(PERMITTED, &[7; 1000])), Outcome::Wait { until_ms, otherwise });
    world.now.ms = until_ms;
    assert!(world.feed(&datagram).goes_to_peer(), "fed again");
    assert_eq!(world.server.stats().bandwidth_pauses, [3, 0, 0, 0], "including the first pause");
    assert_eq!(world.dropped(DropReason::AllocationBandwidth), 0);
    world.server.not_waited(otherwise);
    assert_eq!(world.dropped(DropReason::AllocationBandwidth), 1);
    // Peers send datagrams regardless of the client's transport.
    let to_client = (0..101).map(|_| world.peer_sends(relay, PEER, &[7; 1000])).last();
    assert_eq!(to_client, Some(Outcome::Drop(DropReason::AllocationBandwidth)));
}

#[test]
fn connections_use_the_same_buckets_and_return_unused_bytes() {
    let mut world = World::with(limited(
        Rates { per_allocation: Some(8_000_000), per_user: Some(16_000_000), ..Rates::default() },
        None,
    ));
    let (_, relay) = world.allocated_tcp();
    let (now, id) = (world.now, relay.allocation);
    let server = &mut world.server;
    assert_eq!(server.take_bytes(now, id, Way::ToPeer, 60_000), Ok(60_000));
    server.give_back_bytes(id, Way::ToPeer, 20_000);
    assert_eq!(server.take_bytes(now, id, Way::ToPeer, 1 << 30), Ok(60_000));
    let held_up = server.take_bytes(now, id, Way::ToPeer, 1).expect_err("nothing is left");
    assert!(held_up.level == RateLevel::Allocation && held_up.until_ms > now.ms);
    assert_eq!(server.take_bytes(now, id, Way::ToClient, 10), Ok(10));
    assert_eq!(server.stats().bandwidth_pauses, [1, 0, 0, 0]);
    let stranger = AllocationSlot { index: 77, generation: 0 };
    assert_eq!(
        server.take_bytes(now, stranger, Way::ToPeer, 5),
        Ok(5),
        "an unknown allocation has no limits"
    );
}

#[test]
fn a_reload_changes_rates_without_granting_a_new_burst() {
    let mut world = World::with(per_allocation(8_000_000));
    let relay = relaying(&mut world, client(1), "alice");
    assert_eq!(passing(&mut world, client(1)), 100);
    world.server.reconfigure(world.now, per_allocation(80_000_000).into());
    assert_eq!(passing(&mut world, client(1)), 0);
    world.now.ms += 1;
    assert_eq!(passing(&mut world, client(1)), 10);
    world.server.reconfigure(world.now, streams().into());
    assert_eq!(passing(&mut world, client(1)), 10_000);
    assert!(!world.server.is_limited(relay.allocation));
    let user = limited(Rates { per_user: Some(8_000_000), ..Rates::default() }, None);
    world.server.reconfigure(world.now, user.clone().into());
    assert_eq!(passing(&mut world, client(1)), 100, "the user's limit has a full burst");
    world.server.reconfigure(world.now, user.into());
    assert_eq!(passing(&mut world, client(1)), 0);
    world.server.reconfigure(world.now, per_allocation(8_000_000).into());
    assert_eq!(passing(&mut world, client(1)), 100, "a new limit starts with a full burst");
}

#[test]
fn a_users_new_allocation_gets_no_extra_burst() {
    let mut world = World::with(limited(Rates { per_user: Some(8_000_000), ..Rates::default() }, None));
    relaying(&mut world, client(1), "alice");
    assert_eq!(passing(&mut world, client(1)), 100);
    world.ask_as("alice", Ask::refresh(0)).success();
    relaying(&mut world, client(1), "alice");
    assert_eq!(passing(&mut world, client(1)), 0);
}

#[test]
fn a_bandwidth_limit_does_not_replace_peer_rules_or_channel_checks() {
    let mut config = per_allocation(8_000_000);
    config.peers = PeerRules { deny: vec!["198.41.0.5".parse().unwrap()], ..PeerRules::default() };
    let mut world = World::with(config);
    world.client = client(1);
    world.ask_as("alice", Ask::allocate()).success();
    assert_eq!(world.feed(&Ask::send(PERMITTED, b"x")), Outcome::Drop(DropReason::PeerRefused));
    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::UnboundChannel));
}
