//! Compares example responses of the OpenAPI document with real ones.

use std::{collections::BTreeMap, fs};

use serde_json::Value;

use super::Answer;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/routes/examples.json");
/// Maximum number of items in a list, and of lines in a text.
const ITEMS: usize = 2;
const LINES: usize = 3;

pub(crate) struct Examples {
    known: BTreeMap<String, BTreeMap<String, BTreeMap<String, Value>>>,
    updates: bool,
}

impl Examples {
    pub(crate) fn read() -> Self {
        let text = fs::read_to_string(FILE).unwrap();
        Self { known: serde_json::from_str(&text).unwrap(), updates: turnpike_testkit::writes_golden_files() }
    }

    /// Compares the example of an operation with a response: the same fields, with values of the same
    /// kinds.
    #[track_caller]
    pub(crate) fn compare(&mut self, operation: &str, answer: &Answer) {
        if operation == "openapi" {
            return;
        }
        let real = if answer.header("content-type").ends_with("json") {
            shortened(answer.json())
        } else {
            let lines: Vec<&str> = answer.body.lines().take(LINES).collect();
            (lines.join("\n") + "\n").into()
        };
        let media = answer.header("content-type").split(';').next().unwrap().to_owned();
        let of_operation = self.known.entry(operation.to_owned()).or_default();
        let examples = of_operation.entry(answer.status.to_string()).or_default();
        let example = examples.get(&media);
        if example.is_some_and(|example| is_alike(example, &real)) {
            return;
        }
        assert!(
            self.updates,
            "the example of {operation}, {}, differs from the response: TURNPIKE_TEST_GOLDEN=write records it again\n{example:?}\n{real}",
            answer.status
        );
        examples.insert(media, real);
    }
}

impl Drop for Examples {
    fn drop(&mut self) {
        if self.updates {
            fs::write(FILE, serde_json::to_string_pretty(&self.known).unwrap() + "\n").unwrap();
        }
    }
}

fn shortened(value: Value) -> Value {
    match value {
        Value::Array(items) => items.into_iter().take(ITEMS).map(shortened).collect(),
        Value::Object(members) => members.into_iter().map(|(name, value)| (name, shortened(value))).collect(),
        other => other,
    }
}

/// List items and values may be missing on either side; fields may not.
fn is_alike(example: &Value, real: &Value) -> bool {
    match (example, real) {
        (Value::Null, _) | (_, Value::Null) => true,
        (Value::Object(example), Value::Object(real)) => {
            example.len() == real.len()
                && example
                    .iter()
                    .all(|(name, value)| real.get(name).is_some_and(|real| is_alike(value, real)))
        }
        (Value::Array(example), Value::Array(real)) => match (example.first(), real.first()) {
            (Some(example), Some(real)) => is_alike(example, real),
            _ => true,
        },
        (Value::String(_), Value::String(_))
        | (Value::Number(_), Value::Number(_))
        | (Value::Bool(_), Value::Bool(_)) => true,
        _ => false,
    }
}
