//! Test certificates, and a TLS client that accepts any certificate.

use std::sync::Arc;

use rcgen::{BasicConstraints, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyUsagePurpose};
pub use rcgen::{CertificateParams, KeyPair};
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, SignatureScheme, SupportedProtocolVersion,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, ServerName, UnixTime},
};

pub const PLAIN_KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgRvsujcukgfaa+QEK
zm7eOyWW5A4JVcuWqu1dEJwOcVehRANCAARWGOb9YaezZNEXoeo46gwu8YODK4hH
xcLr1DkxF0SqUgRouuv8si2XxsudozyE7kOYbVOmkje0WLY2mZlP/BrD
-----END PRIVATE KEY-----
";

/// [`PLAIN_KEY`], encrypted by OpenSSL 3 with AES-256 and PBKDF2 or scrypt; the password is "horse".
pub const ENCRYPTED_KEYS: [&str; 2] = [
    "\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAg4qEvicz4DhwICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEOo3H3/oyt0WSHEop459ET8EgZC0
KZVGErwnZAKUo6zrHKA2Alo9tnXsJhFUYeLPGc5l+WO+Bzn7T6afMtVQ7ZJH/t0A
cKq7mXFH29YIbuRtqclY54BS++dZ5W3yGzwu154JE6QyKukrEApOZg1iPDo7bG1l
bbmXzUV+Hme13FOORSSzpwHVIgp3d7tXpj7hbx0taEA83cppJspkD1Tvg5PIZfo=
-----END ENCRYPTED PRIVATE KEY-----
",
    "\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHkME8GCSqGSIb3DQEFDTBCMCEGCSsGAQQB2kcECzAUBAhCcHITNMG3QgICQAAC
AQgCAQEwHQYJYIZIAWUDBAEqBBDGa3UUYMWgTF2TPCQ0oqOzBIGQoWOyoi+bI4hw
gfNTnaCwHxOLMV6nd3PI5map3XIkIsaXZ4F+JhhKMXJ66dOnGaGALl7vt0biDWdN
kZXX1Eqg+8vKU0mFVm0w+a8ggg/5Ms5KcE5SIMRZ/M8+YXuCJZihafHgf0IvfPog
Usj9b0EaMpL59bL8hsMXxALXl3E4r1KINu5mR7JnZ1hcaa5mmVB5
-----END ENCRYPTED PRIVATE KEY-----
",
];

#[derive(Clone, Debug)]
pub struct Certificate {
    pub pem: String,
    pub key: String,
}

impl Certificate {
    pub fn new(names: &[&str]) -> Self {
        Self::with(names, |_| ())
    }

    pub fn with(names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Self {
        Self::of_key(&key(), names, change)
    }

    pub fn of_key(key: &KeyPair, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Self {
        let mut params = params(names);
        change(&mut params);
        let certificate = params.self_signed(key).unwrap_or_else(|error| panic!("{names:?}: {error}"));
        Self { pem: certificate.pem(), key: key.serialize_pem() }
    }

    /// Creates a certificate signed by a new CA; also returns the CA's certificate.
    pub fn of_authority(names: &[&str]) -> (Self, String) {
        Self::signed(names, ExtendedKeyUsagePurpose::ServerAuth)
    }

    pub fn of_client(name: &str) -> (Self, String) {
        Self::signed(&[name], ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn signed(names: &[&str], purpose: ExtendedKeyUsagePurpose) -> (Self, String) {
        let authority_key = key();
        let mut authority = CertificateParams::default();
        authority.distinguished_name.push(DnType::CommonName, "test CA");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let trusted = authority.self_signed(&authority_key).unwrap_or_else(|error| panic!("{error}")).pem();

        let key = key();
        let mut params = params(names);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![purpose];
        let issuer = Issuer::new(authority, authority_key);
        let signed = params.signed_by(&key, &issuer).unwrap_or_else(|error| panic!("{names:?}: {error}"));
        (Self { pem: signed.pem(), key: key.serialize_pem() }, trusted)
    }
}

/// Configuration of a client for these TLS versions that accepts any certificate, to see which one a server presents.
pub fn believing_client(versions: &[&'static SupportedProtocolVersion]) -> ClientConfig {
    believing_client_of(ring::default_provider(), versions)
}

pub fn believing_client_of(
    provider: CryptoProvider,
    versions: &[&'static SupportedProtocolVersion],
) -> ClientConfig {
    ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(versions)
        .unwrap_or_else(|error| panic!("{versions:?}: {error}"))
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Believer))
        .with_no_client_auth()
}

#[derive(Debug)]
struct Believer;

impl ServerCertVerifier for Believer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

fn params(names: &[&str]) -> CertificateParams {
    let owned: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    CertificateParams::new(owned).unwrap_or_else(|error| panic!("{names:?}: {error}"))
}

fn key() -> KeyPair {
    KeyPair::generate().unwrap_or_else(|error| panic!("{error}"))
}
