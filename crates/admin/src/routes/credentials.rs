//! Credentials for applications: in the format for browsers, and in that of draft-uberti-behave-turn-rest.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::{
    Extension,
    extract::{FromRef, Request, State},
    http::{HeaderMap, Method, header},
    response::{IntoResponse, Response},
};
use jiff::Timestamp;
use serde::Deserialize;
use turnpike_api::{
    CredentialsRequest, IceCredential, IceServer, IceToken, IssuedCredential, RestCredentials,
};
use turnpike_config::{Secret, access_tokens::MadeToken};
use turnpike_stores::ApiKey;
use utoipa::{IntoParams, ToSchema};

use super::{App, Json, body, bytes, form, health, query, server_of};
use crate::{
    access::{asks_for_credential, token},
    application_access::ApplicationKeys,
    credential_issuer::{CredentialRefusal, Issued, IssuedSecret, issue},
    problem::Problem,
    program::{Owner, seconds},
    via::Via,
    web,
};

#[derive(Clone)]
pub(crate) struct CredentialService {
    pub(super) program: Arc<dyn Owner>,
    /// Keys for the separate listeners. `None` on the admin interface, where only clients with full access
    /// reach this code.
    keys: Option<Arc<ApplicationKeys>>,
}

impl CredentialService {
    pub(super) fn for_applications(program: Arc<dyn Owner>) -> Self {
        Self { program, keys: Some(Arc::default()) }
    }
}

impl FromRef<App> for CredentialService {
    fn from_ref(app: &App) -> Self {
        Self { program: Arc::clone(&app.program), keys: None }
    }
}

/// Parameters of the draft, plus turnpike's own `ttl` and `realm`.
#[derive(Deserialize, IntoParams, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "service": "turn", "username": "alice" }))]
#[into_params(parameter_in = Query)]
pub(crate) struct RestQuery {
    /// Always `turn`.
    #[schema(pattern = "^turn$")]
    #[param(pattern = "^turn$")]
    service: Option<String>,
    /// Owner of the credential: 1 to 256 bytes; default a random name.
    #[schema(min_length = 1, max_length = 256)]
    #[param(min_length = 1, max_length = 256)]
    username: Option<String>,
    /// The application's key, on a listener for applications; ignored on the admin interface.
    key: Option<String>,
    /// Alias of `key`, used by Janus.
    api: Option<String>,
    /// Lifetime in seconds, at most `credentials.max_ttl`; default `credentials.ttl`.
    #[schema(minimum = 1, maximum = 31536000)]
    #[param(minimum = 1, maximum = 31536000)]
    ttl: Option<u32>,
    /// The realm; default that of the key, or `server.realm`.
    #[schema(min_length = 1, max_length = 127)]
    #[param(min_length = 1, max_length = 127)]
    realm: Option<String>,
}

/// Issues a credential for a user or, with `kid`, a token (RFC 7635), in the format that `new RTCPeerConnection` accepts.
#[utoipa::path(
    post,
    path = "/v1/credentials",
    tag = "credentials",
    request_body(content = Option<CredentialsRequest>),
    responses(
        (status = 200, description = "The credential and all URIs of this server.", body = IssuedCredential),
    ),
)]
pub(crate) async fn make(
    State(service): State<CredentialService>,
    Extension(via): Extension<Via>,
    request: Request,
) -> Response {
    service.make(&via, request).await.unwrap_or_else(CredentialRefusal::answer)
}

/// Shows the web page to browsers, and a list of paths to other clients. With a query such as `/?service=turn&username=alice`, issues a
/// credential in the format of the TURN REST API draft.
#[utoipa::path(
    get,
    path = "/",
    tag = "credentials",
    params(RestQuery),
    responses(
        (
            status = 200,
            description = "The web page or the list of paths; or the credential and all URIs of this server.",
            content((String = "text/plain"), (String = "text/html"), (RestCredentials = "application/json")),
        ),
    ),
)]
pub(crate) async fn front(
    service: State<CredentialService>,
    via: Extension<Via>,
    request: Request,
) -> Response {
    if asks_for_credential(request.uri()) {
        return rest(service, via, request).await;
    }
    if web::is_wanted(request.headers()) { web::front() } else { health::PATHS.into_response() }
}

/// Issues a credential in the format of the TURN REST API draft. Parameters can be in the URI, in a form body, or in both, as Janus sends
/// them.
#[utoipa::path(
    post,
    path = "/",
    tag = "credentials",
    params(RestQuery),
    request_body(content = Option<RestQuery>, content_type = "application/x-www-form-urlencoded"),
    responses(
        (status = 200, description = "The credential and all URIs of this server.", body = RestCredentials),
    ),
)]
pub(crate) async fn rest(
    State(service): State<CredentialService>,
    Extension(via): Extension<Via>,
    request: Request,
) -> Response {
    service.make_as_in_the_draft(&via, request).await.unwrap_or_else(CredentialRefusal::answer)
}

impl RestQuery {
    /// Merges the parameters of the URI and of a POST body. If both have a parameter, the values must be
    /// equal.
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
            return Err(Problem::no_form());
        }
        let in_body: Self = form(&bytes)?;
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

fn one_of<T: PartialEq>(what: &str, one: Option<T>, other: Option<T>) -> Result<Option<T>, Problem> {
    match (one, other) {
        (Some(one), Some(other)) if one != other => {
            Err(Problem::bad_request(format!("{what} has two different values")))
        }
        (one, other) => Ok(one.or(other)),
    }
}

pub(super) fn is_form(headers: &HeaderMap) -> bool {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

impl CredentialService {
    async fn make(&self, via: &Via, request: Request) -> Result<Response, CredentialRefusal> {
        let shown = self.shown(request.headers())?;
        let key = self.judge(via, shown).await?;
        let wanted = body::<CredentialsRequest>(request).await?.unwrap_or_default();
        let issued = self.issue(key.as_ref(), wanted)?;
        let audit = issued.audit(key.as_ref());
        Ok((Extension(audit), Json(for_browsers(issued))).into_response())
    }

    async fn make_as_in_the_draft(&self, via: &Via, request: Request) -> Result<Response, CredentialRefusal> {
        let in_header = self.shown(request.headers())?;
        let RestQuery { service, username, key, api, ttl, realm } = RestQuery::of(request).await?;
        let in_query = one_of("key", key, api)?.map(Secret::new);
        let shown = one_of("the key", in_header, in_query)?;
        let key = self.judge(via, shown).await?;
        if service.as_deref() != Some("turn") {
            let detail = "service must be turn: /?service=turn&username=NAME";
            return Err(Problem::bad_request(detail).into());
        }
        let wanted = CredentialsRequest { user: username, identifier: None, ttl, realm, kid: None };
        let issued = self.issue(key.as_ref(), wanted)?;
        let audit = issued.audit(key.as_ref());
        Ok((Extension(audit), Json(as_in_the_draft(issued))).into_response())
    }

    /// Key in the Authorization header. On the admin interface, the header contains a token, which has been checked
    /// already.
    pub(super) fn shown(&self, headers: &HeaderMap) -> Result<Option<Secret>, Problem> {
        match self.keys {
            Some(_) => Ok(token(headers)?.map(Secret::new)),
            None => Ok(None),
        }
    }

    pub(super) fn needs_key(&self) -> bool {
        self.keys.is_some()
    }

    /// The application's key; `None` for an administrator.
    pub(super) async fn judge(
        &self,
        via: &Via,
        shown: Option<Secret>,
    ) -> Result<Option<ApiKey>, CredentialRefusal> {
        match &self.keys {
            Some(keys) => keys.judge(server_of(&*self.program), via, shown).await.map(Some),
            None => Ok(None),
        }
    }

    pub(super) fn issue(
        &self,
        key: Option<&ApiKey>,
        wanted: CredentialsRequest,
    ) -> Result<Issued, CredentialRefusal> {
        if self.program.process().is_draining() {
            let detail = "this server accepts no new clients: use another one";
            return Err(CredentialRefusal::unavailable("draining", detail));
        }
        issue(&server_of(&*self.program)?, key, wanted, unix())
    }
}

/// Current Unix time in seconds.
pub(super) fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn for_browsers(issued: Issued) -> IssuedCredential {
    let Issued { realm, ttl, expiry, uris, grant, .. } = issued;
    let (username, credential, credential_type) = match grant {
        IssuedSecret::Password { username, password } => {
            (username, IceCredential::Password(password.reveal().to_owned()), None)
        }
        IssuedSecret::Token { kid, token: MadeToken { access_token, mac_key } } => {
            let (mac_key, access_token) = (mac_key.reveal().to_owned(), access_token.reveal().to_owned());
            (kid, IceCredential::Token(IceToken { mac_key, access_token }), Some("oauth".to_owned()))
        }
    };
    let end = Timestamp::from_second(i64::try_from(expiry).unwrap_or(i64::MAX)).unwrap_or(Timestamp::MAX);
    let ice_servers = vec![IceServer { urls: uris, username, credential, credential_type }];
    IssuedCredential { ice_servers, realm, ttl, expires_at: seconds(end) }
}

fn as_in_the_draft(issued: Issued) -> RestCredentials {
    let Issued { ttl, uris, grant, .. } = issued;
    let (username, password) = grant.into_password();
    RestCredentials { username, password, ttl, uris }
}
