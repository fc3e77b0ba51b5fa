//! Events that clients and peers observe.

use std::fmt;

use super::{
    message::Answer,
    step::{Client, Peer},
};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Seen {
    Answer(Client, Answer),
    Data(Client, Peer, usize),
    Channel(Client, u16, usize),
    /// A datagram at a peer, from the relayed address of this client.
    Relayed(Peer, Client, usize),
    Closed(Client),
    /// The server no longer answers Binding requests.
    Deaf(Client),
    Stray(Client, &'static str),
    Failed(Client, String),
}

impl Seen {
    pub(super) const fn is_end(&self) -> bool {
        matches!(self, Self::Closed(_) | Self::Deaf(_))
    }

    pub(super) fn without_client(&self) -> String {
        match self {
            Self::Data(_, peer, length) => format!("{length} bytes from {peer} in a Data indication"),
            Self::Channel(_, _, length) => format!("{length} bytes on a channel"),
            Self::Relayed(peer, _, length) => format!("{peer} gets {length} bytes"),
            Self::Stray(_, what) => (*what).to_owned(),
            other => other.to_string(),
        }
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answer(client, answer) => write!(f, "{client} gets {answer}"),
            Self::Data(client, peer, length) => {
                write!(f, "{client} gets {length} bytes from {peer} in a Data indication")
            }
            Self::Channel(client, number, length) => {
                write!(f, "{client} gets {length} bytes on channel 0x{number:04x}")
            }
            Self::Relayed(peer, client, length) => write!(f, "{peer} gets {length} bytes from {client}"),
            Self::Closed(client) => write!(f, "{client} is disconnected"),
            Self::Deaf(client) => write!(f, "{client} no longer gets responses to Binding requests"),
            Self::Stray(client, what) => write!(f, "{client} gets {what}"),
            Self::Failed(client, why) => write!(f, "{client} cannot connect: {why}"),
        }
    }
}
