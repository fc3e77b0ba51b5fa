//! Report on an attack: attempts and replies.

use std::fmt;

use serde::Serialize;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AttackFacts {
    pub peers: Vec<Attempt>,
    /// Replies to unauthenticated messages over UDP and DTLS.
    pub strangers: Vec<AttackReply>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Attempt {
    pub transport: String,
    pub entry: AttackEntry,
    pub form: String,
    pub peer: String,
    pub outcome: AttackOutcome,
    pub answer: String,
}

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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AttackOutcome {
    Refused,
    /// The data was sent and got no reply. It may have reached a peer that does not respond.
    Silent,
    /// Granted for an address on which some ports may be legitimate peers. Only the test that sends data shows whether a forbidden port
    /// is reachable.
    AddressOnly,
    Unknown,
    Open,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttackReply {
    pub transport: String,
    pub message: String,
    pub sent: usize,
    /// Bytes of all received datagrams, including retransmissions.
    pub received: usize,
    pub datagrams: usize,
    pub ratio: f64,
}
