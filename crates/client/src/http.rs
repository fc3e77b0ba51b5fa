//! HTTP/1.1 connections to a URL, with or without TLS, and no redirects.
//!
//! The name is resolved for each connection, and the addresses found are checked before they are used, so a
//! changed name cannot lead to a forbidden address.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, Response, Uri,
    body::Bytes,
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use crate::{Security, TlsOptions};

/// Maximum number of a server's addresses to try.
const ADDRESSES: usize = 4;
const CONNECT: Duration = Duration::from_secs(5);

/// An open connection, for one request at a time.
#[derive(Debug)]
pub struct HttpConnection {
    sender: SendRequest<Full<Bytes>>,
    /// Stops the connection's task when dropped.
    _driver: JoinSet<hyper::Result<()>>,
}

impl HttpConnection {
    /// Connects to the server of an `https` or `http` URL. `check` refuses an address with a reason.
    pub async fn open(uri: &Uri, check: impl Fn(IpAddr) -> Result<(), String>) -> io::Result<Self> {
        let is_secure = uri.scheme_str() == Some("https");
        let host = uri.host().unwrap_or_default();
        let name = host.trim_start_matches('[').trim_end_matches(']');
        let port = uri.port_u16().unwrap_or(if is_secure { 443 } else { 80 });
        let (stream, address) = open(name, port, check).await?;
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

    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Sends a request and reads the response with its body; `None` if the body is longer than `longest` or
    /// breaks off. After that or an error, the connection cannot be used again.
    pub async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
        longest: usize,
    ) -> io::Result<Response<Option<Bytes>>> {
        self.sender.ready().await.map_err(io::Error::other)?;
        let response = self.sender.send_request(request).await.map_err(io::Error::other)?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, longest).collect().await.ok().map(|body| body.to_bytes());
        Ok(Response::from_parts(parts, body))
    }
}

/// The header field Host of a URL, without the user name and password.
#[must_use]
pub fn host_field(uri: &Uri) -> &str {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    authority.rsplit('@').next().unwrap_or_default()
}

async fn open(
    name: &str,
    port: u16,
    check: impl Fn(IpAddr) -> Result<(), String>,
) -> io::Result<(TcpStream, SocketAddr)> {
    let found = lookup_host((name, port)).await;
    let found = found.map_err(|error| io::Error::other(format!("the name does not resolve: {error}")))?;
    let found: Vec<SocketAddr> = found.collect();
    for address in &found {
        check(address.ip()).map_err(io::Error::other)?;
    }
    let mut last = io::Error::other("the name has no address");
    for address in found.into_iter().take(ADDRESSES) {
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

async fn shake_hands<S>(stream: S) -> io::Result<HttpConnection>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    Ok(HttpConnection { sender, _driver: driver })
}
