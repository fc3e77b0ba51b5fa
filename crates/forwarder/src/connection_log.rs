//! One log line per ended connection or session: who, where, bytes both ways, how long, why it ended.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use turnpike_forward::{Address, ConnectionLog, ConnectionReport, EndReason, RuleId};
use turnpike_process::{
    log_limit::{EndLimit, RefusalLimit, Sum, Summary},
    log_queue::{BACKLOG, LogCounts, LogReceiver, LogSender, log_queue},
    logging::seconds,
};
use turnpike_rates::{Rate, Rates, host};

use crate::{
    connection_file::ConnectionFile,
    denial::{Denial, Lists},
};

/// The workers' end.
pub(crate) struct ConnectionLogger(LogSender<ConnectionReport>);

/// The control thread's end.
pub(crate) struct ConnectionLogWriter {
    receiver: LogReceiver<ConnectionReport>,
    records: SharedRecords,
}

/// What lines need of the configuration; a reload replaces it.
pub(crate) struct Records {
    pub(crate) lists: Lists,
    /// The file of rinetd's lines.
    pub(crate) file: Option<ConnectionFile>,
}

/// Of the writer and of whoever reloads.
pub(crate) type SharedRecords = Arc<Mutex<Records>>;

pub(crate) fn connection_log(records: SharedRecords) -> (ConnectionLogger, ConnectionLogWriter) {
    let (sender, receiver) = log_queue(BACKLOG);
    (ConnectionLogger(sender), ConnectionLogWriter { receiver, records })
}

impl ConnectionLogger {
    /// Counts lines that were lost or suppressed.
    pub(crate) fn counts(&self) -> Arc<LogCounts> {
        self.0.counts()
    }
}

impl ConnectionLog for ConnectionLogger {
    fn ended(&self, report: ConnectionReport) {
        self.0.send(report);
    }
}

/// Stands for clients of Unix sockets, who have no address and count as one; no client of TCP or UDP has this.
const BY_UNIX_SOCKET: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// Which reports become lines.
struct Limits {
    refusals: RefusalLimit,
    evictions: RefusalLimit,
    unreachable: HashMap<(RuleId, Address), Repetition>,
    ends: EndLimit<IpAddr>,
}

/// Until when a line about a target holds, and how often it would have been repeated.
#[derive(Default)]
struct Repetition {
    until: Duration,
    suppressed: u64,
}

impl Limits {
    /// Ends of one client's connections: what a busy one has, and no flood.
    const EACH: Rate = Rate::new(2000, 10);
    /// Of all of them: at once what the queue holds.
    const TOTAL: Rate = Rate::new(32_768, 1);
    /// Clients remembered.
    const MOST: usize = 16_384;
    /// Between two lines about a target that is down.
    const REPEAT: Duration = Duration::from_secs(60);
    /// Targets remembered; names may have ever new addresses.
    const TARGETS: usize = 1024;

    fn new(counts: &Arc<LogCounts>) -> Self {
        let rates = Rates::new(Self::EACH, Self::TOTAL, Self::MOST);
        Self {
            refusals: RefusalLimit::new(Arc::clone(counts)),
            evictions: RefusalLimit::new(Arc::clone(counts)),
            unreachable: HashMap::new(),
            ends: EndLimit::new(rates, Arc::clone(counts)),
        }
    }

    /// With how many of its kind were suppressed before, if it becomes a line.
    fn admit(&mut self, now: Duration, report: &ConnectionReport) -> Option<u64> {
        let client = report.client.ip().unwrap_or(BY_UNIX_SOCKET);
        let mut suppressed = 0;
        let admitted = match Noise::of(report) {
            Noise::Refusal => self.refusals.admit(now, client, &mut suppressed),
            Noise::Eviction => self.evictions.admit(now, client, &mut suppressed),
            Noise::Unreachable(target) => return self.admit_target((report.rule.clone(), target), now),
            // A forwarder stops once, and then says what became of everything.
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

    /// One line about a target at once, and then one a minute as long as it refuses.
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
    /// Writes lines until the last worker is gone.
    pub(crate) async fn run(self) {
        let start = Instant::now();
        let counts = self.receiver.counts();
        let mut limits = Limits::new(&counts);
        self.receiver
            .run(|batch, lost| {
                let Records { lists, file } =
                    &mut *self.records.lock().unwrap_or_else(PoisonError::into_inner);
                batch.retain(|report| {
                    let line = limits.admit(start.elapsed(), report);
                    if let Some(suppressed) = line {
                        write(report, suppressed, lists);
                    }
                    // The file is there to have all of them, but for what strangers can have without end.
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

/// Kinds of ends of which strangers can cause any number.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Noise {
    None,
    /// Somebody was not served.
    Refusal,
    /// A session of UDP gave way: with forged sources, one a datagram.
    Eviction,
    /// A target refused a session: one a datagram, as long as it is down.
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
            // Only sessions of UDP name a target that was not reached.
            (EndReason::ConnectFailed, Some(target)) => Self::Unreachable(target.clone()),
            _ => Self::None,
        }
    }
}

fn write(report: &ConnectionReport, suppressed: u64, lists: &Lists) {
    let ConnectionReport { rule, client, reason, .. } = report;
    let to = report.target.as_ref().map(tracing::field::display);
    match Noise::of(report) {
        Noise::Refusal => {
            let denied = *reason == EndReason::Denied;
            let denial = denied.then(|| lists.denial(&rule.0, client.ip())).flatten();
            tracing::warn!(
                target: "turnpike::forward",
                rule = %rule.0, %client, reason = why(*reason), by = denial.map(Denial::text), suppressed,
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

fn write_sums(summary: &Summary<IpAddr>) {
    let each = summary.of.iter().map(|(client, sum)| (Some(shown(*client)), sum));
    for (client, sum) in each.chain(summary.others.iter().map(|sum| (None, sum))) {
        tracing::info!(
            target: "turnpike::forward",
            client, connections = sum.count, to_target_bytes = sum.out_bytes, to_client_bytes = sum.in_bytes,
            "more connections ended than are told one by one"
        );
    }
}

/// A host of IPv6 is a /64.
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
        EndReason::TargetDown => "its target fails its health checks",
        EndReason::TargetGone => "its target is one no longer",
        EndReason::Idle => "idle for too long",
        EndReason::ConnectFailed => "no target could be reached",
        EndReason::Denied => "denied",
        EndReason::HalfClosed => "half-closed for too long",
        EndReason::Limit => "too many connections",
        EndReason::Evicted => "longest idle when a limit was reached",
        EndReason::BadProxyHeader => "malformed or missing PROXY header",
        EndReason::UntrustedProxy => "PROXY header from none of proxy_protocol_from",
        EndReason::Shutdown => "ended with its rule or with the forwarder",
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
    fn ends_of_one_client_beyond_a_rate_are_told_in_sum_and_those_of_others_singly() {
        let mut limits = Limits::new(&Arc::default());
        let mut told = |client: &str, reason, count: usize| {
            let report = report(client, reason);
            (0..count).filter(|_| limits.admit(Duration::from_secs(1), &report).is_some()).count()
        };
        assert_eq!(told("[2001:db8::1]:5", EndReason::Finished, 10_000), 2000);
        assert_eq!(told("[2001:db8::2]:5", EndReason::ClientReset, 10), 0, "a /64 is one client");
        assert_eq!(told("192.0.2.1:5", EndReason::Finished, 1000), 1000);
        assert_eq!(told("[2001:db8::1]:5", EndReason::Shutdown, 5000), 5000);
        let summary = limits.ends.take().expect("of one client");
        let [(client, sum)] = &summary.of[..] else { panic!("{summary:?}") };
        assert_eq!(shown(*client), "2001:db8::/64");
        assert_eq!(*sum, Sum { count: 8010, out_bytes: 801_000, in_bytes: 16_020_000 });
    }

    #[tokio::test]
    async fn the_file_has_every_connection_that_ended_and_few_refusals() {
        let dir = turnpike_testkit::Dir::new();
        let path = dir.at("log");
        let file = ConnectionFile::open(&path, LineFormat::Rinetd, &[]);
        let file = Some(file.expect("a temporary file"));
        let (logger, writer) =
            connection_log(Arc::new(Mutex::new(Records { lists: Lists::default(), file })));
        let begun = Instant::now();
        for _ in 0..3000 {
            logger.ended(report("192.0.2.1:5", EndReason::Finished));
            logger.ended(report("192.0.2.1:5", EndReason::Denied));
        }
        let counts = logger.counts();
        drop(logger);
        writer.run().await;
        let most = 40 + 20 * usize::try_from(begun.elapsed().as_secs()).expect("seconds");
        let text = std::fs::read_to_string(&path).expect("it was written");
        let denied = text.lines().filter(|line| line.ends_with("\tdenied")).count();
        assert_eq!(text.lines().count() - denied, 3000);
        assert!((20..most).contains(&denied), "{denied}");
        let suppressed = [&counts.ends, &counts.refusals].map(|count| count.load(Ordering::Relaxed));
        assert!(suppressed[0] > 900 && suppressed[1] > 2900, "{suppressed:?}");
    }

    #[test]
    fn refusals_of_one_client_leave_room_for_those_of_others() {
        let mut limits = Limits::new(&Arc::default());
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

    /// How many of `count` reports become lines, and what the last of these counts as suppressed.
    fn lines(limits: &mut Limits, report: &ConnectionReport, second: u64, count: usize) -> (usize, u64) {
        let now = Duration::from_secs(second);
        let admitted: Vec<u64> = (0..count).filter_map(|_| limits.admit(now, report)).collect();
        (admitted.len(), admitted.last().copied().unwrap_or(0))
    }

    #[test]
    fn a_dead_target_is_told_at_once_and_then_once_a_minute_with_a_count() {
        let mut limits = Limits::new(&Arc::default());
        let (one, two) = (dead("10.0.0.1:53"), dead("10.0.0.2:53"));
        assert_eq!(lines(&mut limits, &one, 1, 500), (1, 0));
        assert_eq!(lines(&mut limits, &two, 1, 10), (1, 0));
        assert_eq!(lines(&mut limits, &one, 60, 5), (0, 0));
        assert_eq!(lines(&mut limits, &one, 61, 5), (1, 504));
        // A TCP client without a target has a line of its own, as it is somebody.
        assert_eq!(lines(&mut limits, &report("192.0.2.1:5", EndReason::ConnectFailed), 61, 5), (5, 0));
    }

    #[test]
    fn targets_without_number_are_not_remembered_without_end() {
        let mut limits = Limits::new(&Arc::default());
        let told = |limits: &mut Limits, port: usize, second| {
            lines(limits, &dead(&format!("10.0.0.1:{port}")), second, 1).0
        };
        assert_eq!((1..=5000).map(|port| told(&mut limits, port, 1)).sum::<usize>(), Limits::TARGETS);
        assert_eq!(told(&mut limits, 5000, 100), 1);
        assert_eq!(limits.unreachable.len(), 1, "old ones are forgotten");
    }

    #[test]
    fn evictions_and_refusals_are_bounded_apart() {
        let mut limits = Limits::new(&Arc::default());
        for reason in [EndReason::Evicted, EndReason::UntrustedProxy] {
            assert_eq!(lines(&mut limits, &report("192.0.2.1:5", reason), 1, 100).0, 20);
        }
    }
}
