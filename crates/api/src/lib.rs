//! Interface of a running program: the traits [`Program`] and [`FleetAdmin`], and their results as JSON,
//! which the OpenAPI document describes.
#![forbid(unsafe_code)]

mod account;
mod ban;
mod credential;
mod fleet;
mod live;
mod program;
mod refusal;
mod server;
mod session;

use std::pin::Pin;

use utoipa::openapi::{Object, ObjectBuilder, Type};

pub use account::{
    Change, Key, Keys, NewKey, NewRealm, NewSecret, NewUser, Origin, Realm, RealmQuery, Realms, Rotated,
    Rotation, Secrets, SharedSecret, StoredRealm, User, UserPage, UserQuery, Users,
};
pub use ban::{Ban, Banned, Bans, NewBan, Unbanned};
pub use credential::{Credentials, CredentialsRequest, IceCredential, IceServer, IceToken, RestCredentials};
pub use fleet::{
    FleetAdmin, FleetError, FleetHealth, FleetNode, FleetStatus, NodeOrder, NodeState, PeerRequest, Reply,
};
pub use live::{
    Batch, History, Live, LiveEvent, LiveListener, LiveRealm, LiveRule, LiveServer, LiveWorker, Quantiles,
    Rate, Reason, RuleState, Talker, Talkers, refused, total,
};
pub use program::{
    Access, Build, Datapath, Drain, Draining, Job, LogLevel, NotReloaded, Process, Program, Reloaded, Rule,
    Sandbox, Status,
};
pub use refusal::{Refusal, RefusalFilter, Refusals};
pub use server::{
    Certificate, Certificates, Limit, Limits, Listener, Listeners, RelayRange, Worker, Workers,
};
pub use session::{Channel, FleetSessions, Permission, Relayed, Session, SessionPage, SessionQuery, Traffic};

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
