//! Formatting of quantities: three digits and a decimal SI prefix (1 kB is 1,000 bytes); durations in at most
//! two units. `crates/admin/src/web/format.js` implements the same rules for the web page.

fn prefixed(value: f64, unit: &str) -> String {
    const PREFIXES: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let (mut value, mut prefix) = (value, 0);
    while value >= 999.5 && prefix + 1 < PREFIXES.len() {
        value /= 1000.0;
        prefix += 1;
    }
    let whole = prefix == 0 && value.fract() == 0.0;
    let digits = if whole || value >= 99.95 { 0 } else { 1 + usize::from(value < 9.995) };
    format!("{value:.digits$} {}{unit}", PREFIXES[prefix]).trim_end().to_owned()
}

/// Formats a byte count: `1.50 MB`.
pub fn bytes(count: u64) -> String {
    prefixed(count as f64, "B")
}

/// Formats a bit rate: `10.0 kbit/s`.
pub fn bits_per_second(bits: f64) -> String {
    prefixed(bits, "bit/s")
}

/// Formats an event rate: `1.50 k/s`.
pub fn per_second(rate: f64) -> String {
    format!("{}/s", prefixed(rate, ""))
}

/// Formats a duration: `3 h 12 min`, `26 days`, `3 years`.
pub fn span(seconds: u64) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    const YEAR: u64 = 365 * DAY;
    let days = |count: u64| format!("{count} {}", if count == 1 { "day" } else { "days" });
    let (large, rest) = match seconds {
        ..MINUTE => return format!("{seconds} s"),
        MINUTE..HOUR => (format!("{} min", seconds / MINUTE), (seconds % MINUTE, "s")),
        HOUR..DAY => (format!("{} h", seconds / HOUR), (seconds % HOUR / MINUTE, "min")),
        _ if seconds < 10 * DAY => (days(seconds / DAY), (seconds % DAY / HOUR, "h")),
        _ if seconds < 2 * YEAR => return days(seconds / DAY),
        _ => return format!("{} years", seconds / YEAR),
    };
    match rest {
        (0, _) => large,
        (count, unit) => format!("{large} {count} {unit}"),
    }
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
        assert_eq!(bits_per_second(10_000.0), "10.0 kbit/s");
        for (count, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (12_345, "12.3 kB"),
            (999_499, "999 kB"),
            (999_500, "1.00 MB"),
            (5_000_000_000, "5.00 GB"),
            (u64::MAX, "18.4 EB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn durations_have_at_most_two_units() {
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min"),
            (61, "1 min 1 s"),
            (3661, "1 h 1 min"),
            (7200, "2 h"),
            (90_000, "1 day 1 h"),
            (10 * 86_400 - 1, "9 days 23 h"),
            (13 * 86_400 + 3600, "13 days"),
            (2 * 365 * 86_400 - 1, "729 days"),
            (95_926_150, "3 years"),
        ] {
            assert_eq!(span(seconds), text);
        }
    }
}
