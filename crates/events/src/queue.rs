//! Events on their way to the spool of a webhook, so that emitting does not wait for the disk.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use crate::event::Event;

const MOST_EVENTS: usize = 65_536;
const MOST_BYTES: usize = 32 << 20;

#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    news: Notify,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Arc<Event>>,
    bytes: usize,
    /// Number of dropped events since the last [`Queue::take`].
    lost: u64,
    is_closed: bool,
}

#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) events: Vec<Arc<Event>>,
    pub(crate) lost: u64,
}

impl Queue {
    pub(crate) fn push(&self, event: Arc<Event>) {
        let mut state = self.lock();
        state.bytes += event.size();
        state.events.push_back(event);
        while state.events.len() > MOST_EVENTS || state.bytes > MOST_BYTES {
            let Some(oldest) = state.events.pop_front() else { break };
            state.bytes -= oldest.size();
            state.lost += 1;
        }
        drop(state);
        self.news.notify_one();
    }

    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.news.notify_one();
    }

    /// Waits for events or losses; `None` once the queue is closed and empty. Cancel safe.
    pub(crate) async fn take(&self, most: usize) -> Option<Taken> {
        loop {
            {
                let mut state = self.lock();
                if !state.events.is_empty() || state.lost > 0 {
                    let count = state.events.len().min(most);
                    let events: Vec<_> = state.events.drain(..count).collect();
                    state.bytes -= events.iter().map(|event| event.size()).sum::<usize>();
                    return Some(Taken { events, lost: std::mem::take(&mut state.lost) });
                }
                if state.is_closed {
                    return None;
                }
            }
            self.news.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_queue_drops_its_oldest_events_and_counts_them() {
        let queue = Queue::default();
        for number in 0..MOST_EVENTS + 3 {
            queue.push(Arc::new(Event::new("", "a", &number)));
        }
        queue.close();
        let taken = queue.take(10).await.expect("events");
        assert_eq!((taken.events.len(), taken.lost), (10, 3));
        let rest = queue.take(usize::MAX).await.expect("events");
        assert_eq!((rest.events.len(), rest.lost), (MOST_EVENTS - 10, 0));
        assert!(queue.take(1).await.is_none());
        assert_eq!(queue.lock().bytes, 0);
        queue.push(Arc::new(Event::new("", "a", &"x".repeat(MOST_BYTES))));
        assert_eq!(queue.take(1).await.expect("a loss").lost, 1);
    }
}
