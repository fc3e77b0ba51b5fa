//! Kernel sockets for the data path: batched UDP, non-blocking TCP and Unix streams, and the worker threads
//! that poll them.
//!
//! ```text
//! poll::Poller ─▶ Rx::recv(socket)   fills the arena; Rx::buffers() lists (source, local address, TOS, TTL, bytes)
//!                   └─ route         the caller's protocol decides
//! Tx::push ◀────────┘                header bytes + a span of the arena, no payload copy
//! Tx::flush                          UDP_SEGMENT super-packets, sendmmsg or sendmsg, depending on the Datapath
//! ```
//!
//! [`tcp`] creates stream sockets and [`copy`] moves bytes between two of them. [`worker`] starts, commands
//! and stops threads. A [`channel`] passes open sockets to another process.
//!
//! This crate knows nothing about TURN or forwarding. Together with `offload` it holds all `unsafe` kernel
//! calls.

pub mod channel;
pub mod copy;
pub mod datapath;
pub mod error_queue;
pub mod passed;
pub mod poll;
mod queued;
pub mod rlimit;
pub mod rx;
mod send;
pub mod socket;
mod splice;
mod sys;
pub mod system_calls;
pub mod tcp;
mod tx;
pub mod unix;
pub mod worker;
mod zoned_ip;

pub use channel::{Channel, Message};
pub use copy::{CopyCounts, CopyMode, Flow, Mover, Pumped};
pub use datapath::Datapath;
pub use passed::{PassedError, PassedSocket, PassedSockets};
pub use queued::{Route, TxStats};
pub use rx::{Buffer, Rx, RxStats, Span};
pub use socket::{SocketId, Sockets, UdpOptions, UdpSocket};
pub use tcp::{ConnectOptions, ListenOptions, TcpListener, TcpSocket, TcpTimers};
pub use tx::Tx;
pub use unix::{SocketFile, UnixListener, UnixName};
pub use zoned_ip::{AddressError, ZonedIp, socket_address, split_zone};
