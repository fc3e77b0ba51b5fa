//! The usage ledger on the kernel path: bytes that the kernel relayed are exact, also across an upgrade.

use crate::prelude::*;

use super::{PEER, SERVER, by_each};

#[test]
fn usage_of_kernel_flows_is_exact_across_an_upgrade() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let dir = Dir::new();
        let config = dir.file("turnpike.toml", "[usage]\ndays = 2\n").display().to_string();
        let state = dir.path().join("state").display().to_string();
        let server =
            links.serve(&["--workers", "2", "--datapath", datapath, "-c", &config, "--state", &state]);
        let reflect = Reflect::start(PEER[0], &[]);
        let mut upgraded = Upgraded::new(&server.program);
        let load = Load::as_user(SocketAddr::new(SERVER[0], 3478), "any:body")
            .with("--clients 10 --rate 1000 --size 200 --warmup 0 --duration 12")
            .to(reflect.address)
            .start();
        eventually("the kernel relays the traffic", || server.across() > 2000);
        let sums = || {
            let list: Value = serde_json::from_str(&server.get("/v1/usage?by=realm")).expect("JSON");
            let of = |pointer: &str| list.pointer(pointer).and_then(Value::as_u64).unwrap_or_default();
            ["to_peer/datagrams", "to_peer/bytes", "to_client/datagrams", "to_client/bytes", "allocations"]
                .map(|member| of(&format!("/usage/0/{member}")))
        };
        eventually("some usage is recorded", || sums()[0] > 0);
        ends(upgraded.upgrade());
        let result = load.wait(SOON).result();
        let [sent, received, lost] =
            ["sent", "received", "lost"].map(|key| result[key].as_u64().unwrap_or(u64::MAX));
        assert_eq!(lost, 0, "{result}");
        eventually("all usage is recorded", || sums()[3] >= received * 200);
        assert_eq!(sums(), [sent, sent * 200, received, received * 200, 10]);
    });
}
