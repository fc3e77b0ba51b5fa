//! Protocol between the TCP generators and `reflect --tcp`. One listener serves all TCP workloads; the first
//! bytes of each connection select one.
//!
//! ```text
//! client: greeting, 16 bytes                                        all numbers big-endian
//!  0        4         5      6       7   8            12           16
//!  │ "TPKS" │ version │ mode │ flags │ 0 │ a (u32)    │ b (u32)    │
//!
//! server: acknowledgement, 8 bytes (not in mode connect)
//!  0        4         5        8
//!  │ "TPKS" │ version │ status │ 0 0 │                               status 0: go on; else the connection is closed
//! ```
//!
//! | mode | then |
//! | --- | --- |
//! | 1 `sink` | The client sends the pattern. The server responds with 24-byte records: about one every 50 ms while data arrives, and a final one at most 50 ms after the last byte. The client closes once the byte count in a record equals the number of bytes it has sent. Flags: 1 compare with the pattern, 2 discard in the kernel (MSG_TRUNC). |
//! | 2 `source` | After the client's first byte, the server sends the pattern, in writes of `a` bytes. After the second byte, it stops, appends one record, and closes the connection. |
//! | 3 `exchange` | For every `a` bytes from the client, the server sends `b` bytes, until the client closes. |
//! | 4 `connect` | Like `exchange`, but without an acknowledgement and for a single response; then the server closes (flag 4: the client closes). |
//!
//! Record: payload bytes so far (u64), nanoseconds since the greeting (u64), bytes that differ from the
//! pattern (u64). Records are in-band, and neither side relies on half-closing, because several forwarders do
//! not pass it on.
//!
//! On a connection that starts with anything else, the server echoes all data (RFC 862), as other load
//! generators expect.

use std::time::Duration;

pub(crate) const GREETING_LEN: usize = 16;
pub(crate) const ACK_LEN: usize = 8;
pub(crate) const RECORD_LEN: usize = 24;
pub(crate) const MAX_SIZE: usize = 1 << 20;

const MAGIC: [u8; 4] = *b"TPKS";
const VERSION: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamMode {
    Sink {
        verify: bool,
        /// True if received data is discarded in the kernel instead of being copied to user space.
        discard: bool,
    },
    /// The server sends bytes in writes of `block`, 1 to [`MAX_SIZE`].
    Source {
        block: usize,
    },
    /// Requests and responses with lengths of 1 to [`MAX_SIZE`] bytes.
    Exchange {
        request: usize,
        response: usize,
    },
    Connect {
        request: usize,
        response: usize,
        client_closes: bool,
    },
}

const VERIFY: u8 = 1;
const DISCARD: u8 = 2;
const CLIENT_CLOSES: u8 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GreetingBytes {
    Greeting(StreamMode),
    Incomplete,
    /// Unsupported version or invalid parameters.
    Unknown,
    Foreign,
}

impl StreamMode {
    pub(crate) fn to_bytes(self) -> [u8; GREETING_LEN] {
        let flag = |on: bool, flag: u8| if on { flag } else { 0 };
        let (mode, flags, a, b) = match self {
            Self::Sink { verify, discard } => (1, flag(verify, VERIFY) | flag(discard, DISCARD), 0, 0),
            Self::Source { block } => (2, 0, block, 0),
            Self::Exchange { request, response } => (3, 0, request, response),
            Self::Connect { request, response, client_closes } => {
                (4, flag(client_closes, CLIENT_CLOSES), request, response)
            }
        };
        let mut bytes = [0; GREETING_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..7].copy_from_slice(&[VERSION, mode, flags]);
        bytes[8..12].copy_from_slice(&u32::try_from(a).unwrap_or(u32::MAX).to_be_bytes());
        bytes[12..].copy_from_slice(&u32::try_from(b).unwrap_or(u32::MAX).to_be_bytes());
        bytes
    }
}

impl GreetingBytes {
    pub(crate) fn read(bytes: &[u8]) -> Self {
        let shown = bytes.len().min(MAGIC.len());
        if bytes[..shown] != MAGIC[..shown] {
            return Self::Foreign;
        }
        let Some(greeting) = bytes.first_chunk::<GREETING_LEN>() else { return Self::Incomplete };
        let [.., a0, a1, a2, a3, b0, b1, b2, b3] = *greeting;
        let size = |bytes: [u8; 4]| {
            usize::try_from(u32::from_be_bytes(bytes)).ok().filter(|size| (1..=MAX_SIZE).contains(size))
        };
        let (a, b) = (size([a0, a1, a2, a3]), size([b0, b1, b2, b3]));
        let flags = greeting[6];
        let mode = match (greeting[4], greeting[5], a, b) {
            (VERSION, 1, ..) => {
                StreamMode::Sink { verify: flags & VERIFY != 0, discard: flags & DISCARD != 0 }
            }
            (VERSION, 2, Some(block), _) => StreamMode::Source { block },
            (VERSION, 3, Some(request), Some(response)) => StreamMode::Exchange { request, response },
            (VERSION, 4, Some(request), Some(response)) => {
                StreamMode::Connect { request, response, client_closes: flags & CLIENT_CLOSES != 0 }
            }
            _ => return Self::Unknown,
        };
        Self::Greeting(mode)
    }
}

pub(crate) fn ack(accepted: bool) -> [u8; ACK_LEN] {
    let [m0, m1, m2, m3] = MAGIC;
    [m0, m1, m2, m3, VERSION, u8::from(!accepted), 0, 0]
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamRecord {
    pub(crate) total: u64,
    /// Time since the greeting, according to the server's clock.
    pub(crate) elapsed: Duration,
    /// Received bytes that differ from the pattern.
    pub(crate) wrong: u64,
}

impl StreamRecord {
    pub(crate) fn to_bytes(self) -> [u8; RECORD_LEN] {
        let mut bytes = [0; RECORD_LEN];
        bytes[..8].copy_from_slice(&self.total.to_be_bytes());
        bytes[8..16].copy_from_slice(&crate::clock::nanos(self.elapsed).to_be_bytes());
        bytes[16..].copy_from_slice(&self.wrong.to_be_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: [u8; RECORD_LEN]) -> Self {
        let number = |from: usize| bytes[from..from + 8].iter().fold(0, |sum, b| sum << 8 | u64::from(*b));
        Self { total: number(0), elapsed: Duration::from_nanos(number(8)), wrong: number(16) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_modes_survive_a_round_trip() {
        for mode in [
            StreamMode::Sink { verify: true, discard: false },
            StreamMode::Sink { verify: false, discard: true },
            StreamMode::Source { block: MAX_SIZE },
            StreamMode::Exchange { request: 1, response: 70_000 },
            StreamMode::Connect { request: 1, response: 1, client_closes: true },
            StreamMode::Connect { request: 2, response: 3, client_closes: false },
        ] {
            let bytes = mode.to_bytes();
            assert_eq!(GreetingBytes::read(&bytes), GreetingBytes::Greeting(mode));
            for len in 0..GREETING_LEN {
                assert_eq!(GreetingBytes::read(&bytes[..len]), GreetingBytes::Incomplete);
            }
        }
    }

    #[test]
    fn invalid_greetings_are_unknown_and_other_bytes_are_foreign() {
        for mode in [
            StreamMode::Source { block: 0 },
            StreamMode::Exchange { request: MAX_SIZE + 1, response: 1 },
            StreamMode::Exchange { request: 1, response: 0 },
            StreamMode::Connect { request: usize::MAX, response: 1, client_closes: false },
        ] {
            assert_eq!(GreetingBytes::read(&mode.to_bytes()), GreetingBytes::Unknown, "{mode:?}");
        }
        let mut newer = StreamMode::Source { block: 1 }.to_bytes();
        newer[4] += 1;
        assert_eq!(GreetingBytes::read(&newer), GreetingBytes::Unknown);
        for foreign in [&b"GET / HTTP/1.1\r\n"[..], b"T\r\n", b"TPKE"] {
            assert_eq!(GreetingBytes::read(foreign), GreetingBytes::Foreign);
        }
    }

    #[test]
    fn records_survive_a_round_trip() {
        let record = StreamRecord { total: 1 << 40, elapsed: Duration::from_nanos(987_654_321), wrong: 3 };
        assert_eq!(StreamRecord::from_bytes(record.to_bytes()), record);
    }
}
