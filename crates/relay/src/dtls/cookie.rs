//! Stateless cookies, which prove a client's address before any state is kept (RFC 6347 section 4.2.1, RFC
//! 9147 section 5.1). A cookie consists of the time, the padding length of the first ClientHello, and a MAC
//! over both, the client's address and the first ClientHello: in DTLS 1.3 the complete message, which the
//! transcript hash needs; in DTLS 1.2 only the part before the cookie, so that the first fragment is enough.
//! All workers and nodes of a fleet accept each other's cookies, because a load balancer may send the second
//! ClientHello to another node, and DTLS 1.3 does not allow a third (RFC 8446 section 4.1.4).

use std::net::{IpAddr, SocketAddr};

use hmac::{Hmac, KeyInit as _, Mac};
use sha2::Sha256;
use turnpike_turn::server::{Client, NonceKeys};

use super::hello::{COOKIE_LEN, Cookie, Hello, Version};

/// Validity in seconds; clients retransmit a ClientHello for this long.
const LIFETIME: u32 = 60;
/// Tolerated clock difference between nodes in seconds.
const SKEW: u32 = 10;
/// Number of bytes for time and padding length; the MAC fills the rest.
const PREFIX: usize = 6;
const NO_PADDING: u16 = u16::MAX;

pub(super) struct CookieKeys(NonceKeys);

impl CookieKeys {
    pub(super) fn new(keys: NonceKeys) -> Self {
        Self(keys)
    }

    pub(super) fn make(&self, unix: u64, client: &Client, hello: &Hello<'_>, first: &mut Vec<u8>) -> Cookie {
        let padding = hello.padding();
        hello.write_first(padding, first);
        let padding = padding.and_then(|len| u16::try_from(len).ok()).unwrap_or(NO_PADDING);
        self.finish(unix, prefix(unix, padding), client, covered(hello, first))
    }

    pub(super) fn make_for_fragment(&self, unix: u64, client: &Client, before_cookie: &[u8]) -> Cookie {
        self.finish(unix, prefix(unix, NO_PADDING), client, (Version::V12, before_cookie))
    }

    /// Returns the cookie of a second ClientHello if it is valid for this client. Writes the body of the
    /// first ClientHello to `first`.
    pub(super) fn check(
        &self,
        unix: u64,
        client: &Client,
        hello: &Hello<'_>,
        first: &mut Vec<u8>,
    ) -> Option<Cookie> {
        let (cookie, made) = read(unix, hello.cookie?)?;
        let padding = u16::from_be_bytes([cookie[4], cookie[5]]);
        // No accepted ClientHello can have had more padding, and a forged length must not make us write more.
        if padding != NO_PADDING && usize::from(padding) > super::hello::MAX_HELLO {
            return None;
        }
        hello.write_first((padding != NO_PADDING).then_some(usize::from(padding)), first);
        self.verify(made, cookie, client, covered(hello, first)).then_some(*cookie)
    }

    pub(super) fn check_fragment(
        &self,
        unix: u64,
        client: &Client,
        before_cookie: &[u8],
        cookie: &[u8],
    ) -> bool {
        read(unix, cookie)
            .is_some_and(|(cookie, made)| self.verify(made, cookie, client, (Version::V12, before_cookie)))
    }

    fn verify(&self, made: u64, cookie: &Cookie, client: &Client, covered: (Version, &[u8])) -> bool {
        let [a, b, c, d, e, f, ..] = *cookie;
        let expected = self.finish(made, [a, b, c, d, e, f], client, covered);
        subtle::ConstantTimeEq::ct_eq(&expected[..], &cookie[..]).into()
    }

    /// The MAC does not cover our own address, which differs between the nodes behind a load balancer.
    fn finish(
        &self,
        made: u64,
        prefix: [u8; PREFIX],
        client: &Client,
        (version, hello): (Version, &[u8]),
    ) -> Cookie {
        let mut own = hmac(&self.0.at(made).0);
        own.update(b"turnpike DTLS cookie");
        let mut mac = hmac(&own.finalize().into_bytes());
        mac.update(&prefix);
        mac.update(&client.listener.0.to_be_bytes());
        update_with(&mut mac, client.address);
        mac.update(&[match version {
            Version::V12 => 12,
            Version::V13 => 13,
        }]);
        mac.update(hello);
        let mac = mac.finalize().into_bytes();
        let mut cookie = [0; COOKIE_LEN];
        cookie[..PREFIX].copy_from_slice(&prefix);
        cookie[PREFIX..].copy_from_slice(&mac[..COOKIE_LEN - PREFIX]);
        cookie
    }
}

fn covered<'a>(hello: &Hello<'a>, first: &'a [u8]) -> (Version, &'a [u8]) {
    match hello.version {
        Version::V12 => (Version::V12, hello.before_cookie()),
        Version::V13 => (Version::V13, first),
    }
}

fn prefix(unix: u64, padding: u16) -> [u8; PREFIX] {
    let ([a, b, c, d], [e, f]) = (low(unix).to_be_bytes(), padding.to_be_bytes());
    [a, b, c, d, e, f]
}

fn read(unix: u64, cookie: &[u8]) -> Option<(&Cookie, u64)> {
    let cookie: &Cookie = cookie.try_into().ok()?;
    let age = low(unix).wrapping_sub(u32::from_be_bytes([cookie[0], cookie[1], cookie[2], cookie[3]]));
    let good = age <= LIFETIME || age.wrapping_neg() <= SKEW;
    good.then(|| (cookie, unix.saturating_add_signed(i64::from(age.wrapping_neg().cast_signed()))))
}

#[expect(clippy::expect_used, reason = "HMAC takes keys of any length")]
fn hmac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length")
}

#[expect(clippy::cast_possible_truncation, reason = "only differences matter")]
const fn low(unix: u64) -> u32 {
    unix as u32
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
    use turnpike_turn::server::{ListenerId, NonceKey};

    use super::*;
    use crate::dtls::hello::write_packet;

    fn random() -> CookieKeys {
        CookieKeys::new(NonceKey(rand::random()).into())
    }

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

    /// A cookie starts with the unencrypted time and padding length, which are not random.
    #[test]
    fn secret_part_of_cookies_is_random() {
        let (key, mut first, mut packet) = (random(), Vec::new(), Vec::new());
        write_packet(0, 0, &body(&[]), &mut packet);
        let hello = Hello::parse(&packet).unwrap();
        let mask = [[0; PREFIX].as_slice(), &[0xFF; COOKIE_LEN - PREFIX]].concat();
        let ports = (0..).take(randomness::SAMPLES);
        let of_clients: Vec<_> =
            ports.map(|port| key.make(100, &client(port), &hello, &mut first).to_vec()).collect();
        randomness::judge(&of_clients, &mask).unwrap();
        let of_keys = std::iter::repeat_with(|| random().make(100, &client(1), &hello, &mut first).to_vec());
        randomness::judge(&of_keys.take(randomness::SAMPLES).collect::<Vec<_>>(), &mask).unwrap();
    }

    #[test]
    fn cookie_is_bound_to_client_hello_time_and_key() {
        let (key, mut first, mut packet) = (random(), Vec::new(), Vec::new());
        write_packet(0, 0, &body(&[]), &mut packet);
        let cookie = key.make(100, &client(1), &Hello::parse(&packet).unwrap(), &mut first);
        assert_eq!(first, body(&[]));
        write_packet(1, 0, &body(&cookie), &mut packet);
        let hello = Hello::parse(&packet).unwrap();
        let mut check = |key: &CookieKeys, now, port| key.check(now, &client(port), &hello, &mut first);
        assert_eq!(check(&key, 100, 1), Some(cookie));
        assert_eq!(check(&key, 100 + u64::from(LIFETIME), 1), Some(cookie));
        assert_eq!(check(&key, 101 + u64::from(LIFETIME), 1), None, "too old");
        assert_eq!(check(&key, 90, 1), Some(cookie), "created by a clock that is slightly ahead");
        assert_eq!(check(&key, 89, 1), None, "created too far in the future");
        assert_eq!(check(&key, 100, 2), None, "another port");
        assert_eq!(check(&random(), 100, 1), None);
        assert_eq!(first, body(&[]));

        for at in 0..COOKIE_LEN {
            let mut forged = cookie;
            forged[at] ^= 1;
            write_packet(1, 0, &body(&forged), &mut packet);
            assert_eq!(key.check(100, &client(1), &Hello::parse(&packet).unwrap(), &mut first), None, "{at}");
        }
        let mut other = body(&cookie);
        other[3] ^= 1;
        write_packet(1, 0, &other, &mut packet);
        assert_eq!(key.check(100, &client(1), &Hello::parse(&packet).unwrap(), &mut first), None);
    }

    #[test]
    fn first_fragment_and_whole_hello_have_the_same_cookie() {
        let (key, mut first, mut packet) = (random(), Vec::new(), Vec::new());
        write_packet(0, 0, &body(&[]), &mut packet);
        let hello = Hello::parse(&packet).unwrap();
        let cookie = key.make(100, &client(1), &hello, &mut first);
        assert_eq!(key.make_for_fragment(100, &client(1), hello.before_cookie()), cookie);
        let check = |unix, port, cookie: &[u8]| {
            key.check_fragment(unix, &client(port), hello.before_cookie(), cookie)
        };
        assert!(check(101, 1, &cookie));
        assert!(!check(101, 2, &cookie), "another port");
        assert!(!check(161, 1, &cookie), "too old");
        assert!(!check(101, 1, &cookie[..31]) && !check(101, 1, &[0; COOKIE_LEN]));
    }

    #[test]
    fn cookies_of_other_nodes_and_rotated_keys_are_valid() {
        let key = |byte| NonceKey([byte; 32]);
        let keys = || CookieKeys::new(NonceKeys::new(key(1), [(100, key(2))]));
        let (mut first, mut packet) = (Vec::new(), Vec::new());
        write_packet(0, 0, &body(&[]), &mut packet);
        for made in [99, 100, 101] {
            let cookie = keys().make(made, &client(1), &Hello::parse(&packet).unwrap(), &mut first);
            let mut second = Vec::new();
            write_packet(1, 0, &body(&cookie), &mut second);
            let elsewhere = Client { local: ([192, 0, 2, 77], 5349).into(), ..client(1) };
            for now in [made, made + 5] {
                let hello = Hello::parse(&second).unwrap();
                assert_eq!(
                    keys().check(now, &elsewhere, &hello, &mut first),
                    Some(cookie),
                    "created at {made}, checked at {now}"
                );
            }
        }
    }
}
