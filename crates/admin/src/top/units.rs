//! Numbers with units, as the page has them (docs/web.md): three digits, and a prefix for thousands.

/// What is not known.
pub(super) const NONE: &str = "-";

fn prefixed(value: f64, unit: &str) -> String {
    const PREFIXES: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let (mut value, mut prefix) = (value, 0);
    while value >= 999.5 && prefix + 1 < PREFIXES.len() {
        value /= 1000.0;
        prefix += 1;
    }
    let whole = prefix == 0 && value.fract() == 0.0;
    let digits = if whole || value >= 99.95 { 0 } else { 1 + usize::from(value < 9.995) };
    format!("{value:.digits$} {}{unit}", PREFIXES[prefix]).trim_end().to_owned()
}

pub(super) fn bits(bytes: f64) -> String {
    prefixed(bytes * 8.0, "bit/s")
}

pub(super) fn per_second(value: f64) -> String {
    format!("{}/s", prefixed(value, ""))
}

pub(super) fn percent(share: Option<f64>) -> String {
    share.map_or(NONE.to_owned(), |share| format!("{:.0} %", share * 100.0))
}

pub(super) fn mean(value: Option<f64>) -> String {
    value.map_or(NONE.to_owned(), |value| format!("{value:.1}"))
}

#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
pub(super) fn micros(us: Option<u64>) -> String {
    us.map_or(NONE.to_owned(), |us| match us {
        ..1000 => format!("{us} us"),
        1000..1_000_000 => format!("{:.1} ms", us as f64 / 1e3),
        _ => format!("{:.1} s", us as f64 / 1e6),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_prefix() {
        for (value, text) in [
            (0.0, "0/s"),
            (0.25, "0.25/s"),
            (12.34, "12.3/s"),
            (999.0, "999/s"),
            (1500.0, "1.50 k/s"),
            (999_500.0, "1.00 M/s"),
        ] {
            assert_eq!(per_second(value), text);
        }
        assert_eq!(bits(1250.0), "10.0 kbit/s");
        assert_eq!([micros(None), micros(Some(70)), micros(Some(1234))], ["-", "70 us", "1.2 ms"]);
        assert_eq!([percent(Some(0.256)), percent(None), mean(Some(3.0))], ["26 %", "-", "3.0"]);
    }
}
