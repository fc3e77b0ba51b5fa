//! epoll(7), level-triggered, and an eventfd to wake a worker from another thread.

use std::{io, os::fd::AsFd, sync::Arc, time::Duration};

/// What is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// As given to [`Poller::add`].
    pub token: u64,
    /// Readable.
    pub readable: bool,
    /// Writable.
    pub writable: bool,
    /// EPOLLERR: for UDP sockets with `errors`, read the error queue.
    pub error: bool,
}

/// An epoll instance.
pub struct Poller {}

impl Poller {
    /// Creates one.
    pub fn new() -> io::Result<Self> {
        todo!()
    }
    /// Watches for readability.
    pub fn add(&self, _fd: &impl AsFd, _token: u64) -> io::Result<()> {
        todo!()
    }
    /// Also watches for writability, or stops to.
    pub fn set_writable(&self, _fd: &impl AsFd, _token: u64, _on: bool) -> io::Result<()> {
        todo!()
    }
    /// Stops watching. Closing the descriptor does the same.
    pub fn remove(&self, _fd: &impl AsFd) -> io::Result<()> {
        todo!()
    }
    /// Waits, `None` for ever. An interruption by a signal counts as a time-out.
    pub fn wait(&mut self, _timeout: Option<Duration>) -> io::Result<&[Event]> {
        todo!()
    }
}

/// Wakes a [`Poller`] from any thread.
#[derive(Clone)]
pub struct Waker(#[allow(dead_code)] Arc<()>);

impl Waker {
    /// An eventfd watched by `poller` under `token`.
    pub fn new(_poller: &Poller, _token: u64) -> io::Result<Self> {
        todo!()
    }
    /// Wakes; many calls may give one event.
    pub fn wake(&self) {
        todo!()
    }
    /// To be called by the woken side, before it looks at what it was woken for.
    pub fn acknowledge(&self) {
        todo!()
    }
}
