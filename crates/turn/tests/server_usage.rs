//! Reports for the usage ledger: each byte is reported once, across moves and at the end.

use crate::common::*;
use turnpike_turn::server::{AllocationUsage, RequestRefusal, UsageReport, VolumeLimits};

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

#[test]
fn a_used_up_volume_quota_refuses_new_allocations_only() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    world.server.policy_mut().volume.set(VolumeLimits { refuse: true, per_user: None });
    world.ask(&Ask::refresh(600).signed(&alice)).success();
    world.client = client(2);
    world.all_effects();
    assert_eq!(world.ask_as("alice", Ask::allocate()).code(), Some(486));
    let is_told = |effect: &Effect| {
        matches!(effect, Effect::RequestRefused { code: 486, why: RequestRefusal::VolumeQuota, .. })
    };
    assert!(world.all_effects().iter().any(is_told));
    assert_eq!(world.server.stats().volume_refusals, 1);
    world.client = client(3);
    world.ask_as("bob", Ask::allocate()).success();
    world.server.policy_mut().volume.take();
    world.client = client(2);
    world.ask_as("alice", Ask::allocate()).success();
}

#[test]
fn a_used_up_volume_quota_slows_open_allocations_until_it_is_reset() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.effects();
    let passes = |world: &mut World| {
        let datagram = channel_data(0x4000, &[7; 1000]);
        (0..300).filter(|_| matches!(world.feed(&datagram), Outcome::ToPeer { .. })).count()
    };
    assert_eq!(passes(&mut world), 300);
    let slowed = || Effect::Limited { allocation: relay.allocation };
    world.server.policy_mut().volume.set(VolumeLimits { refuse: false, per_user: Some(1_000_000) });
    for effects in [vec![slowed()], vec![]] {
        world.server.report_usage(world.now, 0).expect("an open allocation");
        assert_eq!(world.effects(), effects, "once");
    }
    assert!(world.server.is_limited(relay.allocation));
    // The burst of a shared limit is at least 64 KiB.
    assert_eq!(passes(&mut world), 65);
    world.now.ms += 80;
    assert_eq!(passes(&mut world), 10);
    assert_eq!(world.dropped(DropReason::UserBandwidth), 235 + 290);
    world.server.policy_mut().volume.take();
    world.server.report_usage(world.now, 0).expect("an open allocation");
    assert_eq!((world.effects(), passes(&mut world)), (vec![slowed()], 300));
    assert!(!world.server.is_limited(relay.allocation));
}
