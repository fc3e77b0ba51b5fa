//! Messages that nodes send each other through the store: broadcasts, and requests to one node. They are
//! sealed, so that only nodes with the fleet's secret can give commands. They contain the time, so that old
//! commands are ignored. Each is executed only once, even if replayed.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::{
    bans::{Ban, GOOD_FOR_S, Subject},
    node::NodeName,
    seal::{Sealer, TAG_LEN},
};

/// Purposes for sealing: a message sealed for one purpose cannot be opened for another.
const PURPOSE: &str = "message";
const ANSWER: &str = "answer";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    pub from: NodeName,
    /// Unix seconds.
    pub at: u64,
    pub notice: Notice,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Notice {
    /// The sender is leaving: stop redirecting clients to it.
    Left {
        incarnation: u64,
    },
    /// These nodes have overdue records: stop redirecting clients to them until they renew their records.
    Silent {
        /// Name and incarnation.
        nodes: Vec<(NodeName, u64)>,
    },
    Card,
    /// A node must stop or resume taking new clients.
    Drain {
        node: NodeName,
        drains: bool,
    },
    /// Bans a subject; its allocations end.
    Ban {
        ban: Ban,
    },
    Unban {
        subject: Subject,
    },
    /// Removes a user from caches, because the credential was changed or deleted.
    Revoked {
        realm: String,
        name: String,
    },
    RulesChanged,
    /// The state of a certificate order has changed, for example because a challenge is pending.
    OrdersChanged,
    Question(ForwardedRequest),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardedRequest {
    pub id: u64,
    pub to: NodeName,
    pub method: String,
    /// Request path, including the query.
    pub path: String,
    /// Access level of the requester on the node that asks.
    pub rights: Rights,
    /// User who made the request, for the log.
    pub by: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rights {
    Read,
    Full,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerAnswer {
    pub status: u16,
    /// Media type of the body; empty from nodes of an older version.
    #[serde(default)]
    pub media_type: String,
    pub body: String,
    /// Other headers by name, such as `allow`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<(String, String)>,
}

impl Message {
    /// Seals the message with a random `nonce`.
    #[must_use]
    pub fn seal(&self, sealer: &Sealer, nonce: [u8; 12]) -> Vec<u8> {
        sealer.seal(PURPOSE, &serde_json::to_vec(self).unwrap_or_default(), nonce)
    }

    /// Opens a recent message; `None` for anything else, including kinds that only newer versions know.
    #[must_use]
    pub fn open(sealer: &Sealer, unix: u64, sealed: &[u8]) -> Option<Self> {
        let text = sealer.open(PURPOSE, sealed)?;
        let message: Self = serde_json::from_slice(&text).ok()?;
        (message.at.abs_diff(unix) <= GOOD_FOR_S).then_some(message)
    }
}

/// Remembers opened messages, so that none is executed twice. If full, it forgets the oldest and refuses
/// messages of that age.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Remembered", into = "Remembered")]
pub struct OpenedMessages {
    tags: HashSet<[u8; TAG_LEN]>,
    by_time: BTreeMap<u64, Vec<[u8; TAG_LEN]>>,
    /// Time of the newest message that was forgotten, or that an earlier process may have executed.
    forgotten: Option<u64>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Remembered {
    by_time: Vec<(u64, Vec<[u8; TAG_LEN]>)>,
    forgotten: Option<u64>,
}

impl From<OpenedMessages> for Remembered {
    fn from(OpenedMessages { by_time, forgotten, .. }: OpenedMessages) -> Self {
        Self { by_time: by_time.into_iter().collect(), forgotten }
    }
}

impl From<Remembered> for OpenedMessages {
    fn from(Remembered { by_time, forgotten }: Remembered) -> Self {
        let tags = by_time.iter().flat_map(|(_, tags)| tags).copied().collect();
        Self { tags, by_time: by_time.into_iter().collect(), forgotten }
    }
}

/// Reason why a message is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Sealed with another secret, too old or too new, or of an unknown kind.
    Unreadable,
    /// The message was executed before, possibly by a previous process.
    Repeated,
}

impl OpenedMessages {
    /// Messages from up to this many seconds before the start are accepted, to allow for clock differences.
    const BEFORE_START_S: u64 = 2;

    /// Refuses messages before `unix`: the previous process may have executed them, and they could be
    /// replayed.
    #[must_use]
    pub fn since(unix: u64) -> Self {
        Self { forgotten: unix.checked_sub(Self::BEFORE_START_S + 1), ..Self::default() }
    }

    /// Maximum number of remembered messages, 48 bytes each. This allows 273 messages per second for as long
    /// as they are valid.
    pub const MOST: usize = 1 << 16;

    /// Opens a recent message, but only once.
    pub fn open(&mut self, sealer: &Sealer, unix: u64, sealed: &[u8]) -> Result<Message, Refused> {
        let message = Message::open(sealer, unix, sealed).ok_or(Refused::Unreadable)?;
        let (_, tag) = sealed.split_last_chunk().ok_or(Refused::Unreadable)?;
        self.forget(unix);
        // Our clock may have been ahead and have been corrected since then.
        self.forgotten = self.forgotten.map(|forgotten| forgotten.min(unix + GOOD_FOR_S));
        let is_old = self.forgotten.is_some_and(|forgotten| message.at <= forgotten);
        if is_old || !self.tags.insert(*tag) {
            return Err(Refused::Repeated);
        }
        self.by_time.entry(message.at).or_default().push(*tag);
        if self.tags.len() > Self::MOST {
            self.forgotten = self.forget_oldest();
        }
        Ok(message)
    }

    fn forget(&mut self, unix: u64) {
        while self.by_time.first_key_value().is_some_and(|(at, _)| at + GOOD_FOR_S < unix) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) -> Option<u64> {
        let (at, tags) = self.by_time.pop_first()?;
        tags.iter().for_each(|tag| _ = self.tags.remove(tag));
        Some(at)
    }
}

impl PeerAnswer {
    /// Seals the response to this request.
    #[must_use]
    pub fn seal(&self, sealer: &Sealer, question: u64, nonce: [u8; 12]) -> Vec<u8> {
        let text = serde_json::to_vec(self).unwrap_or_default();
        sealer.seal(&format!("{ANSWER} {question:x}"), &text, nonce)
    }

    #[must_use]
    pub fn open(sealer: &Sealer, question: u64, sealed: &[u8]) -> Option<Self> {
        let text = sealer.open(&format!("{ANSWER} {question:x}"), sealed)?;
        serde_json::from_slice(&text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    #[test]
    fn messages_round_trip_while_recent() {
        let sealer = Sealer::new("secret");
        let question = ForwardedRequest {
            id: u64::MAX,
            to: name("b"),
            method: "GET".to_owned(),
            path: "/v1/sessions?user=alice".to_owned(),
            rights: Rights::Read,
            by: "local user 0".to_owned(),
        };
        let subject: Subject = "user alice@here".parse().unwrap();
        for notice in [
            Notice::Left { incarnation: 7 },
            Notice::Silent { nodes: vec![(name("c"), u64::MAX)] },
            Notice::Card,
            Notice::Drain { node: name("b"), drains: true },
            Notice::Ban { ban: Ban::new(subject.clone(), 9, "spam".to_owned()) },
            Notice::Unban { subject },
            Notice::Revoked { realm: "here".to_owned(), name: "alice".to_owned() },
            Notice::RulesChanged,
            Notice::OrdersChanged,
            Notice::Question(question),
        ] {
            let message = Message { from: name("a"), at: 1000, notice };
            let sealed = message.seal(&sealer, [1; 12]);
            for unix in [880, 1000, 1120] {
                assert_eq!(Message::open(&sealer, unix, &sealed).as_ref(), Some(&message), "{unix}");
            }
            for unix in [0, 879, 1121] {
                assert_eq!(Message::open(&sealer, unix, &sealed), None, "{unix}");
            }
            assert_eq!(Message::open(&Sealer::new("another"), 1000, &sealed), None);
        }
    }

    fn sealed(sealer: &Sealer, at: u64, number: u32) -> Vec<u8> {
        let mut nonce = [0; 12];
        nonce[..4].copy_from_slice(&number.to_be_bytes());
        Message { from: name("a"), at, notice: Notice::RulesChanged }.seal(sealer, nonce)
    }

    #[test]
    fn replayed_message_is_executed_once() {
        let (sealer, mut opened) = (Sealer::new("secret"), OpenedMessages::default());
        let (one, same_again) = (sealed(&sealer, 1000, 1), sealed(&sealer, 1000, 2));
        assert!(opened.open(&sealer, 1000, &one).is_ok());
        assert!(opened.open(&sealer, 1000, &same_again).is_ok(), "another message with the same content");
        for unix in [1000, 1001, 1000 + GOOD_FOR_S] {
            assert_eq!(opened.open(&sealer, unix, &one), Err(Refused::Repeated), "{unix}");
        }
        assert_eq!(opened.open(&sealer, 1001 + GOOD_FOR_S, &one), Err(Refused::Unreadable));
        assert_eq!(opened.open(&sealer, 1000, b"nonsense"), Err(Refused::Unreadable));
        // A message from a clock that is ahead can be opened for longer, and is remembered for longer.
        let ahead = sealed(&sealer, 1000 + GOOD_FOR_S, 3);
        assert!(opened.open(&sealer, 1000, &ahead).is_ok());
        for unix in (1000..=1000 + 2 * GOOD_FOR_S).step_by(10) {
            assert_eq!(opened.open(&sealer, unix, &ahead), Err(Refused::Repeated), "{unix}");
        }
    }

    #[test]
    fn notices_from_before_the_start_are_refused() {
        let (sealer, mut opened) = (Sealer::new("secret"), OpenedMessages::since(1000));
        for (at, is_heard) in [(880, false), (997, false), (998, true), (1000, true), (1120, true)] {
            let said = opened.open(&sealer, 1000, &sealed(&sealer, at, 1));
            assert_eq!(said.is_ok(), is_heard, "{at}");
        }
        let mut opened = OpenedMessages::since(5000);
        let mut hears = |unix| opened.open(&sealer, unix, &sealed(&sealer, unix, 2)).is_ok();
        assert_eq!([hears(1400), hears(1520), hears(1521)], [false, false, true]);
    }

    #[test]
    fn opened_messages_are_bounded_and_never_repeated() {
        let (sealer, mut opened) = (Sealer::new("secret"), OpenedMessages::default());
        let most = u32::try_from(OpenedMessages::MOST).unwrap();
        let all: Vec<_> =
            (0..most + 100).map(|number| sealed(&sealer, 1000 + u64::from(number) / 1000, number)).collect();
        for sealed in &all {
            assert!(opened.open(&sealer, 1060, sealed).is_ok());
            assert!(opened.tags.len() <= OpenedMessages::MOST);
        }
        for sealed in all.iter().step_by(97) {
            assert_eq!(opened.open(&sealer, 1060, sealed), Err(Refused::Repeated));
        }
        // The process that takes over does not execute the messages again either.
        let text = serde_json::to_string(&opened).unwrap();
        let mut taken: OpenedMessages = serde_json::from_str(&text).unwrap();
        for sealed in all.iter().step_by(97) {
            assert_eq!(taken.open(&sealer, 1060, sealed), Err(Refused::Repeated));
        }
        assert!(opened.open(&sealer, 1060, &sealed(&sealer, 1060, most + 100)).is_ok());
        assert!(opened.open(&sealer, 2000, &sealed(&sealer, 2000, 1)).is_ok());
        assert_eq!((opened.tags.len(), opened.by_time.len()), (1, 1));
    }

    #[test]
    fn response_opens_only_for_its_request() {
        let sealer = Sealer::new("secret");
        let answer = PeerAnswer {
            status: 405,
            media_type: "application/json".to_owned(),
            body: "{}".to_owned(),
            headers: vec![("allow".to_owned(), "GET".to_owned())],
        };
        let sealed = answer.seal(&sealer, 7, [1; 12]);
        assert_eq!(PeerAnswer::open(&sealer, 7, &sealed), Some(answer));
        assert_eq!(PeerAnswer::open(&sealer, 8, &sealed), None);
        let message = Message { from: name("a"), at: 1, notice: Notice::RulesChanged };
        assert_eq!(PeerAnswer::open(&sealer, 7, &message.seal(&sealer, [1; 12])), None);
    }
}
