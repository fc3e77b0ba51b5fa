//! What nodes tell one another through the store: news for all, and questions to one. Sealed, so that nobody gives orders who has no secret; and
//! dated, so that an order of yesterday is not carried out again.

use serde::{Deserialize, Serialize};

use crate::{
    bans::{Ban, Subject},
    node::NodeName,
    seal::Sealer,
};

/// Seconds that the clocks of two nodes may differ, and that a message may be on its way.
pub(crate) const GOOD_FOR_S: u64 = 120;

/// What is sealed as a message opens as nothing else.
const PURPOSE: &str = "message";
const ANSWER: &str = "answer";

/// A notice, from whom, and when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it.
    pub from: NodeName,
    /// Unix seconds.
    pub at: u64,
    /// What.
    pub notice: Notice,
}

/// What is said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Notice {
    /// This node goes: nobody is to be sent there.
    Left {
        /// Its process.
        incarnation: u64,
    },
    /// These nodes have not renewed their records in time: nobody is to be sent there until they do.
    Silent {
        /// Each with its process.
        nodes: Vec<(NodeName, u64)>,
    },
    /// This node has another card than before: a new version, or other addresses.
    Card,
    /// A node is to take nobody new, or to take clients again.
    Drain {
        /// Which.
        node: NodeName,
        /// Whether it drains.
        drains: bool,
    },
    /// Somebody is banned; sessions that exist end.
    Ban {
        /// Who, and until when.
        ban: Ban,
    },
    /// Somebody is banned no more.
    Unban {
        /// Who.
        subject: Subject,
    },
    /// What is known of a user is over: the credential is another, or gone.
    Revoked {
        /// Where.
        realm: String,
        /// Who.
        name: String,
    },
    /// Secrets, realms or their limits have changed in the store of users.
    RulesChanged,
    /// A node is asked something, and answers.
    Question(Question),
}

/// What one node asks of another: a request to its admin interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// Under which the answer is found.
    pub id: u64,
    /// Who is asked.
    pub to: NodeName,
    /// GET, POST, DELETE.
    pub method: String,
    /// With what stands behind `?`.
    pub path: String,
    /// What the one who asks may do, where it was asked.
    pub rights: Rights,
    /// Who that is, for the line in the log.
    pub by: String,
}

/// What somebody may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rights {
    /// Look.
    Read,
    /// Change things, too.
    Full,
}

/// What it is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Media type of the body; empty from nodes of an older version.
    #[serde(default)]
    pub media_type: String,
    /// Text of that type.
    pub body: String,
}

impl Message {
    /// Sealed. `nonce` is by chance.
    #[must_use]
    pub fn seal(&self, sealer: &Sealer, nonce: [u8; 12]) -> Vec<u8> {
        sealer.seal(PURPOSE, &serde_json::to_vec(self).unwrap_or_default(), nonce)
    }

    /// One that was sealed not long ago; `None` for everything else, what a later version says among it.
    #[must_use]
    pub fn open(sealer: &Sealer, unix: u64, sealed: &[u8]) -> Option<Self> {
        let text = sealer.open(PURPOSE, sealed)?;
        let message: Self = serde_json::from_slice(&text).ok()?;
        (message.at.abs_diff(unix) <= GOOD_FOR_S).then_some(message)
    }
}

impl Answer {
    /// Sealed, for this question alone.
    #[must_use]
    pub fn seal(&self, sealer: &Sealer, question: u64, nonce: [u8; 12]) -> Vec<u8> {
        let text = serde_json::to_vec(self).unwrap_or_default();
        sealer.seal(&format!("{ANSWER} {question:x}"), &text, nonce)
    }

    /// The opposite.
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
    fn every_message_is_read_as_it_is_written_while_it_is_young() {
        let sealer = Sealer::new("secret");
        let question = Question {
            id: u64::MAX,
            to: name("b"),
            method: "GET".to_owned(),
            path: "/v1/sessions?user=alice".to_owned(),
            rights: Rights::Read,
            by: "user 0 of this machine".to_owned(),
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

    #[test]
    fn an_answer_is_for_its_question_alone() {
        let sealer = Sealer::new("secret");
        let answer = Answer { status: 200, media_type: "application/json".to_owned(), body: "{}".to_owned() };
        let sealed = answer.seal(&sealer, 7, [1; 12]);
        assert_eq!(Answer::open(&sealer, 7, &sealed), Some(answer));
        assert_eq!(Answer::open(&sealer, 8, &sealed), None);
        let message = Message { from: name("a"), at: 1, notice: Notice::RulesChanged };
        assert_eq!(Answer::open(&sealer, 7, &message.seal(&sealer, [1; 12])), None);
    }
}
