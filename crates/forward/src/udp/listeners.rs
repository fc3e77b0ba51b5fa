//! Binds a rule's ports, separately from the engine, so that the control thread can bind all ports before any
//! of them is served.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    os::fd::OwnedFd,
};

use turnpike_net::{Datapath, ListenOptions, PassedSockets, TcpListener, UdpOptions, UdpSocket};

use crate::{Bind, Protocol, Rule};

/// Receive buffer, large enough for a burst of 16,000 datagrams while the worker is busy; the kernel uses
/// memory only for queued data.
const LISTENER_BUFFER: usize = 4 << 20;

/// Bound ports of a rule for one worker, in the order of the rule's range.
#[derive(Debug)]
pub struct UdpListeners {
    pub(super) bound: Vec<BoundSocket>,
}

#[derive(Debug)]
pub(super) enum BoundSocket {
    Datagrams(UdpSocket),
    Streams(TcpListener),
}

impl UdpListeners {
    /// Binds every port of the rule, or uses the sockets `passed` for the first worker. Set `reuse_port` if
    /// several workers, or an old and a new rule, share the ports. The error includes the address.
    pub fn bind(
        rule: &Rule,
        datapath: Datapath,
        reuse_port: bool,
        passed: &PassedSockets,
    ) -> Result<Self, (SocketAddr, io::Error)> {
        let Bind::Ip(ip) = rule.bind else {
            let nowhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
            return Err((nowhere, io::ErrorKind::Unsupported.into()));
        };
        let ports = rule.ports.first..=rule.ports.last;
        Self::bind_all(rule, ports.map(|port| ip.at(port)), datapath, reuse_port, (passed, 0))
    }

    /// Binds the same ports for another worker, including those chosen by the kernel; `passed` includes the
    /// worker's number. The error includes the address.
    pub fn bind_again(
        &self,
        rule: &Rule,
        datapath: Datapath,
        passed: (&PassedSockets, usize),
    ) -> Result<Self, (SocketAddr, io::Error)> {
        Self::bind_all(rule, self.addresses().into_iter(), datapath, true, passed)
    }

    pub(crate) fn take_over(rule: &Rule, sockets: Vec<OwnedFd>) -> io::Result<Self> {
        let take = |socket| match rule.protocol {
            Protocol::Udp | Protocol::UdpToTcp { .. } => {
                UdpSocket::take_over(socket, 0).map(BoundSocket::Datagrams)
            }
            Protocol::Tcp | Protocol::TcpToUdp { .. } => {
                TcpListener::take_over(socket).map(BoundSocket::Streams)
            }
        };
        Ok(Self { bound: sockets.into_iter().map(take).collect::<io::Result<_>>()? })
    }

    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.bound.iter().map(BoundSocket::address).collect()
    }

    fn bind_all(
        rule: &Rule,
        addresses: impl Iterator<Item = SocketAddr>,
        datapath: Datapath,
        reuse_port: bool,
        (passed, worker): (&PassedSockets, usize),
    ) -> Result<Self, (SocketAddr, io::Error)> {
        let bind = |address| match rule.protocol {
            Protocol::Udp | Protocol::UdpToTcp { .. } => {
                let options = udp_options(address, rule, datapath, reuse_port);
                passed.udp(worker, address, &options).map(BoundSocket::Datagrams)
            }
            Protocol::Tcp | Protocol::TcpToUdp { .. } => {
                passed.tcp(worker, address, &tcp_options(rule, reuse_port)).map(BoundSocket::Streams)
            }
        };
        let bound = addresses.map(|address| bind(address).map_err(|error| (address, error)));
        Ok(Self { bound: bound.collect::<Result<_, _>>()? })
    }
}

/// Sockets bound elsewhere, in the order of the rule's range; those bound to a wildcard address need
/// `packet_info`.
impl From<Vec<UdpSocket>> for UdpListeners {
    fn from(sockets: Vec<UdpSocket>) -> Self {
        Self { bound: sockets.into_iter().map(BoundSocket::Datagrams).collect() }
    }
}

impl BoundSocket {
    pub(super) fn address(&self) -> SocketAddr {
        match self {
            Self::Datagrams(socket) => socket.local_addr(),
            Self::Streams(listener) => listener.local_addr(),
        }
    }
}

fn udp_options(address: SocketAddr, rule: &Rule, datapath: Datapath, reuse_port: bool) -> UdpOptions {
    UdpOptions {
        reuse_port,
        recv_buffer: Some(LISTENER_BUFFER),
        send_buffer: Some(LISTENER_BUFFER),
        gro: datapath == Datapath::Gso,
        // Replies must leave from the address that the client used.
        packet_info: address.ip().is_unspecified(),
        dual_stack: !rule.ipv6_only,
        freebind: rule.freebind,
        ..UdpOptions::default()
    }
}

pub(crate) fn tcp_options(rule: &Rule, reuse_port: bool) -> ListenOptions {
    ListenOptions {
        reuse_port,
        nodelay: rule.nodelay,
        keepalive: rule.keepalive,
        dual_stack: !rule.ipv6_only,
        freebind: rule.freebind,
        timers: rule.timers,
        ..ListenOptions::default()
    }
}
