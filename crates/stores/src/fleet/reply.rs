//! Helpers for Redis answers, whose shape depends on the protocol version.

use redis::Value;

/// Items of a list, or the keys and values of a map in turn; empty for any other type.
pub(super) fn list(value: Value) -> Vec<Value> {
    match value {
        Value::Array(items) | Value::Set(items) => items,
        Value::Map(pairs) => pairs.into_iter().flat_map(|(key, value)| [key, value]).collect(),
        Value::Attribute { data, .. } => list(*data),
        _ => Vec::new(),
    }
}

pub(super) fn bytes(value: Value) -> Option<Vec<u8>> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.into_bytes()),
        _ => None,
    }
}

pub(super) fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}

pub(super) fn int(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        other => text(other)?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_shapes_of_a_list_of_pairs_are_equal() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let flat = Value::Array(vec![text("a"), text("1"), text("b"), Value::Int(2)]);
        let map = Value::Map(vec![(text("a"), text("1")), (text("b"), Value::Int(2))]);
        assert_eq!(list(flat), list(map.clone()));
        let numbers: Vec<_> = list(map).iter().map(int).collect();
        assert_eq!(numbers, [None, Some(1), None, Some(2)]);
        assert!(list(Value::Nil).is_empty() && bytes(Value::Nil).is_none());
    }
}
