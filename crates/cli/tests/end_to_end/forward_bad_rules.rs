//! Unparsable rules: exit code 2, every error reported, no socket opened. Rules that cannot be bound:
//! reported with exit code 1, or skipped with `--keep-going`.

use crate::prelude::*;
use std::io::Read as _;

fn run(arguments: &[&str], file: Option<(&str, &str)>) -> Finished {
    let dir = Dir::new();
    if let Some((name, text)) = file {
        dir.file(name, text);
    }
    Program::start(turnpike(arguments).current_dir(dir.path())).wait(SOON)
}

/// One rule is valid but its port is taken, another is invalid: a program that reads everything before binding reports only the
/// error in the second.
#[test]
fn every_error_is_reported_before_a_socket_opens() {
    let holder = TcpListener::bind((V4, 0)).expect("loopback has a free port");
    let taken = holder.local_addr().expect("the port is bound");
    let conf = format!("127.0.0.1 {} 127.0.0.1 9\n0.0.0.0 80 10.0.0.1\nalow 10.*\n", taken.port());
    for arguments in [&["forward", "-c", "r.conf"][..], &["check-config", "--forward", "r.conf"]] {
        let ended = run(arguments, Some(("r.conf", &conf))).ended(2);
        let lines: Vec<&str> = ended.stderr.lines().collect();
        assert_eq!(lines.len(), 2, "{}", ended.stderr);
        assert!(
            lines[0].starts_with("turnpike: r.conf:2:20: the line ends before connectport"),
            "{}",
            ended.stderr
        );
        assert!(lines[1].starts_with("turnpike: r.conf:3:1: found \"alow\""), "{}", ended.stderr);
    }
}

#[test]
fn errors_on_the_command_line_quote_the_argument() {
    for (arguments, message) in [
        (&["forward", "tcp://0.0.0.0=a:1"][..], "argument tcp://0.0.0.0=a:1, column 7: rule.listen: "),
        (&["forward", "tcp://0.0.0.0:1=a:1", "--workers", "none"], "flag --workers: forward.workers: "),
        (&["forward", "tcp://0.0.0.0:1=a:1", "--copy", "sendfile"], "flag --copy: forward.copy: "),
        (&["forward"], "there is no forwarding rule"),
        (&["forward", "-c", "nowhere.conf"], "nowhere.conf: cannot read the configuration file"),
        (&["forward", "--nonsense"], "--nonsense"),
    ] {
        let ended = run(arguments, None);
        assert_eq!(ended.code, Some(2), "{arguments:?}: {}", ended.output());
        assert!(ended.stderr.contains(message), "{arguments:?}: {}", ended.stderr);
    }
}

#[test]
fn check_prints_the_rules_as_toml_that_checks_again() {
    let conf = "allow 10.*\n0.0.0.0 80 10.0.0.1 8080\n127.0.0.1 53/udp dns.example.org 53/udp [timeout=5]\n";
    let ended = run(&["forward", "-c", "r.conf", "--check"], Some(("r.conf", conf))).ended(0);
    let toml = ended.stdout.strip_prefix("ok\n").expect("the output starts with ok");
    assert!(toml.contains("# r.conf is read as rinetd.conf\n"), "{toml}");
    assert!(
        toml.contains("target = \"dns.example.org:53\"\nidle = 5") && toml.contains("allow = [\"10.*\"]"),
        "{toml}"
    );
    run(&["check-config", "--forward", "f.toml"], Some(("f.toml", toml))).ended(0);
}

#[test]
fn unbindable_rule_is_named_and_skipped_with_keep_going() {
    let holder = TcpListener::bind((V4, 0)).expect("loopback has a free port");
    let taken = holder.local_addr().expect("the port is bound");
    let good = format!("tcp://127.0.0.1:0={}?name=good", tcp_echo());
    // RFC 5737: no machine has this address.
    for (bad, place) in [
        (format!("tcp://{taken}=127.0.0.1:9?name=bad"), taken.to_string()),
        ("tcp://192.0.2.1:9000=127.0.0.1:9?name=bad".to_owned(), "192.0.2.1:9000".to_owned()),
        ("udp://192.0.2.1:9000=127.0.0.1:9?name=bad".to_owned(), "192.0.2.1:9000".to_owned()),
    ] {
        let message = format!("rule bad: cannot listen on {place}");
        run(&["forward", &good, &bad, "--admin", "off"], None).ended(1).says(&message);

        let mut forward = Forward::start(&[&good, &bad, "--keep-going"]);
        forward.program.line_with(&message);
        let address = forward.address("rule good");
        assert_eq!(say(&mut connect(address), "it runs"), "it runs");
    }
}

#[test]
fn unresolvable_listener_is_named() {
    let ended = run(&["forward", "tcp://nowhere.invalid:80=127.0.0.1:9", "--admin", "off"], None).ended(1);
    let told = "rule tcp://nowhere.invalid:80: cannot listen on nowhere.invalid:80: ";
    assert!(ended.stderr.contains(told) && ended.stderr.contains("; check the name"), "{}", ended.stderr);
}

#[test]
fn impossible_outgoing_socket_names_the_rule() {
    let good = format!("tcp://127.0.0.1:0={}?name=good", tcp_echo());
    for (option, message) in [
        ("source=203.0.113.1", "rule bad: cannot send from 203.0.113.1: "),
        ("device=no-such-device", "rule bad: cannot send through device no-such-device: "),
    ] {
        for scheme in ["tcp", "udp"] {
            let bad = format!("{scheme}://127.0.0.1:0=127.0.0.1:9?name=bad&{option}");
            run(&["forward", &good, &bad, "--admin", "off"], None).ended(1).says(message);
            let mut forward = Forward::start(&[&good, &bad, "--keep-going"]);
            forward.program.line_with(message);
            let address = forward.address("rule good");
            assert_eq!(say(&mut connect(address), "it runs"), "it runs");
        }
    }
}

#[test]
fn unreachable_targets_and_recovery_are_logged_once() {
    let target = TcpListener::bind((V4, 0))
        .expect("loopback has a free port")
        .local_addr()
        .expect("the port is bound");
    let mut forward = Forward::start(&[&format!("tcp://127.0.0.1:0={target}?name=a")]);
    let address = forward.address("rule a");
    for count in 1..=3 {
        // The connection is reset immediately, perhaps before connect(2) returns.
        let refused = TcpStream::connect_timeout(&address, SOON);
        let _ = refused.and_then(|mut refused| refused.read(&mut [0; 1]));
        forward.wait_for("turnpike_forward_ended_total", "rule=\"a\",reason=\"connect_failed\"", count);
    }
    let told = forward.program.line_with("no target is reachable; resetting clients");
    assert!(told.contains(&format!("to={target}")) && told.contains("refused"), "{told}");
    let _back = TcpListener::bind(target).expect("the port is still free");
    let _served = connect(address);
    forward.program.line_with("a target is reachable again");
    let lines = forward.program.lines();
    assert_eq!(lines.iter().filter(|line| line.contains("resetting clients")).count(), 1, "{lines:?}");
}
