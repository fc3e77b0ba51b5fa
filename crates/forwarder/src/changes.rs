//! Changes made by a reload of a forwarder, logged with one line per key and rule.

use turnpike_config::forward::ForwardSettings;
use turnpike_process::changes::{Difference, line, log_each, names};

pub(crate) struct ForwardChanges<'s> {
    keys: Vec<&'static str>,
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

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.clone()
    }

    pub(crate) fn log(&self, rules: usize) {
        log_each(&self.lines);
        if self.lines.is_empty() {
            tracing::info!(rules, "rules reloaded; no changes");
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
