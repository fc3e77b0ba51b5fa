//! The counters of a network namespace: what arrived, at which interface, and what was dropped.
//!
//! Datagrams are counted where the segments of a GSO super-packet are ([`NetCounters::datagrams`]); their ratio to the
//! interface's packets is the segments per super-packet.

use std::collections::BTreeMap;

use procfs::{net::DeviceStatus, process::Process};
use turnpike_measure::kernel::NetCounters;

use crate::error::LabError;

/// Of a namespace: datagrams that one packet of its interfaces carried there, before GRO. 1 on a link that behaves as a wire does.
pub(crate) const DATAGRAMS_PER_PACKET: &str = "datagrams_per_packet";

/// What has happened in a namespace since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Network {
    /// IP packets received, each segment of a super-packet counted.
    pub(crate) datagrams: u64,
    /// Buffers (skbs) they came in; a super-packet is one.
    pub(crate) buffers: u64,
    /// `Udp: InDatagrams` and `OutDatagrams` of both families.
    pub(crate) udp_in: u64,
    pub(crate) udp_out: u64,
    /// Datagrams to ports without a socket.
    pub(crate) no_port: u64,
    /// Dropped because a socket's receive or send buffer was full.
    pub(crate) receive_buffer_errors: u64,
    pub(crate) send_buffer_errors: u64,
    /// By device, without the loopback.
    pub(crate) interfaces: BTreeMap<String, Interface>,
}

/// What a device has carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) rx_bytes: u64,
    pub(crate) rx_packets: u64,
    pub(crate) rx_drops: u64,
    pub(crate) tx_bytes: u64,
    pub(crate) tx_packets: u64,
    pub(crate) tx_drops: u64,
}

impl Network {
    /// Reads the counters of the namespace that process `pid` lives in.
    pub(crate) fn read(pid: u32) -> Result<Self, LabError> {
        let counters = NetCounters::read(pid).map_err(LabError::io("cannot read the kernel's counters"))?;
        let devices = i32::try_from(pid)
            .ok()
            .and_then(|pid| Process::new(pid).and_then(|process| process.dev_status()).ok())
            .ok_or_else(|| LabError::failed(format!("cannot read /proc/{pid}/net/dev")))?;
        let interfaces = devices.into_values().filter(|device| device.name != "lo");
        let interfaces = interfaces.map(|device| (device.name.clone(), Interface::from(&device))).collect();
        Ok(Self { interfaces, ..Self::from_counters(&counters) })
    }

    fn from_counters(counters: &NetCounters) -> Self {
        let sum = |names: &[&str]| counters.sum(names);
        Self {
            datagrams: counters.datagrams(),
            buffers: counters.buffers(),
            udp_in: sum(&["Udp:InDatagrams", "Udp6InDatagrams"]),
            udp_out: sum(&["Udp:OutDatagrams", "Udp6OutDatagrams"]),
            no_port: sum(&["Udp:NoPorts", "Udp6NoPorts"]),
            receive_buffer_errors: sum(&["Udp:RcvbufErrors", "Udp6RcvbufErrors"]),
            send_buffer_errors: sum(&["Udp:SndbufErrors", "Udp6SndbufErrors"]),
            interfaces: BTreeMap::new(),
        }
    }

    /// What happened between an earlier reading and this one.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let none = Interface::default();
        Self {
            datagrams: self.datagrams.saturating_sub(earlier.datagrams),
            buffers: self.buffers.saturating_sub(earlier.buffers),
            udp_in: self.udp_in.saturating_sub(earlier.udp_in),
            udp_out: self.udp_out.saturating_sub(earlier.udp_out),
            no_port: self.no_port.saturating_sub(earlier.no_port),
            receive_buffer_errors: self.receive_buffer_errors.saturating_sub(earlier.receive_buffer_errors),
            send_buffer_errors: self.send_buffer_errors.saturating_sub(earlier.send_buffer_errors),
            interfaces: self
                .interfaces
                .iter()
                .map(|(name, now)| (name.clone(), now.since(earlier.interfaces.get(name).unwrap_or(&none))))
                .collect(),
        }
    }

    /// Packets received at all interfaces.
    pub(crate) fn rx_packets(&self) -> u64 {
        self.interfaces.values().map(|interface| interface.rx_packets).sum()
    }

    /// Packets dropped at all interfaces.
    pub(crate) fn drops(&self) -> u64 {
        self.interfaces.values().map(|interface| interface.rx_drops + interface.tx_drops).sum()
    }

    /// All of it as metrics, named after the namespace.
    pub(crate) fn metrics(&self, space: &str, metrics: &mut BTreeMap<String, f64>) {
        let put = |metrics: &mut BTreeMap<String, f64>, name, value: u64| metrics.insert(name, value as f64);
        for (name, value) in [
            ("datagrams_in", self.datagrams),
            ("buffers_in", self.buffers),
            ("udp_in", self.udp_in),
            ("udp_out", self.udp_out),
            ("udp_no_port", self.no_port),
            ("udp_receive_buffer_errors", self.receive_buffer_errors),
            ("udp_send_buffer_errors", self.send_buffer_errors),
        ] {
            put(metrics, format!("net.{space}.{name}"), value);
        }
        if self.rx_packets() > 0 {
            let ratio = self.datagrams as f64 / self.rx_packets() as f64;
            metrics.insert(format!("net.{space}.{DATAGRAMS_PER_PACKET}"), ratio);
        }
        for (device, interface) in &self.interfaces {
            for (name, value) in [
                ("rx_packets", interface.rx_packets),
                ("rx_bytes", interface.rx_bytes),
                ("rx_drops", interface.rx_drops),
                ("tx_packets", interface.tx_packets),
                ("tx_bytes", interface.tx_bytes),
                ("tx_drops", interface.tx_drops),
            ] {
                put(metrics, format!("net.{space}.{device}.{name}"), value);
            }
        }
    }
}

impl Interface {
    fn since(&self, earlier: &Self) -> Self {
        Self {
            rx_bytes: self.rx_bytes.saturating_sub(earlier.rx_bytes),
            rx_packets: self.rx_packets.saturating_sub(earlier.rx_packets),
            rx_drops: self.rx_drops.saturating_sub(earlier.rx_drops),
            tx_bytes: self.tx_bytes.saturating_sub(earlier.tx_bytes),
            tx_packets: self.tx_packets.saturating_sub(earlier.tx_packets),
            tx_drops: self.tx_drops.saturating_sub(earlier.tx_drops),
        }
    }
}

impl From<&DeviceStatus> for Interface {
    fn from(device: &DeviceStatus) -> Self {
        Self {
            rx_bytes: device.recv_bytes,
            rx_packets: device.recv_packets,
            rx_drops: device.recv_drop,
            tx_bytes: device.sent_bytes,
            tx_packets: device.sent_packets,
            tx_drops: device.sent_drop,
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
    fn udp_counters_add_both_families() {
        let network = Network::from_counters(&NetCounters::parse(SNMP, NETSTAT, SNMP6));
        assert_eq!((network.datagrams, network.buffers), (6500 + 9, 504));
        assert_eq!((network.udp_in, network.udp_out, network.no_port), (446, 68, 2));
        assert_eq!((network.receive_buffer_errors, network.send_buffer_errors), (3058, 4));
    }

    #[test]
    fn our_own_namespace_can_be_read_and_its_loopback_is_left_out() {
        let network = Network::read(std::process::id()).unwrap();
        assert!(!network.interfaces.contains_key("lo"));
        assert!(Network::read(u32::MAX).is_err());
    }

    #[test]
    fn a_difference_is_per_device_and_never_negative() {
        let device = Interface { rx_packets: 90, rx_drops: 3, tx_drops: 2, ..Interface::default() };
        let earlier =
            Network { datagrams: 10, interfaces: [("r-c".to_owned(), device)].into(), ..Network::default() };
        let mut later = earlier.clone();
        later.datagrams = 25;
        if let Some(interface) = later.interfaces.get_mut("r-c") {
            interface.rx_packets += 7;
            interface.tx_drops = 0;
        }
        let difference = later.since(&earlier);
        assert_eq!(difference.datagrams, 15);
        assert_eq!(difference.rx_packets(), 7);
        assert_eq!(difference.drops(), 0);
    }
}
