//! Requests from other nodes of a fleet, with the rights that the client has there.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    body::{Body, to_bytes},
    http::{HeaderName, Request, StatusCode, header},
    response::Response,
};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use tokio::{sync::Semaphore, time::Instant};
use turnpike_api::FleetAdmin;
use turnpike_config::AdminAccess;
use turnpike_fleet::{ForwardedRequest, PeerAnswer, Rights};
use turnpike_wire::escape;

use crate::{
    problem::{PROBLEM_JSON, Problem},
    response_headers::DEPRECATION,
    via::Via,
};

/// Maximum concurrent requests.
const MOST: usize = 8;
/// Maximum length of a response in bytes. A page of allocations is a few hundred thousand bytes long.
const LONGEST: usize = 2 << 20;
/// Response headers that are forwarded along with the status.
pub(crate) const HEADERS: [HeaderName; 4] =
    [header::ALLOW, header::RETRY_AFTER, header::WWW_AUTHENTICATE, DEPRECATION];
/// Timeout for a response; the other node does not wait longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Path of a request to another node, as that node sees it.
pub(crate) fn path_at_node(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/v1/fleet/nodes/")?;
    let inner = &rest[rest.find('/')?..];
    inner.starts_with("/v1/").then_some(inner)
}

/// Answers requests until the fleet membership ends.
pub(crate) async fn answer(fleet: Arc<dyn FleetAdmin>, router: Router) {
    let room = Arc::new(Semaphore::new(MOST));
    while let Some((question, reply)) = fleet.next_question().await {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        let router = router.clone();
        tokio::spawn(async move {
            // A late response is dropped, as if this node were gone, but a change runs to completion.
            let begun = Instant::now();
            let ForwardedRequest { method, path, rights, by, .. } = question;
            let access = match rights {
                Rights::Full => AdminAccess::Full,
                Rights::Read => AdminAccess::Read,
            };
            let answer = ask(router, Via::Node(access, by), &method, path, String::new()).await;
            if begun.elapsed() < PATIENCE {
                reply(answer);
            }
            drop(place);
        });
    }
}

/// Handles a request that did not arrive over a connection. The body is JSON or empty.
pub(crate) async fn ask(router: Router, via: Via, method: &str, path: String, body: String) -> PeerAnswer {
    let mut request = Request::builder().method(method).uri(path);
    if !body.is_empty() {
        request = request.header(header::CONTENT_TYPE, "application/json");
    }
    let request = request.body(Body::from(body));
    let Ok(request) = request else {
        return problem(&Problem::bad_request("the request from the other node is invalid"));
    };
    let service = TowerToHyperService::new(router.layer(Extension(via)));
    let response: Result<Response, Infallible> = service.call(request).await;
    let Ok(response) = response;
    let status = response.status().as_u16();
    let media_type = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let media_type = media_type.unwrap_or_default().to_owned();
    let header = |name: &HeaderName| {
        let value = response.headers().get(name)?.to_str().ok()?;
        Some((name.as_str().to_owned(), value.to_owned()))
    };
    let headers = HEADERS.iter().filter_map(header).collect();
    let body = to_bytes(response.into_body(), LONGEST).await;
    match body.ok().and_then(|bytes| String::from_utf8(bytes.into()).ok()) {
        Some(body) => PeerAnswer { status, media_type, body, headers },
        None => {
            let detail = "the response is too long for another node; request fewer items at a time";
            problem(&Problem::new(StatusCode::INSUFFICIENT_STORAGE, "too_long", detail))
        }
    }
}

fn problem(problem: &Problem) -> PeerAnswer {
    let body = escape::json(&serde_json::to_string(problem).unwrap_or_default()).into_owned();
    PeerAnswer { status: problem.status, media_type: PROBLEM_JSON.to_owned(), body, headers: Vec::new() }
}
