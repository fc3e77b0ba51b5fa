//! The admin interface and the relay when descriptors are scarce: neither starves the other.

use crate::prelude::*;
use turnpike_trials::get_as;

fn connect_to(address: SocketAddr, said: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the server accepts connections");
    stream.write_all(said).expect("the connection is open");
    stream
}

fn max_descriptors(serve: &Serve) -> u64 {
    serve.metrics().sum("turnpike_process_max_fds", "")
}

#[test]
fn unfinished_admin_requests_leave_descriptors_for_the_relay() {
    alone::with_descriptors(turnpike_testkit::this_test!(), 1024, || {
        let serve = Serve::start(&["--workers", "1"]);
        assert_eq!(max_descriptors(&serve), 1024);
        let unfinished: Vec<TcpStream> =
            (0..800).map(|_| connect_to(serve.admin(), b"GET /metrics HTTP/1.1\r\nHost: lo")).collect();
        eventually("all but a few are closed", || {
            let closed = serve.metrics().sum("turnpike_admin_connections_closed_total", "reason=\"crowded\"");
            closed >= 760
        });
        assert!(serve.metrics().sum("turnpike_process_open_fds", "") < 150);
        let load = Load::new(serve.address(V4))
            .to(free_address())
            .with("--clients 16 --rate 100 --duration 1")
            .run();
        assert!(!load.output().contains("508"), "{}", load.output());
        eventually("sixteen clients had an allocation", || {
            serve.metrics().sum("turnpike_allocations_opened_total", "") >= 16
        });
        assert_eq!(serve.metrics().sum("turnpike_files_exhausted_total", ""), 0);
        assert_eq!(serve.health(), Some(200));
        drop(unfinished);
    });
}

#[test]
fn clients_cannot_take_the_descriptors_of_the_admin_interface() {
    alone::with_descriptors(turnpike_testkit::this_test!(), 1024, || {
        let dir = Dir::new();
        let text = "[limits]\nidle_connections_per_address = 4096\nfirst_message = 600\n";
        let file = dir.file("turnpike.toml", text);
        let serve = Serve::start(&["--workers", "1", "-c", file.to_str().expect("the test's path is UTF-8")]);
        assert_eq!(max_descriptors(&serve), 1024);
        // The first byte of a STUN message: the server accepts the connection and waits for more. This
        // process, too, is limited to 1,024 descriptors.
        let there = serve.address_of("tcp", V4);
        let _crowd: Vec<TcpStream> = (0..985).map(|_| connect_to(there, &[0])).collect();
        eventually("accepting is paused", || serve.metrics().sum("turnpike_accept_pauses_total", "") > 0);
        assert!(serve.metrics().sum("turnpike_process_open_fds", "") >= 1024 - 48);
        for _ in 0..3 {
            assert_eq!(serve.health(), Some(200));
        }
    });
}

#[test]
fn unknown_host_names_are_refused_and_configured_ones_served() {
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", "[admin]\nhosts = [\"turn1.example.org\"]\n");
    let serve = Serve::start(&["-c", file.to_str().expect("the test's path is UTF-8")]);
    let status = |host: &str| get_as(serve.admin(), "/metrics", host).expect("an answer").0;
    assert_eq!(status("rebound.example"), 421);
    assert_eq!(status("turn1.example.org:9641"), 200);
    assert_eq!(status("localhost"), 200);
    assert_eq!(status("192.0.2.1:80"), 200);
}
