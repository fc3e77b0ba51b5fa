//! Reports for the usage ledger: each byte is reported once, across moves and at the end.

use crate::common::*;
use turnpike_turn::server::{AllocationUsage, UsageReport};

fn usage(lived_ms: u64, to_peer: (u64, u64), to_client: (u64, u64)) -> AllocationUsage {
    AllocationUsage { lived_ms, to_peer, to_client }
}

fn last(world: &mut World) -> (bool, AllocationUsage) {
    let effects = world.effects();
    let effect = effects.last().expect("an effect");
    let report = UsageReport::of_ended(effect).expect("an ended allocation");
    (report.is_first, report.usage)
}

#[test]
fn a_report_contains_only_the_increase_since_the_previous_one() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.feed(&channel_data(0x4000, b"seven b"));
    world.sleep(5);
    let report = world.server.report_usage(world.now, 0).expect("an open allocation");
    assert_eq!((report.username, report.identity, &**report.realm), ("alice", "alice", REALM));
    assert_eq!((report.is_first, report.usage), (true, usage(5000, (1, 7), (0, 0))));
    world.peer_sends(relay, PEER, b"xy");
    world.sleep(1);
    let report = world.server.report_usage(world.now, 0).expect("an open allocation");
    assert_eq!((report.is_first, report.usage), (false, usage(1000, (0, 0), (1, 2))));
    assert!(world.server.report_usage(world.now, 1).is_none(), "no such slot");

    world.feed(&channel_data(0x4000, b"four"));
    world.sleep(2);
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    assert_eq!(last(&mut world), (false, usage(2000, (1, 4), (0, 0))));
}

#[test]
fn an_allocation_that_ends_before_its_first_report_is_reported_in_full() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    world.sleep(3);
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    assert_eq!(last(&mut world), (true, usage(3000, (0, 0), (0, 0))));
}

#[test]
fn reported_usage_moves_to_another_process_with_the_allocation() {
    let mut here = World::new();
    let (alice, relay) = here.allocated();
    here.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    here.feed(&channel_data(0x4000, b"seven b"));
    here.sleep(5);
    here.server.report_usage(here.now, 0).expect("an open allocation");
    here.feed(&channel_data(0x4000, b"four"));

    let mut there = World::with(config());
    there.now.ms = 90_000;
    let moved = here.server.snapshot(here.now, relay.allocation).expect("an open allocation");
    let text = serde_json::to_string(&moved).unwrap();
    let moved = serde_json::from_str(&text).unwrap();
    let allocation = there.server.restore(there.now, moved, Link(7)).expect("below all quotas");
    there.now.ms += 250;
    let report = there.server.report_usage(there.now, allocation.index).expect("an open allocation");
    assert_eq!((report.is_first, report.usage), (false, usage(250, (1, 4), (0, 0))));
}
