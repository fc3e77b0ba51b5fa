//! The admin HTTP server: `/metrics` and `/healthz`. It has no authentication yet, so it listens on loopback unless
//! told otherwise.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use turnpike_relay::WorkerSnapshot;

use crate::metrics::{self, Scrape};

/// What the pages show.
#[derive(Clone)]
pub struct AdminState {
    /// What each worker has counted.
    pub snapshots: Arc<dyn Fn() -> Vec<WorkerSnapshot> + Send + Sync>,
    /// Whether the server is about to stop.
    pub draining: Arc<AtomicBool>,
    /// Log lines that were lost.
    pub log_lost: Arc<std::sync::atomic::AtomicU64>,
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
    let scrape = Scrape {
        workers: (state.snapshots)(),
        process: crate::process::ProcessUsage::read(),
        draining: state.draining.load(Ordering::Relaxed),
        log_lost: state.log_lost.load(Ordering::Relaxed),
    };
    match metrics::encode(scrape) {
        Ok(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
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
    use std::sync::atomic::AtomicU64;

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
            snapshots: Arc::new(|| vec![WorkerSnapshot { allocations: 5, ..WorkerSnapshot::default() }]),
            draining: Arc::new(AtomicBool::new(false)),
            log_lost: Arc::new(AtomicU64::new(0)),
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
