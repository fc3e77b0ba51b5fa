//! Handover of a forwarder to another process. The old process passes on its listeners, and the sessions of
//! UDP clients with their sockets; it keeps TCP connections until they end.
//!
//! ```text
//!        old process                                          new process
//!  offer ─────────── its rules, their listeners ─────────────▶ start_from_handover   checks, creates its workers
//!  pause             kernel flows stop, datagrams wait in sockets
//!  export ────────── worker n: sessions and their sockets ───▶ worker n              imports all of them, or none
//!                                                              received, serve       reads from the same sockets
//!  forget            exported sessions are dropped
//!                                                              attach_kernel         its program replaces the old one
//! ```
//!
//! Until `forget`, the old process keeps everything, and `resume` cancels the upgrade.

use std::{
    io,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use turnpike_net::{Datapath, SocketFile};
use turnpike_offload::{OffloadError, PassedKernel};
use turnpike_worker::{Channel, HandoverStep};

use crate::{Bind, Forwarder, Protocol, Rule, StartError, kernel::Before, worker::Command};

/// Data that the new process needs to decide whether it can take over.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ForwarderOffer {
    /// Number of threads; the new process uses the same number.
    pub workers: usize,
    /// Name of the data path, which determines how queued datagrams were coalesced.
    datapath: String,
    /// Time since the start of the clock to which the times of sessions refer.
    age_ms: u64,
    rules: Vec<OfferedRule>,
    /// Part of the kernel path that is handed over; its descriptors come last.
    #[serde(default, rename = "lent")]
    passed: Option<PassedKernel>,
}

/// A rule with its addresses; each worker has a listener for each of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct OfferedRule {
    name: String,
    protocol: Protocol,
    /// Addresses as configured; a port may be 0.
    addresses: Vec<String>,
}

/// Offer and its descriptors, for [`Forwarder::start_from_handover`].
#[derive(Debug)]
pub struct ForwarderHandover {
    offer: ForwarderOffer,
    /// Per worker: its listeners, rule by rule, and its end of a channel.
    descriptors: Vec<OwnedFd>,
}

#[derive(Default)]
pub(crate) struct Matched {
    /// For each offered rule, the index of our rule.
    places: Vec<usize>,
    /// Listeners for each offered rule and worker, until they are taken.
    listeners: Vec<Vec<Vec<OwnedFd>>>,
    channels: Vec<Channel>,
    kernel: Before,
}

impl ForwarderOffer {
    /// Data path; `None` if this version does not have it.
    #[must_use]
    pub fn datapath(&self) -> Option<Datapath> {
        self.datapath.parse().ok()
    }

    pub(crate) fn began(&self) -> Instant {
        let now = Instant::now();
        now.checked_sub(Duration::from_millis(self.age_ms)).unwrap_or(now)
    }
}

impl OfferedRule {
    fn of(rule: &Rule) -> Self {
        let addresses = match &rule.bind {
            Bind::Unix(_) => vec![rule.bind.to_string()],
            Bind::Ip(_) => {
                (rule.ports.first..=rule.ports.last).map(|port| format!("{}:{port}", rule.bind)).collect()
            }
            Bind::Name(_) => Vec::new(),
        };
        Self { name: rule.id.0.clone(), protocol: rule.protocol, addresses }
    }

    /// True if protocol and addresses are equal; names may differ.
    fn is_like(&self, other: &Self) -> bool {
        (self.protocol, &self.addresses) == (other.protocol, &other.addresses)
    }
}

impl ForwarderHandover {
    #[must_use]
    pub fn new(offer: ForwarderOffer, descriptors: Vec<OwnedFd>) -> Self {
        Self { offer, descriptors }
    }

    pub(crate) fn began(&self) -> Instant {
        self.offer.began()
    }

    /// Finds each offered rule among `rules`; if one is missing, the error names it.
    pub(crate) fn matched(self, rules: &[Rule]) -> Result<Matched, StartError> {
        let Self { offer, descriptors } = self;
        let ours: Vec<OfferedRule> = rules.iter().map(OfferedRule::of).collect();
        let mut places: Vec<usize> = Vec::with_capacity(offer.rules.len());
        for offered in &offer.rules {
            let is_it = |(at, rule): &(usize, &OfferedRule)| !places.contains(at) && rule.is_like(offered);
            let found = ours.iter().enumerate().find(is_it).map(|(at, _)| at);
            let gone = || StartError::RuleGone {
                rule: offered.name.clone(),
                addresses: offered.addresses.first().cloned().unwrap_or_default(),
            };
            places.push(found.ok_or_else(gone)?);
        }
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof));
        let mut listeners: Vec<Vec<Vec<OwnedFd>>> = offer.rules.iter().map(|_| Vec::new()).collect();
        let mut channels = Vec::with_capacity(offer.workers);
        for _ in 0..offer.workers {
            for (rule, listeners) in offer.rules.iter().zip(&mut listeners) {
                listeners.push(rule.addresses.iter().map(|_| next()).collect::<io::Result<_>>()?);
            }
            channels.push(Channel::try_from(next()?)?);
        }
        let kernel = offer.passed.map(|passed| (passed, descriptors.collect()));
        Ok(Matched { places, listeners, channels, kernel })
    }
}

impl Matched {
    /// Listeners of each worker for our rule with index `place`.
    pub(crate) fn listeners(&mut self, place: usize) -> Option<Vec<Vec<OwnedFd>>> {
        let at = self.places.iter().position(|other| *other == place)?;
        Some(std::mem::take(&mut self.listeners[at]))
    }

    /// Key of each offered rule, from the keys of our rules; `None` if one of our rules could not be bound.
    pub(crate) fn keys(&self, keys: &[Option<u32>]) -> Option<Arc<[u32]>> {
        self.places.iter().map(|place| keys.get(*place).copied().flatten()).collect()
    }

    pub(crate) fn take_kernel(&mut self) -> Before {
        self.kernel.take()
    }

    pub(crate) fn into_channels(self) -> Vec<Channel> {
        self.channels
    }
}

impl Forwarder {
    /// Returns the offer, its descriptors (the listeners and the new process's ends of the workers'
    /// channels), and our ends of the channels. Fails if a worker is stuck or has ended, or if descriptors
    /// run out.
    pub fn offer(&self) -> io::Result<(ForwarderOffer, Vec<OwnedFd>, Vec<Channel>)> {
        let keys: Arc<[u32]> = self.rules().active.iter().map(|active| active.state.key).collect();
        let sockets = |answer| Command::ExportSockets(Arc::clone(&keys), answer);
        let (mut descriptors, channels) = self.workers.offer(sockets)?;
        let passed = self.kernel().map(|kernel| kernel.export_fds()).transpose()?;
        let passed = passed.map(|(passed, more)| {
            descriptors.extend(more);
            passed
        });
        let offer = ForwarderOffer {
            workers: channels.len(),
            passed,
            datapath: self.datapath.to_string(),
            age_ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            rules: self.rules().active.iter().map(|active| OfferedRule::of(&active.state.rule)).collect(),
        };
        Ok((offer, descriptors, channels))
    }

    /// Pauses the workers after they have sent all received data; new data waits in the sockets. Call
    /// [`Forwarder::resume`] afterwards even on error.
    pub fn pause(&self) -> io::Result<()> {
        self.workers.pause()
    }

    /// Sends the sessions of paused workers through these channels, each within `patience`; returns their
    /// number.
    pub fn export(&self, channels: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        self.workers.export(channels, patience)
    }

    /// Resumes normal service after a failed upgrade.
    pub fn resume(&self) {
        self.workers.tell(|| HandoverStep::Resume.into());
    }

    /// Drops the exported sessions once the new process serves clients. Other connections continue
    /// ([`Forwarder::active`]).
    pub fn forget(&self) {
        let mut rules = self.rules();
        rules.waiting.clear();
        for active in &mut rules.active {
            if let Some(file) = active.file.take() {
                file.leave();
            }
        }
        drop(rules);
        if let Err(error) = self.workers.forget() {
            tracing::warn!("{error}");
        }
        if let Some(kernel) = self.kernel() {
            kernel.hand_on();
        }
    }

    /// New process: attaches its eBPF program in place of the old one. On error, user space continues to
    /// forward.
    pub fn attach_kernel(&self) -> Result<(), OffloadError> {
        if let Some(kernel) = self.kernel() {
            kernel.attach()?;
            self.workers.tell(|| HandoverStep::ResumeFlows.into());
        }
        Ok(())
    }

    /// New process: waits for the sessions of all workers and returns their number.
    pub fn received(&self) -> io::Result<usize> {
        self.workers.received()
    }

    /// New process: starts accepting connections and reading sockets.
    pub fn serve(&self) {
        for active in self.rules().active.iter_mut().filter(|active| active.file.is_none()) {
            let Bind::Unix(name) = &active.state.rule.bind else { continue };
            match name.address().and_then(|at| SocketFile::take_over(&at)) {
                Ok(file) => active.file = Some(file),
                Err(error) => tracing::warn!(rule = active.state.rule.id.0, %error, "socket file is missing"),
            }
        }
        self.workers.tell(|| HandoverStep::Serve.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(id: &str, protocol: Protocol, first: u16, last: u16) -> Rule {
        let target = std::net::SocketAddr::from(([127, 0, 0, 1], 9));
        let mut rule = Rule::new(id, ([127, 0, 0, 1], first).into(), target.into());
        (rule.protocol, rule.ports.last) = (protocol, last);
        rule
    }

    fn offer(rules: &[Rule], workers: usize) -> ForwarderOffer {
        let rules = rules.iter().map(OfferedRule::of).collect();
        let offer = ForwarderOffer { workers, datapath: "gso".to_owned(), age_ms: 5000, rules, passed: None };
        serde_json::from_str(&serde_json::to_string(&offer).unwrap()).unwrap()
    }

    fn socket() -> OwnedFd {
        std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into()
    }

    fn channel() -> OwnedFd {
        Channel::pair().unwrap().0.into()
    }

    #[test]
    fn rules_match_by_listeners_and_not_by_name_or_order() {
        let old = [rule("a", Protocol::Udp, 0, 0), rule("b", Protocol::Tcp, 80, 81)];
        let new = [
            rule("c", Protocol::Tcp, 90, 91),
            rule("d", Protocol::Tcp, 80, 81),
            rule("e", Protocol::Udp, 0, 0),
        ];
        let descriptors =
            vec![socket(), socket(), socket(), channel(), socket(), socket(), socket(), channel()];
        let mut matched = ForwarderHandover::new(offer(&old, 2), descriptors).matched(&new).unwrap();
        assert_eq!(matched.places, [2, 1]);
        let count = |listeners: Option<Vec<Vec<OwnedFd>>>| {
            listeners.map(|of_workers| of_workers.iter().map(Vec::len).collect::<Vec<_>>())
        };
        assert_eq!(count(matched.listeners(0)), None);
        assert_eq!(count(matched.listeners(1)), Some(vec![2, 2]));
        assert_eq!(count(matched.listeners(2)), Some(vec![1, 1]));
        assert_eq!(matched.keys(&[Some(7), Some(8), Some(9)]).as_deref(), Some(&[9, 8][..]));
        assert_eq!(matched.keys(&[Some(7), Some(8), None]), None);
        assert_eq!(matched.into_channels().len(), 2);
    }

    #[test]
    fn removed_or_changed_rule_is_named_in_the_error() {
        for new in [
            vec![],
            vec![rule("a", Protocol::Tcp, 80, 80)],
            vec![rule("a", Protocol::Udp, 80, 81)],
            vec![rule("a", Protocol::Udp, 81, 81)],
            vec![rule("a", Protocol::UdpToTcp { framed: true }, 80, 80)],
        ] {
            let handover = ForwarderHandover::new(
                offer(&[rule("a", Protocol::Udp, 80, 80)], 1),
                vec![socket(), channel()],
            );
            let Err(error) = handover.matched(&new) else { panic!("{new:?} counts as the same rule") };
            let text = error.to_string();
            assert!(text.contains("rule a ") && text.contains("127.0.0.1:80"), "{text}");
        }
    }

    #[test]
    fn missing_descriptors_are_an_error() {
        let rules = [rule("a", Protocol::Udp, 80, 80)];
        for descriptors in [vec![], vec![socket()], vec![channel(), socket()]] {
            assert!(ForwarderHandover::new(offer(&rules, 1), descriptors).matched(&rules).is_err());
        }
        let offer = offer(&rules, 1);
        assert_eq!(offer.datapath(), Some(Datapath::Gso));
        assert!(ForwarderHandover::new(offer, vec![socket(), channel()]).matched(&rules).is_ok());
    }
}
