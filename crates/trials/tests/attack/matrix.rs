//! Runs `turnpike probe --attack`: every request type with every notation of forbidden addresses, over each transport and data path, and
//! the measurement of amplification for unauthenticated clients.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use turnpike_testkit::alone::run;

use super::{
    Asked, TRANSPORTS, by_each_in_the_kernel, floods, is_thorough, row,
    witness::{self, Seen, Witnesses, relayed},
};
use turnpike_trials::links::{Links, PEER, SERVER, Server};
use turnpike_trials::{
    Certificate, Finished, PASSWORD, Program, Serve, USER, Upgraded, V4, eventually, turnpike,
};

const SPELLINGS: [&str; 9] = [
    "IPv4-mapped",
    "IPv4-compatible",
    "SIIT",
    "NAT64",
    "local-use NAT64",
    "6to4",
    "Teredo, as the client",
    "Teredo, as the server",
    "ISATAP",
];
/// Maximum bytes out per byte in, with the realm `turnpike`. A longer realm adds its length to the challenge (docs/serve.md).
const MOST_AMPLIFICATION: f64 = 4.0;
const MOST_OF_DTLS: f64 = 1.0;
/// Second user, who attacks the first one's allocation.
const OTHER: &str = "mallory:guessed";

fn user() -> String {
    format!("{USER}:{PASSWORD}")
}

fn attack(uri: &str, more: &[&str]) -> Value {
    let user = user();
    let flags = ["--attack", "--i-own-this-server", "--json", "--insecure", "--timeout", "300"];
    let users = ["--user", &user, "--attack-user", OTHER];
    let ask = || {
        let run = Program::start(&mut turnpike(&[&["probe", uri], &flags[..], &users, more].concat()));
        let run = run.wait(Duration::from_secs(400));
        assert!(matches!(run.code, Some(0 | 1)), "{}", run.output());
        run.result()
    };
    // Repeats the probe if a busy machine kept the server from answering in time.
    let late = |report: &Value| not_asked(report).iter().any(|line| line.contains("no answer in time"));
    let report = ask();
    let report = if late(&report) { ask() } else { report };
    let notes = not_asked(&report);
    assert!(notes.is_empty(), "the probe skipped requests: {notes:?}");
    report
}

fn not_asked(report: &Value) -> Vec<String> {
    let findings = report["findings"].as_array().expect("a list").iter();
    let notes = findings.filter(|line| line["level"] == "note" && line["area"] == "attack");
    notes.map(|line| line["what"].to_string()).collect()
}

type Tried = BTreeMap<(String, String), usize>;

fn nothing_is_open(report: &Value) -> Tried {
    let mut tried = Tried::new();
    let attempts = report["attack"]["peers"].as_array().expect("a list");
    for attempt in attempts {
        assert_ne!(attempt["outcome"], "open", "{attempt}");
        // A refusal for an unknown reason proves nothing.
        assert_ne!(attempt["outcome"], "unknown", "{attempt}");
        let text = |name: &str| attempt[name].as_str().expect("text").to_owned();
        // A Send has no response. The server's counters show whether the data reached a peer.
        assert_eq!(attempt["outcome"] == "silent", text("entry").ends_with("send"), "{attempt}");
        *tried.entry((text("entry"), text("transport"))).or_default() += 1;
    }
    let forms: BTreeSet<&str> = attempts.iter().filter_map(|attempt| attempt["form"].as_str()).collect();
    for address in [
        "loopback",
        "unspecified",
        "cloud metadata",
        "the server's own address",
        "the server's public address",
    ] {
        for spelling in SPELLINGS {
            let form = format!("{address} as {spelling}");
            assert!(forms.contains(form.as_str()), "{form} was not requested");
        }
    }
    for form in [
        "link-local, in any scope of the server",
        "the server's own address",
        "the server's public address",
        "unspecified",
    ] {
        assert!(forms.contains(form), "{form} was not requested");
    }
    for form in [
        "a changed ticket",
        "a ticket of zeros",
        "another user's ticket",
        "another user's ticket, to delete the allocation",
    ] {
        assert!(forms.contains(form), "no request had {form}");
    }
    tried
}

fn is_complete(tried: &Tried, transports: &[&str]) {
    for transport in transports {
        for entry in [
            "create_permission",
            "channel_bind",
            "send",
            "mobility",
            "mobility_channel_bind",
            "mobility_send",
            "connect",
            "connection_bind",
        ] {
            let is_of_streams = entry.starts_with("connect");
            let there = tried.get(&(entry.to_owned(), (*transport).to_owned())).copied().unwrap_or_default();
            assert_eq!(
                there > 0,
                !is_of_streams || ["tcp", "tls"].contains(transport),
                "{entry} over {transport}"
            );
        }
    }
}

fn say(where_to: &str, tried: &Tried) {
    let entries: BTreeSet<&String> = tried.keys().map(|(entry, _)| entry).collect();
    for entry in entries {
        let count = |transport: &str| {
            let count = tried.get(&(entry.clone(), transport.to_owned()));
            count.map_or("-".to_owned(), ToString::to_string)
        };
        let [udp, tcp, tls, dtls] = TRANSPORTS.map(count);
        row("peers", &[&where_to, entry, &udp, &tcp, &tls, &dtls, &0]);
    }
}

fn say_together(where_to: &str, tried: &Tried) {
    let mut together = Tried::new();
    for ((_, transport), count) in tried {
        *together.entry(("all of these".to_owned(), transport.clone())).or_default() += count;
    }
    say(where_to, &together);
}

fn amplification_is_bounded(report: &Value) {
    let mut by_kind: BTreeMap<(&str, &str), Vec<&Value>> = BTreeMap::new();
    for reply in report["attack"]["strangers"].as_array().expect("a list") {
        let most = if reply["transport"] == "dtls" { MOST_OF_DTLS } else { MOST_AMPLIFICATION };
        assert!(ratio(reply) <= most, "{reply}");
        let text = |name: &str| reply[name].as_str().expect("text");
        by_kind.entry((text("transport"), kind_of(text("message")))).or_default().push(reply);
    }
    for asked in ["udp", "dtls"] {
        let mut of_it = by_kind.iter().filter(|((transport, _), _)| *transport == asked);
        assert!(
            of_it.any(|(_, replies)| replies.iter().any(|reply| ratio(reply) > 0.0)),
            "no request is answered over {asked}"
        );
    }
    for ((transport, kind), replies) in by_kind {
        let sum =
            |name: &str| replies.iter().map(|reply| reply[name].as_u64().expect("a number")).sum::<u64>();
        let silent = replies.iter().filter(|reply| ratio(reply) == 0.0).count();
        let by_ratio = |one: &&&Value, other: &&&Value| ratio(one).total_cmp(&ratio(other));
        let worst = replies.iter().max_by(by_ratio).expect("each kind has a reply");
        let what = worst["message"].as_str().expect("text");
        let most = if silent == replies.len() {
            "0".to_owned()
        } else {
            format!("{:.2} ({what}: {} for {})", ratio(worst), worst["received"], worst["sent"])
        };
        let mean = format!("{:.2}", sum("received") as f64 / sum("sent") as f64);
        row("strangers", &[&transport, &kind, &replies.len(), &silent, &most, &mean]);
    }
}

fn ratio(reply: &Value) -> f64 {
    reply["ratio"].as_f64().expect("a number")
}

fn kind_of(message: &str) -> &str {
    let first = message.split_whitespace().next().unwrap_or_default();
    match first {
        "Binding" | "Allocate" | "Refresh" | "CreatePermission" | "ChannelBind" | "Connect"
        | "ConnectionBind" => first,
        _ if message.contains("ClientHello") => "ClientHello",
        _ => "not STUN",
    }
}

/// Public relay address, as behind a NAT; it is not on any interface or in any peer rule.
const PUBLIC: &str = "198.41.0.9";

fn on_loopback(datapath: &str, transports: &[&str]) -> (Certificate, Serve) {
    let certificate = Certificate::new(&["turn.example.org"]);
    let user = user();
    let relay = format!("127.0.0.1={PUBLIC}");
    let peer = witness::PEER.to_string();
    let mut flags = vec!["--user", &user, "--user", OTHER, "--allow-peer", &peer];
    flags.extend(["--relay-ip", &relay, "--relay-ip", "::1"]);
    flags.extend(certificate.flags());
    flags.extend(["--datapath", datapath, "--workers", "1"]);
    if transports.contains(&"dtls") {
        flags.extend(["--dtls-listen", "127.0.0.1:0"]);
    }
    let serve = Serve::start_bare(&flags);
    (certificate, serve)
}

#[test]
fn no_request_reaches_a_forbidden_peer() {
    const DATAPATHS: [&str; 3] = ["basic", "mmsg", "gso"];
    if is_thorough() {
        return DATAPATHS.iter().for_each(|datapath| by(datapath));
    }
    // Most of the time is spent waiting for responses that never arrive.
    thread::scope(|scope| DATAPATHS.iter().for_each(|datapath| _ = scope.spawn(|| by(datapath))));
}

fn by(datapath: &str) {
    let (_certificate, mut serve) = on_loopback(datapath, &TRANSPORTS);
    let uri = format!("turn:{}", serve.address(V4));
    let transports = if is_thorough() { &TRANSPORTS[..] } else { &["udp", "tls"] };
    let (report, seen) = beside_witnesses(datapath, &serve, transports, &uri);
    let tried = nothing_is_open(&report);
    is_complete(&tried, &TRANSPORTS);
    say(datapath, &tried);
    print_probe_row(datapath, &tried, &seen);
    amplification_is_bounded(&report);
    serve.wait_for_allocations(0);
    if is_thorough() {
        again(datapath, &mut serve, transports, &uri);
    }
}

/// Runs the probe while witnesses relay over these transports, and checks in the server's counters that no other peer gets data.
fn beside_witnesses<S: Asked>(
    what: &str,
    server: &S,
    transports: &[&'static str],
    uri: &str,
) -> (Value, Seen) {
    let at = |transport: &str| server.at(transport);
    let witnesses = Witnesses::begin(transports, at, S::PEER, || server.metrics());
    let report = attack(uri, &[]);
    (report, witnesses.end(what, || server.metrics()))
}

fn print_probe_row(datapath: &str, tried: &Tried, seen: &Seen) {
    let attempts: usize = tried.values().sum();
    seen.say(&format!("`probe --attack`, data path {datapath}"), &attempts.to_string());
}

/// Repeats the probe after a reload and after an upgrade, both with an unchanged configuration. [`super::peers`] covers changed rules.
fn again<S: Asked>(datapath: &str, server: &mut S, transports: &[&'static str], uri: &str) {
    let once_more = |server: &S, when: &str| {
        let what = format!("{datapath}, {when}");
        let (report, seen) = beside_witnesses(&what, server, transports, uri);
        let tried = nothing_is_open(&report);
        say_together(&what, &tried);
        print_probe_row(&what, &tried, &seen);
    };
    server.program().signal("HUP");
    server.program().line_with("configuration reloaded");
    once_more(&*server, "after a reload");
    let mut upgraded = Upgraded::new(server.program());
    upgraded.upgrade();
    let done = || server.metrics().sum("turnpike_upgrades_total", "result=\"done\"");
    eventually("the new process continues the counters", || done() == 1);
    once_more(&*server, "after an upgrade");
}

#[test]
fn no_request_reaches_a_forbidden_peer_on_the_kernel_path() {
    by_each_in_the_kernel(turnpike_testkit::this_test!(), in_the_kernel);
}

fn in_the_kernel(links: &Links, datapath: &str) {
    let certificate = Certificate::new(&["turn.example.org"]);
    let user = user();
    let mut flags = vec!["--user", &user, "--user", OTHER, "--datapath", datapath];
    flags.extend(["--dtls-listen", "10.77.1.1:3478"]);
    flags.extend(certificate.flags());
    let mut server = links.serve(&flags);
    let uri = format!("turn:{}:3478", SERVER[0]);
    let transports = if is_thorough() { &TRANSPORTS[..] } else { &["udp", "tls"] };
    let (report, seen) = beside_witnesses(datapath, &server, transports, &uri);
    let tried = nothing_is_open(&report);
    is_complete(&tried, &TRANSPORTS);
    say(datapath, &tried);
    print_probe_row(datapath, &tried, &seen);
    amplification_is_bounded(&report);
    if is_thorough() {
        probe_from_unassigned_addresses(links, &server, datapath);
        again(datapath, &mut server, transports, &uri);
    }
}

fn probe_from_unassigned_addresses(links: &Links, server: &Server<'_>, datapath: &str) {
    let address = SocketAddr::new(SERVER[0], 3478);
    run("ip", &["route", "replace", "local", "198.18.0.0/15", "dev", "lo"]);
    links.inside(&["ip", "route", "replace", "198.18.0.0/15", "via", "10.77.1.2"]);
    let witnesses = Witnesses::begin(&TRANSPORTS, |_| address, PEER[0], || server.metrics());
    let begun = Instant::now();
    let mut done = 0;
    for turn in 0.. {
        if begun.elapsed() >= Duration::from_secs(10) {
            break;
        }
        done += floods::spoofed(address, server.program.pid(), turn);
        thread::sleep(Duration::from_millis(5));
    }
    let what = format!("requests from unassigned addresses, data path {datapath}");
    witnesses.end(&what, || server.metrics()).say(&what, &done.to_string());
}

/// Peers on the ports of the admin interface and of other services, including after a reload and an upgrade.
#[test]
#[ignore = "thorough: cargo xtask attack"]
fn no_request_reaches_the_admin_interface_after_reload_or_upgrade() {
    let (_certificate, mut serve) = on_loopback("gso", &["udp", "tcp"]);
    let uri = |transport: &str| format!("turn:{}?transport={transport}", serve.address(V4));
    let admin = serve.admin().port().to_string();
    let (udp, tcp) = (uri("udp"), uri("tcp"));
    let report = attack(&tcp, &["--attack-port", &admin, "--attack-port", "22"]);
    assert_eq!(relayed(&serve.metrics()), 0, "no data was sent to any peer");
    let tried = nothing_is_open(&report);
    is_complete(&tried, &["tcp"]);
    say("gso, ports of the API and of SSH", &tried);
    // Other tests cover each data path in a full run.
    if !is_thorough() {
        again("gso", &mut serve, &["udp", "tcp"], &udp);
    }
}

#[test]
#[ignore = "thorough: cargo xtask attack"]
fn attack_probe_without_consent_sends_nothing() {
    let serve = Serve::start(&["--workers", "1"]);
    let uri = format!("turn:{}", serve.address(V4));
    let said: Finished = Program::run(&mut turnpike(&["probe", &uri, "--user", &user(), "--attack"]));
    assert_eq!(said.code, Some(2), "{}", said.output());
    assert!(said.stdout.contains("CreatePermission, ChannelBind, Send and Connect"), "{}", said.output());
    assert!(said.stdout.contains("--i-own-this-server"), "{}", said.output());
    assert_eq!(serve.metrics().sum("turnpike_rx_datagrams_total", ""), 0);
    Program::run(&mut turnpike(&["probe", &uri, "--i-own-this-server"])).ended(2);
}

/// The probe detects an open relay from the data that it receives from the peer.
#[test]
#[ignore = "thorough: cargo xtask attack"]
fn attack_probe_detects_an_open_relay() {
    let mut serve = Serve::start(&["--allow-peer", "10.0.0.0/8", "--workers", "1"]);
    let uri = format!("turn:{}?transport=udp", serve.address(V4));
    // The second server on this machine answers STUN requests, and the first one allows peers to use its port.
    let other = Serve::start(&["--workers", "1"]);
    let port = other.address(V4).port();
    let report = Program::run(&mut turnpike(&[
        "probe",
        &uri,
        "--user",
        &user(),
        "--attack",
        "--i-own-this-server",
        "--attack-port",
        &port.to_string(),
        "--json",
        "--fail-on",
        "bad",
    ]))
    .ended(3)
    .result();
    let attempts = report["attack"]["peers"].as_array().expect("a list");
    let outcome = |entry: &str, form: &str| {
        let is_it = |attempt: &&Value| attempt["entry"] == entry && attempt["form"] == form;
        attempts.iter().find(is_it).map(|attempt| attempt["outcome"].clone())
    };
    for entry in ["create_permission", "channel_bind", "send"] {
        assert_eq!(outcome(entry, "loopback"), Some("open".into()), "{entry}: {report}");
    }
    assert_eq!(outcome("create_permission", "private"), Some("open".into()));
    // A Send that gets no answer is inconclusive.
    assert_eq!(outcome("send", "private"), Some("silent".into()));
    assert_eq!(outcome("channel_bind", "cloud metadata as NAT64"), Some("refused".into()));
    assert!(!serve.program.has_ended());
}
