//! Counters change during an allocation, not only at its end.

use crate::prelude::*;

#[test]
fn counters_change_during_an_allocation() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let load = serve.load(&reflect).with("--clients 10 --rate 500 --duration 4").start();
    serve.wait_for_allocations(10);

    for (family, label) in [
        ("turnpike_relayed_datagrams_total", "direction=\"to_peer\""),
        ("turnpike_relayed_datagrams_total", "direction=\"to_client\""),
        ("turnpike_relayed_bytes_total", "direction=\"to_peer\""),
        ("turnpike_rx_datagrams_total", ""),
        ("turnpike_tx_datagrams_total", ""),
    ] {
        let before = serve.metrics().sum(family, label);
        eventually(&format!("{family}{{{label}}} increases"), || serve.metrics().sum(family, label) > before);
        assert_eq!(serve.allocations(), 10, "the allocation is still alive");
    }
    assert_eq!(serve.metrics().sum("turnpike_allocations_closed_total", ""), 0);

    load.wait(SOON).ended(0);
    serve.wait_for_allocations(0);
    eventually("ten allocations are counted as deleted", || {
        serve.metrics().sum("turnpike_allocations_closed_total", "reason=\"deleted\"") == 10
    });
}

/// Labels with client-chosen values would let clients exhaust memory.
#[test]
fn no_label_value_is_chosen_by_a_client() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    serve.load(&reflect).with("--rate 100 --duration 1").run().ended(0);
    let metrics = serve.metrics();
    for chosen in [turnpike_trials::USER, &reflect.address.to_string(), &reflect.address.port().to_string()] {
        let labelled = metrics.text().lines().find(|line| line.contains(&format!("\"{chosen}\"")));
        assert_eq!(labelled, None);
    }
}
