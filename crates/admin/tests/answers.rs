//! Each path responds as documented, with correct data.

use crate::prelude::*;
use jsonschema::Validator;

use crate::support::{certificates_in, examples::Examples};

const ENDLESS: [&str; 3] = ["/v1/live/events", "/v1/events", "/v1/allocations/{id}/capture"];

struct Document(Value);

impl Document {
    fn of(running: &Running) -> Self {
        Self(running.get("/openapi.json").ok())
    }

    #[track_caller]
    fn check(&self, method: &str, path: &str, answer: &Answer) {
        let operation = &self.0["paths"][path][method.to_ascii_lowercase()];
        assert!(operation.is_object(), "{method} {path} is not described");
        let responses = &operation["responses"];
        let named = &responses[answer.status.to_string()];
        let shared = named["$ref"].as_str().and_then(|place| self.0.pointer(place.trim_start_matches('#')));
        let response = shared.unwrap_or(named);
        assert!(response.is_object(), "{method} {path}: {} is not described", answer.status);
        if answer.status == 204 {
            return;
        }
        let media = answer.header("content-type").split(';').next().unwrap().trim();
        let schema = &response["content"][media]["schema"];
        assert!(schema.is_object(), "{method} {path}: {media} is not described: {response}");
        if media.ends_with("json") {
            let found = answer.json();
            let errors: Vec<String> =
                self.validator(schema).iter_errors(&found).map(|e| e.to_string()).collect();
            assert!(errors.is_empty(), "{method} {path}: {errors:?} in {found}");
        }
    }

    /// Strict: undocumented fields are errors.
    fn validator(&self, schema: &Value) -> Validator {
        let mut components = self.0["components"].clone();
        for schema in components["schemas"].as_object_mut().expect("schemas").values_mut() {
            if schema["type"] == "object" {
                schema["additionalProperties"] = json!(false);
            }
        }
        let mut whole = schema.clone();
        whole["components"] = components;
        jsonschema::validator_for(&whole).expect("a schema")
    }
}

fn configured(running: &Running) {
    let mut settings = running.program.settings();
    let user = |name: &str| ConfiguredUser {
        name: name.to_owned(),
        secret: UserSecret::Password(Secret::new("hunter2hunter2")),
    };
    settings.auth.users = vec![user("alice"), user("bob")];
    settings.auth.secrets = vec![Secret::new("hunter3hunter3")];
    settings.oauth.keys = vec![TokenKeySettings {
        kid: "east".to_owned(),
        key: TokenKey::A256Gcm([7; 32]),
        max_lifetime: 300,
        realm: None,
    }];
    settings.rates.bits_per_second_per_allocation = Some(1_000_000);
    settings.max_allocation_duration = Some(86_400);
    settings.realms = vec![RealmSettings {
        name: "tenant.example".to_owned(),
        users: vec![user("carol")],
        server_names: vec!["turn.tenant.example".to_owned()],
        allocations: Some(5),
        bits_per_second: Some(Some(3_000_000)),
        max_allocation_duration: Some(None),
        relay_ports: Some(50_000..=50_999),
        ..RealmSettings::default()
    }];
}

#[test]
fn every_path_answers_as_described() {
    let together = Together::default();
    let running = Running::node(&together, "one", 2);
    let other = Running::node(&together, "two", 1);
    let _far = other.allocated();
    let of_other = other.get("/v1/allocations").ok()["allocations"][0]["id"].as_str().unwrap().to_owned();
    configured(&running);
    let certificate = Certificate::new(&["turn.example.org"]);
    let (cert, key) =
        (running.dir.file("cert.pem", &certificate.pem), running.dir.file("key.pem", &certificate.key));
    *running.program.certificates.lock().unwrap() = certificates_in(&cert, &key);
    let _client = running.allocated();
    running.program.refusals.lock().unwrap().push(crate::live::refusal("192.0.2.9:50000", "carol"));
    let document = Document::of(&running);
    let id = running.get("/v1/allocations").ok()["allocations"][0]["id"].as_str().unwrap().to_owned();
    let mut asked = BTreeSet::new();
    let mut examples = Examples::read();
    let mut compared = BTreeSet::new();
    let mut ask = |method: &str, path: &str, body: Option<&str>, status: u16| {
        let name = if path.contains("realms") { "blue.example" } else { "dora" };
        let (path, query) = path.split_once('?').map_or((path, ""), |(path, query)| (path, query));
        let real = path
            .replace("{id}", &id)
            .replace("{name}", name)
            .replace("{fingerprint}", "dc365e79d41cfae1")
            .replace("{node}", "two")
            .replace("{key}", "shop")
            .replace("{sid}", "AC0123456789abcdef0123456789abcdef")
            // Expired long ago, so there is nothing to ban.
            .replace("{username}", "1700000000:alice")
            .replace(
                "{path}",
                &if method == "GET" { "status".to_owned() } else { format!("allocations/{of_other}") },
            );
        let real = if query.is_empty() { real } else { format!("{real}?{query}") };
        let answer = running.ask(method, &real, body);
        assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
        document.check(method, path, &answer);
        let method = method.to_ascii_lowercase();
        let operation = document.0["paths"][path][&method]["operationId"].as_str().unwrap();
        if answer.status != 204
            && !answer.header("content-type").starts_with("application/problem+json")
            && compared.insert(format!("{operation} {status} {}", answer.header("content-type")))
        {
            examples.compare(operation, &answer);
        }
        asked.insert(format!("{method} {path}"));
    };
    for path in [
        "/",
        "/livez",
        "/readyz",
        "/healthz",
        "/metrics",
        "/openapi.json",
        "/v1/status",
        "/v1/build",
        "/v1/config",
        "/v1/log",
        "/v1/allocations",
        "/v1/allocations/{id}",
        "/v1/limits",
        "/v1/listeners",
        "/v1/certificates",
        "/v1/workers",
        "/v1/access",
        "/v1/live",
        "/v1/live/history",
        "/v1/refusals",
        "/v1/fleet",
        "/v1/fleet/allocations",
        "/v1/fleet/nodes/{node}/v1/{path}",
        "/v1/bans",
    ] {
        ask("GET", path, None, 200);
    }
    ask("GET", "/v1/usage", None, 404);
    crate::usage::record(&running, &[("alice", "", 18_200_000)]);
    ask("GET", &format!("/v1/usage?{}", crate::usage::PERIOD), None, 200);
    ask("POST", "/v1/fleet/nodes/{node}/drain", None, 202);
    ask("POST", "/v1/fleet/nodes/{node}/uncordon", None, 202);
    ask("DELETE", "/v1/fleet/nodes/{node}/v1/{path}", None, 200);
    ask("DELETE", "/v1/fleet/nodes/{node}/v1/{path}", None, 404);
    ask("POST", "/v1/bans", Some("{\"user\":\"mallory\",\"seconds\":60,\"reason\":\"abuse\"}"), 202);
    ask("DELETE", "/v1/bans?user=mallory", None, 202);
    ask("POST", "/v1/bans", Some("{\"user\":\"dora\",\"seconds\":60}"), 201);
    ask("GET", "/v1/bans", None, 200);
    ask("DELETE", "/v1/bans?user=dora", None, 200);
    ask("DELETE", "/v1/bans?user=dora", None, 404);
    for (path, name, body) in [
        ("/v1/users", "/v1/users/{name}", "{\"name\":\"dora\",\"password\":\"hunter4hunter4\"}"),
        ("/v1/secrets", "/v1/secrets/{fingerprint}", "{\"secret\":\"north\"}"),
        (
            "/v1/realms",
            "/v1/realms/{name}",
            "{\"name\":\"blue.example\",\"max_allocations\":7,\"bits_per_second_per_allocation\":64000}",
        ),
    ] {
        ask("POST", path, Some(body), 201);
        ask("POST", path, Some(body), 200);
        ask("POST", path, Some("{}"), 400);
        ask("GET", path, None, 200);
        ask("DELETE", name, None, 200);
        ask("DELETE", name, None, 404);
    }
    ask("GET", "/?service=turn&username=alice", None, 200);
    ask("GET", "/?service=stun", None, 400);
    ask("POST", "/?service=turn&username=alice", None, 200);
    ask("POST", "/", None, 400);
    ask("POST", "/v1/credentials", Some("{\"user\":\"alice\",\"ttl\":600}"), 200);
    ask("POST", "/v1/credentials", Some("{\"kid\":\"east\"}"), 200);
    ask("POST", "/v1/credentials", Some("{\"ttl\":0}"), 400);
    ask("POST", "/v1/credentials", Some("{\"realm\":\"tenant.example\"}"), 409);
    let keys = "/v1/turn/keys/{key}/credentials";
    let wanted = "{\"ttl\":86400,\"customIdentifier\":\"alice\"}";
    ask("POST", &format!("{keys}/generate-ice-servers"), Some(wanted), 201);
    ask("POST", &format!("{keys}/generate"), Some(wanted), 201);
    ask("POST", &format!("{keys}/generate"), Some("{\"ttl\":0}"), 400);
    ask("POST", &format!("{keys}/{{username}}/revoke"), None, 204);
    ask("POST", "/2010-04-01/Accounts/{sid}/Tokens.json", None, 201);
    ask("POST", "/v1/secrets/rotation", None, 200);
    ask("POST", "/v1/secrets/rotation", Some("{\"overlap_s\":5}"), 200);
    ask("POST", "/v1/secrets/rotation", Some("{\"realm\":\"\"}"), 400);
    ask("GET", "/v1/secrets", None, 200);
    let key = format!("{{\"name\":\"dora\",\"sha256\":\"{}\"}}", "ab".repeat(32));
    ask("POST", "/v1/keys", Some(&key), 201);
    ask("POST", "/v1/keys", Some(&key), 409);
    ask("GET", "/v1/keys", None, 200);
    ask("DELETE", "/v1/keys/{name}", None, 200);
    ask("DELETE", "/v1/keys/{name}", None, 404);
    ask("PUT", "/v1/log", Some("{\"level\":\"debug\"}"), 200);
    ask("PUT", "/v1/log", Some("{\"level\":\"deb\"}"), 400);
    ask("POST", "/v1/reload", None, 200);
    ask("DELETE", "/v1/allocations/{id}", None, 200);
    ask("DELETE", "/v1/allocations/{id}", None, 404);
    ask("GET", "/v1/allocations/{id}", None, 404);
    *running.program.reload.lock().unwrap() = Err(NotReloaded::Refused(vec!["line 1".to_owned()]));
    ask("POST", "/v1/reload", None, 422);
    ask("POST", "/v1/drain", None, 202);
    ask("GET", "/readyz", None, 503);
    ask("GET", "/healthz", None, 503);
    let described = document.0["paths"].as_object().unwrap().iter();
    let described = described.flat_map(|(path, item)| {
        item.as_object().unwrap().keys().map(move |method| format!("{method} {path}"))
    });
    // Endless responses: see the modules `live`, `events` and `capture`.
    asked.extend(ENDLESS.map(|path| format!("get {path}")));
    assert_eq!(described.collect::<BTreeSet<_>>(), asked, "all documented operations were tested");
}

#[test]
fn responses_match_the_real_state() {
    let running = Running::server(2);
    configured(&running);
    let clients: Vec<_> = (0..6).map(|_| running.allocated()).collect();
    let status = running.get("/v1/status").ok();
    assert_eq!(
        (&status["job"], &status["draining"], &status["open"]),
        (&json!("serve"), &json!(false), &json!(7))
    );
    assert_eq!(status["pid"], std::process::id());
    assert_eq!(status["datapath"], json!({ "step": "gso", "why": "as configured" }));
    assert_eq!(running.get("/v1/build").ok()["version"], env!("CARGO_PKG_VERSION"));

    let users = running.get("/v1/users").ok();
    assert_eq!(users["users"][0]["name"], "alice");
    let counts = ["with_allocations", "configured", "secrets", "token_keys"].map(|key| users[key].as_u64());
    assert_eq!(counts, [1, 3, 1, 1].map(Some));
    let realms = running.get("/v1/realms").ok();
    assert_eq!(realms["realms"][0]["name"], "turnpike");
    assert_eq!(
        (&realms["realms"][0]["users"], &realms["realms"][0]["max_allocations"]),
        (&json!(2), &json!(null))
    );
    assert_eq!(
        realms["realms"][1],
        json!({
            "name": "tenant.example", "allocations": 0, "max_allocations": 5, "max_allocations_per_user": 1024,
            "bits_per_second": 3_000_000, "bits_per_second_per_user": null, "bits_per_second_per_allocation": 1_000_000,
            "max_allocation_duration": null, "relay_ports": "50000-50999",
            "users": 1, "secrets": 0, "listen": [], "server_names": ["turn.tenant.example"],
        })
    );
    let limits = running.get("/v1/limits").ok();
    let limit = |key: &str| {
        let all = limits["limits"].as_array().unwrap();
        all.iter().find(|limit| limit["key"] == key).unwrap_or_else(|| panic!("no {key}")).clone()
    };
    assert_eq!(limit("limits.allocations")["most"], 16_384);
    assert_eq!(limit("limits.bits_per_second_per_allocation")["most"], 1_000_000);
    assert_eq!(limit("limits.bits_per_second")["most"], json!(null), "no limit");
    let config = running.get("/v1/config").body;
    let (_, section) = config.split_once("\n[limits]\n").expect("a section");
    let keys = section.split("\n\n").next().unwrap().lines().filter_map(|line| line.split_once(" = "));
    let keys = keys.filter(|(_, value)| !value.starts_with("true") && !value.starts_with("false"));
    let keys: BTreeSet<String> = keys.map(|(key, _)| format!("limits.{key}")).collect();
    let told: BTreeSet<String> = limits["limits"]
        .as_array()
        .unwrap()
        .iter()
        .map(|limit| limit["key"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(told, keys, "all limits");
    assert_eq!(
        limit("limits.max_lifetime"),
        json!({ "key": "limits.max_lifetime", "most": 3600, "used": null })
    );
    let listeners = running.get("/v1/listeners").ok();
    let udp = running.relay().listeners().udp[0].to_string();
    let nothing = json!({ "datagrams": 0, "bytes": 0 });
    assert_eq!(
        listeners["listeners"],
        json!([{
            "transport": "udp",
            "address": udp,
            "closing": false,
            "allocations": 6,
            "to_peer": nothing,
            "to_client": nothing,
        }])
    );
    assert_eq!(
        listeners["relays"],
        json!([{
            "address": "127.0.0.1",
            "external": "192.0.2.1",
            "first_port": 49_152,
            "last_port": 65_535,
            "up": true,
            "since": "1970-01-01T00:00:00Z",
        }])
    );
    assert_eq!(running.get("/v1/status").ok()["relays"], listeners["relays"]);
    let workers = turnpike_testkit::eventually("the workers have counted", || {
        let workers = running.get("/v1/workers").ok()["workers"].clone();
        let sum = |key: &str| {
            workers.as_array().unwrap().iter().map(|worker| worker[key].as_u64().unwrap()).sum::<u64>()
        };
        (sum("allocations") == 6 && sum("received") >= 6 && sum("sent") >= 6).then_some(workers)
    });
    for (number, worker) in workers.as_array().unwrap().iter().enumerate() {
        assert_eq!(worker["number"], number);
        assert!(worker["event_loop_us"].as_u64().is_some(), "{worker}");
        assert!(worker["load"].as_f64().is_some_and(|load| (0.0..=1.0).contains(&load)), "{worker}");
    }
    drop(clients);
}

#[test]
fn no_response_contains_a_secret() {
    let running = Running::server(1);
    configured(&running);
    for (path, body) in [
        ("/v1/users", "{\"name\":\"dora\",\"password\":\"hunter4hunter4\"}"),
        ("/v1/secrets", "{\"secret\":\"northnorth\"}"),
    ] {
        let answer = running.ask("POST", path, Some(body));
        assert_eq!(answer.status, 201, "{answer:?}");
        assert!(!answer.body.contains("hunter") && !answer.body.contains("north"), "{answer:?}");
    }
    let _client = running.allocated();
    let paths = running.get("/openapi.json").ok()["paths"].clone();
    for path in paths.as_object().unwrap().keys().filter(|path| !ENDLESS.contains(&path.as_str())) {
        let body = running.get(path).body;
        for secret in ["hunter", "north", crate::support::FULL, crate::support::READ] {
            assert!(!body.contains(secret), "{path}: {body}");
        }
    }
    let config = running.get("/v1/config");
    assert_eq!(config.header("content-type"), "application/toml");
    assert!(config.body.contains("read_tokens = [\"***\"] # default"), "{}", config.body);
}

#[test]
fn certificates_are_listed_with_names_and_expiry() {
    let running = Running::server(1);
    assert_eq!(running.get("/v1/certificates").ok(), json!({ "certificates": [], "orders": [] }));
    let certificate = Certificate::new(&["turn.example.org", "b.example.org"]);
    let (cert, key) =
        (running.dir.file("cert.pem", &certificate.pem), running.dir.file("key.pem", &certificate.key));
    *running.program.certificates.lock().unwrap() = certificates_in(&cert, &key);
    let told = running.get("/v1/certificates").ok()["certificates"][0].clone();
    assert_eq!(told["file"], cert.display().to_string());
    assert_eq!(told["names"], json!(["turn.example.org", "b.example.org"]));
    assert_eq!(told["dtls"], true);
    assert!(told["not_after"].as_str().unwrap().ends_with('Z'), "{told}");
    assert!(told["expires_in_s"].as_i64().unwrap() > 0, "{told}");
}

#[test]
fn reload_response_lists_changes_or_errors() {
    let running = Running::server(1);
    let lines = |text: &str| vec![text.to_owned()];
    *running.program.reload.lock().unwrap() = Ok(Reloaded {
        changed: lines("auth.users: 1 added"),
        after_restart: lines("server.workers"),
        warnings: lines("a doubt"),
    });
    assert_eq!(
        running.ask("POST", "/v1/reload", None).ok(),
        json!({ "changed": ["auth.users: 1 added"], "after_restart": ["server.workers"], "warnings": ["a doubt"] })
    );
    *running.program.reload.lock().unwrap() = Err(NotReloaded::Refused(lines("turnpike.toml:2:1: no")));
    let answer = running.ask("POST", "/v1/reload", None);
    assert_eq!(answer.problem(422), "wrong_configuration");
    assert_eq!(answer.json()["errors"], json!(["turnpike.toml:2:1: no"]));
    *running.program.reload.lock().unwrap() = Err(NotReloaded::Draining);
    assert_eq!(running.ask("POST", "/v1/reload", None).problem(409), "draining");
}

#[test]
fn limits_of_a_drain_are_optional() {
    let running = Running::server(1);
    let drain = |body: Option<&str>| running.ask("POST", "/v1/drain", body);
    for (body, left) in [
        (None, 30.0),
        (Some("{}"), 30.0),
        (Some("{\"deadline_s\":5}"), 5.0),
        (Some("{\"deadline_s\":0,\"until\":9}"), 0.0),
    ] {
        let answer = drain(body);
        assert_eq!(
            (answer.status, answer.json()),
            (202, json!({ "open": 7, "deadline_s": left })),
            "{body:?}"
        );
    }
    let asked = [(None, None), (None, None), (Some(5), None), (Some(0), Some(9))];
    let asked = asked.map(|(deadline_s, until)| Drain { deadline_s, until });
    assert_eq!(*running.program.drained.lock().unwrap(), asked);
    for bad in [
        "{\"deadline_s\":86401}",
        "{\"deadline_s\":-1}",
        "{\"deadline_s\":\"5\"}",
        "{\"until\":-1}",
        "{\"deadline\":5}",
        "[5]",
        "5",
    ] {
        assert_eq!(drain(Some(bad)).problem(400), "bad_request", "{bad}");
    }
    running.program.ended.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(drain(None).problem(503), "stopping");
}

#[test]
fn log_level_changes_only_to_a_valid_one() {
    let running = Running::server(1);
    let set = |body: &str| running.ask("PUT", "/v1/log", Some(body));
    assert_eq!(running.get("/v1/log").ok(), json!({ "level": "info" }));
    assert_eq!(set("{\"level\":\"warn,turnpike_relay=debug\"}").ok()["level"], "warn,turnpike_relay=debug");
    assert_eq!(running.get("/v1/log").ok()["level"], "warn,turnpike_relay=debug");
    for bad in ["{\"level\":\"loud\"}", "{}", "{\"level\":5}", "", "{\"level\":\"info\",\"more\":1}"] {
        assert_eq!(set(bad).problem(400), "bad_request", "{bad}");
    }
    assert_eq!(running.get("/v1/log").ok()["level"], "warn,turnpike_relay=debug");
}

#[test]
fn metrics_include_the_interface_counters() {
    let running = Running::server(1);
    let count = |text: &str, series: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.unwrap_or_else(|| panic!("no {series} in {text}")).trim().parse().unwrap()
    };
    let open_metrics = (
        "Accept",
        "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    );
    let answer = running.get_with("/metrics", open_metrics);
    assert!(answer.header("content-type").starts_with("application/openmetrics-text; version=1.0.0"));
    let text = answer.body;
    assert!(text.starts_with("# TYPE turnpike_draining gauge\nturnpike_draining 0.0\n"), "{text}");
    assert!(text.ends_with("\n# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
    for family in ["admin_connections_closed", "admin_requests", "admin_wrong_tokens"] {
        assert_eq!(text.matches(&format!("# TYPE turnpike_{family} counter\n")).count(), 1, "{text}");
    }
    let refused = "turnpike_admin_requests_total{result=\"refused\"}";
    let before = count(&text, refused);
    running.get("/nowhere").problem(404);
    let answer = running.get("/metrics");
    assert!(answer.header("content-type").starts_with("text/plain; version=0.0.4"));
    assert!(count(&answer.body, refused) > before);
    assert!(answer.body.contains("# TYPE turnpike_admin_requests_total counter\n"), "{}", answer.body);
    assert!(!answer.body.contains("# EOF"), "{}", answer.body);
}

#[test]
fn forwarder_answers_every_path_except_those_of_a_turn_server() {
    let running = Running::start(None, |_, _| {});
    for path in [
        "allocations",
        "allocations/00000000000000000000000000000000",
        "users",
        "realms",
        "limits",
        "listeners",
        "workers",
        "refusals",
    ] {
        assert_eq!(running.get(&format!("/v1/{path}")).problem(404), "no_server", "{path}");
    }
    let status = running.get("/v1/status").ok();
    assert_eq!((&status["job"], status.get("datapath")), (&json!("forward"), None));
    for path in ["/livez", "/metrics", "/v1/build", "/v1/log", "/v1/config"] {
        assert_eq!(running.get(path).status, 200, "{path}");
    }
    assert_eq!(running.ask("POST", "/v1/reload", None).status, 200);
}

#[test]
fn stopped_server_is_reported() {
    let running = Running::server(1);
    running.program.ended.store(true, std::sync::atomic::Ordering::Relaxed);
    for path in ["allocations", "allocations/00000000000000000000000000000000", "users", "workers"] {
        assert_eq!(running.get(&format!("/v1/{path}")).problem(503), "stopping", "{path}");
    }
    assert_eq!(running.get("/livez").status, 200);
}
