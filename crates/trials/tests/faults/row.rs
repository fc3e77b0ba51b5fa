//! A row in the table: clients on calls before, during and after a fault.

use std::{collections::BTreeMap, fmt::Write as _, fs, time::Duration};

use serde_json::{Value, json};

use super::{Crowd, Server, or_thorough, rows, server::Kept, within};
use turnpike_trials::Metrics;

pub(super) struct Row {
    name: &'static str,
    what: &'static str,
    notes: Vec<String>,
    limits: Vec<Value>,
    void: Vec<String>,
    /// Sessions that clients leave behind expire after a while.
    pub(super) leaves_sessions: bool,
}

pub(super) fn as_before(kept: impl Fn() -> Kept, before: Kept, patience: Duration) {
    within(patience, "sessions have ended", || kept().sessions <= before.sessions);
    within(patience, "descriptors are closed", || kept().descriptors <= before.descriptors + 2);
    // Memory cached by the allocator is not a leak; `cargo xtask soak` finds leaks.
    within(patience, "memory is freed", || kept().memory <= before.memory + before.memory / 4 + (16 << 20));
}

impl Row {
    pub(super) fn new(name: &'static str, what: &'static str) -> Self {
        Self { name, what, notes: Vec::new(), limits: Vec::new(), void: Vec::new(), leaves_sessions: false }
    }

    pub(super) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Adds a figure with its limit, which `cargo xtask faults` checks.
    pub(super) fn limit(&mut self, what: &str, value: f64, most: f64) {
        self.limits.push(json!({ "what": what, "value": value, "most": most }));
    }

    /// Marks the figures as invalid, so that the row must be repeated on an idle machine.
    pub(super) fn void(&mut self, why: String) {
        self.void.push(why);
    }

    /// Runs `fault` with active clients and returns their results; afterwards everything must be as before.
    pub(super) fn run(
        mut self,
        server: &mut Server,
        mut crowd: Crowd,
        fault: impl FnOnce(&mut Server, &mut Self),
    ) -> Value {
        // The baseline is measured after the first clients, because the server keeps some of the resources that they used.
        crowd.begin(server);
        crowd.end();
        within(Duration::from_secs(90), "the test run has ended", || server.allocations() == 0);
        let before = server.kept();

        crowd.begin(server);
        let (said, counted) = (server.lines().len(), drops(&server.metrics()));
        fault(server, &mut self);
        crowd.flows();
        // Gives individual clients time to recover, because their gaps are not visible in the totals.
        std::thread::sleep(or_thorough(Duration::ZERO, Duration::from_millis(2_500)));
        let seen = crowd.end();
        let new = drops(&server.metrics()).into_iter().filter_map(|(series, count)| {
            // A new process starts its counters at zero.
            let before = counted.get(&series).filter(|before| **before <= count);
            let new = count - before.copied().unwrap_or_default();
            (new > 0).then(|| format!("{series} {new}"))
        });
        let new: Vec<String> = new.collect();
        if !new.is_empty() {
            self.note(format!("counted: {}", new.join(", ")));
        }
        for call in crowd.control_calls(server) {
            let run = call.run();
            assert_eq!(run.code, Some(0), "the control call lost data: {}", run.output());
        }
        let patience = if self.leaves_sessions { 90 } else { 20 };
        if !self.leaves_sessions || rows().is_some() {
            as_before(|| server.kept(), before, Duration::from_secs(patience));
        }
        let log = complaints(&server.lines()[said..]);
        self.tell(&seen, &log, (before, server.kept()), crowd.clients.into());
        seen
    }

    pub(super) fn tell(self, seen: &Value, log: &[String], (before, after): (Kept, Kept), clients: u64) {
        let figure = |name: &str| seen[name].clone();
        let row = json!({
            "clients": clients, "sent": figure("sent"), "lost": figure("lost"), "duplicated": figure("duplicated"), "reordered": figure("reordered"),
            "pause_ms_p50": figure("pause_ms_p50"), "pause_ms_max": figure("pause_ms_max"), "returns": figure("returns_done"),
            "log": log, "before": told(before), "after": told(after),
        });
        let mut line = format!("{}: lost {} of {}", self.what, row["lost"], row["sent"]);
        let _ = write!(line, "; longest gap {} ms; reconnects {}", row["pause_ms_max"], row["returns"]);
        println!("{line}\n  {}", row["log"]);
        self.write(row);
    }

    pub(super) fn write(self, mut figures: Value) {
        println!("  {:?}\n  {:?}\n  {:?}", self.notes, self.limits, self.void);
        figures["name"] = self.name.into();
        figures["what"] = self.what.into();
        figures["notes"] = self.notes.into_iter().map(|note| without_places(&note)).collect();
        figures["limits"] = self.limits.into();
        figures["void"] = self.void.into();
        if let Some(dir) = rows() {
            fs::write(dir.join(format!("{}.json", self.name)), figures.to_string())
                .expect("the directory exists");
        }
    }
}

fn drops(metrics: &Metrics) -> BTreeMap<String, u64> {
    const FAMILIES: [&str; 3] = ["tx_dropped_total", "rx_kernel_drops_total", "dropped_datagrams_total"];
    let series = metrics.text().lines().filter_map(|line| line.strip_prefix("turnpike_")?.rsplit_once(' '));
    let series = series.filter(|(name, _)| FAMILIES.iter().any(|family| name.starts_with(family)));
    series.filter_map(|(name, count)| Some((name.to_owned(), count.parse().ok()?))).collect()
}

fn told(kept: Kept) -> Value {
    json!({ "sessions": kept.sessions, "descriptors": kept.descriptors, "memory": kept.memory })
}

/// Replaces the names of temporary directories, which differ each time.
fn without_places(words: &str) -> String {
    let temporary = std::env::temp_dir().join("turnpike-test-");
    let temporary = temporary.to_string_lossy();
    let mut parts = words.split(temporary.as_ref());
    let mut told = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        told.push_str("DIR");
        told.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit() || c == '-'));
    }
    told
}

/// Warnings and errors without timestamps, each kind only once.
pub(super) fn complaints(lines: &[String]) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for line in lines {
        let Some((_, words)) = [" WARN ", " ERROR "].iter().find_map(|level| line.split_once(level)) else {
            continue;
        };
        let words = words.split_once(": ").map_or(words, |(_, words)| words).trim();
        // Logged at every startup if the machine allows few descriptors.
        if words.starts_with("the limit on open files is") {
            continue;
        }
        let words = without_places(words);
        let kind = |text: &str| text.chars().filter(|c| !c.is_ascii_digit()).take(40).collect::<String>();
        if !found.iter().any(|before| kind(before) == kind(&words)) {
            found.push(words);
        }
    }
    found
}

mod tests {
    use super::*;

    #[test]
    fn complaints_that_differ_in_directories_appear_once() {
        let line = |number: u32| {
            let place = std::env::temp_dir().join(format!("turnpike-test-25041-{number}"));
            format!(
                "2026-11-28T13:00:00Z  WARN turnpike::reload: {}/a.toml: every user can read it",
                place.display()
            )
        };
        let told = complaints(&[line(1), "2026-11-28T13:00:00Z  INFO turnpike: ready".to_owned(), line(2)]);
        assert_eq!(told, ["DIR/a.toml: every user can read it"]);
    }

    #[test]
    fn complaints_contain_no_test_directories() {
        let place = std::env::temp_dir().join("turnpike-test-25041-0");
        let told = format!("sqlite://{0}/state reports an error: {0} is full", place.display());
        assert_eq!(without_places(&told), "sqlite://DIR/state reports an error: DIR is full");
    }
}
