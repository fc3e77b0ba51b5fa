//! Streams that the kernel and user space relay in turn.

#![allow(clippy::cast_possible_truncation, reason = "small numbers")]

use std::sync::{Arc, Mutex};

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore as _, SeedableRng as _},
};

use super::{
    kernel::{KERNEL_STREAMS, KernelMeter, KernelStream, KernelStreams},
    *,
};

const STEP_US: u64 = 20_000;

/// Follows streams as the program in the kernel does.
#[derive(Clone, Debug, Default)]
struct FakeKernel(Arc<Mutex<[KernelStream; KERNEL_STREAMS]>>);

impl KernelStreams for FakeKernel {
    fn ssrc(&self, place: usize) -> u32 {
        self.0.lock().unwrap()[place].ssrc
    }

    fn read(&self, place: usize) -> Option<KernelStream> {
        Some(self.0.lock().unwrap()[place]).filter(|stream| stream.ssrc != 0)
    }

    fn set_unit(&self, place: usize, _: &KernelStream, unit: u32) {
        self.0.lock().unwrap()[place].unit = unit;
    }

    fn longest_gap_us(&self) -> u64 {
        77_000
    }
}

impl FakeKernel {
    /// Sees a datagram. `relays` is false if it goes to user space.
    fn arrive(&self, datagram: &Datagram, relays: bool) {
        let mut streams = self.0.lock().unwrap();
        let known = streams.iter().position(|stream| stream.ssrc == datagram.ssrc);
        let place = known.or_else(|| streams.iter().position(|stream| stream.ssrc == 0));
        let Some(place) = place else { return };
        let stream = &mut streams[place];
        if stream.ssrc == 0 {
            *stream = KernelStream { ssrc: datagram.ssrc, payload_type: 111, expected: 1, ..*stream };
        } else {
            stream.is_confirmed = true;
            stream.expected += u32::from(datagram.sequence.wrapping_sub(stream.highest));
        }
        (stream.highest, stream.timestamp) = (datagram.sequence, (datagram.at_us * 48 / 1000) as u32);
        (stream.at_us, stream.jitter_us) = (datagram.at_us, 5000);
        stream.received += u32::from(relays);
    }
}

struct Datagram {
    ssrc: u32,
    sequence: u16,
    at_us: u64,
}

impl Datagram {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0x80, 111];
        bytes.extend(self.sequence.to_be_bytes());
        bytes.extend(((self.at_us * 48 / 1000) as u32).to_be_bytes());
        bytes.extend(self.ssrc.to_be_bytes());
        bytes
    }
}

struct Bench {
    meter: Box<Meter>,
    kernel: Option<FakeKernel>,
    at_us: u64,
    sequence: u16,
}

impl Bench {
    fn new() -> Self {
        Self { meter: Meter::new(QualityLevel::On).unwrap(), kernel: None, at_us: 0, sequence: 65_000 }
    }

    fn offload(&mut self) {
        let kernel = FakeKernel::default();
        let known = KernelMeter(&mut self.meter).known(Way::ToPeer);
        for (place, known) in kernel.0.lock().unwrap().iter_mut().zip(known) {
            *place = KernelStream {
                ssrc: known.ssrc,
                highest: known.highest,
                unit: known.unit,
                is_confirmed: known.is_confirmed,
                expected: u32::from(!known.is_confirmed),
                received: u32::from(!known.is_confirmed),
                ..*place
            };
        }
        KernelMeter(&mut self.meter).add(Way::ToPeer, 0, Box::new(kernel.clone()));
        self.kernel = Some(kernel);
    }

    fn end_offload(&mut self) {
        KernelMeter(&mut self.meter).retain(Way::ToPeer, |_| false);
        self.kernel = None;
    }

    /// Sends the next datagrams of a stream; user space receives those for which `stays` is true.
    fn send(&mut self, ssrc: u32, count: usize, mut stays: impl FnMut() -> bool) {
        for _ in 0..count {
            let datagram = Datagram { ssrc, sequence: self.sequence, at_us: self.at_us };
            self.lose(1);
            let goes_up = self.kernel.is_none() || stays();
            if let Some(kernel) = &self.kernel {
                kernel.arrive(&datagram, !goes_up);
            }
            if goes_up {
                self.meter.relayed(Way::ToPeer, datagram.at_us, &datagram.bytes());
            }
        }
    }

    fn lose(&mut self, count: u16) {
        self.sequence = self.sequence.wrapping_add(count);
        self.at_us += u64::from(count) * STEP_US;
    }

    fn uplink(&mut self) -> MeasuredFlow {
        self.meter.flows[Way::ToPeer as usize].add_counted();
        self.meter.measured().client.uplink.unwrap()
    }
}

#[test]
fn loss_is_exact_while_the_kernel_relays_some_datagrams() {
    let mut random = ChaCha8Rng::seed_from_u64(4);
    let mut below = |limit: u32| random.next_u32() % limit;
    let mut bench = Bench::new();
    let (mut sent, mut lost) = (0, 0);
    bench.send(7, 100, || true);
    for round in 0..40 {
        bench.offload();
        for _ in 0..below(200) {
            // A share of 0 is a lease; a large one is bulk traffic.
            let share = below(100);
            bench.send(7, 30, || below(100) < share);
            sent += 30;
            if below(2) == 0 {
                bench.lose(3);
                lost += 3;
            }
        }
        if round % 3 == 0 {
            bench.uplink();
        }
        bench.end_offload();
        bench.send(7, 10, || true);
        sent += 10;
    }
    let flow = bench.uplink();
    assert_eq!((flow.expected, flow.lost), (100 + sent + lost, lost));
}

#[test]
fn gaps_in_what_user_space_sees_are_no_gaps() {
    let mut bench = Bench::new();
    bench.send(7, 100, || true);
    bench.offload();
    let mut number = 0;
    bench.send(7, 1000, || {
        number += 1;
        number % 200 == 0
    });
    let flow = bench.uplink();
    assert_eq!((flow.expected, flow.lost, flow.longest_gap_us), (1100, 0, 77_000));
    // The kernel knows the rate from the first estimate.
    assert_eq!(flow.jitter_us, 5000);
    let kernel = bench.kernel.as_ref().unwrap().0.lock().unwrap()[0];
    assert_eq!(kernel.unit, 256 * 1_000_000 / 48);
}

#[test]
fn streams_that_begin_in_the_kernel_are_measured() {
    let mut bench = Bench::new();
    bench.offload();
    bench.send(7, 50, || false);
    bench.lose(2);
    bench.send(7, 50, || false);
    // User space sees all of this one.
    bench.send(8, 50, || true);
    let flow = bench.uplink();
    assert_eq!((flow.expected, flow.lost), (152, 2));
    bench.end_offload();
    bench.send(8, 50, || true);
    assert_eq!((bench.uplink().expected, bench.uplink().lost), (202, 2));
}

#[test]
fn a_datagram_that_waited_while_the_flow_was_installed_is_counted() {
    let mut bench = Bench::new();
    bench.offload();
    let first = Datagram { ssrc: 7, sequence: bench.sequence, at_us: 0 };
    bench.lose(1);
    bench.meter.relayed(Way::ToPeer, 0, &first.bytes());
    bench.send(7, 50, || false);
    assert_eq!((bench.uplink().expected, bench.uplink().lost), (51, 0));
}

#[test]
fn a_fifth_stream_has_no_place_in_either() {
    let mut bench = Bench::new();
    bench.offload();
    for ssrc in 1..=4 {
        bench.send(ssrc, 10, || false);
    }
    // Only some of its datagrams reach user space.
    let mut number = 0;
    bench.send(5, 400, || {
        number += 1;
        number % 20 < 3
    });
    let flow = bench.uplink();
    assert_eq!((flow.expected, flow.lost), (40, 0));
}

#[test]
fn flows_to_several_peers_share_the_known_streams() {
    let mut bench = Bench::new();
    bench.send(7, 100, || true);
    bench.offload();
    let other = bench.kernel.take().unwrap();
    // A second flow, with a copy of the stream that the first one continues.
    let copy = FakeKernel(Arc::new(Mutex::new(*other.0.lock().unwrap())));
    KernelMeter(&mut bench.meter).add(Way::ToPeer, 1, Box::new(copy));
    bench.kernel = Some(other);
    let mut number = 0;
    bench.send(7, 300, || {
        number += 1;
        number % 5 == 0
    });
    assert_eq!((bench.uplink().expected, bench.uplink().lost), (400, 0));
    bench.end_offload();
    bench.send(7, 100, || true);
    assert_eq!((bench.uplink().expected, bench.uplink().lost), (500, 0));
}
