//! Connections of the admin interface and of applications: few, short-lived, one request each.

mod progress;
mod room;
mod wire;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Extension, Router,
    http::{Request, StatusCode},
    response::{IntoResponse as _, Response},
};
use hyper::{
    body::Incoming,
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Notify,
    task, time,
};

use crate::{
    http_listener::{HttpListener, HttpStream},
    problem::Problem,
    response_headers::set_security_headers,
    via::Via,
};
pub(crate) use progress::RequestProgress;
use room::{ConnectionAdmission, ConnectionRoom};
use wire::Wire;

/// Maximum number of connections to the admin interface, over all its listeners.
const MOST_ADMIN: usize = 32;
/// Maximum number of connections from applications, over all listeners for them. A wrong key occupies its
/// slot for a second.
const MOST_OF_APPLICATIONS: usize = 128;

/// Descriptors for the admin interface: one per open or closing connection, and some for files.
pub const DESCRIPTORS: u64 = 48;
/// Additional descriptors for a program that has listeners for applications.
pub const CREDENTIALS_DESCRIPTORS: u64 = 144;

/// Pause after a failed accept, usually because descriptors have run out.
const REST: Duration = Duration::from_millis(100);
/// Time for a slow client to receive the response that reports the timeout.
const LAST_WORD: Duration = Duration::from_secs(1);
/// Time for a new client to send its request and receive 503.
const REFUSAL: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionLimits {
    /// Maximum number of connections per listener. A new connection replaces the oldest idle one; if all
    /// are busy, it gets 503.
    pub(crate) connections: usize,
    /// Time limit for the request headers.
    pub(crate) head: Duration,
    /// Time limit for the whole exchange, until the last byte of the response has been received.
    pub(crate) whole: Duration,
    /// Maximum size of the request headers in bytes.
    pub(crate) head_bytes: usize,
}

impl ConnectionLimits {
    /// Limits for each of several listeners. The connections are divided among the listeners, so that a
    /// flood on one does not affect the others.
    pub(crate) fn of_one(listeners: usize) -> Self {
        Self::share(MOST_ADMIN, listeners)
    }

    /// Limits for each of several listeners for applications.
    pub(crate) fn of_one_for_applications(listeners: usize) -> Self {
        Self::share(MOST_OF_APPLICATIONS, listeners)
    }

    fn share(most: usize, listeners: usize) -> Self {
        let seconds = Duration::from_secs;
        let connections = (most / listeners.max(1)).max(1);
        Self { connections, head: seconds(10), whole: seconds(30), head_bytes: 8192 }
    }
}

/// Reasons for refusing a connection, or for closing it without a complete response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// An idle connection was closed to make room for a new one, or a new one was closed without a
    /// response.
    Crowded,
    /// All connections were busy, and the new one got 503.
    Busy,
    /// The request did not arrive in time.
    NoRequest,
    Slow,
    /// The request is not valid HTTP, or its headers are too long.
    Malformed,
    /// The TLS handshake failed, or the client certificate is unknown.
    Tls,
}

pub(crate) struct CloseReasons {
    /// Subject of log lines.
    of: &'static str,
    counts: [AtomicU64; 6],
}

pub(crate) static ADMIN: CloseReasons = CloseReasons::new("the admin interface");
pub(crate) static APPLICATIONS: CloseReasons = CloseReasons::new("the credentials API");

impl CloseReasons {
    const fn new(of: &'static str) -> Self {
        Self { of, counts: [const { AtomicU64::new(0) }; 6] }
    }

    pub(crate) fn by_reason(&self) -> [(&'static str, u64); 6] {
        [
            ("crowded", Closed::Crowded),
            ("busy", Closed::Busy),
            ("no_request", Closed::NoRequest),
            ("slow", Closed::Slow),
            ("malformed", Closed::Malformed),
            ("tls", Closed::Tls),
        ]
        .map(|(name, reason)| (name, self.counts[reason as usize].load(Ordering::Relaxed)))
    }

    fn count(&self, reason: Closed) {
        self.counts[reason as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Accepts and serves connections until `left` is notified.
pub(crate) async fn serve(
    listener: HttpListener,
    router: Router,
    limits: ConnectionLimits,
    close_reasons: &'static CloseReasons,
    left: Arc<Notify>,
) {
    let http = Arc::new(http(limits));
    let refusing = Router::new().fallback(busy);
    let mut room = ConnectionRoom::new(limits.connections, close_reasons);
    loop {
        let accepted = tokio::select! {
            biased;
            () = left.notified() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok(stream) = accepted else {
            time::sleep(REST).await;
            continue;
        };
        match room.place().await {
            Some(ConnectionAdmission::Free(place)) => {
                let progress = RequestProgress::new(place);
                let connection = answer(
                    Arc::clone(&http),
                    stream,
                    router.clone(),
                    limits,
                    progress.clone(),
                    close_reasons,
                );
                room.enter(tokio::spawn(connection).abort_handle(), progress);
            }
            Some(ConnectionAdmission::Busy(place)) => {
                close_reasons.count(Closed::Busy);
                let limits = ConnectionLimits { head: REFUSAL, whole: REFUSAL, ..limits };
                let progress = RequestProgress::new(place);
                tokio::spawn(answer(
                    Arc::clone(&http),
                    stream,
                    refusing.clone(),
                    limits,
                    progress,
                    close_reasons,
                ));
            }
            None => close_reasons.count(Closed::Crowded),
        }
        // Gives each connection a turn before the next one is accepted, and lets aborted ones end.
        task::yield_now().await;
    }
}

async fn busy() -> Response {
    let detail = "all connections of this listener are busy: try again";
    let mut response = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "busy", detail).into_response();
    set_security_headers(response.headers_mut());
    response
}

/// One request per connection. A client that closes its side after the request still gets the response.
fn http(limits: ConnectionLimits) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_header_size(limits.head_bytes)
        .max_buf_size(limits.head_bytes)
        .half_close(true)
        .keep_alive(false);
    http
}

async fn answer(
    http: Arc<http1::Builder>,
    stream: HttpStream,
    router: Router,
    limits: ConnectionLimits,
    progress: RequestProgress,
    close_reasons: &'static CloseReasons,
) {
    let closed = match stream {
        HttpStream::Unix(stream) => {
            let via = Via::Unix(stream.peer_cred().ok().map(|peer| peer.uid()));
            return speak(&http, stream, router, via, limits, progress, close_reasons).await;
        }
        HttpStream::Tcp(stream, from, None) => {
            return speak(&http, stream, router, Via::Loopback(from), limits, progress, close_reasons).await;
        }
        HttpStream::Tcp(stream, from, Some(tls)) => {
            match time::timeout(limits.head, tls.accept(stream)).await {
                Ok(Ok((stream, client))) => {
                    return speak(
                        &http,
                        stream,
                        router,
                        Via::Tls(from, client),
                        limits,
                        progress,
                        close_reasons,
                    )
                    .await;
                }
                Ok(Err(_)) => Closed::Tls,
                Err(_) => Closed::NoRequest,
            }
        }
    };
    close_reasons.count(closed);
}

async fn speak<S>(
    http: &http1::Builder,
    stream: S,
    router: Router,
    via: Via,
    limits: ConnectionLimits,
    progress: RequestProgress,
    close_reasons: &'static CloseReasons,
) where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let wire = Wire::new(stream);
    let router = TowerToHyperService::new(router.layer(Extension(progress.clone())).layer(Extension(via)));
    let service = service_fn(|request: Request<Incoming>| {
        wire.take_request();
        let (answer, progress) = (router.call(request), progress.clone());
        async move {
            let answer = answer.await;
            // The response is sent from here on.
            progress.work();
            answer
        }
    });
    let closed = {
        let connection = http.serve_connection(TokioIo::new(wire.clone()), service);
        tokio::select! {
            ended = connection => Ok(ended),
            closed = overdue(limits, &progress) => Err(closed),
            // hyper does not read after the request, so the end of the stream is detected here.
            () = async { progress.streaming().await; wire.end(usize::MAX).await } => Ok(Ok(())),
        }
    };
    let is_waiting = progress.waits();
    progress.answered();
    match closed {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            if !wire.has_request()
                && let Some(problem) = wire::problem(&error)
            {
                let _ = time::timeout(limits.head, wire.refuse(problem)).await;
            }
            // Other errors mean that the client has disconnected.
            if error.is_timeout() {
                close_reasons.count(Closed::NoRequest);
            } else if error.is_parse() {
                close_reasons.count(Closed::Malformed);
            }
        }
        Err(closed) => {
            // The body did not arrive in time, so the request was not processed and has no response yet.
            if wire.has_request() && is_waiting {
                let _ = time::timeout(LAST_WORD, wire.refuse(wire::body_overdue())).await;
                close_reasons.count(Closed::NoRequest);
                wire.close().await;
            } else {
                close_reasons.count(closed);
            }
            return;
        }
    }
    wire.close().await;
}

/// Returns when the response has timed out; for an endless response, the timeout starts when it ends.
async fn overdue(limits: ConnectionLimits, progress: &RequestProgress) -> Closed {
    let in_time = async {
        time::sleep(limits.whole).await;
        if progress.streams() {
            progress.streamed().await;
            // The rest of the response must be received too.
            time::sleep(limits.head).await;
        }
    };
    tokio::select! {
        () = in_time => {}
        () = progress.stalled() => {}
    }
    Closed::Slow
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
pub(crate) mod tests;
