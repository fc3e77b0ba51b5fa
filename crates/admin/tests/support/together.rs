//! Servers that are one service, as the interface sees them, with nothing but memory between them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use tokio::sync::{
    mpsc::{self, UnboundedReceiver, UnboundedSender},
    oneshot,
};
use turnpike_admin::{
    model::{self, NodeState},
    program::{Asked, Fleet, FleetRefusal, Later, Reply, Standing},
};
use turnpike_fleet::{Answer, Ban, Ordered, Question, Subject, Unbanned};

type Questions = UnboundedSender<(Question, Reply)>;

/// All of them, by name.
#[derive(Clone, Default)]
pub(crate) struct Together(Arc<Mutex<BTreeMap<String, Questions>>>);

/// One of them, or one that is none.
pub(crate) struct Member {
    together: Option<Together>,
    name: String,
    questions: Arc<tokio::sync::Mutex<UnboundedReceiver<(Question, Reply)>>>,
    pub(crate) standing: Mutex<Standing>,
    bans: Mutex<Vec<Ban>>,
    /// What the others were told, line by line.
    pub(crate) told: Arc<Mutex<Vec<String>>>,
}

impl Together {
    pub(crate) fn join(&self, name: &str) -> Arc<Member> {
        let (sender, member) = Member::new(Some(self.clone()), name);
        self.0.lock().unwrap().insert(name.to_owned(), sender);
        Arc::new(member)
    }

    /// Has it answer nobody any more, though it is listed.
    pub(crate) fn silence(&self, name: &str) {
        self.0.lock().unwrap().insert(name.to_owned(), mpsc::unbounded_channel().0);
    }
}

impl Member {
    /// Of a server that is in no fleet.
    pub(crate) fn alone() -> Arc<Self> {
        Arc::new(Self::new(None, "alone").1)
    }

    fn new(together: Option<Together>, name: &str) -> (Questions, Self) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let member = Self {
            together,
            name: name.to_owned(),
            questions: Arc::new(tokio::sync::Mutex::new(receiver)),
            standing: Mutex::new(Standing::Well),
            bans: Mutex::default(),
            told: Arc::default(),
        };
        (sender, member)
    }

    fn tell<T: Send + 'static>(&self, line: String, answer: T) -> Later<T> {
        self.told.lock().unwrap().push(line);
        Box::pin(async { answer })
    }

    fn way_to(&self, node: &str) -> Result<Questions, FleetRefusal> {
        let none = || FleetRefusal::None("this server is in no fleet".to_owned());
        let together = self.together.as_ref().ok_or_else(none)?;
        let found = together.0.lock().unwrap().get(node).cloned();
        found.ok_or_else(|| FleetRefusal::NoSuchNode(format!("there is no node {node:?}")))
    }
}

impl Fleet for Member {
    fn node(&self) -> Option<String> {
        self.together.as_ref().map(|_| self.name.clone())
    }

    fn status(&self) -> Option<model::Fleet> {
        let nodes = self.together.as_ref()?.0.lock().unwrap();
        let node = |(number, name): (usize, &String)| model::FleetNode {
            name: name.clone(),
            number: u16::try_from(number).unwrap() + 1,
            state: NodeState::Serving,
            silent_s: 0.5,
            zone: String::new(),
            version: Some("0.1.0".to_owned()),
            busy: 0.25,
            sessions: 3,
            max_sessions: 100,
            bits_per_second: 8_000_000,
            max_bits_per_second: None,
            cpu: 0.125,
            relay_ports_left: 97,
            relay_ports: 100,
            addresses: vec!["udp://192.0.2.1:3478".to_owned()],
        };
        Some(model::Fleet {
            name: "turnpike".to_owned(),
            node: self.name.clone(),
            store: "redis://h".to_owned(),
            alone: None,
            recovering: *self.standing.lock().unwrap() == Standing::Recovering,
            keys: 1,
            nodes: nodes.keys().enumerate().map(node).collect(),
        })
    }

    fn standing(&self) -> Standing {
        *self.standing.lock().unwrap()
    }

    fn set_draining(&self, node: &str, drains: bool) -> Later<Result<(), FleetRefusal>> {
        match self.way_to(node) {
            Ok(_) => self.tell(format!("{node} drains: {drains}"), Ok(())),
            Err(refusal) => Box::pin(async { Err(refusal) }),
        }
    }

    fn ask(&self, asked: Asked) -> Later<Result<Answer, FleetRefusal>> {
        let way = self.way_to(&asked.node);
        Box::pin(async move {
            let way = way?;
            let Asked { node, method, path, rights, by } = asked;
            let to = node.parse().unwrap();
            let (sender, answer) = oneshot::channel();
            let reply: Reply = Box::new(move |answer| _ = sender.send(answer));
            let question = Question { id: 1, to, method, path, rights, by };
            let silent = || FleetRefusal::Silent(format!("node {node} does not answer"));
            way.send((question, reply)).map_err(|_| silent())?;
            answer.await.map_err(|_| silent())
        })
    }

    fn next_question(&self) -> Later<Option<(Question, Reply)>> {
        let questions = Arc::clone(&self.questions);
        Box::pin(async move { questions.lock().await.recv().await })
    }

    fn bans(&self) -> Vec<Ban> {
        self.bans.lock().unwrap().clone()
    }

    /// Of mallory the others hear later.
    fn ban(&self, ban: Ban) -> Later<Result<Ordered, FleetRefusal>> {
        let is_announced = !ban.subject.to_string().contains("mallory");
        self.bans.lock().unwrap().push(ban);
        Box::pin(async move { Ok(Ordered { here: 3, is_announced }) })
    }

    fn unban(&self, subject: Subject) -> Later<Result<Unbanned, FleetRefusal>> {
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

    fn revoked(&self, realm: String, name: String) -> Later<()> {
        self.tell(format!("revoked {name} of {realm}"), ())
    }

    fn rules_changed(&self) -> Later<()> {
        self.tell("rules".to_owned(), ())
    }
}
