use std::{
    io::Write,
    net::IpAddr,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use turnpike_events::{Events, LOST, Options, Timing};
use turnpike_testkit::Dir;

use crate::support::{Act, Receiver, SECRET, options, sequence, started, until, webhook};

fn delivered(events: &Events) -> u64 {
    events.counts()[0].delivered
}

async fn until_delivered(events: &Events, count: u64) {
    until("delivered", || delivered(events), |now| now >= count).await;
}

/// Emits numbered events no faster than they can be written.
async fn emit(events: &Events, count: u64) {
    for number in 0..count {
        events.emit("allocation.end", &json!({ "user": "al\"ice\n", "number": number }));
        if number % 1000 == 999 {
            let written = || {
                let counts = &events.counts()[0];
                counts.delivered + counts.waiting
            };
            until("written", written, |written| written + 20_000 > number).await;
        }
    }
}

#[tokio::test]
async fn events_arrive_in_order_with_a_signature_that_openssl_confirms() {
    let (dir, receiver) = (Dir::new(), Receiver::new(|_| Act::Accept));
    let events = started(options(dir.path(), vec![webhook(receiver.url(), false)]));
    emit(&events, 300).await;
    until_delivered(&events, 300).await;
    for (event, number) in receiver.events().iter().zip(0..) {
        assert_eq!((&event["data"]["number"], sequence(event)), (&json!(number), number + 1));
        assert_eq!(event["data"]["user"], "al\"ice\n");
        assert_eq!((&event["source"], &event["type"]), (&json!("/turnpike/test"), &json!("allocation.end")));
    }
    let taken = receiver.taken();
    let request = taken.last().expect("300");
    assert_eq!(request.headers["content-type"], "application/cloudevents+json; charset=utf-8");
    assert_eq!(request.headers["host"], receiver.at.to_string());
    let signature = &request.headers["turnpike-signature"];
    let (time, mac) = signature.split_once(",v1=").expect("two parts");
    let openssl = Command::new("openssl")
        .args(["dgst", "-sha256", "-hmac", SECRET, "-r"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut openssl) = openssl else {
        eprintln!("SKIPPED: openssl is not installed");
        return;
    };
    let mut input = openssl.stdin.take().expect("piped");
    input.write_all(time.strip_prefix("t=").expect("a time").as_bytes()).expect("openssl reads");
    input.write_all(b".").expect("openssl reads");
    input.write_all(&request.body).expect("openssl reads");
    drop(input);
    let output = openssl.wait_with_output().expect("openssl ends").stdout;
    assert!(String::from_utf8_lossy(&output).starts_with(mac));
}

#[tokio::test]
async fn a_batch_is_one_request() {
    let (dir, receiver) = (Dir::new(), Receiver::new(|_| Act::Accept));
    let events = started(options(dir.path(), vec![webhook(receiver.url(), true)]));
    emit(&events, 250).await;
    until_delivered(&events, 250).await;
    assert!(receiver.requests() < 250, "{}", receiver.requests());
    assert_eq!(
        receiver.taken()[0].headers["content-type"],
        "application/cloudevents-batch+json; charset=utf-8"
    );
    let numbers: Vec<usize> = receiver.events().iter().map(sequence).collect();
    assert_eq!(numbers, (1..=250).collect::<Vec<_>>());
}

/// Fails three requests in ten: before or after it has taken the events, but never twice in a row after it has taken them, since no
/// sender can know that.
async fn through_a_failing_receiver(count: u64) {
    let (again, repeated) = (AtomicBool::new(false), Arc::new(AtomicU64::new(0)));
    let repeats = Arc::clone(&repeated);
    let receiver = Receiver::counting(move |number| {
        let after_taking = again.swap(false, Ordering::Relaxed);
        match number % 10 {
            2 => Act::Refuse(503),
            5 => Act::Close,
            8 if !after_taking => {
                again.store(true, Ordering::Relaxed);
                repeats.fetch_add(1, Ordering::Relaxed);
                Act::AcceptAndClose
            }
            _ => Act::Accept,
        }
    });
    let dir = Dir::new();
    let events = started(options(dir.path(), vec![webhook(receiver.url(), true)]));
    emit(&events, count).await;
    until_delivered(&events, count).await;
    // Delivered events leave the spool a moment later.
    until("empty", || events.counts()[0].waiting, |waiting| waiting == 0).await;
    let counts = receiver.counts();
    assert_eq!(counts.len() as u64, count);
    let twice = counts.iter().filter(|times| **times == 2).count() as u64;
    assert!(counts.iter().all(|times| (1..=2).contains(times)), "each event once or twice");
    let repeated = repeated.load(Ordering::Relaxed);
    assert!(
        repeated > 0 && twice >= repeated && twice <= 100 * repeated,
        "{twice} events in {repeated} repeats"
    );
    let counted = &events.counts()[0];
    assert_eq!((counted.lost, counted.waiting), (0, 0));
    assert!(counted.failures * 4 > receiver.requests(), "{counted:?}");
    eprintln!(
        "{count} events, {} requests, {} failures, {twice} delivered twice",
        receiver.requests(),
        counted.failures
    );
}

#[tokio::test]
async fn a_receiver_that_fails_three_times_in_ten_gets_every_event() {
    through_a_failing_receiver(100_000).await;
}

/// `cargo test --release -p turnpike-events --test events million -- --ignored --nocapture`
#[tokio::test]
#[ignore = "takes minutes"]
async fn a_failing_receiver_gets_a_million_events() {
    through_a_failing_receiver(1_000_000).await;
}

#[tokio::test]
async fn a_receiver_that_hangs_gets_everything_when_it_returns() {
    let receiver = Receiver::new(|number| if number < 3 { Act::Hang } else { Act::Accept });
    let dir = Dir::new();
    let timing = Timing {
        first: Duration::from_millis(1),
        most: Duration::from_millis(4),
        request: Duration::from_secs(2),
    };
    let events = started(Options { timing, ..options(dir.path(), vec![webhook(receiver.url(), true)]) });
    emit(&events, 10_000).await;
    until_delivered(&events, 10_000).await;
    receiver.stop_hanging();
    assert!(receiver.counts().iter().all(|times| *times == 1));
    assert_eq!((receiver.counts().len(), events.counts()[0].failures), (10_000, 3));
}

#[tokio::test]
async fn a_spool_that_is_full_drops_the_oldest_events_and_reports_them() {
    let receiver = Receiver::new(|_| Act::Refuse(500));
    let dir = Dir::new();
    let options = Options { spool: 1 << 20, ..options(dir.path(), vec![webhook(receiver.url(), true)]) };
    let events = started(options);
    for number in 0..20_000_u64 {
        events.emit("allocation.end", &json!({ "number": number }));
        if number % 1000 == 999 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    until("lost", || events.counts()[0].lost, |lost| lost > 5000).await;
    receiver.accept_all();
    events.close(Duration::from_secs(60)).await;
    let received = receiver.events();
    let is_report = |event: &&Value| event["type"] == LOST;
    let reported: u64 = received
        .iter()
        .filter(is_report)
        .map(|event| event["data"]["count"].as_u64().expect("a count"))
        .sum();
    let others = received.iter().filter(|event| !is_report(event)).count() as u64;
    assert_eq!(others + reported, 20_000);
    let last = received.iter().rfind(|event| !is_report(event)).expect("some");
    assert_eq!(last["data"]["number"], 19_999, "the newest are kept");
}

#[tokio::test]
async fn private_addresses_are_refused_and_redirects_are_not_followed() {
    let (dir, receiver) = (Dir::new(), Receiver::new(|_| Act::Accept));
    let refuses: Option<fn(IpAddr) -> bool> = Some(|ip| ip.is_loopback());
    let local = format!("http://localhost:{}/hook?a=b", receiver.at.port());
    let webhooks = vec![webhook(receiver.url(), false), webhook(local, false)];
    let events = started(Options { refuses, ..options(dir.path(), webhooks) });
    events.emit("quota", &1);
    let failures = || events.counts().iter().map(|counts| counts.failures).min().unwrap_or(0);
    until("failures", failures, |failures| failures > 5).await;
    assert_eq!(receiver.requests(), 0);
    let receiver = Receiver::new(|number| if number < 5 { Act::Refuse(302) } else { Act::Accept });
    events.set(options(dir.path(), vec![webhook(receiver.url(), false)]));
    events.emit("quota", &2);
    until_delivered(&events, 1).await;
    assert_eq!((receiver.requests(), events.counts()[0].failures), (6, 5));
}

#[tokio::test]
async fn a_webhook_gets_only_its_types_and_continues_with_other_options() {
    let (dir, receiver) = (Dir::new(), Receiver::new(|_| Act::Accept));
    let mut hook = webhook(receiver.url(), false);
    hook.types = vec!["quota"];
    let events = started(options(dir.path(), vec![hook.clone()]));
    events.emit("refusal", &1);
    events.emit("quota", &2);
    until_delivered(&events, 1).await;
    hook.types = vec!["refusal"];
    events.set(options(dir.path(), vec![hook]));
    events.emit("refusal", &3);
    events.emit("quota", &4);
    until_delivered(&events, 1).await;
    events.set(options(dir.path(), Vec::new()));
    events.emit("refusal", &5);
    assert!(!events.is_wanted(), "unused events cost nothing");
    let received: Vec<(Value, usize)> =
        receiver.events().iter().map(|event| (event["data"].clone(), sequence(event))).collect();
    assert_eq!(received, [(json!(2), 1), (json!(3), 2)]);
}

#[tokio::test]
async fn one_emitted_event_reaches_webhook_and_stream() {
    let (dir, receiver) = (Dir::new(), Receiver::new(|_| Act::Accept));
    let events = started(options(dir.path(), vec![webhook(receiver.url(), false)]));
    let mut stream = events.subscribe(None, vec!["quota"]).expect("a free place");
    events.emit("quota", &json!({ "user": "alice" }));
    let text = stream.next().await;
    let text = str::from_utf8(&text).expect("UTF-8");
    assert!(text.contains("\nevent: quota\n") && text.contains("\"data\":{\"user\":\"alice\"}"), "{text}");
    until_delivered(&events, 1).await;
    assert_eq!(receiver.events()[0]["data"]["user"], "alice");
}

#[tokio::test]
async fn closing_delivers_what_is_left() {
    let (dir, receiver) = (Dir::new(), Receiver::new(|_| Act::Accept));
    let events = started(options(dir.path(), vec![webhook(receiver.url(), true)]));
    (0..5000).for_each(|number| events.emit("allocation.end", &json!(number)));
    events.close(Duration::from_secs(60)).await;
    let counts = receiver.counts();
    assert!(counts.len() == 5000 && counts.iter().all(|times| *times == 1), "{} events", counts.len());
}
