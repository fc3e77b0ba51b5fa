//! Decides when to order one certificate: first order, renewal, and retries. Does no I/O: the caller passes random
//! numbers and the time in Unix seconds.

use std::time::Duration;

use serde::{Deserialize, Serialize};

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;
/// Delay in seconds after the first failure; it doubles with each additional failure. CAs commonly allow five failures
/// per name and hour.
const FIRST_RETRY: u64 = 120;
const LONGEST_RETRY: u64 = 6 * HOUR;
/// Pause after a success, in case the new certificate is due for renewal immediately because the clock or the CA's
/// renewal window is wrong.
const AFTER_SUCCESS: u64 = HOUR;
/// Maximum delay accepted from the CA's Retry-After.
const LONGEST_PAUSE: u64 = DAY;

/// First and last Unix second of a certificate's validity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Validity {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Validity {
    fn length(self) -> u64 {
        self.last.saturating_sub(self.first)
    }
}

/// A random fraction in units of 1/65536.
pub(crate) type Fraction = u16;

fn share(whole: u64, part: Fraction) -> u64 {
    whole / 65_536 * u64::from(part) + whole % 65_536 * u64::from(part) / 65_536
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RenewalStep {
    Order,
    /// Ask for the CA's renewal window (RFC 9773).
    AskWindow,
    /// There is nothing to do until this Unix second.
    Wait(u64),
}

#[derive(Debug)]
pub(crate) struct RenewalSchedule {
    /// Point within a renewal window at which this server renews; fixed, so that every calculation yields the same
    /// time.
    place: Fraction,
    certificate: Option<Validity>,
    /// True if another CA issued the certificate.
    is_foreign: bool,
    window: Option<(u64, u64)>,
    ask_at: u64,
    failures: u32,
    attempted_at: u64,
    /// Time of the last failure taken over from another server.
    failed_elsewhere_at: u64,
    /// Minimum number of seconds between the last attempt and the next.
    delay: u64,
}

impl RenewalSchedule {
    pub(crate) fn new(place: Fraction) -> Self {
        Self {
            place,
            certificate: None,
            is_foreign: false,
            window: None,
            ask_at: 0,
            failures: 0,
            attempted_at: 0,
            failed_elsewhere_at: 0,
            delay: 0,
        }
    }

    /// Records the certificate that is in use. A different certificate resets the schedule, and one from
    /// another CA is replaced immediately.
    pub(crate) fn found(&mut self, certificate: Option<Validity>, is_foreign: bool) {
        if (self.certificate, self.is_foreign) != (certificate, is_foreign) {
            *self = Self { certificate, is_foreign, ..Self::new(self.place) };
        }
    }

    pub(crate) fn issued(&mut self, now: u64, certificate: Validity) {
        self.found(Some(certificate), false);
        (self.failures, self.attempted_at, self.delay) = (0, now, AFTER_SUCCESS);
    }

    /// Records the CA's renewal window and the time until the next query for it. A window that ends before it starts
    /// is ignored (RFC 9773 section 4.2).
    pub(crate) fn suggested(&mut self, now: u64, window: (u64, u64), again: Duration) {
        self.window = Some(window).filter(|(start, end)| start < end);
        self.ask_again(now, again);
    }

    pub(crate) fn ask_again(&mut self, now: u64, again: Duration) {
        self.ask_at = now + again.as_secs().clamp(HOUR, DAY);
    }

    pub(crate) fn has_window(&self) -> bool {
        self.window.is_some() && !self.is_foreign
    }

    /// Records a failed attempt; returns the time of the next one.
    pub(crate) fn failed(&mut self, now: u64, pause: Option<Duration>, random: Fraction) -> u64 {
        let doubled = FIRST_RETRY << self.failures.min(16);
        let delay = doubled.min(LONGEST_RETRY);
        let pause = pause.map_or(0, |pause| pause.as_secs().min(LONGEST_PAUSE));
        self.failures = self.failures.saturating_add(1);
        self.attempted_at = now;
        self.delay = (delay - share(delay / 4, random)).max(pause);
        now + self.delay
    }

    /// Takes over the backoff of another server, whose clock may differ. Returns false if that failure is already
    /// known.
    pub(crate) fn failed_elsewhere(&mut self, now: u64, at: u64, next: u64, failures: u32) -> bool {
        if at <= self.attempted_at || at == self.failed_elsewhere_at {
            return false;
        }
        self.failed_elsewhere_at = at;
        self.attempted_at = at.min(now);
        self.failures = failures.max(1);
        self.delay = next.saturating_sub(self.attempted_at).min(LONGEST_PAUSE);
        true
    }

    pub(crate) fn certificate(&self) -> Option<Validity> {
        self.certificate
    }

    pub(crate) fn is_foreign(&self) -> bool {
        self.is_foreign
    }

    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// Time of renewal. Without a window from the CA: after two thirds of the lifetime, or earlier by up to a
    /// thirtieth of it. Otherwise: a time within the window, but early enough to leave a twelfth of the lifetime for
    /// retries.
    pub(crate) fn renewal(&self) -> Option<u64> {
        let certificate = self.certificate?;
        let length = certificate.length();
        Some(match self.window {
            Some((start, end)) => {
                (start + share(end - start, self.place)).min(certificate.last.saturating_sub(length / 12))
            }
            None => certificate.first + length / 3 * 2 - share(length / 30, self.place),
        })
    }

    pub(crate) fn step(&self, now: u64) -> RenewalStep {
        // A clock that was set back must not prolong the delay.
        let retry = if now < self.attempted_at { 0 } else { self.attempted_at + self.delay };
        let renewal = if self.is_foreign { 0 } else { self.renewal().unwrap_or(0) };
        let due = renewal.max(retry);
        if now >= due {
            return RenewalStep::Order;
        }
        if self.certificate.is_none() || now >= renewal {
            return RenewalStep::Wait(due);
        }
        if now >= self.ask_at { RenewalStep::AskWindow } else { RenewalStep::Wait(due.min(self.ask_at)) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const T: u64 = 1_800_000_000;
    const LAST: Fraction = Fraction::MAX;
    const NINETY: Validity = Validity { first: T, last: T + 90 * DAY };

    fn schedule(place: Fraction) -> RenewalSchedule {
        let mut schedule = RenewalSchedule::new(place);
        schedule.found(Some(NINETY), false);
        schedule.ask_again(T, Duration::from_secs(DAY));
        schedule
    }

    #[test]
    fn without_a_certificate_the_order_is_due_immediately() {
        assert_eq!(RenewalSchedule::new(0).step(T), RenewalStep::Order);
    }

    #[test]
    fn renewal_is_due_at_two_thirds_of_the_lifetime_minus_jitter() {
        assert_eq!(schedule(0).renewal(), Some(T + 60 * DAY));
        let earliest = schedule(LAST).renewal().expect("a certificate");
        assert!((T + 57 * DAY..T + 57 * DAY + 60).contains(&earliest), "{earliest}");
        let schedule = schedule(0);
        assert_ne!(schedule.step(T + 60 * DAY - 1), RenewalStep::Order);
        assert_eq!(schedule.step(T + 60 * DAY), RenewalStep::Order);
    }

    #[test]
    fn six_day_certificate_is_renewed_on_its_fourth_day() {
        let mut schedule = RenewalSchedule::new(0);
        schedule.found(Some(Validity { first: T, last: T + 6 * DAY }), false);
        assert_eq!(schedule.renewal(), Some(T + 4 * DAY));
    }

    #[test]
    fn renewal_window_of_the_authority_overrides_two_thirds() {
        let mut schedule = schedule(LAST / 2);
        schedule.suggested(T, (T + 10 * DAY, T + 12 * DAY), Duration::from_secs(6 * HOUR));
        let renewal = schedule.renewal().expect("a certificate");
        assert!((T + 10 * DAY..=T + 11 * DAY).contains(&renewal));
        assert_eq!(schedule.step(T), RenewalStep::Wait(T + 6 * HOUR));
        assert_eq!(schedule.step(T + 6 * HOUR), RenewalStep::AskWindow);
        assert_eq!(schedule.step(renewal), RenewalStep::Order);
        // After a revocation, the window is in the past.
        schedule.suggested(T + DAY, (T - 2 * DAY, T - DAY), Duration::ZERO);
        assert_eq!(schedule.step(T + DAY), RenewalStep::Order);
    }

    #[test]
    fn unusable_windows_do_not_endanger_the_certificate() {
        let mut schedule = schedule(0);
        schedule.suggested(T, (T + 400 * DAY, T + 500 * DAY), Duration::ZERO);
        assert_eq!(schedule.renewal(), Some(T + 90 * DAY - 90 * DAY / 12));
        schedule.suggested(T, (T + 2, T + 1), Duration::ZERO);
        assert_eq!(schedule.renewal(), Some(T + 60 * DAY));
    }

    #[test]
    fn retries_double_up_to_six_hours_and_start_over_with_a_new_certificate() {
        let mut schedule = RenewalSchedule::new(0);
        let delays: Vec<u64> = (0..10).map(|_| schedule.failed(T, None, 0) - T).collect();
        assert_eq!(delays[..4], [120, 240, 480, 960]);
        assert_eq!(delays[8..], [LONGEST_RETRY, LONGEST_RETRY]);
        assert_eq!(schedule.step(T), RenewalStep::Wait(T + LONGEST_RETRY));
        assert_eq!(schedule.step(T + LONGEST_RETRY), RenewalStep::Order);
        schedule.found(Some(NINETY), false);
        assert_eq!((schedule.failures(), schedule.failed(T, None, 0)), (0, T + 120));
    }

    #[test]
    fn certificate_due_immediately_is_not_ordered_again_within_the_hour() {
        let mut schedule = RenewalSchedule::new(0);
        schedule.issued(T + 80 * DAY, NINETY);
        assert_eq!(schedule.step(T + 80 * DAY), RenewalStep::Wait(T + 80 * DAY + HOUR));
        schedule.found(Some(NINETY), false);
        assert_eq!(schedule.step(T + 80 * DAY + HOUR), RenewalStep::Order);
    }

    #[test]
    fn retry_after_of_the_authority_is_observed_but_bounded() {
        let mut schedule = RenewalSchedule::new(0);
        assert_eq!(schedule.failed(T, Some(Duration::from_secs(7200)), 0), T + 7200);
        assert_eq!(schedule.failed(T, Some(Duration::from_secs(60 * DAY)), 0), T + DAY);
    }

    #[test]
    fn clock_set_back_after_a_failure_does_not_delay_the_retry() {
        let mut schedule = RenewalSchedule::new(0);
        schedule.failed(T + 365 * DAY, None, 0);
        assert_eq!(schedule.step(T), RenewalStep::Order);
    }

    #[test]
    fn certificate_of_another_authority_is_replaced_at_once_but_not_in_a_loop() {
        let mut schedule = schedule(0);
        schedule.found(Some(NINETY), true);
        assert_eq!(schedule.step(T), RenewalStep::Order);
        let next = schedule.failed(T, None, 0);
        schedule.found(Some(NINETY), true);
        assert_eq!(schedule.step(T), RenewalStep::Wait(next));
        schedule.issued(T, NINETY);
        assert_ne!(schedule.step(T + HOUR), RenewalStep::Order);
    }

    #[test]
    fn failure_of_another_server_delays_an_order_once_despite_a_fast_clock() {
        let mut schedule = RenewalSchedule::new(0);
        assert!(schedule.failed_elsewhere(T, T - 10, T + 110, 1));
        assert_eq!((schedule.step(T), schedule.failures()), (RenewalStep::Wait(T + 110), 1));
        assert!(!schedule.failed_elsewhere(T + 110, T - 10, T + 110, 1), "known");
        assert_eq!(schedule.step(T + 110), RenewalStep::Order);
        assert_eq!(schedule.failed(T + 110, None, 0), T + 110 + 240, "the backoff doubles across servers");
        assert!(
            !schedule.failed_elsewhere(T + 110, T + 100, T + 900, 1),
            "older than this server's own failure"
        );
        // The other server's clock is an hour ahead.
        let ahead = (T + 120 + HOUR, T + 600 + HOUR);
        assert!(schedule.failed_elsewhere(T + 120, ahead.0, ahead.1, 3));
        assert_eq!(schedule.step(T + 120), RenewalStep::Wait(T + 600 + HOUR));
        assert!(!schedule.failed_elsewhere(T + 600 + HOUR, ahead.0, ahead.1, 3));
        assert!(schedule.failed_elsewhere(T, T + 2 * HOUR, u64::MAX, 3));
        assert_eq!(schedule.step(T), RenewalStep::Wait(T + DAY), "bounded");
    }

    proptest! {
        #[test]
        fn renewal_falls_within_the_validity_period(
            first in 0u64..1 << 40, length in 1u64..1 << 32, place: Fraction,
            window in proptest::option::of((0u64..1 << 41, 0u64..1 << 41)),
        ) {
            let mut schedule = RenewalSchedule::new(place);
            schedule.found(Some(Validity { first, last: first + length }), false);
            if let Some(window) = window {
                schedule.suggested(first, window, Duration::from_secs(1));
            }
            let renewal = schedule.renewal().expect("a certificate");
            prop_assert!(renewal <= first + length);
            prop_assert!(schedule.has_window() || renewal >= first);
            prop_assert_eq!(schedule.step(renewal), RenewalStep::Order);
        }

        #[test]
        fn retry_is_never_sooner_than_ninety_seconds(failures in 1usize..50, random: Fraction, pause: Option<u32>) {
            let mut schedule = RenewalSchedule::new(0);
            for _ in 0..failures {
                let pause = pause.map(|pause| Duration::from_secs(pause.into()));
                let next = schedule.failed(T, pause, random);
                prop_assert!((T + 90..=T + DAY).contains(&next));
                prop_assert_eq!(schedule.step(next - 1), RenewalStep::Wait(next));
            }
        }
    }
}
