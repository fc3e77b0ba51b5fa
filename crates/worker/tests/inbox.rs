//! Wake-ups of a worker through its inbox.

use std::time::{Duration, Instant};

use turnpike_testkit::PATIENCE;
use turnpike_worker::{Frame, INBOX};

const LONG: Option<Duration> = Some(PATIENCE);
const NOW: Option<Duration> = Some(Duration::ZERO);

#[test]
fn waker_wakes_from_another_thread_until_acknowledged() {
    let mut frame = Frame::<(), ()>::new(0, Instant::now()).unwrap();
    assert!(frame.poller.wait(NOW).unwrap().is_empty());
    let remote = frame.sender.clone();
    let thread = std::thread::spawn(move || {
        for _ in 0..1000 {
            remote.tell(());
        }
    });
    let events = frame.poller.wait(LONG).unwrap();
    assert_eq!((events.len(), events[0].token, events[0].readable), (1, INBOX, true));
    thread.join().unwrap();
    assert_eq!(frame.poller.wait(LONG).unwrap().len(), 1, "level-triggered");
    while frame.command().is_some() {}
    assert!(frame.poller.wait(NOW).unwrap().is_empty());
    // An empty inbox must not block.
    assert_eq!(frame.command(), None);
    frame.sender.tell(());
    assert_eq!(frame.poller.wait(LONG).unwrap().len(), 1);
}
