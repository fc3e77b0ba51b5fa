//! Stateless nonces (RFC 8489 section 9.2). A nonce authenticates the client address it was issued to, the
//! time, and the security features announced; the server stores nothing.
//!
//! ```text
//!  obMatJos2  wAAA  AAAAAAAAAAA
//!  cookie     24    base64 of 8 bytes: the lower 18 bits of the time in seconds, 16 bits of salt, and
//!             bits  30 bits of HMAC-SHA256(key, time, salt, network, realm, features)
//! ```
//!
//! A 401 over UDP may go to a forged address, so the nonce is short. 30 bits of MAC suffice: guessing one for
//! a forged address takes 2^29 requests on average, the attacker never sees which guess was right, and a
//! correct guess only causes a query to the store. The 18 bits of time span three days.
//!
//! Clients must get distinct nonces (RFC 8489 section 9.2.4): the salt is the port, mixed with the interface
//! identifier of an IPv6 address. A nonce is nevertheless valid on every port and for the whole IPv6 /64: a
//! data connection (RFC 6062) and its control connection use different ports, and every NAT mapping has its
//! own port.

use std::net::{IpAddr, SocketAddr};

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use hmac::{Hmac, Mac as _};
use sha2::Sha256;
use subtle::ConstantTimeEq as _;

use crate::server::PrefixLengths;

/// Length in characters.
pub(crate) const LEN: usize = 24;

/// Length of nonces from version 0.1, which stay valid during an upgrade and in a fleet with both versions.
const LEN_0_1: usize = 28;

/// Offset of the base64 payload, after the cookie and the feature bits.
const RAW_AT: usize = 13;
const MAC_BITS: u32 = 30;
const SALT_BITS: u32 = 16;
const TIME_BITS: u32 = 64 - SALT_BITS - MAC_BITS;

/// "obMatJos2", then the security features in base64, 0xC00000: bit 0, password algorithms, and bit 1,
/// username anonymity, counted from the left (RFC 8489 section 18.1).
const COOKIE_WITH_ANONYMITY: &[u8; 13] = b"obMatJos2wAAA";

/// Password algorithms only: 0x800000.
const COOKIE: &[u8; 13] = b"obMatJos2gAAA";

/// Maximum number of seconds by which a nonce may lie in the future, because clocks in a fleet differ
/// slightly.
const SKEW: u32 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Issued by this server or fleet, and within its lifetime.
    Fresh,
    Stale,
    Foreign,
    /// Another worker or node owns the request's allocation, so that worker or node must check the nonce.
    ForOwner,
}

#[derive(Clone, Copy)]
pub(crate) struct Scope<'a> {
    pub(crate) key: &'a [u8; 32],
    pub(crate) client: IpAddr,
    pub(crate) realm: &'a str,
    /// PASSWORD-ALGORITHMS as announced. The MAC covers it, so a reload that changes it invalidates nonces.
    pub(crate) algorithms: &'a [u8],
    pub(crate) anonymity: bool,
}

impl Scope<'_> {
    pub(crate) fn issue(&self, unix: u64, salt: u16) -> [u8; LEN] {
        let time = truncate(unix);
        let mac = self.mac(time, Some(salt)) >> (64 - MAC_BITS);
        let raw = u64::from(time) << (64 - TIME_BITS) | u64::from(salt) << MAC_BITS | mac;
        let mut nonce = [0; LEN];
        nonce[..RAW_AT].copy_from_slice(self.cookie());
        // 8 bytes are encoded as 11 characters, exactly the space left after the cookie.
        let written = STANDARD_NO_PAD.encode_slice(raw.to_be_bytes(), &mut nonce[RAW_AT..]);
        debug_assert_eq!(written, Ok(LEN - RAW_AT));
        nonce
    }

    pub(crate) fn judge(&self, nonce: &[u8], unix: u64, lifetime: u32) -> Standing {
        let Some(opened) = open(nonce, unix).filter(|_| nonce.starts_with(self.cookie())) else {
            return Standing::Foreign;
        };
        let difference = (self.mac(opened.issued, opened.salt) ^ opened.mac) >> (64 - opened.mac_bits);
        if !bool::from(difference.ct_eq(&0)) {
            return Standing::Foreign;
        }
        // The difference wraps every 136 years. A nonce from the future, after the clock was set back, is stale.
        let age = truncate(unix).wrapping_sub(opened.issued);
        let ahead = age.wrapping_neg();
        if age <= lifetime || ahead <= SKEW { Standing::Fresh } else { Standing::Stale }
    }

    const fn cookie(&self) -> &'static [u8; 13] {
        if self.anonymity { COOKIE_WITH_ANONYMITY } else { COOKIE }
    }

    fn mac(&self, time: u32, salt: Option<u16>) -> u64 {
        let mut hmac = <Hmac<Sha256> as hmac::KeyInit>::new_from_slice(self.key)
            .expect("HMAC accepts keys of any length");
        hmac.update(&time.to_be_bytes());
        if let Some(salt) = salt {
            hmac.update(&salt.to_be_bytes());
        }
        hmac.update(&host(self.client));
        // Short enough to fit into one SHA-256 block together with a realm of up to 25 bytes. The length byte
        // delimits the realm.
        let [.., length] = self.algorithms.len().to_be_bytes();
        hmac.update(&[u8::from(self.anonymity), length]);
        hmac.update(self.algorithms);
        hmac.update(self.realm.as_bytes());
        let mac: [u8; 32] = hmac.finalize().into_bytes().into();
        let [b0, b1, b2, b3, b4, b5, b6, b7, ..] = mac;
        u64::from_be_bytes([b0, b1, b2, b3, b4, b5, b6, b7])
    }
}

/// Lower 32 bits of Unix seconds; the nonce must be known to be genuine.
pub(crate) fn issued(nonce: &[u8], unix: u64) -> Option<u32> {
    open(nonce, unix).map(|opened| opened.issued)
}

/// Issue time in Unix seconds; selects the key. A malformed nonce counts as current.
pub(crate) fn claimed(nonce: &[u8], unix: u64) -> u64 {
    let ahead = issued(nonce, unix).map_or(0, |issued| issued.wrapping_sub(truncate(unix)).cast_signed());
    unix.saturating_add_signed(ahead.into())
}

/// Distinguishes clients on one network.
pub(crate) fn salt(client: SocketAddr) -> u16 {
    let own = match client.ip() {
        IpAddr::V4(_) => [0; 4],
        IpAddr::V6(ip) => {
            let [_, _, _, _, own @ ..] = ip.segments();
            own
        }
    };
    own.iter().fold(client.port(), |salt, part| salt.rotate_left(3) ^ part)
}

struct OpenedNonce {
    issued: u32,
    /// `None` in nonces of version 0.1.
    salt: Option<u16>,
    /// Leading `mac_bits` of the HMAC, then zeros.
    mac: u64,
    mac_bits: u32,
}

/// A nonce contains only the lower 18 bits of its time; the upper bits are those that bring it closest to
/// `unix`.
fn open(nonce: &[u8], unix: u64) -> Option<OpenedNonce> {
    match nonce.len() {
        LEN => {
            let mut raw = [0; 8];
            let read = STANDARD_NO_PAD.decode_slice(&nonce[RAW_AT..], &mut raw).ok()?;
            (read == raw.len()).then_some(())?;
            let raw = u64::from_be_bytes(raw);
            let now = truncate(unix);
            // Sign-extends the 18-bit difference.
            let ahead = truncate(raw >> (64 - TIME_BITS)).wrapping_sub(now) << (32 - TIME_BITS);
            let ahead = ahead.cast_signed() >> (32 - TIME_BITS);
            let issued = now.wrapping_add_signed(ahead);
            // 16 bits between the time and the MAC.
            let [s0, s1, ..] = (raw << TIME_BITS).to_be_bytes();
            let salt = u16::from_be_bytes([s0, s1]);
            Some(OpenedNonce { issued, salt: Some(salt), mac: raw << (64 - MAC_BITS), mac_bits: MAC_BITS })
        }
        LEN_0_1 => {
            let mut raw = [0; 11];
            let read = STANDARD_NO_PAD.decode_slice(&nonce[RAW_AT..], &mut raw).ok()?;
            (read == raw.len()).then_some(())?;
            let [t0, t1, t2, t3, m0, m1, m2, m3, m4, m5, m6] = raw;
            let issued = u32::from_be_bytes([t0, t1, t2, t3]);
            Some(OpenedNonce {
                issued,
                salt: None,
                mac: u64::from_be_bytes([m0, m1, m2, m3, m4, m5, m6, 0]),
                mac_bits: 56,
            })
        }
        _ => None,
    }
}

/// The client's IPv4 address or IPv6 /64. IPv4 is mapped into IPv6, so the two never collide.
fn host(ip: IpAddr) -> [u8; 16] {
    match PrefixLengths::HOST.of(ip) {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "only differences between times matter")]
pub(crate) const fn truncate(unix: u64) -> u32 {
    unix as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(key: &[u8; 32]) -> Scope<'_> {
        Scope {
            key,
            client: "192.0.2.1".parse().unwrap(),
            realm: "example.org",
            algorithms: &[0, 2, 0, 0],
            anonymity: true,
        }
    }

    #[test]
    fn a_nonce_is_fresh_for_its_lifetime_and_stale_afterwards() {
        let key = [7; 32];
        let scope = scope(&key);
        let nonce = scope.issue(5_000_000_000, 40_000);
        assert_eq!(scope.judge(&nonce, 5_000_000_000, 3600), Standing::Fresh);
        assert_eq!(scope.judge(&nonce, 5_000_003_600, 3600), Standing::Fresh);
        assert_eq!(scope.judge(&nonce, 5_000_003_601, 3600), Standing::Stale);
    }

    #[test]
    fn a_nonce_from_a_slightly_faster_clock_is_fresh() {
        let key = [7; 32];
        let scope = scope(&key);
        let nonce = scope.issue(1000, 40_000);
        assert_eq!(scope.judge(&nonce, 990, 3600), Standing::Fresh);
        assert_eq!(scope.judge(&nonce, 989, 3600), Standing::Stale);
    }

    #[test]
    fn claimed_time_is_the_time_of_issue() {
        let key = [7; 32];
        for (issued, now) in
            [(1_800_000_000, 1_800_003_600), (1_800_000_005, 1_800_000_000), (5_000_000_000, 5_000_000_009)]
        {
            assert_eq!(claimed(&scope(&key).issue(issued, 40_000), now), issued);
        }
        assert_eq!(claimed(b"none", 7), 7);
    }

    #[test]
    fn a_nonce_is_valid_for_one_key_address_realm_and_algorithm_set() {
        let key = [7; 32];
        let scope = scope(&key);
        let nonce = scope.issue(1000, 40_000);
        let others = [
            Scope { key: &[8; 32], ..scope },
            Scope { client: "192.0.2.2".parse().unwrap(), ..scope },
            Scope { client: "::c000:201".parse().unwrap(), ..scope },
            Scope { realm: "example.com", ..scope },
            Scope { algorithms: &[0, 1, 0, 0], ..scope },
            Scope { anonymity: false, ..scope },
        ];
        for other in others {
            assert_eq!(other.judge(&nonce, 1000, 3600), Standing::Foreign);
        }
    }

    /// RFC 8489 section 9.2.4.
    #[test]
    fn ports_get_distinct_nonces_that_are_valid_on_all_ports() {
        let key = [7; 32];
        let scope = scope(&key);
        let issue = |port| scope.issue(1000, salt(SocketAddr::new(scope.client, port)));
        let nonces: std::collections::HashSet<_> = (0..=u16::MAX).map(issue).collect();
        assert_eq!(nonces.len(), 1 << 16);
        assert!(
            [0, 1, 40_000, u16::MAX].map(issue).iter().all(|it| scope.judge(it, 1000, 9) == Standing::Fresh)
        );
        let of = |ip: &str| salt(SocketAddr::new(ip.parse().unwrap(), 40_000));
        assert_ne!(of("2001:db8::1"), of("2001:db8::2"));
        assert_eq!(of("2001:db8::1"), of("2001:db8:1::1"), "the nonces differ in the MAC");
    }

    #[test]
    fn a_nonce_is_valid_within_its_ipv6_subnet_only() {
        let key = [7; 32];
        let of = |client: &str| Scope { client: client.parse().unwrap(), ..scope(&key) };
        let nonce = of("2001:db8:0:1::a").issue(1000, 40_000);
        for (client, standing) in [
            ("2001:db8:0:1:ffff:ffff:ffff:ffff", Standing::Fresh),
            ("2001:db8:0:2::a", Standing::Foreign),
            ("2001:db8:0:0:ffff:ffff:ffff:ffff", Standing::Foreign),
        ] {
            assert_eq!(of(client).judge(&nonce, 1000, 3600), standing, "{client}");
        }
    }

    #[test]
    fn a_nonce_encodes_its_time_of_issue() {
        let key = [7; 32];
        for now in [1_800_000_000, 1_800_000_000 + 36 * 3600, 1_800_000_000 - 9] {
            assert_eq!(issued(&scope(&key).issue(1_800_000_000, 40_000), now), Some(1_800_000_000));
        }
        assert_eq!(issued(b"none", 1_800_000_000), None);
        assert_eq!(scope(&key).judge(b"none", 1000, 3600), Standing::Foreign);
    }

    #[test]
    fn a_nonce_of_version_0_1_is_valid_until_stale() {
        let (key, then) = ([7; 32], 1_800_000_000);
        let scope = scope(&key);
        let nonce = b"obMatJos2wAAAa0nSALyiOc7Gf5k";
        assert_eq!(scope.judge(nonce, then + 3600, 3600), Standing::Fresh);
        assert_eq!(scope.judge(nonce, then + 3601, 3600), Standing::Stale);
        assert_eq!(issued(nonce, then + 9), Some(1_800_000_000));
        assert_eq!(Scope { key: &[8; 32], ..scope }.judge(nonce, then, 3600), Standing::Foreign);
    }

    #[test]
    fn a_nonce_older_than_its_time_bits_can_express_is_invalid() {
        let key = [7; 32];
        let scope = scope(&key);
        let nonce = scope.issue(1_800_000_000, 40_000);
        for span in 1..20 {
            assert_eq!(scope.judge(&nonce, 1_800_000_000 + (span << TIME_BITS), 3600), Standing::Foreign);
        }
    }

    #[test]
    fn a_nonce_announces_the_offered_security_features() {
        use base64::engine::general_purpose::STANDARD;
        let key = [7; 32];
        for (anonymity, features) in [(true, [0xC0, 0, 0]), (false, [0x80, 0, 0])] {
            let nonce = Scope { anonymity, ..scope(&key) }.issue(1000, 40_000);
            assert_eq!(STANDARD.decode(&nonce[9..13]).unwrap(), features);
        }
    }

    #[test]
    fn changing_any_character_invalidates_a_nonce() {
        let key = [7; 32];
        let scope = scope(&key);
        let nonce = scope.issue(1000, 40_000);
        for at in 0..LEN {
            let mut forged = nonce;
            forged[at] = if forged[at] == b'A' { b'B' } else { b'A' };
            assert_eq!(scope.judge(&forged, 1000, 3600), Standing::Foreign, "character {at}");
        }
        assert_eq!(scope.judge(&nonce[..LEN - 1], 1000, 3600), Standing::Foreign);
        assert_eq!(scope.judge(b"", 1000, 3600), Standing::Foreign);
    }
}
