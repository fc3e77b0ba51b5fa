//! Instruction budgets: the file that contains them, and their comparison with counts.

use std::{cmp::Ordering, collections::BTreeMap, fmt::Write as _, fs, path::Path};

use serde::{Deserialize, Serialize};

use super::callgrind::Count;
use crate::Failure;

const HEADER: &str = "\
# Instructions per call of each case of turnpike-benches, in a release build, excluding shared libraries.
# `cargo xtask instructions` compares counts with this file, and `cargo xtask instructions --update` writes
# it; see CONTRIBUTING.md.
";

const TOLERANCE_PERCENT: f64 = 5.0;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Budgets {
    /// Percentage by which a count may exceed its budget. If a count is below its budget by more than this, the budget should be lowered.
    tolerance_percent: f64,
    made_with: Origin,
    instructions: BTreeMap<String, u64>,
}

/// Compiler that built the program; other versions generate different instructions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Origin {
    rustc: String,
    target: String,
}

impl Origin {
    pub(crate) fn of_rustc(said: &str) -> Option<Self> {
        let version = said.lines().next()?.strip_prefix("rustc ")?;
        let target = said.lines().find_map(|line| line.strip_prefix("host: "))?;
        Some(Self { rustc: version.to_owned(), target: target.to_owned() })
    }
}

impl Budgets {
    pub(crate) fn load(file: &Path) -> Result<Self, Failure> {
        let text = fs::read_to_string(file)
            .map_err(|error| format!("{}: {error}: `--update` creates it", file.display()))?;
        let budgets: Self = toml::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        if !(0.0..100.0).contains(&budgets.tolerance_percent) {
            return Err(
                format!("{}: tolerance_percent must be at least 0 and below 100", file.display()).into()
            );
        }
        Ok(budgets)
    }

    pub(crate) fn of(made_with: Origin, before: Option<&Self>, counts: &[Count]) -> Self {
        Self {
            tolerance_percent: before.map_or(TOLERANCE_PERCENT, |budgets| budgets.tolerance_percent),
            made_with,
            instructions: counts.iter().map(|count| (count.name.clone(), count.own)).collect(),
        }
    }

    pub(crate) fn save(&self, file: &Path) -> Result<(), Failure> {
        Ok(fs::write(file, format!("{HEADER}\n{}", toml::to_string(self)?))?)
    }

    /// Reason why counts from this compiler cannot be compared with these budgets, if there is one.
    pub(crate) fn made_elsewhere(&self, here: &Origin) -> Option<String> {
        let Origin { rustc, target } = &self.made_with;
        (self.made_with != *here).then(|| {
            format!(
                "the budgets were made with rustc {rustc} for {target}, but this is rustc {} for {}, so the counts cannot be \
                 compared (`cargo xtask instructions --update` creates new budgets)",
                here.rustc, here.target
            )
        })
    }
}

pub(crate) struct Comparison {
    tolerance_percent: f64,
    rows: Vec<Row>,
}

struct Row {
    name: String,
    budget: Option<u64>,
    counted: Option<u64>,
    libraries: Option<u64>,
    finding: Finding,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finding {
    Kept,
    Over,
    MuchBetter,
    NoBudget,
    NoCase,
}

pub(crate) fn compare(budgets: Option<&Budgets>, counts: &[Count]) -> Comparison {
    let none = BTreeMap::new();
    let known = budgets.map_or(&none, |budgets| &budgets.instructions);
    let tolerance_percent = budgets.map_or(TOLERANCE_PERCENT, |budgets| budgets.tolerance_percent);
    let mut rows: Vec<Row> = counts
        .iter()
        .map(|count| {
            let budget = known.get(&count.name).copied();
            Row {
                name: count.name.clone(),
                budget,
                counted: Some(count.own),
                libraries: Some(count.libraries),
                finding: budget
                    .map_or(Finding::NoBudget, |budget| judge(budget, count.own, tolerance_percent)),
            }
        })
        .collect();
    let gone = known.iter().filter(|(name, _)| counts.iter().all(|count| count.name != **name));
    rows.extend(gone.map(|(name, budget)| Row {
        name: name.clone(),
        budget: Some(*budget),
        counted: None,
        libraries: None,
        finding: Finding::NoCase,
    }));
    Comparison { tolerance_percent, rows }
}

fn judge(budget: u64, counted: u64, tolerance_percent: f64) -> Finding {
    let slack = budget as f64 * tolerance_percent / 100.0;
    if counted.abs_diff(budget) as f64 <= slack {
        return Finding::Kept;
    }
    match counted.cmp(&budget) {
        Ordering::Greater => Finding::Over,
        Ordering::Less | Ordering::Equal => Finding::MuchBetter,
    }
}

impl Comparison {
    /// True if no case exceeds its budget and every case has one.
    pub(crate) fn is_kept(&self) -> bool {
        self.rows.iter().all(|row| matches!(row.finding, Finding::Kept | Finding::MuchBetter))
    }

    pub(crate) fn table(&self) -> String {
        let width = self.rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
        let mut table = format!(
            "{:width$}  {:>7}  {:>7}  {:>8}  {:>9}\n",
            "instructions per call", "budget", "counted", "change", "libraries"
        );
        for row in &self.rows {
            let number = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
            let change = match (row.budget, row.counted) {
                (Some(budget), Some(counted)) => {
                    format!("{:+.1} %", 100.0 * (counted as f64 / budget as f64 - 1.0))
                }
                _ => "-".to_owned(),
            };
            let line = format!(
                "{:width$}  {:>7}  {:>7}  {change:>8}  {:>9}  {}",
                row.name,
                number(row.budget),
                number(row.counted),
                number(row.libraries),
                row.finding.remark()
            );
            let _infallible = writeln!(table, "{}", line.trim_end());
        }
        table
    }

    pub(crate) fn summary(&self) -> String {
        let of = |finding: Finding| self.rows.iter().filter(|row| row.finding == finding).count();
        let mut sentences = Vec::new();
        match of(Finding::Over) {
            0 => sentences
                .push(format!("No case exceeds its budget by more than {} %.", self.tolerance_percent)),
            over => sentences.push(format!(
                "Cases that exceed their budgets by more than {} %: {over} of {}. `callgrind_annotate --threshold=100 \
                 target/instructions/CASE.callgrind` shows the costs. If the increase is justified, run `cargo xtask instructions \
                 --update` and give the reason in the commit message.",
                self.tolerance_percent,
                self.rows.len()
            )),
        }
        if of(Finding::NoBudget) + of(Finding::NoCase) > 0 {
            sentences.push(format!(
                "Cases without a budget: {}; budgets without a case: {}. Run `cargo xtask instructions --update`.",
                of(Finding::NoBudget),
                of(Finding::NoCase)
            ));
        }
        let better = of(Finding::MuchBetter);
        if better > 0 {
            sentences.push(format!(
                "Lower the budgets ({better}), so that a later regression is caught: run `cargo xtask instructions --update`."
            ));
        }
        sentences.join("\n")
    }
}

impl Finding {
    fn remark(self) -> &'static str {
        match self {
            Self::Kept => "",
            Self::Over => "ABOVE THE BUDGET",
            Self::MuchBetter => "much better: lower the budget",
            Self::NoBudget => "NO BUDGET",
            Self::NoCase => "NO SUCH CASE",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin() -> Origin {
        Origin::of_rustc(
            "rustc 1.95.0 (59807616e 2026-04-14)\nbinary: rustc\nhost: x86_64-unknown-linux-gnu\n",
        )
        .unwrap()
    }

    fn counts(of: &[(&str, u64)]) -> Vec<Count> {
        of.iter().map(|(name, own)| Count { name: (*name).to_owned(), own: *own, libraries: 7 }).collect()
    }

    fn compared(budget: u64, counted: u64) -> Comparison {
        let budgets = Budgets::of(origin(), None, &counts(&[("route", budget)]));
        compare(Some(&budgets), &counts(&[("route", counted)]))
    }

    #[test]
    fn a_case_that_exceeds_the_tolerance_fails_and_is_reported() {
        assert!(compared(200, 210).is_kept(), "exactly 5 % more");
        let over = compared(200, 211);
        assert!(!over.is_kept());
        assert!(over.table().contains("+5.5 %          7  ABOVE THE BUDGET"), "{}", over.table());
        assert!(over.summary().contains("1 of 1."), "{}", over.summary());
    }

    #[test]
    fn a_much_lower_count_passes_but_the_budget_should_be_lowered() {
        let better = compared(200, 189);
        assert!(better.is_kept());
        assert!(better.table().contains("lower the budget"), "{}", better.table());
        assert!(better.summary().contains("Lower the budgets (1)"), "{}", better.summary());
        assert!(!compared(200, 190).summary().contains("Lower the budgets"));
    }

    #[test]
    fn a_case_without_a_budget_and_a_budget_without_a_case_fail() {
        let budgets = Budgets::of(origin(), None, &counts(&[("route", 100)]));
        let more = compare(Some(&budgets), &counts(&[("route", 100), ("new", 1)]));
        assert!(!more.is_kept() && more.table().contains("NO BUDGET"), "{}", more.table());
        let fewer = compare(Some(&budgets), &[]);
        assert!(!fewer.is_kept() && fewer.table().contains("NO SUCH CASE"), "{}", fewer.table());
    }

    #[test]
    fn counts_from_another_compiler_or_target_are_not_compared() {
        let budgets = Budgets::of(origin(), None, &[]);
        assert_eq!(budgets.made_elsewhere(&origin()), None);
        let newer = Origin { rustc: "1.96.0".to_owned(), ..origin() };
        assert!(budgets.made_elsewhere(&newer).unwrap().contains("this is rustc 1.96.0"));
        let arm = Origin { target: "aarch64-unknown-linux-gnu".to_owned(), ..origin() };
        assert!(budgets.made_elsewhere(&arm).is_some());
    }

    #[test]
    fn budgets_keep_their_tolerance_when_saved_and_loaded() {
        let file = std::env::temp_dir().join(format!("turnpike-budgets-{}.toml", std::process::id()));
        let mut budgets = Budgets::of(origin(), None, &counts(&[("route/send/1", 600)]));
        budgets.tolerance_percent = 3.0;
        budgets.save(&file).unwrap();
        let loaded = Budgets::load(&file).unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(loaded.instructions["route/send/1"], 600);
        assert_eq!(loaded.made_with, origin());
        let updated = Budgets::of(origin(), Some(&loaded), &counts(&[("route/send/1", 500)]));
        assert_eq!((updated.tolerance_percent, updated.instructions["route/send/1"]), (3.0, 500));
    }
}
