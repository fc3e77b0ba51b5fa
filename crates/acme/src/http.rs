//! HTTPS client for the CA. It opens a connection per request, because an order takes only about fifteen requests
//! every two months.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, Response, Uri,
    body::Bytes,
    client::conn::http1,
    header::{HOST, HeaderValue, RETRY_AFTER},
    http::uri::Scheme,
};
use hyper_util::rt::TokioIo;
use instant_acme::{BodyWrapper, BytesResponse, Error, HttpClient};
use rustls::ClientConfig;
use tokio::{
    net::{TcpStream, lookup_host},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsConnector;
use turnpike_client::{Security, TlsOptions};

const PORT: u16 = 443;
/// Maximum number of the CA's addresses to try.
const ADDRESSES: usize = 4;
const CONNECT: Duration = Duration::from_secs(10);
/// Timeout for a whole request, from the name lookup to the end of the response.
const REQUEST: Duration = Duration::from_secs(30);
/// Maximum response body in bytes; directories and certificate chains are only a few kilobytes long.
const LONGEST_BODY: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
#[error("{host}: {why}")]
pub(crate) struct HttpError {
    host: String,
    why: String,
}

/// Client for one attempt to order a certificate.
#[derive(Clone, Debug)]
pub(crate) struct Https {
    /// File with a certificate to trust for the CA's server.
    trusted: Option<PathBuf>,
    pause: Arc<Mutex<Option<Duration>>>,
}

impl Https {
    pub(crate) fn new(trusted: Option<PathBuf>) -> Self {
        Self { trusted, pause: Arc::default() }
    }

    /// Retry-After of the last response, if that response was an error.
    pub(crate) fn pause(&self) -> Option<Duration> {
        *self.pause.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn send(self, request: Request<BodyWrapper<Bytes>>) -> Result<BytesResponse, HttpError> {
        let host = request.uri().host().unwrap_or_default().to_owned();
        let failed = |why: String| HttpError { host: host.clone(), why };
        if request.uri().scheme() != Some(&Scheme::HTTPS) || host.is_empty() {
            return Err(failed(format!("{} is not an https:// URL", request.uri())));
        }
        let exchanged = timeout(REQUEST, self.exchange(request, &host)).await;
        let response = exchanged
            .map_err(|_| failed(format!("no response within {} s", REQUEST.as_secs())))?
            .map_err(|error| failed(error.to_string()))?;
        let is_error = response.status().is_client_error() || response.status().is_server_error();
        let pause = response.headers().get(RETRY_AFTER).and_then(|value| pause(value.to_str().ok()?));
        *self.pause.lock().unwrap_or_else(PoisonError::into_inner) = pause.filter(|_| is_error);
        Ok(BytesResponse::from(response))
    }

    async fn exchange(
        &self,
        mut request: Request<BodyWrapper<Bytes>>,
        host: &str,
    ) -> io::Result<Response<Full<Bytes>>> {
        let name = host.trim_start_matches('[').trim_end_matches(']');
        let port = request.uri().port_u16().unwrap_or(PORT);
        let (stream, address) = connect(name, port).await?;
        let options = TlsOptions { ca: self.trusted.clone(), ..TlsOptions::default() };
        let security = Security::new(&options, Some(name), address).map_err(io::Error::other)?;
        let stream = TlsConnector::from(Arc::new(for_http(&security.config)))
            .connect(security.name, stream)
            .await
            .map_err(|error| io::Error::other(format!("TLS: {error}")))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        // When this is dropped at the end of the request, the connection's task stops.
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let authority = if port == PORT { host.to_owned() } else { format!("{host}:{port}") };
        request.headers_mut().insert(HOST, HeaderValue::from_str(&authority).map_err(io::Error::other)?);
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        *request.uri_mut() = path.parse::<Uri>().map_err(io::Error::other)?;
        let response = sender.send_request(request).await.map_err(io::Error::other)?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, LONGEST_BODY).collect().await.map_err(io::Error::other)?;
        Ok(Response::from_parts(parts, Full::new(body.to_bytes())))
    }
}

impl HttpClient for Https {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        let client = self.clone();
        Box::pin(async move { client.send(request).await.map_err(|error| Error::Other(Box::new(error))) })
    }
}

/// Parses Retry-After, which is in seconds or a date (RFC 9110 section 10.2.3).
fn pause(text: &str) -> Option<Duration> {
    let text = text.trim();
    text.parse().map(Duration::from_secs).ok().or_else(|| {
        let date = httpdate::parse_http_date(text).ok()?;
        Some(date.duration_since(SystemTime::now()).unwrap_or_default())
    })
}

async fn connect(name: &str, port: u16) -> io::Result<(TcpStream, SocketAddr)> {
    let found = lookup_host((name, port)).await;
    let found = found.map_err(|error| io::Error::other(format!("the name does not resolve: {error}")))?;
    let mut last = io::Error::other("the name has no address");
    for address in found.take(ADDRESSES) {
        match timeout(CONNECT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok((stream, address)),
            Ok(Err(error)) => last = io::Error::other(format!("{address}: {error}")),
            Err(_) => {
                last = io::Error::other(format!("{address}: no connection within {} s", CONNECT.as_secs()));
            }
        }
    }
    Err(last)
}

/// Removes the TURN protocols from ALPN.
fn for_http(config: &ClientConfig) -> ClientConfig {
    let mut config = config.clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use turnpike_testkit::{Dir, certificates::Certificate};

    use super::*;

    async fn failure(url: &str) -> String {
        let dir = Dir::new();
        let trusted = dir.file("ca.pem", &Certificate::new(&["127.0.0.1"]).pem);
        let request = Request::get(url).body(BodyWrapper::default()).expect("a URL");
        match Https::new(Some(trusted)).send(request).await {
            Ok(_) => panic!("{url} answers"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn retry_after_is_in_seconds_or_a_date() {
        assert_eq!(pause(" 120 "), Some(Duration::from_secs(120)));
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(3600));
        let found = pause(&date).expect("a date");
        assert!((3590..=3600).contains(&found.as_secs()), "{found:?}");
        assert_eq!(pause("Fri, 31 Dec 1999 23:59:59 GMT"), Some(Duration::ZERO));
        assert_eq!([pause(""), pause("-1"), pause("soon")], [None; 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn request_to_a_silent_authority_times_out() {
        let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let at = silent.local_addr().expect("bound");
        assert_eq!(failure(&format!("https://{at}/dir")).await, "127.0.0.1: no response within 30 s");
    }

    #[tokio::test]
    async fn http_urls_and_unreachable_authorities_fail_with_the_reason() {
        assert!(failure("http://127.0.0.1/dir").await.contains("is not an https:// URL"));
        let closed = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let at = closed.local_addr().expect("bound");
        drop(closed);
        let why = failure(&format!("https://{at}/dir")).await;
        assert!(why.starts_with(&format!("127.0.0.1: {at}: Connection refused")), "{why}");
        let why = failure("https://no-such-host.invalid/dir").await;
        assert!(why.starts_with("no-such-host.invalid: the name does not resolve"), "{why}");
    }
}
