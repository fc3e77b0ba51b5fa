//! Batch occupancy (datagrams per receive call) from the metrics of a subject.

use std::collections::BTreeMap;

const BATCHES: &str = "turnpike_rx_batch_datagrams";

/// Adds the values of each metric, summed over all labels, to `sums`.
pub(crate) fn add(sums: &mut BTreeMap<String, f64>, text: &str) {
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some(name_end) = line.find(['{', ' ']) else { continue };
        // Labels may contain spaces, but values never do.
        let Some((_, value)) = line.rsplit_once(' ') else { continue };
        if let Ok(value) = value.parse::<f64>() {
            *sums.entry(line[..name_end].to_owned()).or_insert(0.0) += value;
        }
    }
}

pub(crate) fn occupancy(before: &BTreeMap<String, f64>, after: &BTreeMap<String, f64>) -> Option<f64> {
    let grown = |suffix: &str| {
        let name = format!("{BATCHES}_{suffix}");
        Some(after.get(&name)? - before.get(&name).unwrap_or(&0.0))
    };
    let (datagrams, calls) = (grown("sum")?, grown("count")?);
    (calls > 0.0).then(|| datagrams / calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        add(&mut sums, text);
        sums
    }

    #[test]
    fn occupancy_is_the_mean_over_all_workers_in_the_window() {
        let before = parse(
            "turnpike_rx_batch_datagrams_sum{worker=\"0\"} 100\nturnpike_rx_batch_datagrams_count{worker=\"0\"} 100\n",
        );
        let after = parse(
            "# TYPE x histogram\nturnpike_rx_batch_datagrams_sum{worker=\"0\"} 500\n\
             turnpike_rx_batch_datagrams_sum{worker=\"1\"} 400.0\nturnpike_rx_batch_datagrams_count{worker=\"0\"} 180\n\
             turnpike_rx_batch_datagrams_count{worker=\"1\"} 20\nturnpike_rx_batch_datagrams_bucket{le=\"+Inf\"} 7\n",
        );
        assert_eq!(occupancy(&before, &after), Some(8.0));
        assert_eq!(occupancy(&after, &after), None, "nothing was received");
        let mut of_two = after;
        add(&mut of_two, "turnpike_rx_batch_datagrams_sum 200\nturnpike_rx_batch_datagrams_count 100\n");
        assert_eq!(occupancy(&before, &of_two), Some(5.0));
        assert_eq!(occupancy(&BTreeMap::new(), &parse("other 1\n")), None);
    }
}
