//! `/v1/events`: events for applications, as an endless stream that can be resumed.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use http_body_util::channel::{Channel, Sender};
use hyper::body::Bytes;
use serde::Deserialize;
use tokio::time::timeout;
use turnpike_api::Event;
use turnpike_config::{AdminAccess, EventType};
use turnpike_events::{SUBSCRIBERS, Subscription};
use utoipa::IntoParams;

use super::{App, query};
use crate::{access::RequestRights, connections::RequestProgress, live::Watched, problem::Problem};

/// Interval of comments, which keep the connection open and detect that it is not.
const BEAT: Duration = Duration::from_secs(15);
/// Time for a subscriber to receive an event.
const SLOW: Duration = Duration::from_secs(10);
const MOST_EVENTS: u64 = 1_000_000;

/// Selection of events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct StreamQuery {
    /// Types of events, separated by commas; by default, all. `lost` is always sent.
    #[param(example = "allocation.end,quota")]
    types: Option<String>,
    /// Number of events after which the stream ends; by default, it is endless.
    #[param(maximum = 1000000)]
    count: Option<u64>,
}

/// Streams events for applications as server-sent events, from now on or after `Last-Event-ID`.
///
/// The server keeps recent events in memory for subscribers that return within ten minutes: at most 16,384, and 8 MiB. If some are
/// gone, a `lost` event is first.
#[utoipa::path(
    get,
    path = "/v1/events",
    tag = "live",
    params(
        StreamQuery,
        ("Last-Event-ID" = Option<u64>, Header, description = "`id` of the last event that the client received."),
    ),
    responses(
        (status = 200, description = "Events with the fields `id`, a number without gaps, `event`, the type, and `data`, one line of JSON.", body = Event, content_type = "text/event-stream"),
    ),
)]
pub(super) async fn stream(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
    progress: Option<Extension<RequestProgress>>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Problem> {
    let StreamQuery { types, count } = query(&uri)?;
    if count.is_some_and(|count| count > MOST_EVENTS) {
        return Err(Problem::bad_request(format!("count must be 0 to {MOST_EVENTS}")));
    }
    let types = types.as_deref().map(parse_types).transpose()?.unwrap_or_default();
    let last = last_id(&headers)?;
    let events = app.program.events().ok_or_else(Problem::no_server)?;
    let Some(Extension(progress)) = progress else {
        let detail = "events are not forwarded between nodes: connect to this node itself";
        return Err(Problem::new(StatusCode::NOT_FOUND, "no_events", detail));
    };
    let subscription = events.subscribe(last, types).ok_or_else(|| {
        let detail =
            format!("the maximum of {SUBSCRIBERS} subscribers is reached: close one, or use a webhook");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_watchers", detail)
    })?;
    let (mut sender, body) = Channel::<Bytes>::new(1);
    let streaming = progress.stream();
    let program = Arc::clone(&app.program);
    tokio::spawn(async move {
        // A reload may have removed the token.
        let may_watch = || grant.access(&program.settings()) >= AdminAccess::Read;
        tokio::select! {
            ended = send(subscription, &mut sender, count, may_watch) => {
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

fn parse_types(text: &str) -> Result<Vec<&'static str>, Problem> {
    let types = text.split(',').map(|name| EventType::parse(name.trim()).map(EventType::name));
    types.collect::<Result<_, _>>().map_err(|why| Problem::bad_request(format!("types: {why}")))
}

fn last_id(headers: &HeaderMap) -> Result<Option<u64>, Problem> {
    let Some(value) = headers.get("last-event-id") else { return Ok(None) };
    let id = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    id.map(Some).ok_or_else(|| Problem::bad_request("Last-Event-ID must be the id of an event"))
}

async fn send(
    mut subscription: Subscription,
    to: &mut Sender<Bytes>,
    most: Option<u64>,
    may_watch: impl Fn() -> bool,
) -> Watched {
    let mut left = most.unwrap_or(u64::MAX);
    // Lets the client know that the stream has begun.
    let mut next = Bytes::from_static(b": events\n\n");
    loop {
        match timeout(SLOW, to.send_data(next)).await {
            Ok(Ok(())) if left > 0 => {}
            Ok(_) => return Watched::Ended,
            Err(_) => return Watched::Stalled,
        }
        next = match timeout(BEAT, subscription.next()).await {
            Ok(event) => {
                left -= 1;
                event
            }
            Err(_) => Bytes::from_static(b":\n\n"),
        };
        if !may_watch() {
            return Watched::Ended;
        }
    }
}
