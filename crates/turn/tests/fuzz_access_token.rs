//! Fuzz target: ACCESS-TOKEN, as issued, altered, and from a misbehaving issuer that has the key.

use aes_gcm::{
    Aes128Gcm, Aes256Gcm,
    aead::{AeadInOut as _, KeyInit as _},
};
use turnpike_testkit::fuzz::{self, Input};
use turnpike_turn::access_token::{AccessToken, MAC_KEY_LEN, NONCE_LEN, TokenError, TokenKey};

const NAME: &str = "turn.example.org";
/// Maximum token length; reading a token needs no more memory than its key.
const LONGEST: usize = 2 + NONCE_LEN + 2 + 64 + 8 + 4 + 16;

#[test]
fn access_token() {
    fuzz::target("access_token", seeds, |bytes| {
        let mut input = Input::new(bytes);
        let way = input.byte();
        let key = if way & 1 == 0 { TokenKey::A128Gcm([1; 16]) } else { TokenKey::A256Gcm([2; 32]) };
        match way >> 1 & 3 {
            0 => assert!(open(&key, NAME, input.rest()).is_err(), "a forged token"),
            1 => made_and_altered(&key, &mut input),
            2 => made_by_no_rule(&key, &mut input),
            _ => _ = TokenKey::from_bytes(input.rest()).map(|key| key.algorithm()),
        }
    });
}

/// Opens a token and checks memory use: bounded, and nothing retained on failure.
fn open(key: &TokenKey, name: &str, bytes: &[u8]) -> Result<AccessToken, TokenError> {
    let mut read = Err(TokenError::Malformed);
    let counted = allocation_counter::measure(|| read = AccessToken::open(key, name, bytes));
    assert!(counted.count_total <= 2 && counted.bytes_max <= 2 * *MAC_KEY_LEN.end() as u64, "{counted:?}");
    assert!(read.is_ok() || counted.bytes_current == 0, "{counted:?}");
    if let Ok(token) = &read {
        assert!(bytes.len() <= LONGEST && MAC_KEY_LEN.contains(&token.mac_key().len()));
        assert_eq!(token.made_unix(), token.timestamp >> 16);
        assert!(!format!("{token:?}").contains("mac_key"));
    }
    read
}

fn made_and_altered(key: &TokenKey, input: &mut Input<'_>) {
    let (made, lifetime, nonce): (u32, u32, [u8; NONCE_LEN]) = (input.u32(), input.u32(), input.array());
    let (at, mask, mac_key) = (input.byte(), input.byte(), input.bytes());
    let Some(token) = AccessToken::new(mac_key, made.into(), lifetime) else {
        return assert!(!MAC_KEY_LEN.contains(&mac_key.len()));
    };
    let sealed = token.seal(key, NAME, nonce);
    assert_eq!(open(key, NAME, &sealed).as_ref(), Ok(&token));
    assert_eq!(open(key, "turn.example.net", &sealed), Err(TokenError::NotAuthentic));
    assert_eq!(open(&TokenKey::A128Gcm([9; 16]), NAME, &sealed), Err(TokenError::NotAuthentic));
    let mut altered = sealed.clone();
    let at = usize::from(at) % altered.len();
    altered[at] ^= mask | 1;
    assert!(open(key, NAME, &altered).is_err(), "byte {at}");
    assert!(open(key, NAME, &sealed[..at]).is_err());
    assert!(open(key, NAME, &[&sealed[..], &[mask]].concat()).is_err());
}

/// If a token with an arbitrary plaintext opens, sealing it again must yield the same bytes.
fn made_by_no_rule(key: &TokenKey, input: &mut Input<'_>) {
    let nonce: [u8; NONCE_LEN] = input.array();
    let text = input.rest();
    let mut text = text[..text.len().min(2 * LONGEST)].to_vec();
    let associated = NAME.as_bytes();
    let tag = match key {
        TokenKey::A128Gcm(key) => Aes128Gcm::new(key.into()).encrypt_inout_detached(
            (&nonce).into(),
            associated,
            text.as_mut_slice().into(),
        ),
        TokenKey::A256Gcm(key) => Aes256Gcm::new(key.into()).encrypt_inout_detached(
            (&nonce).into(),
            associated,
            text.as_mut_slice().into(),
        ),
    };
    let tag: [u8; 16] = tag.expect("a short text").into();
    let sealed = [&[0, 12][..], &nonce, &text, &tag].concat();
    match open(key, NAME, &sealed) {
        Ok(token) => assert_eq!(token.seal(key, NAME, nonce), sealed),
        Err(error) => assert_eq!(error, TokenError::Malformed, "the token is authentic"),
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for key in [0, 1] {
        let sealed = AccessToken::new(&[5; 20], 1_800_000_000, 3600).expect("a key").seal(
            &TokenKey::A128Gcm([7; 16]),
            NAME,
            [9; 12],
        );
        seeds.push([&[key][..], &sealed].concat());
        for length in [16, 20, 32, 64, 65] {
            let mac_key = vec![5; length.into()];
            seeds.push(
                [&[key | 2][..], &[0x6B, 0, 0, 0, 0, 0, 0x0E, 0x10], &[9; 12], &[31, 1, length], &mac_key]
                    .concat(),
            );
            let text = [&[0, length][..], &mac_key, &[0; 8], &[0, 0, 0x0E, 0x10]].concat();
            seeds.push([&[key | 4][..], &[9; 12], &text].concat());
        }
        seeds.push([&[key | 6][..], &[1; 16]].concat());
    }
    seeds
}
