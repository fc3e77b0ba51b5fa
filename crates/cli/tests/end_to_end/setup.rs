//! `turnpike setup`: from flags to a running server and a green probe, and refused answers.

use crate::prelude::*;

const NAME: &str = "localhost";
const CERTBOT: &str = "/etc/letsencrypt/live/localhost/fullchain.pem";
/// Command that shows if a namespace allows mounts and has loopback.
const MOUNT: [&str; 3] = ["sh", "-c", "mount -t tmpfs none /tmp && ip link set lo up"];

/// `turnpike setup` in `dir`, with the server's state there too.
fn setup(dir: &Dir, arguments: &[&str]) -> Command {
    let mut command = turnpike(&[&["setup"], arguments].concat());
    command.current_dir(dir.path()).env("HOME", dir.path()).env("RUNTIME_DIRECTORY", dir.path());
    // Limits the wait for a DNS server that does not answer.
    command.env("RES_OPTIONS", "timeout:1 attempts:1");
    command
}

/// Flags that make the answers independent of the machine.
fn fixed(port: u16) -> Vec<String> {
    let listen = format!("127.0.0.1:{port}");
    ["--public-address", "none", "--port-443", "no", "--listen", &listen].map(str::to_owned).to_vec()
}

fn with_fixed<'a>(fixed: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    fixed.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

fn read(dir: &Dir) -> String {
    fs::read_to_string(dir.at("turnpike.toml")).expect("the file was written")
}

#[test]
fn flags_lead_to_a_green_probe() {
    let certificate = Certificate::of_authority(&[NAME]);
    let (cert, key) = (certificate.cert(), certificate.key());
    let files = ["--certificate", cert.to_str().expect("UTF-8"), "--key", key.to_str().expect("UTF-8")];
    for access in ["secret", "api", "user:alice"] {
        let dir = Dir::new();
        let port = free_port(V4);
        let fixed = fixed(port);
        let more =
            [&["--name", NAME, "--access", access, "--relay-ports", "50000-50099"][..], &files].concat();
        let mut command = setup(&dir, &with_fixed(&fixed, &more));
        let run = Program::run(command.env("SSL_CERT_FILE", certificate.authority())).ended(0);
        assert_eq!(run.stdout.matches("usable; 0 bad, ").count(), 2, "{}", run.output());
        for line in ["wrote ", "udp dport 50000-50099", "ok    certificate", "turnpike serve -c "] {
            assert!(run.stdout.contains(line), "{line}: {}", run.output());
        }
        let text = read(&dir);
        let secret = text.split('"').find(|word| word.len() == 64).expect("a secret");
        assert_eq!(run.output().matches(secret).count() > 0, access != "api", "{}", run.output());
        let of_access = match access {
            "secret" => "occ talk:turn:add --secret=",
            "api" => "turnpike key add",
            _ => "alice ",
        };
        assert!(run.stdout.contains(of_access), "{}", run.output());
        let mode = fs::metadata(dir.at("turnpike.toml")).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(TcpStream::connect((V4, port)).is_err(), "the server of the probe is still running");
        let mut check = turnpike(&["check-config", "-c", "turnpike.toml"]);
        let check = Program::run(check.current_dir(dir.path()).env("HOME", dir.path())).ended(0);
        assert!(!check.stderr.contains("turnpike.toml"), "{}", check.stderr);
    }
}

#[test]
fn bad_certificate_fails_the_probe() {
    let certificate = Certificate::new(&["turn.example.org"]);
    let dir = Dir::new();
    let (cert, key) = (certificate.cert(), certificate.key());
    let fixed = fixed(free_port(V4));
    let more = ["--certificate", cert.to_str().expect("UTF-8"), "--key", key.to_str().expect("UTF-8")];
    let run = Program::run(&mut setup(&dir, &with_fixed(&fixed, &[&["--name", NAME][..], &more].concat())))
        .ended(1);
    assert!(run.stdout.contains("bad   certificate"), "{}", run.output());
}

#[test]
fn helper_probes_from_another_machine() {
    let bin = Dir::new();
    let script =
        "#!/bin/sh\nprintf '%s\\n' \"$@\" >> \"$HOME/ssh\"\nfor last; do :; done\nexec sh -c \"$last\"\n";
    let ssh = bin.file("ssh", script);
    fs::set_permissions(ssh, fs::Permissions::from_mode(0o755)).expect("the test's own file");
    let path = |more: &Path| format!("{}:{}:/usr/bin:/bin", bin.path().display(), more.display());
    let program = Path::new(env!("CARGO_BIN_EXE_turnpike")).parent().expect("a directory");
    let fixed = fixed(free_port(V4));
    let arguments = with_fixed(
        &fixed,
        &["--name", NAME, "--certificate", "none", "--force", "--helper", "admin@outside"],
    );

    let dir = Dir::new();
    let run = Program::run(setup(&dir, &arguments).env("PATH", path(program))).ended(0);
    assert!(run.stdout.contains("from admin@outside:"), "{}", run.output());
    assert_eq!(run.stdout.matches("usable; 0 bad, ").count(), 2, "{}", run.output());
    let words = fs::read_to_string(dir.at("ssh")).expect("ssh was called");
    assert!(words.contains("--\nadmin@outside\n") && words.contains("turn:localhost:"), "{words}");
    assert!(!words.contains(":setup:"), "the credential is an argument: {words}");

    let absent = Program::run(setup(&dir, &arguments).env("PATH", path(Path::new("/nowhere"))));
    if installed("turnpike").is_err() {
        absent.ended(2).says("admin@outside has no turnpike in its PATH: install it there");
    }
    bin.file("ssh", "#!/bin/sh\nexit 255\n");
    Program::run(setup(&dir, &arguments).env("PATH", path(program)))
        .ended(2)
        .says("ssh cannot run a command on admin@outside");
}

#[test]
fn dry_run_prints_only_the_file() {
    let dir = Dir::new();
    let fixed = fixed(free_port(V4));
    let run = Program::run(&mut setup(&dir, &with_fixed(&fixed, &["--dry-run"]))).ended(0);
    assert_eq!(run.stderr, "");
    assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0);
    let file = dir.file("printed.toml", format!("{}\n", run.stdout));
    Program::run(&mut turnpike(&["check-config", "-c", file.to_str().expect("UTF-8")])).ended(0);
}

#[test]
fn impossible_answers_are_refused_with_one_sentence() {
    let dir = Dir::new();
    let holder = TcpListener::bind((V4, 0)).expect("loopback has a free port");
    let taken = holder.local_addr().expect("bound").to_string();
    dir.file("edited.toml", "[server]\n");
    for (code, arguments, words) in [
        (2, &["--certificate", "automatic"][..], "--certificate needs --name"),
        (2, &["--name", NAME, "--certificate", "cert.pem"], "--key is missing: the private key of cert.pem"),
        (2, &["--port-443", "127.0.0.1:8443"], "--port-443 with a web server needs --certificate"),
        (2, &["--listen", &taken], "is in use: stop the program that uses it (ss -lntup"),
        (2, &["-c", "edited.toml"], "edited.toml exists and has been edited: --force"),
        (2, &["-c", "edited.toml", "--start"], "--start needs root"),
        (2, &["--public-address", "10.0.0.5", "--helper", "outside"], "--helper needs --name"),
        (
            2,
            &["--name", NAME, "--certificate", "a/cert.pem", "--key", "a/key.pem"],
            "a/cert.pem: cannot be read",
        ),
        (1, &["-c", "missing/turnpike.toml"], "create the directory, or choose another file with --config"),
    ] {
        let fixed = ["--public-address", "--port-443"].into_iter().filter(|flag| !arguments.contains(flag));
        let mut all: Vec<&str> = arguments.to_vec();
        for flag in fixed {
            all.extend([flag, if flag == "--port-443" { "no" } else { "none" }]);
        }
        let free = format!("127.0.0.1:{}", free_port(V4));
        if !arguments.contains(&"--listen") {
            all.extend(["--listen", &free]);
        }
        let run = Program::run(&mut setup(&dir, &all)).ended(code).says(words);
        let lines: Vec<&str> = run.stderr.lines().collect();
        assert!(lines.len() == 1 && lines[0].starts_with("turnpike: "), "{arguments:?}: {}", run.output());
        assert_eq!(run.stdout, "", "{arguments:?}");
        assert!(!dir.at("turnpike.toml").exists() && !dir.at("turnpike.toml.new").exists(), "{arguments:?}");
    }
    for arguments in [["--relay-ports", "9-1"], ["--access", "alice"], ["--name", "a b"]] {
        Program::run(&mut setup(&dir, &arguments)).ended(2).says(arguments[0]);
    }
    assert_eq!(fs::read_to_string(dir.at("edited.toml")).expect("the file"), "[server]\n");
}

#[test]
fn taken_web_ports_are_refused_with_the_alternatives() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        let dir = Dir::new();
        let _web = [80, 443].map(|port| TcpListener::bind(("0.0.0.0", port)).expect("a free port"));
        let automatic =
            ["--name", "turn.example.org", "--certificate", "automatic", "--public-address", "none"];
        for (port_443, words) in [
            (&[][..], "port 80 is in use: the certificate authority checks the name on this port"),
            (&["--port-443", "no"], "or answer yes for port 443"),
            (&["--port-443", "yes"], "port 443 is in use: move the web server to another address"),
            (&["--port-443", "127.0.0.1:8443"], "port 443 is in use: move the web server"),
        ] {
            let run =
                Program::run(&mut setup(&dir, &[&automatic[..], port_443].concat())).ended(2).says(words);
            assert!(
                run.stderr.contains("turn.example.org has no address: add a DNS record"),
                "{}",
                run.output()
            );
            assert!(!dir.at("turnpike.toml").exists());
        }
    });
}

#[test]
fn full_and_read_only_directories_are_refused() {
    alone::in_namespaces(turnpike_testkit::this_test!(), "nm", &MOUNT, || {
        run("ip", &["link", "set", "lo", "up"]);
        let dir = Dir::new();
        let path = dir.path().to_str().expect("UTF-8");
        run("mount", &["-t", "tmpfs", "-o", "size=4k", "none", path]);
        dir.file("filler", [0; 4096]);
        let fixed = fixed(free_port(V4));
        let run_setup = || Program::run(&mut setup(&dir, &with_fixed(&fixed, &[]))).ended(1);
        run_setup().says("free some space, or choose another file with --config");
        assert!(!dir.at("turnpike.toml").exists() && !dir.at("turnpike.toml.new").exists());
        run("mount", &["-o", "remount,ro", path]);
        run_setup().says("remount the file system writable, or choose another file with --config");
        run("umount", &[path]);
    });
}

/// A fake systemctl reports systemd 252 and starts the server in the background.
#[test]
fn packaged_service_is_prepared_started_and_probed() {
    alone::in_namespaces(turnpike_testkit::this_test!(), "nm", &MOUNT, || {
        run("ip", &["link", "set", "lo", "up"]);
        let dir = Dir::new();
        let etc = dir.at("etc");
        // Files that only the real root can read are not needed.
        run("sh", &["-c", "cp -a /etc \"$0\" 2>/dev/null || true", etc.to_str().expect("UTF-8")]);
        let accounts = fs::read_to_string(etc.join("passwd")).expect("accounts");
        let accounts: String = accounts
            .lines()
            .filter(|line| !line.starts_with("turnpike:"))
            .fold("turnpike:x:0:0::/:/bin/false\n".to_owned(), |text, line| text + line + "\n");
        fs::write(etc.join("passwd"), accounts).expect("the test's own copy");
        fs::write(etc.join("group"), "root:x:0:\nturnpike:x:0:\n").expect("the test's own copy");
        fs::create_dir_all(etc.join("turnpike")).expect("the test's own copy");
        let packaged = include_str!("../../../../deploy/package/turnpike.toml");
        fs::write(etc.join("turnpike/turnpike.toml"), packaged).expect("the test's own copy");
        let certificate = Certificate::of_authority(&[NAME]);
        let lineage = etc.join("letsencrypt/live/localhost");
        fs::create_dir_all(&lineage).expect("the test's own copy");
        fs::copy(certificate.cert(), lineage.join("fullchain.pem")).expect("the test's own copy");
        fs::copy(certificate.key(), lineage.join("privkey.pem")).expect("the test's own copy");
        fs::create_dir_all(etc.join("systemd/system")).expect("the test's own copy");
        fs::write(etc.join("systemd/system/turnpike.service"), "").expect("the test's own copy");
        run("mount", &["--bind", etc.to_str().expect("UTF-8"), "/etc"]);
        run("mount", &["-t", "tmpfs", "none", "/run"]);
        fs::create_dir_all("/run/systemd/system").expect("the test's own directory");

        let program = env!("CARGO_BIN_EXE_turnpike");
        let systemctl = dir.file(
            "bin/systemctl",
            format!(
                "#!/bin/sh\necho \"$*\" >> $HOME/calls\ncase $1 in\n--version) echo systemd 252;;\nis-active) exit 3;;\n\
                 restart) {program} serve -c /etc/turnpike/turnpike.toml >/dev/null 2>&1 & echo $! > $HOME/pid;;\nesac\n"
            ),
        );
        fs::set_permissions(systemctl, fs::Permissions::from_mode(0o755)).expect("the test's own file");
        let arguments = ["--name", NAME, "--start", "--port-443", "127.0.0.1:8443", "--certificate", CERTBOT];
        let mut command = setup(&dir, &arguments);
        command.env("PATH", format!("{}:/usr/bin:/bin", dir.at("bin").display()));
        let run_setup = Program::run(command.env("SSL_CERT_FILE", certificate.authority()));
        let pid = fs::read_to_string(dir.at("pid")).unwrap_or_default();
        let _ = Command::new("kill").arg(pid.trim()).status();
        let run_setup = run_setup.ended(0);
        assert_eq!(run_setup.stdout.matches("usable; 0 bad, ").count(), 2, "{}", run_setup.output());
        assert!(run_setup.stdout.contains("turns:localhost:443"), "{}", run_setup.output());
        let calls = fs::read_to_string(dir.at("calls")).expect("systemctl was called");
        assert!(
            calls.ends_with("daemon-reload\nenable turnpike.service\nrestart turnpike.service\n"),
            "{calls}"
        );
        for drop_in in ["low-ports.conf", "notify.conf"] {
            assert!(Path::new("/etc/systemd/system/turnpike.service.d").join(drop_in).exists(), "{drop_in}");
        }
        let config = Path::new("/etc/turnpike/turnpike.toml");
        let text = fs::read_to_string(config).expect("the file was written");
        for line in ["format = \"journald\"", "127.0.0.1:8443", "cert = \"/etc/turnpike/tls/fullchain.pem\""]
        {
            assert!(text.contains(line), "{line}: {text}");
        }
        let hook = Path::new("/etc/letsencrypt/renewal-hooks/deploy/turnpike");
        assert_eq!(fs::metadata(hook).expect("a hook").permissions().mode() & 0o777, 0o755);
        assert_eq!(fs::metadata(config).expect("a file").permissions().mode() & 0o777, 0o640);
        let old = fs::read_to_string("/etc/turnpike/turnpike.toml.bak").expect("the packaged file was kept");
        assert_eq!(old, packaged);
    });
}
