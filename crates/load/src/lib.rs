//! Load: the reflector that sends back what it receives, and the generator that floods a TURN server through it.
//!
//! Both stand on the same `Rx` and `Tx` as the relay, so that a measurement compares relays and not generators.
//! Nothing here prints or exits: the command line does.
#![forbid(unsafe_code)]

mod clock;
mod error;
mod pacer;
mod payload;
pub mod progress;
pub mod reflect;
pub mod turn;

pub use error::LoadError;
pub use payload::HEADER_LEN;
pub use turnpike_measure::{Rate, Report};
