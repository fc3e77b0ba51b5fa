//! Users in a store: the embedded one with the commands that change it, coturn's databases, and store outages.

mod fleet;

use crate::prelude::*;

use turnpike_testkit::{HttpStub, databases::PASSWORD as SERVERS_PASSWORD};

use turnpike_trials::coturn_store;

/// Error code of an Allocate by this user in the realm that the server names first; `None` if it succeeds.
fn allocate(serve: &Serve, user: &str, password: &str) -> Option<u16> {
    let client = stun::Client::new(serve.address(V4));
    let (_, _, challenge) = client.challenge();
    client.allocate(user, password, &challenge)
}

fn allocate_in(serve: &Serve, realm: &str, user: &str, password: &str) -> Option<u16> {
    let client = stun::Client::new(serve.address(V4));
    let (_, _, stun::Challenge { nonce, .. }) = client.challenge();
    client.allocate(user, password, &stun::Challenge { realm: realm.as_bytes().to_vec(), nonce })
}

fn run(arguments: &[&str]) -> Finished {
    Program::start(&mut turnpike(arguments)).wait(SOON)
}

#[track_caller]
fn said(arguments: &[&str]) -> String {
    let ended = run(arguments);
    assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.output());
    ended.stdout
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&said(arguments)).expect("JSON")
}

fn path(dir: &Path) -> &str {
    dir.to_str().expect("the test's path is UTF-8")
}

#[test]
fn generated_credential_is_kept_and_shown_once() {
    let dir = Dir::new();
    let state = dir.path().join("state");
    let mut serve = Serve::start_bare(&["--state", path(&state)]);
    let line = serve.program.line_with("No user configured; created one: user turnpike password ");
    assert!(line.contains(path(&state)), "{line}");
    let (_, rest) = line.split_once(" password ").expect("a password");
    let password = rest.split(' ').next().expect("a word").to_owned();
    assert_eq!(allocate(&serve, "turnpike", &password), None);
    assert_eq!(allocate(&serve, "turnpike", "another"), Some(401));
    drop(serve);

    let mode = |path: &Path| fs::metadata(path).expect("the file exists").permissions().mode() & 0o777;
    let file = state.join("turnpike.sqlite");
    assert_eq!((mode(&state), mode(&file)), (0o700, 0o600));
    let bytes = fs::read(&file).expect("the file is readable");
    assert!(
        !bytes.windows(password.len()).any(|window| window == password.as_bytes()),
        "the store contains the password"
    );

    let serve = Serve::start_bare(&["--state", path(&state)]);
    assert_eq!(allocate(&serve, "turnpike", &password), None);
    assert!(!serve.program.lines().iter().any(|line| line.contains("password")), "shown once");
}

#[test]
fn default_state_directory_follows_the_environment() {
    let dir = Dir::new();
    for (variables, expected) in [
        (vec![("STATE_DIRECTORY", "systemd:other")], "systemd"),
        (vec![("XDG_STATE_HOME", "xdg"), ("HOME", "home")], "xdg/turnpike"),
        (vec![("HOME", "home")], "home/.local/state/turnpike"),
    ] {
        let root = path(dir.path());
        let absolute =
            |value: &str| value.split(':').map(|part| format!("{root}/{part}")).collect::<Vec<_>>().join(":");
        let variables = variables.into_iter().map(|(name, value)| (name, absolute(value)));
        Program::start(turnpike(&["user", "add", "alice"]).envs(variables)).wait(SOON).ended(0);
        assert!(dir.path().join(expected).join("turnpike.sqlite").is_file(), "{expected}");
    }
    run(&["user", "list"]).ended(2).says("--state DIR");
}

/// A command that cannot reach the server finds the realm in the store's directory.
#[test]
fn offline_command_refuses_a_realm_unknown_to_the_server() {
    let dir = Dir::new();
    let state = path(dir.path());
    let serve = Serve::start(&["--state", state]);
    let realm = turnpike_trials::REALM;
    for command in [&["user", "add", "carol"][..], &["user", "remove", "carol"], &["secret", "add"]] {
        let ended = run(&[command, &["--state", state]].concat());
        assert_eq!(ended.code, Some(2), "{command:?}: {}", ended.output());
        let is_told = |word: &str| ended.stderr.contains(word);
        assert!(
            is_told(realm) && is_told("\"turnpike\"") && is_told(&format!("{state}/realm")),
            "{}",
            ended.stderr
        );
    }
    said(&["user", "add", "carol", "--state", state, "--realm", realm, "--password", "sesame"]);
    eventually("carol is accepted", || allocate(&serve, "carol", "sesame").is_none());
    let config = dir.file("t.toml", format!("[server]\nrealm = \"{realm}\"\n"));
    said(&["user", "add", "dora", "--state", state, "-c", path(&config), "--password", "sesame"]);
    eventually("dora is accepted", || allocate(&serve, "dora", "sesame").is_none());
}

#[test]
fn running_server_sees_changes_by_the_commands() {
    let dir = Dir::new();
    let state = path(dir.path());
    let mut serve = Serve::start(&["--state", state]);
    let realm = turnpike_trials::REALM;
    let with = |command: &[&str], more: &[&str]| {
        let mut arguments = command.to_vec();
        arguments.extend(["--state", state]);
        arguments.extend(more);
        said(&arguments)
    };
    assert_eq!(allocate(&serve, "bob", "sesame"), Some(401));
    with(&["user", "add", "bob"], &["--realm", realm, "--password", "sesame"]);
    eventually("bob is accepted", || allocate(&serve, "bob", "sesame").is_none());
    assert_eq!(allocate(&serve, turnpike_trials::USER, turnpike_trials::PASSWORD), None);
    with(&["user", "add", "bob"], &["--realm", realm, "--password", "changed"]);
    eventually("bob's new password is accepted", || allocate(&serve, "bob", "changed").is_none());
    assert_eq!(allocate(&serve, "bob", "sesame"), Some(401));
    with(&["user", "remove", "bob"], &["--realm", realm]);
    eventually("bob is refused", || {
        // Each accepted attempt adds an allocation on a port that stays in use.
        std::thread::sleep(Duration::from_millis(50));
        allocate(&serve, "bob", "changed") == Some(401)
    });

    let secret = json(&["secret", "add", "--state", state, "--realm", realm, "--json"]);
    let secret_text = secret["secret"].as_str().expect("the secret is generated");
    let credential = said(&["credentials", "--secret", secret_text, "--user", "carol"]);
    let field = |name: &str| {
        let line = credential.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
        line.trim().to_owned()
    };
    let (name, password) = (field("username:"), field("password:"));
    assert_eq!(allocate(&serve, &name, &password), None);
    assert_eq!(allocate(&serve, &name, "wrong"), Some(401));
    let fingerprint = secret["name"].as_str().expect("the secret's fingerprint");
    let listed = with(&["secret", "list"], &[]);
    assert!(listed.contains(fingerprint) && !listed.contains(secret_text), "{listed}");
    with(&["secret", "remove", fingerprint], &["--realm", realm]);
    eventually("the secret is no longer accepted", || {
        std::thread::sleep(Duration::from_millis(50));
        allocate(&serve, &name, &password) == Some(401)
    });

    with(&["user", "add", "dora"], &["--realm", "blue.example", "--password", "pw"]);
    assert_eq!(allocate_in(&serve, realm, "dora", "pw"), Some(401));
    with(&["realm", "add", "blue.example"], &["--allocations-per-user", "1"]);
    eventually("the realm is served", || {
        let client = stun::Client::new(serve.address(V4));
        let (_, _, stun::Challenge { nonce, .. }) = client.challenge();
        // A client of a realm that is not served is directed to the first realm.
        client.forge("dora", b"blue.example", &nonce) == Some(438)
    });
    eventually("the realm's user gets an allocation", || {
        allocate_in(&serve, "blue.example", "dora", "pw").is_none()
    });
    assert_eq!(allocate_in(&serve, "blue.example", "dora", "pw"), Some(486));
    with(&["realm", "remove", "blue.example"], &[]);
    let line = serve.program.line_with("allocation ended");
    assert!(line.contains("blue.example") && line.contains("ended by an administrator"), "{line}");
}

/// Without store flags the command uses the running server's store, over its socket.
#[test]
fn commands_use_the_running_server_or_else_the_embedded_store() {
    let dir = Dir::new();
    let (runtime, home) = (dir.path().join("run"), dir.path().join("home"));
    fs::create_dir(&runtime).expect("a fresh directory");
    let state = dir.path().join("state");
    if runtime.as_os_str().len() > 80 {
        return skip("the path of the socket would be longer than 107 bytes");
    }
    let command = |arguments: &[&str]| {
        let mut command = turnpike(arguments);
        command.env("XDG_RUNTIME_DIR", &runtime).env("HOME", &home);
        Program::run(&mut command)
    };
    let mut server = Program::start(
        turnpike(&["serve", "--listen", "127.0.0.1:0", "--relay-ip", "127.0.0.1", "--state", path(&state)])
            .args(["--admin", "unix", "--user", "static:secret"])
            .env("XDG_RUNTIME_DIR", &runtime),
    );
    let address = server.line_with("listening on udp 127.0.0.1:");
    let (_, address) = address.split_once("udp ").expect("an address");
    let address = address.parse().expect("an address");
    server.line_with("admin interface on unix:");
    let allocate = |user: &str, password: &str| {
        let client = stun::Client::new(address);
        let (_, _, challenge) = client.challenge();
        client.allocate(user, password, &challenge)
    };
    assert_eq!(allocate("bob", "sesame"), Some(401));
    let added = command(&["user", "add", "bob", "--password", "sesame"]).ended(0);
    assert!(added.stdout.contains(path(&state)), "{}", added.stdout);
    // The embedded store was just created, which the server notices within a second.
    eventually("bob is accepted", || allocate("bob", "sesame").is_none());
    let line = server.line_with("turnpike::audit");
    assert!(line.contains("bob") && line.contains("added user") && line.contains("status=201"), "{line}");
    assert!(!line.contains("sesame"), "{line}");
    let listed = command(&["user", "list"]).stdout;
    assert!(listed.contains("static  turnpike  MD5, SHA-256  configuration"), "{listed}");
    assert_eq!(command(&["user", "remove", "bob"]).code, Some(0));
    assert_eq!(allocate("bob", "sesame"), Some(401), "immediately");
    assert!(!home.exists(), "a store was created for this user");

    server.signal("TERM");
    assert_eq!(server.wait(SOON).code, Some(0));
    let added = command(&["user", "add", "bob"]);
    assert!(added.stdout.contains("home/.local/state/turnpike"), "{}", added.output());
    // An explicit --admin is used even if no server listens there.
    command(&["user", "add", "bob", "--admin", &format!("unix:{}/none", path(&runtime))])
        .ended(1)
        .says("no running turnpike serve");
}

/// The output matches that of a running server: see `commands_give_the_same_output_with_and_without_a_server` in crates/admin.
#[test]
fn commands_create_the_embedded_store_and_report_errors() {
    let dir = Dir::new();
    let state = ["--state", path(dir.path())];
    let on_state = |arguments: &[&str]| run(&[arguments, &state[..]].concat());
    assert_eq!(on_state(&["user", "list", "--json"]).ended(0).stdout, "[]");
    assert!(!dir.path().join("turnpike.sqlite").exists(), "listing created a store");
    let added = on_state(&["user", "add", "alice", "--json"]).ended(0).result();
    assert_eq!((&added["realm"], &added["existed"]), (&"turnpike".into(), &false.into()));
    assert_eq!(added["password"].as_str().map(str::len), Some(32));
    let elsewhere = on_state(&["user", "add", "al", "--realm", "blue", "--password", "pw"]).ended(0);
    assert!(elsewhere.stdout.contains("turnpike realm add blue"), "{}", elsewhere.output());
    let config = dir.file("served.toml", "[server]\nrealm = \"turnpike\"\n");
    let unserved = ["user", "add", "al", "--realm", "red", "--password", "pw", "-c", path(&config)];
    on_state(&unserved).ended(1).says("\"red\" is not served");
    let shared = format!("sqlite://{}", path(&dir.path().join("shared.sqlite")));
    run(&["user", "add", "al", "--store", &shared]).ended(2).says("--realm");
    for (arguments, told) in [
        (&["user", "add", "a:b"][..], "nor a colon"),
        (&["user", "add", "a", "--password-file", "/dev/null"], "/dev/null: the first line is empty"),
        (&["realm", "add", "a\"b"], "127 characters"),
        (&["user", "list", "--store", "postgres://h"], "store.url"),
    ] {
        on_state(arguments).ended(2).says(told);
    }
}

#[test]
fn unwritable_state_directory_leaves_a_credential_for_this_run() {
    let mut serve = Serve::start_bare(&["--state", "/proc/turnpike"]);
    let line = serve.program.line_with("No user configured; for this run: user turnpike password ");
    serve.program.line_with("only until this process exits");
    let (_, rest) = line.split_once(" password ").expect("a password");
    assert_eq!(allocate(&serve, "turnpike", rest.split(' ').next().expect("a word")), None);
}

struct World {
    serve: Serve,
    proxy: Proxy,
    server: Server,
}

impl World {
    fn new(more: &[&str]) -> Result<Self, String> {
        let (server, proxy) = coturn_store()?;
        let url = server.url(proxy.address, "");
        let mut arguments = vec!["--store", &url];
        arguments.extend(more);
        Ok(Self { serve: Serve::start(&arguments), proxy, server })
    }

    fn add(&self, name: &str, password: &str) {
        let url = self.server.url(self.server.address, "");
        let realm = turnpike_trials::REALM;
        said(&["user", "add", name, "--realm", realm, "--password", password, "--store", &url]);
    }
}

#[test]
fn database_outage_only_affects_uncached_users() {
    let mut world = need!(World::new(&[]));
    world.add("known", "pw");
    world.add("stranger", "pw");
    assert_eq!(allocate(&world.serve, "known", "pw"), None);
    let reflect = Reflect::start(V4, &[]);
    let allocation = Load::as_user(world.serve.address(V4), "known:pw")
        .to(reflect.address)
        .with("--rate 200 --duration 8")
        .start();
    world.serve.wait_for_allocations(2);

    world.proxy.hold(true);
    for _ in 0..4 {
        assert_eq!(allocate(&world.serve, "known", "pw"), None);
        assert_eq!(allocate(&world.serve, "stranger", "pw"), Some(500));
        assert_eq!(allocate(&world.serve, turnpike_trials::USER, turnpike_trials::PASSWORD), None);
    }
    let line = world.serve.program.line_with("does not answer in time");
    assert!(!line.contains(SERVERS_PASSWORD), "{line}");
    assert_eq!(world.serve.metrics().sum("turnpike_store_up", ""), 0);
    world.proxy.hold(false);
    world.serve.program.line_with("answers again, after");
    assert_eq!(allocate(&world.serve, "stranger", "pw"), None);
    assert_eq!(allocate(&world.serve, "known", "pw"), None);

    let result = allocation.wait(SOON * 2).result();
    assert_eq!(result["lost"], 0, "relayed traffic is not disturbed: {result}");
}

#[test]
fn database_missing_at_startup_is_used_when_it_appears() {
    let mut server = need!(Server::postgres());
    server.stop();
    let url = server.url(server.address, "");
    let mut serve = Serve::start(&["--store", &url]);
    serve.program.line_with("cannot be reached");
    assert_eq!(allocate(&serve, turnpike_trials::USER, turnpike_trials::PASSWORD), None);
    assert_eq!(allocate(&serve, "stranger", "pw"), Some(500));
    server.start();
    // The missing tables are reported once the database is up.
    serve.program.line_with("does not match coturn's schema");
}

#[test]
fn fake_redis_does_not_stop_a_server_with_configured_users() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    let url = format!("redis://{}/0", listener.local_addr().expect("the port is bound"));
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut asked = [0; 4096];
                while stream.read(&mut asked).is_ok_and(|len| len > 0)
                    && stream.write_all(b"+OK\r\n+OK\r\n").is_ok()
                {}
            });
        }
    });
    let serve = Serve::start(&["--store", &url]);
    assert_eq!(allocate(&serve, turnpike_trials::USER, turnpike_trials::PASSWORD), None);
}

#[test]
fn unusable_database_aborts_startup() {
    let server = need!(Server::postgres());
    let url = server.url(server.address, "");
    let wrong = url.replace(&SERVERS_PASSWORD.replace('%', "%25"), "wrong");
    let start = |url: &str| run(&["serve", "--listen", "127.0.0.1:0", "--admin", "off", "--store", url]);
    for (url, code, told) in [
        (url.as_str(), 1, "has none of coturn's tables"),
        (&wrong, 1, "refuses the user or password"),
        ("postgres://u:hunter2@h", 2, "flag --store: store.url: no database name"),
        ("mongodb://u:hunter2@h/d", 2, "mongodb is not a supported store"),
    ] {
        let ended = start(url);
        assert_eq!(ended.code, Some(code), "{url}: {}", ended.output());
        assert!(ended.stderr.contains(told) && !ended.stderr.contains("hunter2"), "{}", ended.stderr);
        assert_eq!(
            ended.stderr.lines().filter(|line| line.starts_with("turnpike: ")).count(),
            1,
            "{}",
            ended.stderr
        );
    }
    run(&["check-config", "--store", "postgres://u:hunter2@h"]).ended(2);
}

#[test]
fn world_readable_store_causes_a_warning() {
    let dir = Dir::new();
    let state = dir.path().join("state");
    said(&["user", "add", "one", "--password", "pw", "--state", path(&state)]);
    let file = state.join("turnpike.sqlite");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).expect("the test's own file");
    let mut serve = Serve::start_bare(&["--state", path(&state), "--relay-ip", "127.0.0.1"]);
    let told = serve.program.line_with("can read the keys and secrets in it");
    assert!(told.contains("WARN") && told.contains(path(&file)) && told.contains("chmod o= "), "{told}");
}

#[test]
fn reload_switches_stores_and_refuses_an_unusable_one() {
    let dir = Dir::new();
    let [one, two] = ["one", "two"].map(|name| {
        let state = dir.path().join(name);
        said(&["user", "add", name, "--password", "pw", "--state", path(&state)]);
        format!("sqlite://{}", state.join("turnpike.sqlite").display())
    });
    // Without write permission, a database opens only if its write-ahead log still exists.
    let written = path(dir.path());
    let configuration = |url: &str| format!("[store]\nurl = \"{url}\"\n[sandbox]\nwrite = [\"{written}\"]\n");
    let file = dir.file("turnpike.toml", configuration(&one));
    let mut serve = Serve::start_bare(&["-c", path(&file), "--relay-ip", "127.0.0.1"]);
    assert_eq!([allocate(&serve, "one", "pw"), allocate(&serve, "two", "pw")], [None, Some(401)]);
    fs::write(&file, configuration("sqlite:///nowhere/turndb")).expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("/nowhere/turndb");
    fs::write(&file, configuration(&two)).expect("the test's own file");
    serve.program.signal("HUP");
    let line = serve.program.line_with("configuration reloaded");
    assert!(line.contains("store.url"), "{line}");
    assert_eq!([allocate(&serve, "one", "pw"), allocate(&serve, "two", "pw")], [Some(401), None]);
}

#[test]
fn users_at_an_application_authenticate_and_survive_its_outage() {
    let mut stub = HttpStub::new();
    let request = "{\"realm\":\"example.org\",\"user\":\"alice\"}";
    stub.answer(request, "{\"password\":\"secret\"}");
    let url = format!("http://token@{}/users", stub.address);
    let serve = Serve::start_bare(&["--store", &url, "--realm", "example.org"]);
    assert_eq!(allocate(&serve, "alice", "secret"), None);
    assert_eq!(stub.authorization(), "Bearer token");
    assert_eq!(allocate(&serve, "alice", "another"), Some(401));
    assert_eq!(allocate(&serve, "bob", "secret"), Some(401));
    stub.stop();
    assert_eq!(allocate(&serve, "carol", "secret"), Some(500));
    assert_eq!(allocate(&serve, "alice", "secret"), None, "still in memory");
    let lines = serve.program.lines();
    assert!(!lines.iter().any(|line| line.contains("token@")), "{lines:#?}");
    stub.start();
    stub.otherwise("401 Unauthorized", "");
    drop(serve);
    let refused = run(&["serve", "--store", &url, "--listen", "127.0.0.1:0", "--admin", "off"]);
    assert_eq!(refused.code, Some(1), "{}", refused.output());
    assert!(refused.stderr.contains("correct them in store.url"), "{}", refused.output());
}
