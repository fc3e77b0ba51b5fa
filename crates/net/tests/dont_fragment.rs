//! DF per datagram, over a loopback interface with an Ethernet MTU.

use crate::prelude::*;

const SMALL_MTU: [&str; 1] = ["link set lo mtu 1500 up"];

/// Sends datagrams of 3000 bytes, every other one with DF. The kernel refuses those with DF and fragments the
/// rest.
fn only_fragmentable_datagrams_pass(ip: IpAddr) {
    for datapath in DATAPATHS {
        let to = bind(ip, &UdpOptions { recv_buffer: Some(1 << 20), ..UdpOptions::default() });
        let mut sender = Sender::new(datapath, ip, &UdpOptions::default());
        for n in 0..20_u8 {
            let route = Route { dont_fragment: n % 2 == 1, ..sender.route(to.local_addr()) };
            sender.tx.push_bytes(&route, &[n; 3000]);
        }
        // Small datagrams pass with DF too.
        let route = Route { dont_fragment: true, ..sender.route(to.local_addr()) };
        for _ in 0..4 {
            sender.tx.push_bytes(&route, &[99; 1400]);
        }
        sender.flush();
        let stats = sender.tx.stats();
        assert_eq!((stats.datagrams, stats.too_big, stats.refused), (14, 10, 0), "{ip} {datapath}");

        // The socket's default is restored: datagrams without DF may be fragmented.
        let route = sender.route(to.local_addr());
        sender.tx.push_bytes(&route, &[100; 3000]);
        sender.flush();
        assert_eq!((sender.tx.stats().datagrams, sender.tx.stats().too_big), (15, 10));

        let got = receive(&mut Rx::new(datapath), &[&to], 15);
        let firsts: Vec<u8> = got.iter().map(|d| d.bytes[0]).collect();
        assert_eq!(firsts, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 99, 99, 99, 99, 100]);
        assert!(got.iter().all(|d| d.bytes.iter().all(|b| *b == d.bytes[0])));
    }
}

#[test]
fn ipv4_datagrams_beyond_the_mtu_pass_only_without_df() {
    in_namespace(turnpike_testkit::this_test!(), &SMALL_MTU, || {
        only_fragmentable_datagrams_pass(V4);
    });
}

#[test]
fn ipv6_datagrams_beyond_the_mtu_pass_only_without_df() {
    in_namespace(turnpike_testkit::this_test!(), &SMALL_MTU, || {
        only_fragmentable_datagrams_pass(V6);
    });
}

/// Each datagram is left to the routers on the path, because the client needs their ICMP errors.
#[test]
fn datagrams_with_df_beyond_the_path_mtu_are_still_sent() {
    let setup = [
        "link add near type veth peer name far",
        "addr add 10.9.0.1/24 dev near",
        "addr add 2001:db8:9::1/64 dev near nodad",
        "link set near up",
        "link set far up",
        "neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev near",
        "neigh add 2001:db8:9::2 lladdr 02:00:00:00:00:02 dev near",
        "route add 10.9.0.2/32 dev near mtu 600",
        "-6 route add 2001:db8:9::2/128 dev near mtu 1280",
    ];
    in_namespace(turnpike_testkit::this_test!(), &setup, || {
        for (from, to) in [("10.9.0.1", "10.9.0.2:9"), ("2001:db8:9::1", "[2001:db8:9::2]:9")] {
            for datapath in DATAPATHS {
                let mut sender = Sender::new(datapath, from.parse().unwrap(), &UdpOptions::default());
                let route = Route { dont_fragment: true, ..sender.route(to.parse().unwrap()) };
                for size in [1400, 1300, 1400, 1400] {
                    sender.tx.push_bytes(&route, &vec![1; size]);
                }
                sender.flush();
                let stats = *sender.tx.stats();
                assert_eq!((stats.datagrams, stats.too_big), (4, 0), "{from} {datapath}");
                assert_eq!(stats.step_downs, 0);
            }
        }
    });
}
