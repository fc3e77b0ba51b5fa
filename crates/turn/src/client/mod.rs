//! TURN client as a state machine. Feed it datagrams with [`Client::handle_datagram`] and the time with
//! [`Client::handle_timeout`], then send [`Client::poll_transmit`], read [`Client::poll_event`], and call
//! again at [`Client::poll_timeout`].
//!
//! The client authenticates (RFC 8489 section 9.2), retransmits (section 6.2.1), handles stale nonces, and
//! refreshes the allocation with its permissions and channels until it is deleted (RFC 8656). Times are
//! [`crate::time::Now::ms`]. All state is bounded. Application data is never copied, and handling it
//! allocates no memory.

mod config;
mod credentials;
mod data_connection;
mod event;
mod requests;
mod transaction;

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use turnpike_wire::{
    address::{canonical, canonical_ip},
    channel_data::{ChannelData, ChannelNumber},
    demux::{self, Kind},
    indication::{self, Indication, MAX_HEADER_LEN},
    stun::{self, Class, ErrorCode, View, kind, method},
};

use crate::random::{Random, Seed};
pub use config::{AccessToken, Config, Relayed, Timing};
pub use data_connection::{BindProgress, DataConnection};
pub use event::{Allocation, ConnectionId, Event, Failure, Ignored, Incoming, Request, RequestError};
use {
    credentials::{Challenge, Session},
    transaction::{Start, Transaction, Transactions},
};

/// A permission lasts 300 s (RFC 8656 section 9), and a ChannelBind also refreshes the permission for its
/// peer.
const BINDING_REFRESH_MS: u64 = 240_000;
/// Time before expiry at which to refresh; half the lifetime if that is shorter (RFC 8656 section 8.1).
const REFRESH_MARGIN_MS: u64 = 60_000;
/// Maximum number of challenges that the client responds to for one request, before the request counts as
/// refused.
const MAX_CHALLENGES: u8 = 3;
/// Maximum number of queued events. If the queue is full, the oldest event is dropped.
const MAX_EVENTS: usize = 128;

pub struct Client {
    config: Arc<Config>,
    state: ClientState,
    session: Option<Session>,
    transactions: Transactions,
    events: VecDeque<Event>,
    /// `None` while a refresh is in progress.
    refresh_at: Option<u64>,
    permissions: Vec<Permission>,
    channels: Vec<Channel>,
    ticket: Option<Vec<u8>>,
    /// Transaction ID of the last Send indication: starts at random, then counts up.
    indication: u128,
    random: Random,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ClientState {
    Idle,
    Allocating,
    Allocated(Allocation),
}

struct Permission {
    peer: IpAddr,
    granted: bool,
    refresh_at: Option<u64>,
}

struct Channel {
    number: ChannelNumber,
    peer: SocketAddr,
    bound: bool,
    refresh_at: Option<u64>,
}

impl Client {
    pub const MAX_PERMISSIONS: usize = 64;
    pub const MAX_CHANNELS: usize = 64;

    #[must_use]
    pub fn new(config: Arc<Config>, seed: Seed) -> Self {
        let mut random = Random::new(seed);
        Self {
            transactions: Transactions::new(config.timing),
            config,
            state: ClientState::Idle,
            session: None,
            events: VecDeque::new(),
            refresh_at: None,
            permissions: Vec::new(),
            channels: Vec::new(),
            ticket: None,
            indication: u128::from_be_bytes(random.bytes()),
            random,
        }
    }

    /// Asks for the client's mapped address (STUN Binding, unauthenticated).
    pub fn binding(&mut self, now: u64) -> Result<(), RequestError> {
        self.request(now, Request::Binding)
    }

    pub fn allocate(&mut self, now: u64) -> Result<(), RequestError> {
        if self.state != ClientState::Idle {
            return Err(RequestError::AllocationExists);
        }
        self.state = ClientState::Allocating;
        self.request(now, Request::Allocate)
    }

    pub fn permit(&mut self, now: u64, peer: IpAddr) -> Result<(), RequestError> {
        self.allocated()?;
        let peer = canonical_ip(peer);
        if !self.permissions.iter().any(|permission| permission.peer == peer) {
            if self.permissions.len() == Self::MAX_PERMISSIONS {
                return Err(RequestError::TooMany { what: "permissions", limit: Self::MAX_PERMISSIONS });
            }
            self.permissions.push(Permission { peer, granted: false, refresh_at: None });
        }
        self.request(now, Request::Permit(peer))
    }

    /// Binds a channel to this peer and keeps it refreshed. If the peer already has a channel, its number
    /// stays the same.
    pub fn bind_channel(&mut self, now: u64, peer: SocketAddr) -> Result<ChannelNumber, RequestError> {
        self.allocated()?;
        let peer = canonical(peer);
        let number = match self.channels.iter().find(|channel| channel.peer == peer) {
            Some(channel) => channel.number,
            None => {
                let number = self
                    .free_channel()
                    .ok_or(RequestError::TooMany { what: "channels", limit: Self::MAX_CHANNELS })?;
                self.channels.push(Channel { number, peer, bound: false, refresh_at: None });
                number
            }
        };
        self.request(now, Request::Bind(number, peer))?;
        Ok(number)
    }

    /// Needs a permission (RFC 6062 section 4.3). [`Event::Connected`] supplies the connection's ID.
    pub fn connect(&mut self, now: u64, peer: SocketAddr) -> Result<(), RequestError> {
        self.allocated()?;
        self.request(now, Request::Connect(canonical(peer)))
    }

    #[must_use]
    pub fn data_connection(&mut self, connection: ConnectionId) -> DataConnection {
        DataConnection::new(Arc::clone(&self.config), self.session.clone(), connection, self.random.fork())
    }

    #[must_use]
    pub fn can_migrate(&self) -> bool {
        self.allocation().is_some() && self.ticket.is_some()
    }

    /// Moves the allocation to the new address from which the caller already sends (RFC 8016 section 3.2). It
    /// may be called again after a timeout.
    pub fn migrate(&mut self, now: u64) -> Result<(), RequestError> {
        self.allocated()?;
        if self.ticket.is_none() {
            return Err(RequestError::NoTicket);
        }
        self.transactions.clear();
        self.refresh_at = None;
        self.request(now, Request::Migrate)
    }

    pub fn delete(&mut self, now: u64) -> Result<(), RequestError> {
        self.allocated()?;
        self.transactions.clear();
        self.refresh_at = None;
        self.permissions.iter_mut().for_each(|permission| permission.refresh_at = None);
        self.channels.iter_mut().for_each(|channel| channel.refresh_at = None);
        self.request(now, Request::Delete)
    }

    #[must_use]
    pub fn allocation(&self) -> Option<&Allocation> {
        match &self.state {
            ClientState::Allocated(allocation) => Some(allocation),
            ClientState::Idle | ClientState::Allocating => None,
        }
    }

    #[must_use]
    pub fn channel(&self, peer: SocketAddr) -> Option<ChannelNumber> {
        let channel = self.channels.iter().find(|channel| channel.peer == peer && channel.bound);
        channel.map(|channel| channel.number)
    }

    /// Returns the header's length. A Send indication (no channel bound) also needs
    /// [`turnpike_wire::frame::padding`] zero bytes after the payload.
    pub fn send_header(
        &mut self,
        peer: SocketAddr,
        payload_len: u16,
        out: &mut [u8; MAX_HEADER_LEN],
    ) -> usize {
        if let Some(number) = self.channel(peer) {
            let header = ChannelData::header(number, payload_len);
            out[..header.len()].copy_from_slice(&header);
            return header.len();
        }
        self.indication = self.indication.wrapping_add(1);
        let [_, _, _, _, id @ ..] = self.indication.to_be_bytes();
        indication::write_header(Indication::Send, id, &peer, payload_len, out)
    }

    pub fn handle_datagram<'a>(&mut self, now: u64, datagram: &'a [u8]) -> Incoming<'a> {
        match demux::classify(datagram) {
            Kind::ChannelData => self.handle_channel_data(datagram),
            Kind::Stun if indication::is(Indication::Data, datagram) => self.handle_data(datagram),
            Kind::Stun => match self.handle_response(now, datagram) {
                Ok(()) => Incoming::Control,
                Err(ignored) => Incoming::Ignored(ignored),
            },
            Kind::Other => Incoming::Ignored(Ignored::Malformed),
        }
    }

    pub fn poll_transmit(&mut self) -> Option<&[u8]> {
        self.transactions.poll_transmit()
    }

    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Time of the next [`Client::handle_timeout`] call.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let permissions = self.permissions.iter().filter_map(|permission| permission.refresh_at);
        let channels = self.channels.iter().filter_map(|channel| channel.refresh_at);
        permissions.chain(channels).chain(self.refresh_at).chain(self.transactions.next_due()).min()
    }

    pub fn handle_timeout(&mut self, now: u64) {
        while let Some(Transaction { request, transmissions, unverified, .. }) = self.transactions.expire(now)
        {
            if self.can_migrate() {
                self.ask_again(now, &request);
            }
            self.fail(request, Failure::Timeout { transmissions, unverified });
        }
        // Until the server knows the new address, no other request from it can succeed.
        if self.transactions.any(|request| *request == Request::Migrate) {
            return;
        }
        if self.refresh_at.is_some_and(|at| at <= now) && self.request(now, Request::Refresh).is_ok() {
            self.refresh_at = None;
        }
        for index in 0..self.permissions.len() {
            let Permission { peer, refresh_at, .. } = self.permissions[index];
            if refresh_at.is_some_and(|at| at <= now) && self.request(now, Request::Permit(peer)).is_ok() {
                self.permissions[index].refresh_at = None;
            }
        }
        for index in 0..self.channels.len() {
            let Channel { number, peer, refresh_at, .. } = self.channels[index];
            if refresh_at.is_some_and(|at| at <= now)
                && self.request(now, Request::Bind(number, peer)).is_ok()
            {
                self.channels[index].refresh_at = None;
            }
        }
    }

    fn handle_channel_data<'a>(&self, datagram: &'a [u8]) -> Incoming<'a> {
        let Ok(message) = ChannelData::parse(datagram) else {
            return Incoming::Ignored(Ignored::Malformed);
        };
        let number = message.number();
        // A server may send on a channel before its ChannelBind response arrives.
        match self.channels.iter().find(|channel| channel.number == number) {
            Some(channel) => {
                Incoming::Data { peer: channel.peer, channel: Some(number), payload: message.payload() }
            }
            None => Incoming::Ignored(Ignored::UnknownChannel),
        }
    }

    fn handle_data<'a>(&mut self, datagram: &'a [u8]) -> Incoming<'a> {
        let Ok(view) = indication::parse(Indication::Data, datagram) else {
            return self.handle_icmp(datagram);
        };
        if !self.permits(view.peer.ip()) {
            return Incoming::Ignored(Ignored::NoPermission);
        }
        Incoming::Data { peer: view.peer, channel: None, payload: view.data }
    }

    fn handle_icmp<'a>(&mut self, datagram: &'a [u8]) -> Incoming<'a> {
        let Ok(message) = View::new_checked(datagram) else {
            return Incoming::Ignored(Ignored::Malformed);
        };
        let (Some(peer), Some(&[_, _, icmp_type, code, _, _, _, _])) =
            (message.xor_address(kind::XOR_PEER_ADDRESS), message.get(kind::ICMP))
        else {
            return Incoming::Ignored(Ignored::Malformed);
        };
        self.event(Event::Icmp { peer: canonical(peer), icmp_type, code });
        Incoming::Control
    }

    fn handle_response(&mut self, now: u64, datagram: &[u8]) -> Result<(), Ignored> {
        let message = View::new_checked(datagram).map_err(|_| Ignored::Malformed)?;
        let header = message.header();
        if matches!(header.class, Class::Request | Class::Indication) {
            return self.handle_attempt(&message);
        }
        let found = self.transactions.find(&header.transaction);
        let (index, transaction) = found.ok_or(Ignored::UnknownTransaction)?;
        if header.method != requests::method_of(&transaction.request) {
            return Err(Ignored::UnknownTransaction);
        }
        let error = match header.class {
            Class::Error => Some(message.error().ok_or(Ignored::Malformed)?),
            _ => None,
        };
        // Challenges are unsigned, because the server does not know the key yet (RFC 8489 section 9.2.5).
        if let Some(error) = error.filter(ErrorCode::is_challenge) {
            let known_realm = self.session.as_ref().map(|session| session.challenge.realm.as_str());
            let challenge = Challenge::read(&message, known_realm, self.config.password_algorithms)?;
            let stale = error.code == ErrorCode::STALE_NONCE;
            let transaction = self.transactions.remove(index);
            self.answer_challenge(now, &transaction, challenge, stale);
            return Ok(());
        }
        if let (true, Some(session)) = (transaction.signed, &self.session)
            && message.verify(&session.key, session.mac).is_err()
        {
            transaction.unverified = error.map(|error| (error.code, error.text()));
            return Err(Ignored::Unverified);
        }
        let request = self.transactions.remove(index).request;
        match error {
            Some(error) => self.fail(request, refusal(&message, &error)),
            None => self.succeed(now, request, &message),
        }
        Ok(())
    }

    /// Restarts the request, signed for this challenge, unless that cannot help (RFC 8489 section 9.2.5).
    fn answer_challenge(&mut self, now: u64, refused: &Transaction, challenge: Challenge, stale: bool) {
        let again = match &self.session {
            Some(session) if refused.signed => {
                // A server may bind its nonces to the 5-tuple, and this 5-tuple is new.
                let moved = refused.request == Request::Migrate && refused.challenges == 0;
                stale || moved || session.differs(&challenge)
            }
            _ => true,
        };
        if !again || refused.challenges >= MAX_CHALLENGES {
            let failure =
                Failure::Credentials { username: self.config.username.clone(), realm: challenge.realm };
            return self.fail(refused.request, failure);
        }
        match self.session.as_mut() {
            // Deriving a key is expensive; a new nonce alone does not change it.
            Some(session) if !session.differs(&challenge) => session.challenge = challenge,
            _ => match Session::answer(&self.config, challenge) {
                Ok(session) => self.session = Some(session),
                Err(failure) => return self.fail(refused.request, failure),
            },
        }
        self.start(now, refused.request, refused.challenges + 1);
    }

    fn succeed(&mut self, now: u64, request: Request, message: &View<'_>) {
        match request {
            Request::Binding => match message.xor_address(kind::XOR_MAPPED_ADDRESS) {
                Some(mapped) => self.event(Event::Mapped(canonical(mapped))),
                None => self.fail(request, Failure::Incomplete("XOR-MAPPED-ADDRESS")),
            },
            Request::Allocate => match read_allocation(message) {
                Ok(allocation) => {
                    self.state = ClientState::Allocated(allocation);
                    self.ticket = ticket(message);
                    self.schedule_refresh(now, allocation.lifetime);
                    self.event(Event::Allocated(allocation));
                }
                Err(missing) => self.fail(request, Failure::Incomplete(missing)),
            },
            Request::Refresh => match message.number(kind::LIFETIME) {
                Some(lifetime) => {
                    self.schedule_refresh(now, lifetime);
                    self.event(Event::Refreshed { lifetime });
                }
                None => self.fail(request, Failure::Incomplete("LIFETIME")),
            },
            Request::Migrate => match message.number(kind::LIFETIME) {
                Some(lifetime) => self.migrated(now, lifetime, ticket(message)),
                None => self.fail(request, Failure::Incomplete("LIFETIME")),
            },
            Request::Connect(peer) => match message.number(kind::CONNECTION_ID) {
                Some(id) => self.event(Event::Connected { peer, connection: ConnectionId(id) }),
                None => self.fail(request, Failure::Incomplete("CONNECTION-ID")),
            },
            Request::BindConnection(_) => {}
            Request::Delete => {
                self.forget_allocation();
                self.event(Event::Deleted);
            }
            Request::Permit(peer) => {
                if let Some(permission) =
                    self.permissions.iter_mut().find(|permission| permission.peer == peer)
                {
                    permission.granted = true;
                    permission.refresh_at = Some(now + BINDING_REFRESH_MS);
                    self.event(Event::Permitted(peer));
                }
            }
            Request::Bind(number, peer) => {
                if let Some(channel) = self.channels.iter_mut().find(|channel| channel.number == number) {
                    channel.bound = true;
                    channel.refresh_at = Some(now + BINDING_REFRESH_MS);
                    self.event(Event::Bound(number, peer));
                }
            }
        }
    }

    fn fail(&mut self, request: Request, failure: Failure) {
        let kept = matches!(failure, Failure::Timeout { .. }) && self.can_migrate();
        match request {
            Request::Binding | Request::Connect(_) | Request::BindConnection(_) => {}
            // The network may have changed again, so keep the allocation.
            Request::Migrate if matches!(failure, Failure::Timeout { .. }) => {}
            Request::Allocate | Request::Refresh | Request::Delete | Request::Migrate => {
                self.forget_allocation();
            }
            // `ask_again` has scheduled another request for a permission or channel that is kept.
            Request::Permit(peer) => self.permissions.retain(|it| it.peer != peer || (kept && it.granted)),
            Request::Bind(number, _) => self.channels.retain(|it| it.number != number || (kept && it.bound)),
        }
        self.event(Event::Failed { request, failure });
    }

    /// Schedules another refresh of a permission or channel whose refresh timed out. A mobile client may be
    /// about to leave a dead network, while the server still has the permission or channel.
    fn ask_again(&mut self, now: u64, unanswered: &Request) {
        match unanswered {
            Request::Permit(peer) => {
                let granted = self.permissions.iter_mut().filter(|it| it.granted && it.peer == *peer);
                granted.for_each(|permission| permission.refresh_at = Some(now));
            }
            Request::Bind(number, _) => {
                let bound = self.channels.iter_mut().filter(|it| it.bound && it.number == *number);
                bound.for_each(|channel| channel.refresh_at = Some(now));
            }
            _ => {}
        }
    }

    fn handle_attempt(&mut self, message: &View<'_>) -> Result<(), Ignored> {
        let header = message.header();
        if (header.class, header.method) != (Class::Indication, method::CONNECTION_ATTEMPT) {
            return Err(Ignored::Unexpected);
        }
        let id = message.number(kind::CONNECTION_ID).ok_or(Ignored::Malformed)?;
        let peer = canonical(message.xor_address(kind::XOR_PEER_ADDRESS).ok_or(Ignored::Malformed)?);
        if !self.permits(peer.ip()) {
            return Err(Ignored::NoPermission);
        }
        self.event(Event::ConnectionAttempt { peer, connection: ConnectionId(id) });
        Ok(())
    }

    fn migrated(&mut self, now: u64, lifetime: u32, ticket: Option<Vec<u8>>) {
        self.ticket = ticket;
        self.schedule_refresh(now, lifetime);
        // Repeat the refreshes that were pending when the address changed.
        let permissions = self.permissions.iter_mut().map(|permission| &mut permission.refresh_at);
        let channels = self.channels.iter_mut().map(|channel| &mut channel.refresh_at);
        permissions.chain(channels).for_each(|at| _ = at.get_or_insert(now));
        self.event(Event::Migrated { lifetime });
    }

    fn forget_allocation(&mut self) {
        self.state = ClientState::Idle;
        self.ticket = None;
        self.refresh_at = None;
        self.permissions.clear();
        self.channels.clear();
        self.transactions.clear();
    }

    fn schedule_refresh(&mut self, now: u64, lifetime: u32) {
        let lifetime = u64::from(lifetime) * 1_000;
        self.refresh_at = Some(now + lifetime.saturating_sub(REFRESH_MARGIN_MS).max(lifetime / 2));
    }

    fn request(&mut self, now: u64, request: Request) -> Result<(), RequestError> {
        if self.transactions.any(|under_way| *under_way == request) {
            return Ok(());
        }
        if self.transactions.is_full() {
            return Err(RequestError::TooMany { what: "pending requests", limit: Transactions::LIMIT });
        }
        self.start(now, request, 0);
        Ok(())
    }

    fn start(&mut self, now: u64, request: Request, challenges: u8) {
        let id = self.random.bytes();
        let session = self.session.as_ref().filter(|_| request != Request::Binding);
        match requests::write(&request, id, &self.config, session, self.ticket.as_deref().unwrap_or_default())
        {
            Ok(bytes) => {
                let signed = session.is_some();
                self.transactions.start(now, Start { id, request, bytes, signed, challenges });
            }
            Err(failure) => self.fail(request, failure),
        }
    }

    fn allocated(&self) -> Result<(), RequestError> {
        self.allocation().map(|_| ()).ok_or(RequestError::NoAllocation)
    }

    /// True if data from this peer is expected, because of a permission or a channel.
    fn permits(&self, peer: IpAddr) -> bool {
        self.permissions.iter().any(|permission| permission.granted && permission.peer == peer)
            || self.channels.iter().any(|channel| channel.bound && channel.peer.ip() == peer)
    }

    fn free_channel(&self) -> Option<ChannelNumber> {
        let first = ChannelNumber::MIN.get();
        let count = u16::try_from(Self::MAX_CHANNELS).ok()?;
        (first..first + count)
            .filter_map(ChannelNumber::new)
            .find(|number| !self.channels.iter().any(|channel| channel.number == *number))
    }

    fn event(&mut self, event: Event) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

fn read_allocation(message: &View<'_>) -> Result<Allocation, &'static str> {
    let transaction = message.header().transaction;
    let mut relayed = message
        .all(kind::XOR_RELAYED_ADDRESS)
        .map(|value| stun::xor_address(value, &transaction).map(canonical));
    Ok(Allocation {
        relayed: relayed.next().flatten().ok_or("XOR-RELAYED-ADDRESS")?,
        additional: relayed.next().flatten(),
        mapped: message.xor_address(kind::XOR_MAPPED_ADDRESS).map(canonical),
        lifetime: message.number(kind::LIFETIME).ok_or("LIFETIME")?,
        reservation: message.get(kind::RESERVATION_TOKEN).and_then(|token| token.try_into().ok()),
        additional_refused: message
            .get(kind::ADDRESS_ERROR_CODE)
            .and_then(ErrorCode::of)
            .map(|error| error.code),
    })
}

fn ticket(message: &View<'_>) -> Option<Vec<u8>> {
    message.get(kind::MOBILITY_TICKET).map(<[u8]>::to_vec)
}

fn refusal(message: &View<'_>, error: &ErrorCode<'_>) -> Failure {
    let server = message.get(kind::ALTERNATE_SERVER).and_then(stun::address);
    if let (ErrorCode::TRY_ALTERNATE, Some(server)) = (error.code, server) {
        let domain = message.text(kind::ALTERNATE_DOMAIN).map(str::to_owned);
        return Failure::TryAlternate { server: canonical(server), domain };
    }
    Failure::Refused { code: error.code, reason: error.text() }
}
