//! Runs each change to completion in its own task, so that a disconnect or timeout cannot leave it without
//! its audit line or announcement.

use std::sync::Arc;

use axum::{
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use tokio::sync::watch;

use crate::problem::Problem;

#[derive(Clone, Default)]
pub(crate) struct Changes(Arc<watch::Sender<usize>>);

impl Changes {
    /// Runs a change to completion, even if the returned future is dropped.
    pub(crate) async fn run(&self, change: impl Future<Output = Response> + Send + 'static) -> Response {
        let running = self.begin();
        let task = tokio::spawn(async move {
            let response = change.await;
            drop(running);
            response
        });
        task.await.unwrap_or_else(|error| {
            let detail = format!("the change was interrupted: {error}");
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", detail).into_response()
        })
    }

    pub(crate) fn settled(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut count = self.0.subscribe();
        async move {
            let _ = count.wait_for(|count| *count == 0).await;
        }
    }

    fn begin(&self) -> RunningChange {
        self.0.send_modify(|count| *count += 1);
        RunningChange(self.clone())
    }
}

struct RunningChange(Changes);

impl Drop for RunningChange {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}
