//! The OpenAPI document.

use crate::prelude::*;
use std::path::Path;
use utoipa::OpenApi as _;

/// The published file. `TURNPIKE_TEST_GOLDEN=write cargo test -p turnpike-admin --test admin document::`
/// rewrites it.
const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");

#[test]
fn committed_document_matches_the_code() {
    let generated = serde_json::to_value(turnpike_admin::ApiDocument::openapi()).unwrap();
    let text = serde_json::to_string_pretty(&generated).unwrap() + "\n";
    if turnpike_testkit::writes_golden_files() {
        fs::write(COMMITTED, &text).unwrap();
    }
    let committed = fs::read_to_string(Path::new(COMMITTED)).unwrap();
    assert!(
        committed == text,
        "docs/openapi.json differs from the code: TURNPIKE_TEST_GOLDEN=write rewrites it"
    );
    assert_eq!(generated["openapi"], "3.1.0");
    assert_eq!(Running::start(None, |_, _| {}).get("/openapi.json").ok(), generated);
}

/// Users who try out an operation start with its example.
#[test]
fn each_request_body_has_a_working_example() {
    let running = Running::server(1);
    let document = running.get("/openapi.json").ok();
    let mut tried = 0;
    let (draining, others): (Vec<_>, Vec<_>) =
        document["paths"].as_object().unwrap().iter().partition(|(path, _)| path.contains("/drain"));
    for (path, item) in others.into_iter().chain(draining) {
        for (method, operation) in item.as_object().unwrap() {
            let Some(place) =
                operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str()
            else {
                continue;
            };
            let example = &document.pointer(place.trim_start_matches('#')).unwrap()["example"];
            assert!(example.is_object(), "{method} {path}: {place} has no example");
            let answer = running.ask(&method.to_uppercase(), path, Some(&example.to_string()));
            // The server may still lack the secret or the listener that a credential needs.
            let is_taken = answer.status < 300 || (path.contains("/credentials") && answer.status == 409);
            assert!(is_taken, "{method} {path} with {example}: {answer:?}");
            tried += 1;
        }
    }
    assert_eq!(tried, 11, "operations with a body");
}

fn check_example(document: &Value, name: &str, schema: &Value, example: &Value) {
    assert!(!example.is_null(), "{name} has no example");
    let mut whole = schema.clone();
    whole["components"] = document["components"].clone();
    let validator = jsonschema::validator_for(&whole).expect("a schema");
    let errors: Vec<String> = validator.iter_errors(example).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{name}: {errors:?} in {example}");
}

#[test]
fn each_body_has_an_example_that_matches_its_schema() {
    let document = Running::start(None, |_, _| {}).get("/openapi.json").ok();
    let resolved = |value: &Value| match value["$ref"].as_str() {
        Some(place) => document.pointer(place.trim_start_matches('#')).expect("a target").clone(),
        None => value.clone(),
    };
    let mut checked = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let bodies = operation["responses"].as_object().unwrap().iter();
            let bodies = bodies.map(|(status, response)| (status.as_str(), resolved(response)));
            for (status, body) in bodies.chain([("request", operation["requestBody"].clone())]) {
                for (media, content) in body["content"].as_object().into_iter().flatten() {
                    // The OpenAPI document, the page and the metrics need no example.
                    if path == "/openapi.json" && status == "200"
                        || media == "text/html"
                        || media.contains("openmetrics")
                    {
                        continue;
                    }
                    let schema = &content["schema"];
                    let name = format!("{method} {path} {status} {media}");
                    let example = match &content["example"] {
                        Value::Null => resolved(schema)["example"].clone(),
                        example => example.clone(),
                    };
                    check_example(&document, &name, schema, &example);
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 400, "{checked}");
}

/// Generated clients use these names for their functions.
#[test]
fn operation_names_are_unique() {
    let running = Running::start(None, |_, _| {});
    let given = running.get("/openapi.json").ok();
    let paths = given["paths"].as_object().unwrap().values();
    let named =
        paths.flat_map(|path| path.as_object().unwrap().values()).map(|it| it["operationId"].as_str());
    let mut names = BTreeSet::new();
    for name in named {
        assert!(names.insert(name.unwrap()), "{name:?} twice");
    }
}
