//! Requests and output of `turnpike allocations`, `allocation`, `drain` and `reload`.

mod account_commands;
mod fleet;
mod health;
mod usage;

use std::{
    io::{self, Write},
    path::PathBuf,
    time::Duration,
};

use serde::{Serialize, de::DeserializeOwned};
use turnpike_admin::Problem;
use turnpike_api::{
    Allocation, AllocationPage, AllocationQuery, Drain, Draining, NetworkInfo, QualityProblem, Reloaded,
    Traffic,
};
use turnpike_wire::escape;

use turnpike_measure::units::{bytes, span};

pub use crate::table::OutputFormat;
pub use account_commands::{AccountBackend, GeneratedSecret, Output};
pub use fleet::{list_fleet_allocations, order_node, show_fleet};
pub use health::{health, wait_for_end};
pub use usage::{UsageFormat, show_usage};

use crate::{
    client::{Client, ClientError, listed},
    table::{PagedTable, write_members},
};

const PAGE: usize = 1000;

#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Client(ClientError),
    #[error("{}{}", .0.detail, listed(&.0.errors))]
    Refused(Problem),
    #[error("standard input or output is not a terminal: use --once or --json")]
    NoTerminal,
    #[error("a capture is binary: write it to a file with -w FILE, or pipe it to tcpdump -nr -")]
    Terminal,
    #[error("cannot create {}: {source}", file.display())]
    File { file: PathBuf, source: io::Error },
    #[error("not healthy: {0}")]
    Unwell(String),
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
}

impl From<ClientError> for CommandError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Refused(problem) => Self::Refused(problem),
            other => Self::Client(other),
        }
    }
}

impl From<Problem> for CommandError {
    fn from(problem: Problem) -> Self {
        Self::Refused(problem)
    }
}

impl CommandError {
    /// Returns true if the error is in the command line.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Refused(problem) if problem.status == 400)
    }
}

/// Filter for allocations; all conditions must be met. The server validates the values.
#[derive(Clone, Debug, Default)]
pub struct AllocationListFilter {
    pub user: Option<String>,
    pub realm: Option<String>,
    /// The client: an address with a port, an address, or a prefix.
    pub client: Option<String>,
    /// The client's transport: `udp`, `tcp`, `tls` or `dtls`.
    pub transport: Option<String>,
    /// A relayed address, in the same forms as `client`.
    pub relayed: Option<String>,
    pub limit: Option<usize>,
}

impl AllocationListFilter {
    fn query(self) -> AllocationQuery {
        let Self { user, realm, client, transport, relayed, .. } = self;
        AllocationQuery { user, realm, client, transport, relayed, limit: None, cursor: None }
    }
}

pub fn list_allocations(
    client: &Client,
    wanted: AllocationListFilter,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let head = [
        "ID",
        "REALM",
        "USER",
        "CLIENT",
        "VIA",
        "RELAYED",
        "AGE",
        "TO PEERS",
        "TO CLIENT",
        "NETWORK",
        "QUALITY",
    ];
    let mut list = ListOutput::new(format, head);
    list.omit_if_empty(&["NETWORK", "QUALITY"]);
    let mut silent = Vec::new();
    each_page(client, "/v1/allocations", wanted, |page: AllocationPage| {
        list.show(out, &page.allocations, row)?;
        silent.extend(page.silent);
        Ok((page.allocations.len(), page.next))
    })?;
    Ok(list.end_without(out, "no allocations", &silent)?)
}

pub fn show_allocation(
    client: &Client,
    id: &str,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let allocation: Allocation = client.get(&path_of(id))?;
    let shown = if format.is_json() {
        write_json(out, &allocation)
    } else {
        write_allocation(out, &allocation, format)
    };
    Ok(shown?)
}

pub fn end_allocation(
    client: &Client,
    id: &str,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let allocation: Allocation = client.delete(&path_of(id))?;
    if format.is_json() {
        write_json(out, &allocation)?;
    } else {
        let Allocation { id, user, client, node, process, .. } = &allocation;
        let process = process.map_or_else(String::new, |pid| format!(", in process {pid}"));
        let node = node.as_ref().map_or_else(String::new, |node| format!(", on node {}", escape::name(node)));
        let user = escape::name(user);
        let text = format!("ended allocation {id} of {user:#}, client {client}{process}{node}");
        writeln!(out, "{}", format.sentence(&text))?;
    }
    Ok(())
}

/// Maximum payload per datagram in bytes, number of datagrams, and seconds.
#[derive(Clone, Copy, Debug)]
pub struct CaptureBounds {
    pub snap: u16,
    pub count: u64,
    pub seconds: u64,
}

/// Writes the datagrams of an allocation in the pcapng format.
pub fn capture(
    client: &Client,
    id: &str,
    CaptureBounds { snap, count, seconds }: CaptureBounds,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let path = format!("{}/capture?snap={snap}&count={count}&seconds={seconds}", path_of(id));
    Ok(client.download(&path, out)?)
}

/// Drains the program, which exits when its last allocation ends, or after the deadline at the latest.
pub fn drain(client: &Client, wanted: Drain, json: bool, out: &mut dyn Write) -> Result<(), CommandError> {
    let draining: Draining = client.post("/v1/drain", Some(&wanted))?;
    if json {
        write_json(out, &draining)?;
    } else {
        let Draining { open, deadline_s } = draining;
        let most = span(Duration::try_from_secs_f64(deadline_s.round()).unwrap_or(Duration::MAX).as_secs());
        writeln!(out, "draining for at most {most}; open allocations or connections: {open}")?;
    }
    Ok(())
}

pub fn reload(client: &Client, json: bool, out: &mut dyn Write) -> Result<(), CommandError> {
    let reloaded: Reloaded = client.post("/v1/reload", None::<&()>)?;
    if json {
        write_json(out, &reloaded)?;
        return Ok(());
    }
    let Reloaded { changed, after_restart, warnings } = reloaded;
    for warning in &warnings {
        writeln!(out, "warning: {}", escape::line(warning))?;
    }
    for key in &after_restart {
        writeln!(out, "{key}: takes effect only after a restart")?;
    }
    for line in &changed {
        writeln!(out, "{}", escape::line(line))?;
    }
    if changed.is_empty() {
        writeln!(out, "reloaded; nothing has changed that a reload can apply")?;
    }
    Ok(())
}

fn each_page<P: DeserializeOwned>(
    client: &Client,
    path: &str,
    wanted: AllocationListFilter,
    mut show: impl FnMut(P) -> Result<(usize, Option<String>), CommandError>,
) -> Result<(), CommandError> {
    let mut left = wanted.limit.unwrap_or(usize::MAX);
    let mut query = wanted.query();
    while left > 0 {
        query.limit = Some(left.min(PAGE));
        let words = serde_urlencoded::to_string(&query).unwrap_or_default();
        let (count, next) = show(client.get(&format!("{path}?{words}"))?)?;
        if next.is_none() {
            break;
        }
        (left, query.cursor) = (left.saturating_sub(count), next);
    }
    Ok(())
}

fn path_of(id: &str) -> String {
    let plain = id.chars().filter(char::is_ascii_alphanumeric).collect::<String>();
    format!("/v1/allocations/{}", if plain.is_empty() { "-" } else { &plain })
}

/// Percent-encodes a name for a path.
fn encoded(name: &str) -> String {
    let mut text = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'~' => text.push(byte.into()),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

fn write_json(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    writeln!(out, "{}", escape::json(&serde_json::to_string_pretty(value)?))
}

enum ListOutput<const N: usize> {
    /// The last field counts the rows written so far.
    Table(PagedTable<N>, OutputFormat, usize),
    Json(bool),
}

impl<const N: usize> ListOutput<N> {
    fn new(format: OutputFormat, head: [&'static str; N]) -> Self {
        if format.is_json() {
            Self::Json(false)
        } else {
            Self::Table(PagedTable::new(head, format), format, 0)
        }
    }

    /// Leaves out these columns if they are empty on the first page.
    fn omit_if_empty(&mut self, titles: &'static [&'static str]) {
        if let Self::Table(table, ..) = self {
            table.omitted = titles;
        }
    }

    fn show<T: Serialize>(
        &mut self,
        out: &mut dyn Write,
        items: &[T],
        row: fn(&T) -> [String; N],
    ) -> io::Result<()> {
        match self {
            Self::Table(table, _, count) => {
                *count += items.len();
                table.write(out, &items.iter().map(row).collect::<Vec<_>>())
            }
            Self::Json(begun) => {
                for item in items {
                    let lead = if std::mem::replace(begun, true) { ",\n" } else { "[\n" };
                    write!(out, "{lead}{}", escape::json(&serde_json::to_string(item)?))?;
                }
                Ok(())
            }
        }
    }

    /// `none` is the text for an empty table.
    fn end(self, out: &mut dyn Write, none: &str) -> io::Result<()> {
        self.end_without(out, none, &[])
    }

    /// Also lists nodes that did not answer, but only in text output: they do not fit into a JSON
    /// array.
    fn end_without(self, out: &mut dyn Write, none: &str, silent: &[String]) -> io::Result<()> {
        match self {
            Self::Table(_, format, count) => {
                if count == 0 {
                    writeln!(out, "{none}")?;
                }
                silent.iter().try_for_each(|why| {
                    writeln!(out, "{}", format.sentence(&format!("missing: {}", escape::line(why))))
                })
            }
            Self::Json(false) => writeln!(out, "[]"),
            Self::Json(true) => writeln!(out, "\n]"),
        }
    }
}

fn row(allocation: &Allocation) -> [String; 11] {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the age in seconds")]
    let age = span(allocation.age_s as u64);
    let process = allocation.process.map_or_else(String::new, |pid| format!(" (process {pid})"));
    let relayed: Vec<&str> = allocation.relayed.iter().map(|relayed| relayed.address.as_str()).collect();
    [
        allocation.id.clone(),
        allocation.realm.clone(),
        allocation.user.clone(),
        allocation.client.clone(),
        format!("{}{process}", allocation.transport),
        relayed.join(", "),
        age,
        bytes(allocation.to_peer.bytes),
        bytes(allocation.to_client.bytes),
        allocation.network.as_ref().map_or_else(String::new, NetworkInfo::to_string),
        allocation.quality_problem.as_ref().map_or_else(String::new, QualityProblem::place),
    ]
}

fn write_allocation(out: &mut dyn Write, allocation: &Allocation, format: OutputFormat) -> io::Result<()> {
    let [id, realm, user, client, _, _, age, ..] = row(allocation);
    let traffic = |Traffic { datagrams, bytes: count }| format!("datagrams: {datagrams}, {}", bytes(count));
    let mut rows = vec![("id", id), ("realm", realm), ("user", user)];
    rows.extend(allocation.identity.clone().map(|name| ("counted as", name)));
    rows.push(("client", format!("{client}, over {} to {}", allocation.transport, allocation.server)));
    rows.extend(allocation.network.as_ref().map(|network| ("network", network.to_string())));
    for relayed in &allocation.relayed {
        let text = format!(
            "{} ({}), {} left",
            relayed.address,
            allocation.relayed_transport,
            span(relayed.expires_in_s)
        );
        rows.push(("relayed", text));
    }
    rows.push(("age", age));
    rows.push(("to peers", traffic(allocation.to_peer)));
    rows.push(("to client", traffic(allocation.to_client)));
    rows.extend(allocation.quality_problem.as_ref().map(|problem| ("quality", problem.sentence.clone())));
    for permission in allocation.permissions.iter().flatten() {
        let text = format!("{}, {} left", permission.peer, span(permission.expires_in_s));
        rows.push(("permission", text));
    }
    for channel in allocation.channels.iter().flatten() {
        let text =
            format!("{:#06x} to {}, {} left", channel.number, channel.peer, span(channel.expires_in_s));
        rows.push(("channel", text));
    }
    if allocation.peer_connections > 0 {
        rows.push(("connections", allocation.peer_connections.to_string()));
    }
    let marks = [(allocation.mobile, "mobile"), (allocation.away, "away")];
    for (_, mark) in marks.iter().filter(|(is_so, _)| *is_so) {
        rows.push(("status", (*mark).to_owned()));
    }
    rows.push(("worker", allocation.worker.to_string()));
    rows.extend(allocation.process.map(|pid| ("process", format!("{pid}, the previous process"))));
    rows.extend(allocation.node.clone().map(|node| ("node", node)));
    write_members(out, &rows, format)
}
