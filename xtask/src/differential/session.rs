//! Runs one sequence against one server and records the observations of clients and peers in each step.
//!
//! After each step the clients send Binding requests: once two of them are answered, everything that the server sends immediately has
//! arrived. Application data takes a different path, and coturn handles a client's first signed request in a separate thread, so there is
//! also a timeout for data and for first signed responses.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use turnpike_client::ClientTransport;
use turnpike_probe::connection::ProbeConnection;
use turnpike_wire::{
    integrity::{Key, Mac},
    stun::{Class, Header, Transaction, View, Writer, kind, method},
};

use super::{
    message::{self, Challenge, Context, USERS, payload},
    seen::Seen,
    servers::Server,
    step::{Auth, Client, Dialect, Field, Peer, Request, Sequence, Step},
};

pub(super) const SIX: Ipv6Addr = Ipv6Addr::new(0x2001, 0xDB8, 0, 0, 0, 0, 0, 9);

static RUNS: AtomicUsize = AtomicUsize::new(0);

/// Timeouts for data and first responses, and for responses to Binding requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) data: Duration,
    pub(super) answer: Duration,
}

impl Patience {
    pub(super) const SHORT: Self =
        Self { data: Duration::from_millis(25), answer: Duration::from_millis(2_000) };
    pub(super) const LONG: Self =
        Self { data: Duration::from_millis(150), answer: Duration::from_millis(3_000) };
}

/// Runs a sequence; returns the observations of each step. `lane` separates concurrent sequences.
pub(super) fn run(
    sequence: &Sequence,
    server: &Server,
    lane: usize,
    patience: Patience,
) -> io::Result<Vec<Vec<Seen>>> {
    let mut session = Session::new(sequence, server, lane, patience)?;
    let seen = sequence.steps.iter().map(|step| session.step(step)).collect();
    session.clean_up();
    Ok(seen)
}

pub(super) struct Session<'a> {
    pub(super) server: &'a Server,
    dialect: Dialect,
    /// Number of the user. Each sequence has its own user, because of quotas and turnpike's limit on reserved ports.
    user: usize,
    patience: Patience,
    pub(super) clients: Vec<State>,
    pub(super) peers: Vec<(Peer, UdpSocket, SocketAddr)>,
    pub(super) token: Vec<u8>,
    pub(super) seen: Vec<Seen>,
}

pub(super) struct State {
    transport: ClientTransport,
    pub(super) connection: Option<ProbeConnection>,
    is_gone: bool,
    pub(super) challenge: Challenge,
    pub(super) relays: [Option<SocketAddr>; 2],
    pub(super) user: Auth,
    pub(super) last: Option<Sent>,
}

pub(super) struct Sent {
    bytes: Vec<u8>,
    pub(super) transaction: Transaction,
    pub(super) key: (Key, Mac),
    pub(super) auth: Auth,
    pub(super) is_even: bool,
    pub(super) is_again: bool,
}

impl<'a> Session<'a> {
    fn new(sequence: &Sequence, server: &'a Server, lane: usize, patience: Patience) -> io::Result<Self> {
        let [high, low] = u16::try_from(lane).unwrap_or_default().to_be_bytes();
        // The servers' addresses are in 127.0/16. Peers use addresses with the lane in the second and third byte, so that lanes do not
        // overlap.
        let near = Ipv4Addr::new(127, 64 + high, low, 1);
        let far = Ipv4Addr::new(127, 64 + high, low, 2);
        let mut addresses: Vec<(Peer, IpAddr)> =
            vec![(Peer::Near, near.into()), (Peer::Sibling, near.into()), (Peer::Far, far.into())];
        if server.has_ipv6 {
            addresses.push((Peer::Six, SIX.into()));
        }
        let peers = addresses.into_iter().map(|(peer, ip)| {
            let socket = UdpSocket::bind((ip, 0))?;
            socket.set_nonblocking(true)?;
            let address = socket.local_addr()?;
            Ok((peer, socket, address))
        });
        let dialect = if server.knows_sha256 { sequence.dialect } else { Dialect::Classic };
        Ok(Self {
            server,
            dialect,
            user: RUNS.fetch_add(1, Ordering::Relaxed) % USERS,
            patience,
            clients: sequence.transports.iter().map(|transport| State::new(*transport)).collect(),
            peers: peers.collect::<io::Result<_>>()?,
            token: vec![0; 8],
            seen: Vec::new(),
        })
    }

    fn step(&mut self, step: &Step) -> Vec<Seen> {
        match step {
            Step::Wait(time) => thread::sleep(*time),
            Step::Leave(client) => {
                self.release(*client);
                let transport = self.clients[client.0].transport;
                self.clients[client.0] = State::new(transport);
                return Vec::new();
            }
            _ => {
                if let Some(client) = step.client().filter(|client| self.is_open(*client)) {
                    self.act(client, step);
                }
            }
        }
        self.listen(step.may_take_time());
        self.seen.sort();
        std::mem::take(&mut self.seen)
    }

    fn act(&mut self, client: Client, step: &Step) {
        let bytes = match step {
            Step::Request(_, request) => self.request(client, request),
            Step::Again(_) => self.clients[client.0].last.as_mut().map(|sent| {
                sent.is_again = true;
                sent.bytes.clone()
            }),
            Step::Channel(_, number, length) => {
                Some(channel_data(*number, *length, self.clients[client.0].transport))
            }
            Step::Peer(peer, _, length) => return self.peer_sends(*peer, client, *length),
            Step::Leave(_) | Step::Wait(_) => None,
        };
        if let Some(bytes) = bytes {
            self.send(client, &bytes);
        }
    }

    /// Encodes a request; `None` if the step does not apply to this server.
    fn request(&mut self, client: Client, request: &Request) -> Option<Vec<u8>> {
        if request.auth.rule().is_some() && self.dialect == Dialect::Classic {
            return None;
        }
        if request.auth != Auth::None
            && (self.clients[client.0].challenge.nonce.is_empty() || request.auth == Auth::Fresh)
        {
            self.ask_for_nonce(client);
        }
        let transaction: Transaction = rand::random();
        let state = &self.clients[client.0];
        let context = Context {
            dialect: self.dialect,
            user: self.user,
            challenge: &state.challenge,
            is_datagram: !state.transport.is_stream(),
            token: &self.token,
            address: &|peer| self.address(peer),
        };
        let bytes = message::write(request, transaction, &context);
        let sent = Sent {
            bytes: bytes.clone(),
            transaction,
            key: message::key(self.dialect, request.auth, self.user),
            auth: request.auth,
            is_even: request.has(kind::EVEN_PORT),
            is_again: false,
        };
        self.clients[client.0].last = Some(sent);
        Some(bytes)
    }

    fn ask_for_nonce(&mut self, client: Client) {
        // This Refresh contains an attribute, because turnpike rate-limits responses to requests without attributes.
        let request = Request::new(method::REFRESH, vec![Field::number(kind::LIFETIME, 600)], Auth::None);
        let bytes = self.request(client, &request);
        bytes.iter().for_each(|bytes| self.send(client, bytes));
        let deadline = Instant::now() + self.patience.answer;
        let old = std::mem::take(&mut self.clients[client.0].challenge);
        let is_waiting = |state: &State| state.challenge.nonce.is_empty() && !state.is_gone;
        while is_waiting(&self.clients[client.0]) && Instant::now() < deadline {
            self.fence(client);
        }
        if is_waiting(&self.clients[client.0]) {
            self.clients[client.0].challenge = old;
        }
        self.seen.retain(|seen| !matches!(seen, Seen::Answer(from, _) if *from == client));
        if self.clients[client.0].challenge.nonce.is_empty() {
            self.seen.push(Seen::Failed(client, "no nonce".to_owned()));
        }
    }

    fn peer_sends(&mut self, peer: Peer, client: Client, length: u16) {
        let Some((_, socket, from)) = self.peers.iter().find(|(known, ..)| *known == peer) else { return };
        let [v4, v6] = self.clients[client.0].relays;
        if let Some(relay) = if from.is_ipv4() { v4 } else { v6 } {
            let _ = socket.send_to(&payload(length), relay);
        }
    }

    fn send(&mut self, client: Client, bytes: &[u8]) {
        let deadline = Instant::now() + self.patience.answer;
        let state = &mut self.clients[client.0];
        let Some(connection) = &mut state.connection else { return };
        if connection.send(bytes, deadline).is_err() {
            self.ends(client, Seen::Closed(client));
        }
    }

    fn is_open(&mut self, client: Client) -> bool {
        let state = &mut self.clients[client.0];
        if state.connection.is_none() && !state.is_gone {
            match self.server.connect(state.transport, Instant::now() + self.patience.answer) {
                Ok(connection) => state.connection = Some(connection),
                Err(why) => {
                    state.is_gone = true;
                    self.seen.push(Seen::Failed(client, why));
                }
            }
        }
        !self.clients[client.0].is_gone
    }

    fn listen(&mut self, may_take_time: bool) {
        let deadline = Instant::now() + self.patience.data;
        for round in 0.. {
            (0..self.clients.len()).for_each(|index| self.fence(Client(index)));
            self.hear_peers();
            if round > 0 && (!may_take_time || !self.seen.is_empty() || Instant::now() >= deadline) {
                break;
            }
            if round > 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Collects everything that the server sent to a client before answering a Binding request.
    fn fence(&mut self, client: Client) {
        let transaction: Transaction = rand::random();
        let mut buffer = Vec::new();
        let header = Header { class: Class::Request, method: method::BINDING, transaction };
        Writer::begin(&mut buffer, header).finish(false);
        for _ in 0..3 {
            self.send(client, &buffer);
            let deadline = Instant::now() + self.patience.answer / 3;
            loop {
                let Some(connection) = &mut self.clients[client.0].connection else { return };
                match connection.receive(deadline) {
                    Ok(bytes) if is_answer(&bytes, transaction) => return,
                    Ok(bytes) => self.take(client, &bytes),
                    Err(error) if error.kind() == io::ErrorKind::TimedOut => break,
                    Err(_) => return self.ends(client, Seen::Closed(client)),
                }
            }
        }
        self.ends(client, Seen::Deaf(client));
    }

    fn ends(&mut self, client: Client, seen: Seen) {
        let state = &mut self.clients[client.0];
        state.connection = None;
        state.is_gone = true;
        self.seen.push(seen);
    }

    fn address(&self, peer: Peer) -> SocketAddr {
        let of =
            |wanted: Peer| self.peers.iter().find(|(peer, ..)| *peer == wanted).map(|(.., address)| *address);
        let near = of(Peer::Near);
        let found = match peer {
            Peer::Denied => None,
            Peer::Relay(client) => self.clients.get(client.0).and_then(|state| state.relays[0]).or(near),
            Peer::Six => of(peer).or(Some((SIX, 9).into())),
            other => of(other),
        };
        found.unwrap_or(([10, 9, 9, 9], 9).into())
    }

    fn release(&mut self, client: Client) {
        let state = &self.clients[client.0];
        if state.relays != [None; 2] && state.connection.is_some() {
            let auth = if state.user == Auth::OtherUser { Auth::OtherUser } else { Auth::Good };
            self.ask_for_nonce(client);
            let request = Request::new(method::REFRESH, vec![Field::number(kind::LIFETIME, 0)], auth);
            let bytes = self.request(client, &request);
            bytes.iter().for_each(|bytes| self.send(client, bytes));
            self.fence(client);
            self.seen.clear();
        }
    }

    fn clean_up(&mut self) {
        (0..self.clients.len()).for_each(|index| self.release(Client(index)));
    }
}

impl State {
    fn new(transport: ClientTransport) -> Self {
        Self {
            transport,
            connection: None,
            is_gone: false,
            challenge: Challenge::default(),
            relays: [None; 2],
            user: Auth::Good,
            last: None,
        }
    }
}

fn is_answer(bytes: &[u8], transaction: Transaction) -> bool {
    View::new_checked(bytes).is_ok_and(|view| view.header().transaction == transaction)
}

/// ChannelData with any channel number, padded over streams.
fn channel_data(number: u16, length: u16, transport: ClientTransport) -> Vec<u8> {
    let mut bytes = [&number.to_be_bytes()[..], &length.to_be_bytes(), &payload(length)].concat();
    if transport.is_stream() {
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}
