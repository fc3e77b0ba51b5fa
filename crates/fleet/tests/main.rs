//! The fleet's rules in simulations of many nodes, many clients, and a store.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests may panic")]

mod chance;
mod clocks;
mod partitions;
mod placement;
mod quotas;
mod recovery;

use proptest::prelude::ProptestConfig;

/// Number of cases, unless `PROPTEST_CASES` overrides it.
pub(crate) fn cases(usual: u32) -> ProptestConfig {
    let asked = std::env::var_os("PROPTEST_CASES").is_some();
    if asked { ProptestConfig::default() } else { ProptestConfig::with_cases(usual) }
}
