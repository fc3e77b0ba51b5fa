//! Quality of media, through the packet path.

use crate::common::*;
use turnpike_testkit::rtp::RtpSender;
use turnpike_turn::server::{MeasuredFlow, QualityLevel, QualityReport};

const PERMITTED: &str = "198.41.0.5:7000";

fn measuring(quality: QualityLevel) -> (World, RelayId) {
    let mut world = World::with(ServerConfig { quality, ..config() });
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::permit(PERMITTED).signed(&alice)).success();
    (world, relay)
}

fn report(world: &mut World) -> Option<QualityReport> {
    world.server.report_quality(0)
}

/// A call of ten seconds: the uplink loses every tenth datagram, the downlink every 25th.
fn talk(world: &mut World, relay: RelayId) {
    let (mut up, mut down) = (RtpSender::new(1, 65_400), RtpSender::new(2, 9));
    let began = world.now.ms;
    for number in 0..500 {
        let at = std::time::Duration::from_millis(world.now.ms - began);
        let (sent, received) = (up.datagram(at, 100), down.datagram(at, 100));
        if number % 10 != 5 {
            // Over the channel and by indications.
            let message =
                if number % 2 == 0 { channel_data(0x4000, &sent) } else { Ask::send(PERMITTED, &sent) };
            assert!(world.feed(&message).goes_to_peer());
        }
        if number % 25 != 7 {
            let peer = if number % 2 == 0 { PEER } else { PERMITTED };
            assert!(world.peer_sends(relay, peer, &received).goes_to_client());
        }
        world.now.ms += 20;
    }
}

#[test]
fn losses_of_both_uplinks_are_measured_over_channels_and_indications() {
    let (mut world, relay) = measuring(QualityLevel::Headers);
    assert_eq!(report(&mut world), None, "nothing relayed");
    talk(&mut world, relay);
    let measured = report(&mut world).expect("a report").measured;
    for (uplink, lost) in [(measured.client.uplink, 50), (measured.peer.uplink, 20)] {
        let flow = uplink.expect("a stream");
        let expected =
            MeasuredFlow { expected: 500, lost, longest_gap_us: 40_000, ..MeasuredFlow::default() };
        // Timestamps have steps of 21 microseconds.
        assert!(flow.jitter_us <= 21, "{flow:?}");
        assert_eq!(MeasuredFlow { jitter_us: 0, ..flow }, expected);
    }
    assert_eq!((measured.client.downlink, measured.client.round_trip_us), (None, None));
    assert_eq!(report(&mut world), None, "nothing since");
}

#[test]
fn microseconds_of_the_clock_count() {
    let (mut world, _) = measuring(QualityLevel::Headers);
    let mut sender = RtpSender::new(1, 0);
    for number in 0..500_u64 {
        let at = std::time::Duration::from_millis(world.now.ms);
        world.server.set_microseconds(number % 2 * 800);
        let datagram = sender.datagram(at, 100);
        world.feed(&channel_data(0x4000, &datagram));
        world.now.ms += 20;
    }
    let jitter_us = report(&mut world).and_then(|report| report.measured.client.uplink).unwrap().jitter_us;
    assert!((750..850).contains(&jitter_us), "{jitter_us}");
}

#[test]
fn measuring_follows_the_setting() {
    let (mut world, relay) = measuring(QualityLevel::Off);
    assert!(!world.server.is_limited(relay.allocation));
    talk(&mut world, relay);
    assert_eq!(report(&mut world), None);
    world.server.reconfigure(world.now, Arc::new(ServerConfig { quality: QualityLevel::On, ..config() }));
    assert!(world.server.kernel_meter(relay.allocation).is_some_and(|meter| meter.reads_rtcp()));
    assert!(!world.server.is_limited(relay.allocation), "the kernel may relay it");
    talk(&mut world, relay);
    assert_eq!(
        report(&mut world).and_then(|report| report.measured.client.uplink).map(|flow| flow.lost),
        Some(50)
    );
    world.server.reconfigure(world.now, Arc::new(config()));
    assert!(world.server.kernel_meter(relay.allocation).is_none());
    assert_eq!(report(&mut world), None);
}

#[test]
fn measuring_does_not_allocate_per_datagram() {
    let (mut world, relay) = measuring(QualityLevel::On);
    talk(&mut world, relay);
    let mut sender = RtpSender::new(1, 500);
    let messages: Vec<_> = (0..50)
        .map(|number| sender.datagram(std::time::Duration::from_millis(number), 100))
        .map(|datagram| channel_data(0x4000, &datagram))
        .collect();
    let (now, client, server) = (world.now, world.client, &mut world.server);
    let counted = allocation_counter::measure(|| {
        for message in &messages {
            std::hint::black_box(server.from_client(now, &client.into(), message));
        }
    });
    assert_eq!(counted.count_total, 0);
}
