//! Folded stacks, and the distribution of their samples over symbols.

use std::collections::BTreeMap;

use crate::record::{CpuProfile, Symbol};

const KERNEL: &str = "_[k]";

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct FoldedStacks {
    leaves: BTreeMap<String, u64>,
}

impl FoldedStacks {
    /// Parses lines of `frame;frame;frame count`.
    pub(crate) fn parse(text: &str) -> Self {
        let mut leaves = BTreeMap::new();
        for line in text.lines() {
            let Some((stack, count)) = line.rsplit_once(' ') else { continue };
            let Ok(count) = count.parse::<u64>() else { continue };
            let leaf = stack.rsplit(';').next().unwrap_or(stack);
            *leaves.entry(leaf.to_owned()).or_default() += count;
        }
        Self { leaves }
    }

    pub(crate) fn samples(&self) -> u64 {
        self.leaves.values().sum()
    }

    fn percent(&self, leaf: &str) -> f64 {
        let samples = self.samples();
        if samples == 0 {
            0.0
        } else {
            self.leaves.get(leaf).copied().unwrap_or(0) as f64 * 100.0 / samples as f64
        }
    }

    pub(crate) fn profile(&self, rows: usize) -> CpuProfile {
        let symbols = self.hottest().take(rows).map(|leaf| {
            let (name, side) = side(leaf);
            Symbol { name: name.to_owned(), kernel: side == "kernel", percent: self.percent(leaf) }
        });
        CpuProfile {
            samples: self.samples(),
            kernel_percent: self.kernel_percent(),
            symbols: symbols.collect(),
        }
    }

    fn hottest(&self) -> impl Iterator<Item = &String> {
        let mut leaves: Vec<&String> = self.leaves.keys().collect();
        leaves.sort_by(|a, b| self.percent(b).total_cmp(&self.percent(a)));
        leaves.into_iter()
    }

    fn kernel_percent(&self) -> f64 {
        self.leaves.keys().filter(|leaf| leaf.ends_with(KERNEL)).map(|leaf| self.percent(leaf)).sum()
    }

    pub(crate) fn describe(&self, rows: usize) -> String {
        let kernel = self.kernel_percent();
        let mut text =
            format!("{} samples: {:.1} % user, {kernel:.1} % kernel\n", self.samples(), 100.0 - kernel);
        for leaf in self.hottest().take(rows) {
            let (name, side) = side(leaf);
            text += &format!("{:>6.2} %  {side:<6}  {name}\n", self.percent(leaf));
        }
        text
    }

    /// Lists the symbols whose share changed most.
    pub(crate) fn compare(&self, after: &Self, rows: usize) -> String {
        let mut leaves: Vec<&String> = self.leaves.keys().chain(after.leaves.keys()).collect();
        leaves.sort();
        leaves.dedup();
        let change = |leaf: &str| after.percent(leaf) - self.percent(leaf);
        leaves.sort_by(|a, b| change(b).abs().total_cmp(&change(a).abs()));
        let mut text = format!(
            "kernel {:.1} % to {:.1} %\n{:>8} {:>8} {:>8}\n",
            self.kernel_percent(),
            after.kernel_percent(),
            "before",
            "after",
            "change"
        );
        for leaf in leaves.into_iter().take(rows) {
            let (name, side) = side(leaf);
            let (before, now) = (self.percent(leaf), after.percent(leaf));
            text += &format!("{before:>6.2} % {now:>6.2} % {:>+6.2} %  {side:<6}  {name}\n", change(leaf));
        }
        text
    }
}

fn side(leaf: &str) -> (&str, &'static str) {
    match leaf.strip_suffix(KERNEL) {
        Some(name) => (name, "kernel"),
        None => (leaf, "user"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_counted_by_leaf_and_side() {
        let folded = FoldedStacks::parse(
            "a;main;route 60\na;main;send_[k];ip_output_[k] 30\na;x;ip_output_[k] 10\nbroken\n",
        );
        assert_eq!(folded.samples(), 100);
        let text = folded.describe(2);
        assert!(text.starts_with("100 samples: 60.0 % user, 40.0 % kernel\n"), "{text}");
        assert!(text.contains(" 60.00 %  user    route\n 40.00 %  kernel  ip_output\n"), "{text}");
    }

    #[test]
    fn the_largest_change_in_share_comes_first() {
        let before = FoldedStacks::parse("a;x 50\na;y 50\n");
        let after = FoldedStacks::parse("a;x 150\na;y 50\n");
        let text = before.compare(&after, 1);
        assert!(text.contains("50.00 %  75.00 % +25.00 %  user    x"), "{text}");
    }
}
