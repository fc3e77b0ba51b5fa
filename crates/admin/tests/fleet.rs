//! A fleet of three nodes with an in-memory store: each node answers requests about all of them.

use crate::prelude::*;

use turnpike_api::FleetHealth;

fn three() -> (Together, [Running; 3]) {
    let together = Together::default();
    let nodes = ["a", "b", "c"].map(|name| Running::node(&together, name, 1));
    (together, nodes)
}

#[test]
fn allocations_of_all_nodes_are_listed_exactly_once() {
    let (_, nodes) = three();
    let mut clients = Vec::new();
    let mut wanted = BTreeMap::new();
    for (node, name, count) in [(&nodes[0], "a", 3), (&nodes[2], "c", 4)] {
        for _ in 0..count {
            let (client, relayed) = node.allocated();
            wanted.insert(relayed.to_string(), name.to_owned());
            clients.push(client);
        }
    }
    for (limit, asked) in [(1, &nodes[0]), (2, &nodes[1]), (3, &nodes[2]), (1000, &nodes[1])] {
        let mut found = BTreeMap::new();
        let mut cursor = String::new();
        loop {
            let page = asked.get(&format!("/v1/fleet/allocations?limit={limit}{cursor}")).ok();
            let allocations = page["allocations"].as_array().unwrap();
            assert!(allocations.len() <= limit && page.get("silent").is_none(), "{page}");
            for allocation in allocations {
                let relayed = allocation["relayed"][0]["address"].as_str().unwrap().to_owned();
                let node = allocation["node"].as_str().unwrap().to_owned();
                assert_eq!(found.insert(relayed, node), None, "{allocation} twice");
            }
            match page["next"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        assert_eq!(found, wanted, "limit {limit}");
    }
    let of_one = nodes[0].get("/v1/fleet/allocations?client=10.0.0.0/8").ok();
    assert_eq!(of_one["allocations"], json!([]));
}

#[test]
fn silent_node_is_named_and_the_others_are_listed() {
    let (together, nodes) = three();
    let _client = nodes[2].allocated();
    together.silence("b");
    let page = nodes[0].get("/v1/fleet/allocations").ok();
    assert_eq!(page["allocations"].as_array().unwrap().len(), 1);
    let silent = page["silent"][0].as_str().unwrap();
    assert!(silent.starts_with("b: "), "{silent}");
    let absent = nodes[0].get(&format!("/v1/allocations/{}", "0".repeat(32)));
    assert_eq!(absent.problem(404), "no_such_allocation");
    assert!(absent.body.contains("nodes that did not answer: 1"), "{absent:?}");
    assert_eq!(nodes[0].get("/v1/fleet/nodes/b/v1/status").problem(504), "node_silent");
    assert_eq!(nodes[0].get("/v1/fleet/nodes/x/v1/status").problem(404), "no_such_node");
}

#[test]
fn forwarded_response_equals_the_nodes_own() {
    let (_, nodes) = three();
    let config = nodes[0].get("/v1/fleet/nodes/b/v1/config");
    assert_eq!((config.status, config.header("content-type")), (200, "application/toml"));
    assert_eq!(config.body, nodes[1].get("/v1/config").body);
    let problem = nodes[0].get("/v1/fleet/nodes/b/v1/allocations?limit=0").problem(400);
    assert_eq!(problem, nodes[1].get("/v1/allocations?limit=0").problem(400));
    // A stream is endless, but a response from another node must end.
    assert_eq!(nodes[0].get("/v1/fleet/nodes/b/v1/live/events").problem(404), "no_events");
}

#[test]
fn a_forwarded_refusal_keeps_the_headers_of_its_status() {
    let (_, nodes) = three();
    let relayed = nodes[0].get("/v1/fleet/nodes/b/v1/reload");
    assert_eq!(relayed.problem(405), "no_such_method");
    assert_eq!((relayed.header("allow"), nodes[1].get("/v1/reload").header("allow")), ("POST", "POST"));
}

#[test]
fn only_allocations_can_be_deleted_through_another_node() {
    let (_, nodes) = three();
    let user = "{\"name\":\"alice\",\"password\":\"pw\"}";
    assert_eq!(nodes[1].ask("POST", "/v1/users", Some(user)).status, 201);
    for path in ["users/alice", "keys/shop", "secrets/0123456789abcdef", "realms/x", "bans?user=alice"] {
        let answer = nodes[0].ask("DELETE", &format!("/v1/fleet/nodes/b/v1/{path}"), None);
        assert_eq!(answer.problem(405), "no_such_method", "{path}");
    }
    assert_eq!(nodes[1].get("/v1/users").ok()["users"][0]["name"], "alice");
}

fn allocation_of(node: &Running) -> String {
    node.get("/v1/allocations").ok()["allocations"][0]["id"].as_str().unwrap().to_owned()
}

#[test]
fn allocation_is_found_and_ended_on_any_node() {
    let (_, nodes) = three();
    let _client = nodes[2].allocated();
    let path = format!("/v1/allocations/{}", allocation_of(&nodes[2]));
    let seen = nodes[0].get(&path).ok();
    assert_eq!((&seen["node"], seen["permissions"].is_array()), (&json!("c"), true), "{seen}");
    assert_eq!(nodes[2].get(&path).ok().get("node"), None, "the node's own allocation");
    assert_eq!(nodes[1].ask("DELETE", &path, None).ok()["node"], "c");
    assert_eq!(nodes[2].get("/v1/allocations").ok()["allocations"], json!([]));
    assert_eq!(nodes[1].ask("DELETE", &path, None).problem(404), "no_such_allocation");
}

#[test]
fn forwarded_requests_keep_the_clients_access() {
    let (_, nodes) = three();
    let _client = nodes[1].allocated();
    let path = format!("/v1/fleet/nodes/b/v1/allocations/{}", allocation_of(&nodes[1]));
    let bearer = |token: &str| format!("Bearer {token}");
    let ask = |method: &str, path: &str, token: &str| {
        nodes[0].ask_tcp(method, path, &[("Authorization", &bearer(token))])
    };
    assert_eq!(ask("GET", &path, READ).status, 200);
    assert_eq!(ask("DELETE", &path, READ).problem(403), "read_only");
    // A request that needs full access on the other node also needs it on this one.
    let secrets = "/v1/fleet/nodes/b/v1/secrets";
    assert_eq!(ask("GET", secrets, READ).problem(403), "read_only");
    assert_eq!(nodes[0].ask_tcp("GET", secrets, &[]).problem(401), "no_token");
    assert_eq!(ask("GET", secrets, FULL).status, 200);
    log::keep();
    assert_eq!(ask("DELETE", &path, FULL).status, 200);
    let of_allocation = path.strip_prefix("/v1/fleet/nodes/b").unwrap();
    let by = format!("with token 1 of admin.tokens on node a\" request=\"DELETE {of_allocation}\"");
    assert_eq!(log::lines_with(&["turnpike::audit", &by]).len(), 1, "{by}");
    // A request from another node is not forwarded again.
    for path in ["/v1/fleet/nodes/b/v1/fleet/allocations", "/v1/fleet/nodes/b/v1/fleet/nodes/c/v1/status"] {
        assert_eq!(ask("GET", path, FULL).problem(400), "bad_request", "{path}");
    }
}

#[test]
fn node_can_be_drained_and_uncordoned() {
    let (_, nodes) = three();
    let order = |what: &str| nodes[0].ask("POST", &format!("/v1/fleet/nodes/b/{what}"), None);
    assert_eq!((order("drain").status, order("uncordon").status), (202, 202));
    assert_eq!(*nodes[0].member().told.lock().unwrap(), ["b drains: true", "b drains: false"]);
    let absent = nodes[0].ask("POST", "/v1/fleet/nodes/x/drain", None);
    assert_eq!(absent.problem(404), "no_such_node");
    let alone = Running::server(1);
    assert_eq!(alone.get("/v1/fleet").problem(404), "no_fleet");
    assert_eq!(alone.ask("POST", "/v1/fleet/nodes/b/drain", None).problem(404), "no_fleet");
    let forwarder = Running::start(None, |_, _| {});
    assert_eq!(forwarder.get("/v1/fleet").problem(404), "no_server");
}

#[test]
fn readiness_shows_isolated_and_drained_nodes() {
    let (_, nodes) = three();
    for (standing, status, text) in [
        (FleetHealth::Healthy, 200, "ok\n"),
        (FleetHealth::Isolated, 200, "alone\n"),
        (FleetHealth::Recovering, 200, "recovering\n"),
        (FleetHealth::Cordoned, 503, "draining\n"),
    ] {
        *nodes[0].member().health.lock().unwrap() = standing;
        let answer = nodes[0].get("/readyz");
        assert_eq!((answer.status, answer.body.as_str()), (status, text), "{standing:?}");
    }
}

#[test]
fn bans_can_be_set_listed_and_lifted() {
    let running = Running::server(1);
    let ban = |body: &str| running.ask("POST", "/v1/bans", Some(body));
    let made = ban("{\"user\":\"alice\",\"seconds\":3600,\"reason\":\"spam\"}");
    assert_eq!(made.status, 201, "{made:?}");
    let made = made.json();
    assert_eq!((&made["ban"]["user"], &made["ban"]["realm"]), (&json!("alice"), &json!("turnpike")));
    assert_eq!((&made["ended"], &made["ban"]["reason"]), (&json!(3), &json!("spam")));
    assert_eq!(ban("{\"client\":\"192.0.2.0/24\",\"seconds\":60}").status, 201);
    let bans = running.get("/v1/bans").ok();
    assert_eq!(bans["bans"].as_array().unwrap().len(), 2);
    assert_eq!(bans["bans"][1]["client"], "192.0.2.0/24");
    for bad in [
        "{\"seconds\":60}",
        "{\"user\":\"alice\"}",
        "{\"user\":\"alice\",\"client\":\"192.0.2.1\",\"seconds\":60}",
        "{\"client\":\"192.0.2.1\",\"realm\":\"here\",\"seconds\":60}",
        "{\"client\":\"192.0.2.1/24\",\"seconds\":60}",
        "{\"user\":\"\",\"seconds\":60}",
        "{\"user\":\"alice\",\"realm\":\"a@b\",\"seconds\":60}",
        "{\"user\":\"alice\",\"seconds\":60,\"reason\":\"a\\nb\"}",
    ] {
        assert_eq!(ban(bad).problem(400), "bad_request", "{bad}");
    }
    let end = |query: &str| running.ask("DELETE", &format!("/v1/bans?{query}"), None);
    assert_eq!(end("user=alice").ok()["bans"].as_array().unwrap().len(), 1);
    assert_eq!(end("user=alice").problem(404), "no_such_ban");
    assert_eq!(end("client=192.0.2.0%2F24").ok()["bans"], json!([]));
    assert_eq!(end("").problem(400), "bad_request");
}

#[test]
fn delayed_announcement_gets_202() {
    let running = Running::server(1);
    let made = running.ask("POST", "/v1/bans", Some("{\"user\":\"mallory\",\"seconds\":60}"));
    assert_eq!((made.status, &made.json()["announced"]), (202, &json!(false)), "{made:?}");
    for _ in 0..2 {
        let ended = running.ask("DELETE", "/v1/bans?user=mallory", None);
        let expected = json!({"bans": [], "announced": false});
        assert_eq!((ended.status, ended.json()), (202, expected), "it may be banned on other nodes");
    }
    let made = running.ask("POST", "/v1/bans", Some("{\"user\":\"alice\",\"seconds\":60}"));
    assert_eq!((made.status, &made.json()["announced"]), (201, &json!(true)));
}

#[test]
fn user_changes_are_announced_to_other_nodes() {
    let (_, nodes) = three();
    let change = |method: &str, path: &str, body: Option<&str>| {
        assert!(matches!(nodes[0].ask(method, path, body).status, 200 | 201), "{method} {path}");
    };
    change("POST", "/v1/users", Some("{\"name\":\"dora\",\"password\":\"hunter4hunter4\"}"));
    change("DELETE", "/v1/users/dora", None);
    change("POST", "/v1/secrets", Some("{\"secret\":\"north\"}"));
    change("DELETE", "/v1/secrets/dc365e79d41cfae1", None);
    change("POST", "/v1/realms", Some("{\"name\":\"blue.example\"}"));
    change("DELETE", "/v1/realms/blue.example", None);
    let user = "revoked dora of turnpike";
    assert_eq!(*nodes[0].member().told.lock().unwrap(), [user, user, "rules", "rules", "rules", "rules"]);
}

#[test]
fn fleet_commands_show_and_control_nodes() {
    let (together, nodes) = three();
    let _client = nodes[1].allocated();
    let client = Client::new(Some(Target::Unix(nodes[0].dir.path("a.sock"))), None).unwrap();
    let mut out = Vec::new();
    commands::show_fleet(&client, OutputFormat::Text(None), &mut out).unwrap();
    commands::order_node(&client, Some("b"), true, false, &mut out).unwrap();
    commands::order_node(&client, Some("b"), false, false, &mut out).unwrap();
    let text = String::from_utf8(std::mem::take(&mut out)).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "fleet turnpike in redis://h, as seen by node a");
    assert!(lines[1].starts_with("NODE ") && lines[3].starts_with("b "), "{text}");
    assert!(lines[3].contains("3 of 100") && lines[3].contains("8.00 Mbit/s"), "{text}");
    assert!(
        lines[5].starts_with("node b accepts no new clients") && lines[6] == "node b accepts clients again",
        "{text}"
    );
    commands::order_node(&client, None, false, false, &mut out).unwrap();
    assert_eq!(String::from_utf8(std::mem::take(&mut out)).unwrap(), "node a accepts clients again\n");
    *nodes[0].member().health.lock().unwrap() = FleetHealth::Recovering;
    commands::show_fleet(&client, OutputFormat::Text(None), &mut out).unwrap();
    let text = String::from_utf8(std::mem::take(&mut out)).unwrap();
    assert!(text.contains("\nthe store does not know the usage of all nodes yet; "), "{text}");
    together.silence("c");
    commands::list_fleet_allocations(
        &client,
        AllocationListFilter::default(),
        OutputFormat::Text(None),
        &mut out,
    )
    .unwrap();
    let text = String::from_utf8(std::mem::take(&mut out)).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("NODE ") && lines[1].starts_with("b "), "{text}");
    assert!(lines[2].starts_with("missing: c: "), "{text}");
    commands::list_fleet_allocations(&client, AllocationListFilter::default(), OutputFormat::Json, &mut out)
        .unwrap();
    let array: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!((array.as_array().unwrap().len(), &array[0]["node"]), (1, &json!("b")));
    assert!(commands::order_node(&client, Some("x/y"), true, false, &mut out).is_err());
}
