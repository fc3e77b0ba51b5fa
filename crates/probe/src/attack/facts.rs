//! Report of the attack: attempts and replies.

use std::fmt;

use serde::Serialize;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AttackFacts {
    /// Attempts with a credential, per peer and method.
    pub peers: Vec<Attempt>,
    /// Unauthenticated messages over UDP and DTLS.
    pub strangers: Vec<AttackReply>,
}

/// Attempt at something a user must not get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Attempt {
    /// `udp`, `tcp`, `tls` or `dtls`.
    pub transport: String,
    pub entry: AttackEntry,
    /// Kind of address, or what else was requested.
    pub form: String,
    /// Peer address; empty if the attempt has no peer.
    pub peer: String,
    pub outcome: AttackOutcome,
    /// The server's answer.
    pub answer: String,
}

/// Method, or the step that leads to one.
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
    /// Sent without a reply. The data may have reached a peer that does not answer.
    Silent,
    /// Granted for the address, some of whose ports may be legitimate peers; the data test decides.
    AddressOnly,
    /// Refused for another reason, or no answer.
    Unknown,
    Open,
}

/// Reply to a message with a possibly forged source address.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttackReply {
    /// `udp` or `dtls`.
    pub transport: String,
    /// Kind of message sent.
    pub message: String,
    /// Bytes of UDP payload.
    pub sent: usize,
    /// Bytes of all datagrams received, retransmissions included.
    pub received: usize,
    /// Number of datagrams received.
    pub datagrams: usize,
    /// Bytes received per byte sent.
    pub ratio: f64,
}
