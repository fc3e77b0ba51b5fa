//! One log line per ended connection or session: who, where, bytes both ways, how long, why it ended.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::{Duration, Instant},
};

use turnpike_forward::{Address, ConnectionLog, ConnectionReport, EndReason, RuleId};

use super::connection_file::ConnectionFile;
use crate::log_queue::{BACKLOG, LogReceiver, LogSender, RefusalLimit, log_queue};

/// The workers' end.
pub(crate) struct ConnectionLogger(LogSender<ConnectionReport>);

/// The control thread's end.
pub(crate) struct ConnectionLogWriter {
    receiver: LogReceiver<ConnectionReport>,
    file: SharedFile,
}

/// The file of rinetd's lines, which a reload replaces.
pub(crate) type SharedFile = Arc<Mutex<Option<ConnectionFile>>>;

/// Both ends.
pub(crate) fn connection_log(file: SharedFile) -> (ConnectionLogger, ConnectionLogWriter) {
    let (sender, receiver) = log_queue(BACKLOG);
    (ConnectionLogger(sender), ConnectionLogWriter { receiver, file })
}

impl ConnectionLogger {
    /// Counts lines that were lost because the control thread lagged behind.
    pub(crate) fn lost_counter(&self) -> Arc<AtomicU64> {
        self.0.lost_counter()
    }
}

impl ConnectionLog for ConnectionLogger {
    fn ended(&self, report: ConnectionReport) {
        self.0.send(report);
    }
}

impl ConnectionLogWriter {
    /// Writes lines until the last worker is gone.
    pub(crate) async fn run(self) {
        let start = Instant::now();
        let mut limits = Limits::default();
        self.receiver
            .run(|batch, lost| {
                batch.retain(|report| {
                    let mut suppressed = 0;
                    let wanted = limits.admit(report, start.elapsed(), &mut suppressed);
                    if wanted {
                        write(report, suppressed);
                    }
                    wanted
                });
                if let Some(file) = self.file.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
                    file.write(batch);
                }
                if lost > 0 {
                    tracing::warn!(target: "turnpike::forward", lines = lost, "connection log lines lost");
                }
            })
            .await;
    }
}

/// Of which ends strangers can make as many as they like.
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

/// Which of them become lines; the counters count them all.
#[derive(Default)]
struct Limits {
    refusals: RefusalLimit,
    evictions: RefusalLimit,
    unreachable: HashMap<(RuleId, Address), Repetition>,
}

/// Until when a line about a target holds, and how often it would have been repeated.
#[derive(Default)]
struct Repetition {
    until: Duration,
    suppressed: u64,
}

impl Limits {
    /// Between two lines about a target that is down.
    const REPEAT: Duration = Duration::from_secs(60);
    /// Targets remembered; names may have ever new addresses.
    const TARGETS: usize = 1024;

    /// Whether a report becomes a line; if so, `suppressed` tells how many of its kind did not since the last one.
    fn admit(&mut self, report: &ConnectionReport, now: Duration, suppressed: &mut u64) -> bool {
        match Noise::of(report) {
            Noise::None => true,
            Noise::Refusal => self.refusals.admit(now, suppressed),
            Noise::Eviction => self.evictions.admit(now, suppressed),
            Noise::Unreachable(target) => {
                let key = (report.rule.clone(), target);
                if self.unreachable.len() >= Self::TARGETS && !self.unreachable.contains_key(&key) {
                    self.unreachable.retain(|_, repetition| repetition.until > now);
                    if self.unreachable.len() >= Self::TARGETS {
                        return self.refusals.admit(now, suppressed);
                    }
                }
                let repetition = self.unreachable.entry(key).or_default();
                if now < repetition.until {
                    repetition.suppressed += 1;
                    return false;
                }
                repetition.until = now + Self::REPEAT;
                *suppressed = std::mem::take(&mut repetition.suppressed);
                true
            }
        }
    }
}

fn write(report: &ConnectionReport, suppressed: u64) {
    let target = report.target.as_ref().map(tracing::field::display);
    let seconds = format_args!("{:.3}", report.lived.as_secs_f64()).to_string();
    match Noise::of(report) {
        Noise::Refusal => tracing::warn!(
            target: "turnpike::forward",
            rule = %report.rule.0, client = %report.client, reason = why(report.reason), suppressed,
            "connection refused"
        ),
        Noise::Unreachable(_) => tracing::warn!(
            target: "turnpike::forward",
            rule = %report.rule.0, target, client = %report.client, reason = why(report.reason), suppressed,
            "target unreachable"
        ),
        Noise::Eviction => tracing::warn!(
            target: "turnpike::forward",
            rule = %report.rule.0, client = %report.client, target,
            to_target_bytes = report.to_target, to_client_bytes = report.to_client,
            seconds = %seconds, reason = why(report.reason), suppressed,
            "session evicted"
        ),
        Noise::None => tracing::info!(
            target: "turnpike::forward",
            rule = %report.rule.0, client = %report.client, target,
            to_target_bytes = report.to_target, to_client_bytes = report.to_client,
            seconds = %seconds, reason = why(report.reason),
            "connection ended"
        ),
    }
}

fn why(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Finished => "finished",
        EndReason::ClientReset => "reset by the client",
        EndReason::TargetReset => "reset by the target",
        EndReason::TargetDown => "its target fails its health checks",
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
    use super::*;

    fn report(target: Option<&str>, reason: EndReason) -> ConnectionReport {
        ConnectionReport {
            rule: RuleId("a".to_owned()),
            client: Address::Ip(([192, 0, 2, 1], 5).into()),
            target: target.map(|target| Address::Ip(target.parse().expect("an address"))),
            to_target: 0,
            to_client: 0,
            lived: Duration::ZERO,
            reason,
        }
    }

    /// How many of `count` reports become lines, and what the last of these counts as suppressed.
    fn lines(limits: &mut Limits, report: &ConnectionReport, second: u64, count: usize) -> (usize, u64) {
        let admitted: Vec<u64> = (0..count)
            .filter_map(|_| {
                let mut suppressed = 0;
                limits.admit(report, Duration::from_secs(second), &mut suppressed).then_some(suppressed)
            })
            .collect();
        (admitted.len(), admitted.last().copied().unwrap_or(0))
    }

    #[test]
    fn a_dead_target_is_told_at_once_and_then_once_a_minute_with_a_count() {
        let mut limits = Limits::default();
        let (one, two) = ("10.0.0.1:53", "10.0.0.2:53");
        let dead = |target| report(Some(target), EndReason::ConnectFailed);
        assert_eq!(lines(&mut limits, &dead(one), 1, 500), (1, 0));
        assert_eq!(lines(&mut limits, &dead(two), 1, 10), (1, 0));
        assert_eq!(lines(&mut limits, &dead(one), 60, 5), (0, 0));
        assert_eq!(lines(&mut limits, &dead(one), 61, 5), (1, 504));
        // A TCP client without a target has a line of its own, as it is somebody.
        assert_eq!(lines(&mut limits, &report(None, EndReason::ConnectFailed), 61, 5), (5, 0));
    }

    #[test]
    fn targets_without_number_share_the_lines_of_refusals() {
        let mut limits = Limits::default();
        let dead = |port: usize| report(Some(&format!("10.0.0.1:{port}")), EndReason::ConnectFailed);
        let told = (1..=5000).map(|port| lines(&mut limits, &dead(port), 1, 1).0).sum::<usize>();
        assert_eq!((told, limits.unreachable.len()), (Limits::TARGETS + 20, Limits::TARGETS));
        assert_eq!(lines(&mut limits, &dead(5000), 100, 1).0, 1);
        assert_eq!(limits.unreachable.len(), 1, "old ones are forgotten");
    }

    #[test]
    fn evictions_and_refusals_are_bounded_apart() {
        let mut limits = Limits::default();
        assert_eq!(lines(&mut limits, &report(Some("10.0.0.1:53"), EndReason::Evicted), 1, 100).0, 20);
        assert_eq!(lines(&mut limits, &report(None, EndReason::UntrustedProxy), 1, 100).0, 20);
        assert_eq!(lines(&mut limits, &report(None, EndReason::Finished), 1, 100).0, 100);
    }
}
