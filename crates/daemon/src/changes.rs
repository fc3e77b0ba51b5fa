//! What a reload has changed, for the log and for whoever asked for it: a line for each key with its old and its new value, and for each rule
//! and realm; of users and secrets their number. Never a secret, and of no list more than a line can hold.

use std::{collections::HashMap, hash::Hash};

use turnpike_config::{Change, Secret, Settings, UserSecret, forward::ForwardSettings, realms};
use turnpike_relay::{Identity, certificates::Certificate};

/// Names of one list in a line.
const NAMED: usize = 20;

/// What came, what went, what is there under the same name and yet another.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Difference<K> {
    pub(crate) added: Vec<K>,
    pub(crate) removed: Vec<K>,
    pub(crate) changed: Vec<K>,
}

impl<K: Hash + Eq + Clone> Difference<K> {
    /// Between things that have names, in the order of `old` and `new`.
    pub(crate) fn of<T>(old: &[(K, T)], new: &[(K, T)], same: impl Fn(&T, &T) -> bool) -> Self {
        let index = |list: &[(K, T)]| -> HashMap<K, usize> {
            list.iter().enumerate().map(|(at, (name, _))| (name.clone(), at)).collect()
        };
        let (before, after) = (index(old), index(new));
        let missing = |list: &[(K, T)], there: &HashMap<K, usize>| {
            let names = list.iter().map(|(name, _)| name);
            names.filter(|name| !there.contains_key(*name)).cloned().collect()
        };
        let has_changed =
            |(name, thing): &&(K, T)| before.get(name).is_some_and(|at| !same(&old[*at].1, thing));
        Self {
            added: missing(new, &before),
            removed: missing(old, &after),
            changed: new.iter().filter(has_changed).map(|(name, _)| name.clone()).collect(),
        }
    }

    fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }

    /// `2 added, 1 changed`.
    fn counted(&self) -> String {
        let Self { added, removed, changed } = self;
        counted(&[(added.len(), "added"), (removed.len(), "removed"), (changed.len(), "changed")])
    }

    /// `what NAME: added` or `removed`, a line each.
    fn came_and_went(&self, what: &str) -> Vec<String>
    where
        K: AsRef<str>,
    {
        let all = [(&self.added, "added"), (&self.removed, "removed")];
        let lines = all.into_iter().flat_map(|(names, how)| names.iter().map(move |name| (name, how)));
        lines.map(|(name, how)| format!("{what} {}: {how}", name.as_ref())).collect()
    }

    /// The same, and `what NAME: changed`.
    fn lines(&self, what: &str) -> Vec<String>
    where
        K: AsRef<str>,
    {
        let mut lines = self.came_and_went(what);
        lines.extend(self.changed.iter().map(|name| format!("{what} {}: changed", name.as_ref())));
        lines
    }
}

/// Writes them into the log, as many as somebody can read.
fn say_each(lines: &[String]) {
    const MOST: usize = 200;
    for line in lines.iter().take(MOST) {
        tracing::info!("reloaded {line}");
    }
    if let Some(more @ 1..) = lines.len().checked_sub(MOST) {
        tracing::info!("reloaded {more} more; `turnpike reload` names them all");
    }
}

/// `2 added, 1 changed`; or `changed`, where it is but the order.
fn counted(counts: &[(usize, &str)]) -> String {
    let counted = counts.iter().filter(|(count, _)| *count > 0);
    let counted: Vec<String> = counted.map(|(count, how)| format!("{count} {how}")).collect();
    if counted.is_empty() { "changed".to_owned() } else { counted.join(", ") }
}

/// Names as a line has them; `None` for none.
pub(crate) fn names<K: AsRef<str>>(names: &[K]) -> Option<String> {
    let shown: Vec<&str> = names.iter().take(NAMED).map(AsRef::as_ref).collect();
    let text = shown.join(", ");
    match names.len().saturating_sub(NAMED) {
        _ if names.is_empty() => None,
        0 => Some(text),
        more => Some(format!("{text} and {more} more")),
    }
}

/// A count as a line has it; `None` for zero.
fn count<K>(list: &[K]) -> Option<usize> {
    Some(list.len()).filter(|count| *count > 0)
}

/// Of a server's reload.
pub(crate) struct ServeChanges<'s> {
    keys: Vec<&'static str>,
    /// One for each key, realm and key of a realm.
    lines: Vec<String>,
    realms: Difference<&'s str>,
    /// By realm and name.
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
            this.lines.push(format!("alternate: there were {}, now {}", count(old), count(new)));
        }
        this.lines.extend(realm_lines(&this.realms, old, new));
        this
    }

    /// A line for each change.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.clone()
    }

    /// The lines of the log: those, and what they come to.
    pub(crate) fn say(&self, settings: &Settings) {
        say_each(&self.lines);
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
                "configuration reloaded; nothing in it has changed that a reload takes"
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

/// `KEY: what was -> what is`, cut where it is long.
fn line(key: &str, change: &Change) -> String {
    const LONGEST: usize = 200;
    let cut = |text: &str| match text.char_indices().nth(LONGEST) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None if text.is_empty() => "not set".to_owned(),
        None => text.to_owned(),
    };
    match &change.values {
        Some((was, is)) => format!("{key}: {} -> {}", cut(was), cut(is)),
        None => format!("{key}: changed"),
    }
}

/// A line for each realm that came or went, and for each key of those that are another now.
fn realm_lines(realms: &Difference<&str>, old: &Settings, new: &Settings) -> Vec<String> {
    let find = |settings: &Settings, name: &str| {
        settings.realms.iter().find(|realm| realm.name == name).cloned().unwrap_or_default()
    };
    let mut lines = realms.came_and_went("realm");
    for name in &realms.changed {
        for change in find(old, name).changed(&find(new, name)) {
            lines.push(line(&format!("realm {name}, {}", change.key), &change));
        }
    }
    lines
}

/// Of all realms, with the realm.
fn users(settings: &Settings) -> Vec<((&str, &str), &UserSecret)> {
    let main = (settings.realm.as_str(), settings.users.as_slice());
    let tenants = settings.realms.iter().map(|realm| (realm.name.as_str(), realm.users.as_slice()));
    let all = std::iter::once(main).chain(tenants);
    all.flat_map(|(realm, users)| users.iter().map(move |user| ((realm, user.name.as_str()), &user.secret)))
        .collect()
}

/// Of all realms, with the realm.
fn secrets(settings: &Settings) -> Vec<(&str, &Secret)> {
    let main = (settings.realm.as_str(), settings.secrets.as_slice());
    let tenants = settings.realms.iter().map(|realm| (realm.name.as_str(), realm.secrets.as_slice()));
    let all = std::iter::once(main).chain(tenants);
    all.flat_map(|(realm, secrets)| secrets.iter().map(move |secret| (realm, secret))).collect()
}

/// Of certificates that were read again, by file.
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

    /// A line for each change.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.files.lines("certificate")
    }

    /// The line of the log.
    pub(crate) fn say(&self) {
        let Self { files, certificates } = self;
        if files.is_empty() {
            tracing::info!(certificates, "certificates loaded; they are those from before");
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

/// Of a forwarder's reload.
pub(crate) struct ForwardChanges<'s> {
    keys: Vec<&'static str>,
    /// One for each key and rule.
    lines: Vec<String>,
    rules: Difference<&'s str>,
}

impl<'s> ForwardChanges<'s> {
    pub(crate) fn new(old: &'s ForwardSettings, new: &'s ForwardSettings) -> Self {
        let rules = |settings: &'s ForwardSettings| {
            settings.rules.iter().map(|rule| (rule.id.0.as_str(), rule)).collect::<Vec<_>>()
        };
        let rules = Difference::of(&rules(old), &rules(new), PartialEq::eq);
        let changes = old.changed(new);
        let mut lines: Vec<String> = changes.iter().map(|change| line(change.key, change)).collect();
        lines.extend(rules.lines("rule"));
        Self { keys: changes.iter().map(|change| change.key).collect(), lines, rules }
    }

    /// A line for each change.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.clone()
    }

    /// The lines of the log: those, and what they come to; `rules` is how many there are now.
    pub(crate) fn say(&self, rules: usize) {
        say_each(&self.lines);
        if self.lines.is_empty() {
            tracing::info!(rules, "rules reloaded; nothing in them has changed");
            return;
        }
        tracing::info!(
            rules,
            added = names(&self.rules.added),
            removed = names(&self.rules.removed),
            changed = names(&self.rules.changed),
            settings_changed = names(&self.keys),
            "rules reloaded"
        );
    }
}

#[cfg(test)]
mod tests {
    use turnpike_config::{RealmSettings, User};

    use super::*;

    fn user(name: &str, password: &str) -> User {
        User { name: name.to_owned(), secret: UserSecret::Password(Secret::new(password)) }
    }

    #[test]
    fn what_came_went_and_changed_is_told_by_name() {
        let list = |text: &str| -> Vec<(char, u8)> {
            text.split(' ').map(|item| (item.chars().next().unwrap(), item.as_bytes()[1])).collect()
        };
        let difference = Difference::of(&list("a1 b1 c1"), &list("d1 c2 a1"), PartialEq::eq);
        assert_eq!(difference, Difference { added: vec!['d'], removed: vec!['b'], changed: vec!['c'] });
        assert!(Difference::of(&list("a1 b2"), &list("b2 a1"), PartialEq::eq).is_empty());
    }

    #[test]
    fn a_long_list_is_cut() {
        let list: Vec<String> = (0..25).map(|n| format!("r{n}")).collect();
        let text = names(&list).unwrap();
        assert!(text.starts_with("r0, r1, ") && text.ends_with("r19 and 5 more"), "{text}");
        assert_eq!(names::<String>(&[]), None);
    }

    #[test]
    fn users_and_secrets_are_counted_and_a_new_password_is_a_change() {
        let old = Settings {
            users: vec![user("alice", "one"), user("bob", "x")],
            secrets: vec![Secret::new("old"), Secret::new("kept")],
            realms: vec![RealmSettings {
                name: "a".to_owned(),
                users: vec![user("carol", "x")],
                ..RealmSettings::default()
            }],
            ..Settings::default()
        };
        let mut new = old.clone();
        new.users = vec![user("alice", "two"), user("dave", "x"), user("eve", "x")];
        new.secrets = vec![Secret::new("kept"), Secret::new("new")];
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
