//! Refusals in words: the reason, what to do about it, and which keys of the configuration decide it.

use std::{borrow::Cow, net::SocketAddr};

use strum::VariantArray as _;
use turnpike_measure::units::span;
use turnpike_turn::server::{CredentialRefusal, DropReason, PeerDenial, RequestRefusal, TokenProblem};
use turnpike_wire::stun::kind;

use super::Why;

impl Why {
    /// Cause of the refusal.
    pub(crate) fn reason(self) -> String {
        match self {
            Self::Credentials(why) => credentials_reason(why),
            Self::Peer(peer, by, 0) => format!("{}: {}", peer_name(peer), peer_reason(by)),
            Self::Peer(peer, by, others) => format!(
                "{}: {}; the request's {others} other peers got no permission either",
                peer_name(peer),
                peer_reason(by)
            ),
            Self::Request(_, code, why) | Self::Unproved(_, code, why) => {
                request_reason(code, why).into_owned()
            }
            Self::Connection(_, reason) => connection_reason(reason).to_owned(),
        }
    }

    /// Remedy for the operator.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::Credentials(why) => credentials_remedy(why),
            Self::Peer(_, by, _) => peer_remedy(by),
            Self::Request(_, code, why) | Self::Unproved(_, code, why) => request_remedy(code, why),
            Self::Connection("dtls_handshake", "evicted") => {
                "Raise limits.half_open or limits.half_open_per_network, or find out who begins so many handshakes."
            }
            Self::Connection(_, reason) => connection_remedy(reason),
        }
    }

    /// Configuration keys that control it; empty if none does.
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

/// Configuration keys that control what the page counts under this kind and reason; empty if none does.
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
        ("request", "no_relay_port") => request(RequestRefusal::NoRelay),
        ("dtls", "evicted") => Why::Connection("dtls_handshake", "evicted").keys(),
        ("connection" | "tls" | "dtls", reason) => connection_keys(reason).unwrap_or_default(),
        ("packet", "allocation_bandwidth") => &["limits.bits_per_second_per_allocation"],
        ("packet", "user_bandwidth") => &["limits.bits_per_second_per_user"],
        ("packet", "realm_bandwidth") => &["limits.bits_per_second_per_realm"],
        ("packet", "total_bandwidth") => &["limits.bits_per_second"],
        ("packet", "peer_refused") => &["peers.deny", "peers.allow"],
        ("packet", reason) => {
            let drop = DropReason::VARIANTS.iter().find(|drop| <&str>::from(**drop) == reason);
            drop.map_or(&[], |drop| request(RequestRefusal::Unanswered(*drop)))
        }
        _ => &[],
    }
}

/// A permission is for an address, without a port.
pub(crate) fn peer_name(peer: SocketAddr) -> String {
    if peer.port() == 0 { peer.ip().to_string() } else { peer.to_string() }
}

pub(crate) fn peer_reason(by: PeerDenial) -> String {
    match by {
        PeerDenial::Rule(prefix) => format!("peers.deny {prefix}"),
        PeerDenial::Own => {
            "default: a service of this server's own machine, and not named in peers.allow".to_owned()
        }
        PeerDenial::Special => "default: special range, and not in peers.allow".to_owned(),
        PeerDenial::NotAllowed => "peers.allow_only: not in peers.allow".to_owned(),
    }
}

fn peer_remedy(by: PeerDenial) -> &'static str {
    match by {
        PeerDenial::Rule(_) => "Take the prefix out of peers.deny if clients shall reach this peer.",
        PeerDenial::Own => "Name its address and port in peers.allow if clients shall reach this service.",
        PeerDenial::Special => {
            "Clients name private peers when they try all candidates of a call: that is no fault. Add the prefix to peers.allow if they \
             shall reach it."
        }
        PeerDenial::NotAllowed => "Add the prefix to peers.allow if clients shall reach this peer.",
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
            TokenProblem::UnknownKey => "access token of an unknown key: no such kid in oauth.key".to_owned(),
            TokenProblem::Malformed => "access token malformed".to_owned(),
            TokenProblem::NotAuthentic => {
                "access token not authentic: another key or another oauth.server_name".to_owned()
            }
            TokenProblem::Future { ahead } => {
                format!(
                    "access token made {} in the future: set the clocks, or raise oauth.skew",
                    span(ahead)
                )
            }
        },
    }
}

fn credentials_remedy(why: CredentialRefusal) -> &'static str {
    match why {
        CredentialRefusal::NoSuchUser => {
            "No user has this name in the realm. A time-limited name is EXPIRY:ID, and needs a secret in auth.secrets or in the realm."
        }
        CredentialRefusal::Expired { .. } => {
            "Give credentials a longer life, or set the clocks of this machine and of the one that makes them."
        }
        CredentialRefusal::TooFarAhead { .. } => {
            "The time in the username counts seconds since 1970; this one is probably in milliseconds. Divide it by 1000 where the \
             credential is made."
        }
        CredentialRefusal::WrongKey => {
            "The password is another one, or the secret that made it is none of those here. A key that was stored holds for one realm and \
             one algorithm."
        }
        CredentialRefusal::WrongRealm => {
            "The client must take the realm that the 401 names. Keys that were made for another realm do not fit."
        }
        CredentialRefusal::WrongUser => {
            "The allocation is another user's: the client goes on from the same port with other credentials. It has to make a new allocation."
        }
        CredentialRefusal::Token(_) => {
            "The token has to come from the server that has the key of oauth.key, for oauth.server_name."
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
            return format!("attribute {} is not known here", kind::Name(attribute)).into();
        }
        (RequestRefusal::PeerFamily(peer), _) => {
            return format!("{}: the relayed address is not of this peer's family", peer_name(peer)).into();
        }
        (RequestRefusal::AllocationExists, _) => "the client address has an allocation already",
        (RequestRefusal::UserQuota, _) => "the user has as many allocations as each may have",
        (RequestRefusal::PrefixQuota, _) => {
            "the client's address prefix has as many allocations as each may have"
        }
        (RequestRefusal::TotalQuota, _) => {
            "there are as many allocations as there may be, in the realm or in total"
        }
        (RequestRefusal::Banned, _) => "the user or the client's address is banned",
        (RequestRefusal::Draining, _) => "the server is draining",
        (RequestRefusal::Loop, _) => "the client is behind one of this server's own relayed addresses",
        (RequestRefusal::Tunnel, _) => "the client's address is one of 6to4 or Teredo",
        (RequestRefusal::Permissions, _) => "the allocation has as many permissions as it may have",
        (RequestRefusal::Channels, _) => "the allocation has as many channels as it may have",
        (RequestRefusal::SharedPeer, _) => "the peer is another client's on a shared relay port",
        (RequestRefusal::Connections, _) => "there are as many connections to peers as there may be",
        (RequestRefusal::NoRelay, _) => {
            "no relay port or file descriptor is left, or no such port is reserved for this user"
        }
        (RequestRefusal::AddressAbsent, _) => {
            "this machine does not have the relay address of that family at the moment"
        }
        (RequestRefusal::PortsHeld, _) => "other programs hold the relay ports",
        (RequestRefusal::Store, _) => "the credential store does not answer",
        (RequestRefusal::Unanswered(bound), _) => unanswered_reason(bound),
        (RequestRefusal::Code, 300) => "the client was sent to another server",
        (RequestRefusal::Code, 400) => "the request is malformed",
        (RequestRefusal::Code, 401) => "no credential, or a wrong one",
        (RequestRefusal::Code, 403) => "forbidden",
        (RequestRefusal::Code, 405) => "mobility is switched off",
        (RequestRefusal::Code, 420) => "the request has an attribute that is not known here",
        (RequestRefusal::Code, 437) => "the client address has no allocation",
        (RequestRefusal::Code, 438) => "the nonce is too old, or was made for another address",
        (RequestRefusal::Code, 440) => "no relay address of the family that was asked for",
        (RequestRefusal::Code, 442) => "the transport that was asked for is not relayed",
        (RequestRefusal::Code, 443) => "the peer is of another family than the relayed address",
        (RequestRefusal::Code, 446) => "there is a connection to this peer already",
        (RequestRefusal::Code, 447) => "the peer did not take the connection",
        (RequestRefusal::Code, 441) => "the user is not the one of the allocation",
        (RequestRefusal::Code, 486) => "the quota of allocations is reached",
        (RequestRefusal::Code, 500) => "the server failed",
        (RequestRefusal::Code, 508) => "the server has no capacity",
        (RequestRefusal::Code, _) => "refused",
    };
    reason.into()
}

fn unanswered_reason(bound: DropReason) -> &'static str {
    match bound {
        DropReason::RefusalLimit => "no answer: its address prefix got as many refusals a second as it may",
        DropReason::QuotaPending => "no answer yet: the fleet's store is asked whether the limit has room",
        DropReason::LookupLimit => "no answer: as many requests wait for the credential store as may",
        DropReason::LookupOver => "no answer: the credential store did not tell in time",
        _ => "no answer",
    }
}

fn unanswered_remedy(bound: DropReason) -> &'static str {
    match bound {
        DropReason::RefusalLimit => {
            "Each new client needs one refusal. Raise limits.refusals_per_prefix, or take it out."
        }
        DropReason::QuotaPending => {
            "Nothing to do: the client repeats its request, and gets its answer then."
        }
        _ => "The store is slow: the log and the store's metrics tell more.",
    }
}

fn request_remedy(code: u16, why: RequestRefusal) -> &'static str {
    match (why, code) {
        (RequestRefusal::Unanswered(bound), _) => unanswered_remedy(bound),
        (RequestRefusal::UserQuota, _) => {
            "Raise limits.allocations_per_user, or that of the realm; or find out why the client makes so many."
        }
        (RequestRefusal::PrefixQuota, _) => {
            "Many clients behind one address: raise limits.allocations_per_prefix."
        }
        (RequestRefusal::TotalQuota, _) => {
            "Raise limits.allocations, or that of the realm, or add a server ([[alternate]])."
        }
        (RequestRefusal::Banned, _) => "GET /v1/bans of the admin interface says why, and DELETE ends it.",
        (RequestRefusal::Draining, _) => {
            "New clients have to go to another server; [[alternate]] tells them which."
        }
        (RequestRefusal::PeerFamily(_), _) => {
            "Mostly nothing to do: clients try all candidates of a call. For such peers a client needs an allocation of their family, and \
             relay.addresses an address of it."
        }
        (RequestRefusal::Loop, _) => "Clients must not reach this server through itself.",
        (RequestRefusal::Tunnel, _) => {
            "A tunnel may send relayed packets back (RFC 8656 section 21.4). The client has to use IPv4."
        }
        (RequestRefusal::Permissions, _) => "Raise limits.permissions.",
        (RequestRefusal::Channels, _) => "Raise limits.channels.",
        (RequestRefusal::SharedPeer, _) => {
            "A new allocation may be on another port. Raise relay.shared_ports, or have no ports shared."
        }
        (RequestRefusal::Connections, _) => {
            "Raise limits.peer_connections, limits.peer_connections_per_user or limits.peer_connections_per_allocation."
        }
        (RequestRefusal::NoRelay, _) => {
            "Widen relay.ports, add an address to relay.addresses, or raise the limit of open files."
        }
        (RequestRefusal::AddressAbsent, _) => {
            "GET /v1/listeners of the admin interface has the relay addresses: wait for the address, or name another in relay.addresses."
        }
        (RequestRefusal::PortsHeld, _) => {
            "`ss -lunp` shows which programs have them: choose other ports for relay.ports, also outside of net.ipv4.ip_local_port_range."
        }
        (RequestRefusal::Store, _) => {
            "The log says what is wrong with the store. Users who were looked up before get in all the same."
        }
        (RequestRefusal::AllocationExists, _) => {
            "A client address has one allocation: the client has to delete it (Refresh with LIFETIME 0) or to use another local port. \
             Mostly the client was restarted; the old allocation ends by itself within its lifetime."
        }
        (RequestRefusal::BadRequest(_) | RequestRefusal::UnknownAttribute(_), _) => {
            "The client builds a wrong request: tell its developer which attribute is at fault."
        }
        (RequestRefusal::Code, 300) => {
            "Nothing to do if the client follows: it has to connect to the ALTERNATE-SERVER of the answer."
        }
        (RequestRefusal::Code, 438) => {
            "Nothing to do if it happens now and then: the client repeats the request with the new nonce. If it repeats at once and again, \
             something between client and server changes the client's address."
        }
        (RequestRefusal::Code, 437) => {
            "After a restart, or when its address has changed, a client has to make a new allocation. If this goes on, something between \
             client and server changes its port."
        }
        (RequestRefusal::Code, 440) => "Add an address of that family to relay.addresses.",
        (RequestRefusal::Code, 442) => "Relayed TCP needs relay.tcp, and a client that comes by TCP or TLS.",
        (RequestRefusal::Code, 405) => "relay.mobility switches it on.",
        (RequestRefusal::Code, 447) => "Look whether the peer listens, and whether a firewall is in between.",
        _ => "The fault is in the client.",
    }
}

/// `None` for an error code that is not known here.
fn request_keys(code: u16, why: RequestRefusal) -> Option<&'static [&'static str]> {
    Some(match why {
        RequestRefusal::UserQuota => &["limits.allocations_per_user"],
        RequestRefusal::PrefixQuota => &["limits.allocations_per_prefix"],
        RequestRefusal::TotalQuota => &["limits.allocations"],
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
            486 => &["limits.allocations_per_user", "limits.allocations_per_prefix"],
            508 => &["limits.allocations", "relay.ports", "relay.addresses"],
            300 | 400 | 401 | 403 | 420 | 437 | 441 | 443 | 446 | 447 | 500 => &[],
            _ => return None,
        },
    })
}

pub(crate) fn connection_reason(reason: &'static str) -> &'static str {
    match reason {
        "not_stun" => "what came was neither STUN nor ChannelData",
        "length" => "a STUN message with an impossible length",
        "too_long" => "a message that is too long",
        "no_message" | "timeout" => "no complete message came in time",
        "handshake" | "other" => "the handshake failed",
        "tls" => "the TLS records after the handshake were wrong",
        "no_certificate" => "a TLS client, and no certificate is configured",
        "plain_refused" => "a client without TLS, where TLS is needed",
        "plain_stun" => "a STUN request without TLS, where TLS is needed",
        "proxy_header" => "a proxy that sent no PROXY header, or a broken one",
        "untrusted_proxy" => "a PROXY header from an address that is not in server.proxy_protocol_from",
        "duplicate" => "a PROXY header with the addresses of another connection, which is still open",
        "replies_unread" => "the client does not read its replies",
        "evicted" => "it had no allocation and made room for a newcomer",
        "limit_address" => "it had no allocation and made room for a newcomer from its address",
        "closed" => "the client closed the connection in the middle of the handshake",
        "garbage" => "what came is no TLS",
        "incompatible" => "no protocol version, cipher suite or signature in common",
        "version" => "no protocol version in common",
        "key_share" => "no key share in common",
        "alpn" => "ALPN with foreign protocols only",
        "alert" => "the client gave up the handshake",
        "misbehaved" => "the client broke the protocol",
        "busy" => "more handshakes began than a worker does at a time; the client tries again",
        other => other,
    }
}

fn connection_remedy(reason: &'static str) -> &'static str {
    match reason {
        "alert" | "closed" => {
            "Mostly the client does not trust the certificate, or asks for a name that is not in it, or the chain is not whole: turnpike probe \
             turns:NAME tells which."
        }
        "incompatible" | "version" | "key_share" => {
            "The client is too old, or its settings are too narrow. DTLS needs an ECDSA certificate."
        }
        "no_certificate" => "Name tls.cert and tls.key.",
        "plain_refused" => "The client needs turns: in its URI, or tls.only has to be off.",
        "plain_stun" => {
            "The client needs turns: in its URI. GStreamer and Janus ask without TLS in spite of turns: give them turn: with a port of \
             server.listen, or set tls.only = false."
        }
        "untrusted_proxy" => {
            "If this is a load balancer of yours, add its address to server.proxy_protocol_from."
        }
        "proxy_header" => "Have the proxy send PROXY headers, or take it out of server.proxy_protocol_from.",
        "duplicate" => {
            "Two clients behind the proxies have the same address and port: the proxies must send the clients' public addresses."
        }
        "busy" => {
            "Raise limits.half_open or limits.half_open_per_network, or find out who begins so many handshakes."
        }
        "evicted" => "Raise limits.idle_connections, or find out who keeps so many open.",
        "limit_address" => "Many clients behind one address: raise limits.idle_connections_per_address.",
        "not_stun" | "garbage" | "length" | "too_long" => {
            "Some other protocol, or a scan: nothing to do, unless a client of yours is meant."
        }
        "no_message" | "timeout" => {
            "A port scan, or a way on which large packets are lost: a handshake needs some of full size."
        }
        _ => "The fault is in the client.",
    }
}

/// Reasons that point to a mistake of the operator's, and to hardly anything a stranger does.
pub(crate) fn is_misconfiguration(reason: &str) -> bool {
    matches!(reason, "plain_stun" | "untrusted_proxy")
}

/// `None` for a reason that is not known here.
fn connection_keys(reason: &str) -> Option<&'static [&'static str]> {
    Some(match reason {
        "no_certificate" => &["tls.cert", "tls.key"],
        "plain_refused" | "plain_stun" => &["tls.only"],
        "proxy_header" | "untrusted_proxy" | "duplicate" => &["server.proxy_protocol_from"],
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
    fn each_reason_has_words_of_its_own() {
        let closes = CloseReason::VARIANTS.iter().map(<&'static str>::from);
        let handshakes = HandshakeFailure::VARIANTS.iter().map(<&'static str>::from);
        let dtls = DtlsFailure::VARIANTS.iter().map(<&'static str>::from);
        // Reasons that turn no client away.
        let none = ["client", "broken", "idle", "data_connection", "handed_over", "shutdown"];
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

    /// Kinds and reasons that the page shows, besides those of requests.
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
    fn counts_lead_to_the_keys_that_single_refusals_lead_to() {
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
        // Answers are counted by their code alone, not by the limit that caused them.
        for (code, causes) in [
            (486, [RequestRefusal::UserQuota, RequestRefusal::PrefixQuota]),
            (508, [RequestRefusal::TotalQuota, RequestRefusal::NoRelay]),
        ] {
            let keys = keys_of_count("answer", &code.to_string());
            for key in causes.iter().flat_map(|cause| Why::Request(Method::Allocate, code, *cause).keys()) {
                assert!(keys.contains(key), "{code} {key}");
            }
        }
        // Every limit has a key.
        for (kind, reason) in counted().filter(|(kind, _)| *kind == "limit") {
            assert!(!keys_of_count(kind, reason).is_empty(), "{kind} {reason}");
        }
    }

    #[test]
    fn each_key_that_decides_a_refusal_is_one_of_the_configuration() {
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
                assert!(known.contains(*key), "{key} of {kind} {reason} is none of {known:?}");
            }
        }
        for why in all.chain([Why::Connection("dtls_handshake", "evicted")]) {
            assert!(!why.keys().is_empty(), "{why:?}");
            for key in why.keys() {
                assert!(known.contains(*key), "{key} of {why:?} is none of {known:?}");
            }
        }
    }
}
