//! dimpl's cryptography with two parts replaced.
//!
//! - **Cookies.** dimpl creates cookies with a secret per instance, so only that instance can check a cookie.
//!   Our cookies can be checked without an instance ([`super::cookie`]). The instance created afterwards
//!   processes the first ClientHello again and must compute the same cookie. dimpl calls `hmac_sha256` only for
//!   cookies; key derivation uses `hmac`.
//! - **Keys.** dimpl would parse the private key for each instance. rustls parses our keys once, and ring
//!   signs with them.
//!
//! dimpl's interface cannot pass a cookie or key to a single instance, so both are stored in a thread-local
//! variable during a call.

use std::{cell::RefCell, fmt, panic::AssertUnwindSafe, sync::Arc};

use dimpl::{
    CryptoError,
    crypto::{
        Buf, CryptoProvider, HashAlgorithm, HmacProvider, KeyProvider, SignatureAlgorithm, SigningKey,
        rust_crypto,
    },
};
use rustls::{SignatureScheme, sign};

use super::hello::Cookie;

pub(super) struct Lent {
    pub(super) cookie: Cookie,
    pub(super) key: Arc<dyn sign::SigningKey>,
}

thread_local! {
    static LENT: RefCell<Option<Lent>> = const { RefCell::new(None) };
}

pub(super) fn lend<T>(lent: Lent, work: impl FnOnce() -> T) -> T {
    struct TakeBack;
    impl Drop for TakeBack {
        fn drop(&mut self) {
            LENT.with_borrow_mut(Option::take);
        }
    }
    LENT.set(Some(lent));
    let _take_back = TakeBack;
    work()
}

pub(super) fn provider() -> CryptoProvider {
    CryptoProvider { hmac_provider: &CookieOrHmac, key_provider: &LentKey, ..rust_crypto::default_provider() }
}

pub(super) fn scheme(key: &dyn sign::SigningKey) -> Option<SignatureScheme> {
    [SignatureScheme::ECDSA_NISTP256_SHA256, SignatureScheme::ECDSA_NISTP384_SHA384]
        .into_iter()
        .find(|scheme| key.choose_scheme(&[*scheme]).is_some())
}

#[derive(Debug)]
struct CookieOrHmac;

impl HmacProvider for CookieOrHmac {
    fn hmac_sha256(&self, key: &[u8], data: &[u8]) -> Result<[u8; 32], CryptoError> {
        let cookie = LENT.with_borrow(|lent| lent.as_ref().map(|lent| lent.cookie));
        // No cookie is set when dimpl tests its provider at startup.
        cookie.map_or_else(|| rust_crypto::default_provider().hmac_provider.hmac_sha256(key, data), Ok)
    }

    fn hmac(
        &self,
        hash: HashAlgorithm,
        key: &[u8],
        data: &[u8],
        out: &mut [u8],
    ) -> Result<usize, CryptoError> {
        rust_crypto::default_provider().hmac_provider.hmac(hash, key, data, out)
    }
}

#[derive(Debug)]
struct LentKey;

impl KeyProvider for LentKey {
    fn load_private_key(&self, _: &[u8]) -> Result<Box<dyn SigningKey>, CryptoError> {
        let key = LENT.with_borrow(|lent| lent.as_ref().map(|lent| Arc::clone(&lent.key)));
        let key = key.ok_or(CryptoError::InvalidPrivateKey)?;
        let scheme = scheme(&*key).ok_or(CryptoError::InvalidPrivateKey)?;
        Ok(Box::new(RustlsSigner { key: AssertUnwindSafe(key), scheme }))
    }
}

struct RustlsSigner {
    // Signing does not change the key, so a panic cannot leave it in an inconsistent state.
    key: AssertUnwindSafe<Arc<dyn sign::SigningKey>>,
    scheme: SignatureScheme,
}

impl fmt::Debug for RustlsSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signer").field("scheme", &self.scheme).finish_non_exhaustive()
    }
}

impl SigningKey for RustlsSigner {
    fn sign(&mut self, data: &[u8], hash_alg: HashAlgorithm, out: &mut Buf) -> Result<(), CryptoError> {
        let failed = CryptoError::OperationFailed(dimpl::CryptoOperation::Sign);
        if hash_alg != self.hash_algorithm() {
            return Err(failed);
        }
        let signer = self.key.choose_scheme(&[self.scheme]).ok_or(failed.clone())?;
        let signature = signer.sign(data).map_err(|_| failed)?;
        out.clear();
        out.extend_from_slice(&signature);
        Ok(())
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        SignatureAlgorithm::ECDSA
    }

    fn hash_algorithm(&self) -> HashAlgorithm {
        self.supported_hash_algorithms()[0]
    }

    fn supported_hash_algorithms(&self) -> &[HashAlgorithm] {
        match self.scheme {
            SignatureScheme::ECDSA_NISTP384_SHA384 => &[HashAlgorithm::SHA384],
            _ => &[HashAlgorithm::SHA256],
        }
    }
}
