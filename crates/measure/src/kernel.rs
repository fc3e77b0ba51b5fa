//! Kernel counters and open ports of a network namespace.
//!
//! A veth interface counts a GSO super-packet as one packet, and so do `Ip: InReceives` and, on sockets with
//! `UDP_GRO`, `Udp: InDatagrams`. Only the IP layer's counters per ECN codepoint (`ip_rcv_core`,
//! `ip6_rcv_core`: `IpExt: InNoECTPkts` and its siblings) count each segment, measured on Linux 6.18. This
//! module therefore counts datagrams with those counters.

use std::{collections::HashMap, fs, io};

use procfs::{net::TcpState, process::Process};

/// Counters since the namespace was created, keyed by protocol and name: `Ip:InReceives`, `Ip6InReceives`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetCounters(HashMap<String, u64>);

impl NetCounters {
    /// Reads the counters of the namespace of process `pid`; the error names the file.
    pub fn read(pid: u32) -> io::Result<Self> {
        let read = |name: &str| {
            let path = format!("/proc/{pid}/net/{name}");
            fs::read_to_string(&path)
                .map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
        };
        // A kernel without IPv6 has no snmp6 file.
        Ok(Self::parse(&read("snmp")?, &read("netstat")?, &read("snmp6").unwrap_or_default()))
    }

    /// Parses `/proc/net/snmp`, `netstat` and `snmp6` (proc(5)); skips malformed lines.
    pub fn parse(snmp: &str, netstat: &str, snmp6: &str) -> Self {
        let mut counters = parse_paired_lines(snmp);
        counters.extend(parse_paired_lines(netstat));
        counters.extend(parse_named_lines(snmp6));
        Self(counters)
    }

    /// Sum of the named counters; a counter that this kernel does not have is 0.
    pub fn sum(&self, names: &[&str]) -> u64 {
        names.iter().filter_map(|name| self.0.get(*name)).sum()
    }

    /// IP packets received over IPv4 and IPv6, counting each segment of a super-packet.
    pub fn datagrams(&self) -> u64 {
        self.sum(&[
            "IpExt:InNoECTPkts",
            "IpExt:InECT0Pkts",
            "IpExt:InECT1Pkts",
            "IpExt:InCEPkts",
            "Ip6InNoECTPkts",
            "Ip6InECT0Pkts",
            "Ip6InECT1Pkts",
            "Ip6InCEPkts",
        ])
    }

    pub fn buffers(&self) -> u64 {
        self.sum(&["Ip:InReceives", "Ip6InReceives"])
    }
}

pub fn udp_port_is_bound(pid: u32, port: u16) -> bool {
    let bound = |process: &Process| {
        let sockets = process.udp().into_iter().chain(process.udp6()).flatten();
        sockets.map(|socket| socket.local_address.port()).any(|local| local == port)
    };
    // The table of a process that is starting or exiting cannot be read; the caller retries.
    process(pid).is_some_and(|process| bound(&process))
}

pub fn tcp_port_listens(pid: u32, port: u16) -> bool {
    let listens = |process: &Process| {
        let sockets = process.tcp().into_iter().chain(process.tcp6()).flatten();
        sockets
            .filter(|socket| socket.state == TcpState::Listen)
            .any(|socket| socket.local_address.port() == port)
    };
    process(pid).is_some_and(|process| listens(&process))
}

fn process(pid: u32) -> Option<Process> {
    Process::new(i32::try_from(pid).ok()?).ok()
}

/// Parses pairs of lines: a line of names and a line of values, both starting with the protocol.
fn parse_paired_lines(text: &str) -> HashMap<String, u64> {
    let mut counters = HashMap::new();
    let mut lines = text.lines();
    while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
        let mut names = names.split_whitespace();
        let Some(protocol) = names.next() else { continue };
        for (name, value) in names.zip(values.split_whitespace().skip(1)) {
            if let Ok(value) = value.parse() {
                counters.insert(format!("{protocol}{name}"), value);
            }
        }
    }
    counters
}

fn parse_named_lines(text: &str) -> HashMap<String, u64> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    const SNMP: &str = "\
Ip: Forwarding DefaultTTL InReceives InHdrErrors
Ip: 2 64 500 0
Tcp: RtoAlgorithm MaxConn InSegs
Tcp: 1 -1 7
";
    const NETSTAT: &str = "\
TcpExt: SyncookiesSent SyncookiesRecv
TcpExt: 0 0
IpExt: InNoRoutes InOctets InNoECTPkts InECT1Pkts InECT0Pkts InCEPkts
IpExt: 0 794000 6500 1 20 300
";
    const SNMP6: &str = "Ip6InReceives                   \t4\nIp6InNoECTPkts   \t9\n";

    #[test]
    fn datagrams_add_both_families_and_all_ecn_codepoints() {
        let counters = NetCounters::parse(SNMP, NETSTAT, SNMP6);
        assert_eq!((counters.datagrams(), counters.buffers()), (6500 + 1 + 20 + 300 + 9, 504));
    }

    #[test]
    fn a_kernel_without_ipv6_counts_only_ipv4() {
        let counters = NetCounters::parse(SNMP, NETSTAT, "");
        assert_eq!((counters.datagrams(), counters.buffers()), (6821, 500));
    }

    #[test]
    fn a_negative_counter_does_not_shift_the_others() {
        let counters = NetCounters::parse(SNMP, "", "");
        assert_eq!(counters.0.get("Tcp:InSegs"), Some(&7));
        assert_eq!(counters.0.get("Tcp:MaxConn"), None);
    }

    #[test]
    fn a_missing_process_is_named_in_the_error() {
        assert!(
            NetCounters::read(std::process::id())
                .expect("counters of this process")
                .0
                .contains_key("Ip:InReceives")
        );
        let error = NetCounters::read(u32::MAX).expect_err("no such process");
        assert!(error.to_string().contains("/proc/4294967295/net/snmp"), "{error}");
    }

    #[test]
    fn remote_ports_and_connections_do_not_count_as_local_listeners() {
        let own = std::process::id();
        let (near, far) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("[::1]:0"));
        let port = near.local_addr().unwrap().port();
        assert!(udp_port_is_bound(own, port) && !tcp_port_listens(own, port));
        if let Ok(far) = far {
            assert!(udp_port_is_bound(own, far.local_addr().unwrap().port()));
        }
        drop(near);
        assert!(!udp_port_is_bound(own, port));

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(tcp_port_listens(own, listener.local_addr().unwrap().port()));
        assert!(
            !tcp_port_listens(own, client.local_addr().unwrap().port()),
            "the port belongs to a connected socket"
        );
        assert!(!tcp_port_listens(u32::MAX, 80));
    }
}
