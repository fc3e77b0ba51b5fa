//! Handover of a relay to another process. The old process passes on its listening sockets, and the relay
//! sockets and state of UDP clients; it keeps stream and DTLS clients until they leave.
//!
//! ```text
//!        old process                                          new process
//!  offer ─────────── listeners, keys, sockets ───────────────▶ start_from_handover   checks, creates its workers
//!  pause             datagrams wait in sockets; the kernel keeps relaying
//!  export ────────── worker n: allocations and their sockets ───▶ worker n              imports all or none
//!                                                              received, serve       reads from the same sockets
//!  forget            exported allocations are dropped, the kernel's flows too
//!                                                              attach_kernel         its program replaces the old one
//! ```
//!
//! If the new process cannot use the kernel's maps, all flows return to user space before the pause and to
//! the kernel after `attach_kernel`.
//!
//! The old process keeps everything until `forget`, and `resume` cancels the upgrade. Both processes use the
//! same sockets, so the kernel assigns each client to the worker with the same number before and after.

use std::{io, os::fd::OwnedFd, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use turnpike_net::Datapath;
use turnpike_offload::{OffloadError, PassedKernel};
use turnpike_turn::server::NonceKey;
use turnpike_worker::{Channel, HandoverStep};

use crate::{
    Layout, Relay, RelayAddress, StartError,
    listening::{ListenerPlaces, ListenerSockets, Named, OfferedPlaces},
    ports::UsablePorts,
    worker::Command,
};

const STEP: Duration = Duration::from_secs(2);
/// Timeout for returning all flows to user space; generous, because workers keep serving clients in the
/// meantime.
const SUSPEND: Duration = Duration::from_secs(30);
/// Maximum number of rounds until no handoffs between workers are in flight; normally three are enough.
const ROUNDS: usize = 32;

/// Data that the new process needs to decide whether it can take over. Contains keys.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RelayOffer {
    pub workers: usize,
    pub kernel: bool,
    /// Kernel state; its descriptors come last.
    #[serde(default, rename = "lent")]
    passed: Option<PassedKernel>,
    /// Name of the data path, which determines how datagrams that wait in sockets are coalesced.
    datapath: String,
    /// Other versions use this name for the field.
    #[serde(rename = "nonce_key")]
    own_key: NonceKey,
    layout: Layout,
    /// Each place has a listening socket per worker.
    places: OfferedPlaces,
    relay: Vec<RelayAddress>,
    known: UsablePorts,
}

#[derive(Debug)]
pub struct RelayHandover {
    offer: RelayOffer,
    /// For each worker, its sockets in the order of the offer, then its end of a channel.
    descriptors: Vec<OwnedFd>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unfit {
    #[error("the old process sent incomplete data: its version differs too much; restart instead")]
    Incomplete,
    #[error("cannot take over the allocations: {0}")]
    Failed(#[from] io::Error),
    #[error(
        "realm {realm} has allocations but is no longer configured; reload the old process first (SIGHUP), which ends them"
    )]
    Realm { realm: String },
    #[error(
        "limits.allocations, limits.allocations_per_user, limits.allocations_per_prefix or a limit of a realm is too low for the \
         existing allocations, for example of {user:?} in realm {realm}; restore the previous limits"
    )]
    Quota { realm: String, user: String },
}

impl RelayOffer {
    /// True if the kernel relayed only flows that held leases: [`crate::Config::kernel_leases`].
    pub fn has_leases(&self) -> bool {
        self.passed.as_ref().is_some_and(PassedKernel::has_leases)
    }

    #[must_use]
    pub fn datapath(&self) -> Option<Datapath> {
        self.datapath.parse().ok()
    }

    #[must_use]
    pub fn own_key(&self) -> NonceKey {
        self.own_key
    }

    /// Listener numbers; the caller adds those for its own configuration.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    #[must_use]
    pub fn relay(&self) -> &[RelayAddress] {
        &self.relay
    }
}

impl Relay {
    /// Returns the offer, its descriptors (listening sockets and the new process's ends of the channels), and
    /// our end of each worker's channel. Fails if a worker hangs or has ended, or if descriptors have run
    /// out.
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

    /// Pauses the workers once they have handled everything that they have read; later datagrams wait in
    /// their sockets. If the new process does not keep the flows ([`Relay::keeps_flows`]), the kernel stops
    /// relaying first. Call [`Relay::resume`] if anything fails. Fails if a worker hangs or has ended.
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
            "the workers did not finish their handoffs to each other in time: try again",
        ))
    }

    /// Sends the allocations of paused workers through these channels, each within `patience`; returns their
    /// number. Fails if a worker hangs or has ended, or if the other process rejects them.
    pub fn export(&self, channels: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        self.workers.export(channels, patience)
    }

    pub fn resume(&self) {
        self.workers.tell(|| HandoverStep::Resume.into());
    }

    /// Completes the upgrade in the old process: drops exported allocations and keeps the others
    /// ([`Relay::left`]).
    pub fn forget(&self) {
        if let Err(error) = self.workers.forget() {
            tracing::warn!("{error}");
        }
        if let Some(kernel) = &self.kernel {
            kernel.hand_on();
        }
    }

    /// New process: returns true if it will keep using the flows that the old process has installed in the
    /// kernel.
    #[must_use]
    pub fn keeps_flows(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| kernel.keeps_flows())
    }

    /// Numbers of remaining allocations, and of remaining connections and associations; at most 100 ms old.
    pub fn left(&self) -> (u64, u64) {
        self.snapshots().iter().fold((0, 0), |(allocations, connections), worker| {
            let connected =
                worker.streams.open + worker.dtls.open + worker.dtls.half_open + worker.handed_on.open;
            (allocations + worker.allocations, connections + connected)
        })
    }

    /// New process: waits for the allocations of all workers and returns their number, or fails with [`Unfit`].
    pub fn received(&self) -> io::Result<usize> {
        self.workers.received()
    }

    pub fn serve(&self) {
        self.workers.tell(|| HandoverStep::Serve.into());
    }

    /// New process: replaces the old process's eBPF program, which must have been released. On error, user
    /// space keeps relaying.
    pub fn attach_kernel(&self) -> Result<(), OffloadError> {
        if let Some(kernel) = &self.kernel {
            kernel.attach()?;
            self.workers.tell(|| HandoverStep::ResumeFlows.into());
        }
        Ok(())
    }
}

impl RelayHandover {
    #[must_use]
    pub fn new(offer: RelayOffer, descriptors: Vec<OwnedFd>) -> Self {
        Self { offer, descriptors }
    }

    #[must_use]
    pub fn offer(&self) -> &RelayOffer {
        &self.offer
    }

    pub(crate) fn open(self, workers: usize) -> Result<ReceivedRelay, StartError> {
        let Self { offer: RelayOffer { workers: offered, passed, places, known, .. }, descriptors } = self;
        if offered != workers {
            // An additional worker would change the assignment of clients to workers.
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

#[derive(Default)]
pub(crate) struct ReceivedRelay {
    pub(crate) places: ListenerPlaces,
    pub(crate) sockets: Vec<ListenerSockets>,
    pub(crate) channels: Vec<Channel>,
    pub(crate) known: UsablePorts,
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

    fn offer(layout: &Layout, places: &ListenerPlaces) -> RelayOffer {
        let offer = RelayOffer {
            workers: 1,
            kernel: false,
            passed: None,
            datapath: "gso".to_owned(),
            own_key: NonceKey([213; 32]),
            layout: layout.clone(),
            places: places.offered(),
            relay: Vec::new(),
            known: UsablePorts::default(),
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
    fn listeners_keep_places_and_numbers_even_while_closing() {
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let other: SocketAddr = "127.0.0.2:0".parse().unwrap();
        // Plain UDP and DTLS on one socket; a reload removes the second UDP listener.
        let first = config(&[any, other], &[any], &[any], &[other]);
        let mut layout = first.layout();
        let places = ListenerPlaces::default()
            .change(&layout, &first)
            .unwrap_or_else(|error| panic!("{error}"))
            .places;
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
        // An unchanged configuration opens and closes nothing; a removed listener is reported.
        let same = here.change(&layout, &second).unwrap_or_else(|error| panic!("{error}"));
        assert!(same.opened.is_empty() && same.closing.is_empty());
        let less = config(&[any], &[any], &[any], &[]);
        layout.follow(&less.listen, &less.dtls.listen, &less.streams);
        let gone = here.change(&layout, &less).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(gone.closing, [("tls", places.listeners().tls[0])]);
    }

    #[test]
    fn missing_or_wrong_sockets_are_an_error() {
        let config = config(&["127.0.0.1:0".parse().unwrap()], &[], &[], &[]);
        let layout = config.layout();
        let places = ListenerPlaces::default()
            .change(&layout, &config)
            .unwrap_or_else(|error| panic!("{error}"))
            .places;
        let offer = || offer(&layout, &places);
        for descriptors in
            [vec![], vec![udp()], vec![channel(), udp()], vec![udp(), udp()], vec![tcp(), channel()]]
        {
            assert!(RelayHandover::new(offer(), descriptors).open(1).is_err());
        }
        assert!(
            RelayHandover::new(offer(), vec![udp(), channel()]).open(2).is_err(),
            "too few descriptors for two workers"
        );
        assert_eq!(offer().datapath(), Some(Datapath::Gso));
        assert!(!format!("{:?}", offer()).contains("213, 213"));
        assert!(RelayHandover::new(offer(), vec![udp(), channel()]).open(1).is_ok());
    }
}
