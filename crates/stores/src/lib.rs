//! Users, secrets, realms, token keys, quotas and peer rules in a database. coturn's tables and keys are read
//! in place; rotated secrets and API keys, which coturn does not have, are in separate tables and keys.
//! [`FleetStore`] contains the shared state of a fleet.
//!
//! ```text
//!  check (a worker)  ──▶ Directory::known ──▶ cache: a user, absent, or "ask"
//!  look up (a worker) ─▶ Directory::look_up ─▶ one query per user for all waiters ─▶ Backend ─▶ SQLite, PostgreSQL, MySQL, Redis, HTTP
//!                                                    │ slow or gone: breaker
//!  every few seconds  ──▶ Rules: realms, limits, peers, token keys, secrets; small, and completely in memory
//! ```
//!
//! A worker never waits here: the answer is in memory, or comes later from the control thread's runtime.
//! Cached users stay valid during an outage.
#![forbid(unsafe_code)]

mod address;
mod api_keys;
mod backend;
mod breaker;
mod cache;
mod credential_owner;
mod database;
mod directory;
mod edit;
mod error;
mod fleet;
#[cfg(test)]
mod fuzz;
mod http;
mod keys;
mod redis;
mod rules;
mod secrets;
mod sql;
mod sqlite;
mod tables;
mod usage;

// Synchronization types come from `crate::sync`, which `interleave` replaces to explore every interleaving.
use std::sync;

/// Shards of a shared table, each with its own lock.
const SHARDS: usize = 16;

pub use address::{ServerAddress, StoreAddress, TlsMode};
pub use api_keys::{ApiKey, ApiKeys};
pub use backend::{Backend, Existing, PAGE, UserRow};
pub use credential_owner::{CredentialOwner, credential_id};
pub use database::Database;
pub use directory::{CachedUser, Directory, DirectoryCounts, DirectoryLimits, UserLookup};
pub use edit::Edit;
pub use error::{StoreError, StoreFault};
pub use fleet::{Beaten, Beating, Exchanged, FleetAddress, FleetNews, FleetStore, NewsBatch, StoreView};
pub use http::HttpAddress;
pub use keys::UserKeys;
pub use rules::{PeerRanges, RealmRules, Rules, StoredLimits, StoredTokenKey};
pub use secrets::{CUT_OFF, Secrets, StoredSecret, signing};
pub use sqlite::SqliteUse;
pub use usage::{
    DAY, HOUR, UsageAccount, UsageAmount, UsageBatch, UsageBy, UsageGap, UsageHour, UsageQuery, UsageRun,
    UsageStore, UsageSum,
};
