//! Runs the programs and their mirror on the same packets, and the programs on interfaces.

mod agreement;
mod attached;
mod churn;
mod foreign;
mod functions;
mod golden;
mod leases;
mod prelude;
mod program;
mod streams;
mod verdicts;
