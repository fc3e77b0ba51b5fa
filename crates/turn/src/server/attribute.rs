//! Attribute types (RFC 8489 section 18.3, RFC 8656 section 18, RFC 6062 section 6.2, RFC 5780 section 7, RFC 7635
//! section 6, RFC 8016 section 3.3).

pub(super) const MAPPED_ADDRESS: u16 = 0x0001;
/// RFC 5780's three are known in Binding requests only, and only where it is configured; a CHANGE-REQUEST that asks for no change is
/// as if absent everywhere.
pub(super) const CHANGE_REQUEST: u16 = 0x0003;
pub(super) const USERNAME: u16 = 0x0006;
pub(super) const MESSAGE_INTEGRITY: u16 = 0x0008;
pub(super) const ERROR_CODE: u16 = 0x0009;
pub(super) const UNKNOWN_ATTRIBUTES: u16 = 0x000A;
pub(super) const CHANNEL_NUMBER: u16 = 0x000C;
pub(super) const LIFETIME: u16 = 0x000D;
pub(super) const XOR_PEER_ADDRESS: u16 = 0x0012;
pub(super) const DATA: u16 = 0x0013;
pub(super) const REALM: u16 = 0x0014;
pub(super) const NONCE: u16 = 0x0015;
pub(super) const XOR_RELAYED_ADDRESS: u16 = 0x0016;
pub(super) const REQUESTED_ADDRESS_FAMILY: u16 = 0x0017;
pub(super) const EVEN_PORT: u16 = 0x0018;
pub(super) const REQUESTED_TRANSPORT: u16 = 0x0019;
pub(super) const DONT_FRAGMENT: u16 = 0x001A;
/// RFC 7635's is known where third-party authorization is configured.
pub(super) const ACCESS_TOKEN: u16 = 0x001B;
pub(super) const MESSAGE_INTEGRITY_SHA256: u16 = 0x001C;
pub(super) const PASSWORD_ALGORITHM: u16 = 0x001D;
pub(super) const USERHASH: u16 = 0x001E;
pub(super) const XOR_MAPPED_ADDRESS: u16 = 0x0020;
pub(super) const RESERVATION_TOKEN: u16 = 0x0022;
/// RFC 8445 section 7.1: of connectivity checks, which are Binding requests.
const PRIORITY: u16 = 0x0024;
const USE_CANDIDATE: u16 = 0x0025;
pub(super) const PADDING: u16 = 0x0026;
pub(super) const RESPONSE_PORT: u16 = 0x0027;
pub(super) const CONNECTION_ID: u16 = 0x002A;
pub(super) const ADDITIONAL_ADDRESS_FAMILY: u16 = 0x8000;
pub(super) const ADDRESS_ERROR_CODE: u16 = 0x8001;
pub(super) const PASSWORD_ALGORITHMS: u16 = 0x8002;
pub(super) const ALTERNATE_DOMAIN: u16 = 0x8003;
pub(super) const ICMP: u16 = 0x8004;
pub(super) const SOFTWARE: u16 = 0x8022;
pub(super) const ALTERNATE_SERVER: u16 = 0x8023;
pub(super) const FINGERPRINT: u16 = 0x8028;
pub(super) const RESPONSE_ORIGIN: u16 = 0x802B;
pub(super) const OTHER_ADDRESS: u16 = 0x802C;
pub(super) const THIRD_PARTY_AUTHORIZATION: u16 = 0x802E;
/// draft-ietf-tram-stun-origin, which expired; coturn's users choose their realm by it.
pub(super) const ORIGIN: u16 = 0x802F;
pub(super) const MOBILITY_TICKET: u16 = 0x8030;
/// The number that ADDITIONAL-ADDRESS-FAMILY had in the drafts before RFC 8656. coturn's client asks with it.
pub(super) const DRAFT_ADDITIONAL_ADDRESS_FAMILY: u16 = 0x8032;

/// Whether ICE puts it into Binding requests. It is between the two agents of a session; a STUN server that is asked with it answers as
/// if it were not there. ICE-CONTROLLED and ICE-CONTROLLING are comprehension-optional.
pub(super) fn is_of_ice(kind: u16) -> bool {
    matches!(kind, PRIORITY | USE_CANDIDATE)
}

/// Whether the server knows the attribute, or need not (comprehension-optional, RFC 8489 section 14).
pub(super) fn is_comprehended(kind: u16) -> bool {
    kind >= 0x8000
        || matches!(
            kind,
            MAPPED_ADDRESS
                | USERNAME
                | MESSAGE_INTEGRITY
                | ERROR_CODE
                | UNKNOWN_ATTRIBUTES
                | CHANNEL_NUMBER
                | LIFETIME
                | XOR_PEER_ADDRESS
                | DATA
                | REALM
                | NONCE
                | XOR_RELAYED_ADDRESS
                | REQUESTED_ADDRESS_FAMILY
                | EVEN_PORT
                | REQUESTED_TRANSPORT
                | DONT_FRAGMENT
                | MESSAGE_INTEGRITY_SHA256
                | PASSWORD_ALGORITHM
                | USERHASH
                | XOR_MAPPED_ADDRESS
                | RESERVATION_TOKEN
                | CONNECTION_ID
        )
}
