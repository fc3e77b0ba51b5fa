//! Kernel sockets for the data path: batched UDP, non-blocking TCP and Unix streams, and the poller that watches
//! them.
//!
//! ```text
//! Poller ─▶ Rx::recv(socket)         fills the arena; Rx::buffers() lists (source, local address, TOS, TTL, bytes)
//!             └─ route               the caller's protocol decides
//! Tx::push ◀──┘                      header bytes + a span of the arena, no payload copy
//! Tx::flush                          UDP_SEGMENT super-packets, sendmmsg or sendmsg, depending on the Datapath
//! ```
//!
//! This page lists the whole API, except for the process's limits ([`rlimit`]) and its system call filter
//! ([`system_calls`]).
//!
//! This crate knows nothing about TURN, forwarding or threads. All `unsafe` kernel calls are here or in
//! `offload`.

mod bind_error;
mod datapath;
mod error_queue;
mod passed;
mod poll;
mod queued;
pub mod rlimit;
mod rx;
mod send;
mod socket;
mod sys;
pub mod system_calls;
mod tcp;
mod tx;
mod unix;

pub use bind_error::BindError;
pub use datapath::Datapath;
pub use error_queue::QueuedError;
pub use passed::{PassedError, PassedSocket, PassedSockets, SocketProtocol};
pub use poll::{Event, Interest, Poller};
pub use queued::{Route, TxStats};
pub use rx::{ArenaSpan, Buffer, Received, Rx, RxStats};
pub use socket::{SocketId, Sockets, UdpOptions, UdpSocket};
pub use tcp::{ConnectOptions, ListenOptions, SIOCATMARK, TcpListener, TcpSocket, TcpTimers, is_exhaustion};
pub use tx::Tx;
pub use unix::{SocketFile, UnixListener};
