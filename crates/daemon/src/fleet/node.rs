//! One node: what it is called, what it knows of the others, and what it counts.

use std::{
    collections::hash_map::RandomState,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::time::timeout;
use turnpike_config::{FleetSettings, Mistake, Mistakes, Settings};
use turnpike_fleet::{
    Card, Charges, MOST_NODES, Members, Message, NodeName, Notice, Sealer, SentAway, Terms, View,
};
use turnpike_relay::{Relay, SharedQuota};
use turnpike_stores::{FleetAddress, FleetStore, StoreError};
use turnpike_turn::server::QuotaRefusal;

use super::{
    banned::Banned,
    counts::Tallies,
    entrances::Entrances,
    health::Health,
    keys::{Custody, NodeKeys, Step},
    orders::QuestionSender,
    quotas::{Buckets, Quotas},
    unix,
};

/// How long the store has for an answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a node that goes takes to say so.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// Before a store that may have lost something is told everything anew.
const REJOIN_MS: u64 = 2000;
/// So many buckets it is told of in a second then, by all nodes together.
const TOLD_A_SECOND: u64 = 100_000;
/// What is sealed as one of these opens as nothing else.
const RING: &str = "ring";
pub(super) const CARD: &str = "card";
pub(super) const BAN: &str = "ban";

/// This node, and what it knows of the fleet.
pub(super) struct Node {
    pub(super) name: NodeName,
    /// By chance: which process of that name.
    pub(super) incarnation: u64,
    pub(super) sealer: Sealer,
    pub(super) store: FleetStore,
    pub(super) banned: Arc<Banned>,
    pub(super) health: Health,
    pub(super) quotas: Quotas,
    pub(super) members: Mutex<Members>,
    pub(super) sight: RwLock<Arc<Sight>>,
    pub(super) sent: Mutex<SentAway>,
    /// For the hashes of [`SentAway`].
    pub(super) hasher: RandomState,
    pub(super) tallies: Tallies,
    /// Another node's questions, for who answers them.
    pub(super) questions: QuestionSender,
    /// Levels and bans are to be read again, because the store has lost some.
    pub(super) rereads: AtomicBool,
    settings: RwLock<FleetSettings>,
    began: Instant,
    /// What the store gave us; 0 for none.
    number: AtomicU16,
    /// How many nodes there are, this one included.
    nodes: AtomicU32,
    custody: Mutex<Custody>,
    card: OnceLock<Card>,
    own: OnceLock<Vec<SocketAddr>>,
    relay: OnceLock<Weak<Relay>>,
    /// When the store is to be told everything anew, by our clock, though it knows us.
    rejoins_at: AtomicU64,
    /// Until then it is told nothing of quotas.
    quiet_until: AtomicU64,
    cordoned: AtomicBool,
    /// The server takes nobody new until it ends.
    stops: AtomicBool,
    /// It has left: nothing more is told of it.
    left: AtomicBool,
}

/// The fleet as it was when it was looked at last.
#[derive(Default)]
pub(super) struct Sight {
    pub(super) view: View,
    pub(super) charges: Charges,
    /// Our own number then.
    pub(super) own: u16,
    /// When, by our clock.
    pub(super) at_ms: u64,
}

impl Node {
    /// Connects to nothing yet.
    pub(super) fn new(
        settings: &Settings,
        address: &FleetAddress,
        questions: QuestionSender,
    ) -> Result<Self, Mistakes> {
        let fleet = &settings.fleet;
        let name = match &fleet.node {
            Some(name) => name.clone(),
            None => name_of_machine(settings)?,
        };
        let secret = fleet.secret.as_ref().map_or("", |secret| secret.reveal());
        Ok(Self {
            name,
            incarnation: rand::random::<u64>().max(1),
            sealer: Sealer::new(secret),
            store: FleetStore::new(address, fleet.name.as_str(), PATIENCE),
            banned: Arc::default(),
            health: Health::default(),
            quotas: Quotas::default(),
            members: Mutex::default(),
            sight: RwLock::default(),
            sent: Mutex::default(),
            hasher: RandomState::new(),
            tallies: Tallies::default(),
            questions,
            rereads: AtomicBool::new(false),
            settings: RwLock::new(fleet.clone()),
            began: Instant::now(),
            number: AtomicU16::new(0),
            nodes: AtomicU32::new(1),
            custody: Mutex::new(Custody::new(rand::random())),
            card: OnceLock::new(),
            own: OnceLock::new(),
            relay: OnceLock::new(),
            rejoins_at: AtomicU64::new(u64::MAX),
            quiet_until: AtomicU64::new(0),
            cordoned: AtomicBool::new(false),
            stops: AtomicBool::new(false),
            left: AtomicBool::new(false),
        })
    }

    /// The relay runs, and clients come in here.
    pub(super) fn begin(&self, relay: Weak<Relay>, entrances: Entrances) {
        let _ = self.relay.set(relay);
        let _ = self.own.set(entrances.own);
        let settings = self.settings();
        let card = Card {
            name: self.name.clone(),
            incarnation: self.incarnation,
            zone: settings.zone.map(String::from).unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            entrances: entrances.all,
            domain: settings.domain,
        };
        let _ = self.card.set(card);
        self.put_keys();
    }

    pub(super) fn settings(&self) -> FleetSettings {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What a reload can change.
    pub(super) fn set(&self, settings: &Settings) {
        let new = &settings.fleet;
        let mut settings = self.settings.write().unwrap_or_else(PoisonError::into_inner);
        (settings.redirect, settings.allocations) = (new.redirect, new.allocations);
        (settings.bits_per_second, settings.key_rotation) = (new.bits_per_second, new.key_rotation);
    }

    /// Something of them, without a copy of all.
    pub(super) fn setting<T>(&self, of: impl FnOnce(&FleetSettings) -> T) -> T {
        of(&self.settings.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Milliseconds since this process began.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn is_alone(&self) -> bool {
        self.number() == 0 || self.health.is_alone(self.now_ms())
    }

    pub(super) fn answered(&self) {
        self.health.answered(self.now_ms());
    }

    pub(super) fn failed(&self, error: &StoreError) {
        self.health.failed(self.now_ms(), error);
    }

    /// The number that CONNECTION-IDs and tickets hold; 0 for none.
    pub(super) fn number(&self) -> u16 {
        self.number.load(Ordering::Relaxed)
    }

    /// The store has given us this number.
    pub(super) fn set_number(&self, number: u16) {
        if self.number.swap(number, Ordering::Relaxed) != number {
            tracing::info!(node = %self.name, number, store = self.store.name(), "this node is one of the fleet");
            self.put_keys();
        }
    }

    /// Nobody may send clients here by a number that is another's.
    pub(super) fn lose_number(&self) {
        if self.number.swap(0, Ordering::Relaxed) != 0 {
            self.put_keys();
        }
    }

    /// The number that it would like: the same for each process of a name, as far as others leave it.
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

    pub(super) fn card(&self) -> Option<&Card> {
        self.card.get()
    }

    /// Addresses that are ours alone.
    pub(super) fn own(&self) -> &[SocketAddr] {
        self.own.get().map_or(&[], Vec::as_slice)
    }

    pub(super) fn sight(&self) -> Arc<Sight> {
        Arc::clone(&self.sight.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set_sight(&self, sight: Sight) {
        *self.sight.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(sight);
    }

    pub(super) fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Not to be kept while waiting: the server does not stop as long as this is there.
    pub(super) fn relay(&self) -> Option<Arc<Relay>> {
        self.relay.get()?.upgrade()
    }

    /// Whether nothing more is to be done.
    pub(super) fn is_over(&self) -> bool {
        self.left.load(Ordering::Relaxed) || self.relay.get().is_some_and(|relay| relay.strong_count() == 0)
    }

    pub(super) fn is_cordoned(&self) -> bool {
        self.cordoned.load(Ordering::Relaxed)
    }

    /// Whether nobody new is taken, for whatever reason.
    pub(super) fn is_draining(&self) -> bool {
        self.is_cordoned() || self.stops.load(Ordering::Relaxed)
    }

    /// An administrator has this node take nobody new, or clients again.
    pub(super) fn set_cordoned(&self, cordoned: bool) {
        if self.cordoned.swap(cordoned, Ordering::Relaxed) == cordoned {
            return;
        }
        if cordoned {
            tracing::info!("drained in the fleet: new clients are sent to other nodes; the program runs on");
        } else {
            tracing::info!("drained no more in the fleet: clients are taken again");
        }
        if let Some(relay) = self.relay() {
            relay.set_draining(self.is_draining());
        }
    }

    pub(super) fn stop_taking(&self) {
        self.stops.store(true, Ordering::Relaxed);
    }

    /// The connection to the store was lost, and it may have lost something with that: it is told everything anew. So are the others, and the
    /// more there is to tell, the longer they take about it.
    pub(super) fn rejoin_soon(&self) {
        let buckets = self.quotas.counts().buckets * u64::from(self.nodes());
        let within = REJOIN_MS + buckets * 1000 / TOLD_A_SECOND;
        self.rejoins_at.store(self.now_ms() + rand::random::<u64>() % within, Ordering::Relaxed);
    }

    /// Whether it is time for that; once.
    pub(super) fn is_to_rejoin(&self) -> bool {
        let is_due = self.rejoins_at.load(Ordering::Relaxed) <= self.now_ms();
        if is_due {
            self.rejoins_at.store(u64::MAX, Ordering::Relaxed);
        }
        is_due
    }

    /// After a moment, in which others begin with the same.
    pub(super) fn tell_all_anew(&self) {
        self.rejoins_at.store(u64::MAX, Ordering::Relaxed);
        self.quiet_until.store(self.now_ms() + rand::random::<u64>() % REJOIN_MS, Ordering::Relaxed);
        self.rereads.store(true, Ordering::Relaxed);
        self.quotas.tell_all(self.terms());
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.now_ms() < self.quiet_until.load(Ordering::Relaxed)
    }

    pub(super) fn terms(&self) -> Terms {
        Terms { nodes: self.nodes(), enforced: !self.is_alone() }
    }

    pub(super) fn acquire(&self, asked: SharedQuota<'_>) -> Result<(), QuotaRefusal> {
        let total = match self.setting(|settings| settings.allocations) {
            0 => u32::MAX,
            limit => limit,
        };
        self.quotas.acquire(&self.buckets(asked.realm, asked.identity), &asked, total, self.terms())
    }

    pub(super) fn release(&self, realm: &str, identity: &str) {
        self.quotas.release(&self.buckets(realm, identity));
    }

    fn buckets(&self, realm: &str, identity: &str) -> Buckets {
        let sealer = &self.sealer;
        Buckets { total: sealer.total(), realm: sealer.realm(realm), user: sealer.user(realm, identity) }
    }

    /// For whoever has the fleet's secret.
    pub(super) fn seal(&self, purpose: &str, text: &[u8]) -> Vec<u8> {
        self.sealer.seal(purpose, text, rand::random())
    }

    /// Says something to all nodes, this one included.
    pub(super) async fn say(&self, notice: Notice) -> Result<(), StoreError> {
        let message = Message { from: self.name.clone(), at: unix(), notice };
        self.store.say(&message.seal(&self.sealer, rand::random())).await
    }

    pub(super) fn keys(&self) -> NodeKeys {
        NodeKeys { keys: self.custody().keys(), node: Some(self.number()) }
    }

    pub(super) fn ring_version(&self) -> u64 {
        self.custody().version()
    }

    /// The store has a key ring of this version: it is read, made, or put right.
    pub(super) async fn look_after_keys(&self, stored: u64) -> Result<(), KeyError> {
        let rotation = self.setting(|settings| u64::from(settings.key_rotation));
        let step = self.custody().step(stored, unix(), rotation, rand::random());
        match step {
            Step::Nothing => {}
            Step::Read => {
                let Some(sealed) = self.store.ring().await? else { return Ok(()) };
                let opened = self.sealer.open(RING, &sealed);
                let ring = opened.and_then(|bytes| turnpike_fleet::KeyRing::from_bytes(&bytes));
                self.custody().take(ring.ok_or(KeyError::Sealed)?);
                self.put_keys();
            }
            Step::Put { before, ring } => {
                let sealed = self.seal(RING, &ring.to_bytes());
                // Where another node was faster, the next beat says so.
                if self.store.put_ring(before, ring.version, &sealed).await? {
                    self.custody().take(ring);
                    self.put_keys();
                }
            }
        }
        Ok(())
    }

    /// The workers use these keys from now on.
    fn put_keys(&self) {
        if let Some(relay) = self.relay() {
            let NodeKeys { keys, node } = self.keys();
            relay.set_keys(keys, node);
        }
    }

    fn custody(&self) -> MutexGuard<'_, Custody> {
        self.custody.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that this node goes, and gives back what it held: others need not find out.
    pub(super) async fn leave(&self) {
        if self.left.swap(true, Ordering::Relaxed) || self.number() == 0 {
            return;
        }
        let goodbye = async {
            self.say(Notice::Left { incarnation: self.incarnation }).await?;
            while self.store.reap(&self.name, self.number(), true).await? {}
            Ok::<_, StoreError>(())
        };
        match timeout(LAST_WORDS, goodbye).await {
            Ok(Ok(())) => tracing::info!("this node has left the fleet"),
            Ok(Err(error)) => tracing::warn!("{error}; the other nodes find out that this one has left"),
            Err(_) => {
                tracing::warn!("the fleet's store is slow; the other nodes find out that this one has left");
            }
        }
    }
}

/// Why a node has no key ring.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeyError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("its keys were sealed with another fleet.secret")]
    Sealed,
}

/// As the kernel has it.
fn name_of_machine(settings: &Settings) -> Result<NodeName, Mistakes> {
    let told = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = told.trim();
    name.parse().map_err(|why| {
        let problem = format!("there is none, and the name of this machine is {name:?}: {why}");
        Mistakes(vec![Mistake::new(
            settings.origin("fleet.node"),
            "fleet.node",
            problem,
            "a name of its own on each node",
        )])
    })
}

#[cfg(test)]
mod tests {
    use turnpike_config::Secret;

    use super::*;
    use crate::fleet::orders;

    fn node(name: &str) -> Node {
        let mut settings = Settings::default();
        settings.fleet.node = Some(name.parse().expect("a name"));
        settings.fleet.secret = Some(Secret::new("a secret that is long enough for it"));
        let address = "redis://127.0.0.1:1".parse().expect("an address");
        Node::new(&settings, &address, orders::questions().0).expect("nothing wrong")
    }

    #[test]
    fn the_wanted_number_is_the_same_for_all_processes_of_a_name_until_there_is_one() {
        let (one, other) = (node("a"), node("b"));
        assert_eq!(one.wanted_number(), node("a").wanted_number());
        assert_ne!(one.wanted_number(), other.wanted_number());
        assert!((1..=MOST_NODES).contains(&one.wanted_number()));
        one.set_number(7);
        assert_eq!((one.wanted_number(), one.keys().node), (7, Some(7)));
        one.lose_number();
        assert_eq!(one.keys().node, Some(0), "it is still of a fleet");
    }

    #[test]
    fn a_node_that_knows_no_other_holds_its_own_limits_alone() {
        let node = node("a");
        assert!(node.is_alone() && !node.terms().enforced);
        node.set_number(7);
        assert!(node.is_alone(), "the store has not answered");
        node.answered();
        assert!(!node.is_alone() && node.terms().enforced);
    }

    #[test]
    fn who_drains_for_one_reason_or_another_takes_nobody() {
        let node = node("a");
        node.set_cordoned(true);
        assert!(node.is_cordoned() && node.is_draining());
        node.set_cordoned(false);
        assert!(!node.is_draining());
        node.stop_taking();
        assert!(node.is_draining() && !node.is_cordoned());
    }

    #[test]
    fn what_is_to_be_told_anew_is_told_once() {
        let node = node("a");
        assert!(!node.is_to_rejoin());
        node.rejoins_at.store(0, Ordering::Relaxed);
        assert!(node.is_to_rejoin() && !node.is_to_rejoin());
        node.rejoin_soon();
        node.tell_all_anew();
        assert_eq!(node.rejoins_at.load(Ordering::Relaxed), u64::MAX);
        assert!(node.rereads.load(Ordering::Relaxed));
    }

    #[test]
    fn a_machine_has_a_name_that_a_node_can_have() {
        let name = name_of_machine(&Settings::default());
        assert!(name.is_ok(), "{name:?}");
    }
}
