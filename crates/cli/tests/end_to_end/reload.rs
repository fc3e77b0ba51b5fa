//! SIGHUP reloads the configuration: a valid one is applied while allocations continue, an invalid one
//! changes nothing.

use crate::prelude::*;

fn allocate(serve: &Serve, user: &str) -> Finished {
    Load::as_user(serve.address(V4), user).with("--mode allocate --rate 20 --duration 1").run()
}

#[test]
fn reload_applies_valid_users_and_ignores_an_invalid_file() {
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", "[auth]\nusers = [\"a:one\"]\n");
    let path = file.to_str().expect("the test's path is UTF-8");
    let mut serve =
        Serve::start_bare(&["-c", path, "--relay-ip", "127.0.0.1", "--allow-peer", "127.0.0.0/8"]);
    let reflect = Reflect::start(V4, &[]);
    let allocation =
        Load::as_user(serve.address(V4), "a:one").to(reflect.address).with("--rate 100 --duration 8").start();
    serve.wait_for_allocations(1);

    fs::write(&file, "[auth]\nusrs = []\n").expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("auth.usrs");
    serve.program.line_with("the old one stays in use");
    assert_eq!(allocate(&serve, "a:one").code, Some(0));

    fs::write(&file, "[auth]\nusers = [\"a:two\", \"b:x\"]\n[relay]\nbuffer = 100000\n")
        .expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("relay.buffer has changed, but takes effect only after a restart");
    let line = serve.program.line_with("configuration reloaded");
    assert!(line.contains("changed=\"auth.users\" users_added=1 users_changed=1"), "{line}");
    assert!(!line.contains("two") && !line.contains("removed"), "{line}");
    assert!(
        serve.program.lines().iter().any(|line| line.ends_with("reloaded auth.users: 1 added, 1 changed"))
    );
    serve.program.signal("HUP");
    serve.program.line_with("configuration reloaded; no reloadable setting has changed");
    for (user, code) in [("a:one", 1), ("a:two", 0), ("b:x", 0)] {
        let ended = allocate(&serve, user);
        assert_eq!(ended.code, Some(code), "{user}: {}", ended.output());
    }

    let allocation = allocation.wait(SOON).ended(0);
    assert_eq!(allocation.result()["lost"], 0);
}

#[test]
fn reload_changes_listeners_ports_and_log_level_atomically() {
    let [first, second] = [free_port(V4), free_port(V4)];
    let admin = format!("127.0.0.1:{}", free_port(V4));
    let dir = Dir::new();
    let text = |ports: &[u16], more: &str| {
        let listen: Vec<String> = ports.iter().map(|port| format!("\"127.0.0.1:{port}\"")).collect();
        format!("[server]\nlisten = [{}]\n[auth]\nusers = [\"a:one\"]\n{more}", listen.join(", "))
    };
    let file = dir.file("turnpike.toml", text(&[first], ""));
    let path = file.to_str().expect("the test's path is UTF-8");
    let plain = ["serve", "-c", path, "--relay-ip", "127.0.0.1", "--admin", &admin];
    let mut serve = Program::start(&mut turnpike(&plain));
    serve.line_with("data path");
    let allocates = |port: u16| {
        Load::as_user(([127, 0, 0, 1], port).into(), "a:one")
            .with("--mode allocate --rate 20 --duration 1")
            .run()
            .ended(0);
    };
    let reload = |serve: &Program, text: String| {
        fs::write(&file, text).expect("the test's own file");
        serve.signal("HUP");
    };

    // The second port is taken, so not even the log level changes.
    let busy = UdpSocket::bind(("127.0.0.1", second)).expect("the port was free");
    reload(&serve, text(&[second, first], "[log]\nlevel = \"debug\"\n"));
    serve.line_with(&format!("cannot listen on udp 127.0.0.1:{second}"));
    serve.line_with("configuration not reloaded: the old one stays in use");
    allocates(first);
    for wrong in ["allocation opened", "in the store have changed"] {
        assert!(!serve.lines().iter().any(|line| line.contains(wrong)), "{wrong}");
    }
    drop(busy);

    reload(&serve, text(&[first, second], "[relay]\nports = \"50000-50099\"\n[log]\nlevel = \"debug\"\n"));
    serve.line_with("configuration reloaded");
    for protocol in ["udp", "tcp"] {
        serve.line_with(&format!("listening on {protocol} 127.0.0.1:{second}"));
    }
    for (key, value) in [("server.listen", ""), ("relay.ports", "\"50000-50099\""), ("log.level", "debug")] {
        let line = serve.line_with(&format!("reloaded {key}: "));
        assert!(line.contains(" -> ") && line.contains(value), "{line}");
    }
    allocates(second);
    let line = serve.line_with("allocation opened");
    assert!(line.contains("relayed=127.0.0.1:500"), "{line}");

    reload(&serve, text(&[second], ""));
    for protocol in ["udp", "tcp"] {
        serve.line_with(&format!("no longer listening on {protocol} 127.0.0.1:{first}"));
    }
    eventually("the port is closed", || UdpSocket::bind(("127.0.0.1", first)).ok());
    allocates(second);
    let (status, page) =
        fetch(admin.parse().expect("an address"), "/metrics").expect("the admin page answers");
    assert_eq!(status, 200);
    for (result, count) in [("loaded", 2), ("failed", 1)] {
        let series = format!("turnpike_config_reloads_total{{result=\"{result}\"}} {count}");
        assert!(page.contains(&series), "no {series} in {page}");
    }
}
