//! X25519MLKEM768 (draft-ietf-tls-ecdhe-mlkem): ML-KEM-768 (FIPS 203) from libcrux, X25519 from ring.
//!
//! ```text
//!                 ML-KEM-768                X25519
//! client share    encapsulation key 1184    public key 32
//! server share    ciphertext 1088           public key 32
//! secret          shared key 32             shared secret 32
//! ```

use std::sync::LazyLock;

use libcrux_ml_kem::mlkem768::{
    self, MlKem768Ciphertext, MlKem768KeyPair, MlKem768PublicKey, decapsulate, encapsulate,
    validate_public_key,
};
use rustls::{
    Error, NamedGroup, PeerMisbehaved, ProtocolVersion,
    crypto::{
        ActiveKeyExchange, CompletedKeyExchange, SecureRandom, SharedSecret, SupportedKxGroup,
        ring::{self, kx_group::X25519},
    },
    ffdhe_groups::FfdheGroup,
};
use zeroize::Zeroizing;

const ENCAPSULATION_KEY: usize = 1184;
const CIPHERTEXT: usize = 1088;
const SHARED: usize = 32;

pub(crate) static X25519MLKEM768: &dyn SupportedKxGroup = &Hybrid;

static RANDOM: LazyLock<&'static dyn SecureRandom> = LazyLock::new(|| ring::default_provider().secure_random);

#[derive(Debug)]
struct Hybrid;

impl SupportedKxGroup for Hybrid {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        let mut seed = Zeroizing::new([0; 64]);
        RANDOM.fill(&mut *seed)?;
        let ml_kem = mlkem768::generate_key_pair(*seed);
        let x25519 = X25519.start()?;
        let share = [&ml_kem.pk()[..], x25519.pub_key()].concat();
        Ok(Box::new(Started { ml_kem, x25519, share }))
    }

    fn start_and_complete(&self, client: &[u8]) -> Result<CompletedKeyExchange, Error> {
        let (key, point) = split(client, ENCAPSULATION_KEY)?;
        let key = MlKem768PublicKey::try_from(key).ok().filter(validate_public_key);
        let key = key.ok_or(PeerMisbehaved::InvalidKeyShare)?;
        let x25519 = X25519.start_and_complete(point)?;
        let mut message = Zeroizing::new([0; 32]);
        RANDOM.fill(&mut *message)?;
        let (ciphertext, shared) = encapsulate(&key, *message);
        let shared = Zeroizing::new(shared);
        Ok(CompletedKeyExchange {
            group: self.name(),
            pub_key: [&ciphertext.as_slice()[..], &x25519.pub_key].concat(),
            secret: joined(&*shared, &x25519.secret),
        })
    }

    fn ffdhe_group(&self) -> Option<FfdheGroup<'static>> {
        None
    }

    fn name(&self) -> NamedGroup {
        NamedGroup::X25519MLKEM768
    }

    fn usable_for_version(&self, version: ProtocolVersion) -> bool {
        version == ProtocolVersion::TLSv1_3
    }
}

/// A client's key pair of each algorithm.
struct Started {
    ml_kem: MlKem768KeyPair,
    x25519: Box<dyn ActiveKeyExchange>,
    share: Vec<u8>,
}

impl ActiveKeyExchange for Started {
    fn complete(self: Box<Self>, server: &[u8]) -> Result<SharedSecret, Error> {
        let (ciphertext, point) = split(server, CIPHERTEXT)?;
        let x25519 = self.x25519.complete(point)?;
        let ciphertext = MlKem768Ciphertext::try_from(ciphertext);
        let ciphertext = ciphertext.map_err(|_| PeerMisbehaved::InvalidKeyShare)?;
        let shared = Zeroizing::new(decapsulate(self.ml_kem.private_key(), &ciphertext));
        Ok(joined(&*shared, &x25519))
    }

    /// Lets a server without ML-KEM choose X25519 without a second ClientHello.
    fn hybrid_component(&self) -> Option<(NamedGroup, &[u8])> {
        Some((self.x25519.group(), self.x25519.pub_key()))
    }

    fn complete_hybrid_component(self: Box<Self>, server: &[u8]) -> Result<SharedSecret, Error> {
        self.x25519.complete(server)
    }

    fn pub_key(&self) -> &[u8] {
        &self.share
    }

    fn ffdhe_group(&self) -> Option<FfdheGroup<'static>> {
        None
    }

    fn group(&self) -> NamedGroup {
        NamedGroup::X25519MLKEM768
    }
}

/// The ML-KEM and the X25519 part of a share.
fn split(share: &[u8], ml_kem: usize) -> Result<(&[u8], &[u8]), PeerMisbehaved> {
    let parts = share.split_at_checked(ml_kem).filter(|(_, point)| point.len() == SHARED);
    parts.ok_or(PeerMisbehaved::InvalidKeyShare)
}

fn joined(ml_kem: &[u8], x25519: &SharedSecret) -> SharedSecret {
    [ml_kem, x25519.secret_bytes()].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: usize = ENCAPSULATION_KEY + SHARED;

    #[test]
    fn both_sides_compute_the_same_secret() {
        let client = X25519MLKEM768.start().unwrap();
        assert_eq!(client.pub_key().len(), CLIENT);
        let server = X25519MLKEM768.start_and_complete(client.pub_key()).unwrap();
        assert_eq!(server.pub_key.len(), CIPHERTEXT + SHARED);
        let secret = client.complete(&server.pub_key).unwrap();
        assert_eq!(secret.secret_bytes(), server.secret.secret_bytes());
        assert_eq!(secret.secret_bytes().len(), 2 * SHARED);
    }

    #[test]
    fn x25519_is_the_second_half_of_share_and_secret() {
        let client = X25519MLKEM768.start().unwrap();
        let (group, point) = client.hybrid_component().unwrap();
        assert_eq!((group, point), (NamedGroup::X25519, &client.pub_key()[ENCAPSULATION_KEY..]));
        let plain = X25519.start_and_complete(point).unwrap();
        let secret = client.complete_hybrid_component(&plain.pub_key).unwrap();
        assert_eq!(secret.secret_bytes(), plain.secret.secret_bytes());

        let client = X25519MLKEM768.start().unwrap();
        let mut server = X25519MLKEM768.start_and_complete(client.pub_key()).unwrap();
        // A changed ciphertext decapsulates to another key (FIPS 203 section 6.3) but leaves X25519's part.
        server.pub_key[0] ^= 1;
        let secret = client.complete(&server.pub_key).unwrap();
        let (ours, theirs) = (secret.secret_bytes(), server.secret.secret_bytes());
        assert_ne!(ours[..SHARED], theirs[..SHARED]);
        assert_eq!(ours[SHARED..], theirs[SHARED..]);
    }

    #[test]
    fn invalid_shares_are_refused() {
        let good = X25519MLKEM768.start().unwrap().pub_key().to_vec();
        let refused = |share: &[u8]| {
            let error = X25519MLKEM768.start_and_complete(share).map(drop).unwrap_err();
            assert_eq!(error, PeerMisbehaved::InvalidKeyShare.into(), "{}", share.len());
        };
        refused(&[]);
        refused(&good[..CLIENT - 1]);
        refused(&good[..ENCAPSULATION_KEY]);
        refused(&[&good[..], &[0]].concat());
        // Coefficients above the modulus (FIPS 203 section 7.2).
        refused(&[&[0xFF; ENCAPSULATION_KEY], &good[ENCAPSULATION_KEY..]].concat());
        // A point of small order (RFC 7748 section 6.1).
        refused(&[&good[..ENCAPSULATION_KEY], &[0; SHARED]].concat());
        for len in [0, CIPHERTEXT, CIPHERTEXT + SHARED - 1, CIPHERTEXT + SHARED + 1] {
            let client = X25519MLKEM768.start().unwrap();
            let error = client.complete(&vec![9; len]).map(drop).unwrap_err();
            assert_eq!(error, PeerMisbehaved::InvalidKeyShare.into(), "{len}");
        }
    }

    #[test]
    fn tls_1_2_cannot_use_it() {
        assert!(!X25519MLKEM768.usable_for_version(ProtocolVersion::TLSv1_2));
    }
}
