//! Errors in files, flags and environment: exit code 2 with location and reason, before any socket opens.

use crate::prelude::*;

fn run(file: &str) -> Finished {
    let dir = Dir::new();
    let path = dir.file("turnpike.toml", file);
    let path = path.to_str().expect("the test's path is UTF-8");
    Program::start(&mut turnpike(&["serve", "-c", path])).wait(SOON)
}

#[test]
fn error_in_a_flag_names_the_flag() {
    for (flag, value, what) in [
        ("--listen", "nonsense", ""),
        ("--relay-ports", "9000-8000", ""),
        ("--allow-peer", "10.0.0.0/33", ""),
        ("--deny-peer", "example.org", ""),
        ("--datapath", "warp", ""),
        ("--workers", "none", ""),
        ("--user", "nocolon", "the colon and the password are missing"),
        ("--user", "alice:", "after the colon, is empty"),
        ("--secret", "", "the secret is empty"),
        ("--tls-listen", "127.0.0.1:0", ""),
        ("--dtls-listen", "127.0.0.1:0", ""),
        ("--tls-cert", "alone.pem", ""),
        ("--tls-key", "alone.pem", ""),
    ] {
        let ended = Program::start(&mut turnpike(&["serve", flag, value])).wait(SOON);
        assert_eq!(ended.code, Some(2), "{flag} {value}: {}", ended.output());
        assert!(
            ended.stderr.contains(flag) && ended.stderr.contains(what),
            "{flag} {value}: {}",
            ended.stderr
        );
    }
}

#[test]
fn messages_contain_no_secrets() {
    let ended = run("[auth]\nusers = [\"hunter2hunter2\"]\nsecrets = [\"hunter3hunter3\", \n");
    assert_eq!(ended.code, Some(2));
    assert!(!ended.output().contains("hunter"), "{}", ended.output());
}

/// The file has an error and its port is taken: a program that reads everything before binding reports only
/// the error in the file.
#[test]
fn configuration_is_checked_before_sockets_open() {
    let holder = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    let taken = holder.local_addr().expect("the port is bound");
    let ended = run(&format!("[server]\nlisten = [\"{taken}\"]\nlisen = []\n")).ended(2);
    assert!(!ended.stderr.contains("in use"), "{}", ended.stderr);
}

/// A check opens no listener, so it does not notice the taken port.
#[test]
fn check_finds_everything_that_serve_fails_on() {
    let holder = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    let taken = holder.local_addr().expect("the port is bound").to_string();
    let dir = Dir::new();
    let file = dir.file(
        "turnpike.toml",
        "[admin]\nlisten = [\"127.0.0.1:0\"]\ntls_cert = \"/nowhere/admin.pem\"\ntls_key = \"/nowhere/admin.key\"\n",
    );
    let file = file.to_str().expect("the test's path is UTF-8");
    for command in [&["check-config"][..], &["serve", "--check"]] {
        let check = |more: &[&str]| {
            Program::start(&mut turnpike(&[command, &["--listen", &taken, "--user", "a:b"], more].concat()))
                .wait(SOON)
        };
        let good = check(&["--relay-ip", "127.0.0.1"]).ended(0);
        assert!(good.stdout.starts_with("ok\n"), "{}", good.stdout);
        check(&["--relay-ip", "203.0.113.5"]).ended(0).says("does not have the address 203.0.113.5");
        let bad = check(&["-c", file, "--store", "sqlite:///nowhere/turn.sqlite"]).ended(2);
        for words in ["/nowhere/admin.pem", "no database /nowhere/turn.sqlite"] {
            assert!(bad.stderr.contains(words), "{words}: {}", bad.stderr);
        }
        assert!(!bad.stderr.contains(&taken), "{}", bad.stderr);
    }
}

#[test]
fn taken_port_error_names_the_setting() {
    let certificate = Certificate::new(&["turn.example.org"]);
    let port = free_port(V4);
    let taken = SocketAddr::new(V4, port).to_string();
    let _udp = UdpSocket::bind(&taken).expect("the port is free");
    let _tcp = TcpListener::bind(&taken).expect("the port is free");
    let dir = Dir::new();
    let text = format!(
        "[nat_discovery]\naddresses = [\"127.0.0.1\", \"127.0.0.2\"]\nports = [{port}, {}]\n",
        free_port(V4)
    );
    let discovery = dir.file("turnpike.toml", &text);
    let discovery = discovery.to_str().expect("the test's path is UTF-8");
    for (more, protocol, setting) in [
        (["--listen", &taken], "udp", "--listen"),
        (["--tls-listen", &taken], "tls", "--tls-listen"),
        (["--dtls-listen", &taken], "dtls", "--dtls-listen"),
        (["-c", discovery], "udp", "nat_discovery.addresses and nat_discovery.ports"),
    ] {
        let free = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--relay-ip", "127.0.0.1"];
        let arguments = [&free[..], &certificate.flags(), &more].concat();
        let ended = Program::start(&mut turnpike(&arguments)).wait(SOON);
        assert_eq!(ended.code, Some(1), "{setting}: {}", ended.output());
        let words =
            [format!("cannot listen on {protocol} {taken}"), format!("choose another port with {setting}\n")];
        for word in words {
            assert!(format!("{}\n", ended.stderr).contains(&word), "no {word:?} in {}", ended.stderr);
        }
        assert_eq!(ended.stderr.matches(&taken).count(), 1, "more than one message: {}", ended.stderr);
    }
    // A conflict with our own admin listener is found without binding.
    for command in ["serve", "check-config"] {
        let free = SocketAddr::new(V4, free_port(V4)).to_string();
        let ended = Program::start(&mut turnpike(&[command, "--listen", &free, "--admin", &free])).wait(SOON);
        assert_eq!(ended.code, Some(2), "{command}: {}", ended.output());
        assert!(ended.stderr.contains("flag --admin: admin.listen: "), "{}", ended.stderr);
    }
}

#[test]
fn world_readable_secrets_cause_a_warning() {
    let dir = Dir::new();
    let secrets = dir.file("secrets", "north\n");
    let file = dir.file("turnpike.toml", "[auth]\nusers = [\"ned:one\"]\n");
    let path = file.to_str().expect("the test's path is UTF-8");
    let check = |modes: [u32; 2]| {
        for (file, mode) in [&secrets, &file].into_iter().zip(modes) {
            fs::set_permissions(file, fs::Permissions::from_mode(mode)).expect("the test's own file");
        }
        let mut command = turnpike(&["check-config", "-c", path]);
        Program::run(command.env("TURNPIKE_AUTH_SECRETS_FILE", &secrets))
    };
    let closed = check([0o600, 0o640]);
    assert_eq!((closed.code, closed.stderr.as_str()), (Some(0), ""));
    let open = check([0o604, 0o644]);
    assert_eq!(open.code, Some(0), "a warning, not an error");
    for (file, mode) in [(&secrets, "604"), (&file, "644")] {
        let told = format!(
            "warning: {}: every user on this machine can read the secrets in it (mode {mode})",
            file.display()
        );
        assert!(open.stderr.contains(&told), "{told}: {}", open.stderr);
    }

    let address = format!("127.0.0.1:{}", free_port(V4));
    let arguments = ["serve", "-c", path, "--admin", "off", "--relay-ip", "127.0.0.1", "--listen", &address];
    let mut serve = Program::start(&mut turnpike(&arguments));
    let told = serve.line_with("can read the secrets in it");
    assert!(told.contains("WARN") && told.contains(path), "{told}");
}
