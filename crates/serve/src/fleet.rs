//! This server among others that are one service with it: what workers ask, answered from memory, and what the control thread does meanwhile so that
//! it is current. The rules are in `turnpike_fleet`, the store's keys in `turnpike_stores`.
//!
//! ```text
//!  workers ──▶ Fleet ── Banned                            without a fleet, too
//!                └───── Node ── Quotas, Sight, RecentRedirects, keys
//!                         ▲
//!                 heartbeat, watching, quota_exchange, listening, publishing ──▶ FleetStore
//!                 admin_ops ────────────────────────────────────────────────────────┘
//! ```

mod admin_ops;
mod advertised_addresses;
mod banned;
mod counts;
mod handover;
mod health;
mod heartbeat;
mod keys;
mod listening;
mod load;
mod node;
mod placement;
mod publishing;
mod quota_exchange;
mod quotas;
mod recovering;
mod watching;

use std::{
    net::IpAddr,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use turnpike_config::{Mistake, Mistakes, Settings};
use turnpike_relay::{Config, Relay, SharedQuota};
use turnpike_stores::FleetAddress;
use turnpike_turn::server::{
    AllocateAttempt, Destination, NonceKey, QuotaRefusal, Redirects, Transport, UserRef,
};

pub(crate) use admin_ops::FleetOrders;

pub(crate) use counts::FleetCounts;
#[cfg(test)]
pub(crate) use counts::NodeCounts;
pub(crate) use handover::{FleetHandover, FleetOffer};
pub(crate) use keys::NodeKeys;
pub(crate) use publishing::{StatusLines, StatusWriter};

use crate::{ServeError, store::SharedStore};
use banned::Banned;
use heartbeat::Beater;
use load::Room;
use node::Node;

/// What workers ask; there is one without a fleet too.
pub(crate) struct Fleet {
    banned: Arc<Banned>,
    node: Option<Arc<Node>>,
    /// The key of a server that is alone.
    alone: NodeKeys,
}

/// What a node has to do once its relay runs.
pub(crate) struct Begun {
    beater: Beater,
    questions: admin_ops::Questions,
}

impl Fleet {
    /// Joins the fleet that is configured, if one is. A store that cannot be reached now is no reason not to start: the node joins later. `own`
    /// is the server's own key. In the place of another process it goes on as that node, if that was the same.
    ///
    /// # Errors
    /// Somebody has to change something: a name that another node has, another secret than that of the fleet, a password.
    pub(crate) async fn join(
        settings: &Settings,
        own: NonceKey,
        before: Option<&FleetOffer>,
    ) -> Result<(Arc<Self>, Begun), ServeError> {
        let (questions, received) = admin_ops::questions();
        let node = match address(settings)? {
            Some(address) => Some(Arc::new(Node::new(settings, &address, own, before, questions)?)),
            None => None,
        };
        let beater = match &node {
            Some(node) if node.goes_on() => heartbeat::go_on(node).await?,
            Some(node) => heartbeat::join(node).await?,
            None => Beater::default(),
        };
        let banned = node.as_ref().map_or_else(Arc::<Banned>::default, |node| Arc::clone(&node.banned));
        if let Some(before) = before {
            banned.mark(&before.unannounced);
            before.bans.iter().for_each(|ban| banned.put(ban.clone()));
        }
        let fleet = Self { banned, node, alone: NodeKeys::alone(own) };
        Ok((Arc::new(fleet), Begun { beater, questions: received }))
    }

    /// Does from now on what a node does, on the control thread's runtime. `users` is where the cached users are.
    pub(crate) fn begin(
        self: &Arc<Self>,
        begun: Begun,
        relay: &Arc<Relay>,
        config: &Config,
        users: SharedStore,
    ) -> Arc<FleetOrders> {
        let Begun { beater, questions } = begun;
        self.banned.set_relay(Arc::downgrade(relay));
        self.listens(relay, config);
        if let Some(node) = &self.node {
            node.begin(relay);
            tokio::spawn(heartbeat::keep_beating(Arc::clone(node), beater, load::Gauge::new(config)));
            tokio::spawn(admin_ops::keep_announcing(Arc::clone(node)));
            tokio::spawn(watching::keep_watching(Arc::clone(node)));
            tokio::spawn(quota_exchange::keep_exchanging(Arc::clone(node)));
            tokio::spawn(listening::keep_listening(Arc::clone(node), users));
        }
        Arc::new(FleetOrders::new(Arc::clone(self), questions))
    }

    /// Clients come in where the relay listens now, as many as this configuration allows.
    pub(crate) fn listens(&self, relay: &Relay, config: &Config) {
        if let Some(node) = &self.node {
            let entrances = advertised_addresses::of(config, &relay.listeners(), &node.settings());
            node.set_reach(entrances, Room::of(config));
        }
    }

    /// What nonces, tickets and cookies are made with now, and which node this is.
    pub(crate) fn keys(&self) -> NodeKeys {
        self.node.as_ref().map_or_else(|| self.alone.clone(), |node| node.keys())
    }

    /// What a reload can change.
    pub(crate) fn set(&self, settings: &Settings) {
        if let Some(node) = &self.node {
            node.set(settings);
        }
    }

    /// Whether an administrator has this node take nobody new, while it runs on.
    pub(crate) fn is_cordoned(&self) -> bool {
        self.node.as_ref().is_some_and(|node| node.is_cordoned())
    }

    /// The server takes nobody new any more, until it ends.
    pub(crate) fn stop_taking(&self) {
        if let Some(node) = &self.node {
            node.stop_taking();
        }
    }

    /// Says goodbye, and gives back what it held.
    pub(crate) async fn leave(&self) {
        if let Some(node) = &self.node {
            node.leave().await;
        }
    }

    /// For metrics.
    pub(crate) fn counts(&self) -> FleetCounts {
        FleetCounts::of(&self.banned, self.node.as_deref())
    }

    /// Where sessions are published as coturn does, and who does it.
    pub(crate) fn status_lines(&self) -> Option<(StatusLines, StatusWriter)> {
        let node = self.node.as_ref().filter(|node| node.settings().coturn_status)?;
        Some(publishing::status_lines(Arc::clone(node)))
    }
}

impl turnpike_relay::Fleet for Fleet {
    fn acquire(&self, asked: SharedQuota<'_>) -> Result<(), QuotaRefusal> {
        self.node.as_ref().map_or(Ok(()), |node| node.acquire(asked))
    }

    fn release(&self, user: UserRef<'_>) {
        if let Some(node) = &self.node {
            node.release(user);
        }
    }

    fn is_banned(&self, unix: u64, user: UserRef<'_>, username: &str, client: IpAddr) -> bool {
        self.banned.has(unix, user.realm, [username, user.identity], client)
    }
}

impl Redirects for Fleet {
    fn comes_back(&self, attempt: &AllocateAttempt<'_>) -> bool {
        self.node.as_ref().is_some_and(|node| node.comes_back(attempt))
    }

    fn redirect_target(&self, attempt: &AllocateAttempt<'_>, transport: Transport) -> Option<Destination> {
        self.node.as_ref()?.redirect_target(attempt, transport)
    }

    fn node(&self, number: u16, transport: Transport, v4: bool) -> Option<Destination> {
        self.node.as_ref()?.send_to(number, transport, v4)
    }
}

/// Where the store of a fleet is; `None` without one.
///
/// # Errors
/// `fleet.url` is no address of one.
pub(crate) fn address(settings: &Settings) -> Result<Option<FleetAddress>, Mistakes> {
    let Some(url) = &settings.fleet.url else { return Ok(None) };
    let address = url.reveal().parse::<FleetAddress>();
    let wrong = |why| Mistakes(vec![Mistake::new(settings.origin("fleet.url"), "fleet.url", why, "")]);
    address.map(Some).map_err(wrong)
}

/// Unix seconds.
fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use turnpike_config::Secret;

    use super::*;

    #[test]
    fn an_address_that_is_none_names_its_key_and_not_its_password() {
        let settings = |url: &str| {
            let mut settings = Settings::default();
            settings.fleet.url = Some(Secret::new(url));
            settings
        };
        let error =
            address(&settings("redis+cluster://:hunter2@h/7")).expect_err("no such database").to_string();
        assert!(error.starts_with("default: fleet.url: ") && !error.contains("hunter2"), "{error}");
        let found = address(&settings("redis://h/2")).expect("an address").expect("a store");
        assert_eq!(found.to_string(), "redis://h/2");
        assert!(address(&Settings::default()).expect("nothing wrong").is_none());
    }
}
