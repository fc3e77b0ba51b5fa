//! Everything in a store that is not a user: few rows, read whole. A row that cannot be read keeps all of them from being taken: a peer
//! rule that is left out would open what it was to close.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use base64::{Engine as _, alphabet, engine};
use turnpike_turn::{access_token::TokenKey, ip_range::IpRange, server::canonical_origin};
use zeroize::Zeroizing;

use crate::{
    Fault, StoreError,
    api_keys::{ApiKey, ApiKeyRow, ApiKeys},
    secrets::{Secrets, StoredSecret, unix},
};

/// Realms with their limits and peers, origins, secrets, token keys and API keys.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// Realms that have limits, peers or an origin, by name.
    pub realms: BTreeMap<Box<str>, RealmRules>,
    /// Peers for users of every realm.
    pub peers: PeerRanges,
    /// Realms by the canonical origin of their web pages.
    pub origins: BTreeMap<Box<str>, Box<str>>,
    /// Keys shared with authorization servers, those left out whose time is over.
    pub token_keys: Vec<StoredTokenKey>,
    /// Secrets by realm. [`crate::Directory::rules`] has none: they are told by [`crate::Directory::secrets`].
    pub secrets: BTreeMap<Box<str>, Secrets>,
    /// Keys of applications. [`crate::Directory::rules`] has none: they are told by [`crate::Directory::api_keys`].
    pub api_keys: ApiKeys,
    /// Realms that have users without a SHA-256 key; `None` where that is not known.
    pub md5_only: Option<BTreeSet<Box<str>>>,
    /// What is there and counts for nothing, for the log.
    pub ignored: Vec<String>,
}

/// Names what there is, and no secret.
impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { realms, peers, origins, token_keys, md5_only, ignored, .. } = self;
        write!(f, "Rules {{ {realms:?}, {peers:?}, {origins:?}, {token_keys:?}, {md5_only:?}, {ignored:?} }}")
    }
}

/// Of one realm.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RealmRules {
    /// Whether it is one of the store's realms; else it is named for its peers or secrets alone.
    pub named: bool,
    /// Allocations of all its users.
    pub total_quota: Option<usize>,
    /// Allocations of each of its users.
    pub user_quota: Option<usize>,
    /// Bytes a second of each of its allocations (coturn's `max-bps`).
    pub max_bps: Option<u64>,
    /// Peers for its users.
    pub peers: PeerRanges,
}

/// Peers as coturn has them: what is allowed wins over what is denied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerRanges {
    /// Allowed.
    pub allow: Vec<IpRange>,
    /// Denied.
    pub deny: Vec<IpRange>,
}

/// A key shared with an authorization server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTokenKey {
    /// Its name.
    pub kid: String,
    /// The key.
    pub key: TokenKey,
    /// Where its tokens count; `None` is the server's own realm.
    pub realm: Option<String>,
}

/// Fills [`Rules`] row by row. `store` is what errors name.
pub(crate) struct RulesReader<'a> {
    pub(crate) store: &'a str,
    pub(crate) rules: Rules,
    /// For [`Rules::secrets`].
    secrets: BTreeMap<Box<str>, Vec<StoredSecret>>,
}

/// Of a row: a column that may be null, which counts as empty.
pub(crate) type Field<'a> = Option<&'a str>;

impl<'a> RulesReader<'a> {
    pub(crate) fn new(store: &'a str) -> Self {
        Self { store, rules: Rules::default(), secrets: BTreeMap::new() }
    }

    /// A peer range; `table` is where it stands, `realm` empty for all.
    pub(crate) fn peer(
        &mut self,
        denied: bool,
        table: &str,
        realm: Field<'_>,
        range: Field<'_>,
    ) -> Result<(), StoreError> {
        let range = text(range)
            .parse::<IpRange>()
            .map_err(|why| StoreError::new(self.store, Fault::Row, format_args!("in {table}, {why}")))?;
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

    /// A limit of a realm; 0 is none. Of two rows of one realm, which differ in blanks or in whether there is a name at all, the lower counts.
    pub(crate) fn option(
        &mut self,
        realm: Field<'_>,
        option: &str,
        value: Field<'_>,
    ) -> Result<(), StoreError> {
        let number = text(value).parse::<u64>().map_err(|_| {
            let said = format_args!("{option} of realm {:?} is {:?}, no number", text(realm), text(value))
                .to_string();
            StoreError::new(self.store, Fault::Row, said)
        })?;
        let count = usize::try_from(number).unwrap_or(usize::MAX);
        let rules = self.realm(text(realm));
        rules.named = true;
        match option {
            "total-quota" => lower(&mut rules.total_quota, count),
            "user-quota" => lower(&mut rules.user_quota, count),
            "max-bps" => lower(&mut rules.max_bps, number),
            _ => self.ignore(format!("the option {option:?} of realm {:?} is not known", text(realm))),
        }
        Ok(())
    }

    /// An origin and its realm. One that is written in two ways, for two realms, stands for the first of them by name.
    pub(crate) fn origin(&mut self, origin: Field<'_>, realm: Field<'_>) {
        let (origin, realm) = (canonical_origin(text(origin)), text(realm));
        if !realm.is_empty() {
            self.realm(realm).named = true;
            let known = self.rules.origins.entry(origin.into()).or_insert_with(|| realm.into());
            if *realm < **known {
                *known = realm.into();
            }
        }
    }

    /// A secret of a realm.
    pub(crate) fn secret(&mut self, realm: Field<'_>, secret: Field<'_>) {
        let secret = text(secret);
        if !secret.is_empty() {
            let held = self.secrets.entry(text(realm).into()).or_default();
            held.push(StoredSecret::new(Zeroizing::new(secret.to_owned())));
        }
    }

    /// What is known of a secret of a realm, behind the secret itself; of one that is not there, it counts for nothing.
    pub(crate) fn mark(
        &mut self,
        realm: Field<'_>,
        secret: Field<'_>,
        since: Field<'_>,
        until: Field<'_>,
    ) -> Result<(), StoreError> {
        let (since, until) = read_mark(self.store, text(realm), since, until)?;
        let held = self.secrets.get_mut(text(realm)).into_iter().flatten();
        for found in held.filter(|held| *held.value == *text(secret)) {
            (found.since, found.until) = (since, until);
        }
        Ok(())
    }

    /// A key of an application. One that cannot be read opens nothing.
    pub(crate) fn api_key(&mut self, row: &ApiKeyRow<'_>) {
        match ApiKey::read(row) {
            Some(key) => _ = self.rules.api_keys.insert(row.name.into(), key),
            None => self.ignore(format!("the API key {:?} cannot be read, and opens nothing", row.name)),
        }
    }

    /// A token key, as coturn writes them: base64 of at least as many bytes as the algorithm needs; the algorithm is A256GCM where none
    /// is said; `lifetime` seconds from `timestamp`, 0 for ever.
    pub(crate) fn token_key(&mut self, row: TokenKeyRow<'_>) -> Result<(), StoreError> {
        let TokenKeyRow { kid, key, timestamp, lifetime, algorithm, realm } = row;
        if kid.is_empty() {
            self.ignore("an oauth_key has no kid, by which tokens would name it".to_owned());
            return Ok(());
        }
        let bad =
            |why: String| StoreError::new(self.store, Fault::Row, format_args!("oauth_key {kid:?} {why}"));
        let number = |what: &str, field: Field<'_>| match text(field) {
            "" => Ok(0),
            digits => digits.parse::<u64>().map_err(|_| bad(format!("has the {what} {digits:?}, no number"))),
        };
        let (timestamp, lifetime) = (number("timestamp", timestamp)?, number("lifetime", lifetime)?);
        let length = match text(algorithm) {
            "A128GCM" => 16,
            "" | "A256GCM" => 32,
            other => return Err(bad(format!("has the algorithm {other:?}: A128GCM and A256GCM are known"))),
        };
        let bytes = Zeroizing::new(LENIENT.decode(text(key)).map_err(|_| bad("is no base64".to_owned()))?);
        let key = bytes.get(..length).and_then(TokenKey::from_bytes).ok_or_else(|| {
            bad(format!(
                "has {} bytes, and {} needs {length}",
                bytes.len(),
                if length == 16 { "A128GCM" } else { "A256GCM" }
            ))
        })?;
        if lifetime > 0 && timestamp.saturating_add(lifetime) <= unix() {
            self.ignore(format!("the time of oauth_key {kid:?} is over"));
            return Ok(());
        }
        let realm = Some(text(realm)).filter(|realm| !realm.is_empty()).map(str::to_owned);
        self.rules.token_keys.push(StoredTokenKey { kid: kid.to_owned(), key, realm });
        Ok(())
    }

    /// Says that something counts for nothing.
    pub(crate) fn ignore(&mut self, what: String) {
        self.rules.ignored.push(what);
    }

    pub(crate) fn realm(&mut self, name: &str) -> &mut RealmRules {
        self.rules.realms.entry(name.into()).or_default()
    }

    /// In an order of its own, so that the same rows in another order are the same rules.
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
                secrets.sort_unstable_by(|one, other| one.value.as_str().cmp(&other.value));
                (realm, secrets.into())
            })
            .collect();
        rules.ignored.sort_unstable();
        self.rules
    }
}

/// A row of `oauth_key`, or a hash `turn/oauth/kid/KID`.
pub(crate) struct TokenKeyRow<'a> {
    pub(crate) kid: &'a str,
    pub(crate) key: Field<'a>,
    pub(crate) timestamp: Field<'a>,
    pub(crate) lifetime: Field<'a>,
    pub(crate) algorithm: Field<'a>,
    pub(crate) realm: Field<'a>,
}

/// Since when a secret signs, and until when it counts: digits, or nothing.
pub(crate) fn read_mark(
    store: &str,
    realm: &str,
    since: Field<'_>,
    until: Field<'_>,
) -> Result<(u64, Option<u64>), StoreError> {
    let number = |field: Field<'_>| match text(field) {
        "" => Ok(None),
        digits => digits.parse::<u64>().map(Some).map_err(|_| {
            let said =
                format_args!("the time {digits:?} of a secret of realm {realm:?} is no number").to_string();
            StoreError::new(store, Fault::Row, said)
        }),
    };
    Ok((number(since)?.unwrap_or_default(), number(until)?))
}

/// Keys are written with and without padding.
const LENIENT: engine::GeneralPurpose = engine::GeneralPurpose::new(
    &alphabet::STANDARD,
    engine::GeneralPurposeConfig::new().with_decode_padding_mode(engine::DecodePaddingMode::Indifferent),
);

/// Keeps the lower of two limits, of which 0 is none.
fn lower<N: Ord + Default>(limit: &mut Option<N>, other: N) {
    if other > N::default() && limit.as_ref().is_none_or(|limit| other < *limit) {
        *limit = Some(other);
    }
}

fn text(field: Field<'_>) -> &str {
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

    /// The keys of coturn's own example database; the newline in them comes from how they were made.
    const COTURN_256: &str = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEK";
    const COTURN_128: &str = "MTIzNDU2Nzg5MDEyMzQ1Ngo=";

    #[test]
    fn token_keys_are_read_as_coturn_writes_them() {
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
            (token("A256GCM", "not base64!", "0"), "is no base64"),
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
    fn a_token_key_whose_time_is_over_is_left_out_and_told() {
        let rules = read(|reader| reader.token_key(token("A256GCM", COTURN_256, "60"))).expect("rules");
        assert!(rules.token_keys.is_empty());
        assert!(rules.ignored[0].contains("north"), "{:?}", rules.ignored);
        let lives =
            read(|reader| reader.token_key(token("A256GCM", COTURN_256, "99999999999"))).expect("rules");
        assert_eq!(lives.token_keys.len(), 1);
    }

    #[test]
    fn peers_are_of_one_realm_or_of_all_and_one_that_cannot_be_read_is_an_error() {
        let rules = read(|reader| {
            reader.peer(true, "denied_peer_ip", Some("a"), Some("10.0.0.0-10.0.0.9"))?;
            reader.peer(false, "allowed_peer_ip", Some("a"), Some("10.0.0.5"))?;
            reader.peer(true, "denied_peer_ip", None, Some("123::45"))
        });
        let rules = rules.expect("rules");
        assert_eq!(rules.peers.deny.len(), 1);
        let a = &rules.realms["a"];
        assert_eq!((a.peers.deny.len(), a.peers.allow.len(), a.named), (1, 1, false));
        let error =
            read(|reader| reader.peer(true, "denied_peer_ip", None, Some("10.0.0"))).expect_err("no range");
        assert!(
            error.starts_with("postgres://db/turn has what cannot be read: in denied_peer_ip"),
            "{error}"
        );
    }

    #[test]
    fn limits_are_numbers_and_zero_is_none() {
        let rules = read(|reader| {
            reader.option(Some("a"), "total-quota", Some("12000"))?;
            reader.option(Some("a"), "user-quota", Some("0"))?;
            reader.option(Some("a"), "max-bps", Some("500000"))?;
            reader.option(Some("b"), "colour", Some("7"))
        });
        let rules = rules.expect("rules");
        let a = &rules.realms["a"];
        assert_eq!(
            (a.total_quota, a.user_quota, a.max_bps, a.named),
            (Some(12_000), None, Some(500_000), true)
        );
        assert!(rules.ignored[0].contains("\"colour\""));
        // As SQLite holds them: its keys may be empty, or nothing.
        let rows = [(None, "700"), (Some(""), "300"), (Some(" "), "0"), (None, "500")];
        for rows in [rows, [rows[3], rows[2], rows[1], rows[0]]] {
            let rules = read(|reader| {
                rows.iter().try_for_each(|(realm, bps)| reader.option(*realm, "max-bps", Some(bps)))
            });
            assert_eq!(rules.expect("rules").realms[""].max_bps, Some(300), "the lower, whatever the order");
        }
        let error =
            read(|reader| reader.option(Some("a"), "user-quota", Some("many"))).expect_err("no number");
        assert!(error.contains("user-quota of realm \"a\" is \"many\""), "{error}");
    }

    #[test]
    fn the_order_of_rows_means_nothing_and_debug_output_holds_no_secret() {
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
    fn marks_belong_to_a_secret_of_their_realm_and_one_that_cannot_be_read_is_an_error() {
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
    fn an_api_key_that_cannot_be_read_is_told_and_opens_nothing() {
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
