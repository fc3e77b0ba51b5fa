//! Error responses of each operation for the OpenAPI document: statuses, codes and headers.

use std::collections::BTreeMap;

use utoipa::{
    Modify,
    openapi::{
        Content, Header, Object, Ref, RefOr, Required, Response, Schema, Type,
        header::HeaderBuilder,
        path::{Operation, PathItem},
        request_body::RequestBody,
        response::ResponseBuilder,
    },
};

use crate::problem::{CODES, Code, PROBLEM_JSON};

/// Errors that any operation may return: those of the connection, of access control and of the query.
const ALL: &[&str] = &[
    "bad_request",
    "body",
    "busy",
    "foreign_origin",
    "head_too_large",
    "not_http",
    "not_written",
    "stopping",
    "timeout",
    "unknown_host",
];
/// Additional errors of operations that need a token.
const GUARDED: &[&str] = &["no_token", "read_only", "wrong_token"];
/// Additional errors of operations that change something.
const WRITES: &[&str] = &["failed"];
/// Additional errors of operations with a body.
const BODY: &[&str] = &["incomplete_body", "not_json"];
/// Additional errors of operations that read from a store.
const READS: &[&str] = &["no_server", "store_refuses", "store_unavailable"];
/// Additional errors of operations that change a store.
const CHANGES: &[&str] = &["no_server", "no_store", "store_refuses", "store_unavailable"];
/// Additional errors of operations that issue a credential.
const ISSUES: &[&str] = &[
    "draining",
    "no_form",
    "no_key",
    "no_listener",
    "no_secret",
    "no_server",
    "no_store",
    "other_realm",
    "rate_exceeded",
    "store_unavailable",
    "unknown_kid",
    "unknown_realm",
    "wrong_key",
];

/// Additional codes of one operation.
fn own(operation: &str) -> Vec<&'static [&'static str]> {
    match operation {
        "front" | "rest" | "make" => vec![ISSUES],
        "cloudflare_ice_servers" | "cloudflare_credentials" | "twilio_token" => vec![ISSUES],
        "cloudflare_revoke" => vec![ISSUES, &["fleet_store_unavailable"]],
        "newest" | "status" | "build" | "config" | "log_level" | "access" | "history" => vec![],
        "set_log_level" | "drain" => vec![],
        "metrics" => vec![],
        "openapi" => vec![],
        "events" => vec![&["no_events", "too_many_watchers"]],
        "stream" => vec![&["no_events", "no_server", "too_many_watchers"]],
        "reload" => vec![&["draining", "upgrade", "wrong_configuration"]],
        "refusals" | "limits" | "listeners" | "certificates" | "workers" | "list" => vec![&["no_server"]],
        "one" | "end" => {
            vec![&["no_server", "no_such_allocation", "node_not_understood", "predecessor_silent"]]
        }
        "capture" => vec![&[
            "no_capture",
            "no_events",
            "no_server",
            "no_such_allocation",
            "not_captured",
            "too_many_watchers",
        ]],
        "usage" => vec![READS, &["no_usage"]],
        "users" | "secrets" | "keys" | "realms" => vec![READS],
        "put_user" => vec![CHANGES, &["realm_not_served", "user_configured", "user_exists"]],
        "put_secret" => vec![CHANGES, &["realm_not_served", "secret_exists"]],
        "rotate_secret" => vec![CHANGES, &["realm_not_served"]],
        "put_key" => vec![CHANGES, &["key_exists", "realm_not_served"]],
        "put_realm" => vec![CHANGES, &["realm_configured", "realm_exists"]],
        "remove_user" => vec![CHANGES, &["no_such_user"]],
        "remove_secret" => vec![CHANGES, &["no_such_secret"]],
        "remove_key" => vec![CHANGES, &["no_such_key"]],
        "remove_realm" => vec![CHANGES, &["no_such_realm"]],
        "fleet" | "fleet_allocations" => vec![FLEET],
        "drain_node" | "uncordon_node" => vec![FLEET, &["fleet_store_unavailable", "no_such_node"]],
        // The node's own errors are forwarded unchanged.
        "of_node" | "end_of_node" => vec![
            FLEET,
            READS,
            &[
                "no_events",
                "no_such_method",
                "no_such_node",
                "no_such_path",
                "no_such_allocation",
                "node_silent",
                "too_long",
            ],
        ],
        "bans" => vec![&["no_server"]],
        "put_ban" => vec![&["no_server", "fleet_store_unavailable", "predecessor_silent"]],
        "remove_ban" => {
            vec![&["no_server", "no_such_ban", "fleet_store_unavailable", "predecessor_silent"]]
        }
        // Health checks have no codes.
        _ => vec![],
    }
}

const FLEET: &[&str] = &["no_fleet", "no_server"];

pub(super) struct ErrorResponses;

impl Modify for ErrorResponses {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        if let Some(RefOr::T(Schema::Object(problem))) = components.schemas.get_mut("Problem")
            && let Some(RefOr::T(Schema::Object(code))) = problem.properties.get_mut("code")
        {
            code.enum_values = Some(CODES.iter().map(|code| code.name.into()).collect());
        }
        for (is_change, operation) in document.paths.paths.values_mut().flat_map(operations) {
            operation.request_body.iter_mut().for_each(without_null);
            let name = operation.operation_id.clone().unwrap_or_default();
            let is_guarded = operation.security.as_ref().is_none_or(|all| !all.is_empty());
            let mut codes = own(&name);
            codes.push(ALL);
            codes.extend(is_guarded.then_some(GUARDED));
            codes.extend(is_change.then_some(WRITES));
            codes.extend(operation.request_body.is_some().then_some(BODY));
            for (status, codes) in by_status(&codes) {
                // Operations with the same codes share a response object.
                let names: Vec<&str> = codes.iter().map(|code| code.name).collect();
                let name = format!("{status}.{}", names.join("."));
                components.responses.insert(name.clone(), RefOr::T(response(status, &codes)));
                let shared = RefOr::Ref(Ref::from_response_name(name));
                operation.responses.responses.entry(status.to_string()).or_insert(shared);
            }
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = (bool, &mut Operation)> {
    let PathItem { get, post, put, delete, .. } = item;
    let all = [(false, get), (true, post), (true, put), (true, delete)];
    all.into_iter().filter_map(|(is_change, operation)| Some((is_change, operation.as_mut()?)))
}

fn by_status(names: &[&[&str]]) -> BTreeMap<u16, Vec<&'static Code>> {
    let mut statuses: BTreeMap<u16, Vec<&Code>> = BTreeMap::new();
    for code in CODES.iter().filter(|code| names.iter().any(|some| some.contains(&code.name))) {
        code.statuses.iter().for_each(|status| statuses.entry(*status).or_default().push(code));
    }
    statuses
}

fn response(status: u16, codes: &[&Code]) -> Response {
    let describe = |code: &&Code| format!("`{}`: {}", code.name, code.meaning);
    let description = codes.iter().map(describe).collect::<Vec<_>>().join("\n");
    let mut content = Content::new(Some(Ref::from_schema_name("Problem")));
    content.example = codes.first().and_then(|code| serde_json::to_value(code.example(status)).ok());
    let response = ResponseBuilder::new().description(description).content(PROBLEM_JSON, content);
    match header(status) {
        Some((name, header)) => response.header(name, header),
        None => response,
    }
    .build()
}

fn header(status: u16) -> Option<(&'static str, Header)> {
    let (name, description) = match status {
        401 => ("WWW-Authenticate", "`Bearer`."),
        405 => ("Allow", "Methods of this path."),
        429 | 503 => ("Retry-After", "Seconds to wait before the next attempt."),
        _ => return None,
    };
    let text = Object::with_type(Type::String);
    Some((name, HeaderBuilder::new().schema(text).description(Some(description)).build()))
}

/// Removes null from the schema of an optional body.
fn without_null(body: &mut RequestBody) {
    for content in body.content.values_mut() {
        if let Some(RefOr::T(Schema::OneOf(one))) = &mut content.schema
            && let Some(object) = one.items.iter().find(|item| matches!(item, RefOr::Ref(_)))
        {
            content.schema = Some(object.clone());
            body.required = Some(Required::False);
        }
    }
}
