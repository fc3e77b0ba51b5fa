//! Events of the server for webhooks and for the stream.
//!
//! ```text
//!  workers ─▶ allocation log's queue ─▶ EventWriter ─▶ Events     allocations, refusals
//!  control loop, each second ─▶ StateWatch ─────────────┘          certificates, drain, nodes
//! ```

mod event_writer;
mod refusal_events;
mod server_events;
mod state_watch;

pub(crate) use event_writer::EventWriter;
pub(crate) use server_events::ServerEvents;
pub(crate) use state_watch::StateWatch;
