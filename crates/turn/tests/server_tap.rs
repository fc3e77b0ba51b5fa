//! Captures of relayed datagrams.

use std::sync::{Arc, Mutex};

use crate::common::*;
use turnpike_turn::server::{Tap, TapRefusal, TappedDatagram, Way};

const PERMITTED: &str = "198.41.0.5:7000";

/// Direction, peer, and lengths of header and payload.
type Seen = Arc<Mutex<Vec<(Way, SocketAddr, usize, Vec<u8>)>>>;

#[derive(Debug, Default)]
struct Recorder(Seen);

impl Tap for Recorder {
    fn relayed(&mut self, datagram: &TappedDatagram<'_>) {
        let TappedDatagram { way, client, peer, header, payload, .. } = *datagram;
        assert_eq!(client.address, address("192.0.2.7:40000"));
        self.0.lock().unwrap().push((way, peer, header.len(), payload.to_vec()));
    }
}

fn tap(world: &mut World, relay: RelayId) -> (Seen, Result<(), TapRefusal>) {
    let seen = Seen::default();
    let slot = relay.allocation.index;
    let id = world.server.view(world.now, slot).expect("an allocation").id();
    let begun = world.server.tap(slot, id, Box::new(Recorder(Arc::clone(&seen))));
    (seen, begun)
}

fn untap(world: &mut World, relay: RelayId) {
    let slot = relay.allocation.index;
    let id = world.server.view(world.now, slot).expect("an allocation").id();
    world.server.untap(slot, id);
}

/// Sends a datagram in each direction over the channel and over the permission.
fn talk(world: &mut World, relay: RelayId) {
    assert!(world.feed(&channel_data(0x4000, b"one")).goes_to_peer());
    assert!(world.feed(&Ask::send(PERMITTED, b"two")).goes_to_peer());
    assert!(world.peer_sends(relay, PEER, b"three").goes_to_client());
    assert!(world.peer_sends(relay, PERMITTED, b"four").goes_to_client());
}

fn relaying(config: ServerConfig) -> (World, RelayId) {
    let mut world = World::with(config);
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::permit(PERMITTED).signed(&alice)).success();
    (world, relay)
}

#[test]
fn tap_gets_each_relayed_datagram_with_its_header() {
    let (mut world, relay) = relaying(config());
    talk(&mut world, relay);
    let (seen, begun) = tap(&mut world, relay);
    assert_eq!(begun, Ok(()));
    talk(&mut world, relay);
    let expected = [
        (Way::ToPeer, PEER, 4, "one"),
        // 20 bytes of STUN, 12 for XOR-PEER-ADDRESS, 4 before the data.
        (Way::ToPeer, PERMITTED, 36, "two"),
        (Way::ToClient, PEER, 4, "three"),
        (Way::ToClient, PERMITTED, 36, "four"),
    ];
    let expected =
        expected.map(|(way, peer, header, text)| (way, address(peer), header, text.as_bytes().to_vec()));
    assert_eq!(*seen.lock().unwrap(), expected);
    world.feed(&channel_data(0x4001, b"unbound"));
    assert_eq!(seen.lock().unwrap().len(), 4, "dropped datagrams are not captured");
    untap(&mut world, relay);
    talk(&mut world, relay);
    assert_eq!((seen.lock().unwrap().len(), Arc::strong_count(&seen)), (4, 1));
}

#[test]
fn tapped_allocation_counts_as_limited_until_the_capture_ends() {
    let (mut world, relay) = relaying(config());
    let limits = |world: &mut World| {
        let effects = world.all_effects().into_iter();
        effects
            .filter(
                |effect| matches!(effect, Effect::Limited { allocation } if *allocation == relay.allocation),
            )
            .count()
    };
    assert!(!world.server.is_limited(relay.allocation));
    let (_, begun) = tap(&mut world, relay);
    assert_eq!((begun, limits(&mut world), world.server.is_limited(relay.allocation)), (Ok(()), 1, true));
    assert_eq!(tap(&mut world, relay).1, Err(TapRefusal::Tapped));
    untap(&mut world, relay);
    assert_eq!((limits(&mut world), world.server.is_limited(relay.allocation)), (1, false));
}

#[test]
fn capture_and_limits_survive_each_other() {
    let limited = |rate| {
        let rates = Rates { per_allocation: rate, ..Rates::default() };
        ServerConfig { bandwidth: Bandwidth { rates, ..Bandwidth::default() }, ..config() }
    };
    let (mut world, relay) = relaying(config());
    let (seen, _) = tap(&mut world, relay);
    for rate in [Some(8_000_000), None] {
        world.server.reconfigure(world.now, limited(rate).into());
        talk(&mut world, relay);
        assert!(world.server.is_limited(relay.allocation));
    }
    assert_eq!(seen.lock().unwrap().len(), 8);
    world.server.reconfigure(world.now, limited(Some(8_000_000)).into());
    untap(&mut world, relay);
    assert!(world.server.is_limited(relay.allocation), "by its rate");
}

#[test]
fn only_the_named_allocation_is_captured() {
    let (mut world, relay) = relaying(config());
    let slot = relay.allocation.index;
    let other = "0".repeat(32).parse().unwrap();
    assert_eq!(world.server.tap(slot, other, Box::<Recorder>::default()), Err(TapRefusal::Gone));
    assert_eq!(world.server.tap(slot + 1, other, Box::<Recorder>::default()), Err(TapRefusal::Gone));
    let mut world = World::with(streams());
    let (_, relay) = world.allocated_tcp();
    assert_eq!(tap(&mut world, relay).1, Err(TapRefusal::RelaysTcp));
}
