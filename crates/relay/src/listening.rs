//! Open listeners and their sockets, at startup and after each reload. A change binds everything first, so
//! that nothing has changed if it fails.
//!
//! ```text
//!  open ──removed by a reload──▶ closing: no new allocations ──last one ended on every worker───▶ closed
//!    ▲──────────────restored by a reload──────────────┘ ◀────────restored with new sockets─────────┘
//! ```
//!
//! The kernel's distribution of clients depends on the number of sockets, so all workers close a UDP socket
//! together. A stream listener closes immediately because its connections have their own sockets.

use std::{
    io, mem,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use serde::{Deserialize, Serialize};
use turnpike_net::{BindError, Datapath, TcpListener, UdpOptions, UdpSocket};
use turnpike_turn::server::{NatDiscovery, Transport};

use crate::{Config, Layout, StartError, layout::Placed, stream::listen_options};

/// Number of attempts to find a port that is free for both UDP and TCP, if the kernel chooses the port.
const PORT_ATTEMPTS: usize = 16;

/// Bound addresses, with the actual ports instead of 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listeners {
    pub udp: Vec<SocketAddr>,
    /// Addresses for TCP; they also accept TLS if there is a certificate.
    pub tcp: Vec<SocketAddr>,
    /// Addresses for TLS; they also accept TCP unless it is disabled.
    pub tls: Vec<SocketAddr>,
    /// Addresses for DTLS; an address that is also in `udp` has one socket for both.
    pub dtls: Vec<SocketAddr>,
}

#[derive(Default)]
pub(crate) struct ListenerSockets {
    pub(crate) udp: Vec<(usize, SocketSource)>,
    pub(crate) dtls: Vec<(usize, SocketSource)>,
    pub(crate) streams: Vec<(usize, TcpListener)>,
    pub(crate) closing: Vec<Closing>,
}

impl ListenerSockets {
    /// Puts the addresses of `first` in front.
    pub(crate) fn extend(&mut self, first: Self) {
        let behind = mem::replace(self, first);
        self.udp.extend(behind.udp);
        self.dtls.extend(behind.dtls);
        self.streams.extend(behind.streams);
        self.closing.extend(behind.closing);
    }
}

pub(crate) enum SocketSource {
    Own(UdpSocket),
    /// Socket of the UDP or DTLS listener at this place. If that listener is closing, also contains its
    /// `Clients`, which are released once the socket is shared.
    Shared(usize, Option<Arc<ClosingClients>>),
}

#[derive(Clone)]
pub(crate) struct Closing {
    pub(crate) transport: Transport,
    pub(crate) place: usize,
    pub(crate) clients: Arc<ClosingClients>,
}

/// Number of workers that still have clients of a closing listener or are about to share its socket.
pub(crate) struct ClosingClients(AtomicUsize);

/// Added to the count to reopen a listener; larger than any number of workers.
const REOPENED: usize = usize::MAX / 2;

impl ClosingClients {
    pub(crate) fn of(workers: usize) -> Arc<Self> {
        Arc::new(Self(AtomicUsize::new(workers)))
    }

    pub(crate) fn leave(&self) {
        self.release(1);
    }

    pub(crate) fn are_gone(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    /// Prevents closing; returns false if the listener has already closed.
    fn hold(&self, count: usize) -> bool {
        let held = |workers: usize| (workers > 0).then(|| workers + count);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, held).is_ok()
    }

    fn release(&self, count: usize) {
        self.0.fetch_sub(count, Ordering::Relaxed);
    }
}

/// Counts held in [`ClosingClients`] during a change; released on drop unless kept.
#[derive(Default)]
pub(crate) struct HeldClients(Vec<(Arc<ClosingClients>, usize)>);

impl HeldClients {
    fn hold(&mut self, clients: &Arc<ClosingClients>, count: usize) -> bool {
        let held = clients.hold(count);
        if held {
            self.0.push((Arc::clone(clients), count));
        }
        held
    }

    pub(crate) fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for HeldClients {
    fn drop(&mut self) {
        self.0.iter().for_each(|(clients, count)| clients.release(*count));
    }
}

#[derive(Clone, Default)]
pub(crate) struct ListenerPlaces {
    udp: Vec<Option<ListenerPlace>>,
    dtls: Vec<Option<ListenerPlace>>,
    streams: Vec<Option<ListenerPlace>>,
    waiting: Vec<WaitingListener>,
}

#[derive(Clone)]
struct ListenerPlace {
    configured: SocketAddr,
    bound: SocketAddr,
    secure: bool,
    closing: Option<Arc<ClosingClients>>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct OfferedPlaces {
    udp: Vec<Option<OfferedPlace>>,
    dtls: Vec<Option<OfferedPlace>>,
    streams: Vec<Option<OfferedPlace>>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct OfferedPlace {
    configured: SocketAddr,
    bound: SocketAddr,
    secure: bool,
    closing: bool,
}

/// Kind of a listener and its place; `Transport::Tcp` stands for all stream listeners.
pub(crate) type Named = (Transport, usize);

impl OfferedPlaces {
    /// Listeners with their own socket, in the order in which sockets are passed. A DTLS listener may share
    /// the socket of a plain UDP listener.
    pub(crate) fn named(&self) -> impl Iterator<Item = Named> + '_ {
        let listed = [Transport::Udp, Transport::Dtls, Transport::Tcp].into_iter().zip(self.lists());
        let named = listed.flat_map(|(transport, list)| {
            let places = list.iter().enumerate().filter_map(|(place, it)| Some((place, it.as_ref()?)));
            places.map(move |(place, it)| (transport, place, it))
        });
        let has_own = move |(transport, _, it): &(Transport, usize, &OfferedPlace)| {
            *transport != Transport::Dtls || self.plain_at(it.bound).is_none()
        };
        named.filter(has_own).map(|(transport, place, _)| (transport, place))
    }

    fn lists(&self) -> [&[Option<OfferedPlace>]; 3] {
        [&self.udp, &self.dtls, &self.streams]
    }

    fn plain_at(&self, bound: SocketAddr) -> Option<usize> {
        self.udp.iter().position(|place| place.as_ref().is_some_and(|place| place.bound == bound))
    }

    pub(crate) fn places(&self, workers: usize) -> ListenerPlaces {
        let place = |it: &OfferedPlace| ListenerPlace {
            configured: it.configured,
            bound: it.bound,
            secure: it.secure,
            closing: it.closing.then(|| ClosingClients::of(workers)),
        };
        let places = |list: &[Option<OfferedPlace>]| list.iter().map(|it| it.as_ref().map(place)).collect();
        let [udp, dtls, streams] = self.lists().map(places);
        ListenerPlaces { udp, dtls, streams, waiting: Vec::new() }
    }

    /// Builds one worker's sockets from descriptors in the order of [`OfferedPlaces::named`]. Fails if there
    /// are too few or one has the wrong type.
    pub(crate) fn sockets(
        &self,
        places: &ListenerPlaces,
        mut next: impl FnMut() -> io::Result<OwnedFd>,
    ) -> io::Result<ListenerSockets> {
        let mut sockets = ListenerSockets::default();
        for (transport, place) in self.named() {
            match transport {
                Transport::Udp => {
                    sockets.udp.push((place, SocketSource::Own(UdpSocket::take_over(next()?, 0)?)));
                }
                Transport::Dtls => {
                    sockets.dtls.push((place, SocketSource::Own(UdpSocket::take_over(next()?, 0)?)));
                }
                Transport::Tcp | Transport::Tls => {
                    sockets.streams.push((place, TcpListener::take_over(next()?)?));
                }
            }
        }
        for (place, it) in self.dtls.iter().enumerate() {
            if let Some(plain) = it.as_ref().and_then(|it| self.plain_at(it.bound)) {
                sockets.dtls.push((place, SocketSource::Shared(plain, None)));
            }
        }
        for (transport, list) in [(Transport::Udp, &places.udp), (Transport::Dtls, &places.dtls)] {
            let closing = list.iter().enumerate().filter_map(|(place, it)| {
                let clients = Arc::clone(it.as_ref()?.closing.as_ref()?);
                Some(Closing { transport, place, clients })
            });
            sockets.closing.extend(closing);
        }
        Ok(sockets)
    }
}

#[derive(Default)]
struct Probed {
    udp: Vec<Found>,
    dtls: Vec<Found>,
    streams: Vec<SocketAddr>,
}

#[derive(Clone, Copy)]
struct Found {
    address: SocketAddr,
    shared: Option<usize>,
}

impl Found {
    fn own(address: SocketAddr) -> Self {
        Self { address, shared: None }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingListener {
    /// `udp`, `tcp`, `tls` or `dtls`.
    pub protocol: &'static str,
    pub address: SocketAddr,
    /// Bind error; `None` as long as the machine does not have the address.
    pub error: Option<String>,
}

pub(crate) struct ListenerChange {
    pub(crate) places: ListenerPlaces,
    pub(crate) sockets: Vec<ListenerSockets>,
    pub(crate) opened: Vec<(&'static str, SocketAddr)>,
    pub(crate) closing: Vec<(&'static str, SocketAddr)>,
    pub(crate) held: HeldClients,
}

impl ListenerPlaces {
    /// Binds the listeners that `layout` adds, for each worker, and marks removed ones as closing. Listeners
    /// on addresses that this machine does not have wait for a later change, and so do waiting listeners that
    /// still cannot be bound. On error, everything is closed again.
    pub(crate) fn change(&self, layout: &Layout, config: &Config) -> Result<ListenerChange, StartError> {
        let workers = config.workers.max(1);
        let mut change = ListenerChange {
            places: Self { waiting: Vec::new(), ..self.clone() },
            sockets: (0..workers).map(|_| ListenerSockets::default()).collect(),
            opened: Vec::new(),
            closing: Vec::new(),
            held: HeldClients::default(),
        };
        change.places.forget_closed();
        let mut new = [Vec::new(), Vec::new(), Vec::new()];
        for (transport, new) in [Transport::Udp, Transport::Dtls, Transport::Tcp].into_iter().zip(&mut new) {
            for placed in layout.placed(transport) {
                if change.stays(transport, placed, workers) {
                    continue;
                }
                match self.waits(transport, &placed, config) {
                    Some(waiting) => change.places.waiting.push(waiting),
                    None => new.push(placed),
                }
            }
        }
        let [udp, dtls, streams] = new;
        let found = change.places.probe(self, config, &udp, &dtls, &streams)?;
        for (placed, found) in udp.iter().zip(found.udp) {
            change.bind_udp(Transport::Udp, placed, found, config)?;
        }
        for (placed, found) in dtls.iter().zip(found.dtls) {
            change.bind_udp(Transport::Dtls, placed, found, config)?;
        }
        for (placed, address) in streams.iter().zip(found.streams) {
            change.bind_stream(placed, address, config)?;
        }
        Ok(change)
    }

    pub(crate) fn offered(&self) -> OfferedPlaces {
        let offered = |place: &ListenerPlace| {
            let is_closed = place.closing.as_ref().is_some_and(|clients| clients.are_gone());
            (!is_closed).then(|| OfferedPlace {
                configured: place.configured,
                bound: place.bound,
                secure: place.secure,
                closing: place.closing.is_some(),
            })
        };
        let all = |places: &[Option<ListenerPlace>]| {
            places.iter().map(|place| place.as_ref().and_then(offered)).collect::<Vec<_>>()
        };
        OfferedPlaces { udp: all(&self.udp), dtls: all(&self.dtls), streams: all(&self.streams) }
    }

    pub(crate) fn listeners(&self) -> Listeners {
        let open = |places: &[Option<ListenerPlace>], secure: bool| {
            let open = places.iter().flatten().filter(|it| it.closing.is_none() && it.secure == secure);
            open.map(|place| place.bound).collect()
        };
        Listeners {
            udp: open(&self.udp, false),
            tcp: open(&self.streams, false),
            tls: open(&self.streams, true),
            dtls: open(&self.dtls, false),
        }
    }

    pub(crate) fn waiting(&self) -> &[WaitingListener] {
        &self.waiting
    }

    pub(crate) fn bound_to(&self, transport: Transport, place: usize) -> Option<SocketAddr> {
        Some(self.of(transport).get(place)?.as_ref()?.bound)
    }

    fn forget_closed(&mut self) {
        for place in self.udp.iter_mut().chain(&mut self.dtls) {
            let clients = place.as_ref().and_then(|place| place.closing.as_ref());
            if clients.is_some_and(|clients| clients.are_gone()) {
                *place = None;
            }
        }
    }

    pub(crate) fn bound(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let all = [&self.udp, &self.dtls, &self.streams].into_iter().flatten().flatten();
        all.map(|place| place.bound)
    }

    /// Addresses of plain UDP, for the kernel's port table.
    pub(crate) fn bound_by_udp(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.udp.iter().flatten().map(|place| place.bound)
    }

    pub(crate) fn udp(&self) -> (Vec<usize>, Vec<SocketAddr>) {
        let numbered = self.udp.iter().enumerate();
        let open = numbered.filter_map(|(number, place)| Some((number, place.as_ref()?)));
        open.filter(|(_, place)| place.closing.is_none()).map(|(number, place)| (number, place.bound)).unzip()
    }

    fn of(&self, transport: Transport) -> &[Option<ListenerPlace>] {
        match transport {
            Transport::Udp => &self.udp,
            Transport::Dtls => &self.dtls,
            Transport::Tcp | Transport::Tls => &self.streams,
        }
    }

    fn of_mut(&mut self, transport: Transport) -> &mut Vec<Option<ListenerPlace>> {
        match transport {
            Transport::Udp => &mut self.udp,
            Transport::Dtls => &mut self.dtls,
            Transport::Tcp | Transport::Tls => &mut self.streams,
        }
    }

    fn set(&mut self, transport: Transport, at: usize, place: Option<ListenerPlace>) {
        let places = self.of_mut(transport);
        if places.len() <= at {
            places.resize(at + 1, None);
        }
        places[at] = place;
    }

    /// Finds a listener of this kind by its configured address, skipping those in `taken`.
    fn shared(
        &self,
        transport: Transport,
        configured: SocketAddr,
        taken: &[usize],
    ) -> Option<(usize, SocketAddr)> {
        let numbered = self.of(transport).iter().enumerate();
        let mut all = numbered.filter_map(|(number, place)| Some((number, place.as_ref()?)));
        all.find(|(number, place)| place.configured == configured && !taken.contains(number))
            .map(|(number, place)| (number, place.bound))
    }

    /// Determines the addresses and shared sockets of new listeners. Each address is bound once without
    /// SO_REUSEPORT, so that starting a second server on the port fails, rather than the two sharing it
    /// unnoticed. Port 0 is replaced by the same port for UDP and TCP on an address. Sockets in `before` are
    /// ours; neither they nor passed sockets need this test.
    fn probe(
        &self,
        before: &Self,
        config: &Config,
        udp: &[Placed],
        dtls: &[Placed],
        streams: &[Placed],
    ) -> Result<Probed, StartError> {
        let mut all = self.clone();
        let mut found = Probed::default();
        let mut of_pair: Vec<Option<SocketAddr>> = vec![None; streams.len()];
        for placed in udp {
            let wanted = placed.address;
            let probed = match all.shared(Transport::Dtls, wanted, &[]) {
                Some((place, address)) => Found { address, shared: Some(place) },
                None if before.overlaps(&[Transport::Udp, Transport::Dtls], wanted) => Found::own(wanted),
                None => {
                    let is_it = |at: &usize| {
                        !streams[*at].secure && streams[*at].address == wanted && of_pair[*at].is_none()
                    };
                    let pair = (0..streams.len()).find(is_it);
                    let pair = pair.filter(|_| !before.overlaps(&[Transport::Tcp], wanted));
                    let (udp, tcp) = probe_pair(config, wanted, pair.is_some())?;
                    if let Some(at) = pair {
                        of_pair[at] = tcp;
                    }
                    Found::own(udp)
                }
            };
            all.set(Transport::Udp, placed.place, Some(ListenerPlace::open(placed, probed.address)));
            found.udp.push(probed);
        }
        let mut taken = Vec::new();
        for placed in dtls {
            let wanted = placed.address;
            found.dtls.push(match all.shared(Transport::Udp, wanted, &taken) {
                Some((place, address)) => {
                    taken.push(place);
                    Found { address, shared: Some(place) }
                }
                None if before.overlaps(&[Transport::Udp, Transport::Dtls], wanted) => Found::own(wanted),
                None => Found::own(
                    probe(config, turnpike_net::SocketProtocol::Udp, wanted)
                        .map_err(|source| listen_error("dtls", wanted, source))?,
                ),
            });
        }
        for (placed, of_pair) in streams.iter().zip(of_pair) {
            let (wanted, protocol) = (placed.address, protocol(Transport::Tcp, placed.secure));
            let of_udp = || before.shared(Transport::Udp, wanted, &[]).map(|(_, bound)| bound);
            found.streams.push(match of_pair {
                Some(address) => address,
                None if before.overlaps(&[Transport::Tcp], wanted) => wanted,
                None => {
                    let takes_that_of_udp = wanted.port() == 0 && !placed.secure;
                    let wanted = if takes_that_of_udp { of_udp().unwrap_or(wanted) } else { wanted };
                    probe(config, turnpike_net::SocketProtocol::Tcp, wanted)
                        .map_err(|source| listen_error(protocol, wanted, source))?
                }
            });
        }
        Ok(found)
    }

    /// Returns a waiting entry if the machine does not have the address, or if the listener was already
    /// waiting and another program still has the port.
    fn waits(&self, transport: Transport, placed: &Placed, config: &Config) -> Option<WaitingListener> {
        let (address, protocol) = (placed.address, protocol(transport, placed.secure));
        let waiting = |error| Some(WaitingListener { protocol, address, error });
        let by_udp = matches!(transport, Transport::Udp | Transport::Dtls);
        let passed = net_transport(by_udp);
        if config.absent.contains(&address.ip()) && config.passed.count(passed, address) == 0 {
            return waiting(None);
        }
        let has_waited = self.waiting.iter().any(|it| it.protocol == protocol && it.address == address);
        let beside: &[Transport] =
            if by_udp { &[Transport::Udp, Transport::Dtls] } else { &[Transport::Tcp] };
        if !has_waited || self.overlaps(beside, address) {
            return None;
        }
        let error = probe(config, passed, address).err()?;
        waiting(Some(listen_error(protocol, address, error).to_string()))
    }

    fn overlaps(&self, transports: &[Transport], wanted: SocketAddr) -> bool {
        let all = transports.iter().flat_map(|transport| self.of(*transport)).flatten();
        wanted.port() != 0
            && all.map(|place| place.bound).any(|bound| {
                bound.port() == wanted.port()
                    && bound.is_ipv4() == wanted.is_ipv4()
                    && (bound.ip() == wanted.ip()
                        || bound.ip().is_unspecified()
                        || wanted.ip().is_unspecified())
            })
    }
}

impl ListenerPlace {
    fn open(placed: &Placed, bound: SocketAddr) -> Self {
        Self { configured: placed.address, bound, secure: placed.secure, closing: None }
    }
}

impl ListenerChange {
    /// Returns true if this listener need not be bound because it is unchanged, closing or reopened.
    fn stays(&mut self, transport: Transport, placed: Placed, workers: usize) -> bool {
        let protocol = protocol(transport, placed.secure);
        let Some(place) = self.places.of_mut(transport).get_mut(placed.place).and_then(Option::as_mut) else {
            return !placed.open;
        };
        place.secure = placed.secure;
        let bound = place.bound;
        match (placed.open, &place.closing) {
            (true, None) | (false, Some(_)) => true,
            (true, Some(clients)) => {
                let is_open = self.held.hold(clients, REOPENED);
                if is_open {
                    place.closing = None;
                    self.opened.push((protocol, bound));
                }
                is_open
            }
            (false, None) => {
                let clients = ClosingClients::of(workers);
                let closing = Closing { transport, place: placed.place, clients: Arc::clone(&clients) };
                self.sockets.iter_mut().for_each(|sockets| sockets.closing.push(closing.clone()));
                self.closing.push((protocol, bound));
                if transport == Transport::Tcp {
                    self.places.set(transport, placed.place, None);
                } else {
                    place.closing = Some(clients);
                }
                true
            }
        }
    }

    fn bind_udp(
        &mut self,
        transport: Transport,
        placed: &Placed,
        Found { address, shared }: Found,
        config: &Config,
    ) -> Result<(), StartError> {
        let protocol = protocol(transport, false);
        let shared = shared.and_then(|place| self.share(transport, place));
        for (worker, sockets) in self.sockets.iter_mut().enumerate() {
            let source = match &shared {
                Some((place, clients)) => SocketSource::Shared(*place, clients.clone()),
                None => SocketSource::Own(udp_socket(protocol, address, worker, config)?),
            };
            let list = if transport == Transport::Udp { &mut sockets.udp } else { &mut sockets.dtls };
            list.push((placed.place, source));
        }
        self.places.set(transport, placed.place, Some(ListenerPlace::open(placed, address)));
        self.opened.push((protocol, address));
        Ok(())
    }

    /// Shares the socket of the other kind's listener at this place; returns `None` if that has closed.
    fn share(&mut self, transport: Transport, place: usize) -> Option<(usize, Option<Arc<ClosingClients>>)> {
        let other = if transport == Transport::Udp { Transport::Dtls } else { Transport::Udp };
        let found = self.places.of(other).get(place)?.as_ref()?;
        let Some(clients) = &found.closing else { return Some((place, None)) };
        self.held.hold(clients, self.sockets.len()).then(|| (place, Some(Arc::clone(clients))))
    }

    fn bind_stream(
        &mut self,
        placed: &Placed,
        address: SocketAddr,
        config: &Config,
    ) -> Result<(), StartError> {
        let protocol = protocol(Transport::Tcp, placed.secure);
        for (worker, sockets) in self.sockets.iter_mut().enumerate() {
            let bound = config.passed.tcp(worker, address, &listen_options());
            let bound = bound.map_err(|source| bind_error(config, protocol, address, source));
            sockets.streams.push((placed.place, bound?));
        }
        self.places.set(Transport::Tcp, placed.place, Some(ListenerPlace::open(placed, address)));
        self.opened.push((protocol, address));
        Ok(())
    }
}

fn protocol(transport: Transport, secure: bool) -> &'static str {
    match transport {
        Transport::Udp => "udp",
        Transport::Dtls => "dtls",
        Transport::Tcp | Transport::Tls if secure => "tls",
        Transport::Tcp | Transport::Tls => "tcp",
    }
}

fn udp_socket(
    protocol: &'static str,
    address: SocketAddr,
    worker: usize,
    config: &Config,
) -> Result<UdpSocket, StartError> {
    let options = UdpOptions {
        // Workers share the port, as do old and new listeners during a reload, and a wildcard and a specific
        // address.
        reuse_port: true,
        recv_buffer: Some(config.listener_buffer),
        send_buffer: Some(config.listener_buffer),
        gro: config.datapath == Datapath::Gso,
        packet_info: address.ip().is_unspecified(),
        ip_header: true,
        ..UdpOptions::default()
    };
    let bound = config.passed.udp(worker, address, &options);
    bound.map_err(|source| bind_error(config, protocol, address, source).into())
}

fn probe_pair(
    config: &Config,
    address: SocketAddr,
    also_tcp: bool,
) -> Result<(SocketAddr, Option<SocketAddr>), StartError> {
    let named_by = udp_setting(config, address);
    let mut attempts = 0;
    loop {
        let udp = match probe(config, turnpike_net::SocketProtocol::Udp, address) {
            Ok(udp) => udp,
            Err(source) => {
                return Err(BindError::ip(format_args!("udp {address}"), source, named_by).into());
            }
        };
        if !also_tcp {
            return Ok((udp, None));
        }
        match probe(config, turnpike_net::SocketProtocol::Tcp, udp) {
            Ok(tcp) => return Ok((udp, Some(tcp))),
            Err(_) if address.port() == 0 && attempts < PORT_ATTEMPTS => attempts += 1,
            Err(source) => return Err(BindError::ip(format_args!("tcp {udp}"), source, named_by).into()),
        }
    }
}

fn net_transport(by_udp: bool) -> turnpike_net::SocketProtocol {
    if by_udp { turnpike_net::SocketProtocol::Udp } else { turnpike_net::SocketProtocol::Tcp }
}

fn probe(
    config: &Config,
    transport: turnpike_net::SocketProtocol,
    address: SocketAddr,
) -> io::Result<SocketAddr> {
    config.passed.probe(transport, address, &listen_options())
}

fn setting(protocol: &str) -> &'static str {
    match protocol {
        "tls" => "with --tls-listen",
        "dtls" => "with --dtls-listen",
        _ => "with --listen",
    }
}

/// Setting that configures this UDP listener. NAT discovery adds its own listeners, which also serve TCP
/// unless it is disabled.
fn udp_setting(config: &Config, address: SocketAddr) -> &'static str {
    let of_discovery =
        |of: &NatDiscovery| of.addresses.contains(&address.ip()) && of.ports.contains(&address.port());
    let is_discovery = config.server.nat_discovery.iter().any(of_discovery);
    if is_discovery && !config.streams.listen.contains(&address) {
        "with nat_discovery.addresses and nat_discovery.ports"
    } else {
        setting("udp")
    }
}

fn bind_error(config: &Config, protocol: &'static str, address: SocketAddr, source: io::Error) -> BindError {
    let by_udp = matches!(protocol, "udp" | "dtls");
    config.passed.explain(net_transport(by_udp), address, listen_error(protocol, address, source))
}

fn listen_error(protocol: &'static str, address: SocketAddr, source: io::Error) -> BindError {
    BindError::ip(format_args!("{protocol} {address}"), source, setting(protocol))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedy_names_the_setting_that_configures_the_listener() {
        let told = |protocol, kind: io::ErrorKind| {
            listen_error(protocol, ([10, 0, 0, 1], 443).into(), kind.into()).to_string()
        };
        for kind in [
            io::ErrorKind::AddrInUse,
            io::ErrorKind::PermissionDenied,
            io::ErrorKind::AddrNotAvailable,
            io::ErrorKind::Other,
        ] {
            for (protocol, flag) in [
                ("udp", " --listen"),
                ("tcp", " --listen"),
                ("tls", " --tls-listen"),
                ("dtls", " --dtls-listen"),
            ] {
                let text = told(protocol, kind);
                assert!(text.ends_with(flag) && text.contains(&format!("{protocol} 10.0.0.1:443")), "{text}");
            }
        }
    }
}
