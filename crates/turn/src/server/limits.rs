//! Upper bounds on what clients may use.

use std::ops::RangeInclusive;

/// Limits of a realm, where they differ from those of all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RealmLimits {
    /// REALM.
    pub realm: String,
    /// Allocations of all its users together; `None` for no limit but that of the server.
    pub allocations: Option<usize>,
    /// Allocations of each of its users; `None` for the limit of all users.
    pub allocations_per_user: Option<usize>,
    /// Ports of its relayed transport addresses, within those of the server: shared only with realms that name them too. `None` for the
    /// ports that no realm names.
    pub relay_ports: Option<RangeInclusive<u16>>,
}
