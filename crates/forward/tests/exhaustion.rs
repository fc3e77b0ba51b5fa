//! A process without descriptors: accepting pauses, nothing crashes, and it goes on when there are some again. One test alone,
//! as descriptors belong to the whole process.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a panic is how a test fails")]

mod support;

use std::{fs::File, io::Write, os::unix::fs::FileExt, path::PathBuf, time::Duration};

use support::{Running, greeter, read_exactly, rule};

#[test]
fn accepting_pauses_without_descriptors_and_goes_on_with_them() {
    // With all of them taken by clients, accept4 finds none; with half of them left, accepted connections find none for their
    // other half.
    for clients in [6, 3] {
        pause_and_recover(6, clients);
    }
}

fn pause_and_recover(spare: usize, clients: usize) {
    let mut rule = rule("r", greeter("a"));
    rule.connect_timeout = Duration::from_secs(30);
    let running = Running::start(&[rule]);
    let mut early = running.connect("r");
    assert_eq!(read_exactly(&mut early, 1), b"a");

    // Opened while there are descriptors.
    let stat = worker_stat();
    let spare: Vec<_> = (0..spare).map(|_| File::open("/dev/null").unwrap()).collect();
    let taken: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    assert!(taken.len() > 100);
    drop(spare);
    let mut late: Vec<_> = (0..clients)
        .map_while(|_| std::net::TcpStream::connect(running.address("r")).ok().map(support::patient))
        .collect();
    assert!(!late.is_empty());
    let busy = cpu_time(&stat);
    for _ in 0..100 {
        early.write_all(b"still served").unwrap();
        assert_eq!(read_exactly(&mut early, 12), b"still served");
        std::thread::sleep(Duration::from_millis(3));
    }
    // Level-triggered, a queue that cannot be emptied would wake the worker for ever.
    // The exchanges above take 20 ms, on a busy machine too.
    let busy = cpu_time(&stat) - busy;
    assert!(busy < Duration::from_millis(100), "{busy:?} of processor time");
    assert!(running.log.all().is_empty(), "{:?}", running.log.all());

    drop(taken);
    for client in &mut late {
        assert_eq!(read_exactly(client, 1), b"a");
    }
    assert!(running.log.all().is_empty(), "{:?}", running.log.all());
}

/// The file about the forwarder's thread; the test's server, in the same want, does not rest.
fn worker_stat() -> File {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|thread| thread.path());
    let is_worker =
        |path: &PathBuf| std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name == "forward-0\n");
    File::open(threads.into_iter().find(is_worker).expect("a worker").join("stat")).unwrap()
}

/// Of a thread, by proc_pid_stat(5), in steps of 10 ms.
fn cpu_time(stat: &File) -> Duration {
    let mut bytes = [0; 1024];
    let len = stat.read_at(&mut bytes, 0).unwrap();
    let text = String::from_utf8_lossy(&bytes[..len]);
    let (_, fields) = text.rsplit_once(") ").unwrap();
    let ticks: u64 = fields.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}
