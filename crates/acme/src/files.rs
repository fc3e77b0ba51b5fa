//! Files in the state directory: the account, and one PEM file per name with the certificate chain and its key, so that
//! both are replaced together. Only the server's user can read them.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, ErrorKind, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use turnpike_config::CertificateName;
use turnpike_relay::{Identity, certificates};
use zeroize::Zeroizing;

use crate::{error::OrderError, schedule::Validity};

/// Maximum size in bytes of an account file.
const LONGEST_ACCOUNT: u64 = 64 << 10;
const LONGEST_CERTIFICATE: u64 = 1 << 20;
/// Bytes written to check for free space: the size of a long certificate chain with its key.
const ROOM: usize = 32 << 10;
/// Start of a certificate file's first line, which names the issuing CA's directory and precedes the PEM sections.
const AUTHORITY: &str = "Directory: ";

/// Lock held by the process that orders certificates; the kernel releases it when the process exits.
#[derive(Debug)]
pub(crate) struct OrderLock(#[expect(dead_code, reason = "the lock lasts as long as the file is open")] File);

#[derive(Clone, Debug)]
pub(crate) struct OrderFiles {
    directory: PathBuf,
}

impl OrderFiles {
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    pub(crate) fn lock(&self) -> Result<OrderLock, OrderError> {
        let file = self.directory.join("lock");
        let failed = |error| OrderError::File { file: file.clone(), error };
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).map_err(failed)?;
        let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&file);
        let opened = opened.map_err(failed)?;
        match opened.try_lock() {
            Ok(()) => Ok(OrderLock(opened)),
            Err(TryLockError::WouldBlock) => Err(OrderError::Locked(self.directory.clone())),
            Err(TryLockError::Error(error)) => Err(failed(error)),
        }
    }

    /// Checks that a certificate can be written later. One that is issued but lost would still count against the CA's
    /// rate limits.
    pub(crate) fn check_room(&self) -> Result<(), OrderError> {
        let file = self.directory.join("room");
        let failed = |error| OrderError::File { file: file.clone(), error };
        write(&file, &[0; ROOM]).map_err(failed)?;
        fs::remove_file(&file).map_err(failed)
    }

    pub(crate) fn certificate(&self, name: &CertificateName) -> Option<Identity> {
        let file = self.certificate_file(name);
        certificates::read(&file, &file).ok()
    }

    pub(crate) fn certificate_file(&self, name: &CertificateName) -> PathBuf {
        self.directory.join(name.file_name())
    }

    /// The whole file: CA, chain and key.
    pub(crate) fn certificate_text(&self, name: &CertificateName) -> Option<Zeroizing<Vec<u8>>> {
        let file = self.certificate_file(name);
        let is_short = fs::metadata(&file).is_ok_and(|about| about.len() <= LONGEST_CERTIFICATE);
        is_short.then(|| fs::read(&file).ok().map(Zeroizing::new)).flatten()
    }

    /// True if the file names another CA. A file that names no CA was put there by the operator.
    pub(crate) fn is_foreign(&self, name: &CertificateName, directory: &str) -> bool {
        let text = self.certificate_text(name);
        let first = text.as_deref().and_then(|text| text.split(|byte| *byte == b'\n').next());
        first
            .and_then(|line| line.strip_prefix(AUTHORITY.as_bytes()))
            .is_some_and(|found| found != directory.as_bytes())
    }

    /// Replaces the certificate for a name after checking that the server and its clients can use it.
    pub(crate) fn put_certificate(
        &self,
        name: &CertificateName,
        directory: &str,
        chain: &str,
        key: &str,
    ) -> Result<Validity, OrderError> {
        let text = Zeroizing::new(format!("{AUTHORITY}{directory}\n{}\n{key}", chain.trim_end()));
        self.put_certificate_text(name, text.as_bytes())
    }

    pub(crate) fn put_certificate_text(
        &self,
        name: &CertificateName,
        text: &[u8],
    ) -> Result<Validity, OrderError> {
        let identity =
            Identity::from_pem(text, text).map_err(|error| OrderError::Certificate(error.to_string()))?;
        let file = self.certificate_file(name);
        write(&file, text).map_err(|error| OrderError::File { file, error })?;
        Ok(validity(&identity))
    }

    /// Account at the CA with this directory URL, as JSON.
    pub(crate) fn account(&self, directory: &str) -> Option<Vec<u8>> {
        let file = self.account_file(directory);
        let is_short = fs::metadata(&file).is_ok_and(|about| about.len() <= LONGEST_ACCOUNT);
        is_short.then(|| fs::read(&file).ok()).flatten()
    }

    pub(crate) fn put_account(&self, directory: &str, account: &[u8]) -> Result<(), OrderError> {
        let file = self.account_file(directory);
        write(&file, account).map_err(|error| OrderError::File { file, error })
    }

    pub(crate) fn forget_account(&self, directory: &str) {
        let _ = fs::remove_file(self.account_file(directory));
    }

    /// Each CA has its own account file.
    fn account_file(&self, directory: &str) -> PathBuf {
        let is_plain = |one: char| one.is_ascii_alphanumeric() || one == '.' || one == '-';
        let name: String =
            directory.chars().map(|one| if is_plain(one) { one } else { '_' }).take(200).collect();
        self.directory.join(format!("account-{name}.json"))
    }
}

pub(crate) fn validity(identity: &Identity) -> Validity {
    Validity { first: identity.not_before(), last: identity.not_after() }
}

/// Readers see either the old or the new content, even after a power failure.
fn write(file: &Path, content: &[u8]) -> io::Result<()> {
    let new = file.with_extension("new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let written = (|| {
        let mut opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        opened.write_all(content)?;
        opened.sync_all()?;
        fs::rename(&new, file)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written?;
    file.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use turnpike_testkit::{Dir, certificates::Certificate};

    use super::*;

    const CA: &str = "https://ca.example/dir";

    #[test]
    fn certificate_and_account_are_private_and_replaced_as_a_whole() {
        let dir = Dir::new();
        let files = OrderFiles::new(dir.at("state/acme"));
        let _lock = files.lock().expect("the directory is ours");
        let name: CertificateName = "turn.example.org".parse().expect("a name");
        assert!(files.certificate(&name).is_none());
        for _ in 0..2 {
            let made = Certificate::new(&["turn.example.org"]);
            let validity =
                files.put_certificate(&name, CA, &made.pem, &made.key).expect("the certificate is usable");
            let found = files.certificate(&name).expect("written");
            assert!(!files.is_foreign(&name, CA) && files.is_foreign(&name, "https://staging.example/dir"));
            assert_eq!(
                (found.names(), super::validity(&found)),
                (&["turn.example.org".to_owned()][..], validity)
            );
        }
        fs::write(files.certificate_file(&name), "-----BEGIN").expect("the directory is ours");
        assert!(!files.is_foreign(&name, CA), "no authority is named");
        files.put_account(CA, b"{}").expect("the directory is ours");
        assert_eq!(files.account(CA).as_deref(), Some(&b"{}"[..]));
        assert_eq!(files.account("https://ca.example/other"), None);
        for entry in fs::read_dir(dir.at("state/acme")).expect("the directory is ours") {
            let entry = entry.expect("the directory is ours");
            let mode = entry.metadata().expect("the directory is ours").permissions().mode() & 0o777;
            assert_eq!(mode, 0o600, "{:?}", entry.path());
        }
        assert_eq!(
            fs::metadata(dir.at("state/acme")).expect("the directory is ours").permissions().mode() & 0o777,
            0o700
        );
    }

    #[test]
    fn unusable_certificate_does_not_replace_the_old_one() {
        let dir = Dir::new();
        let files = OrderFiles::new(dir.path().to_owned());
        let name: CertificateName = "turn.example.org".parse().expect("a name");
        let (made, other) = (Certificate::new(&["a.example"]), Certificate::new(&["b.example"]));
        files.put_certificate(&name, CA, &made.pem, &made.key).expect("usable");
        for (chain, key) in [("", &*made.key), (&*other.pem, &*made.key), ("no PEM", "no PEM")] {
            assert!(matches!(files.put_certificate(&name, CA, chain, key), Err(OrderError::Certificate(_))));
        }
        assert_eq!(files.certificate(&name).expect("still there").names(), ["a.example"]);
    }

    #[test]
    fn directory_that_cannot_be_written_is_detected_before_the_order() {
        let dir = Dir::new();
        OrderFiles::new(dir.path().to_owned()).check_room().expect("there is room");
        assert_eq!(fs::read_dir(dir.path()).expect("the directory is ours").count(), 0);
        let error =
            OrderFiles::new(dir.at("absent")).check_room().expect_err("there is no directory").to_string();
        assert!(error.contains("absent/room: ") && error.contains("must exist, be writable"), "{error}");
        let file = dir.file("file", "");
        let error = OrderFiles::new(file.join("acme")).lock().expect_err("the parent is a file").to_string();
        assert!(error.contains("must exist, be writable"), "{error}");
    }

    #[test]
    fn second_process_does_not_get_the_lock() {
        let dir = Dir::new();
        let files = OrderFiles::new(dir.path().to_owned());
        let first = files.lock().expect("free");
        assert!(matches!(files.lock(), Err(OrderError::Locked(_))));
        drop(first);
        files.lock().expect("free again");
    }
}
