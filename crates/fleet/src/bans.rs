//! Who may have nothing for a while: a user, or whoever comes from some addresses. Asked on requests of those who have authenticated; a stranger
//! gets no further anyway.

use std::{collections::HashMap, fmt, net::IpAddr, str::FromStr};

use serde::{Deserialize, Serialize};
use turnpike_turn::server::Cidr;

/// Seconds that a ban may last: what is meant for longer is a change of users or of peers.
pub const LONGEST_BAN_S: u64 = 31 * 86_400;

/// Who is banned. Written as `user NAME@REALM` or `client 192.0.2.0/24`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Subject {
    /// A user, by name or by whom quotas count.
    User {
        /// Where.
        realm: String,
        /// Who.
        name: String,
    },
    /// Whoever comes from there.
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
        let expected = || format!("{text:?} is nobody: expected \"user NAME@REALM\" or \"client CIDR\"");
        match text.split_once(' ') {
            Some(("user", user)) => {
                // A name may have an @ in it; a realm that has one can be banned by addresses alone.
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

/// A ban.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ban {
    /// Who.
    pub subject: Subject,
    /// Unix seconds.
    pub until: u64,
    /// As somebody wrote it; may be empty.
    #[serde(default)]
    pub reason: String,
}

/// All bans.
#[derive(Clone, Debug, Default)]
pub struct Bans {
    users: HashMap<Box<str>, Ban>,
    clients: Vec<(Cidr, Ban)>,
}

impl Bans {
    /// Bans at most, so that a request looks through few prefixes: the one that ends first gives way.
    pub const MOST: usize = 10_000;

    /// Takes one, in place of another of the same subject.
    pub fn put(&mut self, ban: Ban) {
        self.remove(&ban.subject);
        if self.len() >= Self::MOST
            && let Some(first) = self.iter().min_by_key(|ban| ban.until).map(|ban| ban.subject.clone())
        {
            self.remove(&first);
        }
        match &ban.subject {
            Subject::User { realm, name } => _ = self.users.insert(key(realm, name), ban),
            Subject::Client(prefix) => self.clients.push((*prefix, ban)),
        }
    }

    /// Ends one. False if there is none.
    pub fn remove(&mut self, subject: &Subject) -> bool {
        let before = self.len();
        match subject {
            Subject::User { realm, name } => _ = self.users.remove(&key(realm, name)),
            Subject::Client(prefix) => self.clients.retain(|(other, _)| other != prefix),
        }
        self.len() < before
    }

    /// Forgets those that are over; who they were.
    pub fn expire(&mut self, unix: u64) -> Vec<Subject> {
        let over: Vec<_> =
            self.iter().filter(|ban| ban.until <= unix).map(|ban| ban.subject.clone()).collect();
        over.iter().for_each(|subject| _ = self.remove(subject));
        over
    }

    /// Whether this user, or who comes from there, is banned.
    #[must_use]
    pub fn has(&self, unix: u64, realm: &str, names: [&str; 2], client: IpAddr) -> bool {
        let counts = |ban: &Ban| unix < ban.until;
        let user = |name| !self.users.is_empty() && self.users.get(&*key(realm, name)).is_some_and(counts);
        let [name, identity] = names;
        // Of a time-limited name quotas count the id, which stands behind a colon so that it is no user's.
        let id = identity.strip_prefix(':').unwrap_or(identity);
        user(name)
            || (id != name && user(id))
            || self.clients.iter().any(|(prefix, ban)| prefix.contains(client) && counts(ban))
    }

    /// In no order that means anything.
    pub fn iter(&self) -> impl Iterator<Item = &Ban> {
        self.users.values().chain(self.clients.iter().map(|(_, ban)| ban))
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.users.len() + self.clients.len()
    }

    /// Whether nobody is banned.
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
        Ban { subject: subject.parse().unwrap(), until, reason: String::new() }
    }

    fn has(bans: &Bans, unix: u64, name: &str, client: &str) -> bool {
        bans.has(unix, "here", [name, name], client.parse().unwrap())
    }

    #[test]
    fn a_ban_holds_for_its_subject_until_it_is_over() {
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
        assert_eq!(bans.expire(50), ["client 192.0.2.0/24".parse().unwrap()]);
        assert!(bans.remove(&"user alice@here".parse().unwrap()));
        assert!(!bans.remove(&"user alice@here".parse().unwrap()));
        assert!(bans.is_empty());
    }

    #[test]
    fn the_id_of_a_time_limited_name_is_banned_with_all_its_names() {
        let mut bans = Bans::default();
        bans.put(ban("user carol@here", 100));
        let client = "198.51.100.1".parse().unwrap();
        assert!(bans.has(0, "here", ["1800000000:carol", ":carol"], client));
        assert!(!bans.has(0, "here", ["1800000000:dora", ":dora"], client));
    }

    #[test]
    fn a_subject_is_banned_once_and_all_of_them_are_bounded() {
        let mut bans = Bans::default();
        bans.put(ban("user a@r", 1));
        bans.put(ban("user a@r", 2));
        assert_eq!((bans.len(), bans.iter().next().unwrap().until), (1, 2));
        for number in 0..=u64::try_from(Bans::MOST).unwrap() {
            bans.put(ban(&format!("user {number}@r"), 10 + number));
        }
        assert_eq!(bans.len(), Bans::MOST);
        let client = "198.51.100.1".parse().unwrap();
        assert!(!bans.has(0, "r", ["a", "a"], client), "the first to end gave way");
        assert!(bans.has(0, "r", ["10000", "10000"], client));
    }

    #[test]
    fn what_is_nobody_is_refused_with_what_would_be_somebody() {
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
        fn a_subject_is_read_as_it_is_written(name in "[^@\\pC]{1,20}", realm in "[^@\\pC]{1,20}", ip: [u8; 4]) {
            let user = Subject::User { realm, name };
            prop_assert_eq!(user.to_string().parse(), Ok(user));
            let client = Subject::Client(Cidr { base: ip.into(), bits: 32 });
            prop_assert_eq!(client.to_string().parse(), Ok(client));
        }

        #[test]
        fn no_text_is_more_than_refused(text in "\\PC{0,40}") {
            let _ = text.parse::<Subject>();
        }
    }
}
