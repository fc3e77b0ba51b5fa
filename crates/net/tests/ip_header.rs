//! TOS (DSCP and ECN) and TTL in both directions, with and without super-packets.

use crate::prelude::*;

#[test]
fn tos_and_ttl_arrive_as_sent() {
    for ip in [V4, V6] {
        for datapath in DATAPATHS {
            let gro = datapath == Datapath::Gso;
            // Requests all control messages, to test their buffer too.
            let options = UdpOptions { ip_header: true, packet_info: true, gro, ..UdpOptions::default() };
            let to = bind(ip, &options);
            let mut sender = Sender::new(datapath, ip, &UdpOptions::default());
            // ECT(1), ECT(0), CE, expedited forwarding with ECT(0), all bits.
            let headers = [(1, 1), (2, 64), (3, 128), (0xba, 255), (0xff, 7)];
            for (tos, ttl) in headers {
                let route = Route { tos, ttl, from: Some(ip), ..sender.route(to.local_addr()) };
                for _ in 0..10 {
                    sender.tx.push_bytes(&route, &[tos; 40]);
                }
            }
            sender.flush();
            assert_eq!(sender.tx.stats().super_packets, if gro { 5 } else { 0 });
            let got = receive(&mut Rx::new(datapath), &[&to], 50);
            let seen: Vec<_> = got.iter().map(|d| (d.tos, d.ttl)).collect();
            let expected: Vec<_> = headers.iter().flat_map(|h| [*h; 10]).collect();
            assert_eq!(seen, expected, "{ip} {datapath}");
            assert!(got.iter().all(|d| d.bytes == [d.tos; 40] && d.local == Some(ip)));
        }
    }
}

#[test]
fn zero_tos_and_ttl_select_the_defaults_of_the_socket() {
    for ip in [V4, V6] {
        let to = bind(ip, &UdpOptions { ip_header: true, ..UdpOptions::default() });
        let mut sender = Sender::new(Datapath::Gso, ip, &UdpOptions::default());
        // The values of the previous datagram must not be reused.
        let route = sender.route(to.local_addr());
        sender.tx.push_bytes(&Route { tos: 0xb8, ttl: 9, ..route }, b"marked");
        sender.flush();
        sender.tx.push_bytes(&route, b"plain");
        sender.flush();
        let got = receive(&mut Rx::new(Datapath::Gso), &[&to], 2);
        assert_eq!((got[0].tos, got[0].ttl), (0xb8, 9));
        assert_eq!(got[1].tos, 0);
        // net.ipv4.ip_default_ttl and net.ipv6.conf.default.hop_limit are 64 by default.
        assert!(got[1].ttl >= 32, "{}", got[1].ttl);
    }
}

#[test]
fn frequent_ttl_becomes_the_default_and_others_still_apply() {
    for ip in [V4, V6] {
        for datapath in DATAPATHS {
            let to = bind(ip, &UdpOptions { ip_header: true, ..UdpOptions::default() });
            let mut sender = Sender::new(datapath, ip, &UdpOptions::default());
            let route = sender.route(to.local_addr());
            let mut rx = Rx::new(datapath);
            let mut default = None;
            // Long runs with one TTL change the socket option. Other TTLs occur in between, one or several
            // per flush.
            for (round, usual) in [0, 41, 41, 41, 0, 17, 0, 0, 93].into_iter().enumerate() {
                let mut expected = Vec::new();
                for at in 0..40_usize {
                    let ttl = if usual != 0 && at % 19 == 18 { 5 } else { usual };
                    // Different lengths, so that each is a separate message.
                    sender.tx.push_bytes(&Route { ttl, ..route }, &vec![0; 1 + at]);
                    expected.push((1 + at, ttl));
                    if round % 2 == 0 || at % 7 == 0 {
                        sender.flush();
                    }
                }
                sender.flush();
                let got = receive(&mut rx, &[&to], expected.len());
                let default = *default.get_or_insert(got[0].ttl);
                assert!(default >= 32 && default != 41, "{default}");
                // A flush groups datagrams by route.
                let mut seen: Vec<_> = got.iter().map(|d| (d.bytes.len(), d.ttl)).collect();
                seen.sort_unstable();
                for (_, ttl) in &mut expected {
                    *ttl = if *ttl == 0 { default } else { *ttl };
                }
                assert_eq!(seen, expected, "{ip} {datapath}, round {round}");
            }
        }
    }
}

#[test]
fn without_ip_header_tos_and_ttl_are_zero() {
    let to = bind(V4, &UdpOptions::default());
    let mut sender = Sender::new(Datapath::Gso, V4, &UdpOptions::default());
    let route = Route { tos: 3, ttl: 9, ..sender.route(to.local_addr()) };
    sender.tx.push_bytes(&route, b"x");
    sender.flush();
    let got = receive(&mut Rx::new(Datapath::Gso), &[&to], 1);
    assert_eq!((got[0].tos, got[0].ttl), (0, 0));
}
