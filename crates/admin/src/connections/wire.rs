//! Stream of one connection, shared with hyper: replaces hyper's error responses, which have no body, and
//! makes sure that the last response arrives.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::timeout,
};

use crate::{problem::Problem, response_headers::set_security_headers};
use axum::{
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use http_body_util::BodyExt as _;

/// Time after the response for the client to close the connection. Closing earlier, with unread bytes,
/// would make the kernel send RST, which would destroy a response in flight.
const LINGER: Duration = Duration::from_secs(1);
/// Maximum number of request bytes that are discarded while waiting for the client to close.
const LINGER_BYTES: usize = 1 << 20;

pub(super) struct Wire<S> {
    stream: Arc<Mutex<S>>,
    /// True once a request has reached the service. Earlier output is an error written by hyper.
    has_request: Arc<AtomicBool>,
}

impl<S> Clone for Wire<S> {
    fn clone(&self) -> Self {
        Self { stream: Arc::clone(&self.stream), has_request: Arc::clone(&self.has_request) }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Wire<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream: Arc::new(Mutex::new(stream)), has_request: Arc::default() }
    }

    pub(super) fn take_request(&self) {
        self.has_request.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_request(&self) -> bool {
        self.has_request.load(Ordering::Relaxed)
    }

    fn stream(&self) -> MutexGuard<'_, S> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Discards bytes until the client closes its side. hyper must not read at the same time.
    pub(super) async fn end(&self, most: usize) {
        let mut left = most;
        poll_fn(|cx| {
            let mut piece = [0; 4096];
            loop {
                let mut buffer = ReadBuf::new(&mut piece);
                let read = ready!(Pin::new(&mut *self.stream()).poll_read(cx, &mut buffer));
                left = left.saturating_sub(buffer.filled().len());
                if read.is_err() || buffer.filled().is_empty() || left == 0 {
                    return Poll::Ready(());
                }
            }
        })
        .await;
    }

    /// Responds to a request that hyper could not parse.
    pub(super) async fn refuse(&self, problem: Problem) -> io::Result<()> {
        self.take_request();
        let mut response = problem.into_response();
        set_security_headers(response.headers_mut());
        let bytes = written(response).await;
        let mut left = &bytes[..];
        while !left.is_empty() {
            let sent = poll_fn(|cx| Pin::new(&mut *self.stream()).poll_write(cx, left)).await?;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            left = &left[sent..];
        }
        poll_fn(|cx| Pin::new(&mut *self.stream()).poll_flush(cx)).await
    }

    /// Closes our side, and gives the client time to close its own.
    pub(super) async fn close(&self) {
        let closing = async {
            if poll_fn(|cx| Pin::new(&mut *self.stream()).poll_shutdown(cx)).await.is_ok() {
                self.end(LINGER_BYTES).await;
            }
        };
        let _ = timeout(LINGER, closing).await;
    }
}

async fn written(response: Response) -> Vec<u8> {
    let (head, body) = response.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let mut bytes = format!("HTTP/1.1 {}\r\n", head.status).into_bytes();
    for (name, value) in &head.headers {
        bytes.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    bytes.extend(format!("content-length: {}\r\nconnection: close\r\n\r\n", body.len()).into_bytes());
    bytes.extend(body);
    bytes
}

/// Response to a request that hyper rejected before it reached the service; `None` if no request had begun.
pub(super) fn problem(error: &hyper::Error) -> Option<Problem> {
    let (status, code, detail) = if error.is_timeout() {
        (StatusCode::REQUEST_TIMEOUT, "timeout", "the request headers did not arrive in time")
    } else if error.is_parse_too_large() {
        (
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            "head_too_large",
            "the request headers are too large: at most 8 KiB and 100 headers are allowed",
        )
    } else if error.is_parse() || error.is_incomplete_message() {
        (StatusCode::BAD_REQUEST, "not_http", "the request is not HTTP/1.1, or ended within its headers")
    } else {
        return None;
    };
    Some(Problem::new(status, code, detail))
}

pub(super) fn body_overdue() -> Problem {
    let detail = "the request body did not arrive in time";
    Problem::new(StatusCode::REQUEST_TIMEOUT, "timeout", detail)
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Wire<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream()).poll_read(cx, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Wire<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !self.has_request() {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut *self.stream()).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if !self.has_request() {
            return Poll::Ready(Ok(pieces.iter().map(|piece| piece.len()).sum()));
        }
        Pin::new(&mut *self.stream()).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.has_request() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut *self.stream()).poll_shutdown(cx)
    }
}
