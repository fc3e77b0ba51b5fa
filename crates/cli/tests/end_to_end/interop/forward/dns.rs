//! dig to a local dnsmasq: hundreds of queries over UDP, long answers, TCP.

use crate::prelude::*;
use std::fmt::Write as _;

use super::{Workshop, all_installed, free_address, run};

/// Host number n has the address 10.1.n/256.n%256.
const HOSTS: u32 = 200;
const ASKERS: u32 = 3;
/// Number of 200-character strings in a long answer. A line of the configuration file is at most 1,024 characters long.
const LONG: usize = 4;

pub(super) struct Dnsmasq {
    pub(super) address: SocketAddr,
    _program: Program,
    _workshop: Workshop,
}

impl Dnsmasq {
    pub(super) fn start() -> Result<Self, String> {
        all_installed(&["dnsmasq", "dig"])?;
        let dnsmasq = installed("dnsmasq")?;
        let workshop = Workshop::new();
        let address = free_address();
        let mut conf = format!(
            "port={}\nlisten-address={}\nbind-interfaces\nno-resolv\nno-hosts\nno-poll\npid-file=\nlocal=/test/\n",
            address.port(),
            address.ip()
        );
        for host in 0..HOSTS {
            let _ = writeln!(conf, "host-record=host{host}.test,{}", address_of(host));
        }
        let long: Vec<String> = (0..LONG).map(long_string).collect();
        let _ = writeln!(conf, "txt-record=long.test,{}", long.join(","));
        let conf = workshop.file("dnsmasq.conf", conf);
        let mut program = Program::start(
            workshop
                .command(&dnsmasq)
                .arg("--keep-in-foreground")
                .arg("--log-facility=-")
                .arg("-C")
                .arg(conf),
        );
        eventually("dnsmasq listens", || {
            assert!(!program.has_ended(), "dnsmasq exited: {:?}", program.lines());
            std::net::TcpStream::connect(address).ok()
        });
        Ok(Self { address, _program: program, _workshop: workshop })
    }

    /// Each query uses a random port, so nearly every query is a session. dig tries only once, so a lost datagram fails the test.
    pub(super) fn exercise_udp(&self, through: SocketAddr) {
        let dir = Dir::new();
        let names: String = (0..HOSTS).map(|host| format!("host{host}.test A\n")).collect();
        let names = dir.file("names", &names);
        let wanted: Vec<String> = (0..HOSTS).map(address_of).collect();
        thread::scope(|scope| {
            for asker in 0..ASKERS {
                let (names, wanted) = (&names, &wanted);
                scope.spawn(move || {
                    // dig sets SO_REUSEPORT: two digs on one address could get the same port at the same time, and one would get
                    // the other's answer.
                    let own = format!("127.0.0.{}", 10 + asker);
                    let ended = run(dig(through).args(["-b", &own, "+notcp", "-f"]).arg(names));
                    assert_eq!(&ended.stdout.lines().collect::<Vec<_>>(), wanted);
                });
            }
        });
        let long = run(dig(through).args(["+notcp", "+ignore", "+bufsize=1232", "long.test", "TXT"])).stdout;
        assert_eq!(long, long_answer());
    }

    pub(super) fn exercise_tcp(&self, through: SocketAddr) {
        let short = run(dig(through).args(["+tcp", "host7.test", "A"])).stdout;
        assert_eq!(short, address_of(7));
        assert_eq!(run(dig(through).args(["+tcp", "long.test", "TXT"])).stdout, long_answer());
    }
}

fn dig(at: SocketAddr) -> Command {
    let mut command = Command::new("dig");
    command.arg("-r").arg(format!("@{}", at.ip())).args(["-p", &at.port().to_string()]);
    command.args(["+short", "+tries=1", "+timeout=10"]);
    command
}

fn address_of(host: u32) -> String {
    format!("10.1.{}.{}", host / 256, host % 256)
}

fn long_string(at: usize) -> String {
    format!("{at}").repeat(200)
}

fn long_answer() -> String {
    (0..LONG).map(|at| format!("{:?}", long_string(at))).collect::<Vec<_>>().join(" ")
}

#[test]
fn every_udp_query_is_answered() {
    let server = need!(Dnsmasq::start());
    for datapath in ["basic", "mmsg", "gso"] {
        let rule = format!("udp://127.0.0.1:0={}?name=dns", server.address);
        let mut forward = Forward::start(&[&rule, "--datapath", datapath]);
        server.exercise_udp(forward.address("rule dns"));
        let queries = u64::from(HOSTS * ASKERS + 1);
        for direction in ["to_target", "to_client"] {
            let label = format!("rule=\"dns\",direction=\"{direction}\"");
            forward.wait_for("turnpike_forward_datagrams_total", &label, queries);
        }
        // Few of dig's random ports repeat.
        let sessions = forward.metrics().sum("turnpike_forward_accepted_total", "rule=\"dns\"");
        assert!((queries * 9 / 10..=queries).contains(&sessions), "{sessions} sessions");
        forward.wait_for("turnpike_forward_dropped_datagrams_total", "rule=\"dns\"", 0);
    }
}

/// Both protocols of a port, as in many rinetd.conf files.
#[test]
fn unchanged_rinetd_conf_serves_both_protocols() {
    let server = need!(Dnsmasq::start());
    let (port, ip) = (server.address.port(), server.address.ip());
    let listen = free_port(V4);
    let conf = format!(
        "# one resolver for the house\nallow 127.*\n127.0.0.1 {listen}/udp {ip} {port}/udp [timeout=5]\n127.0.0.1 {listen}/tcp {ip} {port}\n\
         logfile dns.log\nlogcommon\n"
    );
    let mut forward = Forward::start_file("rinetd.conf", &conf);
    server.exercise_udp(forward.address("(udp, "));
    server.exercise_tcp(forward.address("(tcp, "));
}
