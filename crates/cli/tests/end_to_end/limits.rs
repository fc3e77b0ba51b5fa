//! Limits from a file: their effect on clients, and their log lines and metrics.

use crate::prelude::*;

const PLAIN: [&str; 4] = ["--relay-ip", "127.0.0.1", "--user", "a:one"];

fn serve(dir: &Dir, text: &str) -> (Serve, PathBuf) {
    let file = dir.file("turnpike.toml", text);
    let path = file.to_str().expect("the test's path is UTF-8");
    (Serve::start_bare(&[&PLAIN[..], &["-c", path]].concat()), file)
}

fn reload(serve: &mut Serve, file: &Path, text: &str) {
    fs::write(file, text).expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("configuration reloaded");
}

fn allocate(serve: &Serve, clients: &str) -> Finished {
    Load::as_user(serve.address(V4), "a:one")
        .with(&format!("--mode allocate --clients {clients} --rate max --duration 1"))
        .run()
}

#[test]
fn user_rate_limit_applies_until_a_reload() {
    let peers = "[peers]\nallow = [\"127.0.0.0/8\"]\n";
    let dir = Dir::new();
    let text = format!("[limits]\nbits_per_second_per_user = \"2M\"\nburst = 100\n{peers}");
    let (mut serve, file) = serve(&dir, &text);
    let reflect = Reflect::start(V4, &[]);
    let load = |serve: &Serve| {
        Load::as_user(serve.address(V4), "a:one")
            .to(reflect.address)
            .with("--clients 4 --rate 1000 --size 1000 --warmup 0 --duration 3")
            .run()
            .result()
    };
    let dropped =
        |serve: &Serve| serve.metrics().sum("turnpike_dropped_datagrams_total", "reason=\"user_bandwidth\"");
    let started = Instant::now();
    let result = load(&serve);
    // 250 bytes per millisecond, plus a burst of 64 KiB because several clients share the limit.
    let allowed = (65_536
        + 250 * u64::try_from(started.elapsed().as_millis()).expect("the duration fits into u64"))
        * 21
        / 20;
    let received = result["received"].as_u64().expect("a count") * 1000;
    assert!(received <= allowed, "{received} bytes, of which {allowed} may pass: {result}");
    assert!(received >= 250 * 3000 / 2, "{received} bytes: {result}");
    eventually("the drops are counted", || dropped(&serve) > 0);

    reload(&mut serve, &file, peers);
    let lines = serve.program.lines();
    let told = "reloaded limits.bits_per_second_per_user: 2000000 -> \"none\"";
    assert!(lines.iter().any(|line| line.contains(told)), "{lines:?}");
    let before = dropped(&serve);
    let result = load(&serve);
    assert_eq!(dropped(&serve), before);
    assert!(result["received"].as_u64() > Some(2_000), "{result}");
}

#[test]
fn allocations_per_prefix_are_limited() {
    let dir = Dir::new();
    let (mut serve, file) = serve(&dir, "[limits]\nallocations_per_prefix = 2\n");
    let refused = |serve: &Serve| serve.metrics().sum("turnpike_limit_refusals_total", "limit=\"prefix\"");
    assert_eq!(allocate(&serve, "1").code, Some(0));
    assert_eq!(refused(&serve), 0);
    let many = allocate(&serve, "8");
    eventually(&format!("some allocations are refused: {}", many.output()), || refused(&serve) > 0);
    reload(&mut serve, &file, "[limits]\nallocations_per_prefix = \"none\"\n");
    assert_eq!(allocate(&serve, "1").code, Some(0));
    let before = refused(&serve);
    assert_eq!(allocate(&serve, "8").code, Some(0));
    assert_eq!(refused(&serve), before);
}

#[test]
fn allow_only_refuses_peers_outside_the_list() {
    let dir = Dir::new();
    let text = |allowed: &str| format!("[peers]\nallow_only = true\nallow = [\"{allowed}\"]\n");
    let (mut serve, file) = serve(&dir, &text("192.0.2.1"));
    let lets = |serve: &Serve, peer: &str| {
        let run = Load::as_user(serve.address(V4), "a:one")
            .to(peer.parse().expect("an address"))
            .with("--clients 1 --rate 10 --warmup 0 --duration 0.2")
            .run();
        let text = run.output();
        let is_let_in = text.contains("\"sent\"");
        assert!(is_let_in || text.contains("403"), "neither refused nor permitted: {text}");
        is_let_in
    };
    assert!(!lets(&serve, "198.41.0.5:50000"));
    eventually("the refusal is counted", || {
        serve.metrics().sum("turnpike_peer_refusals_total", "by=\"not_allowed\"") > 0
    });
    reload(&mut serve, &file, &text("198.41.0.4/31"));
    assert!(lets(&serve, "198.41.0.5:50000") && !lets(&serve, "198.41.0.6:50000"));
}

#[test]
fn realms_can_have_their_own_ports() {
    let dir = Dir::new();
    let blue = format!("127.0.0.1:{}", free_port(V4));
    let file = dir.file(
        "turnpike.toml",
        format!(
            "[server]\nrealm = \"main.example\"\n[relay]\nports = \"50000-50099\"\n\
             [[realm]]\nname = \"blue.example\"\nusers = [\"b:two\"]\nlisten = [\"{blue}\"]\n\
             relay_ports = \"50000-50009\"\n"
        ),
    );
    let path = file.to_str().expect("the test's path is UTF-8");
    let mut serve = Serve::start_bare(&[&PLAIN[..], &["-c", path, "--listen", &blue]].concat());
    let blue = blue.parse().expect("an address");
    for (server, user, realm, ports) in [
        (blue, "b:two", "blue.example", 50_000..=50_009),
        (serve.address(V4), "a:one", "main.example", 50_010..=50_099),
    ] {
        Load::as_user(server, user).with("--mode allocate --rate 20 --duration 1").run().ended(0);
        let line = serve.program.line_with(&format!("allocation ended realm=\"{realm}\""));
        let port = address_after(&line, " relayed=").port();
        assert!(ports.contains(&port), "{line}");
    }
}

#[test]
fn invalid_limit_is_refused_with_its_location() {
    let dir = Dir::new();
    let check = |text: &str| {
        let file = dir.file("turnpike.toml", text);
        let path = file.to_str().expect("the test's path is UTF-8");
        Program::run(&mut turnpike(&["check-config", "-c", path]))
    };
    let realm = "[[realm]]\nname = \"b\"\nusers = [\"b:two\"]\n";
    for (text, words) in [
        ("[limits]\nbits_per_second = \"fast\"\n".to_owned(), ["turnpike.toml:2:", "bits_per_second"]),
        ("[limits]\nburst = 5\n".to_owned(), ["turnpike.toml:2:", "limits.burst"]),
        ("[limits]\nmax_allocation_duration = 10\n".to_owned(), ["turnpike.toml:2:", "60"]),
        ("[peers]\nallow_only = true\n".to_owned(), ["peers.allow_only", "peers.allow"]),
        (format!("{realm}relay_ports = \"1000-2000\"\n"), ["relay_ports", "relay.ports"]),
    ] {
        let ended = check(&text);
        assert_eq!(ended.code, Some(2), "{text}: {}", ended.output());
        for word in words {
            assert!(ended.stderr.contains(word), "no {word:?} for {text}: {}", ended.stderr);
        }
    }
}
