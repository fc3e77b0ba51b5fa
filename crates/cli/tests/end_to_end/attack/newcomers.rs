//! Newcomers in numbers keep no genuine client from its relay: pion clients and Chromium arrive over each transport while others ask, from one
//! address or from many networks, however long the realm.

use std::{path::Path, process::Command};

use serde_json::json;

use super::{TRANSPORTS, is_thorough, row};
use crate::{
    harness::{
        Certificate, Newcomers, PASSWORD, Program, Serve, USER, V4, eventually, interop_program, need,
    },
    interop::browsers::{
        Over,
        browser::{Browser as _, Chromium},
        page::Page,
    },
};

/// Clients of each row, and how many of them arrive per second.
fn clients() -> (&'static str, &'static str) {
    if is_thorough() { ("300", "100") } else { ("20", "40") }
}

/// Connections of Chromium of each row, one after the other.
const GATHERINGS: u64 = 30;

/// Time to the relay over one transport, in milliseconds.
struct Arrivals {
    attempts: u64,
    relayed: u64,
    p50: f64,
    p99: f64,
}

/// Newcomers of a row.
struct Others {
    realm_len: usize,
    rate: u32,
    networks: u32,
}

/// Lets clients arrive while newcomers do; each must get its relay. Prints the row.
fn with_newcomers(
    serve: &Serve,
    &Others { realm_len, rate, networks }: &Others,
    (client, transport): (&str, &str),
    idle: &Arrivals,
    arrivals: impl FnOnce() -> Arrivals,
) {
    let others = Newcomers::arrive(serve.address_of("udp", V4), rate, networks);
    let seen = arrivals();
    let others = others.stop();
    assert_eq!(seen.relayed, seen.attempts);
    assert_eq!(others.refused, 0, "{others:?}");
    assert!(others.challenged > others.sent / 2, "{others:?}");
    let ms = |it: f64| format!("{it:.1}");
    let [idle_p50, p50, idle_p99, p99] = [idle.p50, seen.p50, idle.p99, seen.p99].map(ms);
    row(
        "newcomers",
        &[
            &realm_len,
            &rate,
            &networks,
            &client,
            &transport,
            &seen.attempts,
            &seen.relayed,
            &idle_p50,
            &p50,
            &idle_p99,
            &p99,
        ],
    );
}

fn serve(realm_len: usize, certificate: &Certificate) -> Serve {
    let (realm, user) = ("r".repeat(realm_len), format!("{USER}:{PASSWORD}"));
    let flags = ["--realm", &realm, "--user", &user, "--relay-ip", "127.0.0.1", "--workers", "1"];
    let [cert, cert_file, key, key_file] = certificate.flags();
    let more = [cert, cert_file, key, key_file, "--dtls-listen", "127.0.0.1:0"];
    Serve::start_bare(&[&flags[..], &more[..]].concat())
}

fn refused_nobody(serve: &Serve) {
    let metrics = serve.metrics();
    assert_eq!(metrics.sum("turnpike_error_responses_total", "code=\"438\""), 0, "{}", metrics.text());
    assert_eq!(metrics.sum("turnpike_dropped_datagrams_total", "reason=\"refusal_ratio\""), 0);
}

fn arrivals(program: &Path, serve: &Serve, transport: &str, authority: &str) -> Arrivals {
    let (count, rate) = clients();
    let mut command = Command::new(program);
    command.args(["-server", &serve.address_of(transport, V4).to_string(), "-transport", transport]);
    command.args(["-user", USER, "-password", PASSWORD, "-ca", authority, "-count", count, "-rate", rate]);
    let ended = Program::run(&mut command);
    let report: serde_json::Value = serde_json::from_str(ended.stdout.trim()).expect("a JSON object");
    assert_eq!(ended.code, Some(0), "over {transport}: {report}");
    let number = |name: &str| report[name].as_f64().expect("a number");
    let count = |name: &str| report[name].as_u64().expect("a count");
    Arrivals {
        attempts: count("attempts"),
        relayed: count("relayed"),
        p50: number("p50_ms"),
        p99: number("p99_ms"),
    }
}

#[test]
fn pion_gets_its_relay_while_newcomers_arrive() {
    let program = need!(interop_program("interop-pion", "pion-arrivals"));
    let certificate = Certificate::of_authority(&["127.0.0.1"]);
    let authority = certificate.authority();
    let authority = authority.to_str().expect("our own path is UTF-8");
    let realms: &[usize] = if is_thorough() { &[1, 20, 127] } else { &[20] };
    let newcomers: &[(u32, u32)] =
        if is_thorough() { &[(200, 1), (5000, 1), (5000, 100), (5000, 6000)] } else { &[(200, 1)] };
    for &realm_len in realms {
        let serve = serve(realm_len, &certificate);
        for transport in TRANSPORTS {
            let arrivals = || arrivals(&program, &serve, transport, authority);
            let idle = arrivals();
            for &(rate, networks) in newcomers {
                let others = Others { realm_len, rate, networks };
                with_newcomers(&serve, &others, ("pion", transport), &idle, arrivals);
            }
        }
        refused_nobody(&serve);
    }
}

/// Time from the configuration of a connection to its relayed candidate.
fn gatherings(serve: &Serve, over: Over, certificate: &Certificate) -> Arrivals {
    let page = Page::serve(json!({
        "urls": [over.uri::<Chromium>(serve, V4)],
        "username": USER,
        "credential": PASSWORD,
        "gatherings": GATHERINGS,
    }));
    let browser = Chromium::open(&page.url(), certificate);
    let report = eventually("the page reports", || page.report());
    browser.close();
    let mut times: Vec<f64> =
        report["times"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_f64).collect();
    times.sort_by(f64::total_cmp);
    let attempts = GATHERINGS;
    let relayed = times.len() as u64;
    assert_eq!(relayed, attempts, "{report:#}");
    let at = |percent: usize| times[percent * (times.len() - 1) / 100];
    Arrivals { attempts, relayed, p50: at(50), p99: at(99) }
}

/// Browsers have no DTLS to a TURN server.
#[test]
fn chromium_gets_its_relay_while_newcomers_arrive() {
    need!(Chromium::available(true));
    let certificate = Certificate::of_authority(&["localhost", "127.0.0.1"]);
    let others = Others { realm_len: 20, rate: 200, networks: 1 };
    let serve = serve(others.realm_len, &certificate);
    for over in [Over::Udp, Over::Tcp, Over::Tls] {
        let arrivals = || gatherings(&serve, over, &certificate);
        let idle = arrivals();
        with_newcomers(&serve, &others, ("Chromium", over.name()), &idle, arrivals);
    }
    refused_nobody(&serve);
}
