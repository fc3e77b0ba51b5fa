//! Behaviour when descriptors run out: listeners pause and resume, and nothing crashes.

use crate::prelude::*;

#[test]
fn listener_pauses_without_descriptors_and_resumes() {
    alone::with_descriptors(turnpike_testkit::this_test!(), 200, || {
        // Six clients leave no descriptors, so accept4 fails. With three, connections are accepted but cannot
        // open a socket to the target.
        for clients in [6, 3] {
            pause_and_recover(6, clients);
        }
    });
}

fn pause_and_recover(spare: usize, clients: usize) {
    let mut rule = rule("r", greeter("a"));
    rule.connect_timeout = Duration::from_secs(3600);
    let running = Running::start(&[rule]);
    let worker = Thread::named("forward-0");
    let mut early = running.connect("r");
    assert_eq!(read_exactly(&mut early, 1), b"a");

    let mut taken = take_descriptors();
    taken.truncate(taken.len() - spare);
    let mut late: Vec<_> =
        (0..clients).map_while(|_| TcpStream::connect(running.address("r")).ok().map(patient)).collect();
    assert!(!late.is_empty());
    for _ in 0..100 {
        early.write_all(b"still served").unwrap();
        assert_eq!(read_exactly(&mut early, 12), b"still served");
    }
    // Polling is level-triggered: a queue that cannot be emptied would wake the worker forever.
    worker.comes_to_rest();
    assert!(running.log.all().is_empty(), "{:?}", running.log.all());

    drop(taken);
    for client in &mut late {
        assert_eq!(read_exactly(client, 1), b"a");
    }
    assert!(running.log.all().is_empty(), "{:?}", running.log.all());
}
