//! `serve` with `--datapath kernel` and `xdp`, and `forward` and `reflect` with `kernel`, on veth links: the kernel sends exactly the
//! packets that user space would send.
//!
//! ```text
//!  this test                       the server's namespace
//!  10.77.1.2  fd77:1::2  c ──────── c  10.77.1.1  fd77:1::1   clients
//!  10.77.2.2  fd77:2::2  p ──────── p  10.77.2.1  fd77:2::1   peers
//! ```

mod addresses;
mod auto;
mod checksums;
mod churn;
mod client;
mod ends;
mod foreign;
mod forwards;
mod operator;
mod order;
mod quality;
mod reflector;
mod relays;
mod spoofed;
mod untouched;
mod upgrade;
mod usage;
mod vlan;
mod xdp;

use crate::prelude::*;
use turnpike_trials::links::{CLIENT, Links, PEER, RELAY, Server, by_each, reason_of_bulk};
