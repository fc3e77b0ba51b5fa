//! SIGHUP: rules are added, changed and removed while a transfer loses no byte; an invalid file changes
//! nothing.

use crate::prelude::*;
use std::net::Shutdown;

const TRANSFER: usize = 48 << 20;

fn rule(name: &str, target: std::net::SocketAddr, more: &str) -> String {
    format!("[[rule]]\nname = \"{name}\"\nlisten = \"127.0.0.1:0\"\ntarget = \"{target}\"\n{more}")
}

/// Byte at a position; the sequence has no period that could hide a lost or repeated piece.
fn byte_at(position: usize) -> u8 {
    let mixed = (position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed.to_be_bytes()[0]
}

/// Sends [`TRANSFER`] bytes through an echo and counts correct bytes up to the first wrong one.
fn transfer(stream: TcpStream) -> thread::JoinHandle<usize> {
    let mut writer = stream.try_clone().expect("a socket can be cloned");
    thread::spawn(move || {
        let mut sent = 0;
        while sent < TRANSFER {
            let piece: Vec<u8> = (sent..sent + (64 << 10)).map(byte_at).collect();
            writer.write_all(&piece).expect("the connection stays open");
            sent += piece.len();
        }
        writer.shutdown(Shutdown::Write).expect("half-close");
    });
    thread::spawn(move || {
        let mut stream = stream;
        let mut buffer = vec![0; 64 << 10];
        let mut received = 0;
        loop {
            let len = stream.read(&mut buffer).expect("the connection stays open");
            if len == 0 {
                return received;
            }
            let wrong = buffer[..len].iter().enumerate().find(|(at, byte)| byte_at(received + at) != **byte);
            assert_eq!(wrong.map(|(at, _)| received + at), None, "a wrong byte");
            received += len;
        }
    })
}

#[test]
fn reload_changes_rules_without_losing_a_byte() {
    let (one, two) = (tcp_echo(), tcp_echo());
    let mut forward = Forward::start_file("f.toml", &rule("a", one, ""));
    let a = forward.address("rule a");
    let running = transfer(connect(a));

    forward.write("f.toml", &(rule("a", one, "") + &rule("b", two, "")));
    forward.reload("rules reloaded rules=2 added=\"b\"");
    assert_eq!(forward.metrics().sum("turnpike_forward_accepted_total", "rule=\"b\""), 0);
    forward.reload("rules reloaded; no changes rules=2");
    forward.write("f.toml", "[[rule]]\nlisen = \"127.0.0.1:0\"\n");
    forward.reload("the old ones stay in use");
    forward.program.line_with("f.toml:2:1: rule.lisen: unknown key");
    assert_eq!(say(&mut connect(a), "still there"), "still there");
    forward.write("f.toml", &(rule("a", two, "idle = 600\n") + &rule("b", two, "")));
    forward.reload("rules reloaded rules=2 changed=\"a\"");
    forward.write("f.toml", &(String::from("[forward]\nresolve_every = 99\n") + &rule("b", two, "")));
    forward.reload("rules reloaded rules=1 removed=\"a\" settings_changed=\"forward.resolve_every\"");
    assert!(TcpStream::connect(a).is_err(), "the listener of a removed rule is open");

    assert_eq!(running.join().expect("no wrong byte"), TRANSFER);
}

#[test]
fn reload_rereads_included_files_and_names_the_invalid_one() {
    let target = tcp_echo();
    let main = format!("include = [\"*.rules\"]\n{}", rule("a", target, ""));
    let mut forward = Forward::start_file("f.toml", &main);
    let a = forward.address("rule a");
    forward.program.line_with("include \"*.rules\" matches no file");
    // A reload logs no listener addresses, so the test uses a port that was just free.
    let holder = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    let b = holder.local_addr().expect("the port is bound");
    drop(holder);
    forward.write("b.rules", &rule("b", target, "").replace("127.0.0.1:0", &b.to_string()));
    forward.reload("rules reloaded");
    forward.program.line_with("b.rules is included");
    assert_eq!(say(&mut connect(b), "from another file"), "from another file");

    forward.write("c.rules", "\n[[rule]]\nlisen = \"127.0.0.1:0\"\n");
    forward.reload("the old ones stay in use");
    forward.program.line_with("c.rules:3:1: rule.lisen: unknown key");
    assert_eq!(say(&mut connect(b), "still there"), "still there");
    assert_eq!(say(&mut connect(a), "still there"), "still there");
}

#[test]
fn metrics_have_a_label_per_target() {
    let (one, two) = (tcp_echo(), tcp_echo());
    let text =
        format!("[[rule]]\nname = \"a\"\nlisten = \"127.0.0.1:0\"\ntarget = [\"{one}*2\", \"{two}\"]\n");
    let mut forward = Forward::start_file("f.toml", &text);
    let address = forward.address("rule a");
    let labels = |target| format!("rule=\"a\",target=\"{target}\",address=\"{target}\"");
    assert_eq!(forward.metrics().sum("turnpike_forward_target_up", &labels(one)), 1);
    for _ in 0..6 {
        assert_eq!(say(&mut connect(address), "four"), "four");
    }
    for (target, connections) in [(one, 4), (two, 2)] {
        let labels = labels(target);
        for (family, wanted) in [
            ("connected_total", connections),
            ("connect_seconds_count", connections),
            ("bytes_total", 8 * connections),
            ("connections", 0),
            ("failed_total", 0),
            ("up", 1),
        ] {
            forward.wait_for(&format!("turnpike_forward_target_{family}"), &labels, wanted);
        }
    }
}
