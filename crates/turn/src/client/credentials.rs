//! Long-term credentials: what a challenge (401, 438) says, and the key that answers it (RFC 8489 section 9.2).

use base64::Engine as _;
use turnpike_wire::{
    integrity::{Key, KeyAlgorithm, Mac},
    stun_types::{
        attribute::{AttributeStaticType, Nonce, PasswordAlgorithms, Realm},
        message::Message,
    },
};

use super::{Config, Failure, Ignored};

/// What "obMatJos2" at a nonce's start announces (RFC 8489 sections 9.2 and 18.1).
const NONCE_COOKIE: &str = "obMatJos2";
/// Security feature bit 0, counted from the most significant of 24.
const FEATURE_PASSWORD_ALGORITHMS: u8 = 0x80;
/// Security feature bit 1.
const FEATURE_USERNAME_ANONYMITY: u8 = 0x40;

/// A server's challenge.
#[derive(Clone)]
pub(super) struct Challenge {
    pub(super) realm: String,
    pub(super) nonce: String,
    /// PASSWORD-ALGORITHMS byte for byte, because the answer must repeat it.
    pub(super) algorithms: Option<Vec<u8>>,
    pub(super) anonymous: bool,
}

impl Challenge {
    /// Reads a 401 or 438. A 438 may leave out REALM: `known_realm` stands in.
    pub(super) fn read(
        message: &Message<'_>,
        known_realm: Option<&str>,
        honour_algorithms: bool,
    ) -> Result<Self, Ignored> {
        let realm = match message.attribute::<Realm>() {
            Ok(realm) => realm.realm().to_owned(),
            Err(_) => known_realm.ok_or(Ignored::Malformed)?.to_owned(),
        };
        let nonce = message.attribute::<Nonce>().map_err(|_| Ignored::Malformed)?.nonce().to_owned();
        let features = security_features(&nonce);
        let mut algorithms = None;
        let mut anonymous = false;
        if honour_algorithms {
            algorithms = message.raw_attribute(PasswordAlgorithms::TYPE).map(|raw| raw.value.to_vec());
            if features & FEATURE_PASSWORD_ALGORITHMS != 0 && algorithms.is_none() {
                return Err(Ignored::BidDown);
            }
            anonymous = features & FEATURE_USERNAME_ANONYMITY != 0;
        }
        Ok(Self { realm, nonce, algorithms, anonymous })
    }
}

/// An answered challenge: everything that signs a request.
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
        // The key is that of the authorisation server; no algorithm derives it (RFC 7635 section 4).
        if let Some(access) = &config.access_token {
            let challenge = Challenge { algorithms: None, anonymous: false, ..challenge };
            let key = Key::from_bytes(&access.mac_key);
            return Ok(Self { challenge, algorithm: KeyAlgorithm::Md5, key, mac: Mac::Sha1 });
        }
        // With PASSWORD-ALGORITHMS the server is one of RFC 8489, and SHA-256 protects the message whichever
        // algorithm made the key (section 9.2.5).
        let (algorithm, mac) = match &challenge.algorithms {
            Some(offered) => (first_known(offered).ok_or(Failure::PasswordAlgorithms)?, Mac::Sha256),
            None => (KeyAlgorithm::Md5, Mac::Sha1),
        };
        let key = Key::long_term(algorithm, &config.username, &challenge.realm, config.password.as_bytes());
        Ok(Self { challenge, algorithm, key, mac })
    }

    /// Whether a new challenge differs in more than its nonce, so that answering it again could help.
    pub(super) fn differs(&self, challenge: &Challenge) -> bool {
        self.challenge.realm != challenge.realm
            || self.challenge.algorithms != challenge.algorithms
            || self.challenge.anonymous != challenge.anonymous
    }
}

/// The first algorithm of PASSWORD-ALGORITHMS that is known here. Unknown ones are skipped by their length, which
/// `stun_types` cannot do.
fn first_known(mut offered: &[u8]) -> Option<KeyAlgorithm> {
    while let [a, b, c, d, rest @ ..] = offered {
        match u16::from_be_bytes([*a, *b]) {
            0x0001 => return Some(KeyAlgorithm::Md5),
            0x0002 => return Some(KeyAlgorithm::Sha256),
            _ => offered = rest.get(usize::from(u16::from_be_bytes([*c, *d])).next_multiple_of(4)..)?,
        }
    }
    None
}

/// The first eight of the nonce's 24 feature bits; 0 without the cookie.
fn security_features(nonce: &str) -> u8 {
    let encoded = nonce.strip_prefix(NONCE_COOKIE).and_then(|rest| rest.get(..4));
    let decoded = encoded.and_then(|text| base64::engine::general_purpose::STANDARD.decode(text).ok());
    decoded.and_then(|bytes| bytes.first().copied()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn security_features_are_read_from_the_nonce_cookie() {
        assert_eq!(security_features("obMatJos2gAAArest"), FEATURE_PASSWORD_ALGORITHMS);
        assert_eq!(security_features("obMatJos2QAAArest"), FEATURE_USERNAME_ANONYMITY);
        assert_eq!(security_features("obMatJos2AAAA//499k954d6OL34oL9FSTvy64sA"), 0);
        assert_eq!(security_features("obMatJos2"), 0);
        assert_eq!(security_features("obMatJos2\u{e4}\u{e4}\u{e4}"), 0);
        assert_eq!(security_features("gAAA"), 0);
    }

    #[test]
    fn the_first_known_password_algorithm_wins_and_unknown_ones_are_skipped() {
        assert_eq!(first_known(&[0, 2, 0, 0, 0, 1, 0, 0]), Some(KeyAlgorithm::Sha256));
        assert_eq!(first_known(&[0, 1, 0, 0, 0, 2, 0, 0]), Some(KeyAlgorithm::Md5));
        assert_eq!(first_known(&[0, 9, 0, 3, 1, 2, 3, 0, 0, 2, 0, 0]), Some(KeyAlgorithm::Sha256));
        assert_eq!(first_known(&[0, 9, 0, 0]), None);
        assert_eq!(first_known(&[0, 9, 0, 200, 0, 1]), None);
        assert_eq!(first_known(&[]), None);
    }
}
