//! Load generation: the reflector, and the generators that send load to it through relays and forwarders.
//!
//! Datagrams are received and sent through the same `Rx` and `Tx` as in the relay, so that the generators are not the bottleneck when
//! relays are compared. The library neither prints nor exits; that is left to the command line.
#![forbid(unsafe_code)]

mod clock;
mod error;
mod greeting;
pub mod options;
mod pacer;
mod pattern;
mod payload;
mod profile;
pub mod progress;
pub mod reflect;
mod run;
pub mod stream;
mod traffic;
pub mod turn;
pub mod udp;

pub use error::LoadError;
pub use payload::HEADER_LEN;
pub use profile::{Profile, ProfileOptions};
pub use run::{RunOutcome, StopHandle};
pub use turnpike_client::{ClientTransport, Login, TlsOptions};
pub use turnpike_measure::{Direction, Leg, LoadReport, OfferedRate, ProfileReport, StreamReport};
