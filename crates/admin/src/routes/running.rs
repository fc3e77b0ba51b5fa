//! The program as a whole: state, build, configuration, log, reload and drain.

use std::{env, time::Duration};

use axum::{
    Extension,
    extract::{Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use turnpike_api::{Build, Drain, Draining, LogLevel, NotReloaded, Reloaded, Status};
use turnpike_config::rename_log_targets;
use turnpike_measure::units::span;

use super::{App, Json, body};
use crate::{access::Audit, problem::Problem};

/// Maximum deadline of a drain in seconds, as in the configuration.
const LONGEST: u32 = 86_400;
/// Maximum number of characters in a log filter.
const LONGEST_FILTER: usize = 1000;

/// Shows the state of the program.
#[utoipa::path(
    get,
    path = "/v1/status",
    tag = "program",
    responses(
        (status = 200, description = "Its state.", body = Status),
    ),
)]
pub(super) async fn status(State(app): State<App>) -> Json<Status> {
    Json(app.live.status())
}

/// Shows the build of the program.
#[utoipa::path(
    get,
    path = "/v1/build",
    tag = "program",
    responses(
        (status = 200, description = "Version and target.", body = Build),
    ),
)]
pub(super) async fn build() -> Json<Build> {
    Json(Build {
        name: "turnpike".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        target: format!("{}-{}", env::consts::ARCH, env::consts::OS),
        profile: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
    })
}

/// Shows the effective configuration with the origin of each value. Secrets are masked.
#[utoipa::path(
    get,
    path = "/v1/config",
    tag = "program",
    responses(
        (status = 200, description = "TOML.", body = String, content_type = "application/toml"),
    ),
)]
pub(super) async fn config(State(app): State<App>) -> Response {
    ([(header::CONTENT_TYPE, "application/toml")], app.program.to_toml()).into_response()
}

/// Shows the log filter.
#[utoipa::path(
    get,
    path = "/v1/log",
    tag = "program",
    responses(
        (status = 200, description = "The current filter.", body = LogLevel),
    ),
)]
pub(super) async fn log_level(State(app): State<App>) -> Json<LogLevel> {
    Json(LogLevel { level: app.program.process().log_level() })
}

/// Changes the log filter until the program exits. The configuration is not changed.
#[utoipa::path(
    put,
    path = "/v1/log",
    tag = "program",
    request_body = LogLevel,
    responses(
        (status = 200, description = "The new filter.", body = LogLevel),
    ),
)]
pub(super) async fn set_log_level(State(app): State<App>, request: Request) -> Result<Response, Problem> {
    let mut wanted: LogLevel = body(request)
        .await?
        .ok_or_else(|| Problem::bad_request("a body is missing, such as {\"level\": \"debug\"}"))?;
    if !(1..=LONGEST_FILTER).contains(&wanted.level.len()) {
        return Err(Problem::bad_request(format!("level must be 1 to {LONGEST_FILTER} characters long")));
    }
    if let Some(level) = rename_log_targets(&wanted.level) {
        wanted.level = level;
    }
    let before = app.program.process().log_level();
    app.program
        .process()
        .set_log_level(&wanted.level)
        .map_err(|why| Problem::bad_request(format!("level: {why}")))?;
    let audit = Audit(format!("log level changed from {before:?} to {:?}", wanted.level));
    Ok((Extension(audit), Json(wanted)).into_response())
}

/// Reads the configuration and the certificates again. If there is an error, nothing changes.
#[utoipa::path(
    post,
    path = "/v1/reload",
    tag = "program",
    responses(
        (status = 200, description = "Changes, line by line.", body = Reloaded),
    ),
)]
pub(super) async fn reload(State(app): State<App>) -> Result<Response, Problem> {
    match app.program.process().reload().await {
        Ok(reloaded) => {
            let audit = Audit(match reloaded.changed.len() {
                0 => "no changes".to_owned(),
                count => format!("changed: {count}"),
            });
            Ok((Extension(audit), Json(reloaded)).into_response())
        }
        Err(NotReloaded::Refused(lines)) => {
            let detail = "the configuration is invalid, and the old one stays in effect";
            let problem = Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "wrong_configuration", detail);
            Err(problem.with_errors(lines))
        }
        Err(NotReloaded::Draining) => {
            Err(Problem::new(StatusCode::CONFLICT, "draining", "the program is draining and does not reload"))
        }
        Err(NotReloaded::Upgrade) => Err(Problem::new(
            StatusCode::CONFLICT,
            "upgrade",
            "another process is taking over: repeat the request",
        )),
    }
}

/// Drains the program: it accepts no new clients and exits when its last allocation or connection ends.
/// The limits in another request replace the earlier ones.
#[utoipa::path(
    post,
    path = "/v1/drain",
    tag = "program",
    request_body(content = Option<Drain>),
    responses(
        (status = 202, description = "The drain has started.", body = Draining),
    ),
)]
pub(super) async fn drain(State(app): State<App>, request: Request) -> Result<Response, Problem> {
    let wanted: Drain = body(request).await?.unwrap_or_default();
    if wanted.deadline_s.is_some_and(|seconds| seconds > LONGEST) {
        return Err(Problem::bad_request(format!("deadline_s must be 0 to {LONGEST}")));
    }
    let draining = app.program.process().drain(wanted).await.ok_or_else(Problem::stopping)?;
    let Draining { open, deadline_s } = draining;
    let audit = Audit(format!(
        "draining for at most {}; open allocations or connections: {open}",
        span(Duration::from_secs_f64(deadline_s + 0.5).as_secs())
    ));
    Ok((StatusCode::ACCEPTED, Extension(audit), Json(draining)).into_response())
}
