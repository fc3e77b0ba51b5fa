//! Subjects that have used up a volume quota, for the workers.

use std::{
    collections::HashMap,
    sync::{
        PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use strum::VariantArray as _;
use turnpike_config::{QuotaAction, QuotaBy};
use turnpike_stores::UsageAccount;
use turnpike_turn::server::{UserRef, VolumeLimits};

use super::account::{OTHER, account, label};

pub(super) type Subjects = HashMap<(QuotaBy, UsageAccount), VolumeLimits>;

/// Read for each new allocation, and for each allocation every 4 s.
#[derive(Debug, Default)]
pub(crate) struct UsedQuotas {
    is_any: AtomicBool,
    subjects: RwLock<Subjects>,
}

impl UsedQuotas {
    pub(crate) fn limits(&self, user: UserRef<'_>, username: &str) -> VolumeLimits {
        let mut limits = VolumeLimits::default();
        if !self.is_any.load(Ordering::Relaxed) {
            return limits;
        }
        let account = account(user.realm, &label(user.identity, username));
        let subjects = self.subjects.read().unwrap_or_else(PoisonError::into_inner);
        for by in QuotaBy::VARIANTS {
            let subject = subject(*by, &account).and_then(|subject| subjects.get(&(*by, subject)));
            if let Some(more) = subject {
                limits = both(limits, *more);
            }
        }
        limits
    }

    pub(super) fn set(&self, subjects: Subjects) {
        let is_any = !subjects.is_empty();
        *self.subjects.write().unwrap_or_else(PoisonError::into_inner) = subjects;
        self.is_any.store(is_any, Ordering::Relaxed);
    }
}

/// Subject of a quota to which an account belongs. Accounts that were summed because there are too many belong
/// only to their realm.
pub(super) fn subject(by: QuotaBy, account: &UsageAccount) -> Option<UsageAccount> {
    let UsageAccount { realm, user, key, .. } = account;
    let none = UsageAccount::default();
    match by {
        QuotaBy::User => {
            (**user != *OTHER).then(|| UsageAccount { realm: realm.clone(), user: user.clone(), ..none })
        }
        QuotaBy::Key => (!key.is_empty()).then(|| UsageAccount { key: key.clone(), ..none }),
        QuotaBy::Realm => Some(UsageAccount { realm: realm.clone(), ..none }),
    }
}

pub(super) fn limits_of(action: QuotaAction) -> VolumeLimits {
    match action {
        QuotaAction::Refuse => VolumeLimits { refuse: true, per_user: None },
        QuotaAction::Slow(rate) => VolumeLimits { refuse: false, per_user: Some(rate) },
    }
}

pub(super) fn both(one: VolumeLimits, other: VolumeLimits) -> VolumeLimits {
    VolumeLimits {
        refuse: one.refuse || other.refuse,
        per_user: one.per_user.into_iter().chain(other.per_user).min(),
    }
}

#[cfg(test)]
mod tests {
    use turnpike_stores::credential_id;

    use super::*;

    #[test]
    fn limits_of_user_key_and_realm_apply_together() {
        let used = UsedQuotas::default();
        let issued = format!("1700000000:{}", credential_id("alice", Some("shop"), None));
        let limits = |realm: &str, identity: &str, username: &str| {
            let VolumeLimits { refuse, per_user } = used.limits(UserRef::new(realm, identity), username);
            (refuse, per_user)
        };
        assert_eq!(limits("r", ":alice", &issued), (false, None));
        let names = |realm: &str, user: &str, key: &str| UsageAccount {
            realm: realm.into(),
            user: user.into(),
            key: key.into(),
            ..UsageAccount::default()
        };
        let slow = |rate| limits_of(QuotaAction::Slow(rate));
        used.set(
            [
                ((QuotaBy::User, names("r", "alice", "")), slow(5000)),
                ((QuotaBy::Key, names("", "", "shop")), slow(3000)),
                ((QuotaBy::Realm, names("full", "", "")), limits_of(QuotaAction::Refuse)),
            ]
            .into(),
        );
        assert_eq!(limits("r", ":alice", &issued), (false, Some(3000)));
        assert_eq!(limits("r", "alice", "alice"), (false, Some(5000)), "a user without a key");
        assert_eq!(limits("full", ":alice", &issued), (true, Some(3000)));
        assert_eq!(limits("s", "alice", "alice"), (false, None));
        assert_eq!(limits("s", "", ""), (false, None));
        used.set(Subjects::new());
        assert_eq!(limits("full", ":alice", &issued), (false, None));
    }
}
