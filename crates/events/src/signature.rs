//! `Turnpike-Signature: t=SECONDS,v1=HEX`: HMAC-SHA256 over the time, a dot and the body, so that an old request cannot be repeated
//! with another time.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use turnpike_wire::secret::Secret;

pub(crate) const HEADER: &str = "turnpike-signature";

pub(crate) fn sign(secret: &Secret, unix: u64, body: &[u8]) -> String {
    #[expect(clippy::expect_used, reason = "HMAC accepts keys of any length")]
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.reveal().as_bytes()).expect("any length");
    mac.update(unix.to_string().as_bytes());
    mac.update(b".");
    mac.update(body);
    format!("t={unix},v1={}", hex::encode(mac.finalize().into_bytes()))
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn openssl_computes_the_same_signature() {
        let body = "{\"user\":\"al\\\"ice\"}";
        let openssl = Command::new("openssl")
            .args(["dgst", "-sha256", "-hmac", "a secret, with spaces", "-r"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut openssl) = openssl else {
            eprintln!("SKIPPED: openssl is not installed");
            return;
        };
        let mut input = openssl.stdin.take().expect("piped");
        input.write_all(format!("1800000000.{body}").as_bytes()).expect("openssl reads");
        drop(input);
        let output = openssl.wait_with_output().expect("openssl ends");
        let expected = String::from_utf8(output.stdout).expect("text");
        let expected = expected.split_whitespace().next().expect("a digest");
        let secret = Secret::new("a secret, with spaces");
        assert_eq!(sign(&secret, 1_800_000_000, body.as_bytes()), format!("t=1800000000,v1={expected}"));
    }
}
