//! Channels that come and go leave nothing behind.

use std::net::SocketAddr;

use super::{CLIENT, PEER, SERVER, client::Client, on_links};
use crate::harness::eventually;

#[test]
fn channels_that_come_and_go_by_the_thousand_leave_no_flow() {
    on_links("kernel_path::churn::channels_that_come_and_go_by_the_thousand_leave_no_flow", |links| {
        let server = links.serve(&[]);
        for round in 0..40_u16 {
            let family = usize::from(round % 2);
            let client = Client::allocate(CLIENT[family], SocketAddr::new(SERVER[family], 3478), family == 1);
            for channel in 0..60 {
                client.bind(0x4000 + channel, SocketAddr::new(PEER[family], 2000 + round * 60 + channel));
            }
            assert_eq!(server.metrics().sum("turnpike_kernel_flows", ""), 120);
            client.refresh(0);
            assert_eq!(server.metrics().sum("turnpike_kernel_flows", ""), 0);
        }
        eventually("all have ended", || server.metrics().sum("turnpike_allocations", "") == 0);
        assert_eq!(server.metrics().sum("turnpike_kernel_flows_refused_total", ""), 0);
    });
}
