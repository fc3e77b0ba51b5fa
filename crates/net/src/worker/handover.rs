//! Handover of sessions from each worker to the worker of the same number in another process.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{PoisonError, mpsc},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::Workers;
use crate::Channel;

/// Time for a step that involves no other process.
const STEP: Duration = Duration::from_secs(2);

/// A step of a handover. The old process pauses, exports and forgets; the new one imports and serves.
#[derive(Debug)]
pub enum Step {
    /// Rest: what comes waits in its socket.
    Pause(mpsc::Sender<()>),
    /// Send all sessions that can move; answered with their number.
    Export(Channel, mpsc::Sender<io::Result<usize>>),
    /// Take these sessions over; answered with their number.
    Import(Channel, mpsc::Sender<io::Result<usize>>),
    /// Serve again: the handover has failed.
    Resume,
    /// Drop exported sessions and serve the rest.
    Forget(mpsc::Sender<()>),
    /// Serve what was imported.
    Serve,
    /// Have the kernel relay or forward again.
    ResumeFlows,
}

/// Some sessions of a worker on their way: one process reads a batch while the other writes the next.
#[derive(Debug, Serialize, Deserialize)]
pub struct Batch<T> {
    /// Their descriptors travel beside them.
    pub sessions: Vec<T>,
    /// True for the last one, which is empty.
    pub is_last: bool,
}

impl<T> Batch<T> {
    /// Maximum number of sessions.
    pub const MOST: usize = 64;
}

impl<C: From<Step>, S> Workers<C, S> {
    /// Opens a channel for each worker. Returns, worker by worker, the sockets that it answers with and the channel's far end; and the near
    /// ends.
    ///
    /// # Errors
    /// A worker that is stuck or has ended; those of socketpair(2).
    pub fn offer(
        &self,
        sockets: impl FnMut(mpsc::Sender<io::Result<Vec<OwnedFd>>>) -> C,
    ) -> io::Result<(Vec<OwnedFd>, Vec<Channel>)> {
        let (mut descriptors, mut channels) = (Vec::new(), Vec::new());
        for sockets in self.ask(STEP, "lend its sockets", sockets)? {
            let (here, there) = Channel::pair()?;
            descriptors.extend(sockets?);
            descriptors.push(there.into());
            channels.push(here);
        }
        Ok((descriptors, channels))
    }

    /// [`Step::Pause`]. A [`Step::Resume`] is due even if it fails.
    ///
    /// # Errors
    /// A worker that is stuck or has ended.
    pub fn pause(&self) -> io::Result<()> {
        self.ask(STEP, "come to rest", |answer| Step::Pause(answer).into()).map(drop)
    }

    /// [`Step::Export`] through the channels of [`Workers::offer`], each within `patience`. Returns the number of sessions.
    ///
    /// # Errors
    /// A worker that is stuck or has ended; those of [`Channel::send`].
    pub fn export(&self, channels: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        for channel in &channels {
            channel.set_patience(patience)?;
        }
        let mut channels = channels.into_iter();
        let mut export = |answer| match channels.next() {
            Some(channel) => Step::Export(channel, answer),
            // The dropped sender is an error for the asker.
            None => Step::Resume,
        };
        self.ask(patience + STEP, "give its sessions", |answer| export(answer).into())?.into_iter().sum()
    }

    /// [`Step::Forget`].
    ///
    /// # Errors
    /// A worker that is stuck or has ended.
    pub fn forget(&self) -> io::Result<()> {
        self.ask(STEP, "forget what another process has", |answer| Step::Forget(answer).into()).map(drop)
    }

    /// [`Step::Import`], for [`Workers::received`].
    ///
    /// # Errors
    /// `InvalidInput` unless each worker has a channel: one more would change which worker a client reaches.
    pub fn import(&self, channels: Vec<Channel>) -> io::Result<()> {
        if channels.len() != self.count() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (answer, answers) = mpsc::channel();
        for (sender, channel) in self.senders().zip(channels) {
            sender.tell(Step::Import(channel, answer.clone()).into());
        }
        *self.imported.lock().unwrap_or_else(PoisonError::into_inner) = Some(answers);
        Ok(())
    }

    /// Waits for the end of [`Workers::import`], and returns the number of sessions.
    ///
    /// # Errors
    /// Reason why a worker cannot take its sessions over.
    pub fn received(&self) -> io::Result<usize> {
        let results = self.imported.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(results) = results else { return Ok(0) };
        let ended = |_| Err(io::Error::other("a worker has ended; the log lines above may say why"));
        (0..self.count()).map(|_| results.recv().unwrap_or_else(ended)).sum()
    }
}
