//! DTLS as the server speaks it: certificates by server name, and dimpl's settings. One context for all workers; a reload swaps the
//! certificates in it, and whoever has an association keeps it.

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
use crate::{Identity, stream::tls::Directory};

/// Handshake datagrams of this size pass on any path of today. Application data is sent as it is.
const MTU: usize = 1200;
/// Until a flight is repeated for the first time (RFC 9147 section 5.8.2 says 1 s; clients of real-time media wait less long).
const RETRANSMIT: Duration = Duration::from_millis(500);
/// Records that wait for others before them. A handshake has fewer, and afterwards nothing waits.
const QUEUE: usize = 16;

/// Why DTLS cannot be set up; the message says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DtlsError {
    /// RSA or Ed25519 only.
    #[error("DTLS needs an ECDSA certificate with P-256 or P-384, and there is none")]
    NoCertificate,
    /// dimpl refused its settings.
    #[error("DTLS cannot be set up: {0}")]
    Setup(String),
}

/// What the workers make DTLS associations with.
pub struct DtlsContext {
    config: Arc<Config>,
    shown: RwLock<Arc<Directory>>,
}

impl DtlsContext {
    /// With those of these certificates that DTLS can use ([`Identity::can_dtls`]), at least one; the first is shown to clients
    /// that name no server, or one that none is good for. Handshakes may take so long.
    ///
    /// # Errors
    /// [`DtlsError`].
    pub fn new(identities: &[Identity], handshake: Duration) -> Result<Self, DtlsError> {
        let shown = directory(identities).ok_or(DtlsError::NoCertificate)?;
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

    /// Shows these from now on. Without any that DTLS can use the old ones stay.
    ///
    /// # Errors
    /// [`DtlsError::NoCertificate`].
    pub fn replace(&self, identities: &[Identity]) -> Result<(), DtlsError> {
        let new = Arc::new(directory(identities).ok_or(DtlsError::NoCertificate)?);
        *self.shown.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// An instance that has answered the first ClientHello with this cookie; the answer lies in `answer`.
    pub(super) fn begin(
        &self,
        now: Instant,
        hello: &Hello<'_>,
        first: &[u8],
        cookie: Cookie,
        answer: &mut Vec<u8>,
    ) -> Result<Dtls, Error> {
        self.with(hello, cookie, |certificate| self.answer(now, hello.version, certificate, first, answer))
    }

    /// An instance that has also taken the second ClientHello; its answer is still in it. None if dimpl cannot read the first.
    pub(super) fn accept(
        &self,
        now: Instant,
        hello: &Hello<'_>,
        [first, second]: [&[u8]; 2],
        cookie: Cookie,
        scratch: &mut Vec<u8>,
    ) -> Result<Option<Dtls>, Error> {
        self.with(hello, cookie, |certificate| {
            let mut dtls = self.answer(now, hello.version, certificate, first, scratch)?;
            if scratch.is_empty() {
                return Ok(None);
            }
            dtls.handle_packet(second)?;
            Ok(Some(dtls))
        })
    }

    fn with<T>(
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

    /// Returns false if the client can check no signature of ours. A client of DTLS 1.2 that names no schemes is given what there is.
    pub(super) fn has_certificate_for(&self, hello: &Hello<'_>) -> bool {
        let (schemes, chosen) = (schemes(hello), self.choose(hello));
        schemes.is_empty() || chosen.is_some_and(|chosen| chosen.key.choose_scheme(&schemes).is_some())
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
    /// Whether DTLS can use this certificate: dimpl knows ECDSA with P-256 and P-384 only.
    pub fn can_dtls(&self) -> bool {
        provider::scheme(&*self.certified().key).is_some()
    }
}

fn schemes(hello: &Hello<'_>) -> Vec<SignatureScheme> {
    hello.signature_algorithms().map(SignatureScheme::from).collect()
}

fn directory(identities: &[Identity]) -> Option<Directory> {
    let usable: Vec<Identity> = identities.iter().filter(|identity| identity.can_dtls()).cloned().collect();
    (!usable.is_empty()).then(|| Directory::new(&usable))
}
