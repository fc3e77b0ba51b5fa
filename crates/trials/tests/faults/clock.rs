//! Jumps of the wall clock. A time namespace does not affect the wall clock, and a test must not change the machine's clock, so the server
//! preloads a library that adds an offset from a file.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    process::Command,
    thread,
    time::{Duration, SystemTime},
};

use super::{
    Crowd, Row, Server, Wanted, allocation_p99, forwarder::Forwarder, forwards::unharmed, rows, talks,
    visitor::Visitor, within,
};
use turnpike_trials::{
    Dir, Load, PASSWORD, Program, REALM, Reflect, SOON, USER, V4, installed, need, turnpike,
};

const DAY: i64 = 86_400;

const JUMPS: [i64; 3] = [DAY, -DAY, 0];

struct Clock {
    offset: File,
    _dir: Dir,
}

impl Clock {
    /// Shifts the clock of programs started with `wanted`; on failure, returns the reason.
    fn of(wanted: &mut Wanted) -> Result<Self, String> {
        installed("cc")?;
        let dir = Dir::new();
        let source = dir.file("clock.c", include_str!("clock.c"));
        let library = dir.at("clock.so");
        let mut cc = Command::new("cc");
        Program::run(cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source)).ended(0);
        let file = dir.file("offset", 0_i64.to_ne_bytes());
        let offset = File::options().write(true).open(&file).expect("the file belongs to the test");
        wanted.environment.push(("LD_PRELOAD", library.display().to_string()));
        wanted.environment.push(("FAULTS_CLOCK", file.display().to_string()));
        Ok(Self { offset, _dir: dir })
    }

    fn jump(&self, seconds: i64) {
        self.offset.write_all_at(&seconds.to_ne_bytes(), 0).expect("the file belongs to the test");
        thread::sleep(Duration::from_secs(1));
    }
}

/// Waits for a log line whose date has this offset.
fn says_so(seconds: i64, lines: impl Fn() -> Vec<String>, said: usize) {
    within(SOON, "a log line has the other date", || {
        let day = day(seconds);
        lines()[said..].iter().any(|line| line.starts_with(&day))
    });
}

/// Date (UTC) with this offset, as in log lines.
fn day(seconds: i64) -> String {
    let now =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("the clock is after 1970").as_secs();
    let then = now.checked_add_signed(seconds).expect("the time is in range");
    let date =
        Program::run(Command::new("date").args(["-u", "-d", &format!("@{then}"), "+%Y-%m-%d"])).ended(0);
    date.stdout.trim().to_owned()
}

/// Time-limited credentials issued at the real time.
struct Timed {
    dir: Dir,
    /// Time-limited name and password (`auth.secrets`), valid for two hours.
    short: (String, String),
    /// Time-limited name and password, valid for three days.
    long: (String, String),
}

const SECRET: &str = "north wind";
const TOKEN_KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

impl Timed {
    fn settings() -> String {
        format!(
            "[auth]\nsecrets = [\"{SECRET}\"]\n[oauth]\nserver_name = \"turn.faults.test\"\nkey = [{{ kid = \"east\", key = \
             \"{TOKEN_KEY}\" }}]\n"
        )
    }

    fn new() -> Self {
        let made = |arguments: &[&str]| {
            let run = Program::run(&mut turnpike(&[&["credentials"], arguments].concat())).ended(0);
            run.stdout
        };
        let named = |hours: &str| {
            let said = made(&["--secret", SECRET, "--user", "carol", "--ttl", hours, "--realm", REALM]);
            let field = |label: &str| {
                let line = said.lines().find_map(|line| line.strip_prefix(label));
                line.unwrap_or_else(|| panic!("no {label} in {said}")).trim().to_owned()
            };
            (field("username:"), field("password:"))
        };
        let token = [
            "--token-key",
            TOKEN_KEY,
            "--user",
            "east",
            "--server-name",
            "turn.faults.test",
            "--ttl",
            "7200",
        ];
        let dir = Dir::new();
        dir.file("token", made(&token));
        Self { dir, short: named("7200"), long: named("259200") }
    }

    fn are_judged(&self, server: &Server, seconds: i64) {
        let answers = |(name, password): &(String, String)| server.answers(name, password);
        let is_over = seconds >= DAY;
        assert_eq!(
            answers(&self.short),
            is_over.then_some(401),
            "a username valid for two hours, clock off by {seconds} s"
        );
        assert_eq!(answers(&self.long), None, "a username valid for three days, clock off by {seconds} s");
        // A token from the future is invalid too.
        let is_good = seconds == 0;
        let server = server.address.to_string();
        let token = self.dir.at("token").display().to_string();
        let run = Program::run(&mut turnpike(&[
            "load",
            "turn",
            &server,
            "--access-token-file",
            &token,
            "--mode",
            "allocate",
            "--rate",
            "20",
            "--warmup",
            "0.1",
            "--duration",
            "0.3",
            "--json",
            "-",
        ]));
        assert_eq!(run.code, Some(if is_good { 0 } else { 1 }), "clock off by {seconds} s: {}", run.output());
        if is_good {
            assert_eq!(run.result()["lost"], 0, "{}", run.output());
        } else {
            assert!(run.output().contains("401"), "{}", run.output());
        }
    }
}

/// Runs two clients that repeatedly change sockets and move their allocations with their latest ticket before, during and after
/// `meanwhile`; every ticket must work.
fn movers_notice_nothing(server: &Server, reflect: &Reflect, meanwhile: impl FnOnce()) {
    let there = server.allocations() + 2;
    let movers = Load::as_user(server.address, &format!("{USER}:{PASSWORD}"))
        .to(reflect.address)
        .with("--clients 2 --rate 100 --migrate 0.3 --warmup 0.1 --duration 600")
        .start();
    let count = |event: &str| server.metrics().sum("turnpike_mobility_total", &format!("event=\"{event}\""));
    let (moved, refused) = (|| count("arrived"), || count("ticket_invalid"));
    let none = refused();
    within(SOON, "two clients have allocations", || server.allocations() >= there);
    let before = moved();
    within(SOON, "clients move", || moved() > before + 2);
    meanwhile();
    let before = moved();
    within(SOON, "clients still move", || moved() > before + 2);
    movers.signal("INT");
    let run = movers.wait(SOON);
    assert_eq!(refused(), none, "{}", run.output());
    // The server may still have an allocation for the 5-tuple of a new socket, and answer 437.
    assert!(run.result()["migrations_done"].as_u64() > Some(4), "{}", run.output());
}

/// Waits until each of these clients has refreshed its allocation. Must not be used if other clients refresh theirs.
fn all_refresh(server: &Server, clients: u32) {
    /// Clients refresh every 30 s (`limits.default_lifetime` is a minute here).
    const PATIENCE: Duration = Duration::from_secs(50);
    let refreshed = || server.metrics().sum("turnpike_successes_total", "method=\"refresh\"");
    let before = refreshed();
    within(PATIENCE, "all clients refresh their allocations", || refreshed() >= before + u64::from(clients));
}

fn stale(server: &Server) -> u64 {
    server.metrics().sum("turnpike_error_responses_total", "code=\"438\"")
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_clock_jumps_forward_and_back() {
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", Timed::settings());
    let mut wanted = Wanted::flags(&["--workers", "2", "-c", file.to_str().expect("UTF-8")]);
    wanted.environment.push(("TURNPIKE_LOG_LEVEL", "info".to_owned()));
    let clock = need!(Clock::of(&mut wanted));
    let reflect = Reflect::start(V4, &[]);
    let mut server = Server::start(wanted);
    let crowd = Crowd::patient(&server, "20");
    let clients = crowd.clients;
    let seen =
        Row::new("the_clock_jumps_forward_and_back", "the clock jumps one day forward, two days back, then to the right time")
            .run(&mut server, crowd, |server, row| {
                let timed = Timed::new();
                timed.are_judged(server, 0);
                let mut at_home = Visitor::of(server);
                for jump in JUMPS {
                    let (said, before) = (server.lines().len(), stale(server));
                    // This client has an unused nonce from before the jump.
                    let mut late = Visitor::of(server);
                    movers_notice_nothing(server, &reflect, || clock.jump(jump));
                    // The nonce is too old or from the future; the one in the response works.
                    let asked = [(); 2].map(|()| late.asks(USER, PASSWORD));
                    assert_eq!(asked, [Some(438), None], "clock off by {jump} s");
                    allocation_p99(server, &format!("{USER}:{PASSWORD}"), "0.5");
                    timed.are_judged(server, jump);
                    says_so(jump, || server.lines(), said);
                    // All clients refresh within half a minute, too long for a quick run.
                    if rows().is_some() {
                        all_refresh(server, clients);
                        assert!(stale(server) >= before + u64::from(clients), "each client used an old nonce");
                    }
                }
                assert_eq!(at_home.asks(USER, PASSWORD), None, "the client's nonce is valid at this time");
                row.note(
                    "new allocations are granted at each of these times, and log lines have the matching date; a nonce from another time \
                     gets 438 with a fresh one; mobility tickets stay valid; expired time-limited users and access tokens (401) are valid \
                     again at the right time",
                );
            });
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_clock_of_a_forwarder_jumps() {
    let mut wanted = Wanted::default();
    let clock = need!(Clock::of(&mut wanted));
    let row = Row::new(
        "the_clock_of_a_forwarder_jumps",
        "forward: the clock jumps one day forward, two days back, then to the right time",
    );
    let seen = Forwarder::local(wanted).row(row, |forwarder, row| {
        for jump in JUMPS {
            let said = forwarder.lines().len();
            clock.jump(jump);
            talks::whole(forwarder.tcp, forwarder.udp);
            says_so(jump, || forwarder.lines(), said);
        }
        row.note("new clients are served at each of these times; log lines have the matching date");
    });
    unharmed(&seen);
}
