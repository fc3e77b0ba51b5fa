use std::{
    env,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use serde_json::json;
use turnpike_testkit::Dir;

use crate::support::{Act, Receiver, options, sequence, started, until, webhook};

/// Set for the process that is killed: directory of the spool, and URL.
const CHILD: &str = "TURNPIKE_TEST_EVENTS_CHILD";

#[expect(clippy::print_stdout, reason = "the parent waits for the line")]
async fn emit_until_killed(dir: &str, url: &str) {
    let events = started(options(dir.as_ref(), vec![webhook(url.to_owned(), true)]));
    (0..5000).for_each(|number| events.emit("allocation.end", &json!({ "number": number })));
    until("written", || events.counts()[0].waiting, |waiting| waiting == 5000).await;
    println!("\nWRITTEN");
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn events_of_a_killed_process_are_delivered_by_the_next_one() {
    if let Ok(child) = env::var(CHILD) {
        let (dir, url) = child.split_once(' ').expect("two parts");
        return emit_until_killed(dir, url).await;
    }
    let dir = Dir::new();
    let receiver = Receiver::new(|_| Act::Refuse(500));
    let url = receiver.url();
    let mut child = Command::new(env::current_exe().expect("this test"))
        .args(["--exact", turnpike_testkit::this_test!(), "--nocapture"])
        .env(CHILD, format!("{} {url}", dir.path().display()))
        .stdout(Stdio::piped())
        .spawn()
        .expect("the test starts again");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert!(lines.any(|line| line.is_ok_and(|line| line == "WRITTEN")));
    child.kill().expect("it runs");
    child.wait().expect("it has ended");
    receiver.accept_all();
    let events = started(options(dir.path(), vec![webhook(url, true)]));
    events.emit("allocation.end", &json!({ "number": 5000 }));
    until("delivered", || events.counts()[0].delivered, |delivered| delivered == 5001).await;
    // The receiver may have accepted the last request of the killed process.
    let mut received = receiver.events();
    received.sort_by_key(sequence);
    received.dedup_by_key(|event| sequence(event));
    for (event, number) in received.iter().zip(0..) {
        assert_eq!((&event["data"]["number"], sequence(event)), (&json!(number), number + 1));
    }
    let counts = receiver.counts();
    assert_eq!(counts.len(), 5001);
    assert!(counts.iter().all(|times| (1..=2).contains(times)));
}
