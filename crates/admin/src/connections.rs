//! Connections to the admin interface, and of applications: few, short-lived, one request each. They must not take descriptors, memory or
//! time from the relay or the forwarder.

use std::{
    collections::VecDeque,
    pin::pin,
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
    sync::watch,
    task::{self, AbortHandle},
    time,
};

use crate::{
    access::Via,
    listen::{Listener, Stream},
};

/// At a time, over all listeners of the admin interface: so many descriptors are set apart for them.
const MOST_ADMIN: usize = 32;
/// The same of listeners for applications. Who has shown a wrong key keeps a place for a second.
const MOST_OF_APPLICATIONS: usize = 128;

/// How long to wait after an accept that failed, for want of descriptors most likely.
const REST: Duration = Duration::from_millis(100);

/// Limits of these connections. The defaults are the documented ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// At a time and listener. One more takes the place of the oldest: an honest request is answered within milliseconds, so the oldest is
    /// idle. Those who watch are spared as long as there is anybody else.
    pub(crate) connections: usize,
    /// For the head of the request.
    pub(crate) head: Duration,
    /// For all of it, until the last byte of the answer is taken.
    pub(crate) whole: Duration,
    /// Bytes of the head of a request.
    pub(crate) head_bytes: usize,
}

impl Limits {
    /// Of one of so many listeners of the admin interface. Each has a share of its own, so that who crowds one of them keeps nobody from
    /// the others.
    pub(crate) fn of_one(listeners: usize) -> Self {
        Self::share(MOST_ADMIN, listeners)
    }

    /// The same of listeners for applications.
    pub(crate) fn of_one_for_applications(listeners: usize) -> Self {
        Self::share(MOST_OF_APPLICATIONS, listeners)
    }

    fn share(most: usize, listeners: usize) -> Self {
        let seconds = Duration::from_secs;
        let connections = (most / listeners.max(1)).max(1);
        Self { connections, head: seconds(10), whole: seconds(30), head_bytes: 8192 }
    }
}

/// Of one connection: an answer without an end, which outlives the time for an answer for as long as it goes on.
#[derive(Clone)]
pub(crate) struct Endless(Arc<watch::Sender<bool>>);

/// While this is there, the answer goes on.
pub(crate) struct Going(Endless);

impl Endless {
    fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    pub(crate) fn begin(&self) -> Going {
        self.0.send_replace(true);
        Going(self.clone())
    }

    fn goes_on(&self) -> bool {
        *self.0.borrow()
    }

    async fn over(&self) {
        let _ = self.0.subscribe().wait_for(|goes_on| !goes_on).await;
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        self.0.0.send_replace(false);
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

/// How many connections of this process have been closed, by reason.
pub(crate) struct Closings([AtomicU64; 5]);

/// Of the admin interface.
pub(crate) static ADMIN: Closings = Closings::new();
/// Of applications.
pub(crate) static APPLICATIONS: Closings = Closings::new();

impl Closings {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; 5])
    }

    pub(crate) fn by_reason(&self) -> [(&'static str, u64); 5] {
        [
            ("crowded", Closed::Crowded),
            ("no_request", Closed::NoRequest),
            ("slow", Closed::Slow),
            ("malformed", Closed::Malformed),
            ("tls", Closed::Tls),
        ]
        .map(|(name, reason)| (name, self.0[reason as usize].load(Ordering::Relaxed)))
    }

    fn count(&self, reason: Closed) {
        self.0[reason as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Accepts and serves connections for as long as the process lives.
pub(crate) async fn serve(listener: Listener, router: Router, limits: Limits, closings: &'static Closings) {
    let http = Arc::new(http(limits));
    // The oldest first.
    let mut open: VecDeque<(AbortHandle, Endless)> = VecDeque::new();
    loop {
        let Ok(stream) = listener.accept().await else {
            time::sleep(REST).await;
            continue;
        };
        open.retain(|(connection, _)| !connection.is_finished());
        if open.len() >= limits.connections {
            let idle = open.iter().position(|(_, endless)| !endless.goes_on());
            if let Some((oldest, _)) = open.remove(idle.unwrap_or(0)) {
                oldest.abort();
                closings.count(Closed::Crowded);
            }
        }
        let endless = Endless::new();
        let connection = answer(Arc::clone(&http), stream, router.clone(), limits, endless.clone(), closings);
        open.push_back((tokio::spawn(connection).abort_handle(), endless));
        // Each connection runs once before the next is accepted, and aborted ones end.
        task::yield_now().await;
    }
}

/// One request a connection, within these limits.
fn http(limits: Limits) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_header_size(limits.head_bytes)
        .max_buf_size(limits.head_bytes)
        .keep_alive(false);
    http
}

async fn answer(
    http: Arc<http1::Builder>,
    stream: Stream,
    router: Router,
    limits: Limits,
    endless: Endless,
    closings: &'static Closings,
) {
    let router = router.layer(Extension(endless.clone()));
    let closed = match stream {
        Stream::Unix(stream) => {
            let via = Via::Unix(stream.peer_cred().ok().map(|peer| peer.uid()));
            speak(&http, stream, router, via, limits, endless).await
        }
        Stream::Tcp(stream, from, None) => {
            speak(&http, stream, router, Via::Loopback(from), limits, endless).await
        }
        Stream::Tcp(stream, from, Some(tls)) => match time::timeout(limits.head, tls.accept(stream)).await {
            Ok(Ok((stream, access))) => {
                speak(&http, stream, router, Via::Tls(from, access), limits, endless).await
            }
            Ok(Err(_)) => Err(Closed::Tls),
            Err(_) => Err(Closed::NoRequest),
        },
    };
    if let Err(reason) = closed {
        closings.count(reason);
    }
}

async fn speak<S>(
    http: &http1::Builder,
    stream: S,
    router: Router,
    via: Via,
    limits: Limits,
    endless: Endless,
) -> Result<(), Closed>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let service = TowerToHyperService::new(router.layer(Extension(via)));
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
    let ended = match time::timeout(limits.whole, connection.as_mut()).await {
        Err(_) if endless.goes_on() => tokio::select! {
            ended = connection.as_mut() => Ok(ended),
            // What is on its way by then has to be taken, too.
            () = endless.over() => time::timeout(limits.head, connection).await,
        },
        ended => ended,
    };
    match ended {
        Ok(Err(error)) if error.is_timeout() => Err(Closed::NoRequest),
        Ok(Err(error)) if error.is_parse() => Err(Closed::Malformed),
        // Answered, or the client has gone.
        Ok(Ok(()) | Err(_)) => Ok(()),
        Err(_) => Err(Closed::Slow),
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
pub(crate) mod tests;
