//! `load tcp` and iperf3 measure the same throughput.

use std::{
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
};

use crate::common::{eventually, free_address, loopback};
use turnpike_load::{
    StopHandle,
    options::parse,
    reflect::{self, Reflector},
    stream::{StreamLoadConfig, Workload, run},
};

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn iperf3_server() -> (Server, SocketAddr) {
    let address = free_address();
    let child = Command::new("iperf3")
        .args(["--server", "--bind", "127.0.0.1", "--port", &address.port().to_string()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let server = Server(child);
    eventually("iperf3 listens", || TcpStream::connect(address).is_ok());
    (server, address)
}

/// Received bits per second, and the ratio of received to sent bytes.
fn iperf3(server: SocketAddr, flags: &[&str]) -> (f64, f64) {
    // The connection with which `iperf3_server` probed the server may keep it busy for a moment.
    eventually("iperf3 has measured", || {
        let output = Command::new("iperf3")
            .args(["--client", "127.0.0.1", "--port", &server.port().to_string(), "--time", "1", "--json"])
            .args(flags)
            .output()
            .unwrap();
        let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |path: &str| result.pointer(path).and_then(serde_json::Value::as_f64);
        let received = number("/end/sum_received/bytes")?;
        Some((number("/end/sum_received/bits_per_second")?, received / number("/end/sum_sent/bytes")?))
    })
}

#[test]
fn throughput_on_loopback_agrees_with_iperf3() {
    if Command::new("iperf3").arg("--version").output().is_err() {
        return turnpike_testkit::alone::skip("iperf3 is not installed");
    }
    let config = reflect::ReflectConfig {
        tcp: vec![loopback(0)],
        workers: Some(1),
        ..reflect::ReflectConfig::default()
    };
    let reflector = Reflector::start(&config).unwrap();
    let (_server, address) = iperf3_server();
    for flags in [&[][..], &["--reverse"]] {
        // Other work on the machine distorts single runs, so the best results of alternating runs are
        // compared until they agree.
        let (mut ours, mut theirs) = (0.0_f64, 0.0_f64);
        eventually("both tools agree", || {
            let target = format!("{} --warmup 0 --duration 1", reflector.tcp_listeners()[0]);
            let workload = Workload::Bulk(parse(&flags.concat()).unwrap());
            let config = StreamLoadConfig::new(parse(&target).unwrap(), workload);
            let report = run(&config, &StopHandle::default(), |_| {}).unwrap().report;
            assert_eq!(report.sent, report.received, "{report:?}");
            ours = ours.max(report.recv_bps);
            let (rate, share) = iperf3(address, flags);
            // iperf3 stops counting when its time is over, even if data is still in buffers.
            assert!((0.5..=1.001).contains(&share), "{share}");
            theirs = theirs.max(rate);
            eprintln!("{flags:?}: {:.2} Gbit/s, iperf3 {:.2}", ours / 1e9, theirs / 1e9);
            (0.5..2.0).contains(&(ours / theirs))
        });
    }
}
