//! The usage ledger in the API and as output of `turnpike usage`.

use crate::prelude::*;

use turnpike_api::{UsageFilter, UsageGrouping};
use turnpike_ctl::commands::UsageFormat;
use turnpike_stores::{UsageAccount, UsageAmount, UsageBatch, UsageHour, UsageRun, UsageStore};

/// 2026-11-30, 18:00.
const BEGINS: u64 = 1_796_061_600;
/// A period around that hour.
pub(crate) const PERIOD: &str = "since=2026-11-30&until=2026-12-01";

fn amount(bytes: u64) -> UsageAmount {
    UsageAmount {
        allocations: 2,
        lived_ms: 1500,
        to_peer: (bytes / 100, bytes),
        to_client: (1, 7),
        peak_bps: 80_000,
    }
}

fn account(user: &str, key: &str) -> UsageAccount {
    UsageAccount { realm: "turnpike".into(), user: user.into(), key: key.into(), identifier: "".into() }
}

/// Gives the program a ledger with these users' usage, by a run that was killed.
pub(crate) fn record(running: &Running, usage: &[(&str, &str, u64)]) {
    let store = UsageStore::new(None, Some(&running.dir.path("usage.sqlite"))).expect("a place");
    let rows = usage.iter().map(|(user, key, bytes)| (account(user, key), amount(*bytes))).collect();
    let hours = vec![UsageHour { begins: BEGINS, rows }];
    let batch = UsageBatch { number: 1, hours, at: BEGINS + 60, is_idle: false, is_last: false };
    let run = UsageRun { id: "1".to_owned(), node: "one".to_owned(), started: BEGINS };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(store.add(&run, &batch)).unwrap();
    *running.program.usage.lock().unwrap() = Some(Arc::new(store));
}

#[test]
fn usage_is_grouped_paged_and_has_gaps() {
    let running = Running::server(1);
    assert_eq!(running.get("/v1/usage").problem(404), "no_usage");
    record(&running, &[("alice", "shop", 1000), ("bob", "shop", 3000), ("carol", "", 500)]);
    let get = |more: &str| running.get(&format!("/v1/usage?{PERIOD}{more}")).ok();
    let first = get("&limit=2");
    assert_eq!(first["usage"][0]["user"], "bob");
    assert_eq!(first["usage"][0]["to_peer"], json!({ "datagrams": 30, "bytes": 3000 }));
    assert_eq!(
        first["gaps"],
        json!([{ "node": "one", "started": "2026-11-30T18:00:00Z", "last": "2026-11-30T18:01:00Z" }])
    );
    let next = first["next"].as_str().expect("another page");
    let second = get(&format!("&limit=2&cursor={next}"));
    assert_eq!((&second["usage"][0]["user"], &second["next"]), (&json!("carol"), &Value::Null));
    assert_eq!(get("&user=alice")["usage"].as_array().unwrap().len(), 1);
    let keys = get("&by=key");
    assert_eq!(
        (&keys["usage"][0]["key"], &keys["usage"][0]["to_peer"]["bytes"]),
        (&json!("shop"), &json!(4000))
    );
    assert_eq!(get("&by=hour")["usage"][0]["begins"], "2026-11-30T18:00:00Z");
    assert_eq!(get("&by=day")["usage"][0]["begins"], "2026-11-30T00:00:00Z");
    for wrong in
        ["since=x", "until=2026-13-01", "since=2026-12-01&until=2026-11-01", "limit=0", "by=x", "cursor=x"]
    {
        assert_eq!(running.get(&format!("/v1/usage?{wrong}")).problem(400), "bad_request", "{wrong}");
    }
}

#[test]
fn the_command_prints_hostile_names_safely() {
    let running = Running::server(1);
    let long = "x".repeat(500);
    record(&running, &[("=1+1", "", 400), ("a,\"b\r\n\u{1b}[31m", "", 300), (&long, "", 200)]);
    let client = Client::new(Some(Target::Unix(running.dir.path("a.sock"))), None).unwrap();
    let print = |format, by| {
        let wanted = UsageFilter {
            by: Some(by),
            since: Some("2026-11-30".to_owned()),
            until: Some("2026-12-01".to_owned()),
            ..UsageFilter::default()
        };
        let (mut out, mut notices) = (Vec::new(), Vec::new());
        commands::show_usage(&client, wanted, format, &mut out, &mut notices).unwrap();
        (String::from_utf8(out).unwrap(), String::from_utf8(notices).unwrap())
    };
    let (csv, notices) = print(UsageFormat::Csv, UsageGrouping::User);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 4, "{csv}");
    assert!(lines[1].starts_with("turnpike,\"'=1+1\",2,1.5,4,400,1,7,80000"), "{csv}");
    assert!(lines[2].starts_with(r#"turnpike,"a,""b\u{d}\u{a}\u{1b}[31m",2,"#), "{csv}");
    assert!(lines[3].starts_with(&format!("turnpike,{long},2,")), "{csv}");
    assert!(notices.contains("up to 10 s of usage after 2026-11-30T18:01:00Z"), "{notices}");
    let (text, _) = print(UsageFormat::Other(OutputFormat::Json), UsageGrouping::User);
    let list: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(list[1]["user"], "a,\"b\r\n\u{1b}[31m");
    let (text, _) = print(UsageFormat::Other(OutputFormat::Text(None)), UsageGrouping::User);
    assert!(!text.contains('\u{1b}') && text.contains("missing: up to 10 s"), "{text}");
}
