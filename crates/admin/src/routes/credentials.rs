//! Credentials for applications, on the admin interface and on listeners of their own: as a browser wants them, and as the draft of a TURN
//! REST API has it (draft-uberti-behave-turn-rest).

use std::time::{SystemTime, UNIX_EPOCH};

use axum::{
    Extension,
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use jiff::Timestamp;
use serde::Deserialize;
use turnpike_config::{Secret, access_tokens::MadeToken};
use turnpike_stores::ApiKey;
use utoipa::IntoParams;

use super::{App, Json, body, bytes, health, query, running::seconds};
use crate::{
    access::{Via, token},
    issue::{Grant, Issued, Refusal, issue},
    model::{Credentials, CredentialsRequest, IceCredential, IceServer, IceToken, Problem, RestCredentials},
};

/// By which way somebody asks.
#[derive(Clone, Copy)]
pub(crate) enum Asks {
    /// Over the admin interface, which has let in but who may do everything.
    Administrator,
    /// On a listener for applications, where a key is needed.
    Application,
}

/// What the draft has, and, as ours, `ttl` and `realm`.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct RestQuery {
    /// `turn`
    service: Option<String>,
    /// Whose the credential is: 1 to 256 bytes; somebody else each time, if it is not there.
    username: Option<String>,
    /// The key of the application, on a listener for those. Not looked at on the admin interface.
    key: Option<String>,
    /// The same as `key`, as Janus calls it.
    api: Option<String>,
    /// Seconds for which it is good; `credentials.ttl` if it is not there.
    #[param(minimum = 1)]
    ttl: Option<u32>,
    /// The realm; that of the key, or `server.realm`, if it is not there.
    realm: Option<String>,
}

/// Makes a credential for a user, or a token (RFC 7635) if `kid` is there: what `new RTCPeerConnection` takes.
#[utoipa::path(
    post,
    path = "/v1/credentials",
    tag = "credentials",
    request_body(content = Option<CredentialsRequest>),
    responses(
        (status = 200, description = "The credential, and all ways to this server.", body = Credentials),
        (status = "default", description = "It was not done.", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn make(
    State(app): State<App>,
    Extension(asks): Extension<Asks>,
    Extension(via): Extension<Via>,
    request: Request,
) -> Response {
    app.make(asks, via, request).await.unwrap_or_else(Refusal::answer)
}

/// One line a path. With a query, a credential, as the draft of a TURN REST API has it: `/?service=turn&username=alice`.
#[utoipa::path(
    get,
    path = "/",
    tag = "credentials",
    params(RestQuery),
    responses(
        (
            status = 200,
            description = "What there is to look at; or the credential, and all ways to this server.",
            content((String = "text/plain"), (RestCredentials = "application/json")),
        ),
        (status = "default", description = "It was not done.", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn rest_get(
    state: State<App>,
    Extension(asks): Extension<Asks>,
    via: Extension<Via>,
    request: Request,
) -> Response {
    match asks {
        Asks::Administrator if request.uri().query().is_none() => health::front().into_response(),
        _ => rest(state, Extension(asks), via, request).await,
    }
}

/// The same by a POST, which the draft has too: with its parameters in the URI, as a form, or both, as Janus has them.
#[utoipa::path(
    post,
    path = "/",
    tag = "credentials",
    params(RestQuery),
    responses(
        (status = 200, description = "The credential, and all ways to this server.", body = RestCredentials),
        (status = "default", description = "It was not done.", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(crate) async fn rest(
    State(app): State<App>,
    Extension(asks): Extension<Asks>,
    Extension(via): Extension<Via>,
    request: Request,
) -> Response {
    app.make_as_in_the_draft(asks, via, request).await.unwrap_or_else(Refusal::answer)
}

impl RestQuery {
    /// Of the URI, and of the body of a POST. What stands in both must be the same.
    async fn of(request: Request) -> Result<Self, Problem> {
        let in_uri: Self = query(request.uri())?;
        if *request.method() != Method::POST {
            return Ok(in_uri);
        }
        let (headers, bytes) = bytes(request).await?;
        if bytes.is_empty() {
            return Ok(in_uri);
        }
        if !is_form(&headers) {
            let detail =
                "a body is expected to be a form, with Content-Type: application/x-www-form-urlencoded";
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "no_form", detail));
        }
        let in_body: Self = serde_urlencoded::from_bytes(&bytes)
            .map_err(|error| Problem::bad_request(format!("the form cannot be read: {error}")))?;
        Ok(Self {
            service: one_of("service", in_uri.service, in_body.service)?,
            username: one_of("username", in_uri.username, in_body.username)?,
            key: one_of("key", in_uri.key, in_body.key)?,
            api: one_of("api", in_uri.api, in_body.api)?,
            ttl: one_of("ttl", in_uri.ttl, in_body.ttl)?,
            realm: one_of("realm", in_uri.realm, in_body.realm)?,
        })
    }
}

/// What is said in two places.
fn one_of<T: PartialEq>(what: &str, one: Option<T>, other: Option<T>) -> Result<Option<T>, Problem> {
    match (one, other) {
        (Some(one), Some(other)) if one != other => {
            Err(Problem::bad_request(format!("{what} is said twice, and not the same")))
        }
        (one, other) => Ok(one.or(other)),
    }
}

fn is_form(headers: &HeaderMap) -> bool {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

/// The key in the head of a request. On the admin interface a token stands there, and has been looked at.
fn shown(headers: &HeaderMap, asks: Asks) -> Result<Option<Secret>, Problem> {
    match asks {
        Asks::Administrator => Ok(None),
        Asks::Application => Ok(token(headers)?.map(Secret::new)),
    }
}

impl App {
    async fn make(&self, asks: Asks, via: Via, request: Request) -> Result<Response, Refusal> {
        let shown = shown(request.headers(), asks)?;
        let key = self.judge(asks, via, shown).await?;
        let wanted = body::<CredentialsRequest>(request).await?.unwrap_or_default();
        let issued = self.issue(key.as_ref(), wanted)?;
        let audit = issued.audit(key.as_ref());
        Ok((Extension(audit), Json(for_browsers(issued))).into_response())
    }

    async fn make_as_in_the_draft(
        &self,
        asks: Asks,
        via: Via,
        request: Request,
    ) -> Result<Response, Refusal> {
        let in_header = shown(request.headers(), asks)?;
        let RestQuery { service, username, key, api, ttl, realm } = RestQuery::of(request).await?;
        let in_query = one_of("key", key, api)?.map(Secret::new);
        let shown = one_of("the key", in_header, in_query)?;
        let key = self.judge(asks, via, shown).await?;
        if service.as_deref() != Some("turn") {
            let detail = "service is expected to be turn: /?service=turn&username=NAME";
            return Err(Problem::bad_request(detail).into());
        }
        let wanted = CredentialsRequest { user: username, ttl, realm, kid: None };
        let issued = self.issue(key.as_ref(), wanted)?;
        let audit = issued.audit(key.as_ref());
        Ok((Extension(audit), Json(as_in_the_draft(issued))).into_response())
    }

    /// The key of an application; none of an administrator, who needs none.
    async fn judge(&self, asks: Asks, via: Via, shown: Option<Secret>) -> Result<Option<ApiKey>, Refusal> {
        match asks {
            Asks::Administrator => Ok(None),
            Asks::Application => self.keys.judge(self.server(), via, shown).await.map(Some),
        }
    }

    fn issue(&self, key: Option<&ApiKey>, wanted: CredentialsRequest) -> Result<Issued, Refusal> {
        if self.program.is_draining() {
            let detail = "this server takes no new clients: ask another one";
            return Err(Refusal::unavailable("draining", detail));
        }
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        issue(&self.server()?, key, wanted, unix)
    }
}

fn for_browsers(issued: Issued) -> Credentials {
    let Issued { realm, ttl, expiry, uris, grant, .. } = issued;
    let (username, credential, credential_type) = match grant {
        Grant::Password { username, password } => {
            (username, IceCredential::Password(password.reveal().to_owned()), None)
        }
        Grant::Token { kid, token: MadeToken { access_token, mac_key } } => {
            let (mac_key, access_token) = (mac_key.reveal().to_owned(), access_token.reveal().to_owned());
            (kid, IceCredential::Token(IceToken { mac_key, access_token }), Some("oauth".to_owned()))
        }
    };
    let end = Timestamp::from_second(i64::try_from(expiry).unwrap_or(i64::MAX)).unwrap_or(Timestamp::MAX);
    let ice_servers = vec![IceServer { urls: uris, username, credential, credential_type }];
    Credentials { ice_servers, realm, ttl, expires_at: seconds(end) }
}

fn as_in_the_draft(issued: Issued) -> RestCredentials {
    let Issued { ttl, uris, grant, .. } = issued;
    let (username, password) = match grant {
        Grant::Password { username, password } => (username, password.reveal().to_owned()),
        // The draft has none, and none is asked for by it.
        Grant::Token { kid, .. } => (kid, String::new()),
    };
    RestCredentials { username, password, ttl, uris }
}
