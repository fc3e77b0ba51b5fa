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

const WIDTH: u32 = 760;
/// Rows of the plot of ratios, at most.
const MOST_ROWS: usize = 200;
/// Labels of rounds, at most.
const MOST_ROUNDS: usize = 20;
/// Radius of a dot.
const DOT: i32 = 5;
const HEIGHT: u32 = 320;
const FONT: (&str, i32) = ("sans-serif", 13);
/// Pixels of a character of a label, at most on average.
const CHARACTER: u32 = 7;

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

/// Ratios with their intervals on a logarithmic scale that has room for all of them, a line at 1, and the noise floor as a
/// band around it. Each row is labelled with its name and its ratio.
pub(super) fn ratios(rows: &[Ratio]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let rows = &rows[..rows.len().min(MOST_ROWS)];
    let count = u32::try_from(rows.len()).unwrap_or(u32::MAX);
    let labels: Vec<String> =
        rows.iter().map(|row| format!("{}  {}", row.label, figure(row.ratio))).collect();
    let longest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    let label_area = (CHARACTER * u32::try_from(longest).unwrap_or(u32::MAX)).clamp(60, WIDTH / 2);
    svg(60 + 34 * count, |area| {
        let (low, high) = extent(rows);
        let last = rows.len() - 1;
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            // A label at the right end is as long to the right as to the left.
            .margin_right(30)
            .x_label_area_size(34)
            .y_label_area_size(label_area)
            .build_cartesian_2d(
                (low..high).log_scale().with_key_points(ticks(low, high)),
                (0..last).into_segmented(),
            )?;
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
            .x_label_formatter(&|x| tick_label(*x))
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
            let colour = match row.better {
                Some(true) => COLOURS[2],
                Some(false) => COLOURS[1],
                None => RGBColor(120, 120, 120),
            };
            chart.draw_series([PathElement::new(
                vec![(row.low, middle.clone()), (row.high, middle.clone())],
                colour.stroke_width(3),
            )])?;
            chart.draw_series([Circle::new((row.ratio, middle), DOT, colour.filled())])?;
        }
        chart.draw_series([PathElement::new(
            vec![(1.0, SegmentValue::Exact(0)), (1.0, SegmentValue::Last)],
            BLACK.stroke_width(1),
        )])?;
        Ok(())
    })
}

/// From a little below the smallest end of an interval or a noise floor to a little above the largest; 1 is within.
fn extent(rows: &[Ratio]) -> (f64, f64) {
    let ends = rows.iter().flat_map(|row| {
        let floor = row.floor.unwrap_or(0.0);
        [row.low, row.ratio, row.high, (-floor).exp(), floor.exp()]
    });
    let (low, high) = ends.fold((0.98_f64, 1.02_f64), |(low, high), end| (low.min(end), high.max(end)));
    let margin = (high / low).powf(0.05);
    (low / margin, high * margin)
}

/// Round ratios between `low` and `high`, from 1 outwards as long as their labels do not touch.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    const ROUND: [f64; 12] = [1.01, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.7, 2.5, 7.0];
    const ROUND_BELOW: [f64; 12] = [0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.4, 0.3, 0.15, 0.03];
    let apart = (high / low).ln() * 0.09;
    // By tens where the span has so many of them that nothing between finds room.
    let decades = |side: f64| {
        (0..300_i32).flat_map(move |power| {
            let figures: &[f64] = if apart > 1.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
            figures.iter().map(move |figure| {
                if side > 0.0 { figure * 10_f64.powi(power) } else { figure * 10_f64.powi(-power) }
            })
        })
    };
    let mut ticks = vec![1.0_f64];
    for (side, near) in [(1.0, &ROUND), (-1.0, &ROUND_BELOW)] {
        let mut candidates: Vec<f64> = near
            .iter()
            .copied()
            .chain(decades(side))
            .filter(|tick| (low..=high).contains(tick) && (tick.ln() * side) > 0.0)
            .collect();
        candidates.sort_by(|a, b| a.ln().abs().total_cmp(&b.ln().abs()));
        let mut last = 1.0_f64;
        for tick in candidates {
            if (tick / last).ln().abs() >= apart {
                ticks.push(tick);
                last = tick;
            }
        }
    }
    ticks.sort_by(f64::total_cmp);
    ticks
}

/// As short as a label of an axis must be.
fn tick_label(x: f64) -> String {
    if (1e-3..1e5).contains(&x) {
        // 0.3 is not 0.30000000000000004.
        format!("{}", (x * 1e6).round() / 1e6)
    } else {
        format!("{x:.0e}")
    }
}

/// A ratio to three figures behind the first.
fn figure(ratio: f64) -> String {
    match ratio {
        0.1..1000.0 => format!("{ratio:.3}"),
        0.001..0.1 => format!("{ratio:.4}"),
        _ => format!("{ratio:.2e}"),
    }
}

fn after(place: usize, last: usize) -> SegmentValue<usize> {
    if place == last { SegmentValue::Last } else { SegmentValue::Exact(place + 1) }
}

/// Every run as a dot, one colour per subject, those that do not count as rings, the median as a line. What means what is in
/// [`rounds_legend`].
pub(super) fn rounds(record: &Record, metric: &str) -> String {
    let values =
        || record.rounds.iter().filter_map(|round| round.metrics.get(metric).map(|value| (round, *value)));
    let Some((low, high)) = range(values().map(|(_, value)| value)) else { return String::new() };
    let count = record.rounds.iter().map(|round| round.index + 1).max().unwrap_or(1);
    svg(HEIGHT, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(80)
            // A place for each round: an axis of fractions would have ticks between them.
            .build_cartesian_2d((1..count).into_segmented(), low..high)?;
        let label = |place: &SegmentValue<u32>| match place {
            SegmentValue::CenterOf(number) => number.to_string(),
            _ => String::new(),
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
                Circle::new((SegmentValue::CenterOf(round.index + 1), value), 4, style)
            });
            chart.draw_series(dots)?;
            if let Some(median) = stats::median(&record.values(&subject.name, metric)) {
                let line = [(SegmentValue::Exact(1), median), (SegmentValue::Last, median)];
                chart.draw_series(LineSeries::new(line, colour.mix(0.5)))?;
            }
        }
        Ok(())
    })
}

/// What the colours and signs of [`rounds`] mean, as HTML above it: inside it would cover dots.
pub(super) fn rounds_legend(record: &Record, metric: &str) -> String {
    let mut html = "<p class=\"legend\">".to_owned();
    for (i, subject) in record.experiment.subjects.iter().enumerate() {
        let RGBColor(red, green, blue) = colour(i);
        let name = super::page::escape(&subject.name);
        html += &format!("<span><i style=\"color:rgb({red},{green},{blue})\">●</i> {name}</span>");
    }
    if record.rounds.iter().any(|round| round.metrics.contains_key(metric) && !record.counts(round, metric)) {
        html += "<span><i>○</i> void: does not count</span>";
    }
    html + "<span><i>—</i> median of those that count</span></p>"
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
        for (low, high) in [(0.05, 60.0), (0.025, 1.3), (1e-6, 2.0), (0.9, 1e9), (1e-9, 1e9), (0.3, 1.05)] {
            let ticks = ticks(low, high);
            assert!(ticks.contains(&1.0) && (3..=13).contains(&ticks.len()), "{low} to {high}: {ticks:?}");
            assert!(ticks.iter().all(|tick| (low..=high).contains(tick)), "{ticks:?}");
            let apart = ticks.windows(2).map(|pair| (pair[1] / pair[0]).ln()).fold(f64::INFINITY, f64::min);
            assert!(apart >= (high / low).ln() * 0.089, "{ticks:?}");
        }
        assert_eq!([0.3, 1.0, 2000.0, 1e-6, 1e6].map(tick_label), ["0.3", "1", "2000", "1e-6", "1e6"]);
    }

    fn ratio(label: &str, low: f64, ratio: f64, high: f64) -> Ratio {
        Ratio { label: label.to_owned(), ratio, low, high, floor: Some(0.05), better: None }
    }

    /// The numbers of an attribute, of all elements of this kind that have it.
    fn numbers(svg: &str, element: &str, attribute: &str) -> Vec<f64> {
        svg.split(&format!("<{element} "))
            .skip(1)
            .filter_map(|rest| {
                let tag = rest.split('>').next()?;
                let value = tag.split(&format!("{attribute}=\"")).nth(1)?;
                value.split('"').next()?.parse().ok()
            })
            .collect()
    }

    /// Each text with its place.
    fn texts(svg: &str) -> Vec<(String, f64, f64)> {
        let xs = numbers(svg, "text", "x");
        let ys = numbers(svg, "text", "y");
        let words = svg
            .split("<text ")
            .skip(1)
            .filter_map(|rest| Some(rest.split_once('>')?.1.split('<').next()?.trim().to_owned()));
        words.zip(xs.into_iter().zip(ys)).map(|(text, (x, y))| (text, x, y)).collect()
    }

    /// Left, top, right and bottom of the plotted area: its grid lines end there.
    fn frame(svg: &str) -> [f64; 4] {
        let edge = |attribute: &str, better: fn(f64, f64) -> f64| {
            numbers(svg, "line", attribute).into_iter().reduce(better).expect("a grid")
        };
        [edge("x1", f64::min), edge("y2", f64::min), edge("x2", f64::max), edge("y1", f64::max)]
    }

    #[test]
    fn ratios_stand_where_their_logarithm_puts_them_however_far_out_they_are() {
        let rows = [
            ratio("near", 1.1, 1.2, 1.3),
            ratio("tiny", 0.029, 0.031, 0.033),
            ratio("huge", 38.0, 40.0, 55.0),
            ratio("one", 1.0, 1.0, 1.0),
        ];
        let svg = ratios(&rows);
        let dots = numbers(&svg, "circle", "cx");
        assert_eq!(dots.len(), rows.len());
        let [left, top, right, bottom] = frame(&svg);
        assert!(dots.iter().all(|x| (left..=right).contains(x)), "{dots:?} in {left} to {right}");
        assert!(numbers(&svg, "circle", "cy").iter().all(|y| (top..=bottom).contains(y)));

        // Pixels a unit of the logarithm, by the two that are farthest apart.
        let scale = (dots[2] - dots[1]) / (40.0_f64 / 0.031).ln();
        let expected = |ratio: f64| dots[3] + scale * ratio.ln();
        for (row, x) in rows.iter().zip(&dots) {
            assert!(
                (x - expected(row.ratio)).abs() <= 1.5,
                "{} is at {x}, not {}",
                row.label,
                expected(row.ratio)
            );
        }
        // The intervals and the line at 1, each a polyline of two points.
        let ends: Vec<f64> = svg
            .split("points=\"")
            .skip(1)
            .flat_map(|rest| rest.split('"').next().unwrap_or("").split_whitespace())
            .filter_map(|point| point.split(',').next()?.parse().ok())
            .collect();
        for end in [0.029, 0.033, 1.1, 1.3, 38.0, 55.0, 1.0] {
            assert!(ends.iter().any(|x| (x - expected(end)).abs() <= 1.5), "no end at {end}: {ends:?}");
        }
        // Ticks stand at their figures, on both sides of 1.
        let ticks: Vec<(f64, f64)> = texts(&svg)
            .into_iter()
            .filter(|(_, _, y)| *y > bottom)
            .filter_map(|(text, x, _)| Some((text.parse().ok()?, x)))
            .collect();
        assert!(
            ticks.iter().any(|(tick, _)| *tick < 0.1) && ticks.iter().any(|(tick, _)| *tick > 10.0),
            "{ticks:?}"
        );
        for (tick, x) in &ticks {
            assert!((x - expected(*tick)).abs() <= 1.5, "tick {tick} is at {x}");
        }
    }

    #[test]
    fn each_row_is_labelled_at_its_height_with_name_and_ratio_and_long_names_fit() {
        let long = "a-subject-with-a-rather-long-name: segments_per_superpacket ↓";
        let rows: Vec<Ratio> = (0..40)
            .map(|i| ratio(&if i == 7 { long.to_owned() } else { format!("metric_{i}") }, 0.9, 1.0, 1.25))
            .collect();
        let svg = ratios(&rows);
        let heights = numbers(&svg, "circle", "cy");
        let texts = texts(&svg);
        for (row, height) in rows.iter().zip(heights) {
            let label = format!("{}  1.000", row.label);
            let (_, x, y) =
                texts.iter().find(|(text, ..)| *text == label).unwrap_or_else(|| panic!("{label}"));
            assert!((y - height).abs() <= 1.5, "{label} at {y}, its dot at {height}");
            // It ends at the axis, and its letters are narrower than half the height of the font.
            assert!(*x >= 5.3 * label.chars().count() as f64, "{label} ends at {x}");
        }
    }

    #[test]
    fn rounds_stand_at_whole_numbers_and_one_round_has_one_tick() {
        for count in [1_u32, 8, 48] {
            let values: Vec<_> = (0..count).map(|i| (100.0 + f64::from(i), 100.0, 120.0)).collect();
            let record = crate::record::tests::record("delivered_pps", &values);
            let svg = rounds(&record, "delivered_pps");
            let [left, top, right, bottom] = frame(&svg);
            let ticks: Vec<(u32, f64)> = texts(&svg)
                .into_iter()
                .filter(|(_, _, y)| *y > bottom)
                .filter_map(|(text, x, _)| Some((text.parse().ok()?, x)))
                .collect();
            let numbers_seen: Vec<u32> = ticks.iter().map(|(number, _)| *number).collect();
            let expected: Vec<u32> = match count {
                48 => (1..=9).map(|i| i * 5).collect(),
                count => (1..=count).collect(),
            };
            assert_eq!(numbers_seen, expected);
            let (xs, ys) = (numbers(&svg, "circle", "cx"), numbers(&svg, "circle", "cy"));
            assert_eq!(xs.len(), 2 * count as usize);
            assert!(
                xs.iter().all(|x| (left..=right).contains(x))
                    && ys.iter().all(|y| (top..=bottom).contains(y))
            );
            for (number, x) in ticks {
                assert!(xs.iter().any(|dot| (dot - x).abs() <= 1.5), "no dot above round {number}");
            }
        }
    }

    #[test]
    fn runs_that_do_not_count_are_rings() {
        let mut record = crate::record::tests::record("delivered_pps", &[(100.0, 100.0, 120.0); 4]);
        let rings = |record: &Record| {
            let svg = rounds(record, "delivered_pps");
            let circles = svg.split("<circle ").skip(1).filter_map(|rest| rest.split('>').next());
            circles.filter(|tag| tag.contains("fill=\"none\"")).count()
        };
        assert_eq!(rings(&record), 0);
        record.rounds[3].voided = Some(crate::void::Void::CpuStolen { percent: 3.0, limit_percent: 1.0 });
        assert_eq!(rings(&record), 1);
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
