//! What other nodes of a fleet ask: answered as if they had come by a connection, with what whoever asked there may do.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode, header},
    response::Response,
};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use tokio::{sync::Semaphore, time::Instant};
use turnpike_config::AdminAccess;
use turnpike_fleet::{Answer, Question, Rights};
use turnpike_wire::escape;

use crate::{access::Via, model::Problem, problem::PROBLEM_JSON, program::Fleet};

/// At a time.
const MOST: usize = 8;
/// Bytes of an answer: a page of sessions has some hundred thousand.
const LONGEST: usize = 2 << 20;
/// For one of them; nobody waits longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers until there are no more.
pub(crate) async fn answer(fleet: Arc<dyn Fleet>, router: Router) {
    let room = Arc::new(Semaphore::new(MOST));
    while let Some((question, reply)) = fleet.next_question().await {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        let router = router.clone();
        tokio::spawn(async move {
            // A late answer is dropped, as if this node were gone; what was asked runs to its end all the same.
            let begun = Instant::now();
            let Question { method, path, rights, by, .. } = question;
            let access = match rights {
                Rights::Full => AdminAccess::Full,
                Rights::Read => AdminAccess::Read,
            };
            let answer = ask(router, Via::Node(access, by), &method, path).await;
            if begun.elapsed() < PATIENCE {
                reply(answer);
            }
            drop(place);
        });
    }
}

/// Answers a request without a body that came by no connection.
pub(crate) async fn ask(router: Router, via: Via, method: &str, path: String) -> Answer {
    let request = Request::builder().method(method).uri(path).body(Body::empty());
    let Ok(request) = request else {
        return problem(&Problem::bad_request("what another node asks is no request"));
    };
    let service = TowerToHyperService::new(router.layer(Extension(via)));
    let response: Result<Response, Infallible> = service.call(request).await;
    let Ok(response) = response;
    let status = response.status().as_u16();
    let media_type = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let media_type = media_type.unwrap_or_default().to_owned();
    let body = to_bytes(response.into_body(), LONGEST).await;
    match body.ok().and_then(|bytes| String::from_utf8(bytes.into()).ok()) {
        Some(body) => Answer { status, media_type, body },
        None => {
            let detail = "the answer is too long for another node; ask for fewer at a time";
            problem(&Problem::new(StatusCode::INSUFFICIENT_STORAGE, "too_long", detail))
        }
    }
}

fn problem(problem: &Problem) -> Answer {
    let body = escape::json(&serde_json::to_string(problem).unwrap_or_default()).into_owned();
    Answer { status: problem.status, media_type: PROBLEM_JSON.to_owned(), body }
}
