//! What a generator writes at the start of each payload, and reads when it is back.
//!
//! ```text
//!  0        4        8                16               24
//!  │ "TPKE" │  flow  │ sequence (u64) │ due (u64, ns)  │ filler …      all big-endian
//! ```

/// Bytes of the generator's own header: the smallest payload.
pub const HEADER_LEN: usize = 24;
const MAGIC: [u8; 4] = *b"TPKE";

/// One datagram's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Number of the flow in this run: of the client, or with a profile of its stream.
    pub(crate) flow: u32,
    /// Counts the flow's datagrams from 0.
    pub(crate) sequence: u64,
    /// When it was due, in nanoseconds of the run's clock.
    pub(crate) due_ns: u64,
}

impl Stamp {
    /// Writes the header; `out` holds at least [`HEADER_LEN`] bytes.
    #[inline]
    pub(crate) fn write(self, out: &mut [u8]) {
        let Some(header) = out.first_chunk_mut::<HEADER_LEN>() else { return };
        header[..4].copy_from_slice(&MAGIC);
        header[4..8].copy_from_slice(&self.flow.to_be_bytes());
        header[8..16].copy_from_slice(&self.sequence.to_be_bytes());
        header[16..].copy_from_slice(&self.due_ns.to_be_bytes());
    }

    /// Reads it back; `None` for what no generator wrote.
    #[inline]
    pub(crate) fn read(payload: &[u8]) -> Option<Self> {
        let header = payload.first_chunk::<HEADER_LEN>()?;
        let (magic, rest) = header.split_first_chunk::<4>()?;
        let (flow, rest) = rest.split_first_chunk::<4>()?;
        let (sequence, due) = rest.split_first_chunk::<8>()?;
        (*magic == MAGIC).then_some(Self {
            flow: u32::from_be_bytes(*flow),
            sequence: u64::from_be_bytes(*sequence),
            due_ns: u64::from_be_bytes(*due.first_chunk()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back_and_nothing_else_does() {
        let stamp = Stamp { flow: 9_999, sequence: 1 << 40, due_ns: 123_456_789_012 };
        let mut payload = [0xAA; 30];
        stamp.write(&mut payload);
        assert_eq!(Stamp::read(&payload), Some(stamp));
        assert_eq!(payload[HEADER_LEN..], [0xAA; 6]);
        assert_eq!(Stamp::read(&payload[..HEADER_LEN - 1]), None);
        payload[0] ^= 1;
        assert_eq!(Stamp::read(&payload), None);
    }
}
