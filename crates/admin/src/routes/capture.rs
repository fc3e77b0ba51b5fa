//! `/v1/allocations/{id}/capture`: the datagrams of an allocation as a pcapng stream. Needs a right of its own, because a capture shows
//! the traffic of users.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use http_body_util::channel::{Channel, Sender};
use hyper::body::Bytes;
use serde::Deserialize;
use tokio::{
    sync::{Semaphore, mpsc, oneshot},
    time::{Instant, sleep_until, timeout},
};
use turnpike_relay::allocations::AllocationSnapshot;
use turnpike_turn::server::{AllocationId, Tap, TapRefusal, TappedDatagram, Way};
use utoipa::IntoParams;

use super::{App, PathPart, allocations::read_id, query, server_of};
use crate::{
    access::{Audit, RequestRights},
    connections::RequestProgress,
    live::Watched,
    pcapng::{self, CapturedDatagram, Leg},
    problem::Problem,
    program::Owner,
};

/// Captures at the same time.
const MOST: usize = 4;
static CAPTURES: Semaphore = Semaphore::const_new(MOST);
/// Maximum size in bytes of the datagrams that wait for a client; more are only counted.
const QUEUE: usize = 4 << 20;
/// Time for a client to receive a part of the capture.
const SLOW: Duration = Duration::from_secs(10);
/// Interval at which the client's rights are checked.
const CHECK: Duration = Duration::from_secs(1);
const PARTS: usize = 256;

const MOST_DATAGRAMS: u64 = 1_000_000;
const MOST_SECONDS: u64 = 3600;
const MOST_PAYLOAD: usize = 65_535;

/// Bounds of a capture.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct CaptureQuery {
    /// Bytes of payload to capture from each datagram. Default: 0, headers only.
    #[param(maximum = 65535)]
    snap: Option<usize>,
    /// Number of datagrams after which the capture ends. Default: 10000.
    #[param(minimum = 1, maximum = 1000000)]
    count: Option<u64>,
    /// Seconds after which the capture ends. Default: 60.
    #[param(minimum = 1, maximum = 3600)]
    seconds: Option<u64>,
}

/// Captures the datagrams that an allocation relays, on the client's leg and on the peers' leg.
///
/// Needs a token from `admin.capture_tokens`, or the Unix socket. The capture ends with the allocation, or if the allocation moves to
/// another worker; interface statistics at its end count the datagrams for which the client was too slow.
#[utoipa::path(
    get,
    path = "/v1/allocations/{id}/capture",
    tag = "allocations",
    params(
        ("id" = String, Path, description = "Its identifier: 32 hex digits.", min_length = 32, max_length = 32, pattern = "^[0-9a-fA-F]{32}$"),
        CaptureQuery,
    ),
    responses(
        (status = 200, description = "A pcapng file.", body = String, content_type = "application/x-pcapng", example = "(binary)"),
    ),
)]
pub(super) async fn capture(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
    progress: Option<Extension<RequestProgress>>,
    id: PathPart,
    uri: Uri,
) -> Result<Response, Problem> {
    let id = read_id(id)?;
    if !grant.may_capture(&app.program.settings()) {
        let detail = "captures need a token from admin.capture_tokens, or the Unix socket";
        let problem = Problem::new(StatusCode::FORBIDDEN, "no_capture", detail);
        return Ok((Extension(Audit(format!("capture of allocation {id} refused"))), problem).into_response());
    }
    let wanted: CaptureQuery = query(&uri)?;
    let bounds = Bounds::new(&wanted)?;
    let Some(Extension(progress)) = progress else {
        let detail = "captures are not forwarded between nodes: connect to this node itself";
        return Err(Problem::new(StatusCode::NOT_FOUND, "no_events", detail));
    };
    let place = CAPTURES.try_acquire().map_err(|_| {
        let detail = format!("the maximum of {MOST} captures is reached: end one");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_watchers", detail)
    })?;
    let found = app.find_here(id).await?;
    let (tap, queue) = tap(bounds);
    let untap = start(&app.program, &found, tap).await?;
    let text = format!(
        "capture of allocation {id} of {:?} in realm {:?} begun: {bounds}",
        found.username, found.realm
    );
    let (mut sender, body) = Channel::<Bytes>::new(1);
    let streaming = progress.stream();
    let program = Arc::clone(&app.program);
    tokio::spawn(async move {
        let _place = place;
        // A reload may have removed the token.
        let may_capture = || grant.may_capture(&program.settings());
        let begin = pcapng::begin(found.transport.into());
        tokio::select! {
            ended = send(begin, &queue.told, queue.datagrams, (&mut sender, bounds.seconds), may_capture) => {
                if ended == Watched::Stalled {
                    streaming.give_up();
                }
            }
            // The client has disconnected.
            () = progress.streamed() => {}
        }
        drop(untap);
        let (captured, lost) = queue.told.counts();
        tracing::info!(
            target: "turnpike::audit",
            by = grant.to_string(), allocation = %id, datagrams = captured, lost,
            "capture ended"
        );
        drop(streaming);
    });
    let headers = [(header::CONTENT_TYPE.as_str(), "application/x-pcapng"), ("x-accel-buffering", "no")];
    Ok((Extension(Audit(text)), headers, Body::new(body)).into_response())
}

#[derive(Clone, Copy)]
struct Bounds {
    snap: usize,
    count: u64,
    seconds: u64,
}

impl Bounds {
    fn new(wanted: &CaptureQuery) -> Result<Self, Problem> {
        let bounds = Self {
            snap: wanted.snap.unwrap_or(0),
            count: wanted.count.unwrap_or(10_000),
            seconds: wanted.seconds.unwrap_or(60),
        };
        for (name, is_within, range) in [
            ("snap", bounds.snap <= MOST_PAYLOAD, 0..=MOST_PAYLOAD as u64),
            ("count", (1..=MOST_DATAGRAMS).contains(&bounds.count), 1..=MOST_DATAGRAMS),
            ("seconds", (1..=MOST_SECONDS).contains(&bounds.seconds), 1..=MOST_SECONDS),
        ] {
            if !is_within {
                return Err(Problem::bad_request(format!(
                    "{name} must be {} to {}",
                    range.start(),
                    range.end()
                )));
            }
        }
        Ok(bounds)
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { snap, count, seconds } = self;
        write!(f, "at most {count} datagrams and {seconds} s, {snap} bytes of payload each")
    }
}

/// Queue between the worker and the task that serves the client.
struct Queue {
    datagrams: mpsc::UnboundedReceiver<Vec<u8>>,
    told: Arc<QueueCounts>,
}

#[derive(Debug, Default)]
struct QueueCounts {
    bytes: AtomicUsize,
    captured: AtomicU64,
    lost: AtomicU64,
}

impl QueueCounts {
    fn counts(&self) -> (u64, u64) {
        (self.captured.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed))
    }
}

#[derive(Debug)]
struct CaptureTap {
    /// `None` after the last datagram.
    to: Option<mpsc::UnboundedSender<Vec<u8>>>,
    told: Arc<QueueCounts>,
    snap: usize,
    left: u64,
}

fn tap(Bounds { snap, count, .. }: Bounds) -> (CaptureTap, Queue) {
    let (to, datagrams) = mpsc::unbounded_channel();
    let told = Arc::<QueueCounts>::default();
    (CaptureTap { to: Some(to), told: Arc::clone(&told), snap, left: count }, Queue { datagrams, told })
}

impl Tap for CaptureTap {
    fn relayed(&mut self, datagram: &TappedDatagram<'_>) {
        let Some(to) = &self.to else { return };
        if self.told.bytes.load(Ordering::Relaxed) > QUEUE {
            self.told.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let packets = packets(SystemTime::now(), datagram, self.snap);
        self.told.bytes.fetch_add(packets.len(), Ordering::Relaxed);
        self.told.captured.fetch_add(1, Ordering::Relaxed);
        self.left -= 1;
        if to.send(packets).is_err() || self.left == 0 {
            self.to = None;
        }
    }
}

/// The packets of both legs, in the order in which they pass the server.
fn packets(at: SystemTime, datagram: &TappedDatagram<'_>, snap: usize) -> Vec<u8> {
    let TappedDatagram { way, client, relayed, peer, header, payload } = *datagram;
    let packet = |leg, from, to, head| CapturedDatagram { leg, from, to, head, rest: payload, kept: snap };
    let legs = match way {
        Way::ToPeer => {
            [packet(Leg::Client, client.address, client.local, header), packet(Leg::Peer, relayed, peer, &[])]
        }
        Way::ToClient => {
            [packet(Leg::Peer, peer, relayed, &[]), packet(Leg::Client, client.local, client.address, header)]
        }
    };
    let mut packets = Vec::new();
    legs.iter().for_each(|leg| pcapng::packet(at, leg, &mut packets));
    packets
}

/// Ends the tap when dropped.
struct Untap {
    program: Arc<dyn Owner>,
    at: (usize, u32),
    id: AllocationId,
}

impl Drop for Untap {
    fn drop(&mut self) {
        if let Some(server) = self.program.server() {
            server.relay.untap(self.at, self.id);
        }
    }
}

async fn start(
    program: &Arc<dyn Owner>,
    found: &AllocationSnapshot,
    tap: CaptureTap,
) -> Result<Untap, Problem> {
    let (sender, answer) = oneshot::channel();
    let (at, id) = ((found.worker, found.slot), found.id);
    server_of(&**program)?.relay.tap(at, id, Box::new(tap), move |begun| _ = sender.send(begun));
    let conflict = |detail| Problem::new(StatusCode::CONFLICT, "not_captured", detail);
    match answer.await.map_err(|_| Problem::stopping())? {
        Ok(()) => Ok(Untap { program: Arc::clone(program), at, id }),
        Err(TapRefusal::Gone) => Err(conflict("the allocation has just ended or moved: try again")),
        Err(TapRefusal::RelaysTcp) => {
            Err(conflict("the allocation relays TCP: capture on the network instead"))
        }
        Err(TapRefusal::Tapped) => Err(conflict("the allocation is already being captured")),
    }
}

/// Sends the capture until its end or until `seconds` have passed.
async fn send(
    begin: Vec<u8>,
    told: &QueueCounts,
    mut datagrams: mpsc::UnboundedReceiver<Vec<u8>>,
    (to, seconds): (&mut Sender<Bytes>, u64),
    may_capture: impl Fn() -> bool,
) -> Watched {
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut next = begin;
    let mut parts = Vec::with_capacity(PARTS);
    let mut is_over = false;
    loop {
        if !next.is_empty() {
            match timeout(SLOW, to.send_data(std::mem::take(&mut next).into())).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Watched::Ended,
                Err(_) => return Watched::Stalled,
            }
        }
        if is_over {
            return Watched::Ended;
        }
        tokio::select! {
            count = datagrams.recv_many(&mut parts, PARTS) => {
                next = parts.concat();
                parts.clear();
                told.bytes.fetch_sub(next.len(), Ordering::Relaxed);
                is_over = count == 0;
            }
            () = sleep_until((Instant::now() + CHECK).min(end)) => is_over = Instant::now() >= end,
        }
        if !may_capture() {
            return Watched::Ended;
        }
        if is_over {
            next.extend(pcapng::end(SystemTime::now(), told.counts().1));
        }
    }
}
