//! `load udp`: datagrams to a reflector and back, straight or through a forwarder.
//!
//! The traffic of [`crate::turn`] without TURN: the same payload, pacing, and accounting, so that a forwarder's figures
//! and a relay's can be held against each other.

use std::{net::SocketAddr, time::Duration};

use turnpike_measure::Rate;
use turnpike_net::Datapath;

use crate::{
    LoadError,
    progress::Interval,
    run::{Outcome, Stop},
    turn,
};

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
    /// Loss in percent above which the outcome says that a limit was exceeded.
    pub max_loss: Option<f64>,
    /// p99 of the round trip in microseconds above which it does.
    pub max_p99: Option<u64>,
    /// How long the first answer of a flow may take. Default 5 s.
    pub setup_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        let turn = turn::Config::default();
        Self {
            server: turn.peer,
            clients: turn.clients,
            rate: turn.rate,
            size: turn.size,
            burst: turn.burst,
            window: turn.window,
            duration: turn.duration,
            warmup: turn.warmup,
            threads: turn.threads,
            datapath: turn.datapath,
            max_loss: None,
            max_p99: None,
            setup_timeout: Duration::from_secs(5),
        }
    }
}

/// Runs a load until its time is over or `stop` is told to stop. `progress` is called about once a second, from the calling thread.
///
/// # Errors
/// When the settings are impossible, nothing comes back from the server, or it is stopped before anything was measured. What is lost afterwards is counted.
pub fn run(config: &Config, stop: &Stop, progress: impl FnMut(&Interval)) -> Result<Outcome, LoadError> {
    let config = turn::Config {
        server: config.server,
        peer: config.server,
        via: turn::Via::Direct,
        mode: turn::Mode::Packet,
        clients: config.clients,
        rate: config.rate,
        size: config.size,
        burst: config.burst,
        window: config.window,
        duration: config.duration,
        warmup: config.warmup,
        threads: config.threads,
        datapath: config.datapath,
        max_loss: config.max_loss,
        max_p99: config.max_p99,
        setup_timeout: config.setup_timeout,
        ..turn::Config::default()
    };
    turn::run(&config, stop, progress)
}
