//! The budget file: one line per file with its path and count, separated by a tab.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use crate::Failure;

const HEADER: &str = "path\tphrases";

/// Number of phrases allowed by path; zero for every other file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Budget(pub(super) BTreeMap<String, usize>);

/// A file whose count is above or below its budget.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mistake {
    pub(super) path: String,
    pub(super) count: usize,
    pub(super) allowed: usize,
}

impl Budget {
    pub(super) fn parse(text: &str) -> Result<Self, Failure> {
        let mut lines = text.lines();
        if lines.next() != Some(HEADER) {
            return Err(format!("the budget file does not begin with {HEADER:?}").into());
        }
        let rows = lines.map(|line| {
            let (path, count) = line.split_once('\t').ok_or_else(|| format!("no tab in {line:?}"))?;
            let count: usize = count.parse().map_err(|why| format!("{line:?}: {why}"))?;
            Ok((path.to_owned(), count))
        });
        rows.collect::<Result<_, Failure>>().map(Self)
    }

    pub(super) fn total(&self) -> usize {
        self.0.values().sum()
    }

    /// Lowers each budget to the current count. New files, such as renamed ones, share the budgets of files that are gone.
    pub(super) fn lower(&mut self, counts: &BTreeMap<String, usize>) {
        let gone = |path: &str| !counts.contains_key(path);
        let mut free: usize = self.0.iter().filter(|(path, _)| gone(path)).map(|(_, allowed)| allowed).sum();
        let lowered = counts.iter().filter_map(|(path, count)| {
            let allowed = self.0.get(path).copied().unwrap_or_else(|| {
                let taken = free.min(*count);
                free -= taken;
                taken
            });
            Some((path.clone(), allowed.min(*count))).filter(|(_, allowed)| *allowed > 0)
        });
        self.0 = lowered.collect();
    }

    pub(super) fn compare(&self, counts: &BTreeMap<String, usize>) -> Vec<Mistake> {
        let paths: BTreeSet<&String> = counts.keys().chain(self.0.keys()).collect();
        let of = |all: &BTreeMap<String, usize>, path: &String| all.get(path).copied().unwrap_or(0);
        let mistakes = paths.into_iter().map(|path| Mistake {
            count: of(counts, path),
            allowed: of(&self.0, path),
            path: path.clone(),
        });
        mistakes.filter(|mistake| mistake.count != mistake.allowed).collect()
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEADER}")?;
        self.0.iter().try_for_each(|(path, count)| writeln!(f, "{path}\t{count}"))
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, count, allowed } = self;
        write!(f, "{path}: phrase count {count}, budget {allowed}: ")?;
        match count > allowed {
            true => write!(f, "rewrite until at most {allowed} remain"),
            false => f.write_str("lower it with cargo xtask prose --update"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(rows: &[(&str, usize)]) -> BTreeMap<String, usize> {
        rows.iter().map(|(path, count)| ((*path).to_owned(), *count)).collect()
    }

    #[test]
    fn a_written_budget_can_be_read_back() {
        let budget = Budget(counts(&[("a.rs", 2), ("b.md", 1)]));
        assert_eq!(budget.to_string(), "path\tphrases\na.rs\t2\nb.md\t1\n");
        assert_eq!(Budget::parse(&budget.to_string()).expect("the budget is valid"), budget);
        assert!(Budget::parse("a.rs\t2\n").is_err());
        assert!(Budget::parse("path\tphrases\na.rs 2\n").is_err());
    }

    #[test]
    fn a_count_above_or_below_its_budget_is_reported() {
        let budget = Budget(counts(&[("a.rs", 2), ("b.rs", 1), ("gone.rs", 1)]));
        let mistakes = budget.compare(&counts(&[("a.rs", 3), ("b.rs", 1), ("new.rs", 1)]));
        let expected = [("a.rs", 3, 2), ("gone.rs", 0, 1), ("new.rs", 1, 0)]
            .map(|(path, count, allowed)| Mistake { path: path.to_owned(), count, allowed });
        assert_eq!(mistakes, expected);
    }

    #[test]
    fn an_update_never_raises_a_budget() {
        let mut budget = Budget(counts(&[("a.rs", 2), ("b.rs", 3), ("c.rs", 1)]));
        budget.lower(&counts(&[("a.rs", 4), ("b.rs", 1), ("c.rs", 1), ("new.rs", 5)]));
        assert_eq!(budget, Budget(counts(&[("a.rs", 2), ("b.rs", 1), ("c.rs", 1)])));
    }

    #[test]
    fn a_renamed_file_keeps_its_budget() {
        let mut budget = Budget(counts(&[("old.rs", 3)]));
        budget.lower(&counts(&[("new.rs", 2), ("other.rs", 4)]));
        assert_eq!(budget, Budget(counts(&[("new.rs", 2), ("other.rs", 1)])));
    }
}
