//! Newcomers in numbers keep no genuine client from its relay: pion clients arrive over each transport while others ask, from one address or
//! from many networks, however long the realm.

use std::{path::Path, process::Command};

use super::{TRANSPORTS, is_thorough, row};
use crate::harness::{Certificate, Newcomers, PASSWORD, Program, Serve, USER, V4, interop_program, need};

/// Clients of each row, and how many of them arrive per second.
fn clients() -> (&'static str, &'static str) {
    if is_thorough() { ("300", "100") } else { ("20", "40") }
}

/// Time to the relay over one transport, in milliseconds.
struct Arrivals {
    attempts: u64,
    relayed: u64,
    p50: f64,
    p99: f64,
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
fn each_client_gets_its_relay_while_newcomers_arrive() {
    let program = need!(interop_program("interop-pion", "pion-arrivals"));
    let certificate = Certificate::of_authority(&["127.0.0.1"]);
    let authority = certificate.authority();
    let authority = authority.to_str().expect("our own path is UTF-8");
    let user = format!("{USER}:{PASSWORD}");
    let realms: &[usize] = if is_thorough() { &[1, 20, 127] } else { &[20] };
    let newcomers: &[(u32, u32)] =
        if is_thorough() { &[(200, 1), (5000, 1), (5000, 100), (5000, 6000)] } else { &[(200, 1)] };
    for len in realms {
        let realm = "r".repeat(*len);
        let flags = ["--realm", &realm, "--user", &user, "--relay-ip", "127.0.0.1", "--workers", "1"];
        let [cert, cert_file, key, key_file] = certificate.flags();
        let more = [cert, cert_file, key, key_file, "--dtls-listen", "127.0.0.1:0"];
        let serve = Serve::start_bare(&[&flags[..], &more[..]].concat());
        for transport in TRANSPORTS {
            let idle = arrivals(&program, &serve, transport, authority);
            for (rate, networks) in newcomers {
                let others = Newcomers::arrive(serve.address_of("udp", V4), *rate, *networks);
                let seen = arrivals(&program, &serve, transport, authority);
                let others = others.stop();
                assert_eq!(seen.relayed, seen.attempts);
                assert_eq!(others.refused, 0, "{others:?}");
                assert!(others.challenged > others.sent / 2, "{others:?}");
                let ms = |it: f64| format!("{it:.1}");
                let times = [idle.p50, seen.p50, idle.p99, seen.p99].map(ms);
                let [idle_p50, p50, idle_p99, p99] = &times;
                row(
                    "newcomers",
                    &[
                        &len,
                        rate,
                        networks,
                        &transport,
                        &seen.attempts,
                        &seen.relayed,
                        idle_p50,
                        p50,
                        idle_p99,
                        p99,
                    ],
                );
            }
        }
        let metrics = serve.metrics();
        assert_eq!(metrics.sum("turnpike_error_responses_total", "code=\"438\""), 0, "{}", metrics.text());
        assert_eq!(metrics.sum("turnpike_dropped_datagrams_total", "reason=\"refusal_ratio\""), 0);
    }
}
