//! Current activity: single requests, and event streams with a limited number of watchers.

use crate::prelude::*;
use std::io::{BufRead, BufReader, Read, Write};

use turnpike_api::{ClientRefusals, RuleState, RuleStatus};

use crate::support::{SOON, relay_state};

pub(crate) fn refusal(client: &str, user: &str) -> ClientRefusals {
    ClientRefusals {
        first_at: "2026-01-02T02:46:40Z".to_owned(),
        last_at: "2026-01-02T03:00:00.123Z".to_owned(),
        count: 3,
        client: client.to_owned(),
        network: None,
        user: Some(user.to_owned()).filter(|user| !user.is_empty()),
        realm: None,
        asked: "credentials".to_owned(),
        code: Some(401),
        reason: "wrong key".to_owned(),
        remedy: "Use the right one.".to_owned(),
        keys: vec!["auth.users".to_owned()],
        others: 1,
        other_users: vec!["dave".to_owned()],
        other_peers: Vec::new(),
    }
}

struct Events {
    head: String,
    reader: BufReader<TcpStream>,
}

impl Events {
    fn open(running: &Running, query: &str, headers: &[(&str, &str)]) -> Self {
        let address: SocketAddr = running.tcp[0];
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let path = format!("/v1/live/events{query}");
        stream.write_all(&request("GET", &path, &address.to_string(), headers, None)).unwrap();
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(reader.read_line(&mut head).unwrap() > 0, "no answer: {head:?}");
        }
        Self { head: head.to_ascii_lowercase(), reader }
    }

    fn status(&self) -> &str {
        self.head.split(' ').nth(1).unwrap()
    }

    /// Returns the next event, or `None` at the end of the stream. Lines between events are chunk
    /// framing.
    fn next(&mut self) -> Option<(String, Value)> {
        let mut name = None;
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(event) = line.strip_prefix("event: ") {
                name = Some(event.trim_end().to_owned());
            }
            if let (Some(name), Some(data)) = (&name, line.strip_prefix("data: ")) {
                return Some((name.clone(), serde_json::from_str(data).unwrap()));
            }
        }
    }
}

#[test]
fn live_data_describes_the_activity() {
    let running = Running::server(2);
    let clients: Vec<_> = (0..5).map(|_| running.allocated()).collect();
    let live = eventually("the allocations are read", || {
        let live = running.get("/v1/live").ok();
        let sum: u64 =
            live["server"]["workers"].as_array()?.iter().filter_map(|it| it["allocations"].as_u64()).sum();
        (sum == 5).then_some(live)
    });
    assert_eq!((&live["status"]["job"], &live["status"]["open"]), (&json!("serve"), &json!(7)));
    assert!(live["interval_s"].as_f64().is_some_and(|seconds| seconds > 0.0), "{live}");
    let udp = running.relay().listeners().udp[0].to_string();
    let listeners = live["server"]["listeners"].as_array().unwrap();
    let of_udp = listeners.iter().find(|it| it["address"] == udp && it["transport"] == "udp").unwrap();
    assert_eq!(of_udp["allocations"], 5);
    assert_eq!(live["server"]["realms"][0]["allocations"], 5);
    for worker in live["server"]["workers"].as_array().unwrap() {
        assert!(worker["event_loop_us"].as_u64().is_some(), "{worker}");
    }
    assert!(live.get("rules").is_none(), "{live}");
    drop(clients);
}

#[test]
fn history_lists_have_equal_length() {
    let running = Running::server(1);
    let history = eventually("two points", || {
        let history = running.get("/v1/live/history").ok();
        (history["open"].as_array()?.len() >= 2).then_some(history)
    });
    let lengths: Vec<usize> =
        history.as_object().unwrap().values().filter_map(|it| Some(it.as_array()?.len())).collect();
    assert_eq!(lengths.len(), 9);
    assert!(lengths.iter().all(|length| *length == lengths[0]), "{lengths:?}");
    assert!(history["open"].as_array().unwrap().contains(&json!(7.0)), "{history}");
}

#[test]
fn relaying_allocation_is_a_talker_while_watched() {
    let running = Running::server(2);
    let _others: Vec<_> = (0..3).map(|_| running.allocated()).collect();
    let (client, relayed) = running.allocated();
    let peer = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = stun::xor_address(peer.local_addr().unwrap(), 0);
    client.send(&stun::message(0x0009, 2, &[(0x000C, &[0x40, 1, 0, 0]), (0x0012, &to)])).unwrap();
    let mut answer = [0; 1500];
    client.recv(&mut answer).unwrap();
    let address = client.local_addr().unwrap().to_string();
    let talkers = eventually("the talker is found", || {
        client.send(&[[0x40, 1, 0, 4].as_slice(), b"data"].concat()).unwrap();
        let live = running.get("/v1/live").ok();
        let talkers = live["server"]["talkers"].clone();
        (talkers["talkers"][0]["client"] == address.as_str()).then_some(talkers)
    });
    assert!(talkers["active"].as_u64().is_some_and(|active| active >= 1), "{talkers}");
    assert!(talkers["talkers"][0]["to_peer"]["bytes"].as_f64().is_some_and(|bytes| bytes > 0.0), "{talkers}");
    let id = talkers["talkers"][0]["id"].as_str().unwrap();
    let allocation = running.get(&format!("/v1/allocations/{id}")).ok();
    assert_eq!(allocation["relayed"][0]["address"], relayed.to_string());
}

#[test]
fn event_stream_starts_with_the_history() {
    let running = Running::server(1);
    let mut events = Events::open(&running, "", &[]);
    assert_eq!(events.status(), "200");
    for header in
        ["content-type: text/event-stream\r\n", "cache-control: no-store\r\n", "x-accel-buffering: no\r\n"]
    {
        assert!(events.head.contains(header), "no {header} in {}", events.head);
    }
    let (name, history) = events.next().unwrap();
    assert_eq!(name, "history");
    assert!(history["open"].is_array());
    let mut before = jiff::Timestamp::UNIX_EPOCH;
    for _ in 0..3 {
        let (name, live) = events.next().unwrap();
        assert_eq!((name.as_str(), &live["status"]["open"]), ("live", &json!(7)));
        let at = live["at"].as_str().unwrap().parse().unwrap();
        assert!(at > before, "{at} after {before}");
        before = at;
    }
}

#[test]
fn counted_event_stream_ends() {
    let running = Running::server(1);
    let mut events = Events::open(&running, "?count=2", &[]);
    let names: Vec<String> = std::iter::from_fn(|| events.next()).map(|(name, _)| name).collect();
    assert_eq!(names, ["history", "live", "live"]);
    for bad in ["?count=-1", "?count=many", "?most=1"] {
        assert_eq!(running.get(&format!("/v1/live/events{bad}")).problem(400), "bad_request", "{bad}");
    }
}

#[test]
fn watchers_are_limited_and_their_slots_are_reused() {
    let running = Running::server(1);
    let mut watching: Vec<Events> = (0..8).map(|_| Events::open(&running, "", &[])).collect();
    assert!(watching.iter().all(|events| events.status() == "200"));
    let refused = running.get("/v1/live/events");
    assert_eq!(refused.problem(503), "too_many_watchers");
    assert!(refused.json()["detail"].as_str().unwrap().contains("/v1/live"), "{refused:?}");
    // Other requests and all watchers are still served.
    for _ in 0..30 {
        assert_eq!(running.ask_tcp("GET", "/v1/status", &[]).status, 200);
    }
    for events in &mut watching {
        assert_eq!(events.next().unwrap().0, "history");
        assert_eq!(events.next().unwrap().0, "live");
    }
    watching.truncate(7);
    eventually("a slot is free", || Events::open(&running, "", &[]).status() == "200");
}

#[test]
fn watching_ends_when_the_token_is_removed() {
    let running = Running::server(1);
    running.program.settings().admin.loopback = AdminAccess::None;
    assert_eq!(Events::open(&running, "", &[]).status(), "401");
    let bearer = format!("Bearer {READ}");
    let mut events = Events::open(&running, "", &[("Authorization", &bearer)]);
    assert_eq!(events.next().unwrap().0, "history");
    assert_eq!(events.next().unwrap().0, "live");
    running.program.settings().admin.read_tokens.clear();
    while events.next().is_some() {}
    let mut rest = Vec::new();
    events.reader.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
}

#[test]
fn access_response_shows_whether_changes_are_allowed() {
    let running = Running::server(1);
    let asked = |token: Option<&str>| {
        let bearer = token.map(|token| format!("Bearer {token}"));
        let headers: Vec<_> = bearer.iter().map(|bearer| ("Authorization", bearer.as_str())).collect();
        running.ask_tcp("GET", "/v1/access", &headers).ok()["may_change"].as_bool().unwrap()
    };
    assert_eq!([asked(None), asked(Some(READ)), asked(Some(FULL))], [false, false, true]);
    assert_eq!(running.get("/v1/access").ok(), json!({ "may_change": true }));
    running.program.settings().admin.loopback = AdminAccess::Full;
    assert!(asked(None) && asked(Some(READ)));
}

#[test]
fn refusals_can_be_filtered_by_client_and_user() {
    let running = Running::server(1);
    *running.program.refusals.lock().unwrap() = vec![
        refusal("192.0.2.9:50000", "1700000000:carol"),
        refusal("[2001:db8::9]:1", ""),
        refusal("198.51.100.1:1", "dave"),
    ];
    let clients = |query: &str| -> Vec<String> {
        let found = running.get(&format!("/v1/refusals{query}")).ok();
        let found = found["refusals"].as_array().unwrap().iter();
        found.map(|it| it["client"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(clients("").len(), 3);
    for (query, found) in [
        ("?client=192.0.2.9", &["192.0.2.9:50000"][..]),
        ("?client=192.0.2.9:1234", &["192.0.2.9:50000"]),
        ("?client=192.0.2.0/24", &["192.0.2.9:50000"]),
        ("?client=2001:db8::/32", &["[2001:db8::9]:1"]),
        ("?user=carol", &["192.0.2.9:50000"]),
        ("?user=carol&client=198.51.100.1", &[]),
        ("?limit=1", &["192.0.2.9:50000"]),
    ] {
        assert_eq!(clients(query), found, "{query}");
    }
    let told = running.get("/v1/refusals?user=carol").ok()["refusals"][0].clone();
    assert_eq!(
        told,
        json!({
            "first_at": "2026-01-02T02:46:40Z", "last_at": "2026-01-02T03:00:00.123Z", "count": 3, "client": "192.0.2.9:50000",
            "user": "1700000000:carol", "realm": null, "asked": "credentials", "code": 401, "reason": "wrong key",
            "remedy": "Use the right one.", "keys": ["auth.users"], "others": 1, "other_users": ["dave"], "other_peers": [],
        })
    );
    assert_eq!(running.get("/v1/refusals?client=2001:db8::9").ok()["refusals"][0]["user"], json!(null));
    for bad in ["?client=carol", "?client=192.0.2.9/24", "?limit=0", "?limit=1001", "?whom=x"] {
        assert_eq!(running.get(&format!("/v1/refusals{bad}")).problem(400), "bad_request", "{bad}");
    }
}

#[test]
fn missing_relay_addresses_affect_readiness() {
    let running = Running::server(1);
    let readiness = |path: &str, up: &[bool]| {
        let states = (1_u8..).zip(up).map(|(n, up)| relay_state([127, 0, 0, n].into(), *up));
        *running.program.relays.lock().unwrap() = states.collect();
        let answer = running.get(path);
        (answer.status, answer.body)
    };
    let line = |n: u8, state: &str| format!("relay address 127.0.0.{n} {state} since 1970-01-01T00:00:00Z\n");
    assert_eq!(readiness("/readyz", &[true]), (200, "ok\n".to_owned()));
    assert_eq!(readiness("/readyz?verbose", &[true]), (200, format!("ok\n{}", line(1, "up"))));
    let both = format!("waiting\n{}{}", line(1, "up"), line(2, "absent"));
    assert_eq!(readiness("/readyz", &[true, false]), (200, both));
    assert_eq!(readiness("/healthz", &[false]), (503, format!("waiting\n{}", line(1, "absent"))));
}

#[test]
fn forwarder_live_data_lists_its_rules() {
    let running = Running::start(None, |_, _| {});
    *running.program.rules.lock().unwrap() = vec![RuleStatus {
        name: "web".to_owned(),
        open: 3,
        ends: vec![("denied", 2), ("idle", 0)],
        ..RuleStatus::default()
    }];
    let live = eventually("the rules are read", || {
        let live = running.get("/v1/live").ok();
        live.get("rules").is_some().then_some(live)
    });
    assert!(live.get("server").is_none(), "{live}");
    let readiness = |states: &[RuleState]| {
        let rule = |state: &RuleState| RuleStatus { state: *state, ..RuleStatus::default() };
        *running.program.rules.lock().unwrap() = states.iter().map(rule).collect();
        let answer = running.get("/readyz");
        (answer.status, answer.body.trim().to_owned())
    };
    use RuleState::{Closed, Listening, Waiting};
    assert_eq!(readiness(&[Listening, Closed]), (200, "ok".to_owned()));
    assert_eq!(readiness(&[Listening, Waiting]), (200, "waiting".to_owned()));
    assert_eq!(readiness(&[Closed, Waiting]), (503, "waiting".to_owned()));
    let rule = &live["rules"][0];
    assert_eq!((&rule["name"], &rule["open"]), (&json!("web"), &json!(3)));
    assert_eq!(
        rule["ends"],
        json!([{ "kind": "end", "reason": "denied", "total": 2, "rate": rule["ends"][0]["rate"] }])
    );
}
