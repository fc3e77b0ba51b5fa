//! Proofs of control over a name (RFC 8555 section 8), presented to the CA until they are hidden or
//! dropped.

use std::{net::IpAddr, sync::Arc, time::Duration};

use instant_acme::ChallengeType;
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use tokio::{sync::watch, time::sleep};
use turnpike_config::{AcmeChallenge, CertificateName};
use turnpike_relay::TlsContext;

use crate::{
    error::OrderError,
    hook::DnsRecord,
    http_challenge::HttpChallenge,
    proof::ChallengeResponse,
    shared::{SharedChallenge, changed, now},
    wanted::Wanted,
};

/// Interval at which a server that receives no notification looks for challenges of other servers.
const LOOK: Duration = Duration::from_secs(60);

/// A proof that the CA can see. Dropping it withdraws TLS and HTTP proofs; only [`PublishedProof::hide`] removes
/// a DNS record.
pub(crate) enum PublishedProof {
    Tls(ShownCertificate),
    Http(HttpChallenge),
    Dns(DnsRecord),
}

impl PublishedProof {
    pub(crate) async fn new(
        wanted: &Wanted,
        name: &CertificateName,
        proof: &ChallengeResponse,
    ) -> Result<Self, OrderError> {
        Ok(match wanted.challenge {
            AcmeChallenge::Auto | AcmeChallenge::TlsAlpn => {
                let tls = wanted.tls.as_ref().ok_or(OrderError::NoTls)?;
                Self::Tls(ShownCertificate::new(Arc::clone(tls), name, &proof.digest())?)
            }
            AcmeChallenge::Http => {
                Self::Http(HttpChallenge::listen(&wanted.settings.http_listen, proof).await?)
            }
            AcmeChallenge::Dns => {
                Self::Dns(DnsRecord::set(wanted.settings.hook.as_deref(), name, proof).await?)
            }
        })
    }

    pub(crate) async fn hide(self) {
        match self {
            Self::Tls(certificate) => drop(certificate),
            Self::Http(server) => drop(server),
            Self::Dns(record) => record.remove().await,
        }
    }
}

pub(crate) fn kind(challenge: AcmeChallenge) -> (ChallengeType, &'static str) {
    match challenge {
        AcmeChallenge::Auto | AcmeChallenge::TlsAlpn => (ChallengeType::TlsAlpn01, "tls-alpn-01"),
        AcmeChallenge::Http => (ChallengeType::Http01, "http-01"),
        AcmeChallenge::Dns => (ChallengeType::Dns01, "dns-01"),
    }
}

pub(crate) struct ShownCertificate {
    tls: Arc<TlsContext>,
    server_name: String,
}

impl ShownCertificate {
    /// Creates a self-signed certificate that contains the digest of the key authorization (RFC 8737
    /// section 3).
    fn new(tls: Arc<TlsContext>, name: &CertificateName, digest: &[u8]) -> Result<Self, OrderError> {
        let mut params = CertificateParams::new([name.to_string()])?;
        params.distinguished_name = DistinguishedName::new();
        params.custom_extensions = vec![CustomExtension::new_acme_identifier(digest)];
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        let server_name = server_name(name);
        let key =
            PrivateKeyDer::try_from(key.serialize_der()).map_err(|why| OrderError::Key(why.to_owned()))?;
        tls.show_challenge(&server_name, certificate.der().clone(), key)
            .map_err(|error| OrderError::Key(error.to_string()))?;
        Ok(Self { tls, server_name })
    }
}

impl Drop for ShownCertificate {
    fn drop(&mut self) {
        self.tls.hide_challenge(&self.server_name);
    }
}

/// Presents challenges published by other servers, because the CA may connect to any server. Returns when the sender
/// of `receiver` is dropped.
pub(crate) async fn follow(mut receiver: watch::Receiver<Wanted>) {
    let mut shown: Option<(SharedChallenge, Option<PublishedProof>)> = None;
    let mut changes = receiver.borrow().shared().map(|shared| shared.changes());
    loop {
        let wanted = receiver.borrow_and_update().clone();
        let shared =
            wanted.shared().filter(|_| !wanted.names.is_empty() && wanted.challenge != AcmeChallenge::Dns);
        if let Some(changes) = &mut changes {
            changes.mark_unchanged();
        }
        let found = match &shared {
            Some(shared) => shared.challenge().await,
            None => Ok(None),
        };
        // While the storage is down, a challenge stays in place until it expires.
        let found = found.unwrap_or_else(|_| shown.as_ref().map(|(challenge, _)| challenge.clone()));
        let found = found.filter(|challenge| now() < challenge.until);
        if shown.as_ref().map(|(challenge, _)| challenge) != found.as_ref() {
            // Dropped first, because the old challenge may occupy the port.
            shown = None;
            if let Some(challenge) = found {
                let here = show(&wanted, &challenge).await;
                shown = Some((challenge, here));
            }
        }
        tokio::select! {
            () = changed(&mut changes) => {}
            () = sleep(LOOK) => {}
            changed = receiver.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}

async fn show(wanted: &Wanted, challenge: &SharedChallenge) -> Option<PublishedProof> {
    let SharedChallenge { server, name, proof, .. } = challenge;
    // Do not present challenges for names that this server does not serve, even though they were published with the
    // right secret.
    let name = name.parse().ok().filter(|name| wanted.names.contains(name))?;
    match PublishedProof::new(wanted, &name, proof).await {
        Ok(shown) => Some(shown),
        Err(error) => {
            tracing::warn!(
                "{server} is ordering a certificate for {name}, but this server cannot present that challenge to the authority: {error}"
            );
            None
        }
    }
}

/// Server name in the CA's ClientHello: the name itself, or an address's reverse DNS name (RFC 8738
/// section 6).
fn server_name(name: &CertificateName) -> String {
    match name {
        CertificateName::Dns(name) | CertificateName::Wildcard(name) => name.clone(),
        CertificateName::Ip(IpAddr::V4(ip)) => {
            let [a, b, c, d] = ip.octets();
            format!("{d}.{c}.{b}.{a}.in-addr.arpa")
        }
        CertificateName::Ip(IpAddr::V6(ip)) => {
            let nibbles = ip.octets().into_iter().rev().flat_map(|byte| [byte & 15, byte >> 4]);
            nibbles.map(|nibble| format!("{nibble:x}.")).chain(["ip6.arpa".to_owned()]).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_validated_by_their_reverse_names() {
        for (name, wanted) in [
            ("turn.example.org", "turn.example.org"),
            ("192.0.2.1", "1.2.0.192.in-addr.arpa"),
            ("2001:db8::1", "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa"),
        ] {
            assert_eq!(server_name(&name.parse().expect("a name")), wanted);
        }
    }

    #[test]
    fn challenge_certificate_is_accepted_by_the_tls_context_and_hidden_again() {
        let tls = Arc::new(TlsContext::new(&[]).expect("there is randomness"));
        for name in ["turn.example.org", "192.0.2.1", "2001:db8::1"] {
            let name: CertificateName = name.parse().expect("a name");
            // More than the limit on simultaneous challenges.
            for _ in 0..200 {
                drop(
                    ShownCertificate::new(Arc::clone(&tls), &name, &[7; 32])
                        .expect("the certificate can be shown"),
                );
            }
        }
    }
}
