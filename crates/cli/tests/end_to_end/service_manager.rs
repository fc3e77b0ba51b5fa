//! Notifications to a service manager through NOTIFY_SOCKET (sd_notify(3)).

use crate::prelude::*;
use std::os::unix::net::UnixDatagram;

struct Manager {
    socket: UnixDatagram,
    dir: Dir,
}

impl Manager {
    fn new() -> Self {
        let dir = Dir::new();
        let socket = UnixDatagram::bind(dir.path().join("notify")).expect("a fresh directory");
        socket.set_read_timeout(Some(SOON)).expect("the timeout is set");
        Self { socket, dir }
    }

    fn start(&self, arguments: &[&str]) -> Program {
        let mut command: Command = turnpike(arguments);
        command.env("NOTIFY_SOCKET", self.dir.path().join("notify")).env("WATCHDOG_USEC", "600000");
        Program::start(command.current_dir(self.dir.path()))
    }

    fn next(&self) -> Vec<String> {
        let mut message = [0; 4096];
        let len = self.socket.recv(&mut message).expect("another message arrives");
        std::str::from_utf8(&message[..len]).expect("UTF-8").lines().map(str::to_owned).collect()
    }

    fn next_event(&self) -> Vec<String> {
        let until = Instant::now() + SOON;
        while Instant::now() < until {
            let message = self.next();
            if !message[0].starts_with("WATCHDOG") && !message[0].starts_with("STATUS") {
                return message;
            }
        }
        panic!("nothing happened");
    }

    fn wait_for(&self, wanted: &str) {
        let until = Instant::now() + SOON;
        while !self.next().iter().any(|said| said == wanted) {
            assert!(Instant::now() < until, "no message {wanted}");
        }
    }
}

/// CLOCK_MONOTONIC timestamp in microseconds.
fn reloading_since(message: &[String]) -> u64 {
    assert_eq!(message[0], "RELOADING=1", "{message:?}");
    let since = message[1].strip_prefix("MONOTONIC_USEC=").expect("systemd requires the timestamp");
    since.parse().expect("microseconds")
}

#[test]
fn serve_notifies_ready_watchdog_reloading_and_stopping() {
    let manager = Manager::new();
    manager.dir.file("turnpike.toml", "[shutdown]\ndeadline = 7\n");
    let serve = manager.start(&[
        "serve",
        "-c",
        "turnpike.toml",
        "--listen",
        "127.0.0.1:0",
        "--relay-ip",
        "127.0.0.1",
        "--user",
        "a:b",
        "--admin",
        "off",
    ]);
    assert_eq!(manager.next(), ["READY=1"], "before anything else");
    manager.wait_for("STATUS=serving; allocations: 0");
    for _ in 0..3 {
        manager.wait_for("WATCHDOG=1");
    }
    serve.signal("HUP");
    let first = reloading_since(&manager.next_event());
    assert_eq!(manager.next_event(), ["READY=1"]);

    manager.dir.file("turnpike.toml", "[shutdwon]\n");
    serve.signal("HUP");
    assert!(reloading_since(&manager.next_event()) > first);
    assert_eq!(manager.next_event(), ["READY=1"], "the server keeps serving");
    manager.wait_for("STATUS=serving; allocations: 0; the last reload was refused: see the log");

    serve.signal("TERM");
    assert_eq!(manager.next_event(), ["STOPPING=1", "EXTEND_TIMEOUT_USEC=22000000"]);
    assert_eq!(serve.wait(SOON).code, Some(0));
}

#[test]
fn forward_notifies_ready_watchdog_and_stopping() {
    let manager = Manager::new();
    let rule = format!("tcp://127.0.0.1:0={}", tcp_echo());
    let forward = manager.start(&["forward", "--admin", "off", &rule]);
    assert_eq!(manager.next(), ["READY=1"]);
    for _ in 0..3 {
        manager.wait_for("WATCHDOG=1");
    }
    forward.signal("TERM");
    assert_eq!(manager.next_event()[0], "STOPPING=1");
    assert_eq!(forward.wait(SOON).code, Some(0));
}
