//! Current activity, and activity in the last minutes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{NetworkInfo, QualityProblem, Status, transport};

/// An event of `/v1/live/events`.
#[derive(ToSchema)]
#[serde(tag = "event", content = "data", rename_all = "lowercase")]
pub enum LiveEvent {
    /// The first event: the history of the last minutes.
    History(Box<History>),
    /// An event each second.
    Live(Box<Live>),
}

/// Current state of the program, with rates over the last second or so (`interval_s`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Live {
    /// Time (RFC 3339, with milliseconds).
    pub at: String,
    /// Seconds over which rates are measured.
    pub interval_s: f64,
    /// State of the program.
    pub status: Status,
    /// CPU use in cores; 1.0 is one core.
    pub cores: Option<f64>,
    /// Activity of the TURN server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<LiveServer>,
    /// Activity of each rule of a forwarder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<LiveRule>,
}

/// Current activity of the TURN server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveServer {
    /// Payload relayed to peers, per second.
    pub to_peer: PayloadRate,
    /// Payload relayed to clients, per second.
    pub to_client: PayloadRate,
    /// The part of the payload, in both directions, that the kernel relayed without waking a worker, per second.
    pub across: PayloadRate,
    /// Datagrams received by workers, per second.
    pub received: f64,
    /// Datagrams sent by workers, per second.
    pub sent: f64,
    /// Well-formed requests per second.
    pub requests: f64,
    /// New allocations per second.
    pub opened: f64,
    /// Ended allocations per second.
    pub closed: f64,
    /// Time from request to allocation in the last minute; null if there were no allocations.
    pub opening: Option<Quantiles>,
    /// Losses and drops since startup, by reason; reasons that have not occurred are omitted.
    pub drops: Vec<ReasonCount>,
    /// Refusals since startup, by reason; reasons that have not occurred are omitted.
    pub refusals: Vec<ReasonCount>,
    /// Workers by number.
    pub workers: Vec<LiveWorker>,
    /// Histogram of datagrams per receive call.
    pub batches: Vec<BatchRate>,
    /// Allocations by listener.
    pub listeners: Vec<LiveListener>,
    /// Allocations by realm; realms without any are omitted.
    pub realms: Vec<LiveRealm>,
    /// Allocations with the most traffic; null for a few seconds after the first request, until their rates
    /// have been measured.
    pub talkers: Option<Talkers>,
}

/// Payload per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Rate)]
pub struct PayloadRate {
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
    /// 99th percentile in seconds; null above the largest bucket.
    pub p99_s: Option<f64>,
}

/// Count for one reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Reason)]
pub struct ReasonCount {
    /// Kind, such as `packet` or `limit`.
    pub kind: String,
    /// Reason, as in `/metrics`.
    pub reason: String,
    /// Number since startup.
    pub total: u64,
    /// Number per second.
    pub rate: f64,
    /// Configuration keys that control this reason, such as `limits.allocations_per_user`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
}

/// Current activity of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveWorker {
    /// Its number, from 0.
    pub number: u64,
    /// Its current allocations.
    pub allocations: u64,
    /// CPU use as a share of a core, 0 to 1.
    pub load: Option<f64>,
    /// Share of time in which it was ready to run but another thread had its core.
    pub waiting: Option<f64>,
    /// Event loop latency in microseconds: the time that a datagram would currently wait; null if the worker
    /// did not answer.
    pub event_loop_us: Option<u64>,
    /// Wake-ups per second.
    pub wakeups: f64,
    /// Datagrams received per second.
    pub received: f64,
    /// Datagrams sent per second.
    pub sent: f64,
    /// Mean number of datagrams per receive call, not counting empty calls.
    pub receive_batch: Option<f64>,
    /// Mean number of datagrams per send call.
    pub send_batch: Option<f64>,
    /// Datagrams dropped by the kernel or the server, per second.
    pub dropped: f64,
}

/// Rate of receive calls that returned this many datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Batch)]
pub struct BatchRate {
    /// Lower bound.
    pub from: u64,
    /// Upper bound; null for the last one.
    pub to: Option<u64>,
    /// Calls per second.
    pub rate: f64,
}

/// Allocations of a listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveListener {
    /// Transport.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Address and port.
    pub address: String,
    /// The TLS server name that the clients requested, if it selects realms.
    pub server_name: Option<String>,
    /// Allocations.
    pub allocations: u64,
}

/// Allocations of a realm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveRealm {
    /// The name, as in the REALM attribute.
    pub name: String,
    /// Allocations.
    pub allocations: u64,
}

/// Allocations with the most traffic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Talkers {
    /// Seconds over which their rates are measured.
    pub interval_s: f64,
    /// Number of allocations that relayed anything in that time.
    pub active: u64,
    /// Sorted by bytes, the largest first.
    #[schema(max_items = 20)]
    pub talkers: Vec<Talker>,
}

/// One of the allocations with the most traffic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Talker {
    /// Its identifier.
    pub id: String,
    /// The realm of its user.
    pub realm: String,
    /// The username that authenticated it.
    pub user: String,
    /// The client's address.
    pub client: String,
    /// Country and autonomous system of the client; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkInfo>,
    /// Transport between client and server.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Payload to peers, per second.
    pub to_peer: PayloadRate,
    /// Payload to the client, per second.
    pub to_client: PayloadRate,
    /// Trouble of its media; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quality_problem: Option<QualityProblem>,
}

/// Current activity of a forwarding rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveRule {
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: RuleState,
    /// Reason for waiting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Open connections and UDP sessions.
    pub open: u64,
    /// New connections and UDP sessions per second.
    pub accepted: f64,
    /// Traffic to targets per second; datagrams only for UDP.
    pub to_target: PayloadRate,
    /// Traffic to clients per second; datagrams only for UDP.
    pub to_client: PayloadRate,
    /// Ended connections, ended UDP sessions and dropped datagrams since startup, by reason.
    pub ends: Vec<ReasonCount>,
}

/// State of a forwarding rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuleState {
    /// It accepts clients.
    #[default]
    Listening,
    /// It cannot be bound yet and is retried (`forward.keep_going`).
    Waiting,
    /// It accepts no new clients, and waits for its last connections to end.
    Closed,
}

impl RuleState {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Listening => "listening",
            Self::Waiting => "waiting",
            Self::Closed => "closed",
        }
    }
}

/// The last minutes in steps of one second, as lists of equal length; null means that a value is unknown.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// Time of the last point (RFC 3339); null if there are no points.
    pub ends_at: Option<String>,
    /// Seconds between two points.
    pub step_s: f64,
    /// Allocations or connections.
    #[schema(max_items = 600)]
    pub open: Vec<Option<f64>>,
    /// Payload bits to peers or targets, per second.
    #[schema(max_items = 600)]
    pub to_peer_bps: Vec<Option<f64>>,
    /// Payload bits to clients, per second.
    #[schema(max_items = 600)]
    pub to_client_bps: Vec<Option<f64>>,
    /// Payload datagrams to peers or targets, per second.
    #[schema(max_items = 600)]
    pub to_peer_pps: Vec<Option<f64>>,
    /// Payload datagrams to clients, per second.
    #[schema(max_items = 600)]
    pub to_client_pps: Vec<Option<f64>>,
    /// Datagrams lost or dropped, per second.
    #[schema(max_items = 600)]
    pub dropped: Vec<Option<f64>>,
    /// Refusals per second.
    #[schema(max_items = 600)]
    pub refused: Vec<Option<f64>>,
    /// CPU use of the busiest worker as a share of a core.
    #[schema(max_items = 600)]
    pub load: Vec<Option<f64>>,
    /// Event loop latency of the slowest worker in microseconds.
    #[schema(max_items = 600)]
    pub event_loop_us: Vec<Option<f64>>,
}

/// Refusals per second, each counted once: those caused by a limit, a peer rule or a drain are already included in
/// the error responses.
#[must_use]
pub fn refused(refusals: &[ReasonCount]) -> f64 {
    let counts_once = |kind: &str| matches!(kind, "answer" | "credentials" | "connection" | "tls" | "dtls");
    total(refusals.iter().filter(|reason| counts_once(&reason.kind)).map(|reason| reason.rate))
}

/// Sum that is 0 if there are no items; the standard library would return -0, which would be displayed as such.
pub fn total(rates: impl Iterator<Item = f64>) -> f64 {
    rates.fold(0.0, |sum, rate| sum + rate)
}
