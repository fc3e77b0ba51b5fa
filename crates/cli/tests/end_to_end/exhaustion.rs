//! Exhausted resources: each refused client gets a 508 and is counted, and one log line gives the remedy.

use crate::prelude::*;

#[test]
fn exhausted_port_range_is_logged_once_with_the_remedy() {
    // Two ports in the upper half; if another program uses one of them, the range is smaller, which does
    // not matter.
    let first = free_port(V4).clamp(32_768, 65_000);
    let ports = format!("{first}-{}", first + 1);
    let mut serve = Serve::start(&["--workers", "1", "--relay-ports", &ports]);
    let load = Load::new(serve.address(V4))
        .to(SocketAddr::new(V4, free_port(V4)))
        .with("--clients 8 --rate 100 --duration 1")
        .run()
        .ended(1);
    assert!(load.output().contains("508"), "{}", load.output());

    let line = serve.program.line_with("relay port");
    assert!(line.contains("--relay-ports"), "{line}");
    let lines = serve.program.lines().iter().filter(|line| line.contains("--relay-ports")).count();
    assert_eq!(lines, 1, "once, not once per refusal: {:?}", serve.program.lines());
    eventually("the refusals are counted", || {
        let metrics = serve.metrics();
        let exhausted = metrics.sum("turnpike_ports_exhausted_total", "") > 0;
        exhausted && metrics.sum("turnpike_error_responses_total", "code=\"508\"") > 0
    });
}

#[test]
fn open_files_warning_appears_once_per_cause() {
    alone::with_descriptors(turnpike_testkit::this_test!(), 400, || {
        let dir = Dir::new();
        let file = dir.file("turnpike.toml", "");
        let mut serve = Serve::start(&["--workers", "1", "-c", file.to_str().expect("UTF-8")]);
        for (text, change, warnings) in [
            ("[limits]\npermissions = 7\n", "limits.permissions: 64 -> 7", 1),
            ("[limits]\npermissions = 8\n", "limits.permissions: 7 -> 8", 1),
            ("[limits]\npermissions = 8\n[relay]\nports = \"50000-50999\"\n", "relay.ports", 2),
        ] {
            fs::write(&file, text).expect("the test's own file");
            serve.program.signal("HUP");
            serve.program.line_with(change);
            let lines = serve.program.lines();
            let told = lines.iter().filter(|line| line.contains("the limit on open files is 400")).count();
            assert_eq!(told, warnings, "{text}: {lines:?}");
        }
    });
}
