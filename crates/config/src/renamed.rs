//! Renamed keys. Files and the environment may use the old name for one more version; a notice gives the new
//! name.

use turnpike_strict::{TableEntry, Value, ValueNode};

use crate::{Mistake, Origin, key::variable};

pub(crate) struct RenamedKey {
    pub(crate) old: &'static str,
    pub(crate) new: &'static str,
}

/// Keys whose old name this version accepts. A key of a repeated table (`[[realm]]`) must stay in its table.
pub(crate) const RENAMED: &[RenamedKey] = &[
    RenamedKey { old: "limits.session_length", new: "limits.max_allocation_duration" },
    RenamedKey { old: "realm.session_length", new: "realm.max_allocation_duration" },
];

/// Log targets whose old name this version accepts in `log.level`.
const RENAMED_LOG_TARGETS: [(&str, &str); 1] = [("turnpike::session", "turnpike::allocation")];

/// The log filter with the new names of targets; `None` if it contains no old name.
#[must_use]
pub fn rename_log_targets(filter: &str) -> Option<String> {
    let renamed = |directive: &str| {
        RENAMED_LOG_TARGETS.iter().find_map(|(old, new)| {
            let rest = directive.trim().strip_prefix(old)?;
            (rest.is_empty() || rest.starts_with(['=', '['])).then(|| format!("{new}{rest}"))
        })
    };
    filter.split(',').any(|directive| renamed(directive).is_some()).then(|| {
        let directives = filter.split(',');
        directives
            .map(|directive| renamed(directive).unwrap_or_else(|| directive.to_owned()))
            .collect::<Vec<_>>()
            .join(",")
    })
}

/// Gives the targets in `log.level` their new names; returns a notice if it contains an old name.
pub(crate) fn rename_log_level(level: &mut String, origin: &Origin) -> Option<String> {
    let new = rename_log_targets(level)?;
    let old = std::mem::replace(level, new);
    Some(format!("{origin}: log.level: {old:?} is now {level:?}: {ADVICE}"))
}

/// Result of renaming keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct RenamedUses {
    /// One notice for each renamed key.
    pub(crate) notices: Vec<String>,
    /// Keys that are set under both names.
    pub(crate) conflicts: Vec<Mistake>,
}

/// Gives the keys of a parsed file their new names.
pub(crate) fn rename_entries(entries: &mut Vec<TableEntry>, renamed: &[RenamedKey]) -> RenamedUses {
    let mut uses = RenamedUses::default();
    for key in renamed {
        let mut places = Vec::new();
        let (section, name) = key.old_parts();
        let (new_section, new_name) = key.new_parts();
        let mut moved = Vec::new();
        for entry in entries.iter_mut().filter(|entry| entry.key == section) {
            match &mut entry.node.value {
                Value::Table(members) if section == new_section => {
                    key.rename_in(members, &mut places, &mut uses);
                }
                Value::Table(members) => moved.extend(members.extract_if(.., |member| member.key == name)),
                Value::List(tables) if section == new_section => {
                    for table in tables {
                        if let Value::Table(members) = &mut table.value {
                            key.rename_in(members, &mut places, &mut uses);
                        }
                    }
                }
                _ => {}
            }
        }
        for member in moved {
            places.push(member.origin.clone());
            let members = table(entries, new_section, &member.origin);
            match members {
                Some(members) if members.iter().any(|member| member.key == new_name) => {
                    uses.conflicts.push(key.conflict(&member.origin));
                }
                Some(members) => members.push(TableEntry { key: new_name.to_owned(), ..member }),
                // A value that is not a table is reported when it is read.
                None => {}
            }
        }
        uses.notices.extend(key.notice(&places));
    }
    // A section that contained only moved keys may have a name that no longer exists.
    let is_emptied = |entry: &TableEntry| {
        matches!(&entry.node.value, Value::Table(members) if members.is_empty())
            && renamed.iter().any(|key| key.old_parts().0 == entry.key && key.new_parts().0 != entry.key)
    };
    entries.retain(|entry| !is_emptied(entry));
    uses
}

/// Gives environment variables their new names, including those that end in `_FILE`.
pub(crate) fn rename_variables(
    environment: &mut [(String, String)],
    renamed: &[RenamedKey],
    is_known: impl Fn(&str) -> bool,
) -> RenamedUses {
    let mut uses = RenamedUses::default();
    for key in renamed {
        for suffix in ["", "_FILE"] {
            let [old, new] = [key.old, key.new].map(|path| format!("{}{suffix}", variable(path)));
            // Keys of repeated tables have no variables.
            if !is_known(&new) {
                continue;
            }
            let has_new = environment.iter().any(|(name, _)| *name == new);
            let Some((name, _)) = environment.iter_mut().find(|(name, _)| *name == old) else { continue };
            let origin = Origin::Environment(old.clone());
            if has_new {
                let what = format!("{old} is the old name of {new}, and both are set");
                uses.conflicts.push(Mistake::new(&origin, key.new, what, format!("only {new}")));
            } else {
                uses.notices.push(format!("the environment variable {old} is now {new}: {ADVICE}"));
                name.clone_from(&new);
            }
        }
    }
    uses
}

const ADVICE: &str = "rename it; the next version refuses the old name";

impl RenamedKey {
    fn old_parts(&self) -> (&'static str, &'static str) {
        self.old.split_once('.').unwrap_or((self.old, ""))
    }

    fn new_parts(&self) -> (&'static str, &'static str) {
        self.new.split_once('.').unwrap_or((self.new, ""))
    }

    /// Renames the key within a table.
    fn rename_in(&self, members: &mut Vec<TableEntry>, places: &mut Vec<Origin>, uses: &mut RenamedUses) {
        let (name, new_name) = (self.old_parts().1, self.new_parts().1);
        let Some(at) = members.iter().position(|member| member.key == name) else { return };
        places.push(members[at].origin.clone());
        if members.iter().any(|member| member.key == new_name) {
            let member = members.remove(at);
            uses.conflicts.push(self.conflict(&member.origin));
        } else {
            members[at].key = new_name.to_owned();
        }
    }

    fn conflict(&self, origin: &Origin) -> Mistake {
        let what = format!("it is the old name of {}, and both are set", self.new);
        Mistake::new(origin, self.old, what, format!("only {}", self.new))
    }

    fn notice(&self, places: &[Origin]) -> Option<String> {
        let (first, more) = (places.first()?, places.len() - 1);
        let more = if more > 0 { format!(" (here and {more} more)") } else { String::new() };
        Some(format!("{first}: {} is now {}{more}: {ADVICE}", self.old, self.new))
    }
}

/// Members of the section, which is added if the file lacks it.
fn table<'e>(
    entries: &'e mut Vec<TableEntry>,
    section: &str,
    origin: &Origin,
) -> Option<&'e mut Vec<TableEntry>> {
    let at = entries.iter().position(|entry| entry.key == section).unwrap_or_else(|| {
        let node = ValueNode { value: Value::Table(Vec::new()), origin: origin.clone() };
        entries.push(TableEntry { key: section.to_owned(), origin: origin.clone(), node });
        entries.len() - 1
    });
    match &mut entries[at].node.value {
        Value::Table(members) => Some(members),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use turnpike_strict::parse_file;

    use super::*;
    use crate::{
        Flags, Mistakes, Sources, certificates::ReadCertificates, known_variables, realm_keys::REALM_KEYS,
        settings_of, sources,
    };

    const MOVED: &[RenamedKey] = &[
        RenamedKey { old: "server.deadline", new: "shutdown.deadline" },
        RenamedKey { old: "retired.level", new: "log.level" },
        RenamedKey { old: "rule.tcp_nodelay", new: "rule.nodelay" },
    ];

    fn entries(text: &str) -> Vec<TableEntry> {
        let mut problems = Vec::new();
        let entries = parse_file(Path::new("t.toml"), text, &mut problems);
        assert!(problems.is_empty());
        entries
    }

    /// Keys in the order of the file, each prefixed with its section.
    fn keys(entries: &[TableEntry]) -> Vec<String> {
        let of = |section: &str, node: &ValueNode| match &node.value {
            Value::Table(members) => {
                members.iter().map(|member| format!("{section}.{}", member.key)).collect()
            }
            _ => Vec::new(),
        };
        let each = entries.iter().flat_map(|entry| match &entry.node.value {
            Value::List(tables) => tables.iter().flat_map(|table| of(&entry.key, table)).collect(),
            _ => of(&entry.key, &entry.node),
        });
        each.collect()
    }

    fn load(text: &str, environment: &[(&str, &str)]) -> Result<crate::LoadedConfig<()>, Mistakes> {
        let environment = environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        let sources = Sources::new(None, environment, Flags::new());
        sources.merge(entries(text), Vec::new(), |_| ReadCertificates::default())
    }

    #[test]
    fn new_names_are_keys_and_old_names_are_not() {
        let settings = || sources::key_paths().chain(crate::forward::key_paths());
        let all = || settings().chain(REALM_KEYS.iter().map(|spec| spec.path));
        for RenamedKey { old, new } in RENAMED {
            assert!(all().any(|path| path == *new), "{new}");
            assert!(all().all(|path| path != *old), "{old}");
        }
    }

    #[test]
    fn examples_and_translations_use_new_names() {
        for text in [
            include_str!("../../../examples/turnpike.toml"),
            include_str!("../../../examples/forward.toml"),
            include_str!("../../convert/src/coturn/tests/all.toml"),
        ] {
            for key in RENAMED {
                let name = key.old_parts().1;
                assert!(
                    !text.lines().any(|line| line.trim_start_matches(['#', ' ']).starts_with(name)),
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn an_old_key_is_read_with_one_notice() {
        let realm = "[[realm]]\nname = \"a\"\nsecrets = [\"s\"]\nsession_length = 600\n";
        let text = format!("[limits]\nsession_length = 3600\n{realm}{}", realm.replace("\"a\"", "\"b\""));
        let loaded = load(&text, &[]).expect("old keys are accepted");
        assert_eq!(loaded.settings.max_allocation_duration, Some(3600));
        assert!(loaded.settings.realms.iter().all(|realm| realm.max_allocation_duration == Some(Some(600))));
        assert_eq!(
            loaded.warnings,
            [
                "t.toml:2:1: limits.session_length is now limits.max_allocation_duration: rename it; the next version refuses the old name",
                "t.toml:6:1: realm.session_length is now realm.max_allocation_duration (here and 1 more): rename it; the next \
                 version refuses the old name",
            ]
        );
    }

    #[test]
    fn effective_settings_have_the_new_name() {
        let settings = settings_of("[limits]\nsession_length = 3600\n").expect("the old key is accepted");
        let text = settings.to_toml();
        assert!(text.contains("max_allocation_duration = 3600"), "{text}");
        assert!(!text.contains("session_length"), "{text}");
    }

    #[test]
    fn both_names_in_one_source_are_an_error() {
        let text = "[limits]\nmax_allocation_duration = 600\nsession_length = 3600\n";
        let Mistakes(mistakes) = load(text, &[]).expect_err("both names are set");
        assert_eq!(mistakes.len(), 1, "{mistakes:?}");
        let shown = mistakes[0].to_string();
        assert!(
            shown.contains("t.toml:3:1") && shown.contains("only limits.max_allocation_duration"),
            "{shown}"
        );
        let environment =
            [("TURNPIKE_LIMITS_MAX_ALLOCATION_DURATION", "60"), ("TURNPIKE_LIMITS_SESSION_LENGTH", "61")];
        let Mistakes(mistakes) = load("", &environment).expect_err("both names are set");
        assert!(mistakes[0].to_string().contains("TURNPIKE_LIMITS_SESSION_LENGTH"), "{mistakes:?}");
    }

    #[test]
    fn an_old_variable_is_read_with_a_notice() {
        let loaded =
            load("[limits]\nmax_allocation_duration = 600\n", &[("TURNPIKE_LIMITS_SESSION_LENGTH", "60")])
                .expect("the old variable is accepted");
        assert_eq!(loaded.settings.max_allocation_duration, Some(60));
        assert_eq!(
            loaded.warnings,
            [
                "the environment variable TURNPIKE_LIMITS_SESSION_LENGTH is now TURNPIKE_LIMITS_MAX_ALLOCATION_DURATION: rename it; the next \
              version refuses the old name"
            ]
        );
    }

    #[test]
    fn an_error_in_an_old_key_names_its_line() {
        let Mistakes(mistakes) = load("[limits]\nsession_length = 59\n", &[]).expect_err("59 is too short");
        let shown = mistakes[0].to_string();
        assert!(shown.contains("t.toml:2:18") && shown.contains("60 to 31536000"), "{shown}");
    }

    #[test]
    fn a_key_moves_to_another_section() {
        for (text, moved) in [
            ("[server]\ndeadline = 1\nudp = true", &["server.udp", "shutdown.deadline"][..]),
            (
                "[shutdown]\nupgrade_deadline = 2\n[server]\ndeadline = 1",
                &["shutdown.upgrade_deadline", "shutdown.deadline"],
            ),
            ("[retired]\nlevel = \"info\"", &["log.level"]),
            ("[retired]\nother = 1", &["retired.other"]),
            ("[[rule]]\ntcp_nodelay = true\n[[rule]]\nname = \"b\"", &["rule.nodelay", "rule.name"]),
        ] {
            let mut entries = entries(text);
            let uses = rename_entries(&mut entries, MOVED);
            assert_eq!(keys(&entries), moved, "{text}");
            assert!(uses.conflicts.is_empty(), "{text}");
            assert_eq!(uses.notices.len(), usize::from(!text.contains("other")), "{text}");
        }
    }

    #[test]
    fn a_moved_key_must_not_be_set_in_both_places() {
        let mut entries = entries("[server]\ndeadline = 1\n[shutdown]\ndeadline = 2");
        let uses = rename_entries(&mut entries, MOVED);
        assert_eq!(uses.conflicts.len(), 1);
        assert_eq!(keys(&entries), ["shutdown.deadline"]);
    }

    #[test]
    fn an_old_log_target_is_renamed_with_a_notice() {
        for (old, new) in [
            ("info,turnpike::session=off", Some("info,turnpike::allocation=off")),
            ("turnpike::session[x]=debug, warn", Some("turnpike::allocation[x]=debug, warn")),
            ("info,turnpike::sessions=off", None),
            ("info", None),
        ] {
            assert_eq!(rename_log_targets(old).as_deref(), new, "{old}");
        }
        let loaded = load("[log]\nlevel = \"info,turnpike::session=off\"\n", &[]).expect("a filter");
        assert_eq!(loaded.settings.log.level, "info,turnpike::allocation=off");
        assert_eq!(loaded.warnings.len(), 1, "{:?}", loaded.warnings);
    }

    #[test]
    fn a_file_variable_is_renamed_too() {
        let mut environment = vec![("TURNPIKE_SERVER_DEADLINE_FILE".to_owned(), "/run/deadline".to_owned())];
        let known = known_variables();
        let uses = rename_variables(&mut environment, MOVED, |name| known.iter().any(|known| known == name));
        assert_eq!(environment[0].0, "TURNPIKE_SHUTDOWN_DEADLINE_FILE");
        assert_eq!(uses.notices.len(), 1);
    }
}
