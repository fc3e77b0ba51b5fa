//! `load udp`: datagrams to a reflector and back, straight or through a forwarder; or with a profile, to peers of the generator's
//! own and from them.

mod clients;
mod session_setup;

use std::{net::SocketAddr, time::Duration};

use turnpike_measure::Rate;
use turnpike_net::Datapath;

pub(crate) use clients::Clients;
pub(crate) use session_setup::PROBE;

use crate::{
    LoadError,
    payload::HEADER_LEN,
    profile::{self, Ends, Shaped},
    progress::{Interval, Kind},
    run::{self, Asked, Finished, Frame, Outcome, Stop},
    traffic::{
        Carrier as _,
        echo::{self, Plan},
    },
};

type Shared<'a> = run::Shared<'a, Config>;

/// The longest burst: the kernel's UDP_MAX_SEGMENTS in all versions that have it.
pub(crate) const MAX_BURST: usize = 64;
/// The most clients of one run.
pub(crate) const MAX_CLIENTS: usize = 10_000;
/// The longest payload: a UDP datagram less an IPv6 Send indication's header.
pub(crate) const MAX_SIZE: usize = 65_000;

/// Settings of `load udp`. [`Config::default`] holds the documented defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// The reflector, or a forwarder to it. Default 127.0.0.1:3480.
    pub server: SocketAddr,
    /// Flows, each with its own 5-tuple: 1 to 10,000. Default 1.
    pub clients: usize,
    /// Datagrams a second over all flows. Default 1,000.
    pub rate: Rate,
    /// Payload in bytes, 24 to 65,000. Default 120.
    pub size: usize,
    /// Datagrams of one flow back to back, 1 to 64. Default: 1 at a fixed rate, 32 at [`Rate::Max`].
    pub burst: Option<usize>,
    /// At [`Rate::Max`]: datagrams that one flow may have under way. Default: no bound, a flood.
    pub window: Option<u64>,
    /// Measured time. Default 10 s.
    pub duration: Duration,
    /// Traffic before it that is not counted. Default 1 s.
    pub warmup: Duration,
    /// Threads. Default: one per core that this process may use, but no more than flows.
    pub threads: Option<usize>,
    /// Step of the ladder. Default: the best.
    pub datapath: Datapath,
    /// In place of `rate`, `size`, `burst` and `window`: what each flow's client sends, and gets. In one thread. Default none.
    pub profile: Option<Shaped>,
    /// With a profile: where the generator's own peers listen, to which the server is to be a forwarder. Default: the server itself.
    pub peer: Option<SocketAddr>,
    /// Loss in percent above which the outcome says that a limit was exceeded.
    pub max_loss: Option<f64>,
    /// p99 of the round trip in microseconds above which it does.
    pub max_p99: Option<u64>,
    /// How long the first answer of a flow may take. Default 5 s.
    pub setup_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            server: SocketAddr::from(([127, 0, 0, 1], crate::reflect::DEFAULT_PORT)),
            clients: 1,
            rate: Rate::Pps(1_000.0),
            size: 120,
            burst: None,
            window: None,
            duration: Duration::from_secs(10),
            warmup: Duration::from_secs(1),
            threads: None,
            datapath: Datapath::best().0,
            profile: None,
            peer: None,
            max_loss: None,
            max_p99: None,
            setup_timeout: Duration::from_secs(5),
        }
    }
}

impl Config {
    fn plan(&self) -> Plan {
        let Self { clients, rate, size, burst, window, .. } = *self;
        Plan { clients, rate, size, burst: default_burst(burst, rate), window }
    }

    fn frame(&self) -> Frame {
        // A forwarder leads to one address, so that all peers must be there.
        let threads = if self.profile.is_some() { 1 } else { run::threads(self.threads, self.clients) };
        Frame {
            clients: self.clients,
            threads,
            warmup: self.warmup,
            duration: self.duration,
            kind: Kind::Answered,
        }
    }
}

/// Runs a load until its time is over or `stop` is told to stop. `progress` is called about once a second, from the calling
/// thread.
///
/// # Errors
/// When the settings are impossible, nothing comes back from the server, or it is stopped before anything was measured. What is
/// lost afterwards is counted.
pub fn run(config: &Config, stop: &Stop, progress: impl FnMut(&Interval)) -> Result<Outcome, LoadError> {
    let frame = config.frame();
    check(&config.plan(), &frame, config.threads)?;
    if let Some(shaped) = &config.profile {
        shaped.validate(MAX_SIZE)?;
    }
    run::check_files(config.clients)?;
    let asked = Asked {
        size: config.size,
        rate: config.rate,
        datapath: config.datapath.to_string(),
        max_loss: config.max_loss,
        max_p99: config.max_p99,
    };
    let asked = asked.shaped(config.profile.as_ref(), config.clients);
    let mut found = run::run(config, frame, stop, run_thread, progress)?;
    let (interrupted, measured, streams) = (found.interrupted, found.measured, profile::gather(&mut found));
    let mut report = run::report(&frame, &asked, found);
    if let Some(shaped) = &config.profile {
        profile::put(&mut report, shaped, streams, measured);
    } else if report.sent > 0 && report.received == 0 {
        report
            .notes
            .push(format!("nothing came back: is a reflector still running at udp {}?", config.server));
    }
    Ok(run::conclude(report, &asked, interrupted))
}

fn run_thread(shared: &Shared<'_>, thread: usize) -> Result<Finished, LoadError> {
    let config = shared.config;
    let share = shared.share(config.clients, thread);
    let mut clients = Clients::new(config.server, config.datapath, config.clients, share.0, shared.clock)?;
    let finished = match &config.profile {
        None => {
            session_setup::set_up(&mut clients, shared, share, || {})?;
            echo::run(&mut clients, &config.plan(), shared, thread)?
        }
        Some(shaped) => {
            let listen = config.peer.unwrap_or(config.server);
            let mut ends = Ends::new(shaped, share, listen, config.datapath, clients.poller(), shared.clock)?;
            session_setup::set_up(&mut clients, shared, share, || ends.receive_at_peer())?;
            profile::run(&mut clients, ends, shared, thread)?
        }
    };
    Ok(Finished { errors: clients.errors, ..finished })
}

/// Says what is impossible about settings that all datagrams have in common.
pub(crate) fn check(plan: &Plan, frame: &Frame, threads: Option<usize>) -> Result<(), LoadError> {
    let numbers = [
        ("--clients", plan.clients, 1..=MAX_CLIENTS),
        ("--size", plan.size, HEADER_LEN..=MAX_SIZE),
        ("--burst", plan.burst, 1..=MAX_BURST),
    ];
    run::check(&numbers, threads, frame.duration)?;
    if plan.window.is_some_and(|window| window < plan.burst as u64) {
        return Err(LoadError::Config(format!(
            "--window is shorter than a burst ({} datagrams), so that nothing could be sent",
            plan.burst
        )));
    }
    Ok(())
}

/// Datagrams of one client back to back.
pub(crate) fn default_burst(burst: Option<usize>, rate: Rate) -> usize {
    const FLOOD: usize = 32;
    burst.unwrap_or(match rate {
        Rate::Pps(_) => 1,
        Rate::Max => FLOOD,
    })
}
