//! Round trips from the spin bit of QUIC (RFC 9000 section 17.4). The bit changes once per round trip, and the change travels from end to end:
//! the time between a change one way and the change that follows it the other way is the round trip of the end between them.

use super::ends::{opposite, sender};
use crate::server::Way;

const SPIN: u8 = 0x20;
const FIXED: u8 = 0x40;
/// Versions 1 and 2.
const VERSIONS: [[u8; 4]; 2] = [[0, 0, 0, 1], [0x6B, 0x33, 0x43, 0xCF]];
/// Changes that must alternate between the ways before one counts: ends may send random bits.
const REGULAR: u8 = 8;

#[derive(Debug, Default)]
pub(super) struct Spin {
    /// A packet with a long header has been seen.
    is_quic: bool,
    /// Latest bit of each way.
    bits: [Option<bool>; 2],
    /// Way and time of the latest change.
    changed: Option<(Way, u64)>,
    regular: u8,
}

impl Spin {
    /// Returns the end between two changes, and its round trip.
    pub(super) fn relayed(&mut self, way: Way, at_us: u64, packet: &[u8]) -> Option<(usize, u64)> {
        let (first, rest) = packet.split_first()?;
        if first & 0x80 != 0 {
            self.is_quic |= rest.first_chunk().is_some_and(|version| VERSIONS.contains(version));
            return None;
        }
        if !self.is_quic || first & FIXED == 0 {
            return None;
        }
        let bit = first & SPIN != 0;
        let before = self.bits[way as usize].replace(bit)?;
        if before == bit {
            return None;
        }
        let (changed_way, changed_us) = self.changed.replace((way, at_us))?;
        let is_regular = changed_way == opposite(way);
        self.regular = if is_regular { self.regular.saturating_add(1) } else { 0 };
        (self.regular >= REGULAR).then(|| (sender(way), at_us.saturating_sub(changed_us)))
    }
}
