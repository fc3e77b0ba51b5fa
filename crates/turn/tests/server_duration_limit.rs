//! Maximum duration of an allocation: no Refresh extends it further.

use crate::common::*;
use turnpike_turn::server::MaxAllocationDuration;

fn aged(seconds: Option<u32>) -> ServerConfig {
    ServerConfig {
        max_allocation_duration: MaxAllocationDuration { seconds, realms: HashMap::new() },
        ..config()
    }
}

fn refreshed(world: &mut World) -> u32 {
    world.ask_as("alice", Ask::refresh(3600)).success().lifetime()
}

#[test]
fn an_allocation_ends_at_its_maximum_duration() {
    let mut world = World::with(aged(Some(5000)));
    world.allocated();
    assert_eq!(refreshed(&mut world), 3600);
    world.sleep(3000);
    assert_eq!(refreshed(&mut world), 2000, "the remaining time");
    world.sleep(1999);
    assert_eq!(refreshed(&mut world), 2, "libnice refreshes immediately after a LIFETIME of 1");
    world.now.ms += 700;
    assert_eq!(refreshed(&mut world), 2, "a LIFETIME of 0 would mean deletion");
    world.now.ms -= 700;
    world.sleep(1);
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(closed(&mut world), [(ClosedReason::MaxAge, 5_000_000)]);
    assert_eq!(world.server.stats().allocations_closed, [0, 0, 0, 0, 0, 1, 0, 0, 0]);
}

#[test]
fn an_unrefreshed_allocation_expires_as_usual() {
    let mut world = World::with(aged(Some(5000)));
    world.allocated();
    world.sleep(600);
    assert_eq!(closed(&mut world), [(ClosedReason::Expired, 600_000)]);
    let mut world = World::with(aged(Some(300)));
    assert_eq!(world.ask_as("alice", Ask::allocate()).success().lifetime(), 300);
    world.sleep(300);
    assert_eq!(closed(&mut world), [(ClosedReason::MaxAge, 300_000)]);
}

#[test]
fn a_reload_applies_the_new_maximum_to_existing_allocations() {
    let mut world = World::with(aged(None));
    world.allocated();
    assert_eq!(refreshed(&mut world), 3600);
    world.sleep(1000);
    world.server.reconfigure(world.now, aged(Some(1500)).into());
    assert_eq!(refreshed(&mut world), 500);
    world.server.reconfigure(world.now, aged(Some(9000)).into());
    assert_eq!(refreshed(&mut world), 3600);
    world.server.reconfigure(world.now, aged(Some(900)).into());
    world.sleep(1);
    assert_eq!(closed(&mut world), [(ClosedReason::MaxAge, 1_001_000)]);
}

#[test]
fn a_realm_may_have_its_own_maximum_duration() {
    let realms = HashMap::from([(REALM.into(), None)]);
    let config = ServerConfig {
        max_allocation_duration: MaxAllocationDuration { seconds: Some(600), realms },
        ..config()
    };
    let mut world = World::with(config);
    world.allocated();
    assert_eq!(refreshed(&mut world), 3600, "none");
}

#[test]
fn both_families_end_at_the_maximum_duration() {
    let mut world = World::with(aged(Some(1000)));
    world.ask_as("alice", Ask::allocate().raw(0x8000, &[2, 0, 0, 0])).success();
    assert_eq!(refreshed(&mut world), 1000);
    world.sleep(999);
    assert_eq!(world.server.allocations(), 1);
    world.sleep(1);
    assert_eq!(closed(&mut world), [(ClosedReason::MaxAge, 1_000_000)]);
}
