//! Long-term credentials (RFC 8489 section 9.2): parses challenges (401, 438) and derives the keys for the
//! next request.

use turnpike_wire::{
    integrity::{Key, KeyAlgorithm, Mac},
    precis::opaque_string,
    stun::{View, feature, kind, password_algorithms, security_features},
};

use super::{Config, Failure, Ignored};

#[derive(Clone)]
pub(super) struct Challenge {
    pub(super) realm: String,
    pub(super) nonce: String,
    /// PASSWORD-ALGORITHMS as received; the signed request must repeat it.
    pub(super) algorithms: Option<Vec<u8>>,
    pub(super) anonymous: bool,
}

impl Challenge {
    /// Parses a 401 or 438. A 438 may omit REALM; `known_realm` replaces it.
    pub(super) fn read(
        message: &View<'_>,
        known_realm: Option<&str>,
        honour_algorithms: bool,
    ) -> Result<Self, Ignored> {
        let realm = message.text(kind::REALM).or(known_realm).ok_or(Ignored::Malformed)?.to_owned();
        let nonce = message.text(kind::NONCE).ok_or(Ignored::Malformed)?.to_owned();
        let features = security_features(nonce.as_bytes());
        let mut algorithms = None;
        let mut anonymous = false;
        if honour_algorithms {
            algorithms = message.get(kind::PASSWORD_ALGORITHMS).map(<[u8]>::to_vec);
            if features & feature::PASSWORD_ALGORITHMS != 0 && algorithms.is_none() {
                return Err(Ignored::BidDown);
            }
            anonymous = features & feature::USERNAME_ANONYMITY != 0;
        }
        Ok(Self { realm, nonce, algorithms, anonymous })
    }
}

#[derive(Clone)]
pub(super) struct Session {
    pub(super) challenge: Challenge,
    pub(super) algorithm: KeyAlgorithm,
    pub(super) key: Key,
    pub(super) mac: Mac,
}

impl Session {
    pub(super) fn answer(config: &Config, challenge: Challenge) -> Result<Self, Failure> {
        if config.username.is_empty() {
            return Err(Failure::CredentialsNeeded { realm: challenge.realm });
        }
        // The authorization server supplies the key; no algorithm derives it (RFC 7635 section 4).
        if let Some(access) = &config.access_token {
            let challenge = Challenge { algorithms: None, anonymous: false, ..challenge };
            let key = Key::from_bytes(&access.mac_key);
            return Ok(Self { challenge, algorithm: KeyAlgorithm::Md5, key, mac: Mac::Sha1 });
        }
        // PASSWORD-ALGORITHMS identifies an RFC 8489 server, which can verify SHA-256 (section 9.2.5).
        let (algorithm, mac) = match &challenge.algorithms {
            Some(offered) => {
                let known = password_algorithms(offered).find_map(KeyAlgorithm::numbered);
                (known.ok_or(Failure::PasswordAlgorithms)?, Mac::Sha256)
            }
            None => (KeyAlgorithm::Md5, Mac::Sha1),
        };
        let key = Key::long_term(
            algorithm,
            &opaque_string(&config.username),
            &challenge.realm,
            config.password.as_bytes(),
        );
        Ok(Self { challenge, algorithm, key, mac })
    }

    pub(super) fn differs(&self, challenge: &Challenge) -> bool {
        self.challenge.realm != challenge.realm
            || self.challenge.algorithms != challenge.algorithms
            || self.challenge.anonymous != challenge.anonymous
    }
}
