//! Listening sockets for HTTP, and the connections that they accept.

use std::{io, net::SocketAddr, sync::Arc};

use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use crate::tls::ListenerTls;

/// Send buffer for a client that does not read. The kernel's own limit is several megabytes, which would
/// hide the fact that the client has stopped reading.
pub(crate) const UNSENT: u32 = 4096;

pub(crate) enum HttpListener {
    Unix(UnixListener),
    Tcp(TcpListener, Option<Arc<ListenerTls>>),
}

pub(crate) enum HttpStream {
    Unix(UnixStream),
    Tcp(TcpStream, SocketAddr, Option<Arc<ListenerTls>>),
}

impl HttpListener {
    pub(crate) async fn accept(&self) -> io::Result<HttpStream> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                SockRef::from(&stream).set_send_buffer_size(UNSENT as usize)?;
                Ok(HttpStream::Unix(stream))
            }
            Self::Tcp(listener, tls) => {
                let (stream, from) = listener.accept().await?;
                Ok(HttpStream::Tcp(stream, from, tls.clone()))
            }
        }
    }
}
