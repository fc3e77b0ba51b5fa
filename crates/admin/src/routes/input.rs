//! Parses the query and the body of a request. An unknown, misplaced or repeated field is an error.

use std::{borrow::Cow, collections::HashSet, fmt};

use axum::{
    body::Bytes,
    extract::{Path, Request, rejection::PathRejection},
    http::{HeaderMap, StatusCode, Uri, header},
};
use http_body_util::BodyExt as _;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Number, Value};
use url::form_urlencoded;

use crate::{problem::Problem, request_body::collect_body};

/// A segment of a path, or the error in it.
pub(super) type PathPart<T = String> = Result<Path<T>, PathRejection>;

pub(super) fn path_part<T>(part: PathPart<T>) -> Result<T, Problem> {
    let Path(text) = part.map_err(|_| Problem::bad_request("the path is not UTF-8"))?;
    Ok(text)
}

pub(super) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, Problem> {
    form(uri.query().unwrap_or_default().as_bytes())
}

pub(super) fn form<T: DeserializeOwned>(text: &[u8]) -> Result<T, Problem> {
    check_form(text)?;
    let parameters = serde_urlencoded::Deserializer::new(form_urlencoded::parse(text));
    serde_path_to_error::deserialize(parameters).map_err(|error| {
        let why = error.inner().to_string();
        Problem::bad_request(match error.path().to_string() {
            path if path == "." || why.starts_with("unknown field") => in_words(&why),
            path => format!("{path}: {}", in_words(&why)),
        })
    })
}

/// Returns the names of the parameters; duplicates and text that is not UTF-8 are errors.
pub(super) fn check_form(text: &[u8]) -> Result<Vec<String>, Problem> {
    let mut names = Vec::new();
    for pair in text.split(|byte| *byte == b'&').filter(|pair| !pair.is_empty()) {
        let is_text = percent_encoding::percent_decode(pair).decode_utf8().is_ok();
        let name = form_urlencoded::parse(pair).next().map(|(name, _)| name.into_owned()).unwrap_or_default();
        if !is_text {
            return Err(Problem::bad_request(format!("the parameter {name:?} is not UTF-8")));
        }
        if names.contains(&name) {
            return Err(Problem::bad_request(format!("the parameter {name:?} appears twice")));
        }
        names.push(name);
    }
    Ok(names)
}

pub(super) async fn body<T: DeserializeOwned>(request: Request) -> Result<Option<T>, Problem> {
    let (headers, bytes) = bytes(request).await?;
    if bytes.is_empty() {
        return Ok(None);
    }
    check_type(&headers)?;
    read(&bytes).map(Some)
}

pub(super) async fn bytes(request: Request) -> Result<(HeaderMap, Bytes), Problem> {
    let (head, body) = collect_body(request).await?.into_parts();
    // The body is already in memory.
    let bytes = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    Ok((head.headers, bytes))
}

/// Requires JSON, because a page of another origin can send some other types without a CORS preflight.
fn check_type(headers: &HeaderMap) -> Result<(), Problem> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let detail = "the body must be JSON, with Content-Type: application/json";
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", detail))
}

fn read<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, Problem> {
    let wrong = |why: String| Problem::bad_request(format!("the body cannot be read: {why}"));
    let Unique(value) = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
    match value {
        // serde would also accept an object's fields as a list.
        Value::Object(_) => serde_path_to_error::deserialize(value).map_err(|error| {
            let why = in_words(&error.inner().to_string());
            wrong(match error.path().to_string() {
                path if path == "." || why.starts_with("unknown field") => why,
                path => format!("{path}: {why}"),
            })
        }),
        _ => Err(wrong("expected an object, such as {\"name\": \"…\"}".to_owned())),
    }
}

/// Rewords an error message from serde without Rust types, and without the value, which may be a secret.
fn in_words(message: &str) -> String {
    if let Some(rest) = message.strip_prefix("invalid type: ").or(message.strip_prefix("invalid value: "))
        && let Some((found, expected)) = rest.rsplit_once(", expected ")
    {
        let found = ["string", "integer", "floating point", "boolean", "null", "map", "sequence"]
            .into_iter()
            .find(|kind| found.starts_with(kind));
        let found = match found {
            Some("map") => "an object",
            Some("sequence") => "a list",
            Some("integer") => "an integer",
            Some("floating point") => "a fraction",
            Some("string") => "a string",
            Some("boolean") => "a boolean",
            Some(other) => other,
            None => "something else",
        };
        return format!("expected {}, found {found}", expected_in_words(expected));
    }
    if let Some(field) = message.strip_prefix("missing field `") {
        return format!("{} is missing", field.trim_end_matches('`'));
    }
    match message {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            "expected a whole number".to_owned()
        }
        "number too large to fit in target type" => "the number is too large".to_owned(),
        other => other.to_owned(),
    }
}

fn expected_in_words(expected: &str) -> Cow<'_, str> {
    let most = match expected {
        "u8" => u8::MAX.into(),
        "u16" => u16::MAX.into(),
        "u32" => u32::MAX.into(),
        "u64" | "usize" => u64::MAX,
        _ if expected.starts_with("struct ") => return "an object".into(),
        _ => return expected.into(),
    };
    format!("a whole number from 0 to {most}").into()
}

/// JSON without duplicate fields: parsers disagree about which one takes precedence.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Unique(value)) = list.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        let mut names = HashSet::new();
        while let Some(name) = members.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("the field {name:?} appears twice")));
            }
            let Unique(value) = members.next_value()?;
            object.insert(name, value);
        }
        Ok(object.into())
    }
}
