//! A degraded path between clients and server.

use std::{thread, time::Duration};

use serde_json::Value;

use super::{Crowd, Row, Server, Wanted, or_thorough, path::Path};
use turnpike_trials::{Load, PASSWORD, USER};

fn worsened(name: &'static str, what: &'static str, [lost, doubled, late]: [u32; 3]) -> Value {
    let mut server = Server::start(Wanted::flags(&["--workers", "2"]));
    let path = Path::to(server.address);
    let mut row = Row::new(name, what);
    // A client may not retry if the response to its final Refresh is lost.
    row.leaves_sessions = true;
    let crowd = Crowd::at(path.address, "127.0.0.1:0", "5");
    row.run(&mut server, crowd, |_, row| {
        path.worsen(lost, doubled, late);
        let before = (path.passed(), path.worsened());
        let newcomers = Load::as_user(path.address, &format!("{USER}:{PASSWORD}"))
            .with("--profile audio --clients 4 --warmup 0.1")
            .with_words(&["--duration", or_thorough("2", "8")]);
        // A generator gives up after ten seconds without a response, which may happen by chance; users retry.
        let tries = (1..=5).find(|_| newcomers.run().code == Some(0)).expect("new clients connect");
        let [passed, worsened] = [path.passed() - before.0, path.worsened() - before.1];
        // Over thousands of datagrams, the share of affected ones is close to the configured probability.
        let most = u64::from(lost + doubled + late) * passed / 100;
        assert!(worsened > most / 2 && worsened < 2 * most, "{worsened} of {passed} datagrams were affected");
        row.note(format!(
            "{worsened} of {passed} datagrams affected; four new calls succeeded (attempts: {tries})"
        ));
        path.worsen(0, 0, 0);
        thread::sleep(Duration::from_millis(100));
    })
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn a_third_of_datagrams_is_lost() {
    let seen = worsened(
        "a_third_of_datagrams_is_lost",
        "30 % of client datagrams lost in both directions",
        [30, 0, 0],
    );
    assert!(seen["lost"].as_u64() > Some(0), "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn many_datagrams_are_reordered() {
    let seen = worsened("many_datagrams_are_reordered", "20 % of client datagrams reordered", [0, 0, 20]);
    assert!(seen["reordered"].as_u64() > Some(0), "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn many_datagrams_are_duplicated() {
    let seen = worsened("many_datagrams_are_duplicated", "20 % of client datagrams duplicated", [0, 20, 0]);
    assert!(seen["duplicated"].as_u64() > Some(0), "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn a_nat_rebinds_all_at_once() {
    let mut server = Server::start(Wanted::flags(&["--workers", "2"]));
    let path = Path::to(server.address);
    let crowd = Crowd::at(path.address, "127.0.0.1:0", "2");
    let clients = crowd.clients;
    let mut row = Row::new("a_nat_rebinds_all_at_once", "a NAT changes the ports of all clients at once");
    row.leaves_sessions = true;
    row.note("sessions of the old ports end when their lifetime expires");
    let seen = row.run(&mut server, crowd, |_, _| path.rebind());
    assert!(seen["returns_done"].as_u64() >= Some(u64::from(clients)), "{seen}");
}
