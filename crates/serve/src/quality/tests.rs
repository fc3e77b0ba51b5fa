//! Verdicts on synthetic reports.

use turnpike_turn::server::ClientNetwork;

use super::*;

/// 2026-11-30 14:02:10 UTC.
const START: u64 = 1_796_047_330;

#[derive(Debug)]
struct OneSystem;

impl ClientNetworks for OneSystem {
    fn network(&self, client: IpAddr) -> ClientNetwork {
        let asn = client.to_string().starts_with("192.0.2.").then_some(64_500);
        ClientNetwork { asn, ..ClientNetwork::default() }
    }
}

fn monitor() -> QualityMonitor {
    QualityMonitor::new(Arc::new(OneSystem))
}

fn id(number: u8) -> AllocationId {
    format!("{number:032x}").parse().unwrap()
}

fn good() -> Quality {
    let flow = FlowQuality { expected: 1000, jitter_ms: 4.0, ..FlowQuality::default() };
    let leg = LegQuality { round_trip_ms: Some(30.0), uplink: Some(flow), downlink: Some(flow) };
    Quality { client: leg, peer: leg }
}

fn flow_mut(quality: &mut Quality, leg: Leg, direction: FlowDirection) -> &mut FlowQuality {
    let leg = match leg {
        Leg::Client => &mut quality.client,
        Leg::Peer => &mut quality.peer,
    };
    match direction {
        FlowDirection::Uplink => leg.uplink.as_mut().unwrap(),
        FlowDirection::Downlink => leg.downlink.as_mut().unwrap(),
    }
}

fn blamed(quality: &Quality) -> Option<(Leg, Option<FlowDirection>)> {
    let monitor = monitor();
    monitor.report_at(START, id(1), [192, 0, 2, 1].into(), quality);
    monitor.problem_at(START, id(1)).map(|problem| (problem.leg, problem.direction))
}

#[test]
fn good_quality_is_no_problem() {
    assert_eq!(blamed(&good()), None);
}

#[test]
fn loss_is_blamed_on_its_leg_and_direction() {
    for (leg, direction) in FLOWS {
        let mut quality = good();
        flow_mut(&mut quality, leg, direction).lost = 31;
        assert_eq!(blamed(&quality), Some((leg, Some(direction))));
    }
}

#[test]
fn jitter_is_blamed_on_its_leg_although_receivers_report_the_sum() {
    for (leg, direction) in FLOWS {
        let mut quality = good();
        flow_mut(&mut quality, leg, direction).jitter_ms = 40.0;
        if direction == FlowDirection::Uplink {
            let receiver = if leg == Leg::Client { Leg::Peer } else { Leg::Client };
            flow_mut(&mut quality, receiver, FlowDirection::Downlink).jitter_ms = 41.0;
        }
        assert_eq!(blamed(&quality), Some((leg, Some(direction))));
    }
}

#[test]
fn round_trip_is_blamed_on_its_leg() {
    let mut quality = good();
    quality.peer.round_trip_ms = Some(420.0);
    assert_eq!(blamed(&quality), Some((Leg::Peer, None)));
}

#[test]
fn sentence_states_figure_time_and_other_clients_of_the_network() {
    let monitor = monitor();
    let mut bad = good();
    bad.client.uplink.as_mut().unwrap().lost = 31;
    let sentence = || monitor.problem_at(START, id(1)).unwrap().sentence;
    monitor.report_at(START, id(1), [192, 0, 2, 1].into(), &bad);
    assert_eq!(sentence(), "uplink of the client: 3.1 % loss since 14:02 UTC");
    // Another allocation of the same client is no other client.
    monitor.report_at(START, id(2), [192, 0, 2, 1].into(), &bad);
    assert_eq!(sentence(), "uplink of the client: 3.1 % loss since 14:02 UTC");
    monitor.report_at(START, id(3), [192, 0, 2, 77].into(), &good());
    let alone =
        "uplink of the client: 3.1 % loss since 14:02 UTC; the other client in AS64500 is not affected";
    assert_eq!(sentence(), alone);
    monitor.report_at(START, id(4), [192, 0, 2, 99].into(), &bad);
    monitor.report_at(START, id(5), [198, 51, 100, 9].into(), &bad);
    let shared =
        "uplink of the client: 3.1 % loss since 14:02 UTC; 1 of 2 other clients in AS64500 is affected too";
    assert_eq!(sentence(), shared);
    // The client of the last one moves to another network.
    monitor.report_at(START, id(4), [198, 51, 100, 10].into(), &bad);
    assert_eq!(sentence(), alone);
    let elsewhere = monitor.problem_at(START, id(5)).unwrap().sentence;
    assert!(elsewhere.ends_with("; the other client in 198.51.100.0/24 is affected too"), "{elsewhere}");
}

#[test]
fn ended_allocations_leave_nothing() {
    let monitor = monitor();
    let mut bad = good();
    bad.client.uplink.as_mut().unwrap().lost = 31;
    monitor.report_at(START, id(1), [192, 0, 2, 1].into(), &bad);
    monitor.report_at(START, id(2), [192, 0, 2, 2].into(), &good());
    monitor.state().remove(id(1));
    monitor.state().remove(id(2));
    assert!(monitor.state().records.is_empty());
    assert_eq!(format!("{:?}", monitor.state().networks), "Networks({})");
}

#[test]
fn trouble_ends_when_media_end() {
    let monitor = monitor();
    let mut bad = good();
    bad.client.uplink.as_mut().unwrap().lost = 31;
    monitor.report_at(START, id(1), [192, 0, 2, 1].into(), &bad);
    assert!(monitor.problem_at(START + STALE, id(1)).is_some());
    assert!(monitor.problem_at(START + STALE + 1, id(1)).is_none());
}

#[test]
fn figures_have_a_sample_per_window() {
    let monitor = monitor();
    assert_eq!(monitor.figures(), None);
    monitor.report_at(START, id(1), [192, 0, 2, 1].into(), &good());
    monitor.report_at(START + 10, id(1), [192, 0, 2, 1].into(), &good());
    let figures = monitor.figures().unwrap();
    let count = |samples: &Samples| samples.buckets.iter().sum::<u64>();
    assert_eq!(figures.loss.each_ref().map(count), [1; 4]);
    assert_eq!(figures.jitter.each_ref().map(count), [1; 4]);
    assert_eq!(figures.round_trip.each_ref().map(count), [2; 2]);
}
