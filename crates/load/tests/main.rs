//! Generators and reflector over real sockets, in one test program to save link time. A test that needs its
//! own process starts one (`turnpike_testkit::alone`).
#![forbid(unsafe_code)]
#![cfg(test)]
#![allow(clippy::cast_possible_truncation, reason = "small numbers, and payload that may wrap")]

mod common;

mod iperf3;
mod profile;
mod reflect;
mod stream;
mod turn;
mod turn_alternate;
mod turn_migrate;
mod turn_reconnect;
mod turn_taken_port;
mod turn_token;
mod udp;
