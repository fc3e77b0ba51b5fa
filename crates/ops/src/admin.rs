//! The admin HTTP server: `/metrics` and `/healthz`. It has no authentication yet, so it listens on loopback unless
//! told otherwise.

use std::{
    fmt, io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::net::TcpListener;

use crate::{config::AdminListen, exposition};

/// What the pages show.
#[derive(Clone)]
pub struct AdminState {
    /// The text of `/metrics`, made anew at each scrape.
    pub metrics: Arc<dyn Fn() -> Result<String, fmt::Error> + Send + Sync>,
    /// Whether the server is about to stop.
    pub draining: Arc<AtomicBool>,
}

/// The admin address that was asked for cannot be had.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot serve the admin page on tcp {address}: {source}; choose another with --admin ADDR:PORT, or --admin off"
)]
pub struct AdminError {
    /// Which.
    pub address: SocketAddr,
    /// The kernel's answer.
    pub source: io::Error,
}

/// Listens. The default port may be busy, for a second server say; one that was asked for (`explicit`) may not.
pub(crate) async fn bind(listen: AdminListen, explicit: bool) -> Result<Option<TcpListener>, AdminError> {
    let AdminListen::On(address) = listen else {
        return Ok(None);
    };
    match TcpListener::bind(address).await {
        Ok(listener) => {
            if !address.ip().is_loopback() {
                tracing::warn!(
                    "the admin page on {address} has no authentication: keep strangers away from it"
                );
            }
            Ok(Some(listener))
        }
        Err(source) if explicit => Err(AdminError { address, source }),
        Err(error) => {
            tracing::warn!(
                "no admin page: cannot listen on tcp {address}: {error}; name an address with --admin"
            );
            Ok(None)
        }
    }
}

/// Says where the pages are.
pub(crate) fn say_where(listener: Option<&TcpListener>) {
    match listener.and_then(|listener| listener.local_addr().ok()) {
        Some(address) => tracing::info!("admin page on http://{address}/ (metrics, healthz)"),
        None => tracing::info!("no admin page"),
    }
}

/// Serves the pages, for as long as the process lives.
pub(crate) fn spawn(listener: TcpListener, state: AdminState) {
    tokio::spawn(axum::serve(listener, router(state)).into_future());
}

/// The pages.
pub fn router(state: AdminState) -> Router {
    Router::new()
        .route(
            "/",
            get(|| async { "/metrics  what the server counts, for Prometheus\n/healthz  ok, or draining\n" }),
        )
        .route("/metrics", get(show_metrics))
        .route("/healthz", get(show_health))
        .with_state(state)
}

async fn show_metrics(State(state): State<AdminState>) -> Response {
    match (state.metrics)() {
        Ok(text) => ([(header::CONTENT_TYPE, exposition::CONTENT_TYPE)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn show_health(State(state): State<AdminState>) -> (StatusCode, &'static str) {
    if state.draining.load(Ordering::Relaxed) {
        (StatusCode::SERVICE_UNAVAILABLE, "draining\n")
    } else {
        (StatusCode::OK, "ok\n")
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    async fn get_page(router: &Router, path: &str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let server = tokio::spawn(axum::serve(listener, router.clone()).into_future());
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("it answers");
        server.abort();
        answer
    }

    fn state() -> AdminState {
        AdminState {
            metrics: Arc::new(|| Ok("turnpike_allocations{worker=\"0\"} 5\n# EOF\n".to_owned())),
            draining: Arc::new(AtomicBool::new(false)),
        }
    }

    #[tokio::test]
    async fn health_turns_from_ok_to_draining() {
        let state = state();
        let router = router(state.clone());
        let answer = get_page(&router, "/healthz").await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok\n"), "{answer}");
        state.draining.store(true, Ordering::Relaxed);
        let answer = get_page(&router, "/healthz").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("draining\n"), "{answer}");
    }

    /// Its address stands in the log, and people follow it.
    #[tokio::test]
    async fn the_front_page_names_the_others() {
        let answer = get_page(&router(state()), "/").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains("/metrics ") && answer.contains("/healthz "), "{answer}");
    }

    #[tokio::test]
    async fn metrics_are_served_as_openmetrics_text() {
        let answer = get_page(&router(state()), "/metrics").await;
        assert!(answer.contains("content-type: application/openmetrics-text; version=1.0.0"), "{answer}");
        assert!(answer.contains("turnpike_allocations{worker=\"0\"} 5\n"), "{answer}");
        assert!(answer.ends_with("# EOF\n"), "{answer}");
    }
}
