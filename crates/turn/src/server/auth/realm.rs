//! Realms (RFC 8489 section 9.2), each with its own users, secrets and quotas. A listener serves some of
//! them, and a request selects one of these by REALM.

use std::{hash::BuildHasher as _, sync::Arc};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use turnpike_wire::integrity::KeyAlgorithm;

use crate::server::{ListenerId, ServerConfig};

/// PASSWORD-ALGORITHMS, with the preferred algorithm first. Neither algorithm has parameters (RFC 8489
/// section 18.5).
const SHA256_AND_MD5: &[u8] = &[0, 2, 0, 0, 0, 1, 0, 0];
const SHA256_ONLY: &[u8] = &[0, 2, 0, 0];
const MD5_ONLY: &[u8] = &[0, 1, 0, 0];

/// Number of a realm: 0 is [`ServerConfig::realm`]; [`ServerConfig::tenants`] are numbered from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RealmId(pub u16);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Realm {
    /// REALM, at most 127 characters, unique.
    pub name: String,
    pub allow_sha256: bool,
    pub username_anonymity: bool,
}

/// Converts an origin to lower case and adds the scheme's default port if there is none, because clients and
/// stores write origins in various ways.
#[must_use]
pub fn canonical_origin(origin: &str) -> String {
    let origin = origin.trim().trim_end_matches('/').to_ascii_lowercase();
    let Some((scheme, host)) = origin.split_once("://") else { return origin };
    let after_address = host.rsplit_once(']').map_or(host, |(_, rest)| rest);
    let port = match scheme {
        _ if after_address.contains(':') => return origin,
        "http" => 80,
        "https" => 443,
        _ => return origin,
    };
    format!("{origin}:{port}")
}

pub(crate) struct RealmTerms {
    pub(crate) name: Arc<str>,
    pub(crate) algorithms: &'static [u8],
    pub(crate) anonymity: bool,
    pub(crate) third_party: bool,
}

impl RealmTerms {
    fn new(config: &ServerConfig, name: &str, allow_sha256: bool, anonymity: bool) -> Arc<Self> {
        let algorithms = match (allow_sha256, config.allow_md5) {
            (true, true) => SHA256_AND_MD5,
            (true, false) => SHA256_ONLY,
            (false, _) => MD5_ONLY,
        };
        Arc::new(Self {
            name: name.into(),
            algorithms,
            anonymity,
            third_party: config.third_party.serves(name),
        })
    }

    pub(crate) fn announced(&self, chosen: &[u8]) -> Option<KeyAlgorithm> {
        if !self.algorithms.chunks_exact(4).any(|announced| announced == chosen) {
            return None;
        }
        Some(if chosen == SHA256_ONLY { KeyAlgorithm::Sha256 } else { KeyAlgorithm::Md5 })
    }
}

pub(crate) struct Realms {
    terms: Vec<Arc<RealmTerms>>,
    /// All realms, for listeners that list none.
    all: Vec<RealmId>,
    /// Indices of `terms` by name; seeded, because clients choose the names to look up.
    by_name: HashTable<u16>,
    hasher: RandomState,
}

impl Realms {
    pub(crate) fn new(config: &ServerConfig) -> Self {
        let first = RealmTerms::new(config, &config.realm, config.allow_sha256, config.username_anonymity);
        let tenants = config.tenants.iter().map(|realm| {
            // If the server does not accept MD5, each realm offers SHA-256, because it needs an algorithm.
            let allow_sha256 = realm.allow_sha256 || !config.allow_md5;
            RealmTerms::new(config, &realm.name, allow_sha256, realm.username_anonymity)
        });
        let terms: Vec<_> = std::iter::once(first).chain(tenants).take(usize::from(u16::MAX)).collect();
        let hasher = RandomState::default();
        let mut by_name = HashTable::with_capacity(terms.len());
        let all: Vec<_> = (0..).take(terms.len()).map(RealmId).collect();
        for RealmId(index) in &all {
            let hash = |index: &u16| hasher.hash_one(terms[usize::from(*index)].name.as_bytes());
            by_name.insert_unique(hash(index), *index, hash);
        }
        Self { terms, all, by_name, hasher }
    }

    /// Realm named in this listener's challenges: the one configured for the client's origin, or the
    /// listener's first.
    pub(crate) fn challenging(
        &self,
        config: &ServerConfig,
        listener: ListenerId,
        origin: Option<&[u8]>,
    ) -> &Arc<RealmTerms> {
        let served = self.served(config, listener);
        let of_origin = origin
            .and_then(|origin| config.origins.get(&*canonical_origin(str::from_utf8(origin).ok()?)))
            .filter(|id| served.contains(id));
        let id = of_origin.or(served.first()).copied().unwrap_or_default();
        self.terms.get(usize::from(id.0)).unwrap_or(&self.terms[0])
    }

    pub(crate) fn find(
        &self,
        config: &ServerConfig,
        listener: ListenerId,
        name: &[u8],
    ) -> Option<&Arc<RealmTerms>> {
        let id = self.id(name)?;
        self.served(config, listener).contains(&id).then(|| &self.terms[usize::from(id.0)])
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.id(name.as_bytes()).is_some()
    }

    fn id(&self, name: &[u8]) -> Option<RealmId> {
        let is_it = |index: &u16| self.terms[usize::from(*index)].name.as_bytes() == name;
        self.by_name.find(self.hasher.hash_one(name), is_it).copied().map(RealmId)
    }

    fn served<'a>(&'a self, config: &'a ServerConfig, listener: ListenerId) -> &'a [RealmId] {
        match &config.listener(listener).realms[..] {
            [] => &self.all,
            some => some,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_compare_with_port_and_ignore_case() {
        for (written, canonical) in [
            ("https://Example.org", "https://example.org:443"),
            ("HTTP://example.org/", "http://example.org:80"),
            ("https://example.org:8443", "https://example.org:8443"),
            ("https://[2001:db8::1]", "https://[2001:db8::1]:443"),
            ("http://[2001:db8::1]:81", "http://[2001:db8::1]:81"),
            ("app://example.org", "app://example.org"),
            ("example.org", "example.org"),
            ("", ""),
        ] {
            assert_eq!(canonical_origin(written), canonical, "{written}");
        }
    }
}
