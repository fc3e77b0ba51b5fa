//! Specifics of `--datapath xdp`: neighbours that user space must resolve, and links without driver
//! support.

use super::{client::received, on_links, relays::Pair, run};
use crate::prelude::*;

#[test]
fn unknown_neighbour_is_resolved_by_user_space_traffic() {
    need!(installed("ethtool"));
    on_links(turnpike_testkit::this_test!(), |links| {
        links.behave_as_cards();
        let server = links.serve(&["--datapath", "xdp"]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        // The kernel forgets the peer's link-layer address and resolves it again when user space sends.
        let before = server.passes("no_neighbour");
        links.inside(&["ip", "neigh", "flush", "dev", "p"]);
        pair.client.send(0x4001, b"where?");
        assert_eq!(received(&pair.peer).0, b"where?");
        eventually("the packet was seen", || {
            pair.exchange(30);
            links.inside(&["ip", "neigh", "flush", "dev", "p"]);
            server.passes("no_neighbour") > before
        });
        pair.settle(&server);
        assert_eq!(server.metrics().sum("turnpike_kernel_dropped_total", ""), 0);
    });
}

#[test]
fn generic_xdp_relays_if_requested() {
    need!(installed("ethtool"));
    on_links(turnpike_testkit::this_test!(), |links| {
        links.behave_as_cards();
        let mut server = links.serve(&["--datapath", "xdp-generic"]);
        let line = server.program.line_with("data path kernel: attached");
        assert!(line.contains(" to c, p (xdp-generic)"), "{line}");
        let mut pair = Pair::new(0, 1);
        pair.settle(&server);
    });
}

#[test]
fn startup_without_driver_support_fails_with_the_reason() {
    on_links(turnpike_testkit::this_test!(), |links| {
        for name in ["c", "p"] {
            links.inside(&["ip", "link", "del", name]);
        }
        links.inside(&["ip", "link", "add", "c", "type", "bridge"]);
        links.inside(&["ip", "addr", "add", "10.77.1.1/24", "dev", "c"]);
        links.inside(&["ip", "link", "set", "c", "up"]);
        let mut command = std::process::Command::new("nsenter");
        command.args(links.nsenter()).env_clear();
        let flags = ["serve", "--listen", "10.77.1.1:3478", "--admin", "off", "--datapath", "xdp"];
        let serve = turnpike(&flags);
        command.arg(serve.get_program()).args(serve.get_args());
        let ended = Program::start(&mut command).wait(SOON).ended(1);
        for said in ["--datapath kernel", "c: a virtual interface (bridge)", "xdp-generic"] {
            assert!(ended.stderr.contains(said), "{said}: {}", ended.output());
        }
    });
}

/// A veth silently drops redirected packets by default.
#[test]
fn veth_that_drops_redirects_is_named_with_the_remedy() {
    need!(installed("ethtool"));
    on_links(turnpike_testkit::this_test!(), |links| {
        run("ethtool", &["-K", "c", "gro", "on"]);
        let mut server = links.serve(&["--datapath", "xdp"]);
        let line = server.program.line_with("data path kernel: attached");
        assert!(line.contains("c (xdp)") && line.contains("p (tcx"), "{line}");
        let line = server.program.line_with("data path kernel: attached to p at ");
        assert!(line.contains("gro on"), "{line}");
    });
}
