//! Out of file descriptors: listeners rest and come back, datagrams are dropped, nothing ends that need not.
#![allow(clippy::print_stdout, reason = "passes on what the test inside said")]
#![allow(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

mod udp_common;

use std::{
    fs::File,
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::FileExt,
    process::Command,
    time::Duration,
};

use turnpike_forward::{Protocol, udp::RuleKey};
use turnpike_net::Datapath;
use udp_common::{DEADLINE, Echo, LOCALHOST, Worker, client, eventually, expect_echo, rule};

#[test]
fn a_worker_without_descriptors_recovers_when_some_are_free_again() {
    const INSIDE: &str = "TURNPIKE_FORWARD_TEST_INSIDE";
    const TEST: &str = "a_worker_without_descriptors_recovers_when_some_are_free_again";
    if std::env::var_os(INSIDE).is_some() {
        return starve();
    }
    // The limit holds for a process, and other tests run in this one.
    let output = Command::new("sh")
        .args(["-c", "ulimit -n 80 && exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"));
}

fn starve() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    let listen = LOCALHOST.parse().unwrap();
    let streams = rule(Protocol::TcpToUdp { framed: false }, listen, echo.address);
    let streams = worker.add(RuleKey(1), &streams, Datapath::Gso);
    let datagrams = worker.add(RuleKey(2), &rule(Protocol::Udp, listen, echo.address), Datapath::Gso);
    let (old, new) = (client(datagrams), client(datagrams));
    expect_echo(&old, b"old");
    // Opened while there are descriptors.
    let stat = File::open("/proc/self/stat").unwrap();
    let mut clients: Vec<TcpStream> = Vec::new();
    while let Ok(stream) = TcpStream::connect(streams) {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        clients.push(stream);
        assert!(clients.len() < 80);
    }
    // The worker turns away whom it has no socket for, which gives a descriptor back: take what is left until it stays taken.
    let mut fill: Vec<File> = Vec::new();
    let mut quiet = 0;
    while quiet < 20 {
        worker.ask(|engine, _| engine.active());
        let before = fill.len();
        fill.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
        quiet = if fill.len() == before { quiet + 1 } else { 0 };
    }
    // Level-triggered, a queue that cannot be emptied would wake the worker for ever.
    let busy = cpu_time(&stat);
    std::thread::sleep(Duration::from_millis(400));
    let busy = cpu_time(&stat) - busy;
    assert!(busy < Duration::from_millis(50), "{busy:?} of processor time");
    // Every descriptor is taken. Who is known is served on, who is not finds no room.
    new.send(b"new").unwrap();
    eventually("dropped", || {
        worker.ask(|engine, _| engine.snapshots().map(|(_, counted)| counted.dropped_datagrams).sum::<u64>())
            == 1
    });
    expect_echo(&old, b"old");
    // Those who leave make room for those who wait.
    let waiting = clients.split_off(clients.len() - 3);
    drop(clients);
    drop(fill);
    eventually("all who left are known to have", || {
        worker.advance(Duration::from_millis(5100));
        worker.ask(|engine, _| engine.active()) <= 4
    });
    for mut stream in waiting {
        // A client that was accepted when no socket for it could be made was turned away; that is told, not silence.
        let served = stream.write_all(b"x").is_ok() && matches!(stream.read(&mut [0; 8]), Ok(1));
        println!("a client that waited was {}", if served { "served" } else { "turned away" });
    }
    let mut late = TcpStream::connect(streams).unwrap();
    late.set_read_timeout(Some(DEADLINE)).unwrap();
    late.write_all(b"late").unwrap();
    let mut bytes = [0; 4];
    late.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"late");
    expect_echo(&new, b"new");
}

/// Of this process, by proc_pid_stat(5), in steps of 10 ms.
fn cpu_time(stat: &File) -> Duration {
    let mut bytes = [0; 1024];
    let len = stat.read_at(&mut bytes, 0).unwrap();
    let text = String::from_utf8_lossy(&bytes[..len]);
    let (_, fields) = text.rsplit_once(") ").unwrap();
    let ticks: u64 = fields.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}
