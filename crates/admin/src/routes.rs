//! Routes of the API, with their descriptions for the OpenAPI document.

mod accounts;
mod allocation_query;
mod allocations;
mod bans;
mod capture;
mod credentials;
mod deprecated;
mod errors;
mod events;
mod examples;
mod fleet;
mod health;
mod input;
mod live;
mod parameters;
mod refusals;
mod running;
mod server;
mod usage;
mod vendor_credentials;

use std::sync::Arc;

use axum::{
    Router,
    extract::FromRef,
    http::{Method, StatusCode, Uri, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use serde::Serialize;
use turnpike_api::Job;
use turnpike_wire::escape;
use utoipa::{
    Modify, OpenApi,
    openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
};

use crate::{
    access,
    application_access::{self, ApplicationGate},
    changes::Changes,
    live::Feed,
    predecessor::Predecessor,
    problem::Problem,
    program::{Owner, ServerView},
    threads::Threads,
    web,
};
use credentials::CredentialService;
use errors::ErrorResponses;
use examples::Examples;
pub use health::with_own_metrics;
use input::{PathPart, body, bytes, form, path_part, query};
use parameters::Parameters;

#[derive(Clone)]
pub(crate) struct App {
    program: Arc<dyn Owner>,
    threads: Arc<Threads>,
    live: Arc<Feed>,
    /// Set after an upgrade, until the previous process exits.
    predecessor: Option<Arc<Predecessor>>,
}

pub(crate) fn for_applications(program: Arc<dyn Owner>, gate: ApplicationGate) -> Router {
    Router::new()
        .route("/", get(credentials::rest).post(credentials::rest))
        .route("/v1/credentials", post(credentials::make))
        .merge(of_vendors())
        .route("/livez", get(health::live))
        .route_layer(middleware::from_fn_with_state(Parameters::of_document(), parameters::check))
        .fallback(nothing_for_applications)
        .method_not_allowed_fallback(nothing_for_applications)
        .with_state(CredentialService::for_applications(program))
        .layer(middleware::from_fn_with_state(gate, application_access::admit))
}

pub(crate) fn router(program: Arc<dyn Owner>, changes: Changes, predecessor: Option<Predecessor>) -> Router {
    let app = App {
        program: Arc::clone(&program),
        threads: Arc::default(),
        live: Feed::start(Arc::clone(&program)),
        predecessor: predecessor.map(Arc::new),
    };
    Router::new()
        .route("/", get(credentials::front).post(credentials::rest))
        .route("/web/{name}", get(web::file))
        .route("/v1/credentials", post(credentials::make))
        .merge(of_vendors())
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .route("/healthz", get(health::ready))
        .route("/metrics", get(health::metrics))
        .route("/openapi.json", get(health::openapi))
        .route("/v1/access", get(live::access))
        .route("/v1/live", get(live::newest))
        .route("/v1/live/history", get(live::history))
        .route("/v1/live/events", get(live::events))
        .route("/v1/events", get(events::stream))
        .route("/v1/refusals", get(refusals::refusals))
        .route("/v1/status", get(running::status))
        .route("/v1/build", get(running::build))
        .route("/v1/config", get(running::config))
        .route("/v1/log", get(running::log_level).put(running::set_log_level))
        .route("/v1/reload", post(running::reload))
        .route("/v1/drain", post(running::drain))
        .route("/v1/allocations", get(allocations::list))
        .route("/v1/allocations/{id}", get(allocations::one).delete(allocations::end))
        .route("/v1/allocations/{id}/capture", get(capture::capture))
        .merge(old_paths())
        .route("/v1/users", get(accounts::users).post(accounts::put_user))
        .route("/v1/users/{name}", delete(accounts::remove_user))
        .route("/v1/secrets", get(accounts::secrets).post(accounts::put_secret))
        .route("/v1/secrets/rotation", post(accounts::rotate_secret))
        .route("/v1/secrets/{fingerprint}", delete(accounts::remove_secret))
        .route("/v1/keys", get(accounts::keys).post(accounts::put_key))
        .route("/v1/keys/{name}", delete(accounts::remove_key))
        .route("/v1/realms", get(accounts::realms).post(accounts::put_realm))
        .route("/v1/realms/{name}", delete(accounts::remove_realm))
        .route("/v1/usage", get(usage::usage))
        .route("/v1/limits", get(server::limits))
        .route("/v1/listeners", get(server::listeners))
        .route("/v1/certificates", get(server::certificates))
        .route("/v1/workers", get(server::workers))
        .route("/v1/fleet", get(fleet::fleet))
        .route("/v1/fleet/allocations", get(fleet::fleet_allocations))
        .route("/v1/fleet/nodes/{node}/drain", post(fleet::drain_node))
        .route("/v1/fleet/nodes/{node}/uncordon", post(fleet::uncordon_node))
        .route("/v1/fleet/nodes/{node}/v1/{*path}", get(fleet::of_node).delete(fleet::of_node))
        .route("/v1/bans", get(bans::bans).post(bans::put_ban).delete(bans::remove_ban))
        .route_layer(middleware::from_fn_with_state(Parameters::of_document(), parameters::check))
        .fallback(nothing_here)
        .method_not_allowed_fallback(not_so)
        .with_state(app)
        .layer(middleware::from_fn_with_state(access::Guard::new(program, changes), access::admit))
}

fn of_vendors<S: Clone + Send + Sync + 'static>() -> Router<S>
where
    CredentialService: FromRef<S>,
{
    use vendor_credentials::{
        cloudflare_credentials, cloudflare_ice_servers, cloudflare_revoke, twilio_token,
    };
    Router::new()
        .route("/v1/turn/keys/{key}/credentials/generate-ice-servers", post(cloudflare_ice_servers))
        .route("/v1/turn/keys/{key}/credentials/generate", post(cloudflare_credentials))
        .route("/v1/turn/keys/{key}/credentials/{username}/revoke", post(cloudflare_revoke))
        .route("/2010-04-01/Accounts/{sid}/Tokens.json", post(twilio_token))
}

fn old_paths() -> Router<App> {
    Router::new()
        .route("/v1/sessions", get(allocations::list))
        .route("/v1/sessions/{id}", get(allocations::one).delete(allocations::end))
        .route("/v1/fleet/sessions", get(fleet::fleet_allocations))
        .route_layer(middleware::from_fn(deprecated::answer))
}

/// Generates docs/openapi.json, which the program serves.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "turnpike",
        description = "The admin interface of `turnpike serve` and `turnpike forward`. The Unix socket needs no token. A request may have at most \
                       8 KiB of headers and 4 KiB of body. Errors are problem details (RFC 9457). Listeners for applications (`credentials.listen`) serve only `/`, \
                       `/v1/credentials`, `/v1/turn/keys`, `/2010-04-01/Accounts` and `/livez`, with a key from `/v1/keys` instead of a token."
    ),
    paths(
        credentials::front,
        credentials::rest,
        credentials::make,
        vendor_credentials::cloudflare_ice_servers,
        vendor_credentials::cloudflare_credentials,
        vendor_credentials::cloudflare_revoke,
        vendor_credentials::twilio_token,
        health::live,
        health::ready,
        health::health,
        health::metrics,
        health::openapi,
        live::access,
        live::newest,
        live::history,
        live::events,
        events::stream,
        refusals::refusals,
        running::status,
        running::build,
        running::config,
        running::log_level,
        running::set_log_level,
        running::reload,
        running::drain,
        allocations::list,
        allocations::one,
        allocations::end,
        capture::capture,
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
        usage::usage,
        server::limits,
        server::listeners,
        server::certificates,
        server::workers,
        fleet::fleet,
        fleet::fleet_allocations,
        fleet::drain_node,
        fleet::uncordon_node,
        fleet::of_node,
        fleet::end_of_node,
        bans::bans,
        bans::put_ban,
        bans::remove_ban,
    ),
    components(schemas(Problem)),
    modifiers(&TokenScheme, &ErrorResponses, &Examples),
    security((), ("token" = [])),
)]
pub struct ApiDocument;

/// Security scheme for tokens.
struct TokenScheme;

impl Modify for TokenScheme {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("A token from admin.tokens, or from admin.read_tokens for read access."))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
    }
}

fn server_of(program: &dyn Owner) -> Result<ServerView, Problem> {
    match program.server() {
        Some(server) => Ok(server),
        None if program.job() == Job::Forward => Err(Problem::no_server()),
        None => Err(Problem::stopping()),
    }
}

async fn nothing_here(uri: Uri) -> Problem {
    let detail = format!("there is no path {}: see /openapi.json", uri.path());
    Problem::new(StatusCode::NOT_FOUND, "no_such_path", detail)
}

async fn nothing_for_applications(method: Method, uri: Uri) -> Problem {
    let detail = format!(
        "{method} {} is not available here: use POST /v1/credentials or GET /?service=turn&username=NAME",
        uri.path()
    );
    Problem::new(StatusCode::NOT_FOUND, "no_such_path", detail)
}

async fn not_so(method: Method, uri: Uri) -> Problem {
    let detail = format!("{} does not support {method}: see /openapi.json", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "no_such_method", detail)
}

struct Json<T>(T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        json(&self.0)
    }
}

fn json(value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => {
            let text = escape::json(&text).into_owned();
            ([(header::CONTENT_TYPE, "application/json")], text).into_response()
        }
        Err(error) => {
            let code = "not_written";
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, code, error.to_string()).into_response()
        }
    }
}
