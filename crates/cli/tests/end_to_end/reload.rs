//! SIGHUP reads the configuration again: a good one is taken while sessions live on, a broken one changes nothing.

use std::fs;

use super::harness::{Dir, Finished, Load, Reflect, SOON, Serve, V4};

fn allocate(serve: &Serve, user: &str) -> Finished {
    Load::as_user(serve.address(V4), user)
        .with(&["--mode", "allocate", "--rate", "20", "--duration", "1"])
        .run()
}

#[test]
fn a_good_file_changes_who_may_enter_and_a_broken_one_nothing() {
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", "[auth]\nusers = [\"a:one\"]\n");
    let path = file.to_str().expect("our own path is UTF-8");
    let mut serve =
        Serve::start_bare(&["-c", path, "--relay-ip", "127.0.0.1", "--allow-peer", "127.0.0.0/8"]);
    let reflect = Reflect::start(V4, &[]);
    let session = Load::as_user(serve.address(V4), "a:one")
        .to(reflect.address)
        .with(&["--rate", "100", "--duration", "8"])
        .start();
    serve.wait_for_allocations(1);

    fs::write(&file, "[auth]\nusrs = []\n").expect("our own file");
    serve.program.signal("HUP");
    serve.program.line_with("auth.usrs");
    serve.program.line_with("the old one stays in force");
    assert_eq!(allocate(&serve, "a:one").code, Some(0));

    fs::write(&file, "[auth]\nusers = [\"a:two\", \"b:x\"]\n[relay]\nports = \"50000-50999\"\n")
        .expect("our own file");
    serve.program.signal("HUP");
    serve.program.line_with("relay.ports has changed, but takes effect only after a restart");
    let line = serve.program.line_with("configuration reloaded");
    assert!(line.contains("changed=\"auth.users\" users_added=1 users_changed=1"), "{line}");
    assert!(!line.contains("two") && !line.contains("removed"), "{line}");
    serve.program.signal("HUP");
    serve.program.line_with("configuration reloaded; nothing in it has changed that a reload takes");
    for (user, code) in [("a:one", 1), ("a:two", 0), ("b:x", 0)] {
        let ended = allocate(&serve, user);
        assert_eq!(ended.code, Some(code), "{user}: {}", ended.output());
    }

    let session = session.wait(SOON);
    assert_eq!(session.code, Some(0), "{}", session.output());
    assert_eq!(session.result()["lost"], 0);
}
