//! Users who come to one node by hand, ask for an allocation and give it back at once: what is said to who is known there, and to who is not.

use std::thread;
use turnpike_testkit::stun::{self, attribute::LIFETIME, kind::REFRESH};

use super::{
    network::{NODES, balancer_of, node_address},
    service::PASSWORD,
};
use crate::faults::within;
use turnpike_trials::SOON;

/// A user whom a row makes known to a node, if it wants to.
pub(super) const KNOWN: &str = "known0";
/// One of [`STRANGERS`].
pub(super) const STRANGER: &str = "stranger0";
/// Users who come only if a row has them come.
pub(super) const STRANGERS: u32 = 8;

/// What a node says to a user who wants an allocation; `None` if he got one.
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
    // Another nonce may have been asked for meanwhile.
    for _ in 0..2 {
        let credentials = (user, PASSWORD, &challenge);
        client.send_raw(&stun::signed_request(REFRESH, &[(LIFETIME, &[0; 4])], credentials));
        let answer = client.receive().expect("a Refresh is answered");
        match answer.error() {
            None => return,
            Some(438) => challenge = answer.challenge(),
            Some(code) => panic!("{user} cannot give an allocation back: {code}"),
        }
    }
    panic!("the nonce of {user} is stale again");
}

/// Waits until a user has an allocation at a node, who may be told another one, or something of `meanwhile`, before.
pub(super) fn is_served(node: usize, user: &str, meanwhile: &[u16]) {
    within(SOON, &format!("node {node} serves {user}"), || match ask(node, user) {
        None => true,
        Some(code) if code == 300 || meanwhile.contains(&code) => false,
        Some(code) => panic!("node {node} says {code} to {user}"),
    });
}

/// All strangers come to all nodes, and each is answered 500: nobody can tell who they are.
pub(super) fn are_turned_away() {
    let answers: Vec<_> = thread::scope(|scope| {
        let come = |(node, number): (usize, u32)| {
            scope.spawn(move || (node, number, ask(node, &format!("stranger{number}"))))
        };
        let all = (0..NODES).flat_map(|node| (0..STRANGERS).map(move |number| (node, number)));
        let asking: Vec<_> = all.map(come).collect();
        asking.into_iter().map(|one| one.join().expect("it is answered")).collect()
    });
    let others: Vec<_> = answers.iter().filter(|(.., code)| *code != Some(500)).collect();
    assert!(others.is_empty(), "node, stranger and answer where it was not 500: {others:?}");
}
