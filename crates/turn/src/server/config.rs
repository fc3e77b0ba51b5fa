//! What a server is told at start.

use std::{collections::HashMap, fmt};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use strum::{EnumString, IntoStaticStr};
use turnpike_wire::channel_data::ChannelRange;

use super::{
    Alternate, Bandwidth, ConnectionCounts, DiscoveryLimits, MaxSessionDuration, MobileOwners, NatDiscovery,
    OwnEndpoints, PeerRules, Pools, PrefixLengths, RealmId, RefusalLimit, ReplayGuard, ServerLimits,
    ThirdParty, auth::realm::Realm,
};

/// Settings of the state machine. [`ServerConfig::default`] holds the documented defaults.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// REALM, at most 127 characters; where there are [`Self::tenants`], that of the first realm.
    pub realm: String,
    /// Realms beside the first, at most 65,534, in any order. Default none.
    pub tenants: Vec<Realm>,
    /// SOFTWARE in responses to clients whose address is proved; `None` sends none. Default `turnpike`.
    pub software: Option<String>,
    /// Whether Allocate and the rest need long-term credentials. Default true; false is for closed networks and tests.
    pub authenticate: bool,
    /// A key of this server alone, shared by its workers and by the process that takes its place: what has been answered is remembered by
    /// hashes that are made with it. It must not change.
    pub own_key: NonceKey,
    /// What nonces and mobility tickets are made with, shared by all workers of a server, and by all servers of a fleet.
    pub nonce_keys: NonceKeys,
    /// In a fleet, the number of this server, 1 to 4095, or 0 as long as it has none: CONNECTION-IDs and mobility tickets hold it. Whether there is
    /// one must not change. Default no fleet.
    pub node: Option<u16>,
    /// Refuses copies of granted requests, shared by all workers. It outlives reloads: that of a new configuration is ignored.
    pub replays: ReplayGuard,
    /// The workers of mobile allocations, shared by all workers. It outlives reloads: that of a new configuration is ignored.
    pub owners: MobileOwners,
    /// Connections to peers, shared by all workers. It outlives reloads: that of a new configuration is ignored.
    pub connection_counts: ConnectionCounts,
    /// Limits of what allocations hold, and for how long.
    pub limits: ServerLimits,
    /// Seconds for which a nonce is accepted. Default 3600.
    pub nonce_lifetime: u32,
    /// How old an allocation may become. Default without a limit.
    pub max_session_duration: MaxSessionDuration,
    /// Bits per second. Default without a limit.
    pub bandwidth: Bandwidth,
    /// What allocations share of them, all workers together. A new configuration's is not looked at: it outlives reloads.
    pub pools: Pools,
    /// What quotas and refusals by address count as one client.
    pub prefixes: PrefixLengths,
    /// How many refusals a prefix may be sent. Default without a limit.
    pub refusals: Option<RefusalLimit>,
    /// Seconds that a permission lives. Default 300 (RFC 8656 section 9).
    pub permission_lifetime: u32,
    /// Whether the permission for a channel's peer lives at least as long as the channel. Default true: clients such as aioice refresh
    /// nothing but the channel. False is the letter of RFC 8656 section 9.
    pub channels_permit: bool,
    /// Seconds that a channel binding lives. Default 600 (RFC 8656 section 12).
    pub channel_lifetime: u32,
    /// Families that have a relay address, IPv4 first.
    pub relay_v4: bool,
    /// See `relay_v4`.
    pub relay_v6: bool,
    /// Which peers may be relayed to.
    pub peers: PeerRules,
    /// The rules of realms that have their own, by realm: in place of `peers` where a request names a peer. Packets, which need a
    /// permission that such a request made, go by `peers` alone; so it has to allow whatever one of these does.
    pub realm_peers: HashMap<Box<str>, PeerRules>,
    /// Realms that challenges name in place of the listener's first where a request says by ORIGIN from which web page it comes
    /// ([`super::canonical_origin`]) and the listener serves the realm. Default none.
    pub origins: HashMap<Box<str>, RealmId>,
    /// What becomes of a request whose credentials the store cannot tell ([`super::Credentials::Unavailable`]). Default an answer.
    pub store_failure: StoreFailure,
    /// Which channel numbers clients may bind. Default [`ChannelRange::Rfc5766`], because deployed clients (coturn's uclient)
    /// draw from all of it; [`ChannelRange::Rfc8656`] refuses 0x5000 and above with 400 (RFC 8656 section 12.2).
    pub channels: ChannelRange,
    /// Whether MD5 keys with HMAC-SHA1 (RFC 5389 clients) are accepted beside SHA-256. Default true.
    pub allow_md5: bool,
    /// Whether SHA-256 keys are offered and accepted. Default true; false where a user is stored as an MD5 key alone, because
    /// clients of RFC 8489 take the strongest algorithm that they are offered.
    pub allow_sha256: bool,
    /// Whether clients are told that they may hide their name in USERHASH (RFC 8489 section 9.2). Default true; false where
    /// users exist only in the requests that name them (time-limited credentials), because no hash leads to those.
    pub username_anonymity: bool,
    /// What the runtime's listeners are, by [`super::ListenerId`]; one that is missing here is
    /// [`ListenerProfile::default`]. The runtime gives one socket several numbers where its clients differ: one for each
    /// tenant that a TLS server name selects, for instance.
    pub listeners: Vec<ListenerProfile>,
    /// Whether clients on streams may have TCP relayed (RFC 6062). Default true; false refuses with 442.
    pub tcp_relay: bool,
    /// Whether clients may take their allocations along to another address (RFC 8016). Default true: only who asks for a
    /// ticket gets one, and it is good for nothing without the credentials that made the allocation. Where nobody
    /// authenticates, there are none: whoever reads a ticket on its way takes the allocation. False refuses with 405.
    pub mobility: bool,
    /// Tokens in place of passwords (RFC 7635). Default none.
    pub third_party: ThirdParty,
    /// Servers that clients are sent to, in turn; see [`super::AlternateWhen`]. Default none.
    pub alternates: Vec<Alternate>,
    /// Where NAT behaviour can be discovered (RFC 5780), one entry a family. Default nowhere.
    pub nat_discovery: Vec<NatDiscovery>,
    /// How often.
    pub discovery_limits: DiscoveryLimits,
}

/// What becomes of a request whose credentials the store cannot tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreFailure {
    /// 500 (Server Error): the client knows at once, and may ask another server.
    #[default]
    Answer,
    /// Nothing: the client asks again, until its patience is over.
    Drop,
}

/// One kind of client-facing listener.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenerProfile {
    /// How its clients reach the server.
    pub transport: Transport,
    /// The realms that it serves; the first is the one that challenges name, and requests may name any of them. Empty, which
    /// is the default, means all, [`ServerConfig::realm`] first.
    pub realms: Vec<RealmId>,
    /// Whether it takes no new allocations: it is to be closed with its last one.
    pub closing: bool,
}

/// Of a listener that [`ServerConfig::listeners`] does not have.
static DEFAULT_PROFILE: ListenerProfile =
    ListenerProfile { transport: Transport::Udp, realms: Vec::new(), closing: false };

/// The transport between a client and the server (RFC 8656 section 3.1).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, EnumString, IntoStaticStr, Serialize, Deserialize,
)]
#[strum(serialize_all = "lowercase")]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Datagrams.
    #[default]
    Udp,
    /// A stream; the end of the connection is the end of the allocation.
    Tcp,
    /// TLS over TCP.
    Tls,
    /// Datagrams over UDP, encrypted.
    Dtls,
}

impl Transport {
    /// Whether messages arrive in a byte stream (RFC 8489 section 6.2.2, RFC 8656 section 12.5: ChannelData is padded).
    #[must_use]
    pub fn is_stream(self) -> bool {
        matches!(self, Self::Tcp | Self::Tls)
    }
}

/// A key that is never printed: whoever has it makes nonces that the server believes. It is written where a server goes on in another
/// process.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NonceKey(pub [u8; 32]);

impl fmt::Debug for NonceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NonceKey(..)")
    }
}

/// Keys, each in use from a time on. A server alone has one. Of a fleet's the next is known before it is used, so that no server meets what it
/// does not know, and old ones for as long as somebody may come with what they have made.
#[derive(Clone, Debug)]
pub struct NonceKeys {
    oldest: NonceKey,
    /// With the Unix seconds from which they are used, the newest first.
    newer: SmallVec<[(u64, NonceKey); 1]>,
}

impl NonceKeys {
    /// The oldest, which is used for all time before the others; and those, in any order, with the Unix seconds from which they are used.
    #[must_use]
    pub fn new(oldest: NonceKey, newer: impl IntoIterator<Item = (u64, NonceKey)>) -> Self {
        let mut newer: SmallVec<[(u64, NonceKey); 1]> = newer.into_iter().collect();
        newer.sort_by_key(|(from, _)| std::cmp::Reverse(*from));
        Self { oldest, newer }
    }

    /// The one that is used at `unix` seconds.
    #[must_use]
    pub fn at(&self, unix: u64) -> &NonceKey {
        let newest = self.newer.iter().find(|(from, _)| *from <= unix);
        newest.map_or(&self.oldest, |(_, key)| key)
    }

    /// All of them, the newest first.
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
            own_key: NonceKey([0; 32]),
            nonce_keys: NonceKey([0; 32]).into(),
            node: None,
            replays: ReplayGuard::default(),
            owners: MobileOwners::default(),
            connection_counts: ConnectionCounts::default(),
            limits: ServerLimits::default(),
            nonce_lifetime: 3600,
            max_session_duration: MaxSessionDuration::default(),
            bandwidth: Bandwidth::default(),
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
    /// Which peers users of this realm may name.
    #[must_use]
    pub fn peers_in(&self, realm: &str) -> &PeerRules {
        self.realm_peers.get(realm).unwrap_or(&self.peers)
    }

    /// What is ours, for all rules about peers.
    pub fn set_own_endpoints(&mut self, own: &OwnEndpoints) {
        for peers in self.realm_peers.values_mut().chain([&mut self.peers]) {
            peers.own.clone_from(own);
        }
    }

    /// What this listener is.
    #[must_use]
    pub fn listener(&self, id: super::ListenerId) -> &ListenerProfile {
        self.listeners.get(usize::from(id.0)).unwrap_or(&DEFAULT_PROFILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_never_holds_the_nonce_key() {
        let own_key = NonceKey([213; 32]);
        let config = ServerConfig { own_key, nonce_keys: own_key.into(), ..ServerConfig::default() };
        assert!(!format!("{config:?}").contains("213"));
    }

    #[test]
    fn the_key_in_use_is_the_newest_whose_time_has_come() {
        let key = |byte| NonceKey([byte; 32]);
        let keys = NonceKeys::new(key(1), [(200, key(3)), (100, key(2))]);
        for (unix, byte) in [(0, 1), (99, 1), (100, 2), (199, 2), (200, 3), (u64::MAX, 3)] {
            assert_eq!(keys.at(unix).0, [byte; 32], "{unix}");
        }
        assert_eq!(keys.iter().map(|key| key.0[0]).collect::<Vec<_>>(), [3, 2, 1]);
        assert_eq!(NonceKeys::from(key(7)).at(5).0, [7; 32]);
    }
}
