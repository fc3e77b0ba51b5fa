//! Sockets: datagrams in batches, from receive to send.
//!
//! ```text
//! poll::Poller ─▶ Rx::recv(socket)   fills the tick's arena; Rx::buffers() lists (source, local address, TOS, TTL, bytes)
//!                   └─ route         whoever uses this crate decides
//! Tx::push ◀────────┘                header bytes + a span of the arena, no payload copy
//! Tx::flush                          super-packets by UDP_SEGMENT, sendmmsg, or sendmsg, as the data path says
//! ```
//!
//! Streams have a life of their own: [`tcp`] makes the sockets, [`copy`] moves bytes from one to the other. Whose threads these are:
//! [`worker`] starts, tells and stops them. Sockets go to another process by a [`channel`], and are taken over there as they are.
//!
//! This crate knows no TURN and no forwarding. It is the only one that calls the kernel with `unsafe`.

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
