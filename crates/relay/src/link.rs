//! Encoding of [`Link`], through which a client is reached without a lookup.

use turnpike_turn::server::Link;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientLinkKind {
    Datagrams,
    Stream(LinkSlot),
    Dtls(LinkSlot),
}

/// A slot and its generation, because links may outlive the entry to which they point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkSlot {
    pub(crate) slot: usize,
    pub(crate) generation: u32,
}

#[derive(Default)]
pub(crate) struct Generations(u32);

impl Generations {
    pub(crate) fn draw(&mut self) -> u32 {
        self.0 = (self.0 + 1) % GENERATIONS;
        self.0
    }
}

/// ```text
/// │ kind (2 bits) │ generation (30) │ slot (32) │
/// ```
const KIND: u32 = 62;
const GENERATION: u32 = 32;
const GENERATIONS: u32 = 1 << (KIND - GENERATION);

impl ClientLinkKind {
    #[inline]
    pub(crate) fn of(Link(bits): Link) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the slot is in the lower 32 bits")]
        let place =
            LinkSlot { slot: bits as u32 as usize, generation: (bits >> GENERATION) as u32 % GENERATIONS };
        match bits >> KIND {
            0 => Self::Datagrams,
            1 => Self::Stream(place),
            _ => Self::Dtls(place),
        }
    }

    pub(crate) fn link(self) -> Link {
        let (kind, place) = match self {
            Self::Datagrams => return Link::default(),
            Self::Stream(place) => (1, place),
            Self::Dtls(place) => (2, place),
        };
        Link(kind << KIND | u64::from(place.generation) << GENERATION | place.slot as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_has_its_own_link() {
        let mut seen = std::collections::HashSet::new();
        for place in [(0, 0), (7, 1), (7, GENERATIONS - 1), (u32::MAX as usize, 3)]
            .map(|(slot, generation)| LinkSlot { slot, generation })
        {
            for way in [ClientLinkKind::Stream(place), ClientLinkKind::Dtls(place)] {
                assert_eq!(ClientLinkKind::of(way.link()), way);
                assert!(seen.insert(way.link()));
            }
        }
        assert_eq!(ClientLinkKind::of(Link::default()), ClientLinkKind::Datagrams);
        assert!(!seen.contains(&ClientLinkKind::Datagrams.link()));
    }

    #[test]
    fn generations_stay_within_their_bits() {
        let mut generations = Generations(GENERATIONS - 2);
        assert_eq!([generations.draw(), generations.draw()], [GENERATIONS - 1, 0]);
    }
}
