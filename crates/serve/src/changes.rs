//! Log lines about changes made by a reload: one per key and realm, except that users and secrets are
//! only counted.

use turnpike_config::{Secret, Settings, UserSecret, realms};
use turnpike_process::changes::{Difference, counted, line, log_each, names};
use turnpike_relay::{Identity, certificates::Certificate};

fn count<K>(list: &[K]) -> Option<usize> {
    Some(list.len()).filter(|count| *count > 0)
}

pub(crate) struct ServeChanges<'s> {
    keys: Vec<&'static str>,
    lines: Vec<String>,
    realms: Difference<&'s str>,
    /// Changes to users, by realm and name.
    users: Difference<(&'s str, &'s str)>,
    secrets: (usize, usize),
}

impl<'s> ServeChanges<'s> {
    pub(crate) fn new(old: &'s Settings, new: &'s Settings) -> Self {
        let realms = |settings: &'s Settings| {
            settings.realms.iter().map(|realm| (realm.name.as_str(), realm)).collect::<Vec<_>>()
        };
        let (before, after) = (secrets(old), secrets(new));
        let missing = |list: &[(&str, &Secret)], there: &[(&str, &Secret)]| {
            list.iter().filter(|secret| !there.contains(secret)).count()
        };
        let mut this = Self {
            keys: Vec::new(),
            lines: Vec::new(),
            realms: Difference::of(&realms(old), &realms(new), PartialEq::eq),
            users: Difference::of(&users(old), &users(new), PartialEq::eq),
            secrets: (missing(&after, &before), missing(&before, &after)),
        };
        for change in old.changed(new) {
            this.keys.push(change.key);
            this.lines.push(match change.key {
                "auth.users" => format!("auth.users: {}", this.users.counted()),
                "auth.secrets" => {
                    let (added, removed) = this.secrets;
                    format!("auth.secrets: {}", counted(&[(added, "added"), (removed, "removed")]))
                }
                key => line(key, &change),
            });
        }
        if old.alternates != new.alternates {
            this.keys.push("alternate");
            let count = |settings: &Settings| settings.alternates.len();
            this.lines.push(format!("alternate: number of servers {} -> {}", count(old), count(new)));
        }
        this.lines.extend(realm_lines(&this.realms, old, new));
        this
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.clone()
    }

    pub(crate) fn log(&self, settings: &Settings) {
        log_each(&self.lines);
        let all = realms::all(settings);
        let (users, secrets) = all.iter().fold((0, 0), |(users, secrets), realm| {
            (users + realm.users.len(), secrets + realm.secrets.len())
        });
        let nonzero = |count: usize| Some(count).filter(|count| *count > 0);
        if self.lines.is_empty() {
            tracing::info!(
                realms = all.len(),
                users,
                secrets,
                "configuration reloaded; no reloadable setting has changed"
            );
            return;
        }
        tracing::info!(
            realms = all.len(),
            users,
            secrets,
            changed = names(&self.keys),
            realms_added = names(&self.realms.added),
            realms_removed = names(&self.realms.removed),
            realms_changed = names(&self.realms.changed),
            users_added = count(&self.users.added),
            users_removed = count(&self.users.removed),
            users_changed = count(&self.users.changed),
            secrets_added = nonzero(self.secrets.0),
            secrets_removed = nonzero(self.secrets.1),
            "configuration reloaded"
        );
    }
}

fn realm_lines(realms: &Difference<&str>, old: &Settings, new: &Settings) -> Vec<String> {
    let find = |settings: &Settings, name: &str| {
        settings.realms.iter().find(|realm| realm.name == name).cloned().unwrap_or_default()
    };
    let mut lines = realms.added_and_removed("realm");
    for name in &realms.changed {
        for change in find(old, name).changed(&find(new, name)) {
            lines.push(line(&format!("realm {name}, {}", change.key), &change));
        }
    }
    lines
}

fn users(settings: &Settings) -> Vec<((&str, &str), &UserSecret)> {
    let main = (settings.realm.as_str(), settings.auth.users.as_slice());
    let tenants = settings.realms.iter().map(|realm| (realm.name.as_str(), realm.users.as_slice()));
    let all = std::iter::once(main).chain(tenants);
    all.flat_map(|(realm, users)| users.iter().map(move |user| ((realm, user.name.as_str()), &user.secret)))
        .collect()
}

fn secrets(settings: &Settings) -> Vec<(&str, &Secret)> {
    let main = (settings.realm.as_str(), settings.auth.secrets.as_slice());
    let tenants = settings.realms.iter().map(|realm| (realm.name.as_str(), realm.secrets.as_slice()));
    let all = std::iter::once(main).chain(tenants);
    all.flat_map(|(realm, secrets)| secrets.iter().map(move |secret| (realm, secret))).collect()
}

pub(crate) struct CertificateChanges {
    files: Difference<String>,
    certificates: usize,
}

impl CertificateChanges {
    pub(crate) fn new(old: &[Certificate], new: &[Certificate]) -> Self {
        fn files(certificates: &[Certificate]) -> Vec<(String, &Identity)> {
            let file = |certificate: &Certificate| certificate.file.display().to_string();
            certificates.iter().map(|certificate| (file(certificate), &certificate.identity)).collect()
        }
        let files = Difference::of(&files(old), &files(new), PartialEq::eq);
        Self { files, certificates: new.len() }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.files.lines("certificate")
    }

    pub(crate) fn log(&self) {
        let Self { files, certificates } = self;
        if files.is_empty() {
            tracing::info!(certificates, "certificates loaded; no changes");
            return;
        }
        tracing::info!(
            certificates,
            added = names(&files.added),
            removed = names(&files.removed),
            changed = names(&files.changed),
            "certificates loaded"
        );
    }
}

#[cfg(test)]
mod tests {
    use turnpike_config::{AuthSettings, ConfiguredUser, RealmSettings};

    use super::*;

    fn user(name: &str, password: &str) -> ConfiguredUser {
        ConfiguredUser { name: name.to_owned(), secret: UserSecret::Password(Secret::new(password)) }
    }

    #[test]
    fn users_and_secrets_are_counted_and_a_new_password_is_a_change() {
        let old = Settings {
            auth: AuthSettings {
                users: vec![user("alice", "one"), user("bob", "x")],
                secrets: vec![Secret::new("old"), Secret::new("kept")],
                ..AuthSettings::default()
            },
            realms: vec![RealmSettings {
                name: "a".to_owned(),
                users: vec![user("carol", "x")],
                ..RealmSettings::default()
            }],
            ..Settings::default()
        };
        let mut new = old.clone();
        new.auth.users = vec![user("alice", "two"), user("dave", "x"), user("eve", "x")];
        new.auth.secrets = vec![Secret::new("kept"), Secret::new("new")];
        new.realms[0].users.clear();
        new.realms.push(RealmSettings { name: "b".to_owned(), ..RealmSettings::default() });
        let changes = ServeChanges::new(&old, &new);
        assert_eq!(changes.keys, ["auth.users", "auth.secrets"]);
        let counts = [&changes.users.added, &changes.users.removed, &changes.users.changed].map(Vec::len);
        assert_eq!(counts, [2, 2, 1]);
        assert_eq!(changes.secrets, (1, 1));
        assert_eq!((&changes.realms.added, &changes.realms.changed), (&vec!["b"], &vec!["a"]));
        new.allocation_limits.allocations = 20_000;
        new.realms[1].secrets.push(Secret::new("hidden"));
        let changes = ServeChanges::new(&old, &new);
        assert_eq!(
            changes.lines(),
            [
                "auth.users: 2 added, 2 removed, 1 changed",
                "auth.secrets: 2 added, 1 removed",
                "limits.allocations: 16384 -> 20000",
                "realm b: added",
                "realm a, realm.users: changed",
            ]
        );
        let again = ServeChanges::new(&new, &new);
        assert!(again.keys.is_empty() && again.realms.is_empty() && again.users.is_empty());
    }
}
