//! Why a datagram was dropped: each reason is a counter, never a log line.

use strum::{IntoStaticStr, VariantArray};
use turnpike_wire::{channel_data::ChannelDataError, indication::IndicationError};

/// Why a datagram was dropped. Each is a counter in [`crate::server::Stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
#[repr(u8)]
pub enum DropReason {
    /// Neither STUN nor ChannelData by its first byte, or nothing at all.
    NotStun,
    /// Shorter than its own header says.
    Truncated,
    /// Not well-formed: a wrong length, an attribute that reaches beyond the end, an attribute that cannot be.
    Malformed,
    /// A request beyond [`crate::server::MAX_REQUEST_LEN`], or a payload that no message to the client can hold.
    Oversized,
    /// STUN without the magic cookie that is no Binding request over UDP (RFC 3489).
    ClassicStun,
    /// A FINGERPRINT that does not match.
    Fingerprint,
    /// A request for NAT discovery beyond the rate of its source network ([`crate::server::DiscoveryLimits`]).
    DiscoverySourceLimit,
    /// A request for NAT discovery beyond the rate of all together.
    DiscoveryTotalLimit,
    /// A response, or an indication that servers do not receive.
    UnexpectedClass,
    /// A Binding indication: a keepalive, to which nothing is to be said (RFC 8489 section 6.3.2).
    Keepalive,
    /// A method that this server does not know (RFC 8489 section 6.3).
    UnknownMethod,
    /// An indication with an unknown comprehension-required attribute (RFC 8489 section 6.3.2).
    UnknownAttribute,
    /// A Send indication without XOR-PEER-ADDRESS or DATA (RFC 8656 section 11.2).
    MissingAttribute,
    /// A channel number outside 0x4000-0x4FFF (RFC 8656 section 12).
    ChannelNumber,
    /// ChannelData or a Send indication from a 5-tuple without an allocation.
    NoAllocation,
    /// ChannelData on a channel that is not bound, or no longer.
    UnboundChannel,
    /// A peer without a permission (RFC 8656 section 9).
    NoPermission,
    /// A peer that the peer rules refuse.
    PeerRefused,
    /// A peer of a family for which the allocation has no relayed transport address.
    PeerFamily,
    /// Beyond the bits per second of its allocation.
    AllocationBandwidth,
    /// Beyond those of its user.
    UserBandwidth,
    /// Beyond those of its realm.
    RealmBandwidth,
    /// Beyond those of all allocations together.
    TotalBandwidth,
    /// A request beyond the refusals per second of its prefix ([`crate::server::RefusalLimit`]).
    RefusalLimit,
    /// A request too short to be granted, whose 401 would be more than four times as long, beyond a fixed rate.
    RefusalRatio,
    /// A request about an allocation whose 5-tuple was refused for the same cause too often of late.
    RefusalRepeated,
    /// A Send indication on an allocation that relays TCP (RFC 6062).
    TcpAllocation,
    /// A mobile allocation whose client is disconnected and has not come back yet (RFC 8016).
    ClientAway,
    /// From a client whose allocation is on its way from another worker (RFC 8016).
    Moving,
    /// An Allocate sent again while its relay sockets are being opened, or a Connect while its connection is.
    OpenPending,
    /// An Allocate while it is not known yet whether a limit of several servers has room. Its client repeats it.
    QuotaPending,
    /// A request sent again while the credential store is asked.
    LookupPending,
    /// A request for which the credential store would have to be asked, while as many wait as may: of its address, or of all.
    LookupLimit,
    /// A request that the credential store has not answered in time, or could not.
    LookupOver,
    /// From a relay socket, or about a connection, whose allocation is gone.
    StaleRelay,
    /// An ICMP error of a type that is not passed on (RFC 8656 section 11.5).
    IcmpType,
}

impl DropReason {
    /// Whether a request that another time would be answered is dropped for this: operators ask why. Of repeated refusals the refusal itself is
    /// told, and requests too short to be granted are no client's.
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
