//! Connections to the admin interface: few, short-lived, one request each. They must not take descriptors, memory or time from the
//! relay or the forwarder.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::{self, AbortHandle},
    time,
};

use crate::{
    access::Via,
    listen::{Listener, Stream},
};

/// At a time, over all listeners: so many descriptors are set apart for them.
pub(crate) const MOST: usize = 32;

/// How long to wait after an accept that failed, for want of descriptors most likely.
const REST: Duration = Duration::from_millis(100);

/// Limits of these connections. The defaults are the documented ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// At a time and listener. One more takes the place of the oldest: an honest request is answered within milliseconds, so the oldest is
    /// idle.
    pub(crate) connections: usize,
    /// For the head of the request.
    pub(crate) head: Duration,
    /// For all of it, until the last byte of the answer is taken.
    pub(crate) whole: Duration,
    /// Bytes of the head of a request.
    pub(crate) head_bytes: usize,
}

impl Limits {
    /// Of one of so many listeners. Each has a share of its own, so that who crowds one of them keeps nobody from the others.
    pub(crate) fn of_one(listeners: usize) -> Self {
        let seconds = Duration::from_secs;
        let connections = (MOST / listeners.max(1)).max(1);
        Self { connections, head: seconds(10), whole: seconds(30), head_bytes: 8192 }
    }
}

/// Why a connection was closed without an answer, or in the middle of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// Another one needed its place.
    Crowded,
    /// No request in time.
    NoRequest,
    /// The answer was not taken in time.
    Slow,
    /// What came was no HTTP, or its head was too long; where it can be said, it has been.
    Malformed,
    /// No TLS handshake, or one with a client certificate that nobody knows.
    Tls,
}

static CLOSED: [AtomicU64; 5] = [const { AtomicU64::new(0) }; 5];

/// How many connections of this process have been closed, by reason.
pub(crate) fn closed() -> [(&'static str, u64); 5] {
    [
        ("crowded", Closed::Crowded),
        ("no_request", Closed::NoRequest),
        ("slow", Closed::Slow),
        ("malformed", Closed::Malformed),
        ("tls", Closed::Tls),
    ]
    .map(|(name, reason)| (name, CLOSED[reason as usize].load(Ordering::Relaxed)))
}

fn count(reason: Closed) {
    CLOSED[reason as usize].fetch_add(1, Ordering::Relaxed);
}

/// Accepts and serves connections for as long as the process lives.
pub(crate) async fn serve(listener: Listener, router: Router, limits: Limits) {
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
        let Ok(stream) = listener.accept().await else {
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
        let connection = answer(Arc::clone(&http), stream, router.clone(), limits);
        open.push_back(tokio::spawn(connection).abort_handle());
        // Each connection runs once before the next is accepted, and aborted ones end.
        task::yield_now().await;
    }
}

async fn answer(http: Arc<http1::Builder>, stream: Stream, router: Router, limits: Limits) {
    let whole = limits.whole;
    match stream {
        Stream::Unix(stream) => {
            let via = Via::Unix(stream.peer_cred().ok().map(|peer| peer.uid()));
            speak(&http, stream, router, via, whole).await;
        }
        Stream::Tcp(stream, from, None) => speak(&http, stream, router, Via::Loopback(from), whole).await,
        Stream::Tcp(stream, from, Some(tls)) => match time::timeout(limits.head, tls.accept(stream)).await {
            Ok(Ok((stream, access))) => speak(&http, stream, router, Via::Tls(from, access), whole).await,
            Ok(Err(_)) => count(Closed::Tls),
            Err(_) => count(Closed::NoRequest),
        },
    }
}

async fn speak<S>(http: &http1::Builder, stream: S, router: Router, via: Via, whole: Duration)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let service = TowerToHyperService::new(router.layer(Extension(via)));
    match time::timeout(whole, http.serve_connection(TokioIo::new(stream), service)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.is_timeout() => count(Closed::NoRequest),
        Ok(Err(error)) if error.is_parse() => count(Closed::Malformed),
        // The client has gone.
        Ok(Err(_)) => {}
        Err(_) => count(Closed::Slow),
    }
}

#[cfg(test)]
mod tests;
