//! Connection log: one line per ended connection or session, with client, target, bytes, duration and reason.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use turnpike_forward::{Address, ConnectionLog, ConnectionReport, EndReason, RuleId};
use turnpike_process::{
    log_limit::{EndLimit, LineSummary, RefusalLineLimit, Sum},
    log_queue::{BACKLOG, LogCounts, LogReceiver, LogSender, log_queue},
    logging::seconds,
};
use turnpike_rates::{Rate, Rates, host};

use crate::{
    connection_file::ConnectionFile,
    denial::{AccessDenial, AccessLists},
};

pub(crate) struct ConnectionLogger(LogSender<ConnectionReport>);

pub(crate) struct ConnectionLogWriter {
    receiver: LogReceiver<ConnectionReport>,
    records: SharedRecords,
}

pub(crate) struct Records {
    pub(crate) lists: AccessLists,
    pub(crate) file: Option<ConnectionFile>,
}

pub(crate) type SharedRecords = Arc<Mutex<Records>>;

pub(crate) fn connection_log(records: SharedRecords) -> (ConnectionLogger, ConnectionLogWriter) {
    let (sender, receiver) = log_queue(BACKLOG);
    (ConnectionLogger(sender), ConnectionLogWriter { receiver, records })
}

impl ConnectionLogger {
    pub(crate) fn counts(&self) -> Arc<LogCounts> {
        self.0.counts()
    }
}

impl ConnectionLog for ConnectionLogger {
    fn ended(&self, report: ConnectionReport) {
        self.0.send(report);
    }
}

/// Stands for all clients of Unix sockets, since they have no IP address. TCP and UDP clients cannot have
/// this address.
const BY_UNIX_SOCKET: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

struct ConnectionLogLimits {
    refusals: RefusalLineLimit,
    evictions: RefusalLineLimit,
    unreachable: HashMap<(RuleId, Address), Repetition>,
    ends: EndLimit<IpAddr>,
}

#[derive(Default)]
struct Repetition {
    until: Duration,
    suppressed: u64,
}

impl ConnectionLogLimits {
    /// Limit on log lines about one client's ended connections: enough for a busy client, but not for a
    /// flood.
    const EACH: Rate = Rate::new(2000, 10);
    /// Limit on log lines about all ended connections; the burst equals the queue's capacity.
    const TOTAL: Rate = Rate::new(32_768, 1);
    const MOST: usize = 16_384;
    /// Interval between lines about an unreachable target.
    const REPEAT: Duration = Duration::from_secs(60);
    /// Maximum number of targets tracked, because a name can keep resolving to new addresses.
    const TARGETS: usize = 1024;

    fn new(counts: &Arc<LogCounts>) -> Self {
        let rates = Rates::new(Self::EACH, Self::TOTAL, Self::MOST);
        Self {
            refusals: RefusalLineLimit::new(Arc::clone(counts)),
            evictions: RefusalLineLimit::new(Arc::clone(counts)),
            unreachable: HashMap::new(),
            ends: EndLimit::new(rates, Arc::clone(counts)),
        }
    }

    /// Number of lines suppressed before this one, or `None` to drop this line.
    fn admit(&mut self, now: Duration, report: &ConnectionReport) -> Option<u64> {
        let client = report.client.ip().unwrap_or(BY_UNIX_SOCKET);
        let mut suppressed = 0;
        let admitted = match Noise::of(report) {
            Noise::Refusal => self.refusals.admit(now, client, &mut suppressed),
            Noise::Eviction => self.evictions.admit(now, client, &mut suppressed),
            Noise::Unreachable(target) => return self.admit_target((report.rule.clone(), target), now),
            // All connections are logged when the forwarder stops.
            Noise::None => {
                report.reason == EndReason::Shutdown || {
                    let sum = Sum::one(report.to_target, report.to_client);
                    let ask = |rates: &mut Rates, now| rates.admit_address(now, client);
                    self.ends.admit(now, sum, ask, || host(client))
                }
            }
        };
        admitted.then_some(suppressed)
    }

    /// Admits the first line about an unreachable target immediately, then one per minute.
    fn admit_target(&mut self, target: (RuleId, Address), now: Duration) -> Option<u64> {
        if self.unreachable.len() >= Self::TARGETS && !self.unreachable.contains_key(&target) {
            self.unreachable.retain(|_, repetition| repetition.until > now);
            if self.unreachable.len() >= Self::TARGETS {
                return None;
            }
        }
        let repetition = self.unreachable.entry(target).or_default();
        if now < repetition.until {
            repetition.suppressed += 1;
            return None;
        }
        repetition.until = now + Self::REPEAT;
        Some(std::mem::take(&mut repetition.suppressed))
    }
}

impl ConnectionLogWriter {
    pub(crate) async fn run(self) {
        let start = Instant::now();
        let counts = self.receiver.counts();
        let mut limits = ConnectionLogLimits::new(&counts);
        self.receiver
            .run(|batch, lost| {
                let Records { lists, file } =
                    &mut *self.records.lock().unwrap_or_else(PoisonError::into_inner);
                batch.retain(|report| {
                    let line = limits.admit(start.elapsed(), report);
                    if let Some(suppressed) = line {
                        write(report, suppressed, lists);
                    }
                    // The file contains all reports, except for those that unknown clients can cause without
                    // limit.
                    line.is_some() || Noise::of(report) == Noise::None
                });
                if let Some(file) = file {
                    let unwritten = file.write(batch, lists);
                    counts.lost.fetch_add(unwritten, Ordering::Relaxed);
                }
                limits.ends.due(start.elapsed()).iter().for_each(write_sums);
                if lost > 0 {
                    tracing::warn!(target: "turnpike::forward", lines = lost, "log lines lost");
                }
            })
            .await;
        limits.ends.take().iter().for_each(write_sums);
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Noise {
    None,
    Refusal,
    /// Evicted UDP session; with forged sources, every datagram may cause one.
    Eviction,
    /// Session refused by its target; as long as the target is down, every datagram causes one.
    Unreachable(Address),
}

impl Noise {
    fn of(report: &ConnectionReport) -> Self {
        match (report.reason, &report.target) {
            (
                EndReason::Denied | EndReason::Limit | EndReason::BadProxyHeader | EndReason::UntrustedProxy,
                _,
            ) => Self::Refusal,
            (EndReason::Evicted, _) => Self::Eviction,
            // Only reports of UDP sessions contain an unreachable target.
            (EndReason::ConnectFailed, Some(target)) => Self::Unreachable(target.clone()),
            _ => Self::None,
        }
    }
}

fn write(report: &ConnectionReport, suppressed: u64, lists: &AccessLists) {
    let ConnectionReport { rule, client, reason, .. } = report;
    let to = report.target.as_ref().map(tracing::field::display);
    match Noise::of(report) {
        Noise::Refusal => {
            let denied = *reason == EndReason::Denied;
            let denial = denied.then(|| lists.denial(&rule.0, client.ip())).flatten();
            tracing::warn!(
                target: "turnpike::forward",
                rule = %rule.0, %client, reason = why(*reason), by = denial.map(AccessDenial::text), suppressed,
                "connection refused"
            );
        }
        Noise::Unreachable(_) => tracing::warn!(
            target: "turnpike::forward",
            rule = %rule.0, to, %client, reason = why(*reason), suppressed,
            "target unreachable"
        ),
        Noise::Eviction => tracing::warn!(
            target: "turnpike::forward",
            rule = %rule.0, %client, to,
            to_target_bytes = report.to_target, to_client_bytes = report.to_client,
            seconds = seconds(report.lived), reason = why(*reason), suppressed,
            "session evicted"
        ),
        Noise::None => tracing::info!(
            target: "turnpike::forward",
            rule = %rule.0, %client, to,
            to_target_bytes = report.to_target, to_client_bytes = report.to_client,
            seconds = seconds(report.lived), reason = why(*reason),
            "connection ended"
        ),
    }
}

fn write_sums(summary: &LineSummary<IpAddr>) {
    let each = summary.of.iter().map(|(client, sum)| (Some(shown(*client)), sum));
    for (client, sum) in each.chain(summary.others.iter().map(|sum| (None, sum))) {
        tracing::info!(
            target: "turnpike::forward",
            client, connections = sum.count, to_target_bytes = sum.out_bytes, to_client_bytes = sum.in_bytes,
            "too many connections ended to log each one"
        );
    }
}

fn shown(host: IpAddr) -> String {
    match host {
        BY_UNIX_SOCKET => "unix".to_owned(),
        IpAddr::V4(_) => host.to_string(),
        IpAddr::V6(_) => format!("{host}/64"),
    }
}

fn why(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Finished => "finished",
        EndReason::ClientReset => "reset by the client",
        EndReason::TargetReset => "reset by the target",
        EndReason::TargetDown => "target failed its health checks",
        EndReason::TargetGone => "target removed",
        EndReason::Idle => "idle for too long",
        EndReason::ConnectFailed => "no target could be reached",
        EndReason::Denied => "denied",
        EndReason::HalfClosed => "half-closed for too long",
        EndReason::Limit => "too many connections",
        EndReason::Evicted => "evicted at a limit as the longest idle session",
        EndReason::BadProxyHeader => "malformed or missing PROXY header",
        EndReason::UntrustedProxy => "PROXY header from an address not in proxy_protocol_from",
        EndReason::Shutdown => "the rule was removed or the forwarder stopped",
        _ => "ended",
    }
}

#[cfg(test)]
mod tests {
    use turnpike_config::forward::LineFormat;
    use turnpike_forward::RuleId;

    use super::*;

    fn report(client: &str, reason: EndReason) -> ConnectionReport {
        ConnectionReport {
            rule: RuleId("web".to_owned()),
            client: Address::Ip(client.parse().expect("an address")),
            target: None,
            to_target: 100,
            to_client: 2000,
            lived: Duration::from_secs(3),
            reason,
        }
    }

    #[test]
    fn ended_connections_beyond_a_clients_rate_are_summarized() {
        let mut limits = ConnectionLogLimits::new(&Arc::default());
        let mut told = |client: &str, reason, count: usize| {
            let report = report(client, reason);
            (0..count).filter(|_| limits.admit(Duration::from_secs(1), &report).is_some()).count()
        };
        assert_eq!(told("[2001:db8::1]:5", EndReason::Finished, 10_000), 2000);
        assert_eq!(told("[2001:db8::2]:5", EndReason::ClientReset, 10), 0, "a /64 counts as one client");
        assert_eq!(told("192.0.2.1:5", EndReason::Finished, 1000), 1000);
        assert_eq!(told("[2001:db8::1]:5", EndReason::Shutdown, 5000), 5000);
        let summary = limits.ends.take().expect("the limit of one client was exceeded");
        let [(client, sum)] = &summary.of[..] else { panic!("{summary:?}") };
        assert_eq!(shown(*client), "2001:db8::/64");
        assert_eq!(*sum, Sum { count: 8010, out_bytes: 801_000, in_bytes: 16_020_000 });
    }

    #[tokio::test]
    async fn the_file_has_every_ended_connection_and_few_refusals() {
        let dir = turnpike_testkit::Dir::new();
        let path = dir.at("log");
        let file = ConnectionFile::open(&path, LineFormat::Rinetd, &[]);
        let file = Some(file.expect("a temporary file"));
        let (logger, writer) =
            connection_log(Arc::new(Mutex::new(Records { lists: AccessLists::default(), file })));
        let begun = Instant::now();
        for _ in 0..3000 {
            logger.ended(report("192.0.2.1:5", EndReason::Finished));
            logger.ended(report("192.0.2.1:5", EndReason::Denied));
        }
        let counts = logger.counts();
        drop(logger);
        writer.run().await;
        let most = 40 + 20 * usize::try_from(begun.elapsed().as_secs()).expect("seconds");
        let text = std::fs::read_to_string(&path).expect("the file was written");
        let denied = text.lines().filter(|line| line.ends_with("\tdenied")).count();
        assert_eq!(text.lines().count() - denied, 3000);
        assert!((20..most).contains(&denied), "{denied}");
        let suppressed = [&counts.ends, &counts.refusals].map(|count| count.load(Ordering::Relaxed));
        assert!(suppressed[0] > 900 && suppressed[1] > 2900, "{suppressed:?}");
    }

    #[test]
    fn refusals_of_one_client_leave_room_for_those_of_others() {
        let mut limits = ConnectionLogLimits::new(&Arc::default());
        let mut told = |client: &str, count: usize| {
            let report = report(client, EndReason::Denied);
            (0..count).filter_map(|_| limits.admit(Duration::from_secs(1), &report)).collect::<Vec<_>>()
        };
        assert_eq!(told("192.0.2.1:5", 1000), [0; 20]);
        assert_eq!(told("198.51.100.1:5", 1), [980]);
    }

    fn dead(target: &str) -> ConnectionReport {
        let target = Some(Address::Ip(target.parse().expect("an address")));
        ConnectionReport { target, ..report("192.0.2.1:5", EndReason::ConnectFailed) }
    }

    fn lines(
        limits: &mut ConnectionLogLimits,
        report: &ConnectionReport,
        second: u64,
        count: usize,
    ) -> (usize, u64) {
        let now = Duration::from_secs(second);
        let admitted: Vec<u64> = (0..count).filter_map(|_| limits.admit(now, report)).collect();
        (admitted.len(), admitted.last().copied().unwrap_or(0))
    }

    #[test]
    fn an_unreachable_target_is_logged_immediately_and_then_every_minute() {
        let mut limits = ConnectionLogLimits::new(&Arc::default());
        let (one, two) = (dead("10.0.0.1:53"), dead("10.0.0.2:53"));
        assert_eq!(lines(&mut limits, &one, 1, 500), (1, 0));
        assert_eq!(lines(&mut limits, &two, 1, 10), (1, 0));
        assert_eq!(lines(&mut limits, &one, 60, 5), (0, 0));
        assert_eq!(lines(&mut limits, &one, 61, 5), (1, 504));
        // A TCP client that reached no target always gets a line, because its address is real.
        assert_eq!(lines(&mut limits, &report("192.0.2.1:5", EndReason::ConnectFailed), 61, 5), (5, 0));
    }

    #[test]
    fn the_number_of_tracked_targets_is_bounded() {
        let mut limits = ConnectionLogLimits::new(&Arc::default());
        let told = |limits: &mut ConnectionLogLimits, port: usize, second| {
            lines(limits, &dead(&format!("10.0.0.1:{port}")), second, 1).0
        };
        assert_eq!(
            (1..=5000).map(|port| told(&mut limits, port, 1)).sum::<usize>(),
            ConnectionLogLimits::TARGETS
        );
        assert_eq!(told(&mut limits, 5000, 100), 1);
        assert_eq!(limits.unreachable.len(), 1, "expired entries are dropped");
    }

    #[test]
    fn evictions_and_refusals_have_separate_limits() {
        let mut limits = ConnectionLogLimits::new(&Arc::default());
        for reason in [EndReason::Evicted, EndReason::UntrustedProxy] {
            assert_eq!(lines(&mut limits, &report("192.0.2.1:5", reason), 1, 100).0, 20);
        }
    }
}
