//! Fuzz target: datagrams of any content and order in both directions.

use turnpike_testkit::fuzz::{self, Input};

use super::*;

#[test]
fn quality() {
    fuzz::target("quality", seeds, |bytes| {
        let mut input = Input::new(bytes);
        let mut meter = Meter::new(QualityLevel::On).expect("a meter");
        let (mut at_us, mut datagrams, mut before) = (0_u64, 0, Measured::default());
        let counted = allocation_counter::measure(|| {
            while !input.is_empty() {
                let how = input.byte();
                at_us += u64::from(input.u16()) << (how >> 1 & 0xF);
                let way = if how & 1 == 0 { Way::ToPeer } else { Way::ToClient };
                meter.relayed(way, at_us, input.bytes());
                datagrams += 1;
                let measured = meter.measured();
                check(measured.client, before.client);
                check(measured.peer, before.peer);
                before = measured;
            }
        });
        // A vector of four streams per direction, and no more.
        assert!(counted.count_total <= 2, "{counted:?} after {datagrams} datagrams");
    });
}

/// Totals must be consistent and must not fall.
fn check(leg: MeasuredLeg, before: MeasuredLeg) {
    assert!(leg.round_trip_us.is_none_or(|us| us <= 30_000_000), "{leg:?}");
    for (flow, before) in [(leg.uplink, before.uplink), (leg.downlink, before.downlink)] {
        assert!(flow.is_some() || before.is_none());
        let (flow, before) = (flow.unwrap_or_default(), before.unwrap_or_default());
        assert!(flow.lost <= flow.expected && flow.reordered <= flow.expected, "{flow:?}");
        assert!(
            flow.expected >= before.expected && flow.reordered >= before.reordered,
            "{before:?}, then {flow:?}"
        );
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let datagram = |how: u8, payload: &[u8]| {
        let length = u8::try_from(payload.len()).expect("a short payload");
        [&[how, 78, 32, length], payload].concat()
    };
    let rtp = |sequence: u8| {
        let mut header = [0; 16];
        (header[0], header[1], header[3], header[6], header[11]) = (0x80, 111, sequence, sequence, 7);
        datagram(0, &header)
    };
    let stream: Vec<u8> = (1..40).filter(|number| number % 7 != 3).flat_map(rtp).collect();
    let mut report = [0; 32];
    (report[0], report[1], report[3], report[11], report[15], report[19]) = (0x81, 201, 7, 7, 9, 39);
    let quic = [datagram(0, &[0xC3, 0, 0, 0, 1]), datagram(0, &[0x40; 8]), datagram(1, &[0x60; 8])].concat();
    let stun = |kind: [u8; 2]| [&kind[..], &[0, 0], &turnpike_wire::stun::COOKIE, &[9; 12]].concat();
    let transaction = [datagram(0, &stun([0, 1])), datagram(1, &stun([1, 1]))].concat();
    vec![[&stream[..], &datagram(1, &report)].concat(), quic, transaction]
}
