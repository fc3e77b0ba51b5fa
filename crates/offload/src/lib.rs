//! Kernel data path: a program at TC ingress or in the driver (XDP) relays single datagrams between bound
//! channels without waking a worker. Bulk traffic and all doubtful packets go to user space.
//!
//! ```text
//!                     ┌──▶ no: user space, unchanged
//!  interface ──▶ TC ingress or XDP: flow found, alone, in order? ──yes──▶ interface
//!                     │    flows: by source, destination, channel
//!                     └─── routes, hops, states (order, counters), drained ◀── workers, and a thread that reads netlink
//! ```
//!
//! - [`Kernel`] loads the programs (`bpf/`), attaches them, and follows interfaces, routes and neighbours.
//! - [`Flows`] is a worker's access to its flows; [`WorkerSockets`] reports drained sockets to the programs,
//!   and turns UDP_GRO on and off per socket.
//! - [`Echo`] is a reflector for load tests.
//! - [`Sockmap`] joins TCP sockets: the kernel passes interactive traffic between them.
//! - [`mirror`] is the programs' logic in Rust, for tests and readers.

mod claim;
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
mod obstacles;
mod ports;
mod routes;
mod settings;
mod shared;
mod slots;
pub mod sockmap;
pub mod streams;
mod verification;
mod watcher;
mod worker_sockets;
mod xdp;

pub use clock::{WorkerClock, now_ns};
pub use echo::{Echo, Echoed};
pub use error::OffloadError;
pub use flows::{Counted, FlowState, Flows, Installed, NewFlow, TableFull};
pub use handover::PassedKernel;
pub use kernel::{Kernel, Snapshot};
pub use layout::{Count, Kind};
pub use netlink::interface_of_route;
pub use settings::{Attachment, Hook, KernelSettings};
pub use sockmap::{Joined, Sockmap};
pub use streams::Streams;
pub use verification::load_program;
pub use worker_sockets::WorkerSockets;

#[cfg(not(target_endian = "little"))]
compile_error!(
    "the program is compiled for little-endian machines: build it with -target bpfeb, and keep its object separately"
);
