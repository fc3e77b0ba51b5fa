//! Users at an HTTP endpoint of an application, which answers one user per request. docs/stores.md describes the
//! requests and responses. Everything else (secrets, realms, rules) stays in the configuration.

use std::{
    fmt, io,
    net::IpAddr,
    sync::{Mutex, PoisonError},
};

use http_body_util::Full;
use hyper::{
    Request, StatusCode, Uri,
    body::Bytes,
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT},
};
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;
use turnpike_client::http::{HttpConnection, host_field};
use turnpike_wire::secret::Secret;
use url::{Host, Url};

use crate::{
    Backend, Edit, Existing, Rules, StoreError, StoreFault, StoredSecret, UserKeys, UserRow, tables::bad_key,
};

/// Maximum length of a response in bytes.
const LONGEST: usize = 4096;

/// An `https` URL, or `http` on this machine.
#[derive(Clone, PartialEq, Eq)]
pub struct HttpAddress {
    /// Without a user name, password and fragment.
    url: Url,
    /// User name or password of the URL.
    token: Option<Secret>,
}

impl HttpAddress {
    /// Messages never quote the URL, because it may contain a token.
    pub(crate) fn new(mut url: Url) -> Result<Self, String> {
        let is_local = match url.host() {
            Some(Host::Domain(name)) => name == "localhost",
            Some(Host::Ipv4(ip)) => ip.is_loopback(),
            Some(Host::Ipv6(ip)) => ip.is_loopback(),
            None => false,
        };
        if url.scheme() == "http" && !is_local {
            return Err(
                "http:// would show users' keys to others: use https://, or an address of this machine"
                    .to_owned(),
            );
        }
        let text = url.password().unwrap_or(url.username());
        let token = percent_decode_str(text).decode_utf8();
        let token = token.ok().filter(|token| HeaderValue::from_str(token).is_ok());
        let token = token.ok_or("the token in the URL contains control characters")?;
        let token = (!token.is_empty()).then(|| Secret::new(token.as_ref()));
        // Neither can fail: the URL has a host.
        let _ = (url.set_username(""), url.set_password(None));
        url.set_fragment(None);
        Ok(Self { url, token })
    }
}

/// Leaves out the token, and the query, which may contain another one.
impl fmt::Display for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut url = self.url.clone();
        url.set_query(None);
        f.write_str(url.as_str())
    }
}

impl fmt::Debug for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HttpAddress({self})")
    }
}

pub(crate) struct HttpStore {
    uri: Result<Uri, StoreError>,
    authorization: Option<HeaderValue>,
    /// One permit per connection.
    permits: Semaphore,
    idle: Mutex<Vec<HttpConnection>>,
    name: String,
}

impl HttpStore {
    pub(crate) fn new(address: &HttpAddress, connections: usize, name: String) -> Self {
        let uri = address.url.as_str().parse::<Uri>();
        let uri = uri.map_err(|error| StoreError::new(&name, StoreFault::Other, error));
        let authorization = address.token.as_ref().and_then(|token| {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.reveal())).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Self { uri, authorization, permits: Semaphore::new(connections), idle: Mutex::default(), name }
    }

    fn error(&self, fault: StoreFault, detail: impl fmt::Display) -> StoreError {
        StoreError::new(&self.name, fault, detail)
    }

    fn request(&self, uri: &Uri, body: Bytes) -> hyper::http::Result<Request<Full<Bytes>>> {
        let mut request = Request::post(uri.path_and_query().map_or("/", |path| path.as_str()))
            .header(HOST, HeaderValue::from_str(host_field(uri))?)
            .header(USER_AGENT, concat!("turnpike/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        request.body(Full::new(body))
    }

    /// Status and body of the response. A request on a connection that the server has closed in the meantime is
    /// repeated on a new one.
    async fn post(&self, body: Bytes) -> Result<(StatusCode, Bytes), StoreError> {
        let uri = self.uri.as_ref().map_err(Clone::clone)?;
        let _permit = self.permits.acquire().await.map_err(|error| self.error(StoreFault::Other, error))?;
        loop {
            let idle = self.take_idle();
            let is_reused = idle.is_some();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self.connect(uri).await?,
            };
            let request =
                self.request(uri, body.clone()).map_err(|error| self.error(StoreFault::Other, error))?;
            match connection.send(request, LONGEST).await {
                Ok(response) => {
                    let status = response.status();
                    let Some(body) = response.into_body() else {
                        return Err(self.error(
                            StoreFault::Row,
                            format_args!("a response of more than {LONGEST} bytes, or a part of one"),
                        ));
                    };
                    self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
                    return Ok((status, body));
                }
                Err(_) if is_reused => {}
                Err(error) => return Err(self.error(StoreFault::Unreachable, error)),
            }
        }
    }

    fn take_idle(&self) -> Option<HttpConnection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|connection| !connection.is_closed());
        idle.pop()
    }

    async fn connect(&self, uri: &Uri) -> Result<HttpConnection, StoreError> {
        let is_plain = uri.scheme_str() == Some("http");
        let check = |ip: IpAddr| {
            if is_plain && !ip.is_loopback() {
                return Err(format!("{ip} is not an address of this machine: http:// needs one"));
            }
            Ok(())
        };
        HttpConnection::open(uri, check).await.map_err(|error: io::Error| {
            let text = error.to_string();
            let fault = if text.starts_with("TLS: ") { StoreFault::Tls } else { StoreFault::Unreachable };
            self.error(fault, text)
        })
    }

    fn is_read_only(&self) -> StoreError {
        self.error(
            StoreFault::Other,
            "it only answers questions about single users; change users in the application",
        )
    }
}

impl Backend for HttpStore {
    async fn user(&self, realm: &str, name: &str) -> Result<Option<UserKeys>, StoreError> {
        let question = json!({ "realm": realm, "user": name }).to_string();
        let (status, body) = self.post(question.into()).await?;
        match status {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(self.error(StoreFault::Login, format_args!("response {status}")));
            }
            _ if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                return Err(self.error(StoreFault::Other, format_args!("response {status}")));
            }
            _ => {
                return Err(
                    self.error(StoreFault::Schema, format_args!("responds with {status} instead of 200"))
                );
            }
        }
        let unlike = || {
            let detail = "does not respond with a JSON object in which key or password is a text";
            self.error(StoreFault::Schema, detail)
        };
        // The parser's message might quote a key.
        let answer: Map<String, Value> = serde_json::from_slice(&body).map_err(|_| unlike())?;
        let text = |member: &str| match answer.get(member) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(unlike()),
        };
        Ok(match (text("key")?, text("password")?) {
            (Some(key), _) => Some(UserKeys::from_hex(key).unwrap_or_else(|| {
                tracing::warn!("{}: {}", self.name, bad_key(realm, name));
                UserKeys::default()
            })),
            (None, Some(password)) => Some(UserKeys::new(name, realm, password)),
            (None, None) => None,
        })
    }

    async fn secrets(&self, _: &str) -> Result<Vec<StoredSecret>, StoreError> {
        Ok(Vec::new())
    }

    /// No user has an empty name; the question shows that the endpoint works.
    async fn rules(&self) -> Result<Rules, StoreError> {
        self.user("", "").await.map(|_| Rules::default())
    }

    async fn users(&self, _: Option<&str>, _: Option<&UserRow>) -> Result<Vec<UserRow>, StoreError> {
        Err(self.is_read_only())
    }

    async fn apply(&self, _: &Edit, _: Existing) -> Result<bool, StoreError> {
        Err(self.is_read_only())
    }
}
