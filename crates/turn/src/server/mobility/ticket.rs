//! Mobility tickets (RFC 8016 section 3.3) contain the node, the allocation and the number of moves. They are
//! encrypted and authenticated, so that clients can neither read nor forge them. All workers, and all nodes
//! of a fleet, share the keys.
//!
//! ```text
//!  0                16                                       32
//!  ┌────────────────┬────────────────────────────────────────┐
//!  │ MAC, 16 bytes  │ key 52 · node 12 · counter 32 · pad 32 │  bits; the second half XORed with HMAC(key, MAC)
//!  └────────────────┴────────────────────────────────────────┘
//! ```
//!
//! The MAC of the plain text is the nonce of its encryption (the SIV construction, RFC 5297). So encoding a
//! ticket twice gives the same bytes, as retransmissions require, and needs no random number. The pad is the
//! first number that leaves no zero byte in the ticket: coturn's client keeps tickets as C strings of at most
//! 32 characters.

use hmac::{Hmac, Mac as _};
use sha2::Sha256;
use subtle::ConstantTimeEq as _;

/// Length in bytes; short enough that responses are not fragmented (section 3.1.2).
pub(crate) const LEN: usize = 32;
const HALF: usize = LEN / 2;

/// Maximum number of pads to try. Seven out of eight pads leave no zero byte.
const PADS: u32 = 1 << 12;

const NODE_BITS: u32 = 12;
pub(crate) const KEY_BITS: u32 = 64 - NODE_BITS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// The allocation's key, the same on every worker; [`KEY_BITS`] bits.
    pub(crate) key: u64,
    /// 0 without a fleet.
    pub(crate) node: u16,
    /// Incremented with each ticket.
    pub(crate) counter: u32,
}

impl Ticket {
    pub(crate) fn seal(self, secret: &[u8; 32]) -> [u8; LEN] {
        let mut plain = [0; HALF];
        plain[..8].copy_from_slice(&(self.key << NODE_BITS | u64::from(self.node)).to_be_bytes());
        plain[8..12].copy_from_slice(&self.counter.to_be_bytes());
        let secret = own_key(secret);
        let mut sealed = [0; LEN];
        for pad in 0..PADS {
            plain[12..].copy_from_slice(&pad.to_be_bytes());
            let mac = mac(&secret, b"mac", &plain);
            sealed[..HALF].copy_from_slice(&mac);
            sealed[HALF..].copy_from_slice(&xor(plain, mac_stream(&secret, &mac)));
            if !sealed.contains(&0) {
                break;
            }
        }
        sealed
    }

    /// Decrypts a ticket; `None` if it is not genuine.
    pub(crate) fn open(sealed: &[u8], secret: &[u8; 32]) -> Option<Self> {
        let sealed: &[u8; LEN] = sealed.try_into().ok()?;
        let (given, cipher) = (sealed.first_chunk::<HALF>()?, sealed.last_chunk::<HALF>()?);
        let secret = own_key(secret);
        let plain = xor(*cipher, mac_stream(&secret, given));
        if !bool::from(mac(&secret, b"mac", &plain).ct_eq(given)) {
            return None;
        }
        // Earlier versions put two worker numbers into the pad.
        let [k0, k1, k2, k3, k4, k5, k6, k7, c0, c1, c2, c3, ..] = plain;
        let key = u64::from_be_bytes([k0, k1, k2, k3, k4, k5, k6, k7]);
        Some(Self {
            key: key >> NODE_BITS,
            node: (key & ((1 << NODE_BITS) - 1)) as u16,
            counter: u32::from_be_bytes([c0, c1, c2, c3]),
        })
    }
}

fn own_key(secret: &[u8; 32]) -> [u8; 32] {
    hmac(secret, &[b"turnpike mobility ticket"])
}

fn mac_stream(secret: &[u8; 32], mac: &[u8; HALF]) -> [u8; HALF] {
    self::mac(secret, b"stream", mac)
}

fn mac(secret: &[u8; 32], purpose: &[u8], bytes: &[u8; HALF]) -> [u8; HALF] {
    let mut short = [0; HALF];
    short.copy_from_slice(&hmac(secret, &[purpose, bytes])[..HALF]);
    short
}

fn hmac(secret: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    let mut hmac =
        <Hmac<Sha256> as hmac::KeyInit>::new_from_slice(secret).expect("HMAC accepts keys of any length");
    for part in parts {
        hmac.update(part);
    }
    hmac.finalize().into_bytes().into()
}

fn xor(mut bytes: [u8; HALF], with: [u8; HALF]) -> [u8; HALF] {
    for (byte, with) in bytes.iter_mut().zip(with) {
        *byte ^= with;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TICKET: Ticket = Ticket { key: 0x1_0203_0405_0607, node: 4095, counter: 7 };

    #[test]
    fn altered_or_truncated_tickets_are_rejected() {
        let sealed = TICKET.seal(&[7; 32]);
        assert_eq!(Ticket::open(&sealed, &[7; 32]), Some(TICKET));
        assert_eq!(Ticket::open(&sealed, &[8; 32]), None);
        for bit in 0..LEN * 8 {
            let mut forged = sealed;
            forged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Ticket::open(&forged, &[7; 32]), None, "bit {bit}");
        }
        for length in 0..LEN {
            assert_eq!(Ticket::open(&sealed[..length], &[7; 32]), None);
        }
        assert_eq!(Ticket::open(&[&sealed[..], &[0]].concat(), &[7; 32]), None);
    }

    #[test]
    fn a_ticket_of_an_earlier_version_can_be_opened() {
        let secret = [7; 32];
        let own = own_key(&secret);
        let mut plain = [0; HALF];
        plain[..8].copy_from_slice(&(TICKET.key << NODE_BITS | u64::from(TICKET.node)).to_be_bytes());
        plain[8..12].copy_from_slice(&TICKET.counter.to_be_bytes());
        plain[12..].copy_from_slice(&(3_u32 << 22 | 1023 << 12 | 5).to_be_bytes());
        let mac = mac(&own, b"mac", &plain);
        let sealed = [mac, xor(plain, mac_stream(&own, &mac))].concat();
        assert_eq!(Ticket::open(&sealed, &secret), Some(TICKET));
    }

    #[test]
    fn tickets_of_one_allocation_differ_in_both_halves() {
        let one = TICKET.seal(&[7; 32]);
        let next = Ticket { counter: 8, ..TICKET }.seal(&[7; 32]);
        assert_ne!(one[..HALF], next[..HALF]);
        assert_ne!(one[HALF..], next[HALF..]);
        assert!(!one.windows(6).any(|window| window == &TICKET.key.to_be_bytes()[2..]));
    }

    proptest! {
        #[test]
        fn sealed_tickets_can_be_opened(
            key in 0..1_u64 << KEY_BITS,
            node in 0_u16..1 << NODE_BITS,
            counter: u32,
            secret: [u8; 32],
        ) {
            let ticket = Ticket { key, node, counter };
            let sealed = ticket.seal(&secret);
            prop_assert_eq!(Ticket::open(&sealed, &secret), Some(ticket));
            prop_assert!(!sealed.contains(&0));
        }

        #[test]
        fn arbitrary_bytes_cannot_be_opened(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(Ticket::open(&bytes, &[7; 32]), None);
        }
    }
}
