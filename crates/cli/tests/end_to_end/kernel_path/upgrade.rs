//! An upgrade of a server whose kernel relays: flows go up for the change, and across again in the new process.

use std::net::SocketAddr;

use super::{PEER, SERVER, on_links};
use crate::harness::{Load, Reflect, SOON, Upgraded, ends, eventually};

#[test]
fn flows_go_up_for_the_change_and_nothing_is_lost_or_reordered() {
    on_links("kernel_path::upgrade::flows_go_up_for_the_change_and_nothing_is_lost_or_reordered", |links| {
        let server = links.serve(&["--workers", "2"]);
        let reflect = Reflect::start(PEER[0], &[]);
        let mut upgraded = Upgraded::new(&server.program);
        let load = Load::as_user(SocketAddr::new(SERVER[0], 3478), "any:body")
            .with(&["--clients", "40", "--rate", "2000", "--warmup", "0.1", "--duration", "600"])
            .to(reflect.address)
            .start();
        let goes_across = || {
            let before = server.across();
            eventually("it goes across", || (server.across() > before + 2000).then_some(()));
        };
        goes_across();
        for _ in 0..2 {
            let flows = server.metrics().sum("turnpike_kernel_flows", "");
            assert_eq!(flows, 80);
            ends(upgraded.next());
            goes_across();
            assert_eq!(server.metrics().sum("turnpike_kernel_flows", ""), flows);
        }
        load.signal("INT");
        let result = load.wait(SOON).result();
        assert_eq!((result["lost"].as_u64(), result["reordered"].as_u64()), (Some(0), Some(0)), "{result}");
        assert_eq!(server.metrics().sum("turnpike_upgrades_total", "result=\"done\""), 2);
    });
}
