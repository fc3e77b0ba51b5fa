//! One node of a fleet: its identity, its view of the other nodes, and its counters.

mod lifecycle;
mod limits;
pub(super) mod ring;

use std::{
    collections::hash_map::RandomState,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak,
        atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::watch;
use turnpike_config::{FleetSettings, Mistake, Mistakes, Settings};
use turnpike_fleet::{
    Card, Charges, FleetMembers, FleetView, MOST_NODES, Message, NodeName, Notice, OpenedMessages,
    OrphanedQuota, RecentRedirects, Sealer,
};
use turnpike_relay::Relay;
use turnpike_stores::{FleetAddress, FleetStore, StoreError};
use turnpike_turn::server::NonceKey;

use super::{
    advertised_addresses::Entrances,
    announcements::Announcements,
    banned::Banned,
    health::Health,
    keys::{Custody, open_ring},
    load::Room,
    offer::{FleetOffer, NodeIdentity},
    questions::QuestionSender,
    quotas::FleetQuotas,
    recovering::Recovering,
    tallies::FleetCounters,
    unix,
};
use crate::ServeError;

const PATIENCE: Duration = Duration::from_secs(2);
/// Purposes of sealed data: data sealed for one purpose cannot be opened for another.
pub(super) const CARD: &str = "card";
pub(super) const BAN: &str = "ban";

pub(super) struct OwnNode {
    pub(super) name: NodeName,
    /// Random number that distinguishes processes with the same name.
    pub(super) incarnation: u64,
    pub(super) sealer: Sealer,
    pub(super) store: FleetStore,
    pub(super) banned: Arc<Banned>,
    pub(super) announcements: Announcements,
    pub(super) health: Health,
    pub(super) quotas: FleetQuotas,
    pub(super) recovery: Recovering,
    pub(super) members: Mutex<FleetMembers>,
    orphaned_quota: Mutex<OrphanedQuota>,
    opened: Mutex<OpenedMessages>,
    pub(super) sight: RwLock<Arc<Sight>>,
    pub(super) sent: Mutex<RecentRedirects>,
    /// Hash function for the keys of [`RecentRedirects`].
    pub(super) hasher: RandomState,
    pub(super) tallies: FleetCounters,
    pub(super) questions: QuestionSender,
    /// Notified when another node has written to the shared certificate orders.
    pub(super) orders_changed: watch::Sender<()>,
    /// True if levels and bans must be read again, because the store has lost some of them.
    pub(super) rereads: AtomicBool,
    settings: RwLock<FleetSettings>,
    began: Instant,
    /// Number assigned by the store; 0 for none.
    number: AtomicU16,
    nodes: AtomicU32,
    custody: Mutex<Custody>,
    reach: RwLock<Reach>,
    pub(super) card_is_put: AtomicBool,
    relay: OnceLock<Weak<Relay>>,
    /// True while allocations of the previous process are being imported; they are accepted even above the
    /// limits.
    inherits: AtomicBool,
    /// True if the previous process was this node.
    goes_on: bool,
    /// True during a handover, when no quotas are exchanged.
    rests: AtomicBool,
    pub(super) exchanging: tokio::sync::Mutex<()>,
    /// Time before which no quotas are sent, in milliseconds on the clock of [`OwnNode::now_ms`].
    quiet_until: AtomicU64,
    cordoned: AtomicBool,
    /// True if the server is shutting down and accepts no new clients.
    stops: AtomicBool,
    /// True if this node has left the fleet and sends nothing more.
    left: AtomicBool,
    /// True if another process is now this node. This process then only listens for bans, which may affect
    /// the allocations that stayed here.
    handed_over: AtomicBool,
}

#[derive(Clone, Default)]
struct Reach {
    card: Option<Arc<Card>>,
    /// Addresses that no other node shares.
    own: Vec<SocketAddr>,
    room: Room,
}

#[derive(Default)]
pub(super) struct Sight {
    pub(super) view: FleetView,
    pub(super) charges: Charges,
    pub(super) own: u16,
    /// Time at which the fleet was last polled, in milliseconds on the clock of [`OwnNode::now_ms`].
    pub(super) at_ms: u64,
}

impl OwnNode {
    /// Does not connect yet. Takes over the state that the previous process offered, if it was the same node.
    pub(super) fn new(
        settings: &Settings,
        address: &FleetAddress,
        own: NonceKey,
        before: Option<&FleetOffer>,
        questions: QuestionSender,
    ) -> Result<Self, ServeError> {
        let fleet = &settings.fleet;
        let name = match &fleet.node {
            Some(name) => name.clone(),
            None => name_of_machine(settings)?,
        };
        let secret = fleet.secret.as_ref().map_or("", |secret| secret.reveal());
        let (sealer, store) = (Sealer::new(secret), FleetStore::new(address, fleet.name.as_str(), PATIENCE));
        let identity =
            NodeIdentity { store: store.name().to_owned(), fleet: fleet.name.clone(), node: name.clone() };
        let offered = before.and_then(|before| before.node.as_ref());
        let own_is_used = before.is_some() && offered.is_none_or(|offered| offered.own_is_used);
        let mut custody = Custody::new(own, own_is_used);
        let same = offered.filter(|offered| offered.identity == identity);
        if let Some(sealed) = same.and_then(|same| same.ring.as_ref()) {
            custody
                .take(open_ring(&sealer, sealed).ok_or(ServeError::OtherSecret { store: identity.store })?);
        }
        let quotas = FleetQuotas::default();
        if let Some(same) = same {
            quotas.take_over(&same.told);
        }
        Ok(Self {
            name,
            incarnation: same.map_or_else(|| rand::random::<u64>().max(1), |same| same.incarnation),
            sealer,
            store,
            banned: Arc::default(),
            announcements: Announcements::default(),
            health: Health::default(),
            quotas,
            recovery: Recovering::new(same.and_then(|same| same.era)),
            members: Mutex::default(),
            orphaned_quota: Mutex::default(),
            opened: Mutex::new(
                same.map_or_else(|| OpenedMessages::since(unix()), |same| same.opened.clone()),
            ),
            sight: RwLock::default(),
            sent: Mutex::default(),
            hasher: RandomState::new(),
            tallies: FleetCounters::default(),
            questions,
            orders_changed: watch::Sender::default(),
            rereads: AtomicBool::new(false),
            settings: RwLock::new(fleet.clone()),
            began: Instant::now(),
            number: AtomicU16::new(same.map_or(0, |same| same.number)),
            nodes: AtomicU32::new(1),
            custody: Mutex::new(custody),
            reach: RwLock::default(),
            card_is_put: AtomicBool::new(false),
            relay: OnceLock::new(),
            inherits: AtomicBool::new(before.is_some()),
            goes_on: same.is_some(),
            rests: AtomicBool::new(false),
            exchanging: tokio::sync::Mutex::default(),
            quiet_until: AtomicU64::new(0),
            cordoned: AtomicBool::new(offered.is_some_and(|offered| offered.is_cordoned)),
            stops: AtomicBool::new(false),
            left: AtomicBool::new(false),
            handed_over: AtomicBool::new(false),
        })
    }

    pub(super) fn set_reach(&self, Entrances { all, own }: Entrances, room: Room) {
        let settings = self.settings();
        let card = Arc::new(Card {
            name: self.name.clone(),
            incarnation: self.incarnation,
            zone: settings.zone.map(String::from).unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            entrances: all,
            domain: settings.domain,
        });
        let mut reach = self.reach.write().unwrap_or_else(PoisonError::into_inner);
        if reach.card.as_ref() != Some(&card) {
            reach.card = Some(card);
            self.card_is_put.store(false, Ordering::Relaxed);
        }
        (reach.own, reach.room) = (own, room);
    }

    pub(super) fn settings(&self) -> FleetSettings {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set(&self, settings: &Settings) {
        let new = &settings.fleet;
        let mut settings = self.settings.write().unwrap_or_else(PoisonError::into_inner);
        (settings.redirect, settings.allocations) = (new.redirect, new.allocations);
        (settings.bits_per_second, settings.key_rotation) = (new.bits_per_second, new.key_rotation);
    }

    pub(super) fn setting<T>(&self, of: impl FnOnce(&FleetSettings) -> T) -> T {
        of(&self.settings.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn is_alone(&self) -> bool {
        self.number() == 0 || self.health.is_alone(self.now_ms())
    }

    pub(super) fn answered(&self) {
        self.health.answered(self.now_ms());
    }

    pub(super) fn beaten(&self) {
        self.health.beaten(self.now_ms());
    }

    pub(super) fn unbeaten(&self, error: &StoreError) {
        self.health.unbeaten(self.now_ms(), error);
    }

    pub(super) fn failed(&self, error: &StoreError) {
        self.health.failed(self.now_ms(), error);
    }

    /// Node number in CONNECTION-IDs and tickets; 0 for none.
    pub(super) fn number(&self) -> u16 {
        self.number.load(Ordering::Relaxed)
    }

    pub(super) fn set_number(&self, number: u16) {
        if self.number.swap(number, Ordering::Relaxed) != number {
            tracing::info!(node = %self.name, number, store = self.store.name(), "this node is a member of the fleet");
            self.put_keys();
        }
    }

    /// Gives up the number, which now belongs to another node.
    pub(super) fn lose_number(&self) {
        if self.number.swap(0, Ordering::Relaxed) != 0 {
            self.put_keys();
        }
    }

    /// Number to request: derived from the name, so that it usually stays the same across restarts.
    pub(super) fn wanted_number(&self) -> u16 {
        match self.number() {
            0 => {
                let hash =
                    self.name.as_str().bytes().fold(0x811C_9DC5_u32, |hash, byte| {
                        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
                    });
                u16::try_from(hash % u32::from(MOST_NODES)).unwrap_or_default() + 1
            }
            number => number,
        }
    }

    pub(super) fn nodes(&self) -> u32 {
        self.nodes.load(Ordering::Relaxed)
    }

    pub(super) fn set_nodes(&self, nodes: usize) {
        self.nodes.store(u32::try_from(nodes).unwrap_or(u32::MAX).max(1), Ordering::Relaxed);
    }

    pub(super) fn card(&self) -> Option<Arc<Card>> {
        self.reach().card.as_ref().map(Arc::clone)
    }

    pub(super) fn is_own(&self, address: SocketAddr) -> bool {
        self.reach().own.contains(&address)
    }

    pub(super) fn room(&self) -> Room {
        self.reach().room
    }

    fn reach(&self) -> RwLockReadGuard<'_, Reach> {
        self.reach.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn sight(&self) -> Arc<Sight> {
        Arc::clone(&self.sight.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set_sight(&self, sight: Sight) {
        *self.sight.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(sight);
    }

    pub(super) fn members(&self) -> MutexGuard<'_, FleetMembers> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn orphaned_quota(&self) -> MutexGuard<'_, OrphanedQuota> {
        self.orphaned_quota.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn opened(&self) -> MutexGuard<'_, OpenedMessages> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The returned reference must not be held across an await, because the server cannot stop while it
    /// exists.
    pub(super) fn relay(&self) -> Option<Arc<Relay>> {
        self.relay.get()?.upgrade()
    }

    pub(super) fn seal(&self, purpose: &str, text: &[u8]) -> Vec<u8> {
        self.sealer.seal(purpose, text, rand::random())
    }

    pub(super) async fn say(&self, notice: Notice) -> Result<(), StoreError> {
        let message = Message { from: self.name.clone(), at: unix(), notice };
        self.store.say(&message.seal(&self.sealer, rand::random())).await
    }
}

pub(super) fn host_name() -> String {
    let told = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    told.trim().to_owned()
}

fn name_of_machine(settings: &Settings) -> Result<NodeName, Mistakes> {
    let name = host_name();
    name.parse().map_err(|why| {
        let problem = format!("not set, and the host name {name:?} is not a valid node name: {why}");
        Mistakes(vec![Mistake::new(
            settings.origin("fleet.node"),
            "fleet.node",
            problem,
            "set a name, different on each node",
        )])
    })
}

#[cfg(test)]
mod tests {
    use turnpike_config::Secret;
    use turnpike_fleet::{Books, EpochState, KeyRing, QuotaGrant, QuotaLevel, StoreEpoch};

    use turnpike_relay::SharedQuota;
    use turnpike_turn::server::{QuotaRefusal, UserRef};

    use super::*;
    use crate::fleet::questions;

    const OWN: NonceKey = NonceKey([9; 32]);

    fn node(name: &str) -> OwnNode {
        in_place_of(name, None)
    }

    fn in_place_of(name: &str, before: Option<&FleetOffer>) -> OwnNode {
        let mut settings = Settings::default();
        settings.fleet.node = Some(name.parse().expect("a name"));
        settings.fleet.secret = Some(Secret::new("a secret that is long enough for it"));
        let address = "redis://127.0.0.1:1".parse().expect("an address");
        OwnNode::new(&settings, &address, OWN, before, questions::channel().0).expect("nothing wrong")
    }

    #[test]
    fn the_wanted_number_depends_only_on_the_name() {
        let (one, other) = (node("a"), node("b"));
        assert_eq!(one.wanted_number(), node("a").wanted_number());
        assert_ne!(one.wanted_number(), other.wanted_number());
        assert!((1..=MOST_NODES).contains(&one.wanted_number()));
        one.set_number(7);
        assert_eq!((one.wanted_number(), one.keys().node), (7, Some(7)));
        one.lose_number();
        assert_eq!(one.keys().node, Some(0), "still part of a fleet");
    }

    #[test]
    fn a_node_that_is_alone_enforces_limits_locally() {
        let node = node("a");
        assert!(node.is_alone() && !node.terms().enforced);
        node.set_number(7);
        assert!(node.is_alone(), "no answer from the store yet");
        node.answered();
        assert!(!node.is_alone() && node.terms().enforced);
        assert_eq!(node.terms().books, Books::Unknown, "the epoch is not known yet");
    }

    #[test]
    fn draining_for_any_reason_refuses_new_clients() {
        let node = node("a");
        node.set_cordoned(true);
        assert!(node.is_cordoned() && node.is_draining());
        node.set_cordoned(false);
        assert!(!node.is_draining());
        node.stop_taking();
        assert!(node.is_draining() && !node.is_cordoned());
    }

    fn era(number: u64, is_whole: bool) -> EpochState {
        EpochState { era: StoreEpoch { number, since_ms: 7 }, is_whole }
    }

    fn settled(name: &str) -> OwnNode {
        let node = node(name);
        node.set_number(7);
        node.answered();
        node.hear_era(era(1, true));
        node.recovery.looked(3);
        node
    }

    #[test]
    fn a_node_keeps_its_quota_while_an_emptied_store_recovers() {
        let node = settled("a");
        node.set_nodes(3);
        (0..6).for_each(|_| assert!(node.acquire(asked(10)).is_ok()));
        let bucket = node.buckets(UserRef::new("here", "alice")).user;
        let asks = node.quotas.asks(10, node.terms());
        let ask = asks.iter().find(|ask| ask.bucket == bucket).expect("the bucket is sent");
        let grant = QuotaGrant { bucket, told: ask.used, held: 7, sum: 7 };
        node.quotas.granted(&[grant], node.terms());
        node.quotas.put_levels(&[(bucket, QuotaLevel::Heavy)], Books::Whole);
        node.hear_era(era(2, false));
        assert!(node.is_recovering() && node.recovery.is_to_clear());
        node.quotas.set_levels(&[], node.recovery.books());
        let undecided = QuotaRefusal::Undecided { is_user: true };
        assert_eq!([node.acquire(asked(10)), node.acquire(asked(10))], [Ok(()), Err(undecided)]);
        node.recovery.cleared(era(2, false).era);
        node.tell_all_anew();
        assert!(node.quotas.lost() > 0 && node.rereads.load(Ordering::Relaxed));
        let asks = node.quotas.asks(10, node.terms());
        let ask = asks.iter().find(|ask| ask.bucket == bucket).expect("the bucket is sent again");
        assert_eq!((ask.used, ask.want), (7, 7));
        node.hear_era(era(2, true));
        assert!(!node.is_recovering());
    }

    #[test]
    fn a_node_started_during_recovery_grants_its_equal_share() {
        let node = node("a");
        node.set_number(7);
        node.answered();
        node.set_nodes(3);
        node.hear_era(era(1, false));
        assert_eq!((0..60).filter(|_| node.acquire(asked(30)).is_ok()).count(), 10);
        assert_eq!(node.acquire(asked(30)), Err(QuotaRefusal::Undecided { is_user: true }));
    }

    fn asked(of_user: usize) -> SharedQuota<'static> {
        SharedQuota { user: UserRef::new("here", "alice"), of_realm: None, of_user }
    }

    fn offered(node: &OwnNode) -> FleetOffer {
        let offer = FleetOffer { node: Some(node.offer()), ..FleetOffer::default() };
        serde_json::from_slice(&serde_json::to_vec(&offer).expect("serializable")).expect("deserializable")
    }

    #[test]
    fn a_new_process_continues_as_the_same_node() {
        let before = settled("a");
        before.set_cordoned(true);
        let _ = before.keys();
        before.custody().take(KeyRing::first(100, [1; 32]).rotated(100, [2; 32]));
        assert!(before.acquire(asked(1)).is_ok());
        let asks = before.quotas.asks(10, before.terms());
        assert!(!asks.is_empty() && !before.rests());
        let message =
            Message { from: "b".parse().expect("a name"), at: unix(), notice: Notice::RulesChanged };
        let sealed = message.seal(&before.sealer, [1; 12]);
        let opens = |node: &OwnNode| node.opened().open(&node.sealer, unix(), &sealed).is_ok();
        assert!(opens(&before));
        let offer = offered(&before);
        assert!(before.rests(), "no quota exchange during a handover");
        let after = in_place_of("a", Some(&offer));
        assert!(after.goes_on() && after.is_cordoned());
        assert!(!opens(&after), "only one process accepts a message");
        assert_eq!(after.recovery.era(), before.recovery.era());
        assert_eq!(after.terms().books, Books::Whole);
        assert_eq!((after.incarnation, after.number(), after.ring_version()), (before.incarnation, 7, 2));
        let keys = |node: &OwnNode| node.keys().keys.iter().map(|key| key.0).collect::<Vec<_>>();
        assert_eq!(keys(&after), keys(&before));
        after.answered();
        assert!(
            after.acquire(asked(1)).is_ok() && after.acquire(asked(1)).is_ok(),
            "imported allocations are accepted above the limit"
        );
        after.inherits.store(false, Ordering::Relaxed);
        assert_eq!(after.acquire(asked(1)), Err(QuotaRefusal::User));
        let again =
            |asks: Vec<turnpike_fleet::Ask>| -> Vec<_> { asks.iter().map(|ask| ask.bucket).collect() };
        let told = again(after.quotas.asks(10, after.terms()));
        assert!(
            asks.iter().all(|ask| told.contains(&ask.bucket)),
            "every bucket known to the store is sent again"
        );
        before.resume_exchanges();
        assert!(!before.rests());
        before.hand_over();
        assert!(before.is_over() && !before.is_deaf(), "allocations may remain");
    }

    #[test]
    fn a_restarted_node_ignores_messages_from_before_the_restart() {
        let node = node("a");
        let opens = |at| {
            let from = "b".parse().expect("a name");
            let sealed = Message { from, at, notice: Notice::RulesChanged }.seal(&node.sealer, [1; 12]);
            node.opened().open(&node.sealer, unix(), &sealed).is_ok()
        };
        assert!(!opens(unix() - 60) && opens(unix()));
    }

    #[test]
    fn a_handover_to_a_different_name_or_secret_is_refused() {
        let before = node("a");
        before.set_number(7);
        before.custody().take(KeyRing::first(100, [1; 32]));
        let offer = offered(&before);
        let other = in_place_of("b", Some(&offer));
        assert!(!other.goes_on());
        assert_eq!((other.number(), other.ring_version()), (0, 0));
        assert_ne!(other.incarnation, before.incarnation);
        let mut settings = Settings::default();
        settings.fleet.node = "a".parse().ok();
        settings.fleet.secret = Some(Secret::new("another secret that is long enough for it"));
        let address = "redis://127.0.0.1:1".parse().expect("an address");
        let refused = OwnNode::new(&settings, &address, OWN, Some(&offer), questions::channel().0);
        assert!(matches!(refused, Err(ServeError::OtherSecret { .. })));
    }

    #[test]
    fn the_servers_own_key_stays_valid_after_joining_a_fleet() {
        let before = FleetOffer::default();
        let node = in_place_of("a", Some(&before));
        node.custody().take(KeyRing::first(100, [1; 32]));
        assert!(node.keys().keys.iter().any(|key| key.0 == OWN.0));
    }

    #[test]
    fn the_host_name_is_a_valid_node_name() {
        let name = name_of_machine(&Settings::default());
        assert!(name.is_ok(), "{name:?}");
    }
}
