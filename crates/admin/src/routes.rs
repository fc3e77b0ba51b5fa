//! What can be asked, path by path. Each handler stands in a file of `routes/` with its description for the OpenAPI document.

mod accounts;
mod bans;
mod credentials;
mod fleet;
mod health;
mod live;
mod refusals;
mod running;
mod server;
mod sessions;

use std::sync::Arc;

use axum::{
    Router,
    body::{Bytes, to_bytes},
    extract::{Query, Request},
    http::{HeaderMap, Method, StatusCode, Uri, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use utoipa::{
    Modify, OpenApi,
    openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
};

use crate::{
    access,
    applications::{self, Gate},
    live::Feed,
    model::{Job, Problem},
    program::{Program, Server},
    threads::Threads,
    web,
};
pub(crate) use accounts::{RealmQuery, UserQuery};
use credentials::Desk;
pub(crate) use sessions::SessionQuery;

/// Bytes of the body of a request: more than any of ours has.
const MOST_BODY: usize = 4096;

/// What handlers work on.
#[derive(Clone)]
pub(crate) struct App {
    program: Arc<dyn Program>,
    threads: Arc<Threads>,
    live: Arc<Feed>,
}

/// What is answered to applications, behind a guard of its own.
pub(crate) fn for_applications(program: Arc<dyn Program>, gate: Gate) -> Router {
    Router::new()
        .route("/", get(credentials::rest).post(credentials::rest))
        .route("/v1/credentials", post(credentials::make))
        .route("/livez", get(health::live))
        .fallback(nothing_for_applications)
        .method_not_allowed_fallback(nothing_for_applications)
        .with_state(Desk::for_applications(program))
        .layer(middleware::from_fn_with_state(gate, applications::admit))
}

/// All paths, behind the guard. To be called within a runtime.
pub(crate) fn router(program: Arc<dyn Program>) -> Router {
    let app = App {
        program: Arc::clone(&program),
        threads: Arc::default(),
        live: Feed::start(Arc::clone(&program)),
    };
    Router::new()
        .route("/", get(credentials::front).post(credentials::rest))
        .route("/web/{name}", get(web::file))
        .route("/v1/credentials", post(credentials::make))
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .route("/healthz", get(health::ready))
        .route("/metrics", get(health::metrics))
        .route("/openapi.json", get(health::openapi))
        .route("/v1/access", get(live::access))
        .route("/v1/live", get(live::newest))
        .route("/v1/live/history", get(live::history))
        .route("/v1/live/events", get(live::events))
        .route("/v1/refusals", get(refusals::refusals))
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
        .route("/v1/secrets/rotation", post(accounts::rotate_secret))
        .route("/v1/secrets/{fingerprint}", delete(accounts::remove_secret))
        .route("/v1/keys", get(accounts::keys).post(accounts::put_key))
        .route("/v1/keys/{name}", delete(accounts::remove_key))
        .route("/v1/realms", get(accounts::realms).post(accounts::put_realm))
        .route("/v1/realms/{name}", delete(accounts::remove_realm))
        .route("/v1/limits", get(server::limits))
        .route("/v1/listeners", get(server::listeners))
        .route("/v1/certificates", get(server::certificates))
        .route("/v1/workers", get(server::workers))
        .route("/v1/fleet", get(fleet::fleet))
        .route("/v1/fleet/sessions", get(fleet::fleet_sessions))
        .route("/v1/fleet/nodes/{node}/drain", post(fleet::drain_node))
        .route("/v1/fleet/nodes/{node}/uncordon", post(fleet::uncordon_node))
        .route("/v1/fleet/nodes/{node}/v1/{*path}", get(fleet::of_node).delete(fleet::of_node))
        .route("/v1/bans", get(bans::bans).post(bans::put_ban).delete(bans::remove_ban))
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
                       token. Errors are problem details (RFC 9457). On listeners for applications (`credentials.listen`) `/`, \
                       `/v1/credentials` and `/livez` alone are answered, to who has a key of `/v1/keys` in place of a token."
    ),
    paths(
        credentials::front,
        credentials::rest,
        credentials::make,
        health::live,
        health::ready,
        health::health,
        health::metrics,
        health::openapi,
        live::access,
        live::newest,
        live::history,
        live::events,
        refusals::refusals,
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
        accounts::rotate_secret,
        accounts::keys,
        accounts::put_key,
        accounts::remove_key,
        accounts::realms,
        accounts::put_realm,
        accounts::remove_realm,
        server::limits,
        server::listeners,
        server::certificates,
        server::workers,
        fleet::fleet,
        fleet::fleet_sessions,
        fleet::drain_node,
        fleet::uncordon_node,
        fleet::of_node,
        fleet::end_of_node,
        bans::bans,
        bans::put_ban,
        bans::remove_ban,
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

/// The server, not to be kept while waiting.
fn server_of(program: &dyn Program) -> Result<Server, Problem> {
    match program.server() {
        Some(server) => Ok(server),
        None if program.job() == Job::Forward => Err(Problem::no_server()),
        None => Err(Problem::stopping()),
    }
}

async fn nothing_here(uri: Uri) -> Problem {
    let detail = format!("there is nothing at {}: /openapi.json says what there is", uri.path());
    Problem::new(StatusCode::NOT_FOUND, "no_such_path", detail)
}

async fn nothing_for_applications(method: Method, uri: Uri) -> Problem {
    let detail = format!(
        "{method} {} is not answered here: POST /v1/credentials is, and GET /?service=turn&username=NAME",
        uri.path()
    );
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
    let (headers, bytes) = bytes(request).await?;
    if bytes.is_empty() {
        return Ok(None);
    }
    check_type(&headers)?;
    read(&bytes).map(Some)
}

/// Head and body of a request.
async fn bytes(request: Request) -> Result<(HeaderMap, Bytes), Problem> {
    let (head, body) = request.into_parts();
    let bytes = to_bytes(body, MOST_BODY).await.map_err(|_| {
        let detail = format!("the body has more than {MOST_BODY} bytes, or did not come whole");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body", detail)
    })?;
    Ok((head.headers, bytes))
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
