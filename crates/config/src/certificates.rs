//! The files that `tls.cert`, `tls.key` and `tls.certificates` name: read and checked with the rest of the configuration, so that a
//! mistake is told before any socket opens.

use std::{
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use turnpike_relay::{CertificateError, ChainFault, Identity};

use super::{CertificateFiles, Mistake, Settings, world_readable};

/// A certificate and its key, and the file that it is from.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// As the configuration names it.
    pub file: PathBuf,
    /// What is in it, and in the file of the key.
    pub identity: Identity,
}

/// The result of reading the files.
#[derive(Debug, Default)]
pub struct Found {
    /// The default one first.
    pub certificates: Vec<Certificate>,
    /// What cannot be used, with its file's name.
    pub problems: Vec<Mistake>,
    /// Sentences for the log.
    pub warnings: Vec<String>,
}

/// For the TLS of [`turnpike_relay`].
pub fn identities(certificates: &[Certificate]) -> Vec<Identity> {
    certificates.iter().map(|certificate| certificate.identity.clone()).collect()
}

/// The time of this machine's clock, in Unix seconds.
pub fn now_unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Reads all certificates. One whose time is over or has not come is a problem.
pub fn load(settings: &Settings) -> Found {
    load_by(settings, |files| {
        let identity = read(files)?;
        let timely = identity.check_time(now_unix());
        timely.map(|()| identity).map_err(|fault| (files.cert.clone(), fault.to_string()))
    })
}

/// Reads all certificates, whatever their time. The clock of a machine without a battery is wrong until the network has told the time, and
/// clients by UDP need no certificate.
pub fn load_untimely(settings: &Settings) -> Found {
    load_by(settings, read)
}

fn load_by(settings: &Settings, read: fn(&CertificateFiles) -> Result<Identity, (PathBuf, String)>) -> Found {
    let Found { mut certificates, mut problems, mut warnings } = Found::default();
    for (key, files) in named(settings) {
        match read(&files) {
            Ok(identity) => {
                warnings.extend(chain_warning(&files.cert, &identity));
                certificates.push(Certificate { file: files.cert, identity });
                warnings.extend(world_readable::readable_by_all(&files.key, "this private key"));
            }
            // The mistake is in the file, but the line that names it is where a reader starts.
            Err((path, problem)) => {
                let expected = match File::open(&path) {
                    Err(error) if error.kind() == ErrorKind::PermissionDenied => readable_by(&path),
                    _ => "a certificate that is valid now and its private key, PEM both".to_owned(),
                };
                let problem = format!("{}: {problem}", path.display());
                problems.push(Mistake::new(settings.origin(key), key, problem, expected));
            }
        }
    }
    // dimpl has no RSA. Said before anything starts, or DTLS clients would be left without an answer.
    let dtls = settings.dtls_listen.is_empty() || certificates.iter().any(|one| one.identity.can_dtls());
    if let Some((key, files)) = named(settings).into_iter().next()
        && !dtls
        && problems.is_empty()
    {
        problems.push(Mistake::new(
            settings.origin(key),
            key,
            format!("{}: DTLS (dtls.listen) cannot use this certificate's key", files.cert.display()),
            "for DTLS an ECDSA certificate with P-256 or P-384, here or in tls.certificates (beside an RSA one, which TLS goes on \
             using); openssl ecparam -name prime256v1 -genkey makes such a key",
        ));
    }
    Found { certificates, problems, warnings }
}

/// The files of certificates and of their keys.
pub fn files(settings: &Settings) -> impl Iterator<Item = PathBuf> {
    named(settings).into_iter().flat_map(|(_, files)| [files.cert, files.key])
}

/// The pairs of files, with the key that names them.
fn named(settings: &Settings) -> Vec<(&'static str, CertificateFiles)> {
    let default = settings.tls_cert.clone().zip(settings.tls_key.clone());
    let default = default.map(|(cert, key)| ("tls.cert", CertificateFiles { cert, key }));
    let more = settings.tls_certificates.iter().map(|files| ("tls.certificates", files.clone()));
    default.into_iter().chain(more).collect()
}

/// Reads a certificate and its key, whatever its time.
///
/// # Errors
/// The file that cannot be used, and why.
pub fn read(files: &CertificateFiles) -> Result<Identity, (PathBuf, String)> {
    let content = |path: &Path| match fs::read(path) {
        Ok(bytes) if bytes.is_empty() => Err((path.to_owned(), "the file is empty".to_owned())),
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            Err((path.to_owned(), format!("is not readable for user {}", own_name())))
        }
        Err(error) => Err((path.to_owned(), format!("cannot be read: {error}"))),
    };
    let (cert, key) = (content(&files.cert)?, content(&files.key)?);
    Identity::from_pem(&cert, &key).map_err(|error| match error {
        CertificateError::Mismatch => (files.key.clone(), format!("{error} in {}", files.cert.display())),
        error if error.is_about_key() => (files.key.clone(), error.to_string()),
        error => (files.cert.clone(), error.to_string()),
    })
}

/// Whether DTLS can use a certificate and its key; `None` if they cannot be read.
pub fn can_dtls(cert: &Path, key: &Path) -> Option<bool> {
    let files = CertificateFiles { cert: cert.to_owned(), key: key.to_owned() };
    read(&files).ok().map(|identity| identity.can_dtls())
}

/// Sentences about certificates that are not valid now.
pub fn time_faults(certificates: &[Certificate]) -> impl Iterator<Item = String> {
    certificates.iter().filter_map(|Certificate { file, identity }| {
        let fault = identity.check_time(now_unix()).err()?;
        Some(format!(
            "{}: {fault}, by the clock of this machine: TLS and DTLS clients refuse it",
            file.display()
        ))
    })
}

/// The commands that make a file readable for the user of this process.
fn readable_by(path: &Path) -> String {
    let (user, path) = (own_name(), path.display());
    format!(
        "a file that this user can read: chgrp {user} {path} && chmod 640 {path}, and its directories open to {user} (chmod g+x)"
    )
}

/// The name of this process's user, or the number where it has no name.
fn own_name() -> String {
    let number = rustix::process::geteuid().as_raw().to_string();
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let mut rows = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
    rows.find(|row| row.get(2) == Some(&&*number)).map_or(number.clone(), |row| row[0].to_owned())
}

/// A sentence for the log if the file lacks the certificate of an issuer, without which most clients refuse it.
pub fn chain_warning(file: &Path, identity: &Identity) -> Option<String> {
    let file = file.display();
    Some(match identity.chain_fault()? {
        ChainFault::LeafOnly => format!(
            "certificate {file} holds the server's own certificate without its issuer's: clients that do not know the issuer refuse it; name \
             the full chain (fullchain.pem with certbot)"
        ),
        ChainFault::NotIssuer(number) => format!(
            "certificate {file}: certificate {number} in it did not issue certificate {}, which stands before it: clients may refuse the \
             chain; put the server's own first and behind each its issuer's",
            number - 1
        ),
        ChainFault::Unreadable(number) => {
            format!(
                "certificate {file}: certificate {number} in it cannot be read: clients may refuse the chain"
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::certificates::Certificate as Made;

    use super::*;

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let dir = turnpike_testkit::Dir::new();
        let (cert, key) = (dir.at("cert.pem"), dir.at("key.pem"));
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
    }

    #[test]
    fn own_name_is_that_of_the_user_or_a_number() {
        let name = own_name();
        assert!(!name.is_empty() && !name.contains(':'), "{name}");
        let told = readable_by(Path::new("/etc/key.pem"));
        assert!(told.contains(&format!("chgrp {name} /etc/key.pem && chmod 640 /etc/key.pem")), "{told}");
    }

    /// The certificates and warnings of a file with this content.
    fn loaded(pem: &str, key: &str) -> Found {
        let dir = turnpike_testkit::Dir::new();
        let (cert, key) = (dir.file("cert.pem", pem), dir.file("key.pem", key));
        let settings =
            Settings { tls_certificates: vec![CertificateFiles { cert, key }], ..Settings::default() };
        load(&settings)
    }

    fn chain_warnings(found: &Found) -> Vec<&String> {
        found.warnings.iter().filter(|warning| warning.contains("cert.pem")).collect()
    }

    #[test]
    fn chain_survives_markers_that_share_a_line() {
        let (own, authority) = Made::of_authority(&["turn.example"]);
        let joined = format!("{}{authority}", own.pem.trim_end());
        assert!(joined.contains("-----END CERTIFICATE----------BEGIN CERTIFICATE-----"));
        for pem in [joined, format!("{}{authority}", own.pem).replace("-----BEGIN", "    -----BEGIN")] {
            let found = loaded(&pem, &own.key);
            assert_eq!(found.certificates[0].identity.certified_key().cert.len(), 2, "{:?}", found.problems);
            assert!(chain_warnings(&found).is_empty(), "{:?}", found.warnings);
        }
        let with_key = format!("{}{}", own.pem.trim_end(), own.key);
        assert_eq!(loaded(&with_key, &with_key).certificates.len(), 1);
    }

    #[test]
    fn certificate_without_its_issuer_is_warned_about() {
        let (own, authority) = Made::of_authority(&["turn.example"]);
        let self_signed = Made::new(&["turn.example"]);
        for (pem, key, warning) in [
            (own.pem.clone(), &own.key, Some("without its issuer's")),
            (
                format!("{}{}", own.pem, self_signed.pem),
                &own.key,
                Some("certificate 2 in it did not issue certificate 1"),
            ),
            (format!("{}{authority}{}", own.pem, self_signed.pem), &own.key, Some("certificate 3 in it")),
            (format!("{}{authority}", own.pem), &own.key, None),
            (self_signed.pem.clone(), &self_signed.key, None),
        ] {
            let found = loaded(&pem, key);
            assert!(found.problems.is_empty(), "{:?}", found.problems);
            let told = chain_warnings(&found);
            assert_eq!(told.len(), usize::from(warning.is_some()), "{told:?}");
            assert!(warning.is_none_or(|warning| told[0].contains(warning)), "{told:?}");
        }
        let foreign = own.pem.replace("CERTIFICATE", "TRUSTED CERTIFICATE");
        let problems = loaded(&format!("{}{foreign}", own.pem), &own.key).problems;
        assert!(problems[0].to_string().contains("BEGIN TRUSTED CERTIFICATE is not"), "{problems:?}");
    }
}
