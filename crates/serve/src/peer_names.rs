//! Addresses of the names in `peers.allow`, looked up on threads of their own because getaddrinfo(3) blocks. A
//! failed lookup keeps the last addresses.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, ToSocketAddrs as _},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore, oneshot},
    task::JoinSet,
    time::{sleep, timeout},
};
use turnpike_config::{AllowedPeer, Settings};
use turnpike_turn::server::AllowRule;
use turnpike_wire::address::canonical_ip;

/// Interval between lookups, as for targets of `forward`: getaddrinfo(3) does not return a TTL.
const REFRESH: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(5);
/// Time for which startup waits for the first addresses.
const FIRST: Duration = Duration::from_secs(3);
/// Maximum number of concurrent lookups.
const IN_FLIGHT: usize = 8;
/// Maximum number of addresses used per name.
const MOST_ADDRESSES: usize = 16;

type Lookup = dyn Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync;

#[derive(Clone)]
pub(crate) struct PeerNames(Arc<Inner>);

struct Inner {
    table: Mutex<Table>,
    lookup: Arc<Lookup>,
    renamed: Notify,
}

#[derive(Default)]
struct Table {
    names: BTreeMap<String, PeerName>,
    has_changed: bool,
}

#[derive(Default)]
struct PeerName {
    /// Sorted; empty until a lookup has succeeded.
    addresses: Vec<IpAddr>,
    /// Result of the last lookup.
    is_resolved: Option<bool>,
}

impl PeerNames {
    /// Starts to look up the names. Waits for the first results, so that an upgraded server does not refuse
    /// these peers for a moment.
    pub(crate) async fn start(settings: &Settings) -> Self {
        let lookup = |name: &str| Ok((name, 0).to_socket_addrs()?.map(|address| address.ip()).collect());
        let names = Self::with(Arc::new(lookup));
        names.set(settings);
        tokio::spawn(names.clone().run());
        let known = async {
            while names.table().names.values().any(|name| name.is_resolved.is_none()) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        if timeout(FIRST, known).await.is_err() {
            tracing::warn!("no answer yet for names in peers.allow: peers at their addresses are refused");
        }
        names.has_news();
        names
    }

    fn with(lookup: Arc<Lookup>) -> Self {
        Self(Arc::new(Inner { table: Mutex::default(), lookup, renamed: Notify::new() }))
    }

    /// Keeps these settings' names, with the addresses of those that are known.
    pub(crate) fn set(&self, settings: &Settings) {
        let mut table = self.table();
        let mut known = std::mem::take(&mut table.names);
        let wanted = settings.allow.iter().filter_map(AllowedPeer::name).take(AllowedPeer::MOST_NAMES);
        table.names = wanted.map(|name| (name.to_owned(), known.remove(name).unwrap_or_default())).collect();
        if table.names.values().any(|name| name.is_resolved.is_none()) {
            self.0.renamed.notify_one();
        }
    }

    /// Rules of these settings' entries, names included.
    pub(crate) fn rules(&self, settings: &Settings) -> Vec<AllowRule> {
        let table = self.table();
        let addresses = |peer: &AllowedPeer| peer.name().and_then(|name| table.names.get(name));
        let rules = |peer| AllowedPeer::rules(peer, addresses(peer).map_or(&[][..], |name| &name.addresses));
        settings.allow.iter().flat_map(rules).collect()
    }

    /// Returns true once after addresses have changed.
    pub(crate) fn has_news(&self) -> bool {
        std::mem::take(&mut self.table().has_changed)
    }

    /// Each name, and true if its last lookup succeeded.
    pub(crate) fn states(&self) -> Vec<(String, bool)> {
        let state = |(name, found): (&String, &PeerName)| (name.clone(), found.is_resolved == Some(true));
        self.table().names.iter().map(state).collect()
    }

    async fn run(self) {
        loop {
            self.look_up_all().await;
            let has_failed = self.table().names.values().any(|name| name.is_resolved == Some(false));
            let pause = if has_failed { RETRY } else { REFRESH };
            // The pause ends early if there are new names.
            let _ = timeout(pause, self.0.renamed.notified()).await;
        }
    }

    async fn look_up_all(&self) {
        let slots = Arc::new(Semaphore::new(IN_FLIGHT));
        let names: Vec<String> = self.table().names.keys().cloned().collect();
        let mut lookups = JoinSet::new();
        for name in names {
            let (this, slots) = (self.clone(), Arc::clone(&slots));
            lookups.spawn(async move {
                let _slot = slots.acquire().await;
                let found = this.look_up(name.clone()).await;
                this.take(&name, found.and_then(usable));
            });
        }
        while lookups.join_next().await.is_some() {}
    }

    /// A thread outside the runtime, which would wait for it at shutdown.
    async fn look_up(&self, name: String) -> io::Result<Vec<IpAddr>> {
        let (answer, answered) = oneshot::channel();
        let lookup = Arc::clone(&self.0.lookup);
        let work = move || _ = answer.send(lookup(&name));
        thread::Builder::new().name("peer-lookup".to_owned()).spawn(work)?;
        answered.await.unwrap_or_else(|_| Err(io::Error::other("the lookup failed")))
    }

    /// Records a result. Logs when addresses change, when lookups begin to fail, and when they succeed again.
    fn take(&self, name: &str, found: io::Result<Vec<IpAddr>>) {
        let mut table = self.table();
        let Some(entry) = table.names.get_mut(name) else { return };
        let before = entry.is_resolved.replace(found.is_ok());
        match found {
            Err(error) if before != Some(false) => {
                tracing::warn!(
                    name, %error,
                    "cannot resolve a name in peers.allow: its last addresses stay allowed; retrying"
                );
            }
            Err(_) => {}
            Ok(addresses) => {
                let has_changed = entry.addresses != addresses;
                if has_changed || before == Some(false) {
                    let shown: Vec<String> = addresses.iter().map(ToString::to_string).collect();
                    tracing::info!(name, addresses = shown.join(", "), "resolved a name in peers.allow");
                }
                entry.addresses = addresses;
                table.has_changed |= has_changed;
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes addresses that no peer can have or that are this machine's, and sorts the others.
fn usable(found: Vec<IpAddr>) -> io::Result<Vec<IpAddr>> {
    let is_usable = |ip: &IpAddr| {
        let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_broadcast)
    };
    let mut usable: Vec<IpAddr> = found.into_iter().map(canonical_ip).filter(is_usable).collect();
    usable.sort_unstable();
    usable.dedup();
    usable.truncate(MOST_ADDRESSES);
    if usable.is_empty() {
        Err(io::Error::other("the answer contains no usable address"))
    } else {
        Ok(usable)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use turnpike_turn::server::PeerRules;

    use super::*;

    fn settings(allow: &[&str]) -> Settings {
        let allow = allow.iter().map(|text| text.parse().unwrap()).collect();
        Settings { allow, ..Settings::default() }
    }

    #[derive(Clone, Default)]
    struct World(Arc<Mutex<BTreeMap<String, Vec<IpAddr>>>>);

    impl World {
        fn answer(&self, name: &str, addresses: &[&str]) {
            let addresses = addresses.iter().map(|ip| ip.parse().unwrap()).collect();
            self.0.lock().unwrap().insert(name.to_owned(), addresses);
        }

        fn forget(&self, name: &str) {
            self.0.lock().unwrap().remove(name);
        }

        fn names(&self) -> PeerNames {
            let world = self.clone();
            PeerNames::with(Arc::new(move |name| {
                world.0.lock().unwrap().get(name).cloned().ok_or_else(|| io::Error::other("no such name"))
            }))
        }
    }

    fn permits(names: &PeerNames, settings: &Settings, peer: &str) -> bool {
        let rules = PeerRules { allow: names.rules(settings), allow_only: true, ..PeerRules::default() };
        rules.permits_endpoint(peer.parse::<SocketAddr>().unwrap())
    }

    #[tokio::test]
    async fn failed_lookup_keeps_the_last_addresses() {
        let (world, settings) = (World::default(), settings(&["sfu.internal:5000-5100", "192.0.2.0/24"]));
        let names = world.names();
        names.set(&settings);
        names.look_up_all().await;
        assert_eq!((names.has_news(), names.states()), (false, vec![("sfu.internal".to_owned(), false)]));
        assert!(permits(&names, &settings, "192.0.2.7:1") && !permits(&names, &settings, "10.0.0.1:5000"));

        world.answer("sfu.internal", &["10.0.0.2", "10.0.0.1", "::ffff:10.0.0.1", "127.0.0.1", "0.0.0.0"]);
        names.look_up_all().await;
        assert_eq!((names.has_news(), names.has_news()), (true, false));
        let allowed = ["10.0.0.1:5000", "10.0.0.2:5100", "10.0.0.1:80", "10.0.0.3:5000", "127.0.0.1:5000"];
        let found = allowed.map(|peer| permits(&names, &settings, peer));
        assert_eq!(found, [true, true, false, false, false]);

        world.forget("sfu.internal");
        names.look_up_all().await;
        assert_eq!((names.has_news(), names.states()), (false, vec![("sfu.internal".to_owned(), false)]));
        assert!(permits(&names, &settings, "10.0.0.1:5000"));

        world.answer("sfu.internal", &["10.0.0.3"]);
        names.look_up_all().await;
        assert!(names.has_news() && names.states()[0].1);
        assert!(permits(&names, &settings, "10.0.0.3:5000") && !permits(&names, &settings, "10.0.0.1:5000"));
    }

    #[tokio::test]
    async fn reload_keeps_known_addresses_and_drops_removed_names() {
        let world = World::default();
        world.answer("a", &["10.0.0.1"]);
        world.answer("b", &["10.0.0.2"]);
        let (names, first) = (world.names(), settings(&["a"]));
        names.set(&first);
        names.look_up_all().await;
        let both = settings(&["b", "a"]);
        names.set(&both);
        assert!(permits(&names, &both, "10.0.0.1:1") && !permits(&names, &both, "10.0.0.2:1"));
        names.look_up_all().await;
        assert!(permits(&names, &both, "10.0.0.2:1"));
        let only = settings(&["b"]);
        names.set(&only);
        assert!(!permits(&names, &only, "10.0.0.1:1"));
        assert_eq!(names.states(), [("b".to_owned(), true)]);
    }

    #[test]
    fn answers_are_bounded() {
        let many = (0..=255).map(|last| IpAddr::from([10, 0, 0, last])).collect();
        assert_eq!(usable(many).unwrap().len(), MOST_ADDRESSES);
        assert!(usable(vec![IpAddr::from([127, 0, 0, 1]), IpAddr::from([0; 16])]).is_err());
    }
}
