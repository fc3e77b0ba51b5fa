//! Access control: rights by connection and token, and refusal of requests forged by other web pages.
//!
//! ```text
//!  Unix socket, mode 0600          everything
//!  loopback                        admin.loopback
//!  TLS, anywhere else              the rights of the client certificate, if any
//!  Authorization: Bearer TOKEN     the rights of the token, if higher
//!  another node of the fleet       the rights of the client there
//!  captures of traffic             only the Unix socket, and tokens from admin.capture_tokens
//! ```

use std::{
    fmt,
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

use crate::{
    changes::Changes,
    connections::RequestProgress,
    hosts,
    peer_requests::path_at_node,
    problem::{self, Problem, ProblemReason},
    program::Owner,
    refusal_log::RefusalLogLimit,
    request_body::collect_body,
    response_headers::set_security_headers,
    via::Via,
    web,
};

/// Delay of the response to a wrong token or key; together with the connection limit, it allows only a few
/// dozen attempts per second.
pub(crate) const WRONG_TOKEN: Duration = Duration::from_secs(1);
/// Maximum length, in bytes, of a path in a log line.
const LONGEST_PATH: usize = 200;

/// Requests without authentication: health checks, and the static files of the page, which load before a
/// token can be entered.
fn is_open(method: &Method, uri: &Uri) -> bool {
    !changes_something(method)
        && !asks_for_credential(uri)
        && (matches!(uri.path(), "/" | "/livez" | "/readyz" | "/healthz") || web::is_file(uri.path()))
}

/// Returns true for a credential request by GET (draft-uberti-behave-turn-rest).
pub(crate) fn asks_for_credential(uri: &Uri) -> bool {
    uri.path() == "/" && uri.query().is_some_and(|query| !query.is_empty())
}

/// Requests that need full access: those for secrets, because a fingerprint can reveal a weak secret, and
/// those for credentials.
fn private(uri: &Uri) -> Option<&'static str> {
    // A request to be forwarded is judged by its path at the other node.
    match path_at_node(uri.path()).unwrap_or(uri.path()) {
        "/v1/secrets" => Some("secrets"),
        _ => asks_for_credential(uri).then_some("credentials"),
    }
}

#[derive(Clone)]
pub(crate) struct RequestRights {
    via: Via,
    token: Option<Secret>,
    /// Position of the token in the configuration at the time of use, such as `token 2 of admin.tokens`.
    token_name: Option<Arc<str>>,
}

impl RequestRights {
    pub(crate) fn via(&self) -> &Via {
        &self.via
    }

    /// The rights of the connection or those of the token, whichever are higher.
    pub(crate) fn access(&self, settings: &AdminSettings) -> AdminAccess {
        let shown = self.token.as_ref().and_then(|token| find(settings, token));
        shown.map_or(AdminAccess::None, |found| found.access).max(self.via.access(settings))
    }
}

impl RequestRights {
    /// Full access does not include captures, because they show the traffic of users.
    pub(crate) fn may_capture(&self, settings: &AdminSettings) -> bool {
        let shown = self.token.as_ref();
        let has = |token| settings.capture_tokens.iter().fold(false, |found, one| (one == token) | found);
        matches!(self.via, Via::Unix(_)) || shown.is_some_and(has)
    }
}

/// Identifies the client in the audit log; a token is identified by its position in the configuration.
impl fmt::Display for RequestRights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.via)?;
        self.token_name.as_ref().map_or(Ok(()), |token| write!(f, " with {token}"))
    }
}

#[derive(Clone)]
pub(crate) struct Audit(pub(crate) String);

/// Counters since startup.
pub(crate) struct RequestCounts {
    /// Requests completed, refused (4xx) and failed (5xx).
    requests: [AtomicU64; 3],
    wrong_tokens: AtomicU64,
}

pub(crate) static COUNTS: RequestCounts =
    RequestCounts { requests: [const { AtomicU64::new(0) }; 3], wrong_tokens: AtomicU64::new(0) };

impl RequestCounts {
    fn count(&self, status: StatusCode) {
        let class = match status.as_u16() {
            400..500 => 1,
            500.. => 2,
            _ => 0,
        };
        self.requests[class].fetch_add(1, Ordering::Relaxed);
    }

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

/// State that [`admit`] needs.
#[derive(Clone)]
pub(crate) struct Guard {
    program: Arc<dyn Owner>,
    changes: Changes,
    refusals: Arc<RefusalLogLimit>,
}

impl Guard {
    pub(crate) fn new(program: Arc<dyn Owner>, changes: Changes) -> Self {
        Self { program, changes, refusals: Arc::default() }
    }

    async fn pass(
        &self,
        grant: RequestRights,
        progress: Option<RequestProgress>,
        mut request: Request,
        next: Next,
    ) -> Response {
        let (what, by) = (What::of(&request), grant.to_string());
        request.extensions_mut().insert(grant);
        if !changes_something(request.method()) {
            progress.iter().for_each(RequestProgress::work);
            let response = next.run(request).await;
            if response.extensions().get::<Audit>().is_some() {
                log(&by, &what, &response);
            }
            return response;
        }
        // The body arrives at the client's pace; the change starts once the body is complete.
        let request = match collect_body(request).await {
            Ok(request) => request,
            Err(problem) => {
                let response = problem.into_response();
                log(&by, &what, &response);
                return response;
            }
        };
        progress.iter().for_each(RequestProgress::work);
        let unfinished = Unfinished(Some((by, what)));
        let change = async move {
            let response = next.run(request).await;
            unfinished.finish(&response);
            // Keeps the connection's slot until the change is done.
            drop(progress);
            response
        };
        self.changes.run(change).await
    }

    async fn refuse(&self, via: &Via, request: Request, refused: AdmitError) -> Response {
        let what = What::of(&request);
        let asks_for_more = changes_something(request.method()) || private(request.uri()).is_some();
        let is_logged = asks_for_more || matches!(refused, AdmitError::WrongToken);
        let problem = match refused {
            AdmitError::For(problem) => problem,
            AdmitError::WrongToken => {
                COUNTS.wrong_tokens.fetch_add(1, Ordering::Relaxed);
                let detail = "no such token: see admin.tokens, admin.read_tokens and admin.capture_tokens; application keys (tpk_...) are accepted only on the addresses in credentials.listen";
                Problem::new(StatusCode::UNAUTHORIZED, "wrong_token", detail)
            }
        };
        if is_logged && self.refusals.admits(via) {
            tracing::warn!(
                target: "turnpike::audit",
                by = via.to_string(), request = what.request, path_bytes = what.path_bytes,
                status = problem.status, code = problem.code, reason = problem.reason(),
                "admin request refused"
            );
        }
        if &*problem.code == "wrong_token" {
            sleep(WRONG_TOKEN).await;
        }
        problem.into_response()
    }
}

/// A change in progress. If it is dropped before the change is complete (the program exits or panics), it
/// writes an audit line.
struct Unfinished(Option<(String, What)>);

impl Unfinished {
    fn finish(mut self, response: &Response) {
        if let Some((by, what)) = self.0.take() {
            log(&by, &what, response);
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some((by, What { request, path_bytes })) = self.0.take() {
            tracing::warn!(
                target: "turnpike::audit",
                by, request, path_bytes, result = "unknown: the change was interrupted",
                "admin request"
            );
        }
    }
}

pub(crate) async fn admit(
    State(guard): State<Guard>,
    Extension(via): Extension<Via>,
    request: Request,
    next: Next,
) -> Response {
    let progress = request.extensions().get::<RequestProgress>().cloned();
    let mut response = match judge(&guard.program.settings(), &via, &request) {
        Ok(grant) => guard.pass(grant, progress, request, next).await,
        Err(refused) => guard.refuse(&via, request, refused).await,
    };
    COUNTS.count(response.status());
    if response.status() == StatusCode::SERVICE_UNAVAILABLE {
        // Responses of health checks and of other nodes may lack a Retry-After header.
        response.headers_mut().entry(header::RETRY_AFTER).or_insert(problem::RETRY_AFTER);
    }
    set_security_headers(response.headers_mut());
    response
}

pub(crate) struct What {
    pub(crate) request: String,
    pub(crate) path_bytes: Option<usize>,
}

impl What {
    pub(crate) fn of(request: &Request) -> Self {
        let path = request.uri().path();
        let end = path.floor_char_boundary(LONGEST_PATH);
        Self {
            request: format!("{} {}", request.method(), &path[..end]),
            path_bytes: (end < path.len()).then_some(path.len()),
        }
    }
}

fn log(by: &str, What { request, path_bytes }: &What, response: &Response) {
    let result = response.extensions().get::<Audit>().map(|Audit(text)| text.as_str());
    let reason = response.extensions().get::<ProblemReason>().map(|ProblemReason(text)| text.as_str());
    tracing::info!(
        target: "turnpike::audit",
        by, request, path_bytes, status = response.status().as_u16(), result, reason,
        "admin request"
    );
}

fn changes_something(method: &Method) -> bool {
    matches!(*method, Method::POST | Method::PUT | Method::DELETE | Method::PATCH)
}

enum AdmitError {
    For(Problem),
    WrongToken,
}

impl From<Problem> for AdmitError {
    fn from(problem: Problem) -> Self {
        Self::For(problem)
    }
}

fn judge(settings: &AdminSettings, via: &Via, request: &Request) -> Result<RequestRights, AdmitError> {
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
        return Ok(RequestRights { via: via.clone(), token: None, token_name: None });
    }
    let token = token(headers)?.map(Secret::new);
    let found =
        token.as_ref().map(|token| find(settings, token).ok_or(AdmitError::WrongToken)).transpose()?;
    let grant = RequestRights { via: via.clone(), token, token_name: found.map(|found| found.name.into()) };
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
                "{what} need a token from admin.tokens, a client certificate from admin.client_ca, or the Unix socket"
            )
        }
        _ => "this request needs a token, a client certificate, or the Unix socket".to_owned(),
    };
    let problem = match grant.token {
        None => Problem::new(StatusCode::UNAUTHORIZED, "no_token", detail),
        Some(_) => {
            Problem::new(StatusCode::FORBIDDEN, "read_only", format!("this token is read-only: {detail}"))
        }
    };
    Err(problem.into())
}

/// Rejects requests from pages of other origins (CSRF): a browser on this machine can reach us through
/// loopback.
fn check_origin(headers: &HeaderMap) -> Result<(), Problem> {
    if !is_of_another_page(headers) {
        return Ok(());
    }
    let problem = "requests from web pages of other origins are refused";
    Err(Problem::new(StatusCode::FORBIDDEN, "foreign_origin", problem))
}

/// Returns true if a browser sends the request on behalf of a page of another origin.
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

/// Returns true if a user follows a link to the page, which is harmless.
fn opens_page(request: &Request) -> bool {
    let is = |name: &str, wanted: &str| request.headers().get(name).is_some_and(|value| value == wanted);
    *request.method() == Method::GET
        && request.uri().path() == "/"
        && !asks_for_credential(request.uri())
        && is("sec-fetch-mode", "navigate")
        && is("sec-fetch-dest", "document")
}

/// Token after `Bearer` (RFC 6750 section 2.1).
pub(crate) fn token(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let token = value.to_str().ok().and_then(|value| value.split_once(' '));
    match token {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => Ok(Some(token.trim())),
        _ => Err(Problem::bad_request("the Authorization header must have the form: Bearer TOKEN")),
    }
}

struct KnownToken {
    access: AdminAccess,
    name: String,
}

/// Compares the token with every configured one, each in constant time.
fn find(settings: &AdminSettings, token: &Secret) -> Option<KnownToken> {
    let at = |all: &[Secret]| {
        let numbered = all.iter().enumerate();
        numbered.fold(None, |found, (index, one)| if one == token { Some(index + 1) } else { found })
    };
    let (full, read) = (at(&settings.tokens), at(&settings.read_tokens));
    let capture = at(&settings.capture_tokens);
    let named =
        |access, number: usize, key: &str| KnownToken { access, name: format!("token {number} of {key}") };
    full.map(|number| named(AdminAccess::Full, number, "admin.tokens"))
        .or(read.map(|number| named(AdminAccess::Read, number, "admin.read_tokens")))
        .or(capture.map(|number| named(AdminAccess::Read, number, "admin.capture_tokens")))
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Mutex, PoisonError},
    };

    use super::*;

    static LINES: Mutex<Vec<u8>> = Mutex::new(Vec::new());

    struct Kept;

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            LINES.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn interrupted_change_has_one_audit_line() {
        let change = |path: &str| {
            let what = What { request: format!("POST {path}"), path_bytes: None };
            Unfinished(Some(("local user 0".to_owned(), what)))
        };
        let log = tracing_subscriber::fmt().with_writer(|| Kept).with_ansi(false).finish();
        tracing::subscriber::with_default(log, || {
            drop(change("/v1/users"));
            change("/v1/keys").finish(&StatusCode::CREATED.into_response());
        });
        let text = String::from_utf8(LINES.lock().unwrap().clone()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.len() == 2 && lines.iter().all(|line| line.contains("turnpike::audit")), "{lines:?}");
        assert!(lines[0].contains("POST /v1/users") && lines[0].contains("unknown"), "{lines:?}");
        assert!(lines[1].contains("POST /v1/keys") && lines[1].contains("status=201"), "{lines:?}");
    }
}
