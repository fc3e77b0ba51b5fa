//! The time of day jumps. A time namespace does not move it, and the machine's own clock is not a test's to move: the server loads a
//! library in front of libc's that adds what a file says.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    process::Command,
    thread,
    time::{Duration, SystemTime},
};

use super::{
    Crowd, Row, Server, Wanted, allocation_p99, forwarder::Forwarder, forwards::unharmed, talks, within,
};
use crate::harness::{Dir, PASSWORD, Program, SOON, USER, installed, need};

const DAY: i64 = 86_400;

/// A day forth, two back, and home.
const JUMPS: [i64; 3] = [DAY, -DAY, 0];

/// The time of day of one program.
struct Clock {
    offset: File,
    /// With the library and the file.
    _dir: Dir,
}

impl Clock {
    /// Of what is started so; or why there is none.
    fn of(wanted: &mut Wanted) -> Result<Self, String> {
        installed("cc")?;
        let dir = Dir::new();
        let source = dir.file("clock.c", include_str!("clock.c"));
        let library = dir.at("clock.so");
        let mut cc = Command::new("cc");
        let built = Program::run(cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source));
        assert_eq!(built.code, Some(0), "{}", built.output());
        let file = dir.file("offset", 0_i64.to_ne_bytes());
        let offset = File::options().write(true).open(&file).expect("our own file");
        wanted.environment.push(("LD_PRELOAD", library.display().to_string()));
        wanted.environment.push(("FAULTS_CLOCK", file.display().to_string()));
        Ok(Self { offset, _dir: dir })
    }

    /// So many seconds from the machine's time.
    fn jump(&self, seconds: i64) {
        self.offset.write_all_at(&seconds.to_ne_bytes(), 0).expect("our own file");
        thread::sleep(Duration::from_secs(1));
    }
}

/// Waits for a line of a program that has been written so many seconds from the machine's time: it has seen that time.
fn says_so(seconds: i64, lines: impl Fn() -> Vec<String>, said: usize) {
    within(SOON, "a line has the other day", || {
        let day = day(seconds);
        lines()[said..].iter().any(|line| line.starts_with(&day))
    });
}

/// The date (UTC) so many seconds from now, as lines of the log begin with.
fn day(seconds: i64) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is after 1970").as_secs();
    let then = now.checked_add_signed(seconds).expect("a day more or less");
    let date = Program::run(Command::new("date").args(["-u", "-d", &format!("@{then}"), "+%Y-%m-%d"]));
    assert_eq!(date.code, Some(0), "{}", date.output());
    date.stdout.trim().to_owned()
}

#[test]
fn the_clock_jumps_forth_and_back() {
    let mut wanted = Wanted::flags(&["--workers", "2"]);
    wanted.environment.push(("TURNPIKE_LOG_LEVEL", "info".to_owned()));
    let clock = need!(Clock::of(&mut wanted));
    let mut server = Server::start(wanted);
    let crowd = Crowd::patient(&server, "20");
    let seen =
        Row::new("the_clock_jumps_forth_and_back", "the time of day jumps a day forth, two back, and home")
            .run(&mut server, crowd, |server, row| {
                for jump in JUMPS {
                    let said = server.lines().len();
                    clock.jump(jump);
                    // Whoever has a nonce of the other time, and whoever comes new.
                    allocation_p99(server, &format!("{USER}:{PASSWORD}"), "0.5");
                    says_so(jump, || server.lines(), said);
                }
                row.note(
                    "new allocations were granted at each time, of which lines of the log have the date",
                );
            });
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

#[test]
fn the_clock_of_a_forwarder_jumps() {
    let mut wanted = Wanted::default();
    let clock = need!(Clock::of(&mut wanted));
    let row = Row::new(
        "the_clock_of_a_forwarder_jumps",
        "forward: the time of day jumps a day forth, two back, and home",
    );
    let seen = Forwarder::local(wanted).row(row, |forwarder, row| {
        for jump in JUMPS {
            let said = forwarder.lines().len();
            clock.jump(jump);
            talks::whole(forwarder.tcp, forwarder.udp);
            says_so(jump, || forwarder.lines(), said);
        }
        row.note("newcomers were served at each time, of which lines of the log have the date");
    });
    unharmed(&seen);
}
