//! Which listeners are open, and with which sockets: at the start and at each reload. All that is wanted is bound before anything changes,
//! so that what cannot be had changes nothing.
//!
//! ```text
//!  open ──reload takes it away──▶ closing: no new allocations ──its last one has ended, on every worker──▶ closed
//!    ▲─────────────reload brings it back──────────────┘ ◀──────────────────with new sockets─────────────────┘
//! ```
//!
//! The kernel spreads clients over the sockets of a listener by their number: so a UDP socket of one worker is not closed before all are.
//! A stream listener closes at once, for its connections have sockets of their own.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use turnpike_net::{Datapath, TcpListener, UdpOptions, UdpSocket};
use turnpike_turn::server::{NatDiscovery, Transport};

use crate::{Config, Layout, StartError, layout::Placed, runtime::Listeners, stream::bind_stream};

/// Ports that the kernel may choose before one is free for both UDP and TCP.
const PORT_ATTEMPTS: usize = 16;

/// What one worker is to listen on from now on, by place.
#[derive(Default)]
pub(crate) struct Sockets {
    pub(crate) udp: Vec<(usize, Source)>,
    pub(crate) dtls: Vec<(usize, Source)>,
    pub(crate) streams: Vec<(usize, TcpListener)>,
    /// What shall take no new clients.
    pub(crate) closing: Vec<Closing>,
}

/// The socket of a listener.
pub(crate) enum Source {
    Own(UdpSocket),
    /// That of the listener of the other kind, plain UDP or DTLS, at this place.
    Shared(usize),
}

/// A listener that is to be closed.
#[derive(Clone)]
pub(crate) struct Closing {
    pub(crate) transport: Transport,
    pub(crate) place: usize,
    /// For UDP and DTLS, when.
    pub(crate) clients: Arc<Clients>,
}

/// How many workers have clients of a listener that is to be closed.
pub(crate) struct Clients(AtomicUsize);

/// More workers than there are: it is open again.
const REOPENED: usize = usize::MAX / 2;

impl Clients {
    fn of(workers: usize) -> Arc<Self> {
        Arc::new(Self(AtomicUsize::new(workers)))
    }

    /// One worker has none any more.
    pub(crate) fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether no worker has any: it is closed now.
    pub(crate) fn are_gone(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    /// False if it is too late.
    fn reopen(&self) -> bool {
        let reopened = |workers: usize| (workers > 0).then_some(REOPENED);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reopened).is_ok()
    }
}

/// The listeners that have sockets, by place.
#[derive(Clone, Default)]
pub(crate) struct Places {
    udp: Vec<Option<Place>>,
    dtls: Vec<Option<Place>>,
    streams: Vec<Option<Place>>,
}

#[derive(Clone)]
struct Place {
    configured: SocketAddr,
    bound: SocketAddr,
    secure: bool,
    closing: Option<Arc<Clients>>,
}

/// Where new listeners really are, kind by kind.
#[derive(Default)]
struct Probed {
    udp: Vec<Found>,
    dtls: Vec<Found>,
    streams: Vec<SocketAddr>,
}

#[derive(Clone, Copy)]
struct Found {
    address: SocketAddr,
    /// The listener of the other kind that has the socket.
    shared: Option<usize>,
}

impl Found {
    fn own(address: SocketAddr) -> Self {
        Self { address, shared: None }
    }
}

/// What becomes of the listeners, once all of it is bound.
pub(crate) struct Change {
    pub(crate) places: Places,
    /// For each worker.
    pub(crate) sockets: Vec<Sockets>,
    /// By protocol.
    pub(crate) opened: Vec<(&'static str, SocketAddr)>,
    pub(crate) closing: Vec<(&'static str, SocketAddr)>,
}

impl Places {
    /// Binds what `layout` has open and this has not, for each worker, and says what is to be closed.
    ///
    /// # Errors
    /// Something cannot be bound; then nothing is.
    pub(crate) fn change(&self, layout: &Layout, config: &Config) -> Result<Change, StartError> {
        let workers = config.workers.max(1);
        let mut change = Change {
            places: self.clone(),
            sockets: (0..workers).map(|_| Sockets::default()).collect(),
            opened: Vec::new(),
            closing: Vec::new(),
        };
        let mut new = [Vec::new(), Vec::new(), Vec::new()];
        for (transport, new) in [Transport::Udp, Transport::Dtls, Transport::Tcp].into_iter().zip(&mut new) {
            for placed in layout.placed(transport) {
                if !change.stays(transport, placed, workers) {
                    new.push(placed);
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
            change.bind_stream(placed, address)?;
        }
        Ok(change)
    }

    /// Of those that take new clients.
    pub(crate) fn listeners(&self) -> Listeners {
        let open = |places: &[Option<Place>], secure: bool| {
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

    /// All that is bound, those included that are to be closed.
    pub(crate) fn bound(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let all = [&self.udp, &self.dtls, &self.streams].into_iter().flatten().flatten();
        all.map(|place| place.bound)
    }

    /// What plain UDP is bound to, for the kernel's table of ports.
    pub(crate) fn bound_by_udp(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.udp.iter().flatten().map(|place| place.bound)
    }

    /// Open UDP listeners with their places.
    pub(crate) fn udp(&self) -> (Vec<usize>, Vec<SocketAddr>) {
        let numbered = self.udp.iter().enumerate();
        let open = numbered.filter_map(|(number, place)| Some((number, place.as_ref()?)));
        open.filter(|(_, place)| place.closing.is_none()).map(|(number, place)| (number, place.bound)).unzip()
    }

    fn of(&self, transport: Transport) -> &[Option<Place>] {
        match transport {
            Transport::Udp => &self.udp,
            Transport::Dtls => &self.dtls,
            Transport::Tcp | Transport::Tls => &self.streams,
        }
    }

    fn of_mut(&mut self, transport: Transport) -> &mut Vec<Option<Place>> {
        match transport {
            Transport::Udp => &mut self.udp,
            Transport::Dtls => &mut self.dtls,
            Transport::Tcp | Transport::Tls => &mut self.streams,
        }
    }

    fn set(&mut self, transport: Transport, at: usize, place: Option<Place>) {
        let places = self.of_mut(transport);
        if places.len() <= at {
            places.resize(at + 1, None);
        }
        places[at] = place;
    }

    /// The listener of a kind that has, or is to have, the socket of this address as it is configured; none of `taken`.
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

    /// Real addresses of new listeners, and whose sockets they share. Each is bound once without SO_REUSEPORT: a second server on the same
    /// port is told so, instead of silently sharing it. For an address that is listened on by UDP and by TCP, port 0 becomes the same
    /// port. What `before` has is ours.
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
                    let (udp, tcp) = probe_pair(wanted, pair.is_some(), udp_setting(config, wanted))?;
                    if let Some(at) = pair {
                        of_pair[at] = tcp;
                    }
                    Found::own(udp)
                }
            };
            all.set(Transport::Udp, placed.place, Some(Place::open(placed, probed.address)));
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
                None => Found::own(probe_udp("dtls", wanted)?),
            });
        }
        for (placed, of_pair) in streams.iter().zip(of_pair) {
            let (wanted, protocol) = (placed.address, protocol(Transport::Tcp, placed.secure));
            let of_udp = || before.shared(Transport::Udp, wanted, &[]).map(|(_, bound)| bound);
            found.streams.push(match of_pair {
                Some(address) => address,
                None if before.overlaps(&[Transport::Tcp], wanted) => wanted,
                None if wanted.port() == 0 && !placed.secure => {
                    probe_stream(protocol, of_udp().unwrap_or(wanted))?
                }
                None => probe_stream(protocol, wanted)?,
            });
        }
        Ok(found)
    }

    /// Whether a listener of ours is in the way of one that is bound without SO_REUSEPORT.
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

impl Place {
    fn open(placed: &Placed, bound: SocketAddr) -> Self {
        Self { configured: placed.address, bound, secure: placed.secure, closing: None }
    }
}

impl Change {
    /// Whether nothing is to be bound for this listener: it is as it was, or is to be closed, or open again.
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
                if clients.reopen() {
                    place.closing = None;
                    self.opened.push((protocol, bound));
                    return true;
                }
                false
            }
            (false, None) => {
                let clients = Clients::of(workers);
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
        for sockets in &mut self.sockets {
            let source = match shared {
                Some(place) => Source::Shared(place),
                None => Source::Own(udp_socket(protocol, address, config)?),
            };
            let list = if transport == Transport::Udp { &mut sockets.udp } else { &mut sockets.dtls };
            list.push((placed.place, source));
        }
        self.places.set(transport, placed.place, Some(Place::open(placed, address)));
        self.opened.push((protocol, address));
        Ok(())
    }

    fn bind_stream(&mut self, placed: &Placed, address: SocketAddr) -> Result<(), StartError> {
        let protocol = protocol(Transport::Tcp, placed.secure);
        for sockets in &mut self.sockets {
            let socket = bind_stream(address).map_err(|source| listen_error(protocol, address, source))?;
            sockets.streams.push((placed.place, socket));
        }
        self.places.set(Transport::Tcp, placed.place, Some(Place::open(placed, address)));
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

fn udp_socket(protocol: &'static str, address: SocketAddr, config: &Config) -> Result<UdpSocket, StartError> {
    let options = UdpOptions {
        // Several workers, a reload, all addresses and one of them on one port: none could bind what another has.
        reuse_port: true,
        recv_buffer: Some(config.listener_buffer),
        send_buffer: Some(config.listener_buffer),
        gro: config.datapath == Datapath::Gso,
        packet_info: address.ip().is_unspecified(),
        ip_header: true,
        errors: false,
        dual_stack: false,
    };
    UdpSocket::bind(address, &options).map_err(|error| listen_error(protocol, address, error))
}

/// `named_by` is the setting that names the address.
fn probe_pair(
    address: SocketAddr,
    also_tcp: bool,
    named_by: &str,
) -> Result<(SocketAddr, Option<SocketAddr>), StartError> {
    let mut attempts = 0;
    loop {
        let udp = match UdpSocket::bind(address, &UdpOptions::default()) {
            Ok(socket) => socket.local_addr(),
            Err(source) => return Err(cannot_listen("udp", named_by, address, source)),
        };
        if !also_tcp {
            return Ok((udp, None));
        }
        match TcpListener::probe(udp) {
            Ok(tcp) => return Ok((udp, Some(tcp))),
            Err(_) if address.port() == 0 && attempts < PORT_ATTEMPTS => attempts += 1,
            Err(source) => return Err(cannot_listen("tcp", named_by, udp, source)),
        }
    }
}

fn probe_udp(protocol: &'static str, address: SocketAddr) -> Result<SocketAddr, StartError> {
    let socket = UdpSocket::bind(address, &UdpOptions::default());
    Ok(socket.map_err(|source| listen_error(protocol, address, source))?.local_addr())
}

fn probe_stream(protocol: &'static str, address: SocketAddr) -> Result<SocketAddr, StartError> {
    TcpListener::probe(address).map_err(|source| listen_error(protocol, address, source))
}

/// The flag that names the listeners of a protocol.
fn setting(protocol: &str) -> &'static str {
    match protocol {
        "tls" => "--tls-listen",
        "dtls" => "--dtls-listen",
        _ => "--listen",
    }
}

/// What names this UDP listener. Those of NAT discovery stand among the others, which serve TCP too unless nobody wants that.
fn udp_setting(config: &Config, address: SocketAddr) -> &'static str {
    let of_discovery =
        |of: &NatDiscovery| of.addresses.contains(&address.ip()) && of.ports.contains(&address.port());
    let is_discovery = config.server.nat_discovery.iter().any(of_discovery);
    if is_discovery && !config.streams.listen.contains(&address) {
        "nat_discovery.addresses and nat_discovery.ports"
    } else {
        setting("udp")
    }
}

/// Says what to do about a listener that cannot be bound.
fn listen_error(protocol: &'static str, address: SocketAddr, source: io::Error) -> StartError {
    cannot_listen(protocol, setting(protocol), address, source)
}

/// The same for one that `named_by` names.
fn cannot_listen(
    protocol: &'static str,
    named_by: &str,
    address: SocketAddr,
    source: io::Error,
) -> StartError {
    let remedy = match source.kind() {
        io::ErrorKind::AddrInUse => {
            format!("another program has this port: stop it, or choose another port with {named_by}")
        }
        io::ErrorKind::PermissionDenied => format!(
            "ports below 1024 need CAP_NET_BIND_SERVICE: grant it (setcap cap_net_bind_service=ep), or choose a \
             higher port with {named_by}"
        ),
        io::ErrorKind::AddrNotAvailable => {
            format!("choose an address of this machine (ip address) with {named_by}")
        }
        _ => format!("choose another address with {named_by}"),
    };
    StartError::Listen { protocol, address, source, remedy }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_names_the_setting_of_the_listener() {
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
