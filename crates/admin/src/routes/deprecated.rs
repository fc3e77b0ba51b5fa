//! Renamed paths. The old ones work for one more version, with a Deprecation header (RFC 9745) and a
//! link to the new one. Nodes of a fleet and processes during an upgrade may be one version older or newer, so
//! they query each other through the old paths.

use axum::{
    body::{Body, to_bytes},
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use turnpike_api::with_old_list;

use crate::{problem::Problem, response_headers::DEPRECATION};

/// Old path of allocations, for requests to other nodes and to a previous process.
pub(super) const ALLOCATIONS: &str = "/v1/sessions";

/// Old and new paths, as the router knows them.
const PATHS: [(&str, &str); 3] = [
    ("/v1/sessions", "/v1/allocations"),
    ("/v1/sessions/{id}", "/v1/allocations/{id}"),
    ("/v1/fleet/sessions", "/v1/fleet/allocations"),
];

/// Deprecation date: 30 November 2026.
const SINCE: &str = "@1795996800";
/// Maximum length of a response in bytes; longer than a page of 1,000 allocations.
const LONGEST: usize = 4 << 20;

/// The new name of a path.
pub(super) fn current(path: &str) -> &str {
    PATHS.iter().find(|(old, _)| *old == path).map_or(path, |(_, new)| new)
}

/// Answers a request for an old path, with the list's old name.
pub(super) async fn answer(request: Request, next: Next) -> Response {
    let link =
        format!("<{}>; rel=\"successor-version\"", request.uri().path().replace("sessions", "allocations"));
    let (mut parts, body) = next.run(request).await.into_parts();
    let Ok(bytes) = to_bytes(body, LONGEST).await else {
        let detail = "the response is too long for an old path";
        return Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "not_written", detail).into_response();
    };
    let body = match std::str::from_utf8(&bytes) {
        Ok(text) => Body::from(with_old_list(text)),
        Err(_) => Body::from(bytes),
    };
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.insert(DEPRECATION, HeaderValue::from_static(SINCE));
    if let Ok(link) = HeaderValue::try_from(link) {
        parts.headers.insert(header::LINK, link);
    }
    Response::from_parts(parts, body)
}
