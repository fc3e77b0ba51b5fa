//! When something runs out: the client gets 508, the operator one sentence with the remedy, the counter the rest.

use crate::prelude::*;

#[test]
fn an_exhausted_port_range_is_one_sentence_with_the_remedy() {
    // Two ports somewhere in the upper half; that other programs hold one only makes the range smaller.
    let first = free_port(V4).clamp(32_768, 65_000);
    let ports = format!("{first}-{}", first + 1);
    // One worker: each says it once.
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
fn the_warning_about_open_files_comes_once_for_each_need() {
    alone::with_descriptors(turnpike_testkit::this_test!(), 400, || {
        let dir = Dir::new();
        let file = dir.file("turnpike.toml", "");
        let mut serve = Serve::start(&["--workers", "1", "-c", file.to_str().expect("UTF-8")]);
        for (text, change, warnings) in [
            ("[limits]\npermissions = 7\n", "limits.permissions: 64 -> 7", 1),
            ("[limits]\npermissions = 8\n", "limits.permissions: 7 -> 8", 1),
            ("[limits]\npermissions = 8\n[relay]\nports = \"50000-50999\"\n", "relay.ports", 2),
        ] {
            fs::write(&file, text).expect("our own file");
            serve.program.signal("HUP");
            serve.program.line_with(change);
            let lines = serve.program.lines();
            let told = lines.iter().filter(|line| line.contains("the limit of open files is 400")).count();
            assert_eq!(told, warnings, "{text}: {lines:?}");
        }
    });
}
