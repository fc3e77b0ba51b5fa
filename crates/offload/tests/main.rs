//! Runs the programs and their mirror on the same packets, and the programs on interfaces.

mod agreement;
mod attached;
mod churn;
mod functions;
mod golden;
mod prelude;
mod program;
