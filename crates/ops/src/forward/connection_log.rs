//! One log line per ended connection or session: who, where, bytes both ways, how long, why it ended.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use turnpike_forward::{ConnectionLog, ConnectionReport, EndReason};
use turnpike_turn::rates::{Rate, Rates, host};

use super::{
    connection_file::ConnectionFile,
    denial::{Denial, Lists},
};
use crate::{
    log_limit::{EndLimit, LogCounts, RefusalLimit, Sum, Unsaid},
    log_queue::{BACKLOG, LogReceiver, LogSender, log_queue},
    logging::seconds,
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

/// Both ends.
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

/// Which reports become lines.
struct Limits {
    refusals: RefusalLimit,
    ends: EndLimit<IpAddr>,
}

impl Limits {
    /// Ends of one client's connections: what a busy one has, and no flood.
    const EACH: Rate = Rate::new(2000, 10);
    /// Of all of them: at once what the queue holds.
    const TOTAL: Rate = Rate::new(32_768, 1);
    /// Clients remembered.
    const MOST: usize = 16_384;

    fn new(counts: &Arc<LogCounts>) -> Self {
        let rates = Rates::new(Self::EACH, Self::TOTAL, Self::MOST);
        Self {
            refusals: RefusalLimit::new(Arc::clone(counts)),
            ends: EndLimit::new(rates, Arc::clone(counts)),
        }
    }

    /// With how many refusals were suppressed before, if it becomes a line.
    fn admit(&mut self, now: Duration, report: &ConnectionReport) -> Option<u64> {
        let client = report.client.ip();
        let mut suppressed = 0;
        let admitted = if is_refusal(report.reason) {
            self.refusals.admit(now, client, &mut suppressed)
        } else {
            // A forwarder stops once, and then says what became of everything.
            report.reason == EndReason::Shutdown || {
                let sum = Sum::one(report.to_target, report.to_client);
                let ask = |rates: &mut Rates, now| rates.admit_address(now, client);
                self.ends.admit(now, sum, ask, || host(client))
            }
        };
        admitted.then_some(suppressed)
    }
}

impl ConnectionLogWriter {
    /// Writes lines until the last worker is gone.
    pub(crate) async fn run(self) {
        let start = Instant::now();
        let mut limits = Limits::new(&self.receiver.counts());
        self.receiver
            .run(|batch, lost| {
                let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
                batch.retain(|report| {
                    let line = limits.admit(start.elapsed(), report);
                    if let Some(suppressed) = line {
                        write(report, suppressed, &records.lists);
                    }
                    // The file is there to have all of them, but for what strangers can have without end.
                    line.is_some() || !is_refusal(report.reason)
                });
                if let Some(file) = &mut records.file {
                    file.write(batch);
                }
                limits.ends.due(start.elapsed()).iter().for_each(write_sums);
                if lost > 0 {
                    tracing::warn!(target: "turnpike::forward", lines = lost, "connection log lines lost");
                }
            })
            .await;
        limits.ends.take().iter().for_each(write_sums);
    }
}

/// Strangers can make as many of these as they like.
fn is_refusal(reason: EndReason) -> bool {
    matches!(reason, EndReason::Denied | EndReason::Limit | EndReason::BadProxyHeader)
}

fn write(report: &ConnectionReport, suppressed: u64, lists: &Lists) {
    let ConnectionReport { rule, client, reason, .. } = report;
    if is_refusal(*reason) {
        let denied = *reason == EndReason::Denied;
        let denial = denied.then(|| lists.denial(&rule.0, client.ip())).flatten();
        tracing::warn!(
            target: "turnpike::forward",
            rule = %rule.0, %client, reason = why(*reason), by = denial.map(Denial::text), suppressed,
            "connection refused"
        );
        return;
    }
    tracing::info!(
        target: "turnpike::forward",
        rule = %rule.0, %client, to = report.target.map(tracing::field::display),
        to_target_bytes = report.to_target, to_client_bytes = report.to_client,
        seconds = seconds(report.lived), reason = why(*reason),
        "connection ended"
    );
}

fn write_sums(unsaid: &Unsaid<IpAddr>) {
    let each = unsaid.of.iter().map(|(client, sum)| (Some(shown(*client)), sum));
    for (client, sum) in each.chain(unsaid.others.iter().map(|sum| (None, sum))) {
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
        IpAddr::V4(_) => host.to_string(),
        IpAddr::V6(_) => format!("{host}/64"),
    }
}

fn why(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Finished => "finished",
        EndReason::ClientReset => "reset by the client",
        EndReason::TargetReset => "reset by the target",
        EndReason::Idle => "idle for too long",
        EndReason::ConnectFailed => "no target could be reached",
        EndReason::Denied => "denied",
        EndReason::Limit => "too many connections",
        EndReason::BadProxyHeader => "malformed or missing PROXY header",
        EndReason::Shutdown => "ended with its rule or with the forwarder",
        _ => "ended",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use turnpike_forward::RuleId;

    use super::*;
    use crate::forward::LineFormat;

    fn report(client: &str, reason: EndReason) -> ConnectionReport {
        ConnectionReport {
            rule: RuleId("web".to_owned()),
            client: client.parse().expect("an address"),
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
        let unsaid = limits.ends.take().expect("of one client");
        let [(client, sum)] = &unsaid.of[..] else { panic!("{unsaid:?}") };
        assert_eq!(shown(*client), "2001:db8::/64");
        assert_eq!(*sum, Sum { count: 8010, out_bytes: 801_000, in_bytes: 16_020_000 });
    }

    #[tokio::test]
    async fn the_file_has_every_connection_that_ended_and_few_refusals() {
        let path = std::env::temp_dir().join(format!("turnpike-connection-log-{}", std::process::id()));
        let file = ConnectionFile::open(&path, LineFormat::Rinetd, &[], Lists::default());
        let file = Some(file.expect("a temporary file"));
        let (logger, writer) =
            connection_log(Arc::new(Mutex::new(Records { lists: Lists::default(), file })));
        for _ in 0..3000 {
            logger.ended(report("192.0.2.1:5", EndReason::Finished));
            logger.ended(report("192.0.2.1:5", EndReason::Denied));
        }
        let counts = logger.counts();
        drop(logger);
        writer.run().await;
        let text = std::fs::read_to_string(&path).expect("it was written");
        std::fs::remove_file(&path).expect("it is there");
        let denied = text.lines().filter(|line| line.ends_with("\tdenied")).count();
        assert_eq!(text.lines().count() - denied, 3000);
        assert!((20..40).contains(&denied), "{denied}");
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
}
