//! An interrupted generator reports its measurements and cleans up.

use crate::prelude::*;

const FOR_AN_HOUR: [&str; 4] = ["--duration", "3600", "--warmup", "0"];

fn interrupt(mut load: Program, signal: &str) -> Value {
    load.line_with("received");
    load.signal(signal);
    let result = load.wait(SOON).ended(1).result();
    let number =
        |key: &str| result[key].as_f64().unwrap_or_else(|| panic!("{key} is not a number in {result}"));
    assert!(number("duration_s") > 0.0 && number("duration_s") < 3600.0, "{result}");
    assert!(number("sent") > 0.0, "{result}");
    assert_eq!(result["lost"], 0, "{result}");
    // Rates refer to the measured time, not to the requested hour.
    let rate = number("sent") / number("duration_s");
    assert!((number("send_pps") - rate).abs() <= rate * 0.01, "{result}");
    let notes = result["notes"].to_string();
    assert!(notes.contains("interrupted after") && notes.contains("of 3600 s"), "{result}");
    result
}

#[test]
fn interrupted_turn_clients_report_and_delete_their_allocations() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    for (signal, mode) in
        [("INT", &["--clients", "8", "--rate", "400"][..]), ("TERM", &["--mode", "allocate", "--rate", "20"])]
    {
        let load = serve.load(&reflect).with_words(&FOR_AN_HOUR).with_words(mode);
        interrupt(load.start(), signal);
        serve.wait_for_allocations(0);
    }
}

#[test]
fn interrupted_streams_and_datagrams_report() {
    let mut reflect = Reflect::start(V4, &["--tcp", "127.0.0.1:0"]);
    let line = reflect.program.line_with(" on tcp ");
    let tcp: SocketAddr =
        line.rsplit_once(' ').and_then(|(_, address)| address.parse().ok()).expect("an address at its end");
    for (kind, server, flags) in [
        ("tcp", tcp, &["-P", "2"][..]),
        ("tcp", tcp, &["--reverse"]),
        ("rr", tcp, &["--clients", "2", "--rate", "200"]),
        ("connect", tcp, &["--rate", "50"]),
        ("udp", reflect.address, &["--clients", "2", "--rate", "200"]),
    ] {
        let server = server.to_string();
        let arguments = [&["load", kind, &server, "--json", "-"][..], &FOR_AN_HOUR, flags].concat();
        interrupt(Program::start(&mut turnpike(&arguments)), "INT");
    }
}

#[test]
fn interrupted_run_prints_text_without_json() {
    let reflect = Reflect::start(V4, &[]);
    let server = reflect.address.to_string();
    let arguments = [&["load", "udp", &server, "--rate", "200"][..], &FOR_AN_HOUR].concat();
    let mut load = Program::start(&mut turnpike(&arguments));
    load.line_with("received");
    load.signal("INT");
    let ended = load.wait(SOON).ended(1);
    for words in ["sent ", "round trip in us: min ", "note: interrupted after"] {
        assert!(ended.stdout.contains(words), "no {words:?} in {}", ended.output());
    }
}

#[test]
fn run_interrupted_before_measuring_reports_nothing() {
    let reflect = Reflect::start(V4, &[]);
    let server = reflect.address.to_string();
    let arguments = ["load", "udp", &server, "--warmup", "3600", "--duration", "1", "--json", "-"];
    let mut load = Program::start(&mut turnpike(&arguments));
    load.line_with("(warm-up)");
    load.signal("INT");
    let ended = load.wait(SOON).ended(1);
    assert!(ended.stdout.is_empty(), "{}", ended.output());
    assert!(
        ended.stderr.contains("interrupted during the warm-up: nothing was measured"),
        "{}",
        ended.output()
    );
}
