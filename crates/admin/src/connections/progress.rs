//! Progress of one connection, which decides whether it may be closed to make room for a newcomer.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, watch};

/// Stage of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No complete request yet, or a delayed refusal. May be closed for a newcomer.
    Waiting,
    /// A request is at work, or its answer is on the way.
    Working,
    /// An answer without an end.
    Streaming,
    /// An answer without an end whose client has stopped taking it.
    Stalled,
    /// The answer has been sent; the client is given time to take it. May be closed for a newcomer.
    Answered,
}

/// Progress of a connection, and its place among those of its listener. A change that outlives its connection keeps the place.
#[derive(Clone)]
pub(crate) struct Progress {
    stage: Arc<watch::Sender<Stage>>,
    _place: Arc<OwnedSemaphorePermit>,
}

impl Progress {
    pub(super) fn new(place: OwnedSemaphorePermit) -> Self {
        Self { stage: Arc::new(watch::Sender::new(Stage::Waiting)), _place: Arc::new(place) }
    }

    /// A request has begun: from now on the connection is not closed for a newcomer.
    pub(crate) fn work(&self) {
        self.stage.send_if_modified(|stage| {
            let waits = *stage == Stage::Waiting;
            if waits {
                *stage = Stage::Working;
            }
            waits
        });
    }

    /// The answer has been sent.
    pub(super) fn answered(&self) {
        self.stage.send_replace(Stage::Answered);
    }

    pub(super) fn is_answered(&self) -> bool {
        *self.stage.borrow() == Stage::Answered
    }

    /// The answer has no end, and no time limit until the returned value is dropped.
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

    /// Returns when the answer turns out to have no end.
    pub(super) async fn streaming(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage == Stage::Streaming).await;
    }

    /// Returns when the answer without an end has ended.
    pub(crate) async fn streamed(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage != Stage::Streaming).await;
    }

    /// Returns when the client has stopped taking an answer without an end.
    pub(super) async fn stalled(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage == Stage::Stalled).await;
    }
}

/// An answer without an end, as long as this exists.
pub(crate) struct Streaming(Progress);

impl Streaming {
    /// The client takes nothing any more: its connection is closed at once.
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
