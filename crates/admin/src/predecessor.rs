//! The previous process: after an upgrade in place, it still serves its clients over streams and DTLS, and
//! answers this process's requests about their allocations.
//!
//! ```text
//!   previous process                            this process
//!     lend ── one end, among the listening sockets ──▶ Predecessor
//!     leave: Successor::answer ◀── PredecessorRequest, PredecessorAnswer ──▶ ask: /v1/allocations, /v1/bans
//! ```
//!
//! The socket is passed under a name that is not an address. A version that does not know the name closes the
//! socket, and a version that does not offer a socket is not queried.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use axum::{Router, http::Method};
use serde::{Deserialize, Serialize};
use tokio::{runtime::Handle, sync::OwnedMutexGuard, task, time::timeout};
use turnpike_config::AdminAccess;
use turnpike_fleet::PeerAnswer;
use turnpike_worker::Channel;

use crate::{peer_requests, via::Via};

/// Name of the socket among those passed to a new process.
pub(crate) const NAME: &str = "predecessor";
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Serialize, Deserialize)]
struct PredecessorRequest {
    id: u64,
    method: String,
    path: String,
    /// Body of the request as JSON; empty if there is none.
    #[serde(default)]
    body: String,
    /// Client of the new process, for the audit log.
    by: String,
}

#[derive(Serialize, Deserialize)]
struct PredecessorAnswer {
    id: u64,
    pid: u32,
    answer: PeerAnswer,
}

/// Connection to the process that may replace this one.
pub(crate) struct SuccessorLink {
    router: Router,
    channel: Mutex<Option<Channel>>,
}

impl SuccessorLink {
    pub(crate) fn new(router: Router) -> Self {
        Self { router, channel: Mutex::default() }
    }

    /// Creates the socket for the new process, and closes that of an earlier failed upgrade.
    pub(crate) fn lend(&self) -> io::Result<OwnedFd> {
        let (here, there) = Channel::pair()?;
        *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = Some(here);
        Ok(there.into())
    }

    /// Starts answering requests, and stops when the new process exits. Must be called within a runtime.
    pub(crate) fn answer(&self) {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(channel) = channel else { return };
        let (router, runtime) = (self.router.clone(), Handle::current());
        let answer = move || {
            while let Ok((PredecessorRequest { id, method, path, body, by }, _)) =
                channel.receive_value::<PredecessorRequest>()
            {
                // The new process has already authorized its client.
                let via = Via::Node(AdminAccess::Full, by);
                let answer = runtime.block_on(peer_requests::ask(router.clone(), via, &method, path, body));
                if channel
                    .send_value(&PredecessorAnswer { id, pid: std::process::id(), answer }, &[])
                    .is_err()
                {
                    break;
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("successor".to_owned()).spawn(answer) {
            tracing::warn!("the new process cannot list the allocations that stay in this process: {error}");
        }
    }
}

pub(crate) struct Predecessor(Arc<tokio::sync::Mutex<Option<Link>>>);

struct Link {
    channel: Channel,
    asked: u64,
}

impl Predecessor {
    pub(crate) fn new(lent: OwnedFd) -> io::Result<Self> {
        let channel = Channel::try_from(lent)?;
        channel.set_patience(PATIENCE)?;
        Ok(Self(Arc::new(tokio::sync::Mutex::new(Some(Link { channel, asked: 0 })))))
    }

    /// Sends a request. Returns the answer with the process ID, or `None` if the process has exited.
    pub(crate) async fn ask(
        &self,
        method: &Method,
        path: String,
        body: String,
        by: String,
    ) -> Result<Option<(u32, PeerAnswer)>, String> {
        let silent = || "the previous process does not answer".to_owned();
        let link = timeout(PATIENCE, Arc::clone(&self.0).lock_owned()).await.map_err(|_| silent())?;
        // Runs to completion even if the client disconnects, so that the next request does not read this
        // answer.
        let asked = PredecessorRequest { id: 0, method: method.to_string(), path, body, by };
        let asking = task::spawn_blocking(move || exchange(link, asked));
        match asking.await {
            Ok(Ok(answered)) => Ok(answered),
            Ok(Err(_)) | Err(_) => Err(silent()),
        }
    }
}

fn exchange(
    mut link: OwnedMutexGuard<Option<Link>>,
    question: PredecessorRequest,
) -> io::Result<Option<(u32, PeerAnswer)>> {
    let Some(Link { channel, asked }) = &mut *link else { return Ok(None) };
    *asked += 1;
    let (id, until) = (*asked, Instant::now() + PATIENCE);
    let mut answered = channel.send_value(&PredecessorRequest { id, ..question }, &[]);
    while answered.is_ok() && Instant::now() < until {
        match channel.receive_value::<PredecessorAnswer>() {
            Ok((answer, _)) if answer.id == id => return Ok(Some((answer.pid, answer.answer))),
            // A late answer to an earlier request.
            Ok(_) => {}
            Err(error) => answered = Err(error),
        }
    }
    let error = answered.err().unwrap_or_else(|| io::ErrorKind::TimedOut.into());
    if error.kind() == io::ErrorKind::TimedOut {
        return Err(error);
    }
    // The process has exited, or its version does not answer.
    *link = None;
    Ok(None)
}
