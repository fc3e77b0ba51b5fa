//! Verification of server certificates, and error messages for failed handshakes.

use std::{
    fmt::{Debug, Display},
    fs,
    path::Path,
    sync::Arc,
};

use rustls::{
    CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::{self, CryptoProvider},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _},
    server::ParsedCertificate,
};

use turnpike_wire::{escape, pem::with_markers_on_lines};

use crate::{InvalidSetting, TlsOptions};

#[derive(Clone, Copy, Debug)]
pub struct ShownCertificate<'a> {
    pub leaf: &'a CertificateDer<'a>,
    pub intermediates: &'a [CertificateDer<'a>],
    pub name: &'a ServerName<'a>,
    /// Stapled OCSP response; may be empty.
    pub ocsp: &'a [u8],
    pub now: UnixTime,
}

pub trait CertificateJudge: Debug + Send + Sync {
    fn judge(&self, shown: &ShownCertificate<'_>) -> Result<(), Error>;
}

/// Verifier with a pluggable decision about certificates. Regardless of that decision, the handshake must be signed with the certificate's
/// key.
#[derive(Debug)]
pub struct Verifier {
    judge: Arc<dyn CertificateJudge>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    pub fn new(judge: Arc<dyn CertificateJudge>) -> Arc<Self> {
        Arc::new(Self { judge, provider: provider() })
    }

    pub(crate) fn judge_alone(&self, leaf: &[u8], name: &ServerName<'_>) -> Result<(), Error> {
        let (leaf, now) = (&CertificateDer::from(leaf), UnixTime::now());
        self.judge.judge(&ShownCertificate { leaf, intermediates: &[], name, ocsp: &[], now })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.judge.judge(&ShownCertificate { leaf, intermediates, name, ocsp, now })?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        crypto::verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[derive(Clone, Copy, Debug)]
pub struct AnyCertificate;

impl CertificateJudge for AnyCertificate {
    fn judge(&self, _shown: &ShownCertificate<'_>) -> Result<(), Error> {
        Ok(())
    }
}

/// Web PKI rules, with the system's CA certificates or those given by the user.
#[derive(Debug)]
pub struct Authorities {
    inner: Arc<WebPkiServerVerifier>,
    pinned: Vec<CertificateDer<'static>>,
}

impl Authorities {
    /// Reads the CA certificates; fails if there are none. Ignores [`TlsOptions::insecure`].
    pub fn new(options: &TlsOptions) -> Result<Self, InvalidSetting> {
        let authorities = match &options.ca {
            Some(path) => read_authorities(path)?,
            None => system_authorities()?,
        };
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(authorities.iter().cloned());
        if roots.is_empty() {
            let path = options.ca.as_deref().unwrap_or_else(|| Path::new("the system's certificate store"));
            return Err(InvalidSetting(format!("{} contains no usable CA certificate", path.display())));
        }
        let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
            .build()
            .map_err(|error| InvalidSetting(format!("certificates cannot be checked: {error}")))?;
        let pinned = if options.ca.is_some() { authorities } else { Vec::new() };
        Ok(Self { inner, pinned })
    }
}

impl CertificateJudge for Authorities {
    fn judge(&self, shown: &ShownCertificate<'_>) -> Result<(), Error> {
        let ShownCertificate { leaf, intermediates, name, ocsp, now } = *shown;
        let judged = self.inner.verify_server_cert(leaf, intermediates, name, ocsp, now).map(drop);
        // A self-signed certificate from `openssl req -x509` is its own CA, which webpki rejects as a server
        // certificate.
        let outside = matches!(
            judged,
            Err(Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::Other(_)))
        );
        if outside && self.pinned.iter().any(|pinned| pinned == leaf) {
            return verify_server_name(&ParsedCertificate::try_from(leaf)?, name);
        }
        judged
    }
}

pub fn explain(error: &Error) -> String {
    use CertificateError as C;
    let Error::InvalidCertificate(certificate) = error else {
        return match error {
            Error::AlertReceived(alert) => format!("the server ended the handshake ({alert:?})"),
            Error::InvalidMessage(_) => "the server does not speak TLS on this port".to_owned(),
            other => other.to_string(),
        };
    };
    let what = match certificate {
        C::Expired | C::ExpiredContext { .. } => "has expired".to_owned(),
        C::NotValidYet | C::NotValidYetContext { .. } => "is not valid yet".to_owned(),
        C::UnknownIssuer => "was issued by an authority that this machine does not trust".to_owned(),
        C::NotValidForName => "is for a different name".to_owned(),
        C::NotValidForNameContext { expected, presented } => {
            format!("is for {}, not for {}", listed(presented), expected.to_str())
        }
        other if format!("{other:?}").contains("CaUsedAsEndEntity") => "is self-signed".to_owned(),
        other => format!("is not valid ({other})"),
    };
    format!("the certificate {what}")
}

/// Formats names that rustls passes on in webpki's debug format: `DnsName("a")`, `IpAddress(127.0.0.1)`.
fn listed(presented: &[String]) -> String {
    const MOST: usize = 5;
    let within = |text: &str, before: &str, after: &str| {
        text.strip_prefix(before).and_then(|rest| rest.strip_suffix(after)).map(str::to_owned)
    };
    let name = |text: &String| {
        let ip = within(text, "IpAddress(", ")")
            .map(|ip| ip.parse().map_or(ip, |ip: std::net::IpAddr| ip.to_string()));
        let name = within(text, "DnsName(\"", "\")").or(ip)?;
        // rustls has already escaped the name.
        Some(escape::line(&name).to_string())
    };
    let mut names: Vec<_> = presented.iter().filter_map(name).collect();
    if names.is_empty() {
        return "no host name or address".to_owned();
    }
    let more = names.len().saturating_sub(MOST);
    names.truncate(MOST);
    let names = names.join(", ");
    if more > 0 { format!("{names} and {more} more") } else { names }
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(turnpike_tls::provider())
}

fn read_authorities(path: &Path) -> Result<Vec<CertificateDer<'static>>, InvalidSetting> {
    let bad = |what: &dyn Display| {
        let path = path.display();
        InvalidSetting(format!("--ca {path}: {what}; expected a PEM file with certificates"))
    };
    let pem = fs::read(path).map_err(|error| bad(&error))?;
    let found = CertificateDer::pem_slice_iter(&with_markers_on_lines(&pem))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| bad(&error))?;
    if found.is_empty() { Err(bad(&"it contains no certificate")) } else { Ok(found) }
}

fn system_authorities() -> Result<Vec<CertificateDer<'static>>, InvalidSetting> {
    let found = rustls_native_certs::load_native_certs().certs;
    if !found.is_empty() {
        return Ok(found);
    }
    Err(InvalidSetting(
        "this machine has no CA certificates: install ca-certificates, give them with --ca FILE, or accept any \
         certificate with --insecure"
            .to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_name_lists_are_cut_and_unknown_kinds_skipped() {
        let many: Vec<_> = (0..7).map(|number| format!("DnsName(\"{number}.example\")")).collect();
        assert!(listed(&many).ends_with("4.example and 2 more"));
        assert_eq!(listed(&["DirectoryName".to_owned()]), "no host name or address");
        assert_eq!(listed(&["IpAddress(::1)".to_owned()]), "::1");
    }
}
