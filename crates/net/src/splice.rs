//! Moving a stream's bytes inside the kernel: socket, pipe, socket (splice(2)).

use std::{
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

use crate::{rlimit, sys, tcp::size};

/// Bytes asked for per pipe. A pipe of 1 MiB is what an unprivileged process may ask for by default
/// (/proc/sys/fs/pipe-max-size); it takes memory only while it holds bytes, but for 10 KiB of bookkeeping.
const SIZE: i32 = 1 << 20;

/// A pipe that carries one direction of one connection at a time.
#[derive(Debug)]
pub struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    capacity: usize,
    held: usize,
}

impl Pipe {
    /// Opens one, of 1 MiB where the kernel gives that: past /proc/sys/fs/pipe-user-pages-soft it gives less.
    ///
    /// # Errors
    /// Those of pipe2(2).
    pub fn new() -> io::Result<Self> {
        let mut ends = [0; 2];
        // SAFETY: the pointer is to two integers.
        sys::check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_NONBLOCK | libc::O_CLOEXEC) })?;
        // SAFETY: pipe2 gave these descriptors to nobody else.
        let (read, write) = unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
        let (read, write) = (rlimit::ours(read)?, rlimit::ours(write)?);
        // SAFETY: no pointers. EPERM leaves the pipe as it is.
        unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, SIZE) };
        // SAFETY: no pointers.
        let capacity = sys::check(unsafe { libc::fcntl(write.as_raw_fd(), libc::F_GETPIPE_SZ) })?;
        Ok(Self { read, write, capacity: capacity.unsigned_abs() as usize, held: 0 })
    }

    /// Moves what `from` has into the pipe, up to its capacity and to `most` bytes, which is not 0; `Ok(0)` is the end of the stream. Only for an empty pipe:
    /// otherwise `WouldBlock` could also mean that the pipe is full.
    ///
    /// # Errors
    /// Those of splice(2); `WouldBlock` when nothing waits.
    pub fn fill(&mut self, from: &impl AsFd, most: usize) -> io::Result<usize> {
        let moved = splice(from, &self.write, self.capacity.min(most))?;
        self.held += moved;
        Ok(moved)
    }

    /// Moves what the pipe holds to `to`, as much as fits; `Ok(0)` when it holds nothing. Unlike [`crate::TcpSocket::write`], a
    /// broken socket raises SIGPIPE, which Rust's runtime ignores unless told otherwise.
    ///
    /// # Errors
    /// Those of splice(2); `WouldBlock` when nothing fits.
    pub fn drain(&mut self, to: &impl AsFd) -> io::Result<usize> {
        if self.held == 0 {
            return Ok(0);
        }
        let moved = splice(&self.read, to, self.held)?;
        self.held = self.held.saturating_sub(moved);
        Ok(moved)
    }

    /// Bytes inside.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Bytes that fit at most.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

fn splice(from: &impl AsFd, to: &impl AsFd, len: usize) -> io::Result<usize> {
    // SAFETY: both descriptors are open; no offsets, as neither end is a file.
    size(unsafe {
        libc::splice(
            from.as_fd().as_raw_fd(),
            std::ptr::null_mut(),
            to.as_fd().as_raw_fd(),
            std::ptr::null_mut(),
            len,
            libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK,
        )
    })
}
