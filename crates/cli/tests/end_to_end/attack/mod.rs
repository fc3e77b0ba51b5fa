//! What an attacker gets out of a server: nothing, with a credential or without one, by any way in and on any data path. Every test prints
//! rows of the tables in docs/reliability.md, which `cargo xtask attack` collects.

mod floods;
mod kept;
mod matrix;
mod strangers;
mod wire;
mod witness;

use std::{env, fmt::Display};

/// By which clients come.
const TRANSPORTS: [&str; 4] = ["udp", "tcp", "tls", "dtls"];

/// Set by `cargo xtask attack`: as much as the tables say, and not only what each run of all tests has time for.
fn is_thorough() -> bool {
    env::var_os("TURNPIKE_TEST_ATTACK").is_some()
}

/// A row of one of the tables.
fn row(table: &str, cells: &[&dyn Display]) {
    let cells: Vec<String> = cells.iter().map(ToString::to_string).collect();
    println!("ATTACK {table} | {} |", cells.join(" | "));
}
