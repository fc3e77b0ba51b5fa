//! Calls that outlast their credential: both ends of a client send data through `serve` while credentials and nonces expire, the server
//! reloads, and its secret is rotated and removed. `./test calls` runs them.

mod client;

use crate::prelude::*;

use crate::credentials::{Credential, Server, Store, rotate};
use client::{CLIENTS, Call, GSTREAMER, Outcome, longest_gap};

const SECONDS: &str = "TURNPIKE_TEST_CALL_SECONDS";
/// Gap in traffic after which a call is considered ended. Samples are 250 ms apart, and about twenty calls share the machine.
const GAP: Duration = Duration::from_secs(5);
const LIFETIME: Duration = Duration::from_secs(600);

fn call_length() -> Duration {
    let seconds = env::var(SECONDS).map_or(720, |text| text.parse().expect("seconds"));
    Duration::from_secs(seconds)
}

/// Lifetime of a credential: a twelfth of the call, but enough to start every client.
fn lifetime() -> Duration {
    (call_length() / 12).max(Duration::from_secs(30))
}

fn credential(user: &str, server: &Server) -> Credential {
    server.credential(&json!({ "user": user, "ttl": lifetime().as_secs() }))
}

/// Prints the result of a call as a row of docs/clients.md, which `./test` shows. Returns the number of messages received, or the
/// difference from the expected outcome.
fn report(call: &Call) -> Result<u64, String> {
    let (client, transport, samples) = (call.version(), call.transport, call.samples());
    let Some(last) = samples.last() else {
        println!("REPORT: | {client} | {transport} | no call | | |");
        let is_expected = call.expected == Outcome::NeverStarts;
        return if is_expected { Ok(0) } else { Err(format!("{client} over {transport}: no call")) };
    };
    let [sent, received]: [u64; 2] = [last.sent, last.received].map(|ends| ends.iter().sum());
    let gap = longest_gap(&samples);
    let spoken = if call.speaks() == Some(transport) { "" } else { " (unencrypted)" };
    println!("REPORT: | {client} | {transport}{spoken} | {sent} | {received} | {:.2} s |", gap.as_secs_f64());
    let holds = match call.expected {
        Outcome::Holds | Outcome::Unencrypted => true,
        Outcome::NeverRefreshes => call_length() < LIFETIME,
        Outcome::NeverStarts => return Err(format!("{client} now completes a call over {transport}")),
    };
    if (gap <= GAP) == holds {
        Ok(received)
    } else {
        Err(format!("{client} over {transport} received nothing for {gap:?}"))
    }
}

fn wrong_transport(call: &Call, server: &Server) -> Option<String> {
    let spoken = call.spoken(server);
    let is_wrong = !spoken.iter().eq(call.speaks());
    is_wrong.then(|| format!("{} over {} speaks {spoken:?}", call.version(), call.transport))
}

#[test]
#[ignore = "takes twelve minutes: ./test calls"]
fn calls_outlast_credential_nonce_reload_and_secret() {
    let (store, certificate) = (Store::new(), Certificate::of_authority(&["127.0.0.1"]));
    // Clients have no permission for each other's own address, so no ICE agent finds a path around the relay.
    let mut server =
        store.serve_with(Some(&certificate), "[auth]\nnonce_lifetime = 60\n", &["--relay-ip", "127.0.0.2"]);
    let early = credential("early", &server);
    let (mut calls, mut missing) = (Vec::new(), Vec::new());
    for client in &CLIENTS {
        for &over in client.transports {
            match Call::start(client, over, &server, &certificate) {
                Ok(call) => calls.push(call),
                Err(why) => missing.push(format!("{}: {why}", client.name)),
            }
        }
    }
    missing.dedup();
    if !missing.is_empty() {
        skip(&missing.join(", "));
    }
    let began = Instant::now();
    for call in calls.iter_mut().filter(|call| call.expected != Outcome::NeverStarts) {
        call.starts(began);
    }
    let began = Instant::now();
    let go_on_until = |moment: Duration| thread::sleep(moment.saturating_sub(began.elapsed()));
    // All calls started before this point, so none of them ends yet.
    go_on_until(call_length() / 3);
    let mut faults: Vec<String> = calls.iter().filter_map(|call| wrong_transport(call, &server)).collect();
    server.serve.program.signal("HUP");
    server.serve.program.line_with("configuration reloaded");
    go_on_until(call_length() / 2);
    rotate(store.dir.path(), &["--overlap", &lifetime().as_secs().to_string()]);
    go_on_until(call_length() * 3 / 4);
    server.serve.program.line_with("an expired secret of realm");
    assert_eq!(server.allocate(&early), Some(401), "the first credentials are no longer valid");
    let end = Instant::now() + call_length().saturating_sub(began.elapsed()) + SOON;
    for call in calls.iter_mut().filter(|call| call.expected != Outcome::NeverStarts) {
        while !call.is_over() && Instant::now() < end {
            thread::sleep(Duration::from_millis(100));
        }
    }
    let mut received = 0;
    for call in &calls {
        match report(call) {
            Ok(messages) => received += messages,
            Err(fault) => faults.push(fault),
        }
    }
    let metrics = server.serve.metrics();
    let stale = metrics.sum("turnpike_error_responses_total", "code=\"438\"");
    println!("REPORT: requests with a nonce that had expired: {stale}");
    assert!(faults.is_empty(), "{faults:#?}");
    let relayed = metrics.sum("turnpike_relayed_datagrams_total", "direction=\"to_client\"");
    assert!(relayed >= received, "some data bypassed the server: {}", metrics.text());
    calls.into_iter().for_each(Call::close);
}

/// libnice 0.1.21 refreshes after half of a LIFETIME in whole seconds, that is, immediately for a LIFETIME of 1. It refreshes its channel
/// after nine minutes, and if the refresh is refused, repeats it immediately.
#[test]
#[ignore = "takes twelve minutes: ./test calls"]
fn refusals_to_libnice_with_an_expired_credential_are_limited() {
    const ENDS: usize = 2;
    let (store, certificate) = (Store::new(), Certificate::of_authority(&["127.0.0.1"]));
    let server = store.serve(Some(&certificate), "[limits]\nend_with_credential = true\n");
    let mut call = need!(Call::start(&GSTREAMER, ("udp", Outcome::Holds), &server, &certificate));
    assert!(call.starts(Instant::now()), "no call with {}", GSTREAMER.name);
    let deadline = Instant::now() + call_length() + SOON;
    while !call.has_ended() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(100));
    }
    let lines = server.serve.program.lines();
    let ended = lines.iter().filter(|line| line.contains("its credential expired")).count();
    assert_eq!(ended, ENDS, "{lines:#?}");
    let gap = longest_gap(&call.samples());
    assert!(gap > GAP, "an end still received data after that");

    let metrics = server.serve.metrics();
    let refreshes = metrics.sum("turnpike_requests_total", "method=\"refresh\"");
    let answered = metrics.sum("turnpike_error_responses_total", "");
    let dropped = metrics.sum("turnpike_dropped_datagrams_total", "reason=\"refusal_repeated\"");
    println!(
        "REPORT: GStreamer whose allocations end with their credential: {refreshes} Refreshes; {answered} refusals, {dropped} repeated requests dropped"
    );
    assert!(refreshes <= ENDS as u64 * 20, "{}", metrics.text());
    // Per end: a burst of a hundred ChannelBinds, then ten a second, and few other requests.
    assert!(answered <= ENDS as u64 * (110 + 10 * call_length().as_secs()), "{}", metrics.text());
    if call_length() >= Duration::from_secs(600) {
        assert!(dropped > 0, "{}", metrics.text());
    }
}
