//! Test certificates, and a client that fetches a server's certificate.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use rustls::{
    ClientConnection,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use sha2::{Digest, Sha256};
use turnpike_testkit::certificates;

use super::{Dir, SOON};

/// A certificate and key in files; self-signed unless created by [`Certificate::of_authority`].
pub struct Certificate {
    dir: Dir,
}

impl Certificate {
    pub fn new(names: &[&str]) -> Self {
        let certificate = Self { dir: Dir::new() };
        certificate.renew(names);
        certificate
    }

    pub fn renew(&self, names: &[&str]) {
        self.write(&certificates::Certificate::new(names));
    }

    pub fn expired(names: &[&str]) -> Self {
        let day = |year| rcgen::date_time_ymd(year, 1, 1);
        Self::with(names, |params| (params.not_before, params.not_after) = (day(2020), day(2021)))
    }

    pub fn early(names: &[&str]) -> Self {
        let day = |year| rcgen::date_time_ymd(year, 1, 1);
        Self::with(names, |params| (params.not_before, params.not_after) = (day(2090), day(2091)))
    }

    pub fn expiring(names: &[&str], days: u64) -> Self {
        const DAY: u64 = 86_400;
        // Adds one hour, so that a slow test still sees the full number of days.
        Self::ending_in(names, Duration::from_secs(days * DAY + 3600))
    }

    pub fn ending_in(names: &[&str], left: Duration) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is after 1970");
        Self::with(names, |params| params.not_after = rcgen::date_time_ymd(1970, 1, 1) + now + left)
    }

    /// A certificate signed by a test CA, for clients that reject self-signed certificates.
    pub fn of_authority(names: &[&str]) -> Self {
        let certificate = Self { dir: Dir::new() };
        let (made, authority) = certificates::Certificate::of_authority(names);
        fs::write(certificate.authority(), authority).expect("the test's own directory is writable");
        certificate.write(&made);
        certificate
    }

    fn with(names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Self {
        let certificate = Self { dir: Dir::new() };
        certificate.write(&certificates::Certificate::with(names, change));
        certificate
    }

    fn write(&self, made: &certificates::Certificate) {
        fs::write(self.cert(), &made.pem).expect("the test's own directory is writable");
        fs::write(self.key(), &made.key).expect("the test's own directory is writable");
    }

    pub fn cert(&self) -> PathBuf {
        self.dir.path().join("cert.pem")
    }

    pub fn key(&self) -> PathBuf {
        self.dir.path().join("key.pem")
    }

    pub fn authority(&self) -> PathBuf {
        self.dir.path().join("authority.pem")
    }

    /// Base64 of the public key's SHA-256 (SPKI), the form that Chromium and HPKP (RFC 7469) use.
    pub fn spki_hash(&self) -> String {
        spki_hash(&fs::read_to_string(self.key()).expect("the file belongs to the test"))
    }

    pub fn flags(&self) -> [&str; 4] {
        let leak = |path: PathBuf| &*path.into_os_string().into_string().expect("UTF-8").leak();
        ["--tls-cert", leak(self.cert()), "--tls-key", leak(self.key())]
    }

    pub fn der(&self) -> CertificateDer<'static> {
        read(&self.cert())
    }
}

fn read(path: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(path).expect("a certificate")
}

/// SHA-256 of the public key of a private key in PEM, as browsers take it for exceptions.
pub fn spki_hash(pem: &str) -> String {
    let key = KeyPair::from_pem(pem).expect("a private key");
    STANDARD.encode(Sha256::digest(key.subject_public_key_info()))
}

pub fn shown_by(server: SocketAddr, name: &'static str) -> CertificateDer<'static> {
    let config = certificates::believing_client(rustls::ALL_VERSIONS);
    let name = ServerName::try_from(name).expect("the test's name is valid");
    let mut connection = ClientConnection::new(Arc::new(config), name).expect("the configuration is valid");
    let mut socket = TcpStream::connect_timeout(&server, SOON).expect("the listener accepts connections");
    socket.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
    while connection.is_handshaking() {
        connection.complete_io(&mut socket).expect("the handshake succeeds");
    }
    connection.peer_certificates().expect("a server presents a certificate")[0].clone().into_owned()
}
