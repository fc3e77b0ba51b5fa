//! The files that `tls.cert`, `tls.key` and `tls.certificates` name: read and checked with the rest of the configuration, so that a
//! mistake is told before any socket opens; and looked after while the server runs.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use turnpike_relay::{CertificateError, Identity};

use super::{CertificateFiles, ConfigError, Settings, exposed};

/// A certificate and its key, and the file that it is from.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// As the configuration names it.
    pub file: PathBuf,
    /// What is in it, and in the file of the key.
    pub identity: Identity,
}

/// What the files came to.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The default one first.
    pub(crate) certificates: Vec<Certificate>,
    /// What cannot be used, with its file's name.
    pub(crate) problems: Vec<ConfigError>,
    /// Sentences for the log.
    pub(crate) warnings: Vec<String>,
}

/// For the TLS of [`turnpike_relay`].
pub(crate) fn identities(certificates: &[Certificate]) -> Vec<Identity> {
    certificates.iter().map(|certificate| certificate.identity.clone()).collect()
}

/// Reads all certificates.
pub(crate) fn load(settings: &Settings) -> Found {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let Found { mut certificates, mut problems, mut warnings } = Found::default();
    for (key, files) in named(settings) {
        match read(&files, unix) {
            Ok(identity) => {
                certificates.push(Certificate { file: files.cert, identity });
                warnings.extend(exposed::warning(&files.key, "this private key"));
            }
            Err((path, problem)) => problems.push(ConfigError {
                // The file is at fault, and not the line that names it; but that line is what can be found.
                origin: settings.origin(key).clone(),
                key: key.to_owned(),
                problem: format!("{}: {problem}", path.display()),
                expected: "a certificate that is valid now and its private key, PEM both".to_owned(),
                suggestion: None,
            }),
        }
    }
    // dimpl has no RSA. Said before anything starts, or DTLS clients would be left without an answer.
    let dtls = settings.dtls_listen.is_empty() || certificates.iter().any(|one| one.identity.can_dtls());
    if let Some((key, files)) = named(settings).into_iter().next()
        && !dtls
        && problems.is_empty()
    {
        problems.push(ConfigError {
            origin: settings.origin(key).clone(),
            key: key.to_owned(),
            problem: format!("{}: DTLS (dtls.listen) cannot use this certificate's key", files.cert.display()),
            expected: "for DTLS an ECDSA certificate with P-256 or P-384, here or in tls.certificates (beside an RSA one, \
                       which TLS goes on using); openssl ecparam -name prime256v1 -genkey makes such a key"
                .to_owned(),
            suggestion: None,
        });
    }
    Found { certificates, problems, warnings }
}

/// The pairs of files, with the key that names them.
fn named(settings: &Settings) -> Vec<(&'static str, CertificateFiles)> {
    let default = settings.tls_cert.clone().zip(settings.tls_key.clone());
    let default = default.map(|(cert, key)| ("tls.cert", CertificateFiles { cert, key }));
    let more = settings.tls_certificates.iter().map(|files| ("tls.certificates", files.clone()));
    default.into_iter().chain(more).collect()
}

fn read(files: &CertificateFiles, unix: u64) -> Result<Identity, (PathBuf, String)> {
    let content = |path: &Path| match fs::read(path) {
        Ok(bytes) if bytes.is_empty() => Err((path.to_owned(), "the file is empty".to_owned())),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err((path.to_owned(), format!("cannot be read: {error}"))),
    };
    let (cert, key) = (content(&files.cert)?, content(&files.key)?);
    Identity::from_pem(&cert, &key, unix).map_err(|error| match error {
        CertificateError::Mismatch => (files.key.clone(), format!("{error} in {}", files.cert.display())),
        error if error.is_about_key() => (files.key.clone(), error.to_string()),
        error => (files.cert.clone(), error.to_string()),
    })
}

/// Notices when one of the files changes: by looking at them now and then, which works for files that are replaced, for the symbolic
/// links that Kubernetes swaps, and over network file systems, where inotify is blind or watches the wrong thing.
#[derive(Debug, Default)]
pub(crate) struct CertificateWatch {
    seen: Vec<(PathBuf, Option<Stamp>)>,
    /// Changed, and not yet as it was at the last look: somebody is still writing.
    unsettled: bool,
}

/// Device, inode, length, and time of the last change in seconds and nanoseconds.
type Stamp = (u64, u64, u64, i64, i64);

impl CertificateWatch {
    /// As the files are now.
    pub(crate) fn new(settings: &Settings) -> Self {
        let files = named(settings).into_iter().flat_map(|(_, files)| [files.cert, files.key]);
        let seen = files.map(|path| (path.clone(), stamp(&path).ok())).collect();
        Self { seen, unsettled: false }
    }

    /// Whether they have changed since the last time that this said so, and have come to rest since the last look.
    pub(crate) fn has_changed(&mut self) -> bool {
        let mut changed = false;
        for (path, seen) in &mut self.seen {
            let now = stamp(path).ok();
            changed |= *seen != now;
            *seen = now;
        }
        let settled = !changed && self.unsettled;
        self.unsettled = changed;
        settled
    }
}

fn stamp(path: &Path) -> io::Result<Stamp> {
    let found = fs::metadata(path)?;
    Ok((found.dev(), found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_told_once_and_only_when_it_has_come_to_rest() {
        let dir = std::env::temp_dir().join(format!("turnpike-watch-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (cert, key) = (dir.join("cert.pem"), dir.join("key.pem"));
        fs::write(&cert, "one").unwrap();
        let settings =
            Settings { tls_cert: Some(cert.clone()), tls_key: Some(key.clone()), ..Settings::default() };
        let mut watch = CertificateWatch::new(&settings);
        assert!(!watch.has_changed());
        fs::write(&cert, "longer than one").unwrap();
        assert!(!watch.has_changed(), "the key may follow");
        fs::write(&key, "it does").unwrap();
        assert!(!watch.has_changed());
        assert!(watch.has_changed());
        assert!(!watch.has_changed(), "told once");
        fs::remove_file(&cert).unwrap();
        assert!(!watch.has_changed());
        assert!(watch.has_changed(), "gone is a change too");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let dir = std::env::temp_dir().join(format!("turnpike-files-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (cert, key) = (dir.join("cert.pem"), dir.join("key.pem"));
        let problem = |settings: &Settings| {
            let Found { certificates, mut problems, .. } = load(settings);
            assert!(certificates.is_empty());
            problems.remove(0).to_string()
        };
        let settings = Settings {
            tls_certificates: vec![CertificateFiles { cert: cert.clone(), key: key.clone() }],
            ..Settings::default()
        };
        assert!(problem(&settings).contains("cert.pem: cannot be read"));
        fs::write(&cert, "").unwrap();
        assert!(problem(&settings).contains("cert.pem: the file is empty"));
        fs::write(&cert, "no PEM").unwrap();
        assert!(problem(&settings).contains("key.pem: cannot be read"));
        fs::write(&key, "no PEM").unwrap();
        assert!(problem(&settings).contains("key.pem: no private key in it"));
        fs::remove_dir_all(&dir).unwrap();
    }
}
