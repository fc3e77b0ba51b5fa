//! Counters show each event immediately, under the labels used by dashboards.

use crate::common::*;
use turnpike_turn::server::{Stats, stats::ERROR_CODES};

fn value(stats: &Stats, family: &str, label: Option<(&str, &str)>) -> u64 {
    let found = stats.counters().find(|(name, with, _)| *name == family && *with == label);
    found.unwrap_or_else(|| panic!("no {family} {label:?}")).2
}

#[test]
fn events_are_counted_under_their_labels() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice));
    world.ask(&Ask::bind(0x4000, "10.0.0.1:1").signed(&alice));
    world.feed(&channel_data(0x4000, b"four"));
    world.peer_sends(relay, PEER, b"five5");
    world.feed(&[0x80]);
    world.ask(&Ask::refresh(0).signed(&alice));
    let stats = world.server.stats();
    for (family, label, expected) in [
        ("relayed_datagrams", Some(("direction", "to_peer")), 1),
        ("relayed_bytes", Some(("direction", "to_peer")), 4),
        ("relayed_datagrams", Some(("direction", "to_client")), 1),
        ("relayed_bytes", Some(("direction", "to_client")), 5),
        ("requests", Some(("method", "allocate")), 2),
        ("successes", Some(("method", "allocate")), 1),
        ("requests", Some(("method", "channel_bind")), 2),
        ("successes", Some(("method", "channel_bind")), 1),
        ("error_responses", Some(("code", "401")), 1),
        ("error_responses", Some(("code", "403")), 1),
        ("dropped_datagrams", Some(("reason", "not_stun")), 1),
        ("allocations_opened", None, 1),
        ("allocations_closed", Some(("reason", "deleted")), 1),
        ("nonces_issued", None, 1),
    ] {
        assert_eq!(value(stats, family, label), expected, "{family} {label:?}");
    }
}

#[test]
fn every_request_counts_as_success_error_open_or_drop() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    for ask in
        [Ask::refresh(1), Ask::permit(PEER), Ask::permit(PEER_V6), Ask::bind(1, PEER), Ask::new(BINDING)]
    {
        world.ask(&ask.signed(&alice));
    }
    let stats = world.server.stats();
    let sum = |counters: &[u64]| counters.iter().sum::<u64>();
    assert_eq!(sum(&stats.requests), sum(&stats.successes) + sum(&stats.errors));
    assert_eq!(sum(&stats.drops), 0);
    assert_eq!(ERROR_CODES.iter().map(|(code, _)| stats.errors_with(*code)).sum::<u64>(), sum(&stats.errors));
    assert_eq!(stats.dropped(DropReason::Malformed), 0);
}
