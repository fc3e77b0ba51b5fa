//! The certificate that every relay shows to clients over TLS: self-signed, made anew for each run.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use super::netns::RELAY_LISTEN_IP;
use crate::Failure;

/// Two PEM files. The key is of ECDSA on P-256, which both rustls and OpenSSL sign with at about the same cost.
#[derive(Clone, Debug)]
pub(crate) struct Certificate {
    cert: PathBuf,
    key: PathBuf,
}

impl Certificate {
    /// Makes one for the relay's address in `directory`.
    pub(crate) fn make(directory: &Path) -> Result<Self, Failure> {
        let made = rcgen::generate_simple_self_signed([RELAY_LISTEN_IP.to_owned()])?;
        let certificate = Self { cert: directory.join("cert.pem"), key: directory.join("key.pem") };
        fs::write(&certificate.cert, made.cert.pem())?;
        // Good for nothing but this run, and yet no key lies about readable.
        let mut key =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&certificate.key)?;
        key.write_all(made.signing_key.serialize_pem().as_bytes())?;
        Ok(certificate)
    }

    /// The command with the files' names in place of `{cert}` and `{key}`.
    pub(crate) fn fill_in(&self, command: Vec<String>) -> Vec<String> {
        let (cert, key) = (self.cert.display().to_string(), self.key.display().to_string());
        command.into_iter().map(|word| word.replace("{cert}", &cert).replace("{key}", &key)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_key_is_its_owners_and_the_names_are_filled_in() {
        let directory = std::env::temp_dir().join(format!("xtask-certificate-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let certificate = Certificate::make(&directory).unwrap();
        let words = ["--cert", "{cert}", "--pkey={key}"].map(str::to_owned).to_vec();
        let command = certificate.fill_in(words);
        let pem = fs::read_to_string(&command[1]).unwrap();
        assert!(pem.starts_with("-----BEGIN CERTIFICATE-----"), "{pem}");
        let key = command[2].strip_prefix("--pkey=").unwrap();
        assert!(fs::read_to_string(key).unwrap().contains("PRIVATE KEY"));
        assert_eq!(fs::metadata(key).unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_dir_all(directory).unwrap();
    }
}
