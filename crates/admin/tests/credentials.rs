//! Credentials for applications: responses, refusals with reasons, and access for web pages by origin.

use crate::prelude::*;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use turnpike_config::restapi_credentials;
use turnpike_turn::access_token::AccessToken;

const SECRET: &str = "north";

fn running() -> Running {
    let running = Running::server(1);
    let mut settings = running.program.settings();
    settings.auth.secrets = vec![Secret::new(SECRET)];
    settings.realms = vec![RealmSettings {
        name: "tenant.example".to_owned(),
        secrets: vec![Secret::new("south")],
        ..RealmSettings::default()
    }];
    settings.oauth.keys = vec![TokenKeySettings {
        kid: "east".to_owned(),
        key: TokenKey::A256Gcm([7; 32]),
        max_lifetime: 300,
        realm: None,
    }];
    settings.oauth.server_name = "turn.example.org".to_owned();
    drop(settings);
    running
}

fn bearer(key: &str) -> String {
    format!("Bearer {key}")
}

fn ask(running: &Running, key: &str, body: &Value) -> Answer {
    let authorization = bearer(key);
    let headers = [("Authorization", authorization.as_str())];
    running.apply("POST", "/v1/credentials", &headers, Some(&body.to_string()))
}

fn fits(username: &str, password: &Value, secret: &str) -> bool {
    restapi_credentials::password(&Secret::new(secret), username).reveal() == password
}

fn parts(username: &str) -> (u64, &str) {
    restapi_credentials::parse(username).unwrap_or_else(|| panic!("{username} contains no time"))
}

fn uris(running: &Running) -> Value {
    // The stub's external relay address.
    let port = running.relay().listeners().udp[0].port();
    json!([format!("turn:192.0.2.1:{port}?transport=udp")])
}

#[test]
fn application_gets_an_rtc_configuration() {
    let running = running();
    let key = running.key("shop", json!({}));
    let told = ask(&running, &key, &json!({ "user": "alice", "ttl": 600 })).ok();
    let [server] = &told["iceServers"].as_array().unwrap()[..] else { panic!("{told}") };
    assert_eq!(server["urls"], uris(&running));
    let username = server["username"].as_str().unwrap();
    let (expiry, id) = parts(username);
    assert_eq!(id, "alice");
    assert!(fits(username, &server["credential"], SECRET), "{told}");
    assert!(server.get("credentialType").is_none());
    assert_eq!((&told["realm"], &told["ttl"]), (&json!("turnpike"), &json!(600)));
    let end: jiff::Timestamp = told["expires_at"].as_str().unwrap().parse().unwrap();
    assert_eq!(end.as_second(), i64::try_from(expiry).unwrap());
    let left = end.as_second() - jiff::Timestamp::now().as_second();
    assert!((0..=600).contains(&left), "{left}");

    let bare = ask(&running, &key, &json!({})).ok();
    assert_eq!(bare["ttl"], 86_400);
    let ids = [&bare, &ask(&running, &key, &json!({})).ok()].map(|told| {
        let username = told["iceServers"][0]["username"].as_str().unwrap().to_owned();
        parts(&username).1.to_owned()
    });
    assert!(ids[0] != ids[1] && ids[0].len() == 16, "anonymous owners get different ids: {ids:?}");
    let nothing = running.apply("POST", "/v1/credentials", &[("Authorization", &bearer(&key))], None);
    assert_eq!(nothing.status, 200, "{nothing:?}");

    let tenant = ask(&running, &key, &json!({ "user": "bob", "realm": "tenant.example" })).ok();
    let server = &tenant["iceServers"][0];
    assert!(fits(server["username"].as_str().unwrap(), &server["credential"], "south"), "{tenant}");
}

#[test]
fn rest_api_draft_works_with_get_and_post() {
    let running = running();
    let key = running.key("shop", json!({}));
    let form = "application/x-www-form-urlencoded";
    let both = format!("/?service=turn&api={key}");
    for (method, path, headers, body) in [
        ("GET", format!("/?service=turn&username=alice&key={key}"), vec![], None),
        ("POST", format!("/?service=turn&username=alice&key={key}"), vec![], None),
        ("GET", "/?username=alice&service=turn".to_owned(), vec![("Authorization", bearer(&key))], None),
        (
            "POST",
            "/".to_owned(),
            vec![("Content-Type", form.to_owned())],
            Some(format!("service=turn&username=alice&key={key}")),
        ),
        // Janus sends the same parameters in both the URI and the body.
        ("POST", both.clone(), vec![("Content-Type", form.to_owned())], Some(both[2..].to_owned())),
    ] {
        let headers: Vec<(&str, &str)> =
            headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let told = running.apply(method, &path, &headers, body.as_deref()).ok();
        let username = told["username"].as_str().unwrap();
        assert!(fits(username, &told["password"], SECRET), "{method} {path}: {told}");
        assert!(
            body.is_some() && parts(username).1.len() == 16 || parts(username).1 == "alice",
            "{username}"
        );
        assert_eq!((&told["ttl"], &told["uris"]), (&json!(86_400), &uris(&running)));
        assert_eq!(told.as_object().unwrap().len(), 4, "{told}");
    }
    let more = format!("/?service=turn&username=b%20c&key={key}&ttl=60&realm=tenant.example");
    let told = running.apply("GET", &more, &[], None).ok();
    assert_eq!((parts(told["username"].as_str().unwrap()).1, &told["ttl"]), ("b c", &json!(60)));
    for (path, told) in [
        (format!("/?service=stun&key={key}"), "service must be turn"),
        (format!("/?key={key}"), "service must be turn"),
        (format!("/?service=turn&key={key}&usrname=a"), "usrname"),
        (format!("/?service=turn&key={key}&ttl=soon"), "ttl"),
        (format!("/?service=turn&key={key}&ttl=0"), "ttl must be"),
        (format!("/?service=turn&key={key}&api=other"), "two different values"),
    ] {
        let answer = running.apply("GET", &path, &[], None);
        assert_eq!(answer.problem(400), "bad_request", "{path}");
        assert!(answer.body.contains(told) && !answer.body.contains(&key), "{answer:?}");
    }
    let json = running.apply("POST", "/", &[], Some("{}"));
    assert_eq!(json.problem(415), "no_form");
    let differs = running.apply(
        "POST",
        &format!("/?service=turn&username=a&key={key}"),
        &[("Content-Type", form)],
        Some("username=b"),
    );
    assert_eq!(differs.problem(400), "bad_request");
}

#[test]
fn token_lifetime_is_limited_by_its_key() {
    let running = running();
    let key = running.key("shop", json!({}));
    let told = ask(&running, &key, &json!({ "kid": "east", "user": "alice" })).ok();
    let server = &told["iceServers"][0];
    assert_eq!((&server["username"], &server["credentialType"]), (&json!("east"), &json!("oauth")));
    let bytes = |name: &str| STANDARD.decode(server["credential"][name].as_str().unwrap()).unwrap();
    let token = AccessToken::open(&TokenKey::A256Gcm([7; 32]), "turn.example.org", &bytes("accessToken"));
    let token = token.expect("the token opens");
    assert_eq!((token.mac_key(), token.lifetime), (&bytes("macKey")[..], 300));
    assert_eq!((&told["ttl"], &server["urls"]), (&json!(300), &uris(&running)));
    for (body, code) in [
        (json!({ "kid": "west" }), "unknown_kid"),
        (json!({ "kid": "east", "realm": "tenant.example" }), "unknown_kid"),
        (json!({ "kid": "east", "ttl": 301 }), "bad_request"),
    ] {
        assert_eq!(ask(&running, &key, &body).problem(400), code, "{body}");
    }
}

#[test]
fn wrong_credential_request_is_explained() {
    let running = running();
    let key = running.key("shop", json!({}));
    let code = |status: u16, body: &str| {
        let authorization = bearer(&key);
        let answer =
            running.apply("POST", "/v1/credentials", &[("Authorization", &authorization)], Some(body));
        assert!(!answer.body.contains(&key), "{answer:?}");
        answer.problem(status)
    };
    for bad in [
        "{",
        "[]",
        "null",
        "\"alice\"",
        "{\"user\":5}",
        "{\"user\":\"\"}",
        "{\"user\":\"a\\u0000b\"}",
        "{\"user\":\"a\\nb\"}",
        "{\"ttl\":0}",
        "{\"ttl\":86401}",
        "{\"ttl\":-1}",
        "{\"ttl\":\"600\"}",
        "{\"ttl\":1.5}",
        "{\"ttl\":99999999999}",
        "{\"realm\":[]}",
        "{\"usr\":\"alice\"}",
        &format!("{{\"user\":\"{}\"}}", "x".repeat(257)),
    ] {
        assert_eq!(code(400, bad), "bad_request", "{bad}");
    }
    assert_eq!(code(400, "{\"realm\":\"nowhere\"}"), "unknown_realm");
    assert_eq!(code(413, &format!("{{\"user\":\"{}\"}}", "x".repeat(5000))), "body");
    let longest = format!("{{\"user\":\"{}\"}}", "x".repeat(256));
    assert_eq!(
        running.apply("POST", "/v1/credentials", &[("Authorization", &bearer(&key))], Some(&longest)).status,
        200
    );
    let plain = [("Authorization", bearer(&key)), ("Content-Type", "text/plain".to_owned())];
    let plain = plain.each_ref().map(|(name, value)| (*name, value.as_str()));
    assert_eq!(running.apply("POST", "/v1/credentials", &plain, Some("{}")).problem(415), "not_json");
    for (method, path) in [
        ("GET", "/v1/credentials"),
        ("GET", "/v1/allocations"),
        ("GET", "/metrics"),
        ("PUT", "/"),
        ("GET", "/v1"),
    ] {
        assert_eq!(running.apply(method, path, &[], None).problem(404), "no_such_path", "{method} {path}");
    }
    assert_eq!(running.apply("GET", "/livez", &[], None).status, 200);
}

#[test]
fn realm_without_a_secret_is_refused_with_the_remedy() {
    let running = Running::server(1);
    let key = running.key("shop", json!({}));
    let answer = ask(&running, &key, &json!({}));
    assert_eq!(answer.problem(409), "no_secret");
    assert!(answer.body.contains("turnpike secret rotate turnpike"), "{answer:?}");
    running.ask("POST", "/v1/secrets/rotation", None).ok();
    assert_eq!(ask(&running, &key, &json!({})).status, 200);
}

#[test]
fn missing_or_wrong_key_is_refused() {
    let running = running();
    let key = running.key("shop", json!({}));
    for (path, method) in [("/v1/credentials", "POST"), ("/?service=turn", "GET"), ("/", "POST")] {
        let answer = running.apply(method, path, &[], None);
        assert_eq!(answer.problem(401), "no_key", "{method} {path}");
        assert!(answer.header("www-authenticate").starts_with("Bearer "));
    }
    let counted = |reason: &str| refused(&running, reason);
    let before = counted("wrong_key");
    let other = turnpike_config::api_keys::make("shop", [7; 32]).reveal().to_owned();
    for wrong in
        ["zz", &key[..key.len() - 1], &format!("{key}x"), &key.to_uppercase(), &other, "tpk_gone.abc"]
    {
        let answer = ask(&running, wrong, &json!({}));
        assert_eq!(answer.problem(401), "wrong_key", "{wrong}");
        assert!(!answer.body.contains(wrong), "{answer:?}");
    }
    let by_query = running.apply("GET", "/?service=turn&key=x", &[], None);
    assert_eq!(by_query.problem(401), "wrong_key");
    assert!(counted("wrong_key") >= before + 7);
    for malformed in ["Bearer", "Basic YTpi", &key, ""] {
        let answer = running.apply("POST", "/v1/credentials", &[("Authorization", malformed)], Some("{}"));
        assert_eq!(answer.problem(400), "bad_request", "{malformed}");
    }
    // A token of the admin interface is not a key, and a key is not a token.
    assert_eq!(ask(&running, crate::support::FULL, &json!({})).problem(401), "wrong_key");
    let authorization = bearer(&key);
    let status = running.ask_tcp("GET", "/v1/status", &[("Authorization", &authorization)]);
    assert_eq!(status.problem(401), "wrong_token");
    assert!(status.body.contains("credentials.listen"), "{status:?}");
    running.ask("DELETE", "/v1/keys/shop", None).ok();
    assert_eq!(ask(&running, &key, &json!({})).problem(401), "wrong_key", "removed immediately");
}

fn refused(running: &Running, reason: &str) -> u64 {
    let text = running.get("/metrics").body;
    let series = format!("turnpike_credentials_api_refused_total{{reason=\"{reason}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&series));
    line.unwrap_or_else(|| panic!("no {series} in {text}")).parse().unwrap()
}

#[test]
fn rate_limited_key_gets_retry_after_and_others_are_served() {
    let running = running();
    let (slow, fast) = (running.key("slow", json!({ "rate": 1 })), running.key("fast", json!({})));
    let before = refused(&running, "rate");
    let answer = (0..100).map(|_| ask(&running, &slow, &json!({}))).find(|answer| answer.status != 200);
    let answer = answer.expect("a second request");
    assert_eq!(answer.problem(429), "rate_exceeded");
    assert_eq!(answer.header("retry-after"), "1");
    assert!(refused(&running, "rate") > before);
    assert_eq!(ask(&running, &fast, &json!({})).status, 200);
    // Requests that are refused for another reason are counted too.
    running.program.settings().credentials.rate = 1;
    let answers = (0..100).map(|_| ask(&running, &fast, &json!({ "ttl": 0 })).status);
    assert!(answers.into_iter().any(|status| status == 429));
}

#[test]
fn key_is_limited_to_its_realm_and_ttl() {
    let running = running();
    let key = running.key("bound", json!({ "realm": "tenant.example", "max_ttl": 60 }));
    let told = ask(&running, &key, &json!({ "user": "alice" })).ok();
    assert_eq!((&told["realm"], &told["ttl"]), (&json!("tenant.example"), &json!(60)));
    let server = &told["iceServers"][0];
    assert!(fits(server["username"].as_str().unwrap(), &server["credential"], "south"), "{told}");
    assert_eq!(ask(&running, &key, &json!({ "ttl": 60 })).status, 200);
    assert_eq!(ask(&running, &key, &json!({ "ttl": 61 })).problem(400), "bad_request");
    for other in ["turnpike", "nowhere"] {
        let answer = ask(&running, &key, &json!({ "realm": other }));
        assert_eq!(answer.problem(403), "other_realm", "{other}");
        assert!(!answer.body.contains("turnpike") || other == "turnpike", "{answer:?}");
    }
    let gone = running.key("gone", json!({ "realm": "tenant.example" }));
    running.program.settings().realms.clear();
    assert_eq!(ask(&running, &gone, &json!({})).problem(400), "unknown_realm");
}

#[test]
fn only_listed_origins_may_request_credentials() {
    let running = running();
    let key = running.key("page", json!({}));
    running.program.settings().credentials.origins = vec!["https://app.example.org".to_owned()];
    let authorization = bearer(&key);
    let from = |origin: &str| {
        let headers = [("Authorization", authorization.as_str()), ("Origin", origin)];
        running.apply("POST", "/v1/credentials", &headers, Some("{}"))
    };
    let preflight = |origin: &str| {
        let headers = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
            ("Access-Control-Request-Headers", "authorization,content-type"),
        ];
        running.apply("OPTIONS", "/v1/credentials", &headers, None)
    };
    let listed = "https://app.example.org";
    let asked = preflight(listed);
    assert_eq!((asked.status, asked.body.as_str()), (204, ""));
    assert_eq!(asked.header("access-control-allow-origin"), listed);
    assert_eq!(asked.header("access-control-allow-methods"), "GET, POST");
    assert_eq!(asked.header("access-control-allow-headers"), "authorization, content-type");
    let answer = from(listed);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.header("access-control-allow-origin"), listed);
    assert_eq!(answer.header("vary"), "Origin");
    assert_eq!(answer.header("cache-control"), "no-store");
    // The page may also read refusals.
    let refused = running.apply("POST", "/v1/credentials", &[("Origin", listed)], Some("{}"));
    assert_eq!(refused.problem(401), "no_key");
    assert_eq!(refused.header("access-control-allow-origin"), listed);
    assert_eq!(refused.header("access-control-expose-headers"), "retry-after");
    for foreign in [
        "https://evil.example",
        "http://app.example.org",
        "https://app.example.org:8443",
        "https://app.example.org.evil.example",
        "null",
        "",
    ] {
        for answer in [from(foreign), preflight(foreign)] {
            assert_eq!(answer.problem(403), "foreign_origin", "{foreign}");
            assert!(!answer.head.to_ascii_lowercase().contains("access-control-allow"), "{answer:?}");
        }
    }
    let headers = [("Authorization", authorization.as_str()), ("Sec-Fetch-Site", "cross-site")];
    let silent = running.apply("GET", "/?service=turn", &headers, None);
    assert_eq!(silent.problem(403), "foreign_origin");
    // Our own page and programs that are not browsers are allowed.
    let own = format!("http://{}", running.applications[0]);
    assert_eq!(from(&own).status, 200);
    assert_eq!(ask(&running, &key, &json!({})).status, 200);
}

#[test]
fn unknown_host_name_is_refused_for_applications() {
    let running = running();
    let key = running.key("shop", json!({}));
    let at = running.applications[0];
    let ask = |host: &str| {
        let authorization = bearer(&key);
        let bytes =
            request("POST", "/v1/credentials", host, &[("Authorization", &authorization)], Some("{}"));
        crate::support::exchange(&mut std::net::TcpStream::connect(at).unwrap(), &bytes)
    };
    let refused = ask("rebound.example");
    assert_eq!(refused.problem(421), "unknown_host");
    assert!(refused.body.contains("hosts in the section [credentials]"), "{refused:?}");
    assert_eq!(ask("localhost").status, 200);
    running.program.settings().credentials.hosts = vec!["rebound.example".to_owned()];
    assert_eq!(ask("Rebound.example:8443").status, 200);
    running.program.settings().credentials.hosts.clear();
    running.program.settings().credentials.names = vec!["turn.example.org".to_owned()];
    assert_eq!(ask("turn.example.org").status, 200);
}

#[test]
fn non_loopback_applications_use_tls_and_certificate_names() {
    let own = Certificate::new(&["api.example.org", "*.wild.example"]);
    let running = Running::configured(Some(1), |settings, dir| {
        settings.credentials.listen = vec![(Ipv4Addr::UNSPECIFIED, 0).into()];
        settings.credentials.tls_cert = Some(dir.file("api.pem", &own.pem));
        settings.credentials.tls_key = Some(dir.file("api.key", &own.key));
        settings.auth.secrets = vec![Secret::new(SECRET)];
    });
    let key = running.key("shop", json!({}));
    let at = (Ipv4Addr::LOCALHOST, running.applications[0].port()).into();
    let client = Arc::new(believing_client(rustls::ALL_VERSIONS));
    let authorization = bearer(&key);
    let ask = |host: &str| {
        let headers = [("Authorization", authorization.as_str())];
        exchange_tls(at, &client, &request("POST", "/v1/credentials", host, &headers, Some("{}"))).unwrap()
    };
    for host in ["api.example.org", "a.wild.example:8443", "127.0.0.1"] {
        ask(host).ok();
    }
    assert_eq!(ask("rebound.example").problem(421), "unknown_host");
    let mut plain = std::net::TcpStream::connect(at).unwrap();
    let mut answer = Vec::new();
    std::io::Write::write_all(&mut plain, b"GET /livez HTTP/1.0\r\n\r\n").unwrap();
    let _ = std::io::Read::read_to_end(&mut plain, &mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[test]
fn only_full_access_issues_credentials_without_a_key() {
    let running = running();
    let rest = "/?service=turn&username=alice";
    let told = running.ask("POST", "/v1/credentials", Some("{\"user\":\"alice\"}")).ok();
    let server = &told["iceServers"][0];
    assert!(fits(server["username"].as_str().unwrap(), &server["credential"], SECRET), "{told}");
    let told = running.get(rest).ok();
    assert!(fits(told["username"].as_str().unwrap(), &told["password"], SECRET), "{told}");
    running.ask("POST", rest, None).ok();
    let read = bearer(READ);
    let looks = [("Authorization", read.as_str())];
    for (method, path) in [("GET", rest), ("POST", rest), ("POST", "/v1/credentials")] {
        assert_eq!(running.ask_tcp(method, path, &looks).problem(403), "read_only", "{method} {path}");
        assert_eq!(running.ask_tcp(method, path, &[]).problem(401), "no_token", "{method} {path}");
    }
    assert_eq!(running.ask_tcp("GET", "/", &looks).status, 200, "the page is public");
    assert_eq!(running.get("/?service=stun").problem(400), "bad_request");
    assert_eq!(running.get("/?colour=red").problem(400), "bad_request");
}

#[test]
fn keys_are_listed_without_secrets_and_names_are_unique() {
    let running = running();
    let key = running.key("shop", json!({ "realm": "tenant.example", "max_ttl": 600, "rate": 5 }));
    running.key("bare", json!({}));
    let listed = running.get("/v1/keys");
    let secret = key.split_once('.').unwrap().1;
    let hash = turnpike_config::api_keys::hash_digits(&Secret::new(&*key));
    assert!(!listed.body.contains(secret) && !listed.body.contains(&hash), "{listed:?}");
    assert_eq!(
        listed.ok()["keys"],
        json!([
            { "name": "bare", "realm": null, "max_ttl": null, "rate": null },
            { "name": "shop", "realm": "tenant.example", "max_ttl": 600, "rate": 5 },
        ])
    );
    let put = |body: Value| running.ask("POST", "/v1/keys", Some(&body.to_string()));
    let again = put(json!({ "name": "shop", "sha256": "00".repeat(32) }));
    assert_eq!(again.problem(409), "key_exists");
    assert_eq!(ask(&running, &key, &json!({})).status, 200, "the first key is used");
    for bad in [
        json!({ "name": "Shop", "sha256": hash }),
        json!({ "name": "a.b", "sha256": hash }),
        json!({ "name": "a", "sha256": "00" }),
        json!({ "name": "a", "sha256": "no hex" }),
        json!({ "name": "a" }),
        json!({ "name": "a", "sha256": hash, "max_ttl": 0 }),
        json!({ "name": "a", "sha256": hash, "rate": 0 }),
        json!({ "name": "a", "sha256": hash, "rate": 1_000_001 }),
        json!({ "name": "a", "sha256": hash, "realm": "a\"b" }),
        json!({ "name": "a", "key": "hunter2" }),
    ] {
        assert_eq!(put(bad.clone()).problem(400), "bad_request", "{bad}");
    }
    assert_eq!(running.ask("DELETE", "/v1/keys/gone", None).problem(404), "no_such_key");
    *running.program.store.lock().unwrap() = None;
    assert_eq!(put(json!({ "name": "a", "sha256": hash })).problem(409), "no_store");
    assert_eq!(ask(&running, &key, &json!({})).problem(503), "no_store");
}

#[test]
fn rotation_changes_the_signing_secret_immediately() {
    let running = running();
    let key = running.key("shop", json!({}));
    let signs = |secret: &str| {
        let told = ask(&running, &key, &json!({ "user": "alice" })).ok();
        let server = &told["iceServers"][0];
        fits(server["username"].as_str().unwrap(), &server["credential"], secret)
    };
    let rotate = |body: Value| running.ask("POST", "/v1/secrets/rotation", Some(&body.to_string()));
    assert!(signs(SECRET));
    let first = rotate(json!({ "secret": "first" })).ok();
    assert_eq!(
        (&first["until"], &first["realm"]),
        (&Value::Null, &json!("turnpike")),
        "the store's first secret"
    );
    assert!(first["note"].as_str().unwrap().contains("secrets in the configuration"), "{first}");
    assert!(signs("first"), "the store's secret takes precedence");
    let second = rotate(json!({ "secret": "second", "overlap_s": 60 })).ok();
    let until: jiff::Timestamp = second["until"].as_str().unwrap().parse().unwrap();
    let left = until.as_second() - jiff::Timestamp::now().as_second();
    assert!((0..=60).contains(&left), "{second}");
    assert!(signs("second"));
    let listed = running.get("/v1/secrets").ok();
    let of = |fingerprint: &Value| {
        let all = listed["secrets"].as_array().unwrap();
        all.iter().find(|secret| secret["fingerprint"] == *fingerprint).unwrap().clone()
    };
    assert_eq!(of(&second["fingerprint"])["signs"], true);
    let old = of(&first["fingerprint"]);
    assert_eq!((&old["signs"], &old["until"]), (&json!(false), &second["until"]));
    assert_eq!(listed["secrets"].as_array().unwrap().iter().filter(|one| one["signs"] == true).count(), 2);
    // A secret that has been invalidated is no longer accepted or listed.
    let third = rotate(json!({ "secret": "third", "overlap_s": 0 })).ok();
    assert!(third["until"].is_string() && signs("third"), "{third}");
    let listed = running.get("/v1/secrets").ok();
    let all = listed["secrets"].as_array().unwrap();
    assert!(all.iter().all(|one| one["fingerprint"] != second["fingerprint"]), "{listed}");
    // The default is the maximum lifetime of credentials plus a margin.
    let made_up = rotate(json!({}));
    assert!(!made_up.body.contains("secret\""), "{made_up:?}");
    let until: jiff::Timestamp = made_up.ok()["until"].as_str().unwrap().parse().unwrap();
    let left = until.as_second() - jiff::Timestamp::now().as_second();
    assert!((86_400..=86_460).contains(&left), "{left}");
    for bad in [
        json!({ "secret": "" }),
        json!({ "overlap_s": -1 }),
        json!({ "overlap_s": 40_000_000 }),
        json!({ "realm": "" }),
        json!({ "colour": "red" }),
    ] {
        assert_eq!(rotate(bad.clone()).problem(400), "bad_request", "{bad}");
    }
}

#[test]
fn credentials_are_not_issued_while_draining_or_stopped() {
    use std::sync::atomic::Ordering::Relaxed;
    let running = running();
    let key = running.key("shop", json!({}));
    running.program.draining.store(true, Relaxed);
    let answer = ask(&running, &key, &json!({}));
    assert_eq!(answer.problem(503), "draining");
    assert_eq!(answer.header("retry-after"), "5");
    running.program.ended.store(true, Relaxed);
    assert_eq!(ask(&running, &key, &json!({})).problem(503), "stopping");
}

#[test]
fn issued_and_refused_credentials_are_counted() {
    let running = running();
    let key = running.key("shop", json!({}));
    let issued = |kind: &str| -> u64 {
        let text = running.get("/metrics").body;
        let series = format!("turnpike_credentials_api_issued_total{{kind=\"{kind}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&series));
        line.unwrap_or_else(|| panic!("no {series} in {text}")).parse().unwrap()
    };
    let before = [issued("password"), issued("token")];
    ask(&running, &key, &json!({})).ok();
    ask(&running, &key, &json!({ "kid": "east" })).ok();
    assert!(issued("password") > before[0] && issued("token") > before[1]);
    let counts = |reason: &str, refuse: &dyn Fn() -> Answer| {
        let before = refused(&running, reason);
        assert!(refuse().status >= 400);
        assert!(refused(&running, reason) > before, "{reason}");
    };
    counts("no_key", &|| running.apply("POST", "/", &[], None));
    counts("realm", &|| ask(&running, &key, &json!({ "realm": "gone" })));
    counts("bad_request", &|| ask(&running, &key, &json!({ "ttl": 0 })));
    counts("origin", &|| running.apply("GET", "/livez", &[("Origin", "http://evil.example")], None));
    let forwarder = Running::start(None, |_, _| {});
    assert!(!forwarder.get("/metrics").body.contains("credentials_api"), "a forwarder issues no credentials");
    assert_eq!(forwarder.ask("POST", "/v1/credentials", None).problem(404), "no_server");
}
