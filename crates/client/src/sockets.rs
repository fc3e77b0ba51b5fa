//! Sockets towards a server, and what the kernel says about them in words.

use std::{
    io,
    net::{SocketAddr, TcpStream, UdpSocket},
};

use socket2::{Domain, Protocol, Socket, Type};

/// Begins to connect. The socket is writable when that is over.
///
/// # Errors
/// Those of socket(2), and of connect(2) but EINPROGRESS.
pub fn connect(server: SocketAddr) -> io::Result<TcpStream> {
    /// EINPROGRESS (asm-generic/errno.h), which std has no name for yet.
    const IN_PROGRESS: i32 = 115;
    let socket = Socket::new(Domain::for_address(server), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    match socket.connect(&server.into()) {
        Err(error) if error.raw_os_error() != Some(IN_PROGRESS) => Err(error),
        _ => Ok(socket.into()),
    }
}

/// A socket whose datagrams all go to the server.
pub(crate) fn connect_udp(server: SocketAddr) -> io::Result<UdpSocket> {
    const BUFFER: usize = 1 << 20;
    let socket = Socket::new(Domain::for_address(server), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
    // The kernel caps both at what the machine allows.
    let _ = socket.set_recv_buffer_size(BUFFER);
    let _ = socket.set_send_buffer_size(BUFFER);
    socket.connect(&server.into())?;
    Ok(socket.into())
}

/// Nothing more to read is no failure.
pub(crate) fn quiet(error: io::Error) -> Result<(), String> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(refusal(&error)),
    }
}

/// What the server did, as the end of a sentence about it.
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
