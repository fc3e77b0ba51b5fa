//! Spoofed sources: packets from outside cannot use an address of this machine as their source.

use super::{
    CLIENT, SERVER, by_each,
    client::{Client, is_silent},
};
use crate::prelude::*;

#[test]
fn packets_from_outside_cannot_spoof_a_relayed_address() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        links.inside(&["ip", "addr", "replace", "10.77.2.9/24", "dev", "p"]);
        let server =
            links.serve(&["--datapath", datapath, "--relay-ip", "10.77.2.1", "--relay-ip", "10.77.2.9"]);
        let allocate = || Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
        let (one, other) = eventually("two clients on two addresses", || {
            let (one, other) = (allocate(), allocate());
            (one.relayed.ip() != other.relayed.ip()).then_some((one, other))
        });
        one.bind(0x4001, other.relayed);
        other.bind(0x4001, one.relayed);
        let before = server.across();
        eventually("the kernel relays their flow", || {
            one.send(0x4001, b"mine");
            assert_eq!(other.receive(), Some((0x4001, b"mine".to_vec())));
            server.across() > before + 20
        });

        let (stolen, to) = (format!("{}/32", one.relayed.ip()), other.relayed.ip().to_string());
        run("ip", &["addr", "add", &stolen, "dev", "lo"]);
        // Nothing would answer ARP requests for the other client's relayed address.
        run(
            "ip",
            &["neigh", "replace", &to, "lladdr", &links.link_address(), "dev", "p", "nud", "permanent"],
        );
        let thief = UdpSocket::bind(one.relayed).expect("the address is assigned");
        let passes = server.passes("source");
        for _ in 0..20 {
            thief.send_to(b"not mine", other.relayed).expect("the send succeeds");
            // XDP would classify a faster rate as bulk.
            thread::sleep(Duration::from_millis(1));
        }
        eventually("the packets were seen", || server.passes("source") >= passes + 20);
        assert!(is_silent(other.socket()));
        run("ip", &["addr", "del", &stolen, "dev", "lo"]);

        let before = server.across();
        eventually("the kernel relays their flow again", || {
            one.send(0x4001, b"mine");
            assert_eq!(other.receive(), Some((0x4001, b"mine".to_vec())));
            server.across() > before + 20
        });
        assert_eq!(server.metrics().sum("turnpike_kernel_dropped_total", ""), 0);
    });
}
