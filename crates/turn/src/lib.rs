//! TURN without sockets, clocks, threads or files: state machines that take datagrams and the time, and
//! return packets to send. [`server`] is an RFC 8656 server, and [`client`] is a client for it.
#![forbid(unsafe_code)]

pub mod access_token;
pub mod client;
mod family;
pub mod ip_range;
pub mod random;
pub mod server;
pub mod time;

// Shared types come from `crate::sync`, which the `interleave` crate replaces with types that explore every
// interleaving.
use std::sync;

pub use family::Family;
pub use turnpike_wire as wire;
