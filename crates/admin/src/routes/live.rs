//! What the program does at this moment: once, for the last minutes, or as a stream of events without an end.

use std::sync::Arc;

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use http_body_util::channel::Channel;
use hyper::body::Bytes;
use serde::Deserialize;
use turnpike_config::AdminAccess;
use utoipa::IntoParams;

use super::{App, Json, query};
use crate::{
    access::Grant,
    connections::Progress,
    live::{WATCHERS, Watched},
    model::{Access, History, Live, LiveEvent, Problem},
};

/// How many events are wanted.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventQuery {
    /// The stream ends after so many `live` events; without it, it has no end.
    count: Option<u64>,
}

/// What whoever asks may do, as the page wants to know it.
#[utoipa::path(
    get,
    path = "/v1/access",
    tag = "program",
    responses(
        (status = 200, description = "What is allowed.", body = Access),
    ),
)]
pub(super) async fn access(State(app): State<App>, Extension(grant): Extension<Grant>) -> Json<Access> {
    let may_change = grant.access(&app.program.settings()) >= AdminAccess::Full;
    Json(Access { may_change })
}

/// What the program does at this moment.
#[utoipa::path(
    get,
    path = "/v1/live",
    tag = "live",
    responses(
        (status = 200, description = "At most a second or two old.", body = Live),
    ),
)]
pub(super) async fn newest(State(app): State<App>) -> Result<Json<Live>, Problem> {
    let frame = app.live.newest().await.ok_or_else(Problem::stopping)?;
    Ok(Json(frame.live.clone()))
}

/// The last ten minutes, a second apart.
#[utoipa::path(
    get,
    path = "/v1/live/history",
    tag = "live",
    responses(
        (status = 200, description = "Lists of the same length, the oldest first.", body = History),
    ),
)]
pub(super) async fn history(State(app): State<App>) -> Json<History> {
    Json(app.live.history())
}

/// The same as events: `history` once, with what `/v1/live/history` says, and then `live` each second, with what `/v1/live` says.
#[utoipa::path(
    get,
    path = "/v1/live/events",
    tag = "live",
    params(EventQuery),
    responses(
        (status = 200, description = "Server-sent events: `event` is the name, `data` one line of JSON.", body = LiveEvent, content_type = "text/event-stream"),
    ),
)]
pub(super) async fn events(
    State(app): State<App>,
    Extension(grant): Extension<Grant>,
    progress: Option<Extension<Progress>>,
    uri: Uri,
) -> Result<Response, Problem> {
    let EventQuery { count } = query(&uri)?;
    let Some(Extension(progress)) = progress else {
        let detail =
            "events are not passed on by another node: ask this node itself, or for live and live/history";
        return Err(Problem::new(StatusCode::NOT_FOUND, "no_events", detail));
    };
    let watcher = app.live.watcher().ok_or_else(|| {
        let detail = format!("{WATCHERS} watch already, and no more may: ask for /v1/live now and then");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_watchers", detail)
    })?;
    let (mut sender, body) = Channel::<Bytes>::new(1);
    let streaming = progress.stream();
    let program = Arc::clone(&app.program);
    tokio::spawn(async move {
        // A reload may have taken the token away.
        let may_watch = || grant.access(&program.settings()) >= AdminAccess::Read;
        tokio::select! {
            ended = watcher.send(&mut sender, count, may_watch) => {
                if ended == Watched::Stalled {
                    streaming.give_up();
                }
            }
            // The client has left.
            () = progress.streamed() => {}
        }
        drop(streaming);
    });
    // Proxies are not to collect what is sent.
    let headers = [(header::CONTENT_TYPE.as_str(), "text/event-stream"), ("x-accel-buffering", "no")];
    Ok((headers, Body::new(body)).into_response())
}
