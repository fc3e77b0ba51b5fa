//! The TURN server as a service of [`turnpike_process`]: plan, stores, credentials, certificates, fleet, refusals, allocation log, metrics.
//!
//! ```text
//!   control loop (turnpike_process) ─▶ TurnServer (service.rs) ─▶ workers: a thread each
//!   admin interface (turnpike_admin) ─▶ ServerHandle: Control, snapshots │
//!                     log lines ◀── log_queue ◀── AllocationLog ◀───────────┘
//!                    fleet: heartbeats, news, quotas ◀──▶ a store shared with other servers
//! ```
#![forbid(unsafe_code)]

mod admin;
mod allocation_log;
mod certificate_expiry;
mod certificate_files;
mod certificates;
mod changes;
mod check;
mod credentials;
mod effective_settings;
mod ended_allocations;
mod error;
mod events;
mod file_watch;
mod fleet;
mod generated_user;
mod geoip;
mod handover;
mod machine;
mod metrics;
mod needs;
mod own_addresses;
mod passed_listeners;
mod peer_names;
mod plan;
mod public_address;
mod quality;
mod refusals;
mod service;
mod store;
mod usage;

pub use certificate_files::load;
pub use check::{check_start, waited_for};
pub use error::ServeError;
pub use generated_user::random_password;
pub use public_address::{AddressSource, PublicAddress, PublicAddressError};
pub use service::serve;
pub use store::{UserStore, open_store, realm_of_another};
pub use turnpike_relay::certificates::{can_dtls, time_faults};
