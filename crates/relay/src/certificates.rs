//! Certificates and private keys in PEM files.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use turnpike_wire::pem::with_markers_on_lines;

use crate::{CertificateError, ChainFault, Identity};

#[derive(Clone, Debug)]
pub struct Certificate {
    pub file: PathBuf,
    pub identity: Identity,
}

pub fn identities(certificates: &[Certificate]) -> Vec<Identity> {
    certificates.iter().map(|certificate| certificate.identity.clone()).collect()
}

pub fn now_unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Reads a certificate and its key without checking the validity period. Errors contain the unusable
/// file's path and the reason.
pub fn read(cert_file: &Path, key_file: &Path) -> Result<Identity, (PathBuf, String)> {
    read_encrypted(cert_file, key_file, None)
}

/// Like [`read`]; the password is for a key that is encrypted.
pub fn read_encrypted(
    cert_file: &Path,
    key_file: &Path,
    password: Option<&str>,
) -> Result<Identity, (PathBuf, String)> {
    let (cert, key) = (content(cert_file)?, content(key_file)?);
    Identity::from_encrypted_pem(&cert, &key, password).map_err(|error| match error {
        CertificateError::Mismatch => (key_file.to_owned(), format!("{error} in {}", cert_file.display())),
        error if error.is_about_key() => (key_file.to_owned(), error.to_string()),
        error => (cert_file.to_owned(), error.to_string()),
    })
}

/// Reads CA certificates. Errors contain the file's path and the reason.
pub fn authorities(file: &Path) -> Result<RootCertStore, (PathBuf, String)> {
    let refuse = |problem: String| (file.to_owned(), problem);
    let mut store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&with_markers_on_lines(&content(file)?)) {
        let certificate = certificate.map_err(|error| refuse(format!("not valid PEM: {error}")))?;
        store.add(certificate).map_err(|error| refuse(format!("not a CA certificate: {error}")))?;
    }
    if store.is_empty() {
        let problem = "no certificate found: expected PEM with BEGIN CERTIFICATE";
        return Err(refuse(problem.to_owned()));
    }
    Ok(store)
}

fn content(path: &Path) -> Result<Vec<u8>, (PathBuf, String)> {
    match fs::read(path) {
        Ok(bytes) if bytes.is_empty() => Err((path.to_owned(), "the file is empty".to_owned())),
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            Err((path.to_owned(), format!("is not readable for user {}", own_name())))
        }
        Err(error) => Err((path.to_owned(), format!("cannot be read: {error}"))),
    }
}

/// Seconds before expiry from which a renewal counts as overdue: 14 days or a sixth of the validity period,
/// whichever is shorter, because six-day certificates are renewed two days before expiry.
#[must_use]
pub fn overdue(validity: u64) -> u64 {
    const USUAL: u64 = 14 * 86_400;
    USUAL.min(validity / 6)
}

pub fn can_dtls(cert: &Path, key: &Path) -> Option<bool> {
    read(cert, key).ok().map(|identity| identity.can_dtls())
}

pub fn time_faults(certificates: &[Certificate]) -> impl Iterator<Item = String> {
    certificates.iter().filter_map(|Certificate { file, identity }| {
        let fault = identity.check_time(now_unix()).err()?;
        Some(format!(
            "{}: {fault} according to this machine's clock; TLS and DTLS clients reject it",
            file.display()
        ))
    })
}

pub fn own_name() -> String {
    let number = rustix::process::geteuid().as_raw().to_string();
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let mut rows = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
    rows.find(|row| row.get(2) == Some(&&*number)).map_or(number.clone(), |row| row[0].to_owned())
}

/// Log message for a file that lacks an issuer's certificate; most clients reject such a chain.
pub fn chain_warning(file: &Path, identity: &Identity) -> Option<String> {
    let file = file.display();
    Some(match identity.chain_fault()? {
        ChainFault::LeafOnly => format!(
            "certificate {file} contains the server's certificate without its issuer's: clients that do not know the issuer reject it; use \
             the full chain (certbot: fullchain.pem)"
        ),
        ChainFault::NotIssuer(number) => format!(
            "certificate {file}: certificate {number} in it did not issue certificate {} before it: clients may reject the chain; \
             start with the server's certificate and follow each with its issuer's",
            number - 1
        ),
        ChainFault::Unreadable(number) => {
            format!(
                "certificate {file}: certificate {number} in it cannot be read: clients may reject the chain"
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_name_is_the_user_name_or_number() {
        let name = own_name();
        assert!(!name.is_empty() && !name.contains(':'), "{name}");
    }
}
