//! Memory use of many sockets with one datagram each in a tick.

use crate::common::eventually;
use crate::prelude::*;

#[test]
fn thousand_ready_sockets_fit_in_one_tick() {
    const MANY: usize = 1000;
    if rlimit::raise_open_files(MANY as u64 + 100) < MANY as u64 + 100 {
        return turnpike_testkit::alone::skip("fewer open files are allowed than this test needs");
    }
    for datapath in common::DATAPATHS {
        let gro = datapath == Datapath::Gso;
        let sockets: Vec<UdpSocket> =
            (0..MANY).map(|_| bind(V4, &UdpOptions { gro, ..UdpOptions::default() })).collect();
        let mut poller = Poller::new().unwrap();
        for (token, socket) in sockets.iter().enumerate() {
            poller.add(socket, token as u64).unwrap();
        }
        let mut sender = Sender::new(datapath, V4, &UdpOptions::default());
        let mut rx = Rx::new(datapath);
        // Two ticks, because one datagram must not increase the batch size.
        for tick in 0..2 {
            for (n, socket) in sockets.iter().enumerate() {
                let route = sender.route(socket.local_addr());
                sender.tx.push_run(&route, 1, 120, |out| out[..8].copy_from_slice(&n.to_be_bytes()));
            }
            sender.flush();
            let mut seen = vec![false; MANY];
            let mut spans: Vec<ArenaSpan> = Vec::new();
            eventually("all datagrams", || {
                let events = poller.wait(Some(std::time::Duration::ZERO)).unwrap();
                for at in events.iter().map(|e| e.token as usize) {
                    assert!(rx.has_room(), "full after {} datagrams", spans.len());
                    let received = rx.recv(&sockets[at]).unwrap();
                    for buffer in rx.buffers(received) {
                        assert_eq!(buffer.bytes[..8], at.to_be_bytes());
                        assert!(!std::mem::replace(&mut seen[at], true));
                        spans.push(rx.span(buffer.bytes));
                    }
                }
                spans.len() == MANY
            });
            // All datagrams are still there, next to each other.
            spans.sort_by_key(|s| s.offset);
            for pair in spans.windows(2) {
                let gap = pair[1].offset - pair[0].offset;
                // With a batch size of two, a datagram could occupy the second of two slots.
                assert_eq!(gap, 128, "tick {tick}, {datapath}");
            }
            rx.reset();
        }
        assert_eq!(rx.stats().datagrams, 2 * MANY as u64);
        assert_eq!(rx.stats().calls, 2 * MANY as u64);
    }
}
