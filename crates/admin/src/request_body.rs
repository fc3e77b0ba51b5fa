//! Bodies of requests, read completely before a change starts.

use axum::{
    body::{Body, HttpBody as _},
    extract::Request,
    http::StatusCode,
};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};

use crate::problem::Problem;

/// Maximum length of a body in bytes; longer than any valid one.
const MOST_BODY: usize = 4096;

pub(crate) async fn collect_body(request: Request) -> Result<Request, Problem> {
    let (head, body) = request.into_parts();
    let too_long = || {
        let detail = format!("the body is longer than {MOST_BODY} bytes");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body", detail)
    };
    // Content-Length, if present.
    if body.size_hint().lower() > MOST_BODY as u64 {
        return Err(too_long());
    }
    let bytes = Limited::new(body, MOST_BODY).collect().await.map_err(|error| {
        if error.is::<LengthLimitError>() {
            return too_long();
        }
        let detail = "the body is incomplete or has invalid chunks";
        Problem::new(StatusCode::BAD_REQUEST, "incomplete_body", detail)
    })?;
    Ok(Request::from_parts(head, Body::from(bytes.to_bytes())))
}
