//! Recent refusals of clients, kept in memory by the control thread. Bounded, and without secrets.
//!
//! Repeated refusals of a client for the same reason share an entry with a count. Each kind of refusal has
//! its own list. A full list drops an entry of the client with the most entries, so that neither outsiders
//! nor a scan displace the entries of users.
//!
//! Entries are per user and peer; [`RefusalGroup`] combines them by client and reason.

pub(crate) mod reasons;

pub(crate) use reasons::keys_of_count;

use std::{
    collections::{HashMap, VecDeque, hash_map},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use jiff::Timestamp;
use turnpike_api::{NetworkInfo, RefusalFilter};
use turnpike_relay::TurnedAway;
use turnpike_turn::server::{
    ClientNetwork, CredentialRefusal, Effect, Method, PeerDenial, RequestRefusal, TokenProblem,
};

const MOST: usize = 1024;
/// Number of kinds: see [`Why::kind`].
const KINDS: usize = 5;
const NAMED: usize = 16;

/// Refusals of one client for one reason.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RefusalEntry {
    /// Times of the first and last refusal, Unix milliseconds.
    pub(crate) first_ms: u64,
    pub(crate) last_ms: u64,
    /// Number of refusals that passed the log's rate limit.
    pub(crate) count: u64,
    pub(crate) client: SocketAddr,
    pub(crate) network: ClientNetwork,
    /// Username the client sent; empty if it sent none.
    pub(crate) user: Box<str>,
    pub(crate) realm: Option<Arc<str>>,
    pub(crate) why: Why,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RefusalGroup {
    /// Most recent entry, with the count and first time of the group.
    pub(crate) last: RefusalEntry,
    /// Number of other entries that the group combines.
    pub(crate) others: usize,
    pub(crate) other_users: Vec<Box<str>>,
    pub(crate) other_peers: Vec<SocketAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Why {
    Credentials(CredentialRefusal),
    /// The peer, and the number of other peers in the request, which got no permission either.
    Peer(SocketAddr, PeerDenial, usize),
    Request(Method, u16, RequestRefusal),
    /// An unauthenticated request. Over UDP, its source address may be forged.
    Unproved(Method, u16, RequestRefusal),
    /// A connection or handshake: its stage, and the reason as in metrics.
    Connection(&'static str, &'static str),
}

#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<[VecDeque<RefusalEntry>; KINDS]>);

impl Refusals {
    /// Adds the refusal in an effect, if any; `now_ms` is Unix time.
    pub(crate) fn hear(&self, now_ms: u64, effect: &Effect, network: ClientNetwork) {
        if let Some(entry) = RefusalEntry::of(now_ms, effect, network) {
            self.add(entry);
        }
    }

    pub(crate) fn turned_away(&self, now_ms: u64, turned: &TurnedAway, network: ClientNetwork) {
        self.add(RefusalEntry::of_connection(now_ms, turned, network));
    }

    fn add(&self, mut refusal: RefusalEntry) {
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = &mut kinds[refusal.why.kind()];
        if let Some(known) = kept.iter().position(|known| known.is_same(&refusal))
            && let Some(known) = kept.remove(known)
        {
            refusal = known.followed_by(refusal);
        } else if kept.len() >= MOST {
            forget_one(kept);
        }
        kept.push_back(refusal);
    }

    /// Groups refusals by client and reason: most recent first, but refusals in normal operation last.
    pub(crate) fn find(&self, wanted: &RefusalFilter, most: usize) -> Vec<RefusalGroup> {
        let kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = kinds.iter().flat_map(|kept| kept.iter().rev());
        let mut found: Vec<&RefusalEntry> = kept.filter(|refusal| refusal.is_wanted(wanted)).collect();
        found.sort_by_key(|refusal| std::cmp::Reverse(refusal.last_ms));
        let mut groups: Vec<RefusalGroup> = Vec::new();
        let mut places: HashMap<(IpAddr, Why), usize> = HashMap::new();
        for refusal in found {
            match places.entry((refusal.client.ip(), refusal.why.in_general())) {
                hash_map::Entry::Occupied(place) => groups[*place.get()].add(refusal),
                hash_map::Entry::Vacant(place) => {
                    place.insert(groups.len());
                    groups.push(RefusalGroup::new(refusal.clone()));
                }
            }
        }
        groups.sort_by_key(|group| group.last.why.is_ordinary());
        groups.truncate(most);
        groups
    }
}

fn forget_one(kept: &mut VecDeque<RefusalEntry>) {
    let mut counts: HashMap<IpAddr, usize> = HashMap::new();
    for refusal in &*kept {
        *counts.entry(refusal.client.ip()).or_default() += 1;
    }
    let most = counts.values().max().copied();
    if let Some(oldest) = kept.iter().position(|refusal| counts.get(&refusal.client.ip()).copied() == most) {
        kept.remove(oldest);
    }
}

impl RefusalGroup {
    pub(crate) fn new(last: RefusalEntry) -> Self {
        Self { last, others: 0, other_users: Vec::new(), other_peers: Vec::new() }
    }

    fn add(&mut self, other: &RefusalEntry) {
        self.others += 1;
        self.last.count += other.count;
        self.last.first_ms = self.last.first_ms.min(other.first_ms);
        let user = &other.user;
        if *user != self.last.user && !self.other_users.contains(user) && self.other_users.len() < NAMED {
            self.other_users.push(user.clone());
        }
        if let (Why::Peer(peer, ..), Why::Peer(last, ..)) = (other.why, self.last.why)
            && peer.ip() != last.ip()
            && self.other_peers.iter().all(|known| known.ip() != peer.ip())
            && self.other_peers.len() < NAMED
        {
            self.other_peers.push(peer);
        }
    }
}

impl From<RefusalGroup> for turnpike_api::ClientRefusals {
    fn from(RefusalGroup { last, others, other_users, other_peers }: RefusalGroup) -> Self {
        let named = other_users.into_iter().filter(|user| !user.is_empty());
        Self {
            first_at: at(last.first_ms),
            last_at: at(last.last_ms),
            count: last.count,
            client: last.client.to_string(),
            network: NetworkInfo::of(last.network),
            user: Some(last.user.into_string()).filter(|user| !user.is_empty()),
            realm: last.realm.as_deref().map(str::to_owned),
            asked: last.why.asked().to_owned(),
            code: last.why.code(),
            reason: last.why.reason(),
            remedy: last.why.remedy().to_owned(),
            keys: last.why.keys().iter().map(|key| (*key).to_owned()).collect(),
            others: others as u64,
            other_users: named.map(String::from).collect(),
            other_peers: other_peers.into_iter().map(reasons::peer_name).collect(),
        }
    }
}

fn at(unix_ms: u64) -> String {
    let at = i64::try_from(unix_ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    at.unwrap_or(Timestamp::MAX).to_string()
}

impl RefusalEntry {
    pub(crate) fn of(now_ms: u64, effect: &Effect, network: ClientNetwork) -> Option<Self> {
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
            _ => return None,
        };
        let (user, realm) = (user.clone(), realm.cloned());
        Some(Self { first_ms: now_ms, last_ms: now_ms, count: 1, client, network, user, realm, why })
    }

    pub(crate) fn of_connection(now_ms: u64, turned: &TurnedAway, network: ClientNetwork) -> Self {
        let TurnedAway { client, stage, reason, count, .. } = *turned;
        let (realm, user) = turned.user.clone().unzip();
        let (user, why) = (user.unwrap_or_default(), Why::Connection(stage, reason));
        Self { first_ms: now_ms, last_ms: now_ms, count, client, network, user, realm, why }
    }

    /// The later one of two refusals, with the count of both.
    pub(crate) fn followed_by(&self, later: Self) -> Self {
        Self { first_ms: self.first_ms, count: self.count + later.count, ..later }
    }

    fn is_wanted(&self, RefusalFilter { client, user }: &RefusalFilter) -> bool {
        client.as_ref().is_none_or(|prefix| prefix.contains(self.client.ip()))
            && user.as_ref().is_none_or(|user| self.user.contains(user.as_str()))
    }

    fn is_same(&self, other: &Self) -> bool {
        self.client.ip() == other.client.ip()
            && self.user == other.user
            && self.realm == other.realm
            && self.why.without_changes() == other.why.without_changes()
    }
}

impl Why {
    fn kind(self) -> usize {
        match self {
            Self::Credentials(_) => 0,
            Self::Peer(..) => 1,
            Self::Request(..) if !self.is_ordinary() => 2,
            Self::Connection("dtls_hello", _) => 4,
            Self::Connection(..) => 3,
            Self::Request(..) | Self::Unproved(..) => 4,
        }
    }

    /// True if a limit on allocations was reached.
    pub(crate) fn is_quota(self) -> bool {
        use RequestRefusal::{PrefixQuota, TotalQuota, UserQuota};
        matches!(self, Self::Request(_, _, UserQuota | PrefixQuota | TotalQuota))
    }

    /// True if the client has not shown that it receives packets at its address.
    pub(crate) fn may_be_forged(self) -> bool {
        matches!(self, Self::Unproved(..) | Self::Connection("dtls_hello", _))
    }

    /// True for errors in normal operation: a redirect or a stale nonce.
    pub(crate) fn is_ordinary(self) -> bool {
        matches!(self, Self::Request(_, 300 | 438, _) | Self::Unproved(_, 438, _))
    }

    /// Clears times and ports, which differ each time a refusal is repeated.
    fn without_changes(self) -> Self {
        use CredentialRefusal::{Expired, Token, TooFarAhead};
        match self {
            Self::Credentials(Expired { .. }) => Self::Credentials(Expired { ago: 0 }),
            Self::Credentials(TooFarAhead { .. }) => Self::Credentials(TooFarAhead { ahead: 0 }),
            Self::Credentials(Token(TokenProblem::Future { .. })) => {
                Self::Credentials(Token(TokenProblem::Future { ahead: 0 }))
            }
            Self::Peer(peer, by, _) => Self::Peer(SocketAddr::new(peer.ip(), 0), by, 0),
            Self::Request(method, code, RequestRefusal::PeerFamily(peer)) => {
                let peer = RequestRefusal::PeerFamily(SocketAddr::new(peer.ip(), 0));
                Self::Request(method, code, peer)
            }
            other => other,
        }
    }

    /// Clears the peer, request and attribute, so that only the general reason remains.
    pub(crate) fn in_general(self) -> Self {
        use RequestRefusal::{PeerFamily, UnknownAttribute};
        let in_general = |why| match why {
            UnknownAttribute(_) => UnknownAttribute(0),
            PeerFamily(_) => PeerFamily((Ipv4Addr::UNSPECIFIED, 0).into()),
            why => why,
        };
        match self.without_changes() {
            Self::Peer(_, by, _) => Self::Peer((Ipv4Addr::UNSPECIFIED, 0).into(), by, 0),
            Self::Request(_, code, why) => Self::Request(Method::Binding, code, in_general(why)),
            Self::Unproved(_, code, why) => Self::Unproved(Method::Binding, code, in_general(why)),
            other => other,
        }
    }

    pub(crate) fn asked(self) -> &'static str {
        match self {
            Self::Credentials(_) => "credentials",
            Self::Peer(..) => "peer",
            Self::Request(method, ..) | Self::Unproved(method, ..) => method.into(),
            Self::Connection(stage, _) => stage,
        }
    }

    pub(crate) fn code(self) -> Option<u16> {
        match self {
            Self::Credentials(CredentialRefusal::WrongUser) => Some(441),
            Self::Credentials(_) => Some(401),
            Self::Peer(..) => Some(403),
            Self::Request(_, code, _) | Self::Unproved(_, code, _) => (code != 0).then_some(code),
            Self::Connection(..) => None,
        }
    }
}

#[cfg(test)]
mod tests {
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

    fn hear(refusals: &Refusals, now_ms: u64, effect: &Effect) {
        refusals.hear(now_ms, effect, ClientNetwork::default());
    }

    fn find(refusals: &Refusals, client: Option<&str>, user: Option<&str>) -> Vec<RefusalEntry> {
        groups(refusals, client, user).into_iter().map(|group| group.last).collect()
    }

    fn groups(refusals: &Refusals, client: Option<&str>, user: Option<&str>) -> Vec<RefusalGroup> {
        let client = client.map(|text| text.parse().expect("a prefix"));
        refusals.find(&RefusalFilter { client, user: user.map(str::to_owned) }, 100)
    }

    #[test]
    fn repeated_refusals_share_an_entry_that_moves_to_the_front() {
        let refusals = Refusals::default();
        hear(&refusals, 1000, &refused("192.0.2.9:1", "alice", CredentialRefusal::Expired { ago: 1 }));
        hear(&refusals, 2000, &refused("192.0.2.9:2", "bob", CredentialRefusal::WrongKey));
        hear(&refusals, 3000, &refused("192.0.2.9:3", "alice", CredentialRefusal::Expired { ago: 2 }));
        let found = find(&refusals, None, None);
        assert_eq!(found.len(), 2);
        assert_eq!((&*found[0].user, found[0].count, found[0].client.port()), ("alice", 2, 3));
        assert_eq!(found[0].why.reason(), "expired 2 s ago");
        assert_eq!((found[0].first_ms, found[0].last_ms), (1000, 3000));
        assert_eq!((&*found[1].user, found[1].count), ("bob", 1));
    }

    #[test]
    fn filters_match_client_prefixes_and_parts_of_usernames() {
        let refusals = Refusals::default();
        hear(&refusals, 1, &refused("192.0.2.9:1", "1700000000:alice", CredentialRefusal::WrongKey));
        hear(&refusals, 1, &refused("[2001:db8::9]:1", "bob", CredentialRefusal::WrongKey));
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
    fn entries_are_bounded_and_outsiders_do_not_displace_users() {
        let refusals = Refusals::default();
        hear(&refusals, 1, &refused("192.0.2.9:1", "alice", CredentialRefusal::WrongKey));
        for host in 0..3 * u32::try_from(MOST).expect("few") {
            let client = (std::net::Ipv4Addr::from_bits(0x0A00_0000 + host), 1).into();
            let (stage, reason) = ("tls_handshake", "garbage");
            let turned =
                TurnedAway { client, transport: Transport::Tls, user: None, stage, reason, count: 2 };
            refusals.turned_away(u64::from(host), &turned, ClientNetwork::default());
        }
        assert_eq!(find(&refusals, None, Some("alice")).len(), 1);
        let all = refusals.find(&RefusalFilter::default(), usize::MAX);
        assert_eq!(all.len(), MOST + 1);
        assert_eq!(find(&refusals, Some("10.0.0.1"), None), [], "the oldest was dropped");
    }

    #[test]
    fn refusals_in_normal_operation_come_last() {
        let refusals = Refusals::default();
        let told = |code, proved| {
            let (realm, username) = ("example.org".into(), "alice".into());
            let (client, method, why) = (client("192.0.2.9:1"), Method::Refresh, RequestRefusal::Code);
            Effect::RequestRefused { client, realm, username, proved, method, code, why, suppressed: 0 }
        };
        hear(&refusals, 1, &told(437, true));
        hear(&refusals, 2, &told(438, true));
        hear(&refusals, 3, &told(438, false));
        hear(&refusals, 4, &told(400, false));
        let codes: Vec<Option<u16>> =
            find(&refusals, None, None).iter().map(|refusal| refusal.why.code()).collect();
        assert_eq!(codes, [400, 437, 438, 438].map(Some));
        assert_eq!(find(&refusals, None, None)[0].realm, None, "the client was not authenticated");
    }

    fn peer_refused(from: &str, user: &str, peer: &str, by: PeerDenial) -> Effect {
        let (realm, username) = ("example.org".into(), user.into());
        let (client, peer) = (client(from), peer.parse().expect("an address"));
        Effect::PeerRefused { client, realm, username, peer, others: 0, by, suppressed: 0 }
    }

    #[test]
    fn a_scan_of_many_peers_is_one_group_that_lists_them() {
        let refusals = Refusals::default();
        hear(&refusals, 1, &peer_refused("192.0.2.7:1", "bob", "10.0.0.1:9", PeerDenial::Special));
        for last in 1..=30 {
            let peer = format!("10.0.1.{last}:9");
            for _ in 0..2 {
                hear(&refusals, last, &peer_refused("192.0.2.9:1", "alice", &peer, PeerDenial::Special));
            }
        }
        hear(&refusals, 40, &peer_refused("192.0.2.9:2", "alice", "8.8.8.8:9", PeerDenial::NotAllowed));
        let found = groups(&refusals, None, None);
        let told: Vec<_> =
            found.iter().map(|group| (&*group.last.user, group.last.count, group.others)).collect();
        assert_eq!(told, [("alice", 1, 0), ("alice", 60, 29), ("bob", 1, 0)]);
        let probe = &found[1];
        assert_eq!((probe.last.first_ms, probe.last.last_ms), (1, 30));
        let names: Vec<String> = (14..30).rev().map(|last| format!("10.0.1.{last}:9")).collect();
        assert_eq!(
            turnpike_api::ClientRefusals::from(probe.clone()).other_peers,
            names,
            "the most recent peers except the last one"
        );
        assert_eq!(groups(&refusals, None, Some("bob")).len(), 1);
    }

    #[test]
    fn a_group_covers_one_client_and_lists_its_users() {
        let refusals = Refusals::default();
        for (client, user) in
            [("192.0.2.9:1", "alice"), ("192.0.2.8:1", "carol"), ("192.0.2.9:2", ""), ("192.0.2.9:3", "bob")]
        {
            hear(&refusals, 1, &refused(client, user, CredentialRefusal::NoSuchUser));
        }
        hear(&refusals, 2, &refused("192.0.2.9:3", "dave", CredentialRefusal::WrongKey));
        let found = groups(&refusals, Some("192.0.2.9"), None);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!((&*found[1].last.user, found[1].last.count, found[1].others), ("bob", 3, 2));
        assert_eq!(
            turnpike_api::ClientRefusals::from(found[1].clone()).other_users,
            ["alice"],
            "one entry has no name"
        );
    }

    #[test]
    fn refusals_of_one_client_are_grouped_across_attributes_and_requests() {
        let refusals = Refusals::default();
        for (attribute, method) in [(0x7001, Method::Allocate), (0x7002, Method::Refresh)] {
            let why = RequestRefusal::UnknownAttribute(attribute);
            let (realm, username, code) = ("example.org".into(), "alice".into(), 420);
            let client = client("192.0.2.9:1");
            let proved = true;
            hear(
                &refusals,
                1,
                &Effect::RequestRefused { client, realm, username, proved, method, code, why, suppressed: 0 },
            );
        }
        let found = groups(&refusals, None, None);
        assert_eq!((found.len(), found[0].last.count, found[0].others), (1, 2, 1), "{found:?}");
    }

    #[test]
    fn a_full_list_drops_entries_of_the_client_with_the_most_entries() {
        let refusals = Refusals::default();
        hear(&refusals, 1, &refused("192.0.2.9:1", "alice", CredentialRefusal::WrongKey));
        for number in 0..3 * MOST {
            hear(
                &refusals,
                2,
                &refused("192.0.2.8:1", &format!("guess{number}"), CredentialRefusal::NoSuchUser),
            );
        }
        assert_eq!(find(&refusals, None, Some("alice")).len(), 1);
        assert_eq!(find(&refusals, None, Some("guess0")), [], "the oldest of the other client was dropped");
        assert_eq!(groups(&refusals, Some("192.0.2.8"), None)[0].others, MOST - 2);
    }
}
