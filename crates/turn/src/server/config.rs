use std::{collections::HashMap, fmt, sync::Arc};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use strum::{EnumString, IntoStaticStr};
use turnpike_wire::channel_data::ChannelRange;

use super::{
    Alternate, Bandwidth, ClientNetworks, ClientRules, ConnectionCounts, DiscoveryLimits,
    MaxAllocationDuration, MobileOwners, NatDiscovery, OwnEndpoints, PeerRules, Pools, PrefixLengths,
    QualityLevel, RealmId, RefusalLimit, ReplayGuard, ServerLimits, ThirdParty, auth::realm::Realm,
};

/// Settings of the state machine; [`ServerConfig::default`] holds the documented defaults.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// REALM, at most 127 characters. With [`Self::tenants`], this is the first realm.
    pub realm: String,
    /// Additional realms, at most 65,534, in any order. Default none.
    pub tenants: Vec<Realm>,
    /// SOFTWARE in responses to clients with a verified address; `None` omits it. Default `turnpike`.
    pub software: Option<String>,
    /// Default true. Set it to false only on closed networks and in tests.
    pub authenticate: bool,
    /// Binding requests need credentials too. Default false.
    pub authenticate_binding: bool,
    /// Refuses all requests but Binding with 403. Default false.
    pub stun_only: bool,
    /// Default: all clients.
    pub clients: ClientRules,
    /// Networks of clients, for rules on them. Default none: they are unknown.
    pub networks: Option<Arc<dyn ClientNetworks>>,
    /// Key for the hashes in the replay guard and the tombstones. It must not change, not even in an upgrade.
    pub own_key: NonceKey,
    pub nonce_keys: NonceKeys,
    /// Node number in the fleet, 1 to 4095, or 0 while unassigned; `None` without a fleet. Never changes
    /// between `Some` and `None`.
    pub node: Option<u16>,
    /// Like `owners` and `connection_counts`, shared by all workers and kept across reloads.
    pub replays: ReplayGuard,
    pub owners: MobileOwners,
    pub connection_counts: ConnectionCounts,
    pub limits: ServerLimits,
    /// Seconds for which a nonce stays valid. Default 3600.
    pub nonce_lifetime: u32,
    pub max_allocation_duration: MaxAllocationDuration,
    pub bandwidth: Bandwidth,
    /// Default off.
    pub quality: QualityLevel,
    /// Shared by all workers, and kept across reloads.
    pub pools: Pools,
    /// Lengths of the prefixes that quotas and refusal limits count as one client.
    pub prefixes: PrefixLengths,
    /// Limit on refusals sent to the clients of one prefix. Default unlimited.
    pub refusals: Option<RefusalLimit>,
    /// Lifetime of a permission in seconds. Default 300 (RFC 8656 section 9).
    pub permission_lifetime: u32,
    /// Keeps the permission for a channel's peer alive at least as long as the channel. Default true: clients
    /// such as aioice refresh only the channel. False follows RFC 8656 section 9 to the letter.
    pub channels_permit: bool,
    /// Lifetime of a channel binding in seconds. Default 600 (RFC 8656 section 12).
    pub channel_lifetime: u32,
    pub relay_v4: bool,
    pub relay_v6: bool,
    pub peers: PeerRules,
    /// Rules by realm, for requests that name a peer. The packet path checks `peers` only, so `peers` must
    /// allow everything that these rules allow.
    pub realm_peers: HashMap<Box<str>, PeerRules>,
    /// Realms by ORIGIN ([`super::canonical_origin`]). A challenge names the realm of the request's ORIGIN if
    /// the listener serves it.
    pub origins: HashMap<Box<str>, RealmId>,
    pub store_failure: StoreFailure,
    /// Default [`ChannelRange::Rfc5766`], because deployed clients (coturn's uclient) use all of it.
    pub channels: ChannelRange,
    /// Accepts MD5 keys with HMAC-SHA1 (RFC 5389 clients) besides SHA-256. Default true.
    pub allow_md5: bool,
    /// Must be false if any user has only an MD5 key, because clients choose the strongest algorithm offered.
    pub allow_sha256: bool,
    /// USERHASH support (RFC 8489 section 9.2). Must be false with time-limited credentials, which cannot be
    /// found by hash.
    pub username_anonymity: bool,
    /// Listeners by number; missing entries use [`ListenerProfile::default`]. One socket may have several
    /// numbers, for instance one per tenant selected by TLS server name.
    pub listeners: Vec<ListenerProfile>,
    /// Allows TCP relaying (RFC 6062) for clients on streams. Default true; if false, requests for it are
    /// refused with 442.
    pub tcp_relay: bool,
    /// Default true: only clients that ask get a ticket (RFC 8016), and a ticket is useless without the
    /// client's credentials. If false, requests for a ticket are refused with 405. Without authentication, no
    /// tickets are issued.
    pub mobility: bool,
    /// ACCESS-TOKEN authentication (RFC 7635). Default none.
    pub third_party: ThirdParty,
    /// Servers to redirect clients to, in turn; see [`super::AlternateWhen`]. Default none.
    pub alternates: Vec<Alternate>,
    /// NAT behaviour discovery (RFC 5780), one entry per family. Default none.
    pub nat_discovery: Vec<NatDiscovery>,
    pub discovery_limits: DiscoveryLimits,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreFailure {
    /// Respond with 500 (Server Error), so that the client can try another server immediately.
    #[default]
    Answer,
    /// Send no response. The client retransmits until it times out.
    Drop,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenerProfile {
    pub transport: Transport,
    /// Challenges name the first realm; requests may name any of them. Empty means all realms. Default empty.
    pub realms: Vec<RealmId>,
    /// Refuses new allocations; the listener closes with its last allocation.
    pub closing: bool,
}

static DEFAULT_PROFILE: ListenerProfile =
    ListenerProfile { transport: Transport::Udp, realms: Vec::new(), closing: false };

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, EnumString, IntoStaticStr, Serialize, Deserialize,
)]
#[strum(serialize_all = "lowercase")]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    #[default]
    Udp,
    Tcp,
    Tls,
    Dtls,
}

impl Transport {
    /// Streams need framing (RFC 8489 section 6.2.2) and padded ChannelData (RFC 8656 section 12.5).
    #[must_use]
    pub fn is_stream(self) -> bool {
        matches!(self, Self::Tcp | Self::Tls)
    }
}

/// Anyone with this key can forge nonces. `Debug` hides it.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NonceKey(pub [u8; 32]);

impl fmt::Debug for NonceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NonceKey(..)")
    }
}

/// A fleet distributes the next key before its first use, and keeps old keys while nonces or tickets made
/// with them may still be valid.
#[derive(Clone, Debug)]
pub struct NonceKeys {
    oldest: NonceKey,
    /// Each key with the Unix second of its first use, newest first.
    newer: SmallVec<[(u64, NonceKey); 1]>,
}

impl NonceKeys {
    /// `oldest` is used until the first of the `newer` keys takes over. `newer` pairs each key with the Unix
    /// second of its first use.
    #[must_use]
    pub fn new(oldest: NonceKey, newer: impl IntoIterator<Item = (u64, NonceKey)>) -> Self {
        let mut newer: SmallVec<[(u64, NonceKey); 1]> = newer.into_iter().collect();
        newer.sort_by_key(|(from, _)| std::cmp::Reverse(*from));
        Self { oldest, newer }
    }

    #[must_use]
    pub fn at(&self, unix: u64) -> &NonceKey {
        let newest = self.newer.iter().find(|(from, _)| *from <= unix);
        newest.map_or(&self.oldest, |(_, key)| key)
    }

    pub fn iter(&self) -> impl Iterator<Item = &NonceKey> {
        self.newer.iter().map(|(_, key)| key).chain([&self.oldest])
    }
}

impl From<NonceKey> for NonceKeys {
    fn from(key: NonceKey) -> Self {
        Self::new(key, [])
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            realm: "turnpike".to_owned(),
            tenants: Vec::new(),
            software: Some("turnpike".to_owned()),
            authenticate: true,
            authenticate_binding: false,
            stun_only: false,
            clients: ClientRules::default(),
            networks: None,
            own_key: NonceKey([0; 32]),
            nonce_keys: NonceKey([0; 32]).into(),
            node: None,
            replays: ReplayGuard::default(),
            owners: MobileOwners::default(),
            connection_counts: ConnectionCounts::default(),
            limits: ServerLimits::default(),
            nonce_lifetime: 3600,
            max_allocation_duration: MaxAllocationDuration::default(),
            bandwidth: Bandwidth::default(),
            quality: QualityLevel::default(),
            pools: Pools::default(),
            prefixes: PrefixLengths::default(),
            refusals: None,
            permission_lifetime: 300,
            channels_permit: true,
            channel_lifetime: 600,
            relay_v4: true,
            relay_v6: true,
            peers: PeerRules::default(),
            realm_peers: HashMap::new(),
            origins: HashMap::new(),
            store_failure: StoreFailure::default(),
            channels: ChannelRange::Rfc5766,
            allow_md5: true,
            allow_sha256: true,
            username_anonymity: true,
            listeners: Vec::new(),
            tcp_relay: true,
            mobility: true,
            third_party: ThirdParty::default(),
            alternates: Vec::new(),
            nat_discovery: Vec::new(),
            discovery_limits: DiscoveryLimits::default(),
        }
    }
}

impl ServerConfig {
    #[must_use]
    pub fn peers_in(&self, realm: &str) -> &PeerRules {
        self.realm_peers.get(realm).unwrap_or(&self.peers)
    }

    pub fn set_own_endpoints(&mut self, own: &OwnEndpoints) {
        for peers in self.realm_peers.values_mut().chain([&mut self.peers]) {
            peers.own.clone_from(own);
        }
    }

    #[must_use]
    pub fn listener(&self, id: super::ListenerId) -> &ListenerProfile {
        self.listeners.get(usize::from(id.0)).unwrap_or(&DEFAULT_PROFILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_never_contains_the_nonce_key() {
        let own_key = NonceKey([213; 32]);
        let config = ServerConfig { own_key, nonce_keys: own_key.into(), ..ServerConfig::default() };
        assert!(!format!("{config:?}").contains("213"));
    }

    #[test]
    fn the_newest_key_already_valid_is_in_use() {
        let key = |byte| NonceKey([byte; 32]);
        let keys = NonceKeys::new(key(1), [(200, key(3)), (100, key(2))]);
        for (unix, byte) in [(0, 1), (99, 1), (100, 2), (199, 2), (200, 3), (u64::MAX, 3)] {
            assert_eq!(keys.at(unix).0, [byte; 32], "{unix}");
        }
        assert_eq!(keys.iter().map(|key| key.0[0]).collect::<Vec<_>>(), [3, 2, 1]);
        assert_eq!(NonceKeys::from(key(7)).at(5).0, [7; 32]);
    }
}
