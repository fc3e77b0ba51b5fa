//! Stream of events from the nodes: one connection, which blocks until there are events.

use std::time::Duration;

use redis::{RedisError, Value, aio::MultiplexedConnection};
use turnpike_fleet::{QuotaBucket, QuotaLevel};

use super::{
    FleetAddress,
    link::{Finder, is_over},
    reply::{bytes, list, text},
};
use crate::StoreError;

/// Fields of an event: a sealed message, and changed levels.
pub(super) const MESSAGE: &str = "n";
const LEVELS: &str = "l";

/// Time that an XREAD blocks, and the additional time to wait for its answer.
const BLOCK: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of events per answer.
const MOST: usize = 1000;

pub struct FleetNews {
    finder: Finder,
    key: String,
    connection: Option<MultiplexedConnection>,
    last: Option<EventId>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewsBatch {
    /// True for a new connection: stored state may have changed without this node seeing an event.
    pub anew: bool,
    pub messages: Vec<Vec<u8>>,
    pub levels: Vec<(QuotaBucket, QuotaLevel)>,
}

/// The store's time in milliseconds, and a sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct EventId(u64, u64);

impl EventId {
    const FIRST: Self = Self(0, 0);

    fn read(text: &str) -> Option<Self> {
        let (ms, number) = text.split_once('-')?;
        Some(Self(ms.parse().ok()?, number.parse().ok()?))
    }

    fn written(self) -> String {
        format!("{}-{}", self.0, self.1)
    }
}

impl FleetNews {
    pub(super) fn new(address: FleetAddress, key: String) -> Self {
        Self { finder: Finder::new(address), key, connection: None, last: None }
    }

    pub async fn next(&mut self) -> Result<NewsBatch, StoreError> {
        let Some(mut connection) = self.connection.take() else {
            self.connection = Some(self.connect().await?);
            // The caller reads the stored state first; later events are kept in the stream.
            return Ok(NewsBatch { anew: true, ..NewsBatch::default() });
        };
        let mut command = redis::cmd("XREAD");
        command.arg("COUNT").arg(MOST).arg("BLOCK").arg(BLOCK.as_millis().to_string()).arg("STREAMS");
        command.arg(&self.key).arg(self.last.unwrap_or(EventId::FIRST).written());
        match command.query_async::<Value>(&mut connection).await {
            Ok(answer) => {
                self.connection = Some(connection);
                Ok(self.take(answer))
            }
            Err(error) => {
                if !self.finder.learn(&error) && !is_over(&error) {
                    self.connection = Some(connection);
                }
                Err(self.finder.told(&error))
            }
        }
    }

    async fn connect(&mut self) -> Result<MultiplexedConnection, StoreError> {
        let mut connection = self.finder.connect(PATIENCE, BLOCK + PATIENCE).await?;
        let mut newest = self.newest(&mut connection).await;
        if newest.as_ref().is_err_and(|error| self.finder.learn(error)) {
            connection = self.finder.connect(PATIENCE, BLOCK + PATIENCE).await?;
            newest = self.newest(&mut connection).await;
        }
        let newest = newest.map_err(|error| self.finder.told(&error))?;
        // The first connection starts after the newest event. So does a later connection if the last known
        // event is later than that, because the store was emptied or a server with a different clock took
        // over.
        self.last = Some(self.last.map_or(newest, |last| last.min(newest)));
        Ok(connection)
    }

    async fn newest(&self, connection: &mut MultiplexedConnection) -> Result<EventId, RedisError> {
        let mut command = redis::cmd("XREVRANGE");
        command.arg(&self.key).arg("+").arg("-").arg("COUNT").arg(1);
        let answer = command.query_async::<Value>(connection).await?;
        let newest = list(answer).into_iter().next().map(list).unwrap_or_default();
        Ok(newest.first().and_then(text).as_deref().and_then(EventId::read).unwrap_or(EventId::FIRST))
    }

    /// Parses an answer: `[[key, [[id, [field, value, ...]], ...]]]`, or the same as a map.
    fn take(&mut self, answer: Value) -> NewsBatch {
        let mut heard = NewsBatch::default();
        let mut streams = list(answer);
        if matches!(streams.first(), Some(Value::Array(_))) {
            streams = streams.into_iter().flat_map(list).collect();
        }
        for event in streams.into_iter().skip(1).step_by(2).flat_map(list) {
            let mut event = list(event).into_iter();
            let id = event.next().as_ref().and_then(text).as_deref().and_then(EventId::read);
            self.last = id.or(self.last);
            let mut fields = event.next().map(list).unwrap_or_default().into_iter();
            while let (Some(field), Some(value)) = (fields.next(), fields.next()) {
                let Some(value) = bytes(value) else { continue };
                match text(&field).as_deref() {
                    Some(MESSAGE) => heard.messages.push(value),
                    Some(LEVELS) => heard.levels.extend(levels(&value)),
                    _ => {}
                }
            }
        }
        heard
    }
}

/// Parses bucket names of 16 bytes, each followed by a digit.
fn levels(bytes: &[u8]) -> impl Iterator<Item = (QuotaBucket, QuotaLevel)> + '_ {
    bytes.chunks_exact(17).filter_map(|chunk| {
        let (name, digit) = chunk.split_first_chunk::<16>()?;
        let level = QuotaLevel::from_number(digit.first()?.wrapping_sub(b'0'))?;
        Some((QuotaBucket(*name), level))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn news() -> FleetNews {
        FleetNews::new("redis://127.0.0.1:1".parse().expect("an address"), "events".to_owned())
    }

    #[test]
    fn events_are_parsed_in_both_shapes_and_the_last_id_is_kept() {
        let level = [&[7; 16][..], b"2", &[8; 16], b"0", &[9; 16], b"x"].concat();
        let event = |id: &str, field: &str, value: Value| {
            Value::Array(vec![text(id), Value::Array(vec![text(field), value])])
        };
        let events = || {
            Value::Array(vec![
                event("5-0", "n", text("one")),
                event("5-1", "l", Value::BulkString(level.clone())),
                event("6-0", "n", text("two")),
                event("7-0", "later", text("from a later version")),
            ])
        };
        let shapes = [
            Value::Array(vec![Value::Array(vec![text("events"), events()])]),
            Value::Map(vec![(text("events"), events())]),
        ];
        for answer in shapes {
            let mut news = news();
            let heard = news.take(answer);
            assert_eq!(heard.messages, [b"one".to_vec(), b"two".to_vec()]);
            assert_eq!(
                heard.levels,
                [(QuotaBucket([7; 16]), QuotaLevel::Full), (QuotaBucket([8; 16]), QuotaLevel::Calm)]
            );
            assert_eq!((news.last, heard.anew), (Some(EventId(7, 0)), false));
        }
        assert_eq!(news().take(Value::Nil), NewsBatch::default());
    }

    #[test]
    fn event_ids_sort_by_number() {
        let read = |text| EventId::read(text).expect("an event");
        assert!(read("5-9") < read("5-10") && read("5-10") < read("10-0"));
        assert_eq!(read("5-10").written(), "5-10");
        for bad in ["", "5", "a-1", "5-b"] {
            assert_eq!(EventId::read(bad), None);
        }
    }
}
