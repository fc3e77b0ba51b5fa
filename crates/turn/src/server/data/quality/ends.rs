//! Directions of a meter, as indices.

use crate::server::Way;

/// Index of the end that sends this way.
pub(super) const fn sender(way: Way) -> usize {
    match way {
        Way::ToPeer => 0,
        Way::ToClient => 1,
    }
}

pub(super) const fn opposite(way: Way) -> Way {
    match way {
        Way::ToPeer => Way::ToClient,
        Way::ToClient => Way::ToPeer,
    }
}
