//! Hashes of the API keys of applications, with their permissions.

use std::collections::BTreeMap;

pub type ApiKeys = BTreeMap<Box<str>, ApiKey>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiKey {
    pub name: String,
    /// SHA-256 of the key.
    pub hash: [u8; 32],
    /// Realm that the key is limited to; `None` for all.
    pub realm: Option<String>,
    /// Maximum lifetime in seconds of credentials issued with this key.
    pub max_ttl: Option<u32>,
    /// Maximum requests per second with this key.
    pub rate: Option<u32>,
}

/// A row of `turnpike_api_key`, or an entry of `turnpike/api-keys`. Unset fields are empty.
pub(crate) struct ApiKeyRow<'a> {
    pub(crate) name: &'a str,
    pub(crate) hash: &'a str,
    pub(crate) realm: &'a str,
    pub(crate) max_ttl: &'a str,
    pub(crate) rate: &'a str,
}

impl ApiKey {
    pub(crate) fn read(row: &ApiKeyRow<'_>) -> Option<Self> {
        let number = |digits: &str| match digits.trim() {
            "" => Some(None),
            digits => digits.parse::<u32>().ok().filter(|number| *number > 0).map(Some),
        };
        Some(Self {
            name: Some(row.name).filter(|name| !name.is_empty())?.to_owned(),
            hash: hex::decode(row.hash.trim()).ok()?.try_into().ok()?,
            realm: Some(row.realm).filter(|realm| !realm.is_empty()).map(str::to_owned),
            max_ttl: number(row.max_ttl)?,
            rate: number(row.rate)?,
        })
    }

    /// Hash, realm, `max_ttl` and `rate` in the store's format.
    pub(crate) fn written(&self) -> [String; 4] {
        let number = |number: Option<u32>| number.map_or_else(String::new, |number| number.to_string());
        let realm = self.realm.clone().unwrap_or_default();
        [hex::encode(self.hash), realm, number(self.max_ttl), number(self.rate)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, [hash, realm, max_ttl, rate]: [&str; 4]) -> Option<ApiKey> {
        ApiKey::read(&ApiKeyRow { name, hash, realm, max_ttl, rate })
    }

    #[test]
    fn api_key_round_trips() {
        let bare = ApiKey { name: "shop".to_owned(), hash: [7; 32], realm: None, max_ttl: None, rate: None };
        let bound =
            ApiKey { realm: Some("a b".to_owned()), max_ttl: Some(600), rate: Some(5), ..bare.clone() };
        for key in [bare, bound] {
            let written = key.written();
            assert_eq!(read("shop", written.each_ref().map(String::as_str)), Some(key));
        }
    }

    #[test]
    fn invalid_row_is_not_an_api_key() {
        let hash = "07".repeat(32);
        assert!(read("shop", [&hash, "", "", ""]).is_some());
        for bad in [
            ["", "", "", ""],
            ["07", "", "", ""],
            ["no hex", "", "", ""],
            [&hash, "", "0", ""],
            [&hash, "", "", "-1"],
            [&hash, "", "soon", ""],
        ] {
            assert_eq!(read("shop", bad), None, "{bad:?}");
        }
        assert_eq!(read("", [&hash, "", "", ""]), None);
    }
}
