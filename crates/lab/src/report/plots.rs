//! The plots, as SVG text to stand inside a page.
//!
//! Each returns an empty string when there is nothing to show: a page without a plot is better than none at all.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::metric;
use crate::record::{Record, Sweep};
use crate::stats;
use crate::verdict::{Outcome, Verdict};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// Ratio at which the plot of ratios ends, unless the deciding metric goes farther; beyond, dots stand at the edge.
const FARTHEST: f64 = 4.0;
const WIDTH: u32 = 760;
const HEIGHT: u32 = 320;
const FONT: (&str, i32) = ("sans-serif", 13);

/// Told apart also by the colour-blind (Okabe and Ito 2008).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// A row of the ratio plot.
pub(super) struct Ratio {
    pub label: String,
    pub ratio: f64,
    pub low: f64,
    pub high: f64,
    /// Half of the band around 1 that means nothing, as a logarithm.
    pub floor: Option<f64>,
    /// Whether the difference is shown, and is for the better.
    pub better: Option<bool>,
}

impl Ratio {
    pub(super) fn of(label: String, verdict: &Verdict) -> Option<Self> {
        let estimate = verdict.estimate?;
        let interval = estimate.interval();
        let floor = verdict.floor.map(|floor| floor.level);
        let better = match verdict.outcome {
            Outcome::Faster => Some(true),
            Outcome::Slower => Some(false),
            _ => None,
        };
        Some(Self { label, ratio: estimate.ratio(), low: interval.low, high: interval.high, floor, better })
    }
}

/// Ratios with their intervals, a line at 1, and the noise floor as a band around it.
pub(super) fn ratios(rows: &[Ratio]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let count = u32::try_from(rows.len()).unwrap_or(u32::MAX);
    svg(60 + 34 * count.min(60), |area| {
        let floor = |row: &Ratio| row.floor.unwrap_or(0.0);
        let low = rows.iter().map(|row| row.low.min((-floor(row)).exp())).fold(0.98, f64::min);
        let high = rows.iter().map(|row| row.high.max(floor(row).exp())).fold(1.02, f64::max);
        // One wild metric must not press all others onto the line.
        let (low, high) = (low.max(rows[0].low.min(FARTHEST.recip())), high.min(rows[0].high.max(FARTHEST)));
        let (low, high) = (low / (high / low).powf(0.05), high * (high / low).powf(0.05));
        let last = rows.len() - 1;
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(230)
            .build_cartesian_2d(
                (low..high).log_scale().with_key_points(ticks(low, high)),
                (0..last).into_segmented(),
            )?;
        let label = |place: &SegmentValue<usize>| match place {
            SegmentValue::CenterOf(place) => {
                rows.get(last - place.min(&last)).map_or_else(String::new, |r| r.label.clone())
            }
            _ => String::new(),
        };
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .y_labels(rows.len() + 1)
            .y_label_formatter(&label)
            .x_label_formatter(&|x| format!("{x}"))
            .x_desc("ratio to the baseline")
            .label_style(FONT)
            .draw()?;
        for (i, row) in rows.iter().enumerate() {
            // The first row stands on top.
            let place = last - i;
            let middle = SegmentValue::CenterOf(place);
            if let Some(floor) = row.floor {
                let (from, to) = ((-floor).exp().max(low), floor.exp().min(high));
                let band = [(from, SegmentValue::Exact(place)), (to, after(place, last))];
                chart.draw_series([Rectangle::new(band, BLACK.mix(0.08).filled())])?;
            }
            let inside = |ratio: f64| ratio.clamp(low, high);
            let colour = match row.better {
                Some(true) => COLOURS[2],
                Some(false) => COLOURS[1],
                None => RGBColor(120, 120, 120),
            };
            chart.draw_series([PathElement::new(
                vec![(inside(row.low), middle.clone()), (inside(row.high), middle.clone())],
                colour.stroke_width(3),
            )])?;
            chart.draw_series([Circle::new((inside(row.ratio), middle), 5, colour.filled())])?;
        }
        chart.draw_series([PathElement::new(
            vec![(1.0, SegmentValue::Exact(0)), (1.0, SegmentValue::Last)],
            BLACK.stroke_width(1),
        )])?;
        Ok(())
    })
}

/// Round ratios between `low` and `high`, from 1 outwards as long as their labels do not touch.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    const ROUND: [f64; 20] = [
        1.01, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, 50.0,
        100.0,
    ];
    const ROUND_BELOW: [f64; 17] =
        [0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.02, 0.01];
    let apart = (high / low).ln() * 0.09;
    let mut ticks = vec![1.0_f64];
    for side in [&ROUND[..], &ROUND_BELOW[..]] {
        let mut last = 1.0_f64;
        for &tick in side.iter().filter(|tick| (low..=high).contains(*tick)) {
            if (tick / last).ln().abs() >= apart {
                ticks.push(tick);
                last = tick;
            }
        }
    }
    ticks.sort_by(f64::total_cmp);
    ticks
}

fn after(place: usize, last: usize) -> SegmentValue<usize> {
    if place == last { SegmentValue::Last } else { SegmentValue::Exact(place + 1) }
}

/// Every run as a dot, one colour per subject, void ones as rings, the median as a line.
pub(super) fn rounds(record: &Record, metric: &str) -> String {
    let values =
        || record.rounds.iter().filter_map(|round| round.metrics.get(metric).map(|value| (round, *value)));
    let Some((low, high)) = range(values().map(|(_, value)| value)) else { return String::new() };
    // Room above the dots for the legend.
    let high = high + (high - low) * 0.25;
    let last = record.rounds.iter().map(|round| round.index).max().unwrap_or(0);
    svg(HEIGHT, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(80)
            .build_cartesian_2d(0.5..f64::from(last) + 1.5, low..high)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| metric::show(metric, *y))
            .x_desc("round")
            .label_style(FONT)
            .draw()?;
        for (i, subject) in record.experiment.subjects.iter().enumerate() {
            let colour = colour(i);
            let dots = values().filter(|(round, _)| round.subject == subject.name).map(|(round, value)| {
                let style = if round.voided.is_none() { colour.filled() } else { colour.stroke_width(1) };
                Circle::new((f64::from(round.index) + 1.0, value), 4, style)
            });
            chart
                .draw_series(dots)?
                .label(subject.name.as_str())
                .legend(move |(x, y)| Circle::new((x + 8, y), 4, colour.filled()));
            if let Some(median) = stats::median(&record.values(&subject.name, metric)) {
                let line = [(0.5, median), (f64::from(last) + 1.5, median)];
                chart.draw_series(LineSeries::new(line, colour.mix(0.5)))?;
            }
        }
        legend(&mut chart)
    })
}

/// Latency percentiles of each subject, the median over its rounds, on a logarithmic scale.
pub(super) fn latency(record: &Record) -> String {
    let curves: Vec<Line<'_, usize>> = lines(record, |subject| median_percentiles(record, subject));
    let all = || curves.iter().flat_map(|line| line.points.iter().map(|(_, value)| *value));
    let Some((_, high)) = range(all()) else { return String::new() };
    let low = all().fold(f64::INFINITY, f64::min) / 1.2;
    let names = ["p50", "p90", "p99", "p99.9", "max"];
    svg(HEIGHT, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(80)
            .build_cartesian_2d(
                (0..names.len() - 1).into_segmented(),
                (low..high.max(low * 10.0)).log_scale(),
            )?;
        let label = |place: &SegmentValue<usize>| match place {
            SegmentValue::CenterOf(place) => names.get(*place).copied().unwrap_or_default().to_owned(),
            _ => String::new(),
        };
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&label)
            .y_labels(6)
            .y_label_formatter(&|y| format!("{y:.0} µs"))
            .label_style(FONT)
            .draw()?;
        for Line { subject, name, points } in &curves {
            let colour = colour(*subject);
            let at = |&(place, value): &(usize, f64)| (SegmentValue::CenterOf(place), value);
            chart
                .draw_series(LineSeries::new(points.iter().map(at), colour.stroke_width(2)))?
                .label(*name)
                .legend(move |(x, y)| Circle::new((x + 8, y), 4, colour.filled()));
            chart.draw_series(points.iter().map(at).map(|point| Circle::new(point, 4, colour.filled())))?;
        }
        legend(&mut chart)
    })
}

/// One subject's curve.
struct Line<'a, X> {
    /// Its place among the subjects, which gives the colour.
    subject: usize,
    name: &'a str,
    points: Vec<(X, f64)>,
}

/// The curves of all subjects that have one.
fn lines<X>(record: &Record, points: impl Fn(&str) -> Vec<(X, f64)>) -> Vec<Line<'_, X>> {
    let subjects = record.experiment.subjects.iter().map(|subject| subject.name.as_str()).enumerate();
    subjects
        .map(|(subject, name)| Line { subject, name, points: points(name) })
        .filter(|line| !line.points.is_empty())
        .collect()
}

/// Empty without latencies. A percentile of 0 cannot stand on a logarithmic scale and is left out.
fn median_percentiles(record: &Record, subject: &str) -> Vec<(usize, f64)> {
    let latencies: Vec<_> = record
        .rounds
        .iter()
        .filter(|round| round.subject == subject && round.voided.is_none())
        .filter_map(|round| round.latency.as_ref().map(crate::record::Latency::percentiles))
        .collect();
    (0..5)
        .filter_map(|i| Some((i, stats::median(&latencies.iter().map(|p| p[i].1).collect::<Vec<_>>())?)))
        .filter(|(_, value)| *value > 0.0)
        .collect()
}

/// What a sweep plot shows against the offered rate.
#[derive(Clone, Copy)]
pub(super) enum Curve {
    Delivered,
    Loss,
    LatencyP99,
}

/// One curve for each subject over the offered rate; several trials at a rate count as their median.
pub(super) fn sweeps(record: &Record, curve: Curve) -> String {
    let curves: Vec<Line<'_, f64>> = lines(record, |subject| sweep_points(&record.sweeps, subject, curve));
    let points = || curves.iter().flat_map(|line| &line.points);
    let (Some((low, high)), Some((left, right))) =
        (range(points().map(|p| p.1)), range(points().map(|p| p.0)))
    else {
        return String::new();
    };
    svg(HEIGHT, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(80)
            .build_cartesian_2d(left..right, low.max(0.0)..high)?;
        let show_y = |y: &f64| match curve {
            Curve::Delivered => metric::show("delivered_pps", *y),
            Curve::Loss => format!("{y:.2} %"),
            Curve::LatencyP99 => format!("{y:.0} µs"),
        };
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|x| metric::show("offered_pps", *x))
            .y_label_formatter(&show_y)
            .x_desc("offered")
            .label_style(FONT)
            .draw()?;
        if matches!(curve, Curve::Delivered) {
            let (from, to) = (left.max(low).max(0.0), right.min(high));
            chart.draw_series(LineSeries::new([(from, from), (to, to)], BLACK.mix(0.3)))?;
        }
        for Line { subject, name, points } in &curves {
            let colour = colour(*subject);
            chart
                .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
                .label(*name)
                .legend(move |(x, y)| Circle::new((x + 8, y), 4, colour.filled()));
            chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
        }
        legend(&mut chart)
    })
}

fn sweep_points(sweeps: &[Sweep], subject: &str, curve: Curve) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = sweeps
        .iter()
        .filter(|sweep| sweep.subject == subject)
        .flat_map(|sweep| &sweep.points)
        .filter_map(|point| {
            let value = match curve {
                Curve::Delivered => point.delivered_pps,
                Curve::Loss => point.loss_percent,
                Curve::LatencyP99 => point.latency.as_ref()?.p99,
            };
            Some((point.offered_pps, value))
        })
        .filter(|(x, y)| x.is_finite() && y.is_finite())
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let at =
        |rate: f64| stats::median(&points.iter().filter(|p| p.0 == rate).map(|p| p.1).collect::<Vec<_>>());
    let mut rates: Vec<f64> = points.iter().map(|point| point.0).collect();
    rates.dedup();
    rates.into_iter().filter_map(|rate| Some((rate, at(rate)?))).collect()
}

/// From a little below the smallest finite value to a little above the largest; never empty. `None` without a value.
fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let (low, high) = values
        .filter(|value| value.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    let margin = if high > low { (high - low) * 0.08 } else { (high.abs() * 0.05).max(0.5) };
    (low <= high).then_some((low - margin, high + margin))
}

fn colour(subject: usize) -> RGBColor {
    COLOURS[subject % COLOURS.len()]
}

fn legend<'a, DB, X: Ranged, Y: Ranged>(chart: &mut ChartContext<'a, DB, Cartesian2d<X, Y>>) -> Drawn
where
    DB: DrawingBackend + 'a,
    DB::ErrorType: 'static,
    X::ValueType: Clone + 'static,
    Y::ValueType: Clone + 'static,
{
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .label_font(FONT)
        .draw()?;
    Ok(())
}

/// The text of one SVG element; empty when it cannot be drawn.
fn svg(height: u32, draw: impl FnOnce(&Area<'_>) -> Drawn) -> String {
    let mut text = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        draw(&area).and_then(|()| Ok(area.present()?))
    };
    if drawn.is_ok() { text } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_hold_1_and_keep_apart() {
        assert_eq!(ticks(0.95, 1.05), [0.95, 0.98, 0.99, 1.0, 1.01, 1.02, 1.05]);
        assert_eq!(ticks(0.5, 2.2), [0.5, 0.6, 0.7, 0.85, 1.0, 1.15, 1.4, 1.7, 2.0]);
        let wide = ticks(0.05, 60.0);
        assert!(wide.contains(&1.0) && wide.len() < 12, "{wide:?}");
    }

    #[test]
    fn what_is_not_finite_is_not_in_range() {
        assert_eq!(range([f64::NAN, f64::INFINITY].into_iter()), None);
        assert_eq!(range([0.0].into_iter()), Some((-0.5, 0.5)));
        assert_eq!(range([10.0, f64::NAN, 20.0].into_iter()), Some((10.0 - 0.8, 20.0 + 0.8)));
    }

    #[test]
    fn trials_at_the_same_rate_are_one_point() {
        let point = |offered_pps, delivered_pps| crate::record::SweepPoint {
            offered_pps,
            delivered_pps,
            ..crate::record::SweepPoint::default()
        };
        let sweep = Sweep {
            subject: "a".to_owned(),
            points: vec![point(2.0, 5.0), point(1.0, 1.0), point(2.0, 2.0), point(2.0, 1.0)],
            ..Sweep::default()
        };
        assert_eq!(sweep_points(&[sweep], "a", Curve::Delivered), [(1.0, 1.0), (2.0, 2.0)]);
        assert_eq!(sweep_points(&[], "a", Curve::Loss), []);
    }
}
