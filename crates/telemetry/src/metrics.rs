//! Page of /metrics as OTLP metrics with the same names, values and labels.

use crate::message::{
    CUMULATIVE, Gauge, Histogram, HistogramDataPoint, KeyValue, Metric, MetricData, MetricsRequest, Number,
    NumberDataPoint, Resource, ResourceMetrics, Scope, ScopeMetrics, Sum,
};
use crate::page::{MetricFamily, Page};

/// Times of all data points in nanoseconds since 1970.
#[derive(Clone, Copy)]
pub(crate) struct Times {
    pub(crate) start: u64,
    pub(crate) now: u64,
}

pub(crate) fn request(page: &str, resource: &Resource, times: Times) -> MetricsRequest {
    let metrics = Page::new(page).0.iter().filter_map(|family| metric(family, times)).collect();
    let scope_metrics = vec![ScopeMetrics { scope: Some(Scope::new("turnpike")), metrics }];
    MetricsRequest {
        resource_metrics: vec![ResourceMetrics { resource: Some(resource.clone()), scope_metrics }],
    }
}

fn metric(family: &MetricFamily, times: Times) -> Option<Metric> {
    let numbers = || family.samples.iter().filter_map(|sample| number(sample, times)).collect();
    let data = match &*family.kind {
        "counter" => MetricData::Sum(Sum {
            data_points: numbers(),
            aggregation_temporality: CUMULATIVE,
            is_monotonic: true,
        }),
        "gauge" | "info" => MetricData::Gauge(Gauge { data_points: numbers() }),
        "histogram" => MetricData::Histogram(Histogram {
            data_points: histograms(family, times),
            aggregation_temporality: CUMULATIVE,
        }),
        _ => return None,
    };
    Some(Metric { name: family.name.clone(), description: family.help().to_owned(), data: Some(data) })
}

fn number((series, value): &(String, String), times: Times) -> Option<NumberDataPoint> {
    let value = match value.parse() {
        Ok(whole) => Number::Int(whole),
        Err(_) => Number::Double(value.parse().ok()?),
    };
    Some(NumberDataPoint {
        attributes: attributes(series).into_iter().map(|(key, value)| KeyValue::text(key, value)).collect(),
        start_time_unix_nano: times.start,
        time_unix_nano: times.now,
        value: Some(value),
    })
}

/// Labels of a series.
fn attributes(series: &str) -> Vec<(&str, String)> {
    let labels = series.split_once('{').and_then(|(_, labels)| labels.strip_suffix('}')).unwrap_or_default();
    let mut rest = labels;
    let mut found = Vec::new();
    while let Some((key, quoted)) = rest.split_once("=\"") {
        let mut value = String::new();
        let mut characters = quoted.char_indices();
        rest = "";
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => {
                    rest = &quoted[at + 1..];
                    break;
                }
                '\\' => match characters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, other)) => value.push(other),
                    None => break,
                },
                other => value.push(other),
            }
        }
        found.push((key.trim_start_matches(','), value));
    }
    found
}

/// Joins the series of each histogram, which have the same labels except for `le`.
fn histograms(family: &MetricFamily, times: Times) -> Vec<HistogramDataPoint> {
    let mut points: Vec<HistogramDataPoint> = Vec::new();
    for (series, value) in &family.samples {
        let name = series.split('{').next().unwrap_or_default();
        let (bound, labels): (Vec<_>, Vec<_>) =
            attributes(series).into_iter().partition(|(key, _)| *key == "le");
        let attributes: Vec<_> = labels.into_iter().map(|(key, value)| KeyValue::text(key, value)).collect();
        let found = points.iter().position(|point| point.attributes == attributes);
        let at = found.unwrap_or_else(|| {
            points.push(HistogramDataPoint {
                attributes,
                start_time_unix_nano: times.start,
                time_unix_nano: times.now,
                ..HistogramDataPoint::default()
            });
            points.len() - 1
        });
        let point = &mut points[at];
        match name.strip_prefix(&*family.name) {
            Some("_sum") => point.sum = value.parse().ok(),
            Some("_count") => point.count = value.parse().unwrap_or_default(),
            Some("_bucket") => {
                let total = value.parse().unwrap_or_default();
                let before: u64 = point.bucket_counts.iter().sum();
                point.bucket_counts.push(u64::saturating_sub(total, before));
                let bound = bound.first().and_then(|(_, bound)| bound.parse().ok());
                point.explicit_bounds.extend(bound.filter(|bound: &f64| bound.is_finite()));
            }
            _ => {}
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# HELP turnpike_ended Ends.
# TYPE turnpike_ended counter
turnpike_ended_total{worker=\"0\",reason=\"a,b\"} 18
turnpike_ended_total{reason=\"\\\"x\\\\ y\\n\",worker=\"1\"} 5
# HELP turnpike_draining 1 while no new clients are accepted.
# TYPE turnpike_draining gauge
turnpike_draining 1.0
# HELP turnpike_time Times.
# TYPE turnpike_time histogram
turnpike_time_sum{of=\"a\"} 1.25
turnpike_time_count{of=\"a\"} 7
turnpike_time_bucket{le=\"0.5\",of=\"a\"} 2
turnpike_time_bucket{le=\"2.0\",of=\"a\"} 5
turnpike_time_bucket{le=\"+Inf\",of=\"a\"} 7
# HELP turnpike_build Version of this program.
# TYPE turnpike_build info
turnpike_build_info{version=\"1\"} 1
# EOF
";

    #[test]
    fn families_become_metrics_with_the_same_names_values_and_labels() {
        let request = request(PAGE, &Resource::default(), Times { start: 1, now: 2 });
        let metrics = &request.resource_metrics[0].scope_metrics[0].metrics;
        let names: Vec<(&str, &str)> =
            metrics.iter().map(|metric| (&*metric.name, &*metric.description)).collect();
        let wanted = [
            ("turnpike_ended", "Ends."),
            ("turnpike_draining", "1 while no new clients are accepted."),
            ("turnpike_time", "Times."),
            ("turnpike_build", "Version of this program."),
        ];
        assert_eq!(names, wanted);
        let Some(MetricData::Sum(sum)) = &metrics[0].data else { panic!("{:?}", metrics[0]) };
        assert!(sum.is_monotonic && sum.aggregation_temporality == CUMULATIVE);
        assert_eq!(sum.data_points[0].value, Some(Number::Int(18)));
        assert_eq!((sum.data_points[0].start_time_unix_nano, sum.data_points[0].time_unix_nano), (1, 2));
        let text = |key, value: &str| KeyValue::text(key, value.to_owned());
        assert_eq!(sum.data_points[0].attributes, [text("worker", "0"), text("reason", "a,b")]);
        assert_eq!(sum.data_points[1].attributes, [text("reason", "\"x\\ y\n"), text("worker", "1")]);
        let Some(MetricData::Gauge(gauge)) = &metrics[1].data else { panic!("{:?}", metrics[1]) };
        assert_eq!(gauge.data_points[0].value, Some(Number::Double(1.0)));
        let Some(MetricData::Histogram(histogram)) = &metrics[2].data else { panic!("{:?}", metrics[2]) };
        let [point] = &histogram.data_points[..] else { panic!("{histogram:?}") };
        assert_eq!((point.count, point.sum), (7, Some(1.25)));
        assert_eq!((&point.bucket_counts[..], &point.explicit_bounds[..]), (&[2, 3, 2][..], &[0.5, 2.0][..]));
        assert_eq!(point.attributes, [text("of", "a")]);
    }
}
