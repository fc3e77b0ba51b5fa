use strum::{IntoStaticStr, VariantArray};
use turnpike_wire::{channel_data::ChannelDataError, indication::IndicationError};

/// Each reason has a counter in [`crate::server::Stats`]; drops are not logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
#[repr(u8)]
pub enum DropReason {
    /// The client's address is refused by [`crate::server::ClientRules`].
    ClientRefused,
    /// The first byte is neither STUN nor ChannelData, or the datagram is empty.
    NotStun,
    /// The datagram is shorter than the length field in its header indicates.
    Truncated,
    /// Wrong length field, an attribute that extends beyond the end, or an invalid attribute.
    Malformed,
    /// Request longer than [`crate::server::MAX_REQUEST_LEN`], or payload too long for a message.
    Oversized,
    /// STUN without the magic cookie, except Binding requests over UDP (RFC 3489).
    ClassicStun,
    Fingerprint,
    /// See [`crate::server::DiscoveryLimits`].
    DiscoverySourceLimit,
    DiscoveryTotalLimit,
    /// Response, or an indication not meant for servers.
    UnexpectedClass,
    /// Binding indication, a keepalive that gets no response (RFC 8489 section 6.3.2).
    Keepalive,
    /// Request with an unknown method (RFC 8489 section 6.3).
    UnknownMethod,
    /// Indication with an unknown comprehension-required attribute (RFC 8489 section 6.3.2).
    UnknownAttribute,
    MissingAttribute,
    /// Channel number outside 0x4000-0x4FFF (RFC 8656 section 12).
    ChannelNumber,
    /// ChannelData or Send indication from a 5-tuple without an allocation.
    NoAllocation,
    UnboundChannel,
    NoPermission,
    PeerRefused,
    PeerFamily,
    AllocationBandwidth,
    UserBandwidth,
    RealmBandwidth,
    TotalBandwidth,
    /// See [`crate::server::RefusalLimit`].
    RefusalLimit,
    /// The request is too short to be granted, and the 401 would be more than four times as long.
    RefusalRatio,
    /// The 5-tuple was refused too often for the same reason.
    RefusalRepeated,
    /// Send indication on an allocation that relays TCP (RFC 6062).
    TcpAllocation,
    /// The mobile client has disconnected and not returned yet (RFC 8016).
    ClientAway,
    Moving,
    /// Retransmission of an Allocate while its relay sockets are opening, or of a Connect while it connects.
    OpenPending,
    /// The fleet has not granted or refused the allocation yet. The client retransmits.
    QuotaPending,
    /// Retransmission of a request for which the credential store is being queried.
    LookupPending,
    /// Too many requests wait for the store, from this address or in total.
    LookupLimit,
    LookupOver,
    /// Packet from a relay socket of an ended allocation, or report on one of its connections.
    StaleRelay,
    /// ICMP error of a type that is not relayed (RFC 8656 section 11.5).
    IcmpType,
}

impl DropReason {
    /// True if operators should see the drop, because the request should have got a response.
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
