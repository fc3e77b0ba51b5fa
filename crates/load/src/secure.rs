//! TLS as a client of a TURN server has it: whom it trusts, under which name, and with which session it resumes. DTLS checks
//! certificates by the same rules.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, NamedGroup, RootCertStore, SignatureScheme,
    client::{
        ClientSessionMemoryCache, ClientSessionStore, Resumption, Tls12ClientSessionValue,
        Tls13ClientSessionValue, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _},
    server::ParsedCertificate,
};

use crate::LoadError;

/// RFC 7443.
const ALPN_TURN: &[u8] = b"stun.turn";
/// Sessions kept for resumption, of each server: as many as clients may be under way at a time.
const SESSIONS: usize = 10_000;

/// How a server's certificate is judged, and whether sessions are resumed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsOptions {
    /// PEM file with the authorities to trust; a certificate in it may also be the server's own, whose name is then still
    /// checked. Default: the machine's authorities.
    pub ca: Option<PathBuf>,
    /// Take any certificate.
    pub insecure: bool,
    /// The name that the certificate must have. Default: the server's host name or address.
    pub server_name: Option<String>,
    /// Resume sessions (TLS only; dimpl has none). Default true.
    pub resumption: bool,
}

impl Default for TlsOptions {
    fn default() -> Self {
        Self { ca: None, insecure: false, server_name: None, resumption: true }
    }
}

/// Everything that a secure connection is opened with. Made once, shared by all.
#[derive(Clone, Debug)]
pub(crate) struct Security {
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) verifier: Arc<dyn ServerCertVerifier>,
    pub(crate) name: ServerName<'static>,
}

impl Security {
    /// Reads the authorities. `host` is whom the user named, if by name.
    pub(crate) fn new(
        options: &TlsOptions,
        host: Option<&str>,
        server: SocketAddr,
    ) -> Result<Self, LoadError> {
        let name = server_name(options, host, server)?;
        let verifier = verifier(options)?;
        Ok(Self { config: config(options, Arc::clone(&verifier))?, verifier, name })
    }

    /// Judges a leaf certificate for which nobody sent intermediates, as in DTLS.
    pub(crate) fn judge(&self, leaf: &[u8]) -> Result<(), Error> {
        let leaf = CertificateDer::from(leaf);
        self.verifier.verify_server_cert(&leaf, &[], &self.name, &[], UnixTime::now()).map(|_| ())
    }
}

/// Why a handshake failed, in words.
pub(crate) fn explain(error: &Error) -> String {
    use CertificateError as C;
    let Error::InvalidCertificate(certificate) = error else {
        return match error {
            Error::AlertReceived(alert) => format!("the server ended the handshake ({alert:?})"),
            Error::InvalidMessage(_) => "what answers does not speak TLS".to_owned(),
            other => other.to_string(),
        };
    };
    let what = match certificate {
        C::Expired | C::ExpiredContext { .. } => "has expired".to_owned(),
        C::NotValidYet | C::NotValidYetContext { .. } => "is not valid yet".to_owned(),
        C::UnknownIssuer => "comes from an authority that is not trusted here".to_owned(),
        C::NotValidForName => "is for another name".to_owned(),
        C::NotValidForNameContext { expected, presented } => {
            format!("is for {}, not for {}", listed(presented), expected.to_str())
        }
        other if format!("{other:?}").contains("CaUsedAsEndEntity") => "is self-signed".to_owned(),
        other => format!("is not valid ({other})"),
    };
    format!("the certificate {what}")
}

/// Names of a certificate, which rustls hands on as Rust writes the values of webpki: `DnsName("a")`, `IpAddress(127.0.0.1)`.
fn listed(presented: &[String]) -> String {
    /// Of a certificate for a hundred hosts these are enough to see whose it is.
    const MOST: usize = 5;
    let within = |text: &str, before: &str, after: &str| {
        text.strip_prefix(before).and_then(|rest| rest.strip_suffix(after)).map(str::to_owned)
    };
    let name = |text: &String| {
        let ip = within(text, "IpAddress(", ")")
            .map(|ip| ip.parse().map_or(ip, |ip: std::net::IpAddr| ip.to_string()));
        let name = within(text, "DnsName(\"", "\")").or(ip)?;
        Some(name.chars().filter(|c| !c.is_control()).collect::<String>())
    };
    let mut names: Vec<_> = presented.iter().filter_map(name).collect();
    if names.is_empty() {
        return "no host name and no address".to_owned();
    }
    let more = names.len().saturating_sub(MOST);
    names.truncate(MOST);
    let names = names.join(", ");
    if more > 0 { format!("{names} and {more} more") } else { names }
}

/// A configuration with this verifier.
pub(crate) fn config(
    options: &TlsOptions,
    verifier: Arc<dyn ServerCertVerifier>,
) -> Result<Arc<ClientConfig>, LoadError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| LoadError::Config(format!("TLS cannot be set up: {error}")))?;
    let mut config = builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
    config.alpn_protocols = vec![ALPN_TURN.to_vec()];
    config.resumption = if options.resumption {
        Resumption::store(Arc::new(Sessions::default()))
    } else {
        Resumption::disabled()
    };
    Ok(Arc::new(config))
}

/// Who decides about certificates.
fn verifier(options: &TlsOptions) -> Result<Arc<dyn ServerCertVerifier>, LoadError> {
    if options.insecure { Ok(believer()) } else { judge(options) }
}

/// Who takes any certificate, if only the handshake is signed with its key.
pub(crate) fn believer() -> Arc<dyn ServerCertVerifier> {
    Arc::new(TrustAll(provider()))
}

/// Who checks certificates, whether or not the user insists that they be good.
pub(crate) fn judge(options: &TlsOptions) -> Result<Arc<dyn ServerCertVerifier>, LoadError> {
    let authorities = match &options.ca {
        Some(path) => read_authorities(path)?,
        None => system_authorities()?,
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(authorities.iter().cloned());
    if roots.is_empty() {
        let path = options.ca.as_deref().unwrap_or_else(|| Path::new("the machine's authorities"));
        return Err(LoadError::Config(format!("{} holds no certificate that can be used", path.display())));
    }
    let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
        .build()
        .map_err(|error| LoadError::Config(format!("certificates cannot be checked: {error}")))?;
    let pinned = if options.ca.is_some() { authorities } else { Vec::new() };
    Ok(Arc::new(Trust { inner, pinned }))
}

/// The name to ask for.
pub(crate) fn server_name(
    options: &TlsOptions,
    host: Option<&str>,
    server: SocketAddr,
) -> Result<ServerName<'static>, LoadError> {
    let address = server.ip().to_string();
    let name = options.server_name.as_deref().or(host).unwrap_or(&address);
    ServerName::try_from(name.to_owned()).map_err(|_| {
        LoadError::Config(format!(
            "{name:?} is no host name that a certificate could have; give one with --server-name"
        ))
    })
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn read_authorities(path: &Path) -> Result<Vec<CertificateDer<'static>>, LoadError> {
    let bad = |what: &dyn fmt::Display| {
        LoadError::Config(format!(
            "--ca {}: {what}; a file with certificates in PEM is wanted",
            path.display()
        ))
    };
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| bad(&error))?;
    if found.is_empty() { Err(bad(&"it holds no certificate")) } else { Ok(found) }
}

fn system_authorities() -> Result<Vec<CertificateDer<'static>>, LoadError> {
    let found = rustls_native_certs::load_native_certs().certs;
    if !found.is_empty() {
        return Ok(found);
    }
    Err(LoadError::Config(
        "this machine has no list of certificate authorities: install ca-certificates, name one with --ca FILE, or take any \
         certificate with --insecure"
            .to_owned(),
    ))
}

/// Sessions to resume. A TLS 1.3 ticket is good for one connection (RFC 8446 appendix C.4), and the memory of rustls keeps
/// eight of them a server: clients that connect many at a time would mostly find none and not resume.
struct Sessions {
    /// For all but the tickets of TLS 1.3.
    others: ClientSessionMemoryCache,
    tickets: Mutex<HashMap<ServerName<'static>, VecDeque<Tls13ClientSessionValue>>>,
}

impl Default for Sessions {
    fn default() -> Self {
        Self { others: ClientSessionMemoryCache::new(SESSIONS), tickets: Mutex::default() }
    }
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").finish_non_exhaustive()
    }
}

impl ClientSessionStore for Sessions {
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
        // The newest lives longest.
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner).get_mut(server_name)?.pop_back()
    }
}

/// The rules of the web's PKI, and certificates that the user has named one by one.
#[derive(Debug)]
struct Trust {
    inner: Arc<WebPkiServerVerifier>,
    pinned: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for Trust {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let judged =
            self.inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        // `openssl req -x509` makes a certificate that is its own authority, which no path may end in.
        let outside = matches!(
            judged,
            Err(Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::Other(_)))
        );
        if outside && self.pinned.iter().any(|pinned| pinned == end_entity) {
            verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
            return Ok(ServerCertVerified::assertion());
        }
        judged
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// `--insecure`: any certificate, but the handshake must still be signed with its key.
#[derive(Debug)]
struct TrustAll(Arc<CryptoProvider>);

impl ServerCertVerifier for TrustAll {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn certificate(names: &[&str]) -> rcgen::CertifiedKey<rcgen::KeyPair> {
        rcgen::generate_simple_self_signed(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap()
    }

    fn judge(options: &TlsOptions, leaf: &[u8], host: &str) -> Result<(), String> {
        let server = SocketAddr::from(([127, 0, 0, 1], 5349));
        let security = Security::new(options, Some(host), server).map_err(|error| error.to_string())?;
        security.judge(leaf).map_err(|error| error.to_string())
    }

    #[test]
    fn a_named_certificate_is_taken_under_its_own_name_only() {
        let ours = certificate(&["turn.example.org"]);
        let path = std::env::temp_dir().join(format!("turnpike-ca-{}.pem", std::process::id()));
        fs::write(&path, ours.cert.pem()).unwrap();
        let options = TlsOptions { ca: Some(path.clone()), ..TlsOptions::default() };
        assert_eq!(judge(&options, ours.cert.der(), "turn.example.org"), Ok(()));
        assert!(judge(&options, ours.cert.der(), "example.net").is_err());
        let other = certificate(&["turn.example.org"]);
        assert!(judge(&options, other.cert.der(), "turn.example.org").is_err());
        let insecure = TlsOptions { insecure: true, ..TlsOptions::default() };
        assert_eq!(judge(&insecure, other.cert.der(), "example.net"), Ok(()));
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_certificate_for_another_name_is_told_by_its_names_as_people_write_them() {
        let ours = certificate(&["localhost", "127.0.0.1", "::1"]);
        let path = std::env::temp_dir().join(format!("turnpike-names-{}.pem", std::process::id()));
        fs::write(&path, ours.cert.pem()).unwrap();
        let options = TlsOptions { ca: Some(path.clone()), ..TlsOptions::default() };
        let server = SocketAddr::from(([127, 0, 0, 1], 5349));
        let security = Security::new(&options, Some("example.net"), server).unwrap();
        let told = explain(&security.judge(ours.cert.der()).unwrap_err());
        assert_eq!(told, "the certificate is for localhost, 127.0.0.1, ::1, not for example.net");
        let many: Vec<_> = (0..7).map(|number| format!("DnsName(\"{number}.example\")")).collect();
        assert!(listed(&many).ends_with("4.example and 2 more"));
        assert_eq!(listed(&["DirectoryName".to_owned()]), "no host name and no address");
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_without_certificates_and_an_impossible_name_say_so() {
        let path = std::env::temp_dir().join(format!("turnpike-no-ca-{}.pem", std::process::id()));
        fs::write(&path, "nothing").unwrap();
        let options = TlsOptions { ca: Some(path.clone()), ..TlsOptions::default() };
        assert!(judge(&options, &[], "a").unwrap_err().contains("--ca"));
        let insecure = TlsOptions { insecure: true, ..TlsOptions::default() };
        assert!(judge(&insecure, &[], "no name").unwrap_err().contains("--server-name"));
        fs::remove_file(path).unwrap();
    }
}
