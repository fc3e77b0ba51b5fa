//! Users, secrets, realms, token keys, quotas and peer rules in a database, in coturn's own tables and keys, read in place; what coturn
//! has no place for, in tables and keys of ours beside them: rotated secrets and API keys; and what the nodes of a fleet share
//! ([`FleetStore`]).
//!
//! ```text
//!  check (a worker)  ──▶ Directory::known ──▶ cache: a user, nobody, or "ask"
//!  look up (a worker) ─▶ Directory::look_up ─▶ one query a user, however many ask ─▶ Backend ─▶ SQLite, PostgreSQL, MySQL, Redis
//!                                                    │ slow or gone: breaker
//!  every few seconds  ──▶ Rules: realms, limits, peers, token keys, secrets; all of them small, and held whole
//! ```
//!
//! A worker never waits here: what it asks for is in memory, or comes later from the control thread's runtime. While the database is
//! away, whoever is known stays known.
#![forbid(unsafe_code)]

mod address;
mod api_keys;
mod backend;
mod breaker;
mod cache;
mod database;
mod directory;
mod edit;
mod error;
mod fleet;
#[cfg(test)]
mod fuzz;
mod keys;
mod redis;
mod rules;
mod secrets;
mod sql;
mod sqlite;
mod tables;

// What threads share says `crate::sync`, where `interleave` has other types, which try every order of events.
use std::sync;

/// Parts of a table that threads share, each with a lock of its own.
const SHARDS: usize = 16;

pub use address::{ServerAddress, StoreAddress, TlsMode};
pub use api_keys::{ApiKey, ApiKeys};
pub use backend::{Backend, Existing, PAGE, UserRow};
pub use database::Database;
pub use directory::{Counts, Directory, Found, Known, Limits};
pub use edit::{Edit, RealmOptions};
pub use error::{Fault, StoreError};
pub use fleet::{Beaten, Beating, Exchanged, FleetAddress, FleetStore, Heard, Look, News};
pub use keys::UserKeys;
pub use rules::{PeerRanges, RealmRules, Rules, StoredTokenKey};
pub use secrets::{CUT_OFF, Secrets, StoredSecret, signing};
pub use sqlite::SqliteUse;
