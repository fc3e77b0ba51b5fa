//! Example responses for the OpenAPI document, recorded from a running server and compared by a test.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use utoipa::{
    Modify,
    openapi::{OpenApi, RefOr, path::PathItem},
};

/// Bodies by operation, status and media type.
type RecordedBodies = BTreeMap<String, BTreeMap<String, BTreeMap<String, Value>>>;

/// See [`RecordedBodies`]. `TURNPIKE_TEST_GOLDEN=write cargo test -p turnpike-admin --test admin
/// every_path_answers` records missing ones.
const RECORDED: &str = include_str!("examples.json");

pub(super) struct Examples;

impl Modify for Examples {
    fn modify(&self, document: &mut OpenApi) {
        let mut recorded: RecordedBodies = serde_json::from_str(RECORDED).unwrap_or_default();
        let live = recorded.get("newest").and_then(|bodies| bodies.get("200")?.get("application/json"));
        let event = json!({ "event": "live", "data": live });
        let events = BTreeMap::from([("text/event-stream".to_owned(), event)]);
        recorded.insert("events".to_owned(), BTreeMap::from([("200".to_owned(), events)]));
        let event = serde_json::from_str(include_str!("event_example.json")).unwrap_or_default();
        let events = BTreeMap::from([("text/event-stream".to_owned(), event)]);
        recorded.insert("stream".to_owned(), BTreeMap::from([("200".to_owned(), events)]));
        for PathItem { get, post, put, delete, .. } in document.paths.paths.values_mut() {
            for operation in [get, post, put, delete].into_iter().flatten() {
                let name = operation.operation_id.as_deref().unwrap_or_default();
                for (status, bodies) in recorded.remove(name).unwrap_or_default() {
                    let Some(RefOr::T(response)) = operation.responses.responses.get_mut(&status) else {
                        continue;
                    };
                    for (media, body) in bodies {
                        response.content.entry(media).and_modify(|content| content.example = Some(body));
                    }
                }
            }
        }
    }
}
