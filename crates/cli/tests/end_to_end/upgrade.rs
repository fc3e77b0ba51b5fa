//! `turnpike upgrade` and SIGUSR2: a new process replaces a running server without its clients noticing.

use crate::prelude::*;

use turnpike_trials::{delete, run_directory, upgradable};

/// Datagrams per second: few enough that the smallest receive buffer of any kernel holds the datagrams that
/// arrive while a busy machine suspends a program, and enough that some arrive during each upgrade's pause.
const RATE: &str = "1000";

fn relayed(serve: &Serve) -> u64 {
    serve.metrics().sum("turnpike_relayed_datagrams_total", "direction=\"to_client\"")
}

fn goes_on(serve: &Serve) {
    let before = relayed(serve);
    eventually("datagrams are relayed", || relayed(serve) > before + 200);
}

fn talking(serve: &Serve, reflect: &Reflect, clients: u64) -> Program {
    let load = serve
        .load(reflect)
        .with(&format!("--clients {clients} --rate {RATE} --warmup 0.1 --duration 600"))
        .start();
    serve.wait_for_allocations(clients);
    goes_on(serve);
    load
}

/// Ends these clients; asserts that everything returned in order and that no request was repeated.
fn heard_all(load: Program) -> Value {
    load.signal("INT");
    let run = load.wait(SOON);
    let result = run.result();
    for (key, value) in [("lost", 0), ("reordered", 0), ("duplicated", 0)] {
        assert_eq!(result[key], value, "{key} in {result}\n{}", run.output());
    }
    assert!(result["received"].as_u64().is_some_and(|received| received > 200), "{result}");
    result
}

fn config(dir: &Dir, more: &str) -> PathBuf {
    let text = format!(
        "[server]\nlisten = [\"127.0.0.1:0\"]\nworkers = 2\n[auth]\nusers = [\"alice:secret\"]\n\
         [peers]\nallow = [\"127.0.0.0/8\"]\n{more}"
    );
    dir.file("turnpike.toml", text)
}

#[test]
fn upgrade_does_not_disturb_udp_clients_or_counters() {
    let serve = Serve::start(&["--workers", "2"]);
    let reflect = Reflect::start(V4, &[]);
    let mut upgraded = Upgraded::new(&serve.program);
    let load = talking(&serve, &reflect, 16);
    for turn in 1..=3 {
        let before = (relayed(&serve), upgraded.upgrade());
        let now = relayed(&serve);
        assert!(now >= before.0, "{now} after {}", before.0);
        ends(before.1);
        serve.wait_for_allocations(16);
        goes_on(&serve);
        // The last counters of the old process arrive when the kernel path is attached again.
        let done = || serve.metrics().sum("turnpike_upgrades_total", "result=\"done\"");
        eventually("the change is counted", || done() == turn);
        let metrics = serve.metrics();
        assert_eq!(metrics.sum("turnpike_allocations_opened_total", ""), 16);
        assert_eq!(metrics.sum("turnpike_rx_kernel_drops_total", ""), 0);
    }
    let received = heard_all(load)["received"].as_u64().unwrap_or_default();
    serve.wait_for_allocations(0);
    assert!(relayed(&serve) >= received);
    let lines = eventually("each allocation has a log line", || {
        let lines = serve.program.lines();
        let deleted = lines.iter().filter(|line| line.contains("deleted by the client")).count();
        (deleted >= 16).then_some(lines)
    });
    let handed_over: Vec<&String> = lines.iter().filter(|line| line.contains("handed over")).collect();
    assert_eq!(handed_over.len(), 3, "{lines:#?}");
    assert!(handed_over.iter().all(|line| line.contains("allocations=0 ")), "{handed_over:#?}");
}

#[test]
fn signal_upgrades_and_the_log_has_the_steps() {
    let mut serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let mut upgraded = Upgraded::new(&serve.program);
    let load = talking(&serve, &reflect, 4);
    serve.program.signal("USR2");
    upgraded.took_over(&serve.program.line_with(" serves 4 sessions"));
    for step in ["upgrade: started ", "is ready to take over"] {
        serve.program.line_with(step);
    }
    ends(serve.program.pid());
    goes_on(&serve);
    heard_all(load);
    serve.wait_for_allocations(0);
}

#[test]
fn upgrade_keeps_streams_in_the_old_process() {
    let certificate = Certificate::of_authority(&["127.0.0.1"]);
    let serve = Serve::start_secured(&certificate, &["--workers", "2"]);
    let reflect = Reflect::start(V4, &[]);
    let mut upgraded = Upgraded::new(&serve.program);
    let authority = certificate.authority().display().to_string();
    let load = |transport: &str, seconds: &str| {
        let secured = if matches!(transport, "tls" | "dtls") { &["--ca", &authority][..] } else { &[] };
        Load::new(serve.address_of(transport, V4))
            .to(reflect.address)
            .with(&format!("--transport {transport} --clients 4 --rate 200 --duration {seconds}"))
            .with_words(secured)
            .start()
    };
    let is_well = |run: Finished, transport: &str| {
        assert_eq!(run.code, Some(0), "{transport}: {}", run.output());
        assert_eq!(run.result()["lost"], 0, "{transport}: {}", run.result());
    };
    let all = ["udp", "tcp", "tls", "dtls"];
    let before: Vec<Program> = all.iter().map(|transport| load(transport, "600")).collect();
    serve.wait_for_allocations(16);
    goes_on(&serve);
    let first = upgraded.upgrade();
    let lines = serve.program.lines();
    let line = lines.iter().find(|line| line.contains("handed over")).expect("the log reports the handover");
    assert!(line.contains("allocations=12 connections=12 "), "{line}");
    serve.wait_for_allocations(16);
    goes_on(&serve);
    for transport in all {
        is_well(load(transport, "1").wait(SOON), transport);
    }
    serve.wait_for_allocations(16);
    let second = upgraded.upgrade();
    serve.wait_for_allocations(16);
    for transport in all {
        is_well(load(transport, "1").wait(SOON), transport);
    }
    goes_on(&serve);
    assert!(lives(first), "the process has clients");
    for (load, transport) in before.into_iter().zip(all) {
        load.signal("INT");
        let run = load.wait(SOON);
        let result = run.result();
        let nothing = ["lost", "reordered"].map(|key| result[key].as_u64());
        assert_eq!(nothing, [Some(0), Some(0)], "{transport}: {result}");
    }
    ends(first);
    ends(second);
    serve.wait_for_allocations(0);
    assert_eq!(serve.metrics().sum("turnpike_connections_accepted_total", ""), 24);
}

fn listed(run: &impl Fn(&[&str]) -> Finished) -> Vec<(String, Option<u64>, String)> {
    let asked = run(&["allocations", "--json"]).ended(0);
    let allocations: Vec<Value> = serde_json::from_str(&asked.stdout).expect("an array");
    let text = |allocation: &Value, key: &str| allocation[key].as_str().expect("a text").to_owned();
    let mut listed: Vec<_> = allocations
        .iter()
        .map(|allocation| {
            (text(allocation, "transport"), allocation["process"].as_u64(), text(allocation, "id"))
        })
        .collect();
    listed.sort();
    listed
}

#[test]
fn allocations_in_previous_processes_are_listed_and_can_be_ended() {
    let dir = Dir::new();
    let config = dir.file("turnpike.toml", "[admin]\nloopback = \"full\"\n");
    let serve = Serve::start(&["--workers", "2", "-c", config.to_str().expect("the test's path is UTF-8")]);
    let admin = serve.admin().to_string();
    let run = |arguments: &[&str]| Program::run(&mut turnpike(&[arguments, &["--admin", &admin]].concat()));
    let open = || {
        let (_, text) = fetch(serve.admin(), "/v1/status").expect("the admin page answers");
        serde_json::from_str::<Value>(&text).expect("JSON")["open"].as_u64()
    };
    let reflect = Reflect::start(V4, &[]);
    let mut upgraded = Upgraded::new(&serve.program);
    let load = |transport: &str, clients: &str| {
        Load::new(serve.address_of(transport, V4))
            .to(reflect.address)
            .with(&format!("--transport {transport} --clients {clients} --rate 20 --duration 600"))
            .start()
    };
    let of = |listed: &[(String, Option<u64>, String)]| {
        listed.iter().map(|(transport, process, _)| (transport.clone(), *process)).collect::<Vec<_>>()
    };
    let in_process = |pid: u32| ("tcp".to_owned(), Some(u64::from(pid)));
    let here = |transport: &str| (transport.to_owned(), None);

    let (udp, old) = (load("udp", "1"), load("tcp", "2"));
    serve.wait_for_allocations(3);
    let first = upgraded.upgrade();
    let expected = [in_process(first), in_process(first), here("udp")];
    assert_eq!(of(&listed(&run)), expected);
    for limit in 1..=3 {
        let limit = limit.to_string();
        let asked = run(&["allocations", "--limit", &limit, "--json"]);
        let allocations: Vec<Value> = serde_json::from_str(&asked.stdout).expect("an array");
        assert_eq!(allocations.len().to_string(), limit, "{}", asked.output());
    }
    let mut ids = Vec::new();
    let mut cursor = String::new();
    loop {
        let (_, text) =
            fetch(serve.admin(), &format!("/v1/allocations?limit=1{cursor}")).expect("the server responds");
        let page: Value = serde_json::from_str(&text).expect("JSON");
        ids.extend(page["allocations"].as_array().expect("a list").iter().map(|it| it["id"].to_string()));
        let Some(next) = page["next"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3, "{ids:?}");
    eventually("all allocations are counted once", || open() == Some(3));
    assert_eq!(serve.allocations(), 3);

    let middle = load("tcp", "1");
    serve.wait_for_allocations(4);
    let second = upgraded.upgrade();
    let both = listed(&run);
    let mut expected = vec![in_process(first), in_process(first), in_process(second), here("udp")];
    expected.sort();
    assert_eq!(of(&both), expected);
    eventually("all allocations are counted once", || open() == Some(4));
    let table = run(&["allocations"]).stdout;
    assert!(table.contains(&format!("tcp (process {first})")), "{table}");

    for (_, process, id) in both.iter().filter(|(_, process, _)| process.is_some()) {
        let pid = process.expect("the allocation is in another process");
        let shown = run(&["allocation", "show", id]);
        assert!(shown.stdout.contains(&format!("{pid}, the previous process")), "{}", shown.output());
        let ended = run(&["allocation", "end", id]);
        assert!(ended.stdout.contains(&format!("in process {pid}")), "{}", ended.output());
        assert_eq!(run(&["allocation", "show", id]).code, Some(1));
    }
    drop((old, middle));
    ends(first);
    ends(second);
    assert_eq!(of(&listed(&run)), [here("udp")]);
    eventually("the remaining allocation is counted", || open() == Some(1));
    drop(udp);
}

#[test]
fn ban_ends_allocations_in_previous_processes() {
    const TOKEN: &str = "0123456789abcdef";
    let dir = Dir::new();
    let config = dir.file("turnpike.toml", format!("[admin]\ntokens = [\"{TOKEN}\"]\n"));
    let serve = Serve::start(&["-c", config.to_str().expect("the test's path is UTF-8")]);
    let reflect = Reflect::start(V4, &[]);
    let mut upgraded = Upgraded::new(&serve.program);
    let load = |clients: &str| {
        Load::new(serve.address_of("tcp", V4))
            .to(reflect.address)
            .with(&format!("--transport tcp --clients {clients} --rate 20 --duration 600"))
            .start()
    };
    let oldest = load("2");
    serve.wait_for_allocations(2);
    let first = upgraded.upgrade();
    let middle = load("1");
    serve.wait_for_allocations(3);
    let second = upgraded.upgrade();
    let ban = serde_json::json!({ "client": "127.0.0.0/8", "seconds": 600 });
    let (status, banned) = post(serve.admin(), "/v1/bans", TOKEN, &ban).expect("the server responds");
    assert_eq!((status, &banned["ended"]), (201, &3.into()), "{banned}");
    let (_, left) = fetch(serve.admin(), "/v1/allocations").expect("the server responds");
    assert!(left.contains("\"allocations\":[]"), "{left}");
    let lift = || delete(serve.admin(), "/v1/bans?client=127.0.0.0/8", TOKEN).expect("the server responds").0;
    assert_eq!([lift(), lift()], [200, 404]);
    drop((oldest, middle));
    ends(first);
    ends(second);
}

fn other_program(dir: &Dir, script: &str) -> String {
    let path = dir.file("other", script);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the test's own file");
    path.display().to_string()
}

#[test]
fn program_that_does_not_take_over_changes_nothing() {
    let dir = Dir::new();
    // The sandbox allows execution only in readable directories.
    let config = dir.file("turnpike.toml", "");
    let serve = Serve::start(&["-c", config.to_str().expect("the test's path is UTF-8")]);
    let reflect = Reflect::start(V4, &[]);
    let mut upgraded = Upgraded::new(&serve.program);
    let load = talking(&serve, &reflect, 4);
    for (script, why) in [
        ("#!/bin/sh\nexit 3\n", "exit status: 3"),
        ("#!/bin/sh\necho turnpike 9.9 >&0\nexec sleep 60\n", "does not respond"),
    ] {
        let asked = upgraded.ask(&["--binary", &other_program(&dir, script)]).ended(1);
        assert!(asked.stderr.contains(why) && asked.stderr.contains("keeps serving"), "{}", asked.output());
        goes_on(&serve);
    }
    let asked = upgraded.ask(&["--binary", "/nowhere/turnpike"]);
    assert!(asked.code == Some(1) && asked.stderr.contains("/nowhere/turnpike"), "{}", asked.output());
    assert_eq!(serve.metrics().sum("turnpike_upgrades_total", "result=\"failed\""), 3);
    upgraded.upgrade();
    heard_all(load);
}

#[test]
fn incompatible_configuration_fails_the_upgrade_and_changes_nothing() {
    let dir = Dir::new();
    let path = config(&dir, "");
    let path = path.to_str().expect("the test's path is UTF-8");
    let mut program = Program::start(&mut upgradable(&[
        "serve",
        "-c",
        path,
        "--relay-ip",
        "127.0.0.1",
        "--admin",
        "127.0.0.1:0",
    ]));
    let line = program.line_with("listening on udp ");
    let server = address_after(&line, "listening on udp ");
    let reflect = Reflect::start(V4, &[]);
    let mut upgraded = Upgraded::new(&program);
    let load = Load::as_user(server, "alice:secret")
        .to(reflect.address)
        .with(&format!("--clients 4 --rate {RATE} --warmup 0.1 --duration 600"))
        .start();
    let admin = address_after(&program.line_with(" on http://"), " on http://");
    let count = |name, label| {
        let (_, text) = fetch(admin, "/metrics").expect("the admin page answers");
        Metrics::new(text).sum(name, label)
    };
    eventually("all allocations", || count("turnpike_allocations", "") == 4);
    let text = fs::read_to_string(path).expect("the file was written");
    for (changed, why) in [
        (text.replace("workers = 2", "workers = 0"), "server.workers"),
        (text.replace("127.0.0.1:0", "127.0.0.2:0"), "which is no longer configured"),
        (text.replace("\"alice:secret\"", ""), "no client could authenticate"),
        (format!("{text}[limits]\nallocations = 1\n"), "limits.allocations"),
    ] {
        fs::write(path, changed).expect("the test's own file");
        let asked = upgraded.ask(&[]).ended(1);
        assert!(asked.stderr.contains(why), "no {why} in {}", asked.output());
    }
    // A running server cannot change its number of workers, so the upgrade ignores the change.
    fs::write(path, text.replace("workers = 2", "workers = 3")).expect("the test's own file");
    upgraded.upgrade();
    program.line_with("server.workers has changed, but takes effect only after a restart");
    eventually("the server continues", || {
        count("turnpike_relayed_datagrams_total", "direction=\"to_client\"") > 1000
    });
    heard_all(load);
}

#[test]
fn draining_or_missing_server_is_not_upgraded() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let upgraded = Upgraded::new(&serve.program);
    let load = talking(&serve, &reflect, 1);
    serve.program.signal("TERM");
    eventually("/healthz reports draining", || serve.health() == Some(503));
    let asked = upgraded.ask(&[]);
    assert!(asked.code == Some(1) && asked.stderr.contains("while draining"), "{}", asked.output());
    heard_all(load);
    let pid = upgraded.pid();
    ends(pid);
    let asked = upgraded.ask(&[]);
    assert!(
        asked.code == Some(1) && asked.stderr.contains("no running turnpike found"),
        "{}",
        asked.output()
    );
    let socket = run_directory().join(format!("{pid}.sock"));
    assert!(!socket.exists(), "the socket was not removed");
    let asked = Program::run(&mut turnpike(&["upgrade", "--socket", &socket.display().to_string()]));
    assert!(asked.code == Some(1) && asked.stderr.contains("cannot connect to"), "{}", asked.output());
}

/// The container of process 1 would end with it.
#[test]
fn process_1_of_a_container_can_be_upgraded_and_drained() {
    const CANNOT: i32 = 75;
    const SCRIPT: &str = r#"
        mount -t tmpfs tmpfs /run || exit 75
        unshare --pid --fork --mount-proc "$0" serve --listen 127.0.0.1:0 --relay-ip 127.0.0.1 --user a:b --admin unix 2>/run/log &
        container=$!
        for _ in $(seq 300); do [ -S /run/turnpike/turnpike.sock ] && break; sleep 0.1; done
        for turn in 1 2; do
            "$0" upgrade || break
            for _ in $(seq 300); do [ "$(grep -c ' stopped' /run/log)" = $turn ] && break; sleep 0.1; done
        done
        "$0" reload && "$0" drain --deadline 0 --wait
        code=$?
        [ $code = 0 ] || kill $container
        wait $container
        echo "container $?, stopped $(grep -c ' stopped' /run/log)"
        exit $code"#;
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", SCRIPT]).arg(turnpike(&[]).get_program());
    for variable in ["RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", "TURNPIKE_CONFIG"] {
        command.env_remove(variable);
    }
    let ended = Program::run(&mut command);
    if ended.code == Some(CANNOT) || ended.stderr.contains("unshare: ") {
        return turnpike_trials::skip("only root can have a process namespace of its own");
    }
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    assert!(ended.stdout.contains("container 0, stopped 3"), "{}", ended.output());
}
