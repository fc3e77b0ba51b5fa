//! Client certificates (mutual TLS), required while there are authorities for them. A reload replaces the
//! authorities.

use std::{
    fmt,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::{self, CryptoProvider},
    pki_types::{CertificateDer, UnixTime},
    server::{
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

pub(super) struct ClientCertificates {
    provider: Arc<CryptoProvider>,
    verifier: RwLock<Option<Arc<dyn ClientCertVerifier>>>,
    /// True while a certificate authority, which has no certificate, may connect (RFC 8737). A missing
    /// certificate is then found after the handshake.
    awaits_challenge: AtomicBool,
}

impl ClientCertificates {
    pub(super) fn new(provider: Arc<CryptoProvider>) -> Self {
        Self { provider, verifier: RwLock::default(), awaits_challenge: AtomicBool::new(false) }
    }

    pub(super) fn require(&self, authorities: Option<RootCertStore>) -> Result<(), Error> {
        let verifier = |roots| {
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&self.provider))
                .build()
                .map_err(|error| Error::General(error.to_string()))
        };
        let verifier = authorities.map(verifier).transpose()?;
        *self.verifier.write().unwrap_or_else(PoisonError::into_inner) = verifier;
        Ok(())
    }

    pub(super) fn are_required(&self) -> bool {
        self.verifier.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub(super) fn await_challenge(&self, is_awaited: bool) {
        self.awaits_challenge.store(is_awaited, Ordering::Relaxed);
    }
}

impl ClientCertVerifier for ClientCertificates {
    fn offer_client_auth(&self) -> bool {
        self.are_required()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.are_required() && !self.awaits_challenge.load(Ordering::Relaxed)
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // Hints would have to outlive a reload; clients with one certificate need none.
        &[]
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verifier = self.verifier.read().unwrap_or_else(PoisonError::into_inner).clone();
        // Certificates may have ceased to be required during the handshake.
        verifier.map_or_else(
            || Ok(ClientCertVerified::assertion()),
            |verifier| verifier.verify_client_cert(own, intermediates, now),
        )
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        crypto::verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl fmt::Debug for ClientCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCertificates").field("required", &self.are_required()).finish_non_exhaustive()
    }
}
