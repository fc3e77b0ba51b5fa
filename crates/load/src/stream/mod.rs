//! `load tcp`, `load rr` and `load connect`: TCP to a reflector, directly or through a forwarder.
//!
//! ```text
//! tcp      connections ──bytes──▶ [forwarder] ──▶ reflector      either way, or both; exact to the byte
//! rr       connections ◀─request, response─▶      one outstanding on each
//! connect  connect, request, response, close      several at once
//! ```
//!
//! [`crate::greeting`] documents the protocol. A run starts once the reflector has responded on every connection. If a forwarder cannot
//! reach its target, the run thus fails instead of giving a misleading result.

mod bulk;
mod config;
mod connect;
mod dial;
mod exchange;
mod starts;

use std::{io, time::Duration};

use turnpike_measure::LoadReport;
use turnpike_net::{Event, Poller};

pub use config::{BulkLoad, Close, ConnectLoad, ExchangeLoad, StreamLoadConfig, StreamTarget, Workload};

use crate::{
    LoadError, RunOutcome, StopHandle,
    progress::{CountKind, ProgressInterval},
    run::{self, RequestedLoad, RunFrame},
};

type StreamShared<'a> = run::RunShared<'a, StreamLoadConfig>;

const LONGEST_SLEEP_NS: u64 = 20_000_000;

/// Runs the load and calls `progress` about once a second. In bulk transfers, the counts are bytes, and `recv_bps` is the receiver's rate.
pub fn run(
    config: &StreamLoadConfig,
    stop: &StopHandle,
    progress: impl FnMut(&ProgressInterval),
) -> Result<RunOutcome, LoadError> {
    config.validate()?;
    run::check_files(config.connections())?;
    let bulk = matches!(config.workload, Workload::Bulk(_));
    let kind = if bulk { CountKind::Bytes } else { CountKind::Answered };
    let frame = RunFrame::new(&config.target.run, config.connections(), kind);
    let (rate, limits) = config.rate_and_limits();
    let asked = RequestedLoad { size: config.size(), rate, datapath: "tcp".to_owned(), limits };
    let found = run::run(config, frame, stop, run_thread, progress)?;
    let interrupted = found.interrupted;
    let mut report = run::report(&frame, &asked, found);
    complete(&mut report, config.workload);
    Ok(run::conclude(report, &asked, interrupted))
}

fn run_thread(shared: &StreamShared<'_>, number: usize) -> Result<run::ThreadResult, LoadError> {
    match shared.config.workload {
        Workload::Bulk(_) => bulk::run(shared, number),
        Workload::Exchange(_) => exchange::run(shared, number),
        Workload::Connect(_) => connect::run(shared, number),
    }
}

fn wait(poller: &mut Poller, ready: &mut Vec<Event>, longest_ns: u64) -> Result<(), LoadError> {
    let timeout = Duration::from_nanos(longest_ns.min(LONGEST_SLEEP_NS));
    ready.clear();
    ready.extend_from_slice(poller.wait(Some(timeout)).map_err(LoadError::system("epoll_wait"))?);
    Ok(())
}

fn is_not_now(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn complete(report: &mut LoadReport, workload: Workload) {
    match workload {
        Workload::Bulk(_) => {
            let both = [bulk::TO_SERVER_BPS, bulk::TO_CLIENT_BPS].map(|name| report.extra.get(name));
            report.recv_bps = both.into_iter().flatten().sum();
            report.recv_pps = report.recv_bps / 8.0;
        }
        Workload::Exchange(_) => {
            report.extra.insert("transactions_per_s".to_owned(), report.recv_pps);
        }
        Workload::Connect(_) => {
            report.extra.insert("connections_per_s".to_owned(), report.recv_pps);
            if report.errors.contains_key(connect::NO_LOCAL_PORT) {
                report.notes.push(
                    "local ports ran out: each connection that the client closes first keeps one for 60 s \
                     (TIME_WAIT); use --close server or --close reset"
                        .to_owned(),
                );
            }
        }
    }
    if report.sent > 0 && report.received == 0 {
        report
            .notes
            .push("no replies arrived: check that the forwarder still reaches the reflector".to_owned());
    }
    if let Some(count) = report.errors.get(starts::NOT_STARTED) {
        report.notes.push(format!(
            "requests never sent, because every connection was waiting for a response: {count}; use more clients or a \
             lower rate"
        ));
    }
}
