//! What can be asked, path by path. Each handler stands in a file of `routes/` with its description for the OpenAPI document.

mod accounts;
mod bans;
mod fleet;
mod health;
mod running;
mod server;
mod sessions;

use std::{sync::Arc, time::Instant};

use axum::{
    Router,
    body::{Bytes, to_bytes},
    extract::{Query, Request},
    http::{HeaderMap, Method, StatusCode, Uri, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use jiff::Timestamp;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use utoipa::{
    Modify, OpenApi,
    openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
};

use crate::{access, model::Problem, program::Program, threads::Threads};
pub(crate) use accounts::{RealmQuery, UserQuery};
pub(crate) use sessions::SessionQuery;

/// Bytes of the body of a request: more than any of ours has.
const MOST_BODY: usize = 4096;

/// What handlers work on.
#[derive(Clone)]
pub(crate) struct App {
    program: Arc<dyn Program>,
    threads: Arc<Threads>,
    /// By both clocks: one tells the time, the other how long it is ago.
    started: (Timestamp, Instant),
}

/// All paths, behind the guard.
pub(crate) fn router(program: Arc<dyn Program>) -> Router {
    let app = App {
        program: Arc::clone(&program),
        threads: Arc::default(),
        started: (Timestamp::now(), Instant::now()),
    };
    Router::new()
        .route("/", get(health::front))
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .route("/healthz", get(health::ready))
        .route("/metrics", get(health::metrics))
        .route("/openapi.json", get(health::openapi))
        .route("/v1/status", get(running::status))
        .route("/v1/build", get(running::build))
        .route("/v1/config", get(running::config))
        .route("/v1/log", get(running::log_level).put(running::set_log_level))
        .route("/v1/reload", post(running::reload))
        .route("/v1/drain", post(running::drain))
        .route("/v1/sessions", get(sessions::list))
        .route("/v1/sessions/{id}", get(sessions::one).delete(sessions::end))
        .route("/v1/users", get(accounts::users).post(accounts::put_user))
        .route("/v1/users/{name}", delete(accounts::remove_user))
        .route("/v1/secrets", get(accounts::secrets).post(accounts::put_secret))
        .route("/v1/secrets/{fingerprint}", delete(accounts::remove_secret))
        .route("/v1/realms", get(accounts::realms).post(accounts::put_realm))
        .route("/v1/realms/{name}", delete(accounts::remove_realm))
        .route("/v1/limits", get(server::limits))
        .route("/v1/listeners", get(server::listeners))
        .route("/v1/certificates", get(server::certificates))
        .route("/v1/workers", get(server::workers))
        .route("/v1/fleet", get(fleet::fleet))
        .route("/v1/fleet/sessions", get(fleet::sessions))
        .route("/v1/fleet/nodes/{node}/drain", post(fleet::drain))
        .route("/v1/fleet/nodes/{node}/uncordon", post(fleet::uncordon))
        .route("/v1/fleet/nodes/{node}/v1/{*path}", get(fleet::of_node).delete(fleet::of_node))
        .route("/v1/bans", get(bans::list).post(bans::put).delete(bans::remove))
        .fallback(nothing_here)
        .method_not_allowed_fallback(not_so)
        .with_state(app)
        .layer(middleware::from_fn_with_state(program, access::admit))
}

/// The description of all that.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "turnpike",
        description = "The admin interface of `turnpike serve` and `turnpike forward`. Over its Unix socket everything may be done without a \
                       token. Errors are problem details (RFC 9457)."
    ),
    paths(
        health::front,
        health::live,
        health::ready,
        health::health,
        health::metrics,
        health::openapi,
        running::status,
        running::build,
        running::config,
        running::log_level,
        running::set_log_level,
        running::reload,
        running::drain,
        sessions::list,
        sessions::one,
        sessions::end,
        accounts::users,
        accounts::put_user,
        accounts::remove_user,
        accounts::secrets,
        accounts::put_secret,
        accounts::remove_secret,
        accounts::realms,
        accounts::put_realm,
        accounts::remove_realm,
        server::limits,
        server::listeners,
        server::certificates,
        server::workers,
        fleet::fleet,
        fleet::sessions,
        fleet::drain,
        fleet::uncordon,
        fleet::of_node,
        fleet::end_of_node,
        bans::list,
        bans::put,
        bans::remove,
    ),
    modifiers(&Token),
    security((), ("token" = [])),
)]
pub(crate) struct Document;

/// How tokens are sent.
struct Token;

impl Modify for Token {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("One of admin.tokens, or of admin.read_tokens to look."))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
    }
}

async fn nothing_here(uri: Uri) -> Problem {
    let detail = format!("there is nothing at {}: /openapi.json says what there is", uri.path());
    Problem::new(StatusCode::NOT_FOUND, "no_such_path", detail)
}

async fn not_so(method: Method, uri: Uri) -> Problem {
    let detail = format!("{} has no {method}: /openapi.json says what it has", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "no_such_method", detail)
}

/// An answer as JSON.
struct Json<T>(T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_string(&self.0) {
            Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text).into_response(),
            Err(error) => {
                let code = "not_written";
                Problem::new(StatusCode::INTERNAL_SERVER_ERROR, code, error.to_string()).into_response()
            }
        }
    }
}

/// What stands behind `?`; what nobody knows there is a mistake.
fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, Problem> {
    Query::try_from_uri(uri)
        .map(|Query(query)| query)
        .map_err(|error| Problem::bad_request(error.body_text()))
}

/// The JSON of a request; `None` if it has no body.
async fn body<T: DeserializeOwned>(request: Request) -> Result<Option<T>, Problem> {
    let (head, body) = request.into_parts();
    let bytes = to_bytes(body, MOST_BODY).await.map_err(|_| {
        let detail = format!("the body has more than {MOST_BODY} bytes, or did not come whole");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body", detail)
    })?;
    if bytes.is_empty() {
        return Ok(None);
    }
    check_type(&head.headers)?;
    read(&bytes).map(Some)
}

/// Other types a page of a stranger may send without being asked whether it may (CORS).
fn check_type(headers: &HeaderMap) -> Result<(), Problem> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let detail = "the body is expected to be JSON, with Content-Type: application/json";
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", detail))
}

fn read<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, Problem> {
    // First as an object: serde would take the members of one in a list, too.
    let object = serde_json::from_slice::<Map<String, Value>>(bytes);
    let read = object.and_then(|object| serde_json::from_value(Value::Object(object)));
    read.map_err(|error| Problem::bad_request(format!("the body cannot be read: {error}")))
}
