//! SVG plots to be embedded in a page.
//!
//! Each function returns an empty string if there is nothing to show or drawing fails.

use maud::{Markup, html};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::metric;
use crate::record::{Round, RunRecord, Sweep};
use crate::stats::{self, ConfidenceInterval};
use crate::verdict::{Conclusion, MetricVerdict};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type PlotResult = Result<(), Box<dyn std::error::Error>>;

const WIDTH: u32 = 760;
const MOST_ROWS: usize = 200;
const MOST_ROUNDS: usize = 20;
const DOT: i32 = 5;
const HEIGHT: u32 = 320;
const FONT: (&str, i32) = ("sans-serif", 13);
/// Average width of a character in pixels.
const CHARACTER: u32 = 7;

/// Colours for colour-blind readers (Okabe and Ito 2008).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// Row of [`ratios`]; all figures are logarithms.
pub(super) struct Ratio {
    pub(crate) label: String,
    pub(crate) ratio: f64,
    pub(crate) interval: ConfidenceInterval,
    /// Half-width of the noise band around 0.
    pub(crate) floor: f64,
    pub(crate) better: Option<bool>,
}

impl Ratio {
    pub(super) fn of(label: String, verdict: &MetricVerdict) -> Option<Self> {
        let estimate = verdict.estimate?;
        let better = match verdict.outcome {
            Conclusion::Faster => Some(true),
            Conclusion::Slower => Some(false),
            _ => None,
        };
        let floor = verdict.floor.map_or(0.0, |floor| floor.level);
        Some(Self { label, ratio: estimate.log_ratio, interval: estimate.log_interval, floor, better })
    }
}

/// Ratios with intervals on a logarithmic scale, with a line at 1 and the noise floor as a band.
pub(super) fn ratios(rows: &[Ratio]) -> String {
    let rows = &rows[..rows.len().min(MOST_ROWS)];
    let ends = rows.iter().flat_map(|row| [row.interval.low, row.interval.high, -row.floor, row.floor]);
    let Some((low, high)) = range(ends) else { return String::new() };
    let labels: Vec<String> =
        rows.iter().map(|row| format!("{}  {}", row.label, figure(row.ratio.exp()))).collect();
    let longest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    let pixels = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let label_area = (CHARACTER * pixels(longest)).clamp(60, WIDTH / 2);
    svg(60 + 34 * pixels(rows.len()).max(2), |area| {
        // A single row gets an empty row below it, because plotters misplaces a segment that is the only one on its axis.
        let last = (rows.len() - 1).max(1);
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .margin_right(30)
            .x_label_area_size(34)
            .y_label_area_size(label_area)
            .build_cartesian_2d(low..high, (0..last).into_segmented())?;
        let label = |place: &SegmentValue<usize>| match place {
            SegmentValue::CenterOf(place) => {
                labels.get(last - place.min(&last)).map_or_else(String::new, Clone::clone)
            }
            _ => String::new(),
        };
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .y_labels(rows.len() + 1)
            .y_label_formatter(&label)
            .x_labels(8)
            .x_label_formatter(&|x| figure(x.exp()))
            .x_desc("ratio to the baseline")
            .label_style(FONT)
            .draw()?;
        for (i, row) in rows.iter().enumerate() {
            let place = last - i;
            let middle = SegmentValue::CenterOf(place);
            let end = if place == last { SegmentValue::Last } else { SegmentValue::Exact(place + 1) };
            let band = [(-row.floor, SegmentValue::Exact(place)), (row.floor, end)];
            chart.draw_series([Rectangle::new(band, BLACK.mix(0.08).filled())])?;
            let colour = match row.better {
                Some(true) => COLOURS[2],
                Some(false) => COLOURS[1],
                None => RGBColor(120, 120, 120),
            };
            let interval = vec![(row.interval.low, middle.clone()), (row.interval.high, middle.clone())];
            chart.draw_series([PathElement::new(interval, colour.stroke_width(3))])?;
            chart.draw_series([Circle::new((row.ratio, middle), DOT, colour.filled())])?;
        }
        let one = vec![(0.0, SegmentValue::Exact(0)), (0.0, SegmentValue::Last)];
        chart.draw_series([PathElement::new(one, BLACK.stroke_width(1))])?;
        Ok(())
    })
}

fn figure(ratio: f64) -> String {
    match ratio {
        0.1..1000.0 => format!("{ratio:.3}"),
        0.001..0.1 => format!("{ratio:.4}"),
        _ => format!("{ratio:.2e}"),
    }
}

/// All runs as dots, void runs as rings, and the median as a line; see [`rounds_legend`].
pub(super) fn rounds(record: &RunRecord, metric: &str) -> String {
    let values =
        || record.rounds.iter().filter_map(|round| round.metrics.get(metric).map(|value| (round, *value)));
    let Some((low, high)) = range(values().map(|(_, value)| value)) else { return String::new() };
    let end = record.rounds.iter().map(|round| round.index).max().unwrap_or(0) + 2;
    svg(HEIGHT, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(80)
            // Uses an integer axis, because a fractional one would have ticks between the rounds.
            .build_cartesian_2d(0..end, low..high)?;
        let label = |number: &u32| {
            if (1..end).contains(number) { number.to_string() } else { String::new() }
        };
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(MOST_ROUNDS)
            .x_label_formatter(&label)
            .y_labels(6)
            .y_label_formatter(&|y| metric::show(metric, *y))
            .x_desc("round")
            .label_style(FONT)
            .draw()?;
        for (i, subject) in record.experiment.subjects.iter().enumerate() {
            let colour = colour(i);
            let dots = values().filter(|(round, _)| round.subject == subject.name).map(|(round, value)| {
                let style =
                    if record.counts(round, metric) { colour.filled() } else { colour.stroke_width(1) };
                Circle::new((round.index + 1, value), 4, style)
            });
            chart.draw_series(dots)?;
            if let Some(median) = stats::median(&record.values(&subject.name, metric)) {
                let line = [(0, median), (end, median)];
                chart.draw_series(LineSeries::new(line, colour.mix(0.5)))?;
            }
        }
        Ok(())
    })
}

/// Legend, shown above the plot so that it covers no dots.
pub(super) fn rounds_legend(record: &RunRecord, metric: &str) -> Markup {
    let is_void = |round: &Round| round.metrics.contains_key(metric) && !record.counts(round, metric);
    html! {
        p.legend {
            @for (i, subject) in record.experiment.subjects.iter().enumerate() {
                @let RGBColor(red, green, blue) = colour(i);
                span { i style=(format!("color:rgb({red},{green},{blue})")) { "●" } " " (subject.name) }
            }
            @if record.rounds.iter().any(is_void) { span { i { "○" } " void, not counted" } }
            span { i { "—" } " median of valid runs" }
        }
    }
}

#[derive(Clone, Copy)]
pub(super) enum Curve {
    Delivered,
    Loss,
    LatencyP99,
}

pub(super) fn sweeps(record: &RunRecord, curve: Curve) -> String {
    let subjects = record.experiment.subjects.iter().map(|subject| subject.name.as_str()).enumerate();
    let curves: Vec<_> =
        subjects.map(|(i, name)| (i, name, sweep_points(&record.sweeps, name, curve))).collect();
    let points = || curves.iter().flat_map(|(.., points)| points);
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
            chart.draw_series(points.iter().map(|point| Circle::new(*point, 4, colour.filled())))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .label_font(FONT)
            .draw()?;
        Ok(())
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

/// Range of the values, widened if it would be empty. `None` if there are no values.
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

fn svg(height: u32, draw: impl FnOnce(&Area<'_>) -> PlotResult) -> String {
    let mut text = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        draw(&area).and_then(|()| Ok(area.present()?))
    };
    if drawn.is_ok() { text } else { String::new() }
}

#[cfg(test)]
mod tests;
