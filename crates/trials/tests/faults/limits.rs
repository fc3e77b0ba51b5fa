//! The server runs out of descriptors, relay ports, memory or disk space.

use std::{fs, io::Write as _, net::TcpStream, path::PathBuf, process::Command, thread, time::Duration};

use turnpike_testkit::alone::{in_namespaces, run};

use super::{Crowd, Row, Server, Wanted, cgroup::Group, or_thorough, within};
use turnpike_trials::{Dir, Finished, Load, PASSWORD, Program, SOON, USER, need, turnpike};

fn newcomers(server: &Server, clients: &str) -> Finished {
    Load::as_user(server.address, &format!("{USER}:{PASSWORD}"))
        .with(&format!("--profile audio --clients {clients} --warmup 0.1 --duration 0.5"))
        .run()
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn no_relay_port_is_left() {
    // Twice as many ports as the clients need, because freed ports are quarantined for a while.
    let wanted =
        Wanted::flags(&["--workers", "2", "--relay-ports", or_thorough("47000-47019", "47000-47063")]);
    let mut server = Server::start(wanted);
    let crowd = Crowd::of(&server);
    let mut row = Row::new("no_relay_port_is_left", "all relay ports used; more clients arrive");
    // Clients that have just connected may leave before their allocation succeeds.
    row.leaves_sessions = true;
    let seen = row.run(&mut server, crowd, |server, row| {
        for _ in 0..or_thorough(1, 5) {
            let run = newcomers(server, "100").ended(1);
            assert!(run.output().contains("508"), "{}", run.output());
        }
        let refused = || server.metrics().sum("turnpike_error_responses_total", "code=\"508\"");
        // Counters are up to a tenth of a second old.
        within(SOON, "the refusals are counted", || refused() > 0);
        let refused = refused();
        row.note(format!("{refused} new clients got 508"));
    });
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

/// Limits the descriptors, with a hard limit that root cannot raise.
pub(super) fn few_descriptors(wanted: Wanted, most: u32) -> Wanted {
    let script = format!(
        "ulimit -n {most} || exit 1; [ \"$(id -u)\" != 0 ] || exec setpriv --bounding-set=-sys_resource -- \"$0\" \"$@\"; \
         exec \"$0\" \"$@\""
    );
    Wanted { entry: ["sh", "-c", &script].map(str::to_owned).to_vec(), ..wanted }
}

#[test]
fn no_descriptor_is_left() {
    let mut server = Server::start(few_descriptors(Wanted::flags(&["--workers", "2"]), 100));
    let crowd = Crowd::of(&server);
    let mut row =
        Row::new("no_descriptor_is_left", "all descriptors used; more clients arrive over UDP and TCP");
    row.leaves_sessions = true;
    let seen = row.run(&mut server, crowd, |server, row| {
        let opened: Vec<TcpStream> =
            (0..150).filter_map(|_| TcpStream::connect_timeout(&server.address, SOON).ok()).collect();
        // A connection is accepted only once it has data.
        opened.iter().for_each(|mut stream| _ = stream.write_all(&[0]));
        let run = newcomers(server, "150").ended(1);
        assert!(run.output().contains("508"), "{}", run.output());
        let lines = server.lines();
        assert!(lines.iter().any(|line| line.contains("no file descriptor")), "{lines:#?}");
        let spent = cpu_ms(server.pid());
        thread::sleep(Duration::from_secs(1));
        let spent = cpu_ms(server.pid()) - spent;
        row.note(format!(
            "with {} connections open and no descriptor left, {spent} ms of CPU time per second",
            opened.len()
        ));
        // The server retries accepting, but with a pause.
        row.limit(
            "CPU ms per second without a descriptor",
            f64::from(u32::try_from(spent).unwrap_or(u32::MAX)),
            500.0,
        );
        drop(opened);
    });
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

/// CPU time of a process in milliseconds, with a resolution of 10 ms (proc_pid_stat(5)).
pub(crate) fn cpu_ms(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process is running");
    let fields: Vec<&str> = stat.rsplit_once(") ").expect("the process has a name").1.split(' ').collect();
    fields[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("a number") * 10).sum()
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn no_memory_is_left() {
    let mut server = Server::start(Wanted::flags(&["--workers", "2"]));
    drop(need!(Group::of_process(server.pid())));
    let crowd = Crowd::of(&server);
    let mut row = Row::new("no_memory_is_left", "memory limited to current use; 1,000 more clients arrive");
    row.leaves_sessions = true;
    row.run(&mut server, crowd, |server, row| {
        let limited = Group::of_process(server.pid()).expect("the cgroup could be created before the row");
        let used = limited.used();
        limited.to(used + (2 << 20)).expect("memory can be limited");
        let run = newcomers(server, "1000");
        let killed = server.program.has_ended();
        assert!(limited.refusals() > 0, "the memory limit was never reached");
        row.note(if killed {
            "OOM kill, then restart".to_owned()
        } else {
            format!("the server kept running; the new clients exited with code {:?}", run.code)
        });
        if killed {
            server.again();
        } else {
            limited.to(1 << 40).expect("the limit can be raised");
        }
    });
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn no_room_is_left_on_the_disk() {
    Disk::alone(turnpike_testkit::this_test!(), full_disk);
}

pub(super) struct Disk {
    dir: Dir,
    filler: Option<fs::File>,
}

impl Disk {
    /// Runs `body` with a disk in a private mount namespace; `test` is the name of the calling test.
    pub(super) fn alone(test: &str, body: impl FnOnce(Self)) {
        in_namespaces(test, "m", &["mount", "-t", "tmpfs", "tmpfs", "/mnt"], || {
            let dir = Dir::new();
            run("mount", &["-t", "tmpfs", "-o", "size=2m", "tmpfs", dir.path().to_str().expect("UTF-8")]);
            body(Self { dir, filler: None });
        });
    }

    pub(super) fn has_the_log_of(&self, mut wanted: Wanted) -> Wanted {
        let script = format!("exec \"$0\" \"$@\" 2>>{}", self.log().display());
        wanted.entry = ["sh", "-c", &script].map(str::to_owned).to_vec();
        wanted.environment.push(("TURNPIKE_LOG_LEVEL", "info".to_owned()));
        wanted
    }

    pub(super) fn fill(&mut self) {
        let mut file = fs::File::create(self.dir.at("filler")).expect("the disk can be filled");
        while file.write_all(&[0; 4096]).is_ok() {}
        while file.write_all(&[0]).is_ok() {}
        self.filler = Some(file);
    }

    pub(super) fn free(&mut self) {
        self.filler = None;
        fs::remove_file(self.dir.at("filler")).expect("the file can be removed");
    }

    pub(super) fn lines(&self) -> usize {
        fs::read_to_string(self.log()).expect("the log exists").lines().count()
    }

    fn log(&self) -> PathBuf {
        self.dir.at("log")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The mount namespace ends with this process, and with other processes that write to the disk, which exit soon.
        let _ = Program::run(Command::new("umount").arg("-l").arg(self.dir.path()));
    }
}

fn full_disk(mut disk: Disk) {
    let state = disk.dir.at("state");
    let state = state.to_str().expect("UTF-8");
    let user = |arguments: &[&str]| {
        let all = [&["user"], arguments, &["--state", state]].concat();
        Program::start(&mut turnpike(&all)).wait(SOON)
    };
    assert_eq!(user(&["add", "known", "--realm", "example.org", "--password", "pw"]).code, Some(0));
    let mut server = Server::start(disk.has_the_log_of(Wanted::flags(&["--workers", "2", "--state", state])));
    let crowd = Crowd::of(&server);
    let seen = Row::new("no_room_is_left_on_the_disk", "the disk with the log and the users is full").run(
        &mut server,
        crowd,
        |server, row| {
            disk.fill();
            // The last page of the log still has room.
            super::allocation_p99(server, "known:pw", "1");
            let before = disk.lines();
            let p99 = super::allocation_p99(server, "known:pw", "1");
            assert_eq!(disk.lines(), before, "the disk is full");
            let refused = user(&["add", "late", "--realm", "example.org", "--password", "pw"]).ended(1);
            row.note(format!("users in the store served (allocation p99 {p99:.2} ms); log lines lost"));
            row.note(format!(
                "`turnpike user add` failed: {}",
                refused.stderr.lines().last().unwrap_or_default()
            ));
            disk.free();
            user(&["add", "late", "--realm", "example.org", "--password", "pw"]).ended(0);
            super::allocation_p99(server, "late:pw", "0.5");
            within(SOON, "lines are written again", || disk.lines() > before);
        },
    );
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}
