//! Upgrade in place: a new process, of another version perhaps, takes this one's place, and clients over UDP notice nothing of it.
//!
//! ```text
//!   this process (succession)                            the new one (heir)
//!   starts it ─────────────── Hello, offer, sockets ───▶ reads its own configuration, makes its workers
//!                            ◀──────────────────── Ready
//!   workers rest ─── from worker to worker: sessions ──▶ takes them in
//!                            ◀──────────────────── Taken
//!                             ─ Metrics, Commit ───────▶ serves
//!                            ◀────────────────── Serving
//!   forgets what went         ─ Released ──────────────▶ its program in the kernel takes the other's place
//!   serves what stays until it ends, or a deadline ─ Metrics ─▶ adds them to its own
//! ```
//!
//! Whatever fails before `Serving` ends the new process, and this one goes on as if nothing had been. The conversation goes over a pair
//! of sockets that the new process has as its standard input; nobody else can have it.

mod door;
mod heir;
mod program;
mod succession;

use std::{io, os::fd::OwnedFd, time::Duration};

use serde::{Deserialize, Serialize};
use turnpike_admin::Lent;
use turnpike_net::{Channel, PassedSockets};
use zeroize::Zeroizing;

use crate::error::DaemonError;

pub use self::door::{AskError, Which, ask};
pub(crate) use self::{
    door::Door,
    heir::{Heir, begin},
    program::Program,
    succession::{Patience, Successor, hand_over},
};

/// Changes when a process can no longer understand what another one says.
const PROTOCOL: u32 = 1;

/// What this process says to the new one.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FromOld {
    /// First; behind it comes what is offered. All versions understand this one.
    Hello { protocol: u32, version: String, service: String },
    /// All sessions have arrived: serve.
    Commit,
    /// The kernel's path is the new one's.
    Released,
    /// What this process shows of itself, again and again until it ends.
    Metrics(String),
}

/// What the new one answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FromNew {
    /// It has all that it needs but the sessions.
    Ready {
        version: String,
        /// Whether it goes on with what the kernel relays, which then need not rest.
        #[serde(default)]
        keeps_flows: bool,
    },
    /// It cannot take over. All versions understand this one.
    Refused { why: String },
    /// It has so many sessions.
    Taken { sessions: usize },
    /// They are its own from now on.
    Serving,
}

/// What a service can give to another process; used from a thread that may wait.
pub(crate) trait Estate: Send + Sync {
    /// `serve` or `forward`.
    fn service(&self) -> &'static str;
    /// What the other process has to know in advance.
    fn offer(&self) -> io::Result<Offered>;
    /// Rests; whatever comes of it, [`Estate::release`] or [`Estate::thaw`] follows.
    fn freeze(&self, heir_keeps_flows: bool) -> io::Result<()>;
    /// Gives the sessions to the workers at the other ends; how many.
    fn hand_over(&self, heirs: Vec<Channel>, patience: Duration) -> io::Result<usize>;
    /// Goes on as before.
    fn thaw(&self);
    /// Forgets what the other process has.
    fn release(&self);
    /// What the admin page would show.
    fn metrics(&self) -> String;
}

/// What the last descriptors of an offer are called: sockets of the admin interface and of what answers beside it, and then those that a
/// service manager has passed.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Names {
    page: Vec<String>,
    passed: Vec<String>,
}

impl Names {
    /// Appends the descriptors.
    pub(crate) fn lend(
        pages: Vec<Lent>,
        passed: &PassedSockets,
        descriptors: &mut Vec<OwnedFd>,
    ) -> io::Result<Self> {
        let mut names = Self::default();
        for (name, descriptor) in pages {
            names.page.push(name);
            descriptors.push(descriptor);
        }
        for (descriptor, name) in passed.lend()? {
            names.passed.push(name);
            descriptors.push(descriptor);
        }
        Ok(names)
    }

    /// Takes them back.
    pub(crate) fn take_from(
        self,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<(Vec<Lent>, PassedSockets), DaemonError> {
        let Self { page, passed } = self;
        let first = descriptors.len().checked_sub(page.len() + passed.len());
        let incomplete = || DaemonError::Upgrade("what the old process sent is not complete".to_owned());
        let mut sockets = descriptors.split_off(first.ok_or_else(incomplete)?).into_iter();
        let page = page.into_iter().zip(sockets.by_ref()).collect();
        Ok((page, PassedSockets::new(sockets.zip(passed))?))
    }
}

/// See [`Estate::offer`].
pub(crate) struct Offered {
    /// As JSON: there are keys in it.
    pub(crate) text: Zeroizing<Vec<u8>>,
    /// What it names.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// This process's ends of the ways from worker to worker.
    pub(crate) heirs: Vec<Channel>,
}

impl Offered {
    pub(crate) fn new(
        offer: &impl Serialize,
        descriptors: Vec<OwnedFd>,
        heirs: Vec<Channel>,
    ) -> io::Result<Self> {
        // Room for all of it: what is moved would leave a copy behind.
        let mut text = Zeroizing::new(Vec::with_capacity(1 << 16));
        serde_json::to_writer(&mut *text, offer)?;
        Ok(Self { text, descriptors, heirs })
    }
}
