//! Short-lived channels leave no flows behind.

use super::{CLIENT, PEER, SERVER, client::Client, client::bound, on_links};
use crate::prelude::*;

#[test]
fn thousands_of_short_lived_channels_leave_no_flow() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = links.serve(&[]);
        let flows = || server.metrics().sum("turnpike_kernel_flows", "");
        for round in 0..40 {
            let family = round % 2;
            let client = Client::allocate(CLIENT[family], SocketAddr::new(SERVER[family], 3478), family == 1);
            let peers: Vec<_> = (0..60).map(|_| bound(PEER[family])).collect();
            for (number, peer) in (0x4000..).zip(&peers) {
                client.bind(number, peer.local_addr().expect("bound"));
            }
            assert_eq!(flows(), 0, "nothing was sent");
            (0x4000..).zip(&peers).for_each(|(number, _)| client.send(number, b"used"));
            eventually("all channels have flows", || flows() == 120);
            client.refresh(0);
            assert_eq!(flows(), 0);
        }
        eventually("all allocations have ended", || server.metrics().sum("turnpike_allocations", "") == 0);
        assert_eq!(server.metrics().sum("turnpike_kernel_flows_refused_total", ""), 0);
    });
}
