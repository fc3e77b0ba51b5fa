//! Unknown, misplaced, repeated and invalid parameters and fields are refused, and the response names them.

use crate::prelude::*;

fn detail(running: &Running, method: &str, path: &str, body: Option<&str>) -> String {
    let answer = running.ask(method, path, body);
    assert_eq!(answer.problem(400), "bad_request", "{method} {path}");
    answer.json()["detail"].as_str().unwrap().to_owned()
}

#[test]
fn every_path_refuses_unknown_parameters() {
    let running = Running::server(1);
    let document = running.get("/openapi.json").ok();
    let mut asked = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let is_health = ["/livez", "/readyz", "/healthz"].contains(&path.as_str());
        if is_health || path.starts_with("/v1/fleet/nodes/{node}/v1/") {
            continue;
        }
        let target = path.replace("{id}", &"0".repeat(32)).replace("{fingerprint}", "0123456789abcdef");
        let target = target.replace("{name}", "x").replace("{node}", "x");
        for method in ["get", "post", "put", "delete"].into_iter().filter(|method| item[method].is_object()) {
            let method = method.to_uppercase();
            let told = detail(&running, &method, &format!("{target}?colour=red"), None);
            assert!(told.contains("colour"), "{method} {path}: {told}");
            asked += 1;
        }
    }
    assert!(asked > 30, "{asked}");
    // Health checks ignore parameters.
    assert_eq!(running.get("/livez?t=1").status, 200);
}

#[test]
fn realm_in_the_query_of_a_rotation_is_refused() {
    let running = Running::server(1);
    let told = detail(&running, "POST", "/v1/secrets/rotation?realm=tenant.example", None);
    assert!(told.contains("no parameter \"realm\""), "{told}");
    assert_eq!(running.get("/v1/secrets").ok()["secrets"], json!([]));
}

#[test]
fn repeated_and_non_utf8_parameters_are_refused() {
    let running = Running::server(1);
    for (query, told) in [
        ("/v1/allocations?user=alice&user=bob", "\"user\" appears twice"),
        ("/v1/allocations?user=%ff", "\"user\" is not UTF-8"),
        ("/?service=turn&username=%ff", "\"username\" is not UTF-8"),
        ("/v1/allocations?limit=ten", "limit: expected a whole number"),
        ("/v1/allocations?limit=99999999999999999999999", "limit: the number is too large"),
    ] {
        let detail = detail(&running, "GET", query, None);
        assert!(detail.contains(told), "{query}: {detail}");
    }
    let key = running.key("shop", json!({}));
    let form = [("Content-Type", "application/x-www-form-urlencoded")];
    for body in [format!("service=turn&username=%ff&key={key}"), format!("service=turn&key={key}&key={key}")]
    {
        assert_eq!(running.apply("POST", "/", &form, Some(&body)).problem(400), "bad_request", "{body}");
    }
}

#[test]
fn invalid_fields_are_named_without_rust_types() {
    let running = Running::server(1);
    for (path, body, told) in [
        ("/v1/users", "{\"name\":\"a\",\"password\":5}", "password: expected a string, found an integer"),
        (
            "/v1/users",
            "{\"name\":\"a\",\"name\":\"b\",\"password\":\"c\"}",
            "the field \"name\" appears twice",
        ),
        ("/v1/users", "{\"name\":\"a\"}", "password is missing"),
        ("/v1/users", "[\"a\",null,\"b\"]", "expected an object"),
        ("/v1/users", "{\"name\":\"a\",\"password\":\"b\",\"colour\":1}", "unknown field `colour`"),
        (
            "/v1/secrets/rotation",
            "{\"overlap_s\":\"x\"}",
            "overlap_s: expected a whole number from 0 to 4294967295, found a string",
        ),
        (
            "/v1/secrets/rotation",
            "{\"overlap_s\":-1}",
            "overlap_s: expected a whole number from 0 to 4294967295, found an integer",
        ),
        ("/v1/bans", "{\"user\":\"a\",\"seconds\":1.5}", "seconds: expected a whole number"),
        ("/v1/realms", "{\"name\":\"a\",\"max_allocations\":0}", "max_allocations must be 1 to 1000000"),
        ("/v1/drain", "{\"deadline_s\":{}}", "deadline_s: expected a whole number"),
    ] {
        let detail = detail(&running, "POST", path, Some(body));
        assert!(detail.contains(told), "{body}: {detail}");
        for word in ["u32", "u64", "struct", "map", "Option"] {
            assert!(!detail.contains(word), "{body}: {detail}");
        }
    }
    // An optional body must still be an object, as documented.
    assert_eq!(running.ask("POST", "/v1/secrets/rotation", Some("null")).problem(400), "bad_request");
}

#[test]
fn configured_user_cannot_be_added_to_the_store() {
    let running = Running::server(1);
    let secret = UserSecret::Password(Secret::new("pw"));
    running.program.settings().auth.users = vec![ConfiguredUser { name: "alice".to_owned(), secret }];
    let put = |name: &str| {
        let body = json!({ "name": name, "password": "other" }).to_string();
        running.ask("POST", "/v1/users", Some(&body))
    };
    assert_eq!(put("alice").problem(409), "user_configured");
    assert_eq!(put("bob").status, 201);
}

#[test]
fn ban_accepts_all_valid_user_names() {
    let running = Running::server(1);
    let ban = |name: &str| {
        let body = json!({ "user": name, "seconds": 60 }).to_string();
        running.ask("POST", "/v1/bans", Some(&body)).status
    };
    for (name, status) in [("alice", 201), ("@a:example.org", 201), ("", 400), ("a\nb", 400)] {
        assert_eq!(ban(name), status, "{name:?}");
    }
    assert_eq!([ban(&"x".repeat(508)), ban(&"x".repeat(509))], [201, 400]);
}

#[test]
fn unexpected_body_is_refused() {
    let running = Running::server(1);
    let document = running.get("/openapi.json").ok();
    let mut asked = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let is_change = matches!(method.as_str(), "post" | "put");
            if !is_change || operation["requestBody"].is_object() {
                continue;
            }
            let told =
                detail(&running, &method.to_uppercase(), &path.replace("{node}", "x"), Some("{\"x\":1}"));
            assert!(told.contains("accepts no body"), "{told}");
            asked += 1;
        }
    }
    assert_eq!(asked, 4, "reload, revocation, drain and uncordon of a node");
}

#[test]
fn page_files_refuse_parameters_and_invalid_paths_get_problem_details() {
    let running = Running::server(1);
    assert_eq!(running.get("/web/main.js").status, 200);
    assert_eq!(running.get("/web/main.js?x=1").problem(400), "bad_request");
    assert_eq!(running.get("/web/%ff").problem(404), "no_such_path");
    for (method, path) in
        [("GET", "/v1/allocations/%ff"), ("DELETE", "/v1/users/%ff"), ("POST", "/v1/fleet/nodes/%ff/drain")]
    {
        assert!(detail(&running, method, path, None).contains("the path is not UTF-8"), "{method} {path}");
    }
}

#[test]
fn ban_accepts_all_valid_realms() {
    let running = Running::server(1);
    let ban = |realm: &str| {
        let body = json!({ "user": "alice", "realm": realm, "seconds": 60 }).to_string();
        running.ask("POST", "/v1/bans", Some(&body))
    };
    for (realm, status) in [("blue.example", 201), ("a\"b", 400), (" a", 400), ("", 400)] {
        assert_eq!(ban(realm).status, status, "{realm:?}");
    }
    let told = ban("a@b").json()["detail"].as_str().unwrap().to_owned();
    assert!(told.contains("ban their addresses"), "{told}");
}
