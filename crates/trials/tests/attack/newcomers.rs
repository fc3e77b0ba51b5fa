//! Floods of new clients, from one address or many networks and with realms of any length, do not keep pion clients or Chromium from
//! getting their allocations.

use std::{path::Path, process::Command};

use serde_json::{Value, json};

use super::{TRANSPORTS, is_thorough, row};
use turnpike_trials::browsers::{Browser as _, Chromium, Over, Page};
use turnpike_trials::{
    Certificate, Newcomers, PASSWORD, Program, Serve, USER, V4, eventually, interop_program, need,
};

fn clients() -> (&'static str, &'static str) {
    if is_thorough() { ("300", "100") } else { ("20", "40") }
}

const GATHERINGS: u64 = 30;

/// Time to the allocation over one transport, in milliseconds.
struct Arrivals {
    attempts: u64,
    relayed: u64,
    p50: f64,
    p99: f64,
}

/// Measures clients without and during a flood, over each transport and with each realm. All must get an allocation. Prints the rows.
fn get_their_relays<T: Copy>(
    client: &str,
    transports: &[(&str, T)],
    certificate: &Certificate,
    arrivals: impl Fn(&Serve, T) -> Arrivals,
) {
    let realms: &[usize] = if is_thorough() { &[1, 20, 127] } else { &[20] };
    let newcomers: &[(u32, u32)] =
        if is_thorough() { &[(200, 1), (5000, 1), (5000, 100), (5000, 6000)] } else { &[(200, 1)] };
    for len in realms {
        let serve = serve(&"r".repeat(*len), certificate);
        for (name, transport) in transports {
            let idle = arrivals(&serve, *transport);
            for (rate, networks) in newcomers {
                let others = Newcomers::arrive(serve.address_of("udp", V4), *rate, *networks);
                let seen = arrivals(&serve, *transport);
                let others = others.stop();
                assert_eq!(seen.relayed, seen.attempts);
                assert_eq!(others.refused, 0, "{others:?}");
                assert!(others.challenged > others.sent / 2, "{others:?}");
                let ms = |it: f64| format!("{it:.1}");
                let [idle_p50, p50, idle_p99, p99] = [idle.p50, seen.p50, idle.p99, seen.p99].map(ms);
                row(
                    "newcomers",
                    &[
                        len,
                        rate,
                        networks,
                        &client,
                        name,
                        &seen.attempts,
                        &seen.relayed,
                        &idle_p50,
                        &p50,
                        &idle_p99,
                        &p99,
                    ],
                );
            }
        }
        let metrics = serve.metrics();
        assert_eq!(metrics.sum("turnpike_error_responses_total", "code=\"438\""), 0, "{}", metrics.text());
        assert_eq!(metrics.sum("turnpike_dropped_datagrams_total", "reason=\"refusal_ratio\""), 0);
    }
}

fn serve(realm: &str, certificate: &Certificate) -> Serve {
    let user = format!("{USER}:{PASSWORD}");
    let flags = ["--realm", realm, "--user", &user, "--relay-ip", "127.0.0.1", "--workers", "1"];
    let [cert, cert_file, key, key_file] = certificate.flags();
    let more = [cert, cert_file, key, key_file, "--dtls-listen", "127.0.0.1:0"];
    Serve::start_bare(&[&flags[..], &more[..]].concat())
}

fn arrivals(program: &Path, serve: &Serve, transport: &str, authority: &str) -> Arrivals {
    let (count, rate) = clients();
    let mut command = Command::new(program);
    command.args(["-server", &serve.address_of(transport, V4).to_string(), "-transport", transport]);
    command.args(["-user", USER, "-password", PASSWORD, "-ca", authority, "-count", count, "-rate", rate]);
    let ended = Program::run(&mut command);
    let report: Value = serde_json::from_str(ended.stdout.trim()).expect("the output is a JSON object");
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
    let authority = authority.to_str().expect("the test's path is UTF-8");
    get_their_relays("pion", &TRANSPORTS.map(|name| (name, name)), &certificate, |serve, transport| {
        arrivals(&program, serve, transport, authority)
    });
}

/// Time from configuring a connection to its relay candidate.
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
        report["times"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    times.sort_by(f64::total_cmp);
    let attempts = GATHERINGS;
    let relayed = times.len() as u64;
    assert_eq!(relayed, attempts, "{report:#}");
    let at = |percent: usize| times[percent * (times.len() - 1) / 100];
    Arrivals { attempts, relayed, p50: at(50), p99: at(99) }
}

/// Browsers do not support DTLS to a TURN server.
#[test]
fn chromium_gets_its_relay_while_newcomers_arrive() {
    need!(Chromium::available(true));
    let certificate = Certificate::of_authority(&["localhost", "127.0.0.1"]);
    let transports = [Over::Udp, Over::Tcp, Over::Tls].map(|over| (over.name(), over));
    get_their_relays("Chromium", &transports, &certificate, |serve, over| {
        gatherings(serve, over, &certificate)
    });
}
