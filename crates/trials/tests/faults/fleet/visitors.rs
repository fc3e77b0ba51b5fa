//! Users who ask one node for an allocation and delete it immediately, to see the answers to cached and
//! uncached users.

use std::thread;
use turnpike_testkit::stun::{self, attribute::LIFETIME, kind::REFRESH};

use super::{
    network::{NODES, balancer_of, node_address},
    service::PASSWORD,
};
use crate::faults::within;
use turnpike_trials::SOON;

pub(super) const KNOWN: &str = "known0";
pub(super) const STRANGER: &str = "stranger0";
pub(super) const STRANGERS: u32 = 8;

/// Error code of an Allocate sent to a node, or `None` if it succeeds.
pub(super) fn ask(node: usize, user: &str) -> Option<u16> {
    let client = stun::Client::from(balancer_of(node).into(), node_address(node));
    let (_, _, challenge) = client.challenge();
    let code = client.allocate(user, PASSWORD, &challenge);
    if code.is_none() {
        give_back(&client, user, challenge);
    }
    code
}

fn give_back(client: &stun::Client, user: &str, mut challenge: stun::Challenge) {
    // Repeats the request once if the nonce is stale.
    for _ in 0..2 {
        let credentials = (user, PASSWORD, &challenge);
        client.send_raw(&stun::signed_request(REFRESH, &[(LIFETIME, &[0; 4])], credentials));
        let answer = client.receive().expect("a Refresh is answered");
        match answer.error() {
            None => return,
            Some(438) => challenge = answer.challenge(),
            Some(code) => panic!("{user} cannot delete an allocation: {code}"),
        }
    }
    panic!("the nonce of {user} is stale again");
}

/// Waits until a user gets an allocation on a node; until then, redirects and the codes in `meanwhile` are accepted.
pub(super) fn is_served(node: usize, user: &str, meanwhile: &[u16]) {
    within(SOON, &format!("node {node} serves {user}"), || match ask(node, user) {
        None => true,
        Some(code) if code == 300 || meanwhile.contains(&code) => false,
        Some(code) => panic!("node {node} answers {code} to {user}"),
    });
}

/// Connects to all nodes as users who have never connected before; all get a 500, because they cannot be
/// looked up.
pub(super) fn are_turned_away() {
    let answers: Vec<_> = thread::scope(|scope| {
        let come = |(node, number): (usize, u32)| {
            scope.spawn(move || (node, number, ask(node, &format!("stranger{number}"))))
        };
        let all = (0..NODES).flat_map(|node| (0..STRANGERS).map(move |number| (node, number)));
        let asking: Vec<_> = all.map(come).collect();
        asking.into_iter().map(|one| one.join().expect("a response arrives")).collect()
    });
    let others: Vec<_> = answers.iter().filter(|(.., code)| *code != Some(500)).collect();
    assert!(others.is_empty(), "answers other than 500, as node, user and answer: {others:?}");
}
