//! `turnpike public-address` with a fake metadata service, and `serve` with its files.

use crate::prelude::*;

/// A namespace gives the service its usual address, 169.254.169.254.
#[test]
fn serve_relays_on_the_address_of_the_metadata_service() {
    need!(installed("python3"));
    let inside = need!(namespace(
        "ip addr add 10.9.8.7/32 dev lo && ip addr add 169.254.169.254/32 dev lo && ip route add default dev lo src 10.9.8.7"
    ));
    let cloud = Dir::new();
    let instance = "computeMetadata/v1/instance";
    cloud.file(&format!("{instance}/network-interfaces/0/access-configs/0/external-ip"), "203.0.113.9");
    cloud.file(&format!("{instance}/zone"), "projects/1/zones/europe-west1-b");
    let binary = env!("CARGO_BIN_EXE_turnpike");
    let (cloud, place) = (cloud.path().display(), cloud.at("run/place"));
    let place = place.display();
    let script = format!(
        "{{ {binary} public-address; echo status $?; \
         python3 -m http.server --bind 169.254.169.254 --directory {cloud} 80 >&2 & \
         for try in $(seq 300); do {binary} public-address && break; sleep 0.1; done; \
         {binary} public-address --out {place} && \
         TURNPIKE_RELAY_ADDRESSES_FILE={place}/relay-addresses TURNPIKE_FLEET_ZONE_FILE={place}/zone {binary} check-config; }}"
    );
    let run = Program::run(&mut inside(&script));
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert!(lines.starts_with(&["status 1", "10.9.8.7=203.0.113.9", "ok"]), "{}", run.output());
    assert!(run.stderr.contains("no answer from 169.254.169.254:80"), "{}", run.output());
    for setting in ["addresses = [\"10.9.8.7=203.0.113.9\"]", "zone = \"europe-west1-b\""] {
        assert!(lines.iter().any(|line| line.starts_with(setting)), "{setting}: {}", run.output());
    }
}

#[test]
fn missing_pod_or_network_is_reported() {
    let inside = need!(namespace("ip addr add 10.9.8.7/32 dev lo"));
    let binary = env!("CARGO_BIN_EXE_turnpike");
    Program::run(&mut inside(&format!("{binary} public-address --from node")))
        .ended(1)
        .says("no default route");
    let inside =
        need!(namespace("ip addr add 10.9.8.7/32 dev lo && ip route add default dev lo src 10.9.8.7"));
    Program::run(&mut inside(&format!("unset NODE_NAME; {binary} public-address --from node")))
        .ended(1)
        .says("NODE_NAME is not set");
}
