//! Queue of requests from other nodes.

use tokio::sync::mpsc;
use turnpike_api::Reply;
use turnpike_fleet::Question;

const QUESTIONS: usize = 64;

pub(super) type QuestionSender = mpsc::Sender<(Question, Reply)>;

pub(super) struct Questions(pub(super) mpsc::Receiver<(Question, Reply)>);

pub(super) fn channel() -> (QuestionSender, Questions) {
    let (sender, receiver) = mpsc::channel(QUESTIONS);
    (sender, Questions(receiver))
}
