//! TURN without sockets, clocks, threads or files: state machines that are fed datagrams and the time, and answer
//! with what is to be sent. [`server`] is RFC 8656's server, [`client`] its client.
#![forbid(unsafe_code)]

pub mod access_token;
pub mod client;
mod family;
pub mod ip_range;
pub mod random;
pub mod rates;
pub mod server;
pub mod time;

// What threads share says `crate::sync`, where `interleave` has other types, which try every order of events.
use std::sync;

pub use family::Family;
pub use turnpike_wire as wire;
