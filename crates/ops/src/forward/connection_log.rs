//! One log line per ended connection or session: who, where, bytes both ways, how long, why it ended.

use std::{
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::Instant,
};

use turnpike_forward::{ConnectionLog, ConnectionReport, EndReason};

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
        let mut refusals = RefusalLimit::default();
        self.receiver
            .run(|batch, lost| {
                batch.retain(|report| {
                    let mut suppressed = 0;
                    let wanted =
                        !is_refusal(report.reason) || refusals.admit(start.elapsed(), &mut suppressed);
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

/// Strangers can make as many of these as they like.
fn is_refusal(reason: EndReason) -> bool {
    matches!(reason, EndReason::Denied | EndReason::Limit | EndReason::BadProxyHeader)
}

fn write(report: &ConnectionReport, suppressed: u64) {
    let target = report.target.as_ref().map(tracing::field::display);
    let seconds = format_args!("{:.3}", report.lived.as_secs_f64()).to_string();
    if is_refusal(report.reason) {
        tracing::warn!(
            target: "turnpike::forward",
            rule = %report.rule.0, client = %report.client, reason = why(report.reason), suppressed,
            "connection refused"
        );
        return;
    }
    tracing::info!(
        target: "turnpike::forward",
        rule = %report.rule.0, client = %report.client, target,
        to_target_bytes = report.to_target, to_client_bytes = report.to_client,
        seconds = %seconds, reason = why(report.reason),
        "connection ended"
    );
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
