//! Epoch of the store, which decides how much quota this node may grant until the store knows the quotas
//! that all nodes hold. Written by the control thread, read by workers.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use tokio::{sync::Notify, time::timeout};
use turnpike_fleet::{Books, EpochChange, EpochState, NodeReport, Recovery, StoreEpoch};

pub(super) struct Recovering {
    recovery: Mutex<Recovery>,
    /// Copy of the recovery state for lock-free reads.
    books: AtomicU8,
    /// Notified if the next heartbeat must be sent without waiting.
    soon: Notify,
}

impl Recovering {
    /// `before` is the epoch and the number of nodes that the previous process knew of, if the store was
    /// complete.
    pub(super) fn new(before: Option<(StoreEpoch, u32)>) -> Self {
        let recovery = before.map(|(era, members)| Recovery::after(era, members)).unwrap_or_default();
        let books = AtomicU8::new(recovery.books() as u8);
        Self { recovery: Mutex::new(recovery), books, soon: Notify::new() }
    }

    pub(super) fn hear(&self, era: EpochState) -> EpochChange {
        let mut recovery = self.lock();
        let turn = recovery.hear(era);
        self.books.store(recovery.books() as u8, Ordering::Relaxed);
        turn
    }

    pub(super) fn books(&self) -> Books {
        let books = self.books.load(Ordering::Relaxed);
        let all = [Books::Whole, Books::Recovering, Books::Unknown];
        all.into_iter().find(|it| *it as u8 == books).unwrap_or_default()
    }

    pub(super) fn looked(&self, nodes: usize) {
        self.lock().looked(u32::try_from(nodes).unwrap_or(u32::MAX));
    }

    pub(super) fn era(&self) -> StoreEpoch {
        self.lock().era()
    }

    pub(super) fn cleared(&self, era: StoreEpoch) {
        self.lock().cleared(era);
    }

    pub(super) fn is_to_clear(&self) -> bool {
        self.lock().is_to_clear()
    }

    pub(super) fn report(&self, lost: usize) -> NodeReport {
        self.lock().report(lost)
    }

    pub(super) fn offer(&self) -> Option<(StoreEpoch, u32)> {
        let recovery = self.lock();
        (recovery.books() == Books::Whole).then(|| (recovery.era(), recovery.members()))
    }

    pub(super) fn speak_soon(&self) {
        self.soon.notify_one();
    }

    /// Waits for `pause`, or until there is something to report.
    pub(super) async fn wait(&self, pause: Duration) {
        let _ = timeout(pause, self.soon.notified()).await;
    }

    fn lock(&self) -> MutexGuard<'_, Recovery> {
        self.recovery.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_see_the_epoch_that_the_control_thread_received() {
        let said = |number, is_whole| EpochState { era: StoreEpoch { number, since_ms: 0 }, is_whole };
        let recovering = Recovering::new(None);
        assert_eq!((recovering.books(), recovering.offer()), (Books::Unknown, None));
        recovering.hear(said(1, true));
        recovering.looked(2);
        assert_eq!((recovering.books(), recovering.offer()), (Books::Whole, Some((said(1, true).era, 2))));
        recovering.hear(said(2, false));
        assert_eq!((recovering.books(), recovering.offer()), (Books::Recovering, None));
        let heir = Recovering::new(Some((said(2, true).era, 2)));
        assert_eq!(
            (heir.books(), heir.hear(said(3, false)), heir.books()),
            (Books::Whole, EpochChange::Begins, Books::Recovering)
        );
    }
}
