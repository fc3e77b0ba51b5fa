//! The path through the kernel: a program at TC ingress relays lone datagrams between bound channels, so that they never wake a worker.
//! What GRO has coalesced goes up to user space, as does all of which the program is not sure.
//!
//! ```text
//!                     ┌──────────── user space: whatever goes up ────────────┐
//!  interface ──▶ TC ingress: flow found, alone, in order? ──across──▶ interface
//!                     │ flows: by source, destination, channel               │
//!                     └ routes, states (order, counters), drained ◀──────────┘ kept by the workers
//! ```
//!
//! - [`Kernel`] loads the program (`bpf/relay.bpf.c`), attaches it, and follows interfaces and routes.
//! - [`Flows`] is a worker's way to its flows; [`Emptied`] tells the program when what went up has left.
//! - [`Sockmap`] is for TCP: the kernel passes chatter from socket to socket.
//! - [`mirror`] decides in Rust what the program decides, for tests and for readers.

pub mod emptied;
pub mod error;
pub mod flows;
pub mod kernel;
pub mod layout;
pub mod mirror;
mod netlink;
mod ports;
mod routes;
mod slots;
pub mod sockmap;
mod words;

pub use emptied::Emptied;
pub use error::OffloadError;
pub use flows::{Counted, Flows, Full, Installed, NewFlow, State, now_ns};
pub use kernel::{Hook, Kernel, Settings, Snapshot};
pub use layout::{Count, Kind};
pub use sockmap::{Joined, Sockmap};

#[cfg(not(target_endian = "little"))]
compile_error!(
    "the program is compiled for little-endian machines: build it with -target bpfeb, and its object apart"
);
