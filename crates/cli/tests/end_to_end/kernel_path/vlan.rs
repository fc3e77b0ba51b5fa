//! VLANs: a device of one is an interface like others, and what is tagged for another passes by.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use turnpike_testkit::alone::run;

use super::{
    CLIENT, Links, PEER, RELAY, SERVER, by_each,
    client::{Client, bound, is_silent, received},
};
use crate::harness::eventually;

/// A VLAN between the ends of link `p`: 10.77.NUMBER.1 inside, 10.77.NUMBER.2 outside.
fn lay(links: &Links, number: &str) {
    let name = format!("p.{number}");
    for (inside, end) in [(true, 1), (false, 2)] {
        let set = |words: &[&str]| {
            if inside { links.inside(&[&["ip"], words].concat()) } else { run("ip", words) }
        };
        set(&["link", "add", "link", "p", "name", &name, "type", "vlan", "id", number]);
        set(&["addr", "add", &format!("10.77.{number}.{end}/24"), "dev", &name]);
        set(&["link", "set", &name, "up"]);
    }
}

fn take_up(links: &Links, number: &str) {
    links.inside(&["ip", "link", "del", &format!("p.{number}")]);
    run("ip", &["link", "del", &format!("p.{number}")]);
}

#[test]
fn peers_in_a_vlan_are_reached_by_its_device() {
    by_each("kernel_path::vlan::peers_in_a_vlan_are_reached_by_its_device", |links, datapath| {
        lay(links, "5");
        let server = links.serve(&["--datapath", datapath, "--relay-ip", "10.77.5.1"]);
        let client = Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
        let peer = bound(IpAddr::from([10, 77, 5, 2]));
        client.bind(0x4001, peer.local_addr().expect("bound"));
        let before = server.across();
        eventually("it goes across", || {
            client.send(0x4001, b"out");
            assert_eq!(received(&peer), (b"out".to_vec(), client.relayed));
            peer.send_to(b"in", client.relayed).expect("it leaves");
            assert_eq!(client.receive(), Some((0x4001, b"in".to_vec())));
            (server.across() > before + 20).then_some(())
        });
        let counted = |direction| {
            server.metrics().sum("turnpike_kernel_datagrams_total", &format!("direction=\"{direction}\""))
        };
        // A VLAN's device has no driver: XDP leaves what is for it to user space, and takes what comes by it at TC.
        assert_eq!(counted("to_peer") > 0, datapath == "kernel");
        assert!(counted("to_client") > 0);
        drop(server);
        take_up(links, "5");
    });
}

#[test]
fn what_is_tagged_for_another_vlan_is_nobodys_flow() {
    by_each("kernel_path::vlan::what_is_tagged_for_another_vlan_is_nobodys_flow", |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let client = Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
        let peer = bound(PEER[0]);
        client.bind(0x4001, peer.local_addr().expect("bound"));
        let before = server.across();
        eventually("its flow is across", || {
            peer.send_to(b"mine", client.relayed).expect("it leaves");
            assert_eq!(client.receive(), Some((0x4001, b"mine".to_vec())));
            (server.across() > before + 20).then_some(())
        });

        // In VLAN 6, which the server's machine has no part in, the very same packets: same addresses, same ports.
        run("ip", &["link", "add", "link", "p", "name", "p.6", "type", "vlan", "id", "6"]);
        run("ip", &["link", "set", "p.6", "up"]);
        run("ip", &["route", "add", &format!("{}/32", RELAY[0]), "dev", "p.6", "src", &PEER[0].to_string()]);
        let address = links.link_address();
        run(
            "ip",
            &[
                "neigh",
                "replace",
                &RELAY[0].to_string(),
                "lladdr",
                &address,
                "dev",
                "p.6",
                "nud",
                "permanent",
            ],
        );
        let tagged = |peer: &UdpSocket| peer.send_to(b"of another", client.relayed).expect("it leaves");
        (0..20).for_each(|_| _ = tagged(&peer));
        assert!(is_silent(&client.socket));
        run("ip", &["link", "del", "p.6"]);
        eventually("without the tag it arrives", || {
            peer.send_to(b"mine again", client.relayed).expect("it leaves");
            client.receive() == Some((0x4001, b"mine again".to_vec()))
        });
        assert_eq!(server.metrics().sum("turnpike_kernel_dropped_total", ""), 0);
    });
}
