//! Cryptography of TLS servers and clients: ring, plus the post-quantum key exchange X25519MLKEM768, which ring
//! lacks.
#![forbid(unsafe_code)]

mod hybrid;

use rustls::{
    CommonState, NamedGroup,
    crypto::{CryptoProvider, ring},
};
use strum::{IntoStaticStr, VariantArray};

/// Provider whose clients offer X25519MLKEM768 first, with a share for plain X25519 next to it.
#[must_use]
pub fn provider() -> CryptoProvider {
    let mut provider = ring::default_provider();
    provider.kx_groups.insert(0, hybrid::X25519MLKEM768);
    provider
}

/// Groups of [`provider`], by their IANA names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[repr(u8)]
pub enum KeyExchangeGroup {
    #[strum(serialize = "X25519MLKEM768")]
    X25519MlKem768,
    X25519,
    #[strum(serialize = "secp256r1")]
    Secp256r1,
    #[strum(serialize = "secp384r1")]
    Secp384r1,
}

impl KeyExchangeGroup {
    /// Group of a finished handshake; `None` for a resumed TLS 1.2 session, which exchanges no keys.
    #[must_use]
    pub fn of(connection: &CommonState) -> Option<Self> {
        match connection.negotiated_key_exchange_group()?.name() {
            NamedGroup::X25519MLKEM768 => Some(Self::X25519MlKem768),
            NamedGroup::X25519 => Some(Self::X25519),
            NamedGroup::secp256r1 => Some(Self::Secp256r1),
            NamedGroup::secp384r1 => Some(Self::Secp384r1),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_of_the_provider_has_a_name() {
        let offered: Vec<String> =
            provider().kx_groups.iter().map(|group| format!("{:?}", group.name())).collect();
        let named: Vec<&str> = KeyExchangeGroup::VARIANTS.iter().map(<&str>::from).collect();
        assert_eq!(offered, named);
    }
}
