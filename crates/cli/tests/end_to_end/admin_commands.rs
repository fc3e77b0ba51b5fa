//! `turnpike allocations`, `allocation`, `drain` and `reload` against a running program, through its default socket.

use crate::prelude::*;

/// Runtime directory of a user's login session, for servers and commands.
struct Login(Dir);

impl Login {
    fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = turnpike(arguments);
        command.env("XDG_RUNTIME_DIR", self.0.path()).current_dir(self.0.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Finished {
        Program::run(&mut self.command(arguments))
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let ended = self.run(&[arguments, &["--json"]].concat()).ended(0);
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}", ended.stdout))
    }

    fn state(&self) -> String {
        self.0.path().join("state").display().to_string()
    }

    fn socket(&self) -> std::path::PathBuf {
        self.0.path().join("turnpike/admin.sock")
    }

    /// Relays on loopback for [`USER`], with the default admin interface except for its port.
    fn serve(&self, more: &[&str]) -> Program {
        let mut arguments = vec!["serve", "--listen", "127.0.0.1:0", "--relay-ip", "127.0.0.1"];
        arguments.extend(["--allow-peer", "127.0.0.0/8", "--admin", "unix"]);
        arguments.extend(more);
        let mut program = Program::start(&mut self.command(&arguments));
        let line = program.line_with("admin interface on unix:");
        assert!(line.contains(&self.socket().display().to_string()), "{line}");
        program
    }
}

/// Usage errors, connection errors, and errors from the program or store are each reported as one JSON object.
#[test]
fn errors_are_json_with_the_json_flag() {
    let Some(login) = login() else { return };
    let error = |arguments: &[&str]| {
        let ended = login.run(&[arguments, &["--json"]].concat());
        let last = ended.stderr.lines().last().unwrap_or_default();
        let told: Value =
            serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {}", ended.output()));
        assert_eq!(told["exit_code"].as_i64(), ended.code.map(i64::from), "{arguments:?}: {told}");
        assert!(ended.stdout.is_empty(), "{arguments:?}: {}", ended.stdout);
        (ended.code, told)
    };
    for usage in [
        &["allocations", "--limit", "0"][..],
        &["allocations", "--colour", "red"],
        &["user", "add"],
        &["secret", "rotate", "r", "--overlap", "-1"],
        &["probe"],
        &["top", "--interval", "0"],
        &["health", "--live", "x"],
    ] {
        let (code, told) = error(usage);
        assert_eq!(code, Some(2), "{told}");
        let detail = told["detail"].as_str().unwrap_or_default();
        assert!(!detail.is_empty() && !detail.starts_with("error: "), "{usage:?}: {told}");
    }
    for unheard in [
        &["allocations"][..],
        &["allocation", "show", "x"],
        &["drain"],
        &["reload"],
        &["health"],
        &["fleet", "status"],
    ] {
        // The default address may belong to another test.
        let (code, told) = error(&[unheard, &["--admin", "unix:/nowhere.sock"]].concat());
        assert!(code == Some(1) && told["detail"].is_string(), "{unheard:?}: {told}");
    }
    let _serve = login.serve(&["--state", &login.state()]);
    for (refused, exit, status, code) in [
        (&["allocation", "show", "00000000000000000000000000000000"][..], 1, 404, "no_such_allocation"),
        (&["allocations", "--client", "x"], 2, 400, "bad_request"),
        (&["fleet", "status"], 1, 404, "no_fleet"),
        (&["user", "remove", "absent"], 1, 404, "no_such_user"),
        (&["user", "add", "a:b"], 2, 400, "bad_request"),
        (&["key", "add", "Shop"], 2, 400, "bad_request"),
        (&["user", "add", "a", "--realm", "elsewhere"], 1, 409, "realm_not_served"),
    ] {
        let (ended, told) = error(refused);
        assert_eq!(ended, Some(exit), "{told}");
        assert_eq!((&told["status"], &told["code"]), (&status.into(), &code.into()), "{refused:?}");
        assert!(told["detail"].is_string(), "{told}");
    }
}

#[test]
fn json_output_matches_the_documented_schemas() {
    let Some(login) = login() else { return };
    let read = |file: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(file);
        fs::read_to_string(path).expect("docs/openapi.json exists")
    };
    let schemas =
        &serde_json::from_str::<Value>(&read("openapi.json")).expect("JSON")["components"]["schemas"];
    let documented = read("admin.md");
    let (_, documented) = documented.split_once("| command | prints |").expect("a table");
    let documented = documented.split("\n\n").next().unwrap_or_default();
    let is_of = |value: &Value, schema: &str, more: &str, what: &str| {
        assert!(documented.contains(&format!("`{schema}`")), "docs/admin.md does not name {schema}");
        let (properties, value) = (&schemas[schema]["properties"], value.as_object().expect("an object"));
        assert!(properties.is_object(), "{schema} is not in the document");
        for name in value.keys() {
            assert!(properties.get(name).is_some() || name == more, "{what}: {schema} has no {name}");
        }
        for name in schemas[schema]["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            assert!(value.contains_key(name), "{what}: {name} of {schema} is missing");
        }
    };
    let state = login.state();
    let mut serve = login.serve(&["--user", "alice:secret", "--realm", "example.org", "--state", &state]);
    let reflect = Reflect::start(V4, &[]);
    let at = listening(&mut serve);
    let _allocation = Load::new(at).to(reflect.address).with("--rate 30 --duration 600").start();
    let id =
        eventually("an allocation", || login.json(&["allocations"])[0]["id"].as_str().map(str::to_owned));
    for (arguments, schema, more) in [
        (&["user", "add", "bob"][..], "Change", "password"),
        (&["secret", "add"], "Change", "secret"),
        (&["secret", "rotate", "example.org"], "Rotated", "secret"),
        (&["key", "add", "shop"], "Change", "key"),
        (&["realm", "add", "blue"], "Change", ""),
        (&["allocation", "show", &id], "Allocation", ""),
        (&["user", "remove", "bob"], "Change", ""),
        (&["top", "--once"], "Live", ""),
        (&["reload"], "Reloaded", ""),
    ] {
        is_of(&login.json(arguments), schema, more, &arguments.join(" "));
    }
    for (arguments, schema) in [
        (&["allocations"][..], "Allocation"),
        (&["user", "list"], "User"),
        (&["secret", "list"], "SharedSecret"),
        (&["key", "list"], "Key"),
        (&["realm", "list"], "StoredRealm"),
    ] {
        let list = login.json(arguments);
        let list = list.as_array().expect("an array");
        assert!(!list.is_empty(), "{arguments:?}");
        list.iter().for_each(|one| is_of(one, schema, "", &arguments.join(" ")));
    }
    let health = login.json(&["health"]);
    assert_eq!((&health["well"], &health["state"]), (&true.into(), &"ok".into()), "{health}");
    assert!(health["relays"][0].as_str().is_some_and(|line| line.contains(" up since ")), "{health}");
    is_of(&login.json(&["allocation", "end", &id]), "Allocation", "", "allocation end");
    is_of(&login.json(&["drain", "--deadline", "0"]), "Draining", "", "drain");
}

/// Containers have neither a service manager nor a login session.
#[test]
fn admin_socket_defaults_to_run_turnpike() {
    const CANNOT: i32 = 75;
    const SCRIPT: &str = r#"
        mount -t tmpfs tmpfs /run || exit 75
        "$0" serve --listen 127.0.0.1:0 --relay-ip 127.0.0.1 --user a:b --admin unix &
        serve=$!
        for _ in $(seq 300); do [ -S /run/turnpike/turnpike.sock ] && break; sleep 0.1; done
        "$0" reload && stat -c 'mode %a' /run/turnpike
        code=$?
        kill $serve
        wait $serve
        exit $code"#;
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", SCRIPT]).arg(turnpike(&[]).get_program());
    for variable in ["RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", "TURNPIKE_CONFIG"] {
        command.env_remove(variable);
    }
    let ended = Program::run(&mut command);
    if ended.code == Some(CANNOT) || ended.stderr.contains("unshare: ") {
        return turnpike_trials::skip("only root can have a /run of its own");
    }
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    assert!(ended.stdout.contains("mode 700"), "{}", ended.output());
}

/// Cargo's target directory may be too deep for a socket path.
fn login() -> Option<Login> {
    let login = Login(Dir::new());
    let length = login.socket().as_os_str().len();
    if length > 107 {
        turnpike_trials::skip("the path of the socket would be longer than 107 bytes");
        return None;
    }
    Some(login)
}

fn listening(program: &mut Program) -> std::net::SocketAddr {
    turnpike_trials::address_after(&program.line_with("listening on udp "), "listening on udp ")
}

#[test]
fn allocations_are_listed_shown_and_ended_over_the_default_socket() {
    let Some(login) = login() else { return };
    let mut server =
        login.serve(&["--user", "alice:secret", "--user", "bob:secret", "--realm", "example.org"]);
    let at = listening(&mut server);
    assert_eq!(login.json(&["allocations"]).as_array().map(Vec::len), Some(0));
    let reflect = Reflect::start(V4, &[]);
    let load = |user: &str| {
        let more = ["--clients", "3", "--rate", "30", "--duration", "600"];
        Load::as_user(at, &format!("{user}:secret")).to(reflect.address).with_words(&more).start()
    };
    let (_alices, _bobs) = (load("alice"), load("bob"));
    let all = eventually("six allocations", || {
        let all = login.json(&["allocations"]);
        (all.as_array()?.len() == 6).then_some(all)
    });
    for allocation in all.as_array().expect("a list") {
        assert_eq!((&allocation["realm"], &allocation["transport"]), (&"example.org".into(), &"udp".into()));
    }
    let alices = login.json(&["allocations", "--user", USER]);
    let alices = alices.as_array().expect("a list");
    assert!(alices.len() == 3 && alices.iter().all(|allocation| allocation["user"] == USER), "{alices:?}");
    let table = login.run(&["allocations", "--user", "bob", "--realm", "example.org"]);
    assert_eq!((table.code, table.stdout.lines().count()), (Some(0), 4), "{}", table.output());
    assert_eq!(login.run(&["allocations", "--realm", "elsewhere"]).stdout, "no allocations");

    let id = alices[1]["id"].as_str().expect("a name");
    let shown = login.json(&["allocation", "show", id]);
    assert_eq!((&shown["id"], &shown["client"]), (&alices[1]["id"], &alices[1]["client"]));
    assert!(!shown["channels"].as_array().expect("channels").is_empty(), "{shown}");
    login.run(&["allocation", "end", id]).ended(0);
    let line = server.line_with("ended by an administrator");
    assert!(line.contains(&format!("allocation={id}")) && line.contains("user=\"alice\""), "{line}");
    let audit = server.line_with("turnpike::audit");
    assert!(audit.contains(id) && audit.contains("status=200") && audit.contains("local user"), "{audit}");
    let again = login.run(&["allocation", "end", id]);
    assert_eq!(again.code, Some(1));
    assert!(again.stderr.contains("no allocation"), "{}", again.stderr);
    assert_eq!(login.json(&["allocations"]).as_array().map(Vec::len), Some(5));
}

#[test]
fn reload_reports_changes_and_every_error() {
    let Some(login) = login() else { return };
    let file = login.0.file("t.toml", "[auth]\nusers = [\"alice:one\"]\n");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("the test's own file");
    let mut server = login.serve(&["-c", "t.toml"]);
    server.line_with("listening on udp ");
    let reload = || login.run(&["reload"]);
    assert_eq!(reload().stdout, "reloaded; nothing has changed that a reload can apply");
    let text = "[auth]\nusers = [\"alice:two\", \"bob:x\"]\n[[realm]]\nname = \"b.example\"\nusers = [\"carol:x\"]\n[relay]\nports = \"50000-50999\"\nbuffer = 65536\n";
    fs::write(&file, text).expect("the test's own file");
    let changed = reload();
    assert_eq!(
        changed.stdout.lines().collect::<Vec<_>>(),
        [
            "relay.buffer: takes effect only after a restart",
            "relay.ports: \"49152-65535\" -> \"50000-50999\"",
            "auth.users: 2 added, 1 changed",
            "realm b.example: added"
        ],
        "{}",
        changed.output()
    );
    fs::write(&file, "[auth]\nusrs = []\n[server]\nlisten = 5\n").expect("the test's own file");
    let refused = reload();
    assert_eq!(refused.code, Some(1));
    for part in
        ["the old one stays in effect", "auth.usrs: unknown key", "server.listen: found the integer 5"]
    {
        assert!(refused.stderr.contains(part), "no {part} in {}", refused.stderr);
    }
    let reasons =
        ["POST /v1/reload", "status=422", "auth.usrs: unknown key", "server.listen: found the integer 5"];
    eventually("the audit line has the reason", || {
        let is_it = |line: &String| {
            line.contains("turnpike::audit") && reasons.iter().all(|part| line.contains(part))
        };
        server.lines().iter().any(is_it)
    });
    let realms = |login: &Login| login.run(&["allocations", "--json"]).code;
    assert_eq!(realms(&login), Some(0), "the server continues");
}

#[test]
fn drain_exits_after_the_last_allocation_or_at_the_deadline() {
    let Some(login) = login() else { return };
    let mut server = login.serve(&["--user", "alice:secret"]);
    let at = listening(&mut server);
    let reflect = Reflect::start(V4, &[]);
    let allocation = Load::new(at).to(reflect.address).with("--rate 30 --duration 600").start();
    // Counters are updated ten times a second.
    eventually("an allocation", || {
        get_unix(&login.socket(), "/v1/status").is_ok_and(|(_, status)| status.contains("\"open\":1"))
    });
    let said = login.run(&["drain", "--deadline", "86400"]);
    assert!(said.stdout.contains("at most 1 day; open allocations or connections: 1"), "{}", said.output());
    let refused = login.run(&["reload"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("draining"), "{}", refused.stderr);
    let said = login.json(&["drain", "--deadline", "0"]);
    assert_eq!(said["open"], 1);
    server.wait(SOON).ended(0).says("ending the allocations still open");
    drop(allocation);
    assert!(!login.socket().exists(), "the socket was not removed");
    // The next default, loopback, may belong to another test's server.
    let socket = format!("unix:{}", login.socket().display());
    let absent = login.run(&["reload", "--admin", &socket]);
    assert_eq!(absent.code, Some(1));
    assert!(absent.stderr.contains("no running turnpike serve"), "{}", absent.stderr);
    assert!(absent.stderr.contains(&socket), "{}", absent.stderr);
}

#[test]
fn health_sets_the_exit_code_and_drain_can_wait() {
    let Some(login) = login() else { return };
    let socket = format!("unix:{}", login.socket().display());
    assert_eq!(login.run(&["health", "--live", "--admin", &socket]).code, Some(1), "no server");
    let mut server = login.serve(&["--user", "alice:secret"]);
    let at = listening(&mut server);
    let well = login.run(&["health"]);
    assert!(well.code == Some(0) && well.stdout.starts_with("ok\nrelay address "), "{}", well.output());
    assert_eq!(login.json(&["health", "--live"])["well"], true);
    let reflect = Reflect::start(V4, &[]);
    let allocation = Load::new(at).to(reflect.address).with("--rate 30 --duration 600").start();
    eventually("an allocation", || {
        get_unix(&login.socket(), "/v1/status").is_ok_and(|(_, status)| status.contains("\"open\":1"))
    });
    let mut waiting = Program::start(&mut login.command(&["drain", "--deadline", "86400", "--wait"]));
    eventually("a drain", || login.run(&["health"]).code == Some(1));
    let drains = login.run(&["health"]);
    assert!(drains.stderr.contains("draining"), "{}", drains.output());
    assert_eq!(login.run(&["health", "--live"]).code, Some(0), "it runs");
    assert!(!waiting.has_ended(), "an allocation exists");
    login.json(&["drain", "--deadline", "0"]);
    assert_eq!(server.wait(SOON).code, Some(0));
    // `drain --wait` does not wait for a successor at the same address.
    let _next = login.serve(&["--user", "alice:secret"]);
    let waited = waiting.wait(SOON).ended(0);
    let text = "at most 1 day; open allocations or connections: 1";
    assert!(waited.stdout.contains(text), "{}", waited.output());
    drop(allocation);
}

#[test]
fn second_server_runs_without_the_default_socket() {
    let Some(login) = login() else { return };
    let mut first = login.serve(&["--user", "alice:secret"]);
    first.line_with("listening on udp ");
    let arguments = ["serve", "--listen", "127.0.0.1:0", "--relay-ip", "127.0.0.1", "--user", "a:b"];
    let mut second = Program::start(&mut login.command(&arguments));
    let line = second.line_with("admin interface: cannot listen on unix:");
    assert!(line.contains("WARN") && line.contains("admin.sock"), "{line}");
    let mut third = Program::start(&mut login.command(&[&arguments[..], &["--admin", "unix"]].concat()));
    let line = third.line_with("admin interface: cannot listen on unix:");
    assert!(line.contains("choose another"), "{line}");
    assert_eq!(third.wait(SOON).code, Some(1));
    assert_eq!(login.run(&["allocations"]).code, Some(0), "the first server answers");
}

#[test]
fn forwarder_is_reloaded_and_drained_by_address() {
    let Some(login) = login() else { return };
    let socket = login.0.path().join("f.sock");
    let address = format!("unix:{}", socket.display());
    let rule = |port: u16| {
        format!("[[rule]]\nname = \"web\"\nlisten = \"127.0.0.1:0\"\ntarget = \"127.0.0.1:{port}\"\n")
    };
    let file = login.0.file("rules.toml", rule(9));
    let mut forward =
        Program::start(&mut login.command(&["forward", "-c", "rules.toml", "--admin", &address]));
    forward.line_with("admin interface on unix:");
    fs::write(&file, rule(10)).expect("the test's own file");
    let changed = login.run(&["reload", "--admin", &address]);
    assert_eq!(changed.stdout, "rule web: changed", "{}", changed.output());
    let allocations = login.run(&["allocations", "--admin", &address]);
    assert_eq!(allocations.code, Some(1));
    assert!(allocations.stderr.contains("this program is a forwarder"), "{}", allocations.stderr);
    assert_eq!(login.run(&["drain", "--admin", &address]).code, Some(0));
    assert_eq!(forward.wait(SOON).code, Some(0));
    assert!(!socket.exists());
}

#[test]
fn loopback_is_read_only_without_a_token() {
    let dir = Dir::new();
    let token = "0123456789abcdef0123456789abcdef";
    let file = dir.file("t.toml", format!("[admin]\ntokens = [\"{token}\"]\n"));
    let token_file = dir.file("token", format!("{token}\n"));
    let path = |path: &Path| path.to_str().expect("the test's path is UTF-8").to_owned();
    let admin = SocketAddr::new(V4, free_port(V4)).to_string();
    let arguments = ["serve", "--listen", "127.0.0.1:0", "--relay-ip", "127.0.0.1", "--user", "a:b"];
    let more = ["--admin", &admin, "-c", &path(&file), "-q"];
    let mut program = Program::start(&mut turnpike(&[&arguments[..], &more].concat()));
    let run = |arguments: &[&str]| Program::run(&mut turnpike(&[arguments, &["--admin", &admin]].concat()));
    eventually("the program responds", || run(&["allocations"]).code == Some(0));
    let refused = run(&["reload"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("changes need a token from admin.tokens"), "{}", refused.stderr);
    for (mode, is_told) in [(0o644, true), (0o600, false)] {
        fs::set_permissions(&token_file, fs::Permissions::from_mode(mode)).expect("the test's own file");
        let done = run(&["reload", "--token-file", &path(&token_file)]).ended(0);
        let told = "every user on this machine can read the token in it (mode 644); chmod o= ";
        assert_eq!(done.stderr.contains(told), is_told, "{}", done.stderr);
    }
    let audit = program.line_with("turnpike::audit");
    assert!(
        audit.contains("POST /v1/reload") && audit.contains("127.0.0.1:"),
        "also written with -q: {audit}"
    );
    assert!(!audit.contains(token), "{audit}");
}

#[test]
fn usage_errors_appear_before_any_request() {
    for (arguments, told) in [
        (&["allocations", "--admin", "192.0.2.1:9641"][..], "not on loopback"),
        (&["reload", "--admin", "https://me@127.0.0.1:1"], "expected unix:/PATH"),
        (&["allocation", "end"], "<ID>"),
        (&["allocation"], "Usage"),
        (&["drain", "--deadline", "soon"], "--deadline"),
    ] {
        let ended = Program::run(&mut turnpike(arguments));
        assert_eq!(ended.code, Some(2), "{arguments:?}: {}", ended.output());
        assert!(ended.stderr.contains(told), "{arguments:?}: {}", ended.stderr);
    }
}

#[test]
fn non_loopback_admin_requires_tls_and_a_token() {
    let open = |arguments: &[&str]| Program::run(&mut turnpike(arguments));
    for arguments in [
        &["serve", "--user", "a:b", "--admin", "0.0.0.0:0"][..],
        &["forward", "tcp://127.0.0.1:0=127.0.0.1:9", "--admin", "[::]:0"],
    ] {
        open(arguments).ended(2).says("not on loopback, and there is no certificate");
    }
}
