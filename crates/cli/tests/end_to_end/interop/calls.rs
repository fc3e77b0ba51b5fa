//! Calls that outlast their credential: both ends of a client meet through `serve` alone and talk, while their credential and their nonces
//! expire, the server reloads, and its secret is rotated and ends. `./test calls` runs them.

use std::{
    env,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::browsers::{
    browser::{Browser as _, Chromium},
    page::Page,
};
use crate::{
    credentials::{Credential, Server, Store, rotate},
    harness::{Certificate, Program, SOON, V4, eventually, interop_program, need, skip},
};

/// Seconds that a call lasts.
const SECONDS: &str = "TURNPIKE_TEST_CALL_SECONDS";
/// Silence that ends a call. Samples are 250 ms apart, and other tests may use the machine.
const GAP: Duration = Duration::from_secs(3);

/// A client with both ends of a call in one program, which takes HOST PORT USERNAME PASSWORD SECONDS and prints a line for each [`Sample`].
struct Client {
    name: &'static str,
    /// Below `target/interop`.
    program: &'static str,
    /// Below `tests/interop`.
    script: Option<&'static str>,
}

const GSTREAMER: Client =
    Client { name: "GStreamer", program: "gstreamer-python", script: Some("gstreamer/call.py") };
/// Chromium has a page instead.
const CLIENTS: [Client; 4] = [
    Client { name: "aioice", program: "venv/bin/python", script: Some("aioice/call.py") },
    GSTREAMER,
    Client { name: "PJSIP", program: "pjsip/bin/python", script: Some("pjsip/call.py") },
    Client { name: "webrtc-rs", program: "webrtc-rs/debug/turnpike-interop-webrtc-rs", script: None },
];

fn call_length() -> Duration {
    let seconds = env::var(SECONDS).map_or(720, |text| text.parse().expect("seconds"));
    Duration::from_secs(seconds)
}

/// Lifetime of a credential: a minute of twelve, and enough to start every client.
fn lifetime() -> Duration {
    (call_length() / 12).max(Duration::from_secs(10))
}

fn credential(user: &str, server: &Server) -> Credential {
    server.credential(&json!({ "user": user, "ttl": lifetime().as_secs() }))
}

/// Both ends of a call.
enum Call {
    Program(Program),
    Chromium { browser: Chromium, page: Page },
}

/// Messages of both ends until a moment of the call.
struct Sample {
    at: Duration,
    sent: [u64; 2],
    received: [u64; 2],
}

impl Call {
    fn start(client: &Client, server: &Server) -> Result<Self, String> {
        let mut command = Command::new(interop_program("calls", client.program)?);
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop");
        command.args(client.script.map(|script| scripts.join(script)));
        let (address, credential) = (server.serve.address(V4), credential(client.name, server));
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        command.args([&host, &port, &credential.username, &credential.password]);
        command.arg(call_length().as_secs().to_string());
        Ok(Self::Program(Program::start(&mut command)))
    }

    fn in_chromium(server: &Server) -> Result<Self, String> {
        Chromium::available(false)?;
        let credential = credential("Chromium", server);
        let page = Page::serve(json!({
            "urls": [format!("turn:{}?transport=udp", server.serve.address(V4))],
            "username": credential.username,
            "credential": credential.password,
            "seconds": call_length().as_secs(),
        }));
        let browser = Chromium::open(&page.url(), &Certificate::of_authority(&["127.0.0.1"]));
        Ok(Self::Chromium { browser, page })
    }

    fn samples(&self) -> Vec<Sample> {
        let lines = match self {
            Self::Program(program) => program.lines(),
            Self::Chromium { page, .. } => {
                let report = page.report().unwrap_or_default();
                assert!(report.get("error").is_none(), "{report:#}");
                let lines = report["lines"].as_array().into_iter().flatten();
                lines.filter_map(Value::as_str).map(str::to_owned).collect()
            }
        };
        lines.iter().filter_map(|line| Sample::parse(line)).collect()
    }

    fn wait_for_samples(&mut self, client: &str) {
        eventually(&format!("a call of {client}"), || {
            assert!(!self.has_ended(), "{client} has ended");
            !self.samples().is_empty()
        });
    }

    fn has_ended(&mut self) -> bool {
        match self {
            Self::Program(program) => program.has_ended(),
            Self::Chromium { browser, .. } => browser.program().has_ended(),
        }
    }
}

impl Sample {
    /// A line `MS SENT RECEIVED SENT RECEIVED`. Libraries write lines of their own.
    fn parse(line: &str) -> Option<Self> {
        let numbers: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        let [ms, sent_a, received_a, sent_b, received_b] = numbers[..] else { return None };
        Some(Self {
            at: Duration::from_millis(ms),
            sent: [sent_a, sent_b],
            received: [received_a, received_b],
        })
    }
}

/// Longest time for which one of the ends heard nothing.
fn longest_gap(samples: &[Sample], length: Duration) -> Duration {
    let of_end = |end: usize| {
        let (mut heard, mut at, mut longest) = (0, Duration::ZERO, Duration::ZERO);
        for sample in samples {
            if sample.received[end] > heard {
                longest = longest.max(sample.at.saturating_sub(at));
                (heard, at) = (sample.received[end], sample.at);
            }
        }
        longest.max(length.saturating_sub(at))
    };
    of_end(0).max(of_end(1))
}

/// Prints how the call went, in a line that `./test` shows. Returns the messages received and the longest gap.
fn report(client: &str, samples: &[Sample]) -> (u64, Duration) {
    let last = samples.last().expect("the call began");
    let [sent, received]: [u64; 2] = [last.sent, last.received].map(|ends| ends.iter().sum());
    let gap = longest_gap(samples, call_length());
    println!(
        "REPORT: {client}: {sent} messages sent, {received} received in {} s, longest gap {:.2} s",
        call_length().as_secs(),
        gap.as_secs_f64()
    );
    (received, gap)
}

#[test]
#[ignore = "takes twelve minutes: ./test calls"]
fn calls_outlast_credential_nonce_reload_and_secret() {
    let store = Store::new();
    let mut server = store.serve(None, "[auth]\nnonce_lifetime = 60\n");
    let early = credential("early", &server);
    let (mut calls, mut missing) = (Vec::new(), Vec::new());
    let started = CLIENTS.iter().map(|client| (client.name, Call::start(client, &server)));
    for (client, call) in started.chain([("Chromium", Call::in_chromium(&server))]) {
        match call {
            Ok(call) => calls.push((client, call)),
            Err(why) => missing.push(format!("{client}: {why}")),
        }
    }
    if !missing.is_empty() {
        skip(&missing.join(", "));
    }
    for (client, call) in &mut calls {
        call.wait_for_samples(client);
    }
    let began = Instant::now();
    let mut go_on_until = |moment: Duration| {
        while began.elapsed() < moment {
            thread::sleep(Duration::from_millis(100));
            for (client, call) in &mut calls {
                assert!(!call.has_ended(), "{client} has ended after {:?}", began.elapsed());
            }
        }
    };
    // All of them began before, so none is due to end yet.
    go_on_until(call_length() / 3);
    server.serve.program.signal("HUP");
    server.serve.program.line_with("configuration reloaded");
    go_on_until(call_length() / 2);
    rotate(store.dir.path(), &["--overlap", &lifetime().as_secs().to_string()]);
    go_on_until(call_length() * 3 / 4);
    server.serve.program.line_with("whose time is over is removed");
    assert_eq!(server.allocate(&early), Some(401), "the first credentials are good no more");
    go_on_until(call_length().saturating_sub(SOON));
    let ended = calls.into_iter().map(|(client, mut call)| {
        eventually(&format!("the end of the call of {client}"), || {
            let last = call.samples().pop().map(|sample| sample.at);
            call.has_ended() || last >= Some(call_length())
        });
        let (received, gap) = report(client, &call.samples());
        if let Call::Chromium { browser, .. } = call {
            browser.close();
        }
        (client, received, gap)
    });
    let ended: Vec<(&str, u64, Duration)> = ended.collect();
    for (client, _, gap) in &ended {
        assert!(*gap <= GAP, "{client} heard nothing for {gap:?}");
    }
    let received: u64 = ended.iter().map(|(_, received, _)| received).sum();
    let metrics = server.serve.metrics();
    let relayed = metrics.sum("turnpike_relayed_datagrams_total", "direction=\"to_client\"");
    assert!(relayed >= received, "all of it went through the server: {}", metrics.text());
    let stale = metrics.sum("turnpike_error_responses_total", "code=\"438\"");
    println!("REPORT: requests with a nonce that had expired: {stale}");
}

/// libnice 0.1.21 refreshes after half of a LIFETIME in whole seconds, at once after that of 1. It renews its channel after nine minutes, and
/// repeats a refused renewal at once.
#[test]
#[ignore = "takes twelve minutes: ./test calls"]
fn libnice_whose_session_ends_with_its_credential_is_answered_seldom() {
    const ENDS: usize = 2;
    let store = Store::new();
    let server = store.serve(None, "[limits]\nend_with_credential = true\n");
    let mut call = need!(Call::start(&GSTREAMER, &server));
    call.wait_for_samples(GSTREAMER.name);
    let deadline = Instant::now() + call_length() + SOON;
    while !call.has_ended() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(100));
    }
    let lines = server.serve.program.lines();
    let ended = lines.iter().filter(|line| line.contains("its credential expired")).count();
    assert_eq!(ended, ENDS, "{lines:#?}");
    let gap = longest_gap(&call.samples(), call_length());
    assert!(gap > GAP, "its ends heard nothing from then on");

    let metrics = server.serve.metrics();
    let refreshes = metrics.sum("turnpike_requests_total", "method=\"refresh\"");
    let answered = metrics.sum("turnpike_error_responses_total", "");
    let dropped = metrics.sum("turnpike_dropped_datagrams_total", "reason=\"refusal_repeated\"");
    println!(
        "REPORT: GStreamer whose sessions end with their credential: {refreshes} Refreshes; {answered} refusals, {dropped} repeated requests dropped"
    );
    assert!(refreshes <= ENDS as u64 * 20, "{}", metrics.text());
    // Per end: a hundred ChannelBinds at once and ten a second; few other requests.
    assert!(answered <= ENDS as u64 * (110 + 10 * call_length().as_secs()), "{}", metrics.text());
    if call_length() >= Duration::from_secs(600) {
        assert!(dropped > 0, "{}", metrics.text());
    }
}
