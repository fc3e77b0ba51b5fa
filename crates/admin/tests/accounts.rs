//! Users, secrets, realms and keys of a store: changes through the interface, and by commands without a server.

use crate::prelude::*;
use std::io;

use turnpike_admin::Accounts;
use turnpike_api::{NewKey, NewRealm, NewSecret, NewUser, Rotation};
use turnpike_config::restapi_credentials::fingerprint;
use turnpike_ctl::commands::{AccountBackend, GeneratedSecret, Output};
use turnpike_stores::CachedUser;
use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::support::{STATE, store};

fn add_user(running: &Running, name: &str, password: &str) -> u16 {
    let body = json!({ "name": name, "password": password }).to_string();
    running.ask("POST", "/v1/users", Some(&body)).status
}

#[test]
fn user_changes_take_effect_immediately() {
    let running = Running::server(1);
    let known = |name: &str| {
        let store = running.program.store.lock().unwrap().clone().expect("a store");
        store.cached("turnpike", name)
    };
    assert_eq!(add_user(&running, "dora", "pw"), 201);
    assert!(matches!(known("dora"), CachedUser::Unknown));
    let looked_up = |name: &str| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let store = running.program.store.lock().unwrap().clone().expect("a store");
        store.look_up("turnpike", name, move |found| sender.send(found).unwrap());
        receiver.recv_timeout(crate::support::SOON).expect("an answer")
    };
    let turnpike_stores::UserLookup::User(keys) = looked_up("dora") else { panic!("the user is missing") };
    let key = |password: &str| Key::long_term(KeyAlgorithm::Md5, "dora", "turnpike", password.as_bytes());
    assert_eq!(keys.get(KeyAlgorithm::Md5), Some(&key("pw")));
    assert!(matches!(known("dora"), CachedUser::User(_)));
    assert_eq!(add_user(&running, "dora", "another"), 200);
    let turnpike_stores::UserLookup::User(keys) = looked_up("dora") else { panic!("the user is missing") };
    assert_eq!(keys.get(KeyAlgorithm::Md5), Some(&key("another")));
    assert_eq!(running.ask("DELETE", "/v1/users/dora", None).ok()["existed"], true);
    assert!(matches!(looked_up("dora"), turnpike_stores::UserLookup::Absent));
    assert_eq!(running.ask("DELETE", "/v1/users/dora", None).problem(404), "no_such_user");
}

#[test]
fn users_are_paged_with_configured_ones_first() {
    let running = Running::server(1);
    let user = |name: &str| ConfiguredUser {
        name: name.to_owned(),
        secret: UserSecret::Password(Secret::new("pw")),
    };
    running.program.settings().auth.users = vec![user("zoe"), user("alice")];
    for name in ["bob", "carol", "dora"] {
        assert_eq!(add_user(&running, name, "pw"), 201);
    }
    let mut names = Vec::new();
    let mut target = "/v1/users?limit=2".to_owned();
    loop {
        let page = running.get(&target).ok();
        let users = page["users"].as_array().unwrap();
        assert!(users.len() <= 2);
        names.extend(users.iter().map(|user| format!("{} {}", user["name"], user["from"]).replace('"', "")));
        let Some(next) = page["next"].as_str() else { break };
        target = format!("/v1/users?limit=2&cursor={next}");
    }
    let expected = ["zoe configuration", "alice configuration", "bob store", "carol store", "dora store"];
    assert_eq!(names, expected);
    assert_eq!(running.get("/v1/users?realm=nowhere").ok()["users"], json!([]));
    for bad in ["limit=0", "limit=1001", "cursor=x", "colour=red"] {
        assert_eq!(running.get(&format!("/v1/users?{bad}")).problem(400), "bad_request", "{bad}");
    }
}

#[test]
fn read_access_covers_users_and_realms_but_no_secrets() {
    let running = Running::server(1);
    let read = ("Authorization", format!("Bearer {READ}"));
    let full = ("Authorization", format!("Bearer {FULL}"));
    let ask = |method: &str, path: &str, (name, value): &(&str, String)| {
        running.ask_tcp(method, path, &[(*name, value.as_str())])
    };
    for path in ["/v1/users", "/v1/realms"] {
        assert_eq!(ask("GET", path, &read).status, 200, "{path}");
    }
    let refused = ask("GET", "/v1/secrets", &read);
    assert_eq!(refused.problem(403), "read_only");
    assert!(refused.body.contains("secrets need a token from admin.tokens"), "{}", refused.body);
    assert_eq!(running.ask_tcp("GET", "/v1/secrets", &[]).problem(401), "no_token");
    assert_eq!(ask("GET", "/v1/secrets", &full).status, 200);
    for path in ["/v1/users/alice", "/v1/secrets/0011", "/v1/realms/a"] {
        assert_eq!(ask("DELETE", path, &read).problem(403), "read_only", "{path}");
        assert_eq!(ask("DELETE", path, &full).status, 404, "{path}");
    }
}

#[test]
fn invalid_names_are_refused_without_a_change() {
    let running = Running::server(1);
    let post = |path: &str, body: Value| running.ask("POST", path, Some(&body.to_string())).problem(400);
    for body in [
        json!({ "name": "a:b", "password": "pw" }),
        json!({ "name": "", "password": "pw" }),
        json!({ "name": "a", "password": "" }),
        json!({ "name": "a" }),
        json!({ "name": "a", "password": "pw", "realm": "a\"b" }),
        json!({ "name": "a", "password": "pw", "colour": "red" }),
    ] {
        assert_eq!(post("/v1/users", body.clone()), "bad_request", "{body}");
    }
    assert_eq!(post("/v1/secrets", json!({ "secret": "" })), "bad_request");
    // A store may pad its columns, and such whitespace is removed when reading.
    for path in ["/v1/secrets", "/v1/secrets/rotation"] {
        assert_eq!(post(path, json!({ "secret": "north " })), "bad_request");
        assert_eq!(post(path, json!({ "secret": "north", "realm": " blue" })), "bad_request");
    }
    assert_eq!(post("/v1/realms", json!({ "name": "x".repeat(128) })), "bad_request");
    assert_eq!(running.get("/v1/users").ok()["users"], json!([]));
    assert!(!running.dir.path(STATE).exists(), "a store was created");
}

#[test]
fn configured_items_cannot_be_changed_in_the_store() {
    let running = Running::server(1);
    let alice = ConfiguredUser { name: "alice".to_owned(), secret: UserSecret::Password(Secret::new("pw")) };
    let secret = Secret::new("north");
    running.program.settings().auth.users = vec![alice];
    running.program.settings().auth.secrets = vec![secret.clone()];
    let user =
        || NewUser { name: "alice".to_owned(), realm: None, password: "another".to_owned(), only_new: false };
    let mark = fingerprint(&secret);
    for backend in backends(&running) {
        let refused = |error: CommandError| {
            let text = error.to_string();
            assert!(text.contains("realm \"turnpike\"") && text.contains("(default)"), "{text}");
            text
        };
        let text =
            refused(backend.add_user(user(), Output::new(TEXT, &mut Vec::new())).expect_err("configured"));
        assert!(text.starts_with("user \"alice\"") && text.contains("auth.users"), "{text}");
        refused(
            backend.remove_user("alice", None, Output::new(TEXT, &mut Vec::new())).expect_err("configured"),
        );
        refused(
            backend.remove_secret(&mark, None, Output::new(TEXT, &mut Vec::new())).expect_err("configured"),
        );
        // An item in both the store and the configuration is removed from the store, with a note that the
        // configuration still has it.
        let both = NewSecret { secret: "north".to_owned(), realm: None, only_new: false };
        backend.add_secret(both, Output::new(TEXT, &mut Vec::new())).expect("one more");
        let text = shown(TEXT, |to| backend.remove_secret(&mark, None, to));
        assert!(
            text.contains("note: secret") && text.contains("is still valid: it is in auth.secrets"),
            "{text}"
        );
    }
    assert_eq!(add_user(&running, "alice", "another"), 409);
    assert_eq!(add_user(&running, "bob", "pw"), 201);
}

#[test]
fn names_with_any_characters_can_be_added_and_removed() {
    let running = Running::server(1);
    assert_eq!(add_user(&running, "a/b c?d%", "pw"), 201);
    let gone = running.ask("DELETE", "/v1/users/a%2Fb%20c%3Fd%25", None).ok();
    assert_eq!(gone["name"], "a/b c?d%");
}

#[test]
fn changes_without_a_store_are_refused() {
    let running = Running::server(1);
    *running.program.store.lock().unwrap() = None;
    let add = running.ask("POST", "/v1/users", Some("{\"name\":\"a\",\"password\":\"pw\"}"));
    assert_eq!(add.problem(409), "no_store");
    assert!(add.body.contains("store.url"), "{}", add.body);
    for path in ["/v1/users", "/v1/secrets", "/v1/realms"] {
        assert_eq!(running.get(path).status, 200, "{path}");
    }
}

fn backends(running: &Running) -> [AccountBackend; 2] {
    let client = Client::new(Some(Target::Unix(running.dir.path("a.sock"))), None).unwrap();
    assert!(client.finds_somebody().unwrap());
    let here = AccountBackend::here(|| {
        let settings = Arc::new(running.program.settings().clone());
        Ok::<_, io::Error>(Accounts::new(settings, Some(store(&running.dir.path(STATE)))))
    });
    [AccountBackend::Running(client), here.unwrap()]
}

const TEXT: OutputFormat = OutputFormat::Text(None);
const JSON: OutputFormat = OutputFormat::Json;

fn shown(format: OutputFormat, run: impl FnOnce(Output<'_>) -> Result<(), CommandError>) -> String {
    shown_with(format, None, run)
}

fn shown_with(
    format: OutputFormat,
    generated: Option<GeneratedSecret<'_>>,
    run: impl FnOnce(Output<'_>) -> Result<(), CommandError>,
) -> String {
    let mut out = Vec::new();
    run(Output { format, out: &mut out, generated }).unwrap_or_else(|error| panic!("{error}"));
    String::from_utf8(out).unwrap()
}

#[test]
fn commands_give_the_same_output_with_and_without_a_server() {
    let running = Running::server(1);
    let place = running.program.store.lock().unwrap().as_ref().unwrap().name().to_owned();
    for backend in backends(&running) {
        let user = |realm: Option<&str>, password: &str| NewUser {
            name: "alice".to_owned(),
            realm: realm.map(str::to_owned),
            password: password.to_owned(),
            only_new: false,
        };
        let list = |format| shown(format, |to| backend.list_users(None, to));
        assert_eq!([list(TEXT), list(JSON)], ["no users\n", "[]\n"]);
        let made_up = || GeneratedSecret { what: "password", text: "0123" };
        let text = shown_with(TEXT, Some(made_up()), |to| backend.add_user(user(None, "0123"), to));
        assert_eq!(text, format!("added user alice in realm turnpike ({place})\npassword: 0123\n"));
        let error = backend.add_user(user(Some("blue"), "pw"), Output::new(TEXT, &mut Vec::new()));
        let told = error.expect_err("not served").to_string();
        assert!(told.contains("not served") && told.contains("turnpike realm add blue"), "{told}");
        let blue = |max_allocations, rate| NewRealm {
            name: "blue".to_owned(),
            max_allocations,
            max_allocations_per_user: None,
            bits_per_second_per_allocation: rate,
            only_new: false,
        };
        let text = shown(TEXT, |to| backend.add_realm(blue(Some(5), Some(64_000)), to));
        assert_eq!(text, format!("added realm blue ({place})\n"));
        let text = shown_with(JSON, Some(made_up()), |to| backend.add_user(user(Some("blue"), "pw"), to));
        let told: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&told["password"], &told["existed"]), (&json!("0123"), &json!(false)));
        let text = shown(TEXT, |to| backend.add_user(user(None, "pw"), to));
        assert_eq!(text, format!("changed user alice in realm turnpike ({place})\n"));
        let table = list(TEXT);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines,
            [
                "NAME   REALM     KEYS          FROM",
                "alice  blue      MD5, SHA-256  store",
                "alice  turnpike  MD5, SHA-256  store"
            ]
        );
        let of_blue = shown(JSON, |to| backend.list_users(Some("blue".to_owned()), to));
        let of_blue: Value = serde_json::from_str(&of_blue).unwrap();
        assert_eq!(
            of_blue,
            json!([{ "name": "alice", "realm": "blue", "keys": "MD5, SHA-256", "from": "store" }])
        );

        let secret = NewSecret { secret: "north".to_owned(), realm: None, only_new: false };
        let text = shown(TEXT, |to| backend.add_secret(secret, to));
        assert_eq!(text, format!("added secret dc365e79d41cfae1 in realm turnpike ({place})\n"));
        let text = shown(TEXT, |to| backend.list_secrets(None, to));
        assert!(text.contains("dc365e79d41cfae1") && !text.contains("north"), "{text}");
        let text = shown(TEXT, |to| backend.remove_secret("DC365e79d41cfae1", None, to));
        assert!(text.starts_with("removed secret"), "{text}");
        let error = backend.remove_secret("dc365e79d41cfae1", None, Output::new(TEXT, &mut Vec::new()));
        assert!(error.expect_err("already removed").to_string().starts_with("there is no secret"));

        let rotate = |secret: &str| Rotation {
            realm: Some("blue".to_owned()),
            secret: Some(secret.to_owned()),
            overlap_s: Some(60),
        };
        let [one, two] = ["one", "two"].map(|secret| fingerprint(&Secret::new(secret)));
        let made_up = || GeneratedSecret { what: "secret", text: "one" };
        let text = shown_with(TEXT, Some(made_up()), |to| backend.rotate_secret(rotate("one"), to));
        let first = format!(
            "secret {one} signs new credentials in realm blue ({place})\nthere was no other secret\nsecret: one\n"
        );
        assert_eq!(text, first);
        let text = shown(JSON, |to| backend.rotate_secret(rotate("two"), to));
        let told: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&told["fingerprint"], told.get("secret")), (&json!(two), None));
        let text = shown(JSON, |to| backend.list_secrets(Some("blue".to_owned()), to));
        let listed: Value = serde_json::from_str(&text).unwrap();
        for secret in listed.as_array().unwrap() {
            let (signs, until) = if secret["fingerprint"] == json!(two) {
                (true, &Value::Null)
            } else {
                (false, &told["until"])
            };
            assert_eq!((&secret["signs"], &secret["until"]), (&json!(signs), until), "{listed}");
        }
        for secret in [&one, &two] {
            shown(TEXT, |to| backend.remove_secret(secret, Some("blue".to_owned()), to));
        }

        let key = || NewKey {
            name: "shop".to_owned(),
            sha256: "ab".repeat(32),
            realm: None,
            max_ttl: Some(600),
            rate: None,
        };
        let made_up = GeneratedSecret { what: "key", text: "tpk_shop.x" };
        let text = shown_with(TEXT, Some(made_up), |to| backend.add_key(key(), to));
        assert_eq!(text, format!("added key shop ({place})\nkey: tpk_shop.x\n"));
        let error = backend.add_key(key(), Output::new(TEXT, &mut Vec::new())).expect_err("in use");
        assert!(error.to_string().contains("choose another name") && !error.is_usage(), "{error}");
        let text = shown(TEXT, |to| backend.list_keys(to));
        assert_eq!(text, "NAME  REALM  MAX TTL  RATE\nshop  all    600      -\n");
        let text = shown(TEXT, |to| backend.remove_key("shop", to));
        assert_eq!(text, format!("removed key shop ({place})\n"));
        assert_eq!(shown(TEXT, |to| backend.list_keys(to)), "no keys\n");
        let error =
            backend.remove_key("shop", Output::new(TEXT, &mut Vec::new())).expect_err("already removed");
        assert!(error.to_string().starts_with("there is no key \"shop\" in"), "{error}");

        let text = shown(TEXT, |to| backend.list_realms(to));
        assert_eq!(
            text,
            "NAME  ALLOCATIONS  PER USER  BITS/S EACH  ORIGINS\nblue  5            -         64000\n"
        );
        let slow = backend.add_realm(blue(None, Some(999)), Output::new(TEXT, &mut Vec::new()));
        assert!(slow.expect_err("no rate").is_usage());
        let text = shown(TEXT, |to| backend.remove_realm("blue", to));
        assert_eq!(text, format!("removed realm blue ({place})\n"));

        for realm in [None, Some("blue".to_owned())] {
            shown(TEXT, |to| backend.remove_user("alice", realm.clone(), to));
            let error = backend
                .remove_user("alice", realm, Output::new(TEXT, &mut Vec::new()))
                .expect_err("already removed");
            assert!(error.to_string().starts_with("there is no user \"alice\""), "{error}");
            assert!(!error.is_usage());
        }
        let wrong =
            NewUser { name: "a:b".to_owned(), realm: None, password: "pw".to_owned(), only_new: false };
        assert!(backend.add_user(wrong, Output::new(TEXT, &mut Vec::new())).expect_err("no name").is_usage());
    }
}

#[test]
fn unserved_realm_and_overridden_limits_are_conflicts() {
    let running = Running::server(1);
    let own = RealmSettings {
        name: "own".to_owned(),
        server_names: vec!["own.example".to_owned()],
        allocations: Some(7),
        ..RealmSettings::default()
    };
    running.program.settings().realms = vec![own];
    let post = |path: &str, body: Value| running.ask("POST", path, Some(&body.to_string()));
    let hash = "ab".repeat(32);
    for (path, body) in [
        ("/v1/users", json!({ "name": "alice", "password": "pw", "realm": "gone" })),
        ("/v1/secrets", json!({ "secret": "north", "realm": "gone" })),
        ("/v1/secrets/rotation", json!({ "realm": "gone" })),
        ("/v1/keys", json!({ "name": "shop", "sha256": hash, "realm": "gone" })),
    ] {
        assert_eq!(post(path, body).problem(409), "realm_not_served", "{path}");
    }
    assert_eq!(running.get("/v1/users?realm=gone").ok()["users"], json!([]), "nothing was written");
    assert_eq!(post("/v1/users", json!({ "name": "a", "password": "pw", "realm": "own" })).status, 201);

    let limit = |key: &str| post("/v1/realms", json!({ "name": "own", key: 5_000 }));
    let refused = limit("max_allocations");
    assert_eq!(refused.problem(409), "realm_configured");
    assert!(refused.body.contains("realm.allocations"), "{refused:?}");
    assert_eq!(limit("max_allocations_per_user").status, 201);
    assert_eq!(limit("bits_per_second_per_allocation").status, 200);
}

#[test]
fn users_command_lists_more_than_one_page() {
    let dir = Dir::new();
    let user = |number: usize| ConfiguredUser {
        name: format!("u{number:04}"),
        secret: UserSecret::Password(Secret::new("pw")),
    };
    let settings = Settings {
        auth: turnpike_config::AuthSettings { users: (0..1500).map(user).collect(), ..Default::default() },
        ..Settings::default()
    };
    let accounts = || Accounts::of_store(Arc::new(settings), store(&dir.path(STATE)));
    let backend = AccountBackend::here(|| Ok::<_, io::Error>(accounts())).unwrap();
    let new = NewUser { name: "last".to_owned(), realm: None, password: "pw".to_owned(), only_new: false };
    backend.add_user(new, Output::new(TEXT, &mut Vec::new())).unwrap();
    let text = shown(JSON, |to| backend.list_users(None, to));
    let users: Value = serde_json::from_str(&text).unwrap();
    let names: Vec<&str> =
        users.as_array().unwrap().iter().map(|user| user["name"].as_str().unwrap()).collect();
    assert_eq!((names.len(), names[0], names[1499], names[1500]), (1501, "u0000", "u1499", "last"));
}
