//! Membership in a fleet. Workers read state in memory, which the control thread keeps up to date. The
//! rules are in `turnpike_fleet`, the store's keys in `turnpike_stores`.
//!
//! ```text
//!  workers ──▶ Fleet ── Banned                            also without a fleet
//!                └───── Node ── Quotas, Sight, RecentRedirects, keys
//!                         ▲
//!                 heartbeat, watching, quota_exchange, listening, publishing ──▶ FleetStore
//!                 admin_ops ────────────────────────────────────────────────────────┘
//! ```

mod admin_ops;
mod advertised_addresses;
mod announcements;
mod banned;
mod counts;
mod handover;
mod health;
mod heartbeat;
mod keys;
mod listening;
mod load;
mod node;
mod offer;
mod placement;
mod publishing;
mod questions;
mod quota_exchange;
mod quotas;
mod recovering;
mod shared_orders;
mod tallies;
mod watching;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use turnpike_acme::SharedOrders;
use turnpike_config::{Mistake, Mistakes, Settings};
use turnpike_relay::{Config, Relay, SharedQuota};
use turnpike_stores::FleetAddress;
use turnpike_turn::server::{
    AllocateAttempt, Destination, NonceKey, QuotaRefusal, Redirects, Transport, UserRef, VolumeLimits,
};

pub(crate) use admin_ops::FleetOrders;

pub(crate) use counts::FleetCounts;
#[cfg(test)]
pub(crate) use counts::NodeCounts;
pub(crate) use handover::FleetHandover;
pub(crate) use keys::NodeKeys;
pub(crate) use offer::FleetOffer;
pub(crate) use publishing::{StatusLines, StatusWriter};

use crate::{ServeError, store::StoreInUse, usage::UsedQuotas};
use banned::Banned;
use heartbeat::Beater;
use load::Room;
use node::OwnNode;

/// Fleet as the workers see it; exists even if no fleet is configured.
pub(crate) struct FleetMembership {
    banned: Arc<Banned>,
    used_quotas: Arc<UsedQuotas>,
    node: Option<Arc<OwnNode>>,
    alone: NodeKeys,
}

/// Started by [`FleetMembership::begin`] once the relay runs.
pub(crate) struct Begun {
    beater: Beater,
    questions: questions::Questions,
}

impl FleetMembership {
    /// Joins the configured fleet, if any. An unreachable store does not prevent startup: the node joins
    /// later.
    pub(crate) async fn join(
        settings: &Settings,
        own: NonceKey,
        before: Option<&FleetOffer>,
    ) -> Result<(Arc<Self>, Begun), ServeError> {
        let (sender, received) = questions::channel();
        let node = match address(settings)? {
            Some(address) => Some(Arc::new(OwnNode::new(settings, &address, own, before, sender)?)),
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
        let fleet = Self { banned, used_quotas: Arc::default(), node, alone: NodeKeys::alone(own) };
        Ok((Arc::new(fleet), Begun { beater, questions: received }))
    }

    pub(crate) fn begin(
        self: &Arc<Self>,
        begun: Begun,
        relay: &Arc<Relay>,
        config: &Config,
        users: StoreInUse,
    ) -> Arc<FleetOrders> {
        let Begun { beater, questions } = begun;
        self.banned.set_relay(Arc::downgrade(relay));
        self.listens(relay, config);
        if let Some(node) = &self.node {
            node.begin(relay);
            tokio::spawn(heartbeat::keep_beating(Arc::clone(node), beater, load::LoadGauge::new(config)));
            tokio::spawn(admin_ops::keep_announcing(Arc::clone(node)));
            tokio::spawn(watching::keep_watching(Arc::clone(node)));
            tokio::spawn(quota_exchange::keep_exchanging(Arc::clone(node)));
            tokio::spawn(listening::keep_listening(Arc::clone(node), users));
        }
        Arc::new(FleetOrders::new(Arc::clone(self), questions))
    }

    pub(crate) fn listens(&self, relay: &Relay, config: &Config) {
        if let Some(node) = &self.node {
            let entrances = advertised_addresses::of(config, &relay.listeners(), &node.settings());
            node.set_reach(entrances, Room::of(config));
        }
    }

    pub(crate) fn keys(&self) -> NodeKeys {
        self.node.as_ref().map_or_else(|| self.alone.clone(), |node| node.keys())
    }

    pub(crate) fn set(&self, settings: &Settings) {
        if let Some(node) = &self.node {
            node.set(settings);
        }
    }

    /// Volume quotas of users, keys and realms that are used up on all nodes together.
    pub(crate) fn used_quotas(&self) -> Arc<UsedQuotas> {
        Arc::clone(&self.used_quotas)
    }

    /// Name of this node, or of the machine outside a fleet.
    pub(crate) fn node_name(&self) -> String {
        self.node.as_ref().map_or_else(node::host_name, |node| node.name.to_string())
    }

    /// True if an administrator has stopped new clients while the node keeps running.
    pub(crate) fn is_cordoned(&self) -> bool {
        self.node.as_ref().is_some_and(|node| node.is_cordoned())
    }

    /// Names of the other nodes whose cards have been read.
    pub(crate) fn other_nodes(&self) -> BTreeSet<String> {
        let Some(node) = &self.node else { return BTreeSet::new() };
        let members = node.members();
        let others = members.iter().filter(|(name, member)| **name != node.name && member.card.is_some());
        others.map(|(name, _)| name.to_string()).collect()
    }

    pub(crate) fn stop_taking(&self) {
        if let Some(node) = &self.node {
            node.stop_taking();
        }
    }

    pub(crate) async fn leave(&self) {
        if let Some(node) = &self.node {
            node.leave().await;
        }
    }

    /// Storage for certificate orders, shared by the nodes; `None` without a fleet.
    pub(crate) fn shared_orders(&self) -> Option<Arc<dyn SharedOrders>> {
        let node = Arc::clone(self.node.as_ref()?);
        Some(Arc::new(shared_orders::NodeOrders(node)))
    }

    pub(crate) fn counts(&self) -> FleetCounts {
        FleetCounts::of(&self.banned, self.node.as_deref())
    }

    pub(crate) fn status_lines(&self) -> Option<(StatusLines, StatusWriter)> {
        let node = self.node.as_ref().filter(|node| node.settings().coturn_status)?;
        Some(publishing::status_lines(Arc::clone(node)))
    }
}

impl turnpike_relay::Fleet for FleetMembership {
    fn acquire(&self, asked: SharedQuota<'_>) -> Result<(), QuotaRefusal> {
        self.node.as_ref().map_or(Ok(()), |node| node.acquire(asked))
    }

    fn release(&self, user: UserRef<'_>) {
        if let Some(node) = &self.node {
            node.release(user);
        }
    }

    fn volume_limits(&self, user: UserRef<'_>, username: &str) -> VolumeLimits {
        self.used_quotas.limits(user, username)
    }

    fn is_banned(&self, unix: u64, user: UserRef<'_>, username: &str, client: IpAddr) -> bool {
        self.banned.has(unix, user.realm, [username, user.identity], client)
    }
}

impl Redirects for FleetMembership {
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

pub(crate) fn address(settings: &Settings) -> Result<Option<FleetAddress>, Mistakes> {
    let Some(url) = &settings.fleet.url else { return Ok(None) };
    let address = url.reveal().parse::<FleetAddress>();
    let wrong = |why| Mistakes(vec![Mistake::new(settings.origin("fleet.url"), "fleet.url", why, "")]);
    address.map(Some).map_err(wrong)
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use turnpike_config::Secret;

    use super::*;

    #[test]
    fn an_invalid_fleet_url_names_the_key_but_not_the_password() {
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
