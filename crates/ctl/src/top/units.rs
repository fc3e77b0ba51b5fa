//! Figures that may be unknown, formatted as on the admin page (docs/web.md).

use turnpike_measure::units::bits_per_second;

pub(super) const NONE: &str = "-";

/// Formats a payload rate in bytes per second as bits.
pub(super) fn bits(bytes: f64) -> String {
    bits_per_second(bytes * 8.0)
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
    fn unknown_figures_are_a_dash() {
        assert_eq!([micros(None), micros(Some(70)), micros(Some(1234))], ["-", "70 us", "1.2 ms"]);
        assert_eq!([percent(Some(0.256)), percent(None), mean(Some(3.0))], ["26 %", "-", "3.0"]);
    }
}
