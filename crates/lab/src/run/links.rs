//! Behaviour of the links during the rounds, from the kernel's counters, as one sentence per subject for the record.

use std::collections::BTreeMap;

use crate::{probe::network::DATAGRAMS_PER_PACKET, record::RunRecord, stats};

pub(crate) fn describe(record: &RunRecord) -> Vec<String> {
    let subjects = record.experiment.subjects.iter().map(|subject| &subject.name);
    subjects.filter_map(|subject| of_subject(record, subject)).collect()
}

/// Sentence about one subject; `None` if no device receives in dedicated threads, because there is then nothing to check.
fn of_subject(record: &RunRecord, subject: &str) -> Option<String> {
    let rounds = || record.rounds.iter().filter(|round| round.subject == subject);
    let mut all: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (name, value) in rounds().flat_map(|round| &round.metrics) {
        all.entry(name).or_default().push(*value);
    }
    let part = |name: &&str, tail: &str| {
        name.strip_prefix("net.")?.strip_suffix(tail)?.strip_suffix('.').map(str::to_owned)
    };
    let carried = all.iter().filter_map(|(name, values)| {
        Some(format!("{} {:.2}", part(name, DATAGRAMS_PER_PACKET)?, stats::median(values)?))
    });
    let received = all.iter().filter_map(|(name, values)| {
        let mut cpus: Vec<String> = values.iter().map(|cpu| format!("{cpu:.0}")).collect();
        cpus.sort();
        cpus.dedup();
        Some(format!("{} {}", part(name, "receiver_cpu")?, cpus.join(" and ")))
    });
    let (carried, received): (Vec<String>, Vec<String>) = (carried.collect(), received.collect());
    (!received.is_empty()).then(|| {
        format!(
            "links of {subject}: datagrams per received packet at {}; receiving CPUs: {}",
            carried.join(", "),
            received.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_described_by_load_and_receiving_cpu() {
        let mut record = crate::record::tests::record("packets_per_cpu_s", &[(100.0, 100.1, 200.0); 3]);
        assert_eq!(describe(&record), Vec::<String>::new());
        let first = record.experiment.subjects[0].name.clone();
        for (round, cpu) in
            record.rounds.iter_mut().filter(|round| round.subject == first).zip([0.0, 1.0, 0.0])
        {
            round.metrics.insert("net.relay.datagrams_per_packet".to_owned(), 1.004);
            round.metrics.insert("net.peer.datagrams_per_packet".to_owned(), 11.0);
            round.metrics.insert("net.relay.r-c.receiver_cpu".to_owned(), cpu);
            round.metrics.insert("net.peer.p-r.receiver_cpu".to_owned(), 1.0);
        }
        assert_eq!(
            describe(&record),
            [format!(
                "links of {first}: datagrams per received packet at peer 11.00, relay 1.00; receiving CPUs: peer.p-r 1, \
                 relay.r-c 0 and 1"
            )]
        );
    }
}
