//! The TURN server: its limits, listeners, certificates and workers.

use std::time::Duration;

use axum::extract::State;
use jiff::Timestamp;
use tokio::time::timeout;
use turnpike_api::{
    CertificateInfo, CertificateList, LimitInfo, LimitList, Listener, Listeners, Traffic, Worker, WorkerList,
};
use turnpike_relay::{WorkerSnapshot, allocations::Look, certificates::overdue};

use super::{App, Json};
use crate::{ServerView, problem::Problem, program::seconds};

/// Timeout for a worker's answer, after which the worker is reported as not answering.
const PATIENCE: Duration = Duration::from_secs(1);

/// Lists the limits and the amounts in use.
#[utoipa::path(
    get,
    path = "/v1/limits",
    tag = "server",
    responses(
        (status = 200, description = "All numeric limits.", body = LimitList),
    ),
)]
pub(super) async fn limits(State(app): State<App>) -> Result<Json<LimitList>, Problem> {
    let server = app.server()?;
    let (of, workers) = (&server.settings, server.relay.snapshots());
    let sum = |count: fn(&WorkerSnapshot) -> u64| Some(workers.iter().map(count).sum());
    let at_most: [(&str, u64, Option<u64>); 24] = [
        ("limits.allocations", of.allocation_limits.allocations as u64, sum(|worker| worker.allocations)),
        ("limits.allocations_per_user", of.allocation_limits.allocations_per_user as u64, None),
        ("limits.prefix_v4", of.prefix_v4.into(), None),
        ("limits.prefix_v6", of.prefix_v6.into(), None),
        ("limits.burst", of.rates.burst.into(), None),
        ("limits.permissions", of.limits.permissions as u64, None),
        ("limits.channels", of.limits.channels as u64, None),
        ("limits.kernel_flows", of.kernel_flows.into(), None),
        ("limits.peer_connections", of.limits.peer_connections as u64, sum(|worker| worker.peers.open)),
        ("limits.peer_connections_per_allocation", of.limits.peer_connections_per_allocation as u64, None),
        ("limits.peer_connections_per_user", of.limits.peer_connections_per_user as u64, None),
        ("limits.idle_connections", of.connection_limits.idle_connections as u64, None),
        (
            "limits.idle_connections_per_address",
            of.connection_limits.idle_connections_per_address as u64,
            None,
        ),
        ("limits.half_open", of.connection_limits.half_open as u64, sum(|worker| worker.dtls.half_open)),
        ("limits.half_open_per_network", of.connection_limits.half_open_per_network as u64, None),
        ("limits.first_message", of.connection_limits.first_message.as_secs(), None),
        ("limits.idle", of.connection_limits.idle.as_secs(), None),
        ("limits.stream_queue", of.connection_limits.stream_queue as u64, None),
        ("limits.handed_on", of.connection_limits.handed_on as u64, sum(|worker| worker.handed_on.open)),
        ("limits.handed_on_per_address", of.connection_limits.handed_on_per_address as u64, None),
        ("limits.default_lifetime", of.limits.default_lifetime.into(), None),
        ("limits.max_lifetime", of.limits.max_lifetime.into(), None),
        ("limits.channel_lifetime", of.channel_lifetime.into(), None),
        ("limits.permission_lifetime", of.permission_lifetime.into(), None),
    ];
    let where_wanted = [
        (
            "limits.allocations_per_prefix",
            of.allocation_limits.allocations_per_prefix.map(|most| most as u64),
        ),
        ("limits.refusals_per_prefix", of.refusals_per_prefix.map(u64::from)),
        ("limits.bits_per_second", of.rates.bits_per_second),
        ("limits.bits_per_second_per_realm", of.rates.bits_per_second_per_realm),
        ("limits.bits_per_second_per_user", of.rates.bits_per_second_per_user),
        ("limits.bits_per_second_per_allocation", of.rates.bits_per_second_per_allocation),
        ("limits.max_allocation_duration", of.max_allocation_duration.map(u64::from)),
    ];
    let at_most = at_most.into_iter().map(|(key, most, used)| (key, Some(most), used));
    let where_wanted = where_wanted.into_iter().map(|(key, most)| (key, most, None));
    let limit = |(key, most, used): (&str, _, _)| LimitInfo { key: key.to_owned(), most, used };
    Ok(Json(LimitList { limits: at_most.chain(where_wanted).map(limit).collect() }))
}

/// Lists the listeners with their allocations and traffic, and the relay addresses.
#[utoipa::path(
    get,
    path = "/v1/listeners",
    tag = "server",
    responses(
        (status = 200, description = "All listeners and relay addresses, with their actual ports.", body = Listeners),
    ),
)]
pub(super) async fn listeners(State(app): State<App>) -> Result<Json<Listeners>, Problem> {
    let sums = app.traffic().await?;
    let server = app.server()?;
    let traffic = |(datagrams, bytes)| Traffic { datagrams, bytes };
    let listeners = server.relay.listening(&sums).into_iter().map(|it| Listener {
        transport: <&str>::from(it.transport).to_owned(),
        address: it.address.to_string(),
        closing: it.closing,
        allocations: it.traffic.allocations,
        to_peer: traffic(it.traffic.to_peer),
        to_client: traffic(it.traffic.to_client),
    });
    Ok(Json(Listeners { listeners: listeners.collect(), relays: server.relay_ranges() }))
}

/// Lists the certificates of the server.
#[utoipa::path(
    get,
    path = "/v1/certificates",
    tag = "server",
    responses(
        (status = 200, description = "All certificates.", body = CertificateList),
    ),
)]
pub(super) async fn certificates(State(app): State<App>) -> Result<Json<CertificateList>, Problem> {
    let now = Timestamp::now().as_second();
    let ServerView { certificates, orders, .. } = app.server()?;
    let certificates = certificates.iter().map(|certificate| {
        let (first, last) = (certificate.identity.not_before(), certificate.identity.not_after());
        let end = i64::try_from(last).unwrap_or(i64::MAX);
        let overdue = i64::try_from(overdue(last.saturating_sub(first))).unwrap_or(i64::MAX);
        CertificateInfo {
            file: certificate.file.display().to_string(),
            names: certificate.identity.names().to_vec(),
            not_after: seconds(Timestamp::from_second(end).unwrap_or(Timestamp::MAX)),
            expires_in_s: end.saturating_sub(now),
            ends_soon: end.saturating_sub(now) < overdue,
            dtls: certificate.identity.can_dtls(),
        }
    });
    Ok(Json(CertificateList { certificates: certificates.collect(), orders }))
}

/// Lists the workers with their counters and load.
#[utoipa::path(
    get,
    path = "/v1/workers",
    tag = "server",
    responses(
        (status = 200, description = "All workers.", body = WorkerList),
    ),
)]
pub(super) async fn workers(State(app): State<App>) -> Result<Json<WorkerList>, Problem> {
    let shares = app.threads.shares().await;
    let snapshots = app.server()?.relay.snapshots();
    let mut workers = Vec::with_capacity(snapshots.len());
    for (number, snapshot) in snapshots.iter().enumerate() {
        // An empty request, to measure the response time.
        let nothing = Look { from: u32::MAX, most: 0, filter: std::sync::Arc::default(), details: false };
        let looked = timeout(PATIENCE, app.look(number, nothing)).await;
        let waited = looked.ok().and_then(Result::ok).map(|looked| looked.waited);
        let share = shares.get(&format!("relay-{number}"));
        let WorkerSnapshot { turn, rx, tx, .. } = snapshot;
        workers.push(Worker {
            number: number as u64,
            allocations: snapshot.allocations,
            load: share.map(|share| rounded(share.ran)),
            waiting: share.map(|share| rounded(share.waited)),
            event_loop_us: waited.and_then(|waited| u64::try_from(waited.as_micros()).ok()),
            wakeups: snapshot.wakeups,
            receive_calls: rx.calls,
            received: rx.datagrams,
            send_calls: tx.calls,
            sent: tx.datagrams,
            to_peer: Traffic { datagrams: turn.to_peer_datagrams, bytes: turn.to_peer_bytes },
            to_client: Traffic { datagrams: turn.to_client_datagrams, bytes: turn.to_client_bytes },
            kernel_drops: rx.kernel_drops,
            dropped: turn.drops.iter().sum(),
        });
    }
    Ok(Json(WorkerList { workers }))
}

fn rounded(share: f64) -> f64 {
    (share * 1000.0).round() / 1000.0
}
