//! Checksums and headers of relayed packets are correct with every combination of device offloads.

use super::{
    CLIENT, Links, PEER, SERVER, Server,
    client::{Client, bound, received},
    on_links,
    relays::Pair,
};
use crate::prelude::*;

pub(super) fn captured(interface: &str, filter: &str, body: impl FnOnce()) -> Vec<String> {
    let dir = Dir::new();
    let file = dir.path().join("packets");
    let file = file.to_str().expect("a name");
    let mut tcpdump = Program::start(
        Command::new("tcpdump").args(["-Z", "root", "-U", "-i", interface, "-Q", "in", "-w", file, filter]),
    );
    tcpdump.line_with("listening on");
    body();
    let read = || {
        let output = Command::new("tcpdump").args(["-nvvr", file]).output().expect("tcpdump runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    eventually("the last packet is in the file", || {
        fs::read(file).is_ok_and(|bytes| bytes.windows(4).any(|at| at == b"LAST"))
    });
    tcpdump.signal("INT");
    read().lines().map(str::to_owned).collect()
}

pub(super) fn ethtool(links: &Links, inside: bool, device: &str, feature: &str, on: bool) {
    let words = ["ethtool", "-K", device, feature, if on { "on" } else { "off" }];
    if inside {
        links.inside(&words);
    } else {
        turnpike_testkit::alone::run(words[0], &words[1..]);
    }
}

fn sums_are_right(server: &Server<'_>, what: &str) {
    for (client, peer) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let mut pair = Pair::new(client, peer);
        pair.settle(server);
        let before = server.across();
        let lengths = [0, 1, 2, 3, 17, 18, 120, 121, 1000, 1200];
        let at_peer = captured("p", "udp", || {
            lengths.iter().for_each(|len| pair.exchange(*len));
            pair.client.send(0x4001, b"LAST");
            received(&pair.peer);
        });
        let at_client = captured("c", "udp", || {
            lengths.iter().for_each(|len| pair.exchange(*len));
            pair.peer.send_to(b"LAST", pair.client.relayed).expect("the send succeeds");
            pair.client.receive();
        });
        eventually("the kernel relayed the datagrams", || server.across() >= before + 38);
        for (lines, end) in [(at_peer, "peer"), (at_client, "client")] {
            let good = lines.iter().filter(|line| line.contains("udp sum ok")).count();
            let bad = lines.iter().any(|line| line.contains("bad"));
            assert!(!bad && good >= 11, "at the {end}, {what}: {lines:#?}");
        }
        pair.client.refresh(0);
    }
}

#[test]
fn checksums_are_correct_with_every_combination_of_offloads() {
    need!(installed("tcpdump"));
    need!(installed("ethtool"));
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = links.serve(&[]);
        // Outgoing packets are complete: the device computes no checksums.
        for device in ["c", "p"] {
            ethtool(links, true, device, "tx", false);
        }
        for partial in [true, false] {
            for gro in [true, false] {
                for device in ["c", "p"] {
                    // The offload leaves partial checksums, which the receiver must accept.
                    ethtool(links, false, device, "tx", partial);
                    ethtool(links, true, device, "gro", gro);
                }
                sums_are_right(&server, &format!("partial {partial}, gro {gro}"));
            }
        }
        assert_eq!(server.metrics().sum("turnpike_kernel_dropped_total", ""), 0);
    });
}

#[test]
fn checksums_are_correct_with_xdp() {
    need!(installed("tcpdump"));
    need!(installed("ethtool"));
    on_links(turnpike_testkit::this_test!(), |links| {
        // A veth leaves checksums to the receiver by default. XDP cannot see that and passes such packets to user space.
        for device in ["c", "p"] {
            ethtool(links, false, device, "gro", true);
            ethtool(links, true, device, "tx", false);
        }
        let server = links.serve(&["--datapath", "xdp"]);
        let mut pair = Pair::new(0, 0);
        eventually("packets are passed to user space", || {
            pair.exchange(100);
            server.passes("checksum") > 20
        });
        pair.client.refresh(0);
        eventually("the allocation has ended", || server.metrics().sum("turnpike_allocations", "") == 0);
        assert_eq!(server.across(), 0);
        links.behave_as_cards();
        sums_are_right(&server, "by XDP");
        assert_eq!(server.metrics().sum("turnpike_kernel_dropped_total", ""), 0);
    });
}

#[test]
fn kernel_headers_match_those_of_user_space() {
    need!(installed("tcpdump"));
    need!(installed("ethtool"));
    on_links(turnpike_testkit::this_test!(), |links| {
        let mut seen = Vec::new();
        links.behave_as_cards();
        for datapath in ["gso", "kernel", "xdp"] {
            let server = links.serve(&["--datapath", datapath]);
            let client = Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
            let peer = bound(PEER[0]);
            client.bind(0x4001, peer.local_addr().expect("bound"));
            client.socket().set_ttl(33).expect("a TTL");
            let lines = captured("p", "udp", || {
                // The first datagram of a channel goes through user space, and so do those that follow closely.
                if datapath != "gso" {
                    eventually("the kernel relays datagrams", || {
                        client.send(0x4001, b"payload");
                        received(&peer);
                        server.across() > 10
                    });
                }
                client.send(0x4001, b"LAST");
                received(&peer);
            });
            let header = lines
                .iter()
                .rev()
                .find(|line| line.contains("ttl 32"))
                .expect("the header of the last packet");
            let (before, after) = header.split_once(", id ").expect("an ID");
            let after = after.split_once(',').expect("more").1;
            let (_, before) = before.split_once(" IP ").expect("a header after the time");
            seen.push(format!("{before},{after}"));
            client.refresh(0);
            drop(server);
        }
        assert!(seen.iter().all(|header| *header == seen[0]), "{seen:#?}");
        assert!(seen[0].contains("flags [none]"), "{}", seen[0]);
    });
}
