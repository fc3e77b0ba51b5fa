//! `forward --datapath kernel`: UDP sessions are forwarded in the kernel and behave as in user space.

use super::{
    CLIENT, Links, PEER, SERVER, Server,
    checksums::{captured, ethtool},
    client::{bound, is_silent, received},
    on_links,
};
use crate::prelude::*;

pub(super) struct Session {
    client: UdpSocket,
    target: UdpSocket,
    sent: u64,
    bytes: u64,
}

impl Session {
    pub(super) fn new(family: usize, at: SocketAddr, target: &UdpSocket) -> Self {
        let client = bound(CLIENT[family]);
        client.connect(at).expect("the target is reachable");
        Self { client, target: target.try_clone().expect("a descriptor"), sent: 0, bytes: 0 }
    }

    pub(super) fn exchange(&mut self, len: usize) {
        self.sent += 1;
        self.bytes += len as u64;
        let first = self.sent.to_le_bytes()[0];
        // Data that looks like ChannelData is forwarded unchanged.
        let payload: Vec<u8> =
            (first..=255).cycle().map(|byte| byte.wrapping_mul(37) ^ 0x40).take(len).collect();
        self.client.send(&payload).expect("the send succeeds");
        let (heard, from) = received(&self.target);
        assert!(heard == payload, "{len} bytes to the target");
        self.target.send_to(&payload, from).expect("the send succeeds");
        assert!(self.answer() == payload, "{len} bytes to the client");
    }

    fn answer(&self) -> Vec<u8> {
        let mut buffer = [0; 4096];
        let len = self.client.recv(&mut buffer).expect("an answer");
        buffer[..len].to_vec()
    }

    pub(super) fn settle(&mut self, forward: &Server<'_>) {
        let before = counts(forward);
        eventually("the kernel has taken the session", || {
            self.exchange(20);
            let now = counts(forward);
            now[0] > before[0] && now[1] > before[1]
        });
    }
}

fn counts(forward: &Server<'_>) -> [u64; 2] {
    let metrics = forward.metrics();
    ["to_target", "to_client"].map(|direction| {
        metrics.sum("turnpike_kernel_datagrams_total", &format!("direction=\"{direction}\""))
    })
}

/// Like `counts`, but first waits until exactly the datagrams of these sessions have been counted.
fn counts_of(forward: &Server<'_>, sessions: &[&Session]) -> [u64; 2] {
    let sent: u64 = sessions.iter().map(|session| session.sent).sum();
    eventually("datagrams are counted", || sum(forward, "turnpike_forward_datagrams_total", "") == 2 * sent);
    counts(forward)
}

fn sum(forward: &Server<'_>, family: &str, label: &str) -> u64 {
    forward.metrics().sum(family, label)
}

fn flows(forward: &Server<'_>) -> u64 {
    sum(forward, "turnpike_kernel_flows", "")
}

pub(super) fn at(family: usize, port: u16) -> SocketAddr {
    SocketAddr::new(SERVER[family], port)
}

pub(super) fn rule(at: SocketAddr, target: &UdpSocket, more: &str) -> String {
    let options = if more.is_empty() { String::new() } else { format!("?{more}") };
    format!("udp://{at}={}{options}", target.local_addr().expect("bound"))
}

/// Lengths near boundaries: empty, odd, Ethernet padding, the MTU.
const LENGTHS: [usize; 14] = [0, 1, 2, 3, 4, 17, 18, 19, 100, 101, 1000, 1231, 1232, 1233];
const FAMILIES: [(usize, usize); 4] = [(0, 0), (0, 1), (1, 0), (1, 1)];

#[test]
fn forwarded_payloads_are_unchanged_and_totals_are_exact() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let targets = [0, 1].map(|family| bound(PEER[family]));
        let port = |client: usize, target: usize| 5000 + u16::from(client == 1) * 2 + u16::from(target == 1);
        let rules = FAMILIES.map(|(client, target)| {
            let more = format!("idle=2&name=r{client}{target}");
            rule(at(client, port(client, target)), &targets[target], &more)
        });
        let mut forward = links.forward(&rules.each_ref().map(String::as_str));
        let line = forward.program.line_with("data path kernel: attached");
        assert!(line.contains(" to c, p ("), "{line}");
        forward.program.line_with("bypass this machine's firewall");
        for (client, target) in FAMILIES {
            let mut session = Session::new(client, at(client, port(client, target)), &targets[target]);
            session.settle(&forward);
            let before = counts(&forward);
            LENGTHS.into_iter().for_each(|len| session.exchange(len));
            // User space handles the longest datagram, which exceeds the IPv6 limit.
            let least = LENGTHS.len() as u64 - 1;
            eventually("the kernel forwarded the datagrams", || {
                counts(&forward).iter().zip(before).all(|(now, before)| *now >= before + least)
            });
            assert_eq!(flows(&forward), 2);
            let line = forward.program.line_with(&format!("rule=r{client}{target}"));
            for part in ["connection ended", "reason=\"idle for too long\""] {
                assert!(line.contains(part), "{line}");
            }
            for direction in ["to_target", "to_client"] {
                assert!(line.contains(&format!(" {direction}_bytes={} ", session.bytes)), "{line}");
                let label = format!("rule=\"r{client}{target}\",direction=\"{direction}\"");
                eventually("datagrams are counted", || {
                    sum(&forward, "turnpike_forward_datagrams_total", &label) == session.sent
                });
                assert_eq!(sum(&forward, "turnpike_forward_bytes_total", &label), session.bytes);
            }
            assert_eq!(flows(&forward), 0);
        }
        assert_eq!(sum(&forward, "turnpike_kernel_dropped_total", ""), 0);
    });
}

#[test]
fn kernel_session_stays_open_while_it_has_traffic() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let target = bound(PEER[0]);
        let forward = links.forward(&[&rule(at(0, 5000), &target, "idle=2")]);
        let mut session = Session::new(0, at(0, 5000), &target);
        session.settle(&forward);
        // Three times the timeout: first in both directions, then in one.
        for round in 0..12 {
            thread::sleep(Duration::from_millis(500));
            if round < 6 {
                session.exchange(50);
            } else {
                session.client.send(b"?").expect("the send succeeds");
                received(&session.target);
            }
        }
        assert_eq!(sum(&forward, "turnpike_forward_accepted_total", ""), 1);
        assert_eq!(flows(&forward), 2);
        eventually("session ends", || sum(&forward, "turnpike_forward_ended_total", "reason=\"idle\"") == 1);
        assert_eq!(flows(&forward), 0);
        session.settle(&forward);
        assert_eq!(sum(&forward, "turnpike_forward_accepted_total", ""), 2);
    });
}

#[test]
fn session_returns_to_the_kernel_after_a_long_time_in_user_space() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let target = bound(PEER[0]);
        let forward = links.forward(&[&rule(at(0, 5000), &target, "idle=1")]);
        let mut session = Session::new(0, at(0, 5000), &target);
        session.settle(&forward);
        // For longer than the kernel keeps idle flows, the client sends datagrams that stay in user space
        // (TTL 1) and that the target does not answer.
        let before = forward.passes("ttl");
        session.client.set_ttl(1).expect("a TTL");
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(250));
            session.client.send(b"?").expect("the send succeeds");
            received(&session.target);
        }
        assert!(forward.passes("ttl") >= before + 20);
        session.client.set_ttl(64).expect("a TTL");
        session.settle(&forward);
        assert_eq!(forward.passes("expired"), 0);
        assert_eq!(sum(&forward, "turnpike_forward_accepted_total", ""), 1);
    });
}

#[test]
fn full_rule_evicts_the_longest_idle_kernel_session() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let target = bound(PEER[0]);
        let forward = links.forward(&[&rule(at(0, 5000), &target, "max_connections=2")]);
        let [mut busy, mut idle, mut new] = [(); 3].map(|()| Session::new(0, at(0, 5000), &target));
        busy.settle(&forward);
        idle.settle(&forward);
        for _ in 0..15 {
            thread::sleep(Duration::from_millis(100));
            busy.exchange(10);
        }
        new.exchange(10);
        eventually("one session has ended", || {
            sum(&forward, "turnpike_forward_ended_total", "reason=\"evicted\"") == 1
        });
        assert_eq!((flows(&forward), sum(&forward, "turnpike_forward_connections", "")), (4, 2));
        let before = sum(&forward, "turnpike_forward_accepted_total", "");
        busy.exchange(10);
        new.exchange(10);
        counts_of(&forward, &[&busy, &idle, &new]);
        assert_eq!(
            sum(&forward, "turnpike_forward_accepted_total", ""),
            before,
            "the idle session has ended"
        );
        idle.exchange(10);
        counts_of(&forward, &[&busy, &idle, &new]);
        assert_eq!(sum(&forward, "turnpike_forward_accepted_total", ""), before + 1);
    });
}

#[test]
fn unanswered_session_moves_to_another_target_in_the_kernel() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let [silent, other] = [(); 2].map(|()| bound(PEER[0]));
        let more = format!("{}?balance=failover&idle=60", other.local_addr().expect("bound"));
        let forward = links.forward(&[&format!("{},{more}", rule(at(0, 5000), &silent, ""))]);
        let mut session = Session::new(0, at(0, 5000), &other);
        other.set_nonblocking(true).expect("the mode can be set");
        eventually("the second target", || {
            session.client.send(b"?").expect("the send succeeds");
            thread::sleep(Duration::from_millis(50));
            other.recv(&mut [0; 64]).is_ok()
        });
        thread::sleep(Duration::from_millis(500));
        while other.recv(&mut [0; 64]).is_ok() {}
        other.set_nonblocking(false).expect("the mode can be set");
        assert_eq!(flows(&forward), 2, "the flows of the first target are gone");
        session.settle(&forward);
        assert_eq!(flows(&forward), 2);
        assert_eq!(sum(&forward, "turnpike_forward_accepted_total", ""), 1);
        assert_eq!(sum(&forward, "turnpike_forward_target_failed_total", "reason=\"timeout\""), 1);
    });
}

#[test]
fn reload_removes_kernel_flows_before_it_is_logged() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let [target, other] = [(); 2].map(|()| bound(PEER[0]));
        let table = |name: &str, port: u16, target: &UdpSocket, more: &str| {
            let (at, target) = (at(0, port), target.local_addr().expect("bound"));
            format!(
                "[[rule]]\nname = \"{name}\"\nprotocol = \"udp\"\nlisten = \"{at}\"\ntarget = \"{target}\"\n{more}"
            )
        };
        let dir = Dir::new();
        let [stays, goes] = [table("stays", 5000, &target, ""), table("goes", 5001, &target, "")];
        let file = dir.file("f.toml", &(stays.clone() + &goes));
        let mut forward = links.forward(&["-c", file.to_str().expect("a name")]);
        let [mut one, mut two] = [5000, 5001].map(|port| Session::new(0, at(0, port), &target));
        one.settle(&forward);
        two.settle(&forward);

        fs::write(&file, stays + &table("goes", 5001, &other, "kernel = false\n"))
            .expect("the file is writable");
        forward.program.signal("HUP");
        forward.program.line_with("rules reloaded rules=2");
        assert_eq!(flows(&forward), 2);
        two.client.send(b"to the other").expect("the send succeeds");
        assert_eq!(received(&other).0, b"to the other");
        two.target = other;
        for _ in 0..50 {
            two.exchange(30);
        }
        let stays = |family: &str| sum(&forward, family, "rule=\"stays\"");
        let all = "turnpike_forward_datagrams_total";
        eventually("datagrams are counted", || stays(all) == 2 * one.sent);
        let before = stays("turnpike_kernel_datagrams_total");
        one.exchange(30);
        eventually("the new datagrams are counted", || stays(all) == 2 * one.sent);
        assert_eq!(stays("turnpike_kernel_datagrams_total"), before + 2);
        assert_eq!(flows(&forward), 2, "no other flow is in the kernel");

        fs::write(&file, &goes).expect("the file is writable");
        forward.program.signal("HUP");
        forward.program.line_with("rules reloaded rules=1");
        assert_eq!(flows(&forward), 0);
        one.client.send(b"late").expect("the send succeeds");
        assert!(is_silent(&target));
    });
}

#[test]
fn rules_unsupported_by_the_kernel_stay_in_user_space() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let target = bound(PEER[0]);
        let rules = [
            rule(at(0, 5000), &target, "name=slow&max_bytes_per_second=1000000"),
            rule(at(0, 5001), &target, "name=own&kernel=false"),
            rule(at(0, 5002), &target, "name=marked&mark=7"),
        ];
        let mut forward = links.forward(&rules.each_ref().map(String::as_str));
        for (name, why) in [("slow", "a rate limit"), ("marked", "mark can select")] {
            let line = forward.program.line_with(&format!("rule {name}: its datagrams stay in user space"));
            assert!(line.contains(why), "{line}");
        }
        assert!(!forward.program.lines().iter().any(|line| line.contains("data path kernel")));
        for port in [5000, 5001, 5002] {
            let mut session = Session::new(0, at(0, port), &target);
            for _ in 0..100 {
                session.exchange(100);
            }
        }
        eventually("datagrams are counted", || sum(&forward, "turnpike_forward_datagrams_total", "") == 600);
        assert_eq!(counts(&forward), [0, 0]);
        drop(forward);

        let rules = [rule(at(0, 5000), &target, "kernel=true"), rule(at(0, 5001), &target, "")];
        let more = ["--datapath", "gso", &rules[0], &rules[1]];
        let forward = links.forward(&more);
        let [mut across, mut up] = [5000, 5001].map(|port| Session::new(0, at(0, port), &target));
        across.settle(&forward);
        let before = counts_of(&forward, &[&across]);
        for _ in 0..50 {
            up.exchange(40);
        }
        assert_eq!(counts_of(&forward, &[&across, &up]), before);
        across.exchange(40);
        eventually("the kernel forwards one rule", || counts(&forward)[0] > before[0]);
    });
}

#[test]
fn unreachable_target_ends_its_session() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let target = bound(PEER[0]);
        let forward = links.forward(&[&rule(at(0, 5000), &target, "")]);
        let mut session = Session::new(0, at(0, 5000), &target);
        session.settle(&forward);
        let address = target.local_addr().expect("bound");
        drop((target, session.target));
        eventually("ICMP reports the closed port", || {
            session.client.send(b"are you listening?").expect("the send succeeds");
            sum(&forward, "turnpike_forward_ended_total", "reason=\"target_reset\"") == 1
        });
        let target = UdpSocket::bind(address).expect("the port is free");
        target.set_read_timeout(Some(Duration::from_millis(300))).expect("not zero");
        eventually("the session without a target has ended", || {
            session.client.send(b"new").expect("the send succeeds");
            target.recv(&mut [0; 100]).is_ok()
        });
        while !is_silent(&target) {}
        session.target = target;
        session.settle(&forward);
    });
}

#[test]
fn wildcard_listener_answers_from_the_requested_address() {
    on_links(turnpike_testkit::this_test!(), |links| {
        links.inside(&["ip", "addr", "add", "10.77.1.9/24", "dev", "c"]);
        let target = bound(PEER[0]);
        let to = target.local_addr().expect("bound");
        for (rules, family) in [
            (vec![format!("udp://0.0.0.0:5000={to}")], vec![0]),
            (vec![format!("udp://[::]:5000={to}?ipv6_only=false")], vec![0, 1]),
        ] {
            let forward = links.forward(&rules.iter().map(String::as_str).collect::<Vec<_>>());
            for family in family {
                let mut session = Session::new(family, at(family, 5000), &target);
                session.settle(&forward);
            }
            let mut session = Session::new(0, "10.77.1.9:5000".parse().expect("an address"), &target);
            session.settle(&forward);
        }
    });
}

#[test]
fn draining_sessions_continue_in_user_space() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let target = bound(PEER[0]);
        let mut forward = links.forward(&[&rule(at(0, 5000), &target, "")]);
        let mut session = Session::new(0, at(0, 5000), &target);
        session.settle(&forward);
        forward.program.signal("TERM");
        forward.program.line_with("draining");
        for _ in 0..20 {
            session.exchange(60);
        }
        let line = forward.program.line_with("connection ended");
        assert!(line.contains(&format!(" to_target_bytes={} ", session.bytes)), "{line}");
        forward.program.line_with("stopped");
    });
}

#[test]
fn upgraded_forwarder_reattaches_and_forwards_in_the_kernel() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let target = bound(PEER[0]);
        let mut forward = links.forward(&[&rule(at(0, 5000), &target, "idle=8")]);
        let mut upgraded = Upgraded::new(&forward.program);
        let mut session = Session::new(0, at(0, 5000), &target);
        session.settle(&forward);
        for _ in 0..2 {
            ends(upgraded.upgrade());
            session.exchange(30);
            session.settle(&forward);
            assert_eq!(flows(&forward), 2);
        }
        let line = forward.program.line_with("connection ended");
        for direction in ["to_target", "to_client"] {
            assert!(line.contains(&format!(" {direction}_bytes={} ", session.bytes)), "{line}");
        }
        assert_eq!(flows(&forward), 0);
    });
}

#[test]
fn sessions_beyond_a_full_table_use_user_space() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let dir = Dir::new();
        let target = bound(PEER[0]);
        let to = target.local_addr().expect("bound");
        let text = format!(
            "[forward]\nkernel_flows = 2\n[[rule]]\nprotocol = \"udp\"\nlisten = \"{}\"\ntarget = \"{to}\"\n",
            at(0, 5000)
        );
        let file = dir.file("f.toml", &text);
        let forward = links.forward(&["-c", file.to_str().expect("a name")]);
        let [mut first, mut second] = [(); 2].map(|()| Session::new(0, at(0, 5000), &target));
        first.settle(&forward);
        let before = counts_of(&forward, &[&first]);
        for _ in 0..50 {
            second.exchange(70);
        }
        assert_eq!(counts_of(&forward, &[&first, &second]), before);
        assert!(sum(&forward, "turnpike_kernel_flows_refused_total", "") >= 1);
        assert_eq!((flows(&forward), sum(&forward, "turnpike_kernel_flows_limit", "")), (2, 2));
        first.exchange(70);
        eventually("the kernel still forwards the first", || counts(&forward)[0] > before[0]);
    });
}

fn load(forward: SocketAddr, arguments: &[&str]) -> Program {
    let forward = forward.to_string();
    Program::start(&mut turnpike(&[&["load", "udp", &forward, "--json", "-"], arguments].concat()))
}

fn number(run: &Finished, name: &str) -> u64 {
    let result = run.result();
    result[name].as_u64().unwrap_or_else(|| panic!("no {name} in {result}"))
}

#[test]
fn alternating_flow_keeps_its_order_under_load() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let reflect = Reflect::start(PEER[0], &[]);
        let rules = format!("udp://{}={}", at(0, 5000), reflect.address);
        let forward = links.forward(&[&rules]);
        let runs: Vec<Program> =
            [("400", "1", "64"), ("4000", "16", "16"), ("1200", "3", "32"), ("20000", "32", "2")]
                .map(|(rate, burst, clients)| {
                    let flags = ["--rate", rate, "--burst", burst, "--clients", clients, "--duration", "8"];
                    load(at(0, 5000), &flags)
                })
                .into();
        for run in runs {
            let run = run.wait(SOON).ended(0);
            assert_eq!(number(&run, "reordered"), 0, "{}", run.output());
            assert!(number(&run, "received") * 100 > number(&run, "sent") * 95, "{}", run.output());
        }
        assert!(counts(&forward).iter().all(|count| *count > 1000), "{:?}", counts(&forward));
        let passes = ["super_packet", "settling"].map(|reason| forward.passes(reason));
        assert!(passes[0] > 100 && passes[1] > 0, "{passes:?}");
    });
}

#[test]
fn workers_share_a_rule_with_kernel_sessions() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let reflect = Reflect::start(PEER[1], &[]);
        let rules = format!("udp://{}={}?idle=1", at(1, 5000), reflect.address);
        let forward = links.forward(&["--workers", "2", &rules]);
        let run = load(at(1, 5000), &["--rate", "4000", "--clients", "100", "--duration", "3"]).wait(SOON);
        assert_eq!(
            (run.code, number(&run, "lost"), number(&run, "reordered")),
            (Some(0), 0, 0),
            "{}",
            run.output()
        );
        let received = number(&run, "received");
        assert!(counts(&forward)[1] > received / 2, "{:?} of {received}", counts(&forward));
        eventually("all sessions have ended", || sum(&forward, "turnpike_forward_connections", "") == 0);
        assert_eq!(flows(&forward), 0);
        // Echoes are counted in the kernel or in user space.
        let label = "direction=\"to_client\"";
        assert!(sum(&forward, "turnpike_forward_datagrams_total", label) >= received);
    });
}

#[test]
fn checksums_are_correct_with_every_combination_of_offloads() {
    need!(installed("tcpdump"));
    need!(installed("ethtool"));
    on_links(turnpike_testkit::this_test!(), |links| {
        let targets = [0, 1].map(|family| bound(PEER[family]));
        let port = |target: usize| 5000 + u16::from(target == 1);
        let rules = FAMILIES.map(|(client, target)| rule(at(client, port(target)), &targets[target], ""));
        let forward = links.forward(&rules.each_ref().map(String::as_str));
        // Outgoing packets are complete: the device computes no checksums.
        for device in ["c", "p"] {
            ethtool(links, true, device, "tx", false);
        }
        for (partial, gro) in [(true, true), (true, false), (false, true), (false, false)] {
            for device in ["c", "p"] {
                // The offload leaves partial checksums, which the receiver must accept.
                ethtool(links, false, device, "tx", partial);
                ethtool(links, true, device, "gro", gro);
            }
            for (client, target) in FAMILIES {
                let mut session = Session::new(client, at(client, port(target)), &targets[target]);
                session.settle(&forward);
                let before = counts(&forward);
                for (interface, what) in [("p", "at the target"), ("c", "at the client")] {
                    let lines = captured(interface, "udp", || {
                        [0, 1, 2, 3, 17, 18, 120, 121, 1000, 1200]
                            .into_iter()
                            .for_each(|len| session.exchange(len));
                        session.client.send(b"LAST").expect("the send succeeds");
                        let (_, from) = received(&session.target);
                        session.target.send_to(b"LAST", from).expect("the send succeeds");
                        assert_eq!(session.answer(), b"LAST");
                    });
                    let good = lines.iter().filter(|line| line.contains("udp sum ok")).count();
                    let bad: Vec<_> = lines.iter().filter(|line| line.contains("bad")).collect();
                    assert!(bad.is_empty(), "{what}, partial {partial}, gro {gro}: {bad:#?}");
                    assert!(good >= 11, "{what}: {lines:#?}");
                    assert!(lines.iter().all(|line| !line.contains("tos 0x") || line.contains("tos 0x0")));
                }
                eventually("the kernel forwarded the datagrams", || {
                    counts(&forward).iter().zip(before).all(|(now, before)| *now >= before + 20)
                });
            }
        }
        assert_eq!(sum(&forward, "turnpike_kernel_dropped_total", ""), 0);
    });
}

#[test]
fn oversized_and_fragmented_datagrams_use_user_space() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let target = bound(PEER[0]);
        let forward = links.forward(&[&rule(at(0, 5000), &target, "")]);
        let mut session = Session::new(0, at(0, 5000), &target);
        session.settle(&forward);
        for len in [1473, 2900] {
            session.exchange(len);
        }
        assert!(forward.passes("fragment") > 0);
        links.inside(&["ip", "link", "set", "p", "mtu", "1300"]);
        let long = vec![9; 1400];
        session.client.send(&long).expect("the send succeeds");
        assert_eq!(received(&target).0, long);
        links.inside(&["ip", "link", "set", "p", "mtu", "1500"]);
        assert!(forward.passes("too_big") > 0);
        // The TTL expires here; user space sends with a new one.
        session.client.set_ttl(1).expect("a TTL");
        session.exchange(40);
        assert!(forward.passes("ttl") > 0);
        session.client.set_ttl(64).expect("a TTL");
        session.settle(&forward);
        // Datagrams from unknown senders to the session's socket belong to no session.
        session.client.send(b"where?").expect("the send succeeds");
        let (_, from) = received(&target);
        bound(PEER[0]).send_to(b"strange", from).expect("the send succeeds");
        assert!(is_silent(&session.client));
    });
}

#[test]
fn forwarder_kernel_path_needs_three_capabilities() {
    on_links(turnpike_testkit::this_test!(), has_it_with_capabilities);
}

fn has_it_with_capabilities(links: &Links) {
    let target = bound(PEER[0]);
    let rule = rule(at(0, 5000), &target, "");
    {
        let unprivileged = super::operator::unprivileged(links, ",+net_admin,+bpf,+perfmon");
        let forward =
            links.forward_as(unprivileged, &[&rule, "--copy", "kernel", "tcp://10.77.1.1:5000=10.77.2.2:9"]);
        Session::new(0, at(0, 5000), &target).settle(&forward);
    }
    for (flag, rule) in [("--datapath", &rule[..]), ("--copy", "tcp://10.77.1.1:5000=10.77.2.2:9")] {
        let mut command = super::operator::unprivileged(links, "");
        let forward = turnpike(&["forward", "--admin", "off", flag, "kernel", rule]);
        command.arg(forward.get_program()).args(forward.get_args());
        let ended = Program::start(&mut command).wait(SOON).ended(1);
        assert!(ended.stderr.contains(&format!("{flag} kernel: ")), "{}", ended.output());
        assert!(ended.stderr.contains("lacks CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON"), "{}", ended.output());
    }
}
