//! The OpenAPI document that is committed is the one that the program gives.

use std::{env, fs, path::Path};

use crate::support::Running;

/// Where others read it. `UPDATE=1 cargo test -p turnpike-admin --test admin document::` writes it anew.
const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");

#[test]
fn the_committed_document_is_the_one_that_the_program_gives() {
    let running = Running::start(None, |_, _| {});
    let given = running.get("/openapi.json").ok();
    let text = serde_json::to_string_pretty(&given).unwrap() + "\n";
    if env::var_os("UPDATE").is_some() {
        fs::write(COMMITTED, &text).unwrap();
    }
    let committed = fs::read_to_string(Path::new(COMMITTED)).unwrap();
    assert!(committed == text, "docs/openapi.json is not what the program gives: UPDATE=1 writes it anew");
    assert_eq!(given["openapi"], "3.1.0");
}
