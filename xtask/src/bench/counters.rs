//! Reads the kernel's counters: datagrams that reached a namespace, and time that a core or a process spent.
//!
//! Datagrams are counted at the IP layer (`InNoECTPkts`, `InECT0Pkts`, ... of `/proc/net/netstat` and
//! `/proc/net/snmp6`), the only counters that add `gso_segs` per super-packet (`ip_rcv_core`, `ip6_rcv_core`).
//! `Udp: InDatagrams` and `RcvbufErrors` count datagrams only for sockets without `UDP_GRO`; for a socket with
//! it they count a super-packet as one, as `Ip: InReceives` and the interface counters always do
//! (measured on Linux 6.18, see docs/benchmarks.md).

use std::{
    fs,
    ops::Sub,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use turnpike_measure::kernel::NetCounters;

use super::netns::{Network, Place};
use crate::Failure;

/// Units of `/proc/stat` and `/proc/PID/stat` per second: USER_HZ, 100 on every Linux that is not Alpha or ia64.
const TICKS_PER_SECOND: f64 = 100.0;

/// What has arrived in a network namespace since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Arrivals {
    /// IP packets, each segment of a super-packet counted.
    pub(crate) packets: u64,
    /// Buffers (skbs) they came in; a super-packet is one.
    pub(crate) buffers: u64,
    /// `InDatagrams` + `RcvbufErrors`, the cross-check where no socket of the namespace uses `UDP_GRO`.
    pub(crate) udp: u64,
    /// `RcvbufErrors`: what the receiving program was too slow for.
    pub(crate) overflowed: u64,
    /// `InOctets`: bytes of those buffers, IP headers included; a super-packet has one header.
    pub(crate) octets: u64,
}

impl Arrivals {
    /// Reads the counters of the namespace that process `pid` lives in.
    pub(crate) fn read(pid: u32) -> Result<Self, Failure> {
        Ok(Self::from_counters(&NetCounters::read(pid)?))
    }

    fn from_counters(counters: &NetCounters) -> Self {
        let sum = |names: &[&str]| counters.sum(names);
        Self {
            packets: counters.datagrams(),
            buffers: counters.buffers(),
            udp: sum(&["Udp:InDatagrams", "Udp:RcvbufErrors", "Udp6InDatagrams", "Udp6RcvbufErrors"]),
            overflowed: sum(&["Udp:RcvbufErrors", "Udp6RcvbufErrors"]),
            octets: sum(&["IpExt:InOctets", "Ip6InOctets"]),
        }
    }

    pub(crate) fn to_json(self) -> Value {
        json!({ "packets": self.packets, "buffers": self.buffers, "udp": self.udp, "overflowed": self.overflowed, "octets": self.octets })
    }
}

impl Sub for Arrivals {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            packets: self.packets - earlier.packets,
            buffers: self.buffers - earlier.buffers,
            udp: self.udp - earlier.udp,
            overflowed: self.overflowed - earlier.overflowed,
            octets: self.octets - earlier.octets,
        }
    }
}

/// Seconds that one core has spent since boot, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CoreTime {
    pub(crate) user: f64,
    pub(crate) nice: f64,
    pub(crate) system: f64,
    /// Idle and iowait. Exact on a tickless kernel, where the busy kinds are sampled at each timer tick.
    pub(crate) idle: f64,
    pub(crate) irq: f64,
    pub(crate) softirq: f64,
    pub(crate) steal: f64,
}

impl CoreTime {
    pub(crate) fn read(core: usize) -> Result<Self, Failure> {
        let text = fs::read_to_string("/proc/stat")?;
        Self::parse(&text, core).ok_or_else(|| format!("/proc/stat has no line for cpu{core}").into())
    }

    fn parse(text: &str, core: usize) -> Option<Self> {
        let label = format!("cpu{core}");
        let line = text.lines().find(|line| line.split(' ').next() == Some(label.as_str()))?;
        let seconds: Vec<f64> = line
            .split_whitespace()
            .skip(1)
            .map(|ticks| ticks.parse::<f64>().map(|ticks| ticks / TICKS_PER_SECOND))
            .collect::<Result<_, _>>()
            .ok()?;
        let [user, nice, system, idle, iowait, irq, softirq, steal, ..] = seconds[..] else { return None };
        Some(Self { user, nice, system, idle: idle + iowait, irq, softirq, steal })
    }

    /// Seconds not idle, as the kernel sampled them.
    pub(crate) fn sampled_busy(&self) -> f64 {
        self.user + self.nice + self.system + self.irq + self.softirq + self.steal
    }

    pub(crate) fn to_json(self) -> Value {
        json!({
            "user": self.user, "nice": self.nice, "system": self.system, "idle": self.idle,
            "irq": self.irq, "softirq": self.softirq, "steal": self.steal,
        })
    }
}

impl Sub for CoreTime {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            user: self.user - earlier.user,
            nice: self.nice - earlier.nice,
            system: self.system - earlier.system,
            idle: self.idle - earlier.idle,
            irq: self.irq - earlier.irq,
            softirq: self.softirq - earlier.softirq,
            steal: self.steal - earlier.steal,
        }
    }
}

/// Seconds that all threads of one process have spent on a core.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ProcessTime {
    pub(crate) user: f64,
    pub(crate) system: f64,
}

impl ProcessTime {
    pub(crate) fn read(pid: u32) -> Result<Self, Failure> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        Self::parse(&text).ok_or_else(|| format!("/proc/{pid}/stat is not as proc(5) says").into())
    }

    fn parse(text: &str) -> Option<Self> {
        // The second field is the program's name in parentheses and may itself hold spaces and parentheses.
        let (_, fields) = text.rsplit_once(')')?;
        let mut fields = fields.split_whitespace();
        // utime and stime are fields 14 and 15, counted from 1; the first field after the name is the third.
        let user: f64 = fields.nth(11)?.parse().ok()?;
        let system: f64 = fields.next()?.parse().ok()?;
        Some(Self { user: user / TICKS_PER_SECOND, system: system / TICKS_PER_SECOND })
    }

    pub(crate) fn total(&self) -> f64 {
        self.user + self.system
    }

    pub(crate) fn to_json(self) -> Value {
        json!({ "user": self.user, "system": self.system })
    }
}

impl Sub for ProcessTime {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self { user: self.user - earlier.user, system: self.system - earlier.system }
    }
}

/// A process's memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Resident set size.
    pub(crate) resident: u64,
    /// Resident pages, shared ones divided by their users.
    pub(crate) proportional: u64,
}

impl Memory {
    pub(crate) fn read(pid: u32) -> Result<Self, Failure> {
        Ok(Self::parse(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?))
    }

    /// Memory once it no longer moves by more than 0.5 % in half a second.
    pub(crate) fn settled(pid: u32) -> Result<Self, Failure> {
        let deadline = Instant::now() + Duration::from_secs(15);
        let mut last = Self::read(pid)?;
        loop {
            thread::sleep(Duration::from_millis(500));
            let now = Self::read(pid)?;
            if now.resident.abs_diff(last.resident) * 200 <= last.resident || Instant::now() > deadline {
                return Ok(now);
            }
            last = now;
        }
    }

    fn parse(text: &str) -> Self {
        let kibibytes = |name: &str| -> u64 {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok())
                .unwrap_or(0)
        };
        Self { resident: kibibytes("Rss:") * 1024, proportional: kibibytes("Pss:") * 1024 }
    }
}

/// UDP sockets open in the namespace of process `pid`.
pub(crate) fn udp_sockets(pid: u32) -> Result<u64, Failure> {
    let count = |name: &str, label: &str| -> Option<u64> {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{name}")).ok()?;
        parse_sockets_in_use(&text, label)
    };
    let v4 = count("sockstat", "UDP:").ok_or("no UDP line in /proc/net/sockstat")?;
    Ok(v4 + count("sockstat6", "UDP6:").unwrap_or(0))
}

fn parse_sockets_in_use(text: &str, label: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(label))?;
    line.split_whitespace().skip_while(|word| *word != "inuse").nth(1)?.parse().ok()
}

/// IPv4 TCP sockets open in the namespace of process `pid`, listeners included, those in TIME_WAIT not.
pub(crate) fn tcp_sockets(pid: u32) -> Result<u64, Failure> {
    let text = fs::read_to_string(format!("/proc/{pid}/net/sockstat"))?;
    parse_sockets_in_use(&text, "TCP:").ok_or_else(|| "no TCP line in /proc/net/sockstat".into())
}

/// The kernel's softirq thread of `core`: it serves what interrupts could not finish, and its time is charged to no program.
/// `None` where kernel threads cannot be seen.
pub(crate) fn softirq_thread(core: usize) -> Option<u32> {
    let name = format!("ksoftirqd/{core}");
    fs::read_dir("/proc").ok()?.find_map(|entry| {
        let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        (fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim() == name).then_some(pid)
    })
}

/// Bytes of kernel memory that one open UDP socket occupies at least: the socket, its inode, file and directory
/// entry, by the object sizes of `/proc/slabinfo`; `None` where that cannot be read.
pub(crate) fn kernel_bytes_per_socket() -> Option<u64> {
    parse_socket_slabs(&fs::read_to_string("/proc/slabinfo").ok()?)
}

fn parse_socket_slabs(text: &str) -> Option<u64> {
    let size_of = |name: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
        line.split_whitespace().nth(3)?.parse().ok()
    };
    Some(size_of("UDP")? + size_of("sock_inode_cache")? + size_of("filp")? + size_of("dentry")?)
}

/// Packets dropped because a core's input queue (`net.core.netdev_max_backlog`) was full, all cores together.
pub(crate) fn backlog_drops() -> Result<u64, Failure> {
    Ok(parse_softnet_drops(&fs::read_to_string("/proc/net/softnet_stat")?))
}

fn parse_softnet_drops(text: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_whitespace().nth(1))
        .filter_map(|drops| u64::from_str_radix(drops, 16).ok())
        .sum()
}

/// A moment's readings of everything that a trial compares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Snapshot {
    pub(crate) taken: Instant,
    pub(crate) client: Arrivals,
    pub(crate) relay: Arrivals,
    pub(crate) peer: Arrivals,
    pub(crate) core: CoreTime,
    pub(crate) load_core: CoreTime,
    pub(crate) subject: ProcessTime,
    pub(crate) generator: ProcessTime,
    pub(crate) reflector: ProcessTime,
    pub(crate) backlog_drops: u64,
}

impl Snapshot {
    /// Reads everything within a millisecond. `cores` are the relay's and the load's; `programs` the ids of subject,
    /// generator and reflector.
    pub(crate) fn take(network: &Network, cores: [usize; 2], programs: [u32; 3]) -> Result<Self, Failure> {
        let arrivals = |place| Arrivals::read(network.pid_in(place));
        let [subject, generator, reflector] = programs;
        Ok(Self {
            taken: Instant::now(),
            core: CoreTime::read(cores[0])?,
            client: arrivals(Place::Client)?,
            peer: arrivals(Place::Peer)?,
            relay: arrivals(Place::Relay)?,
            load_core: CoreTime::read(cores[1])?,
            subject: ProcessTime::read(subject)?,
            generator: ProcessTime::read(generator)
                .map_err(|error| format!("the generator ended before the window did: {error}"))?,
            reflector: ProcessTime::read(reflector)?,
            backlog_drops: backlog_drops()?,
        })
    }
}

/// What happened between two readings.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window {
    /// Seconds.
    pub(crate) elapsed: f64,
    pub(crate) to_client: Arrivals,
    pub(crate) to_relay: Arrivals,
    pub(crate) to_peer: Arrivals,
    pub(crate) core: CoreTime,
    pub(crate) load_core: CoreTime,
    pub(crate) subject: ProcessTime,
    pub(crate) generator: ProcessTime,
    pub(crate) reflector: ProcessTime,
    pub(crate) backlog_drops: u64,
}

impl Sub for Snapshot {
    type Output = Window;

    fn sub(self, earlier: Self) -> Window {
        Window {
            elapsed: (self.taken - earlier.taken).as_secs_f64(),
            to_client: self.client - earlier.client,
            to_relay: self.relay - earlier.relay,
            to_peer: self.peer - earlier.peer,
            core: self.core - earlier.core,
            load_core: self.load_core - earlier.load_core,
            subject: self.subject - earlier.subject,
            generator: self.generator - earlier.generator,
            reflector: self.reflector - earlier.reflector,
            backlog_drops: self.backlog_drops - earlier.backlog_drops,
        }
    }
}

impl Window {
    /// Seconds that the relay's core was not idle. The idle time of a tickless kernel is exact; the kinds of busy
    /// time are sampled (see [`CoreTime::idle`]) and add up to the same only on average.
    pub(crate) fn busy(&self) -> f64 {
        (self.elapsed - self.core.idle).max(0.0)
    }

    pub(crate) fn load_core_share(&self) -> f64 {
        1.0 - self.load_core.idle / self.elapsed
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "elapsed_s": self.elapsed,
            "busy_s": self.busy(),
            "busy_sampled_s": self.core.sampled_busy(),
            "to_client": self.to_client.to_json(),
            "to_relay": self.to_relay.to_json(),
            "to_peer": self.to_peer.to_json(),
            "relay_core_s": self.core.to_json(),
            "load_core_s": self.load_core.to_json(),
            "subject_s": self.subject.to_json(),
            "generator_s": self.generator.to_json(),
            "reflector_s": self.reflector.to_json(),
            "backlog_drops": self.backlog_drops,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SNMP: &str = "\
Ip: Forwarding DefaultTTL InReceives InHdrErrors
Ip: 2 64 500 0
Tcp: RtoAlgorithm MaxConn InSegs
Tcp: 1 -1 7
Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors
Udp: 443 2 3057 68 3057 0
";
    const NETSTAT: &str = "\
TcpExt: SyncookiesSent SyncookiesRecv
TcpExt: 0 0
IpExt: InNoRoutes InOctets InNoECTPkts InECT1Pkts InECT0Pkts InCEPkts
IpExt: 0 794000 6500 1 20 300
";
    const SNMP6: &str = "Ip6InReceives                   \t4\nIp6InNoECTPkts   \t9\nUdp6InDatagrams \t3\nUdp6RcvbufErrors \t1\n";

    #[test]
    fn arrivals_add_both_families_and_all_ecn_codepoints() {
        assert_eq!(
            Arrivals::from_counters(&NetCounters::parse(SNMP, NETSTAT, SNMP6)),
            Arrivals {
                packets: 6500 + 1 + 20 + 300 + 9,
                buffers: 504,
                udp: 443 + 3057 + 3 + 1,
                overflowed: 3058,
                octets: 794_000,
            }
        );
    }

    const STAT: &str = "\
cpu  21235 5004 6129 192800 610 0 77 19 0 0
cpu0 9700 2500 2600 97800 65 3 22 5 0 0
cpu1 11506 2417 3522 94936 545 0 54 14 0 0
cpu10 1 1 1 1 1 1 1 1 0 0
intr 336889 0
";

    #[test]
    fn core_time_is_read_from_its_own_line() {
        let core = CoreTime::parse(STAT, 0).unwrap();
        assert_eq!(
            core,
            CoreTime {
                user: 97.0,
                nice: 25.0,
                system: 26.0,
                idle: 978.65,
                irq: 0.03,
                softirq: 0.22,
                steal: 0.05
            }
        );
        assert!((core.sampled_busy() - 148.3).abs() < 1e-9);
        assert_eq!(CoreTime::parse(STAT, 1).unwrap().user, 115.06);
        assert_eq!(CoreTime::parse(STAT, 2), None);
    }

    #[test]
    fn process_time_survives_a_name_with_spaces_and_parentheses() {
        let text = "42 (a) b (c) S 1 42 42 0 -1 4194304 100 0 0 0 250 1750 0 0 20 0 3 0 12345 1000 200";
        assert_eq!(ProcessTime::parse(text), Some(ProcessTime { user: 2.5, system: 17.5 }));
        assert_eq!(ProcessTime::parse("42 (short) S 1"), None);
    }

    #[test]
    fn memory_is_in_bytes() {
        let text = "00400000-7fff ---p 00000000 00:00 0 [rollup]\nRss:                3660 kB\nPss:                1044 kB\nPss_Dirty: 5 kB\n";
        assert_eq!(Memory::parse(text), Memory { resident: 3660 * 1024, proportional: 1044 * 1024 });
    }

    #[test]
    fn sockets_in_use_are_found_by_name() {
        let text = "sockets: used 200\nTCP: inuse 5 orphan 0\nUDP: inuse 10003 mem 17\nUDPLITE: inuse 1\n";
        assert_eq!(parse_sockets_in_use(text, "UDP:"), Some(10003));
        assert_eq!(parse_sockets_in_use(text, "UDP6:"), None);
    }

    #[test]
    fn socket_slabs_add_up() {
        let text = "\
slabinfo - version: 2.1
# name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab>
UDPv6 1 1 1472 22 8
UDP 96 96 1344 24 8
sock_inode_cache 1 1 832 19 4
filp 1 1 192 21 1
dentry 1 1 192 21 1
";
        assert_eq!(parse_socket_slabs(text), Some(1344 + 832 + 192 + 192));
        assert_eq!(parse_socket_slabs("UDP 1 1 1344 1 1\n"), None);
    }

    #[test]
    fn softnet_drops_are_hexadecimal_and_summed() {
        assert_eq!(parse_softnet_drops("0000ffff 0000000a 00000001\n00000001 00000010 00000000\n"), 26);
    }
}
