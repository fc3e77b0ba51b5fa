//! The plots, as SVG text to stand inside a page.
//!
//! Each returns an empty string when there is nothing to show: a page without a plot is better than none at all.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::metric;
use crate::record::{Record, Sweep};
use crate::stats;
use crate::verdict::Verdict;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

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
}

impl Ratio {
    pub(super) fn of(label: String, verdict: &Verdict) -> Option<Self> {
        let estimate = verdict.estimate?;
        let interval = estimate.interval();
        let floor = verdict.floor.map(|floor| floor.level);
        Some(Self { label, ratio: estimate.ratio(), low: interval.low, high: interval.high, floor })
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
        let (low, high) = (low / (high / low).powf(0.05), high * (high / low).powf(0.05));
        let last = rows.len() - 1;
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(230)
            .build_cartesian_2d((low..high).log_scale(), (0..last).into_segmented())?;
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
            .x_label_formatter(&|x| format!("{x:.3}"))
            .x_desc("ratio to the baseline")
            .label_style(FONT)
            .draw()?;
        for (i, row) in rows.iter().enumerate() {
            // The first row stands on top.
            let place = last - i;
            let middle = SegmentValue::CenterOf(place);
            if let Some(floor) = row.floor {
                let band = [((-floor).exp(), SegmentValue::Exact(place)), (floor.exp(), after(place, last))];
                chart.draw_series([Rectangle::new(band, BLACK.mix(0.08).filled())])?;
            }
            chart.draw_series([PathElement::new(
                vec![(row.low, middle.clone()), (row.high, middle.clone())],
                COLOURS[0].stroke_width(3),
            )])?;
            chart.draw_series([Circle::new((row.ratio, middle), 5, COLOURS[0].filled())])?;
        }
        chart.draw_series([PathElement::new(
            vec![(1.0, SegmentValue::Exact(0)), (1.0, SegmentValue::Last)],
            BLACK.stroke_width(1),
        )])?;
        Ok(())
    })
}

fn after(place: usize, last: usize) -> SegmentValue<usize> {
    if place == last { SegmentValue::Last } else { SegmentValue::Exact(place + 1) }
}

/// Every run as a dot, one colour per subject, void ones as rings, the median as a line.
pub(super) fn rounds(record: &Record, metric: &str) -> String {
    let values =
        || record.rounds.iter().filter_map(|round| round.metrics.get(metric).map(|value| (round, *value)));
    let Some((low, high)) = range(values().map(|(_, value)| value)) else { return String::new() };
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
    let curves: Vec<(usize, &str, Vec<(usize, f64)>)> = record
        .experiment
        .subjects
        .iter()
        .enumerate()
        .filter_map(|(i, subject)| {
            Some((i, subject.name.as_str(), median_percentiles(record, &subject.name)?))
        })
        .collect();
    let all = || curves.iter().flat_map(|(_, _, curve)| curve.iter().map(|(_, value)| *value));
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
            .y_label_formatter(&|y| format!("{y:.0} µs"))
            .label_style(FONT)
            .draw()?;
        for (i, name, curve) in &curves {
            let colour = colour(*i);
            let at = |&(place, value): &(usize, f64)| (SegmentValue::CenterOf(place), value);
            chart
                .draw_series(LineSeries::new(curve.iter().map(at), colour.stroke_width(2)))?
                .label(*name)
                .legend(move |(x, y)| Circle::new((x + 8, y), 4, colour.filled()));
            chart.draw_series(curve.iter().map(at).map(|point| Circle::new(point, 4, colour.filled())))?;
        }
        legend(&mut chart)
    })
}

/// `None` without latencies. A percentile of 0 cannot stand on a logarithmic scale and is left out.
fn median_percentiles(record: &Record, subject: &str) -> Option<Vec<(usize, f64)>> {
    let latencies: Vec<_> = record
        .rounds
        .iter()
        .filter(|round| round.subject == subject && round.voided.is_none())
        .filter_map(|round| round.latency.as_ref().map(crate::record::Latency::percentiles))
        .collect();
    let curve: Vec<(usize, f64)> = (0..5)
        .filter_map(|i| Some((i, stats::median(&latencies.iter().map(|p| p[i].1).collect::<Vec<_>>())?)))
        .filter(|(_, value)| *value > 0.0)
        .collect();
    (!curve.is_empty()).then_some(curve)
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
    let names: Vec<&str> = record.experiment.subjects.iter().map(|subject| subject.name.as_str()).collect();
    let curves: Vec<(usize, &str, Vec<(f64, f64)>)> = names
        .iter()
        .enumerate()
        .map(|(i, name)| (i, *name, sweep_points(&record.sweeps, name, curve)))
        .filter(|(_, _, points)| !points.is_empty())
        .collect();
    let points = || curves.iter().flat_map(|(_, _, points)| points);
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
        for (i, name, points) in &curves {
            let colour = colour(*i);
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
