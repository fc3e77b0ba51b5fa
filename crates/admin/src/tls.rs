//! TLS for both interfaces: certificates that are reloaded when they change, and rights of client
//! certificates.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use rustls::{
    RootCertStore, ServerConfig,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, UnixTime},
    server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier, danger::ClientCertVerifier},
    sign::CertifiedKey,
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use turnpike_config::{AdminAccess, AdminSettings, CertificateFiles};
use turnpike_relay::{Identity, certificates};
use x509_cert::der::Decode as _;

use crate::via::ClientCertificate;

/// An unusable certificate or CA; the message names the file.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", file.display())]
pub struct TlsError {
    file: PathBuf,
    problem: String,
}

impl TlsError {
    fn new(file: &Path, problem: impl ToString) -> Self {
        Self { file: file.to_owned(), problem: problem.to_string() }
    }
}

/// TLS settings that all listeners of the same kind share.
pub(crate) struct ListenerTls {
    acceptor: TlsAcceptor,
    shown: Arc<ServedCertificate>,
    /// Verifier for full access; other verified clients have read access.
    full: Option<Arc<dyn ClientCertVerifier>>,
}

impl ListenerTls {
    /// TLS for the admin interface; `None` if it has no certificate.
    pub(crate) fn new(settings: &AdminSettings) -> Result<Option<Self>, TlsError> {
        let (Some(cert), Some(key)) = (&settings.tls_cert, &settings.tls_key) else { return Ok(None) };
        let files = CertificateFiles { cert: cert.clone(), key: key.clone() };
        let full = settings.client_ca.as_deref().map(authorities).transpose()?;
        let read = settings.read_client_ca.as_deref().map(authorities).transpose()?;
        Self::with(files, "the admin interface", full, read).map(Some)
    }

    /// TLS for listeners for applications, which use no client certificates.
    pub(crate) fn for_applications(files: CertificateFiles) -> Result<Self, TlsError> {
        Self::with(files, "the API for credentials", None, None)
    }

    /// Clients with certificates from the CAs in `full` have full access; those with certificates from
    /// `read` have read access.
    fn with(
        files: CertificateFiles,
        whose: &'static str,
        full: Option<RootCertStore>,
        read: Option<RootCertStore>,
    ) -> Result<Self, TlsError> {
        let cert = &files.cert.clone();
        let shown = Arc::new(ServedCertificate::new(files, whose)?);
        let provider = Arc::new(turnpike_tls::provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::new(cert, error))?;
        let mut all = RootCertStore::empty();
        all.roots.extend(full.iter().chain(&read).flat_map(|store| store.roots.iter().cloned()));
        let builder = if all.is_empty() {
            builder.with_no_client_auth()
        } else {
            // A client without a certificate may present a token instead.
            builder.with_client_cert_verifier(verifier(all, &provider, cert)?)
        };
        let full = full.map(|roots| verifier(roots, &provider, cert)).transpose()?;
        let mut config = builder.with_cert_resolver(Arc::clone(&shown) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)), shown, full })
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.shown.now.read().unwrap_or_else(PoisonError::into_inner).names.clone()
    }

    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
    ) -> io::Result<(TlsStream<TcpStream>, Option<ClientCertificate>)> {
        self.shown.look();
        let stream = self.acceptor.accept(stream).await?;
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| self.judge(chain));
        Ok((stream, certificate))
    }

    fn judge(&self, chain: &[CertificateDer<'_>]) -> Option<ClientCertificate> {
        let [own, more @ ..] = chain else { return None };
        let is_full =
            |full: &Arc<dyn ClientCertVerifier>| full.verify_client_cert(own, more, UnixTime::now()).is_ok();
        let is_full = self.full.as_ref().is_some_and(is_full);
        let access = if is_full { AdminAccess::Full } else { AdminAccess::Read };
        Some(ClientCertificate { access, name: certificate_name(own).into() })
    }
}

/// Subject, serial number and issuer; the latter two are unique together (RFC 5280 section 4.1.2.2).
fn certificate_name(certificate: &CertificateDer<'_>) -> String {
    let Ok(read) = x509_cert::Certificate::from_der(certificate) else { return "(no name)".to_owned() };
    let content = read.tbs_certificate();
    format!("{} (serial {} of {})", content.subject(), content.serial_number(), content.issuer())
}

fn authorities(file: &Path) -> Result<RootCertStore, TlsError> {
    certificates::authorities(file).map_err(|(file, problem)| TlsError { file, problem })
}

fn verifier(
    roots: RootCertStore,
    provider: &Arc<CryptoProvider>,
    file: &Path,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .allow_unauthenticated()
        .build()
        .map_err(|error| TlsError::new(file, error))
}

#[derive(Debug)]
struct ServedCertificate {
    files: CertificateFiles,
    whose: &'static str,
    now: RwLock<LoadedCertificate>,
}

#[derive(Debug)]
struct LoadedCertificate {
    stamp: PairStamp,
    key: Arc<CertifiedKey>,
    names: Vec<String>,
    /// Time of the last attempt to read an unusable pair. The pair may become valid even if the files do not
    /// change.
    refused: Option<Instant>,
}

/// Interval between attempts to read an unusable pair.
const RETRY: Duration = Duration::from_secs(60);

/// Length, ctime and inode of both files; ctime reflects changes to content, owner and mode.
type PairStamp = [Option<(u64, i64, i64, u64)>; 2];

impl ServedCertificate {
    fn new(files: CertificateFiles, whose: &'static str) -> Result<Self, TlsError> {
        let stamp = stamp(&files);
        let identity = read(&files)?;
        if let Err(fault) = identity.check_time(certificates::now_unix()) {
            tracing::error!(
                "the certificate of {whose}: {fault} according to this machine's clock ({}): clients reject it",
                jiff::Timestamp::now()
            );
        }
        warn_of_chain(&files, &identity);
        let (key, names) = (identity.certified_key(), identity.names().to_vec());
        Ok(Self { files, whose, now: RwLock::new(LoadedCertificate { stamp, key, names, refused: None }) })
    }

    /// Reloads changed files. If the pair is unusable, the old one stays in use, with one log line.
    fn look(&self) {
        let stamp = stamp(&self.files);
        let mut now = self.now.write().unwrap_or_else(PoisonError::into_inner);
        let has_changed = now.stamp != stamp;
        if !has_changed && now.refused.is_none_or(|at| at.elapsed() < RETRY) {
            return;
        }
        (now.stamp, now.refused) = (stamp, None);
        let timely = |identity: Identity| match identity.check_time(certificates::now_unix()) {
            Ok(()) => Ok(identity),
            Err(fault) => Err(TlsError::new(&self.files.cert, fault)),
        };
        match read(&self.files).and_then(timely) {
            Ok(identity) => {
                warn_of_chain(&self.files, &identity);
                (now.key, now.names) = (identity.certified_key(), identity.names().to_vec());
                tracing::info!("the certificate of {} was reloaded", self.whose);
            }
            Err(error) => {
                now.refused = Some(Instant::now());
                if has_changed {
                    tracing::error!("the certificate of {} was not reloaded: {error}", self.whose);
                }
            }
        }
    }
}

impl ResolvesServerCert for ServedCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner).key))
    }
}

fn stamp(files: &CertificateFiles) -> PairStamp {
    [&files.cert, &files.key].map(|file| {
        let file = fs::metadata(file).ok()?;
        Some((file.len(), file.ctime(), file.ctime_nsec(), file.ino()))
    })
}

fn read(files: &CertificateFiles) -> Result<Identity, TlsError> {
    certificates::read(&files.cert, &files.key).map_err(|(file, problem)| TlsError { file, problem })
}

fn warn_of_chain(files: &CertificateFiles, identity: &Identity) {
    if let Some(warning) = certificates::chain_warning(&files.cert, identity) {
        tracing::warn!("{warning}");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use turnpike_testkit::{Dir, certificates::Certificate};

    use super::*;

    #[test]
    fn not_yet_valid_certificate_is_used_once_valid() {
        let dir = Dir::new();
        let own = Certificate::new(&["admin.example.org"]);
        let files =
            CertificateFiles { cert: dir.file("own.pem", &own.pem), key: dir.file("own.key", &own.key) };
        let shown = ServedCertificate::new(files, "a test").unwrap();
        let key = || Arc::clone(&shown.now.read().unwrap().key);
        let before = key();
        let begins = std::time::SystemTime::now() + Duration::from_secs(3);
        let renewed = Certificate::with(&["admin.example.org"], |it| it.not_before = begins.into());
        dir.file("own.key", &renewed.key);
        dir.file("own.pem", &renewed.pem);
        shown.look();
        assert!(Arc::ptr_eq(&key(), &before), "not valid yet");
        let age = |by: Duration| {
            let mut now = shown.now.write().unwrap();
            now.refused = now.refused.and_then(|at| at.checked_sub(by));
            assert!(now.refused.is_some());
        };
        age(RETRY / 2);
        std::thread::sleep(Duration::from_secs(4));
        shown.look();
        assert!(Arc::ptr_eq(&key(), &before), "not read for each connection");
        age(RETRY);
        shown.look();
        assert!(!Arc::ptr_eq(&key(), &before));
    }

    #[test]
    fn changed_file_mode_triggers_a_reload() {
        let dir = Dir::new();
        let files = CertificateFiles { cert: dir.file("own.pem", ""), key: dir.file("own.key", "") };
        let before = stamp(&files);
        assert_eq!(stamp(&files), before);
        std::thread::sleep(Duration::from_millis(20));
        fs::set_permissions(&files.key, fs::Permissions::from_mode(0o640)).unwrap();
        assert_ne!(stamp(&files), before);
    }
}
