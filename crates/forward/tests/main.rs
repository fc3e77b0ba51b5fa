//! Tests of the forwarder with real sockets: one module per behaviour, all in one program, which links
//! faster. Tests that need their own process start one (`turnpike_testkit::alone`).
#![forbid(unsafe_code)]
#![cfg(test)]
#![allow(clippy::cast_possible_truncation, reason = "small numbers, and payload that may wrap")]

mod prelude;
mod support;
mod udp_common;

mod balance;
mod chatter;
mod circles;
mod dual_stack;
mod exhaustion;
mod idle_crowd;
mod life;
mod limits;
mod names;
mod proxy_header;
mod rates;
mod rules;
mod short_crowd;
mod targets;
mod transfers;
mod udp_addresses;
mod udp_cross;
mod udp_echo;
mod udp_exhaustion;
mod udp_sessions;
mod unix;
mod upgrade;
mod vanishing;
