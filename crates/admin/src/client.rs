//! How the commands reach a running program: over its Unix socket where nobody says otherwise, and over TCP on loopback.

use std::{
    fmt, fs,
    io::{self, ErrorKind},
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use http_body_util::{BodyExt as _, Full};
use hyper::{
    Method, Request, StatusCode,
    body::Bytes,
    client::conn::http1,
    header::{AUTHORIZATION, CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    runtime::{Builder, Runtime},
    time::timeout,
};
use turnpike_config::Secret;

use crate::{
    listen::{Environment, candidates},
    model::{Problem, Status},
};

/// What a request may take: a little more than the server gives it.
const PATIENCE: Duration = Duration::from_secs(35);

/// Where a program listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Its Unix socket.
    Unix(PathBuf),
    /// By HTTP in the clear.
    Tcp(SocketAddr),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("{text:?} is no address: expected unix:/PATH or ADDR:PORT");
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(expected()) } else { Ok(Self::Unix(path.into())) };
        }
        if text.starts_with("https://") {
            return Err(format!(
                "{text:?}: the commands speak no TLS; use the Unix socket, loopback, or ssh -L PORT:localhost:9641 HOST"
            ));
        }
        let address = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
        let address: SocketAddr = address.parse().map_err(|_| expected())?;
        if address.ip().to_canonical().is_loopback() {
            Ok(Self::Tcp(address))
        } else {
            Err(format!(
                "{address} is not on loopback, where it is served by TLS, which the commands do not speak"
            ))
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

/// Why there is no answer, or no good one; each message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody listens there.
    #[error("no running turnpike serve was found, at {}; name another one's address with --admin unix:/PATH", .tried.join(" or "))]
    Nobody {
        /// Where it was looked for.
        tried: Vec<String>,
    },
    /// It is somebody else's.
    #[error("{target} is another user's: run this as that user, or as root")]
    Forbidden {
        /// Where.
        target: Target,
    },
    /// On the way.
    #[error("{target} does not answer: {source}")]
    Broken {
        /// Where.
        target: Target,
        /// What happened.
        source: io::Error,
    },
    /// It said why not.
    #[error("{}{}", .0.detail, listed(&.0.errors))]
    Refused(Problem),
    /// It is no turnpike, or of another version.
    #[error("{target} answers what cannot be understood ({status}): {why}")]
    Strange {
        /// Where.
        target: Target,
        /// HTTP status.
        status: u16,
        /// What is wrong.
        why: String,
    },
    /// A token file.
    #[error("cannot read the token in {}: {source}", path.display())]
    Token {
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// Lines behind a sentence.
pub(crate) fn listed(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n{line}")).collect()
}

/// One program that can be asked.
pub struct Client {
    targets: Vec<Target>,
    token: Option<Secret>,
    runtime: Runtime,
}

impl Client {
    /// Of the program at `target`, or of the server of this user or this machine; with the first line of a file as its token.
    ///
    /// # Errors
    /// Where the file cannot be read. Whether somebody is there turns out with the first question.
    pub fn new(target: Option<Target>, token_file: Option<&Path>) -> Result<Self, ClientError> {
        let token = token_file.map(|path| {
            let text = fs::read_to_string(path);
            text.map_err(|source| ClientError::Token { path: path.to_owned(), source })
        });
        let token =
            token.transpose()?.map(|text| Secret::new(text.lines().next().unwrap_or_default().trim()));
        let found = || candidates(&Environment::of_process()).into_iter().map(Target::Unix).collect();
        let targets = target.map_or_else(found, |target| vec![target]);
        let runtime = Builder::new_current_thread().enable_all().build();
        let first = targets[0].clone();
        let runtime = runtime.map_err(|source| ClientError::Broken { target: first, source })?;
        Ok(Self { targets, token, runtime })
    }

    /// Whether a program answers.
    ///
    /// # Errors
    /// See [`ClientError`]: somebody is there who does not answer this one.
    pub fn finds_somebody(&self) -> Result<bool, ClientError> {
        match self.get::<Status>("/v1/status") {
            Ok(_) => Ok(true),
            Err(ClientError::Nobody { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What is at this path.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask(Method::GET, path, Bytes::new())
    }

    /// Has something done.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let body = body.and_then(|body| serde_json::to_vec(body).ok());
        self.ask(Method::POST, path, body.unwrap_or_default().into())
    }

    /// Has something ended.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask(Method::DELETE, path, Bytes::new())
    }

    /// What is said at this path in words, and whether it is well: `/livez`, `/readyz`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn words(&self, path: &str) -> Result<(bool, String), ClientError> {
        let (_, status, bytes) = self.answer(&Method::GET, path, &Bytes::new())?;
        Ok((status.is_success(), String::from_utf8_lossy(&bytes).trim().to_owned()))
    }

    fn ask<T: DeserializeOwned>(&self, method: Method, path: &str, body: Bytes) -> Result<T, ClientError> {
        let (target, status, bytes) = self.answer(&method, path, &body)?;
        understand(target, status, &bytes)
    }

    /// Of the first program that is found.
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
                Ok((status, bytes)) => return Ok((target, status, bytes)),
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                    tried.push(target.to_string());
                }
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    return Err(ClientError::Forbidden { target: target.clone() });
                }
                Err(source) => return Err(ClientError::Broken { target: target.clone(), source }),
            }
        }
        Err(ClientError::Nobody { tried })
    }

    async fn exchange(
        &self,
        target: &Target,
        method: &Method,
        path: &str,
        body: Bytes,
    ) -> io::Result<(StatusCode, Bytes)> {
        let host = match target {
            Target::Unix(_) => "localhost".to_owned(),
            Target::Tcp(address) => address.to_string(),
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
            Target::Unix(path) => exchange(UnixStream::connect(path).await?, request).await,
            Target::Tcp(address) => exchange(TcpStream::connect(address).await?, request).await,
        }
    }
}

async fn exchange<S>(stream: S, request: Request<Full<Bytes>>) -> io::Result<(StatusCode, Bytes)>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    tokio::spawn(connection);
    let response = sender.send_request(request).await.map_err(io::Error::other)?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(io::Error::other)?;
    Ok((status, body.to_bytes()))
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
        return serde_json::from_slice(bytes).map_err(strange);
    }
    let problem: Problem = serde_json::from_slice(bytes).map_err(strange)?;
    Err(ClientError::Refused(problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_socket_or_on_loopback() {
        assert_eq!("unix:/run/a.sock".parse(), Ok(Target::Unix("/run/a.sock".into())));
        for text in ["127.0.0.1:9641", "http://127.0.0.1:9641/"] {
            assert_eq!(text.parse(), Ok(Target::Tcp(([127, 0, 0, 1], 9641).into())), "{text}");
        }
        for (bad, told) in [
            ("unix:", "expected unix:/PATH"),
            ("localhost", "expected unix:/PATH"),
            ("https://127.0.0.1:1/", "no TLS"),
            ("192.0.2.1:9641", "not on loopback"),
        ] {
            let error = bad.parse::<Target>().expect_err(bad);
            assert!(error.contains(told), "{error}");
        }
    }
}
