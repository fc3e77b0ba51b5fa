//! Row of `docs/dev/performance-log.md`: date, commit, change, workload, predicted, measured A/B ratio
//! (rounds), verdict.

use crate::cli::Log;
use crate::metric;
use crate::record::RunRecord;
use crate::verdict::{Conclusion, MetricVerdict};

/// Row without a newline for the first candidate of the record; `None` if there is none.
///
/// The ratio is new over old, **inverted for metrics where lower is better, so that values above 1 are improvements**.
pub(crate) fn row(record: &RunRecord, asked: &Log) -> Option<String> {
    let verdict = super::verdicts(record).into_iter().next()?;
    let date = record.started.get(..10).unwrap_or(&record.started);
    let cells = [
        date,
        &record.environment.short_commit(),
        asked.change.as_deref().unwrap_or(&record.experiment.name),
        or_dash(&record.experiment.workload),
        or_dash(asked.predicted.as_deref().unwrap_or_default()),
        &measured(&verdict),
        suggested(&verdict.outcome),
    ];
    Some(format!("| {} |", cells.map(cell).join(" | ")))
}

/// Inserts the row below the header that starts with `| date |`. `None` if there is no such table.
pub(crate) fn insert_row(log: &str, row: &str) -> Option<String> {
    let is_head = |lines: &[&str]| lines[0].starts_with("| date |") && lines[1].starts_with("| ---");
    let lines: Vec<&str> = log.split_inclusive('\n').collect();
    let head = lines.windows(2).position(is_head)?;
    let (before, after) = lines.split_at(head + 2);
    let before = before.concat();
    let end = if before.ends_with('\n') { "" } else { "\n" };
    Some(format!("{before}{end}{row}\n{}", after.concat()))
}

fn measured(verdict: &MetricVerdict) -> String {
    let (Some(gain), Some(estimate)) = (verdict.gain(), &verdict.estimate) else {
        return format!("{}: {}", verdict.metric, verdict.outcome);
    };
    let interval = estimate.interval();
    let turned = metric::direction(&verdict.metric) == metric::Preference::Lower;
    let (low, high) =
        if turned { (1.0 / interval.high, 1.0 / interval.low) } else { (interval.low, interval.high) };
    let word = verdict.outcome.word();
    format!("{gain:.3}, {low:.3} to {high:.3} in {} ({} rounds): {word}", verdict.metric, estimate.rounds)
}

/// Suggested verdict for the row. Without a proven gain, a change is not necessarily wrong, so a person must decide.
fn suggested(outcome: &Conclusion) -> &'static str {
    match outcome {
        Conclusion::Faster => "kept",
        Conclusion::Slower => "dropped",
        _ => "unclear",
    }
}

fn or_dash(text: &str) -> &str {
    if text.trim().is_empty() { "–" } else { text }
}

/// Escapes text so that it cannot end the cell or the row.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('\\', "\\\\").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::record;

    fn change() -> Log {
        Log {
            change: Some("GSO on relay sockets".to_owned()),
            predicted: Some("1.9".to_owned()),
            ..Log::default()
        }
    }

    fn steady(metric: &str, ratio: f64) -> RunRecord {
        record(metric, &[(100.0, 100.1, 100.0 * ratio); 8])
    }

    #[test]
    fn a_row_has_the_seven_columns_of_the_log() {
        assert_eq!(
            row(&steady("packets_per_cpu_s", 2.0), &change()).unwrap(),
            "| 2026-11-20 | 012345678 | GSO on relay sockets | load turn --clients 8 --rate max --size 120 | 1.9 | \
             2.000, 2.000 to 2.000 in packets_per_cpu_s (8 rounds): faster | kept |"
        );
    }

    #[test]
    fn half_the_cpu_per_packet_is_a_ratio_of_two() {
        let row = row(&steady("cpu_us_per_packet", 0.5), &change()).unwrap();
        assert!(
            row.contains("| 2.000, 2.000 to 2.000 in cpu_us_per_packet (8 rounds): faster | kept |"),
            "{row}"
        );
    }

    #[test]
    fn dirty_trees_are_marked_and_pipes_escaped() {
        let mut record = steady("packets_per_cpu_s", 0.5);
        record.environment.dirty = true;
        record.experiment.workload = "a | b\nc \\".to_owned();
        let row = row(&record, &Log::default()).unwrap();
        assert!(
            row.starts_with("| 2026-11-20 | 012345678+ | relay-flood | a \\| b c \\\\ | – | 0.500"),
            "{row}"
        );
        assert!(row.ends_with(": slower | dropped |"), "{row}");
        assert_eq!(row.replace("\\|", "").matches('|').count(), 8);
    }

    #[test]
    fn the_newest_row_comes_first() {
        let head = "# Log\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n| date | commit |\n| --- | --- |\n";
        let once = insert_row(head, "| old |").unwrap();
        let twice = insert_row(&once, "| new |").unwrap();
        assert_eq!(twice, format!("{head}| new |\n| old |\n"));
        assert_eq!(insert_row(head.trim_end(), "| x |").unwrap(), format!("{head}| x |\n"));
        assert_eq!(insert_row("| date | without a rule |\n", "| x |"), None);
        assert_eq!(insert_row("", "| x |"), None);
    }

    #[test]
    fn a_row_without_figures_gives_the_reason() {
        let mut record = record("packets_per_cpu_s", &[]);
        let text = row(&record, &change()).unwrap();
        assert!(text.contains("packets_per_cpu_s: cannot tell") && text.ends_with("| unclear |"), "{text}");
        record.experiment.subjects.truncate(1);
        assert_eq!(row(&record, &change()), None);
    }
}
