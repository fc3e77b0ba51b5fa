//! Client for the admin interface: Unix socket by default, TCP on loopback, TLS elsewhere.

use std::{
    fmt, fs,
    io::{self, ErrorKind, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use http_body_util::{BodyExt as _, Full};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header::{AUTHORIZATION, CONTENT_TYPE, HOST},
    http::uri::Authority,
};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, crypto::ring, pki_types::ServerName};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    runtime::{Builder, Runtime},
    time::timeout,
};
use tokio_rustls::TlsConnector;
use turnpike_admin::{Problem, candidates};
use turnpike_api::{Job, Status, with_new_fields};
use turnpike_client::{TlsOptions, Verifier, certificates::Authorities, explain};
use turnpike_config::{Secret, Settings, forward::ForwardSettings, secret_file};

/// Request timeout; a little longer than the server's.
const PATIENCE: Duration = Duration::from_secs(35);
/// Default port of a URL.
const HTTPS: u16 = 443;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Unix(PathBuf),
    Tcp(SocketAddr),
    Tls(String, u16),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "{text:?} is not an address: expected unix:/PATH, ADDR:PORT on loopback, or https://HOST:PORT"
            )
        };
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(expected()) } else { Ok(Self::Unix(path.into())) };
        }
        if let Some(rest) = text.strip_prefix("https://") {
            let authority: Authority = rest.trim_end_matches('/').parse().map_err(|_| expected())?;
            let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
            // Rejects user info before an @.
            let is_plain = !host.is_empty() && !authority.as_str().contains('@');
            let port = authority.port_u16().unwrap_or(HTTPS);
            return if is_plain { Ok(Self::Tls(host, port)) } else { Err(expected()) };
        }
        let address = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
        let address: SocketAddr = address.parse().map_err(|_| expected())?;
        if address.ip().to_canonical().is_loopback() {
            Ok(Self::Tcp(address))
        } else {
            Err(format!("{address} is not on loopback: use TLS, with https://{address}"))
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Tls(host, port) => write!(f, "https://{}", bracketed(host, *port)),
        }
    }
}

/// Formats a host and port for a URL or Host header.
fn bracketed(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    #[error("no running turnpike serve was found at {}; to use another address, set --admin unix:/PATH", .tried.join(" or "))]
    NoProgram { tried: Vec<String> },
    #[error("{target} belongs to another user: run this command as that user, or as root")]
    Forbidden { target: Target },
    #[error("{target} does not answer: {source}")]
    Broken { target: Target, source: io::Error },
    #[error("{}{}", .0.detail, listed(&.0.errors))]
    Refused(Problem),
    /// The program is not turnpike, or is a different version.
    #[error("unexpected response from {target} ({status}): {why}")]
    Strange { target: Target, status: u16, why: String },
    #[error("cannot write the response: {0}")]
    Output(io::Error),
    #[error("cannot read the token in {}: {source}", path.display())]
    Token { path: PathBuf, source: io::Error },
}

pub(crate) fn listed(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n{line}")).collect()
}

pub struct Client {
    targets: Vec<Target>,
    answered: Mutex<Option<Target>>,
    token: Option<Secret>,
    /// PEM file of trusted CAs; `None` for the system's.
    ca: Option<PathBuf>,
    tls: OnceLock<Result<Arc<ClientConfig>, String>>,
    runtime: Runtime,
}

impl Client {
    /// Client for the program at `target`, by default the server of this user or of this machine. The first
    /// line of `token_file` is the token.
    pub fn new(target: Option<Target>, token_file: Option<&Path>) -> Result<Self, ClientError> {
        let token = token_file.map(|path| {
            let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
            let found =
                fs::read_to_string(path).and_then(|text| secret_file::first_secret(&text).map_err(invalid));
            found.map_err(|source| ClientError::Token { path: path.to_owned(), source })
        });
        let token = token.transpose()?.map(|token| Secret::new(token.reveal().trim_end()));
        let found = || candidates(Job::Serve).into_iter().map(Target::Unix).collect();
        let targets = target.map_or_else(found, |target| vec![target]);
        let runtime = Builder::new_current_thread().enable_all().build();
        let first = targets[0].clone();
        let runtime = runtime.map_err(|source| ClientError::Broken { target: first, source })?;
        Ok(Self { targets, answered: Mutex::default(), token, ca: None, tls: OnceLock::new(), runtime })
    }

    /// Falls back to the server's port on loopback, where every local user has read access.
    #[must_use]
    pub fn or_on_loopback(mut self) -> Self {
        self.targets.extend(Settings::default().admin.tcp().map(Target::Tcp));
        self
    }

    /// Falls back to a forwarder of this user or this machine.
    #[must_use]
    pub fn or_a_forwarder(mut self) -> Self {
        // The last path is that of the packaged unit.
        let sockets =
            candidates(Job::Forward).into_iter().chain([PathBuf::from("/run/turnpike-forward/forward.sock")]);
        let on_loopback = ForwardSettings::default().admin;
        let targets = sockets.map(Target::Unix).chain(on_loopback.tcp().map(Target::Tcp));
        self.targets.extend(targets);
        self
    }

    #[must_use]
    pub fn trusting(mut self, ca: Option<PathBuf>) -> Self {
        self.ca = ca;
        self
    }

    fn tls(&self) -> io::Result<Arc<ClientConfig>> {
        let made = self.tls.get_or_init(|| {
            let options = TlsOptions { ca: self.ca.clone(), ..TlsOptions::default() };
            let verifier =
                Verifier::new(Arc::new(Authorities::new(&options).map_err(|error| error.to_string())?));
            let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
            let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
            let mut config =
                builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
            config.alpn_protocols = vec![b"http/1.1".to_vec()];
            Ok(Arc::new(config))
        });
        made.clone().map_err(io::Error::other)
    }

    /// The target that answered last or, before any answer, all targets.
    #[must_use]
    pub fn whom(&self) -> String {
        let answered = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        let targets = answered.as_ref().map_or(&*self.targets, std::slice::from_ref);
        targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
    }

    pub fn finds_somebody(&self) -> Result<bool, ClientError> {
        match self.get::<Status>("/v1/status") {
            Ok(_) => Ok(true),
            Err(ClientError::NoProgram { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask(Method::GET, path, Bytes::new())
    }

    pub fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let body = body.and_then(|body| serde_json::to_vec(body).ok());
        self.ask(Method::POST, path, body.unwrap_or_default().into())
    }

    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask(Method::DELETE, path, Bytes::new())
    }

    /// Text of `/livez` or `/readyz`, and true if the status is a success.
    pub fn words(&self, path: &str) -> Result<(bool, String), ClientError> {
        let (_, status, bytes) = self.answer(&Method::GET, path, &Bytes::new())?;
        Ok((status.is_success(), String::from_utf8_lossy(&bytes).trim().to_owned()))
    }

    /// Writes a response of any length to `out`, part by part as it arrives.
    pub fn download(&self, path: &str, out: &mut dyn Write) -> Result<(), ClientError> {
        let mut tried = Vec::new();
        for target in &self.targets {
            let broken = |source| ClientError::Broken { target: target.clone(), source };
            let response = self.runtime.block_on(async {
                let request = self.respond(target, &Method::GET, path, Bytes::new());
                timeout(PATIENCE, request).await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
            });
            let response = match response {
                Ok(response) => response,
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                    tried.push(target.to_string());
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    return Err(ClientError::Forbidden { target: target.clone() });
                }
                Err(source) => return Err(broken(source)),
            };
            let status = response.status();
            let mut body = response.into_body();
            if !status.is_success() {
                let body = self.runtime.block_on(body.collect());
                let bytes = body.map_err(|error| broken(io::Error::other(error)))?.to_bytes();
                return understand::<()>(target, status, &bytes);
            }
            while let Some(frame) = self.runtime.block_on(body.frame()) {
                let frame = frame.map_err(|error| broken(io::Error::other(error)))?;
                let Ok(data) = frame.into_data() else { continue };
                out.write_all(&data).and_then(|()| out.flush()).map_err(ClientError::Output)?;
            }
            return Ok(());
        }
        Err(ClientError::NoProgram { tried })
    }

    fn ask<T: DeserializeOwned>(&self, method: Method, path: &str, body: Bytes) -> Result<T, ClientError> {
        let (target, status, bytes) = self.answer(&method, path, &body)?;
        match (understand(target, status, &bytes), old_path(path)) {
            (Err(ClientError::Refused(problem)), Some(old)) if *problem.code == *"no_such_path" => {
                let (target, status, bytes) = self.answer(&method, &old, &body)?;
                understand(target, status, &bytes)
            }
            (understood, _) => understood,
        }
    }

    fn answer(
        &self,
        method: &Method,
        path: &str,
        body: &Bytes,
    ) -> Result<(&Target, StatusCode, Bytes), ClientError> {
        let mut tried = Vec::new();
        for target in &self.targets {
            let answer = self.runtime.block_on(async {
                let exchange = self.exchange(target, method, path, body.clone());
                timeout(PATIENCE, exchange).await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
            });
            match answer {
                Ok((status, bytes)) => {
                    *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Some(target.clone());
                    return Ok((target, status, bytes));
                }
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                    tried.push(target.to_string());
                }
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    return Err(ClientError::Forbidden { target: target.clone() });
                }
                Err(source) => return Err(ClientError::Broken { target: target.clone(), source }),
            }
        }
        Err(ClientError::NoProgram { tried })
    }

    async fn exchange(
        &self,
        target: &Target,
        method: &Method,
        path: &str,
        body: Bytes,
    ) -> io::Result<(StatusCode, Bytes)> {
        let response = self.respond(target, method, path, body).await?;
        let status = response.status();
        let body = response.into_body().collect().await.map_err(io::Error::other)?;
        Ok((status, body.to_bytes()))
    }

    async fn respond(
        &self,
        target: &Target,
        method: &Method,
        path: &str,
        body: Bytes,
    ) -> io::Result<Response<Incoming>> {
        let host = match target {
            Target::Unix(_) => "localhost".to_owned(),
            Target::Tcp(address) => address.to_string(),
            Target::Tls(host, port) => bracketed(host, *port),
        };
        let mut request = Request::builder().method(method).uri(path).header(HOST, host);
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.reveal()));
        }
        let request = request.body(Full::new(body)).map_err(io::Error::other)?;
        match target {
            Target::Unix(path) => send(UnixStream::connect(path).await?, request).await,
            Target::Tcp(address) => send(TcpStream::connect(address).await?, request).await,
            Target::Tls(host, port) => {
                let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
                let connector = TlsConnector::from(self.tls()?);
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                send(connector.connect(name, stream).await.map_err(in_words)?, request).await
            }
        }
    }
}

fn in_words(error: io::Error) -> io::Error {
    let of_tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).map(explain);
    of_tls.map_or(error, io::Error::other)
}

async fn send<S>(stream: S, request: Request<Full<Bytes>>) -> io::Result<Response<Incoming>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(io::Error::other)
}

/// Name of a path in the previous version, in case the running program is that version.
fn old_path(path: &str) -> Option<String> {
    let is_renamed = ["/v1/allocations", "/v1/fleet/allocations"].iter().any(|new| path.starts_with(new));
    is_renamed.then(|| path.replacen("/allocations", "/sessions", 1))
}

fn understand<T: DeserializeOwned>(
    target: &Target,
    status: StatusCode,
    bytes: &[u8],
) -> Result<T, ClientError> {
    let strange = |error: serde_json::Error| ClientError::Strange {
        target: target.clone(),
        status: status.as_u16(),
        why: error.to_string(),
    };
    if status.is_success() {
        // The running program may be older than this command.
        return match std::str::from_utf8(bytes) {
            Ok(text) => serde_json::from_str(&with_new_fields(text)).map_err(strange),
            Err(_) => serde_json::from_slice(bytes).map_err(strange),
        };
    }
    let problem: Problem = serde_json::from_slice(bytes).map_err(strange)?;
    Err(ClientError::Refused(problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_is_a_socket_loopback_address_or_url() {
        assert_eq!("unix:/run/a.sock".parse(), Ok(Target::Unix("/run/a.sock".into())));
        for text in ["127.0.0.1:9641", "http://127.0.0.1:9641/"] {
            assert_eq!(text.parse(), Ok(Target::Tcp(([127, 0, 0, 1], 9641).into())), "{text}");
        }
        for (text, host, port, shown) in [
            ("https://turn.example.org:9641/", "turn.example.org", 9641, "https://turn.example.org:9641"),
            ("https://turn.example.org", "turn.example.org", 443, "https://turn.example.org:443"),
            ("https://[2001:db8::1]:9641", "2001:db8::1", 9641, "https://[2001:db8::1]:9641"),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!((&target, &*target.to_string()), (&Target::Tls(host.to_owned(), port), shown));
        }
        for (bad, told) in [
            ("unix:", "expected unix:/PATH"),
            ("localhost", "expected unix:/PATH"),
            ("192.0.2.1:9641", "with https://192.0.2.1:9641"),
            ("https://", "expected unix:/PATH"),
            ("https://a:b@turn.example.org", "expected unix:/PATH"),
            ("https://turn.example.org/v1", "expected unix:/PATH"),
        ] {
            let error = bad.parse::<Target>().expect_err(bad);
            assert!(error.contains(told), "{error}");
        }
    }
}
