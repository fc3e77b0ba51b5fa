//! Handover of a relay to another process: the old one passes its listening sockets, and the relay sockets and state of clients over UDP, and
//! keeps clients over streams and DTLS until they end.
//!
//! ```text
//!        old process                                          new process
//!  offer ─────────── how it listens, its keys, sockets ──────▶ start_from_handover   checks, makes its workers
//!  pause             datagrams wait in sockets; the kernel relays on
//!  export ────────── worker n: sessions and their sockets ───▶ worker n of it        all are taken in, or none
//!                                                              received, serve       reads from the same sockets
//!  forget            exported sessions are dropped, the kernel's flows too
//!                                                              attach_kernel         its program replaces the old one
//! ```
//!
//! If the new process cannot use the kernel's maps, all flows return to user space before the pause, and to the kernel after
//! `attach_kernel`.
//!
//! Until `forget` the old process keeps everything, and `resume` ends the upgrade. The kernel spreads clients over the very same sockets
//! before and after, so that each stays with the worker of its number.

use std::{io, os::fd::OwnedFd, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use turnpike_net::{Channel, Datapath, worker::Step};
use turnpike_offload::{OffloadError, PassedKernel};
use turnpike_turn::server::NonceKey;

use crate::{
    Layout, Relay, RelayAddress, StartError,
    listening::{Named, OfferedPlaces, Places, Sockets},
    ports::Known,
    worker::Command,
};

/// Time for a worker's step that involves no other worker.
const STEP: Duration = Duration::from_secs(2);
/// Sessions that a worker takes out of the kernel in that time are more than there can be; but it serves meanwhile.
const SUSPEND: Duration = Duration::from_secs(30);
/// Rounds after which what workers hand to one another has come to an end; three are enough for all that there is.
const ROUNDS: usize = 32;

/// Everything that the new process needs to decide whether it can take over. Contains keys.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RelayOffer {
    /// Threads; the new one has as many.
    pub workers: usize,
    /// Whether the kernel relays what it can.
    pub kernel: bool,
    /// Passed part of it; its descriptors are the last.
    #[serde(default, rename = "lent")]
    passed: Option<PassedKernel>,
    /// How datagrams enter and leave, by name: what waits in a socket was coalesced for it.
    datapath: String,
    /// Between processes it has the name that other versions know.
    #[serde(rename = "nonce_key")]
    own_key: NonceKey,
    /// The numbers of all listeners there have been, which clients go on to have.
    layout: Layout,
    /// A listening socket of each worker for each.
    places: OfferedPlaces,
    /// Those that relayed transport addresses are made on now.
    relay: Vec<RelayAddress>,
    known: Known,
}

/// An offer and its descriptors, for [`Relay::start_from_handover`].
#[derive(Debug)]
pub struct RelayHandover {
    offer: RelayOffer,
    /// Of each worker its sockets in the order of the offer's, and then its end of a channel.
    descriptors: Vec<OwnedFd>,
}

/// Reason why sessions cannot be taken over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
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
        "limits.allocations, limits.allocations_per_user, limits.allocations_per_prefix or a realm's own limits have no room for all \
         sessions, {user:?} of realm {realm} for one; raise them to what they were"
    )]
    Quota { realm: String, user: String },
}

impl RelayOffer {
    /// How datagrams enter and leave; `None` for what this version does not have.
    #[must_use]
    pub fn datapath(&self) -> Option<Datapath> {
        self.datapath.parse().ok()
    }

    /// Of [`turnpike_turn::server::ServerConfig::own_key`].
    #[must_use]
    pub fn own_key(&self) -> NonceKey {
        self.own_key
    }

    /// The numbers of listeners, to be followed by those that are configured here.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The relay addresses in force.
    #[must_use]
    pub fn relay(&self) -> &[RelayAddress] {
        &self.relay
    }
}

impl Relay {
    /// What a new process is told, all listening sockets with the other ends of the ways to its workers, and our ends, one for each
    /// worker.
    ///
    /// # Errors
    /// A worker that is stuck or gone; no more descriptors.
    pub fn offer(&self) -> io::Result<(RelayOffer, Vec<OwnedFd>, Vec<Channel>)> {
        let (places, layout, relay, own_key, datapath) = {
            let in_force = self.in_force();
            let config = &in_force.config;
            let (layout, relay) = (in_force.layout.clone(), config.relay.clone());
            (in_force.places.offered(), layout, relay, config.server.own_key, config.datapath.to_string())
        };
        let named: Arc<[Named]> = places.named().collect();
        let sockets = |answer| Command::ExportSockets(Arc::clone(&named), answer);
        let (mut descriptors, channels) = self.workers.offer(sockets)?;
        let passed = self.kernel.as_ref().map(|kernel| kernel.export_fds()).transpose()?;
        let passed = passed.map(|(passed, more)| {
            descriptors.extend(more);
            passed
        });
        let (workers, kernel, known) = (channels.len(), self.kernel.is_some(), self.ports.known());
        let offer = RelayOffer { workers, kernel, passed, datapath, own_key, layout, places, relay, known };
        Ok((offer, descriptors, channels))
    }

    /// Has the workers rest, behind all that they have read; before that, has the kernel relay nothing any more, unless the new process
    /// [`Relay::keeps_flows`]. What comes from now on waits in its socket. [`Relay::resume`] is due whatever comes of it.
    ///
    /// # Errors
    /// A worker that is stuck or gone.
    pub fn pause(&self, successor_keeps_flows: bool) -> io::Result<()> {
        if !successor_keeps_flows {
            self.workers.ask(SUSPEND, "take its flows out of the kernel", Command::SuspendFlows)?;
        }
        self.workers.pause()?;
        for _ in 0..ROUNDS {
            let taken: Vec<usize> = self.workers.ask(STEP, "settle", Command::Settle)?;
            if taken.iter().all(|taken| *taken == 0) {
                return Ok(());
            }
        }
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the workers do not settle what they hand to one another",
        ))
    }

    /// Sends the sessions of paused workers through these channels, each within `patience`; returns how many.
    ///
    /// # Errors
    /// A worker that is stuck or gone; what the other process does not take.
    pub fn export(&self, channels: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        self.workers.export(channels, patience)
    }

    /// The upgrade has failed: resumes normal service.
    pub fn resume(&self) {
        self.workers.tell(|| Step::Resume.into());
    }

    /// The new process serves. What it has is forgotten here when this returns, and what is left lives on: [`Relay::left`].
    pub fn forget(&self) {
        if let Err(error) = self.workers.forget() {
            tracing::warn!("{error}");
        }
        if let Some(kernel) = &self.kernel {
            kernel.hand_on();
        }
    }

    /// In a new process: returns true if it goes on with the flows that the old one has in the kernel.
    #[must_use]
    pub fn keeps_flows(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| kernel.keeps_flows())
    }

    /// Allocations that exist, and connections and associations beside them: at most 100 ms old.
    pub fn left(&self) -> (u64, u64) {
        self.snapshots().iter().fold((0, 0), |(allocations, connections), worker| {
            let connected = worker.streams.open + worker.dtls.open + worker.dtls.half_open;
            (allocations + worker.allocations, connections + connected)
        })
    }

    /// In a new process: waits for the sessions of all workers, and returns their number.
    ///
    /// # Errors
    /// [`Unfit`].
    pub fn received(&self) -> io::Result<usize> {
        self.workers.received()
    }

    /// In a new process: begins to read from the sockets.
    pub fn serve(&self) {
        self.workers.tell(|| Step::Serve.into());
    }

    /// In a new process: the old one has released the kernel's path, and this one's program replaces its program.
    ///
    /// # Errors
    /// [`OffloadError`]; user space relays on.
    pub fn attach_kernel(&self) -> Result<(), OffloadError> {
        if let Some(kernel) = &self.kernel {
            kernel.attach()?;
            self.workers.tell(|| Step::ResumeFlows.into());
        }
        Ok(())
    }
}

impl RelayHandover {
    /// Pairs an offer with its descriptors.
    #[must_use]
    pub fn new(offer: RelayOffer, descriptors: Vec<OwnedFd>) -> Self {
        Self { offer, descriptors }
    }

    /// What was offered.
    #[must_use]
    pub fn offer(&self) -> &RelayOffer {
        &self.offer
    }

    /// Distributes the descriptors among so many workers.
    pub(crate) fn open(self, workers: usize) -> Result<ReceivedRelay, StartError> {
        let Self { offer: RelayOffer { workers: offered, passed, places, known, .. }, descriptors } = self;
        if offered != workers {
            // One more would change which worker a client comes to.
            return Err(StartError::Worker(io::ErrorKind::InvalidInput.into()));
        }
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof));
        let here = places.places(workers);
        let (mut sockets, mut channels) = (Vec::with_capacity(workers), Vec::with_capacity(workers));
        for _ in 0..workers {
            sockets.push(places.sockets(&here, &mut next)?);
            channels.push(Channel::try_from(next()?)?);
        }
        let kernel = passed.map(|passed| (passed, descriptors.collect()));
        Ok(ReceivedRelay { places: here, sockets, channels, known, kernel })
    }
}

/// A complete handover; empty without one.
#[derive(Default)]
pub(crate) struct ReceivedRelay {
    pub(crate) places: Places,
    /// One for each worker.
    pub(crate) sockets: Vec<Sockets>,
    /// The same.
    pub(crate) channels: Vec<Channel>,
    pub(crate) known: Known,
    /// Of the path through the kernel.
    pub(crate) kernel: Option<(PassedKernel, Vec<OwnedFd>)>,
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, UdpSocket};

    use turnpike_turn::server::Transport;

    use super::*;
    use crate::{Config, DtlsConfig, StreamConfig};

    fn config(udp: &[SocketAddr], dtls: &[SocketAddr], tcp: &[SocketAddr], tls: &[SocketAddr]) -> Config {
        Config {
            listen: udp.to_vec(),
            dtls: DtlsConfig { listen: dtls.to_vec(), ..DtlsConfig::default() },
            streams: StreamConfig {
                listen: tcp.to_vec(),
                tls_listen: tls.to_vec(),
                ..StreamConfig::default()
            },
            ..Config::default()
        }
    }

    /// As a relay with one worker makes it whose listeners are these.
    fn offer(layout: &Layout, places: &Places) -> RelayOffer {
        let offer = RelayOffer {
            workers: 1,
            kernel: false,
            passed: None,
            datapath: "gso".to_owned(),
            own_key: NonceKey([213; 32]),
            layout: layout.clone(),
            places: places.offered(),
            relay: Vec::new(),
            known: Known::default(),
        };
        serde_json::from_str(&serde_json::to_string(&offer).unwrap()).unwrap()
    }

    fn udp() -> OwnedFd {
        UdpSocket::bind("127.0.0.1:0").unwrap().into()
    }

    fn tcp() -> OwnedFd {
        TcpListener::bind("127.0.0.1:0").unwrap().into()
    }

    fn channel() -> OwnedFd {
        Channel::pair().unwrap().0.into()
    }

    #[test]
    fn listeners_keep_places_and_numbers_and_what_was_about_to_be_closed_is_so_still() {
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let other: SocketAddr = "127.0.0.2:0".parse().unwrap();
        // Plain UDP and DTLS on one socket; the second UDP listener is taken away by a reload.
        let first = config(&[any, other], &[any], &[any], &[other]);
        let mut layout = first.layout();
        let places =
            Places::default().change(&layout, &first).unwrap_or_else(|error| panic!("{error}")).places;
        let second = config(&[any], &[any], &[any], &[other]);
        layout.follow(&second.listen, &second.dtls.listen, &second.streams);
        let places = places.change(&layout, &second).unwrap_or_else(|error| panic!("{error}")).places;
        let offer = offer(&layout, &places);
        let named: Vec<Named> = offer.places.named().collect();
        let (plain, stream) = (Transport::Udp, Transport::Tcp);
        assert_eq!(named, [(plain, 0), (plain, 1), (stream, 0), (stream, 1)]);
        assert_eq!(*offer.layout(), layout);
        let descriptors = vec![udp(), udp(), tcp(), tcp(), channel()];
        let ReceivedRelay { places: here, sockets, channels, .. } =
            RelayHandover::new(offer, descriptors).open(1).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((sockets.len(), channels.len()), (1, 1));
        assert_eq!(here.listeners(), places.listeners());
        let [of_one] = &sockets[..] else { panic!() };
        assert_eq!((of_one.udp.len(), of_one.dtls.len(), of_one.streams.len()), (2, 1, 2));
        let closing: Vec<Named> = of_one.closing.iter().map(|it| (it.transport, it.place)).collect();
        assert_eq!(closing, [(plain, 1)]);
        // As it is configured, nothing is opened or closed; one that is not there any more is named.
        let same = here.change(&layout, &second).unwrap_or_else(|error| panic!("{error}"));
        assert!(same.opened.is_empty() && same.closing.is_empty());
        let less = config(&[any], &[any], &[any], &[]);
        layout.follow(&less.listen, &less.dtls.listen, &less.streams);
        let gone = here.change(&layout, &less).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(gone.closing, [("tls", places.listeners().tls[0])]);
    }

    #[test]
    fn what_is_missing_or_of_another_kind_among_the_sockets_is_an_error() {
        let config = config(&["127.0.0.1:0".parse().unwrap()], &[], &[], &[]);
        let layout = config.layout();
        let places =
            Places::default().change(&layout, &config).unwrap_or_else(|error| panic!("{error}")).places;
        let offer = || offer(&layout, &places);
        for descriptors in
            [vec![], vec![udp()], vec![channel(), udp()], vec![udp(), udp()], vec![tcp(), channel()]]
        {
            assert!(RelayHandover::new(offer(), descriptors).open(1).is_err());
        }
        assert!(RelayHandover::new(offer(), vec![udp(), channel()]).open(2).is_err(), "another worker");
        assert_eq!(offer().datapath(), Some(Datapath::Gso));
        assert!(!format!("{:?}", offer()).contains("213, 213"));
        assert!(RelayHandover::new(offer(), vec![udp(), channel()]).open(1).is_ok());
    }
}
