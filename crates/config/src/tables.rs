//! Tables that can appear several times in the file (`[[realm]]`), or as TOML in one environment variable
//! (`TURNPIKE_REALM`). Command line flags cannot set them.

use std::collections::BTreeSet;

use turnpike_strict::{TableEntry, Value, ValueNode};

use super::{Checks, Mistake, Origin, key::KeySpec};

/// A position in the file, which is ignored when settings are compared.
#[derive(Clone, Debug)]
pub struct KeyPosition(pub(crate) Origin);

impl PartialEq for KeyPosition {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Default for KeyPosition {
    fn default() -> Self {
        Self(Origin::Default)
    }
}

pub(crate) struct Repeated<S> {
    pub(crate) settings: S,
    pub(crate) place: KeyPosition,
}

/// Reads every `[[name]]` of a file; a table with errors is left out. `must` lists mandatory keys.
pub(crate) fn read<S: Default>(
    name: &'static str,
    keys: &'static [KeySpec<S>],
    must: &[&'static str],
    entries: &[TableEntry],
    problems: &mut Vec<Mistake>,
) -> Vec<Repeated<S>> {
    let mut read = Vec::new();
    for entry in entries.iter().filter(|entry| entry.key == name) {
        let Value::List(tables) = &entry.node.value else {
            problems.push(no_array(name, entry));
            continue;
        };
        read.extend(tables.iter().filter_map(|table| read_one(name, keys, must, entry, table, problems)));
    }
    read
}

pub(crate) fn as_toml<'a, S: 'a>(
    name: &'static str,
    keys: &'static [KeySpec<S>],
    tables: impl Iterator<Item = (&'a S, &'a KeyPosition)>,
) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    for (settings, place) in tables {
        let _ = writeln!(text, "\n[[{name}]] # {}", place.0);
        for spec in keys {
            let shown = (spec.show)(settings);
            // A key without a default is shown only if it is set.
            if !shown.is_empty() {
                let _ = writeln!(text, "{} = {shown}", spec.name());
            }
        }
    }
    text
}

fn read_one<S: Default>(
    name: &'static str,
    keys: &'static [KeySpec<S>],
    must: &[&'static str],
    entry: &TableEntry,
    table: &ValueNode,
    problems: &mut Vec<Mistake>,
) -> Option<Repeated<S>> {
    let Value::Table(members) = &table.value else {
        problems.push(no_array(name, entry));
        return None;
    };
    let mut settings = S::default();
    let mut said = BTreeSet::new();
    let mut good = true;
    for member in members {
        let Some(spec) = keys.iter().find(|spec| spec.name() == member.key) else {
            let names: Vec<&str> = keys.iter().map(KeySpec::name).collect();
            problems.push(member.unknown(name, &names));
            good = false;
            continue;
        };
        // Record a key with a wrong value too; otherwise, it would also be reported as missing.
        said.insert(spec.path);
        good &= spec.read(&member.node, &mut settings, Checks::NONE, problems).is_some();
    }
    for spec in keys.iter().filter(|spec| must.contains(&spec.path) && !said.contains(spec.path)) {
        problems.push(Mistake::new(
            &table.origin,
            spec.path,
            format!("this [[{name}]] lacks the key"),
            spec.expected,
        ));
        good = false;
    }
    good.then(|| Repeated { settings, place: KeyPosition(table.origin.clone()) })
}

fn no_array(name: &str, entry: &TableEntry) -> Mistake {
    Mistake::new(&entry.origin, name, "it is not a list of tables", format!("one [[{name}]] for each {name}"))
}
