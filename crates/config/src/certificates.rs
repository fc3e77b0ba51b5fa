//! Certificate files, read together with the configuration. This crate does not link TLS.

use std::path::PathBuf;

use super::{CertificateFiles, Mistake, Settings};

/// Certificates in the form of the program that loaded them.
#[derive(Debug)]
pub struct ReadCertificates<C> {
    /// Starts with the default certificate.
    pub certificates: Vec<C>,
    pub problems: Vec<Mistake>,
    pub warnings: Vec<String>,
}

impl<C> Default for ReadCertificates<C> {
    fn default() -> Self {
        Self { certificates: Vec::new(), problems: Vec::new(), warnings: Vec::new() }
    }
}

/// Configuration key named in errors about ordered certificates.
pub const ORDERED: &str = "tls.acme";

/// Directory of ordered certificates and of the account that orders them; `None` without a state directory.
pub fn order_directory(settings: &Settings) -> Option<PathBuf> {
    settings.store.state.directory().map(|state| state.join("acme"))
}

pub fn files(settings: &Settings) -> impl Iterator<Item = PathBuf> {
    let authorities = settings.tls.client_ca.clone();
    named(settings).into_iter().flat_map(|(_, files)| [files.cert, files.key]).chain(authorities)
}

/// Certificate files by configuration key. Those of [`ORDERED`] contain both certificate and key, and are
/// missing until the first order has succeeded.
pub fn named(settings: &Settings) -> Vec<(&'static str, CertificateFiles)> {
    let default = settings.tls.cert.clone().zip(settings.tls.key.clone());
    let default = default.map(|(cert, key)| ("tls.cert", CertificateFiles { cert, key }));
    let more = settings.tls.certificates.iter().map(|files| ("tls.certificates", files.clone()));
    let ordered = order_directory(settings).into_iter().flat_map(|directory| {
        settings.tls.acme.iter().map(move |name| {
            let file = directory.join(name.file_name());
            (ORDERED, CertificateFiles { cert: file.clone(), key: file })
        })
    });
    default.into_iter().chain(more).chain(ordered).collect()
}
