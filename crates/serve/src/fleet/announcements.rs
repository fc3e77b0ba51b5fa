//! Order in which bans reach the other nodes.

use tokio::sync::{Mutex, Notify};

#[derive(Default)]
pub(super) struct Announcements {
    /// Held while one ban is published, so that other nodes see bans and unbans of a subject in the order
    /// in which they were issued.
    pub(super) turn: Mutex<()>,
    pub(super) wake: Notify,
}
