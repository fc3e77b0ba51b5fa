//! The session log: one line per session and per refused credential. Workers hand effects over a bounded channel and
//! never wait; the control thread writes the lines.

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Instant,
};

use turnpike_relay::SessionLog;
use turnpike_turn::server::{ClosedReason, CredentialRefusal, Effect, TokenProblem};

use crate::log_queue::{BACKLOG, LogReceiver, LogSender, RefusalLimit, log_queue};

/// The workers' end.
pub struct SessionLogger(LogSender<(usize, Effect)>);

/// The control thread's end.
pub struct SessionLogWriter(LogReceiver<(usize, Effect)>);

/// Both ends of a session log.
#[must_use]
pub fn session_log() -> (SessionLogger, SessionLogWriter) {
    let (sender, receiver) = log_queue(BACKLOG);
    (SessionLogger(sender), SessionLogWriter(receiver))
}

impl SessionLogger {
    /// Counts lines that were lost because the control thread lagged behind.
    #[must_use]
    pub fn lost_counter(&self) -> Arc<AtomicU64> {
        self.0.lost_counter()
    }
}

impl SessionLog for SessionLogger {
    fn effect(&self, worker: usize, effect: &Effect) {
        let wanted = match effect {
            Effect::Opened { .. } => tracing::enabled!(target: "turnpike::session", tracing::Level::DEBUG),
            Effect::Closed { .. } | Effect::Refused { .. } => true,
            _ => false,
        };
        if wanted {
            self.0.send((worker, effect.clone()));
        }
    }
}

impl SessionLogWriter {
    /// Writes lines until the last worker is gone.
    pub async fn run(self) {
        let start = Instant::now();
        // Each worker bounds its own refusals; this is for servers with many cores.
        let mut refusals = RefusalLimit::default();
        self.0
            .run(|batch, lost| {
                for (worker, mut effect) in batch.drain(..) {
                    let wanted = match &mut effect {
                        Effect::Refused { suppressed, .. } => refusals.admit(start.elapsed(), suppressed),
                        _ => true,
                    };
                    if wanted {
                        write(worker, &effect);
                    }
                }
                if lost > 0 {
                    tracing::warn!(target: "turnpike::session", lines = lost, "session log lines lost");
                }
            })
            .await;
    }
}

fn write(worker: usize, effect: &Effect) {
    match effect {
        Effect::Opened { client, realm, username, relayed, .. } => {
            let second = relayed.1.map(tracing::field::display);
            tracing::debug!(
                target: "turnpike::session",
                realm = ?realm, user = ?username, client = %client.address, relayed = %relayed.0, relayed2 = second, worker,
                "session opened"
            );
        }
        Effect::Closed { client, realm, username, reason, lived_ms, to_peer, to_client, .. } => {
            tracing::info!(
                target: "turnpike::session",
                realm = ?realm, user = ?username, client = %client.address, reason = closed_reason(*reason),
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
        ClosedReason::Disconnected => "the client's connection was closed",
    }
}

fn refusal(why: CredentialRefusal) -> String {
    match why {
        CredentialRefusal::NoSuchUser => "no such user".to_owned(),
        CredentialRefusal::Expired { ago } => format!("expired {ago} s ago"),
        CredentialRefusal::WrongKey => "wrong key".to_owned(),
        CredentialRefusal::WrongRealm => "wrong realm".to_owned(),
        CredentialRefusal::WrongUser => "wrong user".to_owned(),
        CredentialRefusal::Token(problem) => match problem {
            TokenProblem::UnknownKey => "access token of an unknown key: no such kid in oauth.key".to_owned(),
            TokenProblem::Malformed => "access token malformed".to_owned(),
            TokenProblem::NotAuthentic => {
                "access token not authentic: another key or another oauth.server_name".to_owned()
            }
            TokenProblem::Future { ahead } => {
                format!("access token made {ahead} s in the future: set the clocks, or raise oauth.skew")
            }
        },
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
            realm: "example.org".into(),
            username: "alice".into(),
            away: false,
            reason: ClosedReason::Expired,
            lived_ms: 61_999,
            to_peer: (10, 1200),
            to_client: (9, 1080),
        }]);
        assert_eq!(
            line.trim(),
            "INFO turnpike::session: session ended realm=\"example.org\" user=\"alice\" client=192.0.2.9:50000 \
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
            (CredentialRefusal::Token(TokenProblem::Malformed), "access token malformed"),
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
}
