//! Tens of thousands of short-lived flows from several workers at once: nothing is left behind or mixed up.

use crate::prelude::*;
use std::thread;

use crate::attached::{start, with_a_link};

const WORKERS: u16 = 4;
const ROUNDS: u16 = 4000;
const HELD: usize = 50;

#[test]
fn short_lived_flows_leave_nothing_behind() {
    if !with_a_link() {
        return;
    }
    let Some(kernel) = start(Hook::Best) else { return };
    thread::scope(|scope| {
        for worker in 0..WORKERS {
            let mut flows = kernel.flows().expect("a descriptor");
            scope.spawn(move || {
                let local: SocketAddr = "10.78.0.1:3478".parse().expect("an address");
                let socket = flows.socket().expect("a thousand sockets are available");
                let mut held = std::collections::VecDeque::new();
                for round in 0..ROUNDS {
                    let remote = SocketAddr::from((
                        [10, 78, 0, 2 + (round % 100) as u8],
                        1000 + worker * ROUNDS + round,
                    ));
                    let state = flows.state().expect("the table has room");
                    let channel = ChannelNumber::new(0x4000 + round % 0x1000);
                    let new = NewFlow {
                        kind: if round % 2 == 0 { Kind::ToPeer } else { Kind::ToClient },
                        remote,
                        local,
                        channel,
                        from: local,
                        to: remote,
                        state: &state,
                        socket,
                        expires_ns: now_ns() + 1_000_000_000,
                    };
                    let mut installed = flows.install(&new).expect("the table has room");
                    flows.extend(&mut installed, now_ns() + 2_000_000_000).expect("the flow is installed");
                    held.push_back((installed, state));
                    if held.len() > HELD {
                        let (installed, state) = held.pop_front().expect("at least one flow is held");
                        flows.remove(installed);
                        assert!(flows.give_back_state(state).is_zero(), "nothing was sent");
                    }
                }
                for (installed, state) in held {
                    flows.remove(installed);
                    let _ = flows.give_back_state(state);
                }
                flows.give_back_socket(socket);
            });
        }
    });
    let flows = kernel.flows().expect("a descriptor");
    assert_eq!((flows.keys().len(), flows.routes()), (0, 0));
    let snapshot = kernel.snapshot();
    assert_eq!((snapshot.flows, snapshot.refused), (0, 0));
}

#[test]
fn a_full_table_refuses_flows_until_there_is_room_again() {
    if !with_a_link() {
        return;
    }
    let Some(kernel) = start(Hook::Best) else { return };
    let mut flows = kernel.flows().expect("a descriptor");
    let local: SocketAddr = "10.78.0.1:3478".parse().expect("an address");
    let state = flows.state().expect("the table has room");
    let install = |flows: &mut turnpike_offload::Flows, number: u32| {
        let [_, _, _, subnet] = (number / 0x2000).to_be_bytes();
        let port = 1024 + u16::try_from(number % 0x2000).expect("the remainder fits");
        let remote = SocketAddr::from(([10, 78, subnet, 1], port));
        let channel = ChannelNumber::new(0x4000);
        let from_to = (local, SocketAddr::from(([10, 78, 0, 9], 9)));
        flows.install(&NewFlow {
            kind: Kind::ToPeer,
            remote,
            local,
            channel,
            from: from_to.0,
            to: from_to.1,
            state: &state,
            socket: 0,
            expires_ns: u64::MAX,
        })
    };
    let mut all: Vec<_> =
        (0..65_536).map(|number| install(&mut flows, number).expect("the table has room")).collect();
    assert!(install(&mut flows, 70_000).is_err());
    assert_eq!((kernel.snapshot().flows, kernel.snapshot().refused), (65_536, 1));
    flows.remove(all.pop().expect("at least one flow"));
    all.push(install(&mut flows, 70_000).expect("there is room again"));
    for flow in all {
        flows.remove(flow);
    }
    assert_eq!((kernel.snapshot().flows, flows.keys().len(), flows.routes()), (0, 0, 0));
}
