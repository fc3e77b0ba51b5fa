//! Offered rates: parsing and display.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OfferedRate {
    /// Datagrams per second, open loop: replies do not throttle sending. Finite and above 0.
    Pps(f64),
    Max,
}

impl OfferedRate {
    pub const fn pps(self) -> Option<f64> {
        match self {
            Self::Pps(pps) => Some(pps),
            Self::Max => None,
        }
    }
}

impl fmt::Display for OfferedRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pps(pps) => write!(f, "{pps}"),
            Self::Max => f.write_str("max"),
        }
    }
}

impl FromStr for OfferedRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.eq_ignore_ascii_case("max") {
            return Ok(Self::Max);
        }
        let (digits, factor) = match text.strip_suffix(['k', 'K']) {
            Some(digits) => (digits, 1e3),
            None => text.strip_suffix(['m', 'M']).map_or((text, 1.0), |digits| (digits, 1e6)),
        };
        let pps = digits.parse::<f64>().ok().map(|pps| pps * factor);
        pps.filter(|pps| pps.is_finite() && *pps > 0.0).map(Self::Pps).ok_or_else(|| {
            format!("unknown rate {text:?}: expected a number above 0, such as 20000, 20k or 1.5M, or max")
        })
    }
}

impl Serialize for OfferedRate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Pps(pps) => serializer.serialize_f64(*pps),
            Self::Max => serializer.serialize_str("max"),
        }
    }
}

impl<'de> Deserialize<'de> for OfferedRate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a number above 0 or \"max\"")]
        enum Given {
            Pps(f64),
            Text(String),
        }
        match Given::deserialize(deserializer)? {
            Given::Pps(pps) => Ok(Self::Pps(pps)),
            Given::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

/// `count` per second over `time`; 0 if `time` is zero.
pub fn per_second(count: u64, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_and_max_parse() {
        for (text, expected) in [
            ("20000", OfferedRate::Pps(20_000.0)),
            ("20k", OfferedRate::Pps(20_000.0)),
            ("1.5M", OfferedRate::Pps(1_500_000.0)),
            ("0.5", OfferedRate::Pps(0.5)),
            ("max", OfferedRate::Max),
            ("MAX", OfferedRate::Max),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for text in ["", "0", "-1", "nan", "inf", "k", "1kk", "fast"] {
            assert!(text.parse::<OfferedRate>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_rate_is_a_number_or_max_in_json() {
        assert_eq!(serde_json::to_string(&OfferedRate::Pps(250.0)).unwrap(), "250.0");
        assert_eq!(serde_json::to_string(&OfferedRate::Max).unwrap(), "\"max\"");
        assert_eq!(serde_json::from_str::<OfferedRate>("250").unwrap(), OfferedRate::Pps(250.0));
        assert_eq!(serde_json::from_str::<OfferedRate>("\"max\"").unwrap(), OfferedRate::Max);
    }

    #[test]
    fn zero_time_gives_a_zero_rate() {
        assert_eq!(per_second(10, Duration::ZERO), 0.0);
        assert_eq!(per_second(10, Duration::from_millis(500)), 20.0);
    }
}
