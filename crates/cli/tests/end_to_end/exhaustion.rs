//! When something runs out: the client gets 508, the operator one sentence with the remedy, the counter the rest.

use std::net::SocketAddr;

use super::harness::{Load, Serve, V4, eventually, free_port};

#[test]
fn an_exhausted_port_range_is_one_sentence_with_the_remedy() {
    // Two ports somewhere in the upper half; that other programs hold one only makes the range smaller.
    let first = free_port(V4).clamp(32_768, 65_000);
    let ports = format!("{first}-{}", first + 1);
    // One worker: each says it once.
    let mut serve = Serve::start(&["--workers", "1", "--relay-ports", &ports]);
    let load = Load::new(serve.address(V4))
        .to(SocketAddr::new(V4, free_port(V4)))
        .with(&["--clients", "8", "--rate", "100", "--duration", "1"])
        .run();
    assert_eq!(load.code, Some(1), "{}", load.output());
    assert!(load.output().contains("508"), "{}", load.output());

    let line = serve.program.line_with("relay port");
    assert!(line.contains("--relay-ports"), "{line}");
    let lines = serve.program.lines().iter().filter(|line| line.contains("--relay-ports")).count();
    assert_eq!(lines, 1, "once, not once per refusal: {:?}", serve.program.lines());
    eventually("the refusals are counted", || {
        let metrics = serve.metrics();
        let exhausted = metrics.sum("turnpike_ports_exhausted_total", "") > 0;
        (exhausted && metrics.sum("turnpike_error_responses_total", "code=\"508\"") > 0).then_some(())
    });
}

#[test]
fn a_user_gets_no_more_allocations_than_the_quota() {
    let dir = super::harness::Dir::new();
    let file = dir.file("turnpike.toml", "[limits]\nallocations_per_user = 3\n");
    let serve = Serve::start(&["-c", file.to_str().expect("our own path is UTF-8")]);
    let load = Load::new(serve.address(V4))
        .to(SocketAddr::new(V4, free_port(V4)))
        .with(&["--clients", "8", "--rate", "100", "--duration", "1"])
        .run();
    assert_eq!(load.code, Some(1), "{}", load.output());
    assert!(load.output().contains("486"), "{}", load.output());
    eventually("the refusal is counted", || {
        (serve.metrics().sum("turnpike_limit_refusals_total", "limit=\"user\"") > 0).then_some(())
    });
}
