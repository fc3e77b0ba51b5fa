//! Sockets connected to a server, and error messages for them.

use std::{
    io,
    net::{SocketAddr, TcpStream, UdpSocket},
};

use socket2::{Domain, Protocol, Socket, Type};

/// Starts a TCP connection. The socket becomes writable when the attempt ends.
pub fn connect(server: SocketAddr) -> io::Result<TcpStream> {
    /// EINPROGRESS (asm-generic/errno.h), which std does not expose yet.
    const IN_PROGRESS: i32 = 115;
    let socket = Socket::new(Domain::for_address(server), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    match socket.connect(&server.into()) {
        Err(error) if error.raw_os_error() != Some(IN_PROGRESS) => Err(error),
        _ => Ok(socket.into()),
    }
}

pub(crate) fn connect_udp(server: SocketAddr) -> io::Result<UdpSocket> {
    const BUFFER: usize = 1 << 20;
    let socket = Socket::new(Domain::for_address(server), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
    // Errors are ignored, because the kernel limits both sizes anyway.
    let _ = socket.set_recv_buffer_size(BUFFER);
    let _ = socket.set_send_buffer_size(BUFFER);
    socket.connect(&server.into())?;
    Ok(socket.into())
}

pub(crate) fn quiet(error: io::Error) -> Result<(), String> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(refusal(&error)),
    }
}

/// Description of the error: a verb phrase whose subject is the server.
pub(crate) fn refusal(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "refused the connection".to_owned(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "reset the connection".to_owned(),
        io::ErrorKind::AddrNotAvailable => {
            "has no local port left (each closed connection keeps one for 60 s)".to_owned()
        }
        _ => error.to_string(),
    }
}
