//! `turnpike forward` runs out of memory, ports or log space; forwards.rs covers descriptors.

use std::{
    io::{Read as _, Write as _},
    net::{TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use super::{
    Row, Wanted,
    cgroup::Group,
    forward_links::on_a_link,
    forwarder::Forwarder,
    forwards::unharmed,
    limits::Disk,
    or_thorough,
    talks::{self, Fate},
    within,
};
use turnpike_trials::{SOON, need};

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn no_memory_is_left_for_a_forwarder() {
    let forwarder = Forwarder::local(Wanted::default());
    drop(need!(Group::of_process(forwarder.pid())));
    let row = Row::new(
        "no_memory_is_left_for_a_forwarder",
        "forward: memory limited to current use; 1,000 more connections without a reader",
    );
    let mut killed = false;
    let seen = forwarder.row(row, |forwarder, row| {
        let limited = Group::of_process(forwarder.pid()).expect("the cgroup could be created before the row");
        limited.to(limited.used() + (2 << 20)).expect("memory can be limited");
        let opened: Vec<TcpStream> = (0..1000)
            .filter_map(|_| TcpStream::connect_timeout(&forwarder.tcp, Duration::from_millis(200)).ok())
            .collect();
        for mut stream in &opened {
            stream.set_nonblocking(true).expect("the connection is open");
            while stream.write(&[7; 16_384]).is_ok() {}
        }
        within(SOON, "the memory limit is reached", || limited.refusals() > 0);
        thread::sleep(or_thorough(Duration::from_millis(500), Duration::from_secs(3)));
        killed = forwarder.program.has_ended();
        row.note(if killed {
            "OOM kill, then restart".to_owned()
        } else {
            format!(
                "the forwarder kept running; additional connections: {}; times the limit was hit: {}",
                opened.len(),
                limited.refusals()
            )
        });
        drop(opened);
        if killed {
            forwarder.again();
        } else {
            limited.to(1 << 40).expect("the limit can be raised");
        }
        within(SOON * 2, "new clients are served", || talks::newcomer(forwarder.tcp) == Fate::Served);
    });
    assert!(!killed || seen["cut"].as_u64() >= Some(Forwarder::clients()), "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn no_port_is_left_for_a_forwarder() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "forward: no local port left towards the target; more clients arrive",
        |links, forwarder, row| {
            const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
            let set = |range: &str| links.inside(&["sh", "-c", &format!("echo {range} > {RANGE}")]);
            let before = links.inside_says(&["cat", RANGE]);
            set("40000 40003");
            let held: Vec<TcpStream> = (0..4)
                .map(|_| {
                    TcpStream::connect_timeout(&forwarder.tcp, SOON)
                        .expect("the listener accepts connections")
                })
                .collect();
            for mut stream in &held {
                stream.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
                stream.write_all(b"?").and_then(|()| stream.read_exact(&mut [0])).expect("a port is free");
            }
            let refused = or_thorough(10, 100);
            for _ in 0..refused {
                assert_eq!(talks::newcomer(forwarder.tcp), Fate::Refused, "no port is left");
            }
            let of_udp = send_without_ports(forwarder, refused);
            row.note(format!(
                "{refused} TCP clients refused immediately, datagrams of {of_udp} UDP clients dropped and counted; four of each got the \
                 last ports"
            ));
            drop(held);
            set(before.trim());
            within(SOON, "new clients are served", || talks::newcomer(forwarder.tcp) == Fate::Served);
            let fate = talks::newcomer_of_udp(forwarder.udp, 100);
            assert_eq!(fate, Fate::Served, "a new UDP client");
        },
        unharmed,
    );
}

/// Four clients take the last ports towards the UDP target; asserts that the dropped datagrams of `clients` additional clients are counted.
fn send_without_ports(forwarder: &Forwarder, clients: u64) -> u64 {
    let refused =
        || forwarder.metrics().sum("turnpike_forward_ended_total", r#"rule="u",reason="connect_failed""#);
    let before = refused();
    let ask = |client: &UdpSocket| client.send(b"?").map(drop);
    let held: Vec<UdpSocket> = (0..4).map(|_| talks::client_of(forwarder.udp)).collect();
    let served = |client: &UdpSocket| {
        client.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
        ask(client).and_then(|()| client.recv(&mut [0]))
    };
    held.iter().for_each(|client| assert_eq!(served(client).ok(), Some(1), "a port is free"));
    let newcomers: Vec<UdpSocket> = (0..clients).map(|_| talks::client_of(forwarder.udp)).collect();
    for client in &newcomers {
        held.iter().chain([client]).for_each(|client| ask(client).expect("the destination is reachable"));
    }
    within(SOON, "all drops are counted", || refused() >= before + clients);
    for client in &newcomers {
        client.set_nonblocking(true).expect("the connection is open");
        client.recv(&mut [0]).expect_err("no port is left");
    }
    refused() - before
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn no_room_is_left_for_the_log_of_a_forwarder() {
    Disk::alone(turnpike_testkit::this_test!(), |mut disk| {
        let forwarder = Forwarder::local(disk.has_the_log_of(Wanted::default()));
        let row = Row::new(
            "no_room_is_left_for_the_log_of_a_forwarder",
            "forward: log disk full while connections end, one line each",
        );
        let seen = forwarder.row(row, |forwarder, row| {
            let come_and_go = |clients: u32| {
                for _ in 0..clients {
                    assert_eq!(talks::newcomer(forwarder.tcp), Fate::Served);
                }
            };
            let before = disk.lines();
            come_and_go(5);
            within(SOON, "each connection has a log line", || disk.lines() >= before + 5);
            disk.fill();
            // The last page of the log still has room.
            come_and_go(100);
            thread::sleep(Duration::from_secs(1));
            let before = disk.lines();
            come_and_go(100);
            thread::sleep(Duration::from_secs(1));
            assert_eq!(disk.lines(), before, "the disk is full");
            disk.free();
            within(SOON, "lines are written again", || {
                come_and_go(1);
                disk.lines() > before
            });
            row.note("lines were lost; 200 new clients served; logging resumed afterwards");
        });
        unharmed(&seen);
    });
}
