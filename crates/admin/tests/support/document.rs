//! Checks that every response in the tests is documented.

use std::{fs, sync::LazyLock};

use serde_json::Value;

use super::Answer;

static DOCUMENT: LazyLock<Value> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    serde_json::from_str(&fs::read_to_string(path).expect("a committed file")).expect("JSON")
});

fn operation(method: &str, path: &str) -> Option<&'static Value> {
    let fits = |template: &str| {
        let (mut wanted, mut given) = (template.split('/'), path.split('/'));
        loop {
            match (wanted.next(), given.next()) {
                (None, None) => return true,
                (Some("{path}"), Some(_)) => return true,
                (Some(name), Some(part)) if name.starts_with('{') && !part.is_empty() => {}
                (Some(name), Some(part)) if name == part => {}
                _ => return false,
            }
        }
    };
    let paths = DOCUMENT["paths"].as_object()?;
    let exact = paths.get(path).or_else(|| paths.iter().find(|(name, _)| fits(name)).map(|(_, item)| item));
    exact?.get(method.to_lowercase())
}

fn resolved(value: &'static Value) -> &'static Value {
    match value["$ref"].as_str() {
        Some(place) => DOCUMENT.pointer(place.trim_start_matches('#')).expect("a target"),
        None => value,
    }
}

/// Fails if the status, the code or a header of the response is not documented for this operation.
pub(super) fn check(request: &[u8], answer: &Answer) {
    let line = String::from_utf8_lossy(request);
    let mut words = line.lines().next().unwrap_or_default().split(' ');
    let (Some(method), Some(target)) = (words.next(), words.next()) else { return };
    let Some(operation) = operation(method, target.split('?').next().unwrap_or_default()) else { return };
    if answer.body.contains("\"code\":\"no_such_path\"") && !target.starts_with("/v1/fleet/nodes/") {
        // A listener for applications serves fewer paths.
        return;
    }
    let name = format!("{method} {target}: {} {}", answer.status, answer.body);
    let response = resolved(&operation["responses"][answer.status.to_string()]);
    assert!(response.is_object(), "not in docs/openapi.json: {name}");
    if answer.head.contains("application/problem+json") {
        let problem: Value = serde_json::from_str(&answer.body).expect("JSON");
        let code = problem["code"].as_str().unwrap_or_default();
        let codes = response["description"].as_str().unwrap_or_default();
        assert!(codes.contains(&format!("`{code}`")), "{code} is not among {codes}: {name}");
    }
    for header in
        response["headers"].as_object().into_iter().flatten().map(|(header, _)| header.to_lowercase())
    {
        assert!(
            answer.head.to_lowercase().contains(&format!("\n{header}: ")),
            "no {header}: {name}\n{}",
            answer.head
        );
    }
}
