//! Limits of read-only tokens and application keys: neither can read a secret or change anything.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
};
use turnpike_testkit::stun;

use serde_json::{Value, json};

use turnpike_trials::{Dir, Program, REALM, SOON, Serve, V4, address_after, fetch, turnpike};

const FULL: &str = "0123456789-may-do-everything";
const READ: &str = "0123456789-may-only-look";
const BOB: (&str, &str) = ("bob", "hunter-and-gatherer");
const SECRET: &str = "signs-what-is-configured";
const TENANT: &str = "tenant.example";

/// A server whose store contains secrets of each kind, and the keys of two applications.
struct World {
    serve: Serve,
    api: SocketAddr,
    /// Application key valid for [`REALM`] only.
    key: String,
    /// Strings that must not appear: tokens, passwords, secrets, and the secret part of each key.
    secrets: Vec<String>,
    _dir: Dir,
}

impl World {
    fn new() -> Self {
        let dir = Dir::new();
        let state = dir.at("state").display().to_string();
        let said = |words: &[&str]| {
            let ended =
                Program::run(&mut turnpike(&[words, &["--json", "--state", &state]].concat())).ended(0);
            ended.result()
        };
        let printed =
            |name: &str, words: &[&str]| said(words)[name].as_str().expect("the key is printed").to_owned();
        let other = printed("key", &["key", "add", "other"]);
        let key = printed("key", &["key", "add", "shop", "--realm", REALM, "--ttl-max", "60"]);
        let mut secrets = [FULL, READ, BOB.1, SECRET].map(str::to_owned).to_vec();
        secrets.extend([REALM, TENANT].map(|realm| printed("secret", &["secret", "rotate", realm])));
        secrets.extend(
            [&key, &other]
                .map(|key| key.split_once('.').expect("a key consists of a name and a secret").1.to_owned()),
        );
        let text = format!(
            "[admin]\nloopback = \"none\"\ntokens = [\"{FULL}\"]\nread_tokens = [\"{READ}\"]\n\
             [auth]\nsecrets = [\"{SECRET}\"]\nusers = [\"{}:{}\"]\n\
             [credentials]\nlisten = [\"127.0.0.1:0\"]\nnames = [\"127.0.0.1\"]\n",
            BOB.0, BOB.1
        );
        let file = dir.file("turnpike.toml", text).display().to_string();
        let mut serve = Serve::start_bare(&[
            "-c",
            &file,
            "--state",
            &state,
            "--realm",
            REALM,
            "--relay-ip",
            "127.0.0.1",
            "--workers",
            "1",
        ]);
        let label = "get credentials on http://";
        let api = address_after(&serve.program.line_with(label), label);
        Self { serve, api, key, secrets, _dir: dir }
    }

    fn all_requests() -> Vec<DocumentedRequest> {
        let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json"));
        let described: Value = serde_json::from_str(&text.expect("docs/openapi.json exists"))
            .expect("docs/openapi.json is JSON");
        let paths = described["paths"].as_object().expect("the paths are an object");
        let each = paths.iter().flat_map(|(path, methods)| {
            let filled = path.split('/').map(|part| if part.starts_with('{') { "x" } else { part });
            let filled = filled.collect::<Vec<_>>().join("/");
            // Without the parameter `count`, the stream would never end.
            let filled = if filled.ends_with("/events") { format!("{filled}?count=0") } else { filled };
            let methods = methods.as_object().expect("the methods are an object");
            methods.iter().map(move |(method, operation)| DocumentedRequest {
                method: method.to_uppercase(),
                path: filled.clone(),
                is_for_applications: operation["tags"] == json!(["credentials"]),
            })
        });
        each.collect()
    }

    fn holds_no_secret(&self, body: &str, of: &str) {
        for secret in &self.secrets {
            assert!(!body.contains(secret), "{of}: {body} contains {secret}");
        }
    }
}

/// A request in the API document, with `x` for each variable part of its path.
struct DocumentedRequest {
    method: String,
    path: String,
    is_for_applications: bool,
}

fn body_of(method: &str) -> &'static str {
    if ["POST", "PUT"].contains(&method) { "{}" } else { "" }
}

fn asked(at: SocketAddr, method: &str, path: &str, token: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect_timeout(&at, SOON).expect("the listener accepts connections");
    stream.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: {at}\r\nAuthorization: Bearer {token}\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .expect("the connection is open");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the answer is text");
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, answer)
}

#[test]
fn read_only_tokens_cannot_read_secrets_or_change_anything() {
    let world = World::new();
    let (serve, admin) = (&world.serve, world.serve.admin());
    let client = stun::Client::new(serve.address(V4));
    let (_, _, challenge) = client.challenge();
    assert_eq!(client.allocate(BOB.0, BOB.1, &challenge), None);
    let requests = World::all_requests();
    assert!(requests.len() > 40, "{}", requests.len());
    let mut looked = 0;
    for DocumentedRequest { method, path, .. } in requests {
        let (status, answer) = asked(admin, &method, &path, READ, body_of(&method));
        let asked_for = format!("{method} {path}");
        world.holds_no_secret(&answer, &asked_for);
        if method == "GET" {
            // Secrets are listed by fingerprint, from which weak secrets could be guessed.
            let is_closed = path == "/v1/secrets";
            assert_eq!(status == 403, is_closed, "{asked_for}: {answer}");
            looked += usize::from(status == 200);
        } else {
            assert_eq!(status, 403, "{asked_for}: {answer}");
        }
    }
    assert!(looked > 15, "{looked}");
    // The sessions are visible and unchanged.
    let (_, sessions) = asked(admin, "GET", "/v1/allocations", READ, "");
    assert!(sessions.contains(BOB.0), "{sessions}");
    let (_, secrets) = asked(admin, "GET", "/v1/secrets", FULL, "");
    assert!(secrets.contains("fingerprint"), "{secrets}");
    assert_eq!(fetch(admin, "/healthz").expect("the target responds").0, 200, "the server does not drain");
}

#[test]
fn application_keys_issue_credentials_only_for_their_own_realm() {
    let world = World::new();
    let give = |wanted: &Value| asked(world.api, "POST", "/v1/credentials", &world.key, &wanted.to_string());
    let (status, answer) = give(&json!({ "user": "alice" }));
    assert!(status == 200 && answer.contains(REALM), "{answer}");
    world.holds_no_secret(&answer, "a credential");
    for (wanted, refused) in [
        (json!({ "user": "alice", "realm": TENANT }), 403),
        (json!({ "user": "alice", "realm": "nowhere" }), 403),
        (json!({ "user": "alice", "ttl": 61 }), 400),
    ] {
        let (status, answer) = give(&wanted);
        assert_eq!(status, refused, "{wanted}: {answer}");
        world.holds_no_secret(&answer, "a refusal");
    }
    // The admin interface rejects application keys, after a delay.
    for (method, path) in [
        ("GET", "/v1/status"),
        ("GET", "/v1/keys"),
        ("GET", "/metrics"),
        ("POST", "/v1/users"),
        ("POST", "/v1/drain"),
    ] {
        let (status, answer) = asked(world.serve.admin(), method, path, &world.key, body_of(method));
        assert_eq!(status, 401, "{method} {path}: {answer}");
    }
    for DocumentedRequest { method, path, is_for_applications } in World::all_requests() {
        if is_for_applications {
            continue;
        }
        let (status, answer) = asked(world.api, &method, &path, &world.key, body_of(&method));
        world.holds_no_secret(&answer, &path);
        // Load balancers use the health paths on this listener; a request with an unexpected body is refused.
        let is_told_to_everybody = ["/livez", "/readyz", "/healthz"].contains(&&*path) && status == 200;
        assert!([404, 413].contains(&status) || is_told_to_everybody, "{method} {path}: {answer}");
    }
}
