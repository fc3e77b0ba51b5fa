//! Tests of the real binary over real sockets on loopback: one module per behaviour, and `interop` for third-party
//! programs. A single test program, so that it is linked once.
#![forbid(unsafe_code)]
// Cargo builds this with `--test` only; the attribute makes clippy treat the helpers as test code.
#![cfg(test)]

mod admin_commands;
mod admin_http;
mod allocation_lines;
mod bad_config;
mod capture;
mod credentials;
mod deployment;
mod documented;
mod events;
mod exhaustion;
mod firewall;
mod forward_bad_rules;
mod forward_drain;
mod forward_formats;
mod forward_late_listeners;
mod forward_reload;
mod geoip;
mod golden;
mod graceful_stop;
mod hand_on;
mod interop;
mod invalid_flood;
mod json_lines;
mod kernel_path;
mod limits;
mod load_and_reflect;
mod load_forward;
mod load_interrupted;
mod load_profile;
mod log_flags;
mod machine_addresses;
mod manual_pages;
mod media_quality;
mod metrics_live;
mod monitoring;
mod names;
mod nat_discovery;
mod own_endpoints;
mod passed_sockets;
mod port_sharing;
mod prelude;
mod probe;
mod probe_findings;
mod probe_verdicts;
mod public_address;
mod realms;
mod refused_credentials;
mod reload;
mod sandbox;
mod serve_default;
mod service_manager;
mod setup;
mod stores;
mod tenants;
mod tls_certificates;
mod top;
mod transports;
mod upgrade;
mod upgrade_forward;
mod usage;
mod volume_quotas;
mod zones;
