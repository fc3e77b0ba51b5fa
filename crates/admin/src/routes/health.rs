//! Health checks, metrics, and the list of paths.

use std::fmt::Write as _;

use axum::{
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use turnpike_api::{FleetHealth, Job, RelayRange, RuleState, RuleStatus};

use super::App;
use crate::{access::COUNTS, connections, credential_issuer, plain_text::plain_text};

/// Media type of OpenMetrics, and its name in an Accept header.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const OPENMETRICS_TYPE: &str = "application/openmetrics-text";
/// Media type of [`plain_text`].
const PLAIN_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// End marker of OpenMetrics.
const END: &str = "# EOF\n";

/// OpenAPI document. The code that generates it is not in the program.
pub(super) const DOCUMENT: &str = include_str!("../../../../docs/openapi.json");

/// Response to `/` for programs.
pub(super) const PATHS: &str = "/metrics       metrics for Prometheus\n\
     /livez         ok while the program runs\n\
     /readyz        ok, alone, recovering, waiting, or draining; /healthz is the same\n\
     /openapi.json  description of the API: allocations, workers, listeners, reload, drain and so on\n\
     /              in a browser, a page with an overview\n";

/// Responds while the program is running.
#[utoipa::path(get, path = "/livez", tag = "health", responses((status = 200, description = "`ok`.", body = String, content_type = "text/plain")))]
pub(super) async fn live() -> &'static str {
    "ok\n"
}

/// Responds with 200 while the program accepts new clients.
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "health",
    responses(
        (status = 200, description = "`ok`; or `alone`: it accepts clients without knowing the state of the other nodes of its fleet; or `recovering`: it accepts clients, but only up to its equal share of quotas until the fleet's store knows the usage of all nodes; or `waiting`: this machine lacks some relay addresses, or some rules of a forwarder cannot be bound yet. With `?verbose`, or if a relay address is absent, a line for each relay address follows.", body = String, content_type = "text/plain"),
        (status = 503, description = "`draining`: it accepts no new clients; or `waiting`: this machine has none of the relay addresses, or no rule of a forwarder can be bound yet.", body = String, content_type = "text/plain"),
    ),
)]
pub(super) async fn ready(State(app): State<App>, uri: Uri) -> (StatusCode, String) {
    let relays = app.program.server().map_or_else(Vec::new, |server| server.relay_ranges());
    let (code, word) = readiness(&app, &relays);
    let mut text = format!("{word}\n");
    if uri.query() == Some("verbose") || relays.iter().any(|relay| !relay.up) {
        for RelayRange { address, up, since, .. } in &relays {
            let state = if *up { "up" } else { "absent" };
            let _ = writeln!(text, "relay address {address} {state} since {since}");
        }
    }
    (code, text)
}

fn readiness(app: &App, relays: &[RelayRange]) -> (StatusCode, &'static str) {
    let rules = app.program.rules();
    let is = |state: RuleState| move |rule: &RuleStatus| rule.state == state;
    if rules.iter().any(is(RuleState::Waiting)) && !app.program.process().is_draining() {
        let serves = rules.iter().any(is(RuleState::Listening));
        return (if serves { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, "waiting");
    }
    let health = app.program.fleet().map_or(FleetHealth::Healthy, |fleet| fleet.health());
    let drains = app.program.process().is_draining() || health == FleetHealth::Cordoned;
    match health {
        _ if drains => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        _ if relays.iter().any(|relay| !relay.up) => {
            let serves = relays.iter().any(|relay| relay.up);
            (if serves { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, "waiting")
        }
        FleetHealth::Isolated => (StatusCode::OK, "alone"),
        FleetHealth::Recovering => (StatusCode::OK, "recovering"),
        FleetHealth::Healthy | FleetHealth::Cordoned => (StatusCode::OK, "ok"),
    }
}

/// Responds like `/readyz`.
#[utoipa::path(
    get,
    path = "/healthz",
    tag = "health",
    responses(
        (status = 200, description = "`ok`; or `alone`: it accepts clients without knowing the state of the other nodes of its fleet; or `recovering`: it accepts clients, but only up to its equal share of quotas until the fleet's store knows the usage of all nodes; or `waiting`: this machine lacks some relay addresses, or some rules of a forwarder cannot be bound yet. With `?verbose`, or if a relay address is absent, a line for each relay address follows.", body = String, content_type = "text/plain"),
        (status = 503, description = "`draining`: it accepts no new clients; or `waiting`: this machine has none of the relay addresses, or no rule of a forwarder can be bound yet.", body = String, content_type = "text/plain"),
    ),
)]
#[expect(dead_code, reason = "describes a path that another handler serves")]
pub(super) fn health() {}

/// Returns all metrics for Prometheus: as OpenMetrics if `Accept` lists it, otherwise in the older text
/// format.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "health",
    responses(
        (
            status = 200,
            description = "Text in one of the two formats of Prometheus.",
            content((String = "application/openmetrics-text"), (String = "text/plain")),
        ),
    ),
)]
pub(super) async fn metrics(State(app): State<App>, headers: HeaderMap) -> Response {
    let is_server = app.program.job() == Job::Serve;
    let text = with_own_metrics(app.program.metrics(), is_server);
    let takes = |value: &HeaderValue| value.to_str().is_ok_and(|text| text.contains(OPENMETRICS_TYPE));
    if headers.get_all(header::ACCEPT).iter().any(takes) {
        ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response()
    } else {
        ([(header::CONTENT_TYPE, PLAIN_TEXT)], plain_text(&text)).into_response()
    }
}

/// A family of counters: name, help, label, and counts by label value.
type CounterFamily<'a> = (&'a str, &'a str, &'a str, &'a [(&'a str, u64)]);

/// Adds the interface's own metrics to a page of a server or a forwarder.
#[must_use]
pub fn with_own_metrics(mut text: String, is_server: bool) -> String {
    // Writing to a string cannot fail.
    let _ = add_own(&mut text, is_server);
    text
}

fn add_own(text: &mut String, is_server: bool) -> std::fmt::Result {
    if text.ends_with(END) {
        text.truncate(text.len() - END.len());
    }
    let own: [CounterFamily<'_>; 2] = [
        (
            "admin_connections_closed",
            "Connections to the admin interface that were refused, or closed before the response was received, by reason.",
            "reason",
            &connections::ADMIN.by_reason(),
        ),
        ("admin_requests", "Requests to the admin interface, by result.", "result", &COUNTS.requests()),
    ];
    let of_applications: [CounterFamily<'_>; 3] = [
        (
            "credentials_api_connections_closed",
            "Connections of applications that were refused, or closed before the response was received, by reason.",
            "reason",
            &connections::APPLICATIONS.by_reason(),
        ),
        (
            "credentials_api_issued",
            "Credentials and tokens made for applications and administrators, by kind.",
            "kind",
            &credential_issuer::COUNTS.issued(),
        ),
        (
            "credentials_api_refused",
            "Requests for credentials that were refused, by reason.",
            "reason",
            &credential_issuer::COUNTS.refused(),
        ),
    ];
    let families = own.iter().chain(of_applications.iter().filter(|_| is_server));
    for (name, help, label, counts) in families {
        write!(text, "# HELP turnpike_{name} {help}\n# TYPE turnpike_{name} counter\n")?;
        for (value, count) in *counts {
            writeln!(text, "turnpike_{name}_total{{{label}=\"{value}\"}} {count}")?;
        }
    }
    write!(
        text,
        "# HELP turnpike_admin_wrong_tokens Requests to the admin interface with an unknown token.\n\
         # TYPE turnpike_admin_wrong_tokens counter\nturnpike_admin_wrong_tokens_total {}\n{END}",
        COUNTS.wrong_tokens()
    )
}

/// Describes this API as an OpenAPI document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    tag = "health",
    responses(
        (status = 200, description = "OpenAPI 3.1.", body = Object),
    ),
)]
pub(super) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}
