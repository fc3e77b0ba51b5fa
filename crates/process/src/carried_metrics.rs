//! Metrics of the previous process, added to this process's page so that counters continue. Works on the text
//! of both pages, because the previous process may be a different version; counters that only that version
//! has remain in the sum.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use turnpike_telemetry::page::{MetricFamily, Page};

const OF_PROCESS: &str = "turnpike_process_";

/// Metrics of the previous process and of all those before it.
#[derive(Debug, Default)]
pub struct CarriedMetrics {
    /// Gauges that add up while both processes have sessions.
    gauges: &'static [&'static str],
    state: Mutex<PageState>,
}

#[derive(Debug, Default)]
struct PageState {
    page: Page,
    /// True if the previous process has sessions that this process does not count.
    is_apart: bool,
    lives: bool,
}

impl CarriedMetrics {
    pub(crate) fn new(gauges: &'static [&'static str]) -> Self {
        Self { gauges, state: Mutex::default() }
    }

    /// Stores the page of a process that is about to hand over its sessions.
    pub(crate) fn expect(&self, text: &str) {
        *self.lock() = PageState { page: Page::new(text), is_apart: false, lives: false };
    }

    /// Marks the point at which this process begins to serve; sessions that have not moved stay in the
    /// previous process.
    pub(crate) fn begin(&self) {
        self.lock().lives = true;
    }

    pub(crate) fn set(&self, text: &str) {
        *self.lock() = PageState { page: Page::new(text), is_apart: true, lives: true };
    }

    /// Marks the end of the previous process and its sessions. Its counters stay.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        (state.is_apart, state.lives) = (false, false);
    }

    pub(crate) fn lives(&self) -> bool {
        self.lock().lives
    }

    #[must_use]
    pub fn apart(&self, gauge: &str) -> u64 {
        let PageState { page, is_apart, .. } = &*self.lock();
        let family = page.0.iter().find(|family| *is_apart && family.name == gauge);
        let values = family.into_iter().flat_map(|family| &family.samples);
        values.filter_map(|(_, value)| value.parse::<u64>().ok()).sum()
    }

    pub(crate) fn add_to(&self, own: String) -> String {
        let PageState { page, is_apart, .. } = &*self.lock();
        if page.0.is_empty() {
            return own;
        }
        let mut sum = Page::new(&own);
        for family in page.0.iter().filter(|family| self.adds_up(family, *is_apart)) {
            match sum.0.iter_mut().find(|ours| ours.name == family.name) {
                Some(ours) => add(ours, family),
                None => sum.0.push(family.clone()),
            }
        }
        sum.to_string()
    }

    fn adds_up(&self, family: &MetricFamily, is_apart: bool) -> bool {
        match &*family.kind {
            "counter" | "histogram" => !family.name.starts_with(OF_PROCESS),
            "gauge" => is_apart && self.gauges.contains(&&*family.name),
            _ => false,
        }
    }

    fn lock(&self) -> MutexGuard<'_, PageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds the samples of the same family in another page.
fn add(family: &mut MetricFamily, other: &MetricFamily) {
    let places: HashMap<String, usize> =
        family.samples.iter().enumerate().map(|(at, (series, _))| (in_order(series), at)).collect();
    for (series, value) in &other.samples {
        match places.get(&in_order(series)) {
            Some(at) => family.samples[*at].1 = sum(&family.samples[*at].1, value),
            None => family.samples.push((series.clone(), value.clone())),
        }
    }
}

fn in_order(series: &str) -> String {
    let Some((name, labels)) = series.split_once('{') else { return series.to_owned() };
    let labels = labels.strip_suffix('}').unwrap_or(labels);
    let (mut quoted, mut escaped) = (false, false);
    let mut labels: Vec<&str> = labels
        .split(|c: char| {
            let is_end = c == ',' && !quoted;
            quoted ^= c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            is_end
        })
        .collect();
    labels.sort_unstable();
    format!("{name}{{{}}}", labels.join(","))
}

fn sum(one: &str, other: &str) -> String {
    if let (Ok(one), Ok(other)) = (one.parse::<u64>(), other.parse::<u64>()) {
        return one.saturating_add(other).to_string();
    }
    let number = |text: &str| text.parse::<f64>().unwrap_or_default();
    format!("{:?}", number(one) + number(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GAUGES: &[&str] = &["turnpike_allocations"];
    const OLD: &str = "\
# HELP turnpike_allocations Current allocations.
# TYPE turnpike_allocations gauge
turnpike_allocations{worker=\"0\"} 2
# HELP turnpike_draining 1 while no new clients are accepted.
# TYPE turnpike_draining gauge
turnpike_draining 1.0
# HELP turnpike_ended Ends.
# TYPE turnpike_ended counter
turnpike_ended_total{worker=\"0\",reason=\"a,b\"} 18446744073709551000
turnpike_ended_total{reason=\"\\\"x\\\",y\",worker=\"0\"} 5
turnpike_ended_total{worker=\"1\",reason=\"gone\"} 7
# HELP turnpike_process_cpu_seconds CPU time.
# TYPE turnpike_process_cpu_seconds counter
turnpike_process_cpu_seconds_total 99.5
# HELP turnpike_forgotten Not counted by the new version.
# TYPE turnpike_forgotten counter
turnpike_forgotten_total 3
# HELP turnpike_time Times.
# TYPE turnpike_time histogram
turnpike_time_sum 1.25
turnpike_time_count 2
turnpike_time_bucket{le=\"+Inf\"} 2
# HELP turnpike_build Version of this program.
# TYPE turnpike_build info
turnpike_build_info{version=\"1\"} 1
# EOF
";
    const NEW: &str = "\
# HELP turnpike_allocations Current allocations.
# TYPE turnpike_allocations gauge
turnpike_allocations{worker=\"0\"} 10
# HELP turnpike_draining 1 while no new clients are accepted.
# TYPE turnpike_draining gauge
turnpike_draining 0.0
# HELP turnpike_ended Ends.
# TYPE turnpike_ended counter
turnpike_ended_total{reason=\"a,b\",worker=\"0\"} 15
turnpike_ended_total{worker=\"0\",reason=\"\\\"x\\\",y\"} 1
# HELP turnpike_process_cpu_seconds CPU time.
# TYPE turnpike_process_cpu_seconds counter
turnpike_process_cpu_seconds_total 0.5
# HELP turnpike_time Times.
# TYPE turnpike_time histogram
turnpike_time_sum 0.5
turnpike_time_count 1
turnpike_time_bucket{le=\"+Inf\"} 1
# HELP turnpike_build Version of this program.
# TYPE turnpike_build info
turnpike_build_info{version=\"2\"} 1
# EOF
";

    fn value<'t>(text: &'t str, series: &str) -> Vec<&'t str> {
        text.lines().filter_map(|line| line.strip_prefix(series)?.strip_prefix(' ')).collect()
    }

    #[test]
    fn a_page_without_carried_metrics_is_unchanged() {
        let carried = CarriedMetrics::new(GAUGES);
        assert!(!carried.lives());
        assert_eq!(carried.add_to(NEW.to_owned()), NEW);
        assert_eq!(Page::new(NEW).to_string(), NEW);
    }

    #[test]
    fn counters_continue_and_gauges_add_up_while_both_live() {
        let carried = CarriedMetrics::new(GAUGES);
        carried.set(OLD);
        let text = carried.add_to(NEW.to_owned());
        for (series, expected) in [
            ("turnpike_allocations{worker=\"0\"}", "12"),
            ("turnpike_draining", "0.0"),
            ("turnpike_ended_total{reason=\"a,b\",worker=\"0\"}", "18446744073709551015"),
            ("turnpike_ended_total{worker=\"0\",reason=\"\\\"x\\\",y\"}", "6"),
            ("turnpike_ended_total{worker=\"1\",reason=\"gone\"}", "7"),
            ("turnpike_process_cpu_seconds_total", "0.5"),
            ("turnpike_forgotten_total", "3"),
            ("turnpike_time_sum", "1.75"),
            ("turnpike_time_bucket{le=\"+Inf\"}", "3"),
            ("turnpike_build_info{version=\"2\"}", "1"),
        ] {
            assert_eq!(value(&text, series), [expected], "{series} in\n{text}");
        }
        assert!(!text.contains("version=\"1\"") && text.matches("# EOF").count() == 1, "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
        let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        assert_eq!(families.count(), 7, "{text}");
        assert_eq!(carried.apart("turnpike_allocations"), 2);
    }

    #[test]
    fn only_the_counters_of_an_exited_process_remain() {
        let carried = CarriedMetrics::new(GAUGES);
        carried.set(OLD);
        assert!(carried.lives());
        carried.end();
        assert!(!carried.lives());
        assert_eq!(carried.apart("turnpike_allocations"), 0);
        let text = carried.add_to(NEW.to_owned());
        assert_eq!(value(&text, "turnpike_allocations{worker=\"0\"}"), ["10"]);
        assert_eq!(value(&text, "turnpike_ended_total{worker=\"1\",reason=\"gone\"}"), ["7"]);
    }

    #[test]
    fn sessions_about_to_arrive_are_not_counted_twice() {
        let carried = CarriedMetrics::new(GAUGES);
        carried.expect(OLD);
        carried.begin();
        assert_eq!(carried.apart("turnpike_allocations"), 0);
        let text = carried.add_to(NEW.to_owned());
        assert_eq!(value(&text, "turnpike_allocations{worker=\"0\"}"), ["10"]);
        assert_eq!(value(&text, "turnpike_forgotten_total"), ["3"]);
        assert!(carried.lives());
    }

    #[test]
    fn a_third_process_carries_the_sums_of_the_first_two() {
        let (second, third) = (CarriedMetrics::new(GAUGES), CarriedMetrics::new(GAUGES));
        second.expect(OLD);
        third.expect(&second.add_to(NEW.to_owned()));
        let text = third.add_to(NEW.to_owned());
        assert_eq!(value(&text, "turnpike_time_count"), ["4"]);
        assert_eq!(value(&text, "turnpike_forgotten_total"), ["3"]);
    }
}
