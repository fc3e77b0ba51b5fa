//! Round trips of the two ends: smoothing, and STUN transactions that pass through the relay.

use turnpike_wire::stun;

use super::ends::{opposite, sender};
use crate::server::Way;

/// Samples above this are taken for a wrong match.
const MOST_US: u64 = 30_000_000;

/// Smoothed like TCP's (RFC 6298): each sample has a weight of one eighth.
#[derive(Debug, Default)]
pub(super) struct RoundTrip {
    /// Eighths of microseconds; 0 before the first sample.
    eighths_us: u64,
}

impl RoundTrip {
    pub(super) fn add(&mut self, sample_us: u64) {
        if sample_us > MOST_US {
            return;
        }
        // 0 would mean that there was no sample.
        let sample_us = sample_us.max(1);
        self.eighths_us = match self.eighths_us {
            0 => sample_us * 8,
            before => (before - before / 8 + sample_us).max(1),
        };
    }

    pub(super) fn smoothed(&self) -> Option<u64> {
        (self.eighths_us > 0).then_some(self.eighths_us / 8)
    }
}

/// Transaction without a response.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    id: [u8; 12],
    asked_us: u64,
    /// A response could belong to any copy of the request.
    is_repeated: bool,
}

/// The newest Binding request of each way.
#[derive(Debug, Default)]
pub(super) struct Transactions([Option<Outstanding>; 2]);

impl Transactions {
    /// Returns the end that has responded, and its round trip.
    pub(super) fn relayed(&mut self, way: Way, at_us: u64, message: &[u8]) -> Option<(usize, u64)> {
        let header = message.first_chunk::<20>()?;
        let [kind_0, kind_1, _, _, c0, c1, c2, c3, id @ ..] = *header;
        if [c0, c1, c2, c3] != stun::COOKIE {
            return None;
        }
        match [kind_0, kind_1] {
            // Binding request.
            [0, 1] => {
                match &mut self.0[way as usize] {
                    Some(known) if known.id == id => known.is_repeated = true,
                    slot => *slot = Some(Outstanding { id, asked_us: at_us, is_repeated: false }),
                }
                None
            }
            // Success and error.
            [1, 1 | 0x11] => {
                let asked = &mut self.0[opposite(way) as usize];
                let Outstanding { asked_us, is_repeated, .. } = asked.take_if(|asked| asked.id == id)?;
                (!is_repeated).then_some((sender(way), at_us.saturating_sub(asked_us)))
            }
            _ => None,
        }
    }
}
