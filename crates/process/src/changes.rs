//! Changes made by a reload, as lines for the log and for the client that requested it: old and new values of
//! keys, and only the names of everything else. Secret values never appear.

use std::{collections::HashMap, hash::Hash};

use turnpike_config::KeyChange;

const NAMED: usize = 20;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Difference<K> {
    pub added: Vec<K>,
    pub removed: Vec<K>,
    pub changed: Vec<K>,
}

impl<K: Hash + Eq + Clone> Difference<K> {
    /// Compares lists of named values; names keep the order of `old` and `new`.
    #[must_use]
    pub fn of<T>(old: &[(K, T)], new: &[(K, T)], same: impl Fn(&T, &T) -> bool) -> Self {
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

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }

    /// Text such as `2 added, 1 changed`.
    #[must_use]
    pub fn counted(&self) -> String {
        let Self { added, removed, changed } = self;
        counted(&[(added.len(), "added"), (removed.len(), "removed"), (changed.len(), "changed")])
    }

    /// Lines of the form `what NAME: added` or `what NAME: removed`.
    #[must_use]
    pub fn added_and_removed(&self, what: &str) -> Vec<String>
    where
        K: AsRef<str>,
    {
        let all = [(&self.added, "added"), (&self.removed, "removed")];
        let lines = all.into_iter().flat_map(|(names, how)| names.iter().map(move |name| (name, how)));
        lines.map(|(name, how)| format!("{what} {}: {how}", name.as_ref())).collect()
    }

    /// Lines of the form `what NAME: added`, `removed` or `changed`.
    #[must_use]
    pub fn lines(&self, what: &str) -> Vec<String>
    where
        K: AsRef<str>,
    {
        let mut lines = self.added_and_removed(what);
        lines.extend(self.changed.iter().map(|name| format!("{what} {}: changed", name.as_ref())));
        lines
    }
}

pub fn log_each(lines: &[String]) {
    const MOST: usize = 200;
    for line in lines.iter().take(MOST) {
        tracing::info!("reloaded {line}");
    }
    if let Some(more @ 1..) = lines.len().checked_sub(MOST) {
        tracing::info!("changes not logged: {more}; `turnpike reload` lists all of them");
    }
}

/// Text such as `2 added, 1 changed`; `changed` if only the order differs.
#[must_use]
pub fn counted(counts: &[(usize, &str)]) -> String {
    let counted = counts.iter().filter(|(count, _)| *count > 0);
    let counted: Vec<String> = counted.map(|(count, how)| format!("{count} {how}")).collect();
    if counted.is_empty() { "changed".to_owned() } else { counted.join(", ") }
}

#[must_use]
pub fn names<K: AsRef<str>>(names: &[K]) -> Option<String> {
    let shown: Vec<&str> = names.iter().take(NAMED).map(AsRef::as_ref).collect();
    let text = shown.join(", ");
    match names.len().saturating_sub(NAMED) {
        _ if names.is_empty() => None,
        0 => Some(text),
        more => Some(format!("{text} and {more} more")),
    }
}

/// Line of the form `KEY: OLD -> NEW`; long values are truncated.
#[must_use]
pub fn line(key: &str, change: &KeyChange) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_list_added_removed_and_changed_names() {
        let list = |text: &str| -> Vec<(char, u8)> {
            text.split(' ').map(|item| (item.chars().next().unwrap(), item.as_bytes()[1])).collect()
        };
        let difference = Difference::of(&list("a1 b1 c1"), &list("d1 c2 a1"), PartialEq::eq);
        assert_eq!(difference, Difference { added: vec!['d'], removed: vec!['b'], changed: vec!['c'] });
        assert!(Difference::of(&list("a1 b2"), &list("b2 a1"), PartialEq::eq).is_empty());
    }

    #[test]
    fn a_long_list_is_truncated() {
        let list: Vec<String> = (0..25).map(|n| format!("r{n}")).collect();
        let text = names(&list).unwrap();
        assert!(text.starts_with("r0, r1, ") && text.ends_with("r19 and 5 more"), "{text}");
        assert_eq!(names::<String>(&[]), None);
    }
}
