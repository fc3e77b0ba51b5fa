//! Clients and a server in virtual time. The clients encode and decode messages with `stun_types` and
//! `turn_types`, which serve as the oracle.
#![allow(
    dead_code,
    unused_imports,
    clippy::unwrap_used,
    reason = "benchmarks use only part of this, and clippy does not treat them as tests"
)]

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use stun_types::{
    attribute::{
        AlternateServer, Attribute as _, AttributeFromRaw, AttributeStaticType, AttributeWrite, ErrorCode,
        PasswordAlgorithm, RawAttribute, Realm, Userhash, Username, XorMappedAddress,
    },
    message::{
        IntegrityAlgorithm, LongTermKeyCredentials, Message, MessageClass, MessageIntegrityCredentials,
        MessageType, MessageWrite, MessageWriteExt, MessageWriteVec, Method, TransactionId,
    },
};
use turn_types::attribute::{ChannelNumber, Lifetime, RequestedTransport, XorPeerAddress, XorRelayedAddress};
use turnpike_turn::wire::channel_data::ChannelRange;
use turnpike_turn::{
    random::Seed,
    server::{
        AllocateAttempt, ConnectRequest, ConnectionId, CredentialCheck, CredentialQuery, Destination,
        LookupId, MoveRequest, NatDiscovery, Occasion, OpenRequest, PeerConnection, PendingMove,
        QuotaRefusal, Quotas, Realm as TenantRealm, Redirects, Restrictions, Server, Source, User, UserRef,
        Users, VolumeLimits, WorkerId,
    },
    time::Now,
    wire::{
        integrity::userhash,
        stun::{HEADER_LEN, Header, View, Writer},
    },
};

pub(crate) use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};
pub(crate) use stun_types::attribute::{
    AttributeType, Nonce, PasswordAlgorithmValue, PasswordAlgorithms, Software, UnknownAttributes,
};
pub(crate) use stun_types::message::BINDING;
pub(crate) use turn_types::{
    AddressFamily, attribute as turn,
    message::{
        ALLOCATE, CHANNEL_BIND, CONNECT, CONNECTION_ATTEMPT, CONNECTION_BIND, CREATE_PERMISSION, REFRESH,
        SEND,
    },
};
pub(crate) use turnpike_turn::{
    access_token::{AccessToken, TokenKey},
    server::{
        AllocationSlot, Alternate, AlternateWhen, Bandwidth, Client, ClosedReason, ConnectError,
        ConnectionRefusal, CredentialRefusal, DiscoveryLimits, DropReason, Effect, Family, IcmpError,
        IssuerKey, Link, ListenerId, ListenerProfile, Moved, OpenResult, OwnEndpoints, PeerRules,
        PortRequest, PrefixLengths, Rates, RelayId, RelayTransport, RequestRefusal, ServerConfig,
        ServerLimits, SharedPort, ThirdParty, Transport, Verdict,
        stats::{ConnectionEvent, MobilityEvent},
    },
    wire::integrity::{Key, KeyAlgorithm, Mac},
};

/// Short enough that the challenge to a bare header is not rate-limited.
pub(crate) const REALM: &str = "test.org";
pub(crate) const PEER: &str = "198.41.0.4:7000";
pub(crate) const PEER_V6: &str = "[2606:4700::1]:7000";

pub(crate) fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// MOBILITY-TICKET (RFC 8016), unknown to the oracle.
pub(crate) const TICKET: u16 = 0x8030;

/// Passwords are reversed names, and `old` expired 42 seconds ago. Clones share counts, as workers do.
#[derive(Clone, Default)]
pub(crate) struct TestPolicy {
    pub(crate) per_user: usize,
    pub(crate) total: usize,
    pub(crate) per_prefix: usize,
    pub(crate) held: Rc<RefCell<HashMap<String, usize>>>,
    pub(crate) prefixes: Rc<RefCell<HashMap<IpAddr, usize>>>,
    pub(crate) lookups: Cell<usize>,
    /// Always returns [`CredentialCheck::NeedsLookup`].
    pub(crate) later: bool,
    /// For [`Restrictions::is_relayed`].
    pub(crate) relayed: Vec<(SocketAddr, RelayTransport)>,
    /// Quotas are shared with other servers.
    pub(crate) shared: bool,
    /// Exhausted quotas are undecided, because this server's share may grow.
    pub(crate) undecided: bool,
    pub(crate) redirect_target: Option<Destination>,
    pub(crate) attempts: RefCell<Vec<(String, Occasion)>>,
    /// Ports of clients that return after a redirect.
    pub(crate) returned: Vec<u16>,
    pub(crate) nodes: Vec<(u16, Destination)>,
    pub(crate) banned: Vec<String>,
    /// Consequences of alice's volume quota.
    pub(crate) volume: Cell<VolumeLimits>,
    /// Unix second at which the time-limited user `timed` expires.
    pub(crate) timed_until: u64,
}

impl TestPolicy {
    pub(crate) fn held(&self) -> usize {
        self.held.borrow().values().sum()
    }
}

impl Users for TestPolicy {
    fn check(
        &self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        _unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> CredentialCheck {
        self.lookups.set(self.lookups.get() + 1);
        if self.later {
            return CredentialCheck::NeedsLookup;
        }
        let known = ["alice", "bob", "old", "timed"].into_iter().find(|name| match user {
            User::Name(wanted) => *name == wanted,
            User::Hash(wanted) => userhash(name, realm) == *wanted,
        });
        let Some(name) = known else { return CredentialCheck::NoSuchUser };
        if name == "old" {
            return CredentialCheck::Expired { ago: 42 };
        }
        if !verify(&Key::long_term(algorithm, name, realm, password(name).as_bytes())) {
            return CredentialCheck::WrongKey { username: name.into() };
        }
        let until_unix = (name == "timed").then_some(self.timed_until);
        CredentialCheck::Accepted { username: name.into(), identity: name.into(), until_unix }
    }
}

impl Restrictions for TestPolicy {
    fn is_relayed(&self, address: SocketAddr, transport: RelayTransport) -> bool {
        self.relayed.contains(&(address, transport))
    }

    fn volume_limits(&self, user: UserRef<'_>, _username: &str) -> VolumeLimits {
        if user.identity == "alice" { self.volume.get() } else { VolumeLimits::default() }
    }

    fn is_banned(&self, _unix: u64, user: UserRef<'_>, username: &str, client: IpAddr) -> bool {
        self.banned.iter().any(|banned| {
            [username, user.identity].contains(&banned.as_str()) || banned.parse() == Ok(client)
        })
    }
}

impl Redirects for TestPolicy {
    fn comes_back(&self, attempt: &AllocateAttempt<'_>) -> bool {
        self.returned.contains(&attempt.client.address.port())
    }

    fn redirect_target(&self, attempt: &AllocateAttempt<'_>, _transport: Transport) -> Option<Destination> {
        // Bounded, because memory tests use this policy with thousands of clients.
        let mut attempts = self.attempts.borrow_mut();
        if attempts.len() < 10 {
            attempts.push((attempt.user.identity.to_owned(), attempt.occasion));
        }
        self.redirect_target.clone()
    }

    fn node(&self, node: u16, _transport: Transport, v4: bool) -> Option<Destination> {
        let found = self.nodes.iter().find(|(number, at)| *number == node && at.address.is_ipv4() == v4);
        found.map(|(_, destination)| destination.clone())
    }
}

impl Quotas for TestPolicy {
    /// Checks user, prefix and total in the same order as production code.
    fn acquire(&self, user: UserRef<'_>, prefix: IpAddr) -> Result<(), QuotaRefusal> {
        let total = self.held();
        let mut counts = self.held.borrow_mut();
        let held = counts.entry(key(user)).or_default();
        if *held >= self.per_user {
            let undecided = QuotaRefusal::Undecided { is_user: true };
            return Err(if self.undecided { undecided } else { QuotaRefusal::User });
        }
        let mut prefixes = self.prefixes.borrow_mut();
        let of_prefix = prefixes.entry(prefix).or_default();
        if self.per_prefix > 0 && *of_prefix >= self.per_prefix {
            return Err(QuotaRefusal::Prefix);
        }
        if total >= self.total {
            return Err(match (self.undecided, self.shared) {
                (true, _) => QuotaRefusal::Undecided { is_user: false },
                (false, true) => QuotaRefusal::Everywhere,
                (false, false) => QuotaRefusal::Total,
            });
        }
        *held += 1;
        *of_prefix += 1;
        Ok(())
    }

    fn release(&self, user: UserRef<'_>, prefix: IpAddr) {
        let mut prefixes = self.prefixes.borrow_mut();
        let of_prefix = prefixes.get_mut(&prefix).expect("released where it was acquired");
        *of_prefix = of_prefix.checked_sub(1).expect("released once");
        let mut counts = self.held.borrow_mut();
        let held = counts.get_mut(&key(user)).expect("released what was acquired");
        *held = held.checked_sub(1).expect("released once");
    }
}

fn key(UserRef { realm, identity }: UserRef<'_>) -> String {
    if realm == REALM { identity.to_owned() } else { format!("{identity}@{realm}") }
}

pub(crate) fn password(user: &str) -> String {
    user.chars().rev().collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// RFC 5389: MD5 key, HMAC-SHA1.
    Md5,
    /// RFC 8489: MD5 key, HMAC-SHA256, no PASSWORD-ALGORITHM.
    Md5Sha256,
    /// RFC 8489: SHA-256 key, HMAC-SHA256, echoed PASSWORD-ALGORITHMS.
    Sha256,
    /// Like `Sha256`, with USERHASH instead of USERNAME.
    Userhash,
}

#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    pub(crate) user: String,
    pub(crate) password: String,
    pub(crate) realm: String,
    pub(crate) nonce: String,
    pub(crate) scheme: Scheme,
}

impl Credentials {
    fn oracle(&self) -> MessageIntegrityCredentials {
        LongTermKeyCredentials::new(self.user.clone(), self.password.clone(), self.realm.clone()).into()
    }

    fn key(&self) -> Key {
        Key::long_term(KeyAlgorithm::Md5, &self.user, &self.realm, self.password.as_bytes())
    }
}

/// Request or indication under construction. Attributes are written in the given order, valid or not.
#[derive(Clone)]
pub(crate) struct Ask {
    class: MessageClass,
    method: Method,
    pub(crate) transaction: TransactionId,
    attributes: Vec<RawAttribute<'static>>,
    credentials: Option<Credentials>,
    fingerprint: bool,
}

impl Ask {
    pub(crate) fn new(method: Method) -> Self {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let transaction = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Self {
            class: MessageClass::Request,
            method,
            transaction: TransactionId::from(u128::from(transaction)),
            attributes: Vec::new(),
            credentials: None,
            fingerprint: false,
        }
    }

    pub(crate) fn indication(method: Method) -> Self {
        Self { class: MessageClass::Indication, ..Self::new(method) }
    }

    pub(crate) fn allocate() -> Self {
        Self::new(ALLOCATE).with(&RequestedTransport::new(RequestedTransport::UDP))
    }

    pub(crate) fn allocate_tcp() -> Self {
        Self::new(ALLOCATE).with(&RequestedTransport::new(6))
    }

    pub(crate) fn connect(peer: &str) -> Self {
        Self::new(CONNECT).peer(peer)
    }

    pub(crate) fn connection_bind(connection: ConnectionId) -> Self {
        Self::new(CONNECTION_BIND).with(&turn::ConnectionId::new(connection.0))
    }

    pub(crate) fn present(ticket: &[u8]) -> Self {
        Self::new(REFRESH).raw(TICKET, ticket)
    }

    pub(crate) fn refresh(seconds: u32) -> Self {
        Self::new(REFRESH).with(&Lifetime::new(seconds))
    }

    pub(crate) fn permit(peer: &str) -> Self {
        Self::new(CREATE_PERMISSION).peer(peer)
    }

    pub(crate) fn bind(number: u16, peer: &str) -> Self {
        let [high, low] = number.to_be_bytes();
        Self::new(CHANNEL_BIND).raw(ChannelNumber::TYPE.value(), &[high, low, 0, 0]).peer(peer)
    }

    pub(crate) fn send(peer: &str, data: &[u8]) -> Vec<u8> {
        Self::indication(SEND).peer(peer).with(&turn::Data::new(data)).bytes()
    }

    pub(crate) fn with(mut self, attribute: &dyn AttributeWrite) -> Self {
        self.attributes.push(attribute.to_raw().into_owned());
        self
    }

    pub(crate) fn raw(mut self, kind: u16, value: &[u8]) -> Self {
        self.attributes.push(RawAttribute::new(AttributeType::new(kind), value).into_owned());
        self
    }

    pub(crate) fn peer(self, peer: &str) -> Self {
        let attribute = XorPeerAddress::new(address(peer), self.transaction);
        self.with(&attribute)
    }

    pub(crate) fn signed(mut self, credentials: &Credentials) -> Self {
        self.credentials = Some(credentials.clone());
        self
    }

    pub(crate) fn fingerprint(mut self) -> Self {
        self.fingerprint = true;
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let kind = MessageType::from_class_method(self.class, self.method);
        let mut message = Message::builder(kind, self.transaction, MessageWriteVec::new());
        for attribute in &self.attributes {
            message.push_attribute_unchecked(attribute);
        }
        let Some(credentials) = &self.credentials else {
            if self.fingerprint {
                message.add_fingerprint().unwrap();
            }
            return message.finish();
        };
        if credentials.scheme == Scheme::Userhash {
            let hash = Userhash::compute(&credentials.user, &credentials.realm);
            message.push_attribute_unchecked(&Userhash::new(hash));
        } else {
            message.push_attribute_unchecked(&Username::new(&credentials.user).unwrap());
        }
        message.push_attribute_unchecked(&Realm::new(&credentials.realm).unwrap());
        message.push_attribute_unchecked(&Nonce::new(&credentials.nonce).unwrap());
        match credentials.scheme {
            Scheme::Md5 => {
                message.add_message_integrity(&credentials.oracle(), IntegrityAlgorithm::Sha1).unwrap();
            }
            Scheme::Sha256 | Scheme::Userhash => {
                let algorithms = [PasswordAlgorithmValue::SHA256, PasswordAlgorithmValue::MD5];
                message.push_attribute_unchecked(&PasswordAlgorithms::new(&algorithms));
                message.push_attribute_unchecked(&PasswordAlgorithm::new(PasswordAlgorithmValue::SHA256));
                message.add_message_integrity(&credentials.oracle(), IntegrityAlgorithm::Sha256).unwrap();
            }
            Scheme::Md5Sha256 => {
                // The oracle ties the MAC to the key's algorithm.
                return signed(&message.finish(), &credentials.key(), Mac::Sha256, self.fingerprint);
            }
        }
        if self.fingerprint {
            message.add_fingerprint().unwrap();
        }
        message.finish()
    }
}

pub(crate) fn signed(message: &[u8], key: &Key, mac: Mac, fingerprint: bool) -> Vec<u8> {
    let mut buffer = Vec::new();
    let mut writer = Writer::begin(&mut buffer, Header::new_checked(message).unwrap());
    writer.raw(&message[HEADER_LEN..]).sign(key, mac);
    writer.finish(fingerprint);
    buffer
}

/// Result of a datagram: an owned copy of the verdict, or the effect that continues the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Reply(Vec<u8>),
    Open(OpenRequest),
    ToPeer { relay: RelayId, peer: SocketAddr, payload: Vec<u8>, dont_fragment: bool },
    ToClient { client: Client, bytes: Vec<u8> },
    Connect(ConnectRequest),
    Bind { connection: ConnectionId, client: Client, bytes: Vec<u8> },
    HandOver { worker: u16 },
    Forward { worker: u16, occupied: bool },
    Decline { via: u16 },
    Move(MoveRequest),
    LookUp(CredentialQuery),
    Wait { until_ms: u64, otherwise: DropReason },
    Drop(DropReason),
    Later,
}

impl From<Verdict<'_>> for Outcome {
    fn from(verdict: Verdict<'_>) -> Self {
        match verdict {
            Verdict::ToPeer { relay, peer, payload, dont_fragment } => {
                Self::ToPeer { relay, peer, payload: payload.to_vec(), dont_fragment }
            }
            Verdict::ToClient { client, header, payload, padding, .. } => {
                let padding = vec![0; usize::from(padding)];
                Self::ToClient { client, bytes: [header.as_slice(), payload, &padding].concat() }
            }
            Verdict::Reply { bytes, .. } => Self::Reply(bytes.to_vec()),
            Verdict::Wait { until_ms, otherwise } => Self::Wait { until_ms, otherwise },
            Verdict::Drop(Some(reason)) => Self::Drop(reason),
            Verdict::Drop(None) => Self::Later,
        }
    }
}

impl Outcome {
    #[track_caller]
    pub(crate) fn reply(self) -> Reply {
        match self {
            Self::Reply(bytes) => Reply(bytes),
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn opens(self) -> OpenRequest {
        match self {
            Self::Open(request) => request,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn goes_to_peer(&self) -> bool {
        matches!(self, Self::ToPeer { .. })
    }

    pub(crate) fn goes_to_client(&self) -> bool {
        matches!(self, Self::ToClient { .. })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply(pub Vec<u8>);

impl Reply {
    pub(crate) fn message(&self) -> Message<'_> {
        Message::from_bytes(&self.0).expect("the oracle can read the response")
    }

    pub(crate) fn is_success(&self) -> bool {
        self.message().has_class(MessageClass::Success)
    }

    #[track_caller]
    pub(crate) fn success(self) -> Self {
        assert!(self.is_success(), "error {:?}", self.code());
        self
    }

    pub(crate) fn code(&self) -> Option<u16> {
        self.message().attribute::<ErrorCode>().ok().map(|error| error.code())
    }

    pub(crate) fn reason(&self) -> String {
        self.message().attribute::<ErrorCode>().unwrap().reason().to_owned()
    }

    pub(crate) fn has(&self, kind: AttributeType) -> bool {
        self.message().has_attribute(kind)
    }

    pub(crate) fn get<A: for<'a> AttributeFromRaw<'a> + AttributeStaticType>(&self) -> A {
        self.message().attribute::<A>().expect("the attribute is present")
    }

    pub(crate) fn ticket(&self) -> Option<Vec<u8>> {
        self.raw(TICKET)
    }

    pub(crate) fn raw(&self, kind: u16) -> Option<Vec<u8>> {
        let message = self.message();
        let found = message.iter_attributes().find(|(_, raw)| raw.get_type().value() == kind);
        found.map(|(_, raw)| raw.value.to_vec())
    }

    pub(crate) fn connection(&self) -> ConnectionId {
        ConnectionId(self.get::<turn::ConnectionId>().id())
    }

    pub(crate) fn alternates(&self) -> Vec<SocketAddr> {
        let message = self.message();
        let attributes = message.iter_attributes();
        attributes
            .filter(|(_, raw)| raw.get_type() == AlternateServer::TYPE)
            .map(|(_, raw)| AlternateServer::from_raw(raw).unwrap().server())
            .collect()
    }

    pub(crate) fn lifetime(&self) -> u32 {
        self.get::<Lifetime>().seconds()
    }

    pub(crate) fn mapped(&self) -> SocketAddr {
        self.get::<XorMappedAddress>().addr(self.message().transaction_id())
    }

    pub(crate) fn relayed(&self) -> Vec<SocketAddr> {
        let message = self.message();
        message
            .iter_attributes()
            .filter(|(_, raw)| raw.get_type() == XorRelayedAddress::TYPE)
            .map(|(_, raw)| XorRelayedAddress::from_raw_ref(&raw).unwrap().addr(message.transaction_id()))
            .collect()
    }

    pub(crate) fn verifies(&self, key: &Key, mac: Mac) -> bool {
        View::new_checked(&self.0).unwrap().verify(key, mac).is_ok()
    }

    /// True if the message has the valid integrity attribute that RFC 8489 section 9.2.4 requires.
    pub(crate) fn is_signed(&self, credentials: &Credentials) -> bool {
        if credentials.scheme == Scheme::Md5Sha256 {
            return self.verifies(&credentials.key(), Mac::Sha1);
        }
        self.message().validate_integrity(&credentials.oracle()).is_ok()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FromPeer {
    Accepted { connection: ConnectionId, client: Client, indication: Reply },
    Refused(ConnectionRefusal),
}

pub(crate) struct World {
    pub(crate) server: Server<TestPolicy>,
    pub(crate) now: Now,
    pub(crate) client: Client,
    pub(crate) ports: u16,
    pub(crate) told: Vec<Effect>,
}

pub(crate) fn config() -> ServerConfig {
    ServerConfig {
        realm: REALM.to_owned(),
        nonce_keys: turnpike_turn::server::NonceKey([7; 32]).into(),
        channels: ChannelRange::Rfc8656,
        ..ServerConfig::default()
    }
}

/// [`config`] with everything enabled that is off by default.
pub(crate) fn everything() -> ServerConfig {
    let key = turnpike_turn::access_token::TokenKey::A128Gcm([1; 16]);
    let second = "192.0.2.2".parse().unwrap();
    ServerConfig {
        tenants: vec![TenantRealm {
            name: "tenant.example".to_owned(),
            allow_sha256: true,
            username_anonymity: true,
        }],
        third_party: ThirdParty {
            server_name: "turn.example.org".to_owned(),
            skew: 5,
            keys: vec![IssuerKey { kid: "north".to_owned(), key, realm: REALM.to_owned(), max_lifetime: 60 }],
        },
        nat_discovery: vec![NatDiscovery {
            addresses: [client(1).local.ip(), second],
            external: [None; 2],
            ports: [client(1).local.port(), 3479],
            listeners: [[0, 1], [2, 3]].map(|row| row.map(ListenerId)),
        }],
        alternates: vec![Alternate {
            address: address("198.51.100.1:3478"),
            domain: Some("turn2.example.org".to_owned()),
            transports: Vec::new(),
            when: AlternateWhen::Full,
        }],
        ..config()
    }
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(config())
    }

    pub(crate) fn with(config: ServerConfig) -> Self {
        Self::with_policy(config, TestPolicy { per_user: 1000, total: 1000, ..TestPolicy::default() })
    }

    pub(crate) fn with_policy(config: ServerConfig, policy: TestPolicy) -> Self {
        Self::worker(config, policy, WorkerId::ONLY)
    }

    pub(crate) fn workers(config: &ServerConfig, count: u16) -> Vec<Self> {
        Self::workers_with(
            config,
            count,
            &TestPolicy { per_user: 1000, total: 1000, ..TestPolicy::default() },
        )
    }

    pub(crate) fn workers_with(config: &ServerConfig, count: u16, policy: &TestPolicy) -> Vec<Self> {
        let worker =
            |number| Self::worker(config.clone(), policy.clone(), WorkerId::new(number, count).unwrap());
        (0..count).map(worker).collect()
    }

    fn worker(config: ServerConfig, policy: TestPolicy, worker_id: WorkerId) -> Self {
        Self {
            server: Server::for_worker(Arc::new(config), policy, worker_id, seed(worker_id)),
            now: Now { ms: 1_000_000, unix: 1_800_000_000 },
            client: client(40_000),
            ports: 50_000,
            told: Vec::new(),
        }
    }

    pub(crate) fn sleep(&mut self, seconds: u64) {
        self.now.ms += seconds * 1000;
        self.now.unix += seconds;
        self.server.handle_timeout(self.now);
    }

    pub(crate) fn feed(&mut self, datagram: &[u8]) -> Outcome {
        let source = self.client.into();
        let verdict = self.server.from_client(self.now, &source, datagram).into();
        self.outcome(verdict)
    }

    pub(crate) fn handed_over(&mut self, client: Client, request: &[u8]) -> Outcome {
        let verdict = self.server.from_handed_over(self.now, &client.into(), request).into();
        self.outcome(verdict)
    }

    /// Feeds a request forwarded by another worker; returns the outcome and the pending move announced to
    /// that worker.
    pub(crate) fn forwarded(
        &mut self,
        via: u16,
        client: Client,
        request: &[u8],
    ) -> (Outcome, Option<PendingMove>) {
        self.forwarded_from(via, false, client, request)
    }

    /// Like [`Self::forwarded`], where the client's 5-tuple may be occupied on worker `via`.
    pub(crate) fn forwarded_from(
        &mut self,
        via: u16,
        occupied: bool,
        client: Client,
        request: &[u8],
    ) -> (Outcome, Option<PendingMove>) {
        let drops: u64 = self.server.stats().drops.iter().sum();
        self.server.from_elsewhere(self.now, via, occupied, &client.into(), request);
        self.take_effects();
        let last = self.told.iter().rposition(|effect| matches!(effect, Effect::Answer { .. }));
        if let Some(Effect::Answer { via: to, source, pending_move, reply }) =
            last.map(|at| self.told.remove(at))
        {
            assert_eq!((to, source.client), (via, client));
            return (Outcome::Reply(reply.into()), pending_move);
        }
        match self.outcome(Outcome::Later) {
            Outcome::Later => {
                assert_eq!(self.server.stats().drops.iter().sum::<u64>(), drops + 1);
                (Outcome::Drop(DropReason::Moving), None)
            }
            outcome => (outcome, None),
        }
    }

    pub(crate) fn declined(&mut self, owner: u16, client: Client, request: &[u8]) -> Outcome {
        self.client = client;
        let verdict = self.server.declined(self.now, owner, &client.into(), request).into();
        self.outcome(verdict)
    }

    pub(crate) fn found(
        &mut self,
        lookup: LookupId,
        credentials: turnpike_turn::server::LookupResult,
    ) -> Outcome {
        let verdict = self.server.finish_lookup(self.now, lookup, credentials).into();
        self.outcome(verdict)
    }

    fn take_effects(&mut self) {
        self.told.extend(std::iter::from_fn(|| self.server.poll_effect()));
    }

    /// Combines a verdict with the effect that continues the request, if any.
    fn outcome(&mut self, verdict: Outcome) -> Outcome {
        if !matches!(verdict, Outcome::Later | Outcome::Reply(_)) {
            return verdict;
        }
        self.take_effects();
        let goes_on = |effect: &Effect| {
            let bound = matches!(effect, Effect::Bind { .. });
            let later = matches!(
                effect,
                Effect::Open(_)
                    | Effect::Connect(_)
                    | Effect::HandOver { .. }
                    | Effect::Forward { .. }
                    | Effect::Decline { .. }
                    | Effect::Fetch { .. }
                    | Effect::LookUp(_)
            );
            if verdict == Outcome::Later { later } else { bound }
        };
        let Some(at) = self.told.iter().rposition(goes_on) else { return verdict };
        match (self.told.remove(at), verdict) {
            (Effect::Open(request), _) => Outcome::Open(request),
            (Effect::Connect(request), _) => Outcome::Connect(request),
            (Effect::HandOver { worker, .. }, _) => Outcome::HandOver { worker },
            (Effect::Forward { worker, occupied, .. }, _) => Outcome::Forward { worker, occupied },
            (Effect::Decline { via, .. }, _) => Outcome::Decline { via },
            (Effect::Fetch { request, .. }, _) => Outcome::Move(request),
            (Effect::LookUp(query), _) => Outcome::LookUp(query),
            (Effect::Bind { connection, source }, Outcome::Reply(bytes)) => {
                Outcome::Bind { connection, client: source.client, bytes }
            }
            (_, verdict) => verdict,
        }
    }

    #[track_caller]
    pub(crate) fn ask(&mut self, ask: &Ask) -> Reply {
        match self.feed(&ask.bytes()) {
            Outcome::Reply(bytes) => Reply(bytes),
            Outcome::Open(request) => self.open(&request),
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn ask_as(&mut self, user: &str, ask: Ask) -> Reply {
        let credentials = self.credentials(user, Scheme::Md5);
        self.ask(&ask.signed(&credentials))
    }

    #[track_caller]
    pub(crate) fn feed_as(&mut self, user: &str, ask: Ask) -> Outcome {
        let credentials = self.credentials(user, Scheme::Md5);
        self.feed(&ask.signed(&credentials).bytes())
    }

    pub(crate) fn refusals(&mut self) -> Vec<CredentialRefusal> {
        let refused = |effect| match effect {
            Effect::Refused { why, .. } => Some(why),
            _ => None,
        };
        self.effects().into_iter().filter_map(refused).collect()
    }

    #[track_caller]
    pub(crate) fn open(&mut self, request: &OpenRequest) -> Reply {
        let first = self.relay_address(request.first.family);
        let second = request.second.map(|second| self.relay_address(second.family));
        self.opened(request.allocation, first, second)
    }

    #[track_caller]
    pub(crate) fn opened(
        &mut self,
        id: AllocationSlot,
        first: OpenResult,
        second: Option<OpenResult>,
    ) -> Reply {
        Outcome::from(self.server.opened(self.now, id, first, second)).reply()
    }

    fn relay_address(&mut self, family: Family) -> OpenResult {
        self.ports = self.ports.wrapping_add(2);
        let ip = match family {
            Family::V4 => "203.0.113.1".parse().unwrap(),
            Family::V6 => "2001:db8::1".parse().unwrap(),
        };
        OpenResult::Opened { relayed: SocketAddr::new(ip, self.ports) }
    }

    pub(crate) fn credentials(&mut self, user: &str, scheme: Scheme) -> Credentials {
        let challenge = self.ask(&Ask::allocate());
        assert_eq!(challenge.code(), Some(401));
        Credentials {
            user: user.to_owned(),
            password: password(user),
            realm: challenge.get::<Realm>().realm().to_owned(),
            nonce: challenge.get::<Nonce>().nonce().to_owned(),
            scheme,
        }
    }

    pub(crate) fn allocated(&mut self) -> (Credentials, RelayId) {
        let alice = self.credentials("alice", Scheme::Md5);
        // If there are many clients in one second, some collide in the replay guard and have to retry.
        let mut reply = self.ask(&Ask::allocate().signed(&alice));
        while reply.code() == Some(438) {
            reply = self.ask(&Ask::allocate().signed(&alice));
        }
        reply.success();
        let relay = self.last_opened();
        (alice, relay)
    }

    pub(crate) fn allocated_sharing(
        &mut self,
        relayed: SocketAddr,
        port: SharedPort,
    ) -> (Credentials, RelayId) {
        let alice = self.credentials("alice", Scheme::Md5);
        loop {
            match self.feed(&Ask::allocate().signed(&alice).bytes()) {
                Outcome::Open(request) => {
                    self.opened(request.allocation, OpenResult::Shared { relayed, port }, None).success();
                    return (alice, self.last_opened());
                }
                Outcome::Reply(bytes) => assert_eq!(Reply(bytes).code(), Some(438)),
                other => panic!("{other:?}"),
            }
        }
    }

    pub(crate) fn allocated_tcp(&mut self) -> (Credentials, RelayId) {
        self.client = stream(41_000);
        let alice = self.credentials("alice", Scheme::Md5);
        self.ask(&Ask::allocate_tcp().signed(&alice)).success();
        let relay = self.last_opened();
        (alice, relay)
    }

    #[track_caller]
    pub(crate) fn connected(&mut self, alice: &Credentials, peer: &str) -> ConnectionId {
        let request = self.connecting(&Ask::connect(peer).signed(alice));
        let reply = self.connect_result(&request, Ok(())).success();
        assert_eq!(reply.connection(), request.connection);
        request.connection
    }

    #[track_caller]
    pub(crate) fn connecting(&mut self, ask: &Ask) -> ConnectRequest {
        match self.feed(&ask.bytes()) {
            Outcome::Connect(request) => request,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn connect_result(
        &mut self,
        request: &ConnectRequest,
        result: Result<(), ConnectError>,
    ) -> Reply {
        let allocation = request.relay.allocation;
        Outcome::from(self.server.connected(self.now, allocation, request.connection, result)).reply()
    }

    pub(crate) fn peer_connects(&mut self, relay: RelayId, peer: &str) -> FromPeer {
        match self.server.peer_connected(self.now, relay, address(peer)) {
            PeerConnection::Accept { connection, client, bytes, .. } => {
                FromPeer::Accepted { connection, client, indication: Reply(bytes.to_vec()) }
            }
            PeerConnection::Refuse(reason) => FromPeer::Refused(reason),
        }
    }

    /// Returns the allocation that was opened last; drains the effects.
    pub(crate) fn last_opened(&mut self) -> RelayId {
        let effects = self.effects();
        let opened = effects.iter().rev().find_map(|effect| match effect {
            Effect::Opened { allocation, .. } => Some(*allocation),
            _ => None,
        });
        RelayId { allocation: opened.expect("an allocation was opened"), family: Family::V4 }
    }

    pub(crate) fn effects(&mut self) -> Vec<Effect> {
        let mut effects = self.all_effects();
        effects.retain(|effect| {
            !matches!(
                effect,
                Effect::Renewed { .. }
                    | Effect::Permitted { .. }
                    | Effect::PermissionEnded { .. }
                    | Effect::Bound { .. }
                    | Effect::Unbound { .. }
                    | Effect::Away { .. }
                    | Effect::Exported { .. }
                    | Effect::Returned { .. }
                    | Effect::RequestRefused { .. }
            )
        });
        effects
    }

    /// All effects, including permissions, channels and refused requests.
    pub(crate) fn all_effects(&mut self) -> Vec<Effect> {
        self.take_effects();
        std::mem::take(&mut self.told)
    }

    pub(crate) fn peer_sends(&mut self, relay: RelayId, peer: &str, payload: &[u8]) -> Outcome {
        self.server.data.from_peer(self.now, relay, address(peer), payload).into()
    }

    pub(crate) fn dropped(&self, reason: DropReason) -> u64 {
        self.server.stats().dropped(reason)
    }
}

pub(crate) fn seed(worker_id: WorkerId) -> Seed {
    Seed([u8::try_from(worker_id.number() % 251).unwrap() + 1; 32])
}

pub(crate) fn client(port: u16) -> Client {
    Client {
        listener: ListenerId(0),
        address: SocketAddr::new("192.0.2.7".parse().unwrap(), port),
        local: address("192.0.2.1:3478"),
    }
}

pub(crate) fn stream(port: u16) -> Client {
    Client { listener: ListenerId(1), ..client(port) }
}

/// Listeners for UDP, TCP, TLS and DTLS, in this order.
pub(crate) fn streams() -> ServerConfig {
    let listeners = [Transport::Udp, Transport::Tcp, Transport::Tls, Transport::Dtls];
    ServerConfig {
        listeners: listeners
            .map(|transport| ListenerProfile { transport, ..ListenerProfile::default() })
            .to_vec(),
        ..config()
    }
}

pub(crate) fn channel_data(number: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).unwrap();
    [&number.to_be_bytes(), &length.to_be_bytes(), payload].concat()
}

pub(crate) fn elsewhere(n: u16) -> Client {
    Client { address: address(&format!("198.18.0.1:{n}")), ..client(n) }
}

#[track_caller]
pub(crate) fn reaches(world: &mut World, relay: RelayId) -> Client {
    match world.peer_sends(relay, PEER, b"from the peer") {
        Outcome::ToClient { client, .. } => client,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn closed(world: &mut World) -> Vec<(ClosedReason, u64)> {
    let closed = |effect| match effect {
        Effect::Closed { reason, lived_ms, .. } => Some((reason, lived_ms)),
        _ => None,
    };
    world.effects().into_iter().filter_map(closed).collect()
}
