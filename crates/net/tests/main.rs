//! Tests with real sockets, one module per behaviour in a single program, which links faster. Tests that need
//! a process of their own start one (`turnpike_testkit::alone`).
#![forbid(unsafe_code)]
#![cfg(test)]
#![allow(clippy::cast_possible_truncation, reason = "small numbers, and payload that may wrap")]

mod common;
mod prelude;

mod addresses;
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
