use super::*;

fn ratio(label: &str, low: f64, ratio: f64, high: f64) -> Ratio {
    let interval = ConfidenceInterval { low: low.ln(), high: high.ln() };
    Ratio { label: label.to_owned(), ratio: ratio.ln(), interval, floor: 0.05, better: None }
}

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

fn texts(svg: &str) -> Vec<(String, f64, f64)> {
    let xs = numbers(svg, "text", "x");
    let ys = numbers(svg, "text", "y");
    let words = svg
        .split("<text ")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once('>')?.1.split('<').next()?.trim().to_owned()));
    words.zip(xs.into_iter().zip(ys)).map(|(text, (x, y))| (text, x, y)).collect()
}

/// Left, top, right and bottom of the plot area, from the ends of its grid lines.
fn frame(svg: &str) -> [f64; 4] {
    let edge = |attribute: &str, better: fn(f64, f64) -> f64| {
        numbers(svg, "line", attribute).into_iter().reduce(better).expect("a grid")
    };
    [edge("x1", f64::min), edge("y2", f64::min), edge("x2", f64::max), edge("y1", f64::max)]
}

#[test]
fn ratios_are_placed_by_their_logarithm() {
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

    // Pixels per unit of the logarithm, from the two dots that are farthest apart.
    let scale = (dots[2] - dots[1]) / (40.0_f64 / 0.031).ln();
    let expected = |log: f64| dots[3] + scale * log;
    for (row, x) in rows.iter().zip(&dots) {
        assert!(
            (x - expected(row.ratio)).abs() <= 1.5,
            "{} is at {x}, not {}",
            row.label,
            expected(row.ratio)
        );
    }
    // Intervals and the line at 1, each a polyline of two points.
    let ends: Vec<f64> = svg
        .split("points=\"")
        .skip(1)
        .flat_map(|rest| rest.split('"').next().unwrap_or("").split_whitespace())
        .filter_map(|point| point.split(',').next()?.parse().ok())
        .collect();
    for end in [0.029, 0.033, 1.1, 1.3, 38.0, 55.0, 1.0] {
        assert!(ends.iter().any(|x| (x - expected(f64::ln(end))).abs() <= 1.5), "no end at {end}: {ends:?}");
    }
    // Each tick is at the position of its value, and there are ticks on both sides of 1.
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
        assert!((x - expected(tick.ln())).abs() <= 1.5, "tick {tick} is at {x}");
    }
}

#[test]
fn a_single_row_is_inside_its_axes() {
    let svg = ratios(&[ratio("alone", 1.1, 1.2, 1.3)]);
    let [left, top, right, bottom] = frame(&svg);
    let (x, y) = (numbers(&svg, "circle", "cx")[0], numbers(&svg, "circle", "cy")[0]);
    assert!((left..=right).contains(&x) && (top..=bottom).contains(&y), "{x}, {y} in {:?}", frame(&svg));
    let (_, _, label) =
        texts(&svg).into_iter().find(|(text, ..)| text == "alone  1.200").expect("the row has a label");
    assert!((label - y).abs() <= 1.5, "label at {label}, dot at {y}");
}

#[test]
fn row_labels_are_aligned_and_long_names_fit() {
    let long = "a-subject-with-a-rather-long-name: segments_per_superpacket ↓";
    let rows: Vec<Ratio> = (0..40)
        .map(|i| ratio(&if i == 7 { long.to_owned() } else { format!("metric_{i}") }, 0.9, 1.0, 1.25))
        .collect();
    let svg = ratios(&rows);
    let heights = numbers(&svg, "circle", "cy");
    let texts = texts(&svg);
    for (row, height) in rows.iter().zip(heights) {
        let label = format!("{}  1.000", row.label);
        let (_, x, y) = texts.iter().find(|(text, ..)| *text == label).unwrap_or_else(|| panic!("{label}"));
        assert!((y - height).abs() <= 1.5, "{label} at {y}, its dot at {height}");
        // The label ends at the axis, and its letters are narrower than half the font height.
        assert!(*x >= 5.3 * label.chars().count() as f64, "{label} ends at {x}");
    }
}

#[test]
fn rounds_are_at_integers_with_one_tick_each() {
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
        if count == 48 {
            assert!((4..=20).contains(&numbers_seen.len()), "{numbers_seen:?}");
            let step = numbers_seen[1] - numbers_seen[0];
            assert!(step > 1 && numbers_seen.iter().all(|number| number % step == 0), "{numbers_seen:?}");
        } else {
            assert_eq!(numbers_seen, (1..=count).collect::<Vec<_>>());
        }
        let (xs, ys) = (numbers(&svg, "circle", "cx"), numbers(&svg, "circle", "cy"));
        assert_eq!(xs.len(), 2 * count as usize);
        assert!(
            xs.iter().all(|x| (left..=right).contains(x)) && ys.iter().all(|y| (top..=bottom).contains(y))
        );
        for (number, x) in ticks {
            assert!(xs.iter().any(|dot| (dot - x).abs() <= 1.5), "no dot above round {number}");
            let expected = left + (right - left) * f64::from(number) / f64::from(count + 1);
            assert!((x - expected).abs() <= 1.5, "round {number} at {x}, not {expected}");
        }
    }
}

#[test]
fn void_runs_are_drawn_as_rings() {
    let mut record = crate::record::tests::record("delivered_pps", &[(100.0, 100.0, 120.0); 4]);
    let rings = |record: &RunRecord| {
        let svg = rounds(record, "delivered_pps");
        let circles = svg.split("<circle ").skip(1).filter_map(|rest| rest.split('>').next());
        circles.filter(|tag| tag.contains("fill=\"none\"")).count()
    };
    assert_eq!(rings(&record), 0);
    record.rounds[3].voided =
        Some(crate::invalid_rounds::VoidReason::CpuStolen { percent: 3.0, limit_percent: 1.0 });
    assert_eq!(rings(&record), 1);
}

#[test]
fn non_finite_values_are_ignored_by_ranges() {
    assert_eq!(range([f64::NAN, f64::INFINITY].into_iter()), None);
    assert_eq!(range([0.0].into_iter()), Some((-0.5, 0.5)));
    assert_eq!(range([10.0, f64::NAN, 20.0].into_iter()), Some((10.0 - 0.8, 20.0 + 0.8)));
}

#[test]
fn trials_at_the_same_rate_become_one_point() {
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
