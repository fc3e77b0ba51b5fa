//! Several realms on one server: each with its own users, listener and limit, from one file and through a reload.

use std::fs;
use turnpike_testkit::stun;

use turnpike_trials::{Dir, Finished, Load, Program, V4, free_port, turnpike};

fn allocate(port: u16, user: &str, clients: &str) -> Finished {
    Load::as_user(([127, 0, 0, 1], port).into(), user)
        .with(&["--mode", "allocate", "--clients", clients, "--rate", "20", "--duration", "1"])
        .run()
}

#[test]
fn each_listener_serves_its_realm_and_a_reload_changes_who_that_is() {
    let dir = Dir::new();
    let ports = [free_port(V4), free_port(V4)];
    let [north, south] = ports.map(|port| format!("127.0.0.1:{port}"));
    let text = |users: &str| {
        format!(
            "[server]\nlisten = [\"{north}\", \"{south}\"]\n\
             [[realm]]\nname = \"north.example\"\nusers = [{users}]\nlisten = [\"{north}\"]\n\
             [[realm]]\nname = \"south.example\"\nusers = [\"sue:two\"]\nlisten = [\"{south}\"]\n"
        )
    };
    let file = dir.file("turnpike.toml", text("\"ned:one\""));
    let path = file.to_str().expect("our own path is UTF-8");
    let more = ["--relay-ip", "127.0.0.1", "--allow-peer", "127.0.0.0/8", "--admin", "off"];
    let mut serve = Program::start(&mut turnpike(&[&["serve", "-c", path], &more[..]].concat()));
    serve.line_with("data path");

    let expect = |cases: &[(u16, &str, i32)]| {
        for (port, user, code) in cases {
            let ended = allocate(*port, user, "1");
            assert_eq!(ended.code, Some(*code), "{user} on {port}: {}", ended.output());
        }
    };
    let [north, south] = ports;
    expect(&[(north, "ned:one", 0), (south, "sue:two", 0), (north, "sue:two", 1), (south, "ned:one", 1)]);
    assert!(serve.line_with("session ended").contains("realm=\"north.example\" user=\"ned\""));

    fs::write(&file, text("\"nina:three\"")).expect("our own file");
    serve.signal("HUP");
    serve.line_with("configuration reloaded");
    expect(&[
        (north, "ned:one", 1),
        (north, "nina:three", 0),
        (south, "sue:two", 0),
        (south, "nina:three", 1),
    ]);
}

#[test]
fn check_config_shows_realms_and_points_at_what_is_wrong_with_them() {
    let dir = Dir::new();
    let check = |text: &str| {
        let file = dir.file("turnpike.toml", text);
        Program::run(&mut turnpike(&["check-config", "-c", file.to_str().expect("our own path is UTF-8")]))
    };
    let good = check("[[realm]]\nname = \"a\"\nsecrets = [\"hunter2\"]\n");
    assert_eq!(good.code, Some(0), "{}", good.output());
    assert!(good.stdout.contains("[[realm]]") && !good.output().contains("hunter2"), "{}", good.output());
    let bad = check("[[realm]]\nname = \"a\"\nsecret = [\"hunter2\"]\n");
    assert_eq!(bad.code, Some(2));
    let output = bad.output();
    assert!(output.contains("turnpike.toml:3:1: realm.secret: unknown key"), "{output}");
    assert!(output.contains("did you mean \"secrets\"?") && !output.contains("hunter2"), "{output}");
}

/// The namesake in the realm that stays, and his session, are another's.
#[test]
fn a_reload_that_removes_a_realm_ends_its_sessions_and_no_others() {
    let dir = Dir::new();
    let port = free_port(V4);
    let text = |realms: &str| {
        format!("[server]\nlisten = [\"127.0.0.1:{port}\"]\n[shutdown]\ndeadline = 1\n{realms}")
    };
    let realm =
        |name: &str, password: &str| format!("[[realm]]\nname = \"{name}\"\nusers = [\"ned:{password}\"]\n");
    let (north, south) = (realm("north.example", "one"), realm("south.example", "two"));
    let file = dir.file("turnpike.toml", text(&[north.as_str(), &south].concat()));
    let path = file.to_str().expect("our own path is UTF-8");
    let more = ["--relay-ip", "127.0.0.1", "--admin", "off"];
    let mut serve = Program::start(&mut turnpike(&[&["serve", "-c", path], &more[..]].concat()));
    serve.line_with("data path");

    let server = ([127, 0, 0, 1], port).into();
    for (realm, password) in [("north.example", "one"), ("south.example", "two")] {
        let stun = stun::Client::new(server);
        let (_, _, challenge) = stun.challenge();
        let wanted = stun::Challenge { realm: realm.into(), ..challenge };
        assert_eq!(stun.allocate("ned", password, &wanted), None, "{realm}");
    }

    fs::write(&file, text(&south)).expect("our own file");
    serve.signal("HUP");
    let ended = serve.line_with("session ended realm=\"north.example\"");
    assert!(ended.contains("by an administrator"), "{ended}");
    // The other one lives until the server ends it.
    serve.line_with("configuration reloaded");
    serve.signal("TERM");
    let ended = serve.line_with("session ended realm=\"south.example\"");
    assert!(ended.contains("server stopped"), "{ended}");
}
