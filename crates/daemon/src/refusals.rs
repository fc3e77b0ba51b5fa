//! Why clients were refused lately, for whoever asks about one of them. Kept in memory by the control thread, which hears of refusals
//! anyway; bounded, and without secrets.
//!
//! What one client is refused for again and again is one entry with a count. Each kind of refusal has a store of its own, so that strangers
//! who knock at the door do not push out what users were told.

use std::{
    borrow::Cow,
    collections::VecDeque,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use turnpike_relay::TurnedAway;
use turnpike_turn::server::{
    Cidr, CredentialRefusal, Effect, PeerDenial, RequestRefusal, TokenProblem, request::Method,
};
use turnpike_wire::stun::kind;

/// Entries of each kind.
const MOST: usize = 1024;
/// Kinds of refusals: see [`Why::kind`].
const KINDS: usize = 5;

/// One client that was refused for one reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// For the first and the last time, Unix milliseconds.
    pub first_ms: u64,
    /// See `first_ms`.
    pub last_ms: u64,
    /// How often, as far as it was told: the rate of what is told is bounded.
    pub count: u64,
    /// Where it came from the last time.
    pub client: SocketAddr,
    /// Who it said it was; empty where it did not.
    pub user: Box<str>,
    /// The realm of a user who had proved it.
    pub realm: Option<Arc<str>>,
    /// Why.
    pub why: Why,
}

/// Why a client was refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// Its credentials.
    Credentials(CredentialRefusal),
    /// A peer of its request, and the number of peers beside it, which got no permission either.
    Peer(SocketAddr, PeerDenial, usize),
    /// A request, with the error code of the answer.
    Request(Method, u16, RequestRefusal),
    /// A request of a client that had not proved who it is. Over UDP its address may be forged.
    Unproved(Method, u16, RequestRefusal),
    /// Its connection, or its TLS or DTLS handshake: what was being done, and the reason as metrics call it.
    Connection(&'static str, &'static str),
}

/// Which refusals are wanted.
#[derive(Clone, Debug, Default)]
pub struct RefusalFilter {
    /// Of clients within this prefix.
    pub client: Option<Cidr>,
    /// With this in their username.
    pub user: Option<String>,
}

/// The refusals of this program, for those who add to them and those who look.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<[VecDeque<Refusal>; KINDS]>);

impl Refusals {
    /// Adds what an effect tells, if it is a refusal; `now_ms` is Unix time.
    pub(crate) fn hear(&self, now_ms: u64, effect: &Effect) {
        let (client, user, realm, why) = match effect {
            Effect::Refused { client, username, why, .. } => {
                (client.address, username, None, Why::Credentials(*why))
            }
            Effect::PeerRefused { client, realm, username, peer, others, by, .. } => {
                (client.address, username, Some(realm), Why::Peer(*peer, *by, *others))
            }
            Effect::RequestRefused { client, realm, username, proved: true, method, code, why, .. } => {
                (client.address, username, Some(realm), Why::Request(*method, *code, *why))
            }
            Effect::RequestRefused { client, username, method, code, why, .. } => {
                (client.address, username, None, Why::Unproved(*method, *code, *why))
            }
            _ => return,
        };
        let (user, realm) = (user.clone(), realm.cloned());
        self.add(Refusal { first_ms: now_ms, last_ms: now_ms, count: 1, client, user, realm, why });
    }

    /// Adds clients whose connection was closed, or whose handshake failed.
    pub(crate) fn turned_away(&self, now_ms: u64, turned: &TurnedAway) {
        let TurnedAway { client, stage, reason, count, .. } = *turned;
        let (realm, user) = turned.user.clone().unzip();
        self.add(Refusal {
            first_ms: now_ms,
            last_ms: now_ms,
            count,
            client,
            user: user.unwrap_or_default(),
            realm,
            why: Why::Connection(stage, reason),
        });
    }

    fn add(&self, mut refusal: Refusal) {
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = &mut kinds[refusal.why.kind()];
        if let Some(known) = kept.iter().position(|known| known.is_same(&refusal))
            && let Some(known) = kept.remove(known)
        {
            refusal.first_ms = known.first_ms;
            refusal.count += known.count;
        } else if kept.len() >= MOST {
            kept.pop_front();
        }
        kept.push_back(refusal);
    }

    /// The last ones first, and those that belong to a normal session behind all others.
    pub(crate) fn find(&self, wanted: &RefusalFilter, most: usize) -> Vec<Refusal> {
        let kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = kinds.iter().flat_map(|kept| kept.iter().rev());
        let mut found: Vec<&Refusal> = kept.filter(|refusal| wanted.admits(refusal)).collect();
        found.sort_by_key(|refusal| (refusal.why.is_ordinary(), std::cmp::Reverse(refusal.last_ms)));
        found.into_iter().take(most).cloned().collect()
    }
}

impl RefusalFilter {
    fn admits(&self, refusal: &Refusal) -> bool {
        self.client.as_ref().is_none_or(|prefix| prefix.contains(refusal.client.ip()))
            && self.user.as_ref().is_none_or(|user| refusal.user.contains(user.as_str()))
    }
}

impl Refusal {
    fn is_same(&self, other: &Self) -> bool {
        self.client.ip() == other.client.ip()
            && self.user == other.user
            && self.realm == other.realm
            && self.why.is_same(other.why)
    }
}

impl Why {
    fn kind(self) -> usize {
        match self {
            Self::Credentials(_) => 0,
            Self::Peer(..) => 1,
            Self::Request(..) if !self.is_ordinary() => 2,
            // Its address may be forged.
            Self::Connection("dtls_hello", _) => 4,
            Self::Connection(..) => 3,
            Self::Request(..) | Self::Unproved(..) => 4,
        }
    }

    /// Whether clients of a healthy service see this error: another server is to serve them, or their nonce has gone stale.
    fn is_ordinary(self) -> bool {
        matches!(self, Self::Request(_, 300 | 438, _) | Self::Unproved(_, 438, _))
    }

    /// The same but for what differs each time.
    fn is_same(self, other: Self) -> bool {
        use CredentialRefusal::{Expired, Token, TooFarAhead};
        match (self, other) {
            (Self::Credentials(TooFarAhead { .. }), Self::Credentials(TooFarAhead { .. })) => true,
            (Self::Credentials(Expired { .. }), Self::Credentials(Expired { .. })) => true,
            (
                Self::Credentials(Token(TokenProblem::Future { .. })),
                Self::Credentials(Token(TokenProblem::Future { .. })),
            ) => true,
            (Self::Peer(one, by, _), Self::Peer(other, also, _)) => (one.ip(), by) == (other.ip(), also),
            (one, other) => one == other,
        }
    }

    /// What the client asked for, in one word.
    #[must_use]
    pub fn asked(self) -> &'static str {
        match self {
            Self::Credentials(_) => "credentials",
            Self::Peer(..) => "peer",
            Self::Request(method, ..) | Self::Unproved(method, ..) => method.into(),
            Self::Connection(stage, _) => stage,
        }
    }

    /// The error code of the answer, where there was one.
    #[must_use]
    pub fn code(self) -> Option<u16> {
        match self {
            Self::Credentials(CredentialRefusal::WrongUser) => Some(441),
            Self::Credentials(_) => Some(401),
            Self::Peer(..) => Some(403),
            Self::Request(_, code, _) | Self::Unproved(_, code, _) => Some(code),
            Self::Connection(..) => None,
        }
    }

    /// What was wrong.
    #[must_use]
    pub fn reason(self) -> String {
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

    /// What to do about it.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Credentials(why) => credentials_remedy(why),
            Self::Peer(_, by, _) => peer_remedy(by),
            Self::Request(_, code, why) | Self::Unproved(_, code, why) => request_remedy(code, why),
            Self::Connection(_, reason) => connection_remedy(reason),
        }
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
                format!("access token made {ahead} s in the future: set the clocks, or raise oauth.skew")
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

pub(crate) fn request_reason(code: u16, why: RequestRefusal) -> Cow<'static, str> {
    let reason = match (why, code) {
        (RequestRefusal::BadRequest(bad), _) => return bad.to_string().into(),
        (RequestRefusal::UnknownAttribute(attribute), _) => {
            return format!("attribute {} is not known here", kind::Name(attribute)).into();
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
        (RequestRefusal::Permissions, _) => "the allocation has as many permissions as it may have",
        (RequestRefusal::Channels, _) => "the allocation has as many channels as it may have",
        (RequestRefusal::SharedPeer, _) => "the peer is another client's on a shared relay port",
        (RequestRefusal::Connections, _) => "there are as many connections to peers as there may be",
        (RequestRefusal::NoRelay, _) => {
            "no relay port or file descriptor is left, or no such port is reserved for this user"
        }
        (RequestRefusal::Store, _) => "the credential store does not answer",
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

fn request_remedy(code: u16, why: RequestRefusal) -> &'static str {
    match (why, code) {
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
        (RequestRefusal::Loop, _) => "Clients must not reach this server through itself.",
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
        "proxy_header" => "a proxy that sent no PROXY header, or a broken one",
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
        "proxy_header" => "Have the proxy send PROXY headers, or take it out of server.proxy_protocol_from.",
        "duplicate" => {
            "Two clients behind the proxies have the same address and port: the proxies must send the clients' public addresses."
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

/// A time span for people, in the largest unit of which it has two or more.
fn span(seconds: u64) -> String {
    const UNITS: [(u64, &str); 4] =
        [(365 * 86_400, "years"), (86_400, "days"), (3600, "hours"), (60, "minutes")];
    let unit = UNITS.into_iter().find(|(length, _)| seconds >= 2 * length);
    unit.map_or_else(|| format!("{seconds} s"), |(length, name)| format!("{} {name}", seconds / length))
}

#[cfg(test)]
mod tests {
    use strum::VariantArray as _;
    use turnpike_relay::{CloseReason, DtlsFailure, HandshakeFailure};
    use turnpike_turn::server::{Client, ListenerId, Transport};

    use super::*;

    fn client(address: &str) -> Client {
        let local = "192.0.2.1:3478".parse().expect("an address");
        let address = address.parse().expect("an address");
        Client { listener: ListenerId(0), address, local }
    }

    fn refused(from: &str, user: &str, why: CredentialRefusal) -> Effect {
        Effect::Refused { client: client(from), username: user.into(), why, suppressed: 0 }
    }

    fn find(refusals: &Refusals, client: Option<&str>, user: Option<&str>) -> Vec<Refusal> {
        let client = client.map(|text| text.parse().expect("a prefix"));
        refusals.find(&RefusalFilter { client, user: user.map(str::to_owned) }, 100)
    }

    #[test]
    fn what_happens_again_is_one_entry_that_counts_and_comes_first() {
        let refusals = Refusals::default();
        refusals.hear(1000, &refused("192.0.2.9:1", "alice", CredentialRefusal::Expired { ago: 1 }));
        refusals.hear(2000, &refused("192.0.2.9:2", "bob", CredentialRefusal::WrongKey));
        refusals.hear(3000, &refused("192.0.2.9:3", "alice", CredentialRefusal::Expired { ago: 2 }));
        let found = find(&refusals, None, None);
        assert_eq!(found.len(), 2);
        assert_eq!((&*found[0].user, found[0].count, found[0].client.port()), ("alice", 2, 3));
        assert_eq!(found[0].why.reason(), "expired 2 s ago");
        assert_eq!((found[0].first_ms, found[0].last_ms), (1000, 3000));
        assert_eq!((&*found[1].user, found[1].count), ("bob", 1));
    }

    #[test]
    fn a_client_is_found_by_its_address_and_a_user_by_a_part_of_the_name() {
        let refusals = Refusals::default();
        refusals.hear(1, &refused("192.0.2.9:1", "1700000000:alice", CredentialRefusal::WrongKey));
        refusals.hear(1, &refused("[2001:db8::9]:1", "bob", CredentialRefusal::WrongKey));
        for (client, user, users) in [
            (Some("192.0.2.9"), None, &["1700000000:alice"][..]),
            (Some("192.0.2.0/24"), None, &["1700000000:alice"]),
            (Some("192.0.3.0/24"), None, &[]),
            (Some("2001:db8::/32"), Some("bob"), &["bob"]),
            (Some("192.0.2.9"), Some("bob"), &[]),
            (None, Some("alice"), &["1700000000:alice"]),
        ] {
            let found = find(&refusals, client, user);
            let found: Vec<&str> = found.iter().map(|refusal| &*refusal.user).collect();
            assert_eq!(found, users, "{client:?} {user:?}");
        }
    }

    #[test]
    fn there_is_an_end_to_entries_and_strangers_push_out_no_user() {
        let refusals = Refusals::default();
        refusals.hear(1, &refused("192.0.2.9:1", "alice", CredentialRefusal::WrongKey));
        for host in 0..3 * u32::try_from(MOST).expect("few") {
            let client = (std::net::Ipv4Addr::from_bits(0x0A00_0000 + host), 1).into();
            let (stage, reason) = ("tls_handshake", "garbage");
            let turned =
                TurnedAway { client, transport: Transport::Tls, user: None, stage, reason, count: 2 };
            refusals.turned_away(u64::from(host), &turned);
        }
        assert_eq!(find(&refusals, None, Some("alice")).len(), 1);
        let all = refusals.find(&RefusalFilter::default(), usize::MAX);
        assert_eq!(all.len(), MOST + 1);
        assert_eq!(find(&refusals, Some("10.0.0.1"), None), [], "the oldest went");
    }

    #[test]
    fn a_time_span_is_told_in_its_largest_unit() {
        for (seconds, text) in
            [(0, "0 s"), (119, "119 s"), (120, "2 minutes"), (7200, "2 hours"), (95_926_150, "3 years")]
        {
            assert_eq!(span(seconds), text);
        }
    }

    #[test]
    fn refusals_of_a_healthy_service_stand_behind_the_others() {
        let refusals = Refusals::default();
        let told = |code, proved| {
            let (realm, username) = ("example.org".into(), "alice".into());
            let (client, method, why) = (client("192.0.2.9:1"), Method::Refresh, RequestRefusal::Code);
            Effect::RequestRefused { client, realm, username, proved, method, code, why, suppressed: 0 }
        };
        refusals.hear(1, &told(437, true));
        refusals.hear(2, &told(438, true));
        refusals.hear(3, &told(438, false));
        refusals.hear(4, &told(400, false));
        let codes: Vec<Option<u16>> =
            find(&refusals, None, None).iter().map(|refusal| refusal.why.code()).collect();
        assert_eq!(codes, [400, 437, 438, 438].map(Some));
        assert_eq!(find(&refusals, None, None)[0].realm, None, "nothing was proved");
    }

    #[test]
    fn each_reason_has_words_of_its_own() {
        let closes = CloseReason::VARIANTS.iter().map(<&'static str>::from);
        let handshakes = HandshakeFailure::VARIANTS.iter().map(<&'static str>::from);
        let dtls = DtlsFailure::VARIANTS.iter().map(<&'static str>::from);
        // What turns nobody away.
        let none = ["client", "broken", "idle", "data_connection", "handed_over", "shutdown"];
        for reason in closes.chain(handshakes).chain(dtls).filter(|reason| !none.contains(reason)) {
            assert_ne!(connection_reason(reason), reason);
            assert!(Why::Connection("connection", reason).remedy().ends_with('.'));
        }
        let mut reasons = std::collections::HashSet::new();
        for (code, _) in turnpike_turn::server::stats::ERROR_CODES {
            let reason = request_reason(code, RequestRefusal::Code);
            assert_ne!(reason, "refused", "{code}");
            assert!(reasons.insert(reason), "{code}");
        }
    }
}
