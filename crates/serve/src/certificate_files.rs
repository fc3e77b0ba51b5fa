//! Loads the configuration together with its certificates, so that all errors are reported before any
//! socket opens.

use std::{
    fs::File,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use turnpike_config::{
    CertificateFiles, LoadedConfig, Mistake, Mistakes, Secret, Settings, Sources,
    certificates::{ORDERED, ReadCertificates, named},
    readable_by_all,
};
use turnpike_relay::{
    Identity,
    certificates::{self, Certificate, chain_warning, now_unix, own_name},
};

/// Loads the configuration at startup. Accepts certificates outside their validity period: a machine without
/// a battery-backed clock boots with the wrong time, and UDP clients need no certificate.
pub fn load(sources: &Sources) -> Result<LoadedConfig<Certificate>, Mistakes> {
    let loaded = sources.load(|settings| read_by(settings, one))?;
    if loaded.certificate_problems.is_empty() {
        Ok(loaded)
    } else {
        Err(Mistakes::sorted(loaded.certificate_problems))
    }
}

/// Loads the configuration at a reload. Returns certificate problems separately, because they must not
/// prevent the reload: the old certificates can stay in use, but a removed user must lose access.
pub(crate) fn load_for_reload(sources: &Sources) -> Result<LoadedConfig<Certificate>, Mistakes> {
    sources.load(read)
}

/// Reads all certificates. A certificate outside its validity period is reported as a problem.
pub(crate) fn read(settings: &Settings) -> ReadCertificates<Certificate> {
    read_by(settings, |files, settings| {
        let identity = one(files, settings)?;
        let timely = identity.check_time(now_unix());
        timely.map(|()| identity).map_err(|fault| (files.cert.clone(), fault.to_string()))
    })
}

/// The error is an unusable file and the reason.
type Read = Result<Identity, (PathBuf, String)>;

fn one(files: &CertificateFiles, settings: &Settings) -> Read {
    let password = settings.tls.key_password.as_ref().map(Secret::reveal);
    certificates::read_encrypted(&files.cert, &files.key, password)
}

fn read_by(
    settings: &Settings,
    read: fn(&CertificateFiles, &Settings) -> Read,
) -> ReadCertificates<Certificate> {
    let ReadCertificates { mut certificates, mut problems, mut warnings } = ReadCertificates::default();
    for (key, files) in named(settings) {
        let found = if key == ORDERED {
            match read_ordered(&files.cert) {
                Ok(Some(identity)) => Ok(identity),
                Ok(None) => continue,
                Err(warning) => {
                    warnings.push(warning);
                    continue;
                }
            }
        } else {
            read(&files, settings)
        };
        match found {
            Ok(identity) => {
                warnings.extend(chain_warning(&files.cert, &identity));
                certificates.push(Certificate { file: files.cert, identity });
                warnings.extend(readable_by_all(&files.key, "this private key"));
            }
            // Reports the configuration line that names the file, where an administrator looks first.
            Err((path, problem)) => {
                let expected = match File::open(&path) {
                    Err(error) if error.kind() == ErrorKind::PermissionDenied => readable_by(&path),
                    _ => "a currently valid certificate and its private key, both in PEM".to_owned(),
                };
                let problem = format!("{}: {problem}", path.display());
                problems.push(Mistake::new(settings.origin(key), key, problem, expected));
            }
        }
    }
    if let Some(Err((path, problem))) = settings.tls.client_ca.as_deref().map(certificates::authorities) {
        let (key, problem) = ("tls.client_ca", format!("{}: {problem}", path.display()));
        problems.push(Mistake::new(settings.origin(key), key, problem, "a PEM file with CA certificates"));
    }
    // dimpl does not support RSA. Detected at startup, because DTLS clients would get no answer.
    let dtls = settings.dtls.listen.is_empty()
        || !settings.tls.acme.is_empty()
        || certificates.iter().any(|one| one.identity.can_dtls());
    if let Some((key, files)) = named(settings).into_iter().next()
        && !dtls
        && problems.is_empty()
    {
        problems.push(Mistake::new(
            settings.origin(key),
            key,
            format!("{}: DTLS (dtls.listen) cannot use this certificate's key", files.cert.display()),
            "an ECDSA certificate with P-256 or P-384, here or in tls.certificates (TLS keeps using an RSA certificate \
             too); openssl ecparam -name prime256v1 -genkey generates such a key",
        ));
    }
    ReadCertificates { certificates, problems, warnings }
}

/// Reads a certificate that the server ordered; `None` if it has not been issued yet. Its validity is not
/// checked: an expired one is replaced as soon as the CA issues a new one.
fn read_ordered(file: &Path) -> Result<Option<Identity>, String> {
    match certificates::read(file, file) {
        Ok(identity) => Ok(Some(identity)),
        Err(_) if !file.exists() => Ok(None),
        Err((_, problem)) => Err(format!("{}: {problem}; ordering a new certificate", file.display())),
    }
}

fn readable_by(path: &Path) -> String {
    let (user, path) = (own_name(), path.display());
    format!(
        "a file that this user can read: chgrp {user} {path} && chmod 640 {path}, and give {user} access to its directories (chmod g+x)"
    )
}

#[cfg(test)]
mod tests {
    use turnpike_config::{Flags, TlsSettings};
    use turnpike_testkit::certificates::{Certificate as Made, ENCRYPTED_KEYS, KeyPair, PLAIN_KEY};

    use super::*;

    #[test]
    fn unusable_files_are_named() {
        let dir = turnpike_testkit::Dir::new();
        let (cert, key) = (dir.at("cert.pem"), dir.at("key.pem"));
        let problem = |settings: &Settings| {
            let ReadCertificates { certificates, mut problems, .. } = read(settings);
            assert!(certificates.is_empty());
            problems.remove(0).to_string()
        };
        let settings = Settings {
            tls: TlsSettings {
                certificates: vec![CertificateFiles { cert: cert.clone(), key: key.clone() }],
                ..TlsSettings::default()
            },
            ..Settings::default()
        };
        assert!(problem(&settings).contains("cert.pem: cannot be read"));
        std::fs::write(&cert, "").unwrap();
        assert!(problem(&settings).contains("cert.pem: the file is empty"));
        std::fs::write(&cert, "no PEM").unwrap();
        assert!(problem(&settings).contains("key.pem: cannot be read"));
        std::fs::write(&key, "no PEM").unwrap();
        assert!(problem(&settings).contains("key.pem: no private key found"));
    }

    #[test]
    fn unusable_client_authorities_are_a_problem() {
        let dir = turnpike_testkit::Dir::new();
        let (_, authority) = Made::of_client("phone");
        for (content, expected) in [
            (Some(authority.as_str()), None),
            (Some("no PEM"), Some("no certificate found")),
            (None, Some("cannot be read")),
        ] {
            let file = dir.at("ca.pem");
            let _ = std::fs::remove_file(&file);
            content.into_iter().for_each(|content| std::fs::write(&file, content).unwrap());
            let tls = TlsSettings { client_ca: Some(file), ..TlsSettings::default() };
            let problems = read(&Settings { tls, ..Settings::default() }).problems;
            assert_eq!(problems.len(), usize::from(expected.is_some()), "{problems:?}");
            let told = problems.first().map_or_else(String::new, ToString::to_string);
            assert!(
                expected.is_none_or(|words| told.contains("tls.client_ca") && told.contains(words)),
                "{told}"
            );
        }
    }

    #[test]
    fn configured_password_decrypts_the_key() {
        let dir = turnpike_testkit::Dir::new();
        let key = KeyPair::from_pem(PLAIN_KEY).expect("a key");
        let cert = dir.file("cert.pem", Made::of_key(&key, &["turn.example"], |_| ()).pem);
        let files = CertificateFiles { cert, key: dir.file("key.pem", ENCRYPTED_KEYS[0]) };
        let read = |password: Option<&str>| {
            let key_password = password.map(Secret::new);
            let tls =
                TlsSettings { key_password, certificates: vec![files.clone()], ..TlsSettings::default() };
            read(&Settings { tls, ..Settings::default() })
        };
        assert_eq!(read(Some("horse")).certificates.len(), 1);
        for password in [None, Some("hose")] {
            let problem = read(password).problems.remove(0).to_string();
            assert!(problem.contains("key.pem") && problem.contains("tls.key_password"), "{problem}");
        }
    }

    #[test]
    fn remedy_names_the_user_and_the_file() {
        let name = own_name();
        let told = readable_by(Path::new("/etc/key.pem"));
        assert!(told.contains(&format!("chgrp {name} /etc/key.pem && chmod 640 /etc/key.pem")), "{told}");
    }

    fn loaded(pem: &str, key: &str) -> ReadCertificates<Certificate> {
        let dir = turnpike_testkit::Dir::new();
        let (cert, key) = (dir.file("cert.pem", pem), dir.file("key.pem", key));
        let settings = Settings {
            tls: TlsSettings { certificates: vec![CertificateFiles { cert, key }], ..TlsSettings::default() },
            ..Settings::default()
        };
        read(&settings)
    }

    fn chain_warnings(found: &ReadCertificates<Certificate>) -> Vec<&String> {
        found.warnings.iter().filter(|warning| warning.contains("cert.pem")).collect()
    }

    #[test]
    fn chain_is_read_even_if_two_pem_markers_share_a_line() {
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

    #[test]
    fn unusable_certificate_does_not_hide_the_other_settings() {
        let load = |text: &str| {
            let dir = turnpike_testkit::Dir::new();
            let sources = Sources::new(Some(dir.file("turnpike.toml", text)), Vec::new(), Flags::new());
            load_for_reload(&sources)
        };
        let text =
            "[server]\nrealm = \"new\"\n[tls]\ncert = \"/nowhere/cert.pem\"\nkey = \"/nowhere/key.pem\"";
        let loaded = load(text).expect("the rest is valid");
        assert_eq!((loaded.settings.realm.as_str(), loaded.certificates.len()), ("new", 0));
        let problems = loaded.certificate_problems;
        assert!(problems[0].to_string().contains("/nowhere/cert.pem: cannot be read"), "{problems:?}");
        let errors = load(&format!("{text}\n[server2]")).expect_err("wrong").0;
        assert_eq!(errors.len(), 2, "{errors:?}");
    }
}
