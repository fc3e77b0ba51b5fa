//! Random batches over several sockets, destinations and families arrive intact and in order per flow.

use crate::prelude::*;
use std::cell::RefCell;

use proptest::{prelude::*, test_runner::TestRunner};
use turnpike_net::SocketId;
use turnpike_testkit::tests;

#[derive(Clone, Debug)]
struct Run {
    sender: usize,
    receiver: usize,
    tos: u8,
    dont_fragment: bool,
    make: Make,
    size: u32,
    count: u32,
}

#[derive(Clone, Copy, Debug)]
enum Make {
    /// Header, span of the arena and padding.
    Relayed { header: u32, padding: u32 },
    /// Written in place.
    Own,
}

const ARENA: u32 = 40_000;

fn runs() -> impl Strategy<Value = Vec<Run>> {
    let size = prop_oneof![
        2 => 0..8_u32,
        6 => 8..200_u32,
        2 => Just(120_u32),
        2 => 1100..1500_u32,
        1 => 1500..9000_u32,
    ];
    let make = prop_oneof![
        3 => (0..=48_u32, 0..=3_u32).prop_map(|(header, padding)| Make::Relayed { header, padding }),
        1 => Just(Make::Own),
    ];
    // ECN and DSCP make separate routes to the same destination.
    let tos = prop_oneof![4 => Just(0_u8), 1 => Just(2), 1 => Just(0xb8)];
    let df = prop::bool::weighted(0.1);
    let run = (0..5_usize, 0..2_usize, tos, df, make, size, 1..30_u32).prop_map(
        |(sender, receiver, tos, dont_fragment, make, size, count)| {
            // Limited, because some machines have small receive buffers.
            let count = count.min((15_000 / size.max(1)).max(1));
            Run { sender, receiver, tos, dont_fragment, make, size, count }
        },
    );
    prop::collection::vec(run, 1..14)
}

struct World {
    sockets: Sockets,
    senders: Vec<SocketId>,
    receivers: Vec<UdpSocket>,
    tx: Tx,
    rx: Rx,
    arena: Rx,
    span: ArenaSpan,
}

/// Senders 0 to 2 are IPv4, 3 and 4 IPv6; receivers 0 and 1 are IPv4, 2 and 3 IPv6. One of each pair has GRO.
fn world(datapath: Datapath) -> World {
    let options = UdpOptions { recv_buffer: Some(8 << 20), ip_header: true, ..UdpOptions::default() };
    let mut sockets = Sockets::default();
    let senders = [V4, V4, V4, V6, V6].map(|ip| sockets.insert(bind(ip, &UdpOptions::default()))).to_vec();
    let receivers = [(V4, false), (V4, true), (V6, false), (V6, true)];
    let receivers = receivers
        .map(|(ip, gro)| bind(ip, &UdpOptions { gro: gro && datapath == Datapath::Gso, ..options.clone() }));
    let (arena, span) = filled_arena(datapath, ARENA as usize);
    let (tx, rx) = (Tx::new(datapath), Rx::new(datapath));
    World { sockets, senders, receivers: receivers.into(), tx, rx, arena, span }
}

/// Datagrams by sender, receiver and TOS.
type Flows = BTreeMap<(SocketAddr, usize, u8), Vec<Vec<u8>>>;

impl World {
    fn push(&mut self, run: &Run, number: &mut u32, expected: &mut Flows) {
        let id = self.senders[run.sender];
        let from = self.sockets.get(id).unwrap().local_addr();
        let receiver = if matches!(from.ip(), IpAddr::V4(_)) { run.receiver } else { run.receiver + 2 };
        let to = self.receivers[receiver].local_addr();
        let route = Route {
            socket: id,
            to: Some(to),
            from: None,
            tos: run.tos,
            ttl: 0,
            dont_fragment: run.dont_fragment,
        };
        for _ in 0..run.count {
            *number += 1;
            let stamp = number.to_be_bytes();
            let whole = match run.make {
                Make::Relayed { header, padding } => {
                    let header_len = header.min(run.size);
                    let padding = padding.min(run.size - header_len);
                    let len = run.size - header_len - padding;
                    let payload = ArenaSpan { offset: self.span.offset + *number * 97 % (ARENA - len), len };
                    let header: Vec<u8> = stamp.into_iter().cycle().take(header_len as usize).collect();
                    self.tx.push(&route, &header, payload, padding as u8);
                    [&header, self.arena.bytes(payload), &[0; 3][..padding as usize]].concat()
                }
                Make::Own => {
                    let bytes: Vec<u8> = stamp.into_iter().cycle().take(run.size as usize).collect();
                    self.tx.push_run(&route, 1, bytes.len(), |out| out.copy_from_slice(&bytes));
                    bytes
                }
            };
            expected.entry((from, receiver, run.tos)).or_default().push(whole);
        }
    }

    fn check(&mut self, runs: &[Run]) {
        let mut expected = Flows::new();
        let mut number = 0;
        // DF alone makes another route, but the receiver cannot see it.
        for df in [false, true] {
            let mut before = *self.tx.stats();
            for run in runs.iter().filter(|run| run.dont_fragment == df) {
                self.push(run, &mut number, &mut expected);
            }
            let queued = self.tx.queued() as u64;
            self.tx.flush(&mut self.sockets, &self.arena);
            before.datagrams += queued;
            let after = *self.tx.stats();
            assert_eq!(after.datagrams, before.datagrams, "{after:?}");
            assert_eq!((after.refused, after.too_big, after.would_block, after.step_downs), (0, 0, 0, 0));
        }
        let sockets: Vec<&UdpSocket> = self.receivers.iter().collect();
        let mut got = Flows::new();
        for datagram in receive(&mut self.rx, &sockets, number as usize) {
            got.entry((datagram.from, datagram.at, datagram.tos)).or_default().push(datagram.bytes);
        }
        assert_eq!(got, expected);
    }
}

fn arrives_intact_and_in_order(datapath: Datapath) {
    let world = RefCell::new(world(datapath));
    let config = ProptestConfig { cases: 96, ..ProptestConfig::with_source_file(file!()) };
    let run = TestRunner::new(config).run(&runs(), |runs| {
        world.borrow_mut().check(&runs);
        Ok(())
    });
    let world = world.into_inner();
    let (tx, rx) = (world.tx.stats(), world.rx.stats());
    println!("{datapath}: {tx:?} {rx:?}");
    run.unwrap();
    assert_eq!(tx.super_packets > 0, datapath == Datapath::Gso);
    let come_whole = datapath == Datapath::Gso && loopback_keeps_super_packets();
    assert_eq!(rx.buffers < rx.datagrams, come_whole, "super-packets received with GRO");
    assert_eq!(tx.calls == tx.messages, datapath == Datapath::Basic);
}

tests! {
    basic_batches_arrive_intact_and_in_order: arrives_intact_and_in_order(Datapath::Basic);
    mmsg_batches_arrive_intact_and_in_order: arrives_intact_and_in_order(Datapath::Mmsg);
    gso_batches_arrive_intact_and_in_order: arrives_intact_and_in_order(Datapath::Gso);
}
