//! A rule for unit tests.

use std::net::{Ipv4Addr, SocketAddr};

use crate::Rule;

/// TCP rule from any port of 127.0.0.1 to `target`.
pub(crate) fn rule(id: &str, target: SocketAddr) -> Rule {
    Rule::new(id, (Ipv4Addr::LOCALHOST, 0).into(), target.into())
}
