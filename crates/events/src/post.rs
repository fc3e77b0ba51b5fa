//! HTTP client of one webhook: one connection that is kept open. Addresses are checked, so that a webhook cannot
//! reach into the operator's own network, not even if its name changes.

use std::{
    io,
    net::IpAddr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use http_body_util::Full;
use hyper::{
    Request, Response, Uri,
    body::Bytes,
    header::{CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER, USER_AGENT},
};
use tokio::time::timeout;
use turnpike_client::http::{HttpConnection, host_field};
use turnpike_wire::secret::Secret;

use crate::signature;

/// Maximum response body in bytes that is read so that the connection can be used again.
const LONGEST_BODY: usize = 64 << 10;

/// True for addresses that webhooks must not reach.
pub(crate) type RefusedAddress = fn(IpAddr) -> bool;

#[derive(Debug)]
pub(crate) struct Receiver {
    uri: Uri,
    secret: Secret,
    refuses: Option<RefusedAddress>,
    /// Timeout of a request, from the name lookup to the end of the response.
    patience: Duration,
    connection: Option<HttpConnection>,
}

#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) why: String,
    pub(crate) wished: Option<Duration>,
}

impl Receiver {
    pub(crate) fn new(uri: Uri, secret: Secret, refuses: Option<RefusedAddress>, patience: Duration) -> Self {
        Self { uri, secret, refuses, patience, connection: None }
    }

    /// Sends a signed request; succeeds if the receiver responds with 2xx.
    pub(crate) async fn post(&mut self, content_type: &'static str, body: Bytes) -> Result<(), Failure> {
        let patience = self.patience;
        let posted = timeout(patience, self.exchange(content_type, body)).await;
        let failed = |why: String| Failure { why, wished: None };
        let response = match posted {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                self.connection = None;
                return Err(failed(error.to_string()));
            }
            Err(_) => {
                self.connection = None;
                return Err(failed(format!("no response within {} s", patience.as_secs_f32())));
            }
        };
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let hint = if status.is_redirection() { " (redirects are not followed)" } else { "" };
        let wished = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        Err(Failure { why: format!("response {status}{hint}"), wished: wished.map(Duration::from_secs) })
    }

    async fn exchange(
        &mut self,
        content_type: &'static str,
        body: Bytes,
    ) -> io::Result<Response<Option<Bytes>>> {
        let mut connection = match self.connection.take().filter(|open| !open.is_closed()) {
            Some(connection) => connection,
            None => HttpConnection::open(&self.uri, |ip| self.check(ip)).await?,
        };
        let request = self.request(content_type, body).map_err(io::Error::other)?;
        let response = connection.send(request, LONGEST_BODY).await?;
        if response.body().is_some() {
            self.connection = Some(connection);
        }
        Ok(response)
    }

    fn check(&self, ip: IpAddr) -> Result<(), String> {
        if self.refuses.is_some_and(|refuses| refuses(ip)) {
            return Err(format!(
                "{ip} is not a public address: set events.allow_private = true if the receiver is yours"
            ));
        }
        Ok(())
    }

    fn request(&self, content_type: &'static str, body: Bytes) -> hyper::http::Result<Request<Full<Bytes>>> {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Request::post(self.uri.path_and_query().map_or("/", |path| path.as_str()))
            .header(HOST, HeaderValue::from_str(host_field(&self.uri))?)
            .header(USER_AGENT, concat!("turnpike/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, content_type)
            .header(signature::HEADER, signature::sign(&self.secret, unix, &body))
            .body(Full::new(body))
    }
}
