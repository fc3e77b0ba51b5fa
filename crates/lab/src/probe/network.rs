//! Counters of a network namespace: arrivals, per-interface counts, and drops.
//!
//! Datagrams are counted where the kernel counts each segment of a GSO super-packet ([`NetCounters::datagrams`]). Divided by the number of
//! packets on the interface, this gives the number of segments per super-packet.

use std::collections::BTreeMap;

use procfs::process::Process;
use turnpike_measure::kernel::NetCounters;

use crate::error::LabError;

/// Metric: average number of datagrams per packet before GRO; 1 on a link that behaves like a physical one.
pub(crate) const DATAGRAMS_PER_PACKET: &str = "datagrams_per_packet";
const RECEIVE_BUFFER_ERRORS: &str = "udp_receive_buffer_errors";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Network {
    /// Number of IP packets received; each segment of a super-packet counts as one.
    pub(crate) datagrams: u64,
    /// Counters by metric name; those of devices start with the device name. Excludes loopback.
    counters: BTreeMap<String, u64>,
}

impl Network {
    pub(crate) fn read(pid: u32) -> Result<Self, LabError> {
        let counters = NetCounters::read(pid).map_err(LabError::io("cannot read the kernel's counters"))?;
        let devices = i32::try_from(pid)
            .ok()
            .and_then(|pid| Process::new(pid).and_then(|process| process.dev_status()).ok())
            .ok_or_else(|| LabError::failed(format!("cannot read /proc/{pid}/net/dev")))?;
        let mut network = Self::from_counters(&counters);
        for device in devices.into_values().filter(|device| device.name != "lo") {
            for (name, value) in [
                ("rx_packets", device.recv_packets),
                ("rx_bytes", device.recv_bytes),
                ("rx_drops", device.recv_drop),
                ("tx_packets", device.sent_packets),
                ("tx_bytes", device.sent_bytes),
                ("tx_drops", device.sent_drop),
            ] {
                network.counters.insert(format!("{}.{name}", device.name), value);
            }
        }
        Ok(network)
    }

    fn from_counters(counters: &NetCounters) -> Self {
        let of_both = |name: &str| counters.sum(&[&format!("Udp:{name}"), &format!("Udp6{name}")]);
        let named = [
            // Number of packet buffers (skbs); a super-packet counts as one.
            ("buffers_in", counters.buffers()),
            ("udp_in", of_both("InDatagrams")),
            ("udp_out", of_both("OutDatagrams")),
            ("udp_no_port", of_both("NoPorts")),
            (RECEIVE_BUFFER_ERRORS, of_both("RcvbufErrors")),
            ("udp_send_buffer_errors", of_both("SndbufErrors")),
        ];
        let counters_by_name = named.map(|(name, value)| (name.to_owned(), value)).into();
        Self { datagrams: counters.datagrams(), counters: counters_by_name }
    }

    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let then = |name: &String| earlier.counters.get(name).copied().unwrap_or(0);
        Self {
            datagrams: self.datagrams.saturating_sub(earlier.datagrams),
            counters: self
                .counters
                .iter()
                .map(|(name, now)| (name.clone(), now.saturating_sub(then(name))))
                .collect(),
        }
    }

    pub(crate) fn rx_packets(&self) -> u64 {
        self.sum(".rx_packets")
    }

    pub(crate) fn drops(&self) -> u64 {
        self.sum(".rx_drops") + self.sum(".tx_drops")
    }

    pub(crate) fn receive_buffer_errors(&self) -> u64 {
        self.sum(RECEIVE_BUFFER_ERRORS)
    }

    fn sum(&self, ending: &str) -> u64 {
        self.counters.iter().filter(|(name, _)| name.ends_with(ending)).map(|(_, value)| value).sum()
    }

    pub(crate) fn metrics(&self, space: &str, metrics: &mut BTreeMap<String, f64>) {
        metrics.insert(format!("net.{space}.datagrams_in"), self.datagrams as f64);
        if self.rx_packets() > 0 {
            let ratio = self.datagrams as f64 / self.rx_packets() as f64;
            metrics.insert(format!("net.{space}.{DATAGRAMS_PER_PACKET}"), ratio);
        }
        for (name, value) in &self.counters {
            metrics.insert(format!("net.{space}.{name}"), *value as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SNMP: &str = "\
Ip: Forwarding DefaultTTL InReceives InHdrErrors
Ip: 2 64 500 0
Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors
Udp: 443 2 3057 68 3057 4
";
    const NETSTAT: &str = "\
IpExt: InNoRoutes InOctets InNoECTPkts
IpExt: 0 794000 6500
";
    const SNMP6: &str = "Ip6InReceives                   \t4\nIp6InNoECTPkts   \t9\nUdp6InDatagrams \t3\nUdp6RcvbufErrors \t1\n";
    #[test]
    fn udp_counters_are_summed_over_both_families() {
        let network = Network::from_counters(&NetCounters::parse(SNMP, NETSTAT, SNMP6));
        assert_eq!(network.datagrams, 6500 + 9);
        for (name, value) in [
            ("buffers_in", 504),
            ("udp_in", 446),
            ("udp_out", 68),
            ("udp_no_port", 2),
            (RECEIVE_BUFFER_ERRORS, 3058),
            ("udp_send_buffer_errors", 4),
        ] {
            assert_eq!(network.counters[name], value, "{name}");
        }
    }

    #[test]
    fn loopback_is_excluded_from_the_counters() {
        let network = Network::read(std::process::id()).unwrap();
        assert!(!network.counters.contains_key("lo.rx_packets"));
        assert!(Network::read(u32::MAX).is_err());
    }

    #[test]
    fn differences_are_per_device_and_never_negative() {
        let network = |datagrams: u64, received: u64, dropped: u64| Network {
            datagrams,
            counters: [("rx_packets", received), ("rx_drops", 3), ("tx_drops", dropped)]
                .map(|(name, value)| (format!("r-c.{name}"), value))
                .into(),
        };
        let difference = network(25, 97, 0).since(&network(10, 90, 2));
        assert_eq!((difference.datagrams, difference.rx_packets(), difference.drops()), (15, 7, 0));
        let mut metrics = BTreeMap::new();
        difference.metrics("relay", &mut metrics);
        assert_eq!((metrics["net.relay.datagrams_in"], metrics["net.relay.r-c.rx_packets"]), (15.0, 7.0));
    }
}
