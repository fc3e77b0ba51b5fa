//! An in-memory fleet for the admin interface.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use tokio::sync::{
    mpsc::{self, UnboundedReceiver, UnboundedSender},
    oneshot,
};
use turnpike_api::{
    FleetAdmin, FleetError, FleetHealth, FleetNode, FleetStatus, Later, NodeState, PeerRequest, Reply,
};
use turnpike_fleet::{Ban, ForwardedRequest, NodeName, Ordered, PeerAnswer, Subject, Unbanned};

type Questions = UnboundedSender<(ForwardedRequest, Reply)>;

#[derive(Clone, Default)]
pub(crate) struct Together(Arc<Mutex<BTreeMap<String, Questions>>>);

/// A node, or a server without a fleet.
pub(crate) struct Member {
    together: Option<Together>,
    name: String,
    questions: Arc<tokio::sync::Mutex<UnboundedReceiver<(ForwardedRequest, Reply)>>>,
    pub(crate) health: Mutex<FleetHealth>,
    bans: Mutex<Vec<Ban>>,
    /// Notices sent to the other nodes, one per line.
    pub(crate) told: Arc<Mutex<Vec<String>>>,
}

impl Together {
    pub(crate) fn join(&self, name: &str) -> Arc<Member> {
        let (sender, member) = Member::new(Some(self.clone()), name);
        self.0.lock().unwrap().insert(name.to_owned(), sender);
        Arc::new(member)
    }

    pub(crate) fn silence(&self, name: &str) {
        self.0.lock().unwrap().insert(name.to_owned(), mpsc::unbounded_channel().0);
    }
}

impl Member {
    pub(crate) fn alone() -> Arc<Self> {
        Arc::new(Self::new(None, "alone").1)
    }

    fn new(together: Option<Together>, name: &str) -> (Questions, Self) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let member = Self {
            together,
            name: name.to_owned(),
            questions: Arc::new(tokio::sync::Mutex::new(receiver)),
            health: Mutex::new(FleetHealth::Healthy),
            bans: Mutex::default(),
            told: Arc::default(),
        };
        (sender, member)
    }

    fn tell<T: Send + 'static>(&self, line: String, answer: T) -> Later<'static, T> {
        self.told.lock().unwrap().push(line);
        Box::pin(async { answer })
    }

    fn way_to(&self, node: &str) -> Result<Questions, FleetError> {
        let together = self.together.as_ref().ok_or(FleetError::NoFleet)?;
        let found = together.0.lock().unwrap().get(node).cloned();
        found.ok_or_else(|| FleetError::NoSuchNode(node.to_owned()))
    }
}

impl FleetAdmin for Member {
    fn node(&self) -> Option<String> {
        self.together.as_ref().map(|_| self.name.clone())
    }

    fn status(&self) -> Option<FleetStatus> {
        let nodes = self.together.as_ref()?.0.lock().unwrap();
        let node = |(number, name): (usize, &String)| FleetNode {
            name: name.clone(),
            number: u16::try_from(number).unwrap() + 1,
            state: NodeState::Serving,
            silent_s: 0.5,
            zone: String::new(),
            version: Some("0.2.0".to_owned()),
            busy: 0.25,
            allocations: 3,
            max_allocations: 100,
            bits_per_second: 8_000_000,
            max_bits_per_second: None,
            cpu: 0.125,
            relay_ports_left: 97,
            relay_ports: 100,
            addresses: vec!["udp://192.0.2.1:3478".to_owned()],
        };
        Some(FleetStatus {
            name: "turnpike".to_owned(),
            node: self.name.clone(),
            store: "redis://h".to_owned(),
            alone: None,
            recovering: *self.health.lock().unwrap() == FleetHealth::Recovering,
            keys: 1,
            nodes: nodes.keys().enumerate().map(node).collect(),
        })
    }

    fn health(&self) -> FleetHealth {
        *self.health.lock().unwrap()
    }

    fn set_draining<'a>(&'a self, node: &'a str, drains: bool) -> Later<'a, Result<(), FleetError>> {
        match self.way_to(node) {
            Ok(_) => self.tell(format!("{node} drains: {drains}"), Ok(())),
            Err(refusal) => Box::pin(async { Err(refusal) }),
        }
    }

    fn ask(&self, asked: PeerRequest) -> Later<'_, Result<PeerAnswer, FleetError>> {
        let way = self.way_to(&asked.node);
        Box::pin(async move {
            let way = way?;
            let PeerRequest { node, method, path, rights, by } = asked;
            let to: NodeName = node.parse().unwrap();
            let (sender, answer) = oneshot::channel();
            let reply: Reply = Box::new(move |answer| _ = sender.send(answer));
            let question = ForwardedRequest { id: 1, to: to.clone(), method, path, rights, by };
            let silent = || FleetError::Silent(to.clone());
            way.send((question, reply)).map_err(|_| silent())?;
            answer.await.map_err(|_| silent())
        })
    }

    fn next_question(&self) -> Later<'_, Option<(ForwardedRequest, Reply)>> {
        let questions = Arc::clone(&self.questions);
        Box::pin(async move { questions.lock().await.recv().await })
    }

    fn bans(&self) -> Vec<Ban> {
        self.bans.lock().unwrap().clone()
    }

    /// Announcements about mallory are delayed.
    fn ban(&self, ban: Ban) -> Later<'_, Result<Ordered, FleetError>> {
        let is_announced = !ban.subject.to_string().contains("mallory");
        self.bans.lock().unwrap().push(ban);
        Box::pin(async move { Ok(Ordered { here: 3, is_announced }) })
    }

    fn unban(&self, subject: Subject) -> Later<'_, Result<Unbanned, FleetError>> {
        let is_announced = !subject.to_string().contains("mallory");
        let mut bans = self.bans.lock().unwrap();
        let before = bans.len();
        bans.retain(|ban| ban.subject != subject);
        let unbanned = match (bans.len() < before, is_announced) {
            (_, false) => Unbanned::HereOnly,
            (true, true) => Unbanned::Everywhere,
            (false, true) => Unbanned::NotBanned,
        };
        Box::pin(async move { Ok(unbanned) })
    }

    fn revoked(&self, realm: String, name: String) -> Later<'_, ()> {
        self.tell(format!("revoked {name} of {realm}"), ())
    }

    fn rules_changed(&self) -> Later<'_, ()> {
        self.tell("rules".to_owned(), ())
    }
}
