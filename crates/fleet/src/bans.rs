//! Bans of users and client prefixes. Bans are checked only on authenticated requests, because all others
//! are refused anyway.
//!
//! A lifted ban is remembered until its original end. Otherwise a node that did not receive the unban would
//! restore the ban everywhere.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    net::IpAddr,
    str::FromStr,
};

use serde::{Deserialize, Serialize};
use turnpike_turn::server::Cidr;

/// Maximum duration of a ban in seconds. For longer periods, change users or peer rules.
pub const LONGEST_BAN_S: u64 = 31 * 86_400;
/// Maximum clock difference between two nodes, plus message delay, in seconds.
pub(crate) const GOOD_FOR_S: u64 = 120;
/// Seconds for which an ended ban is remembered: by another node's clock it may still be in effect.
const REMEMBERED_S: u64 = GOOD_FOR_S;

/// Subject of a ban. It is written as `user NAME@REALM` or `client 192.0.2.0/24`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Subject {
    /// A user, identified by the full name or by the name that quotas use.
    User { realm: String, name: String },
    /// All clients in a prefix.
    Client(Cidr),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User { realm, name } => write!(f, "user {name}@{realm}"),
            Self::Client(prefix) => write!(f, "client {prefix}"),
        }
    }
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            || format!("{text:?} is not a ban subject: expected \"user NAME@REALM\" or \"client CIDR\"");
        match text.split_once(' ') {
            Some(("user", user)) => {
                // A name may contain an @. If a realm contains one, its users can be banned only by client
                // prefix.
                let (name, realm) = user.rsplit_once('@').ok_or_else(expected)?;
                let fits = !name.is_empty() && !realm.is_empty() && !user.contains(char::is_control);
                let (realm, name) = (realm.to_owned(), name.to_owned());
                if fits { Ok(Self::User { realm, name }) } else { Err(expected()) }
            }
            Some(("client", prefix)) => prefix.parse().map(Self::Client),
            _ => Err(expected()),
        }
    }
}

impl TryFrom<String> for Subject {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Subject> for String {
    fn from(subject: Subject) -> Self {
        subject.to_string()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ban {
    pub subject: Subject,
    /// End of the ban in Unix seconds; 0 for a lifted ban, so that versions without the `lifted` field ignore
    /// it.
    pub until: u64,
    /// Free text; may be empty.
    #[serde(default)]
    pub reason: String,
    /// Original end of a lifted ban; 0 otherwise.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lifted: u64,
    /// Distinguishes bans of one subject with the same end. 0 means no ID: older versions do not set it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub id: u64,
}

impl Ban {
    #[must_use]
    pub fn new(subject: Subject, until: u64, reason: String) -> Self {
        Self { subject, until, reason, lifted: 0, id: 0 }
    }

    #[must_use]
    pub fn with_id(self, id: u64) -> Self {
        Self { id, ..self }
    }

    #[must_use]
    pub fn is_in_force(&self, unix: u64) -> bool {
        unix < self.until
    }

    fn lifts(&self, other: &Self) -> bool {
        // Versions that do not know IDs drop them.
        let is_same = self.id == other.id || self.id == 0 || other.id == 0;
        self.lifted != 0 && self.lifted == other.until && is_same
    }

    fn is_over(&self, unix: u64) -> bool {
        self.until.max(self.lifted).saturating_add(REMEMBERED_S) <= unix
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires this signature")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ordered {
    pub here: u64,
    /// True if the other nodes know of the ban. If false, they will learn of it when the store responds
    /// again.
    pub is_announced: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unbanned {
    Everywhere,
    /// Lifted on this node; the other nodes lift it when the store responds again.
    HereOnly,
    /// There was no such ban.
    NotBanned,
}

#[derive(Clone, Debug, Default)]
pub struct Bans {
    users: HashMap<Box<str>, Ban>,
    clients: Vec<(Cidr, Ban)>,
    /// Subjects banned or unbanned on this node that the other nodes do not know of yet.
    unannounced: HashSet<Subject>,
}

impl Bans {
    /// Maximum number of bans, which bounds the prefixes checked per request. The ban that ends first is
    /// evicted.
    pub const MOST: usize = 10_000;

    /// Bans a subject on this node. Until [`Self::announced`], this overrides earlier messages from other
    /// nodes.
    pub fn order(&mut self, ban: Ban) {
        self.mark(ban.subject.clone());
        self.put(ban);
    }

    /// Lifts a ban on this node, even one that this node does not know. Overrides messages from other nodes,
    /// like [`Self::order`].
    pub fn order_lift(&mut self, unix: u64, subject: &Subject) -> Option<Ban> {
        self.mark(subject.clone());
        self.lift(unix, subject)
    }

    /// Applies a ban from another node; returns false if a newer ban or unban on this node overrides it.
    pub fn hear(&mut self, ban: Ban) -> bool {
        let takes = !self.is_unannounced(&ban.subject);
        if takes {
            self.put(ban);
        }
        takes
    }

    /// Applies an unban from another node, unless a newer ban or unban on this node overrides it.
    pub fn hear_lift(&mut self, unix: u64, subject: &Subject) {
        if !self.is_unannounced(subject) {
            self.lift(unix, subject);
        }
    }

    /// Marks a subject to be announced, up to [`Self::MOST`].
    pub fn mark(&mut self, subject: Subject) {
        if self.unannounced.len() < Self::MOST {
            self.unannounced.insert(subject);
        }
    }

    /// Leaves the announcements to another process of this node.
    pub fn clear_unannounced(&mut self) {
        self.unannounced.clear();
    }

    pub fn is_unannounced(&self, subject: &Subject) -> bool {
        self.unannounced.contains(subject)
    }

    pub fn unannounced(&self) -> impl Iterator<Item = &Subject> {
        self.unannounced.iter()
    }

    /// Ban or unban to send to the other nodes and the store; `None` if there is none. `kept` is the store's
    /// content: if an unban was issued here before this node knew of the ban, the ban is lifted now.
    pub fn to_announce(&mut self, unix: u64, subject: &Subject, kept: &[Ban]) -> Option<Ban> {
        if self.get(subject).is_none() {
            let ban = kept.iter().find(|ban| ban.subject == *subject && ban.is_in_force(unix))?;
            self.put(ban.clone());
            return self.lift(unix, subject);
        }
        self.get(subject).cloned()
    }

    /// Ends the override for a subject after the result of [`Self::to_announce`] was sent.
    pub fn announced(&mut self, subject: &Subject, ban: Option<&Ban>) {
        if self.get(subject) == ban {
            self.unannounced.remove(subject);
        }
    }

    pub fn put(&mut self, ban: Ban) {
        self.remove(&ban.subject);
        if self.len() >= Self::MOST {
            self.evict();
        }
        match &ban.subject {
            Subject::User { realm, name } => _ = self.users.insert(key(realm, name), ban),
            Subject::Client(prefix) => self.clients.push((*prefix, ban)),
        }
    }

    /// Evicts the ban that ends first, preferably an announced one: if an unannounced ban were evicted, this
    /// node would announce it as lifted.
    fn evict(&mut self) {
        let order = |ban: &&Ban| (self.unannounced.contains(&ban.subject), ban.until);
        if let Some(first) = self.iter().min_by_key(order).map(|ban| ban.subject.clone()) {
            self.remove(&first);
            self.unannounced.remove(&first);
        }
    }

    /// Lifts a ban in effect, and returns the record that all nodes need.
    pub fn lift(&mut self, unix: u64, subject: &Subject) -> Option<Ban> {
        let ban = self.get(subject).filter(|ban| ban.is_in_force(unix))?;
        let lifted = Ban { until: 0, lifted: ban.until, ..ban.clone() };
        self.put(lifted.clone());
        Some(lifted)
    }

    /// Merges the store's bans and returns those missing from the store, for example because it was emptied.
    /// The store takes precedence, except for bans that were lifted and then restored by another node.
    pub fn read(&mut self, unix: u64, kept: &[Ban]) -> Vec<Ban> {
        let is_own = |subject: &Subject| self.unannounced.contains(subject);
        let kept_ones: Vec<&Ban> =
            kept.iter().filter(|ban| !ban.is_over(unix) && !is_own(&ban.subject)).collect();
        for ban in kept_ones {
            if !self.get(&ban.subject).is_some_and(|own| own.lifts(ban)) {
                self.put(ban.clone());
            }
        }
        self.missing(unix, kept)
    }

    #[must_use]
    pub fn missing(&self, unix: u64, kept: &[Ban]) -> Vec<Ban> {
        let kept: HashMap<&Subject, &Ban> = kept.iter().map(|ban| (&ban.subject, ban)).collect();
        let is_kept = |ban: &&Ban| kept.get(&ban.subject).is_some_and(|other| !ban.lifts(other));
        let is_missing = |ban: &&Ban| !ban.is_over(unix) && !is_kept(ban);
        // Unannounced subjects are written when they are announced.
        self.iter()
            .filter(|ban| is_missing(ban) && !self.unannounced.contains(&ban.subject))
            .cloned()
            .collect()
    }

    fn get(&self, subject: &Subject) -> Option<&Ban> {
        match subject {
            Subject::User { realm, name } => self.users.get(&key(realm, name)),
            Subject::Client(prefix) => self.clients.iter().find(|(other, _)| other == prefix).map(|it| &it.1),
        }
    }

    fn remove(&mut self, subject: &Subject) -> bool {
        let before = self.len();
        match subject {
            Subject::User { realm, name } => _ = self.users.remove(&key(realm, name)),
            Subject::Client(prefix) => self.clients.retain(|(other, _)| other != prefix),
        }
        self.len() < before
    }

    /// Removes ended bans and returns their subjects.
    pub fn expire(&mut self, unix: u64) -> Vec<Subject> {
        let over: Vec<_> =
            self.iter().filter(|ban| ban.is_over(unix)).map(|ban| ban.subject.clone()).collect();
        for subject in &over {
            self.remove(subject);
            self.unannounced.remove(subject);
        }
        over
    }

    #[must_use]
    pub fn has(&self, unix: u64, realm: &str, names: [&str; 2], client: IpAddr) -> bool {
        let counts = |ban: &Ban| ban.is_in_force(unix);
        let user = |name| !self.users.is_empty() && self.users.get(&*key(realm, name)).is_some_and(counts);
        let [name, identity] = names;
        // For time-limited names, quotas use the id, marked with a colon to distinguish it from user names.
        let id = identity.strip_prefix(':').unwrap_or(identity);
        user(name)
            || (id != name && user(id))
            || self.clients.iter().any(|(prefix, ban)| prefix.contains(client) && counts(ban))
    }

    /// True if [`Self::expire`] would remove a ban.
    #[must_use]
    pub fn has_old(&self, unix: u64) -> bool {
        self.iter().any(|ban| ban.is_over(unix))
    }

    /// All bans in arbitrary order, including lifted ones and those that have ended by our clock.
    pub fn iter(&self) -> impl Iterator<Item = &Ban> {
        self.users.values().chain(self.clients.iter().map(|(_, ban)| ban))
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.users.len() + self.clients.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn key(realm: &str, name: &str) -> Box<str> {
    [realm, "\0", name].concat().into_boxed_str()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ban(subject: &str, until: u64) -> Ban {
        Ban::new(subject.parse().unwrap(), until, String::new())
    }

    fn has(bans: &Bans, unix: u64, name: &str, client: &str) -> bool {
        bans.has(unix, "here", [name, name], client.parse().unwrap())
    }

    #[test]
    fn ban_applies_to_its_subject_until_it_ends() {
        let mut bans = Bans::default();
        bans.put(ban("user alice@here", 100));
        bans.put(ban("client 192.0.2.0/24", 50));
        for (unix, name, client, banned) in [
            (99, "alice", "198.51.100.1", true),
            (100, "alice", "198.51.100.1", false),
            (0, "bob", "198.51.100.1", false),
            (49, "bob", "192.0.2.9", true),
            (50, "bob", "192.0.2.9", false),
            (49, "bob", "::ffff:192.0.2.9", true),
        ] {
            assert_eq!(has(&bans, unix, name, client), banned, "{unix} {name} {client}");
        }
        assert!(!bans.has(0, "there", ["alice", "alice"], "198.51.100.1".parse().unwrap()));
        assert!(bans.expire(50 + REMEMBERED_S - 1).is_empty(), "still in effect according to another clock");
        assert_eq!(bans.expire(50 + REMEMBERED_S), ["client 192.0.2.0/24".parse().unwrap()]);
        let alice = "user alice@here".parse().unwrap();
        assert!(bans.lift(100, &alice).is_none(), "the ban is over");
        assert_eq!(bans.lift(99, &alice).map(|ban| (ban.until, ban.lifted)), Some((0, 100)));
        assert!(bans.lift(99, &alice).is_none() && !has(&bans, 99, "alice", "198.51.100.1"));
        assert_eq!(bans.expire(100 + REMEMBERED_S), [alice]);
        assert!(bans.is_empty());
    }

    #[test]
    fn lifted_ban_is_not_restored_and_can_be_set_again() {
        let (mut here, mut away) = (Bans::default(), Bans::default());
        let alice: Subject = "user alice@here".parse().unwrap();
        [&mut here, &mut away].into_iter().for_each(|bans| bans.put(ban("user alice@here", 1000)));
        assert_eq!(away.read(500, &[]).len(), 1, "the ban is missing from an empty store");
        let kept = here.lift(500, &alice).unwrap();
        assert!(away.read(600, std::slice::from_ref(&kept)).is_empty());
        assert!(!has(&away, 600, "alice", "198.51.100.1"));
        assert_eq!(away.read(700, &[]), [kept], "the unban is missing from an empty store");
        away.put(ban("user alice@here", 2000));
        assert!(has(&away, 800, "alice", "198.51.100.1"));
    }

    #[test]
    fn lifted_ban_is_not_read_from_a_store_with_the_old_ban() {
        let mut here = Bans::default();
        let given_back = [ban("user alice@here", 1000)];
        here.put(given_back[0].clone());
        let lifted = here.lift(500, &given_back[0].subject).unwrap();
        assert_eq!(here.read(600, &given_back), [lifted], "the store gets the unban");
        assert!(!has(&here, 600, "alice", "198.51.100.1"));
        let anew = [ban("user alice@here", 2000)];
        assert!(
            here.read(700, &anew).is_empty() && has(&here, 700, "alice", "198.51.100.1"),
            "a different ban"
        );
    }

    #[test]
    fn unban_does_not_affect_another_ban_with_the_same_end() {
        let alice: Subject = "user alice@here".parse().unwrap();
        let banned = |lifted_id, id| {
            let (mut away, mut here) = (Bans::default(), Bans::default());
            let first = ban("user alice@here", 1000).with_id(lifted_id);
            [&mut away, &mut here].into_iter().for_each(|bans| bans.put(first.clone()));
            [&mut away, &mut here].into_iter().for_each(|bans| _ = bans.lift(500, &alice));
            let second = ban("user alice@here", 1000).with_id(id);
            here.put(second.clone());
            let kept = [second];
            assert_eq!(here.missing(600, &kept), []);
            let gives_back = away.read(600, &kept).len();
            (has(&away, 600, "alice", "198.51.100.1"), gives_back)
        };
        assert_eq!(banned(1, 2), (true, 0));
        assert_eq!(banned(1, 1), (false, 1), "the same ban");
        for (lifted_id, id) in [(0, 0), (1, 0), (0, 2)] {
            assert_eq!(banned(lifted_id, id), (false, 1), "possibly the same ban");
        }
    }

    #[test]
    fn local_ban_or_unban_overrides_the_store_until_announced() {
        let alice: Subject = "user alice@here".parse().unwrap();
        let mut bans = Bans::default();
        let ordered = ban("user alice@here", 1000).with_id(1);
        bans.order(ordered.clone());
        let kept = [ban("user alice@here", 700).with_id(2)];
        assert!(bans.read(500, &kept).is_empty() && has(&bans, 900, "alice", "198.51.100.1"));
        bans.hear_lift(500, &alice);
        assert!(has(&bans, 900, "alice", "198.51.100.1"), "the local ban takes precedence");
        assert_eq!(bans.unannounced().collect::<Vec<_>>(), [&alice]);
        assert_eq!(bans.to_announce(500, &alice, &kept), Some(ordered.clone()));
        bans.announced(&alice, None);
        assert_eq!(bans.unannounced().count(), 1, "another ban was announced");
        bans.announced(&alice, Some(&ordered));
        assert_eq!(bans.unannounced().count(), 0);
        bans.hear_lift(500, &alice);
        assert!(!has(&bans, 900, "alice", "198.51.100.1"));
    }

    #[test]
    fn ban_known_only_to_the_store_can_be_lifted() {
        let alice: Subject = "user alice@here".parse().unwrap();
        let mut bans = Bans::default();
        let kept = [ban("user alice@here", 1000).with_id(1)];
        assert_eq!(bans.order_lift(500, &alice), None);
        bans.read(500, &kept);
        assert!(!has(&bans, 500, "alice", "198.51.100.1"));
        let lifted = bans.to_announce(500, &alice, &kept).unwrap();
        assert_eq!((lifted.until, lifted.lifted, lifted.id), (0, 1000, 1));
        bans.announced(&alice, Some(&lifted));
        assert_eq!((bans.unannounced().count(), bans.read(600, &kept)), (0, vec![lifted]));
    }

    #[test]
    fn older_version_treats_a_lifted_ban_as_ended() {
        let mut bans = Bans::default();
        bans.put(ban("user alice@here", 1000));
        let written = serde_json::to_value(bans.lift(5, &"user alice@here".parse().unwrap())).unwrap();
        assert_eq!(written["until"], 0);
        let written = serde_json::to_string(&ban("user alice@here", 9)).unwrap();
        assert_eq!(written, r#"{"subject":"user alice@here","until":9,"reason":""}"#);
        let with_id = ban("user alice@here", 9).with_id(7);
        let written = serde_json::to_string(&with_id).unwrap();
        assert_eq!(written, r#"{"subject":"user alice@here","until":9,"reason":"","id":7}"#);
        assert_eq!(serde_json::from_str::<Ban>(&written).unwrap(), with_id);
    }

    #[test]
    fn banned_id_covers_all_its_time_limited_names() {
        let mut bans = Bans::default();
        bans.put(ban("user carol@here", 100));
        let client = "198.51.100.1".parse().unwrap();
        assert!(bans.has(0, "here", ["1800000000:carol", ":carol"], client));
        assert!(!bans.has(0, "here", ["1800000000:dora", ":dora"], client));
    }

    #[test]
    fn subject_has_one_ban_and_the_number_is_bounded() {
        let mut bans = Bans::default();
        bans.put(ban("user a@r", 1));
        bans.put(ban("user a@r", 2));
        assert_eq!((bans.len(), bans.iter().next().unwrap().until), (1, 2));
        for number in 0..=u64::try_from(Bans::MOST).unwrap() {
            bans.put(ban(&format!("user {number}@r"), 10 + number));
        }
        assert_eq!(bans.len(), Bans::MOST);
        let client = "198.51.100.1".parse().unwrap();
        assert!(!bans.has(0, "r", ["a", "a"], client), "the first to end was evicted");
        assert!(bans.has(0, "r", ["10000", "10000"], client));
    }

    #[test]
    fn unannounced_ban_is_not_evicted() {
        let (mut bans, subject) = (Bans::default(), "user first@r".parse().unwrap());
        let first = ban("user first@r", 5);
        bans.order(first.clone());
        for number in 0..=u64::try_from(Bans::MOST).unwrap() {
            bans.put(ban(&format!("user {number}@r"), 10 + number));
        }
        assert_eq!((bans.len(), bans.to_announce(0, &subject, &[])), (Bans::MOST, Some(first.clone())));
        bans.announced(&subject, Some(&first));
        bans.put(ban("user last@r", 10));
        assert_eq!(bans.to_announce(0, &subject, &[]), None, "the other nodes have the ban");
    }

    #[test]
    fn ban_overridden_by_a_local_ban_or_unban_is_ignored() {
        let mut bans = Bans::default();
        assert!(bans.hear(ban("user alice@here", 1000)));
        bans.order_lift(500, &"user alice@here".parse().unwrap());
        assert!(!bans.hear(ban("user alice@here", 2000)) && !has(&bans, 500, "alice", "198.51.100.1"));
        bans.clear_unannounced();
        assert!(bans.hear(ban("user alice@here", 2000)), "announced by another process");
    }

    #[test]
    fn invalid_subject_is_refused_with_the_expected_form() {
        for bad in [
            "",
            "alice",
            "user alice",
            "user @here",
            "user alice@",
            "client",
            "client 192.0.2.1/24",
            "user a\n@b",
        ] {
            assert!(bad.parse::<Subject>().is_err(), "{bad}");
        }
        assert_eq!("user a@b@c".parse(), Ok(Subject::User { realm: "c".to_owned(), name: "a@b".to_owned() }));
    }

    proptest! {
        #[test]
        fn subject_round_trips_through_text(name in "[^@\\pC]{1,20}", realm in "[^@\\pC]{1,20}", ip: [u8; 4]) {
            let user = Subject::User { realm, name };
            prop_assert_eq!(user.to_string().parse(), Ok(user));
            let client = Subject::Client(Cidr { base: ip.into(), bits: 32 });
            prop_assert_eq!(client.to_string().parse(), Ok(client));
        }

        #[test]
        fn parser_rejects_invalid_text_without_panic(text in "\\PC{0,40}") {
            let _ = text.parse::<Subject>();
        }
    }
}
