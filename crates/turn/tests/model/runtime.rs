//! Runtime of the model test. Effects must match the model, in order and exactly once.

use super::prelude::*;
use turnpike_turn::{
    server::{LookupResult, MoveRequest, Moved, OpenRequest, OwnedUser, PendingMove, UserRef},
    wire::integrity::{Key, KeyAlgorithm, userhash},
};

use super::{
    cast::{self, Rules},
    message::{Answer, Datagram, Learned, Request},
    network::{Done, Network, Worker, is_for_the_log, pick, policy, server},
    reference::{self, Allocation, DATAGRAMS, Delivery, Expected, Goes, Notice, Place, Verdict, is_wish},
    requests::truth,
    step::{Says, Setup},
};

pub(super) enum Job {
    Open(OpenRequest),
    Connect { allocation: AllocationSlot, id: u32, late: bool },
}

pub(super) enum Mail {
    Stream {
        from: usize,
        request: Request,
        bytes: Box<[u8]>,
    },
    /// Request whose client stays on its worker.
    Request {
        via: u16,
        occupied: bool,
        source: Source,
        request: Request,
        bytes: Box<[u8]>,
    },
    /// A returned request, whose client has no pending move on the owner.
    Declined {
        owner: usize,
        source: Source,
        request: Request,
        bytes: Box<[u8]>,
    },
    MoveOver {
        from: usize,
        pending_move: (PendingMove, reference::PendingMove),
    },
    Deleted {
        deletion: (u64, u64),
        of: (Client, [u8; 12], &'static str),
    },
    /// Reply to a forwarded request, with the pending move according to the server and to the model.
    Reply {
        source: Source,
        pending_move: Option<(PendingMove, reference::PendingMove)>,
        learned: Learned,
        answer: Answer,
    },
    Wanted {
        request: MoveRequest,
        number: usize,
        datagram: Datagram,
        bytes: Box<[u8]>,
    },
    Allocation {
        from: usize,
        number: usize,
        moved: Moved,
        sockets: Sockets,
        data: Option<(Datagram, Box<[u8]>)>,
    },
    NotMoved(Client),
    Returned {
        number: usize,
        moved: Moved,
        sockets: Sockets,
    },
}

type Sockets = Vec<(SocketAddr, Family)>;

impl Network {
    pub(super) fn take_effects(&mut self, at: usize, expected: Option<Expected>, datagram: &Datagram) {
        let (mut goes, mut answered) = match expected {
            Some(Expected::Goes(goes)) => (Some(goes), None),
            Some(Expected::Answered { via, source, answer, pending_move }) => {
                (None, Some((via, source, answer, pending_move)))
            }
            _ => (None, None),
        };
        let effects: Vec<Effect> = std::iter::from_fn(|| self.workers[at].server.poll_effect()).collect();
        let mut moves = Vec::new();
        for effect in effects {
            match effect {
                effect if is_for_the_log(&effect) => {}
                Effect::Answer { via, source, pending_move, reply } => {
                    let Some((back, to, answer, announced)) = answered.take() else {
                        panic!("unexpected response for {source:?}")
                    };
                    assert_eq!((via, source), (back, to));
                    let learned = self.read(&answer, &source, &reply);
                    let pending_move = both(pending_move, announced);
                    self.post(via.into(), Mail::Reply { source, pending_move, learned, answer });
                }
                Effect::Move(request) => moves.push(request),
                effect @ (Effect::MoveOver { .. } | Effect::Deleted { .. }) => self.notify(at, effect),
                effect @ (Effect::Open(_)
                | Effect::Connect(_)
                | Effect::HandOver { .. }
                | Effect::Forward { .. }
                | Effect::Decline { .. }
                | Effect::Fetch { .. }
                | Effect::LookUp(_)) => {
                    let Some(goes) = goes.take() else { panic!("unexpected {effect:?}") };
                    self.goes_on(at, goes, effect, datagram);
                }
                effect => self.state_effect(at, &effect),
            }
        }
        assert_eq!(goes, None, "the effect that continues a request is missing");
        assert!(answered.is_none(), "response missing: {answered:?}");
        assert!(self.model.notices.is_empty(), "notices missing: {:?}", self.model.notices);
        let (told, over) = (&self.model.told, &self.model.over);
        assert!(told.is_empty() && over.is_empty(), "effects missing: {told:?}, {over:?}");
        for request in moves {
            let number = self.model.moving.pop_front().expect("unexpected move");
            let (to, worker) = self.model.arriving_at(number).expect("a pending move");
            assert_eq!((usize::from(request.owner), usize::from(request.to)), (at, worker));
            assert_eq!((request.client, request.link), (to.client, to.link));
            self.export(at, &request, number, None);
        }
    }

    fn notify(&mut self, at: usize, effect: Effect) {
        match (self.model.notices.pop_front(), effect) {
            (
                Some(Notice::MoveOver { to, pending_move: over }),
                Effect::MoveOver { worker, pending_move },
            ) => {
                assert_eq!(usize::from(worker), to);
                self.post(to, Mail::MoveOver { from: at, pending_move: (pending_move, over) });
            }
            (Some(Notice::Deleted { to, client, transaction, user }), Effect::Deleted { via, deletion }) => {
                assert_eq!(usize::from(via), to);
                self.post(to, Mail::Deleted { deletion, of: (client, transaction, user) });
            }
            (notice, effect) => panic!("{effect:?}, expected {notice:?}"),
        }
    }

    fn state_effect(&mut self, at: usize, effect: &Effect) {
        self.model.learn_id(at, effect);
        if let Some(place) = self.model.over.iter().position(|over| over == effect) {
            self.model.over.swap_remove(place);
        } else if self.model.told.front() == Some(effect) {
            assert!(self.model.over.is_empty(), "missing before {effect:?}: {:?}", self.model.over);
            self.model.told.pop_front();
        } else {
            let expected = self.model.told.front().cloned();
            assert!(self.model.may_expire(at, effect), "worker {at} emits {effect:?}, expected {expected:?}");
        }
        match effect {
            Effect::Closed { allocation, .. } => {
                self.close_sockets(at, |relay| relay.allocation == *allocation);
                self.drop_connections(at);
            }
            Effect::RelayClosed { relay } => {
                self.close_sockets(at, |other| other == *relay);
            }
            Effect::ConnectionClosed { connection, .. } => self.drop_connection(at, connection.0),
            Effect::ConnectTimedOut { connection, .. } => {
                for job in &mut self.workers[at].jobs {
                    if let Job::Connect { id, late, .. } = job
                        && *id == connection.0
                    {
                        *late = true;
                    }
                }
            }
            Effect::Bind { connection, source } => {
                let from = cast::number_of(&source.client);
                let data =
                    self.connections.get_mut(&(at, connection.0)).expect("a connection of the runtime");
                assert_eq!(data.replace(from), None, "bound twice");
                self.ends[from].bound = Some((at, connection.0));
            }
            _ => {}
        }
    }

    fn close_sockets(&mut self, at: usize, is_closed: impl Fn(RelayId) -> bool) {
        let closed: Vec<SocketAddr> = self
            .sockets
            .iter()
            .filter(|(_, (worker, relay))| *worker == at && is_closed(*relay))
            .map(|(address, _)| *address)
            .collect();
        for address in closed {
            self.closed.extend(self.sockets.remove(&address));
        }
    }

    fn drop_connections(&mut self, at: usize) {
        let gone: Vec<u32> = self
            .connections
            .keys()
            .filter(|(worker, id)| *worker == at && self.model.connection(at, *id).is_none())
            .map(|(_, id)| *id)
            .collect();
        for id in gone {
            self.drop_connection(at, id);
        }
    }

    /// Closes a connection to a peer and the client's data connection. A pending attempt reports later,
    /// without effect.
    fn drop_connection(&mut self, at: usize, id: u32) {
        if let Some(Some(from)) = self.connections.remove(&(at, id)) {
            self.ends[from].bound = None;
            self.ends[from].open = false;
        }
    }

    fn goes_on(&mut self, at: usize, goes: Goes, effect: Effect, datagram: &Datagram) {
        let request = || match datagram {
            Datagram::Request(request) => request.clone(),
            other => panic!("{other:?} is not a request"),
        };
        match (goes, effect) {
            (Goes::Open { number, first, second }, Effect::Open(open)) => {
                let it = &mut self.model.allocations[number];
                let is_mobile = it.pending.as_ref().is_some_and(|pending| pending.mobile);
                let any = if is_mobile { PortRequest::Own } else { PortRequest::Any };
                assert!(is_wish(&first, &open.first, any), "expected {first:?}, got {:?}", open.first);
                assert_eq!(open.second.map(|second| second.family), second);
                assert!(open.second.is_none_or(|second| second.port == any));
                it.place = Place::At(at, open.allocation);
                if let PortRequest::EvenAndReserveNext(token) = open.first.port {
                    it.reservation = Some(token);
                }
                self.workers[at].jobs.push_back(Job::Open(open));
            }
            (Goes::Connect { number, family, peer }, Effect::Connect(connect)) => {
                let allocation = self.model.allocations[number].id();
                let relay = RelayId { allocation, family };
                assert_eq!((connect.relay, connect.peer), (relay, peer));
                let id = connect.connection.0;
                self.model.name_connection(number, id);
                assert!(self.connections.insert((at, id), None).is_none(), "a CONNECTION-ID was reused");
                self.workers[at].jobs.push_back(Job::Connect { allocation, id, late: false });
            }
            (Goes::HandOver { worker }, Effect::HandOver { worker: to, source, request: bytes }) => {
                assert_eq!((worker, &*datagram.bytes()), (to, &*bytes));
                let from = cast::number_of(&source.client);
                self.ends[from].travels = true;
                self.post(to.into(), Mail::Stream { from, request: request(), bytes });
            }
            (
                Goes::Forward { worker, via, occupied },
                Effect::Forward { worker: to, via: from, occupied: taken, source, request: bytes },
            ) => {
                assert_eq!((worker, via, occupied, &*datagram.bytes()), (to, from, taken, &*bytes));
                self.post(to.into(), Mail::Request { via, occupied, source, request: request(), bytes });
            }
            (Goes::Decline { via }, Effect::Decline { via: to, source, request: bytes }) => {
                assert_eq!((via, &*datagram.bytes()), (to, &*bytes));
                self.post(to.into(), Mail::Declined { owner: at, source, request: request(), bytes });
            }
            (Goes::Fetch { owner, number }, Effect::Fetch { request, datagram: bytes }) => {
                let own = u16::try_from(at).expect("few enough workers");
                assert_eq!((request.owner, request.to), (owner, own));
                // Transaction IDs of indications are arbitrary and differ each time.
                let is_send = matches!(datagram, Datagram::Send { .. });
                assert!(is_send || datagram.bytes() == *bytes, "this is not the datagram to feed again");
                let (client, datagram) = (request.client, datagram.clone());
                if !self.post(owner.into(), Mail::Wanted { request, number, datagram, bytes }) {
                    self.workers[at].server.not_asked(&client);
                    self.model.not_asked(at, &client);
                }
            }
            (Goes::LookUp { user, realm }, Effect::LookUp(query)) => {
                assert_eq!(&*query.realm, realm);
                assert!(match &query.user {
                    OwnedUser::Name(name) => **name == *user,
                    OwnedUser::Hash(hash) => *hash == userhash(user, realm),
                });
                let waiting = self.model.workers[at].waiting.last_mut().expect("a waiting request");
                assert_eq!(waiting.lookup.replace(query.lookup), None);
                self.workers[at].questions.push_back(query.lookup);
            }
            (goes, effect) => panic!("{effect:?}, expected {goes:?}"),
        }
    }

    pub(super) fn settle(&mut self, luck: u8) {
        loop {
            let mut idle = true;
            for at in 0..self.setup.workers {
                while self.work(at, luck) || self.mail(at) || self.store_answers(at, Says::Truth) {
                    idle = false;
                }
            }
            if idle {
                return;
            }
        }
    }

    /// Executes one pending job of a worker's runtime. With low `luck`, some jobs fail.
    pub(super) fn work(&mut self, at: usize, luck: u8) -> bool {
        let Some(job) = self.workers[at].jobs.pop_front() else { return false };
        match job {
            Job::Open(open) => self.open(at, &open, luck),
            Job::Connect { allocation, id, late } => {
                let result = match luck % 8 {
                    _ if late => Err(ConnectError::TimedOut),
                    5 => Err(ConnectError::Failed),
                    6 => Err(ConnectError::NoCapacity),
                    _ => Ok(()),
                };
                self.connected(at, allocation, id, result);
            }
        }
        true
    }

    fn open(&mut self, at: usize, open: &OpenRequest, luck: u8) {
        let id = open.allocation;
        let (spoilt, spoilt_too) = match luck % 8 {
            4 => (Some(OpenResult::NoCapacity), None),
            5 => (None, Some(OpenResult::NoCapacity)),
            6 => (Some(OpenResult::UnsupportedFamily), Some(OpenResult::NoCapacity)),
            _ => (None, None),
        };
        let first = spoilt.unwrap_or_else(|| self.socket(at, id, open.first.family, open.first.port));
        let second = open
            .second
            .map(|second| spoilt_too.unwrap_or_else(|| self.socket(at, id, second.family, second.port)));
        let families = [open.first.family, open.second.map_or(open.first.family, |second| second.family)];
        let expected = self.model.opened(at, id, families, first, second);
        let now = self.now(at);
        let done: Done = self.workers[at].server.opened(now, id, first, second).into();
        let learned = self.judge(at, expected, &done, &Datagram::Noise);
        if let (Some((learned, answer)), Done::Reply { to, .. }) = (learned, &done) {
            self.learn(cast::number_of(&to.client), &learned, &answer);
        }
    }

    fn socket(
        &mut self,
        at: usize,
        allocation: AllocationSlot,
        family: Family,
        port: PortRequest,
    ) -> OpenResult {
        let ip = match family {
            Family::V4 => "203.0.113.1".parse().expect("an address"),
            Family::V6 => "2001:db8::1".parse().expect("an address"),
        };
        let relayed = match port {
            PortRequest::Reserved(token) => match self.reserved.remove(&token) {
                Some(address) => address,
                None => return OpenResult::NoCapacity,
            },
            _ => {
                self.ports += 2;
                SocketAddr::new(ip, self.ports)
            }
        };
        if let PortRequest::EvenAndReserveNext(token) = port {
            self.reserved.insert(token, SocketAddr::new(ip, self.ports + 1));
        }
        let relay = RelayId { allocation, family };
        assert!(self.sockets.insert(relayed, (at, relay)).is_none(), "a port was reused");
        OpenResult::Opened { relayed }
    }

    fn connected(
        &mut self,
        at: usize,
        allocation: AllocationSlot,
        id: u32,
        result: Result<(), ConnectError>,
    ) {
        if result.is_err() {
            self.connections.remove(&(at, id));
        }
        let expected = self.model.connected(at, allocation, id, result);
        let now = self.now(at);
        let done: Done = self.workers[at].server.connected(now, allocation, ConnectionId(id), result).into();
        let learned = self.judge(at, expected, &done, &Datagram::Noise);
        if let (Some((learned, answer)), Done::Reply { to, .. }) = (learned, &done) {
            self.learn(cast::number_of(&to.client), &learned, &answer);
        }
    }

    pub(super) fn connection_ends(&mut self, which: usize, bytes: u16) {
        let is_made = |(at, id): &&(usize, u32)| {
            !self.workers[*at]
                .jobs
                .iter()
                .any(|job| matches!(job, Job::Connect { id: other, .. } if other == id))
        };
        let made: Vec<_> = self.connections.keys().filter(is_made).copied().collect();
        let Some((at, id)) = pick(which, made.len()).map(|which| made[which]) else { return };
        let (to_peer, to_client) = (u64::from(bytes), u64::from(bytes) * 3);
        let now = self.now(at);
        self.model.connection_ended(at, id, to_peer, to_client);
        self.workers[at].server.connection_ended(now, ConnectionId(id), to_peer, to_client);
        self.drop_connection(at, id);
        self.take_effects(at, None, &Datagram::Noise);
    }

    pub(super) fn disconnect(&mut self, from: usize) {
        let at_home = |end: &usize| {
            let client = cast::client(*end);
            client.listener.0 != 0 && self.model.home(self.ends[*end].worker, &client).is_some()
        };
        let at_home: Vec<usize> = (0..cast::CLIENTS).filter(at_home).collect();
        let known = pick(from, at_home.len()).filter(|_| from >= cast::CLIENTS);
        let from = known.map_or(from % cast::CLIENTS, |which| at_home[which]);
        let client = cast::client(from);
        let end = &self.ends[from];
        // Plain UDP has no end of connection; a stream in transit is closed on arrival.
        if client.listener.0 == 0 || !end.open || end.travels {
            return;
        }
        if let Some((at, id)) = end.bound {
            let made = self.connections.keys().position(|key| *key == (at, id));
            return self.connection_ends(made.expect("a connection of the runtime"), 7);
        }
        let at = end.worker;
        self.ends[from].open = false;
        self.ends[from].life += 1;
        self.disconnected(at, &client);
    }

    fn disconnected(&mut self, at: usize, client: &Client) {
        let expected = self.model.disconnected(at, client);
        let now = self.now(at);
        assert_eq!(
            self.workers[at].server.disconnected(now, client),
            expected,
            "server and model disagree on the allocation"
        );
        self.take_effects(at, None, &Datagram::Noise);
    }

    /// Sends mail; returns true if it will arrive. A full mailbox accepts only mail that must not be lost.
    fn post(&mut self, to: usize, mail: Mail) -> bool {
        let may_be_lost = matches!(
            mail,
            Mail::Stream { .. }
                | Mail::Request { .. }
                | Mail::Declined { .. }
                | Mail::Deleted { .. }
                | Mail::Reply { .. }
                | Mail::Wanted { .. }
        );
        if may_be_lost && self.workers[to].full {
            if let Mail::Stream { from, .. } = mail {
                let end = &mut self.ends[from];
                (end.open, end.travels, end.life) = (false, false, end.life + 1);
            }
            return false;
        }
        self.workers[to].mail.push_back(mail);
        true
    }

    pub(super) fn mail(&mut self, at: usize) -> bool {
        let Some(mail) = self.workers[at].mail.pop_front() else { return false };
        let now = self.now(at);
        match mail {
            Mail::Stream { from, request, bytes } => {
                let end = &mut self.ends[from];
                (end.worker, end.travels, end.life) = (at, false, end.life + 1);
                let source = self.source(from);
                let expected = self.model.request(at, source, Delivery::HandedOver, &request);
                let done = self.workers[at].server.from_handed_over(now, &source, &bytes).into();
                let learned = self.judge(at, expected, &done, &Datagram::Request(request));
                if let Some((learned, answer)) = learned {
                    self.learn(from, &learned, &answer);
                }
            }
            Mail::Request { via, occupied, source, request, bytes } => {
                let delivery = Delivery::Forwarded { via, occupied };
                let expected = self.model.request(at, source, delivery, &request);
                self.workers[at].server.from_elsewhere(now, via, occupied, &source, &bytes);
                self.take_effects(at, Some(expected), &Datagram::Request(request));
            }
            Mail::Declined { owner, source, request, bytes } => {
                if self.is_here(&source) {
                    self.model.declined(at, owner, &source.client);
                    let datagram = Datagram::Request(request);
                    let expected = self.model.from_client(at, source, &datagram);
                    let owner = u16::try_from(owner).expect("few enough workers");
                    let done = self.workers[at].server.declined(now, owner, &source, &bytes).into();
                    if let Some((learned, answer)) = self.judge(at, expected, &done, &datagram) {
                        self.learn(cast::number_of(&source.client), &learned, &answer);
                    }
                }
            }
            Mail::MoveOver { from, pending_move: (pending_move, over) } => {
                let by = u16::try_from(from).expect("few enough workers");
                self.model.move_over(at, from, over);
                self.workers[at].server.move_over(by, &pending_move);
                self.take_effects(at, None, &Datagram::Noise);
            }
            Mail::Deleted { deletion, of: (client, transaction, user) } => {
                self.model.deleted(at, client, transaction, user);
                self.workers[at].server.remember_deletions(now, &[deletion]);
            }
            Mail::Reply { source, pending_move, learned, answer } => {
                if let Some((pending_move, expected)) = pending_move {
                    self.model.expect(at, expected);
                    self.workers[at].server.expect(pending_move);
                    self.take_effects(at, None, &Datagram::Noise);
                }
                if self.is_here(&source) {
                    self.learn(cast::number_of(&source.client), &learned, &answer);
                }
            }
            Mail::Wanted { request, number, datagram, bytes } => {
                self.export(at, &request, number, Some((datagram, bytes)));
            }
            Mail::Allocation { from, number, moved, sockets, data } => {
                self.import(at, from, number, moved, sockets, data);
            }
            Mail::NotMoved(client) => {
                self.model.not_moved(at, &client);
                self.workers[at].server.not_moved(&client);
                self.take_effects(at, None, &Datagram::Noise);
            }
            Mail::Returned { number, moved, sockets } => self.take_back(at, number, moved, sockets),
        }
        true
    }

    /// Exports an allocation to the requesting worker as serialized data, or reports that it stays.
    fn export(
        &mut self,
        at: usize,
        request: &MoveRequest,
        number: usize,
        data: Option<(Datagram, Box<[u8]>)>,
    ) {
        let (to, id) = (usize::from(request.to), self.model.allocations[number].id());
        let goes = self.model.export(at, number, request.client, to);
        let now = self.now(at);
        let moved = self.workers[at].server.export(now, request);
        assert_eq!(moved.is_some(), goes, "server and model disagree on the export");
        self.take_effects(at, None, &Datagram::Noise);
        let Some(moved) = moved else {
            self.post(to, Mail::NotMoved(request.client));
            return;
        };
        assert_eq!((moved.from(), moved.client()), (id, request.client));
        let taken: Vec<SocketAddr> = self
            .sockets
            .iter()
            .filter(|(_, (worker, relay))| (*worker, relay.allocation) == (at, id))
            .map(|(address, _)| *address)
            .collect();
        let sockets = taken.into_iter().filter_map(|address| {
            let closed = self.sockets.remove(&address)?;
            self.closed.push(closed);
            Some((address, closed.1.family))
        });
        let sockets = sockets.collect();
        self.post(to, Mail::Allocation { from: at, number, moved: written(&moved), sockets, data });
    }

    fn import(
        &mut self,
        at: usize,
        from: usize,
        number: usize,
        moved: Moved,
        sockets: Sockets,
        data: Option<(Datagram, Box<[u8]>)>,
    ) {
        let (to, now) = (moved.to(), self.now(at));
        let fits = self.model.import(at, number, to, None);
        match self.workers[at].server.import(now, moved) {
            Ok(id) => {
                assert!(fits, "the client's 5-tuple has an allocation");
                self.model.import(at, number, to, Some(id));
                self.attach(at, number, id, sockets);
                if !self.is_here(&to) {
                    self.disconnected(at, &to.client);
                }
                if let Some((datagram, bytes)) = data {
                    let learned = self.feed(at, to, &datagram, &bytes);
                    if let Some((learned, answer)) = learned {
                        self.learn(cast::number_of(&to.client), &learned, &answer);
                    }
                }
            }
            Err(moved) => {
                assert!(!fits, "the server refused the import");
                self.take_effects(at, None, &Datagram::Noise);
                self.post(from, Mail::Returned { number, moved, sockets });
            }
        }
    }

    fn take_back(&mut self, at: usize, number: usize, moved: Moved, sockets: Sockets) {
        let (was, now) = (moved.was(), self.now(at));
        let taken = self.workers[at].server.take_back(now, written(&moved));
        // The first effect contains the allocation's new ID, even if the allocation ends immediately.
        let returned: Vec<Effect> = std::iter::from_fn(|| self.workers[at].server.poll_effect()).collect();
        let Some(Effect::Returned { allocation: id }) = returned.first().cloned() else {
            panic!("Effect::Returned missing: {returned:?}")
        };
        self.model.take_back(at, number, id);
        for effect in &returned {
            self.state_effect(at, effect);
        }
        assert_eq!(
            taken.is_some(),
            self.model.owns(at, number),
            "server and model disagree on the allocation"
        );
        if taken.is_none() {
            return;
        }
        self.attach(at, number, id, sockets);
        if let Some(source) = was
            && !self.is_here(&source)
        {
            self.disconnected(at, &source.client);
        }
    }

    fn attach(&mut self, at: usize, number: usize, allocation: AllocationSlot, sockets: Sockets) {
        for (address, family) in sockets {
            self.sockets.insert(address, (at, RelayId { allocation, family }));
        }
        self.take_effects(at, None, &Datagram::Noise);
        let has_realm = self.model.workers[at].rules.realms().contains(&self.model.allocations[number].realm);
        assert_eq!(self.workers[at].server.has_realm_of(allocation), has_realm);
        if !has_realm {
            self.close(at, number);
        }
    }

    pub(super) fn set_prompt(&mut self, prompt: bool) {
        self.model.prompt = prompt;
        for worker in &mut self.workers {
            worker.server.policy_mut().later = !prompt;
        }
    }

    /// The store responds to a worker's oldest query, or fails.
    pub(super) fn store_answers(&mut self, at: usize, says: Says) -> bool {
        let Some(lookup) = self.workers[at].questions.pop_front() else { return false };
        let waiting = &mut self.model.workers[at].waiting;
        let place = waiting.iter().position(|it| it.lookup == Some(lookup));
        let waited = place.map(|place| waiting.remove(place));
        let Some(request) = waited.as_ref().map(|waited| waited.request.clone()) else {
            let now = self.now(at);
            let expected = self.model.looked_up(at, None, Verdict::Unavailable);
            let done = self.workers[at].server.finish_lookup(now, lookup, LookupResult::Unavailable).into();
            self.judge(at, expected, &done, &Datagram::Noise);
            return true;
        };
        let claim = request.claim.as_ref().expect("a signed request");
        let (credentials, found) = match (says, truth(&request)) {
            (Says::Nothing, _) => (LookupResult::Unavailable, Verdict::Unavailable),
            (Says::Truth, verdict @ (Verdict::NoSuchUser | Verdict::Later)) => {
                (LookupResult::NoSuchUser, verdict)
            }
            (Says::Truth, Verdict::Expired) => {
                let (username, identity) = (claim.user.into(), claim.user.into());
                let keys = vec![(Key::from_bytes(b"another"), Some(self.model.unix - 42))];
                (LookupResult::Keys { username, identity, keys }, Verdict::Expired)
            }
            (Says::Truth, verdict) => {
                let algorithm = match claim.scheme {
                    Scheme::Md5 | Scheme::Md5Sha256 => KeyAlgorithm::Md5,
                    Scheme::Sha256 | Scheme::Userhash => KeyAlgorithm::Sha256,
                };
                let of = |password: String| {
                    Key::long_term(algorithm, claim.user, claim.realm, password.as_bytes())
                };
                let until = cast::until(claim.user);
                let keys = ["an older one".to_owned(), password(claim.user)].map(|it| (of(it), until)).into();
                let (username, identity) = (claim.user.into(), claim.user.into());
                (LookupResult::Keys { username, identity, keys }, verdict)
            }
        };
        let source = waited.as_ref().map(|waited| waited.source);
        let expected = self.model.looked_up(at, waited, found);
        let now = self.now(at);
        let done: Done = self.workers[at].server.finish_lookup(now, lookup, credentials).into();
        let learned = self.judge(at, expected, &done, &Datagram::Request(request));
        if let (Some((learned, answer)), Some(source)) = (learned, source) {
            self.learn(cast::number_of(&source.client), &learned, &answer);
        }
        true
    }

    /// Next time at which a worker wants to check the clock.
    fn next_look(&self) -> Option<u64> {
        let due = |at: usize| {
            let due = self.workers[at].server.poll_timeout()?;
            Some(due.saturating_sub(cast::skew(at)))
        };
        (0..self.setup.workers).filter_map(due).min()
    }

    /// Advances time: workers check the clock whenever they want to, or only once, late.
    pub(super) fn sleep(&mut self, ms: u64, exact: bool) {
        let end = self.model.ms + ms;
        while let Some(next) = self.next_look().filter(|next| exact && *next < end) {
            let next = next.max(self.model.ms);
            self.set_clock(next);
            let busy = (0..self.setup.workers).filter_map(|at| {
                self.workers[at].server.poll_timeout().filter(|due| *due <= self.now(at).ms)
            });
            assert_eq!(busy.count(), 0, "a timer is still due after the clock check");
        }
        self.set_clock(end);
    }

    /// Advances to a deadline, to check that expiry takes effect immediately, without waiting for a clock
    /// check.
    pub(super) fn brink(&mut self, which: usize, before: bool) {
        let now = self.model.ms;
        let deadlines: BTreeSet<u64> = (0..self.setup.workers)
            .flat_map(|at| self.model.deadlines(at))
            .filter(|until| *until > now)
            .collect();
        if let Some(which) = pick(which, deadlines.len()) {
            let until = deadlines.into_iter().nth(which).expect("a valid index");
            self.sleep(until - now - u64::from(before), true);
            self.probe();
        }
    }

    fn set_clock(&mut self, ms: u64) {
        self.model.ms = ms;
        self.model.unix = cast::START_UNIX + (ms - cast::START_MS) / 1000;
        for at in 0..self.setup.workers {
            let now = self.now(at);
            self.workers[at].server.handle_timeout(now);
            self.model.timeout(at);
            self.take_effects(at, None, &Datagram::Noise);
            assert_eq!(self.model.overdue(at), [], "deadlines missed by worker {at}");
            // The runtime cancels late attempts immediately.
            let is_late = |job: &Job| matches!(job, Job::Connect { late: true, .. });
            while let Some(place) = self.workers[at].jobs.iter().position(is_late) {
                let job = self.workers[at].jobs.remove(place).expect("the job is queued");
                self.workers[at].jobs.push_front(job);
                self.work(at, 0);
            }
        }
    }

    pub(super) fn reload(&mut self, worker: Option<usize>, variant: u8) {
        for at in 0..self.setup.workers {
            if worker.is_none_or(|worker| worker % self.setup.workers == at) {
                self.reconfigure(at, Rules::variant(variant));
            }
        }
    }

    pub(super) fn deny(&mut self, worker: Option<usize>, which: usize) {
        let has_some = |it: &Allocation| !it.permissions.is_empty() && it.place != Place::Gone;
        let all = self.model.allocations.iter().filter(|it| has_some(it));
        let mut all: Vec<&Allocation> = all.collect();
        all.sort_by_key(|it| !matches!(it.place, Place::Travels(_)));
        let Some(it) = pick(which, all.len().min(2)).map(|which| all[which]) else { return };
        let ip = *it.permissions.keys().next().expect("a permission");
        self.reached.denied += 1;
        self.reached.denied_on_the_way += u64::from(matches!(it.place, Place::Travels(_)));
        for at in 0..self.setup.workers {
            if worker.is_none_or(|worker| worker % self.setup.workers == at) {
                let rules = self.model.workers[at].rules.denying(ip);
                self.reconfigure(at, rules);
            }
        }
    }

    fn reconfigure(&mut self, at: usize, rules: Rules) {
        let (config, now) = (rules.config(), self.now(at));
        self.model.reconfigure(at, rules);
        self.workers[at].server.reconfigure(now, config);
        self.take_effects(at, None, &Datagram::Noise);
    }

    pub(super) fn drain(&mut self, at: usize) {
        self.model.workers[at].draining = true;
        self.workers[at].server.set_draining(true);
    }

    /// Ends an allocation as an administrator would, including one waiting for its sockets.
    pub(super) fn close_one(&mut self, which: usize) {
        let there: Vec<(usize, usize)> = (0..self.setup.workers)
            .flat_map(|at| self.model.in_slots(at).into_iter().map(move |number| (at, number)))
            .collect();
        if let Some(which) = pick(which, there.len()) {
            let (at, number) = there[which];
            self.close(at, number);
        }
    }

    pub(super) fn close(&mut self, at: usize, number: usize) {
        let (id, now) = (self.model.allocations[number].id(), self.now(at));
        self.model.close(at, number, ClosedReason::Administrator);
        assert!(self.workers[at].server.close_one(now, id, ClosedReason::Administrator));
        self.take_effects(at, None, &Datagram::Noise);
        assert!(!self.workers[at].server.close_one(now, id, ClosedReason::Administrator), "already closed");
    }

    /// Reports offloaded traffic for an allocation, possibly an ended one.
    pub(super) fn across(&mut self, which: usize, datagrams: u8) {
        let Some(which) = pick(which, self.model.allocations.len()) else { return };
        let (at, id) = match self.model.allocations[which].place {
            Place::At(at, id) => (at, id),
            Place::Travels(_) | Place::Gone => (0, AllocationSlot { index: 0, generation: u32::MAX }),
        };
        let is_there = self.model.owns(at, which);
        let (to_peer, to_client) = ((u64::from(datagrams), 100), (1, u64::from(datagrams)));
        let it = &mut self.model.allocations[which];
        if is_there {
            it.to_peer = (it.to_peer.0 + to_peer.0, it.to_peer.1 + to_peer.1);
            it.to_client = (it.to_client.0 + to_client.0, it.to_client.1 + to_client.1);
        }
        let stats = self.model.stats(at);
        stats.to_peer_datagrams += to_peer.0;
        stats.to_peer_bytes += to_peer.1;
        stats.to_client_datagrams += to_client.0;
        stats.to_client_bytes += to_client.1;
        assert_eq!(self.workers[at].server.count_across(id, to_peer, to_client), is_there);
    }

    /// Everything is serialized. If there is no room for all of it, nothing changes.
    pub(super) fn upgrade(&mut self, remembers: bool, variant: Option<u8>, tight: u8) {
        // Requests waiting for the store do not delay the upgrade.
        while (0..self.setup.workers).any(|at| self.work(at, 0) || self.mail(at)) {}
        let limits = self.limits_but(tight);
        let (policy, config) = (policy(&limits), Rules::default().config());
        let process = self.process.wrapping_add(1);
        let (mut heirs, mut taken) = (Vec::new(), Vec::new());
        for at in 0..self.setup.workers {
            let rules = variant.map_or_else(|| self.model.workers[at].rules.clone(), Rules::variant);
            let mut heir = server(at, self.setup.workers, &policy, &config, process);
            if at == 0 && remembers {
                assert!(config.replays.take_over(&self.replays.to_bytes()), "the same key");
            }
            let Some(names) = self.inherit(at, &mut heir, &rules, &limits, remembers, &mut taken) else {
                self.reached.refused += 1;
                return;
            };
            heirs.push((heir, rules, names));
        }
        let old = self.workers[0].server.policy_mut().clone();
        self.reached.upgraded += taken.len() as u64;
        self.process = process;
        self.replays = config.replays.clone();
        (self.setup, self.model.limits) = (limits.clone(), limits);
        for (at, (_, _, names)) in heirs.iter().enumerate() {
            for (_, relay) in self.sockets.values_mut().filter(|(worker, _)| *worker == at) {
                let name = names.iter().find(|(old, ..)| *old == relay.allocation);
                relay.allocation = name.expect("a socket of an allocation").1;
            }
            for (_, id, number) in names {
                self.model.allocations[*number].place = Place::At(at, *id);
                let link = self.source(cast::number_of(&self.model.allocations[*number].client)).link;
                self.model.passed_on(*number, remembers, link);
                let mobility = self.model.allocations[*number].mobility.as_ref();
                self.reached.arriving += u64::from(mobility.is_some_and(|it| it.arriving.is_some()));
            }
        }
        self.model.workers.iter().for_each(|desk| self.counted.merge(&desk.stats));
        self.model.restarted(remembers);
        for (at, (mut heir, rules, names)) in heirs.into_iter().enumerate() {
            let given: Vec<AllocationSlot> = names.iter().map(|(old, ..)| *old).collect();
            self.leave(at, &given);
            heir.policy_mut().later = !self.model.prompt;
            let worker = &mut self.workers[at];
            worker.questions.clear();
            worker.server = heir;
            // The new process's rules may map channels to other addresses.
            self.model.workers[at].rules = rules.clone();
            for (.., number) in &names {
                self.model.permit_by_channels(at, *number, false);
                self.model.tell_restored(at, *number);
            }
            self.take_effects(at, None, &Datagram::Noise);
            // Bindings that the new rules refuse end before the process serves clients.
            self.reconfigure(at, rules);
        }
        assert_eq!(old.held(), 0, "the old process must have nothing left");
        self.closed.clear();
    }

    fn limits_but(&self, tight: u8) -> Setup {
        let less = |held: usize, limit: usize| if held > 0 { held - 1 } else { limit };
        let mut limits = self.setup.clone();
        let users = cast::REALMS.into_iter().flat_map(|realm| cast::USERS.map(|user| (realm, user)));
        let prefixes = self.model.allocations.iter().map(|it| self.model.held_at(it.prefix));
        match tight {
            1 => {
                let most = users.map(|(realm, user)| self.model.held(realm, user)).max();
                limits.per_user = less(most.unwrap_or(0), limits.per_user);
            }
            // 0 means unlimited.
            2 => limits.per_prefix = less(prefixes.max().unwrap_or(0), limits.per_prefix),
            3 => limits.total = less(self.model.held_by_all(), limits.total),
            _ => {}
        }
        limits
    }

    /// Returns old and new IDs, or `None` if any allocation was refused. This worker keeps its copy.
    fn inherit(
        &mut self,
        at: usize,
        heir: &mut Server<TestPolicy>,
        rules: &Rules,
        limits: &Setup,
        remembers: bool,
        taken: &mut Vec<usize>,
    ) -> Option<Vec<(AllocationSlot, AllocationSlot, usize)>> {
        let now = self.now(at);
        heir.reconfigure(now, rules.config());
        if remembers {
            for pending_move in self.workers[at].server.expected() {
                heir.expect(pending_move);
            }
            heir.remember_deletions(now, &self.workers[at].server.deletions(now));
        }
        let numbers = self.model.in_slots(at);
        // The client is away, or reaches the new process without a connection from this one.
        let is_portable = |it: &Allocation| {
            it.transport == RelayTransport::Udp && it.pending.is_none() && (it.away || it.link == DATAGRAMS)
        };
        let portable = numbers.iter().map(|number| &self.model.allocations[*number]);
        let portable: Vec<AllocationSlot> =
            portable.filter(|it| is_portable(it)).map(Allocation::id).collect();
        assert_eq!(self.workers[at].server.portable(|link| link == DATAGRAMS), portable);
        let mut names = Vec::new();
        for number in numbers {
            let it = &self.model.allocations[number];
            let (old, owner) = (it.id(), (it.realm, it.user));
            let mut moved = self.workers[at].server.snapshot(now, old).expect("an open allocation");
            moved.keep_arrival(|link| remembers && link == DATAGRAMS);
            let link = self.source(cast::number_of(&it.client)).link;
            let fits = self.model.fits(number, taken, rules, limits);
            match heir.restore(now, written(&moved), link) {
                Ok(id) => {
                    assert!(fits, "accepted without room for it");
                    taken.push(number);
                    names.push((old, id, number));
                }
                Err(refused) => {
                    assert!(!fits, "refused despite room for it");
                    assert_eq!((refused.owner(), refused.from()), (UserRef::new(owner.0, owner.1), old));
                    return None;
                }
            }
        }
        Some(names)
    }

    /// A worker drops everything that another process took over, after which it must be empty.
    fn leave(&mut self, at: usize, given: &[AllocationSlot]) {
        let now = self.now(at);
        let Worker { server, .. } = &mut self.workers[at];
        given.iter().for_each(|allocation| server.surrender(now, *allocation));
        server.forget_lookups(|_| true);
        let told: Vec<Effect> = std::iter::from_fn(|| server.poll_effect()).collect();
        let expected = given.iter().map(|allocation| Effect::Exported { allocation: *allocation });
        assert!(told.iter().eq(&expected.collect::<Vec<_>>()), "{told:?}");
        assert_eq!((server.allocations(), server.connections(), server.poll_timeout()), (0, 0, None));
    }
}

fn written(moved: &Moved) -> Moved {
    let text = serde_json::to_string(moved).expect("a serializable allocation");
    serde_json::from_str(&text).expect("a serialized allocation")
}

/// Pairs the pending moves of server and model; both or neither must exist.
fn both(
    pending_move: Option<PendingMove>,
    announced: Option<reference::PendingMove>,
) -> Option<(PendingMove, reference::PendingMove)> {
    assert_eq!(pending_move.is_some(), announced.is_some(), "server and model disagree on a pending move");
    pending_move.zip(announced)
}
