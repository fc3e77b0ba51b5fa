//! Order in which bans reach the other nodes.

use tokio::sync::{Mutex, Notify};

#[derive(Default)]
pub(super) struct Announcements {
    /// Held while one ban is published, so that other nodes see orders about the same subject in the
    /// sequence in which they were given.
    pub(super) turn: Mutex<()>,
    pub(super) wake: Notify,
}
