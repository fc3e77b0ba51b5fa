//! Expiry of the certificates in use, for the log and metrics. TLS itself keeps presenting a certificate
//! after it has expired.

use std::{
    fmt::Write,
    sync::{Mutex, MutexGuard, PoisonError},
};

use jiff::{Timestamp, tz::TimeZone};
use turnpike_measure::units::span;
use turnpike_relay::Identity;
use turnpike_relay::certificates::{Certificate, overdue};

/// Remaining validity below which a certificate is reported as expiring very soon: three days span a weekend.
/// Capped at a twelfth of the validity period.
const VERY_SOON: i64 = 3 * DAY;
const DAY: i64 = 86_400;
const NAMES: usize = 8;

#[derive(Debug, Default)]
pub(crate) struct CertificateExpiry(Mutex<Vec<CertificateLifetime>>);

#[derive(Debug)]
struct CertificateLifetime {
    file: String,
    /// First and last Unix second of validity.
    valid: (u64, u64),
    told: Nearness,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Nearness {
    Far,
    Soon,
    VerySoon,
    Over,
    /// Not valid yet; possibly the clock is wrong.
    Early,
}

impl CertificateExpiry {
    pub(crate) fn show(&self, certificates: &[Certificate]) {
        for Certificate { file, identity } in certificates {
            tracing::info!(
                "certificate {} for {}, valid until {}",
                file.display(),
                names(identity),
                date(identity.not_after())
            );
        }
        self.put(certificates.iter().map(|certificate| {
            let Certificate { file, identity } = certificate;
            (file.display().to_string(), (identity.not_before(), identity.not_after()))
        }));
        self.look();
    }

    pub(crate) fn put(&self, certificates: impl IntoIterator<Item = (String, (u64, u64))>) {
        let mut new: Vec<CertificateLifetime> = Vec::new();
        for (file, valid) in certificates {
            // A file that is configured twice is listed once, because metric series must be unique.
            if new.iter().all(|other| other.file != file) {
                new.push(CertificateLifetime { file, valid, told: Nearness::Far });
            }
        }
        *self.lock() = new;
    }

    pub(crate) fn look(&self) {
        for (nearness, warning) in self.due(Timestamp::now().as_second()) {
            match nearness {
                Nearness::Over | Nearness::Early => tracing::error!("{warning}"),
                _ => tracing::warn!("{warning}"),
            }
        }
    }

    fn due(&self, unix: i64) -> Vec<(Nearness, String)> {
        let mut due = Vec::new();
        let clock = date(unix.unsigned_abs());
        for CertificateLifetime { file, valid: (first, last), told } in &mut *self.lock() {
            let signed = |unix: u64| i64::try_from(unix).unwrap_or(i64::MAX);
            let left = signed(*last).saturating_sub(unix);
            let validity = last.saturating_sub(*first);
            let nearness = match left {
                _ if unix < signed(*first) => Nearness::Early,
                ..0 => Nearness::Over,
                left if left < VERY_SOON.min(signed(validity / 12)) => Nearness::VerySoon,
                left if left < signed(overdue(validity)) => Nearness::Soon,
                _ => Nearness::Far,
            };
            if nearness > *told {
                let end = date(*last);
                due.push((
                    nearness,
                    match nearness {
                        Nearness::Early => format!(
                            "certificate {file} is valid from {}, but this machine's clock reads {clock}: clients with a correct clock refuse it \
                             until then; set the clock if it is wrong",
                            date(*first)
                        ),
                        Nearness::Over => format!(
                            "certificate {file} has expired ({end}; this machine's clock reads {clock}): clients refuse it; renew it: the new one is \
                             loaded automatically"
                        ),
                        _ => format!(
                            "certificate {file} expires in {} ({end}); renew it: the new one is loaded automatically",
                            span(left.unsigned_abs())
                        ),
                    },
                ));
            }
            *told = nearness;
        }
        due
    }

    /// First and last second of validity, by file.
    pub(crate) fn validities(&self) -> Vec<(String, (u64, u64))> {
        self.lock().iter().map(|shown| (shown.file.clone(), shown.valid)).collect()
    }

    /// State at the last look, by file.
    pub(crate) fn nearness(&self) -> Vec<(String, Nearness)> {
        self.lock().iter().map(|shown| (shown.file.clone(), shown.told)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<CertificateLifetime>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn names(identity: &Identity) -> String {
    let names = identity.names();
    if names.is_empty() {
        return "no DNS name".to_owned();
    }
    let mut text = names.iter().take(NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > NAMES {
        let _ = write!(text, " and {} more", names.len() - NAMES);
    }
    text
}

fn date(unix: u64) -> String {
    let time = i64::try_from(unix).ok().and_then(|unix| Timestamp::from_second(unix).ok());
    time.map_or_else(
        || "the end of time".to_owned(),
        |time| time.to_zoned(TimeZone::UTC).strftime("%Y-%m-%d %H:%M:%S UTC").to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: i64 = 14 * DAY;

    #[test]
    fn six_day_certificate_is_reported_once_its_renewal_is_overdue() {
        let expiry = CertificateExpiry::default();
        expiry.put([("a.pem".to_owned(), (0, 6 * DAY.unsigned_abs()))]);
        let told = |left: i64| expiry.due(6 * DAY - left).pop().map(|(nearness, _)| nearness);
        assert_eq!([told(6 * DAY), told(2 * DAY), told(DAY)], [None; 3]);
        assert_eq!([told(DAY - 1), told(DAY / 2)], [Some(Nearness::Soon), None]);
        assert_eq!(told(DAY / 2 - 1), Some(Nearness::VerySoon));
    }

    #[test]
    fn approaching_expiry_is_reported_once_per_step() {
        let expiry = CertificateExpiry::default();
        // 2027-01-15 08:00:00 UTC.
        let end = 1_800_000_000_i64;
        let begin = end - 90 * DAY;
        let valid = (begin.unsigned_abs(), end.unsigned_abs());
        expiry.put([("a.pem".to_owned(), valid), ("far.pem".to_owned(), (0, u64::MAX))]);
        let told = |left: i64| {
            let mut due = expiry.due(end - left);
            assert!(due.len() <= 1, "{due:?}");
            assert_eq!(expiry.due(end - left), [], "reported once");
            due.pop().map(|(_, text)| text)
        };
        assert_eq!(told(SOON), None);
        let text = told(SOON - 1).expect("13 days");
        assert!(text.starts_with("certificate a.pem expires in 13 days (2027-01-15 08:00:00 UTC)"), "{text}");
        assert_eq!(told(VERY_SOON), None);
        assert!(told(VERY_SOON - 1).expect("2 days").contains("expires in 2 days 23 h"));
        assert_eq!(told(0), None, "it is still valid in its last second (RFC 5280 section 4.1.2.5)");
        assert!(told(-1).expect("over").starts_with("certificate a.pem has expired"));
        // Warnings about a renewed certificate in the same file start again with the first one.
        expiry.put([("a.pem".to_owned(), valid)]);
        assert!(told(10).expect("10 s").contains("expires in 10 s"));
        // The clock is set back and then corrected.
        let text = told(end).expect("the year 1970");
        assert!(text.contains("is valid from 2026-10-17") && text.contains("1970-01-01"), "{text}");
        assert_eq!(told(SOON), None);
    }

    #[test]
    fn a_file_that_is_named_twice_is_shown_once() {
        let expiry = CertificateExpiry::default();
        expiry.put([("a.pem", 1), ("a.pem", 1), ("b.pem", 2)].map(|(file, end)| (file.to_owned(), (0, end))));
        assert_eq!(expiry.validities(), [("a.pem".to_owned(), (0, 1)), ("b.pem".to_owned(), (0, 2))]);
    }
}
