//! Errors as problem details (RFC 9457), including the remedy.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use turnpike_wire::escape;
use utoipa::ToSchema;

/// Problem details of a failed request (RFC 9457).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Always `about:blank`.
    #[serde(rename = "type")]
    #[schema(value_type = String)]
    pub kind: Box<str>,
    /// The reason phrase of the status.
    #[schema(value_type = String)]
    pub title: Box<str>,
    /// The HTTP status.
    #[schema(minimum = 400, maximum = 599)]
    pub status: u16,
    /// Description of the problem, and the remedy.
    pub detail: String,
    /// Kind of problem, for programs.
    #[schema(value_type = String, example = "no_such_allocation")]
    pub code: Box<str>,
    /// One line for each error, if there can be several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}

pub(crate) const PROBLEM_JSON: &str = "application/problem+json";

/// Whole seconds (RFC 9110 section 10.2.3).
pub(crate) const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

pub(crate) struct Code {
    pub(crate) name: &'static str,
    pub(crate) statuses: &'static [u16],
    pub(crate) meaning: &'static str,
}

pub(crate) const CODES: [Code; 59] = [
    Code {
        name: "bad_request",
        statuses: &[400],
        meaning: "The request is invalid; `detail` names the parameter, field or header.",
    },
    Code {
        name: "body",
        statuses: &[413],
        meaning: "The body is longer than 4096 bytes, or the method accepts no body.",
    },
    Code { name: "busy", statuses: &[503], meaning: "All connections of this listener are busy." },
    Code {
        name: "draining",
        statuses: &[409, 503],
        meaning: "The program is draining: it accepts no new clients and does not reload.",
    },
    Code { name: "failed", statuses: &[500], meaning: "The change failed; see the log for the reason." },
    Code { name: "fleet_store_unavailable", statuses: &[503], meaning: "The fleet's store does not answer." },
    Code {
        name: "foreign_origin",
        statuses: &[403],
        meaning: "The request came from a page with a different origin.",
    },
    Code {
        name: "head_too_large",
        statuses: &[431],
        meaning: "The request has more than 8 KiB of headers, or more than 100 of them.",
    },
    Code {
        name: "incomplete_body",
        statuses: &[400],
        meaning: "The body ended early or has invalid chunks.",
    },
    Code { name: "key_exists", statuses: &[409], meaning: "The store already has a key with this name." },
    Code {
        name: "no_capture",
        statuses: &[403],
        meaning: "Captures need a token from admin.capture_tokens, or the Unix socket.",
    },
    Code {
        name: "no_events",
        statuses: &[404],
        meaning: "Events are available only from the node itself, not through another node.",
    },
    Code { name: "no_fleet", statuses: &[404], meaning: "The server is not in a fleet." },
    Code { name: "no_form", statuses: &[415], meaning: "The body is not a form." },
    Code { name: "no_key", statuses: &[401], meaning: "The request has no key." },
    Code { name: "no_listener", statuses: &[409], meaning: "No listener serves the realm." },
    Code {
        name: "no_secret",
        statuses: &[409],
        meaning: "The realm has no secret to sign credentials with.",
    },
    Code { name: "no_server", statuses: &[404], meaning: "The program is a forwarder." },
    Code { name: "no_store", statuses: &[409, 503], meaning: "No store is configured." },
    Code { name: "no_such_ban", statuses: &[404], meaning: "The user or client is not banned." },
    Code { name: "no_such_key", statuses: &[404], meaning: "The store has no key with this name." },
    Code { name: "no_such_method", statuses: &[405], meaning: "The path does not support this method." },
    Code { name: "no_such_node", statuses: &[404], meaning: "The fleet has no node with this name." },
    Code { name: "no_such_path", statuses: &[404], meaning: "The path does not exist." },
    Code { name: "no_such_realm", statuses: &[404], meaning: "The store has no realm with this name." },
    Code {
        name: "no_such_secret",
        statuses: &[404],
        meaning: "The store has no secret with this fingerprint.",
    },
    Code {
        name: "no_such_allocation",
        statuses: &[404],
        meaning: "The allocation does not exist; it may have ended.",
    },
    Code { name: "no_such_user", statuses: &[404], meaning: "The store has no user with this name." },
    Code {
        name: "no_token",
        statuses: &[401],
        meaning: "The request needs a token, a client certificate or the Unix socket.",
    },
    Code { name: "no_usage", statuses: &[404], meaning: "Usage is not recorded (`usage.days`)." },
    Code {
        name: "node_not_understood",
        statuses: &[502],
        meaning: "Another node sent a response that this node cannot parse.",
    },
    Code { name: "node_silent", statuses: &[504], meaning: "Another node does not answer." },
    Code {
        name: "not_captured",
        statuses: &[409],
        meaning: "The allocation relays TCP, is already being captured, or has just ended.",
    },
    Code {
        name: "not_http",
        statuses: &[400],
        meaning: "The request is not HTTP/1.1, or ended within its headers.",
    },
    Code { name: "not_json", statuses: &[415], meaning: "The body is not JSON." },
    Code { name: "not_written", statuses: &[500], meaning: "The response could not be serialized." },
    Code { name: "other_realm", statuses: &[403], meaning: "The key is valid for another realm." },
    Code { name: "predecessor_silent", statuses: &[504], meaning: "The previous process does not answer." },
    Code { name: "rate_exceeded", statuses: &[429], meaning: "The key exceeds its request rate." },
    Code { name: "read_only", statuses: &[403], meaning: "The token may only read." },
    Code {
        name: "realm_configured",
        statuses: &[409],
        meaning: "The configuration sets this limit for the realm and overrides the store.",
    },
    Code { name: "realm_exists", statuses: &[409], meaning: "The store already has a realm with this name." },
    Code { name: "realm_not_served", statuses: &[409], meaning: "No realm with this name is served." },
    Code { name: "secret_exists", statuses: &[409], meaning: "The store already has this secret." },
    Code { name: "stopping", statuses: &[503], meaning: "The program is about to exit." },
    Code { name: "store_refuses", statuses: &[502], meaning: "The store refused the operation." },
    Code { name: "store_unavailable", statuses: &[503], meaning: "The store does not answer." },
    Code { name: "timeout", statuses: &[408], meaning: "The request did not arrive in time." },
    Code {
        name: "too_long",
        statuses: &[507],
        meaning: "The response is too long to be passed on by another node.",
    },
    Code { name: "too_many_watchers", statuses: &[503], meaning: "There are already eight subscribers." },
    Code { name: "unknown_host", statuses: &[421], meaning: "The Host header names another server." },
    Code { name: "unknown_kid", statuses: &[400], meaning: "The realm has no token key with this name." },
    Code { name: "unknown_realm", statuses: &[400], meaning: "The realm is not served." },
    Code {
        name: "upgrade",
        statuses: &[409],
        meaning: "Another process is taking over: repeat the request.",
    },
    Code {
        name: "user_configured",
        statuses: &[409],
        meaning: "The configuration defines this user and overrides the store.",
    },
    Code { name: "user_exists", statuses: &[409], meaning: "The store already has a user with this name." },
    Code {
        name: "wrong_configuration",
        statuses: &[422],
        meaning: "The configuration has the errors listed in `errors`; the old one stays in effect.",
    },
    Code { name: "wrong_key", statuses: &[401], meaning: "The key does not exist." },
    Code { name: "wrong_token", statuses: &[401], meaning: "The token does not exist." },
];

impl Code {
    pub(crate) fn example(&self, status: u16) -> Problem {
        let status = StatusCode::from_u16(status).unwrap_or_default();
        Problem::new(status, self.name, self.meaning.trim_end_matches('.'))
    }
}

impl Problem {
    pub(crate) fn no_form() -> Self {
        let detail = "a body must be a form, with Content-Type: application/x-www-form-urlencoded";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "no_form", detail)
    }

    /// `code` is for programs, `detail` is for people.
    pub(crate) fn new(status: StatusCode, code: &str, detail: impl Into<String>) -> Self {
        let is_known = |known: &Code| known.name == code && known.statuses.contains(&status.as_u16());
        debug_assert!(CODES.iter().any(is_known), "{code} with {status} is not in CODES");
        Self {
            kind: "about:blank".into(),
            title: status.canonical_reason().unwrap_or("Error").into(),
            status: status.as_u16(),
            detail: detail.into(),
            code: code.into(),
            errors: Vec::new(),
        }
    }

    pub(crate) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", detail)
    }

    /// The program will exit before it can answer.
    pub(crate) fn stopping() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "the program is about to exit")
    }

    pub(crate) fn no_server() -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "no_server",
            "this program is a forwarder, and has no TURN allocations",
        )
    }

    pub(crate) fn reason(&self) -> String {
        let detail = std::iter::once(&*self.detail);
        detail.chain(self.errors.iter().map(|error| &**error)).collect::<Vec<_>>().join("; ")
    }

    pub(crate) fn with_errors(mut self, errors: Vec<String>) -> Self {
        self.errors = errors;
        self
    }
}

#[derive(Clone)]
pub(crate) struct ProblemReason(pub(crate) String);

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = escape::json(&serde_json::to_string(&self).unwrap_or_default()).into_owned();
        let mut response = (status, [(header::CONTENT_TYPE, PROBLEM_JSON)], body).into_response();
        response.extensions_mut().insert(ProblemReason(self.reason()));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        if status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer realm=\"turnpike\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}
