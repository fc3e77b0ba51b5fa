//! Everything in a store except users: few rows, which are all read together. One invalid row invalidates all
//! of them, because skipping a peer rule would allow denied peers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use base64::{Engine as _, alphabet, engine};
use turnpike_turn::{access_token::TokenKey, ip_range::IpRange, server::canonical_origin};
use turnpike_wire::secret::Secret;
use zeroize::Zeroizing;

use crate::{
    StoreError, StoreFault,
    api_keys::{ApiKey, ApiKeyRow, ApiKeys},
    secrets::{Secrets, StoredSecret, unix},
};

#[derive(Clone, Default, PartialEq, Eq)]
pub struct Rules {
    pub realms: BTreeMap<Box<str>, RealmRules>,
    pub peers: PeerRanges,
    /// Realms by canonical web origin.
    pub origins: BTreeMap<Box<str>, Box<str>>,
    pub token_keys: Vec<StoredTokenKey>,
    /// Secrets by realm. Empty in [`crate::Directory::rules`]; use [`crate::Directory::secrets`].
    pub secrets: BTreeMap<Box<str>, Secrets>,
    /// API keys. Empty in [`crate::Directory::rules`]; use [`crate::Directory::api_keys`].
    pub api_keys: ApiKeys,
    /// Realms with users that lack a SHA-256 key; `None` if unknown.
    pub md5_only: Option<BTreeSet<Box<str>>>,
    pub ignored: Vec<String>,
}

/// Omits secrets from debug output.
impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { realms, peers, origins, token_keys, md5_only, ignored, .. } = self;
        write!(f, "Rules {{ {realms:?}, {peers:?}, {origins:?}, {token_keys:?}, {md5_only:?}, {ignored:?} }}")
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RealmRules {
    /// True if the store defines the realm; otherwise, the realm only has peer rules or secrets.
    pub named: bool,
    pub limits: StoredLimits,
    pub peers: PeerRanges,
}

/// Limits of a realm, named as in coturn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredLimits {
    pub total_quota: Option<usize>,
    pub user_quota: Option<usize>,
    /// Bytes per second of each allocation, in each direction.
    pub max_bps: Option<u64>,
}

impl StoredLimits {
    /// Options and their values in the store, where 0 means no limit.
    pub(crate) fn written(self) -> [(&'static str, String); 3] {
        let number = |limit: Option<u64>| limit.unwrap_or_default().to_string();
        let count = |limit: Option<usize>| limit.unwrap_or_default().to_string();
        [
            ("total-quota", count(self.total_quota)),
            ("user-quota", count(self.user_quota)),
            ("max-bps", number(self.max_bps)),
        ]
    }
}

/// Peer ranges, as in coturn: allowed ranges override denied ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerRanges {
    pub allow: Vec<IpRange>,
    pub deny: Vec<IpRange>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTokenKey {
    pub kid: String,
    pub key: TokenKey,
    /// Realm that accepts its tokens; `None` for the server's own realm.
    pub realm: Option<String>,
}

pub(crate) struct RulesReader<'a> {
    pub(crate) store: &'a str,
    pub(crate) rules: Rules,
    secrets: BTreeMap<Box<str>, Vec<StoredSecret>>,
}

/// Text from a nullable column; null is treated as empty.
pub(crate) type NullableText<'a> = Option<&'a str>;

impl<'a> RulesReader<'a> {
    pub(crate) fn new(store: &'a str) -> Self {
        Self { store, rules: Rules::default(), secrets: BTreeMap::new() }
    }

    /// Adds a peer range. `table` is the table that it comes from; an empty `realm` means all realms.
    pub(crate) fn peer(
        &mut self,
        denied: bool,
        table: &str,
        realm: NullableText<'_>,
        range: NullableText<'_>,
    ) -> Result<(), StoreError> {
        let range = text(range)
            .parse::<IpRange>()
            .map_err(|why| StoreError::new(self.store, StoreFault::Row, format_args!("in {table}, {why}")))?;
        let peers = match text(realm) {
            "" => &mut self.rules.peers,
            realm => &mut self.realm(realm).peers,
        };
        if denied {
            peers.deny.push(range);
        } else {
            peers.allow.push(range);
        }
        Ok(())
    }

    /// Adds a limit of a realm; 0 means none. If there are duplicates, the lowest limit wins.
    pub(crate) fn option(
        &mut self,
        realm: NullableText<'_>,
        option: &str,
        value: NullableText<'_>,
    ) -> Result<(), StoreError> {
        let number = text(value).parse::<u64>().map_err(|_| {
            let said = format_args!("{option} of realm {:?} is {:?}, not a number", text(realm), text(value))
                .to_string();
            StoreError::new(self.store, StoreFault::Row, said)
        })?;
        let count = usize::try_from(number).unwrap_or(usize::MAX);
        let rules = self.realm(text(realm));
        rules.named = true;
        match option {
            "total-quota" => lower(&mut rules.limits.total_quota, count),
            "user-quota" => lower(&mut rules.limits.user_quota, count),
            "max-bps" => lower(&mut rules.limits.max_bps, number),
            _ => self.ignore(format!("unknown option {option:?} of realm {:?}", text(realm))),
        }
        Ok(())
    }

    /// Adds an origin. If two spellings of an origin belong to different realms, the realm that sorts first
    /// wins.
    pub(crate) fn origin(&mut self, origin: NullableText<'_>, realm: NullableText<'_>) {
        let (origin, realm) = (canonical_origin(text(origin)), text(realm));
        if !realm.is_empty() {
            self.realm(realm).named = true;
            let known = self.rules.origins.entry(origin.into()).or_insert_with(|| realm.into());
            if *realm < **known {
                *known = realm.into();
            }
        }
    }

    pub(crate) fn secret(&mut self, realm: NullableText<'_>, secret: NullableText<'_>) {
        let secret = text(secret);
        if !secret.is_empty() {
            let held = self.secrets.entry(text(realm).into()).or_default();
            held.push(StoredSecret::new(Secret::new(secret)));
        }
    }

    pub(crate) fn mark(
        &mut self,
        realm: NullableText<'_>,
        secret: NullableText<'_>,
        since: NullableText<'_>,
        until: NullableText<'_>,
    ) -> Result<(), StoreError> {
        let (since, until) = read_mark(self.store, text(realm), since, until)?;
        let held = self.secrets.get_mut(text(realm)).into_iter().flatten();
        for found in held.filter(|held| held.value.reveal() == text(secret)) {
            (found.since, found.until) = (since, until);
        }
        Ok(())
    }

    pub(crate) fn api_key(&mut self, row: &ApiKeyRow<'_>) {
        match ApiKey::read(row) {
            Some(key) => _ = self.rules.api_keys.insert(row.name.into(), key),
            None => self.ignore(format!("the API key {:?} is invalid and not accepted", row.name)),
        }
    }

    /// Adds a token key in coturn's form: base64 of at least as many bytes as the algorithm needs (A256GCM by
    /// default), valid for `lifetime` seconds from `timestamp` (0: forever).
    pub(crate) fn token_key(&mut self, row: TokenKeyRow<'_>) -> Result<(), StoreError> {
        let TokenKeyRow { kid, key, timestamp, lifetime, algorithm, realm } = row;
        if kid.is_empty() {
            self.ignore("an oauth_key has no kid".to_owned());
            return Ok(());
        }
        let bad = |why: String| {
            StoreError::new(self.store, StoreFault::Row, format_args!("oauth_key {kid:?} {why}"))
        };
        let number = |what: &str, field: NullableText<'_>| match text(field) {
            "" => Ok(0),
            digits => {
                digits.parse::<u64>().map_err(|_| bad(format!("has the {what} {digits:?}, not a number")))
            }
        };
        let (timestamp, lifetime) = (number("timestamp", timestamp)?, number("lifetime", lifetime)?);
        let length = match text(algorithm) {
            "A128GCM" => 16,
            "" | "A256GCM" => 32,
            other => {
                return Err(bad(format!(
                    "has the algorithm {other:?}: only A128GCM and A256GCM are supported"
                )));
            }
        };
        let bytes = Zeroizing::new(LENIENT.decode(text(key)).map_err(|_| bad("is not base64".to_owned()))?);
        let key = bytes.get(..length).and_then(TokenKey::from_bytes).ok_or_else(|| {
            bad(format!(
                "has {} bytes, and {} needs {length}",
                bytes.len(),
                if length == 16 { "A128GCM" } else { "A256GCM" }
            ))
        })?;
        if lifetime > 0 && timestamp.saturating_add(lifetime) <= unix() {
            self.ignore(format!("oauth_key {kid:?} has expired"));
            return Ok(());
        }
        let realm = Some(text(realm)).filter(|realm| !realm.is_empty()).map(str::to_owned);
        self.rules.token_keys.push(StoredTokenKey { kid: kid.to_owned(), key, realm });
        Ok(())
    }

    pub(crate) fn ignore(&mut self, what: String) {
        self.rules.ignored.push(what);
    }

    pub(crate) fn realm(&mut self, name: &str) -> &mut RealmRules {
        self.rules.realms.entry(name.into()).or_default()
    }

    /// Sorts everything, so that the order of rows does not matter.
    pub(crate) fn finish(mut self) -> Rules {
        let rules = &mut self.rules;
        for peers in rules.realms.values_mut().map(|realm| &mut realm.peers).chain([&mut rules.peers]) {
            peers.allow.sort_unstable();
            peers.deny.sort_unstable();
        }
        rules.token_keys.sort_unstable_by(|one, other| one.kid.cmp(&other.kid));
        rules.secrets = self
            .secrets
            .into_iter()
            .map(|(realm, mut secrets)| {
                secrets.sort_unstable_by(|one, other| one.value.reveal().cmp(other.value.reveal()));
                (realm, secrets.into())
            })
            .collect();
        rules.ignored.sort_unstable();
        self.rules
    }
}

pub(crate) struct TokenKeyRow<'a> {
    pub(crate) kid: &'a str,
    pub(crate) key: NullableText<'a>,
    pub(crate) timestamp: NullableText<'a>,
    pub(crate) lifetime: NullableText<'a>,
    pub(crate) algorithm: NullableText<'a>,
    pub(crate) realm: NullableText<'a>,
}

/// Parses the two timestamps of a secret, each of which is digits or empty: the start of its use for
/// signing, and its expiry.
pub(crate) fn read_mark(
    store: &str,
    realm: &str,
    since: NullableText<'_>,
    until: NullableText<'_>,
) -> Result<(u64, Option<u64>), StoreError> {
    let number = |field: NullableText<'_>| match text(field) {
        "" => Ok(None),
        digits => digits.parse::<u64>().map(Some).map_err(|_| {
            let said = format_args!("the time {digits:?} of a secret of realm {realm:?} is not a number")
                .to_string();
            StoreError::new(store, StoreFault::Row, said)
        }),
    };
    Ok((number(since)?.unwrap_or_default(), number(until)?))
}

/// Accepts keys with and without padding, since both occur.
const LENIENT: engine::GeneralPurpose = engine::GeneralPurpose::new(
    &alphabet::STANDARD,
    engine::GeneralPurposeConfig::new().with_decode_padding_mode(engine::DecodePaddingMode::Indifferent),
);

/// Keeps the lower of two limits; 0 means none.
fn lower<N: Ord + Default>(limit: &mut Option<N>, other: N) {
    if other > N::default() && limit.as_ref().is_none_or(|limit| other < *limit) {
        *limit = Some(other);
    }
}

fn text(field: NullableText<'_>) -> &str {
    field.unwrap_or_default().trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fill: impl FnOnce(&mut RulesReader<'_>) -> Result<(), StoreError>) -> Result<Rules, String> {
        let mut reader = RulesReader::new("postgres://db/turn");
        fill(&mut reader).map_err(|error| error.to_string())?;
        Ok(reader.finish())
    }

    fn token(algorithm: &'static str, key: &'static str, lifetime: &'static str) -> TokenKeyRow<'static> {
        TokenKeyRow {
            kid: "north",
            key: Some(key),
            timestamp: Some("1000"),
            lifetime: Some(lifetime),
            algorithm: Some(algorithm),
            realm: Some(" "),
        }
    }

    /// Keys of coturn's example database. They contain a newline because of the way they were generated.
    const COTURN_256: &str = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEK";
    const COTURN_128: &str = "MTIzNDU2Nzg5MDEyMzQ1Ngo=";

    #[test]
    fn coturn_token_keys_are_parsed() {
        let rules = read(|reader| {
            reader.token_key(token("A256GCM", COTURN_256, "0"))?;
            reader.token_key(token("", COTURN_256, ""))?;
            reader.token_key(token("A128GCM", COTURN_128, "0"))
        });
        let nameless = read(|reader| {
            reader.token_key(TokenKeyRow { kid: "", realm: Some("a"), ..token("", COTURN_256, "0") })?;
            reader.token_key(TokenKeyRow { kid: "", ..token("", COTURN_256, "0") })
        });
        let nameless = nameless.expect("rules");
        assert_eq!((nameless.token_keys.len(), nameless.ignored.len()), (0, 2));
        let keys = rules.expect("keys").token_keys;
        let made = |bytes: &[u8]| TokenKey::from_bytes(bytes).expect("a key");
        assert_eq!(keys[0].key, made(b"01234567890123456789012345678901"));
        assert_eq!(keys[1].key, keys[0].key);
        assert_eq!(keys[2].key, made(b"1234567890123456"));
        assert_eq!(keys[2].realm, None);
        for (bad, told) in [
            (token("A256GCM", COTURN_128, "0"), "has 17 bytes, and A256GCM needs 32"),
            (token("AES-256-CBC", COTURN_256, "0"), "\"AES-256-CBC\""),
            (token("A256GCM", "not base64!", "0"), "is not base64"),
            (token("A256GCM", COTURN_256, "soon"), "the lifetime \"soon\""),
        ] {
            let error = read(|reader| reader.token_key(bad)).expect_err(told);
            assert!(
                error.contains(told) && error.contains("\"north\"") && !error.contains(COTURN_256),
                "{error}"
            );
        }
    }

    #[test]
    fn expired_token_key_is_ignored_and_logged() {
        let rules = read(|reader| reader.token_key(token("A256GCM", COTURN_256, "60"))).expect("rules");
        assert!(rules.token_keys.is_empty());
        assert!(rules.ignored[0].contains("north"), "{:?}", rules.ignored);
        let lives =
            read(|reader| reader.token_key(token("A256GCM", COTURN_256, "99999999999"))).expect("rules");
        assert_eq!(lives.token_keys.len(), 1);
    }

    #[test]
    fn invalid_peer_rule_is_an_error() {
        let rules = read(|reader| {
            reader.peer(true, "denied_peer_ip", Some("a"), Some("10.0.0.0-10.0.0.9"))?;
            reader.peer(false, "allowed_peer_ip", Some("a"), Some("10.0.0.5"))?;
            reader.peer(true, "denied_peer_ip", None, Some("123::45"))
        });
        let rules = rules.expect("rules");
        assert_eq!(rules.peers.deny.len(), 1);
        let a = &rules.realms["a"];
        assert_eq!((a.peers.deny.len(), a.peers.allow.len(), a.named), (1, 1, false));
        let error = read(|reader| reader.peer(true, "denied_peer_ip", None, Some("10.0.0")))
            .expect_err("not a range");
        assert!(error.starts_with("postgres://db/turn has invalid data: in denied_peer_ip"), "{error}");
    }

    #[test]
    fn limits_are_numbers_and_zero_means_none() {
        let rules = read(|reader| {
            reader.option(Some("a"), "total-quota", Some("12000"))?;
            reader.option(Some("a"), "user-quota", Some("0"))?;
            reader.option(Some("a"), "max-bps", Some("500000"))?;
            reader.option(Some("b"), "colour", Some("7"))
        });
        let rules = rules.expect("rules");
        let a = &rules.realms["a"];
        let limits = StoredLimits { total_quota: Some(12_000), user_quota: None, max_bps: Some(500_000) };
        assert_eq!((a.limits, a.named), (limits, true));
        assert!(rules.ignored[0].contains("\"colour\""));
        // SQLite allows empty and null primary keys.
        let rows = [(None, "700"), (Some(""), "300"), (Some(" "), "0"), (None, "500")];
        for rows in [rows, [rows[3], rows[2], rows[1], rows[0]]] {
            let rules = read(|reader| {
                rows.iter().try_for_each(|(realm, bps)| reader.option(*realm, "max-bps", Some(bps)))
            });
            let lowest = rules.expect("rules").realms[""].limits.max_bps;
            assert_eq!(lowest, Some(300), "the lower limit, in any order");
        }
        let error =
            read(|reader| reader.option(Some("a"), "user-quota", Some("many"))).expect_err("no number");
        assert!(error.contains("user-quota of realm \"a\" is \"many\""), "{error}");
    }

    #[test]
    fn row_order_does_not_matter_and_debug_omits_secrets() {
        let one = read(|reader| {
            reader.secret(Some("a"), Some("north"));
            reader.secret(Some("a"), Some("south"));
            reader.origin(Some("https://a.example"), Some("a"));
            reader.origin(Some("https://b.example"), Some("b"));
            reader.origin(Some("https://B.example:443"), Some("a"));
            Ok(())
        });
        let other = read(|reader| {
            reader.origin(Some("https://B.example:443"), Some("a"));
            reader.origin(Some("https://b.example"), Some("b"));
            reader.origin(Some("HTTPS://a.example:443"), Some("a"));
            reader.secret(Some("a"), Some("south"));
            reader.secret(Some("a"), Some("north"));
            reader.secret(Some("a"), Some(""));
            Ok(())
        });
        assert_eq!(one, other);
        let rules = one.expect("rules");
        assert_eq!(rules.secrets["a"].len(), 2);
        assert!(rules.realms["a"].named);
        assert!(!format!("{rules:?}").contains("north"));
    }

    #[test]
    fn invalid_mark_is_an_error() {
        let marked = |since, until| {
            read(|reader| {
                reader.secret(Some("a"), Some("north"));
                reader.secret(Some("b"), Some("north"));
                reader.mark(Some("a"), Some("gone"), Some("1"), None)?;
                reader.mark(Some("a"), Some("north"), since, until)
            })
        };
        let rules = marked(Some("1000"), Some(" 2000 ")).expect("rules");
        let times = |realm: &str| (rules.secrets[realm][0].since, rules.secrets[realm][0].until);
        assert_eq!([times("a"), times("b")], [(1000, Some(2000)), (0, None)]);
        assert_eq!(marked(None, Some("")).expect("rules").secrets["a"][0].until, None);
        let error = marked(Some("0"), Some("soon")).expect_err("no number");
        assert!(error.contains("\"soon\" of a secret of realm \"a\"") && !error.contains("north"), "{error}");
    }

    #[test]
    fn invalid_api_key_is_ignored_and_logged() {
        let hash = "ab".repeat(32);
        let row = |name, hash| ApiKeyRow { name, hash, realm: "", max_ttl: "60", rate: "" };
        let rules = read(|reader| {
            reader.api_key(&row("good", &hash));
            reader.api_key(&row("bad", "ab"));
            Ok(())
        });
        let rules = rules.expect("rules");
        assert_eq!(rules.api_keys.keys().map(AsRef::as_ref).collect::<Vec<&str>>(), ["good"]);
        assert_eq!(rules.ignored.len(), 1);
        assert!(rules.ignored[0].contains("\"bad\""), "{:?}", rules.ignored);
    }
}
