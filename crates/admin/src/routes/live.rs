//! Current activity: once, for the last minutes, or as an endless stream of events.

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
use turnpike_api::{ClientRights, History, Live, LiveEvent};
use turnpike_config::AdminAccess;
use utoipa::IntoParams;

use super::{App, Json, query};
use crate::{
    access::RequestRights,
    connections::RequestProgress,
    live::{WATCHERS, Watched},
    problem::Problem,
};

/// Maximum number of `live` events in a stream that ends.
const MOST_EVENTS: u64 = 1_000_000;

/// Length of the stream.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventQuery {
    /// Number of `live` events after which the stream ends; by default, it is endless.
    #[param(maximum = 1000000)]
    count: Option<u64>,
}

/// Shows the rights of the client.
#[utoipa::path(
    get,
    path = "/v1/access",
    tag = "program",
    responses(
        (status = 200, description = "The rights.", body = ClientRights),
    ),
)]
pub(super) async fn access(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
) -> Json<ClientRights> {
    let may_change = grant.access(&app.program.settings()) >= AdminAccess::Full;
    Json(ClientRights { may_change })
}

/// Shows the current activity of the program.
#[utoipa::path(
    get,
    path = "/v1/live",
    tag = "live",
    responses(
        (status = 200, description = "The activity, at most two seconds old.", body = Live),
    ),
)]
pub(super) async fn newest(State(app): State<App>) -> Result<Json<Live>, Problem> {
    let frame = app.live.newest().await.ok_or_else(Problem::stopping)?;
    Ok(Json(frame.live.clone()))
}

/// Shows the last ten minutes in steps of one second.
#[utoipa::path(
    get,
    path = "/v1/live/history",
    tag = "live",
    responses(
        (status = 200, description = "Lists of equal length, the oldest value first.", body = History),
    ),
)]
pub(super) async fn history(State(app): State<App>) -> Json<History> {
    Json(app.live.history())
}

/// Streams server-sent events: first `history` with the data of `/v1/live/history`, then `live` each second with the data of `/v1/live`.
#[utoipa::path(
    get,
    path = "/v1/live/events",
    tag = "live",
    params(EventQuery),
    responses(
        (status = 200, description = "Events with the fields `event` and `data`; `data` is one line of JSON.", body = LiveEvent, content_type = "text/event-stream"),
    ),
)]
pub(super) async fn events(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
    progress: Option<Extension<RequestProgress>>,
    uri: Uri,
) -> Result<Response, Problem> {
    let EventQuery { count } = query(&uri)?;
    if count.is_some_and(|count| count > MOST_EVENTS) {
        return Err(Problem::bad_request(format!("count must be 0 to {MOST_EVENTS}")));
    }
    let Some(Extension(progress)) = progress else {
        let detail = "events are not forwarded between nodes: connect to this node itself, or use live and live/history";
        return Err(Problem::new(StatusCode::NOT_FOUND, "no_events", detail));
    };
    let watcher = app.live.watcher().ok_or_else(|| {
        let detail = format!("the maximum of {WATCHERS} subscribers is reached: poll /v1/live instead");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_watchers", detail)
    })?;
    let (mut sender, body) = Channel::<Bytes>::new(1);
    let streaming = progress.stream();
    let program = Arc::clone(&app.program);
    tokio::spawn(async move {
        // A reload may have removed the token.
        let may_watch = || grant.access(&program.settings()) >= AdminAccess::Read;
        tokio::select! {
            ended = watcher.send(&mut sender, count, may_watch) => {
                if ended == Watched::Stalled {
                    streaming.give_up();
                }
            }
            // The client has disconnected.
            () = progress.streamed() => {}
        }
        drop(streaming);
    });
    // Keeps proxies from buffering.
    let headers = [(header::CONTENT_TYPE.as_str(), "text/event-stream"), ("x-accel-buffering", "no")];
    Ok((headers, Body::new(body)).into_response())
}
