//! Wakes a poller from other threads (eventfd(2)).

use std::{io, os::fd::OwnedFd, sync::Arc};

use rustix::event::{EventfdFlags, eventfd};
use turnpike_net::Poller;

#[derive(Clone, Debug)]
pub(crate) struct Waker(Arc<OwnedFd>);

impl Waker {
    pub(crate) fn new(poller: &Poller, token: u64) -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        poller.add(&fd, token)?;
        Ok(Self(Arc::new(fd)))
    }

    /// Wakes the poller; calls coalesce.
    pub(crate) fn wake(&self) {
        // If the counter is full (EAGAIN), the poller is already being woken.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Resets the event. Must be called before looking for work.
    pub(crate) fn acknowledge(&self) {
        // EAGAIN means that the event has already been reset.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}
