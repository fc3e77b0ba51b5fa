//! Each data path forwards every byte, in order and in super-packets where possible.

use crate::prelude::*;

use crate::udp_common::rule;
use turnpike_net::{Route, Rx, Sockets, Tx, UdpOptions};
use turnpike_testkit::{alone::skip, loopback_keeps_super_packets};

/// Datagram sizes: empty, tiny, just below and above the MTU, and the UDP maximum.
const SIZES: [usize; 10] = [0, 1, 2, 120, 512, 1200, 1472, 1473, 9000, 65_507];

#[test]
fn mixed_sizes_of_one_client_return_byte_exact_on_each_datapath() {
    for datapath in DATAPATHS {
        let echo = Echo::start(LOCALHOST);
        let worker = Worker::start(datapath);
        let at = worker.add(KEY, &rule(Protocol::Udp, LOCALHOST.parse().unwrap(), echo.address), datapath);
        let client = client(at);
        let mut bytes = 0;
        for round in 0..20 {
            for size in SIZES {
                expect_echo(&client, &payload(1, round, size));
                bytes += size as u64;
            }
        }
        let counted = worker.snapshot();
        assert_eq!((counted.active, counted.accepted, counted.dropped_datagrams), (1, 1, 0));
        assert_eq!((counted.to_target_bytes, counted.to_client_bytes), (bytes, bytes));
        assert_eq!((counted.to_target_datagrams, counted.to_client_datagrams), (200, 200));
    }
}

#[test]
fn bursts_of_200_clients_return_to_their_senders_on_each_datapath() {
    for datapath in DATAPATHS {
        let echo = Echo::start(LOCALHOST);
        let worker = Worker::start(datapath);
        let at = worker.add(KEY, &rule(Protocol::Udp, LOCALHOST.parse().unwrap(), echo.address), datapath);
        let clients: Vec<UdpSocket> = (0..200).map(|_| client(at)).collect();
        for round in 0..10 {
            let sent = |who: usize| payload(who, round, 20 + (who * 7 + round * 13) % 400);
            // Keep only as many datagrams in flight as certainly fit into the echo server's receive buffer:
            // 212,992 bytes, of which the kernel charges 1,280 per datagram.
            for (lot, clients) in clients.chunks(50).enumerate() {
                for (who, client) in clients.iter().enumerate() {
                    client.send(&sent(lot * 50 + who)).unwrap();
                }
                for (who, client) in clients.iter().enumerate() {
                    assert_eq!(receive(client), sent(lot * 50 + who));
                }
            }
        }
        let counted = worker.snapshot();
        assert_eq!((counted.active, counted.accepted), (200, 200));
        assert_eq!((counted.to_target_datagrams, counted.to_client_datagrams), (2000, 2000));
    }
}

/// Sends datagrams, those of equal size as one super-packet, and returns the echoes.
fn burst(datapath: Datapath, sizes: &[usize]) -> (Vec<Vec<u8>>, turnpike_net::TxStats) {
    let target = UdpSocket::bind(LOCALHOST).unwrap();
    target.set_read_timeout(Some(udp_common::PATIENCE)).unwrap();
    let worker = Worker::start(datapath);
    let to = target.local_addr().unwrap();
    let at = worker.add(KEY, &rule(Protocol::Udp, LOCALHOST.parse().unwrap(), to), datapath);
    let mut sockets = Sockets::default();
    let local = LOCALHOST.parse().unwrap();
    let socket = sockets.insert(turnpike_net::UdpSocket::bind(local, &UdpOptions::default()).unwrap());
    let route = Route { socket, to: Some(at), from: None, tos: 0, ttl: 0, dont_fragment: false };
    let mut tx = Tx::new(Datapath::Gso);
    for (number, size) in sizes.iter().enumerate() {
        tx.push_bytes(&route, &payload(5, number, *size));
    }
    tx.flush(&mut sockets, &Rx::new(Datapath::Gso));
    let got = sizes.iter().map(|_| receive(&target)).collect();
    (got, worker.tx_stats())
}

#[test]
fn received_super_packet_is_sent_as_one() {
    if !loopback_keeps_super_packets() {
        return skip("loopback splits super-packets (before Linux 5.11)");
    }
    let sizes = [1000; 32];
    let (got, sent) = burst(Datapath::Gso, &sizes);
    assert_eq!(got, (0..32).map(|number| payload(5, number, 1000)).collect::<Vec<_>>());
    assert_eq!((sent.datagrams, sent.messages, sent.super_packets, sent.calls), (32, 1, 1, 1));
}

#[test]
fn order_of_a_burst_of_unequal_datagrams_is_kept() {
    let sizes: Vec<usize> = (0..40).map(|number| [800, 800, 300, 801, 0, 64][number % 6]).collect();
    for datapath in DATAPATHS {
        let (got, _) = burst(datapath, &sizes);
        for (number, (bytes, size)) in got.iter().zip(&sizes).enumerate() {
            assert_eq!(bytes, &payload(5, number, *size), "datagram {number} on {datapath}");
        }
    }
}
