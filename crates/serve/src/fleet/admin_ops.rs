//! Fleet administration from any node: members, draining, bans, and requests to other nodes.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{
    sync::{Mutex, mpsc, oneshot},
    time::{sleep, timeout},
};
use turnpike_api::{
    FleetAdmin, FleetError, FleetHealth, FleetNode, FleetStatus, Later, NodeState, PeerRequest, Reply,
};
use turnpike_fleet::{
    BEAT_MS, Ban, FleetMember, ForwardedRequest, LONGEST_BAN_S, NodeName, Notice, Ordered, PeerAnswer,
    Subject, Unbanned,
};
use turnpike_stores::StoreError;

use super::{
    FleetMembership,
    node::{BAN, OwnNode},
    questions::Questions,
    unix,
};

/// Timeout for another node's response. While waiting, the polling interval grows from `FIRST_LOOK` to
/// `LAST_LOOK`.
const PATIENCE: Duration = Duration::from_secs(5);
const FIRST_LOOK: Duration = Duration::from_millis(10);
const LAST_LOOK: Duration = Duration::from_millis(200);
/// Minimum delay before missing bans are written back to the store.
const GIVE_BACK: Duration = Duration::from_secs(2);

pub(crate) struct FleetOrders {
    fleet: Arc<FleetMembership>,
    questions: Mutex<mpsc::Receiver<(ForwardedRequest, Reply)>>,
}

impl FleetOrders {
    pub(super) fn new(fleet: Arc<FleetMembership>, Questions(questions): Questions) -> Self {
        Self { fleet, questions: Mutex::new(questions) }
    }

    /// Publishes a notice. Nodes that miss it pick up the change on their own later.
    async fn tell(&self, notice: Notice) {
        let Some(node) = &self.fleet.node else { return };
        if let Err(error) = node.say(notice).await {
            tracing::warn!(
                "{error}; other nodes will not pick up this user or rule change until their cached entries expire"
            );
        }
    }

    fn own_node(&self) -> Result<&Arc<OwnNode>, FleetError> {
        self.fleet.node.as_ref().ok_or(FleetError::NoFleet)
    }

    fn known(&self, name: &str) -> Result<NodeName, FleetError> {
        let node = self.own_node()?;
        let none = || FleetError::NoSuchNode(name.to_owned());
        let wanted: NodeName = name.parse().map_err(|_| none())?;
        let is_there = wanted == node.name || node.members().get(&wanted).is_some();
        if is_there { Ok(wanted) } else { Err(none()) }
    }
}

fn unavailable(error: StoreError) -> FleetError {
    FleetError::Store(error.to_string())
}

impl FleetAdmin for FleetOrders {
    fn node(&self) -> Option<String> {
        self.fleet.node.as_ref().map(|node| node.name.to_string())
    }

    fn status(&self) -> Option<FleetStatus> {
        let node = self.fleet.node.as_deref()?;
        let members = node.members();
        Some(FleetStatus {
            name: node.setting(|settings| settings.name.to_string()),
            node: node.name.to_string(),
            store: node.store.name().to_owned(),
            alone: alone(node),
            recovering: node.is_recovering(),
            keys: node.ring_version(),
            nodes: members.iter().map(|(name, member)| status_of(name, member)).collect(),
        })
    }

    fn health(&self) -> FleetHealth {
        match &self.fleet.node {
            _ if self.fleet.is_cordoned() => FleetHealth::Cordoned,
            Some(node) if node.is_alone() => FleetHealth::Isolated,
            Some(node) if node.is_recovering() => FleetHealth::Recovering,
            _ => FleetHealth::Healthy,
        }
    }

    fn set_draining<'a>(&'a self, name: &'a str, drains: bool) -> Later<'a, Result<(), FleetError>> {
        Box::pin(async move {
            let node = self.own_node()?;
            let wanted = self.known(name)?;
            if wanted == node.name {
                node.set_cordoned(drains);
                return Ok(());
            }
            node.say(Notice::Drain { node: wanted, drains }).await.map_err(unavailable)
        })
    }

    fn ask(&self, request: PeerRequest) -> Later<'_, Result<PeerAnswer, FleetError>> {
        Box::pin(async move {
            let PeerRequest { node: name, method, path, rights, by } = request;
            let node = self.own_node()?;
            let to = self.known(&name)?;
            let id = rand::random();
            let question = ForwardedRequest { id, to: to.clone(), method, path, rights, by };
            node.say(Notice::Question(question)).await.map_err(unavailable)?;
            let (mut waited, mut pause) = (Duration::ZERO, FIRST_LOOK);
            while waited < PATIENCE {
                sleep(pause).await;
                if let Some(sealed) = node.store.answered(id).await.map_err(unavailable)? {
                    return PeerAnswer::open(&node.sealer, id, &sealed).ok_or(FleetError::Silent(to));
                }
                waited += pause;
                pause = (pause * 3 / 2).min(LAST_LOOK);
            }
            Err(FleetError::Silent(to))
        })
    }

    fn next_question(&self) -> Later<'_, Option<(ForwardedRequest, Reply)>> {
        Box::pin(async { self.questions.lock().await.recv().await })
    }

    fn bans(&self) -> Vec<Ban> {
        let now = unix();
        let mut bans = self.fleet.banned.list();
        bans.retain(|ban| ban.is_in_force(now));
        bans.sort_by(|one, other| {
            (one.until, one.subject.to_string()).cmp(&(other.until, other.subject.to_string()))
        });
        bans
    }

    fn ban(&self, ban: Ban) -> Later<'_, Result<Ordered, FleetError>> {
        Box::pin(async move {
            let seconds = ban.until.saturating_sub(unix());
            if !(1..=LONGEST_BAN_S).contains(&seconds) {
                return Err(FleetError::Length);
            }
            let (banned, ban) = (&self.fleet.banned, ban.with_id(rand::random()));
            let subject = ban.subject.clone();
            let Some(node) = &self.fleet.node else {
                banned.put(ban);
                return Ok(Ordered { here: banned.end_allocations(&subject).await, is_announced: true });
            };
            banned.order(ban);
            let (announced, here) =
                tokio::join!(node.announce_now(&subject), banned.end_allocations(&subject));
            Ok(Ordered { here, is_announced: announced.map_err(unavailable)?.is_some() })
        })
    }

    fn unban(&self, subject: Subject) -> Later<'_, Result<Unbanned, FleetError>> {
        Box::pin(async move {
            let banned = &self.fleet.banned;
            let (was_here, was_kept) = match &self.fleet.node {
                None => (banned.lift(unix(), &subject).is_some(), Some(false)),
                Some(node) => {
                    let was_here = banned.order_lift(unix(), &subject).is_some();
                    (was_here, node.announce_now(&subject).await.map_err(unavailable)?)
                }
            };
            Ok(match was_kept {
                None => Unbanned::HereOnly,
                Some(was_kept) if was_here || was_kept => Unbanned::Everywhere,
                Some(_) => Unbanned::NotBanned,
            })
        })
    }

    fn revoked(&self, realm: String, name: String) -> Later<'_, ()> {
        Box::pin(self.tell(Notice::Revoked { realm, name }))
    }

    fn rules_changed(&self) -> Later<'_, ()> {
        Box::pin(self.tell(Notice::RulesChanged))
    }
}

fn alone(node: &OwnNode) -> Option<String> {
    let trouble = node.health.trouble_of(node.now_ms());
    trouble.or_else(|| {
        let why = "not a member: another node may be using its name, or the fleet is full";
        (node.number() == 0).then(|| why.to_owned())
    })
}

fn status_of(name: &NodeName, member: &FleetMember) -> FleetNode {
    let FleetMember { card, beat, silent_ms, .. } = member;
    let load = &beat.load;
    let state = if !member.is_heard() {
        NodeState::Silent
    } else if beat.draining {
        NodeState::Draining
    } else if load.is_full() {
        NodeState::Full
    } else {
        NodeState::Serving
    };
    let entrances = card.iter().flat_map(|card| &card.entrances);
    #[expect(clippy::cast_precision_loss, reason = "2^53 ms are 285,000 years")]
    let silent_s = *silent_ms as f64 / 1000.0;
    FleetNode {
        name: name.to_string(),
        number: beat.number,
        state,
        silent_s,
        zone: card.as_ref().map_or_else(String::new, |card| card.zone.clone()),
        version: card.as_ref().map(|card| card.version.clone()),
        busy: load.busy(),
        allocations: load.allocations.into(),
        max_allocations: load.most_allocations.into(),
        bits_per_second: load.bits_per_second,
        max_bits_per_second: Some(load.most_bits_per_second).filter(|most| *most > 0),
        cpu: f64::from(load.cpu) / 1000.0,
        relay_ports_left: load.ports_left.into(),
        relay_ports: load.ports.into(),
        addresses: entrances
            .map(|entrance| format!("{}://{}", <&str>::from(entrance.transport), entrance.address))
            .collect(),
    }
}

/// Publishes bans and unbans issued during a store outage, until the node leaves the fleet. Runs separately
/// so that the heartbeat never waits for it.
pub(super) async fn keep_announcing(node: Arc<OwnNode>) {
    while !node.is_over() {
        let is_there = timeout(Duration::from_millis(BEAT_MS), node.announcements.wake.notified()).await;
        if is_there.is_ok()
            && let Err(error) = node.announce_orders().await
        {
            node.failed(&error);
        }
    }
}

impl OwnNode {
    pub(super) fn answer(self: &Arc<Self>, question: ForwardedRequest) {
        let id = question.id;
        let (answer, answered) = oneshot::channel();
        let reply: Reply = Box::new(move |said| _ = answer.send(said));
        if self.questions.try_send((question, reply)).is_err() {
            return;
        }
        let node = Arc::clone(self);
        tokio::spawn(async move {
            let Ok(answer) = answered.await else { return };
            let sealed = answer.seal(&node.sealer, id, rand::random());
            if let Err(error) = node.store.answer(id, &sealed).await {
                node.failed(&error);
            }
        });
    }

    /// Applies the bans in the store. After a delay, writes back bans that the store lacks, because it may
    /// have been emptied, and deletes bans that were lifted in the meantime.
    pub(super) async fn read_bans(self: &Arc<Self>) -> Result<(), StoreError> {
        self.banned.read(unix(), &self.kept_bans().await?);
        let node = Arc::clone(self);
        tokio::spawn(async move {
            sleep(GIVE_BACK + Duration::from_millis(rand::random::<u64>() % 3000)).await;
            if let Err(error) = node.give_bans_back().await {
                node.failed(&error);
            }
        });
        Ok(())
    }

    async fn give_bans_back(&self) -> Result<(), StoreError> {
        for ban in self.banned.missing(unix(), &self.kept_bans().await?) {
            self.put_ban(&ban).await?;
        }
        Ok(())
    }

    /// Publishes a new ban or unban. Returns whether the store had an active ban on the subject, or `None`
    /// during a store outage, after which the ban or unban is published.
    async fn announce_now(&self, subject: &Subject) -> Result<Option<bool>, StoreError> {
        let announced = async {
            let _turn = self.announcements.turn.lock().await;
            // Avoids a queue of bans waiting for a store that is known to be unreachable.
            if self.health.is_alone(self.now_ms()) && self.banned.is_unannounced(subject) {
                return Ok(None);
            }
            let kept = self.kept_bans().await?;
            self.announce(subject, &kept).await?;
            let now = unix();
            Ok(Some(kept.iter().any(|ban| ban.subject == *subject && ban.is_in_force(now))))
        };
        match announced.await {
            Ok(was_kept) => Ok(was_kept),
            Err(error) if self.banned.is_unannounced(subject) => {
                tracing::warn!(
                    "{error}; the ban or unban is in effect on this node now, and will be on the others once the store is reachable"
                );
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    pub(super) async fn announce_orders(&self) -> Result<(), StoreError> {
        let subjects = self.banned.unannounced();
        if subjects.is_empty() {
            return Ok(());
        }
        let kept = self.kept_bans().await?;
        for subject in subjects {
            // Locked per subject, so that a ban or unban issued in the meantime waits for at most one
            // publication.
            let _turn = self.announcements.turn.lock().await;
            if self.banned.is_unannounced(&subject) {
                self.announce(&subject, &kept).await?;
                let subject = subject.to_string();
                tracing::info!(?subject, "published a ban or its removal to the other nodes");
            }
        }
        Ok(())
    }

    /// Writes the ban to the store and notifies the other nodes. The caller holds `turn`.
    async fn announce(&self, subject: &Subject, kept: &[Ban]) -> Result<(), StoreError> {
        let ban = self.banned.to_announce(unix(), subject, kept);
        // A node that is offline misses the notice of a lifted ban and must learn of it from the store.
        match &ban {
            Some(ban) => self.put_ban(ban).await?,
            None => self.store.remove_ban(subject).await?,
        }
        let notice = match &ban {
            Some(ban) if ban.is_in_force(unix()) => Notice::Ban { ban: ban.clone() },
            _ => Notice::Unban { subject: subject.clone() },
        };
        self.say(notice).await?;
        self.banned.announced(subject, ban.as_ref());
        Ok(())
    }

    async fn put_ban(&self, ban: &Ban) -> Result<(), StoreError> {
        let text = serde_json::to_vec(ban).unwrap_or_default();
        self.store.put_ban(&ban.subject, &self.seal(BAN, &text)).await
    }

    async fn kept_bans(&self) -> Result<Vec<Ban>, StoreError> {
        let read = |sealed: Vec<u8>| serde_json::from_slice(&self.sealer.open(BAN, &sealed)?).ok();
        Ok(self.store.bans().await?.into_iter().filter_map(read).collect())
    }

    /// Returns and clears the request to reload levels and bans.
    pub(super) fn is_to_reread(&self) -> bool {
        self.rereads.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use turnpike_fleet::{Beat, Card, FleetMembers, Load, NodeRecord};
    use turnpike_turn::server::NonceKey;

    use super::*;
    use crate::fleet::{NodeKeys, banned::Banned, questions};

    fn orders() -> FleetOrders {
        let alone = NodeKeys::alone(NonceKey([7; 32]));
        let banned = Arc::<Banned>::default();
        let fleet = FleetMembership { banned, used_quotas: Arc::default(), node: None, alone };
        FleetOrders::new(Arc::new(fleet), questions::channel().1)
    }

    fn ban(subject: &str, seconds: u64) -> Ban {
        Ban::new(subject.parse().expect("a subject"), unix() + seconds, "spam".to_owned())
    }

    #[tokio::test]
    async fn a_server_without_a_fleet_supports_bans_but_not_draining() {
        let orders = orders();
        let banned = orders.ban(ban("user bob@here", 100)).await.expect("a valid ban");
        assert_eq!(banned, Ordered { here: 0, is_announced: true });
        orders.ban(ban("user alice@here", 50)).await.expect("a valid ban");
        let subjects: Vec<String> = orders.bans().iter().map(|ban| ban.subject.to_string()).collect();
        assert_eq!(subjects, ["user alice@here", "user bob@here"]);
        let ids: Vec<u64> = orders.bans().iter().map(|ban| ban.id).collect();
        assert!(!ids.contains(&0) && ids[0] != ids[1], "{ids:?}");
        let alice: Subject = "user alice@here".parse().expect("a subject");
        assert_eq!(orders.unban(alice.clone()).await.expect("no other node"), Unbanned::Everywhere);
        assert_eq!(orders.unban(alice).await.expect("no other node"), Unbanned::NotBanned);
        for seconds in [0, LONGEST_BAN_S + 5] {
            assert!(matches!(orders.ban(ban("user bob@here", seconds)).await, Err(FleetError::Length)));
        }
        assert!(orders.status().is_none() && orders.node().is_none());
        assert_eq!(orders.health(), FleetHealth::Healthy);
        assert!(matches!(orders.set_draining("a", true).await, Err(FleetError::NoFleet)));
    }

    #[test]
    fn status_shows_the_last_heartbeat_of_a_node() {
        let load = Load { allocations: 5, most_allocations: 10, ..Load::default() };
        let mut members = FleetMembers::default();
        let state = |beat: Beat, members: &mut FleetMembers| {
            let name: NodeName = format!("n{}", beat.number).parse().expect("a name");
            let record = NodeRecord { name: name.clone(), stamp_ms: 0, beat };
            members.look(0, 0, 0, vec![record]);
            members.put_card(Card {
                name: name.clone(),
                incarnation: 1,
                zone: String::new(),
                version: "1".to_owned(),
                entrances: Vec::new(),
                domain: None,
            });
            let status = status_of(&name, members.get(&name).expect("a member"));
            (status.state, status.version)
        };
        let beat = Beat { number: 1, incarnation: 1, draining: false, load };
        let full = Load { allocations: 10, ..load };
        for (beat, expected) in [
            (beat, NodeState::Serving),
            (Beat { number: 2, draining: true, ..beat }, NodeState::Draining),
            (Beat { number: 3, load: full, ..beat }, NodeState::Full),
        ] {
            assert_eq!(state(beat, &mut members), (expected, Some("1".to_owned())));
        }
    }
}
