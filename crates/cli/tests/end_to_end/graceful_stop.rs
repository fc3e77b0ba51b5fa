//! SIGTERM: no new allocations; existing ones relay until they are deleted or the deadline passes; a
//! second signal makes the server exit immediately.

use crate::prelude::*;
use std::io::{BufRead, BufReader};

const CLIENTS: &str = "4";

fn allocation(serve: &Serve, reflect: &Reflect, seconds: &str) -> Program {
    let load =
        serve.load(reflect).with(&format!("--clients {CLIENTS} --rate 200 --duration {seconds}")).start();
    serve.wait_for_allocations(CLIENTS.parse().expect("a number"));
    eventually("datagrams are relayed", || relayed(serve) > 0);
    load
}

fn relayed(serve: &Serve) -> u64 {
    serve.metrics().sum("turnpike_relayed_datagrams_total", "direction=\"to_client\"")
}

fn drain(serve: &Serve) {
    serve.program.signal("TERM");
    eventually("/healthz reports draining", || serve.health() == Some(503));
}

fn with_deadline(seconds: u32) -> Serve {
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", format!("[shutdown]\ndeadline = {seconds}\n"));
    Serve::start(&["-c", file.to_str().expect("the test's path is UTF-8")])
}

#[test]
fn existing_allocations_continue_and_new_ones_are_refused() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let existing = allocation(&serve, &reflect, "6");
    drain(&serve);

    let before = relayed(&serve);
    let late = serve.load(&reflect).with("--rate 10 --duration 1").run().ended(1);
    assert!(late.output().contains("508"), "{}", late.output());
    eventually("the existing allocation is still relayed", || relayed(&serve) > before);

    let existing = existing.wait(SOON).ended(0);
    assert_eq!(existing.result()["lost"], 0);

    let Serve { program, .. } = serve;
    let ended = program.wait(SOON).ended(0);
    let clients: usize = CLIENTS.parse().expect("a number");
    let allocations =
        ended.stderr.lines().filter(|line| line.contains("allocation ended") && line.contains(USER));
    let deleted = allocations.filter(|line| line.contains("deleted by the client")).count();
    assert_eq!(deleted, clients, "{}", ended.stderr);
}

#[test]
fn server_without_allocations_exits_immediately() {
    let serve = Serve::start(&[]);
    serve.program.signal("TERM");
    serve.program.wait(SOON).ended(0);
}

#[test]
fn interrupt_drains_like_termination() {
    let serve = Serve::start(&[]);
    serve.program.signal("INT");
    assert_eq!(serve.program.wait(SOON).code, Some(0));
}

#[test]
fn second_signal_ends_the_allocations() {
    let serve = with_deadline(86_400);
    let reflect = Reflect::start(V4, &[]);
    let _allocation = allocation(&serve, &reflect, "600");
    drain(&serve);
    serve.program.signal("TERM");
    serve.program.wait(SOON).ended(0).says("server stopped");
}

#[test]
fn deadline_ends_the_allocations() {
    let serve = with_deadline(1);
    let reflect = Reflect::start(V4, &[]);
    let _allocation = allocation(&serve, &reflect, "600");
    serve.program.signal("TERM");
    serve.program.wait(SOON).ended(0).says("ending the allocations still open").says("server stopped");
}

#[test]
fn server_survives_a_closed_log_pipe() {
    let mut command = turnpike(&["serve", "--listen", "127.0.0.1:0", "--admin", "off", "--user", "a:b"]);
    let mut server =
        command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary is there");
    let log = BufReader::new(server.stderr.take().expect("piped above"));
    // Dropping the iterator closes the pipe.
    let started = log.lines().map_while(Result::ok).any(|line| line.contains("no admin interface"));
    for signal in ["-HUP", "-TERM"] {
        let sent = Command::new("kill").args([signal, &server.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "the server has already stopped");
    }
    let code = eventually("the server stops", || server.try_wait().expect("the test's own child"));
    assert!(started && code.success(), "{code}");
}
