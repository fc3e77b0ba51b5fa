//! Listening Unix stream sockets (unix(7)) and their files. A connected one is a [`TcpSocket`], because the data
//! path treats both alike.

use std::{
    ffi::OsStr,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
            net::SocketAddr,
        },
    },
    path::{Path, PathBuf},
};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::{
    rlimit, sys,
    tcp::{self, TcpSocket},
};

/// Listening, non-blocking Unix socket. Workers share one with [`UnixListener::try_clone`] and watch it with
/// [`crate::Interest::Exclusive`], so that a client does not wake all of them.
#[derive(Debug)]
pub struct UnixListener {
    fd: OwnedFd,
}

impl UnixListener {
    /// Binds and listens; a stale socket file is removed first. `mode` sets the permissions of the new file
    /// (write permission allows connecting); `None` leaves it to the umask. Dropping the [`SocketFile`]
    /// removes the file. `AddrInUse` if another listener exists, `AlreadyExists` if the path is another kind
    /// of file.
    pub fn bind(at: &SocketAddr, mode: Option<u32>) -> io::Result<(Self, SocketFile)> {
        let socket = stream()?;
        let address = raw(at)?;
        match (socket.bind(&address), at.as_pathname()) {
            (Err(error), Some(path)) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path, &address)?;
                socket.bind(&address)?;
            }
            (result, _) => result?,
        }
        let file = SocketFile::take_over(at)?;
        file.set_mode(mode)?;
        // No client can connect before listen(2), so the permissions take effect in time.
        socket.listen(i32::MAX)?;
        Ok((Self { fd: socket.into() }, file))
    }

    /// Takes over a listener from another process, including its waiting clients. Call
    /// [`SocketFile::take_over`] too. `InvalidInput` if it is not a listening Unix socket.
    pub fn take_over(fd: OwnedFd) -> io::Result<Self> {
        let option = |name| sys::get_option(fd.as_fd(), libc::SOL_SOCKET, name);
        let found = (option(libc::SO_DOMAIN)?, option(libc::SO_TYPE)?, option(libc::SO_ACCEPTCONN)?);
        if found != (libc::AF_UNIX, libc::SOCK_STREAM, 1) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a listening Unix socket"));
        }
        Ok(Self { fd })
    }

    /// Duplicates the listener for another worker.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()? })
    }

    /// Accepts a connection; `None` if none is waiting. Errors are the same as for
    /// [`crate::TcpListener::accept`].
    pub fn accept(&self) -> io::Result<Option<TcpSocket>> {
        // Clients' sockets rarely have a name.
        Ok(tcp::accept(self.fd.as_fd())?.map(|(fd, _)| TcpSocket::from(fd)))
    }
}

impl AsFd for UnixListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// File of a listener. Dropping it removes the file, unless another file has replaced it.
#[derive(Debug)]
pub struct SocketFile {
    /// Path, device and inode; `None` for an abstract name, and after the file was left to another process.
    file: Option<(PathBuf, (u64, u64))>,
}

impl SocketFile {
    /// Takes over the file of another process's listener.
    pub fn take_over(at: &SocketAddr) -> io::Result<Self> {
        let Some(path) = at.as_pathname() else { return Ok(Self { file: None }) };
        let found = fs::symlink_metadata(path)?;
        Ok(Self { file: Some((path.to_owned(), (found.dev(), found.ino()))) })
    }

    /// Leaves the file to a process that has taken it over.
    pub fn leave(mut self) {
        self.file = None;
    }

    /// Changes the permissions; `None` keeps them.
    pub fn set_mode(&self, mode: Option<u32>) -> io::Result<()> {
        match (&self.file, mode) {
            (Some((path, _)), Some(mode)) => fs::set_permissions(path, fs::Permissions::from_mode(mode)),
            _ => Ok(()),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let Some((path, id)) = &self.file else { return };
        if fs::symlink_metadata(path).is_ok_and(|file| (file.dev(), file.ino()) == *id) {
            // A destructor cannot report errors.
            let _ = fs::remove_file(path);
        }
    }
}

impl TcpSocket {
    /// Connects to a Unix stream socket; completes immediately. `WouldBlock` if the listener's queue is full, so
    /// retrying may succeed.
    pub fn connect_unix(address: &SocketAddr) -> io::Result<Self> {
        let socket = stream()?;
        socket.connect(&raw(address)?)?;
        Ok(Self::from(OwnedFd::from(socket)))
    }
}

fn raw(address: &SocketAddr) -> io::Result<SockAddr> {
    match (address.as_pathname(), address.as_abstract_name()) {
        (Some(path), _) => SockAddr::unix(path),
        (None, Some(name)) => SockAddr::unix(OsStr::from_bytes(&[b"\0", name].concat())),
        (None, None) => Err(io::Error::new(io::ErrorKind::InvalidInput, "a Unix socket without a name")),
    }
}

fn stream() -> io::Result<Socket> {
    rlimit::unreserved(Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?)
}

/// Removes a socket file without a listener; the kernel leaves it behind when a program exits.
fn remove_stale(path: &Path, address: &SockAddr) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(file) if !file.file_type().is_socket() => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "a file that is not a socket is in the way",
            ));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    match stream()?.connect(address) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        // A full queue, a different socket type or missing write permission all mean that the socket is in
        // use.
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}
