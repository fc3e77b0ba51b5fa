//! Model test of the server: `reference.rs` and its siblings specify its behaviour with sets and deadlines.
//! Random scenarios of requests, data, time, reloads, moves between workers and upgrades run against both the
//! server and this model, over a network that loses, duplicates and reorders datagrams (`network.rs`). After
//! each step the test compares everything: delivered bytes, permissions, counters, quotas, relay sockets and
//! connections; at the end nothing may be left.
//!
//! `cargo test` runs a fixed set. For longer runs with other seeds:
//!
//! ```text
//! TURNPIKE_MODEL_MINUTES=60 cargo test --release --workspace --test turn model:: -- --nocapture
//! TURNPIKE_MODEL_SEED=17 ...          starts with this seed, which a failure prints
//! ```
//!
//! Not covered, since these features have separate tests and leave no state behind: NAT discovery, redirects
//! (300), the choice of a challenge's realm by web origin, the errors for malformed messages, and log
//! effects.
//!
//! Tokens (RFC 7635) and bandwidth limits are not covered either, although they affect an allocation for as
//! long as it lasts: clients here have passwords and no bandwidth limit. Tokens and bandwidth limits have
//! models of their own. `server_third_party.rs` covers tokens with their deadlines and upgrades
//! (`an_allocation_lasts_as_long_as_its_tokens`), and `server/data/bandwidth/tests.rs` covers rates, bursts
//! and fair shares (`a_bucket_keeps_its_rate_and_its_burst` and the tests after it). A single case in
//! `server_upgrade.rs` covers a bucket that moves with its allocation.

#![expect(
    clippy::wrong_self_convention,
    reason = "named like the server's functions for input from clients and peers"
)]
#![expect(
    clippy::result_large_err,
    clippy::large_enum_variant,
    reason = "few are created, and none are kept"
)]

mod cast;
mod clients;
mod message;
mod moves;
mod network;
mod prelude;
mod reference;
mod requests;
mod runtime;
mod step;

use std::{
    cell::RefCell,
    env,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use turnpike_turn::server::Stats;

use network::{Network, Reached};
use step::{Mix, plays};

const PLAYS: u32 = 150;

#[test]
fn data_passes_exactly_as_in_the_model() {
    run(Mix::Data);
}

#[test]
fn allocations_move_as_in_the_model() {
    run(Mix::Moves);
}

#[test]
fn connections_are_made_and_bound_as_in_the_model() {
    run(Mix::Connections);
}

/// Runs the fixed set of scenarios, or new seeds for as long as the environment specifies.
fn run(mix: Mix) {
    let number = |name| env::var(name).ok().and_then(|text: String| text.parse::<u64>().ok());
    let since_epoch = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let Some(minutes) = number("TURNPIKE_MODEL_MINUTES") else {
        let first = number("TURNPIKE_MODEL_SEED").unwrap_or(1);
        let reached = RefCell::default();
        (first..first + 3).for_each(|seed| play(mix, seed, &reached));
        let (counted, reached): (Stats, Reached) = reached.into_inner();
        for (family, label) in must_reach(mix) {
            let named = |label: Option<(&str, &'static str)>| label.map_or("", |(_, value)| value);
            let count = |(name, of, value)| (name == *family && named(of) == *label).then_some(value);
            let count = counted.counters().find_map(count);
            assert!(count.is_some_and(|count| count > 0), "no scenario reached {family} {label}");
        }
        let Reached { upgraded, arriving, refused, denied, denied_on_the_way } = reached;
        assert!(upgraded > 0 && refused > 0 && denied > 0, "{reached:?}");
        assert!(mix != Mix::Moves || (arriving > 0 && denied_on_the_way > 0), "{reached:?}");
        return;
    };
    let until = since_epoch() + Duration::from_secs(60 * minutes);
    let mut seed = number("TURNPIKE_MODEL_SEED").unwrap_or_else(|| since_epoch().as_secs());
    let reached = RefCell::default();
    while since_epoch() < until {
        println!("{mix:?}, seed {seed}");
        play(mix, seed, &reached);
        seed += 1;
    }
}

fn must_reach(mix: Mix) -> &'static [(&'static str, &'static str)] {
    match mix {
        Mix::Data => &[
            ("relayed_datagrams", "to_peer"),
            ("relayed_datagrams", "to_client"),
            ("successes", "channel_bind"),
            ("successes", "create_permission"),
            ("limit_refusals", "channels"),
            ("limit_refusals", "permissions"),
            ("limit_refusals", "user"),
            ("limit_refusals", "prefix"),
            ("limit_refusals", "total"),
            ("dropped_datagrams", "no_permission"),
            ("dropped_datagrams", "stale_relay"),
            ("allocations_closed", "expired"),
            ("allocations_closed", "administrator"),
            ("allocations_closed", "credential"),
            ("credentials_refused", "expired"),
            ("retransmits_answered", ""),
            ("error_responses", "500"),
            ("icmp_relayed", ""),
        ],
        Mix::Moves => &[
            ("mobility", "arrived"),
            ("mobility", "moved"),
            ("mobility", "kept"),
            ("mobility", "forwarded"),
            ("mobility", "exported"),
            ("mobility", "imported"),
            ("mobility", "ticket_invalid"),
            ("mobility", "ticket_replayed"),
            ("dropped_datagrams", "client_away"),
            ("credentials_refused", "wrong_user"),
        ],
        Mix::Connections => &[
            ("peer_connections", "connected"),
            ("peer_connections", "connect_failed"),
            ("peer_connections", "accepted"),
            ("peer_connections", "bound"),
            ("peer_connections", "unbound"),
            ("peer_connections", "ended"),
            ("peer_connections", "handed_over"),
            ("limit_refusals", "connections"),
            ("limit_refusals", "connections_total"),
            ("error_responses", "446"),
            ("error_responses", "447"),
        ],
    }
}

fn play(mix: Mix, seed: u64, reached: &RefCell<(Stats, Reached)>) {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config {
        cases: PLAYS,
        failure_persistence: None,
        max_shrink_iters: 20_000,
        // Milliseconds.
        max_shrink_time: 120_000,
        ..Config::default()
    };
    let result = TestRunner::new_with_rng(config, rng).run(&plays(mix), |(setup, steps)| {
        let mut network = Network::new(setup);
        for step in &steps {
            network.step(step);
        }
        let (counted, others) = &mut *reached.borrow_mut();
        counted.merge(&network.counted);
        network.model.workers.iter().for_each(|desk| counted.merge(&desk.stats));
        others.merge(network.reached);
        network.finish();
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{mix:?}, seed {seed} (TURNPIKE_MODEL_SEED): {failure}");
    }
}
