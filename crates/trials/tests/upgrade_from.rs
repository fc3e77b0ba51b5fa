//! Upgrades in place from another build to this one and back, under load. `cargo xtask upgrade-from COMMIT` creates the other build, which
//! is started first; TURNPIKE_TEST_NEXT_BUILD is the path of this build.

use std::{
    env,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use turnpike_testkit::need;
use turnpike_trials::{
    Forward, Load, Program, Reflect, SOON, Serve, Upgraded, V4, ends, eventually,
    links::{PEER, SERVER, on_links},
    say_udp, udp_echo,
};

/// Number of clients.
const CLIENTS: &str = "20";
/// Datagrams per second, per client.
const RATE: &str = "1000";

fn builds() -> Result<[PathBuf; 2], &'static str> {
    let path = |name| env::var_os(name).map(PathBuf::from);
    match (path("TURNPIKE_TEST_PROGRAM"), path("TURNPIKE_TEST_NEXT_BUILD")) {
        (Some(first), Some(next)) => Ok([first, next]),
        _ => Err("run cargo xtask upgrade-from COMMIT"),
    }
}

/// Upgrades to the next build, back to the first, and to the next again; `goes_on` checks traffic after each.
#[must_use]
fn there_and_back(program: &Program, [first, next]: &[PathBuf; 2], mut goes_on: impl FnMut()) -> Upgraded {
    let mut upgraded = Upgraded::new(program);
    goes_on();
    for build in [next, first, next] {
        upgrade_to(&mut upgraded, build);
        goes_on();
    }
    upgraded
}

fn upgrade_to(upgraded: &mut Upgraded, build: &Path) {
    let before = upgraded.pid();
    let asked = upgraded.ask(&["--binary", build.to_str().expect("paths of builds are UTF-8")]);
    assert_eq!(asked.code, Some(0), "to {}: {}", build.display(), asked.output());
    upgraded.took_over(&asked.stdout);
    ends(before);
}

/// Ends the clients and asserts that every datagram was echoed, in order.
fn heard_all(load: Program) {
    load.signal("INT");
    let run = load.wait(SOON);
    let result = run.result();
    for key in ["lost", "reordered", "duplicated"] {
        assert_eq!(result[key], 0, "{key} in {result}\n{}", run.output());
    }
    println!("{} datagrams were echoed", result["received"]);
}

#[test]
#[ignore = "needs another build: cargo xtask upgrade-from COMMIT"]
fn server_clients_lose_nothing_across_builds() {
    let builds = need!(builds());
    let serve = Serve::start(&["--workers", "2"]);
    let reflect = Reflect::start(V4, &[]);
    let load = serve
        .load(&reflect)
        .with(&format!("--clients {CLIENTS} --rate {RATE} --warmup 0.1 --duration 600"))
        .start();
    let relayed = || serve.metrics().sum("turnpike_relayed_datagrams_total", "direction=\"to_client\"");
    let _serves = there_and_back(&serve.program, &builds, || {
        let before = relayed();
        eventually("datagrams are relayed", || relayed() > before + 2000);
    });
    heard_all(load);
    serve.wait_for_allocations(0);
}

/// After each upgrade, kernel flows exist again, in inherited or new maps.
#[test]
#[ignore = "needs another build: cargo xtask upgrade-from COMMIT"]
fn kernel_path_clients_lose_nothing_across_builds() {
    let builds = need!(builds());
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = links.serve(&["--workers", "2"]);
        let reflect = Reflect::start(PEER[0], &[]);
        let load = Load::as_user(SocketAddr::new(SERVER[0], 3478), "any:body")
            .with(&format!("--clients {CLIENTS} --rate {RATE} --warmup 0.1 --duration 600"))
            .to(reflect.address)
            .start();
        let _serves = there_and_back(&server.program, &builds, || {
            let before = server.across();
            eventually("the kernel relays datagrams", || server.across() > before + 2000);
        });
        heard_all(load);
        eventually("all sessions have ended", || server.metrics().sum("turnpike_allocations", "") == 0);
    });
}

#[test]
#[ignore = "needs another build: cargo xtask upgrade-from COMMIT"]
fn forwarder_traffic_continues_across_builds() {
    let builds = need!(builds());
    let target = udp_echo();
    let mut forward = Forward::start(&[&format!("udp://127.0.0.1:0={target}?name=echo")]);
    let listener = forward.address("rule echo");
    let _serves =
        there_and_back(&forward.program, &builds, || assert_eq!(say_udp(listener, "hello"), "hello"));
}
