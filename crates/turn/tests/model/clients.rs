//! Behaviour of clients. Most act sensibly; otherwise scenarios would end at the first check.

use super::prelude::*;
use super::{
    cast,
    message::{Answer, Claim, Datagram, Learned, Request, Told, Wanted, Wish},
    network::{Network, pick},
    reference::{Allocation, Model, Place, Port, family_of},
    step::{Asked, Way},
};

#[derive(Default)]
pub(super) struct Memory {
    /// Nonces by 5-tuple and realm.
    nonces: HashMap<(usize, &'static str), String>,
    tickets: Vec<Vec<u8>>,
    tokens: Vec<[u8; 8]>,
    pub(super) ids: Vec<u32>,
    transactions: u64,
}

pub(super) type Aim = (usize, Option<usize>);

impl Network {
    pub(super) fn aim(&self, from: usize, asked: &Asked) -> Option<Aim> {
        let is_stream = |end: &usize| Model::is_stream(&cast::client(*end));
        let is_free = |end: &usize| {
            let there = &self.ends[*end];
            there.bound.is_none() && self.model.home(there.worker, &cast::client(*end)).is_none()
        };
        let free = (0..cast::CLIENTS).filter(is_free);
        let one_of = |ends: Vec<usize>| pick(from, ends.len()).map(|which| ends[which]);
        let at_home = |suits: &dyn Fn(&Allocation) -> bool| {
            let all = self.model.allocations.iter().enumerate();
            let there = all.filter(|(_, it)| {
                matches!(it.place, Place::At(..)) && !it.away && it.pending.is_none() && suits(it)
            });
            let there: Vec<_> =
                there.map(|(number, it)| (cast::number_of(&it.client), Some(number))).collect();
            pick(from, there.len()).map(|which| there[which])
        };
        match asked {
            Asked::Binding => None,
            Asked::Allocate { transport: 6, .. } => {
                one_of(free.filter(is_stream).collect()).map(|end| (end, None))
            }
            Asked::Allocate { .. } => one_of(free.collect()).map(|end| (end, None)),
            Asked::Refresh { ticket: 0, .. } | Asked::Permit(_) => at_home(&|_| true),
            Asked::Refresh { ticket, .. } => {
                let ticket = newest(&self.memory.tickets, ticket.checked_sub(2)?)?;
                let number = self.model.tickets.get(ticket)?.number;
                // Mostly picks an address other than the current one.
                one_of(free.collect()).map(|end| (end, Some(number)))
            }
            Asked::Bind { .. } => at_home(&|it| it.transport == RelayTransport::Udp),
            Asked::Connect(_) => at_home(&|it| it.transport == RelayTransport::Tcp),
            Asked::ConnectionBind(which) => {
                let id = *newest(&self.memory.ids, *which)?;
                let number = (0..self.setup.workers).find_map(|at| self.model.connection(at, id))?.0;
                one_of(free.filter(is_stream).collect()).map(|end| (end, Some(number)))
            }
        }
    }

    pub(super) fn ask(
        &mut self,
        whom: Option<Aim>,
        from: usize,
        (user_number, realm, nonce): (u8, u8, u8),
        asked: &Asked,
        way: Way,
    ) {
        let (from, number) = whom.unwrap_or((from, None));
        let Some(wanted) = self.wanted(asked, number) else { return };
        let (user, scheme) = match user_number % 32 {
            0 => ("old", Scheme::Md5),
            1 => ("nobody", Scheme::Sha256),
            2..=5 => ("bob", Scheme::Userhash),
            6..=9 => ("bob", Scheme::Md5Sha256),
            10..=18 => ("alice", Scheme::Sha256),
            19..=21 => ("timed", Scheme::Md5),
            22 => ("timed", Scheme::Md5Sha256),
            31 => ("bob", Scheme::Md5),
            _ => ("alice", Scheme::Md5),
        };
        let whom_else = user_number % 16 == 15;
        let realm = if realm == 0 { cast::TENANT } else { REALM };
        let (realm, user) = number.map_or((realm, user), |number| {
            let it = &self.model.allocations[number];
            // Sometimes uses another user's name.
            (it.realm, if whom_else { user } else { it.user })
        });
        let claim = |nonce, right| Claim { user, right, realm, nonce, scheme };
        let claim = match nonce {
            0 => None,
            1 => Some(claim("made up".to_owned(), true)),
            // Uses another client's nonce.
            2 => Some(claim(self.nonce((from + 2) % cast::CLIENTS, realm), true)),
            nonce => Some(claim(self.nonce(from, realm), nonce != 3)),
        };
        let strange = nonce == 4;
        let transaction = self.transaction();
        self.send(from, Datagram::Request(Request { wanted, transaction, claim, strange }), way);
    }

    /// Presents two tickets from one 5-tuple. The first client then closes its connection, so that its
    /// allocation moves immediately.
    pub(super) fn rivals(&mut self, from: usize, ends: bool) {
        let Some((from, at)) = self.free_end(from) else { return };
        let mut elsewhere = self.mobile_elsewhere(at);
        // Clients with connections come first.
        elsewhere.sort_by_key(|number| !Model::is_stream(&self.model.allocations[*number].client));
        let [first, second, ..] = elsewhere[..] else { return };
        self.show_ticket(from, first);
        self.show_ticket(from, second);
        self.settle(0);
        let it = &self.model.allocations[first];
        if Model::is_stream(&it.client) && !it.away {
            self.disconnect(cast::number_of(&it.client));
            self.settle(0);
        }
        if let Some(number) = self.model.home(at, &cast::client(from)).filter(|_| ends) {
            self.close(at, number);
        }
        self.data(None, from, None, 0, 5, Way::AT_ONCE);
        self.settle(0);
    }

    /// A client moves to another worker, and a reload denies the peer while its allocation is in transit.
    pub(super) fn overtaken(&mut self, from: usize, which: u8, everywhere: bool) {
        let Some((from, at)) = self.free_end(from) else { return };
        let elsewhere = self.mobile_elsewhere(at);
        let Some(number) = pick(usize::from(which), elsewhere.len()).map(|which| elsewhere[which]) else {
            return;
        };
        let it = &self.model.allocations[number];
        let Place::At(owner, _) = it.place else { return };
        if !it.away {
            let (home, peer) = (cast::number_of(&it.client), self.peer(u8::MAX, Some(number), false));
            self.request(home, number, Wanted::Permit(vec![peer]));
        }
        self.settle(0);
        self.show_ticket(from, number);
        self.settle(0);
        self.data(None, from, None, 0, 5, Way::AT_ONCE);
        let is_there = |network: &Self| network.model.allocations[number].is_at(owner);
        while is_there(self) && self.mail(owner) {}
        if matches!(self.model.allocations[number].place, Place::Travels(_)) {
            self.deny((!everywhere).then_some(at), 0);
        }
        self.settle(0);
    }

    fn free_end(&self, which: usize) -> Option<(usize, usize)> {
        let is_free = |end: &usize| {
            let (client, there) = (cast::client(*end), &self.ends[*end]);
            let is_its = there.bound.is_none() && self.model.home(there.worker, &client).is_none();
            is_its && !Model::is_stream(&client)
        };
        let free: Vec<usize> = (0..cast::CLIENTS).filter(is_free).collect();
        pick(which, free.len()).map(|which| (free[which], self.ends[free[which]].worker))
    }

    fn mobile_elsewhere(&self, at: usize) -> Vec<usize> {
        let all = self.model.allocations.iter().enumerate();
        let elsewhere = all.filter(|(_, it)| {
            let is_there = matches!(it.place, Place::At(owner, _) if owner != at) && it.pending.is_none();
            is_there && it.mobility.is_some() && it.transport == RelayTransport::Udp
        });
        elsewhere.map(|(number, _)| number).collect()
    }

    fn show_ticket(&mut self, from: usize, number: usize) {
        let known = self.model.ticket(number);
        let mut tickets = self.model.tickets.iter();
        let ticket = tickets.find(|(_, ticket)| Some(**ticket) == known).map(|(bytes, _)| bytes.clone());
        self.request(from, number, Wanted::Refresh { lifetime: None, family: None, ticket });
    }

    fn request(&mut self, from: usize, number: usize, wanted: Wanted) {
        let it = &self.model.allocations[number];
        let (realm, user) = (it.realm, it.user);
        let nonce = self.nonce(from, realm);
        let claim = Some(Claim { user, right: true, realm, nonce, scheme: Scheme::Sha256 });
        let transaction = self.transaction();
        let request = Request { wanted, transaction, claim, strange: false };
        self.send(from, Datagram::Request(request), Way::AT_ONCE);
    }

    fn wanted(&self, asked: &Asked, number: Option<usize>) -> Option<Wanted> {
        let ticket = |which: u8| match which {
            0 => Some(None),
            1 => Some(Some(vec![7; 32])),
            which => newest(&self.memory.tickets, which - 2).map(|ticket| Some(ticket.clone())),
        };
        let peer = |which: u8| self.peer(which, number, false);
        Some(match *asked {
            Asked::Binding => Wanted::Binding,
            Asked::Allocate { transport, lifetime, port, family, additional, mobile } => {
                Wanted::Allocate(Wish {
                    transport,
                    lifetime,
                    port: match port {
                        0 => Port::Even,
                        1 => Port::Pair,
                        2 => Port::Reserved(*newest(&self.memory.tokens, 0)?),
                        3 => Port::Reserved([9; 8]),
                        _ => Port::Any,
                    },
                    family,
                    additional,
                    ticket: match mobile {
                        0 => Some(vec![1]),
                        mobile => (mobile % 2 == 0).then(Vec::new),
                    },
                })
            }
            Asked::Refresh { lifetime, family, ticket: which } => {
                Wanted::Refresh { lifetime, family, ticket: ticket(which)? }
            }
            Asked::Permit(ref peers) => Wanted::Permit(peers.iter().map(|which| peer(*which)).collect()),
            Asked::Bind { number, peer: which } => {
                let number = if number == 7 { 0x5000 } else { 0x4000 + u16::from(number) };
                Wanted::Bind { number, peer: peer(which) }
            }
            Asked::Connect(which) => Wanted::Connect(peer(which)),
            Asked::ConnectionBind(which) => {
                let made_up = u32::from(which) * 0x0040_0001;
                Wanted::ConnectionBind(newest(&self.memory.ids, which).copied().unwrap_or(made_up))
            }
        })
    }

    /// `which` below [`cast::PEERS`] selects any peer, otherwise a peer to which the allocation may relay.
    fn peer(&self, which: u8, number: Option<usize>, permitted: bool) -> SocketAddr {
        let suits = |peer: &SocketAddr| {
            let Some(number) = number else { return false };
            let it = &self.model.allocations[number];
            let Place::At(at, _) = it.place else { return false };
            // The client may ask for a peer that is refused only to its realm.
            let may_be = it.has(family_of(peer.ip())) && !self.model.workers[at].rules.refuses(peer.ip());
            may_be && peer.port() != 0 && (!permitted || it.permits(peer.ip(), self.model.ms))
        };
        let any = usize::from(which) % cast::PEERS;
        let known: Vec<SocketAddr> = (0..cast::PEERS).map(cast::peer).filter(suits).collect();
        let knows = usize::from(which) >= cast::PEERS;
        pick(any, known.len()).filter(|_| knows).map_or(cast::peer(any), |which| known[which])
    }

    pub(super) fn data(
        &mut self,
        whom: Option<Aim>,
        from: usize,
        channel: Option<u8>,
        peer: u8,
        length: u16,
        way: Way,
    ) {
        let (from, number) = whom.unwrap_or((from, None));
        let data = self.payload(usize::from(length.min(1500)));
        let bound = number.map(|number| &self.model.allocations[number].channels);
        let datagram = match channel {
            Some(channel) => {
                let bound: Vec<u16> = bound.into_iter().flatten().map(|(number, _)| *number).collect();
                let known = pick(usize::from(channel), bound.len()).filter(|_| channel >= 4);
                let number = known.map_or(0x4000 + u16::from(channel), |which| bound[which]);
                Datagram::ChannelData { number, data }
            }
            None => {
                let peer = self.peer(peer, number, true);
                Datagram::Send { peer, data, dont_fragment: length % 2 == 1 }
            }
        };
        self.send(from, datagram, way);
    }

    /// Nonce for this 5-tuple and realm, requested if the client has none.
    fn nonce(&mut self, from: usize, realm: &'static str) -> String {
        if !self.memory.nonces.contains_key(&(from, realm)) {
            // The server responds to an invalid nonce with a valid one for that realm.
            let nonce = "made up".to_owned();
            let claim = Claim { user: "alice", right: true, realm, nonce, scheme: Scheme::Md5 };
            let wanted = Wanted::Refresh { lifetime: None, family: None, ticket: None };
            let transaction = self.transaction();
            let request = Request { wanted, transaction, claim: Some(claim), strange: false };
            self.send(from, Datagram::Request(request), Way::AT_ONCE);
        }
        self.memory.nonces.get(&(from, realm)).cloned().unwrap_or_else(|| "never given".to_owned())
    }

    fn transaction(&mut self) -> [u8; 12] {
        self.memory.transactions += 1;
        let mut transaction = [0; 12];
        transaction[4..].copy_from_slice(&self.memory.transactions.to_be_bytes());
        transaction
    }

    pub(super) fn learn(&mut self, from: usize, learned: &Learned, answered: &Answer) {
        let memory = &mut self.memory;
        if let (Some(nonce), Told::Challenge { realm, .. }) = (&learned.nonce, &answered.told) {
            memory.nonces.insert((from, realm), nonce.clone());
        }
        if let Some(ticket) = &learned.ticket
            && memory.tickets.last() != Some(ticket)
        {
            memory.tickets.push(ticket.clone());
        }
        match answered.told {
            Told::Allocated { reservation: Some(token), .. } => memory.tokens.push(token),
            Told::Connected(id) => memory.ids.push(id),
            _ => {}
        }
    }
}

fn newest<T>(all: &[T], but: u8) -> Option<&T> {
    all.iter().rev().nth(usize::from(but))
}
