//! Identifier that names a certificate when asking the CA for its renewal window (RFC 9773 section 4.1).

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
use instant_acme::CertificateIdentifier;
use turnpike_relay::Identity;
use x509_cert::{Certificate, der::Decode as _, ext::pkix::AuthorityKeyIdentifier};

pub(crate) fn certificate_id(identity: &Identity) -> Option<CertificateIdentifier<'static>> {
    let key = identity.certified_key();
    let certificate = Certificate::from_der(key.cert.first()?).ok()?;
    let own = certificate.tbs_certificate();
    let (_, issuer) = own.get_extension::<AuthorityKeyIdentifier>().ok()??;
    let encode = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
    Some(CertificateIdentifier {
        authority_key_identifier: encode(issuer.key_identifier?.as_bytes()).into(),
        serial: encode(own.serial_number().as_bytes()).into(),
    })
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::certificates::Certificate as Made;

    use super::*;

    fn id(made: &Made) -> Option<CertificateIdentifier<'static>> {
        certificate_id(
            &Identity::from_pem(made.pem.as_bytes(), made.key.as_bytes()).expect("the certificate is usable"),
        )
    }

    /// The serial number from the example in RFC 9773 section 4.1. Its first bit is set, so DER puts a
    /// zero byte before it.
    #[test]
    fn serial_number_is_encoded_with_its_sign() {
        let made = Made::with(&["a.example"], |params| {
            params.serial_number = Some(vec![0x87, 0x65, 0x43, 0x21].into());
            params.use_authority_key_identifier_extension = true;
        });
        assert_eq!(id(&made).expect("the certificate names its authority").serial, "AIdlQyE");
    }

    #[test]
    fn certificate_without_an_authority_has_no_identifier() {
        assert!(id(&Made::new(&["a.example"])).is_none());
    }
}
