//! Detects files with secrets that every local user can read.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use turnpike_strict::{TableEntry, Value, ValueNode};

use super::{Origin, key::KeySpec, realm_keys::REALM_KEYS, settings::KEYS};

/// Group read permission is fine: a server that does not run as root reads the file that way.
#[must_use]
pub fn readable_by_all(file: &Path, what: &str) -> Option<String> {
    let mode = fs::metadata(file).ok()?.mode();
    (mode & 0o004 != 0).then(|| {
        let (mode, file) = (mode & 0o777, file.display());
        format!("{file}: every user on this machine can read {what} (mode {mode:03o}); chmod o= {file}")
    })
}

/// Files that hold secrets, even if a flag overrides them.
pub(super) fn files(entries: &[TableEntry], environment: &[(String, String)]) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for spec in KEYS.iter().filter(|spec| spec.secret) {
        let [_, variable] = spec.variables();
        let named = environment.iter().filter(|(name, _)| *name == variable);
        found.extend(named.map(|(_, file)| PathBuf::from(file)));
    }
    for section in entries {
        if section.key == "realm" {
            let Value::List(realms) = &section.node.value else { continue };
            for realm in realms {
                look_into(&realm.value, REALM_KEYS, "realm", &mut found);
            }
        } else {
            look_into(&section.node.value, KEYS, &section.key, &mut found);
        }
    }
    found
}

fn look_into<S>(table: &Value, keys: &[KeySpec<S>], section: &str, found: &mut BTreeSet<PathBuf>) {
    let Value::Table(members) = table else { return };
    for member in members {
        let is_it = |spec: &&KeySpec<S>| spec.section() == section && spec.name() == member.key;
        if keys.iter().find(is_it).is_some_and(|spec| spec.secret) {
            secrets_in(&member.node, found);
        }
    }
}

fn secrets_in(node: &ValueNode, found: &mut BTreeSet<PathBuf>) {
    match &node.value {
        Value::Text(text) if !text.is_empty() => {
            if let Origin::File { path, .. } = &node.origin {
                found.insert(path.clone());
            }
        }
        Value::List(nodes) => nodes.iter().for_each(|node| secrets_in(node, found)),
        Value::Table(members) => {
            for member in members {
                match (member.key.as_str(), &member.node.value) {
                    ("password" | "key", _) => secrets_in(&member.node, found),
                    ("key_file", Value::Text(file)) => _ = found.insert(PathBuf::from(file.as_str())),
                    _ => {}
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use turnpike_strict::parse_file;

    #[test]
    fn world_readable_secret_file_is_a_warning() {
        let dir = turnpike_testkit::Dir::new();
        let key = dir.file("key.pem", "");
        for (mode, told) in [(0o600, false), (0o640, false), (0o644, true), (0o604, true)] {
            fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
            let warning = readable_by_all(&key, "this private key");
            assert_eq!(warning.is_some(), told, "{mode:o}");
            let words = [key.to_str().unwrap(), &format!("mode {mode:o}"), "chmod", "this private key"];
            assert!(warning.is_none_or(|text| words.iter().all(|word| text.contains(word))), "{mode:o}");
        }
    }

    #[test]
    fn secret_is_found_in_each_form() {
        let holds = |text: &str| {
            let mut problems = Vec::new();
            let entries = parse_file(Path::new("t.toml"), text, &mut problems);
            assert!(problems.is_empty(), "{text}: {problems:?}");
            files(&entries, &[]).into_iter().collect::<Vec<_>>()
        };
        for secret in [
            "[auth]\nusers = [\"ned:one\"]",
            "[auth]\nusers = [{ name = \"ned\", password = \"one\" }]",
            "[auth]\nusers = [{ name = \"ned\", key = \"0123\" }]",
            "[auth]\nusers = [{ name = \"ned\", key = [\"0123\"] }]",
            "[auth]\nsecrets = [\"north\"]",
            "[[realm]]\nname = \"a\"\n[[realm]]\nname = \"b\"\nsecrets = [\"north\"]",
            "[[realm]]\nname = \"a\"\nusers = [\"ned:one\"]",
            "[[oauth.key]]\nkid = \"k\"\nkey = \"AAEC\"",
        ] {
            assert_eq!(holds(secret), [Path::new("t.toml")], "{secret}");
        }
        for open in [
            "",
            "[server]\nrealm = \"a\"\n[auth]\nrequired = true\nusers = []\nsecrets = []",
            "[[realm]]\nname = \"a\"\nserver_names = [\"x\"]",
            "[tls]\nkey = \"turn.key\"",
        ] {
            assert!(holds(open).is_empty(), "{open}");
        }
        assert_eq!(holds("[[oauth.key]]\nkid = \"k\"\nkey_file = \"north.key\""), [Path::new("north.key")]);
    }

    #[test]
    fn secret_files_from_the_environment_are_found() {
        let environment = [
            ("TURNPIKE_AUTH_SECRETS_FILE", "/run/secrets/a"),
            ("TURNPIKE_AUTH_USERS_FILE", "/run/secrets/b"),
            ("TURNPIKE_AUTH_SECRETS", "north"),
            ("TURNPIKE_SERVER_REALM_FILE", "/etc/hostname"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let found = files(&[], &environment);
        assert_eq!(
            found.into_iter().collect::<Vec<_>>(),
            ["/run/secrets/a", "/run/secrets/b"].map(PathBuf::from)
        );
    }
}
