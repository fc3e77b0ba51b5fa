//! Recent events in memory for subscribers of the stream. Empty and inactive while the stream is unused.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use hyper::body::Bytes;
use tokio::sync::Notify;

use crate::event::{Event, LOST, LostEvents};

/// Maximum number of subscribers; each uses a connection.
pub const SUBSCRIBERS: usize = 8;
const MOST_EVENTS: usize = 16_384;
const MOST_BYTES: usize = 8 << 20;
/// Time for which events are kept for a subscriber that has disconnected.
const KEPT: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub(crate) struct Buffer {
    state: Mutex<State>,
    news: Notify,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Kept>,
    bytes: usize,
    /// Sequence number of the next event.
    next: u64,
    /// Sequence number of the first event since the buffer became active.
    began: u64,
    subscribers: usize,
    /// Set while there is no subscriber but events are still kept.
    left_at: Option<Instant>,
}

#[derive(Debug)]
struct Kept {
    kind: &'static str,
    /// The event in the format of server-sent events.
    text: Bytes,
}

/// Ends when dropped.
#[derive(Debug)]
pub struct Subscription {
    buffer: Arc<Buffer>,
    source: Arc<str>,
    /// Sequence number of the next event to send.
    at: u64,
    /// Requested events that are gone, with their number if it is known.
    lost: Option<LostEvents>,
    /// Wanted types; empty for all.
    kinds: Vec<&'static str>,
}

impl Buffer {
    /// Adds an event; returns false while the stream is unused.
    pub(crate) fn push(&self, event: &Event) -> bool {
        let mut state = self.lock();
        if state.left_at.is_some_and(|at| at.elapsed() >= KEPT) {
            *state = State { next: state.next, ..State::default() };
        }
        if !state.is_active() {
            return false;
        }
        let sequence = state.next;
        let mut json = String::new();
        event.write(sequence, sequence, &mut json);
        let text = Bytes::from(format!("id: {sequence}\nevent: {}\ndata: {json}\n\n", event.kind));
        state.bytes += text.len();
        state.events.push_back(Kept { kind: event.kind, text });
        state.next += 1;
        while state.events.len() > MOST_EVENTS || state.bytes > MOST_BYTES {
            let Some(oldest) = state.events.pop_front() else { break };
            state.bytes -= oldest.text.len();
        }
        drop(state);
        self.news.notify_waiters();
        true
    }

    /// Continues after the event with the number `last`, or with the next event; `None` if there are too many subscribers.
    pub(crate) fn subscribe(
        self: &Arc<Self>,
        source: Arc<str>,
        last: Option<u64>,
        kinds: Vec<&'static str>,
    ) -> Option<Subscription> {
        let mut state = self.lock();
        if state.subscribers >= SUBSCRIBERS {
            return None;
        }
        if !state.is_active() {
            // Numbers never repeat, not even those of an earlier process, unless it emitted a million events a second.
            let unix_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
            state.next = state.next.saturating_add(1).max(u64::try_from(unix_us).unwrap_or_default());
            state.began = state.next;
        }
        state.subscribers += 1;
        state.left_at = None;
        let (at, lost) = match last {
            None => (state.next, None),
            Some(last) => state.after(last),
        };
        drop(state);
        Some(Subscription { buffer: Arc::clone(self), source, at, lost, kinds })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_active(&self) -> bool {
        self.subscribers > 0 || self.left_at.is_some()
    }

    fn first(&self) -> u64 {
        self.next - self.events.len() as u64
    }

    /// Position after the event `last`, and the events after it that are gone.
    fn after(&self, last: u64) -> (u64, Option<LostEvents>) {
        let (first, at) = (self.first(), last.saturating_add(1));
        if (first..=self.next).contains(&at) {
            return (at, None);
        }
        let known = (self.began..first).contains(&at);
        let lost = LostEvents {
            count: known.then(|| first - at),
            first: known.then_some(at),
            last: known.then(|| first - 1),
            reason: if known { "too old" } else { "from before the stream began" }.into(),
        };
        (first, Some(lost))
    }
}

impl Subscription {
    /// Next event in the format of server-sent events.
    pub async fn next(&mut self) -> Bytes {
        loop {
            let buffer = Arc::clone(&self.buffer);
            let news = buffer.news.notified();
            tokio::pin!(news);
            // Registered before looking, so that an event in between is not missed.
            news.as_mut().enable();
            if let Some(text) = self.look() {
                return text;
            }
            news.await;
        }
    }

    fn look(&mut self) -> Option<Bytes> {
        let buffer = Arc::clone(&self.buffer);
        let state = buffer.lock();
        if self.at < state.first() {
            (self.at, self.lost) = state.after(self.at - 1);
        }
        if let Some(lost) = self.lost.take() {
            return Some(self.report(&lost));
        }
        while self.at < state.next {
            let index = usize::try_from(self.at - state.first()).ok()?;
            let kept = state.events.get(index)?;
            self.at += 1;
            if self.kinds.is_empty() || self.kinds.contains(&kept.kind) || kept.kind == LOST {
                return Some(kept.text.clone());
            }
        }
        None
    }

    /// The report has the number of the event before the next one, from which a client resumes.
    fn report(&self, lost: &LostEvents) -> Bytes {
        let before = self.at - 1;
        let mut json = String::new();
        Event::new(&self.source, LOST, lost).write(format_args!("{before}-lost"), before, &mut json);
        format!("id: {before}\nevent: {LOST}\ndata: {json}\n\n").into()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut state = self.buffer.lock();
        state.subscribers -= 1;
        if state.subscribers == 0 {
            state.left_at = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn subscribe(buffer: &Arc<Buffer>, last: Option<u64>, kinds: &[&'static str]) -> Subscription {
        buffer.subscribe("/turnpike/a".into(), last, kinds.to_vec()).expect("a free place")
    }

    fn push(buffer: &Buffer, kind: &'static str, number: u64) {
        assert!(buffer.push(&Event::new("/turnpike/a", kind, &json!(number))));
    }

    /// Number, type and data of an event.
    fn read(text: &Bytes) -> (u64, String, Value) {
        let text = str::from_utf8(text).expect("UTF-8");
        let lines: Vec<&str> = text.strip_suffix("\n\n").expect("an end").lines().collect();
        let [id, event, data] = lines[..] else { panic!("{text}") };
        let id = id.strip_prefix("id: ").expect("an id").parse().expect("a number");
        let json: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        let kind = event.strip_prefix("event: ").expect("a type").to_owned();
        assert_eq!(json["type"], *kind);
        (id, kind, json["data"].clone())
    }

    fn all(subscription: &mut Subscription) -> Vec<(u64, String, Value)> {
        std::iter::from_fn(|| subscription.look().map(|text| read(&text))).collect()
    }

    #[test]
    fn numbers_have_no_gaps_and_resumption_repeats_nothing() {
        let buffer = Arc::<Buffer>::default();
        assert!(!buffer.push(&Event::new("", "a", &())), "unused, so nothing is kept");
        let mut one = subscribe(&buffer, None, &[]);
        (0..10).for_each(|number| push(&buffer, "a", number));
        let seen = all(&mut one);
        assert_eq!(seen.len(), 10);
        for (pair, number) in seen.windows(2).zip(0..) {
            assert_eq!(pair[1].0, pair[0].0 + 1);
            assert_eq!(pair[0].2, number);
        }
        drop(one);
        push(&buffer, "a", 10);
        let mut resumed = subscribe(&buffer, Some(seen[6].0), &[]);
        let numbers: Vec<Value> = all(&mut resumed).into_iter().map(|(_, _, data)| data).collect();
        assert_eq!(numbers, [7, 8, 9, 10]);
        assert_eq!(all(&mut subscribe(&buffer, Some(seen[9].0 + 1), &[])), [], "nothing new");
    }

    #[test]
    fn events_that_are_gone_are_reported_with_their_number() {
        let buffer = Arc::<Buffer>::default();
        let mut slow = subscribe(&buffer, None, &[]);
        let first = slow.at;
        (0..MOST_EVENTS as u64 + 5).for_each(|number| push(&buffer, "a", number));
        let (id, kind, data) = read(&slow.look().expect("a report"));
        assert_eq!((id, &*kind), (first + 4, LOST));
        assert_eq!(data, json!({ "count": 5, "first": first, "last": first + 4, "reason": "too old" }));
        assert_eq!(read(&slow.look().expect("the first one left")).2, 5);
        // Numbers of another process are smaller, or, after a clock was set back, larger.
        for foreign in [7, u64::MAX] {
            let mut other = subscribe(&buffer, Some(foreign), &[]);
            let (_, kind, data) = read(&other.look().expect("a report"));
            assert_eq!((&*kind, data["count"].is_null()), (LOST, true));
            assert_eq!(read(&other.look().expect("an event")).2, 5);
        }
    }

    #[test]
    fn memory_is_bounded_by_bytes_too() {
        let buffer = Arc::<Buffer>::default();
        let _subscription = subscribe(&buffer, None, &[]);
        for _ in 0..100 {
            assert!(buffer.push(&Event::new("", "a", &"x".repeat(1 << 20))));
        }
        let state = buffer.lock();
        assert!(state.bytes <= MOST_BYTES && state.events.len() == 7, "{}", state.events.len());
    }

    #[test]
    fn a_subscriber_gets_only_the_types_it_wants() {
        let buffer = Arc::<Buffer>::default();
        let mut some = subscribe(&buffer, None, &["b"]);
        for (kind, number) in [("a", 1), ("b", 2), ("c", 3), ("b", 4)] {
            push(&buffer, kind, number);
        }
        let numbers: Vec<Value> = all(&mut some).into_iter().map(|(_, _, data)| data).collect();
        assert_eq!(numbers, [2, 4]);
    }

    #[test]
    fn events_missed_while_the_stream_was_unused_are_reported() {
        let buffer = Arc::<Buffer>::default();
        let first = subscribe(&buffer, None, &[]);
        push(&buffer, "a", 1);
        let seen = first.at;
        drop(first);
        buffer.lock().left_at = Instant::now().checked_sub(KEPT);
        if buffer.lock().left_at.is_none() {
            eprintln!("SKIPPED: the machine has been up for less than {KEPT:?}");
            return;
        }
        assert!(!buffer.push(&Event::new("", "a", &2)));
        let mut again = subscribe(&buffer, Some(seen), &[]);
        assert_eq!(read(&again.look().expect("a report")).1, LOST);
        assert!(again.at > seen + 1, "numbers do not repeat");
    }

    #[test]
    fn the_number_of_subscribers_is_limited() {
        let buffer = Arc::<Buffer>::default();
        let mut all: Vec<_> = (0..SUBSCRIBERS).map(|_| subscribe(&buffer, None, &[])).collect();
        assert!(buffer.subscribe("".into(), None, Vec::new()).is_none());
        all.pop();
        assert!(buffer.subscribe("".into(), None, Vec::new()).is_some());
    }
}
