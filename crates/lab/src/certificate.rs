//! TLS certificate of the subjects: self-signed, generated per experiment and shared by all subjects.

use std::{fs::OpenOptions, io::Write as _, os::unix::fs::OpenOptionsExt as _, path::Path};

use crate::error::LabError;

pub(crate) const CERT: &str = "cert.pem";
pub(crate) const KEY: &str = "key.pem";

/// Creates key and certificate with ECDSA on P-256, for which rustls and OpenSSL need about the same time.
pub(crate) fn make(directory: &Path, addresses: impl IntoIterator<Item = String>) -> Result<(), LabError> {
    let mut names: Vec<String> =
        addresses.into_iter().chain(["localhost".to_owned(), "127.0.0.1".to_owned()]).collect();
    names.sort();
    names.dedup();
    let made = rcgen::generate_simple_self_signed(names)
        .map_err(|error| LabError::failed(format!("cannot create a certificate: {error}")))?;
    for (name, pem, mode) in [(CERT, made.cert.pem(), 0o644), (KEY, made.signing_key.serialize_pem(), 0o600)]
    {
        let path = directory.join(name);
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(mode)
            .open(&path)
            .and_then(|mut file| file.write_all(pem.as_bytes()))
            .map_err(LabError::io(format!("cannot write {}", path.display())))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use turnpike_testkit::Dir;

    use super::*;

    #[test]
    fn only_the_owner_can_read_the_key() {
        let directory = Dir::new();
        make(directory.path(), ["10.77.1.1".to_owned(), "10.77.1.1".to_owned(), "fd77:1::1".to_owned()])
            .unwrap();
        let read = |name| fs::read_to_string(directory.at(name)).unwrap();
        assert!(read(CERT).starts_with("-----BEGIN CERTIFICATE-----") && read(KEY).contains("PRIVATE KEY"));
        let mode = fs::metadata(directory.at(KEY)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
