//! Cookies: a client must show that it hears us at its address before anything is kept for it (RFC 6347 section 4.2.1, RFC 9147
//! section 5.1). A cookie is the time, what cannot be told from a second ClientHello about the first, and a MAC over both, the
//! addresses and the first ClientHello. Nothing is remembered.

use std::net::{IpAddr, SocketAddr};

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use turnpike_turn::server::Client;
use zeroize::ZeroizeOnDrop;

use super::hello::{Hello, Version};

/// dimpl knows cookies of this length only.
pub(super) const COOKIE_LEN: usize = 32;
/// Seconds for which a cookie is good: as long as clients repeat a ClientHello.
const LIFETIME: u32 = 60;
/// Time, padding; the MAC takes the rest.
const PREFIX: usize = 6;
const NO_PADDING: u16 = u16::MAX;

pub(super) type Cookie = [u8; COOKIE_LEN];

/// What cookies are made and checked with. It goes along where the sockets go to another process; overwritten when dropped.
#[derive(Clone, Serialize, Deserialize, ZeroizeOnDrop)]
#[serde(transparent)]
pub(crate) struct CookieKey([u8; 32]);

impl CookieKey {
    pub(super) fn random() -> Self {
        Self(rand::random())
    }

    /// A cookie for a ClientHello without one; `first` becomes its body.
    pub(super) fn make(&self, now_s: u32, client: &Client, hello: &Hello<'_>, first: &mut Vec<u8>) -> Cookie {
        let padding = hello.padding();
        hello.write_first(padding, first);
        let padding = padding.and_then(|len| u16::try_from(len).ok()).unwrap_or(NO_PADDING);
        let mut prefix = [0; PREFIX];
        prefix[..4].copy_from_slice(&now_s.to_be_bytes());
        prefix[4..].copy_from_slice(&padding.to_be_bytes());
        self.finish(prefix, client, hello, first)
    }

    /// The cookie of a ClientHello, if it is one of ours for this client and the first ClientHello, whose body `first` becomes.
    pub(super) fn check(
        &self,
        now_s: u32,
        client: &Client,
        hello: &Hello<'_>,
        first: &mut Vec<u8>,
    ) -> Option<Cookie> {
        let cookie: &Cookie = hello.cookie?.try_into().ok()?;
        let prefix: [u8; PREFIX] = cookie[..PREFIX].try_into().ok()?;
        let made = u32::from_be_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]);
        if now_s.checked_sub(made)? > LIFETIME {
            return None;
        }
        let padding = u16::from_be_bytes([prefix[4], prefix[5]]);
        // More than any ClientHello had that was answered: nobody is to make us write it.
        if padding != NO_PADDING && usize::from(padding) > super::hello::MAX_HELLO {
            return None;
        }
        hello.write_first((padding != NO_PADDING).then_some(usize::from(padding)), first);
        let expected = self.finish(prefix, client, hello, first);
        let same: bool = subtle::ConstantTimeEq::ct_eq(&expected[..], &cookie[..]).into();
        same.then_some(expected)
    }

    fn finish(&self, prefix: [u8; PREFIX], client: &Client, hello: &Hello<'_>, first: &[u8]) -> Cookie {
        #[expect(clippy::expect_used, reason = "HMAC takes keys of any length")]
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(&prefix);
        mac.update(&client.listener.0.to_be_bytes());
        for address in [client.address, client.local] {
            update_with(&mut mac, address);
        }
        match hello.version {
            Version::V12 => {
                mac.update(&[12]);
                for part in hello.fixed_parts() {
                    mac.update(part);
                }
            }
            Version::V13 => {
                mac.update(&[13]);
                mac.update(first);
            }
        }
        let mac = mac.finalize().into_bytes();
        let mut cookie = [0; COOKIE_LEN];
        cookie[..PREFIX].copy_from_slice(&prefix);
        cookie[PREFIX..].copy_from_slice(&mac[..COOKIE_LEN - PREFIX]);
        cookie
    }
}

fn update_with(mac: &mut Hmac<Sha256>, address: SocketAddr) {
    match address.ip() {
        IpAddr::V4(ip) => mac.update(&ip.octets()),
        IpAddr::V6(ip) => mac.update(&ip.octets()),
    }
    mac.update(&address.port().to_be_bytes());
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::randomness;
    use turnpike_turn::server::ListenerId;

    use super::*;
    use crate::dtls::hello::write_packet;

    fn body(cookie: &[u8]) -> Vec<u8> {
        let length = u8::try_from(cookie.len()).unwrap();
        [&[0xFE, 0xFD][..], &[7; 32], &[0, length], cookie, &[0, 2, 0xC0, 0x2B, 1, 0]].concat()
    }

    fn client(port: u16) -> Client {
        Client {
            listener: ListenerId(3),
            address: ([192, 0, 2, 1], port).into(),
            local: ([192, 0, 2, 9], 5349).into(),
        }
    }

    /// Time and padding stand in front, for everybody to read.
    #[test]
    fn the_secret_part_of_cookies_is_as_if_by_chance() {
        let (key, mut first, mut packet) = (CookieKey::random(), Vec::new(), Vec::new());
        write_packet(0, &body(&[]), &mut packet);
        let hello = Hello::parse(&packet).unwrap();
        let mask = [[0; PREFIX].as_slice(), &[0xFF; COOKIE_LEN - PREFIX]].concat();
        let ports = (0..).take(randomness::SAMPLES);
        let of_clients: Vec<_> =
            ports.map(|port| key.make(100, &client(port), &hello, &mut first).to_vec()).collect();
        randomness::judge(&of_clients, &mask).unwrap();
        let of_keys =
            std::iter::repeat_with(|| CookieKey::random().make(100, &client(1), &hello, &mut first).to_vec());
        randomness::judge(&of_keys.take(randomness::SAMPLES).collect::<Vec<_>>(), &mask).unwrap();
    }

    #[test]
    fn a_cookie_is_good_for_its_client_its_hello_its_time_and_our_key_only() {
        let (key, mut first, mut packet) = (CookieKey::random(), Vec::new(), Vec::new());
        write_packet(0, &body(&[]), &mut packet);
        let cookie = key.make(100, &client(1), &Hello::parse(&packet).unwrap(), &mut first);
        assert_eq!(first, body(&[]));
        write_packet(1, &body(&cookie), &mut packet);
        let hello = Hello::parse(&packet).unwrap();
        let mut check = |key: &CookieKey, now, port| key.check(now, &client(port), &hello, &mut first);
        assert_eq!(check(&key, 100, 1), Some(cookie));
        assert_eq!(check(&key, 100 + LIFETIME, 1), Some(cookie));
        assert_eq!(check(&key, 101 + LIFETIME, 1), None, "too old");
        assert_eq!(check(&key, 99, 1), None, "from the future");
        assert_eq!(check(&key, 100, 2), None, "another port");
        assert_eq!(check(&CookieKey::random(), 100, 1), None);
        assert_eq!(first, body(&[]));

        for at in 0..COOKIE_LEN {
            let mut forged = cookie;
            forged[at] ^= 1;
            write_packet(1, &body(&forged), &mut packet);
            assert_eq!(key.check(100, &client(1), &Hello::parse(&packet).unwrap(), &mut first), None, "{at}");
        }
        let mut other = body(&cookie);
        *other.last_mut().unwrap() = 1;
        write_packet(1, &other, &mut packet);
        assert_eq!(key.check(100, &client(1), &Hello::parse(&packet).unwrap(), &mut first), None);
    }
}
