//! Super-packets are formed by the sender and visible at the receiver.

use crate::common::wait_for_input;
use crate::prelude::*;
use turnpike_testkit::alone::{self, skip};

fn gro() -> UdpOptions {
    UdpOptions { gro: true, recv_buffer: Some(4 << 20), ..UdpOptions::default() }
}

/// Simulates a container whose loopback is down: once the machine has any other address, loopback addresses
/// cannot be bound.
#[test]
fn best_data_path_is_found_without_loopback() {
    const LINK: [&str; 8] = ["link", "add", "e0", "type", "veth", "peer", "name", "e1"];
    let test = turnpike_testkit::this_test!();
    alone::in_namespaces(test, "n", &["ip", "link", "show"], || {
        alone::run("ip", &LINK);
        alone::run("ip", &["address", "add", "10.0.0.1/24", "dev", "e0"]);
        alone::run("ip", &["link", "set", "e0", "up"]);
        let without = Datapath::best();
        alone::run("ip", &["link", "set", "lo", "up"]);
        assert_eq!(without, Datapath::best());
    });
}

#[test]
fn datagrams_of_equal_size_form_one_message_and_one_buffer() {
    for ip in [V4, V6] {
        let to = bind(ip, &gro());
        let mut sender = Sender::new(Datapath::Gso, ip, &UdpOptions::default());
        let route = sender.route(to.local_addr());
        for n in 0..64_u8 {
            sender.tx.push_bytes(&route, &[n; 120]);
        }
        sender.flush();
        let stats = sender.tx.stats();
        assert_eq!((stats.calls, stats.messages, stats.super_packets), (1, 1, 1));
        assert_eq!((stats.datagrams, stats.bytes, stats.step_downs), (64, 64 * 120, 0));

        let mut rx = Rx::new(Datapath::Gso);
        wait_for_input(&to);
        let received = rx.recv(&to).unwrap();
        let buffers: Vec<_> = rx.buffers(received).collect();
        if !loopback_keeps_super_packets() {
            return skip("loopback splits super-packets (before Linux 5.11)");
        }
        assert_eq!(buffers.len(), 1);
        assert_eq!((buffers[0].segment_size, buffers[0].count()), (120, 64));
        let firsts: Vec<u8> = buffers[0].datagrams().map(|d| d[0]).collect();
        assert_eq!(firsts, (0..64).collect::<Vec<u8>>());
        assert_eq!((rx.stats().calls, rx.stats().buffers, rx.stats().datagrams), (1, 1, 64));
        assert_eq!(rx.stats().batch[6], 1);
    }
}

#[test]
fn a_queued_run_is_sent_like_single_pushes() {
    for datapath in [Datapath::Basic, Datapath::Mmsg, Datapath::Gso] {
        let to = bind(V4, &gro());
        let mut sender = Sender::new(datapath, V4, &UdpOptions::default());
        let route = sender.route(to.local_addr());
        let mut sent = Vec::new();
        // The first run is too long for one super-packet, and the third has shorter datagrams than the one
        // before it.
        for (count, len) in [(150, 120), (1, 120), (3, 60), (0, 60), (40, 1_400), (2, 1)] {
            sender.tx.push_run(&route, count, len, |all| {
                for datagram in all.chunks_exact_mut(len) {
                    datagram.fill(sent.len() as u8);
                    sent.push(datagram.to_vec());
                }
            });
        }
        assert_eq!((sender.tx.queued(), sent.len()), (196, 196));
        sender.flush();
        assert_eq!(sender.tx.queued(), 0);
        assert_eq!(sender.tx.stats().datagrams, 196, "{datapath}: {:?}", sender.tx.stats());
        let got = receive(&mut Rx::new(datapath), &[&to], 196);
        assert!(got.into_iter().map(|datagram| datagram.bytes).eq(sent), "{datapath}");
    }
}

#[test]
fn bursts_of_one_flow_share_a_call_but_not_a_super_packet() {
    let to = bind(V4, &gro());
    let mut sender = Sender::new(Datapath::Gso, V4, &UdpOptions::default());
    let route = sender.route(to.local_addr());
    for burst in 0..3 {
        sender.tx.push_run(&route, 16, 120, |all| all.fill(burst));
    }
    sender.flush();
    let stats = sender.tx.stats();
    assert_eq!((stats.calls, stats.messages, stats.super_packets, stats.datagrams), (1, 3, 3, 48));
}

#[test]
fn interleaved_destinations_share_one_call() {
    let mut rx = Rx::new(Datapath::Gso);
    let to: Vec<_> = (0..8).map(|_| bind(V4, &gro())).collect();
    let mut sender = Sender::new(Datapath::Gso, V4, &UdpOptions::default());
    for n in 0..128_u8 {
        let route = sender.route(to[usize::from(n) % 8].local_addr());
        sender.tx.push_bytes(&route, &[n; 120]);
    }
    sender.flush();
    let stats = sender.tx.stats();
    assert_eq!((stats.calls, stats.messages, stats.super_packets, stats.datagrams), (1, 8, 8, 128));
    for (i, socket) in to.iter().enumerate() {
        let got = receive(&mut rx, &[socket], 16);
        let firsts: Vec<usize> = got.iter().map(|d| usize::from(d.bytes[0])).collect();
        assert_eq!(firsts, (0..16).map(|n| n * 8 + i).collect::<Vec<_>>());
    }
}

#[test]
fn headers_and_spans_of_the_arena_form_super_packets_without_a_copy() {
    let (arena, span) = filled_arena(Datapath::Gso, 30_000);
    let to = bind(V4, &gro());
    let mut sender = Sender::new(Datapath::Gso, V4, &UdpOptions::default());
    let route = sender.route(to.local_addr());
    let mut expected = Vec::new();
    for n in 0..60_u32 {
        let header = [0x40, n as u8, 0, 117];
        let payload = ArenaSpan { offset: span.offset + n * 400, len: 117 };
        sender.tx.push(&route, &header, payload, 3);
        expected.push([&header, arena.bytes(payload), &[0, 0, 0]].concat());
    }
    sender.tx.flush(&mut sender.sockets, &arena);
    let stats = sender.tx.stats();
    assert_eq!((stats.calls, stats.super_packets, stats.datagrams), (1, 1, 60));
    let got: Vec<_> = receive(&mut Rx::new(Datapath::Gso), &[&to], 60).into_iter().map(|d| d.bytes).collect();
    assert_eq!(got, expected);
}

#[test]
fn a_shorter_datagram_ends_a_super_packet() {
    let to = bind(V4, &gro());
    let mut sender = Sender::new(Datapath::Gso, V4, &UdpOptions::default());
    let route = sender.route(to.local_addr());
    let sizes = [100, 100, 100, 60, 60, 60, 100, 100, 130];
    for (n, size) in sizes.into_iter().enumerate() {
        sender.tx.push_bytes(&route, &vec![n as u8; size]);
    }
    sender.flush();
    // 100 100 100 60 │ 60 60 │ 100 100 │ 130
    let stats = sender.tx.stats();
    assert_eq!((stats.calls, stats.messages, stats.super_packets, stats.datagrams), (1, 4, 3, 9));
    let got = receive(&mut Rx::new(Datapath::Gso), &[&to], 9);
    let seen: Vec<_> = got.iter().map(|d| (d.bytes[0] as usize, d.bytes.len())).collect();
    assert_eq!(seen, sizes.into_iter().enumerate().collect::<Vec<_>>());
}

/// Exceeding the kernel's limit (64 or 128) must not cause a refusal.
#[test]
fn super_packets_of_a_flood_stay_within_the_kernel_limit() {
    let to = bind(V4, &gro());
    let mut sender = Sender::new(Datapath::Gso, V4, &UdpOptions::default());
    let route = sender.route(to.local_addr());
    for n in 0..512_u32 {
        sender.tx.push_bytes(&route, &n.to_be_bytes());
    }
    sender.flush();
    let stats = sender.tx.stats();
    assert_eq!((stats.calls, stats.datagrams, stats.step_downs), (1, 512, 0));
    assert!([4, 8].contains(&stats.super_packets), "{stats:?}");
    println!("super-packets of {} segments", 512 / stats.super_packets);
    let got = receive(&mut Rx::new(Datapath::Gso), &[&to], 512);
    assert!(got.iter().enumerate().all(|(n, d)| d.bytes == (n as u32).to_be_bytes()));
}

#[test]
fn super_packets_of_large_datagrams_are_limited_to_64_kib() {
    let to = bind(V6, &gro());
    let mut sender = Sender::new(Datapath::Gso, V6, &UdpOptions::default());
    let route = sender.route(to.local_addr());
    for n in 0..100_u8 {
        sender.tx.push_bytes(&route, &[n; 1400]);
    }
    sender.flush();
    let stats = sender.tx.stats();
    assert_eq!((stats.calls, stats.super_packets, stats.datagrams, stats.step_downs), (1, 3, 100, 0));
    let got = receive(&mut Rx::new(Datapath::Gso), &[&to], 100);
    assert!(got.iter().enumerate().all(|(n, d)| d.bytes == [n as u8; 1400]));
}

#[test]
fn a_receiver_without_gro_gets_single_datagrams() {
    let options = UdpOptions { recv_buffer: Some(4 << 20), ..UdpOptions::default() };
    let to = bind(V4, &options);
    let mut sender = Sender::new(Datapath::Gso, V4, &UdpOptions::default());
    let route = sender.route(to.local_addr());
    for n in 0..64_u8 {
        sender.tx.push_bytes(&route, &[n; 120]);
    }
    sender.flush();
    assert_eq!(sender.tx.stats().super_packets, 1);
    let mut rx = Rx::new(Datapath::Mmsg);
    let got = receive(&mut rx, &[&to], 64);
    assert!(got.iter().enumerate().all(|(n, d)| d.bytes == [n as u8; 120]));
    assert_eq!((rx.stats().buffers, rx.stats().datagrams), (64, 64));
    // The batch size doubles after a few single datagrams.
    assert!(rx.stats().calls < 16, "{:?}", rx.stats());
}

#[test]
fn other_data_paths_form_no_super_packets() {
    for (datapath, calls) in [(Datapath::Basic, 64), (Datapath::Mmsg, 1)] {
        let to = bind(V4, &UdpOptions::default());
        let mut sender = Sender::new(datapath, V4, &UdpOptions::default());
        let route = sender.route(to.local_addr());
        for n in 0..64_u8 {
            sender.tx.push_bytes(&route, &[n; 120]);
        }
        sender.flush();
        let stats = sender.tx.stats();
        assert_eq!((stats.calls, stats.messages, stats.super_packets), (calls, 64, 0), "{datapath}");
        let got = receive(&mut Rx::new(datapath), &[&to], 64);
        assert!(got.iter().enumerate().all(|(n, d)| d.bytes == [n as u8; 120]));
    }
}
