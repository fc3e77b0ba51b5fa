//! A process without descriptors: accepting pauses, nothing crashes, and it goes on when there are some again. One test alone,
//! as descriptors belong to the whole process.

mod support;

use std::{fs::File, io::Write, time::Duration};

use support::{Running, greeter, read_exactly, rule};

#[test]
fn accepting_pauses_without_descriptors_and_goes_on_with_them() {
    // With all of them taken by clients, accept4 finds none; with half of them left, accepted connections find none for their
    // other half.
    for clients in [6, 3] {
        pause_and_recover(6, clients);
    }
}

fn pause_and_recover(spare: usize, clients: usize) {
    let mut rule = rule("r", greeter("a"));
    rule.connect_timeout = Duration::from_secs(30);
    let running = Running::start(&[rule]);
    let mut early = running.connect("r");
    assert_eq!(read_exactly(&mut early, 1), b"a");

    let spare: Vec<_> = (0..spare).map(|_| File::open("/dev/null").unwrap()).collect();
    let taken: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    assert!(taken.len() > 100);
    drop(spare);
    let mut late: Vec<_> = (0..clients)
        .map_while(|_| std::net::TcpStream::connect(running.address("r")).ok().map(support::patient))
        .collect();
    assert!(!late.is_empty());
    for _ in 0..100 {
        early.write_all(b"still served").unwrap();
        assert_eq!(read_exactly(&mut early, 12), b"still served");
        std::thread::sleep(Duration::from_millis(3));
    }
    assert!(running.log.all().is_empty(), "{:?}", running.log.all());

    drop(taken);
    for client in &mut late {
        assert_eq!(read_exactly(client, 1), b"a");
    }
    assert!(running.log.all().is_empty(), "{:?}", running.log.all());
}
