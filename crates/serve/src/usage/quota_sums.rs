//! Traffic of the subjects of one volume quota in its current period.

use std::{collections::HashMap, ops::Range};

use jiff::{Timestamp, ToSpan as _, civil::Date, tz::TimeZone};
use turnpike_config::{QuotaPeriod, VolumeQuota};
use turnpike_stores::{DAY, UsageAccount};

use super::used_quotas::subject;

/// Percentages at which a notice is due.
const NOTICES: [u8; 2] = [80, 100];
/// Maximum number of subjects; beyond it, more are not counted until the next reading.
const MOST_SUBJECTS: usize = 100_000;
/// Number of subjects above which a reading forgets those without news.
const MANY_SUBJECTS: usize = 50_000;
/// Maximum number of subjects that one reading lists, and of rows that it returns.
const MOST_LISTED: usize = 10_000;
const MOST_ROWS: usize = 20_000;

#[derive(Debug)]
pub(super) struct QuotaSums {
    pub(super) quota: VolumeQuota,
    /// Unix times.
    pub(super) period: Range<u64>,
    subjects: HashMap<UsageAccount, Sum>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    /// Bytes of all nodes, as last read from the ledger.
    stored: u64,
    /// Bytes that this node has counted since.
    since: u64,
    /// Highest percentage whose notice is settled.
    noticed: u8,
}

/// A subject has used 80 or 100 percent.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Notice {
    pub(super) quota: VolumeQuota,
    pub(super) begins: u64,
    pub(super) subject: UsageAccount,
    pub(super) bytes: u64,
    pub(super) percent: u8,
}

impl Notice {
    /// Identifies it in the whole fleet. A changed amount is another quota.
    pub(super) fn id(&self) -> String {
        let UsageAccount { realm, user, key, .. } = &self.subject;
        let VolumeQuota { by, bytes, per, .. } = self.quota;
        let (begins, percent) = (self.begins, self.percent);
        // Names contain no NUL.
        format!("{by:?}\0{realm}\0{user}\0{key}\0{per:?}\0{begins}\0{bytes}\0{percent}")
    }
}

impl Sum {
    fn total(self) -> u64 {
        self.stored.saturating_add(self.since)
    }
}

impl QuotaSums {
    pub(super) fn new(quota: VolumeQuota, unix: u64) -> Self {
        Self { quota, period: period(quota.per, unix), subjects: HashMap::new() }
    }

    /// Continues with another amount or consequence.
    pub(super) fn changed(mut self, quota: VolumeQuota) -> Self {
        if quota.bytes != self.quota.bytes {
            self.subjects.values_mut().for_each(|sum| sum.noticed = 0);
        }
        Self { quota, ..self }
    }

    /// Begins again if the time is in another period, also an earlier one. Returns true if it does.
    pub(super) fn turn(&mut self, unix: u64) -> bool {
        let is_over = !self.period.contains(&unix);
        if is_over {
            *self = Self::new(self.quota, unix);
        }
        is_over
    }

    pub(super) fn add(&mut self, account: &UsageAccount, bytes: u64) {
        let Some(subject) = subject(self.quota.by, account) else { return };
        if let Some(sum) = self.subjects.get_mut(&subject) {
            sum.since = sum.since.saturating_add(bytes);
        } else if self.subjects.len() < MOST_SUBJECTS {
            self.subjects.insert(subject, Sum { since: bytes, ..Sum::default() });
        }
    }

    /// Subjects whose sums must be read because this node has relayed for them, the most active first.
    pub(super) fn active(&self) -> Vec<UsageAccount> {
        let mut active: Vec<_> = self.subjects.iter().filter(|(_, sum)| sum.since > 0).collect();
        active.sort_unstable_by_key(|(_, sum)| std::cmp::Reverse(sum.since));
        active.into_iter().take(MOST_LISTED).map(|(subject, _)| subject.clone()).collect()
    }

    /// Bytes above which the sums of all subjects are read.
    pub(super) fn least(&self) -> u64 {
        threshold(self.quota.bytes, NOTICES[0])
    }

    /// Takes sums that were read while the ledger contained everything this node had counted.
    pub(super) fn read(&mut self, listed: &[UsageAccount], sums: Vec<(UsageAccount, u64)>) {
        if sums.len() < MOST_ROWS {
            for subject in listed {
                if let Some(sum) = self.subjects.get_mut(subject) {
                    (sum.stored, sum.since) = (0, 0);
                }
            }
        }
        for (subject, stored) in sums {
            let sum = self.subjects.entry(subject).or_default();
            (sum.stored, sum.since) = (stored, 0);
        }
        if self.subjects.len() > MANY_SUBJECTS {
            let least = self.least();
            self.subjects.retain(|_, sum| sum.since > 0 || sum.stored >= least);
        }
    }

    pub(super) fn used_up(&self) -> impl Iterator<Item = &UsageAccount> {
        let used = self.subjects.iter().filter(|(_, sum)| sum.total() >= self.quota.bytes);
        used.map(|(subject, _)| subject)
    }

    pub(super) fn notices(&self) -> impl Iterator<Item = Notice> {
        self.subjects.iter().flat_map(move |(subject, sum)| {
            let is_due = move |percent: u8| {
                percent > sum.noticed && sum.total() >= threshold(self.quota.bytes, percent)
            };
            NOTICES.into_iter().filter(move |percent| is_due(*percent)).map(move |percent| Notice {
                quota: self.quota,
                begins: self.period.start,
                subject: subject.clone(),
                bytes: sum.total(),
                percent,
            })
        })
    }

    pub(super) fn settled(&mut self, notice: &Notice) {
        if notice.begins == self.period.start
            && notice.quota == self.quota
            && let Some(sum) = self.subjects.get_mut(&notice.subject)
        {
            sum.noticed = sum.noticed.max(notice.percent);
        }
    }
}

fn threshold(bytes: u64, percent: u8) -> u64 {
    u64::try_from(u128::from(bytes) * u128::from(percent) / 100).unwrap_or(bytes)
}

/// Day or month in UTC.
fn period(per: QuotaPeriod, unix: u64) -> Range<u64> {
    let day = unix - unix % DAY..unix - unix % DAY + DAY;
    match per {
        QuotaPeriod::Day => day,
        QuotaPeriod::Month => month(unix).unwrap_or(day),
    }
}

/// `None` if the clock is beyond all calendars.
fn month(unix: u64) -> Option<Range<u64>> {
    let now = Timestamp::from_second(i64::try_from(unix).ok()?).ok()?;
    let first = now.to_zoned(TimeZone::UTC).date().first_of_month();
    let next = first.checked_add(1.month()).ok()?;
    let begins = |date: Date| {
        let time = date.to_zoned(TimeZone::UTC).ok()?.timestamp();
        u64::try_from(time.as_second()).ok()
    };
    Some(begins(first)?..begins(next)?)
}

#[cfg(test)]
mod tests {
    use turnpike_config::{QuotaAction, QuotaBy};

    use super::*;

    /// 2024-02-10, 00:00 UTC.
    const FEBRUARY: u64 = 1_707_523_200;

    fn quota(by: QuotaBy, per: QuotaPeriod) -> VolumeQuota {
        VolumeQuota { by, bytes: 1000, per, then: QuotaAction::Refuse }
    }

    fn account(user: &str, key: &str) -> UsageAccount {
        UsageAccount { realm: "r".into(), user: user.into(), key: key.into(), ..UsageAccount::default() }
    }

    fn names<'a>(subjects: impl Iterator<Item = &'a UsageAccount>) -> Vec<String> {
        let mut names: Vec<String> =
            subjects.map(|subject| [&*subject.user, &*subject.key].concat()).collect();
        names.sort_unstable();
        names
    }

    fn due(sums: &QuotaSums) -> Vec<(String, u8)> {
        let mut due: Vec<_> =
            sums.notices().map(|notice| (notice.subject.user.into(), notice.percent)).collect();
        due.sort_unstable();
        due
    }

    #[test]
    fn periods_are_calendar_days_and_months() {
        let day = period(QuotaPeriod::Day, FEBRUARY + 5);
        assert_eq!(day, FEBRUARY..FEBRUARY + DAY);
        let month = period(QuotaPeriod::Month, FEBRUARY + 5);
        assert_eq!(month, FEBRUARY - 9 * DAY..FEBRUARY + 20 * DAY, "29 days");
        assert_eq!(period(QuotaPeriod::Month, month.end - 1), month);
        assert_eq!(period(QuotaPeriod::Month, month.end).start, month.end);
        assert!(period(QuotaPeriod::Month, u64::MAX / 2).contains(&(u64::MAX / 2)));
    }

    #[test]
    fn a_sum_is_what_was_read_and_what_was_counted_since() {
        let mut sums = QuotaSums::new(quota(QuotaBy::User, QuotaPeriod::Month), FEBRUARY);
        sums.add(&account("alice", "shop"), 300);
        sums.add(&account("alice", ""), 200);
        assert_eq!((names(sums.active().iter()), due(&sums)), (vec!["alice".to_owned()], vec![]));
        // Other nodes have relayed 450 bytes; the 500 of this node have been saved.
        let listed = sums.active();
        sums.read(&listed, vec![(listed[0].clone(), 950), (account("bob", ""), 800)]);
        assert_eq!(due(&sums), [("alice".to_owned(), 80), ("bob".to_owned(), 80)]);
        assert_eq!((names(sums.used_up()).len(), sums.active().len()), (0, 0));
        sums.add(&account("alice", "other"), 49);
        assert!(names(sums.used_up()).is_empty());
        sums.add(&account("alice", "other"), 1);
        assert_eq!(names(sums.used_up()), ["alice"]);
        // The store is away: the last sums stay, and local traffic is added.
        sums.add(&account("bob", ""), 200);
        assert_eq!(names(sums.used_up()), ["alice", "bob"]);
        // The ledger was emptied.
        let listed = sums.active();
        sums.read(&listed, Vec::new());
        assert!(names(sums.used_up()).is_empty());
    }

    #[test]
    fn a_notice_is_due_once_per_percentage_and_period() {
        let mut sums = QuotaSums::new(quota(QuotaBy::User, QuotaPeriod::Day), FEBRUARY);
        sums.add(&account("alice", ""), 799);
        assert_eq!(due(&sums), []);
        sums.add(&account("alice", ""), 1);
        let notice = sums.notices().next().expect("a notice");
        assert_eq!((notice.percent, notice.bytes), (80, 800));
        sums.settled(&notice);
        sums.add(&account("alice", ""), 700);
        assert_eq!(due(&sums), [("alice".to_owned(), 100)]);
        let full = sums.notices().next().expect("a notice");
        sums.settled(&full);
        assert_eq!(due(&sums), []);
        let listed = sums.active();
        sums.read(&listed, vec![(account("alice", ""), 1500)]);
        assert_eq!(due(&sums), [], "a reading does not repeat it");
        // The clock jumps back a day and forward again: the ledger knows the notices by their ids.
        assert!(!sums.turn(FEBRUARY + DAY - 1) && sums.turn(FEBRUARY - 1));
        assert!(names(sums.used_up()).is_empty());
        assert!(sums.turn(FEBRUARY));
        sums.read(&[], vec![(account("alice", ""), 1500)]);
        let ids: Vec<String> = sums.notices().map(|notice| notice.id()).collect();
        assert_eq!(ids, [notice.id(), full.id()]);
        assert!(sums.turn(FEBRUARY + DAY));
        sums.add(&account("alice", ""), 1500);
        assert!(sums.notices().all(|notice| !ids.contains(&notice.id())), "a new period");
    }

    #[test]
    fn a_raised_quota_is_announced_again_and_keeps_the_sums() {
        let daily = quota(QuotaBy::Key, QuotaPeriod::Day);
        let mut sums = QuotaSums::new(daily, FEBRUARY);
        sums.add(&account("alice", "shop"), 900);
        sums.add(&account("bob", "shop"), 100);
        sums.add(&account("carol", ""), 5000);
        assert_eq!(names(sums.used_up()), ["shop"]);
        sums.notices().collect::<Vec<_>>().iter().for_each(|notice| sums.settled(notice));
        let slower = VolumeQuota { then: QuotaAction::Slow(64_000), ..daily };
        let sums = sums.changed(slower);
        assert_eq!((names(sums.used_up()).len(), sums.notices().count()), (1, 0));
        let sums = sums.changed(VolumeQuota { bytes: 1200, ..slower });
        assert_eq!((names(sums.used_up()).len(), due(&sums)), (0, vec![(String::new(), 80)]));
    }

    #[test]
    fn the_number_of_subjects_is_bounded() {
        let mut sums = QuotaSums::new(quota(QuotaBy::User, QuotaPeriod::Day), FEBRUARY);
        for user in 0..MOST_SUBJECTS + 10 {
            sums.add(&account(&user.to_string(), ""), 1);
        }
        sums.add(&account(super::super::account::OTHER, ""), 5000);
        assert_eq!((sums.subjects.len(), sums.active().len()), (MOST_SUBJECTS, MOST_LISTED));
        let listed = sums.active();
        sums.read(&listed, vec![(account("loud", ""), 900)]);
        assert_eq!(sums.subjects.len(), MOST_SUBJECTS - MOST_LISTED + 1);
        assert_eq!(due(&sums), [("loud".to_owned(), 80)]);
    }
}
