//! Progress of one connection, which decides whether it may be closed to make room for a new one.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, watch};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No complete request has arrived, or a refusal is being delayed. May be closed to make room for a new
    /// connection.
    Waiting,
    /// A request is being processed, or its response is being sent.
    Working,
    /// An endless response is being sent.
    Streaming,
    /// An endless response whose client has stopped reading.
    Stalled,
    /// The client may still be reading the response. May be closed to make room for a new connection.
    Answered,
}

/// Progress of a connection, and its slot within the connection limit. A change that outlives the connection
/// keeps the slot.
#[derive(Clone)]
pub(crate) struct Progress {
    stage: Arc<watch::Sender<Stage>>,
    _place: Arc<OwnedSemaphorePermit>,
}

impl Progress {
    pub(super) fn new(place: OwnedSemaphorePermit) -> Self {
        Self { stage: Arc::new(watch::Sender::new(Stage::Waiting)), _place: Arc::new(place) }
    }

    /// Records that a request is being processed: the connection is then no longer closed to make room for a
    /// new one.
    pub(crate) fn work(&self) {
        self.stage.send_if_modified(|stage| {
            let waits = *stage == Stage::Waiting;
            if waits {
                *stage = Stage::Working;
            }
            waits
        });
    }

    pub(super) fn answered(&self) {
        self.stage.send_replace(Stage::Answered);
    }

    pub(super) fn is_answered(&self) -> bool {
        *self.stage.borrow() == Stage::Answered
    }

    /// Marks the response as endless, without a time limit until the returned value is dropped.
    pub(crate) fn stream(&self) -> Streaming {
        self.stage.send_replace(Stage::Streaming);
        Streaming(self.clone())
    }

    pub(super) fn waits(&self) -> bool {
        *self.stage.borrow() == Stage::Waiting
    }

    pub(super) fn streams(&self) -> bool {
        *self.stage.borrow() == Stage::Streaming
    }

    pub(super) async fn streaming(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage == Stage::Streaming).await;
    }

    pub(crate) async fn streamed(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage != Stage::Streaming).await;
    }

    pub(super) async fn stalled(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage == Stage::Stalled).await;
    }
}

pub(crate) struct Streaming(Progress);

impl Streaming {
    /// Closes the connection immediately, because the client has stopped reading.
    pub(crate) fn give_up(&self) {
        self.0.stage.send_replace(Stage::Stalled);
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        self.0.stage.send_if_modified(|stage| {
            let streams = *stage == Stage::Streaming;
            if streams {
                *stage = Stage::Working;
            }
            streams
        });
    }
}
