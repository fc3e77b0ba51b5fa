//! Compares the lab's counters with independent tools: iperf3 and `perf stat`.
#![allow(clippy::unwrap_used, reason = "a failed step must fail the test")]

mod support;

use std::{fs, path::Path};

use support::{Dir, needs, only_directory, ran, record_in};
use turnpike_lab::RunRecord;

#[test]
fn as_lab() {
    support::as_lab();
}

/// Experiment whose subject does nothing: the relay's namespace forwards from client to peer by itself.
fn routed(directory: &Path, workload: &str) -> RunRecord {
    let path = directory.join("routed.toml");
    let text = format!(
        r#"
name = "routed"
metric = "delivered_pps"
rounds = 1
aa = false
duration = 2
warmup = 0.3
discard = 0
counters = false
limits = {{ steal_percent = 100.0 }}
[[subject]]
name = "nothing"
command = "sleep 600"
namespace = "relay"
[[helper]]
name = "server"
command = "iperf3 --server --bind {{peer}} --forceflush"
namespace = "peer"
ready = {{ tcp_port = "5201" }}
[workload]
{workload}
result = "stdout"
namespace = "client"
"#
    );
    fs::write(&path, text).unwrap();
    let out = directory.join("out");
    ran(0, &["run", path.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    record_in(&out)
}

fn iperf3_result(directory: &Path) -> serde_json::Value {
    let text = fs::read_to_string(only_directory(&directory.join("out")).join("runs/workload.out")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn datagrams_agree_with_iperf3_within_one_percent() {
    needs!("iperf3");
    let directory = Dir::new();
    // The whole run is measured, so that both figures cover the same time.
    let record = routed(
        directory.path(),
        "command = 'iperf3 --client {peer} --udp --bitrate 20M --length 500 --time 2 --json'\nformat = 'iperf3'\n\
         whole = true\ndelivered_at = ['peer']",
    );
    let metrics = &record.rounds[0].metrics;
    let sent = iperf3_result(directory.path())["end"]["sum"]["packets"].as_f64().unwrap();
    let lost = iperf3_result(directory.path())["end"]["sum"]["lost_packets"].as_f64().unwrap();
    assert!(sent > 5_000.0, "{sent}");

    let close = |ours: f64, theirs: f64| (ours / theirs - 1.0).abs() < 0.01;
    let ours = metrics["net.peer.udp_in"] + metrics["net.peer.udp_receive_buffer_errors"];
    assert!(close(ours, sent - lost) || close(ours, sent), "UDP counters {ours}, iperf3 {sent} minus {lost}");
    // The IP counters include iperf3's TCP control connection, which needs a few dozen packets.
    assert!(close(metrics["delivered"] - 40.0, sent), "IP counters {}, iperf3 {sent}", metrics["delivered"]);
    let per_packet = metrics["segments_per_superpacket"];
    let interface = metrics["net.peer.p-r.rx_packets"];
    assert!((per_packet - metrics["delivered"] / interface).abs() < 1e-9);
    assert!(
        close(interface * per_packet - 40.0, sent),
        "{interface} interface packets of {per_packet} segments"
    );
    // Packets at the peer were sent by the relay, and packets at the relay by the client.
    assert_eq!(metrics["net.relay.r-p.tx_packets"], interface);
    assert_eq!(metrics["net.client.c-r.tx_packets"], metrics["net.relay.r-c.rx_packets"]);
    // IP and UDP headers, and the Ethernet header that the interface counts.
    let bytes = metrics["net.peer.p-r.rx_bytes"];
    assert!(close(bytes, sent * f64::from(500 + 28 + 14)), "{bytes} bytes for {sent} datagrams");
}

#[test]
fn cpu_and_bytes_of_a_stream_agree_with_iperf3_within_five_percent() {
    needs!("iperf3");
    let directory = Dir::new();
    let path = directory.at("stream.toml");
    // The server is the subject and is idle except during the test; the whole run is measured, so that both figures cover the same time.
    let text = r#"
name = "stream"
metric = "subject_cpu_s"
rounds = 1
aa = false
duration = 2
warmup = 0
discard = 0
counters = false
limits = { steal_percent = 100.0 }
[[subject]]
name = "server"
command = "iperf3 --server --bind {peer} --forceflush"
namespace = "peer"
ready = { tcp_port = "5201" }
[workload]
command = "iperf3 --client {peer} --bitrate 2G --time 2 --json"
format = "iperf3"
whole = true
result = "stdout"
namespace = "client"
"#;
    fs::write(&path, text).unwrap();
    let out = directory.at("out");
    ran(0, &["run", path.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    let record = record_in(&out);
    let metrics = &record.rounds[0].metrics;
    let end = &iperf3_result(directory.path())["end"];

    let seconds = end["sum_received"]["seconds"].as_f64().unwrap();
    let theirs = end["cpu_utilization_percent"]["remote_total"].as_f64().unwrap() / 100.0 * seconds;
    let ours = metrics["subject_cpu_s"];
    // A tick of /proc is 10 ms, for user time and for system time; the server also handles a connection before and after its
    // test.
    assert!((ours - theirs).abs() < 0.03 + 0.05 * theirs, "/proc {ours:.3} s, iperf3 {theirs:.3} s");
    assert!(ours > 0.0);

    // Payload and one set of headers (66 bytes with options) per super-packet of at least 1448 bytes.
    let payload = end["sum_received"]["bytes"].as_f64().unwrap();
    let interface = metrics["net.peer.p-r.rx_bytes"];
    assert!((0.999..1.06).contains(&(interface / payload)), "interface {interface}, iperf3 {payload}");
}

#[test]
fn cpu_of_the_subject_agrees_with_perf_stat() {
    needs!("perf", "python3");
    let directory = Dir::new();
    let out = directory.at("out");
    let csv = directory.at("perf.csv");
    // The subject is busy half of the time, in user space and in the kernel, and works only while perf is counting, so that both see all of
    // it. The amount of work is fixed, however busy the machine is.
    let burn = "import os,sys,time
open(sys.argv[1],'w').write(str(os.getpid()))
print('ready', flush=True)
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
end=time.process_time()+0.75
while time.process_time()<end:
    stop=time.process_time()+0.02
    while time.process_time()<stop: os.getppid()
    time.sleep(0.02)
open(sys.argv[3],'w')
time.sleep(600)";
    let path = directory.at("burn.toml");
    let text = format!(
        r#"
name = "burn"
topology = "host"
metric = "subject_cpu_s"
rounds = 1
aa = false
discard = 0
warmup = 0
counters = false
limits = {{ steal_percent = 100.0 }}
[[subject]]
name = "burner"
command = ["python3", "-c", '''{burn}''', "{pid}", "{go}", "{done}"]
ready = {{ log = "ready" }}
[workload]
command = ["sh", "-c", "perf stat -x , -e task-clock -o {csv} -p $(cat {pid}) -- sh -c 'touch {go}; for i in $(seq 600); do [ -e {done} ] && break; sleep 0.05; done'"]
format = "none"
whole = true
"#,
        csv = csv.display(),
        pid = directory.at("pid").display(),
        go = directory.at("go").display(),
        done = directory.at("done").display()
    );
    fs::write(&path, text).unwrap();
    ran(0, &["run", path.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    let record = record_in(&out);
    let ours = record.rounds[0].metrics["subject_cpu_s"];
    let text = fs::read_to_string(&csv).unwrap();
    let line = text.lines().find(|line| line.contains("task-clock")).unwrap_or_else(|| panic!("{text}"));
    let theirs = line.split(',').next().unwrap().parse::<f64>().unwrap() / 1e3;
    // A tick of /proc is 10 ms, for user time and for system time.
    assert!((ours - theirs).abs() < 0.03 + 0.03 * theirs, "/proc {ours:.3} s, perf {theirs:.3} s");
    assert!(theirs > 0.5, "{theirs}");
    let switches = record.rounds[0].metrics["context_switches"];
    assert!(switches >= 20.0, "the subject sleeps 37 times, but there were {switches} context switches");
}
