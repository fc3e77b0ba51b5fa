//! Header that a generator writes at the start of each payload and reads when the payload returns.
//!
//! ```text
//!  0        4        8                16               24
//!  │ "TPKE" │  flow  │ sequence (u64) │ due (u64, ns)  │ filler …      all big-endian
//! ```

pub const HEADER_LEN: usize = 24;
/// First 8 bytes of the header: "TPKE", and four bytes for the flow number.
const MAGIC: u64 = 0x5450_4B45 << 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PayloadStamp {
    /// Flow number within the run: that of the client or, with a profile, of the stream.
    pub(crate) flow: u32,
    pub(crate) sequence: u64,
    /// Due time in nanoseconds on the run's clock.
    pub(crate) due_ns: u64,
}

impl PayloadStamp {
    #[inline]
    pub(crate) fn write(self, out: &mut [u8]) {
        // Writes whole words, because each slice copy would cost a function call.
        if let ([first, second, third, ..], _) = out.as_chunks_mut::<8>() {
            *first = (MAGIC | u64::from(self.flow)).to_be_bytes();
            *second = self.sequence.to_be_bytes();
            *third = self.due_ns.to_be_bytes();
        }
    }

    /// Parses the header; returns `None` for other programs' payloads.
    #[inline]
    pub(crate) fn read(payload: &[u8]) -> Option<Self> {
        let ([first, second, third, ..], _) = payload.as_chunks::<8>() else { return None };
        let first = u64::from_be_bytes(*first);
        #[expect(clippy::cast_possible_truncation, reason = "the lower half is the flow number")]
        let flow = first as u32;
        let (sequence, due_ns) = (u64::from_be_bytes(*second), u64::from_be_bytes(*third));
        (first ^ u64::from(flow) == MAGIC).then_some(Self { flow, sequence, due_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_survive_a_round_trip_and_other_payloads_are_rejected() {
        let stamp = PayloadStamp { flow: 9_999, sequence: 1 << 40, due_ns: 123_456_789_012 };
        let mut payload = [0xAA; 30];
        stamp.write(&mut payload);
        assert_eq!(PayloadStamp::read(&payload), Some(stamp));
        assert_eq!(payload[HEADER_LEN..], [0xAA; 6]);
        assert_eq!(PayloadStamp::read(&payload[..HEADER_LEN - 1]), None);
        payload[0] ^= 1;
        assert_eq!(PayloadStamp::read(&payload), None);
    }
}
