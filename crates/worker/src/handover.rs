//! Hands the sessions of each worker over to the worker with the same number in a new process.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{PoisonError, mpsc},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{Channel, Workers};

/// Timeout for a step that does not involve the other process.
const STEP: Duration = Duration::from_secs(2);

/// Steps of a handover. The old process pauses, exports and forgets sessions; the new one imports and serves
/// them.
#[derive(Debug)]
pub enum HandoverStep {
    /// Pause: stop reading, so that arriving data waits in the sockets.
    Pause(mpsc::Sender<()>),
    /// Send all movable sessions. The reply is their number.
    Export(Channel, mpsc::Sender<io::Result<usize>>),
    /// Receive sessions. The reply is their number.
    Import(Channel, mpsc::Sender<io::Result<usize>>),
    /// Continue after a failed handover.
    Resume,
    /// Drop exported sessions and serve the rest.
    Forget(mpsc::Sender<()>),
    /// Serve the imported sessions.
    Serve,
    /// Let the kernel relay or forward again.
    ResumeFlows,
}

/// Part of a worker's sessions, so that one process can read a batch while the other writes the next.
#[derive(Debug, Serialize, Deserialize)]
pub struct HandoverBatch<T> {
    /// The sessions' descriptors are sent alongside.
    pub sessions: Vec<T>,
    /// True for the last batch, which is empty.
    pub is_last: bool,
}

impl<T> HandoverBatch<T> {
    /// Maximum number of sessions per batch.
    pub const MOST: usize = 64;
}

impl<C: From<HandoverStep>, S> Workers<C, S> {
    /// Opens a channel for each worker. Returns each worker's sockets followed by the new process's end of
    /// its channel, and a list of this process's ends. Fails if a worker is stuck or has ended.
    pub fn offer(
        &self,
        sockets: impl FnMut(mpsc::Sender<io::Result<Vec<OwnedFd>>>) -> C,
    ) -> io::Result<(Vec<OwnedFd>, Vec<Channel>)> {
        let (mut descriptors, mut channels) = (Vec::new(), Vec::new());
        for sockets in self.ask(STEP, "export its sockets", sockets)? {
            let (here, there) = Channel::pair()?;
            descriptors.extend(sockets?);
            descriptors.push(there.into());
            channels.push(here);
        }
        Ok((descriptors, channels))
    }

    /// Performs [`HandoverStep::Pause`]. Send [`HandoverStep::Resume`] afterwards even if this fails.
    pub fn pause(&self) -> io::Result<()> {
        self.ask(STEP, "pause", |answer| HandoverStep::Pause(answer).into()).map(drop)
    }

    /// Performs [`HandoverStep::Export`] through the channels of [`Workers::offer`], each within `patience`. Returns
    /// the number of sessions.
    pub fn export(&self, channels: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        for channel in &channels {
            channel.set_patience(patience)?;
        }
        let mut channels = channels.into_iter();
        let mut export = |answer| match channels.next() {
            Some(channel) => HandoverStep::Export(channel, answer),
            // Dropping the sender makes the request fail.
            None => HandoverStep::Resume,
        };
        self.ask(patience + STEP, "export its sessions", |answer| export(answer).into())?.into_iter().sum()
    }

    /// Performs [`HandoverStep::Forget`].
    pub fn forget(&self) -> io::Result<()> {
        self.ask(STEP, "drop its exported sessions", |answer| HandoverStep::Forget(answer).into()).map(drop)
    }

    /// Starts [`HandoverStep::Import`]; wait with [`Workers::received`]. `InvalidInput` unless each worker has a
    /// channel: with a different number of workers, clients would reach the wrong one.
    pub fn import(&self, channels: Vec<Channel>) -> io::Result<()> {
        if channels.len() != self.count() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (answer, answers) = mpsc::channel();
        for (sender, channel) in self.senders().zip(channels) {
            sender.tell(HandoverStep::Import(channel, answer.clone()).into());
        }
        *self.imported.lock().unwrap_or_else(PoisonError::into_inner) = Some(answers);
        Ok(())
    }

    /// Waits for the end of [`Workers::import`] and returns the number of sessions.
    pub fn received(&self) -> io::Result<usize> {
        let results = self.imported.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(results) = results else { return Ok(0) };
        let ended = |_| Err(io::Error::other("a worker has ended; see the log lines above for the reason"));
        (0..self.count()).map(|_| results.recv().unwrap_or_else(ended)).sum()
    }
}
