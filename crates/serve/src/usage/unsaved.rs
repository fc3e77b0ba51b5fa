//! Usage that is not in the database yet, by hour and account. The number of rows is bounded, so an outage of
//! the database may last for hours.

use std::collections::{BTreeMap, HashMap};

use turnpike_stores::{HOUR, UsageAccount, UsageAmount, UsageHour};

use super::account::OTHER;

#[derive(Debug)]
pub(super) struct Unsaved {
    hours: BTreeMap<u64, HashMap<UsageAccount, UsageAmount>>,
    rows: usize,
    most: usize,
}

impl Unsaved {
    pub(super) fn new(most: usize) -> Self {
        Self { hours: BTreeMap::new(), rows: 0, most }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Adds usage reported at a Unix time. Returns false if it is counted under `(other)`, because there are too
    /// many accounts.
    pub(super) fn add(&mut self, unix: u64, account: UsageAccount, amount: &UsageAmount) -> bool {
        let accounts = self.hours.entry(unix - unix % HOUR).or_default();
        let is_known = accounts.contains_key(&account);
        let has_room = is_known || self.rows < self.most;
        let account = if has_room {
            account
        } else {
            UsageAccount { realm: account.realm, user: OTHER.into(), ..UsageAccount::default() }
        };
        let rows = accounts.len();
        accounts.entry(account).or_default().add(amount);
        self.rows += accounts.len() - rows;
        has_room
    }

    /// Takes at most `most` rows, the oldest hours first.
    pub(super) fn take(&mut self, most: usize) -> Vec<UsageHour> {
        let mut taken = Vec::new();
        let mut left = most;
        while left > 0
            && let Some((begins, mut accounts)) = self.hours.pop_first()
        {
            let some: Vec<UsageAccount> = accounts.keys().take(left).cloned().collect();
            let rows: Vec<_> = some.iter().filter_map(|account| accounts.remove_entry(account)).collect();
            (left, self.rows) = (left - rows.len(), self.rows - rows.len());
            taken.push(UsageHour { begins, rows });
            if !accounts.is_empty() {
                self.hours.insert(begins, accounts);
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(user: &str) -> UsageAccount {
        UsageAccount { realm: "r".into(), user: user.into(), ..UsageAccount::default() }
    }

    fn bytes(bytes: u64) -> UsageAmount {
        UsageAmount { to_peer: (1, bytes), ..UsageAmount::default() }
    }

    fn total(hours: &[UsageHour]) -> u64 {
        hours.iter().flat_map(|hour| &hour.rows).map(|(_, amount)| amount.to_peer.1).sum()
    }

    #[test]
    fn accounts_beyond_the_bound_are_summed_per_realm() {
        let mut unsaved = Unsaved::new(2);
        let added: Vec<bool> = ["a", "b", "c", "a", "d"]
            .iter()
            .map(|user| unsaved.add(7200, account(user), &bytes(10)))
            .collect();
        assert_eq!((added, unsaved.rows()), (vec![true, true, false, true, false], 3));
        let hours = unsaved.take(10);
        let other = hours[0].rows.iter().find(|(account, _)| &*account.user == OTHER).expect("a row");
        assert_eq!((other.1.to_peer, total(&hours), unsaved.rows()), ((2, 20), 50, 0));
    }

    #[test]
    fn hours_stay_apart_even_if_the_clock_jumps_back() {
        let mut unsaved = Unsaved::new(100);
        for (unix, user) in [(7205, "a"), (7300, "b"), (3601, "a"), (7206, "a")] {
            unsaved.add(unix, account(user), &bytes(1));
        }
        assert_eq!(unsaved.rows(), 3);
        let first = unsaved.take(2);
        assert_eq!(
            first.iter().map(|hour| (hour.begins, hour.rows.len())).collect::<Vec<_>>(),
            [(3600, 1), (7200, 1)]
        );
        let rest = unsaved.take(2);
        assert_eq!((total(&first) + total(&rest), unsaved.rows()), (4, 0));
        assert!(unsaved.take(2).is_empty());
    }
}
