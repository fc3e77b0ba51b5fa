//! Activity at this moment and over the last minutes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Status, transport};

/// An event of `/v1/live/events`.
#[derive(ToSchema)]
#[serde(tag = "event", content = "data", rename_all = "lowercase")]
pub enum LiveEvent {
    /// The first one: the last minutes.
    History(Box<History>),
    /// One each second.
    Live(Box<Live>),
}

/// State of the program at this moment, with rates over the last second or so (`interval_s`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Live {
    /// When (RFC 3339, with milliseconds).
    pub at: String,
    /// Seconds over which rates are measured.
    pub interval_s: f64,
    /// State of the program.
    pub status: Status,
    /// Cores that it took, 1.0 being one of them.
    pub cores: Option<f64>,
    /// Activity of the TURN server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<LiveServer>,
    /// Activity of each rule of a forwarder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<LiveRule>,
}

/// Activity of the TURN server at this moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveServer {
    /// Payload relayed to peers, a second.
    pub to_peer: Rate,
    /// Payload relayed to clients, a second.
    pub to_client: Rate,
    /// Traffic of both that the kernel relayed without waking a worker, a second.
    pub across: Rate,
    /// Datagrams that workers received, a second.
    pub received: f64,
    /// Datagrams that workers sent, a second.
    pub sent: f64,
    /// Well-formed requests, a second.
    pub requests: f64,
    /// Sessions that began, a second.
    pub opened: f64,
    /// Sessions that ended, a second.
    pub closed: f64,
    /// Duration of allocations in the last minute; null without any.
    pub opening: Option<Quantiles>,
    /// Losses and drops since the start, by reason; reasons that have not happened are left out.
    pub drops: Vec<Reason>,
    /// Refusals since the start, by reason, likewise.
    pub refusals: Vec<Reason>,
    /// Workers by number.
    pub workers: Vec<LiveWorker>,
    /// Datagrams of one receive call.
    pub batches: Vec<Batch>,
    /// Sessions by listener.
    pub listeners: Vec<LiveListener>,
    /// Sessions by realm; realms without any are left out.
    pub realms: Vec<LiveRealm>,
    /// Sessions that relay the most; null for some seconds after the first request, until they have been compared.
    pub talkers: Option<Talkers>,
}

/// Payload a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Rate {
    /// Datagrams.
    pub datagrams: f64,
    /// Bytes.
    pub bytes: f64,
}

/// Durations as upper bounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Quantiles {
    /// Number of allocations.
    pub count: u64,
    /// Median in seconds; null above the largest bucket.
    pub p50_s: Option<f64>,
    /// 99th percentile in seconds, likewise.
    pub p99_s: Option<f64>,
}

/// Count of one reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Reason {
    /// Kind, such as `packet` or `limit`.
    pub kind: String,
    /// Reason, as in `/metrics`.
    pub reason: String,
    /// Since the start.
    pub total: u64,
    /// A second.
    pub rate: f64,
    /// Keys of the configuration that decide it, such as `limits.allocations_per_user`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
}

/// Activity of a worker at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveWorker {
    /// Its number, from 0.
    pub number: u64,
    /// Sessions that it has.
    pub sessions: u64,
    /// The share of a core that it took, 0 to 1.
    pub load: Option<f64>,
    /// The share of time in which it was ready to run but another thread had its core.
    pub waiting: Option<f64>,
    /// Time that a datagram would have waited for it just now, in microseconds; null without an answer.
    pub event_loop_us: Option<u64>,
    /// Times that it woke up, a second.
    pub wakeups: f64,
    /// Datagrams received, a second.
    pub received: f64,
    /// Datagrams sent, a second.
    pub sent: f64,
    /// Datagrams of a receive call that brought any.
    pub receive_batch: Option<f64>,
    /// Datagrams of a send call.
    pub send_batch: Option<f64>,
    /// Datagrams that were lost or dropped, by the kernel or by us, a second.
    pub dropped: f64,
}

/// Receive calls that brought so many datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Batch {
    /// Lower bound.
    pub from: u64,
    /// Upper bound; null for the last.
    pub to: Option<u64>,
    /// Calls a second.
    pub rate: f64,
}

/// Sessions of a listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveListener {
    /// Transport.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Address and port.
    pub address: String,
    /// The TLS server name that the clients asked for, if it leads to realms of its own.
    pub server_name: Option<String>,
    /// Sessions.
    pub sessions: u64,
}

/// Sessions of a realm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveRealm {
    /// REALM.
    pub name: String,
    /// Sessions.
    pub sessions: u64,
}

/// Sessions that relay the most.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Talkers {
    /// Seconds over which their rates are measured.
    pub interval_s: f64,
    /// Sessions that relayed anything in that time.
    pub active: u64,
    /// Sorted by bytes, the largest first.
    #[schema(max_items = 20)]
    pub talkers: Vec<Talker>,
}

/// A session that relays much.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Talker {
    /// Its name.
    pub id: String,
    /// The realm of its user.
    pub realm: String,
    /// The username that authenticated it.
    pub user: String,
    /// The client's address.
    pub client: String,
    /// Between client and server.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Payload to peers, a second.
    pub to_peer: Rate,
    /// Payload to the client, a second.
    pub to_client: Rate,
}

/// Activity of a rule of a forwarder at this moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveRule {
    /// Its name.
    pub name: String,
    /// State towards clients.
    pub state: RuleState,
    /// Reason for waiting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Connections and sessions that exist.
    pub open: u64,
    /// Connections and sessions that began, a second.
    pub accepted: f64,
    /// To targets, a second; datagrams of UDP alone.
    pub to_target: Rate,
    /// To clients, likewise.
    pub to_client: Rate,
    /// Ended connections and sessions and dropped datagrams since the start, by reason.
    pub ends: Vec<Reason>,
}

/// State of a rule of a forwarder towards clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuleState {
    /// It takes clients.
    #[default]
    Listening,
    /// It cannot be bound yet; it is tried again (`forward.keep_going`).
    Waiting,
    /// It takes no new clients while its last connections end.
    Closed,
}

impl RuleState {
    /// As in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Listening => "listening",
            Self::Waiting => "waiting",
            Self::Closed => "closed",
        }
    }
}

/// The last minutes, a second apart, in lists of equal length; null stands for an unknown value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// Time of the last point (RFC 3339); null without points.
    pub ends_at: Option<String>,
    /// Seconds between two points.
    pub step_s: f64,
    /// Sessions or connections.
    #[schema(max_items = 600)]
    pub open: Vec<Option<f64>>,
    /// Payload bits to peers or targets, a second.
    #[schema(max_items = 600)]
    pub to_peer_bps: Vec<Option<f64>>,
    /// Payload bits to clients, a second.
    #[schema(max_items = 600)]
    pub to_client_bps: Vec<Option<f64>>,
    /// Payload datagrams to peers or targets, a second.
    #[schema(max_items = 600)]
    pub to_peer_pps: Vec<Option<f64>>,
    /// Payload datagrams to clients, a second.
    #[schema(max_items = 600)]
    pub to_client_pps: Vec<Option<f64>>,
    /// Datagrams lost or dropped, a second.
    #[schema(max_items = 600)]
    pub dropped: Vec<Option<f64>>,
    /// Refusals, a second.
    #[schema(max_items = 600)]
    pub refused: Vec<Option<f64>>,
    /// The share of its core that the busiest worker took.
    #[schema(max_items = 600)]
    pub load: Vec<Option<f64>>,
    /// Microseconds that a datagram would have waited for the slowest worker.
    #[schema(max_items = 600)]
    pub event_loop_us: Vec<Option<f64>>,
}

/// Refusals a second, each counted once: what a limit, a peer rule or a drain has refused is among the answers.
#[must_use]
pub fn refused(refusals: &[Reason]) -> f64 {
    let counts_once = |kind: &str| matches!(kind, "answer" | "credentials" | "connection" | "tls" | "dtls");
    total(refusals.iter().filter(|reason| counts_once(&reason.kind)).map(|reason| reason.rate))
}

/// The sum of nothing is 0 here, and -0 in the standard library, which people would see.
pub fn total(rates: impl Iterator<Item = f64>) -> f64 {
    rates.fold(0.0, |sum, rate| sum + rate)
}
