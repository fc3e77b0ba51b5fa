//! The path through the kernel: a program at TC ingress, or in the driver (XDP), relays lone datagrams between bound channels, so that they
//! never wake a worker. What comes in bulk goes up to user space, as does all of which the program is not sure.
//!
//! ```text
//!                     ┌──────────── user space: whatever goes up ────────────┐
//!  interface ──▶ TC ingress or XDP: flow found, alone, in order? ──across──▶ interface
//!                     │ flows: by source, destination, channel               │
//!                     └ routes, hops, states (order, counters), drained ◀────┘ kept by the workers and a thread that hears netlink
//! ```
//!
//! - [`Kernel`] loads the programs (`bpf/`), attaches them, and follows interfaces, routes and neighbours.
//! - [`Flows`] is a worker's way to its flows; [`WorkerSockets`] tells the programs what has been sent, and switches UDP_GRO by socket.
//! - [`Echo`] is a reflector's: what comes goes back.
//! - [`Sockmap`] is for TCP: the kernel passes chatter from socket to socket.
//! - [`mirror`] decides in Rust what the programs decide, for tests and for readers.

mod clock;
mod drained;
pub mod echo;
pub mod error;
pub mod flows;
mod gro_control;
mod handover;
pub mod kernel;
pub mod layout;
mod links;
mod mapped_array;
pub mod mirror;
mod netlink;
mod object;
mod ports;
mod routes;
mod settings;
mod shared;
mod slots;
pub mod sockmap;
mod verification;
mod watcher;
mod worker_sockets;
mod xdp;

pub use clock::{WorkerClock, now_ns};
pub use echo::{Echo, Echoed};
pub use error::OffloadError;
pub use flows::{Counted, Flows, Full, Installed, NewFlow, State};
pub use handover::PassedKernel;
pub use kernel::{Kernel, Snapshot};
pub use layout::{Count, Kind};
pub use netlink::interface_of_route;
pub use settings::{Attachment, Hook, Settings};
pub use sockmap::{Joined, Sockmap};
pub use verification::load_program;
pub use worker_sockets::WorkerSockets;

#[cfg(not(target_endian = "little"))]
compile_error!(
    "the program is compiled for little-endian machines: build it with -target bpfeb, and its object apart"
);
