//! Upgrade in place: a new process, possibly of a different version, takes over without interrupting UDP
//! clients.
//!
//! ```text
//!   this process (old_process)                           the new one (new_process)
//!   starts it ─────────────── Hello, offer, sockets ───▶ reads its own configuration, makes its workers
//!                            ◀──────────────────── Ready
//!   workers pause ── from worker to worker: sessions ──▶ imports them
//!                            ◀──────────────────── Taken
//!                             ─ Metrics, Commit ───────▶ serves
//!                            ◀────────────────── Serving
//!   forgets exported sessions ─ Released ──────────────▶ its program in the kernel replaces the old one
//!   serves the rest until it ends, or a deadline ─ Metrics ─▶ adds them to its own
//! ```
//!
//! Any failure before `Serving` ends the new process, and this one resumes normal service. The messages use a socket
//! pair, one end of which is the new process's standard input, so no other process can interfere.

mod handover;
mod new_process;
mod old_process;
mod program;
mod protocol;
mod socket;

pub use self::{
    handover::{DescriptorNames, HandoverOffer, HandoverState, NamedSocket},
    new_process::{PreviousProcess, begin, take_over},
    socket::{AskError, Which, ask},
};
pub(crate) use self::{
    old_process::{Patience, Successor, hand_over},
    program::ProgramFile,
    socket::UpgradeSocket,
};
