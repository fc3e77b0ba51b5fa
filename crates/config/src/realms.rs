//! Realms of a configuration: the listeners that serve them, and their limits in the form that the TURN
//! server expects.

use std::net::SocketAddr;

use turnpike_turn::server::{IssuerKey, Realm, RealmId, RealmLimits, ThirdParty};

use crate::{
    ConfiguredUser, OauthSettings, RealmSettings, Secret, Settings, StateDir, StoredKey, TokenKeySettings,
    UserSecret,
};

/// Maximum number of realms besides `server.realm`, including those in the store: [`RealmId`] has 16 bits.
pub const MOST_REALMS: usize = 65_534;

#[derive(Clone, Copy)]
pub struct RealmView<'a> {
    pub name: &'a str,
    pub users: &'a [ConfiguredUser],
    pub secrets: &'a [Secret],
    /// The realm's own table; `None` for `server.realm`.
    table: Option<&'a RealmSettings>,
    settings: &'a Settings,
}

/// All realms in the order of their [`RealmId`]: `server.realm` with the users of `[auth]`, then each
/// `[[realm]]`. If other realms exist and `server.realm` has no users, it is left out, because no client
/// could answer its challenge.
pub fn all(settings: &Settings) -> Vec<RealmView<'_>> {
    let view = |name, users, secrets, table| RealmView { name, users, secrets, table, settings };
    let main = view(&settings.realm, &settings.auth.users, &settings.auth.secrets, None);
    let tenants = settings.realms.iter();
    let tenants = tenants.map(|realm| view(&realm.name, &realm.users, &realm.secrets, Some(realm)));
    serves_main(settings).then_some(main).into_iter().chain(tenants).collect()
}

pub(crate) fn serves_main(settings: &Settings) -> bool {
    settings.realms.is_empty() || has_anybody(settings)
}

/// Returns true if `server.realm` has a user, a secret, a token key or a store.
pub fn has_anybody(settings: &Settings) -> bool {
    !settings.auth.users.is_empty()
        || !settings.auth.secrets.is_empty()
        || has_tokens(settings, &settings.realm)
        || has_store(settings)
}

fn has_store(settings: &Settings) -> bool {
    settings.stored.in_use || settings.store.url.is_some()
}

/// Returns true if the configuration names a store, even if it has not been read yet.
pub(crate) fn names_store(settings: &Settings) -> bool {
    has_store(settings) || matches!(settings.store.state, StateDir::At(_))
}

pub(crate) fn has_tokens(settings: &Settings, realm: &str) -> bool {
    settings.oauth.keys.iter().any(|key| key.realm.as_deref().unwrap_or(&settings.realm) == realm)
}

pub fn third_party(settings: &Settings) -> ThirdParty {
    let OauthSettings { server_name, skew, keys } = &settings.oauth;
    let name = if server_name.is_empty() { &settings.realm } else { server_name };
    let issuer = |key: &TokenKeySettings| IssuerKey {
        kid: key.kid.clone(),
        key: key.key.clone(),
        realm: key.realm.clone().unwrap_or_else(|| settings.realm.clone()),
        max_lifetime: key.max_lifetime,
    };
    ThirdParty { server_name: name.clone(), skew: *skew, keys: keys.iter().map(issuer).collect() }
}

/// Realms that a listener serves; its challenges contain the first one. These are the realms that name the
/// listener or, if there are none, those that name no listener. A server name (SNI) of a realm selects only
/// that realm.
pub fn served_at(realms: &[RealmView<'_>], listener: SocketAddr, server_name: Option<&str>) -> Vec<RealmId> {
    let ids = |wanted: &dyn Fn(&RealmView<'_>) -> bool| -> Vec<RealmId> {
        (0..).zip(realms).filter(|(_, realm)| wanted(realm)).map(|(index, _)| RealmId(index)).collect()
    };
    let listens = |realm: &RealmView<'_>| realm.listen().contains(&listener);
    if let Some(name) = server_name {
        let is_it = |own: &String| own.eq_ignore_ascii_case(name);
        let asked = ids(&|realm| {
            realm.server_names().iter().any(is_it) && (realm.listen().is_empty() || listens(realm))
        });
        if !asked.is_empty() {
            return asked;
        }
    }
    let named = ids(&listens);
    if named.is_empty() {
        ids(&|realm| realm.listen().is_empty() && realm.server_names().is_empty())
    } else {
        named
    }
}

pub fn server_names(settings: &Settings) -> impl Iterator<Item = &str> {
    settings.realms.iter().flat_map(|realm| &realm.server_names).map(String::as_str)
}

impl RealmView<'_> {
    pub fn for_server(&self, allow_md5: bool) -> Realm {
        Realm {
            name: self.name.to_owned(),
            allow_sha256: self.allows_sha256(allow_md5),
            username_anonymity: self.has_anonymity(),
        }
    }

    /// Clients choose the strongest password algorithm, and the server offers its list before it knows the
    /// user, so every user must have a SHA-256 key.
    pub fn allows_sha256(&self, allow_md5: bool) -> bool {
        !allow_md5 || !self.stores_md5() && self.users.iter().all(has_sha256)
    }

    /// Username anonymity: a client sends a hash of its name (RFC 8489 section 9.2). Time-limited names, kids
    /// and users in a store cannot be found by hash, so a realm with any of these must not offer it.
    pub fn has_anonymity(&self) -> bool {
        self.secrets.is_empty() && !self.has_tokens() && !has_store(self.settings)
    }

    /// Returns true if the realm accepts RFC 7635 tokens.
    pub(crate) fn has_tokens(&self) -> bool {
        has_tokens(self.settings, self.name)
    }

    /// Returns true if a user of the realm may lack a SHA-256 key. An embedded store knows this; for others,
    /// `store.sha256` decides.
    fn stores_md5(&self) -> bool {
        let md5_only = self.settings.stored.md5_only.as_ref();
        has_store(self.settings)
            && md5_only.map_or(!self.settings.store.sha256, |realms| realms.contains(self.name))
    }

    fn listen(&self) -> &[SocketAddr] {
        self.table.map_or(&[], |table| &table.listen)
    }

    fn server_names(&self) -> &[String] {
        self.table.map_or(&[], |table| &table.server_names)
    }
}

pub fn limits(settings: &Settings) -> Vec<RealmLimits> {
    let limits = all(settings).into_iter().map(|realm| {
        let (allocations, allocations_per_user) = match realm.table {
            None => (settings.stored.allocations, settings.stored.allocations_per_user),
            Some(table) => (table.allocations, table.allocations_per_user),
        };
        let relay_ports = realm.table.and_then(|table| table.relay_ports.clone());
        RealmLimits { realm: realm.name.to_owned(), allocations, allocations_per_user, relay_ports }
    });
    limits
        .filter(|limits| *limits != RealmLimits { realm: limits.realm.clone(), ..RealmLimits::default() })
        .collect()
}

/// Returns true if the user's SHA-256 key is known or can be computed.
fn has_sha256(user: &ConfiguredUser) -> bool {
    match &user.secret {
        UserSecret::Password(_) => true,
        UserSecret::Keys(keys) => keys.iter().any(|key| matches!(key, StoredKey::Sha256(_))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AuthSettings;

    fn realm(name: &str, listen: &[&str], server_names: &[&str]) -> RealmSettings {
        RealmSettings {
            name: name.to_owned(),
            listen: listen.iter().map(|text| text.parse().expect("an address")).collect(),
            server_names: server_names.iter().map(|name| (*name).to_owned()).collect(),
            ..RealmSettings::default()
        }
    }

    fn served<'a>(settings: &'a Settings, listener: &str, server_name: Option<&str>) -> Vec<&'a str> {
        let realms = all(settings);
        let ids = served_at(&realms, listener.parse().expect("an address"), server_name);
        ids.iter().map(|id| realms[usize::from(id.0)].name).collect()
    }

    #[test]
    fn listener_serves_realms_that_name_it_or_no_listener() {
        let settings = Settings {
            auth: AuthSettings { secrets: vec![Secret::new("s")], ..AuthSettings::default() },
            realms: vec![
                realm("anywhere", &[], &[]),
                realm("there", &["10.0.0.1:3478"], &[]),
                realm("also", &["10.0.0.1:3478", "10.0.0.2:3478"], &[]),
                realm("named", &[], &["turn.example.org"]),
            ],
            ..Settings::default()
        };
        assert_eq!(served(&settings, "0.0.0.0:3478", None), ["turnpike", "anywhere"]);
        assert_eq!(served(&settings, "10.0.0.1:3478", None), ["there", "also"]);
        assert_eq!(served(&settings, "10.0.0.2:3478", None), ["also"]);
        assert_eq!(served(&settings, "0.0.0.0:3478", Some("Turn.Example.ORG")), ["named"]);
        assert_eq!(served(&settings, "10.0.0.2:3478", Some("turn.example.org")), ["named"]);
        assert_eq!(served(&settings, "0.0.0.0:3478", Some("else.example.org")), ["turnpike", "anywhere"]);
    }

    #[test]
    fn main_realm_without_users_is_left_out() {
        let mut settings = Settings { realms: vec![realm("a", &[], &[])], ..Settings::default() };
        assert_eq!(served(&settings, "0.0.0.0:3478", None), ["a"]);
        settings.auth.secrets.push(Secret::new("s"));
        assert_eq!(served(&settings, "0.0.0.0:3478", None), ["turnpike", "a"]);
        assert_eq!(served(&Settings::default(), "0.0.0.0:3478", None), ["turnpike"]);
    }

    #[test]
    fn only_realms_with_limits_are_listed() {
        let limited = RealmSettings { allocations: Some(3), ..realm("b", &[], &[]) };
        let settings = Settings { realms: vec![realm("a", &[], &[]), limited], ..Settings::default() };
        let limit = RealmLimits { realm: "b".to_owned(), allocations: Some(3), ..RealmLimits::default() };
        assert_eq!(limits(&settings), [limit]);
    }

    #[test]
    fn realm_with_a_store_offers_no_sha256_or_anonymity() {
        let in_realm = |settings: &Settings, name: &str| {
            let all = all(settings);
            let realm = all.iter().find(|realm| realm.name == name).expect("a realm");
            (realm.allows_sha256(true), realm.has_anonymity())
        };
        let mut settings = Settings { realms: vec![realm("a", &[], &[])], ..Settings::default() };
        assert_eq!(in_realm(&settings, "a"), (true, true));
        assert!(!serves_main(&settings));
        settings.store.url = Some(Secret::new("postgres://h/d"));
        assert!(serves_main(&settings));
        assert_eq!([in_realm(&settings, "a"), in_realm(&settings, "turnpike")], [(false, false); 2]);
        settings.store.sha256 = true;
        assert_eq!(in_realm(&settings, "a"), (true, false));
        // A store that knows whether all users have a SHA-256 key overrides this setting.
        settings.store.sha256 = false;
        settings.stored.md5_only = Some(["a".to_owned()].into());
        assert_eq!(
            [in_realm(&settings, "a"), in_realm(&settings, "turnpike")],
            [(false, false), (true, false)]
        );
    }
}
