//! Tests of the relay over real sockets: one module per behaviour, linked into one program. A test that needs
//! its own process starts one (`turnpike_testkit::alone`).
#![forbid(unsafe_code)]
#![cfg(test)]
#![allow(clippy::cast_possible_truncation, reason = "small numbers, and payload that may wrap")]

mod prelude;
mod support;

mod allocations;
mod bandwidth;
mod coalescing;
mod descriptors;
mod dtls_limits;
mod dtls_memory;
mod dtls_messages;
mod hairpinning;
mod handed_on;
mod ip_fields;
mod loops;
mod mobility;
mod mobility_client;
mod observed;
mod padding;
mod pending_credentials;
mod quality;
mod reload;
mod reservations;
mod several_addresses;
mod shared_ports;
mod stream_attacks;
mod stream_limits;
mod stream_memory;
mod stream_messages;
mod stream_proxy;
mod stream_reset;
mod stream_splits;
mod stream_tls;
mod tcp_relaying;
mod upgrade;
