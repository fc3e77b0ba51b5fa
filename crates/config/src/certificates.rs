//! The files that `tls.cert`, `tls.key` and `tls.certificates` name. The program reads them with the rest of its configuration, so that
//! mistakes are reported before any socket opens; this crate links no TLS.

use std::path::PathBuf;

use super::{CertificateFiles, Mistake, Settings};

/// Certificates that the program has read, as values of its own.
#[derive(Debug)]
pub struct ReadCertificates<C> {
    /// The default one first.
    pub certificates: Vec<C>,
    /// Unusable files, by name.
    pub problems: Vec<Mistake>,
    /// Sentences for the log.
    pub warnings: Vec<String>,
}

/// None.
impl<C> Default for ReadCertificates<C> {
    fn default() -> Self {
        Self { certificates: Vec::new(), problems: Vec::new(), warnings: Vec::new() }
    }
}

/// The files of certificates and of their keys.
pub fn files(settings: &Settings) -> impl Iterator<Item = PathBuf> {
    named(settings).into_iter().flat_map(|(_, files)| [files.cert, files.key])
}

/// The pairs of files, with the key that names them.
pub fn named(settings: &Settings) -> Vec<(&'static str, CertificateFiles)> {
    let default = settings.tls_cert.clone().zip(settings.tls_key.clone());
    let default = default.map(|(cert, key)| ("tls.cert", CertificateFiles { cert, key }));
    let more = settings.tls_certificates.iter().map(|files| ("tls.certificates", files.clone()));
    default.into_iter().chain(more).collect()
}
