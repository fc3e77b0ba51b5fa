//! Bounds in the OpenAPI document: the server accepts each bound and refuses the next value.

use crate::prelude::*;
use crate::usage;

struct Case<'a> {
    running: &'a Running,
    method: String,
    path: &'a str,
    name: &'a str,
    example: Option<&'a Value>,
}

impl Case<'_> {
    fn ask(&self, value: &Value) -> Answer {
        if let Some(example) = self.example {
            let mut body = example.clone();
            body[self.name] = value.clone();
            // The example has the other fields that the request needs, such as the user of a token.
            return self.running.ask(&self.method, self.path, Some(&body.to_string()));
        }
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let others = match (self.path, self.name) {
            ("/", "service") => String::new(),
            ("/", _) => "&service=turn".to_owned(),
            ("/v1/bans", "realm") => "&user=x".to_owned(),
            _ => String::new(),
        };
        let path = self.path.replace("{name}", "x").replace("{fingerprint}", "0123456789abcdef");
        let path = path.replace("{id}", &"0".repeat(32));
        self.running.ask(&self.method, &format!("{path}?{}={text}{others}", self.name), None)
    }

    #[track_caller]
    fn takes(&self, value: &Value) {
        let answer = self.ask(value);
        // The user, realm or allocation does not have to exist.
        let is_taken = answer.status < 300 || [404, 409].contains(&answer.status);
        assert!(is_taken, "{} {} with {} = {value}: {answer:?}", self.method, self.path, self.name);
    }

    #[track_caller]
    fn refuses(&self, value: &Value) {
        let answer = self.ask(value);
        let what = format!("{} {} with {} = {value}", self.method, self.path, self.name);
        assert_eq!(answer.status, 400, "{what}: {answer:?}");
    }

    fn try_bounds(&self, schema: &Value) -> usize {
        let mut tried = 0;
        if let Some(least) = schema["minimum"].as_u64() {
            self.takes(&json!(least));
            if least > 0 {
                self.refuses(&json!(least - 1));
            }
            tried += 1;
        }
        if let Some(most) = schema["maximum"].as_u64() {
            self.takes(&json!(most));
            self.refuses(&json!(most + 1));
            tried += 1;
        }
        let length = |key: &str| schema[key].as_u64().and_then(|length| usize::try_from(length).ok());
        if let Some(least) = length("minLength") {
            self.takes(&json!(self.text(least)));
            self.refuses(&json!(self.text(least - 1)));
            tried += 1;
        }
        if let Some(most) = length("maxLength") {
            self.takes(&json!(self.text(most)));
            self.refuses(&json!(self.text(most + 1)));
            tried += 1;
        }
        for word in schema["enum"].as_array().into_iter().flatten() {
            self.takes(word);
            tried += 1;
        }
        if schema["enum"].is_array() {
            self.refuses(&json!("x"));
        }
        tried
    }

    fn text(&self, length: usize) -> String {
        match self.name {
            "sha256" => "a".repeat(length),
            "level" if length > 5 => format!("{}=info", "t".repeat(length - 5)),
            // No level has a name of one letter, but a digit is a valid level.
            "level" if length == 1 => "0".to_owned(),
            _ => "x".repeat(length),
        }
    }
}

/// A server whose realms and token keys have names of minimum and maximum length.
fn server() -> Running {
    let running = Running::server(1);
    let mut settings = running.program.settings();
    settings.credentials.max_ttl = 31_536_000;
    settings.auth.secrets = vec![Secret::new("a secret in the configuration")];
    let realm = |length: usize| RealmSettings {
        name: "x".repeat(length),
        secrets: vec![Secret::new("another secret")],
        ..RealmSettings::default()
    };
    settings.realms = vec![realm(1), realm(127)];
    let key = |length: usize| TokenKeySettings {
        kid: "x".repeat(length),
        key: TokenKey::A256Gcm([7; 32]),
        max_lifetime: 31_536_000,
        realm: None,
    };
    settings.oauth.keys = vec![key(1), key(508)];
    drop(settings);
    usage::record(&running, &[]);
    running
}

/// Returns true for parameters without length bounds: most filters, addresses, keys and cursors.
fn needs_no_bounds(method: &str, path: &str, name: &str) -> bool {
    let is_filter = method == "get" && ["user", "realm", "client", "relayed"].contains(&name);
    let is_address = name == "client";
    // A wrong key gets 401, and the last part of a cursor is arbitrary.
    let is_opaque = ["key", "api", "cursor", "types"].contains(&name);
    let is_of_ledger = path == "/v1/usage" && ["since", "until", "identifier", "node"].contains(&name);
    is_of_ledger
        || (is_filter && path != "/" && path != "/v1/users" && path != "/v1/secrets")
        || is_address
        || is_opaque
}

#[test]
fn each_bound_is_accepted_and_the_next_value_refused() {
    let document = server().get("/openapi.json").ok();
    let mut tried = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let running = server();
            let case = |name, example| Case {
                running: &running,
                method: method.to_uppercase(),
                path,
                name,
                example,
            };
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let (name, schema) = (parameter["name"].as_str().unwrap(), &parameter["schema"]);
                if parameter["in"] == "query" {
                    let count = if path.ends_with("/events") && name == "count" {
                        assert_eq!(schema["maximum"], 1_000_000);
                        case(name, None).refuses(&json!(1_000_001));
                        1
                    } else {
                        case(name, None).try_bounds(schema)
                    };
                    assert!(
                        count > 0 || needs_no_bounds(method, path, name) || name == "service",
                        "{method} {path} {name}"
                    );
                    tried += count;
                }
            }
            let place = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str();
            let Some(schema) = place.and_then(|place| document.pointer(place.trim_start_matches('#'))) else {
                continue;
            };
            for (name, member) in schema["properties"].as_object().unwrap() {
                if member["type"] == "boolean" {
                    continue;
                }
                let count = case(name, Some(&schema["example"])).try_bounds(member);
                assert!(
                    count > 0 || needs_no_bounds(method, path, name),
                    "{method} {path} {name} has no bounds"
                );
                tried += count;
            }
        }
    }
    assert!(tried > 80, "{tried}");
}
