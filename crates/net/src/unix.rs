//! Unix stream sockets (unix(7)): their names, their listeners and the files that those leave behind. A connected one is a
//! [`TcpSocket`], for the data path asks the same of both.

use std::{
    fmt, fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    },
    path::Path,
    str::FromStr,
    sync::Arc,
};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::{
    rlimit,
    socket::set_buffer,
    sys,
    tcp::{self, TcpSocket},
};

/// Bytes of `sun_path`, less one: a path ends, and an abstract name begins, with a zero byte.
const LONGEST: usize = 107;

/// An absolute path, or `@` and a name of the abstract namespace, which has no file. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnixName(Arc<str>);

impl FromStr for UnixName {
    type Err = &'static str;

    /// Takes `/run/app.sock` or `@app`.
    fn from_str(text: &str) -> Result<Self, &'static str> {
        match text.as_bytes() {
            [b'/', _, ..] | [b'@', _, ..] if text.contains('\0') => Err("it has a zero byte"),
            [b'/', rest @ ..] if rest.len() >= LONGEST => Err("its path has more than 107 bytes"),
            [b'@', rest @ ..] if rest.len() > LONGEST => Err("its name has more than 107 bytes"),
            [b'/', _, ..] | [b'@', _, ..] => Ok(Self(text.into())),
            _ => Err("a Unix socket is an absolute path, or @ and a name"),
        }
    }
}

impl UnixName {
    /// Where its file is; an abstract name has none.
    pub fn path(&self) -> Option<&Path> {
        (!self.0.starts_with('@')).then(|| Path::new(&*self.0))
    }

    fn address(&self) -> io::Result<SockAddr> {
        match self.path() {
            Some(path) => SockAddr::unix(path),
            None => SockAddr::unix(format!("\0{}", &self.0[1..])),
        }
    }
}

/// `/run/app.sock`, as it was written.
impl fmt::Display for UnixName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A listening, non-blocking Unix socket. Unlike TCP's, several workers share one by [`UnixListener::try_clone`]; they watch it
/// with [`crate::poll::Poller::add_exclusive`], so that not all of them wake up for each client.
#[derive(Debug)]
pub struct UnixListener {
    fd: OwnedFd,
    name: UnixName,
}

impl UnixListener {
    /// Binds and listens. A file that a listener left behind which is gone is removed first. `mode` are the permissions of the
    /// new file (whoever may write may connect); `None` leaves them to the umask. The file goes when the [`SocketFile`] is
    /// dropped.
    ///
    /// # Errors
    /// `AddrInUse` where somebody listens there, `AlreadyExists` where a file is in the way that is no socket; those of
    /// socket(2), bind(2), chmod(2) and listen(2).
    pub fn bind(name: &UnixName, mode: Option<u32>) -> io::Result<(Self, SocketFile)> {
        let socket = stream()?;
        let address = name.address()?;
        match (socket.bind(&address), name.path()) {
            (Err(error), Some(path)) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path, &address)?;
                socket.bind(&address)?;
            }
            (result, _) => result?,
        }
        let file = SocketFile::of(name)?;
        file.set_mode(mode)?;
        // Until now nobody could connect, whatever the permissions were.
        socket.listen(i32::MAX)?;
        Ok((Self { fd: socket.into(), name: name.clone() }, file))
    }

    /// Takes over a listener of this name that another process has made, with the clients that wait in it. [`SocketFile::take_over`]
    /// goes with it.
    ///
    /// # Errors
    /// `InvalidInput` for what is no listening Unix socket; those of getsockopt(2).
    pub fn take_over(fd: OwnedFd, name: &UnixName) -> io::Result<Self> {
        let option = |name| sys::get_option(fd.as_fd(), libc::SOL_SOCKET, name);
        let found = (option(libc::SO_DOMAIN)?, option(libc::SO_TYPE)?, option(libc::SO_ACCEPTCONN)?);
        if found != (libc::AF_UNIX, libc::SOCK_STREAM, 1) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no listening Unix socket"));
        }
        Ok(Self { fd, name: name.clone() })
    }

    /// The same listener once more, for another worker.
    ///
    /// # Errors
    /// Those of dup(2).
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()?, name: self.name.clone() })
    }

    /// Takes one connection; `None` when none waits.
    ///
    /// # Errors
    /// As for [`crate::TcpListener::accept`].
    pub fn accept(&self) -> io::Result<Option<TcpSocket>> {
        // Clients hardly ever have a name.
        Ok(tcp::accept(self.fd.as_fd())?.map(|(fd, _)| TcpSocket::from(fd)))
    }

    /// Where it listens.
    pub fn name(&self) -> &UnixName {
        &self.name
    }
}

impl AsFd for UnixListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The file of a listener. Dropping it removes the file, unless another one has taken its place.
#[derive(Debug)]
pub struct SocketFile {
    name: UnixName,
    /// Device and inode.
    id: Option<(u64, u64)>,
}

impl SocketFile {
    fn of(name: &UnixName) -> io::Result<Self> {
        let id = name.path().map(fs::symlink_metadata).transpose()?.map(|file| (file.dev(), file.ino()));
        Ok(Self { name: name.clone(), id })
    }

    /// The file of a listener that another process has made, which leaves it.
    ///
    /// # Errors
    /// Those of lstat(2).
    pub fn take_over(name: &UnixName) -> io::Result<Self> {
        Self::of(name)
    }

    /// Leaves the file to a process that has taken it over.
    pub fn leave(mut self) {
        self.id = None;
    }

    /// Changes its permissions.
    ///
    /// # Errors
    /// Those of chmod(2).
    pub fn set_mode(&self, mode: Option<u32>) -> io::Result<()> {
        match (self.name.path(), mode) {
            (Some(path), Some(mode)) => fs::set_permissions(path, fs::Permissions::from_mode(mode)),
            _ => Ok(()),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let (Some(path), Some(id)) = (self.name.path(), self.id) else { return };
        if fs::symlink_metadata(path).is_ok_and(|file| (file.dev(), file.ino()) == id) {
            // Nobody is left to hear of an error.
            let _ = fs::remove_file(path);
        }
    }
}

/// Connects; done when this returns, as there is no network to wait for.
///
/// # Errors
/// Those of socket(2) and connect(2); `WouldBlock` when the listener's queue is full, so that the same call may succeed later.
pub fn connect(name: &UnixName) -> io::Result<TcpSocket> {
    let socket = stream()?;
    socket.connect(&name.address()?)?;
    Ok(TcpSocket::from(OwnedFd::from(socket)))
}

/// A pair of connected sockets that keep messages apart (SOCK_SEQPACKET) and never wait. Each holds up to `buffer` bytes on their way to the
/// other, as far as the kernel allows.
///
/// # Errors
/// Those of socketpair(2) and fcntl(2).
pub fn messages(buffer: usize) -> io::Result<(TcpSocket, TcpSocket)> {
    let (one, other) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None)?;
    for end in [&one, &other] {
        end.set_nonblocking(true)?;
        set_buffer(end.as_fd(), Some(buffer), libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)?;
    }
    Ok((TcpSocket::from(OwnedFd::from(one)), TcpSocket::from(OwnedFd::from(other))))
}

fn stream() -> io::Result<Socket> {
    rlimit::ours(Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?)
}

/// Removes a socket's file if nobody listens there any more: the kernel leaves it when a program ends.
fn remove_stale(path: &Path, address: &SockAddr) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(file) if !file.file_type().is_socket() => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "a file that is no socket is in the way",
            ));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    match stream()?.connect(address) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        // A full queue, a socket of another type, one that we may not write to: somebody has it.
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_path_or_abstract_and_fits_into_the_address() {
        for good in
            ["/run/app.sock", "@app", &format!("/{}", "x".repeat(106)), &format!("@{}", "x".repeat(107))]
        {
            let name = good.parse::<UnixName>().expect(good);
            assert_eq!(name.to_string(), good);
            assert!(name.address().is_ok(), "{good}");
        }
        let long = format!("/{}", "x".repeat(107));
        for bad in ["", "/", "@", "app.sock", "./app.sock", "/a\0b", &long, &format!("@{}", "x".repeat(108))]
        {
            assert!(bad.parse::<UnixName>().is_err(), "{bad:?}");
        }
    }
}
