//! `load turn`: load generator for TURN servers.
//!
//! ```text
//! client sockets ──▶ server ──▶ reflector      client → relay → reflector, and back the same way
//!        ◀──────────────┴───────────┘          (sequence number and due time travel in the payload)
//! ```
//!
//! Each client has its own socket and thus its own 5-tuple; each thread drives a share of the clients and
//! alternates between sending and receiving. Latency is measured from the time a datagram was *due*, so a
//! stalled generator or server cannot hide it (no coordinated omission).

mod allocate;
mod config;
mod engine;
mod invalid;
mod migrate;
mod moves;
mod reconnect;
mod reconnects;
mod redirect;
mod redirect_history;
mod set_up;
mod token;

pub use config::{DataVia, Mode, TurnLoadConfig};
pub use token::PrintedToken;

pub use crate::run::{RunOutcome, StopHandle};
use std::sync::{Mutex, PoisonError};

use turnpike_client::Security;
pub use turnpike_turn::{client::Relayed, server::Cidr};

use crate::{
    ClientTransport, LoadError, TlsOptions,
    profile::{self, ProfileEnds},
    progress::ProgressInterval,
    run::{self, RequestedLoad, RunTally, ThreadResult},
    traffic::{Carrier as _, echo},
};
use engine::TurnEngine;

type TurnShared<'a> = run::RunShared<'a, TurnLoadConfig>;

/// Runs the load and calls `progress` about once a second. Failures after the setup are counted in the
/// report.
pub fn run(
    config: &TurnLoadConfig,
    stop: &StopHandle,
    progress: impl FnMut(&ProgressInterval),
) -> Result<RunOutcome, LoadError> {
    let config = &config.resolved()?;
    let transport = config.transport();
    run::check_files(config.clients * config.files_per_client())?;
    let tls = TlsOptions { resumption: !config.no_resumption, ..config.tls.clone() };
    let security = match transport.is_secure() {
        true => Some(Security::new(&tls, config.host(), config.server_of(0))?),
        false => None,
    };
    let frame = config.frame();
    let asked = RequestedLoad {
        size: config.size,
        rate: config.rate,
        datapath: match transport {
            ClientTransport::Udp => config.datapath.to_string(),
            other => other.to_string(),
        },
        limits: config.limits,
    };
    let told = ClientFigures::default();
    let thread = |shared: &TurnShared<'_>, number| run_thread(shared, security.as_ref(), number, &told);
    let asked = asked.with_profile(config.profile.as_ref(), config.clients);
    let mut found = run::run(config, frame, stop, thread, progress)?;
    let (interrupted, measured, streams) = (found.interrupted, found.measured, profile::gather(&mut found));
    let RunTally { sent_bytes, received_bytes, .. } = found.tallies.measured;
    let (sent, received) = (sent_bytes as f64, received_bytes as f64);
    let mut report = run::report(&frame, &asked, found);
    let relayed = if config.relayed == Relayed::Tcp { "tcp" } else { "udp" };
    report.transport = Some(transport.to_string());
    report.relay = (config.mode != Mode::Invalid).then(|| relayed.to_owned());
    if config.mode == Mode::Invalid {
        let amplification = if sent == 0.0 { 0.0 } else { received / sent };
        report.add_figures([
            ("sent_bytes", sent),
            ("reply_bytes", received),
            ("amplification", amplification),
        ]);
        return Ok(run::conclude(report, &asked, interrupted));
    }
    if config.mode == Mode::Packet && config.relayed == Relayed::Tcp {
        report.add_figures([("sent_bytes", sent), ("received_bytes", received)]);
    }
    if config.migrate.is_some() {
        told.moved.into_inner().unwrap_or_else(PoisonError::into_inner).put(&mut report);
    }
    if config.reconnect.is_some() {
        told.returned.into_inner().unwrap_or_else(PoisonError::into_inner).put(&mut report);
    }
    if let Some(shaped) = &config.profile {
        profile::put(&mut report, shaped, streams, measured);
    } else if report.sent > 0 && report.received == 0 {
        report.notes.push(
            "no replies arrived: check that the reflector is running at the peer's address and that the server can reach it"
                .to_owned(),
        );
    }
    Ok(run::conclude(report, &asked, interrupted))
}

#[derive(Default)]
struct ClientFigures {
    moved: Mutex<moves::MoveFigures>,
    returned: Mutex<reconnects::ReconnectFigures>,
}

fn run_thread(
    shared: &TurnShared<'_>,
    security: Option<&Security>,
    number: usize,
    told: &ClientFigures,
) -> Result<ThreadResult, LoadError> {
    match shared.config.mode {
        Mode::Packet => relay(shared, security, number, told),
        Mode::Allocate | Mode::Bind => allocate::run(shared, security, number),
        Mode::Invalid => invalid::run(shared, number),
    }
}

fn relay(
    shared: &TurnShared<'_>,
    security: Option<&Security>,
    thread: usize,
    told: &ClientFigures,
) -> Result<ThreadResult, LoadError> {
    let (count, first) = shared.share(shared.config.clients, thread);
    let mut engine = TurnEngine::new(shared.config, security, (count, first), shared.clock)?;
    let relayed = match &shared.config.profile {
        None => set_up::set_up(&mut engine, shared)
            .and_then(|()| echo::run(&mut engine, &shared.config.plan(), shared, thread)),
        Some(shaped) => {
            let (peer, datapath) = (shared.config.peer_of(thread), shared.config.datapath);
            let ends =
                ProfileEnds::new(shaped, (count, first), peer, datapath, engine.poller(), shared.clock)?;
            engine.set_peer(ends.peer());
            set_up::set_up(&mut engine, shared).and_then(|()| profile::run(&mut engine, ends, shared, thread))
        }
    };
    engine.moves.finish(&told.moved);
    engine.reconnects.finish(&told.returned);
    // Allocations are deleted even after a failure, because some clients may have one.
    let taken_down = set_up::take_down(&mut engine, shared);
    let relayed = relayed?;
    taken_down?;
    // A relayed stream that has lost or gained a byte cannot be parsed from that byte on.
    if relayed.garbled > 0 && shared.config.relayed == Relayed::Tcp {
        engine.errors.insert("garbled", relayed.garbled);
    }
    Ok(finished(shared.config, engine, relayed))
}

fn finished(config: &TurnLoadConfig, engine: TurnEngine, mut rest: ThreadResult) -> ThreadResult {
    if config.transport().is_secure() {
        let (full, resumed) = engine.handshakes();
        rest.sums.insert("full_handshakes", full as f64);
        rest.sums.insert("resumed_handshakes", resumed as f64);
    }
    if engine.redirects > 0 {
        rest.sums.insert("redirects", engine.redirects as f64);
    }
    ThreadResult { errors: engine.errors, ..rest }
}
