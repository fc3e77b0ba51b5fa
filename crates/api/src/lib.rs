//! Interface of a running program: the traits [`Program`] and [`FleetAdmin`], and their results as JSON,
//! which the OpenAPI document describes.
#![forbid(unsafe_code)]

mod account;
mod allocation;
mod ban;
mod credential;
mod event;
mod fleet;
mod live;
mod network;
mod program;
pub mod quality;
mod quality_problem;
mod refusal;
mod renamed;
mod server;
mod usage;
mod vendor_credential;

use std::pin::Pin;

use utoipa::openapi::{Object, ObjectBuilder, Type};

pub use account::{
    AccountChange, AccountOrigin, Key, KeyList, NewKey, NewRealm, NewSecret, NewUser, RealmInfo, RealmList,
    RealmQuery, Rotated, Rotation, SecretList, SharedSecret, StoredRealm, UserInfo, UserList, UserPage,
    UserQuery,
};
pub use allocation::{
    Allocation, AllocationPage, AllocationQuery, Channel, FleetAllocations, Permission, RelayedAddress,
    Traffic,
};
pub use ban::{BanEntry, BanList, BanResult, NewBan, UnbanResult};
pub use credential::{
    CredentialsRequest, IceCredential, IceServer, IceToken, IssuedCredential, RestCredentials,
};
pub use event::{
    AllocationBegin, AllocationEnd, CertificateEvent, DrainEvent, Event, EventData, LostEvents, NodeEvent,
    QuotaUse,
};
pub use fleet::{
    FleetAdmin, FleetError, FleetHealth, FleetNode, FleetStatus, NodeOrder, NodeState, PeerRequest, Reply,
};
pub use live::{
    BatchRate, History, Live, LiveEvent, LiveListener, LiveRealm, LiveRule, LiveServer, LiveWorker,
    PayloadRate, Quantiles, ReasonCount, RuleState, Talker, Talkers, refused, total,
};
pub use network::NetworkInfo;
pub use program::{
    Build, ClientRights, DatapathStatus, Drain, Draining, Job, LogLevel, NotReloaded, Process, Program,
    Reloaded, RuleStatus, Sandbox, Status,
};
pub use quality_problem::{FlowDirection, Leg, QualityProblem};
pub use refusal::{ClientRefusals, RefusalFilter, RefusalList};
pub use renamed::{with_new_fields, with_old_list};
pub use server::{
    CertificateInfo, CertificateList, CertificateOrder, LimitInfo, LimitList, Listener, Listeners,
    RelayRange, Worker, WorkerList,
};
pub use usage::{UsageEntry, UsageFilter, UsageGapInfo, UsageGrouping, UsageList};
pub use vendor_credential::{
    CloudflareCredentials, CloudflareIceServer, CloudflareIceServers, CloudflareRequest, TwilioIceServer,
    TwilioToken,
};

pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Schema of a transport between client and server.
#[must_use]
pub fn transport() -> Object {
    one_of("Transport between client and server.", &["udp", "tcp", "tls", "dtls"])
}

/// Schema of an enumeration.
fn one_of(description: &str, words: &[&'static str]) -> Object {
    let object = ObjectBuilder::new().schema_type(Type::String).description(Some(description));
    object.enum_values(Some(words.iter().copied())).build()
}
