//! Unix stream sockets (unix(7)): names, listeners and socket files. A connected one is a [`TcpSocket`],
//! because the data path treats both alike.

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

/// Size of `sun_path` minus one: a path ends, and an abstract name begins, with a zero byte.
const LONGEST: usize = 107;

/// Absolute path, or `@` and a name in the abstract namespace, which has no file. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnixName(Arc<str>);

impl FromStr for UnixName {
    type Err = &'static str;

    /// Accepts `/run/app.sock` or `@app`.
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
    /// Path of the file; `None` for an abstract name.
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

impl fmt::Display for UnixName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Listening, non-blocking Unix socket. Workers share one with [`UnixListener::try_clone`] and watch it with
/// [`crate::poll::Interest::Exclusive`], so that a client does not wake all of them.
#[derive(Debug)]
pub struct UnixListener {
    fd: OwnedFd,
    name: UnixName,
}

impl UnixListener {
    /// Binds and listens; a stale socket file is removed first. `mode` is the permission of the new file
    /// (write permission allows connecting); `None` leaves it to the umask. Dropping the [`SocketFile`]
    /// removes the file. `AddrInUse` if another listener exists, `AlreadyExists` if the path is another kind
    /// of file.
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
        // Before listen(2) no client can connect, so the permissions are in effect in time.
        socket.listen(i32::MAX)?;
        Ok((Self { fd: socket.into(), name: name.clone() }, file))
    }

    /// Takes over a listener with this name from another process, including its waiting clients. Call
    /// [`SocketFile::take_over`] too. `InvalidInput` if it is not a listening Unix socket.
    pub fn take_over(fd: OwnedFd, name: &UnixName) -> io::Result<Self> {
        let option = |name| sys::get_option(fd.as_fd(), libc::SOL_SOCKET, name);
        let found = (option(libc::SO_DOMAIN)?, option(libc::SO_TYPE)?, option(libc::SO_ACCEPTCONN)?);
        if found != (libc::AF_UNIX, libc::SOCK_STREAM, 1) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a listening Unix socket"));
        }
        Ok(Self { fd, name: name.clone() })
    }

    /// Duplicates the listener for another worker.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()?, name: self.name.clone() })
    }

    /// Accepts a connection; `None` if none is waiting. Errors as for [`crate::TcpListener::accept`].
    pub fn accept(&self) -> io::Result<Option<TcpSocket>> {
        // Clients rarely have a name.
        Ok(tcp::accept(self.fd.as_fd())?.map(|(fd, _)| TcpSocket::from(fd)))
    }

    pub fn name(&self) -> &UnixName {
        &self.name
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
    name: UnixName,
    /// Device and inode.
    id: Option<(u64, u64)>,
}

impl SocketFile {
    fn of(name: &UnixName) -> io::Result<Self> {
        let id = name.path().map(fs::symlink_metadata).transpose()?.map(|file| (file.dev(), file.ino()));
        Ok(Self { name: name.clone(), id })
    }

    /// Takes over the file of another process's listener.
    pub fn take_over(name: &UnixName) -> io::Result<Self> {
        Self::of(name)
    }

    /// Leaves the file to a process that has taken it over.
    pub fn leave(mut self) {
        self.id = None;
    }

    /// Changes the permissions; `None` keeps them.
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
            // A destructor cannot report errors.
            let _ = fs::remove_file(path);
        }
    }
}

/// Connects; completes immediately. `WouldBlock` if the listener's queue is full, so retrying may succeed.
pub fn connect(name: &UnixName) -> io::Result<TcpSocket> {
    let socket = stream()?;
    socket.connect(&name.address()?)?;
    Ok(TcpSocket::from(OwnedFd::from(socket)))
}

/// Creates a pair of connected, non-blocking SOCK_SEQPACKET sockets. Each buffers up to `buffer` bytes, as
/// far as the kernel allows.
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

/// Removes a socket file without a listener; the kernel leaves it when a program ends.
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
        // A full queue, another socket type or missing write permission: the socket is in use.
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_limited_paths_or_abstract_names() {
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
