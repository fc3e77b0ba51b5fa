//! Access control for applications: API keys, host names, and origins of web pages (CORS).

use std::sync::Arc;

use axum::{
    Extension,
    body::HttpBody as _,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tokio::time::sleep;
use turnpike_config::{Secret, api_keys};
use turnpike_stores::ApiKey;

use crate::{
    access::{Audit, WRONG_TOKEN, What, is_of_another_page},
    credential_issuer::{CredentialRefusal, RefusalReason},
    hosts,
    key_rates::KeyRates,
    problem::Problem,
    program::{Owner, ServerView},
    refusal_log::RefusalLogLimit,
    response_headers::set_security_headers,
    tls::ListenerTls,
    via::Via,
};

/// Checks the requested host name and the origin of web pages.
#[derive(Clone)]
pub(crate) struct ApplicationGate {
    program: Arc<dyn Owner>,
    tls: Option<Arc<ListenerTls>>,
}

/// Handles a permitted request, adds CORS headers, and logs issued credentials.
pub(crate) async fn admit(
    State(gate): State<ApplicationGate>,
    Extension(via): Extension<Via>,
    request: Request,
    next: Next,
) -> Response {
    let page = page(request.headers()).map(str::to_owned);
    let (verdict, may_read) = gate.judge(&request, page.as_deref());
    let mut response = match verdict {
        Ok(Passes::Preflight) => preflight(),
        Ok(Passes::Request) => {
            let what = What::of(&request);
            let response = next.run(request).await;
            write_line(&via, &what, &response);
            response
        }
        Err(refusal) => refusal.answer(),
    };
    let headers = response.headers_mut();
    set_security_headers(headers);
    headers.append(header::VARY, HeaderValue::from_static("Origin"));
    if let Some(origin) = page.filter(|_| may_read).and_then(|page| HeaderValue::from_str(&page).ok()) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("retry-after"));
    }
    response
}

/// Origin of the web page.
fn page(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::ORIGIN)?.to_str().ok()
}

fn preflight() -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    let allowed = HeaderValue::from_static("authorization, content-type");
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
    // Seconds for which a browser may cache the response to a preflight request.
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    response
}

fn write_line(via: &Via, What { request, path_bytes }: &What, response: &Response) {
    let Some(Audit(result)) = response.extensions().get::<Audit>() else { return };
    let (by, status) = (via.to_string(), response.status());
    let done = if status == StatusCode::NO_CONTENT { "credential revoked" } else { "credential issued" };
    tracing::info!(
        target: "turnpike::credentials",
        by, request, path_bytes, status = status.as_u16(), result, "{done}"
    );
}

enum Passes {
    Request,
    Preflight,
}

impl ApplicationGate {
    pub(crate) fn new(program: Arc<dyn Owner>, tls: Option<Arc<ListenerTls>>) -> Self {
        Self { program, tls }
    }

    /// Returns the result, and true if the web page may read the response.
    fn judge(&self, request: &Request, page: Option<&str>) -> (Result<Passes, CredentialRefusal>, bool) {
        let Some(server) = self.program.server() else { return (Err(Problem::stopping().into()), false) };
        let settings = &server.settings.credentials;
        let headers = request.headers();
        let of_tls = self.tls.iter().flat_map(|tls| tls.names());
        let names: Vec<String> =
            settings.hosts.iter().chain(&settings.names).cloned().chain(of_tls).collect();
        let section = ("credentials", "hosts");
        if let Err(problem) = hosts::check(&names, section, request.version(), request.uri(), headers) {
            let reason = if problem.status == 421 { RefusalReason::Host } else { RefusalReason::BadRequest };
            return (Err(CredentialRefusal::of(reason, problem)), false);
        }
        let is_listed =
            page.is_some_and(|page| settings.origins.iter().any(|own| own.eq_ignore_ascii_case(page)));
        if !is_listed && is_of_another_page(headers) {
            let detail = "the origin of the web page is not in credentials.origins";
            let refusal = CredentialRefusal::new(
                RefusalReason::Origin,
                StatusCode::FORBIDDEN,
                "foreign_origin",
                detail,
            );
            return (Err(refusal), false);
        }
        if *request.method() == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
        {
            return (Ok(Passes::Preflight), is_listed);
        }
        if *request.method() != Method::POST && !request.body().is_end_stream() {
            let problem = Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body", "this request has no body");
            return (Err(problem.into()), is_listed);
        }
        (Ok(Passes::Request), is_listed)
    }
}

/// Request rates of keys, and the log of wrong keys.
#[derive(Default)]
pub(crate) struct ApplicationKeys {
    rates: KeyRates,
    refusals: RefusalLogLimit,
}

impl ApplicationKeys {
    /// Checks the key and its rate. A response to a wrong key is delayed.
    pub(crate) async fn judge(
        &self,
        server: Result<ServerView, Problem>,
        via: &Via,
        shown: Option<Secret>,
    ) -> Result<ApiKey, CredentialRefusal> {
        let Some(shown) = shown else {
            let detail = "this request needs a key: Authorization: Bearer KEY, or key=KEY as in the TURN REST API draft";
            return Err(CredentialRefusal::new(
                RefusalReason::NoKey,
                StatusCode::UNAUTHORIZED,
                "no_key",
                detail,
            ));
        };
        match self.find(server?, &shown) {
            Ok((key, rate)) => match self.rates.spend(&key.name, rate) {
                Ok(()) => Ok(key),
                Err(pause) => {
                    let detail = format!("the request rate of this key is limited to {rate} per second");
                    let status = StatusCode::TOO_MANY_REQUESTS;
                    Err(CredentialRefusal::new(RefusalReason::Rate, status, "rate_exceeded", detail)
                        .after(pause))
                }
            },
            Err(refusal) => {
                if refusal.reason == RefusalReason::WrongKey {
                    if self.refusals.admits(via) {
                        tracing::warn!(target: "turnpike::credentials", by = via.to_string(), "wrong key");
                    }
                    sleep(WRONG_TOKEN).await;
                }
                Err(refusal)
            }
        }
    }

    /// The key and its rate in requests per second.
    fn find(&self, server: ServerView, shown: &Secret) -> Result<(ApiKey, u32), CredentialRefusal> {
        let Some(store) = &server.store else {
            let detail = "there is no store for keys: set store.url, or a directory in store.state";
            return Err(CredentialRefusal::unavailable("no_store", detail));
        };
        if store.rules().is_none() {
            let detail = "the store with the keys has not answered yet";
            return Err(CredentialRefusal::unavailable("store_unavailable", detail));
        }
        let key = api_keys::name_of(shown).and_then(|name| store.api_key(name));
        let is_it = api_keys::is_key_of(shown, key.as_ref().map(|key| &key.hash));
        match key.filter(|_| is_it) {
            Some(key) => {
                let rate = key.rate.unwrap_or(server.settings.credentials.rate);
                Ok((key, rate))
            }
            None => {
                let detail = "this key does not exist: see turnpike key list";
                Err(CredentialRefusal::new(
                    RefusalReason::WrongKey,
                    StatusCode::UNAUTHORIZED,
                    "wrong_key",
                    detail,
                ))
            }
        }
    }
}
