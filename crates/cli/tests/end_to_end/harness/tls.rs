//! Certificates made for a test, and a client that asks a server for its own.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData,
};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::ring,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};
use sha2::{Digest, Sha256};

use super::{Dir, SOON};

/// A certificate and its key, in files of their own. Self-signed, but for [`Certificate::of_authority`].
pub(crate) struct Certificate {
    dir: Dir,
}

impl Certificate {
    pub(crate) fn new(names: &[&str]) -> Self {
        let certificate = Self { dir: Dir::new() };
        certificate.renew(names);
        certificate
    }

    /// Another certificate and key in the same files.
    pub(crate) fn renew(&self, names: &[&str]) {
        self.write(CertificateParams::new(owned(names)).expect("names of tests are names"));
    }

    /// One whose time is over.
    pub(crate) fn expired(names: &[&str]) -> Self {
        let day = |year| rcgen::date_time_ymd(year, 1, 1);
        let certificate = Self { dir: Dir::new() };
        let mut params = CertificateParams::new(owned(names)).expect("names of tests are names");
        (params.not_before, params.not_after) = (day(2020), day(2021));
        certificate.write(params);
        certificate
    }

    /// One whose time is over after so many whole days.
    pub(crate) fn expiring(names: &[&str], days: u64) -> Self {
        const DAY: u64 = 86_400;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        let certificate = Self { dir: Dir::new() };
        let mut params = CertificateParams::new(owned(names)).expect("names of tests are names");
        // An hour more, so that no slow test sees a day less.
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + now + Duration::from_secs(days * DAY + 3600);
        certificate.write(params);
        certificate
    }

    /// One that an authority of this test alone has signed: what trusts no self-signed server is made to trust that.
    pub(crate) fn of_authority(names: &[&str]) -> Self {
        let certificate = Self { dir: Dir::new() };
        let authority_key = KeyPair::generate().expect("ring makes keys");
        let mut authority = CertificateParams::default();
        authority.distinguished_name.push(DnType::CommonName, "authority of a test");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let signed = authority.self_signed(&authority_key).expect("ring signs");
        fs::write(certificate.authority(), signed.pem()).expect("our own directory");

        let key = KeyPair::generate().expect("ring makes keys");
        let mut params = CertificateParams::new(owned(names)).expect("names of tests are names");
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let issuer = Issuer::new(authority, authority_key);
        let signed = params.signed_by(&key, &issuer).expect("ring signs");
        certificate.write_files(&signed.pem(), &key);
        certificate
    }

    fn write(&self, params: CertificateParams) {
        let key = KeyPair::generate().expect("ring makes keys");
        let certificate = params.self_signed(&key).expect("ring signs");
        self.write_files(&certificate.pem(), &key);
    }

    fn write_files(&self, pem: &str, key: &KeyPair) {
        fs::write(self.cert(), pem).expect("our own directory");
        fs::write(self.key(), key.serialize_pem()).expect("our own directory");
    }

    pub(crate) fn cert(&self) -> PathBuf {
        self.dir.path().join("cert.pem")
    }

    pub(crate) fn key(&self) -> PathBuf {
        self.dir.path().join("key.pem")
    }

    /// The certificate of the authority, where there is one.
    pub(crate) fn authority(&self) -> PathBuf {
        self.dir.path().join("authority.pem")
    }

    /// SHA-256 of the public key with its kind (SPKI), in Base64: how Chromium and HPKP (RFC 7469) name a key.
    pub(crate) fn spki_hash(&self) -> String {
        let pem = fs::read_to_string(self.key()).expect("our own file");
        let key = KeyPair::from_pem(&pem).expect("our own key");
        STANDARD.encode(Sha256::digest(key.subject_public_key_info()))
    }

    /// What `serve` is given.
    pub(crate) fn flags(&self) -> [&str; 4] {
        // Leaked: a few dozen bytes for the life of a test program.
        let leak = |path: PathBuf| &*path.into_os_string().into_string().expect("UTF-8").leak();
        ["--tls-cert", leak(self.cert()), "--tls-key", leak(self.key())]
    }

    /// The certificate as a client sees it.
    pub(crate) fn der(&self) -> CertificateDer<'static> {
        read(&self.cert())
    }
}

fn read(path: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(path).expect("a certificate")
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// The certificate that a server shows to a client that names this one.
pub(crate) fn shown_by(server: SocketAddr, name: &'static str) -> CertificateDer<'static> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring has them")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Believer))
        .with_no_client_auth();
    let name = ServerName::try_from(name).expect("names of tests are names");
    let mut connection = ClientConnection::new(Arc::new(config), name).expect("a valid configuration");
    let mut socket = TcpStream::connect_timeout(&server, SOON).expect("it listens");
    socket.set_read_timeout(Some(SOON)).expect("not zero");
    while connection.is_handshaking() {
        connection.complete_io(&mut socket).expect("the handshake succeeds");
    }
    connection.peer_certificates().expect("a server shows one")[0].clone().into_owned()
}

/// Believes whatever it is shown: what is asked is which certificate that is.
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
