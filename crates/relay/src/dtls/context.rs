//! Certificates by server name, and settings for dimpl, shared by all workers. A reload replaces the
//! certificates; existing associations continue.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use dimpl::{Config, CryptoError, Dtls, DtlsCertificate, Error, Output};
use rustls::{SignatureScheme, sign::CertifiedKey};

use super::{
    hello::Cookie,
    hello::{Hello, Version},
    provider::{self, Lent},
};
use crate::{Identity, stream::tls::CertificateDirectory};

/// Conservative path MTU for handshake datagrams. Application data is not limited.
const MTU: usize = 1200;
/// Time until the first retransmission of a flight (RFC 9147 section 5.8.2 recommends 1 s; clients of
/// real-time media wait less).
const RETRANSMIT: Duration = Duration::from_millis(500);
/// Maximum number of out-of-order records kept. Handshakes need fewer, and none are kept after the handshake.
const QUEUE: usize = 16;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DtlsError {
    #[error("DTLS needs an ECDSA certificate with P-256 or P-384: add one, or remove the DTLS listeners")]
    NoCertificate,
    #[error("cannot set up DTLS: {0}")]
    Setup(String),
}

pub struct DtlsContext {
    config: Arc<Config>,
    shown: RwLock<Arc<CertificateDirectory>>,
}

impl DtlsContext {
    /// Uses those certificates that support DTLS ([`Identity::can_dtls`]). The first one is for clients whose
    /// server name does not match any. `handshake` is the timeout of a handshake.
    pub fn new(identities: &[Identity], handshake: Duration) -> Result<Self, DtlsError> {
        Self::with(directory(identities).ok_or(DtlsError::NoCertificate)?, handshake)
    }

    /// Refuses handshakes until [`DtlsContext::replace`] provides a certificate.
    pub fn without_certificate(handshake: Duration) -> Result<Self, DtlsError> {
        Self::with(CertificateDirectory::new(&[]), handshake)
    }

    fn with(shown: CertificateDirectory, handshake: Duration) -> Result<Self, DtlsError> {
        let config = Config::builder()
            .with_crypto_provider(provider::provider())
            .mtu(MTU)
            .max_queue_rx(QUEUE)
            .require_client_certificate(false)
            .use_server_cookie(true)
            .flight_start_rto(RETRANSMIT)
            .handshake_timeout(handshake)
            .build()
            .map_err(|error| DtlsError::Setup(error.to_string()))?;
        Ok(Self { config: Arc::new(config), shown: RwLock::new(Arc::new(shown)) })
    }

    /// Replaces the certificates, or keeps the old ones if none supports DTLS.
    pub fn replace(&self, identities: &[Identity]) -> Result<(), DtlsError> {
        let new = Arc::new(directory(identities).ok_or(DtlsError::NoCertificate)?);
        *self.shown.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// Returns an instance that has replied to the first ClientHello with this cookie; the reply is written
    /// to `answer`.
    pub(super) fn begin(
        &self,
        now: Instant,
        hello: &Hello<'_>,
        first: &[u8],
        cookie: Cookie,
        answer: &mut Vec<u8>,
    ) -> Result<Dtls, Error> {
        self.lend(hello, cookie, |certificate| self.answer(now, hello.version, certificate, first, answer))
    }

    /// Like `begin`, and also feeds the second ClientHello, whose reply is pending. Returns `None` if dimpl
    /// cannot parse the first one.
    pub(super) fn accept(
        &self,
        now: Instant,
        hello: &Hello<'_>,
        [first, second]: [&[u8]; 2],
        cookie: Cookie,
        scratch: &mut Vec<u8>,
    ) -> Result<Option<Dtls>, Error> {
        self.lend(hello, cookie, |certificate| {
            let mut dtls = self.answer(now, hello.version, certificate, first, scratch)?;
            if scratch.is_empty() {
                return Ok(None);
            }
            dtls.handle_packet(second)?;
            Ok(Some(dtls))
        })
    }

    fn lend<T>(
        &self,
        hello: &Hello<'_>,
        cookie: Cookie,
        work: impl FnOnce(DtlsCertificate) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let chosen = self.choose(hello).ok_or(Error::CryptoError(CryptoError::InvalidPrivateKey))?;
        let leaf = chosen.cert.first().map_or_else(Vec::new, |leaf| leaf.to_vec());
        let certificate = DtlsCertificate { certificate: leaf, private_key: Vec::new() };
        provider::lend(Lent { cookie, key: Arc::clone(&chosen.key) }, || work(certificate))
    }

    fn answer(
        &self,
        now: Instant,
        version: Version,
        certificate: DtlsCertificate,
        first: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<Dtls, Error> {
        let config = Arc::clone(&self.config);
        let mut dtls = match version {
            Version::V12 => Dtls::new_12(config, certificate, now),
            Version::V13 => Dtls::new_13(config, certificate, now),
        };
        dtls.handle_timeout(now)?;
        dtls.handle_packet(first)?;
        answer.resize(2 * MTU, 0);
        let mut len = 0;
        loop {
            match dtls.poll_output(&mut answer[len..]) {
                Output::Packet(packet) => len += packet.len(),
                Output::Timeout(_) | Output::BufferTooSmall { .. } => break,
                _ => {}
            }
        }
        answer.truncate(len);
        Ok(dtls)
    }

    /// Returns false if the client cannot verify any of our signatures. A DTLS 1.2 client that does not list
    /// signature schemes is assumed to accept any certificate.
    pub(super) fn has_certificate_for(&self, hello: &Hello<'_>) -> bool {
        let (schemes, chosen) = (schemes(hello), self.choose(hello));
        chosen.is_some_and(|chosen| schemes.is_empty() || chosen.key.choose_scheme(&schemes).is_some())
    }

    fn choose(&self, hello: &Hello<'_>) -> Option<Arc<CertifiedKey>> {
        let directory = Arc::clone(&self.shown.read().unwrap_or_else(PoisonError::into_inner));
        directory.choose(hello.server_name, &schemes(hello))
    }
}

impl fmt::Debug for DtlsContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DtlsContext").finish_non_exhaustive()
    }
}

impl Identity {
    pub fn can_dtls(&self) -> bool {
        provider::scheme(&*self.certified().key).is_some()
    }
}

fn schemes(hello: &Hello<'_>) -> Vec<SignatureScheme> {
    hello.signature_algorithms().map(SignatureScheme::from).collect()
}

fn directory(identities: &[Identity]) -> Option<CertificateDirectory> {
    let usable: Vec<Identity> = identities.iter().filter(|identity| identity.can_dtls()).cloned().collect();
    (!usable.is_empty()).then(|| CertificateDirectory::new(&usable))
}
