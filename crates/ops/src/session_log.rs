//! The session log: one line per session and per refused credential. Workers hand effects over a bounded channel and
//! never wait; the control thread writes the lines.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::mpsc;
use turnpike_relay::SessionLog;
use turnpike_turn::server::{ClosedReason, CredentialRefusal, Effect};

/// Effects that may wait for the control thread: twice the default limit of allocations, so that a stop loses none of their
/// lines. Beyond that lines are lost and counted rather than a worker held up. The queue grows as needed; an entry has
/// about 200 bytes.
const BACKLOG: usize = 32_768;

/// Lines written in one go.
const BATCH: usize = 1024;
/// After that: a writer that waits for the next effect costs the worker a wake-up of another thread (two system calls)
/// for each session, one that looks again a little later costs it none.
const PAUSE: Duration = Duration::from_millis(20);

/// The workers' end.
pub struct SessionLogger {
    sender: mpsc::Sender<(usize, Effect)>,
    lost: Arc<AtomicU64>,
}

/// The control thread's end.
pub struct SessionLogWriter {
    receiver: mpsc::Receiver<(usize, Effect)>,
    lost: Arc<AtomicU64>,
    lost_reported: u64,
    refusals: RefusalLimit,
}

/// Both ends of a session log.
#[must_use]
pub fn session_log() -> (SessionLogger, SessionLogWriter) {
    with_backlog(BACKLOG)
}

fn with_backlog(backlog: usize) -> (SessionLogger, SessionLogWriter) {
    let (sender, receiver) = mpsc::channel(backlog);
    let lost = Arc::new(AtomicU64::new(0));
    let writer = SessionLogWriter {
        receiver,
        lost: Arc::clone(&lost),
        lost_reported: 0,
        refusals: RefusalLimit::default(),
    };
    (SessionLogger { sender, lost }, writer)
}

impl SessionLogger {
    /// Counts lines that were lost because the control thread lagged behind.
    #[must_use]
    pub fn lost_counter(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.lost)
    }
}

impl SessionLog for SessionLogger {
    fn effect(&self, worker: usize, effect: &Effect) {
        let wanted = match effect {
            Effect::Opened { .. } => tracing::enabled!(target: "turnpike::session", tracing::Level::DEBUG),
            Effect::Closed { .. } | Effect::Refused { .. } => true,
            _ => false,
        };
        if wanted && self.sender.try_send((worker, effect.clone())).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl SessionLogWriter {
    /// Writes lines until the last worker is gone.
    pub async fn run(mut self) {
        let start = Instant::now();
        let mut batch = Vec::new();
        while self.receiver.recv_many(&mut batch, BATCH).await > 0 {
            for (worker, mut effect) in batch.drain(..) {
                let wanted = match &mut effect {
                    Effect::Refused { suppressed, .. } => self.refusals.admit(start.elapsed(), suppressed),
                    _ => true,
                };
                if wanted {
                    write(worker, &effect);
                }
            }
            self.report_lost();
            if self.receiver.len() < BATCH {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    fn report_lost(&mut self) {
        let lost = self.lost.load(Ordering::Relaxed);
        if lost > self.lost_reported && self.receiver.is_empty() {
            tracing::warn!(target: "turnpike::session", lines = lost - self.lost_reported, "session log lines lost");
            self.lost_reported = lost;
        }
    }
}

/// How many refusals become lines: a token bucket over all workers. Each worker bounds its own, but a stranger's guesses must
/// not fill the disk of a server with many cores; the counters count them all.
#[derive(Default)]
struct RefusalLimit {
    /// The bucket as a time: full when this lies in the past, empty when `BURST` seconds ahead.
    drained: Duration,
    suppressed: u64,
}

impl RefusalLimit {
    /// Lines at once.
    const BURST: u32 = 20;
    /// One more line each.
    const INTERVAL: Duration = Duration::from_secs(1);

    /// Whether this refusal becomes a line; if so, `suppressed` also counts those that did not since the last line.
    fn admit(&mut self, now: Duration, suppressed: &mut u64) -> bool {
        let drained = self.drained.max(now) + Self::INTERVAL;
        if drained > now + Self::INTERVAL * Self::BURST {
            self.suppressed += *suppressed + 1;
            return false;
        }
        self.drained = drained;
        *suppressed += std::mem::take(&mut self.suppressed);
        true
    }
}

fn write(worker: usize, effect: &Effect) {
    match effect {
        Effect::Opened { client, username, relayed, .. } => {
            let second = relayed.1.map(tracing::field::display);
            tracing::debug!(
                target: "turnpike::session",
                user = ?username, client = %client.address, relayed = %relayed.0, relayed2 = second, worker,
                "session opened"
            );
        }
        Effect::Closed { client, username, reason, lived_ms, to_peer, to_client, .. } => {
            tracing::info!(
                target: "turnpike::session",
                user = ?username, client = %client.address, reason = closed_reason(*reason),
                seconds = lived_ms / 1000,
                to_peer_datagrams = to_peer.0, to_peer_bytes = to_peer.1,
                to_client_datagrams = to_client.0, to_client_bytes = to_client.1,
                worker,
                "session ended"
            );
        }
        Effect::Refused { client, username, why, suppressed } => {
            tracing::warn!(
                target: "turnpike::auth",
                user = ?username, client = %client.address, reason = refusal(*why), suppressed, worker,
                "credential refused"
            );
        }
        _ => {}
    }
}

fn closed_reason(reason: ClosedReason) -> &'static str {
    match reason {
        ClosedReason::Deleted => "deleted by the client",
        ClosedReason::Expired => "not refreshed in time",
        ClosedReason::Shutdown => "server stopped",
        ClosedReason::Administrator => "ended by an administrator",
    }
}

fn refusal(why: CredentialRefusal) -> String {
    match why {
        CredentialRefusal::NoSuchUser => "no such user".to_owned(),
        CredentialRefusal::Expired { ago } => format!("expired {ago} s ago"),
        CredentialRefusal::WrongKey => "wrong key".to_owned(),
        CredentialRefusal::WrongRealm => "wrong realm".to_owned(),
        CredentialRefusal::WrongUser => "wrong user".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Mutex, PoisonError},
    };

    use turnpike_turn::server::{AllocationId, Client, ListenerId};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines_of(effects: &[Effect]) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .without_time()
            .with_max_level(tracing::Level::DEBUG)
            .finish();
        tracing::subscriber::with_default(subscriber, || effects.iter().for_each(|effect| write(0, effect)));
        let bytes = lines.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        String::from_utf8(bytes).expect("log lines are UTF-8")
    }

    fn client() -> Client {
        Client {
            listener: ListenerId(0),
            address: "192.0.2.9:50000".parse().expect("an address"),
            local: "192.0.2.1:3478".parse().expect("an address"),
        }
    }

    fn refused(why: CredentialRefusal) -> Effect {
        Effect::Refused { client: client(), username: "al\"ice".into(), why, suppressed: 7 }
    }

    #[test]
    fn a_session_ends_with_one_line() {
        let line = lines_of(&[Effect::Closed {
            allocation: AllocationId { index: 1, generation: 2 },
            client: client(),
            username: "alice".into(),
            reason: ClosedReason::Expired,
            lived_ms: 61_999,
            to_peer: (10, 1200),
            to_client: (9, 1080),
        }]);
        assert_eq!(
            line.trim(),
            "INFO turnpike::session: session ended user=\"alice\" client=192.0.2.9:50000 \
             reason=\"not refreshed in time\" seconds=61 to_peer_datagrams=10 to_peer_bytes=1200 \
             to_client_datagrams=9 to_client_bytes=1080 worker=0"
        );
    }

    #[test]
    fn each_refusal_says_its_reason_and_what_was_suppressed() {
        for (why, text) in [
            (CredentialRefusal::NoSuchUser, "no such user"),
            (CredentialRefusal::Expired { ago: 42 }, "expired 42 s ago"),
            (CredentialRefusal::WrongKey, "wrong key"),
            (CredentialRefusal::WrongRealm, "wrong realm"),
            (CredentialRefusal::WrongUser, "wrong user"),
        ] {
            let line = lines_of(&[refused(why)]);
            assert_eq!(
                line.trim(),
                format!(
                    "WARN turnpike::auth: credential refused user=\"al\\\"ice\" client=192.0.2.9:50000 \
                     reason=\"{text}\" suppressed=7 worker=0"
                )
            );
        }
    }

    #[test]
    fn twenty_refusals_at_once_then_one_a_second_and_the_rest_is_counted() {
        let mut limit = RefusalLimit::default();
        let mut admitted = |seconds: u64, tries: usize| {
            (0..tries)
                .filter_map(|_| {
                    let mut suppressed = 1;
                    limit.admit(Duration::from_secs(seconds), &mut suppressed).then_some(suppressed)
                })
                .collect::<Vec<u64>>()
        };
        assert_eq!(admitted(5, 100), vec![1; 20]);
        // 80 lines with one suppressed refusal each stand for 160, and this one brings its own.
        assert_eq!(admitted(6, 100), [161]);
        assert_eq!(admitted(8, 3), [99 * 2 + 1, 1]);
    }

    #[test]
    fn a_full_backlog_loses_lines_and_counts_them() {
        let (logger, mut writer) = with_backlog(2);
        for _ in 0..5 {
            logger.effect(0, &refused(CredentialRefusal::WrongKey));
        }
        assert_eq!(logger.lost_counter().load(Ordering::Relaxed), 3);
        assert!(writer.receiver.try_recv().is_ok());
    }
}
