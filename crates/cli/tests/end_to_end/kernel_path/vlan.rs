//! VLANs: a VLAN device works like any interface, and packets tagged for another VLAN are ignored.

use super::{
    CLIENT, Links, PEER, SERVER, by_each,
    client::{Client, bound, is_silent, received},
    on_links,
};
use crate::prelude::*;

/// Adds a VLAN to both ends of link `p`: 10.77.NUMBER.1 inside, 10.77.NUMBER.2 outside. Returns false with a message if the kernel
/// does not support VLANs.
fn lay(links: &Links, number: &str) -> bool {
    let name = format!("p.{number}");
    let probe = ["link", "add", "link", "p", "name", "probe", "type", "vlan", "id", "99"];
    if !Command::new("ip").args(probe).status().is_ok_and(|status| status.success()) {
        skip("this kernel has no VLAN devices");
        return false;
    }
    run("ip", &["link", "del", "probe"]);
    for (inside, end) in [(true, 1), (false, 2)] {
        let set = |words: &[&str]| {
            if inside { links.inside(&[&["ip"], words].concat()) } else { run("ip", words) }
        };
        set(&["link", "add", "link", "p", "name", &name, "type", "vlan", "id", number]);
        set(&["addr", "add", &format!("10.77.{number}.{end}/24"), "dev", &name]);
        set(&["link", "set", &name, "up"]);
    }
    true
}

fn take_up(links: &Links, number: &str) {
    links.inside(&["ip", "link", "del", &format!("p.{number}")]);
    run("ip", &["link", "del", &format!("p.{number}")]);
}

#[test]
fn peers_on_a_vlan_are_reached_through_its_device() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        if !lay(links, "5") {
            return;
        }
        let server = links.serve(&["--datapath", datapath, "--relay-ip", "10.77.5.1"]);
        let client = Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
        let peer = bound(IpAddr::from([10, 77, 5, 2]));
        client.bind(0x4001, peer.local_addr().expect("bound"));
        let before = server.across();
        eventually("the kernel relays the traffic", || {
            client.send(0x4001, b"out");
            assert_eq!(received(&peer), (b"out".to_vec(), client.relayed));
            peer.send_to(b"in", client.relayed).expect("the send succeeds");
            assert_eq!(client.receive(), Some((0x4001, b"in".to_vec())));
            server.across() > before + 20
        });
        let counted = |direction| {
            server.metrics().sum("turnpike_kernel_datagrams_total", &format!("direction=\"{direction}\""))
        };
        // A VLAN device has no XDP support in its driver: user space relays towards it, and TC relays from it.
        assert_eq!(counted("to_peer") > 0, datapath == "kernel");
        assert!(counted("to_client") > 0);
        drop(server);
        take_up(links, "5");
    });
}

/// If the network card does not insert the tag, the tag is part of the VLAN device's header.
#[test]
fn packets_too_long_for_a_vlan_use_user_space() {
    need!(installed("ethtool"));
    on_links(turnpike_testkit::this_test!(), |links| {
        links.inside(&["ethtool", "-K", "p", "txvlan", "off"]);
        if !lay(links, "5") {
            return;
        }
        let server = links.serve(&["--listen", "10.77.5.1:3478", "--relay-ip", "10.77.1.1"]);
        let client = Client::allocate([10, 77, 5, 2].into(), ([10, 77, 5, 1], 3478).into(), false);
        let peer = bound(CLIENT[0]);
        client.bind(0x4001, peer.local_addr().expect("bound"));
        let exchange = |len: usize| {
            peer.send_to(&vec![7; len], client.relayed).expect("the send succeeds");
            assert_eq!(client.receive(), Some((0x4001, vec![7; len])));
        };
        let before = server.across();
        eventually("the kernel relays the traffic", || {
            exchange(1468);
            server.across() > before + 20
        });
        let before = server.passes("too_big");
        (1469..=1472).for_each(exchange);
        assert_eq!(server.passes("too_big"), before + 4);
        drop(server);
        take_up(links, "5");
    });
}

#[test]
fn packets_of_another_vlan_match_no_flow() {
    need!(installed("python3"));
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let client = Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
        let peer = bound(PEER[0]);
        client.bind(0x4001, peer.local_addr().expect("bound"));
        let before = server.across();
        eventually("the kernel relays the flow", || {
            peer.send_to(b"mine", client.relayed).expect("the send succeeds");
            assert_eq!(client.receive(), Some((0x4001, b"mine".to_vec())));
            server.across() > before + 20
        });

        // Otherwise identical packets: one without a VLAN tag, and one with the tag of a VLAN that the server's machine does not
        // have.
        let (from, to) = (peer.local_addr().expect("bound"), client.relayed);
        send_frames(&[frame(links, None, from, to, b"by hand")]);
        assert_eq!(client.receive(), Some((0x4001, b"by hand".to_vec())));
        send_frames(&vec![frame(links, Some(6), from, to, b"of another"); 20]);
        assert!(is_silent(client.socket()));
        send_frames(&[frame(links, None, from, to, b"once more")]);
        assert_eq!(client.receive(), Some((0x4001, b"once more".to_vec())));
        assert_eq!(server.metrics().sum("turnpike_kernel_dropped_total", ""), 0);
    });
}

fn frame(links: &Links, vlan: Option<u16>, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> String {
    let octets = |address: SocketAddr| match address.ip() {
        IpAddr::V4(ip) => ip.octets(),
        IpAddr::V6(_) => panic!("the test supports only IPv4"),
    };
    let length = |more: usize| u16::try_from(payload.len() + more).expect("short").to_be_bytes();
    let mut ip =
        [&[0x45, 0][..], &length(28), &[0, 1, 0, 0, 64, 17, 0, 0], &octets(from), &octets(to)].concat();
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let [.., high, low] = ((sum & 0xffff) + (sum >> 16)).to_be_bytes();
    ip[10..12].copy_from_slice(&[!high, !low]);
    // The UDP checksum is optional in IPv4.
    let udp =
        [&from.port().to_be_bytes()[..], &to.port().to_be_bytes(), &length(8), &[0, 0], payload].concat();
    let link = links.link_address().replace(':', "");
    let tag = vlan.map_or_else(String::new, |vlan| format!("8100{vlan:04x}"));
    let rest: String = [ip, udp].concat().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{link}020000000009{tag}0800{rest}")
}

fn send_frames(frames: &[String]) {
    const SCRIPT: &str = "import socket, sys\n\
        link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\n\
        link.bind(('p', 0))\n\
        for frame in sys.argv[1:]: link.send(bytes.fromhex(frame))\n";
    let frames: Vec<&str> = frames.iter().map(String::as_str).collect();
    run("python3", &[&["-c", SCRIPT], &frames[..]].concat());
}
