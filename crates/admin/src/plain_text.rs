//! Converts metrics to the Prometheus text format that preceded OpenMetrics.

use std::collections::HashMap;

/// Converts OpenMetrics to the older format (text/plain; version=0.0.4).
pub(crate) fn plain_text(open_metrics: &str) -> String {
    let types = open_metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let suffixes: HashMap<&str, &str> = types
        .filter_map(|(family, kind)| match kind {
            "counter" => Some((family, "_total")),
            "info" => Some((family, "_info")),
            _ => None,
        })
        .collect();
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines().filter(|line| *line != "# EOF" && !line.starts_with("# UNIT ")) {
        let told = ["# HELP ", "# TYPE "]
            .iter()
            .find_map(|told| Some((*told, line.strip_prefix(told)?.split_once(' ')?)));
        match told {
            Some((told, (family, rest))) => {
                let suffix = suffixes.get(family).copied().unwrap_or_default();
                let rest = if told == "# TYPE " && rest == "info" { "gauge" } else { rest };
                text.extend([told, family, suffix, " ", rest]);
            }
            None => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_format_names_counter_families_like_their_series() {
        let open_metrics = "# HELP a_b Some # TYPE of.\n# TYPE a_b counter\n# UNIT a_b bytes\na_b_total{x=\"# EOF\"} 1\n\
                            # TYPE build info\nbuild_info{version=\"1\"} 1\n# HELP c Now.\n# TYPE c gauge\nc 2\n# EOF\n";
        let plain = "# HELP a_b_total Some # TYPE of.\n# TYPE a_b_total counter\na_b_total{x=\"# EOF\"} 1\n\
                     # TYPE build_info gauge\nbuild_info{version=\"1\"} 1\n# HELP c Now.\n# TYPE c gauge\nc 2\n";
        assert_eq!(plain_text(open_metrics), plain);
    }
}
