//! Ten thousand short connections: no byte is lost, and no memory or descriptor is leaked.

use crate::prelude::*;

use turnpike_forward::{ConnectionLog, ConnectionReport};
use turnpike_testkit::process::descriptors;

use crate::support::{client, socket_address};

const CLIENTS: usize = 4;

/// Checks each report and discards it, because keeping reports would use memory.
#[derive(Default)]
struct Reports {
    good: AtomicUsize,
    bad: Mutex<Option<ConnectionReport>>,
}

impl ConnectionLog for Reports {
    fn ended(&self, report: ConnectionReport) {
        if report.reason == EndReason::Finished && report.to_client == (report.to_target - 1) * 16 {
            self.good.fetch_add(1, Ordering::Relaxed);
        } else {
            *self.bad.lock().unwrap() = Some(report);
        }
    }
}

/// Responds on each connection with sixteen copies of its data, and closes it.
fn serve(listener: &TcpListener, count: usize) {
    for _ in 0..count {
        let mut stream = accept(listener);
        let len = usize::from(read_exactly(&mut stream, 1)[0]) + 1;
        let asked = read_exactly(&mut stream, len);
        stream.write_all(&asked.repeat(16)).unwrap();
    }
}

fn connect_and_check(address: SocketAddr, number: u64) {
    let len = number as usize % 200 + 1;
    let asked = pattern(number * 1000, len, 77);
    let mut client = client(address);
    client.write_all(&[&[len as u8 - 1][..], &asked].concat()).unwrap();
    assert!(read_all(&mut client) == asked.repeat(16), "connection {number}");
}

fn run(forwarder: &Forwarder, listener: &TcpListener, address: SocketAddr, count: usize) {
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(move || serve(listener, count / CLIENTS));
        }
        for client in 0..CLIENTS {
            scope.spawn(move || {
                (0..count / CLIENTS)
                    .for_each(|number| connect_and_check(address, (number * CLIENTS + client) as u64));
            });
        }
    });
    eventually("the last connection ends", || forwarder.active() == 0);
}

#[test]
fn ten_thousand_short_connections_lose_and_leak_nothing() {
    alone::in_own_process(turnpike_testkit::this_test!(), come_and_go);
}

fn come_and_go() {
    let (listener, target) = listener();
    let rules =
        [CopyMode::Auto, CopyMode::Splice].map(|copy| Rule { copy, ..rule(&format!("{copy:?}"), target) });
    let reports = Arc::new(Reports::default());
    let (forwarder, _) = Forwarder::start(&settings(), &rules, reports.clone()).unwrap();
    let addresses: Vec<SocketAddr> = forwarder.listeners().iter().map(|(_, at)| socket_address(at)).collect();
    let come = |count| addresses.iter().for_each(|address| run(&forwarder, &listener, *address, count));
    come(400);
    let descriptors_before = descriptors();
    come(4800);
    let mut expected = 10_400;
    settles(|| {
        come(400);
        expected += 800;
    });
    eventually("all reports", || {
        let bad = reports.bad.lock().unwrap().clone();
        assert!(bad.is_none(), "{bad:?}");
        reports.good.load(Ordering::Relaxed) == expected
    });
    assert!(
        descriptors() <= descriptors_before,
        "{} descriptors, {descriptors_before} before",
        descriptors()
    );
}
