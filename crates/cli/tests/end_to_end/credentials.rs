//! The credentials API: credentials work over every listed transport until they expire, and secrets rotate without failures.

use crate::prelude::*;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{KeyInit as _, Mac as _};

pub(crate) struct Store {
    pub(crate) dir: Dir,
    secret: Value,
    key: String,
}

impl Store {
    pub(crate) fn new() -> Self {
        let dir = Dir::new();
        let secret = rotate(dir.path(), &[]);
        let made =
            json_of(&["key", "add", "shop", "--rate", "100000", "--json", "--state", text(dir.path())]);
        let key = made["key"].as_str().expect("the key is printed").to_owned();
        Self { dir, secret, key }
    }

    pub(crate) fn serve(&self, certificate: Option<&Certificate>, more: &str) -> Server {
        self.serve_with(certificate, more, &[])
    }

    pub(crate) fn serve_with(&self, certificate: Option<&Certificate>, more: &str, flags: &[&str]) -> Server {
        let file = Dir::new();
        let section = "[credentials]\nlisten = [\"127.0.0.1:0\"]\nnames = [\"127.0.0.1\"]\n";
        let path = file.file("turnpike.toml", format!("{section}{more}"));
        let arguments = [&["-c", text(&path), "--state", text(self.dir.path())], flags].concat();
        let mut serve = match certificate {
            Some(certificate) => Serve::start_secured(certificate, &arguments),
            None => Serve::start(&arguments),
        };
        let label = "get credentials on http://";
        let api = address_after(&serve.program.line_with(label), label);
        Server { serve, api, key: self.key.clone(), _file: file }
    }
}

pub(crate) struct Server {
    pub(crate) serve: Serve,
    api: SocketAddr,
    key: String,
    _file: Dir,
}

pub(crate) struct Credential {
    pub(crate) username: String,
    pub(crate) password: String,
    urls: Vec<String>,
}

impl Credential {
    fn user(&self) -> String {
        format!("{}:{}", self.username, self.password)
    }

    fn is_of(&self, secret: &Value) -> bool {
        let secret = secret["secret"].as_str().expect("a secret");
        let mut mac = Hmac::<sha1::Sha1>::new_from_slice(secret.as_bytes()).expect("any key");
        mac.update(self.username.as_bytes());
        STANDARD.encode(mac.finalize().into_bytes()) == self.password
    }
}

impl Server {
    fn ask(&self, wanted: &Value) -> (u16, Value) {
        post(self.api, "/v1/credentials", &self.key, wanted).expect("the API answers")
    }

    pub(crate) fn credential(&self, wanted: &Value) -> Credential {
        let (status, told) = self.ask(wanted);
        assert_eq!(status, 200, "{told}");
        let server = &told["iceServers"][0];
        let word = |value: &Value| value.as_str().expect("text").to_owned();
        let urls = server["urls"].as_array().expect("a list").iter().map(word).collect();
        Credential { username: word(&server["username"]), password: word(&server["credential"]), urls }
    }

    /// Error code of an Allocate, or `None` if it succeeds.
    pub(crate) fn allocate(&self, credential: &Credential) -> Option<u16> {
        loop {
            let client = stun::Client::new(self.serve.address(V4));
            let (_, _, challenge) = client.challenge();
            let stun::Challenge { realm, .. } = &challenge;
            assert_eq!(realm, REALM.as_bytes(), "a browser uses the realm of the challenge");
            match client.allocate(&credential.username, &credential.password, &challenge) {
                // The port belonged to an earlier client whose allocation still exists.
                Some(437) => {}
                answered => return answered,
            }
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the test's path is UTF-8")
}

#[track_caller]
fn said(arguments: &[&str]) -> String {
    let ended = Program::start(&mut turnpike(arguments)).wait(SOON);
    assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.output());
    ended.stdout
}

#[track_caller]
fn json_of(arguments: &[&str]) -> Value {
    serde_json::from_str(&said(arguments)).expect("JSON")
}

pub(crate) fn rotate(state: &Path, more: &[&str]) -> Value {
    let arguments = ["secret", "rotate", REALM, "--json", "--state", text(state)];
    json_of(&[&arguments[..], more].concat())
}

#[test]
fn credential_works_over_every_listed_transport() {
    let (store, certificate) = (Store::new(), Certificate::of_authority(&["127.0.0.1", "::1"]));
    let mut server = store.serve(Some(&certificate), "");
    let credential = server.credential(&json!({ "user": "carol", "ttl": 3600 }));
    let address = server.serve.address(V4);
    let expected = [
        ("turn", address.port(), "udp"),
        ("turn", address.port(), "tcp"),
        ("turns", address.port(), "tcp"),
        ("turns", server.serve.address_of("dtls", V4).port(), "udp"),
    ];
    let port_of_tcp = server.serve.address_of("tcp", V4).port();
    let expected = expected.map(|(scheme, port, transport)| {
        let port = if transport == "tcp" { port_of_tcp } else { port };
        format!("{scheme}:127.0.0.1:{port}?transport={transport}")
    });
    assert_eq!(credential.urls, expected);
    let authority = certificate.authority();
    let (reflect, user) = (Reflect::start(V4, &[]), credential.user());
    for url in &credential.urls {
        let arguments = ["probe", url, "--user", &user, "--ca", text(&authority), "--json"];
        let probed = Program::run(&mut turnpike(&arguments));
        assert_eq!(probed.code, Some(0), "{url}: {}", probed.output());
        let report = probed.result();
        assert_eq!((&report["usable"], &report["realm"]), (&json!(true), &json!(REALM)), "{url}: {report}");
        let trust = ["--ca", text(&authority)];
        let load = Load::at_as(url, &user).to(reflect.address).with("--clients 2 --rate 100");
        let load = load.with("--duration 0.5 --warmup 0.1");
        let run = if url.starts_with("turns:") { load.with_words(&trust) } else { load }.run();
        assert_eq!(run.code, Some(0), "{url}: {}", run.output());
        assert!(run.result()["received"].as_u64() > Some(10), "{url}: {}", run.output());
    }
    server.serve.wait_for_allocations(0);
    let line = server.serve.program.line_with("credential issued");
    assert!(line.contains("carol") && line.contains("by key \\\"shop\\\""), "{line}");
    let secret = store.secret["secret"].as_str().expect("a secret");
    for line in server.serve.program.lines() {
        for hidden in [credential.password.as_str(), &store.key, secret] {
            assert!(!line.contains(hidden), "{line}");
        }
    }
    let issued = server.serve.metrics().sum("turnpike_credentials_api_issued_total", "kind=\"password\"");
    assert_eq!(issued, 1);
}

#[test]
fn access_token_from_the_api_allows_an_allocation() {
    let key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let oauth = format!(
        "[oauth]\nserver_name = \"turn.example.org\"\nkey = [{{ kid = \"east\", key = \"{key}\" }}]\n"
    );
    let store = Store::new();
    let server = store.serve(None, &oauth);
    let (status, told) = server.ask(&json!({ "kid": "east", "ttl": 600 }));
    assert_eq!(status, 200, "{told}");
    let ice = &told["iceServers"][0];
    let word = |value: &Value| value.as_str().expect("text").to_owned();
    let token = format!(
        "username: {}\nmac_key: {}\naccess_token: {}\nexpires_in: 600\n",
        word(&ice["username"]),
        word(&ice["credential"]["macKey"]),
        word(&ice["credential"]["accessToken"]),
    );
    let dir = Dir::new();
    let file = dir.file("token", &token);
    let reflect = Reflect::start(V4, &[]);
    let (server_at, peer) = (server.serve.address(V4).to_string(), reflect.address.to_string());
    let arguments =
        ["load", "turn", &server_at, "--access-token-file", text(&file), "--peer", &peer, "--json", "-"];
    let more = ["--rate", "100", "--duration", "0.5", "--warmup", "0.1"];
    let run = Program::run(&mut turnpike(&[&arguments[..], &more].concat())).ended(0);
    assert!(run.result()["received"].as_u64() > Some(10), "{}", run.output());
}

#[test]
fn rotation_keeps_old_credentials_until_the_old_secrets_expire() {
    let store = Store::new();
    let state = store.dir.path();
    let mut server = store.serve(None, "");
    let old = server.credential(&json!({ "user": "carol" }));
    assert!(old.is_of(&store.secret));
    let second = rotate(state, &["--overlap", "86400"]);
    let new = eventually("the new secret signs", || {
        Some(server.credential(&json!({ "user": "carol" }))).filter(|credential| credential.is_of(&second))
    });
    assert_eq!([server.allocate(&old), server.allocate(&new)], [None, None]);
    // The next rotation ends all older secrets immediately, even though the first was valid until
    // tomorrow.
    let third = rotate(state, &["--overlap", "0"]);
    assert!(third["until"].is_string(), "{third}");
    eventually("the other secrets are no longer accepted", || {
        // Each accepted credential adds an allocation.
        std::thread::sleep(std::time::Duration::from_millis(50));
        [server.allocate(&old), server.allocate(&new)] == [Some(401); 2]
    });
    let newest = eventually("the third secret signs", || {
        Some(server.credential(&json!({ "user": "carol" }))).filter(|credential| credential.is_of(&third))
    });
    assert_eq!(server.allocate(&newest), None);
    let line = server.serve.program.line_with("an expired secret of realm");
    assert!(line.contains(REALM), "{line}");
    eventually("only the third secret is left", || {
        let listed = json_of(&["secret", "list", "--json", "--state", text(state)]);
        let left: Vec<&Value> =
            listed.as_array().expect("a list").iter().map(|one| &one["fingerprint"]).collect();
        left == [&third["fingerprint"]]
    });
}

#[test]
fn servers_with_a_shared_store_immediately_accept_each_others_credentials() {
    let store = Store::new();
    let full = "[admin]\nloopback = \"full\"\n";
    let [one, other] = [(), ()].map(|()| store.serve(None, full));
    let admin = one.serve.admin().to_string();
    let secret = json_of(&["secret", "rotate", REALM, "--json", "--admin", &admin]);
    // The first server has the secret in memory; the other looks it up when no secret matches.
    let credential = one.credential(&json!({ "user": "carol" }));
    assert!(credential.is_of(&secret));
    assert_eq!([other.allocate(&credential), one.allocate(&credential)], [None, None]);
    let from_other = other.credential(&json!({ "user": "carol" }));
    assert_eq!([one.allocate(&from_other), other.allocate(&from_other)], [None, None]);
    eventually("both servers sign with the same secret", || {
        other.credential(&json!({ "user": "carol" })).is_of(&secret)
    });
}

#[test]
fn impossible_credentials_settings_fail_before_sockets_open() {
    let dir = Dir::new();
    for (section, told) in [
        ("listen = [\"0.0.0.0:8443\"]", "there is no certificate"),
        ("listen = [\"127.0.0.1:9641\"]", "is taken"),
        ("origins = [\"*\"]", "credentials.origins"),
        ("ttl = 0", "credentials.ttl"),
    ] {
        let file = dir.file("turnpike.toml", format!("[credentials]\n{section}\n"));
        let ended = Program::run(&mut turnpike(&["check-config", "-c", text(&file)]));
        assert_eq!(ended.code, Some(2), "{section}: {}", ended.output());
        assert!(ended.stderr.contains(told), "{section}: {}", ended.stderr);
    }
    let state = ["--state", text(dir.path())];
    for arguments in [
        &["key", "add", "Shop"][..],
        &["key", "add", "shop", "--rate", "0"],
        &["key", "add", "shop", "--ttl-max", "0"],
        &["secret", "rotate", REALM, "--overlap", "-1"],
        &["secret", "rotate", REALM, "--realm", REALM],
        &["secret", "rotate"],
        &["secret", "rotate", "a\"b"],
    ] {
        let ended = Program::run(&mut turnpike(&[arguments, &state].concat()));
        assert_eq!(ended.code, Some(2), "{arguments:?}: {}", ended.output());
    }
    assert!(!dir.at("turnpike.sqlite").exists(), "a store was created");
    said(&[&["key", "add", "shop"][..], &state].concat());
    Program::run(&mut turnpike(&[&["key", "add", "shop"][..], &state].concat()))
        .ended(1)
        .says("choose another name");
}
