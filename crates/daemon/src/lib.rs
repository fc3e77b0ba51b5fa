//! The TURN server and the forwarder as services of [`turnpike_process`]: plans, stores, credentials, certificates, logs, metrics and fleets.
//!
//! ```text
//!   control loop (turnpike_process) ─▶ Service: TURN server or forwarder ─▶ workers: a thread each
//!   admin interface (another crate) ─▶ Program: Control, snapshots           │
//!                    log lines ◀── log_queue ◀── SessionLog, ConnectionLog ◀─┘
//!                    fleet: heartbeats, news, quotas ◀──▶ a store shared with other servers
//! ```
#![forbid(unsafe_code)]

mod admin;
mod certificate_expiry;
mod certificate_files;
mod certificate_watch;
mod certificates;
mod changes;
mod check;
mod connection_file;
mod connection_log;
mod credentials;
mod denial;
mod effective_settings;
mod error;
mod fleet;
mod forward;
mod forward_handover;
mod forward_metrics;
mod forwarder_needs;
mod generated_user;
mod kernel_path;
mod log_limit;
mod machine;
mod own_addresses;
mod passed_listeners;
mod plan;
mod public_address;
mod refusals;
mod serve;
mod serve_handover;
mod serve_metrics;
mod server_needs;
mod session_log;
mod session_totals;
mod store;

pub use certificate_files::load;
pub use check::{check_start, waited_for};
pub use error::DaemonError;
pub use forward::forward;
pub use generated_user::random_password;
pub use public_address::{AddressSource, PublicAddress, PublicAddressError};
pub use serve::serve;
pub use store::{Store, open_store, realm_of_another};
pub use turnpike_relay::certificates::{can_dtls, time_faults};
