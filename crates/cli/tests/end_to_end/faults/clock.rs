//! The time of day jumps. A time namespace does not move it, and the machine's own clock is not a test's to move: the server loads a
//! library in front of libc's that adds what a file says.

use std::{fs::File, os::unix::fs::FileExt as _, process::Command, thread, time::Duration};

use super::{Crowd, Row, Server, Wanted, allocation_p99};
use crate::harness::{Dir, PASSWORD, Program, USER, installed, need};

const DAY: i64 = 86_400;

#[test]
fn the_clock_jumps_forth_and_back() {
    need!(installed("cc"));
    let dir = Dir::new();
    let source = dir.file("clock.c", include_str!("clock.c"));
    let library = dir.at("clock.so");
    let built =
        Program::run(Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source));
    assert_eq!(built.code, Some(0), "{}", built.output());
    let file = dir.file("offset", 0_i64.to_ne_bytes());
    let offset = File::options().write(true).open(&file).expect("our own file");
    let mut wanted = Wanted::flags(&["--workers", "2"]);
    wanted.environment.push(("LD_PRELOAD", library.display().to_string()));
    wanted.environment.push(("FAULTS_CLOCK", file.display().to_string()));
    let mut server = Server::start(wanted);
    let crowd = Crowd::patient(&server, "20");
    let seen =
        Row::new("the_clock_jumps_forth_and_back", "the time of day jumps a day forth, two back, and home")
            .run(&mut server, crowd, |server, row| {
                for jump in [DAY, -DAY, 0] {
                    offset.write_all_at(&jump.to_ne_bytes(), 0).expect("our own file");
                    thread::sleep(Duration::from_secs(1));
                    // Whoever has a nonce of the other time, and whoever comes new.
                    allocation_p99(server, &format!("{USER}:{PASSWORD}"), "0.5");
                }
                row.note("new allocations were granted at each time");
            });
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}
