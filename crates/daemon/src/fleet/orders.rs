//! What administrators ask of a fleet, at any of its nodes: who is there, who takes nobody new, who is banned, and what another node says.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{
    sync::{Mutex, Notify, mpsc, oneshot},
    time::{sleep, timeout},
};
use turnpike_fleet::{
    Answer, BEAT_MS, Ban, LONGEST_BAN_S, Load, Member, NodeName, Notice, Ordered, Question, Rights, Subject,
    Unbanned,
};
use turnpike_stores::StoreError;

use super::{Fleet, node::BAN, node::Node, unix};

/// Questions of other nodes that may wait.
const QUESTIONS: usize = 64;
/// How long another node has for an answer, and how often it is looked for: soon at first.
const PATIENCE: Duration = Duration::from_secs(5);
const FIRST_LOOK: Duration = Duration::from_millis(10);
const LAST_LOOK: Duration = Duration::from_millis(200);
/// Before bans go back into a store that does not have them.
const GIVE_BACK: Duration = Duration::from_secs(2);

/// A question of another node, and where its answer goes.
#[derive(Debug)]
pub struct Asked {
    /// What it asks.
    pub question: Question,
    /// To be sent within some seconds.
    pub answer: oneshot::Sender<Answer>,
}

pub(super) type QuestionSender = mpsc::Sender<Asked>;

/// Questions, for who answers them.
pub(super) struct Questions(mpsc::Receiver<Asked>);

pub(super) fn questions() -> (QuestionSender, Questions) {
    let (sender, receiver) = mpsc::channel(QUESTIONS);
    (sender, Questions(receiver))
}

/// Why something was not done; each message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// The server is none of a fleet.
    #[error("this server is in no fleet: name its store in fleet.url")]
    NoFleet,
    /// Nobody has this name.
    #[error("there is no node {0} in the fleet; `turnpike fleet status` lists them")]
    NoSuchNode(String),
    /// It does not answer.
    #[error("node {0} does not answer: it may have ended, or have another fleet.secret")]
    Silent(NodeName),
    /// The store is away.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A ban that is over before it begins, or too long.
    #[error("a ban lasts from 1 second to {} days", LONGEST_BAN_S / 86_400)]
    Length,
}

/// A fleet, as one of its nodes sees it.
#[derive(Clone, Debug)]
pub struct FleetStatus {
    /// What the fleet is called.
    pub name: String,
    /// What this node is called.
    pub node: String,
    /// Where its store is, without a password.
    pub store: String,
    /// Why this node knows nothing of the others as of late, where it does not.
    pub alone: Option<String>,
    /// Whether the store was emptied or is another server, and does not know yet what all nodes hold.
    pub recovering: bool,
    /// Whether this node takes nobody new because somebody wants it so.
    pub cordoned: bool,
    /// The version of the keys that all share.
    pub keys: u64,
    /// All nodes by name, this one included.
    pub nodes: Vec<NodeStatus>,
}

/// A node.
#[derive(Clone, Debug)]
pub struct NodeStatus {
    /// Its name.
    pub name: String,
    /// What CONNECTION-IDs and tickets hold.
    pub number: u16,
    /// Whether it takes clients.
    pub state: NodeState,
    /// Milliseconds for which it has said nothing.
    pub silent_ms: u64,
    /// What it has to do.
    pub load: Load,
    /// Of that the largest share: 0 is idle, 1 is as much as it can take.
    pub busy: f64,
    /// Where it is, if somebody says.
    pub zone: String,
    /// Of its program; none before that is known.
    pub version: Option<String>,
    /// Where clients reach it, such as `tls://203.0.113.5:5349`.
    pub addresses: Vec<(&'static str, SocketAddr)>,
}

/// Whether a node takes clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// It does.
    Serving,
    /// It has no room.
    Full,
    /// It takes nobody new.
    Draining,
    /// Nobody knows as of late.
    Silent,
}

/// The way to a fleet; bans there are without one too. Clones are the same.
#[derive(Clone)]
pub struct FleetOrders {
    fleet: Arc<Fleet>,
    questions: Arc<Mutex<mpsc::Receiver<Asked>>>,
}

impl FleetOrders {
    pub(super) fn new(fleet: Arc<Fleet>, Questions(questions): Questions) -> Self {
        Self { fleet, questions: Arc::new(Mutex::new(questions)) }
    }

    /// What this node is called; `None` without a fleet.
    #[must_use]
    pub fn node_name(&self) -> Option<&str> {
        self.fleet.node.as_ref().map(|node| node.name.as_str())
    }

    /// Who is there; `None` without a fleet.
    #[must_use]
    pub fn status(&self) -> Option<FleetStatus> {
        let node = self.fleet.node.as_deref()?;
        let members = node.members();
        Some(FleetStatus {
            name: node.setting(|settings| settings.name.to_string()),
            node: node.name.to_string(),
            store: node.store.name().to_owned(),
            alone: alone(node),
            recovering: node.is_recovering(),
            cordoned: node.is_cordoned(),
            keys: node.ring_version(),
            nodes: members.iter().map(|(name, member)| NodeStatus::of(name, member)).collect(),
        })
    }

    /// Whether this node is one of a fleet, and knows nothing of the others as of late.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.fleet.node.as_ref().is_some_and(|node| node.is_alone())
    }

    /// Whether the fleet's store grants nothing, because it does not know yet what all nodes hold.
    #[must_use]
    pub fn is_recovering(&self) -> bool {
        self.fleet.node.as_ref().is_some_and(|node| node.is_recovering())
    }

    /// Whether somebody has this node take nobody new.
    #[must_use]
    pub fn is_cordoned(&self) -> bool {
        self.fleet.is_cordoned()
    }

    /// Whether a node is this one.
    #[must_use]
    pub fn is_own(&self, name: &str) -> bool {
        self.fleet.node.as_ref().is_some_and(|node| node.name.as_str() == name)
    }

    /// Has a node take nobody new, or clients again. It runs on, and sessions that it has go on.
    ///
    /// # Errors
    /// There is no such node, or no way to it.
    pub async fn set_draining(&self, name: &str, drains: bool) -> Result<(), FleetError> {
        let node = self.node()?;
        let wanted = self.known(name)?;
        if wanted == node.name {
            node.set_cordoned(drains);
            return Ok(());
        }
        Ok(node.say(Notice::Drain { node: wanted, drains }).await?)
    }

    /// Asks another node.
    ///
    /// # Errors
    /// There is no such node, no way to it, or no answer.
    pub async fn ask(
        &self,
        name: &str,
        (method, path): (&str, &str),
        rights: Rights,
        by: &str,
    ) -> Result<Answer, FleetError> {
        let node = self.node()?;
        let to = self.known(name)?;
        let question = Question {
            id: rand::random(),
            to: to.clone(),
            method: method.to_owned(),
            path: path.to_owned(),
            rights,
            by: by.to_owned(),
        };
        let id = question.id;
        node.say(Notice::Question(question)).await?;
        let (mut waited, mut pause) = (Duration::ZERO, FIRST_LOOK);
        while waited < PATIENCE {
            sleep(pause).await;
            if let Some(sealed) = node.store.answered(id).await? {
                return Answer::open(&node.sealer, id, &sealed).ok_or(FleetError::Silent(to));
            }
            waited += pause;
            pause = (pause * 3 / 2).min(LAST_LOOK);
        }
        Err(FleetError::Silent(to))
    }

    /// The next question of another node; none any more when the server ends.
    pub async fn next_question(&self) -> Option<Asked> {
        self.questions.lock().await.recv().await
    }

    /// Who is banned, those first whose ban ends first.
    #[must_use]
    pub fn bans(&self) -> Vec<Ban> {
        let now = unix();
        let mut bans = self.fleet.banned.list();
        bans.retain(|ban| ban.is_in_force(now));
        bans.sort_by(|one, other| {
            (one.until, one.subject.to_string()).cmp(&(other.until, other.subject.to_string()))
        });
        bans
    }

    /// Bans a user or an address, everywhere; sessions here end. Their number. Without a fleet it is for as long as this process lives.
    ///
    /// # Errors
    /// The ban is too short or too long; or more orders wait for the store than can be remembered.
    pub async fn ban(&self, ban: Ban) -> Result<Ordered, FleetError> {
        let seconds = ban.until.saturating_sub(unix());
        if !(1..=LONGEST_BAN_S).contains(&seconds) {
            return Err(FleetError::Length);
        }
        let (banned, ban) = (&self.fleet.banned, ban.with_id(rand::random()));
        let subject = ban.subject.clone();
        let Some(node) = &self.fleet.node else {
            banned.put(ban);
            return Ok(Ordered { here: banned.end_sessions(&subject).await, is_announced: true });
        };
        banned.order(ban);
        let (announced, here) = tokio::join!(node.announce_now(&subject), banned.end_sessions(&subject));
        Ok(Ordered { here, is_announced: announced?.is_some() })
    }

    /// Ends a ban that this node or the store knows of.
    ///
    /// # Errors
    /// More orders wait for the store than can be remembered.
    pub async fn unban(&self, subject: &Subject) -> Result<Unbanned, FleetError> {
        let banned = &self.fleet.banned;
        let (was_here, was_kept) = match &self.fleet.node {
            None => (banned.lift(unix(), subject).is_some(), Some(false)),
            Some(node) => (banned.order_lift(unix(), subject).is_some(), node.announce_now(subject).await?),
        };
        Ok(match was_kept {
            None => Unbanned::HereOnly,
            Some(was_kept) if was_here || was_kept => Unbanned::Everywhere,
            Some(_) => Unbanned::NotBanned,
        })
    }

    /// A user has another credential, or none: no node believes the old one any more.
    pub async fn revoked(&self, realm: &str, name: &str) {
        self.tell(Notice::Revoked { realm: realm.to_owned(), name: name.to_owned() }).await;
    }

    /// Secrets, realms or limits have changed in the store of users: all nodes read them.
    pub async fn rules_changed(&self) {
        self.tell(Notice::RulesChanged).await;
    }

    /// What the others find out by themselves some time later.
    async fn tell(&self, notice: Notice) {
        let Some(node) = &self.fleet.node else { return };
        if let Err(error) = node.say(notice).await {
            tracing::warn!(
                "{error}; other nodes hear of a change of users when what they remember is too old"
            );
        }
    }

    fn node(&self) -> Result<&Arc<Node>, FleetError> {
        self.fleet.node.as_ref().ok_or(FleetError::NoFleet)
    }

    /// A node that is there.
    fn known(&self, name: &str) -> Result<NodeName, FleetError> {
        let node = self.node()?;
        let none = || FleetError::NoSuchNode(format!("{name:?}"));
        let wanted: NodeName = name.parse().map_err(|_| none())?;
        let is_there = wanted == node.name || node.members().get(&wanted).is_some();
        if is_there { Ok(wanted) } else { Err(none()) }
    }
}

/// Why a node knows nothing of the others as of late.
fn alone(node: &Node) -> Option<String> {
    let trouble = node.health.trouble_of(node.now_ms());
    trouble.or_else(|| {
        let why = "it is no member: another node may have its name, or there are as many as there may be";
        (node.number() == 0).then(|| why.to_owned())
    })
}

impl NodeStatus {
    fn of(name: &NodeName, member: &Member) -> Self {
        let Member { card, beat, silent_ms, .. } = member;
        let state = if !member.is_heard() {
            NodeState::Silent
        } else if beat.draining {
            NodeState::Draining
        } else if beat.load.is_full() {
            NodeState::Full
        } else {
            NodeState::Serving
        };
        let entrances = card.iter().flat_map(|card| &card.entrances);
        Self {
            name: name.to_string(),
            number: beat.number,
            state,
            silent_ms: *silent_ms,
            load: beat.load,
            busy: beat.load.busy(),
            zone: card.as_ref().map_or_else(String::new, |card| card.zone.clone()),
            version: card.as_ref().map(|card| card.version.clone()),
            addresses: entrances.map(|entrance| (entrance.transport.into(), entrance.address)).collect(),
        }
    }
}

/// Orders about bans, on their way to the other nodes.
#[derive(Default)]
pub(super) struct Announcements {
    /// Held while one is announced, so that the others hear of two about one subject in the order in which they were given.
    turn: Mutex<()>,
    /// The store has taken a beat.
    pub(super) wake: Notify,
}

/// Announces orders that were given while the store was away, until the node has left: apart from the beats, which must not wait for it.
pub(super) async fn keep_announcing(node: Arc<Node>) {
    while !node.is_over() {
        let is_there = timeout(Duration::from_millis(BEAT_MS), node.announcements.wake.notified()).await;
        if is_there.is_ok()
            && let Err(error) = node.announce_orders().await
        {
            node.failed(&error);
        }
    }
}

impl Node {
    /// Another node asks this one.
    pub(super) fn answer(self: &Arc<Self>, question: Question) {
        let id = question.id;
        let (answer, answered) = oneshot::channel();
        if self.questions.try_send(Asked { question, answer }).is_err() {
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

    /// Bans that the store keeps count here, and those that we know and it does not are given back: it may have been emptied. What was lifted
    /// meanwhile it keeps, too.
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

    /// Announces an order that was just given, and returns whether the store had a ban of the subject in force. `None` if the store is away:
    /// it is announced when that answers again.
    async fn announce_now(&self, subject: &Subject) -> Result<Option<bool>, StoreError> {
        let announced = async {
            let _turn = self.announcements.turn.lock().await;
            // Many administrators' orders must not wait one after the other for a store that is known to be away.
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
                tracing::warn!("{error}; the order holds here, and the other nodes are told when it answers");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Announces the orders that were given while the store was away.
    pub(super) async fn announce_orders(&self) -> Result<(), StoreError> {
        let subjects = self.banned.unannounced();
        if subjects.is_empty() {
            return Ok(());
        }
        let kept = self.kept_bans().await?;
        for subject in subjects {
            // An administrator who gives an order meanwhile waits for one of these at most.
            let _turn = self.announcements.turn.lock().await;
            if self.banned.is_unannounced(&subject) {
                self.announce(&subject, &kept).await?;
                let subject = subject.to_string();
                tracing::info!(?subject, "the other nodes are told of a ban, or of its end");
            }
        }
        Ok(())
    }

    /// Tells the store, which keeps these bans, and the other nodes of a subject. Its turn is the caller's.
    async fn announce(&self, subject: &Subject, kept: &[Ban]) -> Result<(), StoreError> {
        let ban = self.banned.to_announce(unix(), subject, kept);
        // A node that is away hears nothing of a ban that is lifted, and has to find that in the store.
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

    /// Whether levels and bans are to be read again; once.
    pub(super) fn is_to_reread(&self) -> bool {
        self.rereads.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use turnpike_fleet::{Beat, Card, Members, Record};
    use turnpike_turn::server::NonceKey;

    use super::*;
    use crate::fleet::{NodeKeys, banned::Banned};

    /// Of a server that is in no fleet.
    fn orders() -> FleetOrders {
        let alone = NodeKeys::alone(NonceKey([7; 32]));
        let fleet = Fleet { banned: Arc::<Banned>::default(), node: None, alone };
        FleetOrders::new(Arc::new(fleet), questions().1)
    }

    fn ban(subject: &str, seconds: u64) -> Ban {
        Ban::new(subject.parse().expect("a subject"), unix() + seconds, "spam".to_owned())
    }

    #[tokio::test]
    async fn a_server_without_a_fleet_has_bans_and_nothing_else_of_one() {
        let orders = orders();
        let banned = orders.ban(ban("user bob@here", 100)).await.expect("it is banned");
        assert_eq!(banned, Ordered { here: 0, is_announced: true });
        orders.ban(ban("user alice@here", 50)).await.expect("it is banned");
        let subjects: Vec<String> = orders.bans().iter().map(|ban| ban.subject.to_string()).collect();
        assert_eq!(subjects, ["user alice@here", "user bob@here"]);
        let ids: Vec<u64> = orders.bans().iter().map(|ban| ban.id).collect();
        assert!(!ids.contains(&0) && ids[0] != ids[1], "{ids:?}");
        let alice = "user alice@here".parse().expect("a subject");
        assert_eq!(orders.unban(&alice).await.expect("no other node"), Unbanned::Everywhere);
        assert_eq!(orders.unban(&alice).await.expect("no other node"), Unbanned::NotBanned);
        for seconds in [0, LONGEST_BAN_S + 5] {
            assert!(matches!(orders.ban(ban("user bob@here", seconds)).await, Err(FleetError::Length)));
        }
        assert!(orders.status().is_none() && !orders.is_alone() && !orders.is_own("a"));
        assert!(matches!(orders.set_draining("a", true).await, Err(FleetError::NoFleet)));
    }

    #[test]
    fn a_node_is_told_of_as_it_was_heard_last() {
        let load = Load { allocations: 5, most_allocations: 10, ..Load::default() };
        let mut members = Members::default();
        let state = |beat: Beat, members: &mut Members| {
            let name: NodeName = format!("n{}", beat.number).parse().expect("a name");
            let record = Record { name: name.clone(), stamp_ms: 0, beat };
            members.look(0, 0, 0, vec![record]);
            members.put_card(Card {
                name: name.clone(),
                incarnation: 1,
                zone: String::new(),
                version: "1".to_owned(),
                entrances: Vec::new(),
                domain: None,
            });
            let status = NodeStatus::of(&name, members.get(&name).expect("it is there"));
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
