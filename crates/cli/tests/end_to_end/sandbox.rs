//! Dropped privileges of a running process: in effect in every thread, logged, and kept by upgrades. All other tests show that the program
//! still works in the sandbox.

use crate::prelude::*;

/// Value of a status line (proc(5)) for each thread of a process.
fn of_threads(pid: u32, name: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs").flatten();
    let value = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(|value| value.trim().to_owned())
    };
    tasks.filter_map(value).collect()
}

fn assert_sandboxed(pid: u32) {
    let seccomp = of_threads(pid, "Seccomp");
    assert!(seccomp.len() > 2 && seccomp.iter().all(|mode| mode == "2"), "{seccomp:?}");
    assert!(of_threads(pid, "NoNewPrivs").iter().all(|set| set == "1"));
    // CAP_SYS_ADMIN (21), CAP_SYS_PTRACE (19), CAP_SYS_MODULE (16), CAP_SETUID (7), CAP_CHOWN (0).
    let given_up = 1 << 21 | 1 << 19 | 1 << 16 | 1 << 7 | 1;
    for kept in of_threads(pid, "CapPrm") {
        assert_eq!(u64::from_str_radix(&kept, 16).expect("the value is hexadecimal") & given_up, 0, "{kept}");
    }
}

fn status(serve: &Serve) -> Value {
    let (code, text) = fetch(serve.admin(), "/v1/status").expect("the admin page answers");
    assert_eq!(code, 200, "{text}");
    serde_json::from_str(&text).expect("the status is JSON")
}

#[test]
fn every_server_thread_is_sandboxed_even_after_an_upgrade() {
    let mut serve = Serve::start(&["--workers", "2"]);
    let line = serve.program.line_with("sandbox: ");
    assert!(line.contains(" system calls, ") && line.contains("capabilities"), "{line}");
    assert_sandboxed(serve.program.pid());
    let said = &status(&serve)["sandbox"];
    assert!(said["system_calls"].as_u64() > Some(100), "{said}");
    if said["read"].is_null() {
        skip("this kernel has no Landlock");
    } else {
        let read: Vec<&str> =
            said["read"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
        assert!(read.contains(&"/etc") && !read.contains(&"/") && !read.contains(&"/home"), "{said}");
    }
    let reflect = Reflect::start(V4, &[]);
    let filters = of_threads(serve.program.pid(), "Seccomp_filters");
    let mut upgraded = Upgraded::new(&serve.program);
    for _ in 0..2 {
        upgraded.upgrade();
        assert_sandboxed(upgraded.pid());
        // The kernel limits the number of filters, so the new process installs no second one.
        assert_eq!(of_threads(upgraded.pid(), "Seccomp_filters").first(), filters.first());
    }
    serve.load(&reflect).with("--rate 100 --duration 1").run().ended(0);
}

#[test]
fn forwarder_is_sandboxed() {
    let mut forward = Forward::start(&["tcp://127.0.0.1:0=127.0.0.1:9"]);
    forward.program.line_with("sandbox: ");
    assert_sandboxed(forward.program.pid());
}

#[test]
fn sandbox_can_be_turned_off() {
    let mut serve = Serve::start(&["--sandbox", "off"]);
    serve.program.line_with("sandbox: off, as configured");
    assert!(of_threads(serve.program.pid(), "Seccomp").iter().all(|mode| mode == "0"));
    assert!(status(&serve)["sandbox"].is_null());
}

/// A reload that names a file in an unreadable location changes nothing and reports why; files named at startup are reread.
#[test]
fn file_outside_the_sandbox_needs_a_restart_or_configuration() {
    let (dir, elsewhere) = (Dir::new(), Certificate::new(&["b.example.org"]));
    let own = Certificate::new(&["a.example.org"]);
    let text = |certificate: &Certificate, more: &str| {
        let [_, cert, _, key] = certificate.flags();
        format!("[auth]\nusers = [\"a:one\"]\n[tls]\ncert = \"{cert}\"\nkey = \"{key}\"\n{more}")
    };
    let file = dir.file("turnpike.toml", text(&own, ""));
    let path = file.to_str().expect("the test's path is UTF-8");
    let mut serve = Serve::start_bare(&["-c", path, "--relay-ip", "127.0.0.1"]);
    if status(&serve)["sandbox"]["read"].is_null() {
        return skip("this kernel has no Landlock");
    }
    fs::write(&file, text(&elsewhere, "")).expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("add directories to sandbox.read");
    own.renew(&["c.example.org"]);
    fs::write(&file, text(&own, "[log]\nlevel = \"debug\"\n")).expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("configuration reloaded");
    drop(serve);

    let [_, cert, ..] = elsewhere.flags();
    let directory = Path::new(cert).parent().expect("the path has a parent").display();
    let more = format!("[sandbox]\nread = [\"{directory}\"]\n");
    fs::write(&file, text(&own, &more)).expect("the test's own file");
    let mut serve = Serve::start_bare(&["-c", path, "--relay-ip", "127.0.0.1"]);
    fs::write(&file, text(&elsewhere, &more)).expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("configuration reloaded");
    assert!(!serve.program.lines().iter().any(|line| line.contains("Permission denied")));
}

#[test]
fn store_outside_the_sandbox_needs_a_restart() {
    let (dir, elsewhere) = (Dir::new(), Dir::new());
    let store = elsewhere.file("turndb", "");
    let file = dir.file("turnpike.toml", "[auth]\nusers = [\"a:one\"]\n");
    let path = file.to_str().expect("the test's path is UTF-8");
    let mut serve = Serve::start_bare(&["-c", path, "--relay-ip", "127.0.0.1"]);
    if status(&serve)["sandbox"]["read"].is_null() {
        return skip("this kernel has no Landlock");
    }
    let store = format!("[store]\nurl = \"sqlite://{}\"\n[auth]\nusers = [\"a:one\"]\n", store.display());
    fs::write(&file, store).expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("unable to open database file");
    serve.program.line_with("add directories to sandbox.read and sandbox.write");
    // A file next to the configuration is readable, which is not enough for a database with a write-ahead log.
    let state = dir.at("state");
    let made = ["user", "add", "b", "--password", "pw", "--state", state.to_str().expect("UTF-8")];
    assert_eq!(Program::run(&mut turnpike(&made)).code, Some(0));
    for log in ["turnpike.sqlite-wal", "turnpike.sqlite-shm"] {
        // The command that created the database may already have removed these files.
        let _ = fs::remove_file(state.join(log));
    }
    let url = format!("[store]\nurl = \"sqlite://{}/turnpike.sqlite\"\n", state.display());
    fs::write(&file, url).expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("attempt to write a readonly database");
    eventually("the refusal is logged again", || {
        let lines = serve.program.lines();
        lines.iter().filter(|line| line.contains("sandbox.read and sandbox.write")).count() == 2
    });
}
