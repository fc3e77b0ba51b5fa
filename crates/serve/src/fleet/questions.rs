//! Queue of requests from other nodes.

use tokio::sync::mpsc;
use turnpike_api::Reply;
use turnpike_fleet::ForwardedRequest;

const QUESTIONS: usize = 64;

pub(super) type QuestionSender = mpsc::Sender<(ForwardedRequest, Reply)>;

pub(super) struct Questions(pub(super) mpsc::Receiver<(ForwardedRequest, Reply)>);

pub(super) fn channel() -> (QuestionSender, Questions) {
    let (sender, receiver) = mpsc::channel(QUESTIONS);
    (sender, Questions(receiver))
}
