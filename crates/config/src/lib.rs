//! Configuration of `serve` and `forward`. A file, the environment and flags become [`Settings`] or
//! [`forward::ForwardSettings`], or a list of all errors, each with file, line and expected form.
//!
//! ```text
//! flags, environment, file ─▶ source::Node ─▶ tables of keys ─▶ check ─▶ Settings
//! ```
//!
//! Loading opens no socket except the resolver's, for listeners that are host names.
#![forbid(unsafe_code)]

pub mod access_tokens;
mod acme_keys;
mod admin_keys;
mod allowed_peer;
mod alternate_keys;
pub mod api_keys;
pub mod certificates;
mod check;
mod credentials_keys;
mod discovery_keys;
mod event_keys;
mod firewall;
mod fleet_keys;
pub mod forward;
mod hand_on_keys;
mod key;
mod keys;
pub mod limit_keys;
mod oauth_keys;
mod read;
mod realm_keys;
pub mod realms;
mod relay_doubts;
pub mod relay_keys;
mod renamed;
pub mod restapi_credentials;
pub mod runtime_directory;
mod sandbox_keys;
pub mod secret_file;
mod sections;
mod settings;
mod source;
mod sources;
mod store_keys;
mod tables;
mod telemetry_keys;
mod usage_keys;
mod world_readable;

pub use acme_keys::{AcmeChallenge, AcmeSettings, BindingKey, CertificateName};
pub use admin_keys::{AdminAccess, AdminAddress, AdminSettings};
pub use allowed_peer::{AllowedName, AllowedPeer};
pub use alternate_keys::AlternateSettings;
pub use credentials_keys::CredentialsSettings;
pub use discovery_keys::DiscoverySettings;
pub use event_keys::{EventSettings, EventType, WebhookSettings, event_directory};
pub use firewall::{Firewall, FirewallFormat};
pub use fleet_keys::{FleetRedirect, FleetSettings};
pub use key::KeyChange;
pub use oauth_keys::{OauthSettings, TokenKeySettings};
pub use read::Checks;
pub use realm_keys::RealmSettings;
pub use relay_doubts::relay_doubts;
pub use relay_keys::RelayPlace;
pub use renamed::rename_log_targets;
pub use sandbox_keys::{SandboxMode, SandboxSettings};
pub use sections::{
    AuthSettings, CertificateFiles, ConfiguredUser, DtlsSettings, GeoipSettings, LogFormat, LogSettings,
    RateSettings, RelaySettings, ShutdownSettings, StoredKey, TlsSettings, UserSecret,
};
pub use settings::{DatapathChoice, Settings};
pub use source::Flags;
pub use sources::{
    LoadedConfig, Sources, UPGRADE_SANDBOX_VARIABLE, UPGRADE_VARIABLE, known_variables, settings_of,
};
pub use store_keys::{StateDir, StoreSettings, Stored, WhenUnavailable};
pub use tables::KeyPosition;
pub use telemetry_keys::TelemetrySettings;
pub use turnpike_strict::{Mistake, Mistakes, Origin};
pub use turnpike_wire::secret::Secret;
pub use usage_keys::{QuotaAction, QuotaBy, QuotaPeriod, UsageSettings, VolumeQuota};
pub use world_readable::readable_by_all;
