//! Real sockets: one module per behaviour, in one program, which is linked once. A test that needs a
//! process to itself starts one (`turnpike_testkit::alone`).
#![forbid(unsafe_code)]
#![cfg(test)]
#![allow(clippy::cast_possible_truncation, reason = "small numbers, and payload that may wrap")]

mod common;
mod prelude;

mod addresses;
mod channel;
mod dont_fragment;
mod full_buffers;
mod icmp_errors;
mod ip_header;
mod mixed_batches;
mod open_files;
mod polling;
mod set_apart;
mod step_down;
mod streams;
mod super_packets;
mod take_over;
mod thin_flows;
