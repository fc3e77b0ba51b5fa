//! Reasons for dropping datagrams; they are counted and not logged.

use strum::{IntoStaticStr, VariantArray};
use turnpike_wire::{channel_data::ChannelDataError, indication::IndicationError};

/// Reason for dropping a datagram; each has a counter in [`crate::server::Stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
#[repr(u8)]
pub enum DropReason {
    /// The first byte is neither STUN nor ChannelData, or the datagram is empty.
    NotStun,
    /// Shorter than the length in its header.
    Truncated,
    /// Wrong length, an attribute beyond the end, or an invalid attribute.
    Malformed,
    /// Request longer than [`crate::server::MAX_REQUEST_LEN`], or payload too long for a message to the
    /// client.
    Oversized,
    /// STUN without the magic cookie, except Binding requests over UDP (RFC 3489).
    ClassicStun,
    Fingerprint,
    /// NAT discovery request above the rate of its source network ([`crate::server::DiscoveryLimits`]).
    DiscoverySourceLimit,
    DiscoveryTotalLimit,
    /// Response, or an indication not meant for servers.
    UnexpectedClass,
    /// Binding indication, a keepalive that gets no response (RFC 8489 section 6.3.2).
    Keepalive,
    /// RFC 8489 section 6.3.
    UnknownMethod,
    /// Indication with an unknown comprehension-required attribute (RFC 8489 section 6.3.2).
    UnknownAttribute,
    /// Send indication without XOR-PEER-ADDRESS or DATA (RFC 8656 section 11.2).
    MissingAttribute,
    /// Outside 0x4000-0x4FFF (RFC 8656 section 12).
    ChannelNumber,
    /// ChannelData or Send indication from a 5-tuple without an allocation.
    NoAllocation,
    UnboundChannel,
    /// RFC 8656 section 9.
    NoPermission,
    PeerRefused,
    PeerFamily,
    AllocationBandwidth,
    UserBandwidth,
    RealmBandwidth,
    TotalBandwidth,
    /// Request above the refusal rate of its prefix ([`crate::server::RefusalLimit`]).
    RefusalLimit,
    /// Request too short to be granted, whose 401 would be more than four times as long, above a fixed rate.
    RefusalRatio,
    /// Request about an allocation whose 5-tuple was recently refused too often for the same reason.
    RefusalRepeated,
    /// Send indication on an allocation that relays TCP (RFC 6062).
    TcpAllocation,
    /// The client of the mobile allocation has disconnected and not returned yet (RFC 8016).
    ClientAway,
    /// The client's allocation is in transit from another worker (RFC 8016).
    Moving,
    /// Retransmission of an Allocate while its relay sockets are opening, or of a Connect while it connects.
    OpenPending,
    /// Allocate while the fleet has not decided yet whether a shared limit has room; the client retransmits.
    QuotaPending,
    /// Retransmission while the credential store is queried.
    LookupPending,
    /// Request that needs a store lookup while the waiting requests of its address, or all, are at their
    /// limit.
    LookupLimit,
    LookupOver,
    /// Packet from a relay socket, or report on a connection, of an ended allocation.
    StaleRelay,
    /// ICMP error of a type that is not relayed (RFC 8656 section 11.5).
    IcmpType,
}

impl DropReason {
    /// Returns true for reasons that drop a request which would otherwise get an answer; operators want to
    /// see these. Repeated refusals are left out since the refusal itself is logged, and so are requests too
    /// short to be from a client.
    pub(crate) fn is_bound_on_requests(self) -> bool {
        matches!(self, Self::RefusalLimit | Self::QuotaPending | Self::LookupLimit | Self::LookupOver)
    }
}

impl From<ChannelDataError> for DropReason {
    #[inline]
    fn from(error: ChannelDataError) -> Self {
        match error {
            ChannelDataError::Truncated => Self::Truncated,
            ChannelDataError::Number(_) => Self::ChannelNumber,
        }
    }
}

impl From<IndicationError> for DropReason {
    #[inline]
    fn from(error: IndicationError) -> Self {
        match error {
            IndicationError::Missing => Self::MissingAttribute,
            IndicationError::UnknownAttribute(_) => Self::UnknownAttribute,
            IndicationError::Fingerprint => Self::Fingerprint,
            _ => Self::Malformed,
        }
    }
}
