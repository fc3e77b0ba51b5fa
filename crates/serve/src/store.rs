//! The configured store: its address, its use, and its additions to the settings.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use turnpike_config::{
    ConfiguredUser, Mistake, Mistakes, RealmSettings, Settings, Sources, StateDir, StoreSettings,
    TokenKeySettings, UserSecret, WhenUnavailable, readable_by_all, realms,
};
use turnpike_stores::{
    Database, Directory, DirectoryLimits, Edit, Existing, PeerRanges, Rules, SqliteUse, StoreAddress,
    StoreError, StoredLimits, UserKeys,
};
use turnpike_turn::{
    ip_range,
    server::Bandwidth,
    server::{AllowRule, PeerRules, RealmId, StoreFailure},
};

use crate::{ServeError, generated_user::random_user};

pub type UserStore = Directory<Database>;

const FILE: &str = "turnpike.sqlite";
/// Name of the file, in the embedded store's directory, that contains the server's realm.
const REALM_FILE: &str = "realm";
/// Maximum lifetime of tokens in seconds if their key is from a store, which has no setting for it.
const TOKEN_LIFETIME: u32 = 86_400;

pub(crate) fn address(settings: &Settings) -> Result<Option<(StoreAddress, SqliteUse)>, Mistakes> {
    let StoreSettings { url, state, .. } = &settings.store;
    let Some(url) = url else {
        let file = state.directory().map(|dir| dir.join(FILE));
        return Ok(file.map(|file| (StoreAddress::Sqlite(file), SqliteUse::Own)));
    };
    let address = url
        .reveal()
        .parse::<StoreAddress>()
        .map_err(|why| Mistakes(vec![Mistake::new(settings.origin("store.url"), "store.url", why, "")]))?;
    Ok(Some((address, SqliteUse::Foreign)))
}

/// Address of the configured store, after checking that the store can be created.
pub(crate) fn checked_address(settings: &Settings) -> Result<Option<(StoreAddress, SqliteUse)>, Mistakes> {
    let StoreSettings { url, state, .. } = &settings.store;
    if let Some(missing) = missing_parent(state).filter(|_| url.is_none()) {
        let problem = format!("no directory {}", missing.display());
        let expected = "a path whose parent directory exists; it is created on the first write";
        return Err(Mistakes(vec![Mistake::new(
            settings.origin("store.state"),
            "store.state",
            problem,
            expected,
        )]));
    }
    address(settings)
}

/// Opens the configured store for commands that run without a server. Must be called on the runtime that runs
/// its tasks; does not connect yet.
pub fn open_store(sources: &Sources) -> Result<(Settings, UserStore), ServeError> {
    let settings = sources.settings()?;
    let Some((address, file)) = checked_address(&settings)? else { return Err(ServeError::NoStore) };
    let limits = limits(&settings.store);
    let database = Database::new(&address, 1, file, &limits);
    Ok((settings, Directory::new(database, address.to_string(), limits)))
}

/// File next to the embedded store that contains the server's realm; `None` if another store is used.
fn realm_file(settings: &Settings) -> Option<PathBuf> {
    let StoreSettings { url, state, .. } = &settings.store;
    if url.is_some() { None } else { state.directory().map(|dir| dir.join(REALM_FILE)) }
}

/// Writes the server's realm next to its embedded store, for commands that run without the server.
pub(crate) fn note_realm(settings: &Settings) {
    let Some(file) = realm_file(settings) else { return };
    let noted = fs::read_to_string(&file).is_ok_and(|noted| noted.trim_end() == settings.realm);
    // Errors are ignored: if the directory is read-only, commands cannot write to it either.
    if !noted && file.parent().is_some_and(Path::is_dir) {
        let _ = fs::write(&file, format!("{}\n", settings.realm));
    }
}

/// Realm of the server that last used the embedded store, and the file that contains this realm. `None` if
/// these settings have the same realm, or if no realm is known.
#[must_use]
pub fn realm_of_another(settings: &Settings) -> Option<(String, PathBuf)> {
    let file = realm_file(settings)?;
    let noted = fs::read_to_string(&file).ok()?.trim_end().to_owned();
    (!noted.is_empty() && noted != settings.realm).then_some((noted, file))
}

/// Returns the parent of the configured directory if it does not exist: a mistyped path must not create
/// directories.
fn missing_parent(state: &StateDir) -> Option<&Path> {
    let StateDir::At(dir) = state else { return None };
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty())?;
    (!parent.is_dir()).then_some(parent)
}

/// Generation of the applied rules, and true if the store was in use.
type Taken = (u64, bool);

pub(crate) struct OpenStore {
    pub(crate) directory: UserStore,
    /// Path of the embedded store; the file exists after the first write.
    own_file: Option<PathBuf>,
    taken: Option<Taken>,
    told: Vec<String>,
}

impl OpenStore {
    /// Opens the configured store. Unless the store `must_answer`, retries in the background if it is
    /// unreachable, or if its answers cannot be parsed and the settings have users.
    pub(crate) async fn open(settings: &Settings, must_answer: bool) -> Result<Option<Self>, OpenError> {
        let Some((address, file)) = checked_address(settings)? else { return Ok(None) };
        let limits = limits(&settings.store);
        let database = Database::new(&address, settings.store.connections, file, &limits);
        let directory = Directory::new(database, address.to_string(), limits);
        let own_file = match (&address, file) {
            (StoreAddress::Sqlite(path), SqliteUse::Own) => Some(path.clone()),
            _ => None,
        };
        let has_users = !settings.auth.users.is_empty()
            || !settings.auth.secrets.is_empty()
            || settings.realms.iter().any(|realm| !realm.users.is_empty() || !realm.secrets.is_empty());
        let may_wait = |error: &StoreError| error.may_pass() || has_users && !error.is_misconfigured();
        match directory.read().await {
            Err(error) if must_answer || !may_wait(&error) => return Err(OpenError::Store(error)),
            Err(error) => directory.wait_for_it(&error),
            Ok(()) => {}
        }
        if let StoreAddress::Sqlite(path) = &address
            && let Some(warning) = readable_by_all(path, "the keys and secrets in it")
        {
            tracing::warn!("{warning}");
        }
        if own_file.is_none() {
            tracing::info!("also using users, secrets and rules from {address}");
        }
        Ok(Some(Self { directory, own_file, taken: None, told: Vec::new() }))
    }

    /// Called when this store replaces `before` because of changed settings. If it is the same store, removed
    /// secrets stay valid for running allocations.
    pub(crate) fn replace(&self, before: &Self) {
        if self.directory.name() == before.directory.name() {
            self.directory.take_ended_secrets(&before.directory);
        }
    }

    /// Returns true if the store may have users. The embedded store has none before its file exists.
    pub(crate) fn is_in_use(&self) -> bool {
        self.own_file.as_ref().is_none_or(|file| file.is_file())
    }

    pub(crate) fn has_news(&self) -> bool {
        self.taken != Some((self.directory.generation(), self.is_in_use()))
    }

    pub(crate) fn taken(&self) -> Option<Taken> {
        self.taken
    }

    pub(crate) fn put_back(&mut self, taken: Option<Taken>) {
        self.taken = taken;
    }

    pub(crate) fn take(&mut self, settings: &Settings) -> Merged {
        let in_use = self.is_in_use();
        self.taken = Some((self.directory.generation(), in_use));
        let rules = self.directory.rules();
        let merged = Merged::new(settings, in_use, rules.as_deref());
        for line in merged.notes.iter().filter(|line| !self.told.contains(line)) {
            tracing::warn!("{line}");
        }
        self.told.clone_from(&merged.notes);
        merged
    }

    /// Creates a user in the embedded store if no user could authenticate.
    pub(crate) async fn make_up_a_user(&self, settings: &Settings) -> Option<Result<MadeUp, StoreError>> {
        let file = self.own_file.as_ref()?;
        match self.has_anybody(&settings.realm).await {
            Ok(true) => return None,
            Ok(false) => {}
            Err(error) => return Some(Err(error)),
        }
        let user = random_user();
        let UserSecret::Password(password) = &user.secret else { return None };
        let (realm, name) = (settings.realm.clone(), user.name.clone());
        let keys = UserKeys::new(&name, &realm, password.reveal());
        // Another process that starts on the same file may have created this user first.
        let made = self.directory.apply(&Edit::PutUser { realm, name, keys }, Existing::Keep).await;
        let dir = || file.parent().unwrap_or(Path::new("/")).to_owned();
        made.map(|existed| (!existed).then(|| MadeUp { user, dir: dir() })).transpose()
    }

    async fn has_anybody(&self, realm: &str) -> Result<bool, StoreError> {
        if !self.is_in_use() {
            return Ok(false);
        }
        let has_more = self.directory.rules().is_some_and(|rules| {
            !rules.token_keys.is_empty() || rules.realms.values().any(|realm| realm.named)
        });
        let has_secrets = self.directory.secrets(realm).is_some_and(|secrets| !secrets.is_empty());
        let has_users = || async { Ok(!self.directory.users(Some(realm), None).await?.is_empty()) };
        Ok(has_more || has_secrets || has_users().await?)
    }
}

pub(crate) struct MadeUp {
    pub(crate) user: ConfiguredUser,
    pub(crate) dir: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error(transparent)]
    Address(#[from] Mistakes),
    #[error(transparent)]
    Store(StoreError),
}

/// Current store, shared with other tasks; a reload replaces it.
pub(crate) type StoreInUse = Arc<RwLock<Option<UserStore>>>;

pub(crate) fn share(shared: &StoreInUse, store: Option<&OpenStore>) {
    *shared.write().unwrap_or_else(PoisonError::into_inner) = store.map(|store| store.directory.clone());
}

pub(crate) fn shared(shared: &StoreInUse) -> Option<UserStore> {
    shared.read().unwrap_or_else(PoisonError::into_inner).clone()
}

fn limits(settings: &StoreSettings) -> DirectoryLimits {
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    DirectoryLimits {
        users: settings.cache_users,
        lifetime: seconds(settings.cache_lifetime),
        negative: seconds(settings.cache_negative),
        stale: seconds(settings.cache_stale),
        deadline: seconds(settings.deadline),
        refresh: seconds(settings.refresh),
    }
}

/// Response to requests during a store outage.
pub(crate) fn failure(settings: &StoreSettings) -> StoreFailure {
    match settings.unavailable {
        WhenUnavailable::Error => StoreFailure::Answer,
        WhenUnavailable::Drop => StoreFailure::Drop,
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Merged {
    /// Realms, limits and token keys, merged from the configuration, which takes precedence, and the store.
    pub(crate) settings: Settings,
    /// Rules that only a store can have.
    pub(crate) rules: StoredRules,
    /// Rules of `peers.allow`, with the addresses of its names.
    pub(crate) allow: Vec<AllowRule>,
    notes: Vec<String>,
}

/// Peer and origin rules, for which the configuration has no keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoredRules {
    everywhere: PeerRanges,
    realms: HashMap<String, PeerRanges>,
    origins: Vec<(String, String)>,
}

impl Merged {
    pub(crate) fn of(settings: &Settings) -> Self {
        let allow = settings.allow.iter().flat_map(|peer| peer.rules(&[])).collect();
        Self { settings: settings.clone(), allow, ..Self::default() }
    }

    fn new(configured: &Settings, in_use: bool, rules: Option<&Rules>) -> Self {
        let mut merged = Self::of(configured);
        merged.settings.stored.in_use = in_use;
        let Some(rules) = rules else { return merged };
        let Self { settings, notes, .. } = &mut merged;
        notes.extend(rules.ignored.iter().cloned());
        settings.stored.md5_only =
            rules.md5_only.as_ref().map(|realms| realms.iter().map(|realm| realm.to_string()).collect());
        let mut left_out = 0_usize;
        for (name, realm) in &rules.realms {
            let StoredLimits { total_quota, user_quota, max_bps } = realm.limits;
            let rate = max_bps.map(Bandwidth::from_bytes);
            if **name == *settings.realm {
                settings.stored.allocations = total_quota;
                settings.stored.allocations_per_user = user_quota;
                settings.stored.rate_per_allocation = rate;
            } else if let Some(own) = settings.realms.iter_mut().find(|own| own.name == **name) {
                let added =
                    own.limits().filter(|(_, is_set)| !is_set).map(|(key, _)| (own.name.clone(), key));
                settings.stored.realm_limits.extend(added);
                own.allocations = own.allocations.or(total_quota);
                own.allocations_per_user = own.allocations_per_user.or(user_quota);
                own.bits_per_second_per_allocation = own.bits_per_second_per_allocation.or(rate.map(Some));
            } else if realm.named && settings.realms.len() >= realms::MOST_REALMS {
                left_out += 1;
            } else if realm.named {
                settings.realms.push(RealmSettings {
                    name: name.to_string(),
                    allocations: total_quota,
                    allocations_per_user: user_quota,
                    bits_per_second_per_allocation: rate.map(Some),
                    ..RealmSettings::default()
                });
            }
        }
        if left_out > 0 {
            notes.push(format!(
                "realms in the store that are not served: {left_out} (the maximum is {} besides server.realm)",
                realms::MOST_REALMS
            ));
        }
        for key in &rules.token_keys {
            let realm = key.realm.as_ref().filter(|realm| **realm != settings.realm);
            let (kid, of_realm) = (&key.kid, realm.unwrap_or(&settings.realm));
            let is_served =
                *of_realm == settings.realm || settings.realms.iter().any(|own| own.name == *of_realm);
            let same = |own: &TokenKeySettings| own.kid == *kid && own.realm.as_ref() == realm;
            if !is_served {
                notes.push(format!("oauth_key {kid:?} belongs to realm {of_realm:?}, which is not served"));
            } else if !settings.oauth.keys.iter().any(same) {
                let (kid, key, realm) = (kid.clone(), key.key.clone(), realm.cloned());
                settings.oauth.keys.push(TokenKeySettings { kid, key, max_lifetime: TOKEN_LIFETIME, realm });
            }
        }
        merged.rules = StoredRules {
            everywhere: rules.peers.clone(),
            realms: rules
                .realms
                .iter()
                .map(|(name, realm)| (name.to_string(), realm.peers.clone()))
                .collect(),
            origins: rules
                .origins
                .iter()
                .map(|(origin, realm)| (origin.to_string(), realm.to_string()))
                .collect(),
        };
        merged
    }

    /// Peer rules that apply to packets, and those of each realm. If the store has none, the configuration's
    /// rules apply everywhere.
    pub(crate) fn peers(&self) -> (PeerRules, HashMap<Box<str>, PeerRules>) {
        let Self { settings, rules, .. } = self;
        let configured = PeerRules {
            allow: self.allow.clone(),
            deny: settings.deny.clone(),
            allow_only: settings.allow_only,
            ..PeerRules::default()
        };
        let nothing = PeerRanges::default();
        if rules.everywhere == nothing && rules.realms.values().all(|realm| *realm == nothing) {
            return (configured, HashMap::new());
        }
        let mut packets = configured.clone();
        let realms = realms::all(settings).into_iter().map(|realm| {
            let own = rules.realms.get(realm.name).unwrap_or(&nothing);
            let allow = [&rules.everywhere.allow[..], &own.allow].concat();
            // Allow rules override deny rules, as in coturn.
            let deny = ip_range::difference(&[&rules.everywhere.deny[..], &own.deny].concat(), &allow);
            let mut peers = configured.clone();
            peers.allow.extend(allow.iter().flat_map(|range| range.prefixes()).map(AllowRule::of_others));
            peers.deny.extend(deny.iter().flat_map(|range| range.prefixes()));
            packets.allow.extend(peers.allow[configured.allow.len()..].iter().cloned());
            (realm.name.into(), peers)
        });
        let realms = realms.collect();
        (packets, realms)
    }

    pub(crate) fn origins(&self) -> HashMap<Box<str>, RealmId> {
        let all = realms::all(&self.settings);
        let ids: HashMap<&str, RealmId> =
            (0..).zip(&all).map(|(id, realm)| (realm.name, RealmId(id))).collect();
        let origins = self.rules.origins.iter();
        origins
            .filter_map(|(origin, realm)| Some((origin.as_str().into(), *ids.get(realm.as_str())?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use turnpike_config::{Secret, limit_keys};
    use turnpike_stores::{RealmRules, StoredTokenKey};
    use turnpike_turn::access_token::TokenKey;

    use super::*;

    fn range(text: &str) -> ip_range::IpRange {
        text.parse().expect("a range")
    }

    fn rules(realms: &[(&str, RealmRules)]) -> Rules {
        let realms = realms.iter().map(|(name, rules)| ((*name).into(), rules.clone())).collect();
        Rules { realms, ..Rules::default() }
    }

    fn limited(total: usize, user: usize) -> RealmRules {
        let limits = StoredLimits {
            total_quota: Some(total),
            user_quota: Some(user),
            max_bps: Some(1000 * total as u64),
        };
        RealmRules { named: true, limits, ..RealmRules::default() }
    }

    #[test]
    fn a_missing_parent_directory_is_reported_and_not_created() {
        let dir = turnpike_testkit::Dir::new();
        let settings = |state: &Path| {
            let mut settings = Settings::default();
            settings.store.state = StateDir::At(state.to_owned());
            settings
        };
        let mistyped = dir.at("lib/turnpike");
        let told = checked_address(&settings(&mistyped)).expect_err("lib does not exist").to_string();
        assert!(told.contains(&format!("store.state: no directory {}", dir.at("lib").display())), "{told}");
        assert!(!dir.at("lib").exists());
        assert!(checked_address(&settings(&dir.at("turnpike"))).is_ok());
        assert!(checked_address(&settings(Path::new("state"))).is_ok());
    }

    #[test]
    fn limits_of_the_configuration_override_those_of_the_store() {
        let own = RealmSettings {
            name: "own".to_owned(),
            allocations: Some(7),
            bits_per_second_per_allocation: Some(None),
            ..RealmSettings::default()
        };
        let settings = Settings { realms: vec![own], ..Settings::default() };
        let only_peers = RealmRules::default();
        let stored = rules(&[
            ("turnpike", limited(100, 10)),
            ("own", limited(200, 20)),
            ("new", limited(300, 30)),
            ("peers", only_peers),
        ]);
        let merged = Merged::new(&settings, true, Some(&stored)).settings;
        let limits: Vec<_> = realms::limits(&merged)
            .into_iter()
            .map(|limits| (limits.realm, limits.allocations, limits.allocations_per_user))
            .collect();
        assert_eq!(
            limits,
            [
                ("turnpike".to_owned(), Some(100), Some(10)),
                ("own".to_owned(), Some(7), Some(20)),
                ("new".to_owned(), Some(300), Some(30)),
            ]
        );
        let rates = ["turnpike", "own", "new"].map(|realm| limit_keys::rates(&merged, realm).per_allocation);
        assert_eq!(rates, [Some(800_000), None, Some(2_400_000)], "given in bytes per second");
        assert_eq!(merged.realms.len(), 2, "a realm that has only peer rules is not served");
        assert_eq!(Merged::new(&settings, false, None).settings, settings, "no rules, no additions");
    }

    #[test]
    fn surplus_realms_in_the_store_are_logged() {
        let named = |number: usize| RealmSettings { name: format!("r{number}"), ..RealmSettings::default() };
        let settings =
            Settings { realms: (1..realms::MOST_REALMS).map(named).collect(), ..Settings::default() };
        let merged =
            Merged::new(&settings, true, Some(&rules(&[("x", limited(1, 1)), ("y", limited(1, 1))])));
        assert_eq!(merged.settings.realms.len(), realms::MOST_REALMS);
        assert_eq!(
            merged.notes,
            ["realms in the store that are not served: 1 (the maximum is 65534 besides server.realm)"]
        );
    }

    #[test]
    fn token_keys_in_the_store_need_a_served_realm_and_a_unique_name() {
        let key = |byte| TokenKey::from_bytes(&[byte; 32]).expect("a key");
        let stored = |kid: &str, byte, realm: Option<&str>| StoredTokenKey {
            kid: kid.to_owned(),
            key: key(byte),
            realm: realm.map(str::to_owned),
        };
        let mut settings = Settings::default();
        settings.oauth.keys.push(TokenKeySettings {
            kid: "north".to_owned(),
            key: key(1),
            max_lifetime: 60,
            realm: None,
        });
        let mut all = rules(&[("new", limited(1, 1))]);
        all.token_keys = vec![
            stored("north", 2, None),
            stored("south", 3, Some("turnpike")),
            stored("east", 4, Some("new")),
            stored("west", 5, Some("elsewhere")),
        ];
        let merged = Merged::new(&settings, true, Some(&all));
        let keys: Vec<_> =
            merged.settings.oauth.keys.iter().map(|own| (own.kid.as_str(), own.key == key(1))).collect();
        assert_eq!(keys, [("north", true), ("south", false), ("east", false)]);
        assert_eq!(merged.settings.oauth.keys[1].realm, None);
        assert_eq!(merged.notes.len(), 1);
        assert!(merged.notes[0].contains("\"west\"") && merged.notes[0].contains("\"elsewhere\""));
    }

    #[test]
    fn allow_rules_in_the_store_override_deny_rules_per_realm() {
        let settings = Settings {
            deny: vec!["192.0.2.0/24".parse().expect("a prefix")],
            realms: vec![RealmSettings { name: "own".to_owned(), ..RealmSettings::default() }],
            stored: turnpike_config::Stored { in_use: true, ..turnpike_config::Stored::default() },
            ..Settings::default()
        };
        let mut stored = rules(&[(
            "own",
            RealmRules {
                peers: PeerRanges { allow: vec![range("10.0.0.5")], deny: vec![range("198.51.100.7")] },
                ..RealmRules::default()
            },
        )]);
        stored.peers.deny = vec![range("10.0.0.0-10.0.0.7"), range("203.0.114.0/24")];
        let (packets, realms) = Merged::new(&settings, true, Some(&stored)).peers();
        let permits = |realm: &str, ip: &str| realms[realm].permits(ip.parse().expect("an address"));
        for (ip, main, own) in [
            ("10.0.0.5", false, true),
            ("10.0.0.4", false, false),
            ("203.0.114.1", false, false),
            ("8.8.8.8", true, true),
            ("192.0.2.1", false, false),
        ] {
            assert_eq!((permits("turnpike", ip), permits("own", ip)), (main, own), "{ip}");
        }
        assert!(packets.permits("10.0.0.5".parse().expect("an address")), "allowed in at least one realm");
        assert!(!packets.permits("192.0.2.1".parse().expect("an address")));
        let (packets, realms) = Merged::new(&settings, true, Some(&rules(&[]))).peers();
        assert!(realms.is_empty() && packets.deny == settings.deny);
    }

    /// Synapse's documentation recommends allowing the address of the TURN server itself.
    #[test]
    fn allowing_our_own_address_in_the_store_exposes_no_local_services() {
        let ip: std::net::IpAddr = "10.0.0.1".parse().expect("an address");
        let settings = Settings {
            stored: turnpike_config::Stored { in_use: true, ..Default::default() },
            ..Settings::default()
        };
        let mut stored = rules(&[]);
        stored.peers.allow = vec![range("10.0.0.1"), range("10.0.0.9")];
        let (mut packets, _) = Merged::new(&settings, true, Some(&stored)).peers();
        packets.own = turnpike_turn::server::OwnEndpoints::new([ip], [], [], 49_152..=65_535);
        let permits = |at: &str| packets.permits_endpoint(at.parse().expect("an address"));
        assert!(!permits("10.0.0.1:22") && permits("10.0.0.1:50000"));
        assert!(permits("10.0.0.9:22"), "another machine");
    }

    #[test]
    fn the_servers_realm_is_written_next_to_its_store() {
        let dir = turnpike_testkit::Dir::new();
        let mut settings = Settings { realm: "example.org".to_owned(), ..Settings::default() };
        settings.store.state = StateDir::At(dir.path().join("missing"));
        note_realm(&settings);
        assert!(!dir.path().join("missing").exists(), "the directory was created");
        settings.store.state = StateDir::At(dir.path().to_owned());
        note_realm(&settings);
        assert_eq!(realm_of_another(&settings), None);
        settings.realm = "turnpike".to_owned();
        let expected = ("example.org".to_owned(), dir.path().join("realm"));
        assert_eq!(realm_of_another(&settings), Some(expected));
        settings.store.url = Some(Secret::new("redis://h/2"));
        assert_eq!(realm_of_another(&settings), None, "another store");
    }

    #[test]
    fn origins_select_served_realms() {
        let mut stored = rules(&[("new", limited(1, 1))]);
        stored.origins =
            [("https://a:443".into(), "new".into()), ("https://b:443".into(), "gone".into())].into();
        let merged = Merged::new(&Settings::default(), true, Some(&stored));
        assert_eq!(merged.origins(), [("https://a:443".into(), RealmId(1))].into());
    }

    #[test]
    fn an_invalid_store_url_names_the_key_but_not_the_password() {
        let settings = |url: &str| {
            let mut settings = Settings::default();
            settings.store.url = Some(Secret::new(url));
            settings
        };
        let error = address(&settings("postgres://u:hunter2@h")).expect_err("no database").to_string();
        assert!(error.starts_with("default: store.url: ") && !error.contains("hunter2"), "{error}");
        let found = address(&settings("redis://h/2")).expect("an address").expect("a store");
        assert_eq!((found.0.to_string().as_str(), found.1), ("redis://h/2", SqliteUse::Foreign));
        let mut own = Settings::default();
        own.store.state = StateDir::At("/tmp/x".into());
        let found = address(&own).expect("an address").expect("a store");
        assert_eq!(
            (found.0.to_string().as_str(), found.1),
            ("sqlite:///tmp/x/turnpike.sqlite", SqliteUse::Own)
        );
        own.store.state = StateDir::Off;
        assert!(address(&own).expect("nothing wrong").is_none());
    }
}
