//! TLS and DTLS settings of a client: server name, certificate verification and session cache.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use rustls::{
    ClientConfig, Error, NamedGroup,
    client::{
        ClientSessionMemoryCache, ClientSessionStore, Resumption, Tls12ClientSessionValue,
        Tls13ClientSessionValue,
    },
    pki_types::ServerName,
};

use crate::{
    InvalidSetting,
    certificates::{AnyCertificate, Authorities, CertificateJudge, Verifier, provider},
};

const ALPN_TURN: &[u8] = b"stun.turn";
/// Number of sessions kept per server for resumption: one for each client that may be in a handshake at the same time.
const SESSIONS: usize = 10_000;

#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct TlsOptions {
    /// PEM file with the certificate authorities to trust, or with the server's own certificate [default: the
    /// system's authorities]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub ca: Option<PathBuf>,

    /// Accept any certificate (for tests)
    #[cfg_attr(feature = "clap", arg(long, conflicts_with = "ca"))]
    pub insecure: bool,

    /// Name that the certificate must be valid for, also sent as SNI with TLS [default: the host of SERVER]
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME"))]
    pub server_name: Option<String>,

    /// Resume sessions (TLS only; dimpl has no resumption). Default true.
    #[cfg_attr(feature = "clap", arg(skip = true))]
    pub resumption: bool,
}

impl Default for TlsOptions {
    fn default() -> Self {
        Self { ca: None, insecure: false, server_name: None, resumption: true }
    }
}

#[derive(Clone, Debug)]
pub struct Security {
    pub config: Arc<ClientConfig>,
    pub name: ServerName<'static>,
    verifier: Arc<Verifier>,
}

impl Security {
    /// Reads the CA certificates. `host` is the server's name as given, unless it is an address.
    pub fn new(options: &TlsOptions, host: Option<&str>, server: SocketAddr) -> Result<Self, InvalidSetting> {
        let judge: Arc<dyn CertificateJudge> =
            if options.insecure { Arc::new(AnyCertificate) } else { Arc::new(Authorities::new(options)?) };
        Self::with_judge(options, host, server, judge)
    }

    pub fn with_judge(
        options: &TlsOptions,
        host: Option<&str>,
        server: SocketAddr,
        judge: Arc<dyn CertificateJudge>,
    ) -> Result<Self, InvalidSetting> {
        let name = server_name(options, host, server)?;
        let verifier = Verifier::new(judge);
        Ok(Self { config: config(options, Arc::clone(&verifier))?, name, verifier })
    }

    pub fn judge(&self, leaf: &[u8]) -> Result<(), Error> {
        self.verifier.judge_alone(leaf, &self.name)
    }
}

fn config(options: &TlsOptions, verifier: Arc<Verifier>) -> Result<Arc<ClientConfig>, InvalidSetting> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| InvalidSetting(format!("TLS cannot be set up: {error}")))?;
    let mut config = builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
    config.alpn_protocols = vec![ALPN_TURN.to_vec()];
    config.resumption = if options.resumption {
        Resumption::store(Arc::new(SessionCache::default()))
    } else {
        Resumption::disabled()
    };
    Ok(Arc::new(config))
}

fn server_name(
    options: &TlsOptions,
    host: Option<&str>,
    server: SocketAddr,
) -> Result<ServerName<'static>, InvalidSetting> {
    let address = server.ip().to_string();
    let name = options.server_name.as_deref().or(host).unwrap_or(&address);
    ServerName::try_from(name.to_owned()).map_err(|_| {
        InvalidSetting(format!(
            "{name:?} is not a valid host name for a certificate; give one with --server-name"
        ))
    })
}

/// Session cache. A TLS 1.3 ticket should be used for only one connection (RFC 8446 appendix C.4), and
/// rustls's own cache keeps only eight per server, so clients that connect in parallel would rarely find one.
struct SessionCache {
    others: ClientSessionMemoryCache,
    tickets: Mutex<HashMap<ServerName<'static>, VecDeque<Tls13ClientSessionValue>>>,
}

impl Default for SessionCache {
    fn default() -> Self {
        Self { others: ClientSessionMemoryCache::new(SESSIONS), tickets: Mutex::default() }
    }
}

impl fmt::Debug for SessionCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").finish_non_exhaustive()
    }
}

impl ClientSessionStore for SessionCache {
    fn set_kx_hint(&self, server_name: ServerName<'static>, group: NamedGroup) {
        self.others.set_kx_hint(server_name, group);
    }

    fn kx_hint(&self, server_name: &ServerName<'_>) -> Option<NamedGroup> {
        self.others.kx_hint(server_name)
    }

    fn set_tls12_session(&self, server_name: ServerName<'static>, value: Tls12ClientSessionValue) {
        self.others.set_tls12_session(server_name, value);
    }

    fn tls12_session(&self, server_name: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        self.others.tls12_session(server_name)
    }

    fn remove_tls12_session(&self, server_name: &ServerName<'static>) {
        self.others.remove_tls12_session(server_name);
    }

    fn insert_tls13_ticket(&self, server_name: ServerName<'static>, value: Tls13ClientSessionValue) {
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        let tickets = tickets.entry(server_name).or_default();
        if tickets.len() >= SESSIONS {
            tickets.pop_front();
        }
        tickets.push_back(value);
    }

    fn take_tls13_ticket(&self, server_name: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner).get_mut(server_name)?.pop_back()
    }
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;
    use crate::explain;

    fn certificate(names: &[&str]) -> rcgen::CertifiedKey<rcgen::KeyPair> {
        rcgen::generate_simple_self_signed(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap()
    }

    fn judge(options: &TlsOptions, leaf: &[u8], host: &str) -> Result<(), String> {
        let server = SocketAddr::from(([127, 0, 0, 1], 5349));
        let security = Security::new(options, Some(host), server).map_err(|error| error.to_string())?;
        security.judge(leaf).map_err(|error| error.to_string())
    }

    #[test]
    fn a_pinned_certificate_is_valid_for_its_own_name_only() {
        let ours = certificate(&["turn.example.org"]);
        let dir = Dir::new();
        let path = dir.file("ca.pem", ours.cert.pem());
        let options = TlsOptions { ca: Some(path), ..TlsOptions::default() };
        assert_eq!(judge(&options, ours.cert.der(), "turn.example.org"), Ok(()));
        assert!(judge(&options, ours.cert.der(), "example.net").is_err());
        let other = certificate(&["turn.example.org"]);
        assert!(judge(&options, other.cert.der(), "turn.example.org").is_err());
        let insecure = TlsOptions { insecure: true, ..TlsOptions::default() };
        assert_eq!(judge(&insecure, other.cert.der(), "example.net"), Ok(()));
    }

    #[test]
    fn a_name_mismatch_lists_the_certificate_names() {
        let ours = certificate(&["localhost", "127.0.0.1", "::1"]);
        let dir = Dir::new();
        let path = dir.file("ca.pem", ours.cert.pem());
        let options = TlsOptions { ca: Some(path), ..TlsOptions::default() };
        let server = SocketAddr::from(([127, 0, 0, 1], 5349));
        let security = Security::new(&options, Some("example.net"), server).unwrap();
        let told = explain(&security.judge(ours.cert.der()).unwrap_err());
        assert_eq!(told, "the certificate is for localhost, 127.0.0.1, ::1, not for example.net");
    }

    #[test]
    fn an_empty_ca_file_and_an_invalid_name_are_reported() {
        let dir = Dir::new();
        let path = dir.file("ca.pem", "nothing");
        let options = TlsOptions { ca: Some(path), ..TlsOptions::default() };
        assert!(judge(&options, &[], "a").unwrap_err().contains("--ca"));
        let insecure = TlsOptions { insecure: true, ..TlsOptions::default() };
        assert!(judge(&insecure, &[], "no name").unwrap_err().contains("--server-name"));
    }
}
