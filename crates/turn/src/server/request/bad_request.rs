//! Faults of requests that are answered with 400, as the attribute at fault and its fault: for the reason phrase, the log and the page.

use std::fmt;

use turnpike_wire::{channel_data::ChannelNumber, stun::kind::Name};

use crate::server::RequestRefusal;

/// An attribute that makes a request a bad one (400).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BadRequest {
    /// Its type.
    pub attribute: u16,
    /// Its fault.
    pub fault: Fault,
}

/// The fault of an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The request needs it.
    Missing,
    /// Its length or its value is none that it can have.
    Malformed,
    /// Its number is outside the range.
    OutOfRange,
    /// Its address has port 0.
    PortZero,
    /// It must not stand beside this other one.
    Beside(u16),
    /// It repeats another list than that of the challenge.
    NotAnnounced,
    /// This channel of the allocation is bound to another peer.
    ChannelTaken(ChannelNumber),
    /// The peer is bound to this other channel of the allocation.
    PeerHasChannel(ChannelNumber),
    /// It needs a client over TCP or TLS.
    OverDatagrams,
    /// It is for datagrams, and the allocation relays TCP.
    RelaysTcp,
    /// It is for connections, and the allocation relays datagrams.
    RelaysUdp,
    /// It names nothing that exists here (any more).
    Unknown,
    /// A newer one took its place.
    Replaced,
    /// It comes from where its allocation is already.
    AtHome,
    /// The connection has an allocation, so it is a control connection.
    ControlConnection,
    /// An Allocate sends it empty.
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
            Fault::Beside(other) => write!(f, "{name} must not stand beside {}", Name(other)),
            Fault::NotAnnounced => write!(f, "{name} is not the list of the server"),
            Fault::ChannelTaken(number) => {
                write!(f, "channel {:#06x} is bound to another peer", number.get())
            }
            Fault::PeerHasChannel(number) => write!(f, "the peer already has channel {:#06x}", number.get()),
            Fault::OverDatagrams => write!(f, "{name} needs a client over TCP or TLS"),
            Fault::RelaysTcp => write!(f, "{name} is for datagrams, and the allocation relays TCP"),
            Fault::RelaysUdp => write!(f, "{name} is for connections, and the allocation relays UDP"),
            Fault::Unknown => write!(f, "{name} is not known here (any more)"),
            Fault::Replaced => write!(f, "{name} was replaced by a newer one"),
            Fault::AtHome => write!(f, "{name} comes from the current address of its allocation"),
            Fault::ControlConnection => write!(f, "{name} came over a connection that has an allocation"),
            Fault::NotEmpty => write!(f, "{name} must be empty here"),
        }
    }
}

/// The error code of a refused request, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Denied {
    pub(crate) code: u16,
    pub(crate) why: RequestRefusal,
}

impl Denied {
    /// An error code that stands for one reason.
    pub(crate) const fn code(code: u16) -> Self {
        Self { code, why: RequestRefusal::Code }
    }

    /// 400.
    pub(crate) const fn bad(attribute: u16, fault: Fault) -> Self {
        Self { code: 400, why: RequestRefusal::BadRequest(BadRequest { attribute, fault }) }
    }
}

#[cfg(test)]
mod tests {
    use turnpike_wire::stun::kind;

    use super::*;

    #[test]
    fn the_text_names_the_attribute_as_the_rfcs_do() {
        let bad = |attribute, fault| BadRequest { attribute, fault }.to_string();
        assert_eq!(bad(kind::XOR_PEER_ADDRESS, Fault::Missing), "XOR-PEER-ADDRESS is missing");
        assert_eq!(
            bad(kind::RESERVATION_TOKEN, Fault::Beside(kind::EVEN_PORT)),
            "RESERVATION-TOKEN must not stand beside EVEN-PORT"
        );
        let taken = Fault::PeerHasChannel(ChannelNumber::MIN);
        assert_eq!(bad(kind::CHANNEL_NUMBER, taken), "the peer already has channel 0x4000");
        assert_eq!(bad(0x0031, Fault::Malformed), "0x0031 is malformed");
    }
}
