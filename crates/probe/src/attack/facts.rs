//! Report of the attack: attempts and replies.

use std::fmt;

use serde::Serialize;

/// What was asked, and what came of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AttackFacts {
    /// Peers, by each way in.
    pub peers: Vec<Attempt>,
    /// Messages without a credential over UDP and DTLS.
    pub strangers: Vec<AttackReply>,
}

/// One thing that a user must not get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Attempt {
    /// `udp`, `tcp`, `tls` or `dtls`.
    pub transport: String,
    /// How it was asked for: a method, or what leads to one.
    pub entry: AttackEntry,
    /// What kind of address it is, or what else was asked for.
    pub form: String,
    /// The peer; empty where there is none.
    pub peer: String,
    /// What came of it.
    pub outcome: AttackOutcome,
    /// In the server's words.
    pub answer: String,
}

/// A way in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AttackEntry {
    CreatePermission,
    ChannelBind,
    Send,
    Connect,
    ConnectionBind,
    Mobility,
    MobilityChannelBind,
    MobilitySend,
}

impl fmt::Display for AttackEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::CreatePermission => "CreatePermission",
            Self::ChannelBind => "ChannelBind",
            Self::Send => "Send",
            Self::Connect => "Connect",
            Self::ConnectionBind => "ConnectionBind",
            Self::Mobility => "mobility",
            Self::MobilityChannelBind => "ChannelBind after a move",
            Self::MobilitySend => "Send after a move",
        })
    }
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AttackOutcome {
    /// As it should be.
    Refused,
    /// Sent, and nothing came back; nobody says whether that was let through to a peer that does not answer.
    Silent,
    /// Granted for the address, which has ports that may be a peer's; what matters is whether data goes to this one.
    AddressOnly,
    /// Refused for another reason, or not answered.
    Unknown,
    /// It is let in.
    Open,
}

/// What a server sends to an address that anybody may have written into a packet.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttackReply {
    /// `udp` or `dtls`.
    pub transport: String,
    /// Of what kind the message was.
    pub message: String,
    /// Its bytes, of UDP payload.
    pub sent: usize,
    /// Bytes of all datagrams that came for it, repetitions included.
    pub received: usize,
    /// How many datagrams these were.
    pub datagrams: usize,
    /// Bytes out per byte in.
    pub ratio: f64,
}
