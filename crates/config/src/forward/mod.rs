//! `turnpike forward`: its rules in four formats, and its settings.
//!
//! ```text
//! tcp://LISTEN=TARGET ─▶ argument ─┐
//! [[rule]] of TOML files ──────────┤                 ┌▶ settings, rules ─▶ turnpike_forward::Forwarder
//! rinetd.conf ───────────▶ rinetd ─┼▶ Draft ─▶ check ┤
//! oxidinetd's TOML ────▶ oxidinetd ┘                 └▶ all errors: place, problem, expected form
//! ```
//!
//! Rules on the command line and in `TURNPIKE_RULE` are added to those in the file. Settings have this precedence: flags,
//! environment (`TURNPIKE_FORWARD_WORKERS` etc.), file, defaults.

mod argument;
mod check;
mod circles;
mod file_format;
mod include;
mod rule_keys;
mod settings;

use std::path::{Path, PathBuf};

use self::{
    file_format::{INCLUDE, is_mistyped_rule, is_oxidinetd, looks_like_toml, no_section, read_tables},
    include::Included,
    settings::FORWARD_KEYS,
};
use turnpike_convert::{
    forward::{ForeignRules, ForwardHost, draft::Draft, oxidinetd, rinetd},
    wrong_format,
};
use turnpike_rules::Rule;

pub use self::{file_format::Format, settings::ForwardSettings};
use crate::{
    Checks, Flags, Mistake, Mistakes, Origin, Sources,
    key::{self, KeySpec},
    renamed::{RENAMED, rename_entries, rename_log_level},
};
pub use turnpike_convert::forward::{LineFormat, parts::show_pattern};
use turnpike_strict::{TableEntry, file_text, parse_file};

/// Tables of rules, in files and in `TURNPIKE_RULE`.
const RULE: &str = "rule";

#[derive(Clone, Debug)]
pub struct ForwardLoaded {
    pub settings: ForwardSettings,
    pub format: Option<Format>,
    pub included: Vec<PathBuf>,
    pub warnings: Vec<String>,
}

#[derive(Clone)]
pub struct ForwardSources {
    sources: Sources,
    arguments: Vec<String>,
}

impl ForwardSources {
    pub fn from_process(file: Option<PathBuf>, arguments: Vec<String>, flags: Flags, checks: Checks) -> Self {
        Self { sources: Sources::from_process(file, flags, checks), arguments }
    }

    /// See [`Sources::with_fallback`].
    #[must_use]
    pub fn with_fallback(self, fallback: Flags) -> Self {
        Self { sources: self.sources.with_fallback(fallback), ..self }
    }

    pub fn file(&self) -> Option<&Path> {
        self.sources.file()
    }

    /// Opens no socket except the resolver's, for listeners that are host names.
    pub fn load(&self) -> Result<ForwardLoaded, Mistakes> {
        let mut problems = Vec::new();
        let text = self.file().map(|path| (path, file_text(path, &mut problems)));
        match text {
            None => self.merge(None, problems),
            Some((path, Some(text))) => self.merge(Some((path, &text)), problems),
            Some((_, None)) => Err(Mistakes(problems)),
        }
    }

    fn merge(
        &self,
        file: Option<(&Path, &str)>,
        mut problems: Vec<Mistake>,
    ) -> Result<ForwardLoaded, Mistakes> {
        let content =
            file.map_or_else(Content::default, |(path, text)| Content::read(path, text, &mut problems));
        let Content { format, mut drafts, mut settings, entries, mut warnings, included } = content;
        let origins = self.sources.apply(FORWARD_KEYS, &[], &entries, &mut settings, &mut problems);
        settings.origins.extend(origins);
        let origin = |key: &str| settings.origins.get(key).unwrap_or(&Origin::Default).clone();
        settings.admin.check(origin, &mut problems);
        let Included { files, problems: of_included, .. } = included;
        problems.extend(of_included);

        let from_arguments = self.arguments.iter().flat_map(|text| argument::read(text, &mut problems));
        drafts.extend(from_arguments.collect::<Vec<_>>());
        if let Some(rules) = self.sources.environment_tables(RULE, &mut problems) {
            drafts.extend(read_tables(&rules, false, &mut problems));
        }
        for draft in &drafts {
            check::rule(draft, &mut problems);
        }
        check::together(&drafts, &mut problems);
        circles::check(&drafts, &mut problems);
        if drafts.is_empty() && problems.is_empty() {
            problems.push(no_rules(file.map(|(path, _)| path)));
        }
        if !problems.is_empty() {
            return Err(Mistakes::sorted(problems));
        }

        let mut doubts: Vec<String> = drafts.iter().flat_map(check::doubts).collect();
        doubts.extend(check::doubts_about_all(&settings));
        settings.rules = rules(drafts, &settings);
        warnings.extend(doubts);
        let origin = settings.origin("log.level").clone();
        warnings.extend(rename_log_level(&mut settings.log.level, &origin));
        warnings.extend(self.sources.variable_warnings());
        Ok(ForwardLoaded { settings, format, included: files, warnings })
    }
}

fn rules(drafts: Vec<Draft>, settings: &ForwardSettings) -> Vec<Rule> {
    let rule = |mut draft: Draft| {
        if !draft.has("rule.copy") {
            draft.rule.copy = settings.copy;
        }
        draft.rule.max_connections = draft.rule.max_connections.min(settings.max_connections);
        draft.rule
    };
    drafts.into_iter().map(rule).collect()
}

#[derive(Default)]
struct Content {
    format: Option<Format>,
    drafts: Vec<Draft>,
    settings: ForwardSettings,
    entries: Vec<TableEntry>,
    warnings: Vec<String>,
    included: Included,
}

impl Content {
    fn read(path: &Path, text: &str, problems: &mut Vec<Mistake>) -> Self {
        if let Some(problem) =
            wrong_format::of_another_program(path, text, wrong_format::FormatReader::Forward)
        {
            problems.push(problem);
            return Self::default();
        }
        if !looks_like_toml(text) {
            return Self::foreign(path, Format::Rinetd, rinetd::read(path, text, &machine(), problems));
        }
        let before = problems.len();
        let mut entries = parse_file(path, text, problems);
        if is_oxidinetd(&entries) {
            return Self::foreign(path, Format::Oxidinetd, oxidinetd::read(&entries, &machine(), problems));
        }
        if let Some(realm) = entries.iter().find(|entry| entry.key == "endpoints") {
            problems.truncate(before);
            problems.push(of_realm(realm));
            return Self::default();
        }
        let sections = (&own_sections()[..], &crate::sources::own_sections()[..]);
        if let Some(problem) =
            wrong_format::of_the_other_command(path, &entries, sections, wrong_format::FormatReader::Forward)
        {
            // A wrong format makes all other errors irrelevant.
            problems.truncate(before);
            problems.push(problem);
            return Self::default();
        }
        let renamed = rename_entries(&mut entries, RENAMED);
        problems.extend(renamed.conflicts);
        let (rules, entries): (Vec<TableEntry>, Vec<TableEntry>) =
            entries.into_iter().partition(|entry| entry.key == RULE);
        let (mistyped, entries): (Vec<TableEntry>, Vec<TableEntry>) =
            entries.into_iter().partition(|entry| is_mistyped_rule(&entry.key));
        let (includes, entries): (Vec<TableEntry>, Vec<TableEntry>) =
            entries.into_iter().partition(|entry| entry.key == INCLUDE);
        problems.extend(mistyped.iter().map(no_section));
        let broken = problems.len() > before;
        let mut drafts: Vec<Draft> =
            rules.iter().flat_map(|entry| read_tables(entry, broken, problems)).collect();
        let mut included = Included::read(path, &includes);
        drafts.append(&mut included.drafts);
        let mut warnings = renamed.notices;
        warnings.append(&mut included.warnings);
        Self { format: Some(Format::Turnpike), drafts, entries, warnings, included, ..Self::default() }
    }

    fn foreign(path: &Path, format: Format, rules: ForeignRules) -> Self {
        let ForeignRules { drafts, access, connection_file, pid_file, warnings } = rules;
        let mut settings = ForwardSettings::default();
        let mut explicit = |key| {
            let origin = Origin::file(path);
            settings.origins.insert(key, origin);
        };
        if !access.allow.is_empty() {
            explicit("forward.allow");
        }
        if !access.deny.is_empty() {
            explicit("forward.deny");
        }
        settings.access = access;
        if let Some(file) = connection_file {
            explicit("log.connections");
            explicit("log.connections_format");
            (settings.connections, settings.connections_format) = (Some(file.path), file.format);
        }
        if pid_file.is_some() {
            explicit("forward.pid_file");
            settings.pid_file = pid_file;
        }
        Self { format: Some(format), drafts, settings, warnings, ..Self::default() }
    }
}

fn machine() -> ForwardHost {
    #[cfg(test)]
    return tests::machine();
    #[cfg(not(test))]
    ForwardHost::this()
}

fn of_realm(entry: &TableEntry) -> Mistake {
    Mistake::new(
        &entry.origin,
        "",
        "this looks like a configuration file of the port forwarder realm, because it has [[endpoints]]",
        "a [[rule]] for each endpoint: keep `listen`, rename `remote` to `target`, and replace `use_udp` with protocol = \"tcp+udp\" \
         (docs/forward.md has the other keys)",
    )
}

fn no_rules(path: Option<&Path>) -> Mistake {
    let origin = match path {
        Some(path) => Origin::file(path),
        None => Origin::Default,
    };
    Mistake::new(
        &origin,
        "",
        "there is no forwarding rule",
        "at least one, such as tcp://0.0.0.0:9000=10.0.0.2:9001 on the command line, or a file with -c",
    )
}

/// Sections that `serve` and `forward` share.
pub(crate) const SHARED: [&str; 5] = ["admin", "log", "sandbox", "shutdown", "telemetry"];

/// Sections and tables of `forward` and oxidinetd that `serve` does not have.
pub(crate) fn own_sections() -> Vec<&'static str> {
    let sections = FORWARD_KEYS.iter().map(KeySpec::section).chain([RULE]).chain(oxidinetd::TOP);
    sections.filter(|section| !SHARED.contains(section)).collect()
}

pub(crate) fn variables() -> Vec<String> {
    let keys = FORWARD_KEYS.iter().flat_map(KeySpec::variables).chain(key::variables(RULE));
    keys.chain(["TURNPIKE_FORWARD_CONFIG".to_owned()]).collect()
}

#[cfg(test)]
pub(crate) fn key_paths() -> impl Iterator<Item = &'static str> {
    let rule = rule_keys::RULE_KEYS.iter().map(|spec| spec.path);
    FORWARD_KEYS.iter().map(|spec| spec.path).chain(rule)
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
