//! RTP streams that the programs count while they relay them.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    layout::{LONGEST_GAP, RTCP_DUE, STREAM_WORDS, STREAMS, STREAMS_HEAD, STREAMS_WORDS},
    shared::SharedMaps,
};

/// Words of a stream: see `struct stream`.
const IDENTITY: usize = 0;
const PROGRESS: usize = 1;
const RECEIVED: usize = 2;
const REORDERED: usize = 3;
const JITTER: usize = 4;
const AT: usize = 5;
const ARRIVED: usize = 6;

/// Access to the streams of the flows with one state.
pub struct Streams {
    shared: Arc<SharedMaps>,
    slot: u32,
}

/// Stream that user space has measured so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownStream {
    pub ssrc: u32,
    pub payload_type: u8,
    pub highest: u16,
    /// False for a datagram whose successor would begin a stream.
    pub is_confirmed: bool,
    /// See [`CountedStream::unit`].
    pub unit: u32,
}

/// Counters of a stream since it took its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountedStream {
    pub ssrc: u32,
    pub payload_type: u8,
    pub highest: u16,
    /// False until a datagram follows the first one.
    pub is_confirmed: bool,
    /// Nanoseconds per unit of timestamps, in fractions of 256; 0 if unknown.
    pub unit: u32,
    /// Datagrams up to the highest sequence number.
    pub expected: u32,
    /// Those of them that did not go to user space.
    pub received: u32,
    pub reordered: u32,
    /// Timestamp and time of the latest datagram.
    pub timestamp: u32,
    pub at_ns: u64,
    pub jitter_ns: u64,
}

impl CountedStream {
    /// Reads a stream as the program stores it; `None` if the place is free.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "fields of words")]
    pub fn of_words(words: [u64; STREAM_WORDS]) -> Option<Self> {
        let (identity, progress) = (words[IDENTITY], words[PROGRESS]);
        let (received, reordered) = (words[RECEIVED], words[REORDERED]);
        (identity as u32 != 0).then(|| Self {
            ssrc: identity as u32,
            payload_type: (progress >> 16) as u8,
            highest: (identity >> 32) as u16,
            is_confirmed: (progress >> 8) as u8 != 0,
            unit: (progress >> 32) as u32,
            expected: received as u32,
            received: (received >> 32) as u32,
            reordered: reordered as u32,
            timestamp: (reordered >> 32) as u32,
            at_ns: words[AT],
            jitter_ns: words[JITTER] / 16,
        })
    }
}

impl Streams {
    pub(crate) fn new(shared: Arc<SharedMaps>, slot: u32) -> Self {
        Self { shared, slot }
    }

    /// Empties the slot, except for known streams.
    pub(crate) fn prepare(&self, known: &[KnownStream], reads_rtcp: bool) {
        for word in 0..STREAMS_WORDS {
            self.word(word).store(0, Ordering::Relaxed);
        }
        self.word(RTCP_DUE).store(if reads_rtcp { 0 } else { u64::MAX }, Ordering::Relaxed);
        for (place, stream) in known.iter().take(STREAMS).enumerate() {
            let word = |word| self.of(place, word);
            let [highest, awaited] = [stream.highest, stream.highest.wrapping_add(1)].map(u64::from);
            word(IDENTITY).store(u64::from(stream.ssrc) | highest << 32 | awaited << 48, Ordering::Relaxed);
            // User space has received the datagram before the awaited one.
            let state = if stream.is_confirmed { 1 << 8 } else { 2 };
            let kind = u64::from(stream.payload_type) << 16;
            word(PROGRESS).store(state | kind | u64::from(stream.unit) << 32, Ordering::Relaxed);
            word(ARRIVED).store(u64::MAX, Ordering::Relaxed);
        }
    }

    /// Counters of a stream; `None` if its place is free.
    #[must_use]
    pub fn read(&self, place: usize) -> Option<CountedStream> {
        CountedStream::of_words(std::array::from_fn(|word| self.of(place, word).load(Ordering::Relaxed)))
    }

    /// SSRC of the stream in a place; 0 if it is free.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the low half")]
    pub fn ssrc(&self, place: usize) -> u32 {
        self.of(place, IDENTITY).load(Ordering::Relaxed) as u32
    }

    /// Sets [`CountedStream::unit`] if the place still has this stream.
    pub fn set_unit(&self, place: usize, stream: &CountedStream, unit: u32) {
        if stream.unit == unit || self.ssrc(place) != stream.ssrc {
            return;
        }
        self.of(place, JITTER).store(0, Ordering::Relaxed);
        // Atomic, because the program writes other bytes of this word.
        let set = |word| Some(word & u64::from(u32::MAX) | u64::from(unit) << 32);
        let _ = self.of(place, PROGRESS).fetch_update(Ordering::Relaxed, Ordering::Relaxed, set);
    }

    #[must_use]
    pub fn longest_gap_ns(&self) -> u64 {
        self.word(LONGEST_GAP).load(Ordering::Relaxed)
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        &self.shared.streams[self.slot as usize * STREAMS_WORDS + word]
    }

    fn of(&self, place: usize, word: usize) -> &AtomicU64 {
        self.word(STREAMS_HEAD + place * STREAM_WORDS + word)
    }
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("slot", &self.slot).finish_non_exhaustive()
    }
}
