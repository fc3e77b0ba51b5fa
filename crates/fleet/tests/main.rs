//! The rules as a whole: many nodes, many clients, and a store, all simulated.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests may panic")]

mod chance;
mod clocks;
mod partitions;
mod placement;
mod quotas;
mod recovery;

use proptest::prelude::ProptestConfig;

/// So many cases, or as many as `PROPTEST_CASES` asks for.
pub(crate) fn cases(usual: u32) -> ProptestConfig {
    let asked = std::env::var_os("PROPTEST_CASES").is_some();
    if asked { ProptestConfig::default() } else { ProptestConfig::with_cases(usual) }
}
