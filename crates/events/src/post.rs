//! HTTP client of one webhook: one connection that is kept open, and no redirects.
//!
//! Names are resolved for each connection, and the addresses found are checked before they are used, so that a webhook cannot reach
//! into the operator's own network, not even if its name changes.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, Response, Uri,
    body::{Bytes, Incoming},
    client::conn::http1::{self, SendRequest},
    header::{CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER, USER_AGENT},
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpStream, lookup_host},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsConnector;
use turnpike_client::{Security, TlsOptions};
use turnpike_wire::secret::Secret;

use crate::signature;

/// Maximum number of a receiver's addresses to try.
const ADDRESSES: usize = 4;
const CONNECT: Duration = Duration::from_secs(5);
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
    connection: Option<Connection>,
}

#[derive(Debug)]
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// Stops the connection's task when dropped.
    _driver: JoinSet<hyper::Result<()>>,
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

    async fn exchange(&mut self, content_type: &'static str, body: Bytes) -> io::Result<Response<()>> {
        let mut connection = match self.connection.take().filter(|open| !open.sender.is_closed()) {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        connection.sender.ready().await.map_err(io::Error::other)?;
        let request = self.request(content_type, body).map_err(io::Error::other)?;
        let response = connection.sender.send_request(request).await.map_err(io::Error::other)?;
        let (parts, body) = response.into_parts();
        // A longer body closes the connection.
        if read(body).await {
            self.connection = Some(connection);
        }
        Ok(Response::from_parts(parts, ()))
    }

    fn request(&self, content_type: &'static str, body: Bytes) -> hyper::http::Result<Request<Full<Bytes>>> {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let authority = self.uri.authority().map_or("", |authority| authority.as_str());
        // User names and passwords in URLs are not sent.
        let host = authority.rsplit('@').next().unwrap_or_default();
        Request::post(self.uri.path_and_query().map_or("/", |path| path.as_str()))
            .header(HOST, HeaderValue::from_str(host)?)
            .header(USER_AGENT, concat!("turnpike/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, content_type)
            .header(signature::HEADER, signature::sign(&self.secret, unix, &body))
            .body(Full::new(body))
    }

    async fn connect(&self) -> io::Result<Connection> {
        let is_secure = self.uri.scheme_str() == Some("https");
        let host = self.uri.host().unwrap_or_default();
        let name = host.trim_start_matches('[').trim_end_matches(']');
        let port = self.uri.port_u16().unwrap_or(if is_secure { 443 } else { 80 });
        let (stream, address) = self.open(name, port).await?;
        // Without this, Nagle's algorithm delays the second packet of a request until the first is acknowledged.
        stream.set_nodelay(true)?;
        if !is_secure {
            return shake_hands(stream).await;
        }
        let name = name.to_owned();
        // Reads the certificates of the authorities from files.
        let security = tokio::task::spawn_blocking(move || {
            Security::new(&TlsOptions::default(), Some(&name), address).map_err(io::Error::other)
        });
        let security = security.await.map_err(io::Error::other)??;
        let mut config = (*security.config).clone();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let stream = TlsConnector::from(Arc::new(config)).connect(security.name, stream).await;
        shake_hands(stream.map_err(|error| io::Error::other(format!("TLS: {error}")))?).await
    }

    async fn open(&self, name: &str, port: u16) -> io::Result<(TcpStream, SocketAddr)> {
        let found = lookup_host((name, port)).await;
        let found = found.map_err(|error| io::Error::other(format!("the name does not resolve: {error}")))?;
        let found: Vec<SocketAddr> = found.collect();
        let refused = |at: &&SocketAddr| self.refuses.is_some_and(|refuses| refuses(at.ip()));
        if let Some(address) = found.iter().find(refused) {
            let ip = address.ip();
            return Err(io::Error::other(format!(
                "{ip} is not a public address: set events.allow_private = true if the receiver is yours"
            )));
        }
        let mut last = io::Error::other("the name has no address");
        for address in found.into_iter().take(ADDRESSES) {
            match timeout(CONNECT, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok((stream, address)),
                Ok(Err(error)) => last = io::Error::other(format!("{address}: {error}")),
                Err(_) => {
                    last =
                        io::Error::other(format!("{address}: no connection within {} s", CONNECT.as_secs()));
                }
            }
        }
        Err(last)
    }
}

async fn shake_hands<S>(stream: S) -> io::Result<Connection>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    Ok(Connection { sender, _driver: driver })
}

/// Reads a response body; false if it is too long or broken.
async fn read(body: Incoming) -> bool {
    let mut body = Limited::new(body, LONGEST_BODY);
    while let Some(frame) = body.frame().await {
        if frame.is_err() {
            return false;
        }
    }
    true
}
