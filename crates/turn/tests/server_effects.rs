//! Effects for each new, refreshed and ended allocation, permission and channel, in order.

use crate::common::*;
use turnpike_turn::wire::channel_data::ChannelNumber;

const OTHER: &str = "198.41.0.5:7000";

#[test]
fn each_creation_refresh_and_end_has_one_effect() {
    let mut world = World::with(ServerConfig { channels_permit: false, ..config() });
    let (alice, relay) = world.allocated();
    let (allocation, start) = (relay.allocation, world.now.ms);
    let (peer, number) = (address(PEER), ChannelNumber::MIN);
    let permitted = |at: u64, renewed| Effect::Permitted {
        allocation,
        peer: peer.ip(),
        expires_ms: start + at + 300_000,
        renewed,
    };
    let bound = |at: u64, renewed| Effect::Bound {
        allocation,
        number,
        peer,
        at: peer,
        expires_ms: start + at + 600_000,
        renewed,
    };

    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert_eq!(world.all_effects(), [permitted(0, false), bound(0, false)]);
    world.sleep(100);
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    world.ask(&Ask::refresh(1200).signed(&alice)).success();
    let renewed = Effect::Renewed { allocation, family: None, expires_ms: start + 1_300_000 };
    assert_eq!(world.all_effects(), [permitted(100_000, true), renewed]);
    // The permission ends before the channel and is installed again when the channel is refreshed.
    world.sleep(300);
    assert_eq!(world.all_effects(), [Effect::PermissionEnded { allocation, peer: peer.ip() }]);
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert_eq!(world.all_effects(), [permitted(400_000, false), bound(400_000, true)]);
    world.sleep(300);
    world.all_effects();
    world.sleep(300);
    assert_eq!(world.all_effects(), [Effect::Unbound { allocation, number, peer }]);
    world.sleep(300);
    assert!(matches!(
        world.all_effects()[..],
        [Effect::Closed { reason: ClosedReason::Expired, lived_ms: 1_300_000, .. }]
    ));
}

#[test]
fn first_use_of_a_channel_is_reported_once_if_enabled() {
    let mut world = World::new();
    world.server.tell_first_use();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::bind(0x4001, OTHER).signed(&alice)).success();
    world.all_effects();
    let used =
        |number| Effect::Used { allocation: relay.allocation, number: ChannelNumber::new(number).unwrap() };

    // Neither an indication nor a dropped datagram counts as a use.
    assert!(world.feed(&Ask::send(PEER, b"x")).goes_to_peer());
    assert_eq!(world.feed(&channel_data(0x4002, b"x")), Outcome::Drop(DropReason::UnboundChannel));
    assert_eq!(world.all_effects(), []);
    // One channel is first used by the client, the other by the peer.
    assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
    assert!(world.peer_sends(relay, OTHER, b"x").goes_to_client());
    assert_eq!(world.all_effects(), [used(0x4000), used(0x4001)]);
    let both_ways = |world: &mut World| {
        for (number, peer) in [(0x4000, PEER), (0x4001, OTHER)] {
            assert!(world.feed(&channel_data(number, b"x")).goes_to_peer());
            assert!(world.peer_sends(relay, peer, b"x").goes_to_client());
        }
        let mut effects = world.all_effects();
        effects.retain(|effect| matches!(effect, Effect::Used { .. }));
        effects
    };
    assert_eq!(both_ways(&mut world), []);
    world.ask(&Ask::refresh(1200).signed(&alice)).success();
    world.sleep(250);
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::permit(OTHER).signed(&alice)).success();
    assert_eq!(both_ways(&mut world), []);
    world.sleep(350);
    let alice = world.credentials("alice", Scheme::Md5);
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::bind(0x4001, OTHER).signed(&alice)).success();
    assert_eq!(both_ways(&mut world), [used(0x4001)]);
}

#[test]
fn channels_from_another_process_start_as_unused() {
    let mut world = World::new();
    let mut there = World::new();
    there.server.tell_first_use();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
    assert!(
        world.all_effects().iter().all(|effect| !matches!(effect, Effect::Used { .. })),
        "first uses are reported although this is disabled"
    );
    let moved = world.server.snapshot(world.now, relay.allocation).unwrap();
    let allocation = there.server.restore(there.now, moved, Link::default()).unwrap();
    there.all_effects();
    there.feed(&channel_data(0x4000, b"x"));
    let number = ChannelNumber::MIN;
    assert_eq!(there.all_effects(), [Effect::Used { allocation, number }]);
}

#[test]
fn new_peer_rules_emit_effects_for_ended_bindings() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::permit("192.5.5.241:0").signed(&alice)).success();
    world.all_effects();
    let deny = PeerRules { deny: vec!["198.41.0.0/24".parse().unwrap()], ..PeerRules::default() };
    world.server.reconfigure(world.now, Arc::new(ServerConfig { peers: deny, ..config() }));
    let allocation = relay.allocation;
    let ended = world.all_effects();
    assert!(
        matches!(
            ended[..],
            [
                Effect::PermissionEnded { allocation: one, peer: ip },
                Effect::Unbound { allocation: two, peer, .. }
            ] if (one, two, ip, peer) == (allocation, allocation, address(PEER).ip(), address(PEER))
        ),
        "{ended:?}"
    );
}
