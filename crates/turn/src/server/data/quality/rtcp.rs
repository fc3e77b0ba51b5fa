//! Report blocks of unencrypted RTCP (RFC 3550 section 6.4).

const SENDER_REPORT: u8 = 200;
const RECEIVER_REPORT: u8 = 201;
const BLOCK: usize = 24;

/// A receiver's report about one stream, since that began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) ssrc: u32,
    /// Negative if duplicates outnumber losses.
    pub(super) lost: i32,
    /// Highest sequence number received.
    pub(super) highest: u16,
    /// Timestamp units.
    pub(super) jitter: u32,
}

impl Block {
    fn read(bytes: &[u8; BLOCK]) -> Self {
        let [s0, s1, s2, s3, _, l0, l1, l2, _, _, h0, h1, j0, j1, j2, j3, ..] = *bytes;
        Self {
            ssrc: u32::from_be_bytes([s0, s1, s2, s3]),
            // A signed number of 24 bits.
            lost: i32::from_be_bytes([l0, l1, l2, 0]) >> 8,
            highest: u16::from_be_bytes([h0, h1]),
            jitter: u32::from_be_bytes([j0, j1, j2, j3]),
        }
    }
}

/// Passes on the blocks of a compound packet. Lengths must add up to that of the datagram: encrypted RTCP ends with an index and a tag.
pub(super) fn blocks(datagram: &[u8], mut each: impl FnMut(&Block)) {
    if !is_whole(datagram) {
        return;
    }
    let mut rest = datagram;
    while let Some((packet, after)) = packet(rest) {
        let fixed = match packet[1] {
            SENDER_REPORT => 28,
            RECEIVER_REPORT => 8,
            _ => packet.len(),
        };
        let bytes = packet.get(fixed..).unwrap_or_default();
        let count = usize::from(packet[0] & 0x1F);
        bytes.as_chunks::<BLOCK>().0.iter().take(count).for_each(|bytes| each(&Block::read(bytes)));
        rest = after;
    }
}

fn is_whole(datagram: &[u8]) -> bool {
    let mut rest = datagram;
    while let Some((_, after)) = packet(rest) {
        rest = after;
    }
    rest.is_empty()
}

fn packet(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let [first, 192..=223, l0, l1] = *bytes.first_chunk()? else { return None };
    let length = 4 * (1 + usize::from(u16::from_be_bytes([l0, l1])));
    if first >> 6 == 2 { bytes.split_at_checked(length) } else { None }
}
