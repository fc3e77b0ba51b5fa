//! Why a datagram was dropped: each reason is a counter, never a log line.

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident => $name:literal,)*) => {
        /// Why a datagram was dropped. Each is a counter in [`super::Stats`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum DropReason {
            $($(#[$doc])* $variant,)*
        }

        impl DropReason {
            /// All of them, in the order of their discriminants.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The value of the `reason` label in metrics.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

reasons! {
    /// Neither STUN nor ChannelData by its first byte, or nothing at all.
    NotStun => "not_stun",
    /// Shorter than its own header says.
    Truncated => "truncated",
    /// Not well-formed: a wrong length, an attribute that reaches beyond the end, an attribute that cannot be.
    Malformed => "malformed",
    /// A request beyond [`super::request::MAX_REQUEST_LEN`], or a payload that no message to the client can hold.
    Oversized => "oversized",
    /// STUN without the magic cookie (RFC 3489), which we do not speak.
    ClassicStun => "classic_stun",
    /// A FINGERPRINT that does not match.
    Fingerprint => "fingerprint",
    /// A request for NAT discovery beyond the rate of its source network ([`super::DiscoveryLimits`]).
    DiscoverySourceLimit => "discovery_source_limit",
    /// A request for NAT discovery beyond the rate of all together.
    DiscoveryTotalLimit => "discovery_total_limit",
    /// A response, or an indication that servers do not receive.
    UnexpectedClass => "unexpected_class",
    /// A Binding indication: a keepalive, to which nothing is to be said (RFC 8489 section 6.3.2).
    Keepalive => "keepalive",
    /// A method that this server does not know (RFC 8489 section 6.3).
    UnknownMethod => "unknown_method",
    /// An indication with an unknown comprehension-required attribute (RFC 8489 section 6.3.2).
    UnknownAttribute => "unknown_attribute",
    /// A Send indication without XOR-PEER-ADDRESS or DATA (RFC 8656 section 11.2).
    MissingAttribute => "missing_attribute",
    /// A channel number outside 0x4000-0x4FFF (RFC 8656 section 12).
    ChannelNumber => "channel_number",
    /// ChannelData or a Send indication from a 5-tuple without an allocation.
    NoAllocation => "no_allocation",
    /// ChannelData on a channel that is not bound, or no longer.
    UnboundChannel => "unbound_channel",
    /// A peer without a permission (RFC 8656 section 9).
    NoPermission => "no_permission",
    /// A peer that the peer rules refuse.
    PeerRefused => "peer_refused",
    /// A peer of a family for which the allocation has no relayed transport address.
    PeerFamily => "peer_family",
    /// A Send indication on an allocation that relays TCP (RFC 6062).
    TcpAllocation => "tcp_allocation",
    /// A mobile allocation whose client is disconnected and has not come back yet (RFC 8016).
    ClientAway => "client_away",
    /// From a client whose allocation is on its way from another worker (RFC 8016).
    Moving => "moving",
    /// An Allocate sent again while its relay sockets are being opened, or a Connect while its connection is.
    OpenPending => "open_pending",
    /// A request sent again while the credential store is asked.
    LookupPending => "lookup_pending",
    /// A request for which the credential store would have to be asked, while as many wait as may: of its address, or of all.
    LookupLimit => "lookup_limit",
    /// A request that the credential store has not answered in time, or could not.
    LookupOver => "lookup_over",
    /// From a relay socket, or about a connection, whose allocation is gone.
    StaleRelay => "stale_relay",
    /// An ICMP error of a type that is not passed on (RFC 8656 section 11.5).
    IcmpType => "icmp_type",
}

#[cfg(test)]
mod tests {
    use super::DropReason;

    #[test]
    fn names_are_distinct_metric_labels_and_discriminants_index_all() {
        let mut names = std::collections::HashSet::new();
        for (index, reason) in DropReason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, index);
            assert!(names.insert(reason.name()));
            assert!(reason.name().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'));
        }
    }
}
