//! Errors as problem details (RFC 9457): what is wrong, and what to do instead.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use turnpike_wire::escape;

use crate::model::Problem;

/// Media type of such an answer.
pub(crate) const PROBLEM_JSON: &str = "application/problem+json";

/// Whole seconds (RFC 9110 section 10.2.3).
pub(crate) const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Every code, with the statuses that it comes with.
pub(crate) const CODES: [(&str, &[u16]); 56] = [
    ("bad_request", &[400]),
    ("body", &[413]),
    ("busy", &[503]),
    ("draining", &[409, 503]),
    ("failed", &[500]),
    ("fleet_store_unavailable", &[503]),
    ("foreign_origin", &[403]),
    ("head_too_large", &[431]),
    ("incomplete_body", &[400]),
    ("key_exists", &[409]),
    ("no_events", &[404]),
    ("no_fleet", &[404]),
    ("no_form", &[415]),
    ("no_key", &[401]),
    ("no_listener", &[409]),
    ("no_secret", &[409]),
    ("no_server", &[404]),
    ("no_store", &[409, 503]),
    ("no_such_ban", &[404]),
    ("no_such_key", &[404]),
    ("no_such_method", &[405]),
    ("no_such_node", &[404]),
    ("no_such_path", &[404]),
    ("no_such_realm", &[404]),
    ("no_such_secret", &[404]),
    ("no_such_session", &[404]),
    ("no_such_user", &[404]),
    ("no_token", &[401]),
    ("node_not_understood", &[502]),
    ("node_silent", &[504]),
    ("not_http", &[400]),
    ("not_json", &[415]),
    ("not_written", &[500]),
    ("other_realm", &[403]),
    ("predecessor_silent", &[504]),
    ("rate_exceeded", &[429]),
    ("read_only", &[403]),
    ("realm_configured", &[409]),
    ("realm_exists", &[409]),
    ("realm_not_served", &[409]),
    ("secret_exists", &[409]),
    ("stopping", &[503]),
    ("store_refuses", &[502]),
    ("store_unavailable", &[503]),
    ("timeout", &[408]),
    ("too_long", &[507]),
    ("too_many_watchers", &[503]),
    ("unknown_host", &[421]),
    ("unknown_kid", &[400]),
    ("unknown_realm", &[400]),
    ("upgrade", &[409]),
    ("user_configured", &[409]),
    ("user_exists", &[409]),
    ("wrong_configuration", &[422]),
    ("wrong_key", &[401]),
    ("wrong_token", &[401]),
];

impl Problem {
    /// `code` tells programs which it is, `detail` people.
    pub(crate) fn new(status: StatusCode, code: &str, detail: impl Into<String>) -> Self {
        let is_known =
            |(known, statuses): &(&str, &[u16])| *known == code && statuses.contains(&status.as_u16());
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

    /// A program that ends meanwhile.
    pub(crate) fn stopping() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "the program is about to end")
    }

    pub(crate) fn no_server() -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "no_server",
            "this program forwards, and has no sessions of a TURN server",
        )
    }

    pub(crate) fn with_errors(mut self, errors: Vec<String>) -> Self {
        self.errors = errors;
        self
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = escape::json(&serde_json::to_string(&self).unwrap_or_default()).into_owned();
        let mut response = (status, [(header::CONTENT_TYPE, PROBLEM_JSON)], body).into_response();
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
