//! Causes of 400 responses, shown in the reason phrase, the log and the admin page.

use std::fmt;

use turnpike_wire::{channel_data::ChannelNumber, stun::kind::Name};

use crate::server::RequestRefusal;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BadRequest {
    pub attribute: u16,
    pub fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    Missing,
    Malformed,
    OutOfRange,
    PortZero,
    /// Not allowed together with this attribute.
    Beside(u16),
    NotAnnounced,
    /// This channel of the allocation is bound to another peer.
    ChannelTaken(ChannelNumber),
    /// The peer is bound to this other channel of the allocation.
    PeerHasChannel(ChannelNumber),
    OverDatagrams,
    /// Only for UDP, but the allocation relays TCP.
    RelaysTcp,
    /// Only for TCP, but the allocation relays UDP.
    RelaysUdp,
    /// The ID does not exist, or no longer exists.
    Unknown,
    Replaced,
    /// The allocation is already on this 5-tuple.
    AtHome,
    /// A connection with an allocation is a control connection.
    ControlConnection,
    /// The attribute must be empty in an Allocate.
    NotEmpty,
}

impl fmt::Display for BadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Name(self.attribute);
        match self.fault {
            Fault::Missing => write!(f, "{name} is missing"),
            Fault::Malformed => write!(f, "{name} is malformed"),
            Fault::OutOfRange => write!(f, "{name} is out of range"),
            Fault::PortZero => write!(f, "{name} has port 0"),
            Fault::Beside(other) => write!(f, "{name} cannot be combined with {}", Name(other)),
            Fault::NotAnnounced => write!(f, "{name} differs from the list in the challenge"),
            Fault::ChannelTaken(number) => {
                write!(f, "channel {:#06x} is bound to another peer", number.get())
            }
            Fault::PeerHasChannel(number) => write!(f, "the peer already has channel {:#06x}", number.get()),
            Fault::OverDatagrams => write!(f, "{name} requires a client connection over TCP or TLS"),
            Fault::RelaysTcp => write!(f, "{name} is only for UDP, but the allocation relays TCP"),
            Fault::RelaysUdp => write!(f, "{name} is only for TCP, but the allocation relays UDP"),
            Fault::Unknown => write!(f, "{name} is unknown or has expired"),
            Fault::Replaced => write!(f, "{name} was replaced by a newer one"),
            Fault::AtHome => write!(f, "{name} came from the current address of its allocation"),
            Fault::ControlConnection => write!(f, "{name} came over a connection that has an allocation"),
            Fault::NotEmpty => write!(f, "{name} must be empty here"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Denied {
    pub(crate) code: u16,
    pub(crate) why: RequestRefusal,
}

impl Denied {
    pub(crate) const fn code(code: u16) -> Self {
        Self { code, why: RequestRefusal::Code }
    }

    pub(crate) const fn bad(attribute: u16, fault: Fault) -> Self {
        Self { code: 400, why: RequestRefusal::BadRequest(BadRequest { attribute, fault }) }
    }
}

#[cfg(test)]
mod tests {
    use turnpike_wire::stun::kind;

    use super::*;

    #[test]
    fn message_names_attributes_as_the_rfcs_do() {
        let bad = |attribute, fault| BadRequest { attribute, fault }.to_string();
        assert_eq!(bad(kind::XOR_PEER_ADDRESS, Fault::Missing), "XOR-PEER-ADDRESS is missing");
        assert_eq!(
            bad(kind::RESERVATION_TOKEN, Fault::Beside(kind::EVEN_PORT)),
            "RESERVATION-TOKEN cannot be combined with EVEN-PORT"
        );
        let taken = Fault::PeerHasChannel(ChannelNumber::MIN);
        assert_eq!(bad(kind::CHANNEL_NUMBER, taken), "the peer already has channel 0x4000");
        assert_eq!(bad(0x0031, Fault::Malformed), "0x0031 is malformed");
    }
}
