//! TLS settings: certificates by server name, the protocols of RFC 7443, and session tickets. All workers
//! share one context. A reload replaces its certificates; existing sessions continue.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use pkcs8::{EncryptedPrivateKeyInfoRef, SecretDocument};
use rustls::{
    CipherSuite, InconsistentKeys, RootCertStore, ServerConfig, ServerConnection, SignatureScheme,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime, pem, pem::PemObject},
    server::{
        ClientHello, NoServerSessionStorage, ProducesTickets, ResolvesServerCert, danger::ClientCertVerifier,
    },
    sign::CertifiedKey,
};
use webpki::{EndEntityCert, KeyUsage};

use turnpike_measure::units::span;
use turnpike_rules::TURN_PROTOCOLS;
use turnpike_wire::pem::with_markers_on_lines;

use super::{
    client_certificates::ClientCertificates,
    tickets::{TicketKeys, Tickets},
};

/// Application protocol with which a certificate authority validates a name (RFC 8737).
const CHALLENGE_PROTOCOL: &[u8] = b"acme-tls/1";

/// Maximum number of simultaneously pending challenges.
const CHALLENGES: usize = 128;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CertificateError {
    #[error("no certificate found: expected PEM with BEGIN CERTIFICATE, the server's certificate first")]
    NoCertificate,
    #[error("invalid PEM: {0}")]
    CertificatePem(String),
    /// PEM label of an OpenSSL format, which the PEM parser would skip.
    #[error("BEGIN {0} is not BEGIN CERTIFICATE: convert it (openssl x509 -in FILE -out NEW)")]
    ForeignLabel(&'static str),
    #[error("the first certificate is not a usable X.509 certificate: {0}")]
    Malformed(String),
    #[error("the certificate expired {} ago", span(.0.as_secs()))]
    Expired(Duration),
    #[error("the certificate is not valid yet: it becomes valid in {}", span(.0.as_secs()))]
    NotYetValid(Duration),
    #[error("no private key found: expected PEM with BEGIN PRIVATE KEY")]
    NoKey,
    #[error(
        "the private key is encrypted: set tls.key_password if it has BEGIN ENCRYPTED PRIVATE KEY, or decrypt it (openssl pkey -in FILE -out NEW)"
    )]
    EncryptedKey,
    #[error("tls.key_password does not decrypt the private key: {0}")]
    KeyPassword(String),
    #[error("invalid PEM: {0}")]
    KeyPem(String),
    #[error("unusable private key: {0}; use RSA with at least 2048 bits, ECDSA P-256 or P-384, or Ed25519")]
    UnusableKey(String),
    #[error("the private key does not belong to the certificate")]
    Mismatch,
}

impl CertificateError {
    pub fn is_about_key(&self) -> bool {
        matches!(
            self,
            Self::NoKey
                | Self::EncryptedKey
                | Self::KeyPassword(_)
                | Self::KeyPem(_)
                | Self::UnusableKey(_)
                | Self::Mismatch
        )
    }
}

/// Fault of a chain that TLS can use but clients may reject. Certificates are numbered from 1, which is the
/// server's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainFault {
    /// The file contains only the server's certificate, but it is not self-signed.
    LeafOnly,
    NotIssuer(usize),
    Unreadable(usize),
}

#[derive(Clone)]
pub struct Identity {
    key: Arc<CertifiedKey>,
    names: Vec<String>,
    not_before: u64,
    not_after: u64,
}

impl Identity {
    /// Parses PEM. Checks neither the validity period ([`Identity::check_time`]) nor trust.
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, CertificateError> {
        Self::from_encrypted_pem(chain, key, None)
    }

    /// Like [`Identity::from_pem`], with a password that decrypts the key if it is encrypted.
    pub fn from_encrypted_pem(
        chain: &[u8],
        key: &[u8],
        password: Option<&str>,
    ) -> Result<Self, CertificateError> {
        let (chain, key) = (&with_markers_on_lines(chain), &with_markers_on_lines(key));
        if let Some(label) = foreign_label(chain) {
            return Err(CertificateError::ForeignLabel(label));
        }
        let chain = CertificateDer::pem_slice_iter(chain)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| CertificateError::CertificatePem(pem_fault(&error)))?;
        let key = private_key(key, password)?;
        let (names, not_before, not_after) = {
            let own = chain.first().ok_or(CertificateError::NoCertificate)?;
            let parsed = EndEntityCert::try_from(own)
                .map_err(|error| CertificateError::Malformed(der_fault(&error).to_owned()))?;
            let names = parsed.valid_dns_names().map(str::to_ascii_lowercase).collect();
            (names, not_before(&parsed), not_after(&parsed))
        };
        let signing = provider().key_provider.load_private_key(key).map_err(|error| {
            CertificateError::UnusableKey(match error {
                rustls::Error::General(why) => why,
                error => error.to_string(),
            })
        })?;
        let key = CertifiedKey::new(chain, signing);
        match key.keys_match() {
            Err(rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch)) => {
                Err(CertificateError::Mismatch)
            }
            Ok(()) | Err(rustls::Error::InconsistentKeys(_)) => {
                Ok(Self { key: Arc::new(key), names, not_before, not_after })
            }
            Err(error) => Err(CertificateError::Malformed(error.to_string())),
        }
    }

    /// Checks the validity period at this Unix time; returns [`CertificateError::Expired`] or
    /// [`CertificateError::NotYetValid`].
    pub fn check_time(&self, unix: u64) -> Result<(), CertificateError> {
        if unix > self.not_after {
            Err(CertificateError::Expired(Duration::from_secs(unix - self.not_after)))
        } else if unix < self.not_before {
            Err(CertificateError::NotYetValid(Duration::from_secs(self.not_before - unix)))
        } else {
            Ok(())
        }
    }

    /// DNS names in lower case; wildcards start with `*.`.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    #[must_use]
    pub fn certified_key(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.key)
    }

    /// First fault of the chain; a missing root is not a fault.
    pub fn chain_fault(&self) -> Option<ChainFault> {
        let readable =
            |(place, der)| EndEntityCert::try_from(der).map_err(|_| ChainFault::Unreadable(place + 1));
        let chain = match self.key.cert.iter().enumerate().map(readable).collect::<Result<Vec<_>, _>>() {
            Ok(chain) => chain,
            Err(fault) => return Some(fault),
        };
        if let [own] = &chain[..] {
            return (own.issuer() != own.subject()).then_some(ChainFault::LeafOnly);
        }
        let stranger = chain.windows(2).position(|pair| pair[0].issuer() != pair[1].subject())?;
        Some(ChainFault::NotIssuer(stranger + 2))
    }

    /// First Unix second of validity.
    pub fn not_before(&self) -> u64 {
        self.not_before
    }

    /// Last Unix second of validity.
    pub fn not_after(&self) -> u64 {
        self.not_after
    }

    pub(crate) fn certified(&self) -> &CertifiedKey {
        &self.key
    }
}

impl PartialEq for Identity {
    fn eq(&self, other: &Self) -> bool {
        self.key.cert == other.key.cert
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("names", &self.names).finish_non_exhaustive()
    }
}

pub struct TlsContext {
    config: Arc<ServerConfig>,
    shown: Arc<ShownCertificates>,
    clients: Arc<ClientCertificates>,
    tickets: Arc<Tickets>,
}

impl TlsContext {
    /// The first certificate is the default for clients without a matching server name; without certificates,
    /// handshakes fail until [`TlsContext::replace`]. Fails if the machine has no source of randomness.
    pub fn new(identities: &[Identity]) -> Result<Self, rustls::Error> {
        let shown = Arc::new(ShownCertificates {
            directory: RwLock::new(Arc::new(CertificateDirectory::new(identities))),
            challenges: RwLock::default(),
        });
        let provider = provider();
        let clients = Arc::new(ClientCertificates::new(Arc::clone(&provider)));
        let builder = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(Arc::clone(&clients) as Arc<dyn ClientCertVerifier>);
        let mut config = builder.with_cert_resolver(Arc::clone(&shown) as Arc<dyn ResolvesServerCert>);
        // The last protocol is for certificate authorities, not for clients.
        let protocols = TURN_PROTOCOLS.iter().map(|name| name.as_bytes()).chain([CHALLENGE_PROTOCOL]);
        config.alpn_protocols = protocols.map(<[u8]>::to_vec).collect();
        // Stateless: nothing is stored per client, and workers never wait for each other.
        let tickets = Arc::new(Tickets::new());
        config.ticketer = Arc::clone(&tickets) as Arc<dyn ProducesTickets>;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        // Our order of preference decides; see `provider`.
        config.ignore_client_order = true;
        // Each resumption issues a new ticket, so one is enough.
        config.send_tls13_tickets = 1;
        Ok(Self { config: Arc::new(config), shown, clients, tickets })
    }

    pub fn replace(&self, identities: &[Identity]) {
        let new = Arc::new(CertificateDirectory::new(identities));
        *self.shown.directory.write().unwrap_or_else(PoisonError::into_inner) = new;
    }

    /// Requires certificates from these authorities of new clients, or none. Sessions are not resumed while
    /// certificates are required, because that would skip their verification.
    pub fn require_client_certificates(
        &self,
        authorities: Option<RootCertStore>,
    ) -> Result<(), rustls::Error> {
        self.clients.require(authorities)?;
        self.tickets.enable(!self.clients.are_required());
        Ok(())
    }

    /// Returns true if this client should have presented a certificate.
    pub(super) fn lacks_certificate(&self, connection: &ServerConnection) -> bool {
        connection.peer_certificates().is_none() && self.clients.are_required()
    }

    /// Returns true if a certificate lists this lower-case name itself, not just a matching wildcard, or if a challenge
    /// for it is pending.
    pub(super) fn has_certificate_for(&self, name: &str) -> bool {
        let directory = self.shown.directory.read().unwrap_or_else(PoisonError::into_inner);
        let challenges = self.shown.challenges.read().unwrap_or_else(PoisonError::into_inner);
        directory.by_name.contains_key(name) || challenges.contains_key(name)
    }

    /// Presents this certificate to a certificate authority that validates `server_name` (RFC 8737), until
    /// [`TlsContext::hide_challenge`].
    pub fn show_challenge(
        &self,
        server_name: &str,
        certificate: CertificateDer<'static>,
        key: PrivateKeyDer<'static>,
    ) -> Result<(), rustls::Error> {
        let key = provider().key_provider.load_private_key(key)?;
        let mut challenges = self.shown.challenges.write().unwrap_or_else(PoisonError::into_inner);
        if challenges.len() >= CHALLENGES {
            return Err(rustls::Error::General(format!("{CHALLENGES} challenges are pending")));
        }
        challenges
            .insert(server_name.to_ascii_lowercase(), Arc::new(CertifiedKey::new(vec![certificate], key)));
        self.clients.await_challenge(true);
        Ok(())
    }

    pub fn hide_challenge(&self, server_name: &str) {
        let mut challenges = self.shown.challenges.write().unwrap_or_else(PoisonError::into_inner);
        challenges.remove(&server_name.to_ascii_lowercase());
        self.clients.await_challenge(!challenges.is_empty());
    }

    pub fn ticket_keys(&self) -> TicketKeys {
        self.tickets.keys()
    }

    pub fn take_over(&self, keys: &TicketKeys) {
        self.tickets.take_over(keys);
    }

    pub(super) fn connect(&self) -> Result<ServerConnection, rustls::Error> {
        let mut connection = ServerConnection::new(Arc::clone(&self.config))?;
        // Callers already limit the data; with a limit here, rustls might accept only part of a message.
        connection.set_buffer_limit(None);
        Ok(connection)
    }
}

impl fmt::Debug for TlsContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsContext").finish_non_exhaustive()
    }
}

/// Returns true for a finished handshake with a certificate authority, which exchanges no data (RFC 8737
/// section 3).
pub(super) fn is_challenge(connection: &ServerConnection) -> bool {
    connection.alpn_protocol() == Some(CHALLENGE_PROTOCOL)
}

struct ShownCertificates {
    directory: RwLock<Arc<CertificateDirectory>>,
    /// Maps server names to certificates of pending challenges.
    challenges: RwLock<HashMap<String, Arc<CertifiedKey>, RandomState>>,
}

impl fmt::Debug for ShownCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shown")
    }
}

impl ResolvesServerCert for ShownCertificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        // A validating certificate authority offers only this protocol (RFC 8737 section 3).
        if hello.alpn().is_some_and(|mut offered| offered.all(|name| name == CHALLENGE_PROTOCOL)) {
            let challenges = self.challenges.read().unwrap_or_else(PoisonError::into_inner);
            return challenges.get(&hello.server_name()?.to_ascii_lowercase()).cloned();
        }
        let directory = Arc::clone(&self.directory.read().unwrap_or_else(PoisonError::into_inner));
        directory.choose(hello.server_name(), hello.signature_schemes())
    }
}

pub(crate) struct CertificateDirectory {
    all: Vec<Arc<CertifiedKey>>,
    /// Indices in `all`, several per name, because an RSA and an ECDSA certificate may have the same name.
    by_name: HashMap<String, Vec<usize>, RandomState>,
}

impl CertificateDirectory {
    pub(crate) fn new(identities: &[Identity]) -> Self {
        let mut by_name: HashMap<String, Vec<usize>, RandomState> = HashMap::default();
        for (place, identity) in identities.iter().enumerate() {
            for name in &identity.names {
                by_name.entry(name.clone()).or_default().push(place);
            }
        }
        Self { all: identities.iter().map(|identity| Arc::clone(&identity.key)).collect(), by_name }
    }

    /// Prefers an exact name, then a wildcard, then the default; among several, the first one whose key type
    /// the client supports.
    pub(crate) fn choose(
        &self,
        server: Option<&str>,
        schemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        let server = server.map(str::to_ascii_lowercase);
        // RFC 6125 section 6.4.3: a wildcard replaces only the leftmost label.
        let parent =
            server.as_deref().and_then(|name| name.split_once('.')).map(|(_, rest)| format!("*.{rest}"));
        let named = [server.as_deref(), parent.as_deref()].into_iter().flatten();
        let places = named.filter_map(|name| self.by_name.get(name)).flatten().copied();
        let usable = |place: &usize| self.all[*place].key.choose_scheme(schemes).is_some();
        let chosen = places.chain(0..self.all.len()).find(usable).unwrap_or(0);
        self.all.get(chosen).cloned()
    }
}

fn provider() -> Arc<CryptoProvider> {
    let mut provider = turnpike_tls::provider();
    // The mandatory suite (RFC 8446 section 9.1), which is also the cheapest per byte on CPUs with AES
    // instructions, and its TLS 1.2 equivalents for each certificate type.
    let is_first = |suite: CipherSuite| {
        matches!(
            suite,
            CipherSuite::TLS13_AES_128_GCM_SHA256
                | CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
                | CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
        )
    };
    provider.cipher_suites.sort_by_key(|suite| !is_first(suite.suite()));
    Arc::new(provider)
}

/// Verifies without any trust anchor: webpki checks the validity period first, and the other checks do not
/// matter here.
fn time_fault(certificate: &EndEntityCert<'_>, now: UnixTime) -> Option<webpki::Error> {
    certificate.verify_for_usage(&[], &[], &[], now, KeyUsage::server_auth(), None, None).err()
}

/// Start of validity, derived from the error at Unix time 0.
fn not_before(certificate: &EndEntityCert<'_>) -> u64 {
    match time_fault(certificate, UnixTime::since_unix_epoch(Duration::ZERO)) {
        Some(webpki::Error::CertNotValidYet { not_before, .. }) => not_before.as_secs(),
        _ => 0,
    }
}

/// End of validity, derived from the error at the maximum time, when no certificate is valid any more (RFC
/// 5280 section 4.1.2.5).
fn not_after(certificate: &EndEntityCert<'_>) -> u64 {
    match time_fault(certificate, UnixTime::since_unix_epoch(Duration::from_secs(u64::MAX))) {
        Some(webpki::Error::CertExpired { not_after, .. }) => not_after.as_secs(),
        _ => u64::MAX,
    }
}

fn foreign_label(pem: &[u8]) -> Option<&'static str> {
    ["X509 CERTIFICATE", "TRUSTED CERTIFICATE"]
        .into_iter()
        .find(|label| holds(pem, &format!("-----BEGIN {label}-----")))
}

fn private_key(pem: &[u8], password: Option<&str>) -> Result<PrivateKeyDer<'static>, CertificateError> {
    if let (Some(password), Some(encrypted)) = (password, encrypted_key(pem)) {
        return decrypted(encrypted, password);
    }
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| match error {
        _ if is_encrypted(pem) => CertificateError::EncryptedKey,
        pem::Error::NoItemsFound => CertificateError::NoKey,
        error => CertificateError::KeyPem(pem_fault(&error)),
    })
}

/// Label of RFC 5958.
const BEGIN_ENCRYPTED: &str = "-----BEGIN ENCRYPTED PRIVATE KEY-----";
const END_ENCRYPTED: &str = "-----END ENCRYPTED PRIVATE KEY-----";

fn encrypted_key(pem: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(pem).ok()?;
    let key = &text[text.find(BEGIN_ENCRYPTED)?..];
    let end = key.find(END_ENCRYPTED).map_or(key.len(), |at| at + END_ENCRYPTED.len());
    Some(&key[..end])
}

/// Decrypts with PBES2 (RFC 8018 section 6.2).
fn decrypted(pem: &str, password: &str) -> Result<PrivateKeyDer<'static>, CertificateError> {
    let malformed = |error: &dyn fmt::Display| CertificateError::KeyPem(error.to_string());
    let (_, der) = SecretDocument::from_pem(pem).map_err(|error| malformed(&error))?;
    let encrypted =
        EncryptedPrivateKeyInfoRef::try_from(der.as_bytes()).map_err(|error| malformed(&error))?;
    match encrypted.decrypt(password) {
        Ok(key) => Ok(PrivatePkcs8KeyDer::from(key.as_bytes().to_vec()).into()),
        Err(error) => Err(CertificateError::KeyPassword(error.to_string())),
    }
}

/// Recognizes the label of RFC 5958 and OpenSSL's older header (RFC 1421 section 4.6.1.1).
fn is_encrypted(pem: &[u8]) -> bool {
    holds(pem, BEGIN_ENCRYPTED) || holds(pem, "Proc-Type: 4,ENCRYPTED")
}

fn holds(pem: &[u8], mark: &str) -> bool {
    pem.windows(mark.len()).any(|place| place == mark.as_bytes())
}

fn pem_fault(error: &pem::Error) -> String {
    match error {
        pem::Error::MissingSectionEnd { end_marker } => {
            let name = String::from_utf8_lossy(end_marker);
            format!("the line -----END {name}----- is missing; the file may be truncated")
        }
        pem::Error::IllegalSectionStart { line } => {
            format!("the line {:?} does not end with -----", String::from_utf8_lossy(line))
        }
        pem::Error::Base64Decode(_) => "the text between BEGIN and END is not Base64".to_owned(),
        error => error.to_string(),
    }
}

/// Describes an error, because webpki errors have no messages.
fn der_fault(error: &webpki::Error) -> &'static str {
    match error {
        webpki::Error::TrailingData(_) => "it has trailing bytes",
        webpki::Error::UnsupportedCertVersion => "it is not an X.509 version 3 certificate",
        webpki::Error::UnsupportedCriticalExtension => "it has an unknown critical extension",
        _ => "it is not valid DER",
    }
}
