//! Rows of fleet faults: clients' losses, time to recovery, quotas, and distribution over the nodes.

use std::fmt::Write as _;

use serde::Deserialize;

pub(super) const DOCUMENT: &str = "docs/dev/fleet-faults.md";

pub(super) const HEAD: &str = "\
| `cargo xtask faults` | fault | allocations lost | datagrams lost by others; longest gap | time to a new allocation: p50, p99 | peak allocations of the quota user | \
peak grants per second on one node; load shares; new users per node | notes, limits, recovery |\n\
| --- | --- | --- | --- | --- | --- | --- | --- |\n";

#[derive(Deserialize)]
pub(super) struct Figures {
    allocations_lost: u64,
    /// Number of allocations on the faulty node, if they may be lost.
    allocations_of_the_broken: Option<u64>,
    sent: u64,
    lost_of_others: u64,
    /// Longest time without packets, in seconds.
    longest_silence: f64,
    reconnect: Vec<Reconnect>,
    quota: u64,
    most_of_one_user: u64,
    /// Excess over the quota, in percent.
    beyond: f64,
    were_alone: bool,
    most_in_a_second: u64,
    /// Load of each node, in percent.
    shares: Vec<u64>,
    newcomers: Vec<u64>,
    /// Time until recovery, in seconds.
    healed: f64,
}

#[derive(Deserialize)]
struct Reconnect {
    transport: String,
    lost: u64,
    p50: f64,
    p99: f64,
}

impl Figures {
    pub(super) fn row(&self, name: &str, what: &str, clients: u64, told: &[String]) -> String {
        let lost = match self.allocations_of_the_broken {
            Some(most) => format!("{} of the node's {most} ({clients} in total)", self.allocations_lost),
            None => format!("{} of {clients}", self.allocations_lost),
        };
        let others = format!("{} of {}; {:.2} s", self.lost_of_others, self.sent, self.longest_silence);
        let mut times = String::new();
        for Reconnect { transport, lost, p50, p99 } in self.reconnect.iter().filter(|part| part.lost > 0) {
            let between = if times.is_empty() { "" } else { "; " };
            let _ = write!(times, "{between}{lost} {transport}: {p50:.2} s, {p99:.2} s");
        }
        let quota = if self.were_alone {
            format!("{} of {} (local limits)", self.most_of_one_user, self.quota)
        } else {
            format!("{} of {} (+{:.1} %)", self.most_of_one_user, self.quota, self.beyond)
        };
        let listed = |counts: &[u64]| counts.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let herd =
            format!("{}; {} %; {}", self.most_in_a_second, listed(&self.shares), listed(&self.newcomers));
        let times = if times.is_empty() { "–" } else { &times };
        let recovered = format!("recovered after {:.1} s", self.healed);
        let last = told.iter().chain([&recovered]).filter(|words| !words.is_empty());
        let last = last.map(String::as_str).collect::<Vec<_>>().join("; ");
        format!("| `{name}` | {what} | {lost} | {others} | {times} | {quota} | {herd} | {last} |\n")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn figures(were_alone: bool) -> Figures {
        let figures = json!({
            "allocations_lost": 300, "allocations_of_the_broken": 310, "sent": 5000, "lost": 900, "lost_of_others": 0,
            "longest_silence": 2.25, "reconnect": [
                { "transport": "udp", "lost": 280, "p50": 1.5, "p99": 2.125, "max": 2.2 },
                { "transport": "tcp", "lost": 20, "p50": 1.6, "p99": 2.0, "max": 2.0 },
                { "transport": "tls", "lost": 0, "p50": 0.0, "p99": 0.0, "max": 0.0 },
            ],
            "quota": 300, "most_of_one_user": 303, "beyond": 1.0, "were_alone": were_alone, "most_in_a_second": 160,
            "shares": [10, 45, 45], "newcomers": [180, 11, 9], "healed": 3.2,
        });
        serde_json::from_value(figures).expect("the figures are valid")
    }

    #[test]
    fn a_row_has_a_cell_for_each_column() {
        let row = figures(false).row("killed", "SIGKILL", 1000, &["known".to_owned(), String::new()]);
        assert_eq!(
            row,
            "| `killed` | SIGKILL | 300 of the node's 310 (1000 in total) | 0 of 5000; 2.25 s | 280 udp: 1.50 s, 2.12 s; \
             20 tcp: 1.60 s, 2.00 s | 303 of 300 (+1.0 %) | 160; 10, 45, 45 %; 180, 11, 9 | known; recovered after 3.2 s |\n"
        );
        let cells = |line: &str| line.matches(" | ").count();
        assert_eq!(HEAD.lines().next().map(cells), row.lines().next().map(cells));
        assert!(figures(true).row("a", "b", 1, &[]).contains("303 of 300 (local limits)"));
    }
}
