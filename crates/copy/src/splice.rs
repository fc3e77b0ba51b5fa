//! Moves stream data inside the kernel, from a socket through a pipe to another socket (splice(2)).

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with};

use turnpike_net::rlimit;

/// Requested pipe size in bytes. 1 MiB is the default maximum without privileges
/// (/proc/sys/fs/pipe-max-size); an empty pipe takes only 10 KiB of bookkeeping.
const SIZE: usize = 1 << 20;

/// Pipe for one direction of one connection at a time.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    capacity: usize,
    held: usize,
}

impl Pipe {
    /// Opens a pipe of 1 MiB, or a smaller one if the user's pipes exceed /proc/sys/fs/pipe-user-pages-soft.
    pub(crate) fn new() -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC)?;
        let (read, write) = (rlimit::unreserved(read)?, rlimit::unreserved(write)?);
        // If this fails with EPERM, the pipe keeps its size.
        let _ = fcntl_setpipe_size(&write, SIZE);
        let capacity = fcntl_getpipe_size(&write)?;
        Ok(Self { read, write, capacity, held: 0 })
    }

    /// Fills an empty pipe from a socket, up to its capacity and `most` bytes (not 0). `Ok(0)` means end of
    /// stream, and `WouldBlock` means that the socket is empty. If there were bytes in the pipe, `WouldBlock`
    /// could also mean that the pipe is full.
    pub(crate) fn fill(&mut self, from: &impl AsFd, most: usize) -> io::Result<usize> {
        let moved = splice(from, &self.write, self.capacity.min(most))?;
        self.held += moved;
        Ok(moved)
    }

    /// Moves as many of the pipe's bytes to `to` as fit; `WouldBlock` if nothing fits. Unlike with
    /// [`turnpike_net::TcpSocket::write`], a broken socket raises SIGPIPE, which Rust's runtime ignores by
    /// default.
    pub(crate) fn drain(&mut self, to: &impl AsFd) -> io::Result<usize> {
        if self.held == 0 {
            return Ok(0);
        }
        let moved = splice(&self.read, to, self.held)?;
        self.held = self.held.saturating_sub(moved);
        Ok(moved)
    }

    pub(crate) fn held(&self) -> usize {
        self.held
    }
}

fn splice(from: &impl AsFd, to: &impl AsFd, len: usize) -> io::Result<usize> {
    let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
    Ok(rustix::pipe::splice(from, None, to, None, len, flags)?)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{ErrorKind, Read as _, Write as _},
        os::unix::net::UnixStream,
    };

    use turnpike_testkit::eventually;

    use super::*;

    fn pair() -> (UnixStream, UnixStream) {
        let (one, other) = UnixStream::pair().unwrap();
        other.set_nonblocking(true).unwrap();
        (one, other)
    }

    #[test]
    fn pipe_moves_a_stream_and_counts_its_content() {
        let (mut client, from) = pair();
        let (mut sink, to) = pair();
        let mut pipe = Pipe::new().unwrap();
        assert!(pipe.capacity >= 1 << 12, "{}", pipe.capacity);
        assert_eq!(pipe.fill(&from, usize::MAX).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(pipe.drain(&to).unwrap(), 0);
        let bytes: Vec<u8> =
            (0..3_000_000_u32).map(|at| (at.wrapping_mul(0x9E37_79B9) >> 24) as u8).collect();
        let sent = bytes.clone();
        let writer = std::thread::spawn(move || client.write_all(&sent));
        let reader = std::thread::spawn(move || {
            let mut heard = Vec::new();
            sink.read_to_end(&mut heard).map(|_| heard)
        });
        let mut moved = 0;
        eventually("the whole stream has been moved", || {
            match pipe.fill(&from, usize::MAX) {
                Ok(0) => return Some(()),
                Ok(n) => {
                    assert_eq!(pipe.held(), n);
                    moved += n;
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            while pipe.held() > 0 {
                if let Err(error) = pipe.drain(&to) {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                }
            }
            None
        });
        drop(to);
        writer.join().unwrap().unwrap();
        assert_eq!(moved, bytes.len());
        assert!(reader.join().unwrap().unwrap() == bytes);
    }
}
