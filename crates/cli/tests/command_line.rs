//! Output and exit codes of commands that serve nothing: configuration checks, credentials, usage errors.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use turnpike_testkit::Dir;

fn turnpike(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_turnpike")).args(arguments).output().expect("the program runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn check_config_prints_effective_settings_without_secrets() {
    let dir = Dir::new();
    let path = dir.file("t.toml", "[server]\nrealm = \"file\"\n[auth]\nsecrets = [\"hunter2\"]\n");
    let output = turnpike(&[
        "check-config",
        "-c",
        path.to_str().expect("UTF-8"),
        "--user",
        "a:hunter2",
        "--admin",
        "off",
    ]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(text.starts_with("ok\n"), "{text}");
    assert!(text.contains(&format!("realm = \"file\" # {}:2:9", path.display())), "{text}");
    assert!(text.contains("listen = \"off\" # flag --admin"), "{text}");
    assert!(text.contains("ports = \"49152-65535\" # default"), "{text}");
    assert!(!text.contains("hunter2"), "{text}");
}

#[test]
fn invalid_configuration_exits_with_2_and_lists_every_error() {
    let dir = Dir::new();
    let path = dir.file("t.toml", "[server]\nlisten = [\"nowhere\"]\nrelm = \"x\"\n");
    let path = path.to_str().expect("UTF-8");
    for command in ["check-config", "serve"] {
        let output = turnpike(&[command, "-c", path, "--relay-ports", "9-1"]);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[0].starts_with(&format!("turnpike: {path}:2:11: server.listen: ")), "{text}");
        assert!(lines[1].ends_with("did you mean \"realm\"?"), "{text}");
        assert!(lines[2].starts_with("turnpike: flag --relay-ports: relay.ports: "), "{text}");
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    for arguments in [
        &["serve", "--nonsense"][..],
        &["serve", "-c", "/nowhere/turnpike.toml"],
        &["nonsense"],
        &[],
        &["credentials", "--user", "a"],
        &["public-address", "--from", "nobody"],
    ] {
        assert_eq!(turnpike(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn malformed_credential_error_names_the_missing_part() {
    for (arguments, what) in [
        (&["load", "turn", "127.0.0.1", "--user", "alice:"][..], "the password after the colon is empty"),
        (&["load", "turn", "127.0.0.1", "--user", "alice"], "there is no colon"),
        (&["probe", "127.0.0.1", "--user", ":secret"], "the name before the colon is empty"),
        (&["credentials", "--user", "alice", "--secret", ""], "the secret is empty"),
        (&["credentials", "--user", "alice", "--password", ""], "the password is empty"),
    ] {
        let output = turnpike(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(what), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn credentials_from_a_secret_are_two_lines() {
    let output = turnpike(&["credentials", "--secret", "north", "--user", "alice", "--ttl", "60"]);
    let text = stdout(&output);
    let (first, second) = text.trim_end().split_once('\n').expect("two lines");
    let (expiry, id) =
        first.strip_prefix("username: ").expect("a username").split_once(':').expect("expiry:id");
    assert!(expiry.parse::<u64>().is_ok_and(|expiry| expiry > 1_700_000_000) && id == "alice", "{text}");
    assert!(second.starts_with("password: ") && second.ends_with('='), "{text}");
}

#[test]
fn stored_keys_are_a_valid_users_entry() {
    let output = turnpike(&["credentials", "--user", "user", "--realm", "realm", "--password", "pass"]);
    let entry = stdout(&output);
    assert!(entry.contains("8493fbc53ba582fb4c044c456bdc40eb"), "{entry}");
    let dir = Dir::new();
    let path = dir.file("t.toml", format!("[auth]\nusers = [{}]\n", entry.trim_end()));
    let check = turnpike(&["check-config", "-c", path.to_str().expect("UTF-8")]);
    assert_eq!(check.status.code(), Some(0), "{}", stderr(&check));
}

/// Like `turnpike check-config | head`.
#[test]
fn closed_output_pipe_is_not_a_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_turnpike"))
        .arg("check-config")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the program ends");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn import_translates_a_command_line_and_writes_to_standard_output() {
    let output = turnpike(&[
        "import",
        "coturn",
        "-o",
        "-",
        "--",
        "-n",
        "--lt-cred-mech",
        "--user=alice:w",
        "--realm",
        "example.org",
    ]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(text.contains("realm = \"example.org\"") && text.contains("name = \"alice\""), "{text}");
    let dir = Dir::new();
    let file = dir.file("turnserver.conf", "use-auth-secret\nstatic-auth-secret=north\n");
    let output = turnpike(&["import", "coturn", file.to_str().expect("UTF-8"), "-o", "-"]);
    assert!(stdout(&output).contains("secrets = [\"north\"]"), "{}", stderr(&output));
    assert_eq!(turnpike(&["import", "coturn"]).status.code(), Some(2));
}

#[test]
fn coturn_option_error_suggests_import() {
    for arguments in [&["serve", "--lt-cred-mech"][..], &["serve", "-n", "--min-port=50000", "--realm=x"]] {
        let output = turnpike(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains("turnpike import coturn -- ARGUMENTS"), "{}", stderr(&output));
    }
    assert!(stderr(&turnpike(&["serve", "--nonsense"])).contains("unexpected argument"));
}

/// Root can read any file, so the program runs as another user.
#[test]
fn unreadable_key_error_suggests_chmod() {
    use std::os::unix::{fs::PermissionsExt as _, process::CommandExt as _};
    let dir = Dir::new();
    let key = dir.file("key.pem", "a key");
    let key = key.to_str().expect("UTF-8");
    std::fs::set_permissions(key, std::fs::Permissions::from_mode(0o000)).expect("the mode can be changed");
    let mut command = Command::new(env!("CARGO_BIN_EXE_turnpike"));
    command.args(["check-config", "--tls-cert", key, "--tls-key", key, "--tls-listen", "127.0.0.1:5349"]);
    let is_root =
        std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    if is_root {
        command.uid(65_534).gid(65_534);
    }
    let Ok(output) = command.output() else {
        eprintln!("SKIPPED: another user cannot run the program here");
        return;
    };
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("is not readable for user ") && text.contains(&format!("{key} && chmod 640 {key}")),
        "{text}"
    );
}

#[test]
fn swapped_relay_addresses_error_shows_the_right_order() {
    let dir = Dir::new();
    let state = dir.path().to_str().expect("UTF-8").to_owned();
    let serve = |address: &str| {
        let arguments = [
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "off",
            "--state",
            &state,
            "--user",
            "a:b",
            "--relay-ip",
            address,
        ];
        turnpike(&arguments)
    };
    let output = serve("10.255.255.9=127.0.0.1");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("write it first, 127.0.0.1=10.255.255.9"), "{}", stderr(&output));
    for mistaken in ["198.51.100.7=127.0.0.1", "198.51.100.7/127.0.0.1", "127.0.0.1/198.51.100.7"] {
        let output = serve(mistaken);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains("write 127.0.0.1=198.51.100.7"), "{}", stderr(&output));
    }
}

#[test]
fn yaml_file_is_recognized() {
    let dir = Dir::new();
    for (text, name) in
        [("eturnal:\n  secret: \"x\"\n", "eturnal.yml"), ("realm: example.org\nport: 3478\n", "YAML")]
    {
        let file = dir.file("turn.yml", text);
        let output = turnpike(&["check-config", "-c", file.to_str().expect("UTF-8")]);
        assert_eq!(output.status.code(), Some(2));
        assert!(
            stderr(&output).contains(&format!("this looks like {name}; expected turnpike's TOML")),
            "{}",
            stderr(&output)
        );
        assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
    }
}

#[test]
fn old_commands_run_with_a_notice() {
    for (old, new) in [
        (&["sessions"][..], "turnpike allocations"),
        (&["session", "show", "00000000000000000000000000000000"], "turnpike allocation"),
        (&["fleet", "sessions"], "turnpike fleet allocations"),
    ] {
        let output = turnpike(&[old, &["--admin", "unix:/nowhere/turnpike.sock"]].concat());
        let text = stderr(&output);
        let mut lines = text.lines();
        let notice = lines.next().expect("a notice");
        assert!(notice.contains(&format!("is now `{new}`")), "{text}");
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(lines.next().is_some_and(|line| line.contains("/nowhere/turnpike.sock")), "{text}");
        let current: Vec<&str> =
            new.split(' ').skip(1).chain(old[new.split(' ').count() - 1..].iter().copied()).collect();
        let output = turnpike(&[&current[..], &["--admin", "unix:/nowhere/turnpike.sock"]].concat());
        assert!(!stderr(&output).contains("is now"), "{current:?}");
    }
}

#[test]
fn check_config_prints_the_new_name_of_a_key() {
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", "[limits]\nsession_length = 600\n");
    let output = turnpike(&["check-config", "--config", file.to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains(":2:1: limits.session_length is now limits.max_allocation_duration"));
    let settings = stdout(&output);
    assert!(settings.contains("max_allocation_duration = 600"), "{settings}");
}

/// Configurations of earlier versions: the defaults plus the commented-out examples. `accept_proxy` without `proxy_protocol_from` is
/// left out on purpose: it is refused because it trusts every client.
#[test]
fn configurations_of_earlier_versions_load() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/configurations");
    let files = fs::read_dir(folder).expect("the folder exists");
    let mut loaded = 0;
    for file in files.map(|entry| entry.expect("the entry is readable").path()) {
        let name = file.file_name().expect("a file").to_string_lossy().into_owned();
        let flag = if name.starts_with("forward") { "--forward" } else { "--config" };
        let output = turnpike(&["check-config", flag, file.to_str().expect("UTF-8")]);
        // The certificates of the examples do not exist, and some keys have been renamed.
        let text = stderr(&output);
        let expected = ["cannot be read: No such file or directory", "the next version refuses the old name"];
        let is_mistake = |line: &&str| !expected.iter().any(|part| line.contains(part));
        let mistakes: Vec<&str> = text.lines().filter(is_mistake).collect();
        assert!(mistakes.is_empty(), "{name}: {mistakes:#?}");
        assert!(output.status.code() == Some(0) || name.contains("examples"), "{name}: {text}");
        loaded += 1;
    }
    assert!(loaded >= 13, "{loaded} files");
}
