//! Faults for clients over TCP, TLS and DTLS, and over UDP with `--datapath kernel`.

use std::{
    net::SocketAddr,
    process::Command,
    sync::atomic::Ordering::Relaxed,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    Crowd, Row, Server, Wanted,
    cgroup::Frozen,
    link_faults, or_thorough,
    restarts::{Storm, all_return, for_many},
    stalled::{watched, worker},
    within,
};
use turnpike_trials::links::{Links, RELAY, SERVER, on_links};
use turnpike_trials::{Certificate, Dir, Program, SOON, V4, ends, free_port, lives, need};

fn secured(certificate: &Certificate, wanted: impl FnOnce(&[&str]) -> Wanted) -> Server {
    let address = SocketAddr::new(V4, free_port(V4));
    let listen = address.to_string();
    let flags = [&certificate.flags()[..], &["--dtls-listen", &listen]].concat();
    Server::on(address, V4, wanted(&flags))
}

fn two_workers(flags: &[&str]) -> Wanted {
    Wanted::flags(&[&["--workers", "2"], flags].concat())
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn killed_with_tcp_tls_and_dtls_clients() {
    let certificate = Certificate::new(&["127.0.0.1"]);
    let mut server = secured(&certificate, two_workers);
    let crowd = Crowd::secured(&server);
    let clients = crowd.clients;
    let row = Row::new(
        "killed_with_tcp_tls_and_dtls_clients",
        "TCP, TLS and DTLS clients: SIGKILL and immediate restart",
    );
    let seen = row.run(&mut server, crowd, |server, _| server.kill_and_start());
    for part in seen["parts"].as_array().expect("the parts are an array") {
        assert!(part["returns_done"].as_u64() >= Some(u64::from(clients / 3)), "{part}");
    }
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn upgraded_with_tcp_tls_and_dtls_clients() {
    let certificate = Certificate::new(&["127.0.0.1"]);
    let mut server = secured(&certificate, two_workers);
    let crowd = Crowd::secured(&server);
    let mut before = Vec::new();
    let row = Row::new(
        "upgraded_with_tcp_tls_and_dtls_clients",
        "TCP, TLS and DTLS clients: two upgrades in place",
    );
    let seen = row.run(&mut server, crowd, |server, row| {
        for _ in 0..2 {
            before.push(server.upgraded.upgrade());
        }
        // Existing clients stay in the first process.
        assert!(lives(before[0]), "the first process still has clients");
        row.note("the first process kept its clients and exited after the last one");
    });
    before.into_iter().for_each(ends);
    let nothing = ["lost", "reordered", "returns_done"].map(|name| seen[name].as_u64());
    assert_eq!(nothing, [Some(0); 3], "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn reloaded_with_tcp_tls_and_dtls_clients() {
    let (certificate, storm) = (Certificate::new(&["127.0.0.1"]), Storm::new());
    let mut server = secured(&certificate, |flags| storm.wanted(flags));
    let crowd = Crowd::secured(&server);
    let row = Row::new(
        "reloaded_with_tcp_tls_and_dtls_clients",
        "TCP, TLS and DTLS clients: 20 reloads per second, each with changes",
    );
    let seen = row.run(&mut server, crowd, |server, row| {
        storm.rages(server, row, |_, _, storms| {
            storms.store(true, Relaxed);
            a_storm_lasts();
        });
    });
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

/// Runs a fault on a server with the kernel path; `test` is the calling test's full name. Clients reconnect after `patience` seconds
/// without data. The kernel must have relayed most datagrams.
fn in_the_kernel(
    test: &str,
    what: &'static str,
    (wanted, patience): (Wanted, &str),
    fault: impl FnOnce(&Links, &mut Server, &mut Row),
    check: impl FnOnce(&Value),
) {
    let name: &'static str = test.rsplit("::").next().unwrap_or_default().to_owned().leak();
    on_links(test, |links| {
        let address = SocketAddr::new(SERVER[0], 3478);
        let mut server = Server::on(address, RELAY[0], inside(links, wanted));
        let crowd = Crowd::thin(address, "10.77.2.2:0", patience);
        let clients = u64::from(crowd.clients);
        let mut row = Row::new(name, what);
        row.leaves_sessions = true;
        let seen = row.run(&mut server, crowd, |server, row| {
            goes_across(server, clients);
            fault(links, server, row);
            goes_across(server, 3 * clients);
            most_is_relayed_by_the_kernel(server, row);
        });
        check(&seen);
    });
}

fn inside(links: &Links, wanted: Wanted) -> Wanted {
    let mut flags = wanted.flags;
    flags.extend(["--datapath", "kernel"].map(str::to_owned));
    Wanted { entry: Wanted::inside(links).entry, flags, ..wanted }
}

/// Waits for one second in which the kernel relayed everything that the clients exchanged.
fn goes_across(server: &Server, clients: u64) {
    let before = server.across();
    within(SOON, "the kernel relays", || server.across() > before + 50 * clients);
}

fn most_is_relayed_by_the_kernel(server: &Server, row: &mut Row) {
    let relayed = server.metrics().sum("turnpike_relayed_datagrams_total", "");
    let across = server.across();
    assert!(2 * across > relayed, "the kernel relayed {across} of {relayed} datagrams");
    row.note(format!("{across} of {relayed} datagrams relayed by the kernel"));
}

fn sent_to_clients(links: &Links) -> u64 {
    let said = links.inside_says(&["ip", "-s", "link", "show", "dev", "c"]);
    let sent = said.lines().last().and_then(|line| line.split_whitespace().nth(1));
    sent.and_then(|packets| packets.parse().ok()).expect("ip has the counter")
}

/// Kernel flows: two per client.
fn flows(server: &Server) -> u64 {
    server.metrics().sum("turnpike_kernel_flows", "")
}

/// Packets sent to clients during `meanwhile`, and the number expected if all clients of these flows received everything.
fn heard(links: &Links, flows: u64, meanwhile: impl FnOnce()) -> [u64; 2] {
    let (before, begun) = (sent_to_clients(links), Instant::now());
    meanwhile();
    let sent = sent_to_clients(links) - before;
    // Each peer sends every 20 ms.
    [sent, flows / 2 * u64::try_from(begun.elapsed().as_millis() / 20).unwrap_or_default()]
}

fn a_storm_lasts() {
    thread::sleep(or_thorough(Duration::from_secs(1), Duration::from_secs(10)));
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn reloaded_with_the_kernel_path() {
    let storm = Storm::new();
    in_the_kernel(
        turnpike_testkit::this_test!(),
        "`--datapath kernel`: 20 reloads per second, each with changes",
        (storm.wanted(&[]), "2"),
        |_, server, row| {
            storm.rages(server, row, |server, _, storms| {
                storms.store(true, Relaxed);
                let before = server.across();
                a_storm_lasts();
                within(SOON, "the kernel still relays", || server.across() > before);
            });
        },
        |seen| assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}"),
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn upgraded_with_the_kernel_path() {
    in_the_kernel(
        turnpike_testkit::this_test!(),
        "`--datapath kernel`: two upgrades in place",
        (two_workers(&[]), "2"),
        |_, server, row| {
            let without_flow = |server: &Server| {
                server.metrics().sum("turnpike_kernel_passes_total", "reason=\"unknown_channel\"")
            };
            let before = (flows(server), without_flow(server));
            for _ in 0..2 {
                ends(server.upgraded.upgrade());
                goes_across(server, before.0 / 2);
                assert_eq!((flows(server), without_flow(server)), before, "a flow was missing");
            }
            row.note("every flow stayed in the kernel");
        },
        |seen| {
            let nothing = ["lost", "reordered", "returns_done"].map(|name| seen[name].as_u64());
            assert_eq!(nothing, [Some(0); 3], "{seen}");
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn killed_with_the_kernel_path() {
    in_the_kernel(
        turnpike_testkit::this_test!(),
        "`--datapath kernel`: SIGKILL, restart after 0.5 s",
        (two_workers(&[]), "2"),
        |links, server, row| {
            let flows = flows(server);
            server.kill();
            // If an eBPF program were still attached, clients would keep receiving data; otherwise they receive only an occasional ICMP
            // error from the kernel.
            let [sent, all] = heard(links, flows, || thread::sleep(Duration::from_millis(500)));
            assert!(sent < all / 10, "{sent} of {all} packets were sent to clients");
            server.again();
            row.note(format!(
                "no program stayed attached (packets sent to clients before the restart: {sent}; a program would have sent {all})"
            ));
        },
        |seen| {
            let clients = or_thorough(6, 40);
            assert!(seen["returns_done"].as_u64() >= Some(clients), "{seen}");
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn a_worker_stalls_with_the_kernel_path() {
    const WATCHED: &str = "a worker has been stuck";
    // Skips the test early if a thread cannot be frozen.
    let sleeps = Program::start(Command::new("sleep").arg("600"));
    drop(need!(Frozen::thread(sleeps.pid())));
    in_the_kernel(
        turnpike_testkit::this_test!(),
        "`--datapath kernel`: the only worker stalls for 3 s",
        (watched(Wanted::flags(&["--workers", "1"])), "60"),
        |links, server, row| {
            let flows = flows(server);
            let frozen = Frozen::thread(worker(server.pid(), "relay-0"))
                .expect("freezing a thread has already succeeded");
            let [sent, all] = heard(links, flows, || thread::sleep(Duration::from_secs(3)));
            assert!(
                server.lines().iter().any(|line| line.contains(WATCHED)),
                "the watchdog did not report the stall"
            );
            drop(frozen);
            // The kernel does not relay all packets, because bursts and the datagrams after them wait for the worker.
            assert!(all > 0 && sent > all / 2, "{sent} of {all} packets were sent to clients");
            row.note(format!("{sent} packets sent to clients in the meantime (expected {all})"));
        },
        |seen| {
            assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
            assert!(
                seen["pause_ms_p50"].as_f64() < Some(1_500.0),
                "at least half of the clients noticed the stall: {seen}"
            );
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn a_queue_is_full_on_the_kernel_path() {
    in_the_kernel(
        turnpike_testkit::this_test!(),
        "`--datapath kernel`: both link queues limited to 1 Mbit/s",
        (two_workers(&[]), "2"),
        |links, server, row| {
            let before = server.across();
            let dropped = link_faults::are_full(links);
            within(SOON, "the kernel still relays", || server.across() > before);
            assert!(dropped > 0, "the queues dropped nothing");
            row.note(format!("{dropped} packets dropped and counted by the queues"));
        },
        |seen| assert!(seen["lost"].as_u64() > Some(0), "{seen}"),
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn many_reconnect_on_the_kernel_path() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let dir = Dir::new();
        let address = SocketAddr::new(SERVER[0], 3478);
        let mut server = Server::on(address, RELAY[0], inside(links, for_many(&dir, &[])));
        let row = Row::new(
            "many_reconnect_on_the_kernel_path",
            "`--datapath kernel`: SIGKILL and restart; 5,000 clients return within 1 s",
        );
        let clients = (or_thorough(200, 5_000), "10.77.2.2:0");
        all_return(row, &mut server, clients, |server, row| {
            within(SOON, "all clients have flows", || flows(server) >= 2 * clients.0);
            let relayed = || server.metrics().sum("turnpike_relayed_datagrams_total", "");
            let before = (server.across(), relayed());
            goes_across(server, clients.0 / 10);
            let (across, all) = (server.across() - before.0, relayed() - before.1);
            assert!(2 * across > all, "the kernel relayed {across} of {all} datagrams");
            row.note(format!("afterwards {across} of {all} datagrams relayed by the kernel"));
        });
    });
}
