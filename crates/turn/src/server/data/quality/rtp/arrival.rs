//! RTP header of a datagram, with its time.

/// Fields of an RTP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) at_us: u64,
    pub(super) payload_type: u8,
    pub(super) sequence: u16,
    pub(super) timestamp: u32,
    pub(super) ssrc: u32,
}

impl Arrival {
    #[inline]
    pub(super) fn read(at_us: u64, datagram: &[u8]) -> Option<Self> {
        let [first, second, s0, s1, t0, t1, t2, t3, i0, i1, i2, i3] = *datagram.first_chunk()?;
        let sources = 12 + 4 * usize::from(first & 0x0F);
        let extension = usize::from(first >> 4 & 1) * 4;
        (datagram.len() >= sources + extension).then_some(Self {
            at_us,
            payload_type: second & 0x7F,
            sequence: u16::from_be_bytes([s0, s1]),
            timestamp: u32::from_be_bytes([t0, t1, t2, t3]),
            ssrc: u32::from_be_bytes([i0, i1, i2, i3]),
        })
    }
}
