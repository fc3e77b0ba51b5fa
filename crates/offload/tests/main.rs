//! The program and its mirror, fed the same packets; and the program on interfaces.

mod agreement;
mod attached;
mod churn;
mod functions;
mod golden;
mod prelude;
mod program;
