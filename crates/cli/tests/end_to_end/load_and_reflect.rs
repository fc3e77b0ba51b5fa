//! TURN traffic from client to relay to reflector and back: every I/O method, channels and Send indications,
//! IPv4 and IPv6. Also exit codes and JSON of the generator.

use crate::prelude::*;
use turnpike_load::LoadReport;

fn relays_all(family: IpAddr, via: &str, datapath: &str) {
    need!(loopback_of(family));
    let serve = Serve::start(&["--datapath", datapath]);
    let reflect = Reflect::start(family, &["--datapath", datapath]);
    let result = Load::new(serve.address(family))
        .to(reflect.address)
        .with(&format!("--via {via} --datapath {datapath}"))
        .with("--clients 8 --rate 2000 --size 120 --duration 2")
        .run()
        .ended(0)
        .result();
    let number =
        |key: &str| result[key].as_u64().unwrap_or_else(|| panic!("{key} is not a count in {result}"));
    // A busy machine sends fewer datagrams, but every one sent must return.
    assert!((1000..=4400).contains(&number("sent")), "{result}");
    assert_eq!(number("received"), number("sent"), "{result}");
    for nothing in ["lost", "duplicated", "reordered"] {
        assert_eq!(number(nothing), 0, "{nothing} in {result}");
    }
    assert_eq!(result["datapath"], datapath, "{result}");
    assert_eq!(result["clients"], 8, "{result}");
    assert_eq!(result["errors"].as_object().map(serde_json::Map::len), Some(0), "{result}");

    for direction in ["to_peer", "to_client"] {
        eventually(&format!("each datagram is counted {direction}"), || {
            let metrics = serve.metrics();
            let relayed =
                metrics.sum("turnpike_relayed_datagrams_total", &format!("direction=\"{direction}\""));
            relayed >= number("sent")
        });
    }
    assert_eq!(serve.metrics().sum("turnpike_tx_dropped_total", ""), 0);
}

tests! {
    basic_by_channel: relays_all(V4, "channel", "basic");
    basic_by_send: relays_all(V4, "send", "basic");
    mmsg_by_channel: relays_all(V4, "channel", "mmsg");
    mmsg_by_send: relays_all(V4, "send", "mmsg");
    gso_by_channel: relays_all(V4, "channel", "gso");
    gso_by_send: relays_all(V4, "send", "gso");
    ipv6_by_channel: relays_all(V6, "channel", "gso");
    ipv6_by_send: relays_all(V6, "send", "gso");
}

#[test]
fn json_result_has_every_documented_key() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let run = serve.load(&reflect).with("--duration 1 --rate 100").run();
    let result = run.result();
    let _: LoadReport = serde_json::from_value(result.clone()).expect("every key");
    let percentiles = |key: &str, names: &[&str]| {
        let values: Vec<f64> =
            names.iter().map(|name| result[key][name].as_f64().expect("a percentile")).collect();
        assert!(values.is_sorted(), "{key} in {result}");
        assert!(values[names.len() - 1] > 0.0, "{key} in {result}");
    };
    percentiles("rtt_us", &["min", "p50", "p90", "p99", "p999", "max"]);
    percentiles("late_us", &["p50", "p99", "max"]);
    assert!(result["jitter_us"].is_number());
}

/// A client's bursts leave as super-packets, which the design depends on.
#[test]
fn bursts_leave_the_relay_in_super_packets() {
    let serve = Serve::start(&["--datapath", "gso"]);
    let reflect = Reflect::start(V4, &[]);
    let run = serve.load(&reflect).with("--clients 1 --rate max --duration 2").run();
    let result = run.result();
    assert!(result["received"].as_u64() > Some(1000), "{result}");
    let metrics = serve.metrics();
    let datagrams = metrics.sum("turnpike_tx_datagrams_total", "");
    let messages = metrics.sum("turnpike_tx_messages_total", "");
    assert!(metrics.sum("turnpike_tx_super_packets_total", "") > 0);
    assert!(messages < datagrams, "{messages} messages of {datagrams} datagrams");
}

#[test]
fn every_client_gets_an_allocation() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let load = serve.load(&reflect).with("--clients 300 --rate 600 --duration 4").start();
    serve.wait_for_allocations(300);
    let ended = load.wait(SOON * 2).ended(0);
    assert_eq!(ended.result()["lost"], 0);
    serve.wait_for_allocations(0);
}

#[test]
fn loss_beyond_the_limit_exits_with_3() {
    let serve = Serve::start(&[]);
    let silent = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    let load = Load::new(serve.address(V4))
        .to(silent.local_addr().expect("the socket is bound"))
        .with("--rate 100 --duration 1");
    let result = load.with("--max-loss 1").run().ended(3).result();
    assert_eq!(result["received"], 0, "{result}");
    assert_eq!(result["lost"], result["sent"], "{result}");
}

#[test]
fn latency_beyond_the_limit_exits_with_3() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let load = serve.load(&reflect).with("--rate 200 --duration 1");
    // No datagram crosses four sockets in a microsecond.
    load.with(&format!("--max-p99 {MICROSECOND}")).run().ended(3);
}

const MICROSECOND: &str = "1";

#[test]
fn impossible_run_exits_with_1() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let run = |load: Load| load.to(reflect.address).with("--rate 10 --duration 1").start().wait(SOON * 3);

    run(Load::as_user(serve.address(V4), &format!("{USER}:wrong"))).ended(1).says("refused user");

    run(Load::new(SocketAddr::new(V4, free_port(V4)))).ended(1);
}

#[test]
fn bad_usage_exits_with_2() {
    let server = SocketAddr::new(V4, 3478);
    for wrong in
        [["--via", "pigeon"], ["--rate", "fast"], ["--clients", "0"], ["--mode", "quiet"], ["--size", "-1"]]
    {
        let ended = Load::new(server).to(server).with_words(&wrong).start().wait(SOON);
        assert_eq!(ended.code, Some(2), "{wrong:?}: {}", ended.output());
    }
}

#[test]
fn allocations_are_created_and_deleted_at_the_requested_rate() {
    let serve = Serve::start(&[]);
    let run = Load::new(serve.address(V4)).with("--mode allocate --clients 8 --duration 2").run().ended(0);
    let result: Value = run.result();
    assert!(result["received"].as_u64() > Some(50), "{result}");
    serve.wait_for_allocations(0);
    eventually("each allocation is counted", || {
        let opened = serve.metrics().sum("turnpike_allocations_opened_total", "");
        Some(opened) >= result["received"].as_u64()
    });
}

#[test]
fn progress_line_appears_every_second() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let load = serve.load(&reflect).with("--rate 100 --duration 3").start();
    let ended = load.wait(SOON);
    let progress: Vec<&str> = ended.stderr.lines().filter(|line| line.contains("p99")).collect();
    assert!(progress.len() >= 2, "{}", ended.stderr);
    // Datagrams in flight at the end of an interval are not lost.
    assert_eq!(ended.result()["lost"], 0, "{}", ended.output());
    assert!(progress.iter().all(|line| line.contains("loss 0.00 %")), "{}", ended.stderr);
}

#[test]
fn reflector_returns_every_datagram_to_its_sender() {
    let reflect = Reflect::start(V4, &[]);
    let sockets: Vec<UdpSocket> = (0..4)
        .map(|_| {
            let socket = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
            socket.connect(reflect.address).expect("loopback has a route");
            socket.set_read_timeout(Some(Duration::from_secs(10))).expect("not zero");
            socket
        })
        .collect();
    for round in 0..50_usize {
        for (index, socket) in sockets.iter().enumerate() {
            let payload: Vec<u8> = (0..=round * 29 % 1400).map(|at| (at + index).to_le_bytes()[0]).collect();
            socket.send(&payload).expect("loopback accepts a datagram");
            let mut back = [0; 2048];
            let len = socket.recv(&mut back).expect("the datagram returns");
            assert_eq!(&back[..len], payload);
        }
    }
}

#[test]
fn reflector_reports_its_counters_at_exit() {
    let reflect = Reflect::start(V4, &[]);
    let socket = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    socket.set_read_timeout(Some(SOON)).expect("not zero");
    for _ in 0..3 {
        socket.send_to(b"hello", reflect.address).expect("loopback accepts a datagram");
        socket.recv(&mut [0; 16]).expect("the datagram returns");
    }
    reflect.program.signal("TERM");
    reflect.program.wait(SOON).ended(0).says("datagrams: 3 received, 3 returned,");
}
