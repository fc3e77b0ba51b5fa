//! Stream content that is known at every offset, so that a receiver can detect lost, duplicated and misplaced
//! bytes.

use std::sync::LazyLock;

/// Length after which the pattern repeats. It is a prime, and no buffer, pipe or page size is a multiple of
/// it, so a displaced block never matches.
const PERIOD: usize = 65_521;
pub(crate) const LONGEST: usize = 1 << 20;

static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    // The generator is Marsaglia's xorshift: neighbouring sections always differ, and every build produces the same bytes.
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut period = Vec::with_capacity(PERIOD);
    period.resize_with(PERIOD, || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_be_bytes()[0]
    });
    period.iter().copied().cycle().take(PERIOD + LONGEST).collect()
});

/// Pattern at `offset`: `len` bytes, at most [`LONGEST`].
#[inline]
pub(crate) fn at(offset: u64, len: usize) -> &'static [u8] {
    #[expect(clippy::cast_possible_truncation, reason = "below PERIOD")]
    let start = (offset % PERIOD as u64) as usize;
    &BYTES[start..start + len.min(LONGEST)]
}

pub(crate) fn wrong(offset: u64, data: &[u8]) -> u64 {
    let mut wrong = 0;
    let mut offset = offset;
    for piece in data.chunks(LONGEST) {
        let expected = at(offset, piece.len());
        if piece != expected {
            wrong += piece.iter().zip(expected).filter(|(found, expected)| found != expected).count() as u64;
        }
        offset += piece.len() as u64;
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_length_fit_together() {
        let (mut offset, mut length) = (0, 1);
        while offset < 3 * PERIOD as u64 {
            let piece = at(offset, length);
            assert_eq!(wrong(offset, piece), 0, "at {offset}");
            assert_eq!(piece[0], at(offset + PERIOD as u64, 1)[0]);
            offset += length as u64;
            length = (length * 7 + 3) % 40_000;
        }
    }

    #[test]
    fn wrong_missing_and_displaced_bytes_are_found() {
        let mut data = at(1_000_000, 70_000).to_vec();
        data[69_999] ^= 1;
        assert_eq!(wrong(1_000_000, &data), 1);
        data.remove(10);
        assert!(wrong(1_000_000, &data) > 60_000);
        assert!(wrong(65_536, at(0, 4_096)) > 4_000, "a block displaced by the size of a pipe");
    }
}
