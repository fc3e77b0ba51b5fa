//! Who may connect: `allow` and `deny` patterns as rinetd writes them.

use std::net::IpAddr;

/// A pattern over the text of a client's address: `*` stands for any run of characters, `?` for one (rinetd(8)); or a prefix
/// such as `10.0.0.0/8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// `192.168.*`, `10.0.0.?`.
    Wildcard(String),
    /// A prefix: first address and leading bits that count.
    Prefix(IpAddr, u8),
}

/// Allow and deny lists. As in rinetd: with any `allow`, a client must match one of them; then a match of any `deny` refuses
/// it. Global lists are asked first, then the rule's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// If not empty, one must match.
    pub allow: Vec<Pattern>,
    /// None may match.
    pub deny: Vec<Pattern>,
}
