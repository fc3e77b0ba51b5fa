//! Header that a generator writes at the start of each payload and reads when the payload returns.
//!
//! It begins with an RTP header, so that a relay treats generated traffic as media and can measure its quality.
//!
//! ```text
//!  0          2              4           8               12                    16               24
//!  │ 0x80 120 │ sequence low │ timestamp │ flow ^ "TPKE" │ sequence high (u32) │ due (u64, ns)  │ filler …      all big-endian
//! ```

pub const HEADER_LEN: usize = 24;
/// RTP version 2 and a dynamic payload type.
const RTP: u64 = 0x8078;
/// Flow number 0 as an SSRC: "TPKE".
const MAGIC: u64 = 0x5450_4B45;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PayloadStamp {
    /// Flow number within the run: that of the client or, with a profile, of the stream.
    pub(crate) flow: u32,
    /// Below 2^48.
    pub(crate) sequence: u64,
    /// Due time in nanoseconds on the run's clock.
    pub(crate) due_ns: u64,
}

impl PayloadStamp {
    #[inline]
    pub(crate) fn write(self, out: &mut [u8]) {
        // Writes whole words, because each slice copy would cost a function call.
        if let ([first, second, third, ..], _) = out.as_chunks_mut::<8>() {
            *first = (RTP << 48 | (self.sequence & 0xFFFF) << 32 | timestamp(self.due_ns)).to_be_bytes();
            *second = ((MAGIC ^ u64::from(self.flow)) << 32 | self.sequence >> 16).to_be_bytes();
            *third = self.due_ns.to_be_bytes();
        }
    }

    /// Parses the header; returns `None` for other programs' payloads, whose timestamp does not match the due time.
    #[inline]
    pub(crate) fn read(payload: &[u8]) -> Option<Self> {
        let ([first, second, third, ..], _) = payload.as_chunks::<8>() else { return None };
        let [first, second, due_ns] = [first, second, third].map(|word| u64::from_be_bytes(*word));
        let is_own = first >> 48 == RTP && first & 0xFFFF_FFFF == timestamp(due_ns);
        #[expect(clippy::cast_possible_truncation, reason = "32 bits are left")]
        let flow = (second >> 32 ^ MAGIC) as u32;
        is_own.then_some(Self { flow, sequence: (second & 0xFFFF_FFFF) << 16 | first >> 32 & 0xFFFF, due_ns })
    }
}

/// RTP timestamp of video (90 kHz).
#[inline]
fn timestamp(due_ns: u64) -> u64 {
    (due_ns.wrapping_mul(9) / 100_000) & 0xFFFF_FFFF
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
        for at in [0, 1, 7, 20] {
            let mut foreign = payload;
            foreign[at] ^= 0x80;
            assert_eq!(PayloadStamp::read(&foreign), None, "byte {at}");
        }
    }
}
