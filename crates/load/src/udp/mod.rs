//! `load udp`: datagrams to a reflector and back, directly or through a forwarder; with a profile, to and
//! from peers inside the generator.

mod clients;
mod session_setup;

use std::{net::SocketAddr, time::Duration};

use clap::Args;
use turnpike_measure::OfferedRate;
use turnpike_net::Datapath;
use turnpike_wire::address::socket_address;

pub(crate) use clients::UdpClients;
pub(crate) use session_setup::PROBE;

use crate::{
    LoadError,
    options::{self, BurstOptions, ResultLimits, RunOptions},
    payload::HEADER_LEN,
    profile::{self, ProfileEnds, ProfileOptions},
    progress::{CountKind, ProgressInterval},
    run::{self, RequestedLoad, RunFrame, RunOutcome, StopHandle, ThreadResult},
    traffic::{
        Carrier as _,
        echo::{self, EchoPlan},
    },
};

type UdpShared<'a> = run::RunShared<'a, UdpLoadConfig>;

/// Maximum datagrams per burst: the limit of the first kernels with UDP GSO (UDP_MAX_SEGMENTS).
pub(crate) const MAX_BURST: usize = 64;
pub(crate) const MAX_CLIENTS: usize = 10_000;
/// Maximum payload: a UDP datagram minus the header of an IPv6 Send indication.
pub(crate) const MAX_SIZE: usize = 65_000;

/// Settings and flags of `load udp`; see [`UdpLoadConfig::new`] for the defaults.
#[derive(Clone, Debug, Args)]
pub struct UdpLoadConfig {
    /// A `turnpike reflect`, or a forwarder to one: HOST[:PORT], default port 3480
    #[arg(value_name = "HOST:PORT", value_parser = options::reflector)]
    pub server: SocketAddr,

    #[command(flatten)]
    pub run: RunOptions,

    /// Flows, each from its own port, 1 to 10000
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub clients: usize,

    /// Datagrams per second across all flows, open loop, such as 20000, 20k or 1.5M; "max" for as many as
    /// possible
    #[arg(long, value_name = "PPS|max", default_value = "1000")]
    pub rate: OfferedRate,

    /// Payload bytes per datagram, 24 to 65000
    #[arg(long, value_name = "B", default_value_t = 120)]
    pub size: usize,

    #[command(flatten)]
    pub bursts: BurstOptions,

    /// Traffic profile of each client; limits the run to one thread.
    #[command(flatten)]
    pub profile: Option<ProfileOptions>,

    /// With --profile: listen address of the peers inside the generator, an address of this machine that is
    /// the forwarder's target [default: SERVER itself, without a forwarder]
    #[arg(long, value_name = "ADDR:PORT", requires = "profile", value_parser = socket_address)]
    pub peer: Option<SocketAddr>,

    /// Data path: auto, basic, mmsg or gso
    #[arg(long, value_name = "D", default_value = "auto")]
    pub datapath: Datapath,

    #[command(flatten)]
    pub limits: ResultLimits,

    /// Timeout for the first reply to a flow: 5 s.
    #[arg(skip = Duration::from_secs(5))]
    pub setup_timeout: Duration,
}

impl UdpLoadConfig {
    pub fn new(server: SocketAddr) -> Self {
        options::defaults(server)
    }

    fn plan(&self) -> EchoPlan {
        self.bursts.plan(self.clients, self.rate, self.size)
    }

    fn frame(&self) -> RunFrame {
        let frame = RunFrame::new(&self.run, self.clients, CountKind::Answered);
        // All peers must share one address, because a forwarder has only one target address.
        if self.profile.is_some() { RunFrame { threads: 1, ..frame } } else { frame }
    }
}

/// Runs the load and calls `progress` about once a second. Losses after the setup are counted in the report.
pub fn run(
    config: &UdpLoadConfig,
    stop: &StopHandle,
    progress: impl FnMut(&ProgressInterval),
) -> Result<RunOutcome, LoadError> {
    let frame = config.frame();
    check(&config.plan(), &frame, config.run.threads)?;
    if let Some(shaped) = &config.profile {
        shaped.validate(MAX_SIZE)?;
    }
    run::check_files(config.clients)?;
    let asked = RequestedLoad {
        size: config.size,
        rate: config.rate,
        datapath: config.datapath.to_string(),
        limits: config.limits,
    };
    let asked = asked.with_profile(config.profile.as_ref(), config.clients);
    let mut found = run::run(config, frame, stop, run_thread, progress)?;
    let (interrupted, measured, streams) = (found.interrupted, found.measured, profile::gather(&mut found));
    let mut report = run::report(&frame, &asked, found);
    if let Some(shaped) = &config.profile {
        profile::put(&mut report, shaped, streams, measured);
    } else if report.sent > 0 && report.received == 0 {
        report.notes.push(format!(
            "no replies arrived: check that a reflector is still running at udp {}",
            config.server
        ));
    }
    Ok(run::conclude(report, &asked, interrupted))
}

fn run_thread(shared: &UdpShared<'_>, thread: usize) -> Result<ThreadResult, LoadError> {
    let config = shared.config;
    let share = shared.share(config.clients, thread);
    let mut clients = UdpClients::new(config.server, config.datapath, config.clients, share.0, shared.clock)?;
    let finished = match &config.profile {
        None => {
            session_setup::set_up(&mut clients, shared, share, || {})?;
            echo::run(&mut clients, &config.plan(), shared, thread)?
        }
        Some(shaped) => {
            let listen = config.peer.unwrap_or(config.server);
            let mut ends =
                ProfileEnds::new(shaped, share, listen, config.datapath, clients.poller(), shared.clock)?;
            session_setup::set_up(&mut clients, shared, share, || ends.receive_at_peer())?;
            profile::run(&mut clients, ends, shared, thread)?
        }
    };
    Ok(ThreadResult { errors: clients.errors, ..finished })
}

pub(crate) fn check(plan: &EchoPlan, frame: &RunFrame, threads: Option<usize>) -> Result<(), LoadError> {
    let numbers = [
        ("--clients", plan.clients, 1..=MAX_CLIENTS),
        ("--size", plan.size, HEADER_LEN..=MAX_SIZE),
        ("--burst", plan.burst, 1..=MAX_BURST),
    ];
    run::check(&numbers, threads, frame.duration)?;
    if plan.window.is_some_and(|window| window < plan.burst as u64) {
        return Err(LoadError::Config(format!(
            "--window is smaller than a burst ({} datagrams), so nothing could be sent",
            plan.burst
        )));
    }
    Ok(())
}
