//! Connections to the admin page: few, short-lived, one request each. They must not take descriptors, memory or time from the
//! relay or the forwarder.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{self, AbortHandle},
    time,
};

/// Descriptors set apart for the admin page and for files that are read while the program runs: one for each connection, one for each
/// of those that are just being closed, and some for configuration, certificates and `/proc`.
pub(crate) const DESCRIPTORS: u64 = 48;

/// How long to wait after an accept that failed, for want of descriptors most likely.
const REST: Duration = Duration::from_millis(100);

/// Limits of these connections. The defaults are the documented ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// At a time. One more takes the place of the oldest: an honest request is answered within milliseconds, so the oldest is
    /// idle.
    pub(super) connections: usize,
    /// For the head of the request.
    pub(super) head: Duration,
    /// For all of it, until the last byte of the answer is taken.
    pub(super) whole: Duration,
    /// Bytes of the head of a request.
    pub(super) head_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { connections: 32, head: seconds(10), whole: seconds(30), head_bytes: 8192 }
    }
}

/// Why a connection was closed without an answer, or in the middle of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Closed {
    /// Another one needed its place.
    Crowded,
    /// No request in time.
    NoRequest,
    /// The answer was not taken in time.
    Slow,
    /// What came was no HTTP, or its head was too long; where it can be said, it has been.
    Malformed,
}

static CLOSED: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// How many connections of this process have been closed, by reason.
pub(crate) fn closed() -> [(&'static str, u64); 4] {
    [
        ("crowded", Closed::Crowded),
        ("no_request", Closed::NoRequest),
        ("slow", Closed::Slow),
        ("malformed", Closed::Malformed),
    ]
    .map(|(name, reason)| (name, CLOSED[reason as usize].load(Ordering::Relaxed)))
}

fn count(reason: Closed) {
    CLOSED[reason as usize].fetch_add(1, Ordering::Relaxed);
}

/// Accepts and serves connections for as long as the process lives.
pub(super) async fn serve(listener: TcpListener, router: Router, limits: Limits) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_header_size(limits.head_bytes)
        .max_buf_size(limits.head_bytes)
        .keep_alive(false);
    let http = Arc::new(http);
    // The oldest first.
    let mut open: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            time::sleep(REST).await;
            continue;
        };
        open.retain(|connection| !connection.is_finished());
        if open.len() >= limits.connections
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
            count(Closed::Crowded);
        }
        let connection = answer(Arc::clone(&http), stream, router.clone(), limits.whole);
        open.push_back(tokio::spawn(connection).abort_handle());
        // Each connection runs once before the next is accepted, and aborted ones end.
        task::yield_now().await;
    }
}

async fn answer(http: Arc<http1::Builder>, stream: TcpStream, router: Router, whole: Duration) {
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match time::timeout(whole, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.is_timeout() => count(Closed::NoRequest),
        Ok(Err(error)) if error.is_parse() => count(Closed::Malformed),
        // The client has gone.
        Ok(Err(_)) => {}
        Err(_) => count(Closed::Slow),
    }
}
