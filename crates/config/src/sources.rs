//! Sources of the settings of `serve`, in order of precedence and key by key: flags, environment
//! (`TURNPIKE_SECTION_KEY`, or a file that `..._FILE` names), file, passed sockets, defaults. All errors
//! are reported together.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use turnpike_convert::wrong_format;
use turnpike_strict::{TableEntry, Value, ValueNode, file_text, nearest, parse_file};

use crate::{
    AlternateSettings, Checks, Flags, Mistake, Mistakes, Origin, RealmSettings, Settings,
    alternate_keys::ALTERNATE_KEYS,
    certificates::ReadCertificates,
    check,
    key::{self, KeySpec},
    realm_keys::REALM_KEYS,
    renamed::{RENAMED, RenamedUses, rename_entries, rename_log_level, rename_variables},
    settings::KEYS,
    source, tables, world_readable,
};

#[derive(Clone, Debug)]
pub struct LoadedConfig<C> {
    pub settings: Settings,
    pub certificates: Vec<C>,
    pub certificate_problems: Vec<Mistake>,
    pub warnings: Vec<String>,
}

#[derive(Clone)]
pub struct Sources {
    file: Option<PathBuf>,
    flags: Flags,
    environment: Vec<(String, String)>,
    /// Lowest precedence.
    fallback: Flags,
    checks: Checks,
    renamed_variables: RenamedUses,
}

impl Sources {
    /// Uses this process's environment. Variables that are not UTF-8 are ignored.
    pub fn from_process(file: Option<PathBuf>, flags: Flags, checks: Checks) -> Self {
        let environment = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with("TURNPIKE_"))
            .collect();
        Self { checks, ..Self::new(file, environment, flags) }
    }

    pub fn new(file: Option<PathBuf>, mut environment: Vec<(String, String)>, flags: Flags) -> Self {
        let known = known_variables();
        let is_known = |name: &str| known.iter().any(|known| known == name);
        let renamed_variables = rename_variables(&mut environment, RENAMED, is_known);
        Self { file, flags, environment, fallback: Flags::new(), checks: Checks::NONE, renamed_variables }
    }

    /// Adds settings of the lowest precedence, from sockets that a service manager passed. Their origin is
    /// shown as an environment variable.
    #[must_use]
    pub fn with_fallback(self, fallback: Flags) -> Self {
        Self { fallback, ..self }
    }

    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Reads, merges and checks all sources. `certificates` reads the certificates.
    pub fn load<C>(
        &self,
        certificates: impl FnOnce(&Settings) -> ReadCertificates<C>,
    ) -> Result<LoadedConfig<C>, Mistakes> {
        let mut problems = Vec::new();
        let entries = match &self.file {
            Some(path) => file_entries(path, &mut problems)?,
            None => Vec::new(),
        };
        self.merge(entries, problems, certificates)
    }

    pub fn settings(&self) -> Result<Settings, Mistakes> {
        Ok(self.load(|_| ReadCertificates::<()>::default())?.settings)
    }

    pub(crate) fn merge<C>(
        &self,
        mut entries: Vec<TableEntry>,
        mut problems: Vec<Mistake>,
        certificates: impl FnOnce(&Settings) -> ReadCertificates<C>,
    ) -> Result<LoadedConfig<C>, Mistakes> {
        for name in TABLES {
            if let Some(tables) = self.environment_tables(name, &mut problems) {
                entries.retain(|entry| entry.key != *name);
                entries.push(tables);
            }
        }
        let renamed = rename_entries(&mut entries, RENAMED);
        problems.extend(renamed.conflicts);
        let file = &entries[..];
        let mut settings = Settings::default();
        settings.origins = self.apply(KEYS, TABLES, file, &mut settings, &mut problems);
        let unread: Vec<String> = problems.iter().map(|mistake| mistake.key.clone()).collect();
        settings.realms = tables::read("realm", REALM_KEYS, &["realm.name"], file, &mut problems)
            .into_iter()
            .map(|read| RealmSettings { place: read.place, ..read.settings })
            .collect();
        settings.alternates =
            tables::read("alternate", ALTERNATE_KEYS, &["alternate.address"], file, &mut problems)
                .into_iter()
                .map(|read| AlternateSettings { place: read.place, ..read.settings })
                .collect();
        let mut contradictions = Vec::new();
        check::combinations(&settings, &mut contradictions);
        // A key that could not be read has its default here; errors about that value would be misleading.
        contradictions.retain(|mistake| mistake.key.is_empty() || !unread.contains(&mistake.key));
        problems.append(&mut contradictions);
        let found = certificates(&settings);
        if !problems.is_empty() {
            problems.extend(found.problems);
            return Err(Mistakes::sorted(problems));
        }
        let mut warnings = renamed.notices;
        warnings.extend(self.variable_warnings());
        let origin = settings.origin("log.level").clone();
        warnings.extend(rename_log_level(&mut settings.log.level, &origin));
        warnings.extend(check::doubts(&settings));
        warnings.extend(self.exposed(file));
        warnings.extend_from_slice(&found.warnings);
        let ReadCertificates { certificates, problems: certificate_problems, .. } = found;
        Ok(LoadedConfig { settings, certificates, certificate_problems, warnings })
    }

    /// Reads every key of a table. `tables` names entries that other code reads.
    pub(crate) fn apply<S>(
        &self,
        keys: &'static [KeySpec<S>],
        tables: &[&'static str],
        file: &[TableEntry],
        settings: &mut S,
        problems: &mut Vec<Mistake>,
    ) -> BTreeMap<&'static str, Origin> {
        problems.extend_from_slice(&self.renamed_variables.conflicts);
        let mut origins = BTreeMap::new();
        let from_file = sort_out(keys, tables, file, problems);
        for spec in keys {
            let environment = source::environment_node(spec, &self.environment, problems);
            let file = from_file.get(spec.path).map(|node| (*node).clone());
            // All sources are checked, so that removing an overriding flag cannot reveal a new error.
            for node in
                [self.fallback.variable(spec), file, environment, self.flags.node(spec)].into_iter().flatten()
            {
                let origin = node.origin.clone();
                if spec.read(&node, settings, self.checks, problems).is_some() {
                    origins.insert(spec.path, origin);
                }
            }
        }
        origins
    }

    pub(crate) fn environment_tables(
        &self,
        name: &'static str,
        problems: &mut Vec<Mistake>,
    ) -> Option<TableEntry> {
        source::environment_tables(name, &self.environment, problems)
    }

    pub(crate) fn exposed(&self, file: &[TableEntry]) -> Vec<String> {
        let with_secrets = world_readable::files(file, &self.environment);
        with_secrets
            .iter()
            .filter_map(|file| world_readable::readable_by_all(file, "the secrets in it"))
            .collect()
    }

    /// Warnings about environment variables with an old or unknown name.
    pub(crate) fn variable_warnings(&self) -> Vec<String> {
        let mut warnings = self.renamed_variables.notices.clone();
        warnings.extend(source::unknown_variables(&self.environment, &known_variables()));
        warnings
    }
}

/// Reads settings from text. Files that it names are not read.
pub fn settings_of(text: &str) -> Result<Settings, Mistakes> {
    let mut problems = Vec::new();
    let entries = parse_file(Path::new("result"), text, &mut problems);
    let sources = Sources::new(None, Vec::new(), Flags::new());
    Ok(sources.merge(entries, problems, |_| ReadCertificates::<()>::default())?.settings)
}

/// Environment variables of all subcommands, because several subcommands can share one environment.
pub fn known_variables() -> Vec<String> {
    let settings = KEYS.iter().flat_map(KeySpec::variables).chain(crate::forward::variables());
    let tables = TABLES.iter().flat_map(|name| key::variables(name));
    settings.chain(tables).chain(OTHER_VARIABLES.map(str::to_owned)).collect()
}

/// Entries of a file. A file in another program's format is reported as a single error.
fn file_entries(path: &Path, problems: &mut Vec<Mistake>) -> Result<Vec<TableEntry>, Mistakes> {
    let Some(text) = file_text(path, problems) else { return Ok(Vec::new()) };
    entries_of(path, &text, problems)
}

fn entries_of(path: &Path, text: &str, problems: &mut Vec<Mistake>) -> Result<Vec<TableEntry>, Mistakes> {
    if let Some(problem) = wrong_format::of_another_program(path, text, wrong_format::FormatReader::Serve) {
        return Err(Mistakes(vec![problem]));
    }
    let entries = parse_file(path, text, problems);
    let sections = (&own_sections()[..], &crate::forward::own_sections()[..]);
    match wrong_format::of_the_other_command(path, &entries, sections, wrong_format::FormatReader::Serve) {
        Some(problem) => Err(Mistakes(vec![problem])),
        None => Ok(entries),
    }
}

pub(crate) fn own_sections() -> Vec<&'static str> {
    let sections = KEYS.iter().map(KeySpec::section).chain(TABLES.iter().copied());
    sections.filter(|section| !crate::forward::SHARED.contains(section)).collect()
}

/// Variables of commands that have no settings.
const OTHER_VARIABLES: [&str; 7] = [
    "TURNPIKE_ADMIN",
    "TURNPIKE_CONFIG",
    "TURNPIKE_LOAD_USER",
    "TURNPIKE_LOAD_ACCESS_TOKEN",
    "TURNPIKE_PROBE_USER",
    UPGRADE_VARIABLE,
    UPGRADE_SANDBOX_VARIABLE,
];

/// Set by the old process for the new one during an upgrade; never set by hand.
pub const UPGRADE_VARIABLE: &str = "TURNPIKE_UPGRADE";
/// Parts of the sandbox that are already in effect, set together with [`UPGRADE_VARIABLE`].
pub const UPGRADE_SANDBOX_VARIABLE: &str = "TURNPIKE_UPGRADE_SANDBOX";

/// Tables that can appear several times.
const TABLES: &[&str] = &["realm", "alternate"];

/// Values in the file by key path. Unknown sections and keys are added to `problems`.
fn sort_out<'a, S>(
    table: &'static [KeySpec<S>],
    tables: &[&'static str],
    entries: &'a [TableEntry],
    problems: &mut Vec<Mistake>,
) -> BTreeMap<&'static str, &'a ValueNode> {
    let mut known = BTreeMap::new();
    for section in entries.iter().filter(|entry| !tables.contains(&entry.key.as_str())) {
        let keys: Vec<&KeySpec<S>> = table.iter().filter(|spec| spec.section() == section.key).collect();
        if keys.is_empty() {
            problems.push(unknown_section(table, tables, section));
            continue;
        }
        let Value::Table(members) = &section.node.value else {
            problems.push(Mistake::new(
                &section.origin,
                section.key.clone(),
                "it is a single value, not a table",
                format!("a table, [{}]", section.key),
            ));
            continue;
        };
        for member in members {
            match keys.iter().find(|spec| spec.name() == member.key) {
                Some(spec) => {
                    known.insert(spec.path, &member.node);
                }
                None => problems.push(unknown_key(table, section, member, &keys)),
            }
        }
    }
    known
}

fn unknown_section<S>(
    table: &'static [KeySpec<S>],
    tables: &[&'static str],
    section: &TableEntry,
) -> Mistake {
    let mut sections: Vec<&str> = table.iter().map(KeySpec::section).collect();
    sections.dedup();
    sections.extend(tables);
    let is_table = matches!(section.node.value, Value::Table(_) | Value::List(_));
    let elsewhere = table.iter().find(|spec| !is_table && spec.name() == section.key).map(|spec| spec.path);
    Mistake::new(
        &section.origin,
        section.key.clone(),
        if is_table { "unknown section" } else { "unknown key outside of any section" },
        format!("one of the sections {}", sections.join(", ")),
    )
    .suggesting_instead(elsewhere.or_else(|| nearest(&section.key, sections)))
}

fn unknown_key<S>(
    table: &'static [KeySpec<S>],
    section: &TableEntry,
    member: &TableEntry,
    keys: &[&KeySpec<S>],
) -> Mistake {
    let names: Vec<&str> = keys.iter().map(|spec| spec.name()).collect();
    let problem = member.unknown(&section.key, &names);
    match table.iter().find(|spec| spec.name() == member.key) {
        Some(elsewhere) if problem.suggestion.is_none() => problem.suggesting_instead(Some(elsewhere.path)),
        _ => problem,
    }
}

#[cfg(test)]
pub(crate) fn key_paths() -> impl Iterator<Item = &'static str> {
    KEYS.iter().map(|spec| spec.path)
}

#[cfg(test)]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
