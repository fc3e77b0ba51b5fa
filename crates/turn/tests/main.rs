//! One module per behaviour, linked into one program; `turnpike_testkit::alone` starts another process.
#![forbid(unsafe_code)]
#![cfg(test)]

mod client_support;
mod common;

mod client_any_bytes;
mod client_authentication;
mod client_lifetime;
mod client_mobility;
mod client_server;
mod client_tcp_relaying;
mod fuzz_access_token;
mod fuzz_server;
mod fuzz_tickets;
mod model;
mod server_allocate;
mod server_alternate;
mod server_amplification;
mod server_auth;
mod server_bandwidth;
mod server_binding;
mod server_channel;
mod server_clients;
mod server_connections;
mod server_dual_stack;
mod server_duration_limit;
mod server_effects;
mod server_expired_credentials;
mod server_fleet;
mod server_hairpinning;
mod server_icmp;
mod server_lifetime;
mod server_lookups;
mod server_loops;
mod server_memory;
mod server_mobility;
mod server_mobility_workers;
mod server_moved;
mod server_nat_discovery;
mod server_nonce_binding;
mod server_padding;
mod server_peer_rules;
mod server_permission;
mod server_quality;
mod server_quota;
mod server_randomness;
mod server_realms;
mod server_refused_requests;
mod server_replays;
mod server_reply_sizes;
mod server_requirements;
mod server_robustness;
mod server_shared_ports;
mod server_stats;
mod server_tap;
mod server_third_party;
mod server_upgrade;
mod server_usage;
mod server_views;

fn kept_seeds() -> proptest::test_runner::Config {
    use proptest::test_runner::{Config, FileFailurePersistence};
    let seeds = FileFailurePersistence::WithSource("regressions");
    Config { failure_persistence: Some(Box::new(seeds)), ..Config::default() }
}
