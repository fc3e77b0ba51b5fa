//! Text of /metrics (OpenMetrics).

use std::fmt;

/// Page of metrics, by family.
#[derive(Debug, Default)]
pub struct Page(pub Vec<MetricFamily>);

/// Metric family with its samples.
#[derive(Clone, Debug, Default)]
pub struct MetricFamily {
    pub name: String,
    /// Type, such as `counter`.
    pub kind: String,
    head: Vec<String>,
    /// Series with their values.
    pub samples: Vec<(String, String)>,
}

impl Page {
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut families: Vec<MetricFamily> = Vec::new();
        for line in text.lines() {
            let Some(about) = line.strip_prefix("# ") else {
                if let (Some(family), Some((series, value))) = (families.last_mut(), line.rsplit_once(' ')) {
                    family.samples.push((series.to_owned(), value.to_owned()));
                }
                continue;
            };
            let mut words = about.splitn(3, ' ');
            let (Some(what), Some(name)) = (words.next(), words.next()) else { continue };
            if families.last().is_none_or(|family| family.name != name) {
                families.push(MetricFamily { name: name.to_owned(), ..MetricFamily::default() });
            }
            if let Some(family) = families.last_mut() {
                family.head.push(line.to_owned());
                if what == "TYPE" {
                    family.kind = words.next().unwrap_or_default().to_owned();
                }
            }
        }
        Self(families)
    }
}

impl fmt::Display for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for MetricFamily { head, samples, .. } in &self.0 {
            head.iter().try_for_each(|line| writeln!(f, "{line}"))?;
            samples.iter().try_for_each(|(series, value)| writeln!(f, "{series} {value}"))?;
        }
        f.write_str("# EOF\n")
    }
}

impl MetricFamily {
    pub(crate) fn help(&self) -> &str {
        let help = self.head.iter().find_map(|line| line.strip_prefix("# HELP "));
        help.and_then(|help| help.split_once(' ')).map_or("", |(_, help)| help)
    }
}
