//! Redirects: applies the rules of `turnpike_fleet` to this node's view of the fleet. Called by workers for
//! each request.

use std::{
    hash::BuildHasher as _,
    net::SocketAddr,
    sync::{Arc, MutexGuard, PoisonError, atomic::Ordering},
};

use turnpike_config::FleetRedirect;
use turnpike_fleet::{Card, Need, RecentRedirects, RedirectTarget, look_period_ms};
use turnpike_turn::server::{AllocateAttempt, Destination, Occasion, Transport};

use super::{node::OwnNode, tallies::RedirectReason};

/// After this many missed polls of the fleet, load no longer causes redirects.
const LOOKS: u64 = 3;
/// Time for which a full node that cannot reach the store still redirects clients to the nodes it last
/// knew. Afterwards, `[[alternate]]` applies.
const REMEMBERED_MS: u64 = 300_000;

impl OwnNode {
    /// Redirect target for an attempt that this node could serve; `None` to serve it here.
    pub(super) fn redirect_target(
        &self,
        attempt: &AllocateAttempt<'_>,
        transport: Transport,
    ) -> Option<Destination> {
        let way = (transport, attempt.client.address.ip().to_canonical().is_ipv4());
        let (destination, reason) = match attempt.occasion {
            Occasion::None if self.room().is_nearly_full(self.allocations()) => {
                if self.is_back(attempt) {
                    return None;
                }
                (self.with_room(attempt, Need::Reserve, way)?, RedirectReason::Full)
            }
            Occasion::None => self.better_served(attempt, way)?,
            Occasion::Full => (self.with_room(attempt, Need::Room, way)?, RedirectReason::Full),
            Occasion::Draining => (self.with_room(attempt, Need::Room, way)?, RedirectReason::Draining),
        };
        self.tallies.sent(reason);
        Some(destination)
    }

    /// Returns true if a client that has returned after a redirect is served here although this node is
    /// draining. A node that is about to stop does not serve it.
    pub(super) fn comes_back(&self, attempt: &AllocateAttempt<'_>) -> bool {
        self.only_drains() && self.is_back(attempt)
    }

    /// Returns true if the client has returned from the same 5-tuple after a redirect, and counts such clients.
    fn is_back(&self, attempt: &AllocateAttempt<'_>) -> bool {
        let (unix, request) = (attempt.now.unix, self.hasher.hash_one(attempt.transaction));
        let is_back = !self.recent_redirects().may_go(unix, self.hasher.hash_one(attempt.client), request);
        if is_back {
            self.tallies.returned.fetch_add(1, Ordering::Relaxed);
        }
        is_back
    }

    /// Returns a node with free capacity, or `None` if the client has returned from a redirect.
    fn with_room(
        &self,
        attempt: &AllocateAttempt<'_>,
        need: Need,
        way: (Transport, bool),
    ) -> Option<Destination> {
        let sight = self.sight();
        if self.now_ms().saturating_sub(sight.at_ms) > REMEMBERED_MS {
            return None;
        }
        let target = sight.view.choose(sight.own, &sight.charges, need, way, rand::random())?;
        let (unix, request) = (attempt.now.unix, self.hasher.hash_one(attempt.transaction));
        self.recent_redirects().note(unix, self.hasher.hash_one(attempt.client), request);
        Some(destination(target))
    }

    fn better_served(
        &self,
        attempt: &AllocateAttempt<'_>,
        way: (Transport, bool),
    ) -> Option<(Destination, RedirectReason)> {
        let redirect = self.setting(|settings| settings.redirect);
        if redirect == FleetRedirect::Full {
            return None;
        }
        // A client that repeats its request here after a redirect does not follow redirects, so it is
        // served.
        let (unix, client) = (attempt.now.unix, attempt.client.address.ip());
        let who = self.hasher.hash_one((client, attempt.user.realm, attempt.user.identity));
        let request = self.hasher.hash_one(attempt.transaction);
        if !self.recent_redirects().may_go(unix, who, request) {
            self.tallies.returned.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let found = self.less_busy(way).map(|target| (destination(target), RedirectReason::Load));
        let found = found.or_else(|| {
            let comes_here = self.is_own(attempt.client.local);
            let own = (redirect == FleetRedirect::Always && !comes_here).then(|| self.card())??;
            Some((at_own_address(&own, way)?, RedirectReason::OwnAddress))
        });
        if found.is_some() {
            self.recent_redirects().note(unix, who, request);
        }
        found
    }

    fn less_busy(&self, way: (Transport, bool)) -> Option<RedirectTarget> {
        let sight = self.sight();
        let age_ms = self.now_ms().saturating_sub(sight.at_ms);
        if age_ms > LOOKS * look_period_ms(sight.view.nodes()) || self.is_alone() {
            return None;
        }
        sight.view.choose(sight.own, &sight.charges, Need::None, way, rand::random())
    }

    pub(super) fn send_to(&self, number: u16, transport: Transport, v4: bool) -> Option<Destination> {
        let sight = self.sight();
        let target = sight.view.node(number, transport, v4).filter(|_| number != sight.own)?;
        self.tallies.sent(RedirectReason::Owner);
        Some(destination(target))
    }

    fn recent_redirects(&self) -> MutexGuard<'_, RecentRedirects> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn destination(target: RedirectTarget) -> Destination {
    let RedirectTarget { card, address, second, .. } = target;
    Destination { address, second, domain: domain(&card) }
}

fn at_own_address(card: &Card, (transport, v4): (Transport, bool)) -> Option<Destination> {
    let of = |v4: bool| -> Option<SocketAddr> {
        let mut all = card.entrances.iter();
        let found = all.find(|entrance| entrance.transport == transport && entrance.address.is_ipv4() == v4);
        found.map(|entrance| entrance.address)
    };
    Some(Destination { address: of(v4)?, second: of(!v4), domain: domain(card) })
}

fn domain(card: &Card) -> Option<Arc<str>> {
    card.domain.as_deref().map(Arc::from)
}

#[cfg(test)]
mod tests {
    use turnpike_config::Settings;
    use turnpike_fleet::{Beat, FleetMembers, FleetView, Load, NodeRecord};
    use turnpike_relay::SharedQuota;
    use turnpike_turn::{
        server::{Client, ListenerId, NonceKey, UserRef},
        time::Now,
    };

    use super::*;
    use crate::fleet::{advertised_addresses::Entrances, load::Room, node::Sight, questions};

    const UDP: &str = "udp://203.0.113.1:3478";

    fn card(name: &str, entrance: &str) -> Card {
        Card {
            name: name.parse().expect("a name"),
            incarnation: 1,
            zone: String::new(),
            version: String::new(),
            entrances: vec![entrance.parse().expect("an entrance")],
            domain: Some(format!("{name}.example.org")),
        }
    }

    fn node(redirect: FleetRedirect, own: u32, other: u32) -> OwnNode {
        let mut settings = Settings::default();
        settings.fleet.node = "one".parse().ok();
        settings.fleet.redirect = redirect;
        let address = "redis://127.0.0.1:1".parse().expect("an address");
        let (key, questions) = (NonceKey([9; 32]), questions::channel().0);
        let node = OwnNode::new(&settings, &address, key, None, questions).expect("nothing wrong");
        let all = vec![UDP.parse().expect("an entrance")];
        let entrances = Entrances { own: vec!["203.0.113.1:3478".parse().expect("one")], all };
        node.set_reach(entrances, Room::new(100, 0));
        node.set_number(1);
        node.answered();
        let mut members = FleetMembers::default();
        let record = |(number, name, allocations): (u16, &str, u32)| {
            let load = Load { allocations, most_allocations: 100, ..Load::default() };
            let beat = Beat { number, incarnation: 1, draining: false, load };
            NodeRecord { name: name.parse().expect("a name"), stamp_ms: 0, beat }
        };
        members.look(0, 0, 0, [(1, "one", own), (2, "two", other)].map(record).into());
        members.put_card(card("one", UDP));
        members.put_card(card("two", "udp://203.0.113.2:3478"));
        let view = FleetView::new("", &members);
        node.set_sight(Sight { charges: view.charges(), view, own: 1, at_ms: node.now_ms() });
        node
    }

    fn asks(node: &OwnNode, number: u8, local: &str, occasion: Occasion) -> Option<String> {
        let found = node.redirect_target(&attempt(number, 50_000, local, occasion), Transport::Udp);
        found.map(|to| format!("{} {}", to.address, to.domain.as_deref().unwrap_or_default()))
    }

    fn attempt(number: u8, port: u16, local: &str, occasion: Occasion) -> AllocateAttempt<'static> {
        let client = Client {
            listener: ListenerId(0),
            address: ([192, 0, 2, number], port).into(),
            local: local.parse().expect("an address"),
        };
        AllocateAttempt {
            now: Now { ms: 0, unix: 1_800_000_000 },
            client,
            user: UserRef::new("here", "alice"),
            transaction: rand::random(),
            occasion,
        }
    }

    fn returned(node: &OwnNode) -> u64 {
        node.tallies.returned.load(Ordering::Relaxed)
    }

    #[test]
    fn a_draining_node_serves_returning_5_tuples_unless_it_is_stopping() {
        let node = node(FleetRedirect::Full, 10, 10);
        let draining = |port| attempt(1, port, OWN, Occasion::Draining);
        let first = draining(50_000);
        assert!(!node.comes_back(&first), "not draining");
        node.set_cordoned(true);
        assert!(!node.comes_back(&first));
        assert!(node.redirect_target(&first, Transport::Udp).is_some());
        assert!(!node.comes_back(&first), "the same request, whose answer was lost");
        assert!(
            !node.comes_back(&draining(50_001)),
            "another client of the same user behind the same address"
        );
        assert_eq!(returned(&node), 0);
        assert!(node.comes_back(&draining(50_000)));
        assert_eq!(returned(&node), 1);
        node.stop_taking();
        assert!(!node.comes_back(&draining(50_000)), "the client would immediately lose its allocation");
    }

    #[test]
    fn a_nearly_full_node_serves_only_clients_that_do_not_follow_redirects() {
        let node = node(FleetRedirect::Full, 98, 10);
        let entrances = Entrances { own: Vec::new(), all: Vec::new() };
        node.set_reach(entrances, Room::new(100, 0));
        let quota = SharedQuota { user: UserRef::new("here", "alice"), of_realm: None, of_user: 1000 };
        (0..97).for_each(|_| node.acquire(quota).expect("there is room"));
        assert_eq!(asks(&node, 1, OWN, Occasion::None), None);
        node.acquire(quota).expect("there is room");
        assert_eq!(asks(&node, 1, OWN, Occasion::None).as_deref(), TWO);
        assert_eq!((asks(&node, 1, OWN, Occasion::None), returned(&node)), (None, 1));
        let crowded = self::node(FleetRedirect::Full, 98, 96);
        crowded.set_reach(Entrances { own: Vec::new(), all: Vec::new() }, Room::new(100, 0));
        (0..98).for_each(|_| crowded.acquire(quota).expect("there is room"));
        assert_eq!(asks(&crowded, 1, OWN, Occasion::None), None, "the other node is nearly full too");
    }

    const OWN: &str = "203.0.113.1:3478";
    const TWO: Option<&str> = Some("203.0.113.2:3478 two.example.org");

    #[test]
    fn a_client_that_does_not_follow_redirects_is_served() {
        let node = node(FleetRedirect::Load, 90, 10);
        assert_eq!(asks(&node, 1, OWN, Occasion::None).as_deref(), TWO);
        assert_eq!((asks(&node, 1, OWN, Occasion::None), returned(&node)), (None, 1));
        assert_eq!(asks(&node, 2, OWN, Occasion::None).as_deref(), TWO, "another client");
        assert_eq!(asks(&node, 1, OWN, Occasion::Full).as_deref(), TWO, "this node is full");
    }

    #[test]
    fn load_redirects_need_the_setting_and_a_current_view() {
        assert_eq!(asks(&node(FleetRedirect::Full, 90, 10), 1, OWN, Occasion::None), None);
        let lost = node(FleetRedirect::Load, 90, 10);
        lost.lose_number();
        assert_eq!(asks(&lost, 1, OWN, Occasion::None), None);
        assert_eq!(
            asks(&lost, 1, OWN, Occasion::Draining).as_deref(),
            TWO,
            "the other nodes are still known"
        );
    }

    #[test]
    fn clients_at_a_shared_address_are_redirected_to_the_nodes_own_address() {
        let (node, anycast) = (node(FleetRedirect::Always, 10, 10), "198.51.100.1:3478");
        assert_eq!(asks(&node, 1, anycast, Occasion::None).as_deref(), Some("203.0.113.1:3478 "));
        assert_eq!(asks(&node, 1, anycast, Occasion::None), None, "the client does not follow redirects");
        assert_eq!(asks(&node, 2, OWN, Occasion::None), None, "already at the node's own address");
        let load = self::node(FleetRedirect::Load, 10, 10);
        assert_eq!(asks(&load, 1, anycast, Occasion::None), None);
    }

    #[test]
    fn the_number_of_another_node_redirects_the_client_to_it() {
        let node = node(FleetRedirect::Load, 10, 10);
        let to = node.send_to(2, Transport::Udp, true).map(|to| to.address.to_string());
        assert_eq!(to.as_deref(), Some("203.0.113.2:3478"));
        assert_eq!(node.send_to(1, Transport::Udp, true), None);
        assert_eq!(node.send_to(3, Transport::Udp, true), None);
    }
}
