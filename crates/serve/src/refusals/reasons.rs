//! Reason, remedy and configuration keys to show for each refusal.

use std::{borrow::Cow, net::SocketAddr};

use strum::VariantArray as _;
use turnpike_measure::units::span;
use turnpike_turn::server::{CredentialRefusal, DropReason, PeerDenial, RequestRefusal, TokenProblem};
use turnpike_wire::stun::kind;

use super::Why;

impl Why {
    pub(crate) fn reason(self) -> String {
        match self {
            Self::Credentials(why) => credentials_reason(why),
            Self::Peer(peer, by, 0) => format!("{}: {}", peer_name(peer), peer_reason(by)),
            Self::Peer(peer, by, others) => format!(
                "{}: {}; the request's other peers ({others}) get no permission either",
                peer_name(peer),
                peer_reason(by)
            ),
            Self::Request(_, code, why) | Self::Unproved(_, code, why) => {
                request_reason(code, why).into_owned()
            }
            Self::Connection(_, reason) => connection_reason(reason).to_owned(),
        }
    }

    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::Credentials(why) => credentials_remedy(why),
            Self::Peer(_, by, _) => peer_remedy(by),
            Self::Request(_, code, why) | Self::Unproved(_, code, why) => request_remedy(code, why),
            Self::Connection("dtls_handshake", "evicted") => {
                "Raise limits.half_open or limits.half_open_per_network, or find the source of so many handshakes."
            }
            Self::Connection(_, reason) => connection_remedy(reason),
        }
    }

    pub(crate) fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Credentials(why) => credentials_keys(why),
            Self::Peer(_, by, _) => peer_keys(by),
            Self::Request(_, code, why) | Self::Unproved(_, code, why) => {
                request_keys(code, why).unwrap_or_default()
            }
            Self::Connection("dtls_handshake", "evicted") => {
                &["limits.half_open", "limits.half_open_per_network"]
            }
            Self::Connection(_, reason) => connection_keys(reason).unwrap_or_default(),
        }
    }
}

pub(crate) fn keys_of_count(kind: &str, reason: &str) -> &'static [&'static str] {
    let request = |why| request_keys(486, why).unwrap_or_default();
    match (kind, reason) {
        ("answer", code) => {
            let code = code.parse().unwrap_or_default();
            request_keys(code, RequestRefusal::Code).unwrap_or_default()
        }
        ("credentials", "no_such_user") => credentials_keys(CredentialRefusal::NoSuchUser),
        ("credentials", "wrong_key") => credentials_keys(CredentialRefusal::WrongKey),
        ("credentials", "wrong_realm") => credentials_keys(CredentialRefusal::WrongRealm),
        ("credentials", "access_token") => &["oauth.key"],
        ("limit", "user") => request(RequestRefusal::UserQuota),
        ("limit", "total") => request(RequestRefusal::TotalQuota),
        ("limit", "prefix") => request(RequestRefusal::PrefixQuota),
        ("limit", "volume") => request(RequestRefusal::VolumeQuota),
        ("limit", "permissions") => request(RequestRefusal::Permissions),
        ("limit", "channels") => request(RequestRefusal::Channels),
        ("limit", "shared_peer") => request(RequestRefusal::SharedPeer),
        ("limit", "connections") => &["limits.peer_connections_per_allocation"],
        ("limit", "connections_total") | ("peer_connection", "limit") => &["limits.peer_connections"],
        ("limit", "connections_user") => &["limits.peer_connections_per_user"],
        ("peer", "rule") => &["peers.deny"],
        ("peer", "own" | "special") => peer_keys(PeerDenial::Special),
        ("peer", "not_allowed") => peer_keys(PeerDenial::NotAllowed),
        ("peer_connection", "peer_refused") => &["peers.deny", "peers.allow"],
        ("request", "client_network") => request(RequestRefusal::ClientNetwork),
        ("request", "no_relay_port") => request(RequestRefusal::NoRelay),
        ("dtls", "evicted") => Why::Connection("dtls_handshake", "evicted").keys(),
        ("connection" | "tls" | "dtls", reason) => connection_keys(reason).unwrap_or_default(),
        ("packet", "allocation_bandwidth") => &["limits.bits_per_second_per_allocation"],
        ("packet", "user_bandwidth") => &["limits.bits_per_second_per_user", "usage.quota"],
        ("packet", "realm_bandwidth") => &["limits.bits_per_second_per_realm"],
        ("packet", "total_bandwidth") => &["limits.bits_per_second"],
        ("packet", "client_refused") => &["clients.allow", "clients.deny"],
        ("packet", "peer_refused") => &["peers.deny", "peers.allow"],
        ("packet", reason) => {
            let drop = DropReason::VARIANTS.iter().find(|drop| <&str>::from(**drop) == reason);
            drop.map_or(&[], |drop| request(RequestRefusal::Unanswered(*drop)))
        }
        _ => &[],
    }
}

/// Port 0 stands for a permission, which has no port, and is left out.
pub(crate) fn peer_name(peer: SocketAddr) -> String {
    if peer.port() == 0 { peer.ip().to_string() } else { peer.to_string() }
}

pub(crate) fn peer_reason(by: PeerDenial) -> String {
    match by {
        PeerDenial::Rule(prefix) => format!("peers.deny {prefix}"),
        PeerDenial::Own => "default: a service on this server's machine, not in peers.allow".to_owned(),
        PeerDenial::Special => "default: special range, not in peers.allow".to_owned(),
        PeerDenial::NotAllowed => "peers.allow_only: not in peers.allow".to_owned(),
    }
}

fn peer_remedy(by: PeerDenial) -> &'static str {
    match by {
        PeerDenial::Rule(_) => "Remove the prefix from peers.deny if clients should reach this peer.",
        PeerDenial::Own => "Add its address and port to peers.allow if clients should reach this service.",
        PeerDenial::Special => {
            "Normal: clients try all candidates of a call, private ones included. Add the prefix to peers.allow if they \
             should reach it."
        }
        PeerDenial::NotAllowed => "Add the prefix to peers.allow if clients should reach this peer.",
    }
}

fn peer_keys(by: PeerDenial) -> &'static [&'static str] {
    match by {
        PeerDenial::Rule(_) => &["peers.deny"],
        PeerDenial::Own | PeerDenial::Special => &["peers.allow"],
        PeerDenial::NotAllowed => &["peers.allow", "peers.allow_only"],
    }
}

pub(crate) fn credentials_reason(why: CredentialRefusal) -> String {
    match why {
        CredentialRefusal::NoSuchUser => "no such user".to_owned(),
        CredentialRefusal::Expired { ago } => format!("expired {} ago", span(ago)),
        CredentialRefusal::TooFarAhead { ahead } => {
            format!("expires in {}: more than ten years ahead", span(ahead))
        }
        CredentialRefusal::WrongKey => "wrong key".to_owned(),
        CredentialRefusal::WrongRealm => "wrong realm".to_owned(),
        CredentialRefusal::WrongUser => "wrong user".to_owned(),
        CredentialRefusal::Token(problem) => match problem {
            TokenProblem::UnknownKey => {
                "access token with an unknown key: no such kid in oauth.key".to_owned()
            }
            TokenProblem::Malformed => "access token malformed".to_owned(),
            TokenProblem::NotAuthentic => {
                "access token not authentic: made with a different key or oauth.server_name".to_owned()
            }
            TokenProblem::Future { ahead } => {
                format!(
                    "access token issued {} in the future: set the clocks, or raise oauth.skew",
                    span(ahead)
                )
            }
        },
    }
}

fn credentials_remedy(why: CredentialRefusal) -> &'static str {
    match why {
        CredentialRefusal::NoSuchUser => {
            "The realm has no user with this name. A time-limited name has the form EXPIRY:ID and needs a secret in auth.secrets or in the realm."
        }
        CredentialRefusal::Expired { .. } => {
            "Extend the lifetime of credentials, or correct the clocks of this machine and of the one that creates them."
        }
        CredentialRefusal::TooFarAhead { .. } => {
            "The time in the username counts seconds since 1970; this one is probably in milliseconds. Divide it by 1000 where the \
             credential is created."
        }
        CredentialRefusal::WrongKey => {
            "The password is wrong, or was created with a secret that this server does not have. A stored key is valid for one realm and \
             one algorithm."
        }
        CredentialRefusal::WrongRealm => {
            "The client must use the realm of the 401 response. Keys for another realm do not match."
        }
        CredentialRefusal::WrongUser => {
            "The allocation belongs to another user: the client continues from the same port with different credentials. It must create a new allocation."
        }
        CredentialRefusal::Token(_) => {
            "The token must come from the authorization server that shares the key in oauth.key, for oauth.server_name."
        }
    }
}

fn credentials_keys(why: CredentialRefusal) -> &'static [&'static str] {
    match why {
        CredentialRefusal::NoSuchUser | CredentialRefusal::WrongKey => &["auth.users", "auth.secrets"],
        CredentialRefusal::WrongRealm => &["server.realm"],
        CredentialRefusal::Token(TokenProblem::UnknownKey) => &["oauth.key"],
        CredentialRefusal::Token(TokenProblem::NotAuthentic) => &["oauth.key", "oauth.server_name"],
        CredentialRefusal::Token(TokenProblem::Future { .. }) => &["oauth.skew"],
        CredentialRefusal::Token(TokenProblem::Malformed)
        | CredentialRefusal::Expired { .. }
        | CredentialRefusal::TooFarAhead { .. }
        | CredentialRefusal::WrongUser => &[],
    }
}

pub(crate) fn request_reason(code: u16, why: RequestRefusal) -> Cow<'static, str> {
    let reason = match (why, code) {
        (RequestRefusal::BadRequest(bad), _) => return bad.to_string().into(),
        (RequestRefusal::UnknownAttribute(attribute), _) => {
            return format!("attribute {} is not supported", kind::Name(attribute)).into();
        }
        (RequestRefusal::PeerFamily(peer), _) => {
            return format!(
                "{}: the relayed address is of a different family than this peer",
                peer_name(peer)
            )
            .into();
        }
        (RequestRefusal::AllocationExists, _) => "the client address already has an allocation",
        (RequestRefusal::UserQuota, _) => "the user has reached the allocation limit",
        (RequestRefusal::PrefixQuota, _) => "the client's address prefix has reached the allocation limit",
        (RequestRefusal::VolumeQuota, _) => "the user, its API key or its realm has used up its volume quota",
        (RequestRefusal::TotalQuota, _) => {
            "the allocation limit of the realm or of the server has been reached"
        }
        (RequestRefusal::Banned, _) => "the user or the client's address is banned",
        (RequestRefusal::ClientNetwork, _) => {
            "the client's country or autonomous system is refused by clients.allow or clients.deny"
        }
        (RequestRefusal::Draining, _) => "the server is draining",
        (RequestRefusal::Loop, _) => "the client is behind one of this server's own relayed addresses",
        (RequestRefusal::Tunnel, _) => "the client's address is a 6to4 or Teredo address",
        (RequestRefusal::StunOnly, _) => "the server does not relay",
        (RequestRefusal::Permissions, _) => "the allocation has reached the permission limit",
        (RequestRefusal::Channels, _) => "the allocation has reached the channel limit",
        (RequestRefusal::SharedPeer, _) => "another client uses this peer on the shared relay port",
        (RequestRefusal::Connections, _) => "the limit on connections to peers has been reached",
        (RequestRefusal::NoRelay, _) => {
            "no free relay port or file descriptor is left, or the user has not reserved this port"
        }
        (RequestRefusal::AddressAbsent, _) => {
            "this machine currently does not have the relay address of that family"
        }
        (RequestRefusal::PortsHeld, _) => "other programs are using the relay ports",
        (RequestRefusal::Store, _) => "the credential store does not answer",
        (RequestRefusal::Unanswered(bound), _) => unanswered_reason(bound),
        (RequestRefusal::Code, 300) => "the client was redirected to another server",
        (RequestRefusal::Code, 400) => "the request is malformed",
        (RequestRefusal::Code, 401) => "the credential is missing or wrong",
        (RequestRefusal::Code, 403) => "forbidden",
        (RequestRefusal::Code, 405) => "mobility is disabled",
        (RequestRefusal::Code, 420) => "the request contains an unsupported attribute",
        (RequestRefusal::Code, 437) => "the client address has no allocation",
        (RequestRefusal::Code, 438) => "the nonce is too old, or was issued to another address",
        (RequestRefusal::Code, 440) => "no relay address of the requested family",
        (RequestRefusal::Code, 442) => "the requested transport is not relayed",
        (RequestRefusal::Code, 443) => "the peer is of a different family than the relayed address",
        (RequestRefusal::Code, 446) => "a connection to this peer already exists",
        (RequestRefusal::Code, 447) => "the peer did not accept the connection",
        (RequestRefusal::Code, 441) => "the allocation belongs to another user",
        (RequestRefusal::Code, 486) => "the allocation quota has been reached",
        (RequestRefusal::Code, 500) => "internal server error",
        (RequestRefusal::Code, 508) => "the server has no capacity left",
        (RequestRefusal::Code, _) => "refused",
    };
    reason.into()
}

fn unanswered_reason(bound: DropReason) -> &'static str {
    match bound {
        DropReason::RefusalLimit => {
            "no answer: the address prefix has reached its limit of refusals per second"
        }
        DropReason::QuotaPending => "no answer yet: waiting for the fleet store to decide on the limit",
        DropReason::LookupLimit => "no answer: too many requests are waiting for the credential store",
        DropReason::LookupOver => "no answer: the credential store did not answer in time",
        _ => "no answer",
    }
}

fn unanswered_remedy(bound: DropReason) -> &'static str {
    match bound {
        DropReason::RefusalLimit => {
            "Each new client needs one refusal. Raise limits.refusals_per_prefix, or remove it."
        }
        DropReason::QuotaPending => {
            "Nothing to do: the client retransmits its request and then gets an answer."
        }
        _ => "The store is slow: see the log and the store's metrics.",
    }
}

fn request_remedy(code: u16, why: RequestRefusal) -> &'static str {
    match (why, code) {
        (RequestRefusal::Unanswered(bound), _) => unanswered_remedy(bound),
        (RequestRefusal::UserQuota, _) => {
            "Raise limits.allocations_per_user or the realm's limit, or find out why the client creates so many allocations."
        }
        (RequestRefusal::PrefixQuota, _) => {
            "Probably many clients behind one address: raise limits.allocations_per_prefix."
        }
        (RequestRefusal::VolumeQuota, _) => {
            "`turnpike usage` shows the traffic. Raise the quota in usage.quota, or wait for the next day or month (UTC)."
        }
        (RequestRefusal::TotalQuota, _) => {
            "Raise limits.allocations or the realm's limit, or add a server ([[alternate]])."
        }
        (RequestRefusal::Banned, _) => {
            "GET /v1/bans of the admin interface shows the reason; DELETE lifts the ban."
        }
        (RequestRefusal::ClientNetwork, _) => {
            "If the client should be served, change the rule, or put the client's prefix into clients.allow and remove the rule that denies it. \
             An unknown country matches no rule: see geoip.files."
        }
        (RequestRefusal::Draining, _) => "New clients must use another server; [[alternate]] redirects them.",
        (RequestRefusal::PeerFamily(_), _) => {
            "Usually nothing to do: clients try all candidates of a call. To reach such peers a client needs an allocation of their family, and \
             relay.addresses must contain an address of that family."
        }
        (RequestRefusal::Loop, _) => "Clients must not reach this server through itself.",
        (RequestRefusal::Tunnel, _) => {
            "A tunnel may send relayed packets back (RFC 8656 section 21.4). The client must use IPv4."
        }
        (RequestRefusal::StunOnly, _) => "Use a stun: URI for this server, or set server.stun_only = false.",
        (RequestRefusal::Permissions, _) => "Raise limits.permissions.",
        (RequestRefusal::Channels, _) => "Raise limits.channels.",
        (RequestRefusal::SharedPeer, _) => {
            "A new allocation may get another port. Raise relay.shared_ports, or disable sharing."
        }
        (RequestRefusal::Connections, _) => {
            "Raise limits.peer_connections, limits.peer_connections_per_user or limits.peer_connections_per_allocation."
        }
        (RequestRefusal::NoRelay, _) => {
            "Widen relay.ports, add an address to relay.addresses, or raise the open file limit."
        }
        (RequestRefusal::AddressAbsent, _) => {
            "GET /v1/listeners of the admin interface lists the relay addresses: wait for the address, or set another in relay.addresses."
        }
        (RequestRefusal::PortsHeld, _) => {
            "`ss -lunp` shows the programs: choose other ports for relay.ports, outside net.ipv4.ip_local_port_range."
        }
        (RequestRefusal::Store, _) => {
            "See the log for the store's error. Cached users can still authenticate."
        }
        (RequestRefusal::AllocationExists, _) => {
            "A client address can have one allocation: the client must delete it (Refresh with LIFETIME 0) or use another local port. \
             Usually the client was restarted; the old allocation expires on its own."
        }
        (RequestRefusal::BadRequest(_) | RequestRefusal::UnknownAttribute(_), _) => {
            "The client sends an invalid request: report the attribute to its developer."
        }
        (RequestRefusal::Code, 300) => {
            "Nothing to do if the client follows: it must connect to the ALTERNATE-SERVER in the response."
        }
        (RequestRefusal::Code, 438) => {
            "Normal now and then: the client repeats the request with the new nonce. If requests keep failing, \
             something between client and server changes the client's address."
        }
        (RequestRefusal::Code, 437) => {
            "After a restart or an address change, the client must create a new allocation. If this continues, something between \
             client and server changes its port."
        }
        (RequestRefusal::Code, 440) => "Add an address of that family to relay.addresses.",
        (RequestRefusal::Code, 442) => {
            "Relayed TCP needs relay.tcp and a client that is connected over TCP or TLS."
        }
        (RequestRefusal::Code, 405) => "Enable it with relay.mobility.",
        (RequestRefusal::Code, 447) => "Check that the peer listens and that no firewall blocks it.",
        _ => "The client is at fault.",
    }
}

fn request_keys(code: u16, why: RequestRefusal) -> Option<&'static [&'static str]> {
    Some(match why {
        RequestRefusal::UserQuota => &["limits.allocations_per_user"],
        RequestRefusal::PrefixQuota => &["limits.allocations_per_prefix"],
        RequestRefusal::TotalQuota => &["limits.allocations"],
        RequestRefusal::VolumeQuota => &["usage.quota"],
        RequestRefusal::ClientNetwork => &["clients.allow", "clients.deny", "geoip.files"],
        RequestRefusal::StunOnly => &["server.stun_only"],
        RequestRefusal::Permissions => &["limits.permissions"],
        RequestRefusal::Channels => &["limits.channels"],
        RequestRefusal::SharedPeer => &["relay.shared_ports"],
        RequestRefusal::PeerFamily(_) => &["relay.addresses"],
        RequestRefusal::Connections => &[
            "limits.peer_connections",
            "limits.peer_connections_per_user",
            "limits.peer_connections_per_allocation",
        ],
        RequestRefusal::NoRelay => &["relay.ports", "relay.addresses"],
        RequestRefusal::AddressAbsent => &["relay.addresses"],
        RequestRefusal::PortsHeld => &["relay.ports"],
        RequestRefusal::Unanswered(DropReason::RefusalLimit) => &["limits.refusals_per_prefix"],
        RequestRefusal::Unanswered(DropReason::QuotaPending) => {
            &["limits.allocations_per_user", "fleet.allocations"]
        }
        RequestRefusal::Unanswered(DropReason::LookupLimit | DropReason::LookupOver) => {
            &["store.unavailable"]
        }
        RequestRefusal::Unanswered(_) => &[],
        RequestRefusal::BadRequest(_)
        | RequestRefusal::UnknownAttribute(_)
        | RequestRefusal::AllocationExists
        | RequestRefusal::Banned
        | RequestRefusal::Draining
        | RequestRefusal::Loop
        | RequestRefusal::Tunnel
        | RequestRefusal::Store => &[],
        RequestRefusal::Code => match code {
            405 => &["relay.mobility"],
            438 => &["auth.nonce_lifetime"],
            440 => &["relay.addresses"],
            442 => &["relay.tcp"],
            486 => &["limits.allocations_per_user", "limits.allocations_per_prefix", "usage.quota"],
            508 => &["limits.allocations", "relay.ports", "relay.addresses"],
            300 | 400 | 401 | 403 | 420 | 437 | 441 | 443 | 446 | 447 | 500 => &[],
            _ => return None,
        },
    })
}

pub(crate) fn connection_reason(reason: &'static str) -> &'static str {
    match reason {
        "not_stun" => "received data is neither STUN nor ChannelData",
        "length" => "a STUN message with an invalid length",
        "too_long" => "a message that is too long",
        "no_message" | "timeout" => "no complete message arrived in time",
        "handshake" | "other" => "the handshake failed",
        "tls" => "invalid TLS records after the handshake",
        "no_certificate" => "a TLS client, but no certificate is configured",
        "plain_refused" => "a client without TLS on a listener that requires TLS",
        "plain_stun" => "a STUN request without TLS on a listener that requires TLS",
        "proxy_header" => "a proxy that sent no PROXY header or an invalid one",
        "untrusted_proxy" => "a PROXY header from an address not in server.proxy_protocol_from",
        "client_refused" => "the client's address is refused by clients.allow or clients.deny",
        "duplicate" => "a PROXY header with the addresses of another open connection",
        "replies_unread" => "the client does not read its replies",
        "evicted" => "closed to make room for a new connection (no allocation)",
        "limit_address" => "closed to make room for a new connection from its address (no allocation)",
        "closed" => "the client closed the connection during the handshake",
        "garbage" => "received data is not TLS",
        "incompatible" => "no protocol version, cipher suite or signature in common",
        "version" => "no protocol version in common",
        "key_share" => "no key share in common",
        "alpn" => "ALPN without a supported protocol",
        "alert" => "the client aborted the handshake",
        "client_certificate" => "no client certificate, or not one of tls.client_ca",
        "misbehaved" => "the client violated the protocol",
        "busy" => "too many handshakes in progress on the worker; the client retries",
        other => other,
    }
}

fn connection_remedy(reason: &'static str) -> &'static str {
    match reason {
        "alert" | "closed" => {
            "Usually the client does not trust the certificate, it requests a name that is not in the certificate, or the chain is incomplete: turnpike probe \
             turns:NAME shows which."
        }
        "incompatible" | "version" | "key_share" => {
            "The client is too old or too strictly configured. DTLS needs an ECDSA certificate."
        }
        "no_certificate" => "Set tls.cert and tls.key, or tls.acme.",
        "client_certificate" => "Give the client a certificate from tls.client_ca that is valid now.",
        "plain_refused" => "Use turns: in the client's URI, or set tls.only = false.",
        "plain_stun" => {
            "Use turns: in the client's URI. GStreamer and Janus skip TLS despite turns: give them turn: with a port of \
             server.listen, or set tls.only = false."
        }
        "untrusted_proxy" => "If this is your load balancer, add its address to server.proxy_protocol_from.",
        "client_refused" => "Nothing to do, unless it is one of your clients.",
        "proxy_header" => {
            "Configure the proxy to send PROXY headers, or remove it from server.proxy_protocol_from."
        }
        "duplicate" => {
            "Two clients behind proxies have the same address and port: the proxies must send the clients' public addresses."
        }
        "busy" => {
            "Raise limits.half_open or limits.half_open_per_network, or find the source of so many handshakes."
        }
        "evicted" => "Raise limits.idle_connections, or find out where the connections come from.",
        "limit_address" => {
            "Probably many clients behind one address: raise limits.idle_connections_per_address."
        }
        "not_stun" | "garbage" | "length" | "too_long" => {
            "Another protocol or a scan: nothing to do, unless it is one of your clients."
        }
        "no_message" | "timeout" => {
            "A port scan, or a network path that drops full-size packets, which a handshake needs."
        }
        _ => "The client is at fault.",
    }
}

/// Reasons that indicate a configuration error and that outsiders rarely cause.
pub(crate) fn is_misconfiguration(reason: &str) -> bool {
    matches!(reason, "plain_stun" | "untrusted_proxy")
}

fn connection_keys(reason: &str) -> Option<&'static [&'static str]> {
    Some(match reason {
        "no_certificate" => &["tls.cert", "tls.key", "tls.acme"],
        "client_certificate" => &["tls.client_ca"],
        "plain_refused" | "plain_stun" => &["tls.only"],
        "proxy_header" | "untrusted_proxy" | "duplicate" => &["server.proxy_protocol_from"],
        "client_refused" => &["clients.allow", "clients.deny"],
        "busy" => &["limits.half_open", "limits.half_open_per_network"],
        "evicted" => &["limits.idle_connections"],
        "limit_address" => &["limits.idle_connections_per_address"],
        "no_message" | "timeout" => &["limits.first_message"],
        "not_stun" | "length" | "too_long" | "handshake" | "other" | "tls" | "replies_unread" | "closed"
        | "garbage" | "incompatible" | "version" | "key_share" | "alpn" | "alert" | "misbehaved" => &[],
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use turnpike_relay::{CloseReason, DtlsFailure, HandshakeFailure};
    use turnpike_turn::server::Method;

    use super::*;

    #[test]
    fn each_reason_has_a_distinct_text() {
        let closes = CloseReason::VARIANTS.iter().map(<&'static str>::from);
        let handshakes = HandshakeFailure::VARIANTS.iter().map(<&'static str>::from);
        let dtls = DtlsFailure::VARIANTS.iter().map(<&'static str>::from);
        let none = [
            "client",
            "broken",
            "idle",
            "data_connection",
            "challenge",
            "handed_over",
            "handed_on",
            "shutdown",
        ];
        for reason in closes.chain(handshakes).chain(dtls).filter(|reason| !none.contains(reason)) {
            assert_ne!(connection_reason(reason), reason);
            assert!(Why::Connection("connection", reason).remedy().ends_with('.'));
            assert!(connection_keys(reason).is_some(), "{reason}");
        }
        let mut reasons = std::collections::HashSet::new();
        for (code, _) in turnpike_turn::server::stats::ERROR_CODES {
            let reason = request_reason(code, RequestRefusal::Code);
            assert_ne!(reason, "refused", "{code}");
            assert!(reasons.insert(reason), "{code}");
            assert!(request_keys(code, RequestRefusal::Code).is_some(), "{code}");
        }
    }

    fn counted() -> impl Iterator<Item = (&'static str, &'static str)> {
        let codes = turnpike_turn::server::stats::ERROR_CODES.iter().map(|(_, name)| ("answer", *name));
        let drops = DropReason::VARIANTS.iter().map(|drop| ("packet", <&str>::from(*drop)));
        let closed = CloseReason::VARIANTS.iter().map(|reason| ("connection", <&str>::from(*reason)));
        let tls = HandshakeFailure::VARIANTS.iter().map(|reason| ("tls", <&str>::from(*reason)));
        let dtls = DtlsFailure::VARIANTS.iter().map(|reason| ("dtls", <&str>::from(*reason)));
        let peers = PeerDenial::NAMES.iter().map(|name| ("peer", *name));
        let counters = turnpike_turn::server::Stats::default();
        let families = [("credentials_refused", "credentials"), ("limit_refusals", "limit")];
        let others: Vec<_> = counters
            .counters()
            .filter_map(|(family, label, _)| {
                let (_, kind) = families.iter().find(|(known, _)| *known == family)?;
                Some((*kind, label?.1))
            })
            .collect();
        codes.chain(drops).chain(closed).chain(tls).chain(dtls).chain(peers).chain(others)
    }

    #[test]
    fn refusal_counters_and_single_refusals_name_the_same_keys() {
        for (kind, reason, keys) in [
            ("answer", "440", Why::Unproved(Method::Allocate, 440, RequestRefusal::Code).keys()),
            ("limit", "user", Why::Request(Method::Allocate, 486, RequestRefusal::UserQuota).keys()),
            ("credentials", "wrong_key", Why::Credentials(CredentialRefusal::WrongKey).keys()),
            ("connection", "evicted", Why::Connection("connection", "evicted").keys()),
            ("dtls", "evicted", Why::Connection("dtls_handshake", "evicted").keys()),
            (
                "packet",
                "refusal_limit",
                Why::Request(Method::Allocate, 401, RequestRefusal::Unanswered(DropReason::RefusalLimit))
                    .keys(),
            ),
        ] {
            assert!(!keys.is_empty(), "{kind} {reason}");
            assert_eq!(keys_of_count(kind, reason), keys, "{kind} {reason}");
        }
        // Responses are counted by error code, without the limit that caused them.
        for (code, causes) in [
            (486, &[RequestRefusal::UserQuota, RequestRefusal::PrefixQuota, RequestRefusal::VolumeQuota][..]),
            (508, &[RequestRefusal::TotalQuota, RequestRefusal::NoRelay]),
        ] {
            let keys = keys_of_count("answer", &code.to_string());
            for key in causes.iter().flat_map(|cause| Why::Request(Method::Allocate, code, *cause).keys()) {
                assert!(keys.contains(key), "{code} {key}");
            }
        }
        for (kind, reason) in counted().filter(|(kind, _)| *kind == "limit") {
            assert!(!keys_of_count(kind, reason).is_empty(), "{kind} {reason}");
        }
    }

    #[test]
    fn keys_of_refusals_exist_in_the_configuration() {
        let toml = turnpike_config::Settings::default().to_toml();
        let mut section = "";
        let mut known = std::collections::HashSet::new();
        for line in toml.lines() {
            let line = line.trim_start_matches("# ");
            if let Some(name) = line.strip_prefix('[').and_then(|line| line.split(']').next()) {
                section = name;
            } else if let Some((key, _)) = line.split_once(" =") {
                known.insert(format!("{section}.{key}"));
            }
        }
        let peers = [
            PeerDenial::Rule("10.0.0.0/8".parse().expect("a prefix")),
            PeerDenial::Own,
            PeerDenial::Special,
            PeerDenial::NotAllowed,
        ];
        let peer = (std::net::Ipv4Addr::LOCALHOST, 9).into();
        let tokens =
            [TokenProblem::UnknownKey, TokenProblem::NotAuthentic, TokenProblem::Future { ahead: 1 }];
        let credentials =
            [CredentialRefusal::NoSuchUser, CredentialRefusal::WrongKey, CredentialRefusal::WrongRealm];
        let requests = [
            RequestRefusal::UserQuota,
            RequestRefusal::PrefixQuota,
            RequestRefusal::TotalQuota,
            RequestRefusal::VolumeQuota,
            RequestRefusal::Permissions,
            RequestRefusal::Channels,
            RequestRefusal::SharedPeer,
            RequestRefusal::Connections,
            RequestRefusal::NoRelay,
            RequestRefusal::AddressAbsent,
            RequestRefusal::PortsHeld,
            RequestRefusal::PeerFamily(peer),
            RequestRefusal::Unanswered(DropReason::RefusalLimit),
            RequestRefusal::Unanswered(DropReason::QuotaPending),
            RequestRefusal::Unanswered(DropReason::LookupLimit),
        ];
        let codes = [405, 438, 440, 442, 486];
        let connections =
            ["no_certificate", "plain_stun", "untrusted_proxy", "evicted", "limit_address", "timeout"];
        let all = peers.map(|by| Why::Peer(peer, by, 0)).into_iter();
        let all = all.chain(credentials.map(Why::Credentials));
        let all = all.chain(tokens.map(|token| Why::Credentials(CredentialRefusal::Token(token))));
        let all = all.chain(requests.map(|why| Why::Request(Method::Allocate, 486, why)));
        let all = all.chain(codes.map(|code| Why::Unproved(Method::Allocate, code, RequestRefusal::Code)));
        let all = all.chain(connections.map(|reason| Why::Connection("connection", reason)));
        for (kind, reason) in counted() {
            for key in keys_of_count(kind, reason) {
                assert!(known.contains(*key), "{key} of {kind} {reason} is not one of {known:?}");
            }
        }
        for why in all.chain([Why::Connection("dtls_handshake", "evicted")]) {
            assert!(!why.keys().is_empty(), "{why:?}");
            for key in why.keys() {
                assert!(known.contains(*key), "{key} of {why:?} is not one of {known:?}");
            }
        }
    }
}
