//! A relay that goes on in another process: the old one gives its listening sockets, the relay sockets of clients over UDP and all that it
//! knows of them to a new one, and keeps the clients over streams and DTLS until they end.
//!
//! ```text
//!        old process                                          new process
//!  offer ─────────── how it listens, its keys, sockets ──────▶ start_as_heir     checks, makes its workers
//!  freeze            the kernel relays nothing, workers rest, datagrams wait
//!  hand_over ─────── worker n: sessions and their sockets ───▶ worker n of it    all are taken in, or none
//!                                                              inherited, serve  reads from the same sockets
//!  release           what went is forgotten, the kernel's program too
//!                                                              attach_kernel
//! ```
//!
//! Until `release` the old one has everything that it had, and `thaw` lets it go on. The kernel spreads clients over the very same sockets
//! before and after, so that each stays with the worker of its number.

use std::{
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::{Arc, PoisonError, mpsc},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use turnpike_net::{Channel, Datapath, TcpListener, UdpSocket};
use turnpike_offload::OffloadError;
use turnpike_turn::server::{ListenerId, NonceKey, Transport};

use crate::{
    Config, Layout, Relay, StreamConfig,
    runtime::{Listeners, StartError},
    worker::{Command, Inherited, Step},
};

/// So long a worker may take for a step that is none but its own.
const STEP: Duration = Duration::from_secs(2);
/// Sessions that a worker takes out of the kernel in that time are more than there can be; but it serves meanwhile.
const SUSPEND: Duration = Duration::from_secs(30);
/// Rounds after which what workers hand to one another has come to an end; three are enough for all that there is.
const ROUNDS: usize = 32;

/// What the new process has to know before it can say whether it can take over. It holds keys.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// Threads; the new one has as many.
    pub workers: usize,
    /// Whether the kernel relays what it can.
    pub kernel: bool,
    /// How datagrams enter and leave, by name: what waits in a socket was coalesced for it.
    datapath: String,
    nonce_key: NonceKey,
    listeners: Vec<Offered>,
    /// What each number of a listener stands for.
    numbers: Vec<Number>,
}

/// A listening socket of each worker.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Offered {
    kind: Kind,
    /// As the configuration has it: the port may be 0.
    configured: SocketAddr,
    bound: SocketAddr,
}

/// Which list of the configuration has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Udp,
    Dtls,
    Tcp,
    Tls,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Number {
    transport: Transport,
    place: usize,
    server_name: Option<String>,
}

/// What a new process begins with: see [`Relay::start_as_heir`].
#[derive(Debug)]
pub struct Inheritance {
    offer: Offer,
    /// Of each worker its sockets in the order of the offer's, and then its end of a channel.
    descriptors: Vec<OwnedFd>,
}

/// Why sessions cannot be taken over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what their fields are")]
pub enum Unfit {
    #[error("what the old process sent is not complete: it is of too different a version")]
    Incomplete,
    #[error("cannot take the sessions over: {0}")]
    Failed(#[from] io::Error),
    #[error(
        "the realm {realm} has sessions and is not configured any more; reload the old process first (SIGHUP), which ends them"
    )]
    Realm { realm: String },
    #[error(
        "limits.allocations, limits.allocations_per_user or a realm's own limits have no room for all sessions, {user:?} of realm \
         {realm} for one; raise them to what they were"
    )]
    Quota { realm: String, user: String },
    #[error("a worker has ended; the log lines above may say why")]
    Worker,
}

impl Offer {
    /// How datagrams enter and leave; `None` for what this version does not have.
    #[must_use]
    pub fn datapath(&self) -> Option<Datapath> {
        self.datapath.parse().ok()
    }

    /// What makes nonces that clients have.
    #[must_use]
    pub fn nonce_key(&self) -> NonceKey {
        self.nonce_key
    }

    /// Sockets of each worker.
    fn sockets(&self) -> impl Iterator<Item = &Offered> {
        let is_shared = |dtls: &Offered| {
            self.listeners.iter().any(|other| other.kind == Kind::Udp && other.bound == dtls.bound)
        };
        self.listeners.iter().filter(move |one| one.kind != Kind::Dtls || !is_shared(one))
    }
}

impl Relay {
    /// What a new process is told, all listening sockets with the other ends of the ways to its workers, and our ends, one for each
    /// worker.
    ///
    /// # Errors
    /// A worker that is stuck or gone; no more descriptors.
    pub fn offer(&self) -> io::Result<(Offer, Vec<OwnedFd>, Vec<Channel>)> {
        let (mut descriptors, mut heirs) = (Vec::new(), Vec::new());
        for sockets in self.ask(STEP, "lend its sockets", Step::Lend)? {
            let (here, there) = Channel::pair()?;
            descriptors.extend(sockets?);
            descriptors.push(there.into());
            heirs.push(here);
        }
        let in_force = self.in_force.lock().unwrap_or_else(PoisonError::into_inner);
        let offer = Offer {
            workers: heirs.len(),
            kernel: self.kernel.is_some(),
            datapath: self.datapath.to_string(),
            nonce_key: in_force.server.nonce_key,
            listeners: offered(&in_force.layout, &self.listeners),
            numbers: numbers(&in_force.layout),
        };
        Ok((offer, descriptors, heirs))
    }

    /// Has the workers rest, behind all that they have read; before that, has the kernel relay nothing any more. What comes from now on
    /// waits in its socket. [`Relay::thaw`] is due whatever comes of it.
    ///
    /// # Errors
    /// A worker that is stuck or gone.
    pub fn freeze(&self) -> io::Result<()> {
        self.ask(SUSPEND, "take its flows out of the kernel", Step::Suspend)?;
        self.ask(STEP, "come to rest", Step::Freeze)?;
        for _ in 0..ROUNDS {
            let taken: Vec<usize> = self.ask(STEP, "settle", Step::Settle)?;
            if taken.iter().all(|taken| *taken == 0) {
                return Ok(());
            }
        }
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the workers do not settle what they hand to one another",
        ))
    }

    /// Gives what the frozen workers have to those at the other ends of these ways, each within so long; how many sessions.
    ///
    /// # Errors
    /// A worker that is stuck or gone; what the other process does not take.
    pub fn hand_over(&self, heirs: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        for heir in &heirs {
            heir.set_patience(patience)?;
        }
        let mut heirs = heirs.into_iter();
        let give = |answer| match heirs.next() {
            Some(heir) => Step::Give(heir, answer),
            // Dropped: no answer.
            None => Step::Thaw,
        };
        self.ask(patience + STEP, "give its sessions", give)?.into_iter().sum()
    }

    /// There is no upgrade: all goes on as before.
    pub fn thaw(&self) {
        self.tell(|| Step::Thaw);
    }

    /// The new process serves. What it has is forgotten here, and what is left lives on: [`Relay::left`].
    pub fn release(&self) {
        self.tell(|| Step::Release);
        if let Some(kernel) = &self.kernel {
            kernel.detach();
        }
    }

    /// Allocations that exist, and connections and associations beside them: at most 100 ms old.
    pub fn left(&self) -> (u64, u64) {
        self.snapshots().iter().fold((0, 0), |(allocations, connections), worker| {
            let connected = worker.streams.open + worker.dtls.open + worker.dtls.half_open;
            (allocations + worker.allocations, connections + connected)
        })
    }

    /// Of an heir: waits until all workers have taken in what they were given; how many sessions.
    ///
    /// # Errors
    /// [`Unfit`].
    pub fn inherited(&self) -> Result<usize, Unfit> {
        let heirs = self.heirs.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(heirs) = heirs else { return Ok(0) };
        let mut sessions = 0;
        for _ in 0..self.workers.count() {
            sessions += heirs.recv().unwrap_or(Err(Unfit::Worker))?;
        }
        Ok(sessions)
    }

    /// Of an heir: from now on it reads what comes.
    pub fn serve(&self) {
        self.tell(|| Step::Serve);
    }

    /// Of an heir: the old process has taken its program from the interfaces, and this one's goes there.
    ///
    /// # Errors
    /// [`OffloadError`]; user space relays on.
    pub fn attach_kernel(&self) -> Result<(), OffloadError> {
        if let Some(kernel) = &self.kernel {
            kernel.attach()?;
            self.tell(|| Step::Resume);
        }
        Ok(())
    }

    fn tell(&self, step: impl Fn() -> Step) {
        self.workers.senders().for_each(|worker| worker.tell(Command::Upgrade(step())));
    }

    fn ask<T>(
        &self,
        patience: Duration,
        what: &str,
        mut step: impl FnMut(mpsc::Sender<T>) -> Step,
    ) -> io::Result<Vec<T>> {
        self.workers.ask(patience, what, |answer| Command::Upgrade(step(answer)))
    }
}

impl Inheritance {
    /// What a process was offered, and what came with it.
    #[must_use]
    pub fn new(offer: Offer, descriptors: Vec<OwnedFd>) -> Self {
        Self { offer, descriptors }
    }

    /// What was offered.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Which of the offered sockets are listeners of this configuration: all have to be.
    pub(crate) fn matched(&self, config: &Config) -> Result<Matched, StartError> {
        let mut matched = Matched::default();
        let StreamConfig { listen: tcp, tls_listen: tls, .. } = &config.streams;
        let wanted = [&config.listen, &config.dtls.listen, tcp, tls];
        let mut places = vec![None; self.offer.listeners.len()];
        for (kind, wanted) in Kind::ALL.into_iter().zip(wanted) {
            for (place, address) in wanted.iter().enumerate() {
                let is_it = |(at, one): &(usize, &Offered)| {
                    places[*at].is_none() && (one.kind, one.configured) == (kind, *address)
                };
                let found = self.offer.listeners.iter().enumerate().find(is_it);
                matched.found[kind as usize].push(found.map(|(_, one)| one.bound));
                if let Some((at, _)) = found {
                    places[at] = Some(place);
                }
            }
        }
        for (one, place) in self.offer.listeners.iter().zip(places) {
            let gone = StartError::ListenerGone { protocol: one.kind.name(), address: one.bound };
            matched.places.push(place.ok_or(gone)?);
        }
        Ok(matched)
    }

    /// The numbers that the offered listeners have here.
    pub(crate) fn numbers(&self, matched: &Matched, config: &Config, layout: &Layout) -> Arc<[ListenerId]> {
        let listeners = || self.offer.listeners.iter().zip(&matched.places);
        let of = |kind| listeners().filter(move |(one, _)| one.kind == kind).map(|(_, place)| *place);
        let first_tls = config.streams.listen.len();
        let streams: Vec<usize> = of(Kind::Tcp).chain(of(Kind::Tls).map(|place| first_tls + place)).collect();
        let (udp, dtls): (Vec<usize>, Vec<usize>) = (of(Kind::Udp).collect(), of(Kind::Dtls).collect());
        let number = |Number { transport, place, server_name }: &Number| {
            let places = match transport {
                Transport::Udp => &udp,
                Transport::Dtls => &dtls,
                Transport::Tcp | Transport::Tls => &streams,
            };
            let place = places.get(*place).copied().unwrap_or(usize::MAX);
            layout.number(*transport, place, server_name.as_deref())
        };
        self.offer.numbers.iter().map(number).collect()
    }

    /// What each worker gets: its sockets, and its end of a channel.
    pub(crate) fn of_workers(self) -> Result<Vec<(Inherited, Channel)>, StartError> {
        let Self { offer, descriptors } = self;
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof));
        let mut of_workers = Vec::with_capacity(offer.workers);
        for _ in 0..offer.workers {
            let mut inherited = Inherited::default();
            for Offered { kind, bound, .. } in offer.sockets() {
                match kind {
                    Kind::Udp | Kind::Dtls => {
                        inherited.udp.push((*bound, UdpSocket::take_over(next()?, 0)?));
                    }
                    Kind::Tcp | Kind::Tls => {
                        inherited.streams.push((*bound, TcpListener::take_over(next()?)?));
                    }
                }
            }
            of_workers.push((inherited, Channel::try_from(next()?)?));
        }
        Ok(of_workers)
    }
}

/// Where the listeners of a configuration are, as far as another process has them.
#[derive(Debug, Default)]
pub(crate) struct Matched {
    /// By kind: of each listener the address that it is bound to, if it is.
    found: [Vec<Option<SocketAddr>>; 4],
    /// Of each offered listener, its place among those of its kind here.
    places: Vec<usize>,
}

impl Matched {
    /// The same configuration with those listeners alone that have to be bound.
    pub(crate) fn missing(&self, config: &Config) -> Config {
        let missing = |kind: Kind, wanted: &[SocketAddr]| -> Vec<SocketAddr> {
            let both = wanted.iter().zip(&self.found[kind as usize]);
            both.filter(|(_, found)| found.is_none()).map(|(address, _)| *address).collect()
        };
        let mut new = config.clone();
        new.listen = missing(Kind::Udp, &config.listen);
        // One that shares the socket of a listener for plain UDP has nothing to bind.
        new.dtls.listen = missing(Kind::Dtls, &config.dtls.listen);
        new.dtls.listen.retain(|address| !config.listen.contains(address));
        new.streams.listen = missing(Kind::Tcp, &config.streams.listen);
        new.streams.tls_listen = missing(Kind::Tls, &config.streams.tls_listen);
        new
    }

    /// All listeners, once those that were missing are `bound`.
    pub(crate) fn completed(self, config: &Config, bound: Listeners) -> Listeners {
        let [udp, dtls, tcp, tls] = self.found;
        let complete = |found: Vec<Option<SocketAddr>>, bound: Vec<SocketAddr>| -> Vec<SocketAddr> {
            let mut bound = bound.into_iter();
            found.into_iter().filter_map(|found| found.or_else(|| bound.next())).collect()
        };
        let udp = complete(udp, bound.udp);
        let shared = |address: &SocketAddr| {
            let place = config.listen.iter().position(|plain| plain == address)?;
            udp.get(place).copied()
        };
        let dtls = dtls.into_iter().zip(&config.dtls.listen);
        let dtls = dtls.map(|(found, address)| found.or_else(|| shared(address))).collect();
        Listeners {
            dtls: complete(dtls, bound.dtls),
            tcp: complete(tcp, bound.tcp),
            tls: complete(tls, bound.tls),
            udp,
        }
    }
}

impl Kind {
    const ALL: [Self; 4] = [Self::Udp, Self::Dtls, Self::Tcp, Self::Tls];

    fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Dtls => "dtls",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
        }
    }
}

fn offered(layout: &Layout, listeners: &Listeners) -> Vec<Offered> {
    let [udp, dtls, streams] =
        [Transport::Udp, Transport::Dtls, Transport::Tcp].map(|transport| layout.configured(transport));
    let (tcp, tls) = streams.split_at(listeners.tcp.len().min(streams.len()));
    let mut offered = Vec::new();
    for (kind, configured, bound) in [
        (Kind::Udp, &udp[..], &listeners.udp),
        (Kind::Dtls, &dtls[..], &listeners.dtls),
        (Kind::Tcp, tcp, &listeners.tcp),
        (Kind::Tls, tls, &listeners.tls),
    ] {
        let both = configured.iter().zip(bound);
        offered.extend(both.map(|(configured, bound)| Offered {
            kind,
            configured: *configured,
            bound: *bound,
        }));
    }
    offered
}

fn numbers(layout: &Layout) -> Vec<Number> {
    let number = |(transport, place, server_name): (Transport, usize, Option<&str>)| Number {
        transport,
        place,
        server_name: server_name.map(str::to_owned),
    };
    layout.numbers().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DtlsConfig;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn config(udp: &[&str], dtls: &[&str], tcp: &[&str], tls: &[&str]) -> Config {
        let all = |addresses: &[&str]| addresses.iter().map(|address| at(address)).collect::<Vec<_>>();
        Config {
            listen: all(udp),
            dtls: DtlsConfig { listen: all(dtls), ..DtlsConfig::default() },
            streams: StreamConfig { listen: all(tcp), tls_listen: all(tls), ..StreamConfig::default() },
            ..Config::default()
        }
    }

    /// As a relay of this configuration makes it, with ports of its own where that says 0.
    fn offer(config: &Config, bound: &Listeners) -> Inheritance {
        let layout = config.layout();
        let offer = Offer {
            workers: 1,
            kernel: false,
            datapath: "gso".to_owned(),
            nonce_key: NonceKey([213; 32]),
            listeners: offered(&layout, bound),
            numbers: numbers(&layout),
        };
        let text = serde_json::to_string(&offer).unwrap();
        Inheritance::new(serde_json::from_str(&text).unwrap(), Vec::new())
    }

    fn bound(udp: &[&str], dtls: &[&str], tcp: &[&str], tls: &[&str]) -> Listeners {
        let Config { listen, dtls, streams, .. } = config(udp, dtls, tcp, tls);
        Listeners { udp: listen, dtls: dtls.listen, tcp: streams.listen, tls: streams.tls_listen }
    }

    #[test]
    fn listeners_in_another_order_are_the_same_and_get_their_numbers() {
        let old =
            config(&["10.0.0.1:0", "10.0.0.2:3478"], &["10.0.0.1:0"], &["10.0.0.1:0"], &["10.0.0.1:443"]);
        let sockets = bound(
            &["10.0.0.1:500", "10.0.0.2:3478"],
            &["10.0.0.1:500"],
            &["10.0.0.1:500"],
            &["10.0.0.1:443"],
        );
        let inheritance = offer(&old, &sockets);
        let new = config(
            &["10.0.0.2:3478", "10.0.0.3:3478", "10.0.0.1:0"],
            &["10.0.0.3:3478", "10.0.0.1:0"],
            &["10.0.0.3:3478", "10.0.0.1:0"],
            &["10.0.0.1:443"],
        );
        let matched = inheritance.matched(&new).unwrap();
        let missing = matched.missing(&new);
        assert_eq!((missing.listen, missing.dtls.listen), (vec![at("10.0.0.3:3478")], vec![]));
        assert_eq!((missing.streams.listen, missing.streams.tls_listen), (vec![at("10.0.0.3:3478")], vec![]));
        let layout = new.layout();
        let numbers = inheritance.numbers(&matched, &new, &layout);
        let names: Vec<_> = old.layout().entries().map(|entry| (entry.transport, entry.address)).collect();
        let here: Vec<_> = layout.entries().map(|entry| (entry.transport, entry.address)).collect();
        assert_eq!(numbers.len(), names.len());
        for (name, number) in names.iter().zip(&*numbers) {
            assert_eq!(here[usize::from(number.0)], *name);
        }
        let all = matched.completed(&new, bound(&["10.0.0.3:3478"], &[], &["10.0.0.3:3478"], &[]));
        let expected = bound(
            &["10.0.0.2:3478", "10.0.0.3:3478", "10.0.0.1:500"],
            &["10.0.0.3:3478", "10.0.0.1:500"],
            &["10.0.0.3:3478", "10.0.0.1:500"],
            &["10.0.0.1:443"],
        );
        assert_eq!(all, expected);
    }

    #[test]
    fn a_listener_that_is_gone_is_named() {
        let old = config(&["10.0.0.1:0"], &[], &["10.0.0.1:0"], &[]);
        let inheritance = offer(&old, &bound(&["10.0.0.1:500"], &[], &["10.0.0.1:501"], &[]));
        let error = inheritance.matched(&config(&["10.0.0.1:0"], &[], &[], &["10.0.0.1:0"])).unwrap_err();
        assert!(error.to_string().contains("tcp 10.0.0.1:501"), "{error}");
    }

    #[test]
    fn what_is_missing_or_of_another_kind_among_the_sockets_is_an_error() {
        let old = config(&["127.0.0.1:0"], &[], &[], &[]);
        let sockets = bound(&["127.0.0.1:500"], &[], &[], &[]);
        let udp = || OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        let channel = || OwnedFd::from(Channel::pair().unwrap().0);
        for descriptors in [vec![], vec![udp()], vec![channel(), udp()], vec![udp(), udp()]] {
            let Inheritance { offer, .. } = offer(&old, &sockets);
            assert!(Inheritance::new(offer, descriptors).of_workers().is_err());
        }
        let Inheritance { offer, .. } = offer(&old, &sockets);
        assert_eq!(offer.datapath(), Some(Datapath::Gso));
        assert!(!format!("{offer:?}").contains("213"), "{offer:?}");
        assert_eq!(Inheritance::new(offer, vec![udp(), channel()]).of_workers().unwrap().len(), 1);
    }
}
