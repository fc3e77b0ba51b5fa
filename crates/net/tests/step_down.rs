//! Super-packets that the kernel refuses (segments longer than the MTU), and a small path MTU, which must not
//! count as a refusal.

use crate::prelude::*;
use turnpike_testkit::alone::run;

#[test]
fn segments_beyond_the_mtu_are_sent_one_by_one() {
    let setup = ["link set lo mtu 1500 up"];
    in_namespace(turnpike_testkit::this_test!(), &setup, || {
        for ip in [V4, V6] {
            let options = UdpOptions { gro: true, recv_buffer: Some(4 << 20), ..UdpOptions::default() };
            let to = bind(ip, &options);
            let mut sender = Sender::new(Datapath::Gso, ip, &UdpOptions::default());
            let route = sender.route(to.local_addr());
            let mut rx = Rx::new(Datapath::Gso);
            for round in 0..3 {
                for n in 0..10_u8 {
                    sender.tx.push_bytes(&route, &[n; 1200]);
                }
                for n in 10..20_u8 {
                    sender.tx.push_bytes(&route, &[n; 1600]);
                }
                for n in 20..30_u8 {
                    sender.tx.push_bytes(&route, &[n; 300]);
                }
                sender.flush();
                let stats = *sender.tx.stats();
                assert_eq!(stats.step_downs, 1, "round {round}, {ip}: one step-down");
                assert_eq!(stats.datagrams, 30 * (round + 1));
                assert_eq!(stats.super_packets, 2 * (round + 1), "smaller segments stay in super-packets");
                assert_eq!((stats.refused, stats.too_big, stats.would_block), (0, 0, 0));
                let got = receive(&mut rx, &[&to], 30);
                let firsts: Vec<u8> = got.iter().map(|d| d.bytes[0]).collect();
                assert_eq!(firsts, (0..30).collect::<Vec<_>>());
            }
        }
    });
}

#[test]
fn super_packets_are_used_again_when_the_mtu_grows() {
    let setup = ["link set lo mtu 1500 up"];
    in_namespace(turnpike_testkit::this_test!(), &setup, || {
        let to = bind(V4, &UdpOptions::default());
        let mut sender = Sender::new(Datapath::Gso, V4, &UdpOptions::default());
        let route = sender.route(to.local_addr());
        let mut flush = |times: u64| {
            for _ in 0..times {
                sender.tx.push_bytes(&route, &[1; 1600]);
                sender.tx.push_bytes(&route, &[2; 1600]);
                sender.flush();
            }
            let stats = *sender.tx.stats();
            assert_eq!((stats.refused, stats.too_big, stats.would_block), (0, 0, 0));
            stats
        };
        let narrow = flush(100);
        assert_eq!((narrow.step_downs, narrow.super_packets, narrow.datagrams), (1, 0, 200));
        run("ip", &["link", "set", "lo", "mtu", "9000"]);
        let wide = flush(2_000);
        assert_eq!((wide.step_downs, wide.datagrams), (1, 4_200));
        assert!(wide.super_packets > 1_000, "{wide:?}");
    });
}

/// A path MTU may be as small as 552 bytes, and any host can claim one for its own path.
#[test]
fn ipv4_path_with_a_small_mtu_does_not_disable_super_packets() {
    let setup = [
        "link add near type veth peer name far",
        "addr add 10.9.0.1/24 dev near",
        "link set near up",
        "link set far up",
        "neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev near",
        "route add 10.9.0.2/32 dev near mtu 600",
    ];
    in_namespace(turnpike_testkit::this_test!(), &setup, || {
        let mut sender = Sender::new(Datapath::Gso, "10.9.0.1".parse().unwrap(), &UdpOptions::default());
        let route = sender.route("10.9.0.2:9".parse().unwrap());
        for round in 1..3 {
            for n in 0..10_u8 {
                sender.tx.push_bytes(&route, &[n; 1000]);
            }
            sender.flush();
            let stats = *sender.tx.stats();
            assert_eq!((stats.step_downs, stats.super_packets, stats.datagrams), (0, round, 10 * round));
        }
    });
}
