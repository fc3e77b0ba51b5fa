//! Progress of one connection, which decides whether it may be closed to make room for a new one.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, watch};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestStage {
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
pub(crate) struct RequestProgress {
    stage: Arc<watch::Sender<RequestStage>>,
    _place: Arc<OwnedSemaphorePermit>,
}

impl RequestProgress {
    pub(super) fn new(place: OwnedSemaphorePermit) -> Self {
        Self { stage: Arc::new(watch::Sender::new(RequestStage::Waiting)), _place: Arc::new(place) }
    }

    /// Records that a request is being processed: the connection is then no longer closed to make room for a
    /// new one.
    pub(crate) fn work(&self) {
        self.stage.send_if_modified(|stage| {
            let waits = *stage == RequestStage::Waiting;
            if waits {
                *stage = RequestStage::Working;
            }
            waits
        });
    }

    pub(super) fn answered(&self) {
        self.stage.send_replace(RequestStage::Answered);
    }

    pub(super) fn is_answered(&self) -> bool {
        *self.stage.borrow() == RequestStage::Answered
    }

    /// Marks the response as endless, without a time limit until the returned value is dropped.
    pub(crate) fn stream(&self) -> Streaming {
        self.stage.send_replace(RequestStage::Streaming);
        Streaming(self.clone())
    }

    pub(super) fn waits(&self) -> bool {
        *self.stage.borrow() == RequestStage::Waiting
    }

    pub(super) fn streams(&self) -> bool {
        *self.stage.borrow() == RequestStage::Streaming
    }

    pub(super) async fn streaming(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage == RequestStage::Streaming).await;
    }

    pub(crate) async fn streamed(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage != RequestStage::Streaming).await;
    }

    pub(super) async fn stalled(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage == RequestStage::Stalled).await;
    }
}

pub(crate) struct Streaming(RequestProgress);

impl Streaming {
    /// Closes the connection immediately, because the client has stopped reading.
    pub(crate) fn give_up(&self) {
        self.0.stage.send_replace(RequestStage::Stalled);
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        self.0.stage.send_if_modified(|stage| {
            let streams = *stage == RequestStage::Streaming;
            if streams {
                *stage = RequestStage::Working;
            }
            streams
        });
    }
}
