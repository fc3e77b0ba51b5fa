//! Who may do what: what a connection is worth by the way that it came, what a token adds, and what no honest client sends.
//!
//! ```text
//!  Unix socket, mode 0600          everything
//!  loopback                        what admin.loopback says
//!  TLS, anywhere else              what its client certificate is worth, else nothing
//!  Authorization: Bearer TOKEN     what the token is worth, if that is more
//!  another node of the fleet       what whoever asked it may do there
//! ```

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Extension,
    body::HttpBody,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tokio::time::sleep;
use turnpike_config::{AdminAccess, AdminSettings, Secret};

use crate::{hosts, model::Problem, program::Program, web};

/// What somebody waits for who has shown a wrong token, or a wrong key: with a few dozen connections at a time, a few dozen tries a second.
pub(crate) const WRONG_TOKEN: Duration = Duration::from_secs(1);

/// Answered whoever asks: a program that looks after this one need not know a token, and the files of the page, which hold nothing of
/// this program, are there before anybody can type one.
fn is_open(method: &Method, uri: &Uri) -> bool {
    !changes_something(method)
        && !asks_for_credential(uri)
        && (matches!(uri.path(), "/" | "/livez" | "/readyz" | "/healthz") || web::is_file(uri.path()))
}

/// Whether a credential is asked for by a GET, as the draft of a TURN REST API has it (draft-uberti-behave-turn-rest).
pub(crate) fn asks_for_credential(uri: &Uri) -> bool {
    uri.path() == "/" && uri.query().is_some_and(|query| !query.is_empty())
}

/// What nobody gets who may look alone, although it is but asked for: secrets, of which a weak one could be guessed by its fingerprint, and
/// credentials, which a GET makes too.
fn private(uri: &Uri) -> Option<&'static str> {
    match uri.path() {
        "/v1/secrets" => Some("secrets"),
        _ => asks_for_credential(uri).then_some("credentials"),
    }
}

/// How a connection came.
#[derive(Clone, Debug)]
pub(crate) enum Via {
    /// Over the Unix socket, from a program of this user; none where the kernel does not tell.
    Unix(Option<u32>),
    /// In the clear, on loopback.
    Loopback(SocketAddr),
    /// By TLS; what the client's certificate is worth, if it has one.
    Tls(SocketAddr, AdminAccess),
    /// Through another node: what may be done, and by whom.
    Node(AdminAccess, String),
}

impl Via {
    /// Of whoever has come over TCP.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Unix(_) | Self::Node(..) => None,
            Self::Loopback(address) | Self::Tls(address, _) => Some(*address),
        }
    }

    fn access(&self, settings: &AdminSettings) -> AdminAccess {
        match self {
            Self::Unix(_) => AdminAccess::Full,
            Self::Loopback(_) => settings.loopback,
            Self::Tls(_, access) | Self::Node(access, _) => *access,
        }
    }

    /// Whether it was asked at another node, which asks all that it means to.
    pub(crate) fn is_node(&self) -> bool {
        matches!(self, Self::Node(..))
    }
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(Some(uid)) => write!(f, "user {uid} of this machine"),
            Self::Unix(None) => f.write_str("a user of this machine"),
            Self::Loopback(address) => write!(f, "{address}"),
            Self::Tls(address, AdminAccess::None) => write!(f, "{address} by TLS"),
            Self::Tls(address, _) => write!(f, "{address} by TLS with a client certificate"),
            Self::Node(_, by) => f.write_str(by),
        }
    }
}

/// Who asks: what that is worth depends on the configuration in force.
#[derive(Clone)]
pub(crate) struct Grant {
    via: Via,
    token: Option<Secret>,
}

impl Grant {
    /// The way.
    pub(crate) fn via(&self) -> &Via {
        &self.via
    }

    /// By the way that the connection came, or by the token if that is worth more.
    pub(crate) fn access(&self, settings: &AdminSettings) -> AdminAccess {
        let shown = self.token.as_ref().and_then(|token| worth(settings, token));
        shown.unwrap_or(AdminAccess::None).max(self.via.access(settings))
    }
}

/// What a change has come to, for its line in the log.
#[derive(Clone)]
pub(crate) struct Audit(pub(crate) String);

/// What has been counted since the start.
pub(crate) struct Counts {
    /// Requests done, refused (4xx) and failed (5xx).
    requests: [AtomicU64; 3],
    wrong_tokens: AtomicU64,
}

pub(crate) static COUNTS: Counts =
    Counts { requests: [const { AtomicU64::new(0) }; 3], wrong_tokens: AtomicU64::new(0) };

impl Counts {
    fn count(&self, status: StatusCode) {
        let class = match status.as_u16() {
            400..500 => 1,
            500.. => 2,
            _ => 0,
        };
        self.requests[class].fetch_add(1, Ordering::Relaxed);
    }

    /// Requests by result.
    pub(crate) fn requests(&self) -> [(&'static str, u64); 3] {
        let counts = self.requests.iter().map(|count| count.load(Ordering::Relaxed));
        let mut named = [("done", 0), ("refused", 0), ("failed", 0)];
        named.iter_mut().zip(counts).for_each(|(named, count)| named.1 = count);
        named
    }

    pub(crate) fn wrong_tokens(&self) -> u64 {
        self.wrong_tokens.load(Ordering::Relaxed)
    }
}

/// Lets a request pass that may, writes a line about what it has changed, and marks each answer as one that nobody keeps.
pub(crate) async fn admit(
    State(program): State<Arc<dyn Program>>,
    Extension(via): Extension<Via>,
    mut request: Request,
    next: Next,
) -> Response {
    let mut response = match judge(&program.settings(), &via, &request) {
        Ok(grant) => {
            request.extensions_mut().insert(grant);
            let changes = changes_something(request.method());
            let what = format!("{} {}", request.method(), request.uri().path());
            let response = next.run(request).await;
            if changes || response.extensions().get::<Audit>().is_some() {
                write_line(&via, &what, &response);
            }
            response
        }
        Err(Refused::For(problem)) => problem.into_response(),
        Err(Refused::WrongToken) => {
            COUNTS.wrong_tokens.fetch_add(1, Ordering::Relaxed);
            sleep(WRONG_TOKEN).await;
            let detail = "no such token: see admin.tokens and admin.read_tokens; keys of applications (tpk_...) are taken at credentials.listen";
            Problem::new(StatusCode::UNAUTHORIZED, "wrong_token", detail).into_response()
        }
    };
    COUNTS.count(response.status());
    keep_from_being_kept(response.headers_mut());
    response
}

/// Marks an answer as one that nobody keeps, nor takes for something else.
pub(crate) fn keep_from_being_kept(headers: &mut HeaderMap) {
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    // An answer that somebody opens as a page does nothing, and stands in no frame. The page has a policy of its own.
    let nothing = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(nothing);
}

fn write_line(via: &Via, what: &str, response: &Response) {
    let result = response.extensions().get::<Audit>().map(|Audit(text)| text.as_str());
    tracing::info!(
        target: "turnpike::audit",
        by = %via, request = what, status = response.status().as_u16(), result,
        "admin request"
    );
}

fn changes_something(method: &Method) -> bool {
    matches!(*method, Method::POST | Method::PUT | Method::DELETE | Method::PATCH)
}

/// Why a request does not pass.
enum Refused {
    For(Problem),
    WrongToken,
}

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Self {
        Self::For(problem)
    }
}

fn judge(settings: &AdminSettings, via: &Via, request: &Request) -> Result<Grant, Refused> {
    let headers = request.headers();
    if !matches!(via, Via::Unix(_) | Via::Node(..)) {
        hosts::check(&settings.hosts, ("admin", "hosts"), request.version(), request.uri(), headers)?;
    }
    if !opens_page(request) {
        check_origin(headers)?;
    }
    let may_have_body = changes_something(request.method()) && *request.method() != Method::DELETE;
    if !may_have_body && !request.body().is_end_stream() {
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body", "this request has no body").into());
    }
    if is_open(request.method(), request.uri()) {
        return Ok(Grant { via: via.clone(), token: None });
    }
    let token = token(headers)?.map(Secret::new);
    if token.as_ref().is_some_and(|token| worth(settings, token).is_none()) {
        return Err(Refused::WrongToken);
    }
    let grant = Grant { via: via.clone(), token };
    let private = private(request.uri());
    let is_full = changes_something(request.method()) || private.is_some();
    let needed = if is_full { AdminAccess::Full } else { AdminAccess::Read };
    if grant.access(settings) >= needed {
        return Ok(grant);
    }
    let detail = match needed {
        AdminAccess::Full => {
            let what = private.unwrap_or("changes");
            format!(
                "{what} need a token of admin.tokens, a client certificate of admin.client_ca, or the Unix socket"
            )
        }
        _ => "a token is needed, a client certificate, or the Unix socket".to_owned(),
    };
    let problem = match grant.token {
        None => Problem::new(StatusCode::UNAUTHORIZED, "no_token", detail),
        Some(_) => Problem::new(StatusCode::FORBIDDEN, "read_only", format!("this token may look: {detail}")),
    };
    Err(problem.into())
}

/// A browser says for which page it asks. None but our own may: a stranger's could end sessions in the name of whoever looks at it
/// (CSRF), for to reach us on loopback is enough for that, and no answer has to be read.
fn check_origin(headers: &HeaderMap) -> Result<(), Problem> {
    if !is_of_another_page(headers) {
        return Ok(());
    }
    let problem = "a page of another origin asks, and none but the server's own may";
    Err(Problem::new(StatusCode::FORBIDDEN, "foreign_origin", problem))
}

/// Whether a browser asks for a page that is not ours.
pub(crate) fn is_of_another_page(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or_default());
    let is_own = |origin: &str| {
        let (_, authority) = origin.split_once("://")?;
        let (origin, host) =
            (Authority::try_from(authority).ok()?, Authority::try_from(text(header::HOST)?).ok()?);
        Some(origin == host)
    };
    text(header::ORIGIN).is_some_and(|origin| is_own(origin) != Some(true))
        || headers.get("sec-fetch-site").is_some_and(|site| site != "same-origin" && site != "none")
}

/// Whether somebody follows a link, from wherever, to the page. That shows nothing and does nothing by itself: what it asks for, it asks for
/// as our own.
fn opens_page(request: &Request) -> bool {
    let is = |name: &str, wanted: &str| request.headers().get(name).is_some_and(|value| value == wanted);
    *request.method() == Method::GET
        && request.uri().path() == "/"
        && !asks_for_credential(request.uri())
        && is("sec-fetch-mode", "navigate")
        && is("sec-fetch-dest", "document")
}

/// What stands behind `Bearer` (RFC 6750 section 2.1).
pub(crate) fn token(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let token = value.to_str().ok().and_then(|value| value.split_once(' '));
    match token {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => Ok(Some(token.trim())),
        _ => Err(Problem::bad_request("the Authorization header is expected to be: Bearer TOKEN")),
    }
}

/// Compares with all tokens, in constant time each.
fn worth(settings: &AdminSettings, token: &Secret) -> Option<AdminAccess> {
    let is_one = |all: &[Secret]| all.iter().fold(false, |found, one| found | (one == token));
    let (full, read) = (is_one(&settings.tokens), is_one(&settings.read_tokens));
    if full { Some(AdminAccess::Full) } else { read.then_some(AdminAccess::Read) }
}
